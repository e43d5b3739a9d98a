"""What happened lately, kept in memory for operators to look at: endings, latencies, changes.

All of it is bounded. Of each class the newest endings are kept apart, so that a flood of refused batch
requests does not push out the realtime ones that an operator looks for; latencies are kept for the window
that promises are judged in. Never a prompt, never a key.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.events import Observer, RatesChanged, RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.request import PRIORITIES, Priority
from gateway.telemetry.labels import LENGTH_MAX, clean

ENDINGS_KEPT = 200
"""Of each class."""
LATENCIES_KEPT = 1000
CHANGES_KEPT = 200
UPSTREAM_CHANGES_KEPT = 100
MINUTE_NS = 60 * NANOSECONDS_PER_SECOND

REFUSALS = frozenset(
    {
        Outcome.REJECTED_RATE,
        Outcome.REJECTED_QUEUE_FULL,
        Outcome.QUEUE_TIMEOUT,
        Outcome.REJECTED_NO_UPSTREAM,
        Outcome.REJECTED_DRAINING,
    }
)
"""The gateway's own no for want of budget, place or engine."""


class Latencies(NamedTuple):
    """Of one stream, in nanoseconds; None where it had none."""

    ended_at: int
    ttft: int | None
    tpot: int | None
    max_gap: int | None


@dataclass(frozen=True, slots=True)
class UpstreamChanged:
    at: int
    upstream: str
    state: str  # up | down | trial


class Recent(Observer):
    """`tick` is to be called about once a second; what happened between two of them is counted as one."""

    def __init__(self) -> None:
        self._endings = [deque[RequestEnded](maxlen=ENDINGS_KEPT) for _ in PRIORITIES]
        self._latencies = [deque[Latencies](maxlen=LATENCIES_KEPT) for _ in PRIORITIES]
        self.totals: list[Counter[Outcome]] = [Counter() for _ in PRIORITIES]
        """Endings since the start, by class."""
        self._totals_at: deque[tuple[int, list[Counter[Outcome]]]] = deque()
        self.rate_changes: deque[RatesChanged] = deque(maxlen=CHANGES_KEPT)
        self.upstream_changes: deque[UpstreamChanged] = deque(maxlen=UPSTREAM_CHANGES_KEPT)

    # ------------------------------------------------------------------ events of the policy

    def ended(self, event: RequestEnded) -> None:
        priority = event.priority
        if event.ask is not None or len(event.model) > LENGTH_MAX:
            event = _without_bulk(event)
        self._endings[priority].append(event)
        self.totals[priority][event.outcome] += 1
        if event.streaming and event.ttft_ns is not None:
            latencies = Latencies(event.ended_at, event.ttft_ns, event.tpot_ns, event.max_gap_ns)
            self._latencies[priority].append(latencies)

    def rates_changed(self, event: RatesChanged) -> None:
        self.rate_changes.append(event)

    def health_changed(self, upstream: str, healthy: bool, at: int) -> None:
        self.upstream_changes.append(UpstreamChanged(at, upstream, "up" if healthy else "down"))

    def trial_allowed(self, upstream: str, at: int) -> None:
        self.upstream_changes.append(UpstreamChanged(at, upstream, "trial"))

    def tick(self, now: int) -> None:
        self._totals_at.append((now, [totals.copy() for totals in self.totals]))
        while self._totals_at[0][0] < now - MINUTE_NS:
            self._totals_at.popleft()

    # ------------------------------------------------------------------ looking back

    def endings(self, priorities: Sequence[Priority] = PRIORITIES) -> Iterator[RequestEnded]:
        """Newest first."""
        found = [event for priority in priorities for event in self._endings[priority]]
        return iter(sorted(found, key=lambda event: event.ended_at, reverse=True))

    def latencies(self, priority: Priority, since: int) -> list[Latencies]:
        return [each for each in self._latencies[priority] if each.ended_at >= since]

    def last_minute(self, priority: Priority) -> Counter[Outcome]:
        """Endings of the last minute, to the second."""
        before = self._totals_at[0][1][priority] if self._totals_at else Counter[Outcome]()
        return self.totals[priority] - before

    def refused(self, priority: Priority) -> int:
        """Since the start."""
        totals = self.totals[priority]
        return sum(totals[outcome] for outcome in REFUSALS)


def quantile(values: Sequence[int], part: float) -> int | None:
    """Nearest rank, of sorted values; None of none."""
    return values[max(ceil(part * len(values)), 1) - 1] if values else None


def _without_bulk(event: RequestEnded) -> RequestEnded:
    """A client chooses how long a model's name is, and details are many."""
    return event._replace(model=clean(event.model), ask=None, seen=None, order=None)
