"""One configuration, one traffic, one seed: run, and boiled down to what a report needs.

What comes out is small and can be sent between processes; the records of single requests stay behind.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.policy.events import RatesChanged, RequestEnded
from gateway.policy.request import PRIORITIES, Priority
from gateway.simulator.contenders import Contender
from gateway.simulator.experiment import Experiment
from gateway.simulator.history import Moment, history
from gateway.simulator.report import NANOSECONDS_PER_MILLISECOND, ClassReport, make_report, percentile
from gateway.simulator.traffic import Traffic

Progress = Callable[[float], None]

QUANTILES = (*(percent / 100 for percent in range(1, 100)), 0.995, 0.999, 1.0)
LATENCIES: Mapping[str, Callable[[RequestEnded], int | None]] = {
    "ttft": lambda record: record.ttft_ns,
    "tpot": lambda record: record.tpot_ns,
    "max_gap": lambda record: record.max_gap_ns,
}

_GC_ALLOCATIONS = 100_000
"""A run keeps what it makes, so that looking for garbage as often as usual costs time and finds nothing."""


@dataclass(frozen=True, slots=True)
class Job:
    contender: Contender
    traffic: Traffic
    seed: int


@dataclass(frozen=True, slots=True)
class Trial:
    title: str
    seed: int
    classes: Mapping[Priority, ClassReport]
    retries: Mapping[Priority, int]
    """How many of the offered requests were ones that came back."""
    history: Sequence[Moment]
    rate_changes: Sequence[RatesChanged]
    latencies: Mapping[tuple[Priority, str], Sequence[float]]
    """By class and name of the latency: milliseconds at QUANTILES. Empty where nobody has the figure."""
    cpu_seconds: float


def run_job(job: Job, progress: Progress | None = None) -> Trial:
    """`progress` is told which part of the arrivals is over."""
    contender, traffic = job.contender, job.traffic
    began = time.process_time()
    with _rare_garbage_collection():
        run = Experiment(
            traffic.workload(job.seed, contender.model),
            contender.parameters,
            contender.presets,
            seed=job.seed,
            seconds=traffic.seconds,
            gateway=contender.gateway,
            progress=progress,
        ).run()
    taken = time.process_time() - began
    report = make_report(contender.title, run.records, contender.parameters, traffic.seconds)
    retries = Counter(run.retries)
    return Trial(
        title=contender.title,
        seed=job.seed,
        classes=report.classes,
        retries={p: retries[p] for p in PRIORITIES},
        history=tuple(history(run, contender.parameters)),
        rate_changes=tuple(run.rate_changes),
        latencies=_latencies(run.records),
        cpu_seconds=taken,
    )


def _latencies(records: Sequence[RequestEnded]) -> dict[tuple[Priority, str], list[float]]:
    quantiles = {}
    for p in PRIORITIES:
        own = [record for record in records if record.priority is p]
        for name, figure in LATENCIES.items():
            ascending = sorted(ns / NANOSECONDS_PER_MILLISECOND for r in own if (ns := figure(r)) is not None)
            values = (percentile(ascending, part) for part in QUANTILES)
            quantiles[p, name] = [value for value in values if value is not None]
    return quantiles


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(_GC_ALLOCATIONS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
