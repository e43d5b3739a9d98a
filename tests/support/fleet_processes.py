"""Several gateways with one budget as processes, before one engine that counts what they let through.

    async with counting_engine() as engine, fleet(replica_settings(engine.url, server.url)) as gateways:
        await in_state("shared", gateways)
        ...  # engine.admitted, engine.most_in_flight

What was admitted is what reached the engine, by one clock and whatever a gateway says of itself. A request
says in its `user` field which one it is, of which class, and what it costs: `asking(...)` makes one whose
estimate is exact, since it gives token ids and output is free.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from gateway.policy.request import PRIORITIES, Priority
from tests.support.gateway_process import GatewayProcess, Settings, laid_over, running_gateway
from tests.support.loops import eventually
from tests.support.scripted_engine import (
    DONE,
    END,
    FINISH,
    ScriptedEngine,
    plain,
    scripted_engine,
    token,
    usage_event,
    whole_answer,
)
from tests.support.scripted_upstream import STREAM_HEAD, RecordedRequest, ScriptedConnection, chunk

MODEL = "mock-gpu"
PAUSE_SECONDS = 0.1
"""Of a client, from an answer to the next request."""
STATES = ("joining", "shared", "holding", "alone")
_ASKED = re.compile(rb'"user":\s*"(P\d)/(\d+)/(\d+)"')
_SAMPLE = re.compile(
    r"^qos_gateway_(fleet_state|fleet_replicas|fleet_leader|bucket_rate_tokens_per_second)"
    r"(?:\{(.*?)\})? (\S+)$",
    re.MULTILINE,
)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

# ---------------------------------------------------------------------- the engine


@dataclass(frozen=True, slots=True)
class Admitted:
    at: float
    """Seconds on the event loop's clock."""
    priority: Priority
    cost: int
    number: int


class CountingEngine:
    """Answers after `seconds`, or when what a test has put into `released` is set."""

    def __init__(self, engine: ScriptedEngine, seconds: float) -> None:
        self._engine = engine
        self.seconds = seconds
        self.admitted: list[Admitted] = []
        self.in_flight = self.most_in_flight = 0
        self.released: asyncio.Event | None = None
        engine.play = self._play

    @property
    def url(self) -> str:
        return self._engine.url

    async def _play(self, connection: ScriptedConnection, request: RecordedRequest) -> None:
        found = _ASKED.search(request.body)
        assert found, "not made by `asking`"
        priority, cost, number = Priority[found[1].decode()], int(found[2]), int(found[3])
        self.admitted.append(Admitted(asyncio.get_running_loop().time(), priority, cost, number))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.released is not None:
                await self.released.wait()
            else:
                await asyncio.sleep(self.seconds)
        finally:
            self.in_flight -= 1
        if b'"stream": true' in request.body:
            events = (token("Good day"), FINISH, usage_event(cost, 1), DONE)
            await connection.send(STREAM_HEAD + b"".join(map(chunk, events)) + END)
        else:
            await plain(whole_answer(cost, 1))(connection, request)


@asynccontextmanager
async def counting_engine(seconds: float = 0.0) -> AsyncIterator[CountingEngine]:
    async with scripted_engine() as engine:
        yield CountingEngine(engine, seconds)


def asking(
    priority: Priority, cost: int, number: int = 0, *, stream: bool = False, model: str = MODEL
) -> dict[str, Any]:
    """The body of a completion that costs so many tokens; to be sent to `/v1/completions`."""
    body: dict[str, Any] = {"user": f"{priority.name}/{cost}/{number}", "model": model, "max_tokens": 1}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body | {"prompt": [1] * cost}


# ---------------------------------------------------------------------- the gateways


def replica_settings(engine_url: str, store_url: str | None, given: Settings | None = None) -> dict[str, Any]:
    """Of one replica; without a store each of them has the whole budget. The budget alone is in the way of a
    request: places are many, and output is free so that an estimate is a cost."""
    own: dict[str, Any] = {
        "upstreams": [{"name": "gpu0", "url": engine_url, "models": [MODEL], "max_in_flight": None}],
        "capacity": {"output_weight": 0},
        "scheduling": {"long_prompt_tokens": 1_000_000, "max_pending_prefill_tokens": 1_000_000},
        "logging": {"format": "json"},
    }
    if store_url is not None:
        own |= {"state": store_url, "fleet": {"name": "qos-gateway"}}
    return laid_over(own, given or {})


