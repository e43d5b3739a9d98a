"""One request on a client's connection, and its answer: uvicorn's own object for that, with a direct way.

Through ASGI an answer is a series of messages, each checked and taken apart again, and a client's leaving is
a message that somebody must be waiting for. Here both are calls: the body of the request is taken as it
stands, the answer is written as it comes, and whoever asked is told when the client has gone. FastAPI's own
paths use the inherited `receive` and `send`; no request uses both ways for its answer.
"""

import re
from collections.abc import Callable, Sequence

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from gateway.api.headers import Header

_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_STATUSES_WITHOUT_BODY = frozenset({204, 304})


class Cycle(RequestResponseCycle):
    """A `Channel` (see `channel.py`). What is written to a client that has gone is dropped."""

    on_gone: Callable[[], None] | None = None
    on_writable: Callable[[], None] | None = None
    _has_body = True  # HEAD, 204 and 304 have none, whatever is written

    # ------------------------------------------------------------------ the request

    def body_at_once(self) -> bytes | None:
        if self.more_body or self.disconnected:
            return None
        body, self.body = bytes(self.body), bytearray()
        self.message_event.clear()
        return body

    def watch(self, on_gone: Callable[[], None]) -> None:
        self.on_gone = on_gone
        self.flow.resume_reading()  # which is how the end of a connection shows
        if self.disconnected:
            on_gone()

    def unwatch(self) -> None:
        self.on_gone = self.on_writable = None

    def gone(self) -> None:
        """The client has left before it had its answer."""
        self.disconnected = True
        self.message_event.set()
        if self.on_gone is not None:
            self.on_gone()

    def writable(self) -> None:
        """The client has taken what was written."""
        if self.on_writable is not None:
            self.on_writable()

    # ------------------------------------------------------------------ the answer

    async def start(self, status: int, headers: Sequence[Header], *, length: int | None, close: bool) -> None:
        await self._drained()
        if not self.disconnected:
            self.transport.write(self._head(status, headers, length, close))

    async def write(self, piece: bytes) -> None:
        await self._drained()
        self.write_now(piece)

    async def finish(self, last: bytes = b"") -> None:
        await self._drained()
        if not self.response_started:
            self.cut()  # broken off before its head was out: what is left cannot be told
        if self.disconnected or not self.response_started:
            return
        if last:
            self.write_now(last)
        if self.chunked_encoding:
            self.transport.write(b"0\r\n\r\n")
        self._complete()

    async def whole(self, status: int, headers: Sequence[Header], body: bytes, length: int | None) -> None:
        await self._drained()
        if not self.disconnected:
            head = self._head(status, headers, length, False)
            self.transport.write(head + body if self._has_body else head)
            self._complete()

    def direct(self) -> "Cycle | None":
        return self if self.chunked_encoding else None

    def write_now(self, piece: bytes) -> bool:
        if not self.disconnected and self._has_body:
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked_encoding else piece)
        return not self.flow.write_paused

    def cut(self) -> None:
        self.transport.abort()

    # ------------------------------------------------------------------ inside

    async def _drained(self) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()

    def _head(self, status: int, headers: Sequence[Header], length: int | None, close: bool) -> bytes:
        has_body = status not in _STATUSES_WITHOUT_BODY and self.scope["method"] != "HEAD"
        keep_alive = self.keep_alive and not close
        parts = [STATUS_LINE[status]]
        for name, value in self.default_headers:
            parts += (name, b": ", value, b"\r\n")
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        lines = 2 + len(self.default_headers) + len(headers)  # the status line, and the empty one at the end
        if length is not None:
            parts.append(b"content-length: %d\r\n" % length)
            lines += 1
        elif has_body:
            parts.append(b"transfer-encoding: chunked\r\n")
            lines += 1
        if not keep_alive:
            parts.append(b"connection: close\r\n")
            lines += 1
        parts.append(b"\r\n")
        head = b"".join(parts)
        # Counting is the cheapest proof that no value smuggles in a line of its own.
        if head.count(b"\n") != lines or head.count(b"\r") != lines or _CONTROL.search(head):
            raise RuntimeError("a header that cannot be sent")
        self._has_body = has_body
        self.chunked_encoding = length is None and has_body
        self.keep_alive = keep_alive
        self.response_started = True
        self.waiting_for_100_continue = False
        return head

    def _complete(self) -> None:
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
