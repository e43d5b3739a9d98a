"""Three gateways as processes with one budget, and all that can befall the store between them."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.support.fleet_processes import (
    MODEL,
    PAUSE_SECONDS,
    CountingEngine,
    ask,
    counting_engine,
    crowd,
    fleet,
    in_state,
    replica_settings,
    standings,
    state_changes,
)
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.store_servers import StoreServer, store_server

pytestmark = pytest.mark.anyio

CAPACITY = 30_000.0
REPLICAS = 3
FREE, NARROW, WIDE = "key-free", "key-narrow", "key-wide"
METERED, METERED_TOO = "key-metered", "key-metered-too"
NARROW_PLACES, WIDE_PLACES = 2, 6
SMALL_ENGINE = "few-places"
"""The model of an engine that takes no more than WIDE_PLACES requests at once."""
PER_MINUTE = 6_000
METERED_COST = 200
KEYS: dict[str, dict[str, Any]] = {
    FREE: {"tenant": "free"},
    NARROW: {"tenant": "narrow", "max_in_flight": NARROW_PLACES},
    WIDE: {"tenant": "wide", "max_in_flight": WIDE_PLACES},
    METERED: {"tenant": "metered", "tokens_per_minute": PER_MINUTE},
    METERED_TOO: {"tenant": "metered too", "tokens_per_minute": PER_MINUTE},
}
RULES = {"slice_seconds": 0.05, "lease_seconds": 3.0, "call_seconds_max": 0.3}
"""The lease leaves more than a second between `holding` and `alone`."""
CALM_SECONDS_MAX = 3.0
"""No request takes so long: nothing of it waits for the store."""
QUICK_SECONDS, SLOW_SECONDS = 0.02, 0.2
"""Of an answer; slow ones are under way several at once."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    with store_server("valkey") as server:
        yield server


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[CountingEngine]:
    async with counting_engine(QUICK_SECONDS) as engine:
        yield engine


def settings(engine: CountingEngine, store_url: str, **rules: object) -> dict[str, Any]:
    engines: list[dict[str, Any]] = [
        {"name": "gpu0", "models": [MODEL], "max_in_flight": None},
        {"name": "gpu1", "models": [SMALL_ENGINE], "max_in_flight": WIDE_PLACES},
    ]
    each: dict[str, Any] = {"url": engine.url, "tokens_per_second": CAPACITY / len(engines)}
    own = {
        "upstreams": [{**one, **each} for one in engines],
        "controller": {"law": "static"},
        "fleet": {**RULES, **rules},
    }
    return replica_settings(engine.url, store_url, own)


@pytest.fixture(scope="module")
async def started(server: StoreServer, engine: CountingEngine) -> AsyncIterator[list[GatewayProcess]]:
    async with fleet(settings(engine, server.url), REPLICAS, keys=KEYS) as gateways:
        yield gateways


@pytest.fixture
async def gateways(started: list[GatewayProcess], engine: CountingEngine) -> list[GatewayProcess]:
    """Sharing, the engine quick and nothing counted yet."""
    await sharing(started)
    engine.seconds = QUICK_SECONDS
    engine.admitted.clear()
    engine.most_in_flight = 0
    return started


# ---------------------------------------------------------------------- what is looked at


def metered_at_most(seconds: float) -> float:
    """A minute's tokens, what flows in meanwhile, and one request."""
    return PER_MINUTE + PER_MINUTE / 60 * seconds + METERED_COST


def admitted_tokens(engine: CountingEngine) -> int:
    return sum(one.cost for one in engine.admitted)


def most_of_a_minute(engine: CountingEngine) -> bool:
    return admitted_tokens(engine) >= 0.8 * PER_MINUTE


async def sharing(gateways: Sequence[GatewayProcess]) -> None:
    """All of them, and their logs have come as far: a line may come later than the metric."""
    await in_state("shared", gateways)
    await eventually(lambda: all("reason" not in state_changes(gateway)[-1] for gateway in gateways))


async def whole_budget(gateways: Sequence[GatewayProcess]) -> bool:
    """Their rates add up to all of it, but for what is on its way from one to another."""
    return sum(s.rate for s in await standings(gateways)) >= 0.97 * CAPACITY


