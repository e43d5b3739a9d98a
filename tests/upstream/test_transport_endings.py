"""Every way an exchange can end, and that nothing is left behind."""

import asyncio
import math
import socket

import pytest

from gateway.upstream import http1
from gateway.upstream.errors import (
    ConnectFailed,
    FirstByteTimeout,
    IdleTimeout,
    UpstreamAborted,
    UpstreamClosed,
)
from gateway.upstream.transport import TransportTimeouts, UpstreamTransport
from tests.support.loops import both_loops, until
from tests.support.scripted_upstream import STREAM_HEAD, Handler, ScriptedConnection, answer, chunk
from tests.support.transports import always, once, talking_to

pytestmark = pytest.mark.anyio
anyio_backend = both_loops()

SOON = 0.1
"""Seconds: a limit that is meant to be reached."""
READ_BYTES_MAX = 256 * 1024


async def silent(connection: ScriptedConnection) -> None:
    await connection.request()
    await connection.peer_closed.wait()


def begins(data: bytes) -> Handler:
    """Answer with these bytes, then fall silent until the peer goes."""

    async def handler(connection: ScriptedConnection) -> None:
        await connection.answer(data)
        await connection.peer_closed.wait()

    return handler


async def test_a_refused_connection_fails_at_once() -> None:
    """A dead port is reported as such, with nothing sent."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        transport = UpstreamTransport(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConnectFailed) as caught:
            await transport.send(b"POST", b"/", [], b"x")
    assert caught.value.phase == "connect"
    assert not caught.value.timed_out
    assert isinstance(caught.value.__cause__, OSError)
    assert transport.in_use == 0


async def test_an_unknown_name_fails_to_connect() -> None:
    """A name that does not resolve is a failed connection, not a foreign exception."""
    transport = UpstreamTransport("http://no-such-host.invalid")
    with pytest.raises(ConnectFailed):
        await transport.send(b"GET", b"/", [])
    assert transport.in_use == 0


async def test_a_connection_that_takes_too_long() -> None:
    """A listener whose queue is full answers nothing: the connect limit ends the wait."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(3)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(address)
            transport = UpstreamTransport(
                f"http://127.0.0.1:{address[1]}", timeouts=TransportTimeouts(connect_seconds=SOON)
            )
            with pytest.raises(ConnectFailed) as caught:
                await transport.send(b"GET", b"/", [])
            assert caught.value.timed_out
            assert transport.in_use == 0
            sending = asyncio.ensure_future(
                transport.send(b"GET", b"/", [], timeouts=TransportTimeouts(connect_seconds=math.inf))
            )
            await until(lambda: transport.in_use == 1)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert transport.in_use == 0
        finally:
            for filler in fillers:
                filler.close()


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 O", b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n"])
@pytest.mark.parametrize("reset", [False, True], ids=["eof", "reset"])
async def test_closed_before_the_head(begun: bytes, reset: bool) -> None:
    """An upstream that goes before its head is whole is reported; the request is not sent again."""

    async def handler(connection: ScriptedConnection) -> None:
        await connection.answer(begun)
        if reset:
            connection.reset()

    async with talking_to(handler) as (transport, upstream):
        with pytest.raises(UpstreamClosed) as caught:
            await transport.send(b"POST", b"/", [], b"x")
        assert not caught.value.resend_is_safe
        assert transport.in_use == 0
        assert len(upstream.requests) == 1


@pytest.mark.parametrize(
    "begun",
    [
        STREAM_HEAD + chunk(b"some"),
        STREAM_HEAD + b"8\r\nsome",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nsome",
    ],
    ids=["between chunks", "inside a chunk", "length"],
)
async def test_a_body_that_breaks_off(begun: bytes) -> None:
    """The reader gets what came, then the fact that more should have come."""
    async with talking_to(once(begun)) as (transport, _):
        response = await transport.send(b"GET", b"/", [])
        assert await response.read() == b"some"
        with pytest.raises(UpstreamAborted) as caught:
            await response.read()
        assert caught.value.phase == "body"
        assert not response.complete
        assert transport.in_use == 0


