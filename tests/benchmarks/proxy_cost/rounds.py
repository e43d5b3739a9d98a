"""The measurement itself: what one contender goes through in one round, and the rounds of all of them."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, replace

from tests.benchmarks.proxy_cost.client import WrongAnswer
from tests.benchmarks.proxy_cost.cpu_time import machine_cpu_seconds, tree_cpu_seconds
from tests.benchmarks.proxy_cost.engine_answers import CHUNKS
from tests.benchmarks.proxy_cost.figures import RoundFigures
from tests.benchmarks.proxy_cost.machine import load_average
from tests.benchmarks.proxy_cost.paced_load import paced_streams, plain_latency
from tests.benchmarks.proxy_cost.running import Target, set_pace
from tests.benchmarks.proxy_cost.wrk import run_wrk

PLAIN_CONNECTIONS = 64
TURN_STREAMS = 128
CLOCK_STREAMS = 200
INTERVAL_MS = 20
"""50 tokens a second."""
HALF_LOAD_PER_SECOND_MAX = 4000
"""More would measure the client."""
SETTLE_SECONDS = 0.2
"""What a load leaves behind (connections to close) is done by then; it is counted with that load."""
SLOW_CHUNK_CPU_US = 200
"""At this cost a core has 5,000 chunks a second: half of what `CLOCK_STREAMS` want."""
WARM_UP_SECONDS = 1
SECONDS_MAX = 90
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Plan:
    rounds: int = 5
    plain_seconds: int = 2
    streams_each: int = 2
    """One after another on each connection."""
    latency_seconds: float = 1.5


QUICK = Plan(rounds=1, plain_seconds=1, streams_each=1, latency_seconds=1.0)


@dataclass
class Contestant:
    """A target in the race. Once it has answered wrongly it is out, and none of its figures count."""

    target: Target
    wrong: str | None = None
    plain_requests: int = 2 * PLAIN_CONNECTIONS
    """What it answers in the time of the plan, as far as the warm-up tells."""
    slow: bool = False
    """Streams cost it so much that it gets one on each connection, and none at a pace it could not keep."""


class Race:
    """`async for step in race.run(): …` tells what comes next; then look at its attributes."""

    def __init__(self, engine: Target, targets: Sequence[Target], plan: Plan) -> None:
        self._engine = engine
        self._plan = plan
        self.contestants = [Contestant(target) for target in targets]
        self.rounds: list[dict[str, RoundFigures]] = []
        self.load_during: list[float] = []
        """The machine's load average at the end of each round."""

    @property
    def steps(self) -> int:
        contestants = len(self.contestants)
        return contestants + self._plan.rounds * (contestants + 1)

    async def run(self) -> AsyncIterator[str]:
        for contestant in self.contestants:
            yield f"warming up {contestant.target.name}"
            await self._guarded(contestant, self._warm_up(contestant))
        for number in range(self._plan.rounds):
            figures: dict[str, RoundFigures] = {}
            self.rounds.append(figures)
            title = f"round {number + 1} of {self._plan.rounds}"
            yield f"{title}: {self._engine.name}"
            direct = figures[self._engine.name] = await self._measure_engine()
            for contestant in self._in_order_of(number):
                yield f"{title}: {contestant.target.name}"
                if contestant.wrong is not None:
                    continue
                measured = await self._guarded(contestant, self._measure(contestant, direct, number))
                if measured is not None:
                    figures[contestant.target.name] = measured
            self.load_during.append(load_average())
        for contestant in self.contestants:
            if contestant.wrong is not None:
                for figures in self.rounds:
                    figures.pop(contestant.target.name, None)

    def _in_order_of(self, number: int) -> list[Contestant]:
        """Each round begins with another one."""
        first = number % max(len(self.contestants), 1)
        return [*self.contestants[first:], *self.contestants[:first]]

    async def _guarded(
        self, contestant: Contestant, step: Awaitable[RoundFigures | None]
    ) -> RoundFigures | None:
        try:
            return await step
        except TimeoutError:
            contestant.wrong = "not done in time"
        except (WrongAnswer, OSError) as error:
            contestant.wrong = str(error) or repr(error)
        return None

    # ------------------------------------------------------------------ steps

    async def _warm_up(self, contestant: Contestant) -> None:
        """Code loaded, pools filled; and the first look at what streams cost."""
        target = contestant.target
        plain = await run_wrk(
            target.url, target.headers, stream=False, connections=PLAIN_CONNECTIONS, seconds=WARM_UP_SECONDS
        )
        in_time = int(plain.responses / plain.seconds * self._plan.plain_seconds)
        contestant.plain_requests = max(contestant.plain_requests, in_time)
        cost = await self._turns_cpu_us(target, connections=TURN_STREAMS // 4, requests=TURN_STREAMS // 4)
        contestant.slow = cost > SLOW_CHUNK_CPU_US

    async def _measure_engine(self) -> RoundFigures:
        """What the figures of the others are held against; and how far the load itself gets."""
        plain = await run_wrk(self._engine.url, {}, stream=False, connections=PLAIN_CONNECTIONS, seconds=1)
        figures = RoundFigures(plain_per_second=plain.responses / plain.seconds)
        return await self._with_gaps(figures, self._engine)

    async def _measure(self, contestant: Contestant, direct: RoundFigures, number: int) -> RoundFigures:
        target = contestant.target
        began, busy, own = time.monotonic(), machine_cpu_seconds(), tree_cpu_seconds(os.getpid())
        figures = await self._with_plain(RoundFigures(), contestant)
        streams = TURN_STREAMS if contestant.slow else TURN_STREAMS * self._plan.streams_each
        cost = await self._turns_cpu_us(target, connections=TURN_STREAMS, requests=streams)
        figures = replace(figures, turns_cpu_us=cost)
        if not contestant.slow:
            figures = await self._with_gaps(figures, target)
            assert figures.gap_p99_ms is not None
            assert direct.gap_p99_ms is not None
            figures = replace(figures, added_gap_p99_ms=figures.gap_p99_ms - direct.gap_p99_ms)
        figures = await self._with_latency(figures, target, number)
        others = (machine_cpu_seconds() - busy) - (tree_cpu_seconds(os.getpid()) - own)
        cores = (time.monotonic() - began) * (os.cpu_count() or 1)
        return replace(figures, others_cpu=max(others / cores, 0.0))

    async def _with_plain(self, figures: RoundFigures, contestant: Contestant) -> RoundFigures:
        """A number of requests and not a time, so that none is begun, paid for and not counted."""
        target, requests = contestant.target, contestant.plain_requests
        await asyncio.sleep(SETTLE_SECONDS)
        before = target.cpu_seconds()
        result = await run_wrk(
            target.url,
            target.headers,
            stream=False,
            connections=PLAIN_CONNECTIONS,
            requests=requests,
            seconds=SECONDS_MAX,
        )
        await asyncio.sleep(SETTLE_SECONDS)
        return replace(
            figures,
            plain_cpu_us=MICROSECONDS * (target.cpu_seconds() - before) / requests,
            plain_per_second=requests / result.seconds,
        )

    async def _turns_cpu_us(self, target: Target, *, connections: int, requests: int) -> float:
        await set_pace(self._engine.url, "turns", INTERVAL_MS)
        await asyncio.sleep(SETTLE_SECONDS)
        before = target.cpu_seconds()
        await run_wrk(
            target.url,
            target.headers,
            stream=True,
            connections=connections,
            requests=requests,
            seconds=SECONDS_MAX,
        )
        await asyncio.sleep(SETTLE_SECONDS)
        return MICROSECONDS * (target.cpu_seconds() - before) / (requests * CHUNKS)

    async def _with_gaps(self, figures: RoundFigures, target: Target) -> RoundFigures:
        await set_pace(self._engine.url, "clocks", INTERVAL_MS)
        before = target.cpu_seconds()
        each = self._plan.streams_each
        times = await paced_streams(
            target.url, target.headers, streams=CLOCK_STREAMS, each=each, seconds_max=SECONDS_MAX
        )
        await asyncio.sleep(SETTLE_SECONDS)
        cost = MICROSECONDS * (target.cpu_seconds() - before) / (CLOCK_STREAMS * each * CHUNKS)
        return replace(
            figures,
            clocks_cpu_us=None if target is self._engine else cost,
            chunks_per_read=times.chunks_per_read,
            gap_p50_ms=times.gap_p50,
            gap_p99_ms=times.gap_p99,
        )

    async def _with_latency(self, figures: RoundFigures, target: Target, seed: int) -> RoundFigures:
        """Straight to the engine at the same rate, then through the proxy."""
        assert figures.plain_per_second is not None
        rate = min(figures.plain_per_second / 2, HALF_LOAD_PER_SECOND_MAX)
        direct, proxied = [
            await plain_latency(
                each.url,
                each.headers,
                requests_per_second=rate,
                seconds=self._plan.latency_seconds,
                seed=seed,
            )
            for each in (self._engine, target)
        ]
        return replace(
            figures,
            half_load_per_second=rate,
            latency_p50_ms=proxied.p50,
            latency_p99_ms=proxied.p99,
            added_p50_ms=proxied.p50 - direct.p50,
            added_p99_ms=proxied.p99 - direct.p99,
        )
