import pytest

from gateway.telemetry.buckets import bounds, latency_bounds

MS = 10**6
SECOND = 10**9


def seconds(*values):
    return tuple(round(v * 1e9) for v in values)


def test_promises_are_bounds_with_three_below(parameters):
    """Each promised latency is a bound of the histograms it is read from, with at least three below."""
    found = latency_bounds(parameters, 300, 60)
    assert {SECOND, 3 * SECOND} <= set(found.ttft) & set(found.upstream_ttft)
    assert {60 * MS, 100 * MS} <= set(found.tpot)
    assert {60 * MS, 100 * MS, 700 * MS} <= set(found.max_gap)
    for one, smallest in ((found.ttft, SECOND), (found.tpot, 60 * MS), (found.max_gap, 60 * MS)):
        assert sum(b < smallest for b in one) >= 3


def test_time_outs_lie_within_finite_bounds(parameters):
    """No time-out lies beyond the last finite bound, however long it is."""
    found = latency_bounds(parameters, first_byte_seconds=9000, idle_seconds=600)
    assert found.upstream_ttft[-1] >= 9000 * SECOND
    assert found.ttft[-1] >= 9120 * SECOND
    assert found.tpot[-1] >= 600 * SECOND
    assert found.max_gap[-1] >= 600 * SECOND
    assert found.queue_wait[-1] >= 120 * SECOND
    assert found.duration[-1] >= 9720 * SECOND


def test_tokens_are_measured_in_milliseconds(parameters):
    """Gaps below 10 ms, which fast engines have, are told apart."""
    found = latency_bounds(parameters, 300, 60)
    assert {MS, 5 * MS} <= set(found.tpot) & set(found.max_gap)


def test_page_shows_the_bounds(metrics, scrape):
    """The bounds on the page are vLLM's, and rise."""
    vllm = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
    found = scrape().bounds("time_to_first_token_seconds")
    assert vllm | {160, 640, 2560, 3} == set(found)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (0.02, (0.0025, 0.005, 0.01, 0.02, 0.1)),
        (0.002, (0.00025, 0.0005, 0.001, 0.002, 0.01, 0.1)),
    ],
)
def test_small_promises_get_bounds_below_them(target, expected):
    """Where the usual bounds begin too late, halves of the lowest are put before it."""
    assert bounds((0.01, 0.1), seconds(target)) == seconds(*expected)


def test_a_promise_of_a_nanosecond_does_not_hang():
    """There is no room for bounds below it."""
    assert bounds((1,), (1,))[0] == 1
