"""Questions about tokens, answered at once: `/tokenize`, `/detokenize`, `/v1/messages/count_tokens`."""

import msgspec

from .openai_requests import Content, Message, text_of_content
from .request_errors import check_model, decoded, refused
from .tokens import IDS_END, text_of, token_ids


class _TokenizeBody(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    return_token_strs: bool | None = None


class _DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


class _CountBody(msgspec.Struct):
    messages: list[Message]
    model: str | None = None
    system: Content = None


_TOKENIZE = msgspec.json.Decoder(_TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(_DetokenizeBody)
_COUNT = msgspec.json.Decoder(_CountBody)


def tokenize(body: bytes, model: str, max_model_len: int) -> bytes:
    """Of a `prompt`, or of the text in `messages`."""
    call = decoded(_TOKENIZE, body)
    check_model(call.model, model)
    if call.prompt is not None:
        ids = token_ids(call.prompt)
    elif call.messages is not None:
        ids = token_ids(_text_of(call.messages))
    else:
        raise refused("either prompt or messages must be given", "prompt", None)
    strings = [text_of([id]) for id in ids] if call.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings}
    return msgspec.json.encode(answer)


def detokenize(body: bytes, model: str, max_model_len: int) -> bytes:
    call = decoded(_DETOKENIZE, body)
    check_model(call.model, model)
    if not all(0 <= id < IDS_END for id in call.tokens):
        raise refused(f"token ids must be from 0 to {IDS_END - 1}", "tokens", None)
    return msgspec.json.encode({"prompt": text_of(call.tokens)})


def count_tokens_of_messages(body: bytes, model: str, max_model_len: int) -> bytes:
    """In the Anthropic form; tools are not counted."""
    call = decoded(_COUNT, body)
    check_model(call.model, model)
    tokens = len(token_ids(text_of_content(call.system) + _text_of(call.messages)))
    context = {"original_input_tokens": tokens}
    return msgspec.json.encode({"input_tokens": tokens, "context_management": context})


def _text_of(messages: list[Message]) -> str:
    return "".join(text_of_content(message.content) for message in messages)


TOKEN_CALLS = {
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/v1/messages/count_tokens": count_tokens_of_messages,
}
