"""Connections kept, reused, retired and, in one case only, replaced under a request."""

import asyncio
from collections.abc import Callable

import pytest

from gateway.upstream import http1
from gateway.upstream.connection_pool import LEARNED_SECONDS_MIN, ConnectionPool
from gateway.upstream.errors import UpstreamClosed
from gateway.upstream.transport import UpstreamTransport
from tests.support.loops import both_loops, until
from tests.support.scripted_upstream import STREAM_HEAD, Handler, ScriptedConnection, answer, chunk
from tests.support.transports import always, talking_to

pytestmark = pytest.mark.anyio
anyio_backend = both_loops()


async def call(transport: UpstreamTransport, body: bytes = b"x") -> bytes:
    return await (await transport.send(b"POST", b"/", [], body)).read_all(1000)


def answers_once_then(end: Callable[[ScriptedConnection], None]) -> Handler:
    """The first connection answers once, takes another request and ends without a word; the others serve."""

    async def handler(connection: ScriptedConnection) -> None:
        await connection.answer(answer())
        while await connection.request() is not None:
            if connection.number == 0:
                end(connection)
                return
            await connection.send(answer())

    return handler


async def test_one_after_the_other_share_a_connection() -> None:
    """A connection serves as soon as the response before has been read by the parser."""
    async with talking_to(always(answer())) as (transport, upstream):
        for _ in range(20):
            assert await call(transport) == b"{}"
            assert (transport.in_use, transport.idle) == (0, 1)
        assert len(upstream.connections) == 1


async def test_the_connection_used_last_is_used_next() -> None:
    """Last in, first out."""
    release = asyncio.Event()

    async def handler(connection: ScriptedConnection) -> None:
        while await connection.request() is not None:
            await release.wait()
            await connection.send(answer(b"%d" % connection.number))

    async with talking_to(handler) as (transport, upstream):
        calls = [asyncio.ensure_future(call(transport)) for _ in range(3)]
        await until(lambda: len(upstream.requests) == 3)
        assert transport.in_use == 3
        release.set()
        await asyncio.gather(*calls)
        assert transport.idle == 3
        assert len({await call(transport) for _ in range(5)}) == 1


async def test_150_streams_at_once() -> None:
    """Nothing here limits how many exchanges are under way; afterwards none is."""
    all_there = asyncio.Event()

    async def handler(connection: ScriptedConnection) -> None:
        while await connection.request() is not None:
            await connection.send(STREAM_HEAD + chunk(b"first"))
            await all_there.wait()
            await connection.send(chunk(b"last") + chunk(b""))

    async with talking_to(handler) as (transport, upstream):
        responses = await asyncio.gather(*(transport.send(b"POST", b"/", []) for _ in range(150)))
        assert [await response.read() for response in responses] == [b"first"] * 150
        assert (transport.in_use, transport.idle) == (150, 0)
        all_there.set()
        assert await asyncio.gather(*(response.read_all(100) for response in responses)) == [b"last"] * 150
        assert (transport.in_use, transport.idle) == (0, 150)
        assert len(upstream.connections) == 150


async def test_idle_connections_are_bounded() -> None:
    """Above `max_idle` the one idle for longest is closed."""
    async with talking_to(always(answer()), max_idle=2) as (transport, upstream):
        await asyncio.gather(*(call(transport) for _ in range(5)))
        assert (transport.in_use, transport.idle) == (0, 2)
        await until(lambda: upstream.open_connections == 2)


async def test_no_connection_is_kept_with_max_idle_0() -> None:
    """`max_idle=0` means a connection for each request."""
    async with talking_to(always(answer()), max_idle=0) as (transport, upstream):
        for _ in range(2):
            assert await call(transport) == b"{}"
        assert transport.idle == 0
        assert len(upstream.connections) == 2


async def test_idle_connections_are_retired() -> None:
    """Nobody needs to send a request for an old connection to be closed."""
    async with talking_to(always(answer()), idle_retire_seconds=0.1) as (transport, upstream):
        await asyncio.gather(*(call(transport) for _ in range(3)))
        await upstream.all_closed()
        assert transport.idle == 0
        assert await call(transport) == b"{}"
        assert len(upstream.connections) == 4