async def one_budget_by_one_law(gateways: Sequence[GatewayProcess]) -> bool:
    """Nobody is read at the same instant as another, so this need not hold while parts move."""
    told = await standings(gateways)
    whole = 0.97 * CAPACITY <= sum(s.rate for s in told) <= 1.01 * CAPACITY
    return whole and sum(s.leads for s in told) == 1


async def equal_parts(gateways: Sequence[GatewayProcess]) -> bool:
    part = pytest.approx(CAPACITY / len(gateways), rel=0.01)
    return all(standing.rate == part for standing in await standings(gateways))


async def store_calls(gateways: Sequence[GatewayProcess], result: str) -> float:
    pages = [await gateway.metrics() for gateway in gateways]
    return sum(page.total("fleet_store_calls_total", result=result) for page in pages)


# ---------------------------------------------------------------------- sharing


async def test_replicas_have_one_budget_and_one_leader(gateways: list[GatewayProcess]) -> None:
    """Three know each other, their rates add up to C, and the law of one of them counts."""
    await eventually(lambda: one_budget_by_one_law(gateways))
    assert [s.replicas for s in await standings(gateways)] == [REPLICAS] * REPLICAS


async def test_places_of_a_key_are_counted_over_all_replicas(
    gateways: list[GatewayProcess], engine: CountingEngine
) -> None:
    """Of a key with two places, fewer than replicas, the engine never has a third request; none is refused
    for good."""
    engine.seconds = SLOW_SECONDS

    async def until_served(client: httpx.AsyncClient, gateway: GatewayProcess) -> None:
        while (status := await ask(client, gateway, NARROW)) != 200:
            assert status == 429
            await asyncio.sleep(PAUSE_SECONDS)

    async with asyncio.timeout(30), httpx.AsyncClient(trust_env=False, timeout=20) as client:
        await asyncio.gather(*(until_served(client, gateway) for gateway in gateways for _ in range(4)))
    assert len(engine.admitted) == 12
    assert engine.most_in_flight <= NARROW_PLACES


async def test_tokens_per_minute_of_a_tenant_are_counted_over_all_replicas(
    gateways: list[GatewayProcess], engine: CountingEngine
) -> None:
    """A minute's tokens and what flows in meanwhile, whichever replicas are asked; most of it is used."""
    began = time.monotonic()
    async with crowd(gateways, METERED, cost=METERED_COST) as answers:
        await eventually(lambda: most_of_a_minute(engine), seconds=20)
        refused = answers.statuses[429]
        await eventually(lambda: answers.statuses[429] >= refused + 12, seconds=20)
    assert admitted_tokens(engine) <= metered_at_most(time.monotonic() - began)
    assert answers.statuses.keys() == {200, 429}


# ---------------------------------------------------------------------- the store goes away


async def test_a_killed_store_costs_no_request(gateways: list[GatewayProcess], server: StoreServer) -> None:
    """Shares are held, then local, then shared again; every replica stays live and ready, and says each
    change once."""
    seen = [len(state_changes(gateway)) for gateway in gateways]
    async with crowd(gateways, FREE) as answers:
        server.stop()
        try:
            await in_state("alone", gateways)
            await eventually(lambda: equal_parts(gateways))  # some time after the lease has ended
            async with httpx.AsyncClient(trust_env=False) as client:
                for gateway in gateways:
                    for path in ("/healthz", "/readyz"):
                        assert (await client.get(gateway.api + path)).status_code == 200
        finally:
            server.start()
        await sharing(gateways)
        await eventually(lambda: whole_budget(gateways))
    assert answers.statuses.keys() == {200}
    assert answers.slowest_seconds < CALM_SECONDS_MAX
    for gateway, before in zip(gateways, seen, strict=True):
        changes = state_changes(gateway)[before:]
        assert [line["before"] for line in changes] == ["shared", "holding", "alone"]
        assert [bool(line.get("reason")) for line in changes] == [True, True, False]


