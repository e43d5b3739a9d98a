"""An upstream that does exactly what a test tells it, on raw TCP.

    async def handler(connection):
        request = await connection.request()          # one whole request, None when the peer has gone
        await connection.send(b"HTTP/1.1 200 OK\\r\\n")  # any bytes, whenever
        await connection.peer_closed.wait()

    async with ScriptedUpstream(handler) as upstream:
        ...  # upstream.url, upstream.requests, upstream.connections

The handler runs once per accepted connection; when it returns, the connection is closed. What goes wrong in
it is raised at the end of the `async with` block. A connection that ends under it is no error.
"""

import asyncio
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self


def answer(body: bytes = b"{}", *, status: str = "200 OK", headers: tuple[str, ...] = ()) -> bytes:
    """The bytes of a plain response with a content-length."""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def chunk(data: bytes) -> bytes:
    """One piece of a chunked body; the empty piece ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    head: bytes
    """Up to and with the empty line, as received."""
    body: bytes
    method: str
    target: str
    headers: list[tuple[str, str]] = field(default_factory=list)
    """Names in lower case."""

    @property
    def raw(self) -> bytes:
        return self.head + self.body

    def header(self, name: str) -> str | None:
        """The only value of this header; two of them fail the test."""
        values = [value for received, value in self.headers if received == name]
        assert len(values) <= 1, f"{name} came {len(values)} times"
        return values[0] if values else None


class ScriptedConnection(asyncio.Protocol):
    """One accepted connection, in the hands of the handler."""

    def __init__(self, upstream: "ScriptedUpstream", number: int) -> None:
        self.number = number
        """0 for the first connection of this upstream."""
        self.peer_closed = asyncio.Event()
        """The other side has closed or reset; known also while the handler does something else."""
        self.unread = bytearray()
        """Received and not yet taken by `request`."""
        self.sent_bytes = 0
        self.transport: asyncio.Transport
        self.handler: asyncio.Task[None]
        self._upstream = upstream
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._gone = asyncio.Event()

    async def request(self) -> RecordedRequest | None:
        """The next whole request, recorded; None when the peer has gone instead."""
        end = await self._find(b"\r\n\r\n")
        if end is None:
            return None
        head = bytes(self.unread[: end + 4])
        method, target, headers = _parse_head(head)
        length = int(dict(headers).get("content-length", "0"))
        if not await self.received(len(head) + length):
            return None
        body = bytes(self.unread[len(head) : len(head) + length])
        del self.unread[: len(head) + length]
        recorded = RecordedRequest(head, body, method, target, headers)
        self._upstream.requests.append(recorded)
        return recorded

    async def received(self, length: int) -> bool:
        """Wait for this many unread bytes; False if the peer goes first."""
        while len(self.unread) < length:
            if not await self._more():
                return False
        return True

    async def send(self, data: bytes) -> None:
        """Write, and wait until the kernel has taken all but a little of it."""
        if self._gone.is_set():
            raise ConnectionResetError("the peer has gone")
        self.transport.write(data)
        self.sent_bytes += len(data)
        await self._writable.wait()
        if self._gone.is_set():
            raise ConnectionResetError("the peer has gone")

    async def answer(self, data: bytes) -> bool:
        """Read one request and send these bytes; False when there was no further request."""
        if await self.request() is None:
            return False
        await self.send(data)
        return True

    def stop_reading(self) -> None:
        """Take no further byte; from here on `peer_closed` cannot be seen either."""
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        self.transport.resume_reading()

    def close(self) -> None:
        """Send what is still to be sent, then end in order."""
        self.transport.close()

    def reset(self) -> None:
        """End with a TCP reset, dropping what is still to be sent."""
        # Lingering for zero seconds makes the close a reset.
        linger = struct.pack("ii", 1, 0)
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's are not asyncio.Transport
        self._upstream.connections.append(self)
        self.handler = asyncio.ensure_future(self._run())

    def data_received(self, data: bytes) -> None:
        self.unread += data
        self._arrived.set()

    def eof_received(self) -> bool:
        self.peer_closed.set()
        self._arrived.set()
        return not self._upstream.tls  # keep our half open: it is the handler who closes

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()
        self.peer_closed.set()
        self._arrived.set()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def _run(self) -> None:
        try:
            await self._upstream.handler(self)
        except ConnectionError:
            pass  # the peer went away in the middle of the script
        finally:
            self.transport.close()

    async def _find(self, mark: bytes) -> int | None:
        while (end := self.unread.find(mark)) < 0:
            if not await self._more():
                return None
        return end

    async def _more(self) -> bool:
        if self.peer_closed.is_set():
            return False
        self._arrived.clear()
        await self._arrived.wait()
        return True


Handler = Callable[[ScriptedConnection], Awaitable[None]]


class ScriptedUpstream:
    """A listening socket whose connections run the handler."""

    def __init__(
        self, handler: Handler, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
    ) -> None:
        self.handler = handler
        self.requests: list[RecordedRequest] = []
        """Every whole request that a handler has read, in that order."""
        self.connections: list[ScriptedConnection] = []
        """Every connection accepted so far."""
        self.tls = tls
        self._host = host
        self.port = port
        self._server: asyncio.Server

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    @property
    def open_connections(self) -> int:
        """Connections that the peer has not closed."""
        return sum(not connection.peer_closed.is_set() for connection in self.connections)

    async def all_closed(self) -> None:
        """Wait until the peer has closed every connection."""
        for connection in self.connections:
            await connection.peer_closed.wait()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.get_running_loop().create_server(
            self._accept, self._host, self.port, ssl=self.tls, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for connection in self.connections:
            connection.handler.cancel()
            connection.transport.abort()
        handlers = [connection.handler for connection in self.connections]
        endings = await asyncio.gather(*handlers, return_exceptions=True)
        for connection in self.connections:
            await connection._gone.wait()
        await self._server.wait_closed()
        faults = [ending for ending in endings if isinstance(ending, Exception)]
        if faults and error is None:
            raise faults[0]

    def _accept(self) -> ScriptedConnection:
        return ScriptedConnection(self, len(self.connections))


def _parse_head(head: bytes) -> tuple[str, str, list[tuple[str, str]]]:
    first, *rest = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, target, _version = first.split(" ")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in rest)]
    return method, target, headers