async def test_a_reset_ends_even_a_body_without_framing() -> None:
    """A reset is not taken for the end of a body that ends with its connection."""
    proceed = asyncio.Event()

    async def handler(connection: ScriptedConnection) -> None:
        await connection.answer(b"HTTP/1.1 200 OK\r\n\r\nsome")
        await proceed.wait()
        connection.reset()

    async with talking_to(handler) as (transport, _):
        response = await transport.send(b"GET", b"/", [])
        assert await response.read() == b"some"
        proceed.set()
        with pytest.raises(UpstreamAborted):
            await response.read()


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_no_head_in_time(begun: bytes) -> None:
    """The first-byte limit counts until the head is whole; then the upstream sees the connection closed."""
    timeouts = TransportTimeouts(first_byte_seconds=SOON, idle_seconds=60)
    async with talking_to(begins(begun), timeouts=timeouts) as (transport, upstream):
        with pytest.raises(FirstByteTimeout):
            await transport.send(b"POST", b"/", [], b"x")
        assert transport.in_use == 0
        await upstream.all_closed()
        assert len(upstream.requests) == 1


async def test_each_phase_has_its_own_limit() -> None:
    """A first byte later than the idle limit is fine, and so is a body longer than the first-byte limit."""

    async def handler(connection: ScriptedConnection) -> None:
        await connection.request()
        await asyncio.sleep(0.3)  # the story: prefill
        await connection.send(STREAM_HEAD)
        for _ in range(10):
            await connection.send(chunk(b"x"))
            await asyncio.sleep(0.1)
        await connection.send(chunk(b""))

    hasty_head = TransportTimeouts(first_byte_seconds=0.9, idle_seconds=60)
    hasty_body = TransportTimeouts(first_byte_seconds=60, idle_seconds=0.25)
    async with talking_to(handler) as (transport, _):
        long_stream = await transport.send(b"POST", b"/", [], timeouts=hasty_head)
        late_start = await transport.send(b"POST", b"/", [], timeouts=hasty_body)
        assert late_start.status == 200
        late_start.abort()
        assert await long_stream.read_all(100) == b"x" * 10


async def test_a_body_that_stands_still() -> None:
    """The idle limit ends a silent stream and closes its connection."""
    timeouts = TransportTimeouts(idle_seconds=SOON)
    async with talking_to(begins(STREAM_HEAD + chunk(b"some")), timeouts=timeouts) as (transport, upstream):
        response = await transport.send(b"GET", b"/", [])
        assert await response.read() == b"some"
        with pytest.raises(IdleTimeout):
            await response.read()
        assert transport.in_use == 0
        await upstream.all_closed()


async def test_the_clock_stands_still_while_the_reader_does() -> None:
    """Time in which we hold the upstream back is not the upstream's silence."""
    size = 4 * READ_BYTES_MAX
    timeouts = TransportTimeouts(idle_seconds=SOON)
    async with talking_to(always(answer(b"x" * size)), timeouts=timeouts) as (transport, _):
        response = await transport.send(b"GET", b"/", [])
        await asyncio.sleep(4 * SOON)  # the story: a slow client
        assert len(await response.read_all(size)) == size
        assert transport.idle == 1


