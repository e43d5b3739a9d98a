"""A response as its reader sees it: the head, then pieces of body as they come off the wire.

The connection is the producer and calls `begin`, `deliver`, `finish`, `fail` and `wake`; the reader calls
the rest. Reader and connection meet in one future, which exists only while the reader has nothing to read.
Whoever holds an unfinished response reads it to its end or calls `abort()`; nothing else frees it.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from gateway.upstream.errors import UpstreamAborted

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future

    from gateway.upstream.http1 import Http1Connection


class _Readable(Protocol):
    async def read(self) -> bytes: ...

    def abort(self) -> None: ...


async def read_whole(response: _Readable, limit: int) -> bytes:
    """The rest of a body. One of more than `limit` bytes is given up with `UpstreamAborted`."""
    pieces = []
    length = 0
    while piece := await response.read():
        length += len(piece)
        if length > limit:
            response.abort()
            raise UpstreamAborted(f"the body is longer than {limit} bytes")
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class UpstreamResponse:
    """One response. Status 0 means that the head has not come yet; `send` hands none of those out."""

    __slots__ = (
        "_connection",
        "_error",
        "_loop",
        "_pieces",
        "_waiter",
        "complete",
        "headers",
        "http_version",
        "reason",
        "sink",
        "status",
        "unread_bytes",
    )

    def __init__(self, connection: "Http1Connection", loop: "AbstractEventLoop") -> None:
        self.status = 0
        self.reason = b""
        self.headers: list[tuple[bytes, bytes]] = []
        """In the order and spelling they were received."""
        self.http_version = ""
        self.complete = False
        """The last byte has come; pieces may still wait to be read."""
        self.unread_bytes = 0
        self._connection: Http1Connection | None = connection
        self._loop = loop
        self._pieces: deque[bytes] = deque()
        self.sink: Callable[[bytes], None] | None = None
        """Takes each piece where it arrives; see `pass_to`."""
        self._waiter: Future[None] | None = None
        self._error: Exception | None = None

    # What the reader calls.

    def header(self, name: bytes) -> bytes | None:
        """The first value of the header with this lower-case name."""
        for received, value in self.headers:
            if received.lower() == name:
                return value
        return None

    def lower_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers with lower-case names."""
        return [(name.lower(), value) for name, value in self.headers]

    async def head(self) -> None:
        """Wait until the head has come."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def read(self) -> bytes:
        """The next piece: all body bytes of one read of the socket. `b""` at the end, however often asked."""
        while True:
            piece = self.read_nowait()
            if piece is not None:
                return piece
            await self._wait()

    def read_nowait(self) -> bytes | None:
        """What is here already: a piece, None if there is none yet, `b""` at the end."""
        if self._pieces:
            piece = self._pieces.popleft()
            self.unread_bytes -= len(piece)
            if self._connection is not None:
                self._connection.drained(self.unread_bytes)
            return piece
        if self.complete:
            return b""
        if self._error is not None:
            raise self._error
        return None

    async def pass_to(self, sink: Callable[[bytes], None]) -> None:
        """Every piece from here to the end of the body, as it comes off the wire: no task is woken for it.
        `sink` may `hold` what comes behind. Raises what `read` does, and what `sink` raises."""
        here, self._pieces = self._pieces, deque()
        self.unread_bytes = 0
        self.go_on()
        for piece in here:
            sink(piece)
        self.sink = sink
        try:
            while True:
                if self._error is not None:
                    raise self._error
                if self.complete:
                    return
                await self._wait()
        finally:
            self.sink = None

    def hold(self) -> None:
        """Take no more from the upstream until told to `go_on`."""
        if self._connection is not None:
            self._connection.hold()

    def go_on(self) -> None:
        if self._connection is not None:
            self._connection.drained(0)

    async def read_all(self, limit: int) -> bytes:
        """The rest of the body. A body of more than `limit` bytes is given up with `UpstreamAborted`."""
        return await read_whole(self, limit)

    def abort(self) -> None:
        """Give the rest up: an unfinished response has its connection closed at once."""
        if self._connection is not None:
            self._connection.give_up("given up by the reader")
            self._pieces.clear()
            self.unread_bytes = 0

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError("a response has one reader")
        self._waiter = waiter = self._loop.create_future()
        try:
            await waiter
        except BaseException:
            self._waiter = None
            self.abort()
            raise

    # What the connection calls.

    def begin(
        self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]], http_version: str
    ) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers
        self.http_version = http_version

    def deliver(self, piece: bytes) -> int:
        """Add a piece and answer how many bytes now wait to be read."""
        if self.sink is not None:
            try:
                self.sink(piece)
            except Exception as error:
                self.sink_failed(error)
            return 0
        self._pieces.append(piece)
        self.unread_bytes += len(piece)
        return self.unread_bytes

    def sink_failed(self, error: Exception) -> None:
        """What takes the pieces could not take one: its caller gets the error."""
        self.sink = None
        self._error = error
        self.wake()

    def finish(self) -> None:
        """All has come, and the connection is no longer ours."""
        self.complete = True
        self._connection = None

    def fail(self, error: Exception) -> None:
        """Nothing more will come. The reader gets the error after the pieces that did come: an
        `UpstreamError`, or what the source of a streamed request body raised."""
        self._error = error
        self._connection = None
        self.wake()

    def wake(self) -> None:
        """There is something new: with a sink only the end of the body is."""
        waiter = self._waiter
        if waiter is not None and (self.sink is None or self.complete or self._error is not None):
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
