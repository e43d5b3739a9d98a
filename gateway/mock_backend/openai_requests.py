"""The body of an inference call → what the engine has to generate, or the error vLLM would answer.

Texts have the tokens that `tokens.py` gives them; lists of token ids are counted exactly. Unknown fields are
ignored, as vLLM does.

An answer has `min_tokens` tokens where that is given: it ends by itself as soon as it may, which lets a
client choose a length that a gateway in between cannot read; else `max_tokens`; else 128.
"""

from dataclasses import dataclass

import msgspec

from .request_errors import check_model, context_limit, decoded, prompt_too_long, refused
from .tokens import count_tokens, text_bytes

DEFAULT_OUTPUT_TOKENS = 128
MAX_ANSWERS = 16_384
"""vLLM's bound of `n`."""


@dataclass(frozen=True)
class Generation:
    """What one call asks for: `n` answers of `output_tokens` to each prompt."""

    prompts_tokens: tuple[int, ...]
    output_tokens: int
    finish_reason: str
    """`length` when the caller set the limit, `stop` when the answer ended by itself."""
    n: int = 1
    priority: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    def choices_prompt_tokens(self) -> list[int]:
        """Prompt tokens by choice: the answers to the first prompt, then those to the second."""
        return [tokens for tokens in self.prompts_tokens for _ in range(self.n)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Call(msgspec.Struct, kw_only=True):
    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    priority: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


class ContentPart(msgspec.Struct):
    text: str | None = None


Content = str | list[ContentPart] | None


class Message(msgspec.Struct):
    content: Content = None


class _ChatCall(_Call, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None


Prompts = str | list[str | int | list[int]]
"""One text, one list of token ids, or a list of either."""


class _CompletionCall(_Call, kw_only=True):
    prompt: Prompts


_CHAT = msgspec.json.Decoder(_ChatCall)
_COMPLETION = msgspec.json.Decoder(_CompletionCall)


def parse_chat(body: bytes, model: str, max_model_len: int) -> Generation:
    call = decoded(_CHAT, body)
    if not call.messages:
        raise refused("messages must not be empty", "messages", [])
    bytes_of_text = sum(text_bytes(text_of_content(message.content)) for message in call.messages)
    asked = call.max_tokens if call.max_completion_tokens is None else call.max_completion_tokens
    return _generation(call, (count_tokens(bytes_of_text),), asked, model, max_model_len)


def parse_completion(body: bytes, model: str, max_model_len: int) -> Generation:
    call = decoded(_COMPLETION, body)
    prompts = separate_prompts(call.prompt, "prompt")
    return _generation(call, tuple(map(tokens_of_prompt, prompts)), call.max_tokens, model, max_model_len)


def _generation(
    call: _Call, prompts_tokens: tuple[int, ...], asked: int | None, model: str, max_model_len: int
) -> Generation:
    options = call.stream_options
    if options is not None and not call.stream:
        raise refused("Stream options can only be defined when `stream=True`.", "stream_options", None)
    n = 1 if call.n is None else call.n
    if not 1 <= n <= MAX_ANSWERS:
        raise refused(f"n must be at least 1 and at most {MAX_ANSWERS}, got {n}.", "n", n)
    check_model(call.model, model)
    include_usage = options is not None and bool(options.include_usage)
    output_tokens, finish_reason = answer_length(asked, call.min_tokens, max(prompts_tokens), max_model_len)
    return Generation(
        prompts_tokens=prompts_tokens,
        output_tokens=output_tokens,
        finish_reason=finish_reason,
        n=n,
        priority=call.priority or 0,
        stream=bool(call.stream),
        include_usage=include_usage,
        continuous_usage=include_usage and options is not None and bool(options.continuous_usage_stats),
    )


def answer_length(
    asked: int | None,
    at_least: int | None,
    prompt_tokens: int,
    max_model_len: int,
    limit_name: str = "max_tokens",
) -> tuple[int, str]:
    """Tokens to generate, and the finish reason they end with. Raises RequestError.

    `prompt_tokens` are those of the longest prompt; `limit_name` is the API's name of the limit `asked`.
    """
    most = _output_tokens(asked, at_least, prompt_tokens, max_model_len, limit_name)
    tokens = min(most, at_least or most)
    return tokens, "stop" if asked is None or tokens < asked else "length"


def _output_tokens(
    asked: int | None, at_least: int | None, prompt_tokens: int, max_model_len: int, limit_name: str
) -> int:
    """The most tokens to generate; refuses what does not fit the context together with the prompt."""
    if at_least is not None and at_least < 0:
        says = f"min_tokens must be greater than or equal to 0, got {at_least}."
        raise refused(says, "min_tokens", at_least)
    if at_least is not None and asked is not None and at_least > asked:
        says = f"min_tokens must be less than or equal to {limit_name}={asked}, got {at_least}."
        raise refused(says, "min_tokens", at_least)
    if asked is not None and asked < 1:
        raise refused(f"{limit_name} must be at least 1, got {asked}.", limit_name, asked)
    if asked is not None and asked > max_model_len:
        raise refused(
            f"{limit_name}={asked} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            limit_name,
            asked,
        )
    room = max_model_len - prompt_tokens
    if room < 1:
        raise prompt_too_long(prompt_tokens, max_model_len)
    if asked is not None and asked > room:
        raise refused(
            f"{context_limit(max_model_len)}you requested {asked} output tokens and your prompt contains at "
            f"least {prompt_tokens} input tokens, for a total of at least {prompt_tokens + asked} tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            "input_tokens",
            prompt_tokens,
        )
    return min(at_least or DEFAULT_OUTPUT_TOKENS, room) if asked is None else asked


def text_of_content(content: Content) -> str:
    """The text in a message; pictures and the like have none."""
    if isinstance(content, list):
        return "".join(part.text for part in content if part.text is not None)
    return content or ""


def separate_prompts(given: Prompts, param: str) -> list[str | list[int]]:
    """One by one, whichever of the four forms they came in; refuses a list of nothing and a mixture."""
    if isinstance(given, str):
        return [given]
    ids = [part for part in given if isinstance(part, int)]
    if not given or 0 < len(ids) < len(given):
        raise refused(f"{param} must be text, token ids, or a non-empty list of one of them.", param, None)
    return [ids] if ids else [part for part in given if not isinstance(part, int)]


def tokens_of_prompt(prompt: str | list[int]) -> int:
    return count_tokens(text_bytes(prompt)) if isinstance(prompt, str) else max(1, len(prompt))
