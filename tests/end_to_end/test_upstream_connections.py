"""Connections to engines: kept as long as the engine keeps them, opened in time or given up, and none in the
way of another's."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from statistics import median
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, RawResponse, ask, chat, get, post_chat
from tests.support.scripted_engine import (
    DONE,
    END,
    FINISH,
    ROLE,
    ScriptedEngine,
    held_plain,
    plain,
    scripted_engine,
    token,
    whole_answer,
)
from tests.support.scripted_upstream import (
    STREAM_HEAD,
    RecordedRequest,
    ScriptedConnection,
    ScriptedUpstream,
    answer,
    chunk,
)

pytestmark = pytest.mark.anyio

SELDOM = {"health": {"interval_seconds": 600}, "load": {"interval_seconds": 600}}
"""Looked at once at the start: what comes on its connections then are requests."""
CONNECT_SECONDS, FIRST_BYTE_SECONDS, IDLE_SECONDS = 0.5, 3.0, 0.5
THINKING_SECONDS = 1.2
"""Longer than it may take to connect, or than a stream may be silent."""


def settings(*upstreams: dict[str, Any], **given: Any) -> dict[str, Any]:
    return {
        "upstreams": list(upstreams),
        "capacity": {"tokens_per_second": 1_000_000},
        "classes": {"P1": {"max_wait_seconds": 600}},
        "scheduling": {"deadline_drop": False},
        "circuit_breaker": {"failures": 1000},
        **given,
    }


async def of_model(gateway: GatewayProcess, model: str, **members: Any) -> RawResponse:
    return await ask(gateway.port, post_chat(chat(**members) | {"model": model}))


# ── connections that the engine closes ───────────────────────────────────────────────────────────────────

KEPT_SECONDS = 0.2
LANES = 12
ROUNDS = 25
EARLY_SECONDS = 0.01


class Closing:
    """An engine that closes a connection when nothing has come for `KEPT_SECONDS`, at the very moment."""

    def __init__(self) -> None:
        self.generations = self.closed = 0
        self.lost = 0
        """Requests that came on a connection it had closed."""

    async def __call__(self, connection: ScriptedConnection) -> None:
        while True:
            try:
                async with asyncio.timeout(KEPT_SECONDS):
                    if not await connection.received(1):
                        return
            except TimeoutError:
                self.closed += 1
                self.lost += bool(connection.unread)
                return
            request = await connection.request()
            if request is None:
                return
            self.generations += request.method == "POST"
            await connection.send(answer(whole_answer(), headers=("content-type: application/json",)))


async def test_requests_about_the_moment_of_closing() -> None:
    """Once an engine has closed an idle connection the gateway is faster: of three hundred requests, each
    about as long after the last as a connection is kept, none meets one that is being closed."""
    async with AsyncExitStack() as stack:
        engines = [Closing() for _ in range(LANES)]
        upstreams = [await stack.enter_async_context(ScriptedUpstream(each)) for each in engines]
        given = [
            {"name": f"gpu{n}", "url": each.url, "models": [f"model-{n}"], **SELDOM}
            for n, each in enumerate(upstreams)
        ]
        gateway = await stack.enter_async_context(running_gateway(settings(*given)))

        async def lane(n: int) -> None:
            for round in range(ROUNDS):
                response = await of_model(gateway, f"model-{n}")
                assert (response.status, response.body) == (200, whole_answer())
                late = 2 * EARLY_SECONDS * (round * LANES + n) / (ROUNDS * LANES)
                await asyncio.sleep(KEPT_SECONDS - EARLY_SECONDS + late)  # the story: the client's rhythm

        def have_closed() -> bool:
            return all(engine.closed for engine in engines) and not any(u.open_connections for u in upstreams)

        await eventually(have_closed)  # what their probes came on
        await asyncio.gather(*map(lane, range(LANES)))
        assert [engine.generations for engine in engines] == [ROUNDS] * LANES
        assert [engine.lost for engine in engines] == [0] * LANES


# ── each phase has its own limit ─────────────────────────────────────────────────────────────────────────


async def _thinks_long(connection: ScriptedConnection, request: RecordedRequest) -> None:
    await asyncio.sleep(THINKING_SECONDS)  # the story: a long prompt
    if b'"stream": true' in request.body:
        await connection.send(STREAM_HEAD + b"".join(map(chunk, (ROLE, token("x"), FINISH, DONE))) + END)
    else:
        await plain()(connection, request)


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    """An engine that answers, one that answers nothing in time, one whose name nobody knows, and two that
    were there at the start: one refuses connections now, the other lets them wait."""
    async with AsyncExitStack() as stack:
        async with scripted_engine() as gone, scripted_engine() as full:
            upstreams = [
                {"name": name, "url": url, "models": [name], **probed}
                for name, url, probed in (
                    ("good", engine.url, {}),
                    ("hung", engine.url, {}),
                    ("unknown", "http://no-such-host.invalid:8000", {}),
                    ("gone", gone.url, SELDOM),
                    ("full", full.url, SELDOM),
                )
            ]
            timeouts = {
                "connect_seconds": CONNECT_SECONDS,
                "first_byte_seconds": FIRST_BYTE_SECONDS,
                "idle_seconds": IDLE_SECONDS,
                "no_upstream_seconds": 0.2,
            }
            given = settings(*upstreams, upstream_timeouts=timeouts)
            gateway = await stack.enter_async_context(running_gateway(given))
            await eventually(lambda: bool(gone.probes and full.probes))
        port = int(full.url.rpartition(":")[2])
        listener, *fillers = (stack.enter_context(socket.socket()) for _ in range(4))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield gateway


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_an_engine_that_thinks_long(
    gateway: GatewayProcess, engine: ScriptedEngine, stream: bool
) -> None:
    """A first byte later than the limits of connecting and of silence is in time."""
    engine.play = _thinks_long
    response = await of_model(gateway, "good", stream=stream)
    assert (response.status, response.whole) == (200, True)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_an_engine_that_lets_connections_wait(gateway: GatewayProcess, stream: bool) -> None:
    """It is given up after the time for connecting, long before that for an answer."""
    began = asyncio.get_running_loop().time()
    response = await of_model(gateway, "full", stream=stream)
    took = asyncio.get_running_loop().time() - began
    assert response.status in (502, 504)
    assert 0.9 * CONNECT_SECONDS < took < FIRST_BYTE_SECONDS


async def test_engines_that_cannot_be_reached(gateway: GatewayProcess) -> None:
    """One that refuses is told of at once, one without an address is never taken for one."""
    began = asyncio.get_running_loop().time()
    gone = await of_model(gateway, "gone")
    took = asyncio.get_running_loop().time() - began
    unknown = await of_model(gateway, "unknown")
    assert (gone.status, unknown.status) == (502, 503)
    assert took < FIRST_BYTE_SECONDS
    assert [line["upstream"] for line in gateway.log if line["event"] == "upstream is down"] == ["unknown"]


# ── one beside another ───────────────────────────────────────────────────────────────────────────────────


async def served_beside_probes(gateway: GatewayProcess) -> float:
    """A hundred requests for the good engine, and how long liveness took meanwhile: median, in seconds."""
    loop = asyncio.get_running_loop()
    served = [asyncio.create_task(of_model(gateway, "good")) for _ in range(100)]
    seconds = []
    async with RawClient(gateway.port) as prober:
        while not all(task.done() for task in served):
            asked_at = loop.time()
            await prober.send(get("/healthz"))
            assert (await prober.response("GET")).status == 200
            seconds.append(loop.time() - asked_at)
            await asyncio.sleep(0.01)  # the story: a probe every now and then
    assert [task.result().status for task in served] == [200] * 100
    return median(seconds)


async def test_a_hundred_stuck_in_one_engine(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """A hundred for another engine are served meanwhile, and the gateway answers for itself as soon as ever;
    those that are stuck fail by their own time."""
    held, good = held_plain(), plain()

    async def play(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await (held if b'"hung"' in request.body else good)(connection, request)

    engine.play = play
    alone = await served_beside_probes(gateway)
    stuck = [asyncio.create_task(of_model(gateway, "hung")) for _ in range(100)]
    await eventually(lambda: len(held.connections) == 100)
    assert await served_beside_probes(gateway) < 4 * alone + 0.1
    assert [response.status for response in await asyncio.gather(*stuck)] == [504] * 100
