"""How fast a queue empties."""

import pytest

from gateway.policy.drain_rate import DrainRate
from tests.support.policy_settings import nanoseconds

EVERY_TENTH = [i / 10 for i in range(1, 9)]


def backlog(*dispatches: float) -> DrainRate:
    made = DrainRate()
    made.begins(0)
    for at in dispatches:
        made.count(nanoseconds(at))
    return made


@pytest.mark.parametrize("rate", [1, 4, 50])
@pytest.mark.parametrize("until", [3, 5, 9.9, 60, 61.5])
def test_a_steady_queue_is_told_well(rate: float, until: float) -> None:
    """At a steady rate n requests take n over the rate."""
    drain = backlog(*(i / rate for i in range(1, int(rate * until) + 1)))
    told = drain.time_for(20, nanoseconds(until))
    assert told == pytest.approx(nanoseconds(20 / rate), rel=0.02 if until * rate % 1 == 0 else 0.25)


def test_places_come_as_they_came() -> None:
    """Eight dispatches in 0.8 s: one in 0.1 s, so ten more take a second."""
    assert backlog(*EVERY_TENTH).time_for(10, nanoseconds(0.8)) == nanoseconds(1)


def test_a_standstill_counts() -> None:
    """Time since the last dispatch is time in which no place came."""
    assert backlog(*EVERY_TENTH).time_for(1, nanoseconds(8)) == nanoseconds(1)


def test_nobody_ahead_is_no_wait() -> None:
    assert backlog(*EVERY_TENTH).time_for(0, nanoseconds(3600)) == 0


@pytest.mark.parametrize(
    ("dispatches", "now"),
    [([], 100), (EVERY_TENTH[:7], 100), ([0.0] * 8, 0.499), ([i / 100 for i in range(32)], 0.4)],
)
def test_a_young_backlog_tells_nothing(dispatches: list[float], now: float) -> None:
    """With fewer dispatches than asked for, or in its first half second, nothing is predicted."""
    assert backlog(*dispatches).time_for(1000, nanoseconds(now), least=8) is None


def test_one_dispatch_may_be_enough() -> None:
    assert backlog(2.0).time_for(3, nanoseconds(2)) == nanoseconds(6)
    assert backlog().time_for(3, nanoseconds(2)) is None
    assert DrainRate().time_for(3, nanoseconds(2)) is None


def test_a_new_backlog_knows_nothing_of_the_last_one() -> None:
    """What left before the queue was last empty says nothing."""
    made = backlog(*EVERY_TENTH)
    made.begins(nanoseconds(1))
    assert made.time_for(1, nanoseconds(9)) is None


def test_only_the_recent_past_counts() -> None:
    """Of a long backlog the last 32 dispatches tell the rate."""
    slow = [float(i) for i in range(100)]
    quick = [100 + i / 100 for i in range(33)]
    assert backlog(*slow, *quick).time_for(100, nanoseconds(quick[-1])) == nanoseconds(1)
