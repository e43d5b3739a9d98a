"""The store stops, hangs, comes back empty; a replica dies: what becomes of requests and of the budget."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from statistics import fmean

import httpx

from tests.benchmarks.fleet.figures import Observed
from tests.benchmarks.fleet.load import arrivals
from tests.benchmarks.fleet.shares import REPLICAS
from tests.benchmarks.fleet.stage import CAPACITY, ENGINE_SECONDS, LEASE_SECONDS, Stage, Story, settings
from tests.benchmarks.fleet.verdicts import Verdict, at_least, at_most, say
from tests.support.fleet_processes import Standing, counting_engine, fleet, in_state, standings
from tests.support.store_servers import StoreServer

STOPPED_AT_SECONDS = 15.0
AWAY_SECONDS = 20.0
AFTERWARDS_SECONDS = 15.0
KILLED_AT_SECONDS = 15.0
LOOK_SECONDS = 0.1
WAIT_SECONDS_MAX = 30.0
BACK_SECONDS = 2.0
NEARLY_ALL = 0.97
"""Of C: rates that are on their way from one replica to another belong to nobody."""
AS_BEFORE = 0.1
"""A replica's part of C is what it was, give or take so much of C."""


class How(StrEnum):
    KILLED = "SIGKILL"
    FROZEN = "SIGSTOP"

    def begin(self, server: StoreServer) -> None:
        if self is How.KILLED:
            server.stop()
        else:
            os.kill(server.pid, signal.SIGSTOP)

    def end(self, server: StoreServer) -> None:
        """It answers when this returns, and is empty."""
        server.stop()
        server.start()


