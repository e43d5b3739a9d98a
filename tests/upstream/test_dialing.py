"""One host, several addresses: which one is used, and what becomes of the others."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.upstream import dialing
from gateway.upstream.dialing import Address, connected_socket, first_connected, in_turns
from gateway.upstream.errors import ConnectFailed
from gateway.upstream.transport import TransportTimeouts, UpstreamTransport
from tests.support.loops import both_loops
from tests.support.scripted_upstream import ScriptedUpstream, answer
from tests.support.transports import always

pytestmark = pytest.mark.anyio
anyio_backend = both_loops()

V4, V6 = socket.AF_INET, socket.AF_INET6


def four(port: int) -> Address:
    return Address(V4, ("127.0.0.1", port))


@contextmanager
def listening() -> Iterator[Address]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield four(server.getsockname()[1])


@contextmanager
def refusing() -> Iterator[Address]:
    """Bound, and nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield four(taken.getsockname()[1])


@contextmanager
def silent() -> Iterator[Address]:
    """A listener whose queue is full: attempts stay without an answer."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        fillers = [socket.socket() for _ in range(3)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(server.getsockname())
            yield four(server.getsockname()[1])
        finally:
            for filler in fillers:
                filler.close()


@pytest.mark.parametrize(
    ("families", "expected"),
    [
        ([V6, V6, V4, V4], [V6, V4, V6, V4]),
        ([V4, V6, V6, V6], [V4, V6, V6, V6]),
        ([V4, V4], [V4, V4]),
        ([], []),
    ],
)
def test_families_take_turns(families: list[int], expected: list[int]) -> None:
    """The resolver's first choice is first, and its family does not keep the other one waiting."""
    turned = in_turns(Address(family, number) for number, family in enumerate(families))
    assert [address.family for address in turned] == expected
    for family in (V4, V6):
        order = [address.sockaddr for address in turned if address.family == family]
        assert order == sorted(order)


async def test_what_refuses_is_passed_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure nobody waits for the delay."""
    monkeypatch.setattr(dialing, "ATTEMPT_DELAY_SECONDS", 60.0)
    with refusing() as dead, listening() as alive:
        async with asyncio.timeout(10):
            with await first_connected(asyncio.get_running_loop(), [dead, dead, alive]) as connected:
                assert connected.getpeername() == alive.sockaddr


async def test_what_is_silent_is_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that does not answer costs the delay, and not the whole connect limit."""
    monkeypatch.setattr(dialing, "ATTEMPT_DELAY_SECONDS", 0.02)
    with silent() as lost, listening() as alive:
        async with asyncio.timeout(10):
            with await first_connected(asyncio.get_running_loop(), [lost, alive]) as connected:
                assert connected.getpeername() == alive.sockaddr
    await asyncio.sleep(0.01)  # for the loser to be closed: a socket left open would be a warning


async def test_all_that_failed_is_told() -> None:
    """The error names every address."""
    with refusing() as one, refusing() as other:
        with pytest.raises(OSError, match=r".*;.*"):
            await first_connected(asyncio.get_running_loop(), [one, other])
        with pytest.raises(ConnectionRefusedError):
            await first_connected(asyncio.get_running_loop(), [one])


async def test_giving_up_ends_all_attempts() -> None:
    """Cancelled in the middle, nothing stays open."""
    with silent() as one, silent() as other:
        dialing_both = asyncio.ensure_future(first_connected(asyncio.get_running_loop(), [one, other]))
        await asyncio.sleep(0.01)
        dialing_both.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialing_both
        await asyncio.sleep(0.01)


async def test_a_name_of_both_families_of_which_one_serves() -> None:
    """A name is ::1 first, where nobody listens: 127.0.0.1 is used."""
    loop = asyncio.get_running_loop()

    class Resolver:
        """The loop, with a resolver that knows both addresses of every name."""

        def __getattr__(self, name: str) -> object:
            return getattr(loop, name)

        async def getaddrinfo(self, host: str, port: int, **_: object) -> list[object]:
            six = (V6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("::1", port, 0, 0))
            return [six, (V4, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", port))]

    with listening() as alive, await connected_socket(Resolver(), "engine", alive.sockaddr[1]) as connected:
        assert connected.getpeername() == alive.sockaddr


async def test_localhost() -> None:
    """An upstream by name gets the name as its host header, and small writes leave at once."""
    async with asyncio.timeout(10), ScriptedUpstream(always(answer(b"here"))) as upstream:
        transport = UpstreamTransport(f"http://localhost:{upstream.port}")
        response = await transport.send(b"GET", b"/", [])
        assert await response.read_all(100) == b"here"
        assert upstream.requests[0].header("host") == f"localhost:{upstream.port}"
        (connection,) = transport._pool._idle
        connected = connection._transport.get_extra_info("socket")
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await transport.aclose()


async def test_a_name_of_which_no_address_serves() -> None:
    """Refused everywhere is a failed connection, told at once."""
    with refusing() as dead:
        transport = UpstreamTransport(
            f"http://localhost:{dead.sockaddr[1]}", timeouts=TransportTimeouts(connect_seconds=60)
        )
        async with asyncio.timeout(10):
            with pytest.raises(ConnectFailed, match=r"refused|failed") as caught:
                await transport.send(b"GET", b"/", [])
        assert not caught.value.timed_out
        assert transport.in_use == 0