@asynccontextmanager
async def fleet(
    settings: Settings, replicas: int = 3, *, keys: Mapping[str, Mapping[str, Any]] | None = None
) -> AsyncIterator[list[GatewayProcess]]:
    """Replicas with the same settings, each ready to serve."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running_gateway(settings, keys=keys)) for _ in range(replicas)]


@dataclass(frozen=True, slots=True)
class Standing:
    """What a replica's metrics say of its place in the fleet."""

    state: str | None
    """None: it has no shared state."""
    replicas: int
    leads: bool
    rates: tuple[float, ...]
    """Of its buckets by class, tokens per second."""

    @property
    def rate(self) -> float:
        return sum(self.rates)

    @classmethod
    def read(cls, page: str) -> "Standing":
        state, replicas, leads, rates = None, 0, False, dict.fromkeys(PRIORITIES, 0.0)
        for name, labels, value in _SAMPLE.findall(page):
            told = dict(_LABEL.findall(labels))
            match name:
                case "fleet_state" if float(value):
                    state = told["state"]
                case "fleet_replicas":
                    replicas = int(float(value))
                case "fleet_leader":
                    leads = bool(float(value))
                case "bucket_rate_tokens_per_second":
                    rates[Priority[told["priority"]]] += float(value)
        return cls(state, replicas, leads, tuple(rates.values()))


async def standings(gateways: Sequence[GatewayProcess]) -> list[Standing]:
    """Of those that run, all asked at once."""
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        asked = [client.get(g.operations + "/metrics") for g in gateways if g.is_running]
        return [Standing.read(page.text) for page in await asyncio.gather(*asked)]


async def in_state(state: str, gateways: Sequence[GatewayProcess], *, seconds: float = 20.0) -> None:
    """Wait until all that run say so, and that they know each other."""
    running = [gateway for gateway in gateways if gateway.is_running]

    async def reached() -> bool:
        told = await standings(running)
        return all(s.state == state and (state != "shared" or s.replicas == len(running)) for s in told)

    await eventually(reached, seconds=seconds)


def state_changes(gateway: GatewayProcess) -> list[dict[str, Any]]:
    """Its log lines that tell in which state it was before, oldest first."""
    return [line for line in gateway.log if line.get("before") in STATES]


# ---------------------------------------------------------------------- clients


@dataclass
class Answers:
    statuses: Counter[int] = field(default_factory=Counter)
    slowest_seconds: float = 0.0


async def ask(
    client: httpx.AsyncClient, gateway: GatewayProcess, key: str, cost: int = 10, model: str = MODEL
) -> int:
    response = await client.post(
        gateway.api + "/v1/completions",
        json=asking(Priority.P1, cost, model=model),
        headers={"authorization": f"Bearer {key}"},
    )
    return response.status_code


@asynccontextmanager
async def crowd(
    gateways: Sequence[GatewayProcess], key: str, *, each: int = 2, cost: int = 10, model: str = MODEL
) -> AsyncIterator[Answers]:
    """Clients that ask again and again, so many at each replica, for the length of the block."""
    answers = Answers()
    ended = asyncio.Event()

    async def keep_asking(client: httpx.AsyncClient, gateway: GatewayProcess) -> None:
        while not ended.is_set():
            began = time.monotonic()
            answers.statuses[await ask(client, gateway, key, cost, model)] += 1
            answers.slowest_seconds = max(answers.slowest_seconds, time.monotonic() - began)
            await asyncio.sleep(PAUSE_SECONDS)

    async with httpx.AsyncClient(trust_env=False, timeout=20) as client, asyncio.TaskGroup() as group:
        for gateway in gateways:
            for _ in range(each):
                group.create_task(keep_asking(client, gateway))
        try:
            yield answers
        finally:
            ended.set()
