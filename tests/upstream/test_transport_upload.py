"""Request bodies that go up while they are still coming in."""

import asyncio
import resource
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gateway.upstream import http1
from gateway.upstream.errors import (
    ConnectFailed,
    FirstByteTimeout,
    IdleTimeout,
    UpstreamAborted,
    UpstreamClosed,
)
from gateway.upstream.http1 import JOIN_BYTES_MAX
from gateway.upstream.transport import StreamedBody, TransportTimeouts, UpstreamTransport
from tests.support.loops import both_loops, until
from tests.support.scripted_upstream import STREAM_HEAD, ScriptedConnection, ScriptedUpstream, answer, chunk
from tests.support.transports import always, talking_to

pytestmark = pytest.mark.anyio
anyio_backend = both_loops()

SOON = 0.1
"""Seconds: a limit that is meant to be reached."""
MEBIBYTE = 1024 * 1024


class Source:
    """Pieces that a test hands out one by one; `taken` counts those that were asked for."""

    def __init__(self, *pieces: bytes) -> None:
        self._queue: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self.taken = 0
        self.closed = False
        self.give(*pieces)

    def give(self, *pieces: bytes | Exception) -> None:
        for piece in pieces:
            self._queue.put_nowait(piece)

    def end(self) -> None:
        self.give(b"END")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while (piece := await self._queue.get()) != b"END":
                self.taken += 1
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            self.closed = True

    def body(self, length: int | None = None) -> StreamedBody:
        return StreamedBody(aiter(self), length)


def whole(*pieces: bytes, length: int | None = None) -> StreamedBody:
    source = Source(*pieces)
    source.end()
    return source.body(length)


async def endless(piece: bytes, taken: Callable[[], None] = lambda: None) -> AsyncIterator[bytes]:
    while True:
        taken()
        yield piece


async def refuses_early(connection: ScriptedConnection) -> None:
    """An answer as soon as the request's head is here, and nothing is read any more."""
    await connection.received(1)
    connection.stop_reading()
    await connection.send(answer(b"too large", status="413 Content Too Large"))
    connection.resume_reading()
    await connection.peer_closed.wait()


def posted(transport: UpstreamTransport, body: StreamedBody, **options: Any) -> Any:
    return transport.send(b"POST", b"/", [(b"content-length", b"7")], body, **options)


# ---------------------------------------------------------------------- what goes out


async def test_a_body_of_known_length() -> None:
    """The length is told, the bytes follow as they are, and the connection serves the next request."""
    async with talking_to(always(answer())) as (transport, upstream):
        for number in range(2):
            response = await posted(transport, whole(b"one", b"", b"two", length=6))
            assert await response.read_all(100) == b"{}"
            assert (transport.in_use, transport.idle) == (0, number + 1)
            request = upstream.requests[-1]
            assert request.body == b"onetwo"
            assert request.header("content-length") == "6"
            assert request.header("transfer-encoding") is None
            await (await transport.send(b"GET", b"/", [])).read_all(100)
        assert len(upstream.connections) == 2
        assert len(upstream.requests) == 4


async def test_a_body_of_unknown_length() -> None:
    """It goes out in chunks; an empty piece is none, for it would be the end."""
    large = b"x" * (JOIN_BYTES_MAX + 1)
    received = b"3\r\none\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(large), large)

    async def handler(connection: ScriptedConnection) -> None:
        end = await connection._find(b"\r\n\r\n")
        assert end is not None
        head = bytes(connection.unread[: end + 4])
        assert b"\r\ntransfer-encoding: chunked\r\n" in head
        assert b"content-length" not in head
        assert await connection.received(len(head) + len(received))
        assert connection.unread[len(head) :] == received
        await connection.send(answer())
        await connection.peer_closed.wait()

    async with talking_to(handler) as (transport, _):
        response = await posted(transport, whole(b"one", b"", large))
        assert await response.read_all(100) == b"{}"
        assert transport.idle == 1


@pytest.mark.parametrize("length", [0, None])
async def test_an_empty_body(length: int | None) -> None:
    """No piece at all is a body too."""

    async def handler(connection: ScriptedConnection) -> None:
        ending = b"content-length: 0\r\n\r\n" if length == 0 else b"\r\n\r\n0\r\n\r\n"
        assert await connection._find(ending) is not None
        await connection.send(answer())
        await connection.peer_closed.wait()

    async with talking_to(handler) as (transport, _):
        response = await posted(transport, whole(length=length))
        assert await response.read_all(100) == b"{}"
        assert transport.idle == 1


