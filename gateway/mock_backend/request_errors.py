"""What the caller did wrong, or the engine, in vLLM's words and its form of error body."""

import json
from typing import TypeVar

import msgspec

T = TypeVar("T")

QUEUE_FULL = (
    "The engine is currently busy and cannot accept new requests. "
    "Please try again later or on a different instance."
)


ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_NO_VALID_CALL = "Bad Request"


class RequestError(Exception):
    """The call is refused with `status`."""

    def __init__(self, status: int, type: str, message: str, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.message = message
        self.param = param

    def body(self, path: str = "") -> bytes:
        """`{"error": {message, type, param, code}}`, and on the Anthropic paths their own form, which vLLM
        has there for all but a body that is no valid call at all."""
        return msgspec.json.encode(self._members(path))

    def events(self, path: str) -> bytes:
        """The same inside a stream, and how vLLM ends the stream then."""
        data = b"data: " + json.dumps(self._members(path)).encode() + b"\n\n"
        return (b"event: error\n" if path in ANTHROPIC_PATHS else b"") + data + b"data: [DONE]\n\n"

    def _members(self, path: str) -> dict[str, object]:
        if path in ANTHROPIC_PATHS and self.type != _NO_VALID_CALL:
            return {"type": "error", "error": {"type": self.type, "message": self.message}}
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        return {"error": error}


def queue_full() -> RequestError:
    """The engine has as many requests as `max_num_queued_reqs` allows."""
    return RequestError(503, "Service Unavailable", QUEUE_FULL, None)


def engine_failed() -> RequestError:
    """Generating has failed, and it was not the caller's fault."""
    return RequestError(500, "InternalServerError", "Internal server error", None)


def refused(message: str, param: str, value: object) -> RequestError:
    """A value that is understood and not accepted."""
    parameter = f"(parameter={param}, value={value})"
    return RequestError(400, "BadRequestError", f"{message} {parameter}", param)


def check_model(asked: str | None, served: str) -> None:
    """A call that names no model means the one there is."""
    if asked is not None and asked != served:
        message = f"The model `{asked}` does not exist. Valid aliases: {served}."
        raise RequestError(404, "NotFoundError", message, "model")


def context_limit(max_model_len: int) -> str:
    """The beginning of a complaint about it."""
    return f"This model's maximum context length is {max_model_len} tokens. However, "


def prompt_too_long(prompt_tokens: int, max_model_len: int) -> RequestError:
    return refused(
        f"{context_limit(max_model_len)}your prompt contains at least {prompt_tokens} input tokens, which "
        "exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
        "input_tokens",
        prompt_tokens,
    )


def decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body in the decoder's shape. Raises RequestError."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid_body(body, error) from error


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
    return RequestError(400, _NO_VALID_CALL, message, place)
