"""The upstream connection without a socket: a test hands it the bytes of each read, and reads what comes out.

exchange = begin(loop)
exchange.feed(data, cuts)
exchange.response.status, exchange.read_rest()
"""

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gateway.upstream.http1 import Http1Connection, TransportTimeouts
from gateway.upstream.response import UpstreamResponse


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.aborted = False
        self.paused = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def abort(self) -> None:
        self.aborted = True


@dataclass
class FakeOwner:
    kept: list[Http1Connection] = field(default_factory=list)
    dropped_count: int = 0

    def opened(self, connection: Http1Connection) -> None: ...

    def put_back(self, connection: Http1Connection) -> None:
        self.kept.append(connection)

    def dropped(self, connection: Http1Connection) -> None:
        self.dropped_count += 1

    def closed_by_peer(self, connection: Http1Connection) -> None: ...

    def lost(self, connection: Http1Connection) -> None: ...


@dataclass(frozen=True)
class Exchange:
    owner: FakeOwner
    transport: FakeTransport
    connection: Http1Connection
    response: UpstreamResponse

    def feed(self, data: bytes, cuts: Iterable[int]) -> None:
        """Hand the bytes over in pieces, as a socket would: nothing more once the transport is closed."""
        borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
        for start, end in itertools.pairwise(borders):
            if end > start and not self.transport.aborted:
                self.connection.data_received(data[start:end])

    def read_pieces(self) -> list[bytes]:
        """What each read brought of the body, if it is all there."""
        pieces = []
        while piece := self.response.read_nowait():
            pieces.append(piece)
        assert piece is not None, "neither ended nor failed"
        return pieces

    def read_rest(self) -> bytes:
        """The body, if it is all there."""
        return b"".join(self.read_pieces())


def begin(loop: asyncio.AbstractEventLoop, *, no_body: bool = False) -> Exchange:
    """A connection on which a request was just sent."""
    owner, transport = FakeOwner(), FakeTransport()
    connection = Http1Connection(owner, loop)
    connection.connection_made(transport)
    timeouts = TransportTimeouts()
    response = connection.start(
        b"GET / HTTP/1.1\r\n\r\n", b"", no_body=no_body, reused=False, timeouts=timeouts
    )
    return Exchange(owner, transport, connection, response)