async def test_pieces_leave_as_they_come() -> None:
    """The upstream has a piece before the next one exists."""
    source = Source(b"first")
    seen = asyncio.Event()

    async def handler(connection: ScriptedConnection) -> None:
        await connection._find(b"first")
        seen.set()
        await connection.request()
        await connection.send(answer())

    async with talking_to(handler) as (transport, _):
        sending = asyncio.ensure_future(posted(transport, source.body(9)))
        await seen.wait()
        source.give(b"last")
        source.end()
        response = await sending
        assert await response.read_all(100) == b"{}"


async def test_always_a_fresh_connection() -> None:
    """A kept connection may be stale, and what has been taken of a body cannot be taken again."""
    async with talking_to(always(answer())) as (transport, upstream):
        await (await transport.send(b"GET", b"/", [])).read_all(100)
        assert transport.idle == 1
        await (await posted(transport, whole(b"x", length=1))).read_all(100)
        assert len(upstream.connections) == 2
        assert transport.idle == 2


async def test_an_upstream_that_is_not_there_takes_nothing() -> None:
    """Without a connection no piece is asked for."""
    async with ScriptedUpstream(refuses_early) as gone:
        url = gone.url
    source = Source(b"x")
    transport = UpstreamTransport(url)
    with pytest.raises(ConnectFailed):
        await posted(transport, source.body(1))
    assert source.taken == 0


@pytest.mark.parametrize("pieces", [(b"abc",), (b"abcd", b"efghi")], ids=["too short", "too long"])
async def test_a_wrong_length_is_the_callers_fault(pieces: tuple[bytes, ...]) -> None:
    """The upstream must not take the next request for a part of this one: the connection ends."""
    async with talking_to(always(answer())) as (transport, upstream):
        with pytest.raises(ValueError, match="announced"):
            await posted(transport, whole(*pieces, length=8))
        assert (transport.in_use, transport.idle) == (0, 0)
        await upstream.all_closed()
        assert upstream.requests == []


# ---------------------------------------------------------------------- back-pressure


async def test_50_megabytes_to_a_slow_upstream() -> None:
    """However fast the source is, no more is taken than the upstream takes, and all of it arrives."""
    piece = bytes(range(256)) * 256
    pieces = 50 * MEBIBYTE // len(piece)
    taken = received = lead_max = 0

    async def source() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(pieces):
            taken += len(piece)
            yield piece

    async def handler(connection: ScriptedConnection) -> None:
        nonlocal received, lead_max
        end = await connection._find(b"\r\n\r\n")
        assert end is not None
        del connection.unread[: end + 4]
        while received < pieces * len(piece):
            connection.stop_reading()
            await asyncio.sleep(0)
            lead_max = max(lead_max, taken - received - len(connection.unread))
            connection.resume_reading()
            assert await connection.received(1)
            received += len(connection.unread)
            connection.unread.clear()
        await connection.send(answer())
        await connection.peer_closed.wait()

    async with talking_to(handler) as (transport, _):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        response = await posted(transport, StreamedBody(source(), pieces * len(piece)))
        assert await response.read_all(100) == b"{}"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert received == taken == pieces * len(piece)
        assert lead_max < 16 * MEBIBYTE  # the kernel's buffers, and ours of little more than a piece
        assert grown < 20 * 1024  # KiB


async def test_an_upstream_that_stops_reading_stops_the_source() -> None:
    """Once the kernel's buffers are full nothing is taken; after the limit the upload is given up."""
    taken = 0

    def count() -> None:
        nonlocal taken
        taken += 1

    async def handler(connection: ScriptedConnection) -> None:
        await connection.received(1)
        connection.stop_reading()
        await until(lambda: transport.in_use == 0)

    timeouts = TransportTimeouts(first_byte_seconds=4 * SOON)
    async with talking_to(handler, timeouts=timeouts) as (transport, _):
        body = StreamedBody(endless(b"x" * 64 * 1024, count))
        with pytest.raises(FirstByteTimeout, match="not taken"):
            await posted(transport, body)
        assert taken * 64 * 1024 < 32 * MEBIBYTE
        assert transport.in_use == 0


# ---------------------------------------------------------------------- time


async def test_the_first_byte_limit_counts_from_the_last_byte() -> None:
    """A source that is slower than the limit is not the upstream's fault; a late head after it is."""
    source = Source(b"a")
    timeouts = TransportTimeouts(first_byte_seconds=2 * SOON)

    async def handler(connection: ScriptedConnection) -> None:
        await connection.request()
        await connection.peer_closed.wait()

    async with talking_to(handler, timeouts=timeouts) as (transport, upstream):
        sending = asyncio.ensure_future(posted(transport, source.body(2)))
        await asyncio.sleep(6 * SOON)  # the story: a slow client
        assert not sending.done()
        source.give(b"b")
        source.end()
        with pytest.raises(FirstByteTimeout, match="no response head"):
            await sending
        assert len(upstream.requests) == 1
        assert transport.in_use == 0


