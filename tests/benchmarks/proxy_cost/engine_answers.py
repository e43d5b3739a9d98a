"""What the engine stand-in says, as finished bytes: framed and worded as vLLM does it, the same each time.

A stream is 64 chunks: the role, 62 words, and an empty one with the finish reason. Behind them, not counted,
come the usage (if it was asked for) and `[DONE]`.
"""

import json
from collections.abc import Sequence
from typing import Any

CHUNKS = 64
MODEL = "tiny"
WORD = " measured"
TEXT = WORD * (CHUNKS - 2)
"""All words of a stream."""
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 230, "total_tokens": 230 + CHUNKS, "completion_tokens": CHUNKS}

_ID = {"id": "chatcmpl-af23a099d13e0c2a", "created": 1796017556, "model": MODEL}


def answer(body: bytes, content_type: str = "application/json", status: str = "200 OK") -> bytes:
    """A whole response with this body."""
    lines = (
        f"HTTP/1.1 {status}",
        "server: uvicorn",
        f"content-length: {len(body)}",
        f"content-type: {content_type}",
    )
    return "\r\n".join([*lines, "", ""]).encode() + body


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _plain() -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": WORD * 4}, "finish_reason": "length"}
    return answer(_json({**_ID, "object": "chat.completion", "choices": [choice], "usage": USAGE}))


def _event(**members: Any) -> bytes:
    data = {**_ID, "object": "chat.completion.chunk", **members}
    return b"data: " + _json(data) + b"\n\n"


def _word(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, "token_ids": None}
    return _event(choices=[choice])


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _stream(*, usage: bool) -> tuple[bytes, ...]:
    head = (
        b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    role = _word({"role": "assistant", "content": ""})
    words = [_word({"content": WORD})] * (CHUNKS - 2)
    finish = [_word({"content": ""}, "length")]
    chunks = [head + _chunk(role), *map(_chunk, [*words, *finish])]
    if usage:
        chunks[-1] += _chunk(_event(choices=[], usage=USAGE))
    chunks[-1] += _chunk(DONE) + _chunk(b"")
    return tuple(chunks)


PLAIN = _plain()
STREAM: Sequence[bytes] = _stream(usage=False)
STREAM_WITH_USAGE: Sequence[bytes] = _stream(usage=True)
"""One entry is one write. What ends the stream goes out with its last chunk."""

OTHERS = {
    b"/health": answer(b""),
    b"/v1/models": answer(_json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})),
    b"/metrics": answer(
        b'vllm:num_requests_running{model_name="tiny"} 0\nvllm:num_requests_waiting{model_name="tiny"} 0\n',
        "text/plain; version=0.0.4",
    ),
    # what sglang's router asks a worker it has just met
    b"/server_info": answer(_json({"model_path": MODEL, "served_model_name": MODEL, "dp_size": 1})),
    b"/model_info": answer(_json({"model_path": MODEL, "is_generation": True})),
}
NOT_FOUND = answer(b'{"detail":"Not Found"}', status="404 Not Found")
EMPTY = answer(b"")
