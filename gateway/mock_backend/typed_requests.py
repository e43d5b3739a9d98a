"""The bodies of `/v1/responses` and `/v1/messages` → what the engine has to generate.

Both have one answer. Their texts count as in a chat; tools, pictures and earlier responses are not looked at.
"""

import msgspec

from .openai_requests import Content, Generation, Message, answer_length, text_of_content
from .request_errors import check_model, decoded, refused
from .tokens import count_tokens, text_bytes


class _Call(msgspec.Struct, kw_only=True):
    model: str | None = None
    min_tokens: int | None = None
    priority: int | None = None
    stream: bool | None = None


class _ResponsesCall(_Call, kw_only=True):
    input: str | list[Message]
    instructions: str | None = None
    max_output_tokens: int | None = None


class _MessagesCall(_Call, kw_only=True):
    messages: list[Message]
    max_tokens: int
    system: Content = None


_RESPONSES = msgspec.json.Decoder(_ResponsesCall)
_MESSAGES = msgspec.json.Decoder(_MessagesCall)


def parse_response(body: bytes, model: str, max_model_len: int) -> Generation:
    call = decoded(_RESPONSES, body)
    texts = [call.instructions or ""]
    texts += [call.input] if isinstance(call.input, str) else _texts_of(call.input)
    return _generation(call, texts, call.max_output_tokens, "max_output_tokens", model, max_model_len)


def parse_message(body: bytes, model: str, max_model_len: int) -> Generation:
    call = decoded(_MESSAGES, body)
    if not call.messages:
        raise refused("messages must not be empty", "messages", [])
    texts = [text_of_content(call.system), *_texts_of(call.messages)]
    return _generation(call, texts, call.max_tokens, "max_tokens", model, max_model_len)


def _texts_of(messages: list[Message]) -> list[str]:
    return [text_of_content(message.content) for message in messages]


def _generation(
    call: _Call, texts: list[str], asked: int | None, limit_name: str, model: str, max_model_len: int
) -> Generation:
    check_model(call.model, model)
    prompt_tokens = count_tokens(sum(map(text_bytes, texts)))
    output_tokens, finish_reason = answer_length(
        asked, call.min_tokens, prompt_tokens, max_model_len, limit_name
    )
    return Generation(
        prompts_tokens=(prompt_tokens,),
        output_tokens=output_tokens,
        finish_reason=finish_reason,
        priority=call.priority or 0,
        stream=bool(call.stream),
    )
