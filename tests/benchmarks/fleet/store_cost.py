"""What sharing costs: calls of the store, whatever the load, and time added to a request."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tests.benchmarks.fleet.shares import REPLICAS
from tests.benchmarks.fleet.stage import settings
from tests.benchmarks.fleet.verdicts import Verdict, at_most, say
from tests.benchmarks.proxy_cost.client import Connection, WrongAnswer, chat_request
from tests.benchmarks.proxy_cost.figures import Spread
from tests.benchmarks.proxy_cost.paced_load import Latency, plain_latency
from tests.benchmarks.proxy_cost.running import Target, running_engine
from tests.support.fleet_processes import fleet, in_state
from tests.support.gateway_process import GatewayProcess
from tests.support.store_servers import StoreServer

PLENTY = 1_000_000_000.0
"""Tokens per second: nobody waits for them."""
CALLS_MAX = 50.0
COUNTED_SECONDS = 10.0
SLOW_PER_SECOND = 5.0
"""At each replica."""
CONNECTIONS_EACH = 8
LATENCY_PER_SECOND = 50.0
LATENCY_SECONDS = 10.0
ADDED_P99_MS_MAX = 1.0
FROM_CLIENTS = (
    "evalsha",
    "eval",
    "script|load",
    "hello",
    "client|setname",
    "client|setinfo",
    "select",
    "auth",
)
"""What comes over a connection; all else is done inside a script, but for this benchmark's own `info`."""


def _settings(engine: Target, store_url: str | None) -> dict[str, Any]:
    own = settings(engine.url, store_url, PLENTY)
    own["upstreams"] = [{**own["upstreams"][0], "models": ["*"]}]
    return own


# ---------------------------------------------------------------------- calls of the store


async def calls(server: StoreServer) -> list[Verdict]:
    async with running_engine() as engine, fleet(_settings(engine, server.url), REPLICAS) as gateways:
        await in_state("shared", gateways)
        say(f"store calls at {SLOW_PER_SECOND:g} requests/s each, {COUNTED_SECONDS:g} s")
        slow = await _counted(server, lambda: _steadily(gateways))
        say(f"store calls at the highest rate, {COUNTED_SECONDS:g} s")
        fast = await _counted(server, lambda: _as_fast_as_it_goes(gateways))
    return [
        *(
            at_most(f"store calls/s of a replica at {rate:,.0f} requests/s each", CALLS_MAX, each, more=more)
            for rate, each, more in (slow, fast)
        ),
        at_most(
            "calls/s at the highest rate, parts of those at the low one", 1.5, fast[1] / slow[1], "{:.2f}"
        ),
    ]


async def _counted(server: StoreServer, load: Callable[[], Awaitable[int]]) -> tuple[float, float, str]:
    """Requests per second, store calls per second, both of one replica, and what the calls were."""
    before = await asyncio.to_thread(_commands, server)
    requests = await load()
    done = await asyncio.to_thread(_commands, server)
    done.subtract(before)
    per_replica = COUNTED_SECONDS * REPLICAS
    sent = {name: count for name, count in done.items() if count and name in FROM_CLIENTS}
    inside = sum(count for name, count in done.items() if name not in (*FROM_CLIENTS, "info"))
    told = ", ".join(f"{name} {count / per_replica:.1f}" for name, count in sent.items())
    more = f"{told}; commands inside the script {inside / per_replica:.0f}/s"
    return requests / per_replica, sum(sent.values()) / per_replica, more


def _commands(server: StoreServer) -> Counter[str]:
    with server.client() as client:
        stats: dict[str, dict[str, int]] = client.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): told["calls"] for name, told in stats.items()})


async def _steadily(gateways: Sequence[GatewayProcess]) -> int:
    async with asyncio.TaskGroup() as group:
        for number, gateway in enumerate(gateways):
            group.create_task(
                plain_latency(
                    gateway.api,
                    {},
                    requests_per_second=SLOW_PER_SECOND,
                    seconds=COUNTED_SECONDS,
                    seed=number,
                )
            )
    return round(SLOW_PER_SECOND * COUNTED_SECONDS * len(gateways))


async def _as_fast_as_it_goes(gateways: Sequence[GatewayProcess]) -> int:
    """On each connection one request after the other."""
    clock = asyncio.get_running_loop().time
    end = clock() + COUNTED_SECONDS

    async def ask(gateway: GatewayProcess) -> int:
        connection = await Connection.open(gateway.api)
        request, count = chat_request(gateway.api, {}, stream=False), 0
        try:
            while clock() < end:
                exchange = await connection.exchange(request)
                if exchange.status != 200:
                    raise WrongAnswer(f"status {exchange.status}")
                count += 1
        finally:
            connection.close()
        return count

    return sum(await asyncio.gather(*(ask(g) for g in gateways for _ in range(CONNECTIONS_EACH))))


# ---------------------------------------------------------------------- added latency


async def latency(server: StoreServer, rounds: int) -> list[Verdict]:
    """One gateway with and one without shared state, under the same load at the same time, so that both meet
    the same machine."""
    async with (
        running_engine() as engine,
        fleet(_settings(engine, server.url), 1) as (shared,),
        fleet(_settings(engine, None), 1) as (alone,),
    ):
        await in_state("shared", [shared])
        pairs = []
        for number in range(rounds):
            say(f"latency, round {number + 1} of {rounds}: {LATENCY_SECONDS:g} s")
            pair = await asyncio.gather(_plain(shared, 2 * number), _plain(alone, 2 * number + 1))
            pairs.append([(told.p50, told.p99) for told in pair])
    p50, p99 = (Spread.of([with_[k] - without[k] for with_, without in pairs]) for k in (0, 1))
    assert p50 is not None
    assert p99 is not None
    bare = Spread.of([without[1] for _, without in pairs])
    assert bare is not None
    return [
        at_most(
            "added P99 of a plain request, ms",
            ADDED_P99_MS_MAX,
            p99.median,
            "{:.2f}",
            f"median of {rounds} differences, {p99.low:.2f} to {p99.high:.2f}; without shared state P99 is "
            f"{bare.median:.2f}, {bare.low:.2f} to {bare.high:.2f}",
        ),
        Verdict("added P50, ms", "", f"{p50.median:.2f} ({p50.low:.2f} to {p50.high:.2f})"),
    ]


def _plain(gateway: GatewayProcess, seed: int) -> Awaitable[Latency]:
    return plain_latency(
        gateway.api, {}, requests_per_second=LATENCY_PER_SECOND, seconds=LATENCY_SECONDS, seed=seed
    )
