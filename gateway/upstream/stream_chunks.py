"""The shapes of the events in a stream of tokens, as far as the gateway looks into them.

Members are as loosely typed as the reading allows: an engine's idea of `tool_calls` is none of our business,
only whether there are any.
"""

import json
from typing import Any, Protocol, TypeVar

import msgspec


class Delta(msgspec.Struct):
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    refusal: Any = None
    function_call: Any = None


class Choice(msgspec.Struct):
    index: int | None = 0
    delta: Delta | None = None
    text: Any = None
    finish_reason: Any = None

    def has_token(self) -> bool:
        """Whether something was generated here; a role alone, empty or null content is nothing."""
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(
            delta.content
            or delta.reasoning
            or delta.reasoning_content
            or delta.tool_calls
            or delta.refusal
            or delta.function_call
            or self.text
        )


class Chunk(msgspec.Struct):
    """An event of a chat or completions stream."""

    choices: list[Choice] | None = None
    usage: Any = None
    error: Any = None


class UsageCarrier(msgspec.Struct):
    usage: Any = None


class TypedEvent(msgspec.Struct):
    """An event of a responses or messages stream."""

    type: str | None = None
    delta: Any = None
    usage: Any = None
    error: Any = None
    response: UsageCarrier | None = None
    item: Any = None
    content_block: Any = None
    sequence_number: Any = None
    message: UsageCarrier | str | None = None  # an error event has its text here

    def has_token(self, kind: str) -> bool:
        """Whether something was generated: a bit of text, or a call that has got its name. `kind` is the
        event's type, which older engines give only as the name of the event."""
        if kind == "content_block_start":
            return _is_call(self.content_block)
        if kind == "response.output_item.added":
            return _is_call(self.item)
        if not (kind.endswith(".delta") or kind == "content_block_delta"):
            return False
        delta = self.delta
        if isinstance(delta, dict):
            return bool(delta.get("text") or delta.get("thinking") or delta.get("partial_json"))
        return bool(delta)

    def reported_usage(self) -> Any:
        for carrier in (self.response, self.message):
            if isinstance(carrier, UsageCarrier) and carrier.usage is not None:
                return carrier.usage
        return self.usage


def _is_call(item: Any) -> bool:
    """Of a tool: `function_call`, `mcp_call`, `tool_use`, … ."""
    kind = item.get("type") if isinstance(item, dict) else None
    return isinstance(kind, str) and kind.endswith(("_call", "tool_use"))


CHUNK = msgspec.json.Decoder(Chunk)
TYPED_EVENT = msgspec.json.Decoder(TypedEvent)


class _ReportsUsageOrError(Protocol):
    def __init__(self, *, usage: Any, error: Any) -> None: ...


_E = TypeVar("_E", bound=_ReportsUsageOrError)


def decode_leniently(data: bytes, shape: type[_E]) -> _E | None:
    """What can be saved of an event that the strict decoder refused; None if it is no JSON object at all.

    Half a surrogate pair (one emoji in two chunks) and NaN are refused by a strict decoder though clients
    read them. Of an event with members of unexpected types an error or a usage is still worth knowing.
    """
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict):
        return None
    try:
        return msgspec.convert(event, shape)
    except (msgspec.ValidationError, RecursionError):
        return shape(usage=event.get("usage"), error=event.get("error"))
