"""Alive and ready: what the gateway says of itself, whatever goes on inside, and how it asks its engines."""

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, ask, chat, get, post_chat, request_head
from tests.support.scripted_engine import (
    Held,
    ScriptedEngine,
    held_plain,
    plain,
    scripted_engine,
)
from tests.support.scripted_upstream import RecordedRequest, ScriptedConnection, answer

pytestmark = pytest.mark.anyio

KEY, SPENT, CREDENTIAL, OPERATOR = "a-client", "a-spent-one", "for-the-engine", "an-operator"
BEARER = ("authorization", f"Bearer {KEY}")
FULL = {"max_queued_requests": 0}


async def _guarded(connection: ScriptedConnection, request: RecordedRequest) -> None:
    known = request.header("authorization") == f"Bearer {CREDENTIAL}"
    await connection.send(answer(status="200 OK" if known else "401 Unauthorized"))


async def _silent(connection: ScriptedConnection, request: RecordedRequest) -> None:
    await connection.peer_closed.wait()


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        engine.probed = _guarded
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    """With one place at its engine and none to wait. The engine wants a credential of its probes; a second
    upstream, of other models, lacks it."""
    often = {"interval_seconds": 0.3, "fail_after": 2}
    one = {"name": "guarded", "url": engine.url, "api_key": CREDENTIAL, "models": ["mock-gpu"]}
    other = {"name": "stranger", "url": engine.url, "models": ["other"]}
    settings = {
        "upstreams": [{**one, "health": often, "max_in_flight": 1}, {**other, "health": often}],
        "server": {"operations_token": OPERATOR},
        "classes": {"P0": FULL, "P1": FULL, "P2": FULL},
        "capacity": {"tokens_per_second": 1_000_000},
    }
    keys = {KEY: {"tenant": "team"}, SPENT: {"tenant": "spent", "requests_per_minute": 0}}
    async with running_gateway(settings, keys=keys, token=OPERATOR) as gateway:
        yield gateway


async def says(gateway: GatewayProcess, alive: int, ready: int) -> bool:
    """Whether liveness and readiness have these statuses, asked without a key, by GET and HEAD and on both
    ports alike."""
    for path, expected in (("/healthz", alive), ("/readyz", ready)):
        for port in (gateway.port, gateway.operations_port):
            async with RawClient(port) as client:
                await client.send(get(path))
                if (await client.response()).status != expected:
                    return False
                await client.send(request_head("HEAD", path))
                if (await client.response("HEAD")).status != expected:
                    return False
    return True


async def test_probes_log_in(gateway: GatewayProcess) -> None:
    """The engine is healthy for the upstream that has its credential, and for the other it is not."""
    await eventually(
        lambda: any(line["event"] == "upstream is down" for line in gateway.log),
    )
    (down,) = (line for line in gateway.log if line["event"] == "upstream is down")
    assert (down["upstream"], down["reason"]) == ("stranger", "probe of /health got 401")
    page = await gateway.metrics()
    assert page.total("upstream_healthy", upstream="guarded") == 1
    assert page.total("upstream_healthy", upstream="stranger") == 0


async def test_neither_queue_nor_limits_nor_keys(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """While no place is free, none may wait, and a key has no requests left, both are answered."""
    engine.play = held = held_plain()
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(chat(), [BEARER]))
        await held.begun.wait()
        for key, outcome in ((KEY, "rejected_queue_full"), (SPENT, "rejected_rate")):
            refused = await ask(gateway.port, post_chat(chat(), [("x-api-key", key)]))
            assert refused.header("x-qos-outcome") == outcome
        assert await says(gateway, 200, 200)
        held.released.set()
        assert (await client.response()).status == 200


async def test_dead_engines_do_not_make_a_dead_gateway(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """Ready is who can serve: not while no engine is up, again when one is. Alive it is all along."""

    for failing in (plain(status="500 Internal Server Error"), _silent):
        engine.probed = failing
        await eventually(lambda: says(gateway, 200, 503))
        engine.probed = _guarded
        await eventually(lambda: says(gateway, 200, 200))


async def test_draining(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Not ready any more, but alive to the end. (The last in this module: it ends the gateway.)"""
    engine.play = held = Held()
    await eventually(gateway.is_ready)
    async with asyncio.timeout(20), RawClient(gateway.port) as client:
        await client.send(get("/v1/models", [BEARER]))
        await held.begun.wait()
        gateway.signal(signal.SIGTERM)
        await eventually(lambda: says(gateway, 200, 503))
        held.released.set()
    await gateway.stop()
