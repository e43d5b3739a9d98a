"""The body of an inference call → what the engine has to generate, or the error vLLM would answer.

The mock's tokenizer: a token is 4 bytes of text, rounded up per prompt, at least one; lists of token ids are
counted exactly. Unknown fields are ignored, as vLLM does.

An answer has `min_tokens` tokens where that is given: it ends by itself as soon as it may, which lets a
client choose a length that a gateway in between cannot read; else `max_tokens`; else 128.
"""

from dataclasses import dataclass

import msgspec

DEFAULT_OUTPUT_TOKENS = 128
BYTES_PER_TOKEN = 4
MAX_ANSWERS = 16_384
"""vLLM's bound of `n`."""


class RequestError(Exception):
    """The caller's fault, in vLLM's words."""

    def __init__(self, status: int, type: str, message: str, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.message = message
        self.param = param

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


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


class _ContentPart(msgspec.Struct):
    text: str | None = None


class _Message(msgspec.Struct):
    content: str | list[_ContentPart] | None = None


class _ChatCall(_Call, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None


class _CompletionCall(_Call, kw_only=True):
    prompt: str | list[str | int | list[int]]


_decode_chat = msgspec.json.Decoder(_ChatCall).decode
_decode_completion = msgspec.json.Decoder(_CompletionCall).decode


def parse_chat(body: bytes, model: str, max_model_len: int) -> Generation:
    try:
        call = _decode_chat(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid_body(body, error) from error
    if not call.messages:
        raise _refused("messages must not be empty", "messages", [])
    bytes_of_text = sum(_message_bytes(message) for message in call.messages)
    asked = call.max_tokens if call.max_completion_tokens is None else call.max_completion_tokens
    return _generation(call, (_tokens(bytes_of_text),), asked, model, max_model_len)


def parse_completion(body: bytes, model: str, max_model_len: int) -> Generation:
    try:
        call = _decode_completion(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid_body(body, error) from error
    return _generation(call, _prompts_tokens(call.prompt), call.max_tokens, model, max_model_len)


def _generation(
    call: _Call, prompts_tokens: tuple[int, ...], asked: int | None, model: str, max_model_len: int
) -> Generation:
    options = call.stream_options
    if options is not None and not call.stream:
        raise _refused("Stream options can only be defined when `stream=True`.", "stream_options", None)
    n = 1 if call.n is None else call.n
    if not 1 <= n <= MAX_ANSWERS:
        raise _refused(f"n must be at least 1 and at most {MAX_ANSWERS}, got {n}.", "n", n)
    if call.model is not None and call.model != model:
        message = f"The model `{call.model}` does not exist. Valid aliases: {model}."
        raise RequestError(404, "NotFoundError", message, "model")
    include_usage = options is not None and bool(options.include_usage)
    limit = _output_tokens(asked, max(prompts_tokens), max_model_len, call.min_tokens)
    output_tokens = min(limit, call.min_tokens or limit)
    return Generation(
        prompts_tokens=prompts_tokens,
        output_tokens=output_tokens,
        finish_reason="stop" if asked is None or output_tokens < asked else "length",
        n=n,
        priority=call.priority or 0,
        stream=bool(call.stream),
        include_usage=include_usage,
        continuous_usage=include_usage and options is not None and bool(options.continuous_usage_stats),
    )


def _output_tokens(asked: int | None, prompt_tokens: int, max_model_len: int, at_least: int | None) -> int:
    """The most tokens to generate; refuses what does not fit the context together with the longest prompt."""
    if at_least is not None and at_least < 0:
        says = f"min_tokens must be greater than or equal to 0, got {at_least}."
        raise _refused(says, "min_tokens", at_least)
    if at_least is not None and asked is not None and at_least > asked:
        says = f"min_tokens must be less than or equal to max_tokens={asked}, got {at_least}."
        raise _refused(says, "min_tokens", at_least)
    if asked is not None and asked < 1:
        raise _refused(f"max_tokens must be at least 1, got {asked}.", "max_tokens", asked)
    if asked is not None and asked > max_model_len:
        raise _refused(
            f"max_tokens={asked} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            "max_tokens",
            asked,
        )
    room = max_model_len - prompt_tokens
    limit = f"This model's maximum context length is {max_model_len} tokens. However, "
    if room < 1:
        raise _refused(
            f"{limit}your prompt contains at least {prompt_tokens} input tokens, which exceeds this limit "
            "even without any output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
            prompt_tokens,
        )
    if asked is not None and asked > room:
        raise _refused(
            f"{limit}you requested {asked} output tokens and your prompt contains at least {prompt_tokens} "
            f"input tokens, for a total of at least {prompt_tokens + asked} tokens. Please reduce the length "
            "of the input prompt or the number of requested output tokens.",
            "input_tokens",
            prompt_tokens,
        )
    return min(at_least or DEFAULT_OUTPUT_TOKENS, room) if asked is None else asked


def _message_bytes(message: _Message) -> int:
    content = message.content
    if isinstance(content, list):
        return sum(_text_bytes(part.text) for part in content if part.text is not None)
    return 0 if content is None else _text_bytes(content)


def _prompts_tokens(prompt: str | list[str | int | list[int]]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return (_tokens(_text_bytes(prompt)),)
    numbers = sum(1 for part in prompt if isinstance(part, int))
    if not prompt or 0 < numbers < len(prompt):
        raise _refused("prompt must be text, token ids, or a non-empty list of one of them.", "prompt", None)
    if numbers:
        return (numbers,)
    return tuple(
        _tokens(_text_bytes(part)) if isinstance(part, str) else max(1, len(part))
        for part in prompt
        if not isinstance(part, int)
    )


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _tokens(bytes_of_text: int) -> int:
    return max(1, -(-bytes_of_text // BYTES_PER_TOKEN))


def _refused(message: str, param: str, value: object) -> RequestError:
    parameter = f"(parameter={param}, value={value})"
    return RequestError(400, "BadRequestError", f"{message} {parameter}", param)


def _invalid_body(body: bytes, error: Exception) -> RequestError:
    """No JSON, or JSON of another shape: vLLM's validation error, `param` naming the place."""
    if not body:
        kind, place, reason = "missing", "body", "Field required"
    elif isinstance(error, msgspec.ValidationError):
        reason, _, path = str(error).partition(" - at `$")
        kind, place = "value_error", "body" + path.rstrip("`")
        if reason.startswith("Object missing required field"):
            kind, place, reason = "missing", f"{place}.{reason.split('`')[1]}", "Field required"
    else:
        kind, place, reason = "json_invalid", "body", f"JSON decode error: {error}"
    message = f"1 validation error:\n  {{'type': '{kind}', 'loc': '{place}', 'msg': {reason!r}}}"
    return RequestError(400, "Bad Request", message, place)