@pytest.mark.parametrize("farewell", [b"", b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n"])
async def test_an_upstream_that_closes_idle_connections_is_learned_from(farewell: bytes) -> None:
    """Seen to be closed at some age, connections are retired at half of it; a 408 is a farewell as well."""

    async def handler(connection: ScriptedConnection) -> None:
        await connection.answer(answer())
        await asyncio.sleep(0.2)  # the story: the upstream's own limit
        if farewell:
            await connection.send(farewell)

    async with talking_to(handler) as (transport, upstream):
        assert transport.idle_retire_seconds == 4.0
        await call(transport)
        await until(lambda: transport.idle == 0)
        assert LEARNED_SECONDS_MIN <= transport.idle_retire_seconds < 4.0
        assert await call(transport) == b"{}"
        assert len(upstream.connections) == 2


async def test_what_was_learned_has_a_floor() -> None:
    """An upstream that closes at once does not bring the age to nothing; a later close does not raise it."""
    pool = ConnectionPool(retire_seconds=4.0, max_idle=8)
    connection = pool.new(asyncio.get_running_loop())
    now = asyncio.get_running_loop().time()
    for age, expected in [(6.0, 3.0), (8.0, 3.0), (0.01, LEARNED_SECONDS_MIN), (6.0, LEARNED_SECONDS_MIN)]:
        connection.idle_since = now - age
        pool.closed_by_peer(connection)
        assert pool.retire_seconds == pytest.approx(expected, abs=0.05)
    connection.close()


async def test_an_end_the_loop_has_not_seen_yet() -> None:
    """Before an old connection is used again the kernel is asked whether it has ended."""
    async with talking_to(always(answer())) as (transport, upstream):
        await call(transport)
        (connection,) = transport._pool._idle
        connection._transport.pause_reading()  # so that the loop cannot tell first
        assert not connection.has_input()
        connection.idle_since -= 1.0
        upstream.connections[0].close()
        await until(connection.has_input)
        assert await call(transport) == b"{}"
        assert len(upstream.requests) == 2
        assert transport.idle_retire_seconds < 4.0


@pytest.mark.parametrize("end", [ScriptedConnection.close, ScriptedConnection.reset], ids=["eof", "reset"])
async def test_a_stale_connection_is_replaced_once(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[ScriptedConnection], None]
) -> None:
    """A kept connection that ends at once without a byte was closed before: the request goes out afresh."""
    monkeypatch.setattr(http1, "STALE_SECONDS", 5.0)  # the machine may be slow
    monkeypatch.setattr(http1, "STALE_RESET_SECONDS", 5.0)
    async with talking_to(answers_once_then(end)) as (transport, upstream):
        await call(transport)
        assert await call(transport) == b"{}"
        assert len(upstream.connections) == 2
        assert [request.body for request in upstream.requests] == [b"x"] * 3
        assert (transport.in_use, transport.idle) == (0, 1)


async def test_a_request_is_sent_again_no_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second connection is a fresh one, and its end is final."""
    monkeypatch.setattr(http1, "STALE_SECONDS", 5.0)

    async def handler(connection: ScriptedConnection) -> None:
        if connection.number == 0:
            await connection.answer(answer())
        await connection.request()

    async with talking_to(handler) as (transport, upstream):
        await call(transport)
        with pytest.raises(UpstreamClosed):
            await call(transport)
        assert len(upstream.connections) == 2
        assert len(upstream.requests) == 3
        assert transport.in_use == 0


async def test_a_late_end_is_not_stale() -> None:
    """An upstream that thinks for a moment and goes may have begun: nothing is sent again."""

    async def handler(connection: ScriptedConnection) -> None:
        await connection.answer(answer())
        await connection.request()
        await asyncio.sleep(2 * http1.STALE_SECONDS)  # the story

    async with talking_to(handler) as (transport, upstream):
        await call(transport)
        with pytest.raises(UpstreamClosed):
            await call(transport)
        assert len(upstream.connections) == 1
        assert len(upstream.requests) == 2


@pytest.mark.parametrize("end", ["eof", "reset"])
async def test_a_reset_may_come_later_than_an_end(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """A system resets what comes to a closed connection, and on a busy machine takes a while to: that is
    stale still where an orderly end, before which the request may have been read, is not."""
    monkeypatch.setattr(http1, "STALE_RESET_SECONDS", 5.0)

    async def handler(connection: ScriptedConnection) -> None:
        await connection.answer(answer())
        await connection.request()
        if connection.number == 0:
            await asyncio.sleep(2 * http1.STALE_SECONDS)  # the story
            if end == "reset":
                connection.reset()
        else:
            await connection.send(answer(b"{}"))

    async with talking_to(handler) as (transport, upstream):
        await call(transport)
        if end == "reset":
            await call(transport)
        else:
            with pytest.raises(UpstreamClosed):
                await call(transport)
        assert len(upstream.connections) == (2 if end == "reset" else 1)


async def test_a_begun_answer_is_not_stale() -> None:
    """One byte of a response is enough to know that the engine has the request."""

    async def handler(connection: ScriptedConnection) -> None:
        await connection.answer(answer())
        await connection.answer(b"HTTP")

    async with talking_to(handler) as (transport, upstream):
        await call(transport)
        with pytest.raises(UpstreamClosed):
            await call(transport)
        assert len(upstream.connections) == 1


async def test_a_fresh_connection_is_never_stale() -> None:
    """What was opened for this request cannot have been closed before it."""

    async def handler(connection: ScriptedConnection) -> None:
        await connection.request()

    async with talking_to(handler) as (transport, upstream):
        with pytest.raises(UpstreamClosed) as caught:
            await call(transport)
        assert not caught.value.resend_is_safe
        assert len(upstream.requests) == 1


async def test_racing_the_upstreams_own_limit() -> None:
    """Requests spaced just about the age at which the upstream closes: none fails, each is answered once."""
    limit = 0.12
    rounds = 20

    async def handler(connection: ScriptedConnection) -> None:
        while True:
            try:
                async with asyncio.timeout(limit):
                    if not await connection.received(1):
                        return
            except TimeoutError:
                return
            await connection.answer(answer())

    async with talking_to(handler) as (transport, upstream):
        for number in range(rounds):
            assert await call(transport, b"%d" % number) == b"{}"
            await asyncio.sleep(limit - 0.01 + 0.02 * number / rounds)  # the story: the client's rhythm
        assert [request.body for request in upstream.requests] == [b"%d" % n for n in range(rounds)]
        assert transport.in_use == 0


async def test_a_hung_upstream_is_no_trouble_to_others() -> None:
    """Requests stuck in one upstream leave another's alone."""

    async def hung(connection: ScriptedConnection) -> None:
        await connection.request()
        await connection.peer_closed.wait()

    async with talking_to(hung) as (stuck, _), talking_to(always(answer())) as (healthy, _):
        waiting = [asyncio.ensure_future(call(stuck)) for _ in range(50)]
        assert await asyncio.gather(*(call(healthy) for _ in range(50))) == [b"{}"] * 50
        assert stuck.in_use == 50
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert stuck.in_use == 0
