"""How fast a queue empties."""

import pytest

from gateway.policy.clock import to_seconds
from gateway.policy.drain_rate import DrainRate
from tests.support.policy_settings import nanoseconds


def drained(rate: float, until: float) -> DrainRate:
    drain = DrainRate(0)
    for i in range(int(rate * until)):
        drain.count(nanoseconds(i / rate))
    return drain


def advice(drain: DrainRate, requests: int, at: float) -> float | None:
    wait = drain.time_for(requests, nanoseconds(at))
    return None if wait is None else to_seconds(wait)


@pytest.mark.parametrize("rate", [1, 4, 50])
@pytest.mark.parametrize("until", [3, 5, 9.9, 60, 61.5])
def test_a_steady_queue_is_told_well(rate: float, until: float) -> None:
    """At a steady rate n requests take about n over the rate."""
    assert advice(drained(rate, until), 20, until) == pytest.approx(20 / rate, rel=0.35 if rate == 1 else 0.2)


def test_nothing_moved_is_no_advice() -> None:
    """Without a dispatch in the last ten seconds nothing is known."""
    assert advice(DrainRate(0), 5, 1) is None
    assert advice(drained(10, 5), 5, 20) is None


def test_an_empty_queue_still_takes_time() -> None:
    """The advice is never zero."""
    assert advice(drained(10, 5), 0, 5) == pytest.approx(0.1, rel=0.2)


def test_places_filled_in_an_instant_promise_nothing() -> None:
    """A hundred dispatches at once after a silence do not mean that the queue empties in no time."""
    drain = DrainRate(0)
    at = nanoseconds(100)
    for _ in range(100):
        drain.count(at)
    assert to_seconds(drain.time_for(500, at) or 0) >= 1


def test_change_of_pace_shows_within_ten_seconds() -> None:
    """After ten seconds at a new pace the old one is forgotten."""
    drain = drained(50, 10)
    for i in range(11):
        drain.count(nanoseconds(10 + i))
    assert advice(drain, 10, 20.5) == pytest.approx(10, rel=0.25)