@pytest.mark.parametrize(
    ("key", "model", "told"),
    [pytest.param(WIDE, MODEL, {200, 429}, id="key"), pytest.param(FREE, SMALL_ENGINE, {200}, id="engine")],
)
async def test_places_hold_while_the_store_is_away(
    gateways: list[GatewayProcess],
    engine: CountingEngine,
    server: StoreServer,
    key: str,
    model: str,
    told: set[int],
) -> None:
    """Each replica has its part of them: never are more in use than the limit, before, meanwhile, after."""
    engine.seconds = SLOW_SECONDS
    async with crowd(gateways, key, each=4, model=model) as answers:
        server.stop()
        try:
            await in_state("alone", gateways)
            engine.admitted.clear()
            await eventually(lambda: len(engine.admitted) >= 3 * WIDE_PLACES)
        finally:
            server.start()
        await in_state("shared", gateways)
        engine.admitted.clear()
        await eventually(lambda: len(engine.admitted) >= 3 * WIDE_PLACES)
    assert engine.most_in_flight <= WIDE_PLACES
    assert answers.statuses.keys() <= told


async def test_a_tenants_minute_is_not_granted_twice(
    gateways: list[GatewayProcess], engine: CountingEngine, server: StoreServer
) -> None:
    """Neither by a store that was emptied, nor by one that comes back empty, nor by replicas alone."""
    began = time.monotonic()
    async with crowd(gateways, METERED_TOO, cost=METERED_COST) as answers:
        await eventually(lambda: most_of_a_minute(engine), seconds=20)
        refused = answers.statuses[429]
        await eventually(lambda: answers.statuses[429] >= refused + 3, seconds=20)
        with server.client() as client:
            client.flushall()
        await eventually(lambda: answers.statuses[429] >= refused + 20, seconds=20)
        server.stop()
        try:
            await in_state("alone", gateways)
        finally:
            server.start()
        await in_state("shared", gateways)
        refused = answers.statuses[429]
        await eventually(lambda: answers.statuses[429] >= refused + 12, seconds=20)
    assert admitted_tokens(engine) <= metered_at_most(time.monotonic() - began)
    assert answers.statuses.keys() == {200, 429}


async def test_a_frozen_store_keeps_no_request_waiting(
    gateways: list[GatewayProcess], server: StoreServer
) -> None:
    """It accepts connections and says nothing: requests do not notice; after the thaw all is shared again."""
    before = await store_calls(gateways, "timed_out")
    async with crowd(gateways, FREE) as answers:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            await in_state("alone", gateways)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await in_state("shared", gateways)
    assert answers.statuses.keys() == {200}
    assert answers.slowest_seconds < CALM_SECONDS_MAX
    assert await store_calls(gateways, "timed_out") >= before + REPLICAS


async def test_a_read_only_store_is_told_as_such_and_outlived(
    gateways: list[GatewayProcess], server: StoreServer
) -> None:
    """As after a failover, until the address leads to the new primary."""
    async with crowd(gateways, FREE) as answers:
        with server.client() as client:
            client.replicaof("127.0.0.1", 1)
            try:

                async def all_have_met_it() -> bool:
                    pages = [await gateway.metrics() for gateway in gateways]
                    return all(page.total("fleet_store_calls_total", result="read_only") for page in pages)

                await eventually(all_have_met_it)
                await in_state("alone", gateways)
            finally:
                client.replicaof("no", "one")
        await in_state("shared", gateways)
        await eventually(lambda: whole_budget(gateways))
    assert answers.statuses.keys() == {200}


async def test_an_emptied_store_is_filled_again_by_those_who_use_it(
    engine: CountingEngine, server: StoreServer
) -> None:
    """FLUSHALL and SCRIPT FLUSH under load: nobody leaves the shared state, no limit is granted twice."""
    engine.seconds = SLOW_SECONDS
    engine.most_in_flight = 0
    # a call that is late on a busy machine has not failed, and is no reason to leave the shared state
    patient = settings(engine, server.url, name="emptied", call_seconds_max=5.0, lease_seconds=20.0)
    async with fleet(patient, 2, keys=KEYS) as gateways:
        await sharing(gateways)
        seen = [len(state_changes(gateway)) for gateway in gateways]
        async with crowd(gateways, WIDE, each=6) as answers:
            await eventually(lambda: answers.statuses[200] >= WIDE_PLACES)
            with server.client() as client:
                client.flushall()
                client.script_flush()
                await eventually(lambda: bool(client.keys("*emptied*")))
            served = answers.statuses[200]
            await in_state("shared", gateways)
            await eventually(lambda: whole_budget(gateways))
            await eventually(lambda: answers.statuses[200] >= served + 2 * WIDE_PLACES)
        assert [state_changes(g)[n:] for g, n in zip(gateways, seen, strict=True)] == [[], []]
    assert answers.statuses.keys() <= {200, 429}
    assert engine.most_in_flight <= WIDE_PLACES


