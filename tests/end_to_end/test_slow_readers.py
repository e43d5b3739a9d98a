"""Clients that read slowly, or not at all: the engine waits for them, the gateway's memory does not grow."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import pairwise
from statistics import median

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.processes import open_sockets, resident_bytes
from tests.support.raw_client import RawClient, chat, post_chat
from tests.support.scripted_engine import (
    DONE,
    END,
    FINISH,
    ROLE,
    ScriptedEngine,
    plain,
    scripted_engine,
    token,
)
from tests.support.scripted_upstream import STREAM_HEAD, RecordedRequest, ScriptedConnection, chunk

pytestmark = pytest.mark.anyio

MEGABYTE = 1 << 20
READERS = 20
OFFERED_BYTES = 200 * MEGABYTE
"""To each of them, as fast as it is taken."""
GROWTH_BYTES_MAX = 50 * MEGABYTE
WRITE_IDLE_SECONDS = 2
SLOW_BYTES = 64 * MEGABYTE
STEADY = "steady"
STEADY_TOKENS = 30
STEADY_SECONDS = 0.02
KERNEL_BYTES_MAX = 16 * MEGABYTE
"""What the kernel may hold in the sockets on both sides of the gateway."""
PIECE = b"".join(chunk(token("x" * 900)) for _ in range(64))


class Offer:
    """An engine that streams as fast as it is let, and counts what was taken from it. Who asks for a steady
    stream gets a token every now and then."""

    def __init__(self, length: int = OFFERED_BYTES) -> None:
        self._length = length
        self.connections: list[ScriptedConnection] = []
        self._sent_before: list[int] = []

    async def __call__(self, connection: ScriptedConnection, request: RecordedRequest) -> None:
        if STEADY.encode() in request.body:
            await _steady(connection)
            return
        end = connection.sent_bytes + self._length
        self._sent_before.append(connection.sent_bytes)
        self.connections.append(connection)
        await connection.send(STREAM_HEAD + chunk(ROLE))
        while connection.sent_bytes < end:
            await connection.send(PIECE)
        await connection.send(chunk(FINISH) + chunk(DONE) + END)

    @property
    def taken_bytes(self) -> list[int]:
        """By connection, in the order in which they came."""
        pairs = zip(self.connections, self._sent_before, strict=True)
        return [connection.sent_bytes - before for connection, before in pairs]

    async def stands_still(self) -> None:
        """Wait until nothing more is taken for a while."""
        taken = [-1]
        while taken != self.taken_bytes:
            taken = self.taken_bytes
            await asyncio.sleep(0.2)


async def _steady(connection: ScriptedConnection) -> None:
    await connection.send(STREAM_HEAD)
    for _ in range(STEADY_TOKENS):
        await connection.send(chunk(token("x")))
        await asyncio.sleep(STEADY_SECONDS)  # the story: an engine's pace
    await connection.send(chunk(FINISH) + chunk(DONE) + END)


async def steady_gap(gateway: GatewayProcess) -> float:
    """Median time between the tokens of a steady stream, in seconds."""
    loop = asyncio.get_running_loop()
    came_at = []
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(chat(STEADY, stream=True)))
        await client.head()
        while piece := await client.chunk():
            came_at += [loop.time()] if b'"x"' in piece else []
    assert len(came_at) > STEADY_TOKENS // 2
    return median(after - before for before, after in pairwise(came_at))


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url}],
        "server": {"write_idle_seconds": WRITE_IDLE_SECONDS},
        "upstream_timeouts": {"idle_seconds": 0.5},
        "capacity": {"tokens_per_second": 1_000_000_000},  # these streams are long
    }
    async with running_gateway(settings) as gateway:
        yield gateway


async def test_readers_that_take_nothing(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """The engine's writes block, memory stays small, another's stream keeps its pace; then the idle readers
    are dropped, their connections with them, and it is not called the engine's silence."""
    engine.play = offer = Offer()
    alone = await steady_gap(gateway)
    sockets, memory = open_sockets(gateway.pid), resident_bytes(gateway.pid)
    async with AsyncExitStack() as stack:
        for n in range(READERS):
            reader = await stack.enter_async_context(RawClient(gateway.port, receive_buffer_bytes=8192))
            await reader.send(post_chat(chat(stream=True), id=f"idle-{n}"))
        await eventually(lambda: len(offer.connections) == READERS)
        await offer.stands_still()
        assert all(taken < KERNEL_BYTES_MAX for taken in offer.taken_bytes)
        beside = await steady_gap(gateway)
        grown = resident_bytes(gateway.pid) - memory
        print(
            f"{READERS} readers, {OFFERED_BYTES / MEGABYTE:.0f} MiB offered to each, "
            f"{sum(offer.taken_bytes) / MEGABYTE:.0f} MiB taken from all of them; "
            f"resident {memory / MEGABYTE:.1f} MiB before, {grown / MEGABYTE:.1f} MiB more; "
            f"another's gap {alone * 1000:.1f} ms before, {beside * 1000:.1f} ms beside them"
        )
        assert grown < GROWTH_BYTES_MAX
        assert beside < 1.5 * alone + 0.02
        for n in range(READERS):
            line = await gateway.ending(f"idle-{n}")
            assert (line["outcome"], line["status"]) == ("client_stalled", 200)
            assert line["output_tokens"] > 0
        await eventually(lambda: open_sockets(gateway.pid) <= sockets + 2)
        assert all(connection.peer_closed.is_set() for connection in offer.connections)


async def test_a_reader_that_takes_nothing_of_a_large_answer(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """A plain answer that nobody reads does not hold its place for ever either."""
    engine.play = plain(b'{"choices":[],"x":"' + b"x" * (32 * MEGABYTE) + b'"}')
    sockets = open_sockets(gateway.pid)
    async with RawClient(gateway.port, receive_buffer_bytes=8192) as client:
        await client.send(post_chat(chat(), id="large"))
        assert (await gateway.ending("large"))["outcome"] == "client_stalled"
        await eventually(lambda: open_sockets(gateway.pid) <= sockets + 2)


async def test_a_reader_that_is_slow(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Who takes a little now and then keeps the stream, to its end, though it lasts longer than the time
    after which an idle reader is dropped."""
    engine.play = offer = Offer(SLOW_BYTES)
    began = asyncio.get_running_loop().time()
    async with RawClient(gateway.port, receive_buffer_bytes=65536) as client:
        await client.send(post_chat(chat(stream=True), id="slow"))
        await client.head()
        while asyncio.get_running_loop().time() < began + 1.5 * WRITE_IDLE_SECONDS:
            await client.read(256 * 1024)
            await asyncio.sleep(0.1)  # this is what slow means
        assert offer.taken_bytes[0] < SLOW_BYTES
        assert not gateway.endings("slow")
        rest = b""
        while not rest.endswith(b"0\r\n\r\n"):
            rest = rest[-8:] + await client._reader.read(MEGABYTE)
    line = await gateway.ending("slow")
    assert (line["outcome"], line["status"]) == ("completed", 200)


async def test_a_reader_that_leaves_unread_what_came(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """A reader that stops reading and then goes away frees everything without waiting to be found idle."""
    engine.play = offer = Offer()
    async with RawClient(gateway.port, receive_buffer_bytes=8192) as client:
        await client.send(post_chat(chat(stream=True), id="gone"))
        await eventually(lambda: bool(offer.taken_bytes) and offer.taken_bytes[0] > MEGABYTE)
    assert (await gateway.ending("gone"))["outcome"] == "client_gone_streaming"
    await eventually(lambda: offer.connections[0].peer_closed.is_set())