async def test_an_answer_that_waits_for_the_rest_of_the_request() -> None:
    """Silence in the body is the upstream's only once it has the whole request."""
    source = Source(b"a")

    async def handler(connection: ScriptedConnection) -> None:
        await connection._find(b"\r\n\r\na")
        await connection.send(STREAM_HEAD + chunk(b"more"))
        await connection.request()
        await connection.peer_closed.wait()

    async with talking_to(handler, timeouts=TransportTimeouts(idle_seconds=SOON)) as (transport, upstream):
        response = await posted(transport, source.body(2))
        assert await response.read() == b"more"
        reading = asyncio.ensure_future(response.read())
        await asyncio.sleep(4 * SOON)  # the story: a slow client
        assert not reading.done()
        source.give(b"b")
        source.end()
        with pytest.raises(IdleTimeout):
            await reading
        assert upstream.requests[0].body == b"ab"


# ---------------------------------------------------------------------- early answers


async def test_refused_in_the_middle() -> None:
    """An error that comes first is delivered, the upload stops, and the connection is not used again."""
    source = Source(b"x" * 1000)
    async with talking_to(refuses_early) as (transport, upstream):
        response = await posted(transport, source.body(10**9))
        assert response.status == 413
        assert await response.read_all(100) == b"too large"
        await until(lambda: source.closed)
        assert (transport.in_use, transport.idle) == (0, 0)
        await upstream.all_closed()


async def test_an_error_stops_the_upload_before_its_body_is_whole() -> None:
    """With the head of an error nothing more is taken from the source."""
    proceed = asyncio.Event()
    source = Source(b"x")

    async def handler(connection: ScriptedConnection) -> None:
        await connection._find(b"\r\n\r\nx")
        await connection.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 4\r\n\r\n")
        await proceed.wait()
        await connection.send(b"late")

    async with talking_to(handler) as (transport, _):
        response = await posted(transport, source.body(100))
        assert response.status == 400
        await until(lambda: source.closed)
        proceed.set()
        assert await response.read_all(100) == b"late"
        assert source.taken == 1
        assert (transport.in_use, transport.idle) == (0, 0)


@pytest.mark.parametrize("end", [ScriptedConnection.close, ScriptedConnection.reset], ids=["close", "reset"])
async def test_refused_by_an_upstream_that_hangs_up(end: Callable[[ScriptedConnection], None]) -> None:
    """To close with bytes unread is to reset; the answer that came before is delivered all the same."""

    async def handler(connection: ScriptedConnection) -> None:
        await connection.received(MEBIBYTE)
        connection.stop_reading()
        await connection.send(answer(b"too large", status="413 Content Too Large"))
        end(connection)

    async with talking_to(handler) as (transport, _):
        for _ in range(20):
            body = StreamedBody(endless(b"x" * 64 * 1024))
            try:
                response = await posted(transport, body)
            except UpstreamClosed:
                assert end is ScriptedConnection.reset  # which may overtake the answer
                continue
            assert response.status == 413
            assert await response.read_all(100) == b"too large"
        assert (transport.in_use, transport.idle) == (0, 0)


async def test_an_answer_may_run_beside_the_upload() -> None:
    """A good head does not stop the upload: an upstream may answer piece by piece."""
    source = Source(b"piece 0")

    async def handler(connection: ScriptedConnection) -> None:
        await connection._find(b"\r\n\r\npiece")
        await connection.send(STREAM_HEAD)
        for number in range(3):
            await connection._find(b"piece %d" % number)
            await connection.send(chunk(b"got %d" % number))
        await connection.request()
        await connection.send(chunk(b""))
        await connection.peer_closed.wait()

    async with talking_to(handler) as (transport, _):
        response = await posted(transport, source.body(21))
        for number in range(3):
            assert await response.read() == b"got %d" % number
            source.give(b"piece %d" % (number + 1))
        assert await response.read() == b""
        assert (transport.in_use, transport.idle) == (0, 1)


