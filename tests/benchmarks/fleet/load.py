"""An open load on several gateways: requests come when they come, each to the replica that chance gives it.

A request that finds a replica closing (connection refused, hung up on without an answer, 503) goes to another
one, as behind a balancer. Every attempt is on a connection of its own, so that none dies of an idle one.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from gateway.policy.request import PRIORITIES, Priority
from tests.benchmarks.proxy_cost.client import Connection, Exchange
from tests.support.fleet_processes import asking

MEAN_COST = 300
COST_MAX = 1500
OVERLOAD = (0.8, 0.8, 0.4)
"""In parts of C by class: twice C, and more than its share of each."""
UNEVEN = (0.8, 0.15, 0.05)
"""Of three replicas."""
ATTEMPTS_MAX = 8
BETWEEN_ATTEMPTS_SECONDS = 0.05
ANSWER_SECONDS_MAX = 30.0
LAST_ANSWERS_SECONDS = 1.5
"""Who still waits so long after the last arrival is not waited for."""


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    """Seconds from the beginning."""
    number: int
    replica: int
    priority: Priority
    cost: int


def arrivals(
    capacity: float,
    seconds: float,
    seed: int,
    load: Sequence[float] = OVERLOAD,
    weights: Sequence[float] = UNEVEN,
) -> list[Arrival]:
    """Poisson, the sizes log-normal. What comes, and when, does not depend on the weights' number."""
    chance, where = Random(seed), Random(seed + 1)
    found: list[Arrival] = []
    for priority, part in zip(PRIORITIES, load, strict=True):
        at = 0.0
        while part and (at := at + chance.expovariate(part * capacity / MEAN_COST)) < seconds:
            cost = min(round(MEAN_COST * chance.lognormvariate(-0.32, 0.8)), COST_MAX)
            replica = where.choices(range(len(weights)), weights)[0]
            found.append(Arrival(at, len(found), replica, priority, max(cost, 1)))
    return sorted(found, key=lambda arrival: arrival.at)


@dataclass(slots=True)
class Asked:
    """One request and what became of it."""

    arrival: Arrival
    status: int | None = None
    """Of the last attempt; None: no answer, or it was not waited for."""
    first_byte_seconds: float | None = None
    """From its arrival, of a good answer."""
    turned_away: list[str] = field(default_factory=list)
    """By whom it was sent on, in words."""
    given_up: bool = False
    """The run ended while it waited."""

    @property
    def failed(self) -> bool:
        """Neither answered nor refused by the policy."""
        return not self.given_up and self.status not in (200, 429)


class Clients:
    """`ports` of the replicas, in their order; whoever stops one puts the next one's there, or None."""

    def __init__(self, ports: Sequence[int | None]) -> None:
        self.ports = list(ports)
        self.asked: list[Asked] = []

    async def run(self, coming: Sequence[Arrival]) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        calls = []
        for arrival in coming:
            if (ahead := began + arrival.at - clock()) > 0:
                await asyncio.sleep(ahead)
            asked = Asked(arrival)
            self.asked.append(asked)
            calls.append(asyncio.create_task(self._ask(asked)))
        _, late = await asyncio.wait(calls, timeout=LAST_ANSWERS_SECONDS)
        for call in late:
            call.cancel()
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, Exception):
                raise answer

    async def _ask(self, asked: Asked) -> None:
        arrival = asked.arrival
        began = time.perf_counter_ns()
        request = _request(arrival)
        try:
            for attempt in range(ATTEMPTS_MAX):
                which = (arrival.replica + attempt) % len(self.ports)
                exchange = await self._attempt(which, request, asked)
                if exchange is None:
                    await asyncio.sleep(BETWEEN_ATTEMPTS_SECONDS * (attempt >= len(self.ports) - 1))
                    continue
                asked.status = exchange.status
                if exchange.status == 200:
                    asked.first_byte_seconds = (exchange.read_at[0] - began) / 1e9
                return
        except asyncio.CancelledError:
            asked.given_up = True
            raise

    async def _attempt(self, which: int, request: bytes, asked: Asked) -> Exchange | None:
        """None: it is to go to another replica."""
        port = self.ports[which]
        if port is None:
            asked.turned_away.append("known to be away")
            return None
        try:
            connection = await Connection.open(f"http://127.0.0.1:{port}")
        except OSError:
            asked.turned_away.append("refused connection")
            return None
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                exchange = await connection.exchange(request)
        except OSError as error:  # a time-out is one too
            asked.turned_away.append("no answer in time" if isinstance(error, TimeoutError) else "hung up on")
            return None
        finally:
            connection.close()
        if exchange.status == 503:
            asked.status = 503
            asked.turned_away.append("503")
            return None
        return exchange


def _request(arrival: Arrival) -> bytes:
    """P0 reads a stream, so that its first token is known."""
    streams = arrival.priority is Priority.P0
    body = json.dumps(asking(arrival.priority, arrival.cost, arrival.number, stream=streams)).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
        f"x-request-priority: {arrival.priority.name}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