# ---------------------------------------------------------------------- beginnings and ends


async def test_a_wrong_password_keeps_nobody_from_serving(
    engine: CountingEngine, server: StoreServer
) -> None:
    """It is told without the password, the gateway serves its assumed part, and joins once it is let in."""
    with server.client() as client:
        client.acl_setuser("someone", enabled=True, passwords=["+right"], keys=["*"], categories=["+@all"])
        url = f"redis://someone:let-me-in@127.0.0.1:{server.port}/0"
        async with running_gateway(settings(engine, url, name="guarded", replicas_assumed=2)) as gateway:
            (told,) = await standings([gateway])
            assert told.state == "joining"
            assert told.rate == pytest.approx(CAPACITY / 2, rel=0.01)
            await eventually(lambda: _denied(gateway))
            async with httpx.AsyncClient(trust_env=False) as http:
                assert await ask(http, gateway, FREE) == 200
            client.acl_setuser("someone", enabled=True, passwords=["+let-me-in"])
            await in_state("shared", [gateway])
            page = await gateway.metrics()
        assert not any("let-me-in" in line for line in (*gateway.lines, page.text))


async def _denied(gateway: GatewayProcess) -> bool:
    return bool((await gateway.metrics()).total("fleet_store_calls_total", result="denied"))


async def test_without_a_store_from_the_start_each_has_its_assumed_part(
    engine: CountingEngine, server: StoreServer
) -> None:
    """Three that never meet do not have three times the limit: of six places of a key each gives two."""
    engine.most_in_flight = 0
    engine.released = asyncio.Event()
    nobody = f"redis://127.0.0.1:{_unused_port()}/0"
    try:
        async with (
            running_gateway(settings(engine, nobody, replicas_assumed=REPLICAS), keys=KEYS) as gateway,
            httpx.AsyncClient(trust_env=False, timeout=20) as client,
        ):
            (told,) = await standings([gateway])
            assert told.state == "joining"
            assert told.rate == pytest.approx(CAPACITY / REPLICAS, rel=0.01)
            calls = [asyncio.create_task(ask(client, gateway, WIDE)) for _ in range(8)]
            part = WIDE_PLACES // REPLICAS
            await eventually(lambda: sum(call.done() for call in calls) == len(calls) - part)
            engine.released.set()
            statuses = Counter(await asyncio.gather(*calls))
        assert statuses == {200: part, 429: len(calls) - part}
        assert engine.most_in_flight == part
    finally:
        engine.released = None


def _unused_port() -> int:
    """Of a server that was never started."""
    return StoreServer("nobody").port


async def test_what_a_killed_replica_held_is_the_others_when_its_lease_ends(
    engine: CountingEngine, server: StoreServer
) -> None:
    """It could say nothing; the store's clock alone tells."""
    async with fleet(settings(engine, server.url, name="mortal"), 2) as (mortal, heir):
        await in_state("shared", [mortal, heir])
        await mortal.kill()
        await in_state("shared", [heir])
        await eventually(lambda: one_budget_by_one_law([heir]))


async def test_a_replica_that_ends_in_good_order_gives_back_at_once(
    engine: CountingEngine, server: StoreServer
) -> None:
    """The other has all of the budget long before a lease of ten minutes would have ended."""
    own = settings(engine, server.url, name="orderly", lease_seconds=600)
    async with fleet(own, 2) as (leaving, staying):
        await in_state("shared", [leaving, staying])
        await leaving.stop()
        await in_state("shared", [staying])
        await eventually(lambda: one_budget_by_one_law([staying]))
