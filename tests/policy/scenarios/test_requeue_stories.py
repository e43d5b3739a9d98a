"""Stories of engines that have no room and send a request back: it waits again, once, as if it had never
left, and the engine is left alone for a moment."""

from contextlib import closing

import pytest

from gateway.policy.outcome import Outcome
from gateway.policy.request import Priority, Stage
from tests.support.drivers import DRIVERS, Driver
from tests.support.policy_settings import P0, P1, P2, nanoseconds, policy, upstream
from tests.support.stories import (
    Action,
    Story,
    both,
    cancel,
    drain,
    engine_load,
    finish,
    first_token,
    health,
    nothing,
    requeue,
    see,
    submit,
    tell,
)

WIDE = upstream(max_in_flight=None)
SLOW = upstream(max_in_flight=None, tokens_per_second=1000)
SMALL_BURSTS = {"burst_seconds": 0.5, "min_burst_tokens": 0}
"""Bursts of 300 / 175 / 25 tokens at 1000 tokens a second."""


def level(priority: Priority, tokens: float) -> Action:
    def check(driver: Driver) -> None:
        driver.pool.buckets.advance(driver.clock.now())
        assert driver.pool.buckets.level_tokens(priority) == pytest.approx(tokens)

    return see(check)


def waits(name: str, stage: Stage) -> Action:
    def check(driver: Driver) -> None:
        assert driver.tickets[name].stage is stage

    return see(check)


def ends(*names: str) -> Action:
    return both(*(finish(name) for name in names))


