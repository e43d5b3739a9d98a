"""What is kept of the last minutes, and that it stays little."""

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.request import Priority
from gateway.telemetry.endings import ended_at_the_door
from gateway.telemetry.recent import ENDINGS_KEPT, Recent, quantile

SECOND = NANOSECONDS_PER_SECOND


def ending(
    outcome: Outcome = Outcome.COMPLETED,
    at: int = 0,
    priority: Priority = Priority.P1,
    name: str = "r",
    model: str = "m",
    ttft: int | None = None,
) -> RequestEnded:
    event = ended_at_the_door(name, outcome, at, at, priority=priority, model=model, streaming=True)
    return event._replace(ttft_ns=ttft)


def test_a_flood_in_one_class_pushes_nothing_out_of_another() -> None:
    """The newest come first, and of each class the last ones are kept."""
    recent = Recent()
    recent.ended(ending(at=1, priority=Priority.P0, name="realtime"))
    for number in range(ENDINGS_KEPT + 5):
        refused = ending(Outcome.REJECTED_RATE, at=2 + number, priority=Priority.P2, name=f"batch-{number}")
        recent.ended(refused)
    names = [event.request_id for event in recent.endings()]
    assert (len(names), names[0], names[-1]) == (ENDINGS_KEPT + 1, f"batch-{ENDINGS_KEPT + 4}", "realtime")
    assert [event.request_id for event in recent.endings([Priority.P0])] == ["realtime"]
    assert recent.refused(Priority.P2) == ENDINGS_KEPT + 5


def test_long_names_are_cut() -> None:
    """A model's name is as long as a client likes."""
    recent = Recent()
    recent.ended(ending(model="m" * 1_000_000))
    (event,) = recent.endings()
    assert len(event.model) <= 100


def test_counts_of_a_minute_forget_what_is_older() -> None:
    """Before a minute has passed they are all that happened."""
    recent = Recent()
    told = []
    for second in range(100):
        recent.tick(second * SECOND)
        if second in (0, 30, 59):
            recent.ended(ending(Outcome.REJECTED_RATE, at=second * SECOND))
        told.append(recent.last_minute(Priority.P1)[Outcome.REJECTED_RATE])
    assert [told[second] for second in (0, 29, 30, 59, 60, 61, 90, 91, 99)] == [1, 1, 2, 3, 3, 2, 2, 1, 1]
    assert recent.last_minute(Priority.P0) == {}
    assert recent.totals[Priority.P1] == {Outcome.REJECTED_RATE: 3}


def test_latencies_are_those_of_streams_in_the_window() -> None:
    recent = Recent()
    recent.ended(ending(at=1 * SECOND, ttft=7))
    recent.ended(ending(at=5 * SECOND, ttft=9))
    recent.ended(ending(Outcome.REJECTED_RATE, at=6 * SECOND))
    assert [each.ttft for each in recent.latencies(Priority.P1, 2 * SECOND)] == [9]


def test_quantiles_are_values_that_were_measured() -> None:
    """Nearest rank; none of nothing."""
    assert quantile([], 0.5) is None
    assert [quantile([1, 2, 3, 4], part) for part in (0.5, 0.75, 0.99, 0.0)] == [2, 3, 4, 1]
