"""A run: gateways before the counting engine, an open load, and something that happens meanwhile."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from gateway.policy.request import Priority
from tests.benchmarks.fleet.figures import FIRST_TOKEN_SECONDS, Observed
from tests.benchmarks.fleet.load import Arrival, Clients
from tests.benchmarks.proxy_cost.cpu_time import machine_cpu_seconds
from tests.support.fleet_processes import Admitted, CountingEngine, replica_settings
from tests.support.gateway_process import GatewayProcess

CAPACITY = 24_000.0
"""Tokens per second; with the mean cost of a request, 80 requests/s."""
MIN_BURST_TOKENS = 1640
"""The default's part of the default capacity, more or less."""
ENGINE_SECONDS = 0.02
LEASE_SECONDS = 10.0


def settings(engine_url: str, store_url: str | None, capacity: float = CAPACITY) -> dict[str, Any]:
    """A fixed budget that is the only thing in the way; who waits for it does so for less than a run."""
    own: dict[str, Any] = {
        "capacity": {"tokens_per_second": capacity, "min_burst_tokens": MIN_BURST_TOKENS},
        "controller": {"law": "static"},
        "classes": {
            "P0": {"slo": {"ttft_seconds": FIRST_TOKEN_SECONDS}},
            "P1": {"max_throttle_seconds": 2.0},
            "P2": {"max_throttle_seconds": 8.0},
        },
    }
    if store_url is not None:
        own["fleet"] = {"slice_seconds": 0.1, "lease_seconds": LEASE_SECONDS, "call_seconds_max": 0.5}
    return replica_settings(engine_url, store_url, own)


class Stage:
    """What a story has in its hands while the load runs."""

    def __init__(self, gateways: Sequence[GatewayProcess], engine: CountingEngine, capacity: float) -> None:
        self.gateways = list(gateways)
        self.engine = engine
        self.capacity = capacity
        self.clients = Clients([gateway.port for gateway in gateways])
        self._began = asyncio.get_running_loop().time()
        self._former: list[GatewayProcess] = []

    def replace(self, index: int, gateway: GatewayProcess) -> None:
        """Another one takes this one's place, for the clients too."""
        self._former.append(self.gateways[index])
        self.gateways[index] = gateway
        self.clients.ports[index] = gateway.port

    @property
    def now(self) -> float:
        """Seconds since the load began."""
        return asyncio.get_running_loop().time() - self._began

    async def until(self, at: float) -> None:
        await asyncio.sleep(max(at - self.now, 0.0))

    async def run(self, coming: Sequence[Arrival], seconds: float, story: "Story | None" = None) -> Observed:
        """The load is `seconds` long; a story that lasts longer is waited for."""
        self._began, wall_clock = asyncio.get_running_loop().time(), time.time()
        self.engine.admitted.clear()
        busy_before = machine_cpu_seconds()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.clients.run(coming))
            if story is not None:
                group.create_task(story(self))
        elapsed = self.now
        arrived = [replace(one, at=one.at - self._began) for one in self.engine.admitted]
        admitted = [
            one for gateway in (*self.gateways, *self._former) for one in _let_go(gateway, wall_clock)
        ]
        admitted.sort(key=lambda one: one.at)
        busy = (machine_cpu_seconds() - busy_before) * seconds / elapsed
        return Observed(self.capacity, seconds, admitted, arrived, self.clients.asked, busy)


def _let_go(gateway: GatewayProcess, began: float) -> Iterator[Admitted]:
    """What its log has of requests that went to the engine. `began`: of the run, seconds since 1970."""
    for line in gateway.endings():
        if line["upstream"] is not None:
            ended_at = datetime.fromisoformat(line["ts"]).timestamp()
            at = ended_at - (line["duration_ms"] - line["queue_ms"]) / 1000 - began
            yield Admitted(at, Priority[line["priority"]], round(line["cost"]), 0)


Story = Callable[[Stage], Coroutine[Any, Any, None]]
