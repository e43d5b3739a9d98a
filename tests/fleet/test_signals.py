"""The signals of several replicas, as the law of the one that leads reads them."""

from typing import Any

import pytest
from msgspec.structs import replace

from gateway.fleet.signals import PooledSignals, Report, Signals, ToldVerdict, by_pool, told
from gateway.policy.control_signals import Readings, Verdict

NOW = 50_000_000_000
QUIET = Signals(
    pool="gpu",
    gap_ns=0,
    gap_tokens=0.0,
    late_ns=0,
    first_tokens=0,
    oldest_late_ns=None,
    kv_usage=None,
    held_back=(False, False, False),
    demand=(0, 0, 0),
    verdict_numbers=(0, 0, 0),
    verdicts=((), (), ()),
    overdue_ns_ago=((), (), ()),
)


def pooled(memory: PooledSignals, *signals: Signals) -> Readings:
    messages = [told(Report(f"r{i}", (one,))) for i, one in enumerate(signals)]
    return memory.measured(by_pool(messages)["gpu"], NOW).readings()


def read(*replicas: dict[str, Any]) -> Readings:
    return pooled(PooledSignals(), *(replace(QUIET, **told_of) for told_of in replicas))


def test_nothing_told_is_no_sample() -> None:
    """A fleet without work has no gap, no wait and no memory use, rather than zeros."""
    readings = read({}, {})
    assert (readings.gap_ns, readings.wait_ns, readings.kv_usage) == (None, None, None)


def test_each_token_counts_the_same_wherever_it_passes() -> None:
    """A replica with one slow stream does not outweigh one with a hundred quick ones."""
    readings = read({"gap_ns": 99 * 20, "gap_tokens": 99.0}, {"gap_ns": 220, "gap_tokens": 1.0})
    assert readings.gap_ns == pytest.approx(22)


def test_waits_are_one_mean_and_the_oldest_of_all() -> None:
    """The larger of the two."""
    some, others = {"late_ns": 300, "first_tokens": 3}, {"late_ns": 500, "first_tokens": 1}
    assert read(some, others).wait_ns == pytest.approx(200)
    assert read(some, others, {"oldest_late_ns": 900}).wait_ns == 900


def test_the_fullest_engine_and_the_sum_of_what_is_asked_count() -> None:
    """Held back is who is held back anywhere."""
    readings = read(
        {"kv_usage": 0.3, "demand": (1, 2, 3), "held_back": (False, True, False)},
        {"kv_usage": 0.7, "demand": (10, 20, 30)},
    )
    assert readings.kv_usage == 0.7
    assert readings.demand == (11, 22, 33)
    assert readings.held_back == (False, True, False)


def test_a_verdict_counts_once_however_often_it_is_told() -> None:
    """By its number; of two that were told together the new one alone is new the next time."""
    memory = PooledSignals()
    first, second = ToldVerdict(3_000, 1_000, True), ToldVerdict(2_500, 500, False)
    once = replace(QUIET, verdict_numbers=(1, 0, 0), verdicts=((first,), (), ()))
    twice = replace(QUIET, verdict_numbers=(2, 0, 0), verdicts=((first, second), (), ()))
    for message in (once, once, twice, twice):
        readings = pooled(memory, message)
    assert list(readings.verdicts[0]) == [
        Verdict(NOW - 3_000, NOW - 1_000, True),
        Verdict(NOW - 2_500, NOW - 500, False),
    ]


def test_streams_that_are_late_are_late_on_the_leaders_clock() -> None:
    """Ages are told, times are made of them."""
    readings = read({"overdue_ns_ago": ((5, 7), (), ())}, {"overdue_ns_ago": ((9,), (), (1,))})
    assert [list(times) for times in readings.overdue] == [[NOW - 5, NOW - 7, NOW - 9], [], [NOW - 1]]
