"""The way back to one client: its answer, and word of its leaving.

Two kinds. `Cycle` (in `cycle.py`) is the server's own object for the request, reached through the ASGI scope:
what ASGI can only say by a message and a task is a plain call there. `AsgiChannel` does the same with nothing
but ASGI's `receive` and `send`, for any other server.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.types import Receive, Scope, Send

from gateway.api.headers import Header
from gateway.upstream.relay import DirectWriter

SCOPE_KEY = "qos.channel"
"""Where the server puts its own channel into the ASGI scope, for one to take it out."""


class Channel(Protocol):
    def body_at_once(self) -> bytes | None:
        """The request's whole body, if it is here already and nothing of it was received yet."""
        ...

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call this once if the client leaves before it has its answer. The body has been received."""
        ...

    def unwatch(self) -> None: ...

    async def start(self, status: int, headers: Sequence[Header], *, length: int | None, close: bool) -> None:
        """The head of the answer. `length` of its body: None where that ends when it ends. `close` the
        connection behind it."""
        ...

    async def write(self, piece: bytes) -> None:
        """Some of the body; returns when the reader has taken most of what was written before."""
        ...

    async def finish(self, last: bytes = b"") -> None: ...

    async def whole(self, status: int, headers: Sequence[Header], body: bytes, length: int | None) -> None:
        """All of an answer. `length` is what is said of the body, which may be left out."""
        ...

    def direct(self) -> DirectWriter | None:
        """For a body of unknown length that has begun: how to write it from a callback, if that can be."""
        ...

    def cut(self) -> None:
        """Drop the connection: closing it in good order would wait for the reader to take the rest."""
        ...


def channel_of(scope: Scope, receive: Receive, send: Send) -> Channel:
    direct: Channel | None = scope.pop(SCOPE_KEY, None)  # which has the scope: left in, they would be a cycle
    return direct if direct is not None else AsgiChannel(receive, send)


class AsgiChannel:
    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._watching: asyncio.Task[None] | None = None

    def body_at_once(self) -> None:
        return None

    def watch(self, on_gone: Callable[[], None]) -> None:
        self._watching = asyncio.create_task(self._see_client_leave(on_gone))

    def unwatch(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None  # it holds us until it has noticed

    async def _see_client_leave(self, on_gone: Callable[[], None]) -> None:
        """Once the body is in, nothing else can be received."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        on_gone()

    async def start(self, status: int, headers: Sequence[Header], *, length: int | None, close: bool) -> None:
        told = [*headers]
        if length is not None:
            told.append((b"content-length", b"%d" % length))
        if close:
            told.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": told})

    async def write(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def finish(self, last: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": last})

    async def whole(self, status: int, headers: Sequence[Header], body: bytes, length: int | None) -> None:
        await self.start(status, headers, length=length, close=False)
        await self.finish(body)

    def direct(self) -> None:
        return None

    def cut(self) -> None:
        """ASGI has no word for it: the server closes what its application leaves unfinished."""
