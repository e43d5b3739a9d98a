"""A request body that goes up while it is still coming in.

One task for each such request takes a piece, writes it, and waits until the upstream has room before it takes
the next. The exchange around it may end at any moment: an early answer, a lost connection and a caller that
gives up all cancel the task. What its source raises ends the exchange with that very exception.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

JOIN_BYTES_MAX = 64 * 1024
"""Up to here copying a chunk between its size and its end is cheaper than three writes."""


@dataclass(frozen=True, slots=True)
class StreamedBody:
    """`length` is the exact number of bytes that `pieces` will have, None where nobody knows (then it goes
    out in chunks). The pieces are taken once, so such a request is never sent a second time."""

    pieces: AsyncIterator[bytes]
    length: int | None = None

    @property
    def framing(self) -> bytes:
        """The header line that tells where the body ends."""
        if self.length is None:
            return b"transfer-encoding: chunked\r\n"
        return b"content-length: %d\r\n" % self.length


class Sink(Protocol):
    """Who the body goes to: the connection."""

    async def write_piece(self, *parts: bytes) -> None: ...
    def upload_ended(self) -> None: ...
    def upload_failed(self, error: Exception) -> None: ...


async def pump(body: StreamedBody, sink: Sink) -> None:
    """Write all of it. A body of more or fewer bytes than announced is refused with ValueError: the upstream
    would take the next request for the rest of this one."""
    try:
        if body.length is None:
            await _write_chunks(body.pieces, sink)
        else:
            await _write_exactly(body.length, body.pieces, sink)
        sink.upload_ended()
    except Exception as error:
        sink.upload_failed(error)
    finally:
        close = getattr(body.pieces, "aclose", None)
        if close is not None:
            await close()


async def _write_exactly(length: int, pieces: AsyncIterator[bytes], sink: Sink) -> None:
    """After the last byte nothing is asked for any more: the source may take its time to end."""
    left = length
    while left:
        piece = await anext(pieces, None)
        if piece is None:
            raise ValueError(f"the body ended {left} bytes before the {length} bytes announced")
        left -= len(piece)
        if left < 0:
            raise ValueError(f"the body is longer than the {length} bytes announced")
        if piece:
            await sink.write_piece(piece)


async def _write_chunks(pieces: AsyncIterator[bytes], sink: Sink) -> None:
    async for piece in pieces:
        if not piece:
            continue  # the empty chunk is the end
        size = b"%x\r\n" % len(piece)
        if len(piece) <= JOIN_BYTES_MAX:
            await sink.write_piece(b"".join((size, piece, b"\r\n")))
        else:
            await sink.write_piece(size, piece, b"\r\n")
    await sink.write_piece(b"0\r\n\r\n")