STORIES = [
    Story(
        "its engine is left alone for a quarter of a second",
        policy(WIDE),
        [
            (0, submit("a", P0), {"a": "dispatched"}),
            (1, requeue("a"), {}),
            (1.1, submit("b", P0), {}),
            (1.25, nothing, {"a": "dispatched", "b": "dispatched"}),
            (2, ends("a", "b"), {}),
        ],
    ),
    Story(
        "or until a request there ends",
        policy(WIDE),
        [
            (0, both(submit("a", P0), submit("b", P1)), {"a": "dispatched", "b": "dispatched"}),
            (1, requeue("a"), {}),
            (1.1, first_token("b"), {}),
            (1.2, finish("b"), {"a": "dispatched"}),
            (2, finish("a"), {}),
        ],
    ),
    Story(
        "sending back another one begins the time anew",
        policy(WIDE),
        [
            (0, both(submit("a", P0), submit("b", P1)), {"a": "dispatched", "b": "dispatched"}),
            (1, requeue("a"), {}),
            (1.2, requeue("b"), {}),
            (1.45, nothing, {"a": "dispatched", "b": "dispatched"}),
            (2, ends("a", "b"), {}),
        ],
    ),
    Story(
        "what it has is what it can take: a place that comes free is one place",
        policy(WIDE),
        [
            (0, both(*(submit(n, P1) for n in "abcd")), dict.fromkeys("abcd", "dispatched")),
            (1, both(requeue("c"), requeue("d")), {}),
            (1.1, both(submit("e", P1), submit("f", P1), submit("g", P1)), {}),
            (1.5, nothing, {}),  # long after the pause
            (2, finish("a"), {"c": "dispatched"}),
            (3, finish("b"), {"d": "dispatched", "e": "dispatched"}),  # as many have completed: one more
            (4, requeue("e"), {}),
            (5, finish("c"), {"e": "dispatched"}),
            (5.5, submit("h", P1), {}),
            (34, nothing, {"f": "dispatched", "g": "dispatched", "h": "dispatched"}),  # it last said no at 4
            (35, ends("d", "e", "f", "g", "h"), {}),
        ],
    ),
    Story(
        "another upstream is taken meanwhile, by it and by everybody",
        policy(upstream("a", max_in_flight=None), upstream("b", max_in_flight=2)),
        [
            (0, submit("r", P2), {"r": "dispatched@a"}),
            (0, requeue("r"), {"r": "dispatched@b"}),
            (0.1, submit("s", P2), {"s": "dispatched@b"}),
            (0.2, submit("t", P0), {}),
            (0.25, nothing, {"t": "dispatched@a"}),
            (1, ends("r", "s", "t"), {}),
        ],
    ),
    Story(
        "it is the first of its tenant again, and its tenant's turn has come back",
        policy(upstream(max_in_flight=2)),
        [
            (0, submit("x0", P1, 10, tenant="x"), {"x0": "dispatched"}),
            (0, submit("holder", P0, tenant="h"), {"holder": "dispatched"}),
            (0, both(submit("y0", P1, 10, tenant="y"), submit("x1", P1, 10, tenant="x")), {}),
            (1, requeue("x0"), {}),
            (1.2, finish("holder"), {"x0": "dispatched", "y0": "dispatched"}),
            (2, finish("y0"), {"x1": "dispatched"}),
            (3, ends("x0", "x1"), {}),
        ],
    ),
    Story(
        "several sent back go again in the order in which they came",
        policy(upstream(max_in_flight=3)),
        [
            (0, both(*(submit(n, P1) for n in "abcd")), dict.fromkeys("abc", "dispatched")),
            (1, both(requeue("b"), requeue("a"), requeue("c")), {}),
            (1.25, nothing, dict.fromkeys("abc", "dispatched")),
            (2, finish("a"), {"d": "dispatched"}),
            (3, ends("b", "c", "d"), {}),
        ],
    ),
    Story(
        "it waits until the deadline that it had",
        policy(WIDE, wait=2),
        [
            (0, submit("a", P0), {"a": "dispatched"}),
            (1.9, requeue("a"), {}),
            (2, nothing, {"a": "queue_timeout"}),
            (3, submit("b", P0), {"b": "dispatched"}),
            (4, finish("b"), {}),
        ],
    ),
    Story(
        "booked twice it times out once",
        policy(upstream(max_in_flight=2), wait=2, classes={P2: {"wait": 1}}),
        [
            (0, both(engine_load(waiting=5), submit("keeps the bookings", P2)), {}),
            (0, submit("holder", P0, tenant="h"), {"holder": "dispatched"}),
            (0, submit("a", P0), {"a": "dispatched"}),
            (0.9, requeue("a"), {}),
            (0.95, submit("b", P0), {}),
            (0.95, health("gpu0", False), {}),
            (1, nothing, {"keeps the bookings": "rejected_no_upstream"}),
            (2, nothing, {"a": "rejected_no_upstream"}),
            (2.95, nothing, {"b": "rejected_no_upstream"}),
            (3, finish("holder"), {}),
        ],
    ),
    Story(
        "sent back after its deadline it may go at once to another engine, or else its time is over",
        policy(upstream("a"), upstream("b"), wait=2),
        [
            (0, submit("r", P0), {"r": "dispatched@a"}),
            (3, requeue("r"), {"r": "dispatched@b"}),
            (4, submit("s", P0), {"s": "dispatched@a"}),
            (7, requeue("s"), {"s": "queue_timeout"}),
            (8, finish("r"), {}),
        ],
    ),
    Story(
        "its charge comes back, and is taken again when it goes",
        policy(SLOW, capacity=SMALL_BURSTS),
        [
            (0, submit("a", P0, 200), {"a": "dispatched"}),
            (0, both(level(P0, 100), requeue("a"), level(P0, 100), waits("a", Stage.READY)), {}),
            (0.1, cancel("a"), {"a": "client_gone_queued"}),
            (0.1, level(P0, 300), {}),
        ],
    ),
    Story(
        "where its class has no tokens any more it waits for them, before the others of its tenant",
        policy(SLOW, capacity=SMALL_BURSTS, classes={P0: {"share": 1.0}, P1: {"share": 0}, P2: {"share": 0}}),
        # C = 1000, burst 500
        [
            (0, submit("a", P0, 700), {"a": "dispatched"}),
            (0, level(P0, -200), {}),
            (0, both(submit("b", P0, 100), submit("c", P0, 100)), {}),
            (0, both(requeue("a"), waits("a", Stage.READY)), {}),
            (0.25, nothing, {"a": "dispatched"}),
            (0.3, nothing, {"b": "dispatched"}),
            (0.4, nothing, {"c": "dispatched"}),
            (1, ends("a", "b", "c"), {}),
        ],
    ),
    Story(
        "its tokens were spent by another: it waits for others, first of its tenant but for the head",
        policy(SLOW, capacity=SMALL_BURSTS),
        [
            (0, both(submit("a", P0, 100), submit("z", P0, 100)), {"a": "dispatched", "z": "dispatched"}),
            (0, finish("z", 400), {}),
            (0, level(P0, -200), {}),
            (0, both(submit("b", P0, 100), submit("c", P0, 100)), {}),
            (0, both(requeue("a"), waits("a", Stage.THROTTLED)), {}),
            (0.25, nothing, {"b": "dispatched"}),  # paid at 0.2
            (0.3, nothing, {"a": "dispatched"}),
            (0.4, nothing, {"c": "dispatched"}),
            (1, ends("a", "b", "c"), {}),
        ],
    ),
    Story(
        "drained while it waits",
        policy(WIDE),
        [
            (0, submit("a", P0), {"a": "dispatched"}),
            (1, requeue("a"), {}),
            (1.1, drain(), {"a": "rejected_draining"}),
            (9, nothing, {}),
        ],
    ),
    Story(
        "sent back while the gateway drains",
        policy(WIDE),
        [
            (0, submit("a", P0), {"a": "dispatched"}),
            (1, drain(), {}),
            (2, requeue("a"), {"a": "rejected_draining"}),
        ],
    ),
    Story(
        "its client leaves while it waits again",
        policy(WIDE),
        [
            (0, submit("a", P0), {"a": "dispatched"}),
            (1, requeue("a"), {}),
            (1.1, both(cancel("a"), cancel("a")), {"a": "client_gone_queued"}),
            (2, submit("b", P0), {"b": "dispatched"}),
            (3, finish("b"), {}),
        ],
    ),
    Story(
        "its engine goes down while it waits again",
        policy(WIDE, no_upstream_seconds=1, wait=60),
        [
            (0, submit("a", P0), {"a": "dispatched"}),
            (5, both(requeue("a"), health("gpu0", False)), {}),
            (6, nothing, {"a": "rejected_no_upstream"}),
        ],
    ),
    Story(
        "a lower class does not take the place meanwhile",
        policy(upstream(max_in_flight=1)),
        [
            (0, submit("a", P0), {"a": "dispatched"}),
            (0, both(submit("p1", P1), submit("p0", P0)), {}),
            (1, requeue("a"), {}),
            (1.25, nothing, {"a": "dispatched"}),
            (2, finish("a"), {"p0": "dispatched"}),
            (3, finish("p0"), {"p1": "promoted"}),
            (4, finish("p1"), {}),
        ],
    ),
    Story(
        "a long prompt gets back its turn in the lane, since nothing of it ran",
        policy(SLOW, scheduling={"long_prompt_tokens": 100}, capacity={"min_burst_tokens": 10**6}),
        [
            (0, both(*(submit(n, P0) for n in "pqr")), dict.fromkeys("pqr", "dispatched")),
            (0, submit("long", P1, 200), {"long": "dispatched"}),  # the next one in 5 s
            (1, requeue("long"), {}),
            (1.25, finish("q"), {"long": "dispatched"}),
            (1.5, both(first_token("long"), submit("next", P1, 200), finish("r")), {}),
            (6.25, nothing, {"next": "dispatched"}),
            (7, ends("p", "long", "next"), {}),
        ],
    ),
    Story(
        "the turn of one that did run is not given back with that of a later one",
        policy(SLOW, scheduling={"long_prompt_tokens": 100}, capacity={"min_burst_tokens": 10**6}),
        [
            (0, both(*(submit(n, P0) for n in "pqr")), dict.fromkeys("pqr", "dispatched")),
            (0, submit("ran", P1, 200), {"ran": "dispatched"}),
            (0.2, first_token("ran"), {}),
            (1, submit("long", P1, 200), {}),
            (5, nothing, {"long": "dispatched"}),
            (6, requeue("long"), {}),
            (6.25, finish("q"), {"long": "dispatched"}),
            (6.5, both(first_token("long"), finish("r")), {}),
            (7, submit("next", P2, 150), {}),
            (11.25, nothing, {"next": "dispatched"}),
            (12, ends("p", "ran", "long", "next"), {}),
        ],
    ),
    Story(
        "an answer that is not streamed counts as started from its second try on",
        policy(SLOW, scheduling={"max_pending_prefill_tokens": 50}, capacity={"min_burst_tokens": 10**6}),
        [
            (0, submit("a", P1, 100, streaming=False), {"a": "dispatched"}),  # taken for started at 0.1
            (0.09, requeue("a"), {}),
            (0.34, nothing, {"a": "dispatched"}),
            (0.35, submit("b", P1, 1), {}),
            (0.44, nothing, {"b": "dispatched"}),
            (1, ends("a", "b"), {}),
        ],
    ),
    Story(
        "sent back in the instant it was sent, not streamed, it goes to the other engine as soon",
        policy(
            upstream("a", max_in_flight=None, tokens_per_second=1000),
            upstream("b", max_in_flight=None, tokens_per_second=1000),
            capacity={"min_burst_tokens": 10**6},
        ),
        [
            (0, submit("r", P1, 100, streaming=False), {"r": "dispatched@a"}),
            (0, requeue("r"), {"r": "dispatched@b"}),
            (1, finish("r"), {}),
        ],
    ),
]


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("story", STORIES, ids=lambda s: s.title)
def test_story(story: Story, kind: type[Driver]) -> None:
    """Each story is decided as told, at the instants told, under both drivers."""
    driver = tell(story, kind)
    assert len(driver.endings.records) == len(driver.tickets)


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
def test_once_only(kind: type[Driver]) -> None:
    """Sent back a second time it may not try again; that is for the caller to pass on."""
    with closing(kind(policy(upstream("a"), upstream("b")))) as driver:
        ticket = driver.submit("r", P0)
        assert driver.admission.may_requeue(ticket)
        driver.requeue("r")
        assert ticket.upstream.name == "b"
        assert not driver.admission.may_requeue(ticket)
        with pytest.raises(ValueError, match="cannot be sent again"):
            driver.requeue("r")
        assert ticket.stage is Stage.DISPATCHED
        driver.finish("r", -1, outcome=Outcome.UPSTREAM_ERROR)
        with pytest.raises(ValueError, match="cannot be sent again"):
            driver.requeue("r")
        assert [r.outcome for r in driver.endings.records] == [Outcome.UPSTREAM_ERROR]


