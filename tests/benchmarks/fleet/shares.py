"""The same requests before one gateway and before three with uneven load: is it one budget, and whose?"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from gateway.policy.request import PRIORITIES
from tests.benchmarks.fleet.figures import SHARES, Observed
from tests.benchmarks.fleet.load import UNEVEN, arrivals
from tests.benchmarks.fleet.stage import CAPACITY, ENGINE_SECONDS, Stage, settings
from tests.benchmarks.fleet.verdicts import Verdict, at_least, at_most, say
from tests.support.fleet_processes import counting_engine, fleet, in_state
from tests.support.store_servers import StoreServer

REPLICAS = 3


@dataclass(frozen=True)
class Pair:
    one: Observed
    several: Observed


async def measure(server: StoreServer, runs: int, seconds: float) -> list[Verdict]:
    pairs = []
    for seed in range(1, runs + 1):
        say(f"shares, run {seed} of {runs}: one gateway, {seconds:g} s")
        one = await run(None, 1, seconds, seed)
        say(f"shares, run {seed} of {runs}: three gateways, {seconds:g} s")
        several = await run(server.url, REPLICAS, seconds, seed)
        say(f"  C used {told_by_class(one)} and {told_by_class(several)}; cores busy {several.busy:.0%}")
        pairs.append(Pair(one, several))
    return verdicts(pairs)


async def run(store_url: str | None, replicas: int, seconds: float, seed: int) -> Observed:
    weights = UNEVEN if replicas == REPLICAS else (1.0,) * replicas
    coming = arrivals(CAPACITY, seconds, seed, weights=weights)
    async with (
        counting_engine(ENGINE_SECONDS) as engine,
        fleet(settings(engine.url, store_url), replicas) as gateways,
    ):
        if store_url is not None:
            await in_state("shared", gateways)
        return await Stage(gateways, engine, CAPACITY).run(coming, seconds)


def verdicts(pairs: Sequence[Pair]) -> list[Verdict]:
    several = [pair.several for pair in pairs]
    fullest = [run.fullest() for run in several]
    in_second = [run.fullest(1.0) for run in several]
    off = [
        abs(fmean(p.several.by_class()[k] for p in pairs) - fmean(p.one.by_class()[k] for p in pairs))
        for k in PRIORITIES
    ]
    worst = max(
        abs(a - b) for p in pairs for a, b in zip(p.one.by_class(), p.several.by_class(), strict=True)
    )
    kept, alone = ([run.attainment() for run in each] for each in (several, [pair.one for pair in pairs]))
    served = {
        (replica, priority): fmean(run.served_cost(replica, priority) for run in several)
        for replica in range(REPLICAS)
        for priority in PRIORITIES
    }
    (least_at, least_class), least = min(served.items(), key=lambda item: item[1])
    where = f"{least_class.name} at replica {least_at + 1}, of which {UNEVEN[least_at]:.0%} is asked"
    return [
        at_most(
            "admitted in the fullest 10 s, parts of C",
            1.05,
            max(fullest),
            "{:.3f}",
            f"mean of runs {fmean(fullest):.3f}; in 1 s {max(in_second):.2f}, one gateway "
            f"{max(p.one.fullest(1.0) for p in pairs):.2f}",
        ),
        at_most(
            "class shares against one gateway, points of C",
            5.0,
            100 * max(off),
            more=f"worst class, mean of runs; worst of one run {100 * worst:.1f}",
        ),
        at_least(
            "a class in its emptiest 10 s, parts of its share",
            0.5,
            min(run.least_of_share() for run in several),
            "{:.2f}",
            f"one gateway {min(p.one.least_of_share() for p in pairs):.2f}",
        ),
        at_least("least served of any replica's classes, part of its cost", 0.01, least, "{:.2f}", where),
        at_most(
            "P0 first tokens in time, points below one gateway",
            3.0,
            100 * (fmean(alone) - fmean(kept)),
            more=f"{fmean(kept):.1%} and {fmean(alone):.1%} of all that came; "
            + ", ".join(f"{100 * (a - k):+.1f}" for a, k in zip(alone, kept, strict=True)),
        ),
        Verdict(
            "C used by P0 / P1 / P2",
            "",
            f"{_parts(several)}; one gateway {_parts([pair.one for pair in pairs])}; "
            f"guaranteed {' / '.join(f'{share:.0%}' for share in SHARES)}",
        ),
        at_most(
            "admitted by the logs against what the engine got, points",
            1.0,
            100 * max(abs(run.logged - 1) for run in several),
            "{:.2f}",
        ),
        at_most(
            "requests that failed",
            0,
            sum(run.failed + len(run.turned_away) for run in several),
            "{:.0f}",
            f"of {sum(len(run.asked) for run in several)}",
        ),
        Verdict("cores busy", "", f"{fmean(run.busy for run in several):.0%}, everything on the machine"),
    ]


def told_by_class(run: Observed) -> str:
    return " / ".join(f"{part:.1%}" for part in run.by_class())


def _parts(runs: Sequence[Observed]) -> str:
    return " / ".join(f"{fmean(run.by_class()[k] for run in runs):.1%}" for k in PRIORITIES)
