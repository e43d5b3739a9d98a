"""What the demo says of its figures, whichever way they turned out."""

import pytest
from rich.console import Console

from gateway.demo.table import GapWatch, Half, closing_words, live_table, summary_table
from gateway.policy.admission import Delivered
from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Priority, Usage
from gateway.policy_parameters import policy_parameters
from gateway.settings import Settings
from gateway.simulator.doors import record_of
from gateway.simulator.report import make_report
from gateway.simulator.workload import Caller

MILLISECOND = 1_000_000


@pytest.fixture
def parameters() -> PolicyParameters:
    return policy_parameters(Settings())


def record(
    parameters: PolicyParameters,
    priority: Priority,
    ttft_ms: int | None,
    outcome: Outcome = Outcome.COMPLETED,
) -> RequestEnded:
    """Two tokens, 20 ms apart; without a first token nothing was delivered."""
    first = None if ttft_ms is None else ttft_ms * MILLISECOND
    last = None if first is None else first + 20 * MILLISECOND
    return record_of(
        parameters,
        "1",
        Caller(priority),
        outcome,
        arrived_at=0,
        dispatched_at=0,
        first_token_at=first,
        ended_at=last or 0,
        delivered=Delivered(None if first is None else Usage(10, 2), last, 20 * MILLISECOND),
    )


def half(parameters: PolicyParameters, records: list[RequestEnded], long_prompts: int = 0) -> Half:
    return Half(make_report("a half", records, parameters, 10.0), {Priority.P2: long_prompts}, {"P2": 3})


def printed(table: object) -> list[str]:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


def test_control_that_helped(parameters: PolicyParameters) -> None:
    """The promise, and how many requests it was kept for in each half."""
    without = half(parameters, [record(parameters, Priority.P0, 2000)], long_prompts=7)
    with_control = half(parameters, [record(parameters, Priority.P0, 100)], long_prompts=1)
    p0, _, long_prompts = closing_words(without, with_control, parameters)
    assert p0 == (
        "P0 (first token within 1 s, 60 ms per token): "
        "kept for 0 % of its requests without, 100 % with control."
    )
    assert "7 without, 1 with control" in long_prompts


def test_control_that_did_not_help(parameters: PolicyParameters) -> None:
    """It is said; a refused request counts as a broken promise, and refusals are named."""
    without = half(parameters, [record(parameters, Priority.P1, 100)])
    refused = record(parameters, Priority.P1, None, Outcome.REJECTED_RATE)
    with_control = half(parameters, [record(parameters, Priority.P1, 100), refused])
    words = closing_words(without, with_control, parameters)
    assert words[1].endswith(
        "100 % of its requests without, 50 % with control. Control did not help it here."
    )
    assert words[-1].startswith("With control, not served: 1 P1 (rejected_rate).")


def test_almost_all_is_not_all(parameters: PolicyParameters) -> None:
    """One broken promise of 3000 does not round to 100 %."""
    records = [record(parameters, Priority.P0, 100)] * 2999 + [record(parameters, Priority.P0, 5000)]
    both = half(parameters, records)
    assert "99.9 % with control" in closing_words(both, both, parameters)[0]


def test_classes_stand_side_by_side(parameters: PolicyParameters) -> None:
    """Without and with for each class; a figure that nobody has is a dash."""
    without = half(parameters, [record(parameters, Priority.P0, 2000)])
    with_control = half(parameters, [record(parameters, Priority.P0, 100)] * 2)
    lines = {line[:20].strip(): line[20:].split() for line in printed(summary_table(without, with_control))}
    assert lines["requests ended"] == ["1", "2", "0", "0", "0", "0"]
    assert lines["TTFT P50, ms"] == ["2,000", "100", "-", "-", "-", "-"]
    assert lines["largest gap, ms"] == ["20", "20", "-", "-", "-", "-"]
    assert lines["given up at end"] == ["0", "0", "0", "0", "3", "3"]


def test_gaps_of_answers_under_way(parameters: PolicyParameters) -> None:
    """They are seen before the answer has ended, of one answer and not between two."""
    gaps = GapWatch()
    for number, now in ((1, 0), (2, 500), (1, 2000), (1, 2010)):
        gaps(Caller(Priority.P0), number, now * MILLISECOND)
    assert gaps.largest_ms == {Priority.P0: 2000}
    report = half(parameters, []).report
    lines = printed(live_table("a half", report, {Priority.P0: 2}, gaps.largest_ms))
    (p0,) = (line.split() for line in lines if line.split()[:1] == ["P0"])
    assert p0[1] == "2"
    assert "2,000" in p0
