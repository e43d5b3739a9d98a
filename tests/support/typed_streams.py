"""Streams of the responses and the messages API, event by event as vLLM and llama.cpp write them.

events = response_events(["one", " two"], input=10, output=5)
events = message_events(["one", " two"], input=10, output=5)
"""

import json
from collections.abc import Sequence
from typing import Any

from tests.support.raw_client import RawResponse

Usage = dict[str, Any]


def typed_event(kind: str, data: dict[str, Any]) -> bytes:
    """A named event; `data` as it stands."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return f"event: {kind}\ndata: {text}\n\n".encode()


def numbered(kind: str, number: int, **members: Any) -> bytes:
    """An event of a responses stream, its members in the order of their names."""
    return typed_event(kind, dict(sorted((members | {"sequence_number": number, "type": kind}).items())))


def response_object(status: str, usage: Usage | None = None, **members: Any) -> dict[str, Any]:
    return {
        "id": "resp_81",
        "created_at": 1796017563,
        "incomplete_details": None,
        "model": "m",
        "object": "response",
        "output": [],
        "service_tier": "auto",
        "status": status,
        "usage": usage,
        **members,
    }


def response_usage(input: int, output: int, cached: int = 0) -> Usage:
    return {
        "input_tokens": input,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input + output,
    }


def response_delta(text: str, number: int) -> bytes:
    return numbered(
        "response.output_text.delta",
        number,
        content_index=0,
        delta=text,
        item_id="msg_8f",
        logprobs=[],
        output_index=0,
    )


def response_opening() -> list[bytes]:
    """What comes before the first token."""
    begun = response_object("in_progress")
    item = {"id": "msg_8f", "content": [], "role": "assistant", "status": "in_progress", "type": "message"}
    part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
    return [
        numbered("response.created", 0, response=begun),
        numbered("response.in_progress", 1, response=begun),
        numbered("response.output_item.added", 2, item=item, output_index=0),
        numbered(
            "response.content_part.added", 3, content_index=0, item_id="msg_8f", output_index=0, part=part
        ),
    ]


def response_deltas(words: Sequence[str]) -> list[bytes]:
    return [response_delta(word, 4 + n) for n, word in enumerate(words)]


def response_closing(words: Sequence[str], usage: Usage | None) -> list[bytes]:
    """Here an answer that reached its limit, which vLLM calls completed all the same."""
    number, text = 4 + len(words), "".join(words)
    ended = response_object("incomplete", usage, incomplete_details={"reason": "max_output_tokens"})
    return [
        numbered("response.output_text.done", number, content_index=0, item_id="msg_8f", text=text),
        numbered("response.output_item.done", number + 1, item={"id": "msg_8f"}, output_index=0),
        numbered("response.completed", number + 2, response=ended),
    ]


def response_events(words: Sequence[str], input: int, output: int) -> list[bytes]:
    closing = response_closing(words, response_usage(input, output))
    return [*response_opening(), *response_deltas(words), *closing]


def llamacpp_response_events(words: Sequence[str], input: int, output: int) -> list[bytes]:
    """Without numbers, the type first, and with timings beside the last response."""

    def typed(kind: str, **members: Any) -> bytes:
        return typed_event(kind, {"type": kind, **members})

    ended = response_object("completed", response_usage(input, output, cached=input - 1))
    return [
        typed("response.created", response={"id": "resp_Zk", "object": "response", "status": "in_progress"}),
        *[typed("response.output_text.delta", item_id="msg_WX", delta=word) for word in words],
        typed("response.output_text.done", item_id="msg_WX", text="".join(words)),
        typed("response.completed", response=ended, timings={"cache_n": input - 1, "prompt_ms": 0.555}),
    ]


# ── Anthropic's ──────────────────────────────────────────────────────────────────────────────────────────


def message_event(kind: str, **members: Any) -> bytes:
    return typed_event(kind, {"type": kind, **members})


def message_start(**usage: int) -> bytes:
    message = {"id": "chatcmpl-b7", "type": "message", "role": "assistant", "content": [], "model": "m"}
    unknown = {"stop_reason": None, "stop_sequence": None}
    return message_event("message_start", message={**message, **unknown, "usage": usage})


def message_delta_event(text: str) -> bytes:
    return message_event("content_block_delta", delta={"type": "text_delta", "text": text}, index=0)


def message_closing(**usage: int) -> list[bytes]:
    reason = {"stop_reason": "max_tokens", "stop_sequence": None}
    return [
        message_event("content_block_stop", index=0),
        message_event("message_delta", delta=reason, usage=usage),
        message_event("message_stop"),
    ]


def message_opening(**usage: int) -> list[bytes]:
    block = {"type": "text", "text": ""}
    return [
        message_start(**usage),
        message_event("content_block_start", content_block=block, index=0),
        message_event("ping"),
    ]


def message_events(words: Sequence[str], input: int, output: int) -> list[bytes]:
    return [
        *message_opening(input_tokens=input, output_tokens=0),
        *map(message_delta_event, words),
        *message_closing(input_tokens=input, output_tokens=output),
    ]


def read_event(raw: bytes) -> tuple[str, dict[str, Any]]:
    """Name and data of an event of these APIs, without its blank line."""
    name, data = raw.decode().split("\n")
    assert name.startswith("event: ")
    assert data.startswith("data: ")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def last_event(response: RawResponse) -> tuple[str, dict[str, Any]]:
    """What a broken stream ends with, behind a blank line, and no end of the body."""
    assert (response.status, response.whole) == (200, False)
    *_, last, rest = response.body.split(b"\n\n")
    assert rest == b""
    return read_event(last)


def check_anthropic_error(body: dict[str, Any]) -> dict[str, str]:
    """Its error, after a look at its shape."""
    assert body.keys() == {"type", "error"}
    assert body["type"] == "error"
    error: dict[str, str] = body["error"]
    assert error.keys() == {"type", "message"}
    assert error["message"]
    return error


def anthropic_error(response: RawResponse) -> dict[str, str]:
    """The error that an Anthropic client reads."""
    assert response.header("content-type") == "application/json"
    return check_anthropic_error(response.json)
