"""An engine whose answers a test writes byte by byte, for a gateway that runs as a process.

It passes its health probes, and has no metrics page unless a test gives it one. Every other request is
answered by `play`, which a test sets before it sends anything; a script that returns leaves the connection
open for the next request.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.support.scripted_upstream import (
    STREAM_HEAD,
    RecordedRequest,
    ScriptedConnection,
    ScriptedUpstream,
    answer,
    chunk,
)

Script = Callable[[ScriptedConnection, RecordedRequest], Awaitable[None]]


def event(data: dict[str, Any] | str) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def choice_event(delta: dict[str, Any], finish_reason: str | None = None, **members: Any) -> bytes:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    return event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": choices, **members})


def token(text: str) -> bytes:
    return choice_event({"content": text})


def usage_event(prompt: int, completion: int) -> bytes:
    return event({"id": "chatcmpl-1", "choices": [], "usage": _usage(prompt, completion)})


ROLE = choice_event({"role": "assistant", "content": ""})
FINISH = choice_event({}, "stop")
DONE = b"data: [DONE]\n\n"
END = chunk(b"")


def whole_answer(prompt: int = 3, completion: int = 2, content: str = "Good day") -> bytes:
    """The body of a plain chat completion."""
    message = {"role": "assistant", "content": content}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return json.dumps({"id": "chatcmpl-1", "choices": choices, "usage": _usage(prompt, completion)}).encode()


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def plain(body: bytes | None = None, *, status: str = "200 OK", headers: tuple[str, ...] = ()) -> Script:
    """Answer with this body, as JSON."""
    content = whole_answer() if body is None else body
    return raw(answer(content, status=status, headers=("content-type: application/json", *headers)))


def raw(data: bytes, *, close: bool = False) -> Script:
    """Answer with exactly these bytes."""

    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await connection.send(data)
        if close:
            connection.close()

    return script


def streaming(*events: bytes) -> Script:
    """Stream these events, one chunk each, and end the body in order."""
    return raw(STREAM_HEAD + b"".join(map(chunk, events)) + END)


def breaking_off(*events: bytes) -> Script:
    """Stream these events, then reset the connection once they have gone out."""

    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await connection.send(STREAM_HEAD + b"".join(map(chunk, events)))
        await _all_written(connection)
        connection.reset()

    return script


async def _all_written(connection: ScriptedConnection) -> None:
    while connection.transport.get_write_buffer_size():  # noqa: ASYNC110 – a buffer tells nobody
        await asyncio.sleep(0.001)


class Held:
    """A script that begins (with `first` bytes sent at once), and ends when the test says so.

    `released` is set by the test; then `last` is sent. `begun` is set once a request has come.
    """

    def __init__(self, first: bytes = b"", last: bytes = b"") -> None:
        self._first = first
        self._last = last
        self.begun = asyncio.Event()
        self.released = asyncio.Event()
        self.connections: list[ScriptedConnection] = []

    async def __call__(self, connection: ScriptedConnection, request: RecordedRequest) -> None:
        self.connections.append(connection)
        if self._first:
            await connection.send(self._first)
        self.begun.set()
        waits = [asyncio.ensure_future(e.wait()) for e in (self.released, connection.peer_closed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not connection.peer_closed.is_set():
            await connection.send(self._last)


def held_stream(*events: bytes, then: tuple[bytes, ...] = (FINISH, DONE)) -> Held:
    """A stream that stops after these events until it is released."""
    return Held(STREAM_HEAD + b"".join(map(chunk, events)), b"".join(map(chunk, then)) + END)


def held_plain() -> Held:
    """A plain answer that is not begun before it is released."""
    return Held(last=answer(whole_answer(), headers=("content-type: application/json",)))


class ScriptedEngine:
    def __init__(self, upstream: ScriptedUpstream) -> None:
        self._upstream = upstream
        self.play: Script = plain()
        self.healthy = True
        self.probed: Script | None = None
        """What answers the health probes; None: `healthy` does, at once."""
        self.metrics_page = answer(status="404 Not Found")
        """The whole response; empty to let the page be waited for."""

    @property
    def url(self) -> str:
        return self._upstream.url

    @property
    def requests(self) -> list[RecordedRequest]:
        """What came, but for health probes and looks at the metrics page."""
        return [r for r in self._upstream.requests if r.target not in ("/health", "/metrics")]

    @property
    def probes(self) -> list[RecordedRequest]:
        return [r for r in self._upstream.requests if r.target == "/health"]

    @property
    def last(self) -> RecordedRequest:
        return self.requests[-1]

    async def handle(self, connection: ScriptedConnection) -> None:
        while (request := await connection.request()) is not None:
            if request.target == "/health" and self.probed is not None:
                await self.probed(connection, request)
            elif request.target == "/health":
                await connection.send(answer(status="200 OK" if self.healthy else "503 Service Unavailable"))
            elif request.target == "/metrics":
                await connection.send(self.metrics_page)
            else:
                await self.play(connection, request)
            if connection.transport.is_closing():
                return


@asynccontextmanager
async def scripted_engine(port: int = 0) -> AsyncIterator[ScriptedEngine]:
    async def handle(connection: ScriptedConnection) -> None:
        await engine.handle(connection)

    upstream = ScriptedUpstream(handle, port=port)
    engine = ScriptedEngine(upstream)
    async with upstream:
        yield engine