async def test_an_interim_response_changes_nothing() -> None:
    """100 Continue in the middle of an upload is no answer."""

    async def handler(connection: ScriptedConnection) -> None:
        await connection.received(1)
        await connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await connection.request()
        await connection.send(answer(b"done"))
        await connection.peer_closed.wait()

    async with talking_to(handler) as (transport, upstream):
        response = await posted(transport, whole(*[b"x" * 1000] * 100, length=100_000))
        assert await response.read_all(100) == b"done"
        assert len(upstream.requests[0].body) == 100_000
        assert transport.idle == 1


# ---------------------------------------------------------------------- other endings


class Trouble(Exception):
    """Of the source's own."""


async def test_what_the_source_raises_is_raised_by_send() -> None:
    """The connection is closed before its request is whole, and the caller gets the very exception."""
    source = Source(b"some", trouble := Trouble())  # type: ignore[arg-type]
    async with talking_to(always(answer())) as (transport, upstream):
        with pytest.raises(Trouble) as caught:
            await posted(transport, source.body(100))
        assert caught.value is trouble
        assert (transport.in_use, transport.idle) == (0, 0)
        await upstream.all_closed()
        assert upstream.requests == []


async def test_what_the_source_raises_during_the_answer_is_raised_by_read() -> None:
    """After the pieces that came."""
    source = Source(b"x")

    async def handler(connection: ScriptedConnection) -> None:
        await connection._find(b"\r\n\r\nx")
        await connection.send(STREAM_HEAD + chunk(b"some"))
        await connection.peer_closed.wait()

    async with talking_to(handler) as (transport, upstream):
        response = await posted(transport, source.body(100))
        source.give(Trouble())
        assert await response.read() == b"some"
        with pytest.raises(Trouble):
            await response.read()
        await upstream.all_closed()
        assert transport.in_use == 0


@pytest.mark.parametrize("stuck", [False, True], ids=["source is slow", "upstream is slow"])
async def test_cancelling_closes_both_ends(stuck: bool) -> None:
    """Whether it waits for the source or for the upstream: the connection ends and the source is closed."""
    source = Source(b"x")
    begun = asyncio.Event()

    async def handler(connection: ScriptedConnection) -> None:
        await connection.received(1)
        if stuck:
            connection.stop_reading()
        begun.set()
        await (until(lambda: transport.in_use == 0) if stuck else connection.peer_closed.wait())

    async with talking_to(handler) as (transport, _):
        if stuck:
            source.give(*[b"x" * MEBIBYTE] * 32)
        sending = asyncio.ensure_future(posted(transport, source.body()))
        await begun.wait()
        await until(lambda: source.taken > 0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert transport.in_use == 0
        await until(lambda: source.closed)
        assert source.taken < 33


async def test_abort_ends_the_upload() -> None:
    """A response that is given up takes the rest of its request with it."""
    source = Source(b"x")

    async def handler(connection: ScriptedConnection) -> None:
        await connection._find(b"\r\n\r\nx")
        await connection.send(STREAM_HEAD)
        await connection.peer_closed.wait()

    async with talking_to(handler) as (transport, upstream):
        response = await posted(transport, source.body(100))
        response.abort()
        await until(lambda: source.closed)
        await upstream.all_closed()
        with pytest.raises(UpstreamAborted):
            await response.read()


@pytest.mark.parametrize("end", [ScriptedConnection.close, ScriptedConnection.reset], ids=["eof", "reset"])
async def test_an_upstream_that_leaves_in_the_middle(end: Callable[[ScriptedConnection], None]) -> None:
    """It may have begun: nothing is sent again, within no time at all either."""

    async def handler(connection: ScriptedConnection) -> None:
        await connection._find(b"\r\n\r\nx")
        end(connection)

    source = Source(b"x")
    async with talking_to(handler) as (transport, upstream):
        with pytest.raises(UpstreamClosed) as caught:
            await posted(transport, source.body(100))
        assert not caught.value.resend_is_safe
        await until(lambda: source.closed)
        assert len(upstream.connections) == 1
        assert transport.in_use == 0


async def test_closing_the_transport_ends_uploads() -> None:
    """What is under way fails, and its source is closed."""
    source = Source(b"x")

    async def handler(connection: ScriptedConnection) -> None:
        await connection.peer_closed.wait()

    async with talking_to(handler) as (transport, _):
        sending = asyncio.ensure_future(posted(transport, source.body()))
        await until(lambda: source.taken == 1)
        await transport.aclose()
        with pytest.raises(UpstreamClosed):
            await sending
        await until(lambda: source.closed)


def test_what_is_buffered_is_little() -> None:
    """The bounds that the tests above rest on."""
    assert http1.UNREAD_BYTES_MAX <= 64 * 1024
    assert JOIN_BYTES_MAX <= 64 * 1024
