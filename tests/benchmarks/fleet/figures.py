"""What a run has shown, as numbers: parts of C over windows of time. Pure arithmetic."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import cpu_count

from gateway.policy.request import PRIORITIES, Priority
from tests.benchmarks.fleet.load import Asked
from tests.support.fleet_processes import Admitted

SHARES = (0.6, 0.35, 0.05)
WINDOW_SECONDS = 10.0
SETTLED_SECONDS = 10.0
"""From then on a run counts."""
FIRST_TOKEN_SECONDS = 2.0
"""Promised to P0: four times as long as it may wait for tokens, so that the budget is measured and not the
machine."""


@dataclass(frozen=True)
class Observed:
    """One run. Times are seconds from its beginning."""

    capacity: float
    seconds: float
    admitted: Sequence[Admitted]
    """By the request logs of all gateways, in order of time: when a request went to the engine, by the clock
    of the gateway that let it go."""
    arrived: Sequence[Admitted]
    """The same as the engine has seen it."""
    asked: Sequence[Asked]
    busy_seconds: float
    """Of all cores together, whoever used them."""

    def admitted_between(self, begin: float, end: float, priority: Priority | None = None) -> float:
        """In parts of what C gives in that time."""
        cost = sum(a.cost for a in self.admitted if begin <= a.at < end and priority in (None, a.priority))
        return cost / (self.capacity * (end - begin))

    def by_class(self) -> list[float]:
        return [self.admitted_between(SETTLED_SECONDS, self.seconds, each) for each in PRIORITIES]

    def fullest(self, window: float = WINDOW_SECONDS, begin: float = SETTLED_SECONDS) -> float:
        """Of any window of this length, in parts of C."""
        inside: deque[Admitted] = deque()
        total = most = 0
        for one in self.admitted:
            if not begin <= one.at < self.seconds:
                continue
            inside.append(one)
            total += one.cost
            while inside[0].at <= one.at - window:
                total -= inside.popleft().cost
            most = max(most, total)
        return most / (self.capacity * window)

    def least_of_share(self) -> float:
        """Of any class in any window that begins at a whole second, in parts of its share of C."""
        begin, least = SETTLED_SECONDS, float("inf")
        while begin + WINDOW_SECONDS <= self.seconds:
            for priority, share in zip(PRIORITIES, SHARES, strict=True):
                got = self.admitted_between(begin, begin + WINDOW_SECONDS, priority) / share
                least = min(least, got)
            begin += 1.0
        return least

    def attainment(self, priority: Priority = Priority.P0) -> float:
        """Of all that came, those whose first token came in time."""
        came = [a for a in self._settled() if a.arrival.priority is priority]
        return sum((a.first_byte_seconds or 99.0) <= FIRST_TOKEN_SECONDS for a in came) / len(came)

    def served_cost(self, replica: int, priority: Priority) -> float:
        """The part of what was asked at a replica."""
        came = [a for a in self._settled() if (a.arrival.replica, a.arrival.priority) == (replica, priority)]
        return sum(a.arrival.cost for a in came if a.status == 200) / max(
            sum(a.arrival.cost for a in came), 1
        )

    def _settled(self) -> Iterator[Asked]:
        return (a for a in self.asked if a.arrival.at >= SETTLED_SECONDS and not a.given_up)

    @property
    def logged(self) -> float:
        """What the logs tell of, in parts of what the engine got. Not all of what a killed gateway let go is
        in its log."""
        return sum(one.cost for one in self.admitted) / sum(one.cost for one in self.arrived)

    # ------------------------------------------------------------------ endings

    @property
    def failed(self) -> int:
        return sum(asked.failed for asked in self.asked)

    @property
    def turned_away(self) -> Counter[str]:
        """How often, by what was met."""
        return Counter(why for asked in self.asked for why in asked.turned_away)

    @property
    def lost(self) -> int:
        """Requests that the engine has had and whose answer no client has, and those it has had twice."""
        answered = {asked.arrival.number for asked in self.asked if asked.status == 200 or asked.given_up}
        begun = Counter(one.number for one in self.arrived)
        return sum(times - (number in answered) for number, times in begun.items())

    @property
    def busy(self) -> float:
        """Part of the machine's cores."""
        return self.busy_seconds / self.seconds / (cpu_count() or 1)