class Watch:
    """Looks at all replicas again and again, from the beginning of the load on."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.seen: list[tuple[float, list[Standing]]] = []

    async def run(self) -> None:
        while True:
            with suppress(httpx.TransportError):  # of one that is killed at this moment
                found = await standings(self._stage.gateways)
                self.seen.append((self._stage.now, found))
            await asyncio.sleep(LOOK_SECONDS)

    def parts(self, begin: float, end: float) -> list[float]:
        """Of C, by replica, on average."""
        rows = [[s.rate for s in seen] for at, seen in self.seen if begin <= at < end]
        return [fmean(column) / self._stage.capacity for column in zip(*rows, strict=True)]

    def first(self, begin: float, condition: Callable[[Sequence[Standing]], bool]) -> float:
        """Seconds from `begin` until it was first seen to hold; infinite if it never was."""
        return next((at - begin for at, seen in self.seen if at >= begin and condition(seen)), float("inf"))

    def states(self, begin: float, end: float) -> Counter[str]:
        return Counter(s.state or "none" for at, seen in self.seen if begin <= at < end for s in seen)


async def _watched(server: StoreServer, seconds: float, seed: int, events: Story) -> tuple[Observed, Watch]:
    """Three replicas under uneven load, what `events` does meanwhile, and what was seen of them."""
    coming = arrivals(CAPACITY, seconds, seed)
    async with (
        counting_engine(ENGINE_SECONDS) as engine,
        fleet(settings(engine.url, server.url), REPLICAS) as gateways,
    ):
        await in_state("shared", gateways)
        stage = Stage(gateways, engine, CAPACITY)
        watch = Watch(stage)
        watching = asyncio.create_task(watch.run())

        try:
            return await stage.run(coming, seconds, events), watch
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


async def store_away(server: StoreServer, how: How) -> list[Verdict]:
    say(f"store away ({how}): {STOPPED_AT_SECONDS + AWAY_SECONDS + AFTERWARDS_SECONDS:g} s")
    times: dict[str, float] = {}

    async def events(stage: Stage) -> None:
        await stage.until(STOPPED_AT_SECONDS)
        times["away"] = stage.now
        await asyncio.to_thread(how.begin, server)
        await stage.until(STOPPED_AT_SECONDS + AWAY_SECONDS)
        await asyncio.to_thread(how.end, server)
        times["back"] = stage.now
        say("  the store is back, and empty")

    seconds = STOPPED_AT_SECONDS + AWAY_SECONDS + AFTERWARDS_SECONDS
    run, watch = await _watched(server, seconds, 21, events)
    away, back = times["away"], times["back"]
    before = watch.parts(away - 4, away)

    def shared(seen: Sequence[Standing]) -> bool:
        return all(s.state == "shared" and s.replicas == REPLICAS for s in seen)

    def as_before(seen: Sequence[Standing]) -> bool:
        parts = [s.rate / CAPACITY for s in seen]
        near = all(abs(a - b) <= AS_BEFORE for a, b in zip(parts, before, strict=True))
        return shared(seen) and near and sum(parts) >= NEARLY_ALL

    meanwhile = watch.states(away, back)
    failed = run.failed + sum(run.turned_away.values())
    return [
        at_most("requests that failed or had to go elsewhere", 0, failed, "{:.0f}", _of(run)),
        at_most(
            "admitted while the store was away, parts of C",
            1.1,
            run.admitted_between(away, back),
            "{:.3f}",
            f"states seen: {', '.join(f'{state} {count}' for state, count in meanwhile.items())}",
        ),
        at_most("admitted in the fullest 10 s of the run, parts of C", 1.1, run.fullest(), "{:.3f}"),
        at_most("until all are `shared` again, s", BACK_SECONDS, watch.first(back, shared)),
        at_most(
            "until each has its part of before again, s",
            BACK_SECONDS,
            watch.first(back, as_before),
            more=f"before: {_parts(before)}; 5 s after: {_parts(watch.parts(back + 5, back + 8))}",
        ),
        Verdict("C used before / while away / from 2 s after on", "", _used(run, away, back)),
    ]


async def replica_killed(server: StoreServer) -> list[Verdict]:
    """The one with 80 % of the load, which then goes to the others."""
    seconds = KILLED_AT_SECONDS + LEASE_SECONDS + 12
    say(f"replica killed: {seconds:g} s")
    times: dict[str, float] = {}

    async def events(stage: Stage) -> None:
        await stage.until(KILLED_AT_SECONDS)
        times["killed"] = stage.now
        await stage.gateways[0].kill()

    run, watch = await _watched(server, seconds, 22, events)
    killed = times["killed"]
    had = watch.parts(killed - 4, killed)

    def all_theirs(seen: Sequence[Standing]) -> bool:
        return len(seen) == REPLICAS - 1 and sum(s.rate for s in seen) >= NEARLY_ALL * CAPACITY

    goal = LEASE_SECONDS + 1
    regained = watch.first(killed, all_theirs)
    return [
        at_most(
            f"until the other two have {NEARLY_ALL:.0%} of C, s", goal, regained, more=f"it had {had[0]:.0%}"
        ),
        at_most("admitted in the fullest 10 s, parts of C", 1.05, run.fullest(), "{:.3f}"),
        at_least(
            "C used from then on",
            0.9,
            run.admitted_between(min(killed + goal + 1, seconds - 5), seconds),
            "{:.3f}",
            f"before {run.admitted_between(10, killed):.3f}, between "
            f"{run.admitted_between(killed, killed + LEASE_SECONDS):.3f}",
        ),
        at_most(
            "requests that failed at all replicas",
            0,
            run.failed,
            "{:.0f}",
            f"{_of(run)}; {run.lost} were under way in the dead one; sent on: {_sent_on(run)}",
        ),
    ]


def _of(run: Observed) -> str:
    return f"of {len(run.asked)}, {sum(asked.status == 200 for asked in run.asked)} served"


def _sent_on(run: Observed) -> str:
    return ", ".join(f"{why} {count}" for why, count in run.turned_away.most_common()) or "none"


def _parts(parts: Sequence[float]) -> str:
    return " / ".join(f"{part:.0%}" for part in parts)


def _used(run: Observed, away: float, back: float) -> str:
    spans = ((10.0, away), (away, back), (back + BACK_SECONDS, run.seconds))
    return " / ".join(f"{run.admitted_between(*span):.3f}" for span in spans)
