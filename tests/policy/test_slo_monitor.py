"""How well the promises are kept: which endings count, in which view, of which whole."""

from typing import Any

import pytest

from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import SloWindow
from gateway.policy.request import PRIORITIES, Priority
from gateway.policy.slo_monitor import SLOS, VIEWS, WHOLES, SloMonitor
from tests.support.policy_settings import P0, P1, P2, class_parameters, nanoseconds

PROMISES: dict[Priority, dict[str, Any]] = {
    P0: {"ttft": 1.0, "tpot": 0.06, "gap": 2.0},
    P1: {"ttft": 3.0},
    P2: {},
}


def monitor(window_requests: int = 1000, window_seconds: float = 60) -> SloMonitor:
    classes = {p: class_parameters(p, **PROMISES[p]) for p in PRIORITIES}
    return SloMonitor(classes, SloWindow(window_requests, nanoseconds(window_seconds)))


def ended(
    at: float = 10,
    outcome: Outcome = Outcome.COMPLETED,
    priority: Priority = P0,
    queued: float | None = 0.0,
    ttft: float | None = 0.5,
    tpot: float | None = None,
    gap: float | None = None,
    took: float = 5,
    streaming: bool = True,
) -> RequestEnded:
    """`ttft` counts from arrival; `queued` None = never dispatched."""

    def ns(seconds: float | None) -> int | None:
        return None if seconds is None else nanoseconds(seconds)

    return RequestEnded(
        request_id="r",
        priority=priority,
        tenant="t",
        model="m",
        outcome=outcome,
        streaming=streaming,
        upstream=None if queued is None else "gpu0",
        arrived_at=nanoseconds(at - took),
        ended_at=nanoseconds(at),
        queue_wait_ns=ns(queued),
        ttft_ns=ns(ttft),
        upstream_ttft_ns=None if ttft is None or queued is None else nanoseconds(ttft - queued),
        tpot_ns=ns(tpot),
        max_gap_ns=ns(gap),
        usage=None,
        estimated_cost=0,
        charged=0,
        promoted=False,
    )


def attainment(
    *events: RequestEnded,
    slo: str = "ttft",
    view: str = "arrival",
    of: str = "offered",
    priority: Priority = P0,
    now: float = 10,
) -> float | None:
    m = monitor()
    for event in events:
        m.record(event)
    return m.attainment(priority, slo, view, of, nanoseconds(now))


def test_no_sample_is_no_number() -> None:
    """Without a sample attainment is absent, not zero and not one."""
    for slo in SLOS:
        for view in VIEWS:
            for of in WHOLES:
                for p in PRIORITIES:
                    assert attainment(slo=slo, view=view, of=of, priority=p) is None


def test_a_class_without_promises_has_no_attainment() -> None:
    """P2 has no SLO, and a class is judged only by what it was promised."""
    assert attainment(ended(priority=P2), priority=P2) is None
    assert attainment(ended(priority=P1, tpot=9), priority=P1, slo="tpot") is None
    assert attainment(ended(priority=P1, tpot=9), priority=P1, slo="all") == 1


@pytest.mark.parametrize(("ttft", "met"), [(0.999, 1), (1.0, 1), (1.001, 0)])
def test_first_token_within_its_target(ttft: float, met: float) -> None:
    """A promise is kept up to and including its target."""
    assert attainment(ended(ttft=ttft)) == met


def test_two_views() -> None:
    """Time in the gateway's own queue counts for the user's view and not for the engine's."""
    slow_queue = ended(queued=3.0, ttft=3.5)
    assert attainment(slow_queue, view="arrival") == 0
    assert attainment(slow_queue, view="dispatch") == 1