def test_who_cannot_be_sent_back() -> None:
    """One that waits was at no engine, and one that has had its first token has run."""
    driver = DRIVERS[0](policy())
    driver.submit("holder", P0)
    driver.first_token("holder")
    with pytest.raises(ValueError, match="cannot be sent again"):
        driver.requeue("holder")
    assert driver.tickets["holder"].stage is Stage.DISPATCHED
    driver.submit("a", P0)
    with pytest.raises(ValueError, match="cannot be sent again"):
        driver.requeue("a")
    assert driver.tickets["a"].stage is Stage.READY


def test_what_is_told_of_it() -> None:
    """Whoever listens hears of the full engine; the record says that it was sent again, where it was in the
    end, and how long it waited until then."""
    driver = DRIVERS[0](policy(upstream("a"), upstream("b")))
    driver.submit("r", P0, 100)
    driver.at(nanoseconds(3), lambda: driver.requeue("r"))
    driver.at(nanoseconds(4), lambda: driver.first_token("r"))
    driver.at(nanoseconds(5), lambda: driver.finish("r", 100))
    driver.run(6)
    record = driver.endings.record("r")
    assert driver.endings.full == ["a"]
    assert (record.requeued, record.upstream, record.outcome) == (True, "b", Outcome.COMPLETED)
    assert (record.queue_wait_ns, record.upstream_ttft_ns) == (nanoseconds(3), nanoseconds(1))
    assert (record.charged, record.estimated_cost) == (100_000, 100_000)


def test_one_refused_after_it_was_sent_back_was_at_no_engine() -> None:
    """Its record names no upstream and no dispatch, and it paid nothing."""
    driver = DRIVERS[0](policy(wait=2))
    driver.submit("r", P0, 100)
    driver.at(nanoseconds(1.9), lambda: driver.requeue("r"))
    driver.run(3)
    record = driver.endings.record("r")
    assert (record.requeued, record.outcome) == (True, Outcome.QUEUE_TIMEOUT)
    assert (record.upstream, record.queue_wait_ns, record.charged) == (None, None, 0)


def test_one_let_through_while_observed_is_not_sent_again() -> None:
    """Uncharged it would otherwise be charged on its second try, and never settled."""
    classes = {"max_queued_requests": 0}
    driver = DRIVERS[0](policy(observe=True, **classes))
    driver.submit("holder", P0)
    driver.submit("a", P0)
    assert driver.tickets["a"].exempt
    driver.reconfigure(policy())
    assert not driver.admission.may_requeue(driver.tickets["a"])
    assert driver.admission.may_requeue(driver.tickets["holder"])