@pytest.mark.parametrize("begun", [b"", STREAM_HEAD, STREAM_HEAD + chunk(b"x" * 100_000)])
async def test_cancelling_closes(begun: bytes) -> None:
    """A cancelled `send` or `read` closes the connection, and the upstream sees it."""

    async def exchange(transport: UpstreamTransport) -> None:
        response = await transport.send(b"POST", b"/", [], b"x")
        while True:
            await response.read()

    async with talking_to(begins(begun)) as (transport, upstream):
        task = asyncio.ensure_future(exchange(transport))
        await until(lambda: len(upstream.requests) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (transport.in_use, transport.idle) == (0, 0)
        await upstream.all_closed()


async def test_given_up_in_the_moment_of_connecting() -> None:
    """A request cancelled just when its connection is made leaves none behind that closing would wait for."""
    async with talking_to(always(answer())) as (transport, upstream):
        opened = transport._pool.opened

        def opened_and_given_up(connection: http1.Http1Connection) -> None:
            opened(connection)
            sending.cancel()

        transport._pool.opened = opened_and_given_up  # type: ignore[method-assign]
        sending = asyncio.ensure_future(transport.send(b"POST", b"/", [], b"x"))
        with pytest.raises(asyncio.CancelledError):
            await sending
        await upstream.all_closed()


async def test_abort_closes_at_once() -> None:
    """An unfinished response is given up by one call, as often as one likes; reading on tells so."""
    async with talking_to(begins(STREAM_HEAD + chunk(b"some"))) as (transport, upstream):
        response = await transport.send(b"GET", b"/", [])
        for _ in range(2):
            response.abort()
        assert transport.in_use == 0
        with pytest.raises(UpstreamAborted):
            await response.read()
        await upstream.all_closed()


async def test_abort_wakes_a_reader_in_another_task() -> None:
    """Whoever waits for the next piece is told."""
    async with talking_to(begins(STREAM_HEAD)) as (transport, _):
        response = await transport.send(b"GET", b"/", [])
        reading = asyncio.ensure_future(response.read())
        await asyncio.sleep(0)
        response.abort()
        with pytest.raises(UpstreamAborted):
            await reading


async def test_abort_after_the_end_changes_nothing() -> None:
    """The connection of a finished response is back in the pool, whether it has been read or not."""
    async with talking_to(always(answer(b"hello"))) as (transport, upstream):
        response = await transport.send(b"GET", b"/", [])
        await until(lambda: response.complete)
        assert transport.idle == 1
        response.abort()
        assert transport.idle == 1
        assert await response.read_all(100) == b"hello"
        assert upstream.open_connections == 1


async def test_an_early_answer_to_an_upload() -> None:
    """An answer before the body was read is the answer; the half-used connection is closed."""

    async def handler(connection: ScriptedConnection) -> None:
        await connection.received(1)
        connection.stop_reading()
        await connection.send(answer(b"too large", status="413 Content Too Large"))
        connection.resume_reading()
        await connection.peer_closed.wait()

    async with talking_to(handler) as (transport, upstream):
        response = await transport.send(b"POST", b"/", [], b"x" * 64 * 1024 * 1024)
        assert response.status == 413
        assert await response.read_all(100) == b"too large"
        assert (transport.in_use, transport.idle) == (0, 0)
        await upstream.all_closed()


async def test_an_upload_that_nobody_takes() -> None:
    """An upstream that stops reading the request runs into the first-byte limit."""

    async def handler(connection: ScriptedConnection) -> None:
        await connection.received(1)
        connection.stop_reading()
        await until(lambda: transport.in_use == 0)

    timeouts = TransportTimeouts(first_byte_seconds=SOON)
    async with talking_to(handler, timeouts=timeouts) as (transport, _):
        with pytest.raises(FirstByteTimeout, match="not taken"):
            await transport.send(b"POST", b"/", [], b"x" * 64 * 1024 * 1024)
        assert transport.in_use == 0


async def test_a_slow_reader_holds_the_upstream_back() -> None:
    """What is buffered here stays small however much is offered, and what is read is complete."""
    size = 64 * 1024 * 1024
    piece = b"x" * 64 * 1024

    async def handler(connection: ScriptedConnection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size // len(piece)):
            await connection.send(piece)
        await connection.peer_closed.wait()

    async with talking_to(handler) as (transport, upstream):
        response = await transport.send(b"GET", b"/", [])
        (connection,) = upstream.connections
        sent = -1
        while sent != connection.sent_bytes:  # until the upstream is stuck
            sent = connection.sent_bytes
            await asyncio.sleep(0.1)
        assert sent < size // 2
        assert response.unread_bytes <= http1.UNREAD_BYTES_MAX + READ_BYTES_MAX
        received = 0
        while data := await response.read():
            received += len(data)
            assert response.unread_bytes <= http1.UNREAD_BYTES_MAX + READ_BYTES_MAX
        assert received == size
        assert transport.idle == 1


async def test_abort_with_bytes_unread() -> None:
    """A held-back upstream is let go by abort."""
    async with talking_to(always(answer(b"x" * 16 * 1024 * 1024))) as (transport, upstream):
        response = await transport.send(b"GET", b"/", [])
        await until(lambda: response.unread_bytes > http1.UNREAD_BYTES_MAX)
        response.abort()
        assert response.unread_bytes == 0
        assert transport.in_use == 0
        await upstream.all_closed()


async def test_closing_the_transport_ends_what_is_under_way() -> None:
    """Exchanges under way fail, idle connections go, and no new one begins."""
    async with talking_to(silent) as (transport, upstream):
        sending = asyncio.ensure_future(transport.send(b"GET", b"/", []))
        await until(lambda: len(upstream.requests) == 1)
        await transport.aclose()
        with pytest.raises(UpstreamClosed):
            await sending
        with pytest.raises(ConnectFailed):
            await transport.send(b"GET", b"/", [])
        await upstream.all_closed()