@pytest.mark.parametrize(
    ("event", "ttft", "tpot", "everything"),
    [
        (ended(tpot=0.05, gap=1), 1, 1, 1),
        (ended(tpot=0.07, gap=1), 1, 0, 0),
        (ended(tpot=0.05, gap=3), 1, 1, 0),
        (ended(ttft=2, tpot=0.05), 0, 1, 0),
        (ended(), 1, None, 1),
        (ended(ttft=None), None, None, None),
    ],
)
def test_all_promises_together(
    event: RequestEnded, ttft: float | None, tpot: float | None, everything: float | None
) -> None:
    """`all` needs every promise that applies, no other; no token is no sample."""
    for view in VIEWS:
        told = [attainment(event, slo=slo, view=view) for slo in ("ttft", "tpot", "all")]
        assert told == [ttft, tpot, everything]


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome.REJECTED_RATE,
        Outcome.REJECTED_QUEUE_FULL,
        Outcome.QUEUE_TIMEOUT,
        Outcome.REJECTED_NO_UPSTREAM,
        Outcome.REJECTED_DRAINING,
    ],
)
def test_refusals_are_misses_of_the_offered(outcome: Outcome) -> None:
    """Told no by the class is a missed promise of the offered, and no matter of the admitted."""
    refused = ended(outcome=outcome, queued=None, ttft=None)
    for view in VIEWS:
        for slo in SLOS:
            assert attainment(refused, slo=slo, view=view) == 0
            assert attainment(refused, slo=slo, view=view, of="admitted") is None
    assert attainment(refused, ended()) == 0.5


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome.UPSTREAM_REFUSED,
        Outcome.UPSTREAM_TIMEOUT,
        Outcome.UPSTREAM_ERROR,
        Outcome.UPSTREAM_ABORTED,
        Outcome.INTERNAL_ERROR,
    ],
)
def test_failures_are_misses_of_both(outcome: Outcome) -> None:
    """A request that the engine or the gateway let down is missed, however fast its first token was."""
    for of in WHOLES:
        assert attainment(ended(outcome=outcome), of=of) == 0
        assert attainment(ended(outcome=outcome, ttft=None), of=of) == 0


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome.BAD_REQUEST,
        Outcome.TOO_LARGE,
        Outcome.UNAUTHORIZED,
        Outcome.FORBIDDEN,
        Outcome.NOT_FOUND,
    ],
)
def test_the_callers_own_mistakes_do_not_count(outcome: Outcome) -> None:
    """What only the caller did wrong is neither offered nor missed."""
    assert attainment(ended(outcome=outcome, queued=None, ttft=None)) is None


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_GONE_QUEUED, Outcome.CLIENT_GONE_STREAMING])
def test_a_client_that_leaves(outcome: Outcome) -> None:
    """Gone before the first-token target says nothing; gone after it without a token is a miss."""
    assert attainment(ended(outcome=outcome, ttft=None, took=0.9)) is None
    assert attainment(ended(outcome=outcome, ttft=None, took=1.0)) is None
    assert attainment(ended(outcome=outcome, ttft=None, took=1.1)) == 0


@pytest.mark.parametrize(
    ("outcome", "met"),
    [(Outcome.CLIENT_GONE_STREAMING, 1), (Outcome.CLIENT_STALLED, 1), (Outcome.UPSTREAM_ABORTED, 0)],
)
def test_a_client_that_got_tokens_and_left_is_judged_by_what_it_got(outcome: Outcome, met: int) -> None:
    """It was not let down, unlike one whose stream broke off; what came too slowly was missed."""
    for slo in SLOS:
        assert attainment(ended(outcome=outcome, tpot=0.05, gap=1), slo=slo) == met
    assert attainment(ended(outcome=outcome, tpot=0.07), slo="tpot") == 0
    assert attainment(ended(outcome=outcome, ttft=1.1)) == 0


def test_non_streamed_answers_do_not_count() -> None:
    """A non-streamed answer has no first token to judge."""
    for slo in SLOS:
        assert attainment(ended(streaming=False, ttft=None), slo=slo) is None


def test_window_in_requests() -> None:
    """Only the last so many requests of the class count, and other classes do not push them out."""
    m = monitor(window_requests=10)
    for i in range(30):
        m.record(ended(at=10 + i / 100, ttft=9 if i < 25 else 0.1))
        m.record(ended(at=10 + i / 100, priority=P1, ttft=0.1))
    assert m.attainment(P0, "ttft", "arrival", "offered", nanoseconds(11)) == 0.5
    assert m.attainment(P1, "ttft", "arrival", "offered", nanoseconds(11)) == 1


def test_window_in_time() -> None:
    """Samples leave when they are older than the window, and a silent class comes to have none."""
    m = monitor(window_seconds=60)
    m.record(ended(at=10, ttft=9))
    m.record(ended(at=40))
    times = {70: 0.5, 70.001: 1, 100: 1, 100.001: None}
    for now, expected in times.items():
        assert m.attainment(P0, "ttft", "arrival", "offered", nanoseconds(now)) == expected


def test_a_promise_that_was_not_made_cannot_be_broken() -> None:
    """A refused request breaks the promises of its class, and only those."""
    refused = ended(outcome=Outcome.QUEUE_TIMEOUT, priority=P1, queued=None, ttft=None)
    assert attainment(refused, priority=P1, slo="ttft") == 0
    assert attainment(refused, priority=P1, slo="tpot") is None
    assert attainment(refused, priority=P1, slo="all") == 0
