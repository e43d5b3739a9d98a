"""A run as it went: rates, attainment and work done, from second to second.

The rates of the class buckets follow from those at the beginning and the events that changed them; the rest
from the records.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from gateway.policy.clock import to_nanoseconds
from gateway.policy.events import RatesChanged
from gateway.policy.parameters import MILLITOKENS, PolicyParameters, SloWindow
from gateway.policy.request import PRIORITIES, Priority
from gateway.policy.slo_monitor import SloMonitor
from gateway.simulator.experiment import Run

POINTS_MAX = 600
ATTAINMENT_WINDOW_SECONDS = 10


class Moment(NamedTuple):
    """One class at one time. Rates are tokens per second; attainment is of the requests that ended in the
    last ten seconds (or since the moment before, if that is longer ago), None where there were none."""

    second: int
    priority: Priority
    bucket_rate: float | None
    """None without a gateway."""
    slo_met_of_offered: float | None
    slo_met_of_admitted: float | None
    arrived_per_second: float
    settled_tokens_per_second: float
    """Since the moment before, as the tokens of requests that ended."""


class RateSteps:
    """The rates of all pools together at any time. Advice that was not taken (observe mode) is no change."""

    def __init__(self, initial: Sequence[int], changes: Sequence[RatesChanged]) -> None:
        self._times = [0]
        self._rates = [tuple(initial)]
        for change in changes:
            if change.applied:
                triples = zip(self._rates[-1], change.new_rates, change.old_rates, strict=True)
                self._times.append(change.at)
                self._rates.append(tuple(rate + new - old for rate, new, old in triples))

    def at(self, time: int) -> tuple[int, ...]:
        """Millitokens per second."""
        return self._rates[bisect_right(self._times, time) - 1]


def step_seconds(seconds: float) -> int:
    return max(ceil(seconds / POINTS_MAX), 1)


def history(run: Run, parameters: PolicyParameters) -> Iterator[Moment]:
    step = step_seconds(run.seconds)
    window_ns = to_nanoseconds(max(step, ATTAINMENT_WINDOW_SECONDS))
    monitor = SloMonitor(parameters.classes, SloWindow(len(run.records) + 1, window_ns))
    rates = RateSteps(run.initial_rates, run.rate_changes) if run.initial_rates else None
    arrived = _arrivals(run, step)
    records = iter(run.records)
    record = next(records, None)
    for second in range(step, int(run.seconds) + 1, step):
        now = to_nanoseconds(second)
        settled = [0] * len(PRIORITIES)
        while record is not None and record.ended_at <= now:
            monitor.record(record)
            settled[record.priority] += record.charged
            record = next(records, None)
        for p in PRIORITIES:
            yield Moment(
                second,
                p,
                None if rates is None else rates.at(now)[p] / MILLITOKENS,
                monitor.attainment(p, "all", "arrival", "offered", now),
                monitor.attainment(p, "all", "arrival", "admitted", now),
                arrived[p].get(second // step, 0) / step,
                settled[p] / MILLITOKENS / step,
            )


def _arrivals(run: Run, step: int) -> list[dict[int, int]]:
    """For each class, how many requests came in each step, the first of which is 1."""
    step_ns = to_nanoseconds(step)
    counts: list[dict[int, int]] = [{} for _ in PRIORITIES]
    for record in run.records:
        own, number = counts[record.priority], record.arrived_at // step_ns + 1
        own[number] = own.get(number, 0) + 1
    return counts
