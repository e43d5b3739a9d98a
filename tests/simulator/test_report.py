"""From records to figures: numbers that can be checked in the head."""

import pytest

from gateway.policy.admission import Delivered
from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.request import Priority, Usage
from gateway.policy_parameters import policy_parameters
from gateway.settings import Settings
from gateway.simulator.doors import record_of
from gateway.simulator.report import make_report, percentile, render
from gateway.simulator.workload import Caller

P0, P1, P2 = Priority
DEFAULTS = policy_parameters(Settings())
MS = 1_000_000
SECOND = 1000 * MS


def completed(
    priority: Priority, at: int, first: int, per_token: int, *, prompt: int = 100, queued: int = 0
) -> RequestEnded:
    """An answer of 11 tokens; `first` and `per_token` are milliseconds."""
    tokens = 11
    first_at = at + first * MS
    last = first_at + (tokens - 1) * per_token * MS
    return record_of(
        DEFAULTS,
        "r",
        Caller(priority),
        Outcome.COMPLETED,
        arrived_at=at,
        dispatched_at=at + queued,
        first_token_at=first_at,
        ended_at=last,
        delivered=Delivered(Usage(prompt, tokens), last, per_token * MS),
    )


def refused(priority: Priority, outcome: Outcome) -> RequestEnded:
    return record_of(
        DEFAULTS,
        "r",
        Caller(priority),
        outcome,
        arrived_at=0,
        dispatched_at=None,
        first_token_at=None,
        ended_at=0,
    )


def test_percentiles_are_values_that_occurred() -> None:
    """Nearest rank: the smallest value that so large a part does not exceed."""
    assert percentile([], 0.5) is None
    assert [percentile([1.0, 2.0, 3.0, 4.0], part) for part in (0.01, 0.5, 0.51, 0.99, 1.0)] == [
        1,
        2,
        3,
        4,
        4,
    ]


def test_attainment_is_of_offered_and_of_admitted() -> None:
    """Of four P0 requests one is in time, one late, one slow, one refused."""
    records = [
        completed(P0, 0, first=900, per_token=20),
        completed(P0, 0, first=1100, per_token=20),
        completed(P0, 0, first=100, per_token=70),
        refused(P0, Outcome.REJECTED_RATE),
    ]
    of = make_report("r", records, DEFAULTS, 10).classes[P0]
    assert (of.offered, of.completed) == (4, 3)
    assert of.slo_met_of_offered == pytest.approx(1 / 4)
    assert of.slo_met_of_admitted == pytest.approx(1 / 3)
    assert (of.ttft_p50_ms, of.ttft_p99_ms) == (900, 1100)
    assert (of.tpot_p50_ms, of.tpot_p99_ms, of.max_gap_ms) == (20, 70, 70)
    assert of.refusals == {"rejected_rate": 1}


def test_settled_tokens_are_those_of_requests_that_ended_in_time() -> None:
    """100 tokens in and 11 out at weight 4 are 144; the second one ends after the run."""
    records = [completed(P1, 0, 100, 20), completed(P1, 3 * SECOND - MS, 100, 20)]
    of = make_report("r", records, DEFAULTS, 3.0).classes[P1]
    assert of.settled_tokens_per_second == pytest.approx(144 / 3)
    assert of.own_share_tokens_per_second == pytest.approx(0.35 * 12_000)


def test_long_dispatches_are_told_by_the_second() -> None:
    """Those below P0, from the moment they left the queue, while requests arrived."""
    long = 32_768
    records = [
        completed(P2, SECOND, 5000, 20, prompt=long, queued=2 * SECOND),
        completed(P2, 0, 2000, 20, prompt=long),
        completed(P0, 0, 2000, 20, prompt=long),
        completed(P2, 0, 2000, 20, prompt=8192),
        completed(P2, 9 * SECOND, 9000, 20, prompt=long, queued=SECOND),
    ]
    report = make_report("r", records, DEFAULTS, 10)
    assert report.long_dispatches == ((0.0, P2, long), (3.0, P2, long))
    assert "2 long prompts sent to the engine in 10 s,\n    at least 3.0 s" in render([report])


def test_runs_are_shown_side_by_side() -> None:
    """Every line has a cell for each class of each run; what nobody has is a dash."""
    one = make_report("without", [completed(P0, 0, 100, 20)], DEFAULTS, 1)
    other = make_report("with", [refused(P2, Outcome.QUEUE_TIMEOUT)], DEFAULTS, 1)
    lines = render([one, other]).splitlines()
    assert lines[0].split() == ["without", "with"]
    assert lines[1].split() == ["P0", "P1", "P2"] * 2
    cells = {line[:30].strip(): line[30:].split() for line in lines[2:]}
    assert cells["offered"] == ["1", "0", "0", "0", "0", "1"]
    assert cells["SLO met of offered"] == ["1.0000", "-", "-", "-", "-", "-"]
    assert cells["queue_timeout"] == ["0", "0", "0", "0", "0", "1"]
    assert all(len(line) <= 100 for line in lines)
