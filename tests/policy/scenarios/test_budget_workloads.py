"""The token budget at work: spikes, lending, ceilings, long prompts, debt. C = 1000 tokens a second."""

import pytest

from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Priority
from tests.support.drivers import DRIVERS, Driver
from tests.support.policy_settings import ENDLESS, P0, P1, P2, nanoseconds, policy, upstream
from tests.support.stories import Story, both, finish, first_token, nothing, submit, tell
from tests.support.workloads import (
    arrivals,
    at_once,
    backlog,
    dispatched,
    paid_tokens,
    seconds,
    under_both,
)

SHARES = {P0: 600, P1: 350, P2: 50}
BURSTS = {P0: 300, P1: 175, P2: 25}
WIDE = upstream(max_in_flight=None, tokens_per_second=1000)


def budget(**given: object) -> PolicyParameters:
    """Bursts of half a second, and nothing else that binds."""
    return policy(WIDE, capacity={"burst_seconds": 0.5, "min_burst_tokens": 0}, **given)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- spikes


SPIKY = {P0: {"throttle": 0.5, "wait": 2}, P2: {"ceiling_share": 0.5}}


def book_spike(driver: Driver) -> None:
    """Twice P0's rate for three seconds. P1 and P2 have more to do than they may: nothing is lent."""
    driver.service = at_once
    backlog(driver, P1, 400, 10)
    backlog(driver, P2, 60, 10)
    arrivals(driver, P0, every=10 / 1200, start=1.0, end=4.0, tokens=10)


def test_a_burst_of_half_a_second_passes_whole() -> None:
    """Half a second's worth of P0 tokens passes at the instant it comes, and not a token more."""

    def book(driver: Driver) -> None:
        driver.service = at_once
        backlog(driver, P1, 400, 10)
        backlog(driver, P2, 60, 10)
        backlog(driver, P0, 31, 10, at=1.0)

    with under_both(budget(), book, 3) as driver:
        burst = dispatched(driver, 1.0, 1.0001)
        assert sum(t.priority is P0 for t in burst) == 30
        late = driver.tickets["P0 1.0 30"]
        assert seconds(late.queue_wait_ns) == pytest.approx(10 / 600, abs=1e-6)
        assert paid_tokens(driver, P1, 1, 1.5) == pytest.approx(175, abs=10)
        assert paid_tokens(driver, P2, 1, 1.5) == pytest.approx(25, abs=10)


def test_a_spike_that_lasts_is_throttled_and_then_refused() -> None:
    """Twice the rate: from half a second on P0 is throttled, from about one second on refused."""
    with under_both(budget(classes=SPIKY), book_spike, 8) as driver:
        p0 = sorted((t for t in driver.tickets.values() if t.priority is P0), key=lambda t: t.seq)
        assert len(p0) == 360
        waited = [t for t in p0 if t.refusal is None and seconds(t.queue_wait_ns) > 1e-6]
        refused = [t for t in p0 if t.refusal is not None]
        assert {t.refusal.outcome for t in refused if t.refusal} == {"rejected_rate"}
        assert seconds(waited[0].arrived_at) == pytest.approx(1.5, abs=0.02)
        assert seconds(refused[0].arrived_at) == pytest.approx(2.0, abs=0.05)
        assert max(seconds(t.queue_wait_ns) for t in waited) <= 0.5
        # In the last two seconds the promise is kept at the rate, the other half is refused
        served = sum(t.refusal is None for t in p0 if t.arrived_at >= nanoseconds(2.1))
        assert served == pytest.approx(0.5 * 1.9 * 120, abs=4)


def test_retry_advice_is_when_it_would_really_pass() -> None:
    """The advice of each refusal is within a fifth of when the bucket would have paid for it."""
    with under_both(budget(classes=SPIKY), book_spike, 8) as driver:
        accepted = 0
        checked = 0
        for ticket in sorted((t for t in driver.tickets.values() if t.priority is P0), key=lambda t: t.seq):
            if ticket.refusal is None:
                accepted += 10
                continue
            # All that was accepted before it, and itself, out of 300 tokens and 600 a second from 1.0 on
            passes_at = 1.0 + (accepted + 10 - 300) / 600
            advice = seconds(ticket.refusal.retry_after_ns)
            assert advice == pytest.approx(passes_at - seconds(ticket.arrived_at), rel=0.2)
            checked += 1
        assert checked > 50


# ---------------------------------------------------------------------- lending


@pytest.mark.parametrize("alone", [P0, P1, P2])
def test_a_class_alone_gets_all_of_c(alone: Priority) -> None:
    """Whoever is alone gets C, batch too: shares are guarantees, not limits."""
    parameters = budget(classes={P2: {"ceiling_share": 0.5}})

    def book(driver: Driver) -> None:
        driver.service = at_once
        backlog(driver, alone, 600, 10)

    with under_both(parameters, book, 5) as driver:
        assert paid_tokens(driver, alone, 0, 0.001) == pytest.approx(BURSTS[alone], abs=10)
        assert paid_tokens(driver, alone, 0.001, 5) == pytest.approx(5000, abs=20)


def test_all_busy_each_gets_its_share() -> None:
    """With a backlog in every class each gets its share of C, whatever the others ask for."""

    def book(driver: Driver) -> None:
        driver.service = at_once
        for p in Priority:
            backlog(driver, p, 600, 10)

    with under_both(budget(classes={P2: {"ceiling_share": 0.5}}), book, 5) as driver:
        for p in Priority:
            assert paid_tokens(driver, p, 0.001, 5) == pytest.approx(5 * SHARES[p], abs=10)


def test_ceiling_beside_an_active_class_and_its_tail() -> None:
    """P2 beside a P0 in flight gets half of C, and all of C from five seconds after P0's end."""
    parameters = budget(classes={P2: {"ceiling_share": 0.5}})

    def book(driver: Driver) -> None:
        driver.service = lambda t: None if t.ask.request_id == "realtime" else (0.001, 0.001)
        driver.at(0, lambda: driver.submit("realtime", P0, 1))
        backlog(driver, P2, 1400, 10)
        driver.at(nanoseconds(4), lambda: driver.finish("realtime"))

    with under_both(parameters, book, 12) as driver:
        assert paid_tokens(driver, P2, 1, 4) == pytest.approx(1500, abs=10)
        assert paid_tokens(driver, P2, 4, 9) == pytest.approx(2500, abs=10)
        assert paid_tokens(driver, P2, 9, 12) == pytest.approx(3000, abs=10)


def test_waiting_requests_count_as_activity() -> None:
    """P0 that only waits, and is refused in the end, holds P2 to its ceiling until five seconds later."""
    parameters = policy(
        upstream("a", models=("m",), max_in_flight=None, tokens_per_second=500),
        upstream("b", models=("m", "full"), max_in_flight=0, tokens_per_second=500),
        capacity={"burst_seconds": 0.5, "min_burst_tokens": 0},
        classes={P2: {"ceiling_share": 0.5}, P0: {"wait": 2}},
    )

    def book(driver: Driver) -> None:
        driver.service = at_once
        driver.at(0, lambda: driver.submit("waits", P0, 1, model="full"))
        backlog(driver, P2, 1000, 10)

    with under_both(parameters, book, 9) as driver:
        assert driver.tickets["waits"].refusal is not None
        assert paid_tokens(driver, P2, 1, 2) == pytest.approx(500, abs=10)
        assert paid_tokens(driver, P2, 2, 7) == pytest.approx(2500, abs=10)
        assert paid_tokens(driver, P2, 7, 9) == pytest.approx(2000, abs=10)


def test_a_share_is_back_within_one_refill() -> None:
    """P1 lives on all of C; P0 comes back and has its burst at once and its share from then on."""

    def book(driver: Driver) -> None:
        driver.service = at_once
        backlog(driver, P1, 1200, 10)
        backlog(driver, P0, 400, 10, at=5.0)

    with under_both(budget(), book, 9) as driver:
        assert paid_tokens(driver, P1, 1, 5) == pytest.approx(4000 - 0, abs=20)
        assert paid_tokens(driver, P0, 5, 5.0001) == 300
        for second in (5, 6, 7, 8):
            assert paid_tokens(driver, P0, second + 0.0001, second + 1) == pytest.approx(600 + 50, abs=11)
            assert paid_tokens(driver, P1, second + 0.0001, second + 1) == pytest.approx(350, abs=11)


def test_long_run_rate_holds_with_oversize_requests() -> None:
    """Requests three times the burst are served, one after the other, at C in the long run."""

    def book(driver: Driver) -> None:
        driver.service = at_once
        backlog(driver, P0, 30, 900)

    with under_both(budget(), book, 20) as driver:
        assert paid_tokens(driver, P0, 0, 20) == pytest.approx(20_000 + 300 + 600, abs=900)
        assert len(dispatched(driver, 0, 0.001)) == 1


# ---------------------------------------------------------------------- long prompts and debt

LONG = {"long_prompt_tokens": 50, "long_prompt_duty": 1.0}

STORIES = [
    Story(
        "beside an active class a long prompt is paid by its own share alone, and its head is not bypassed",
        budget(scheduling=LONG),
        [
            (0.0, submit("r", P0), {"r": "dispatched"}),
            (0.0, submit("a", P1, 50), {"a": "dispatched"}),
            (0.0, submit("b", P1, 50), {"b": "dispatched"}),
            (0.0, submit("c", P1, 50), {"c": "dispatched"}),
            (0.0, submit("d", P1, 25), {"d": "dispatched"}),
            (0.0, submit("long", P1, 100), {}),
            (0.1, submit("short", P1, 10), {}),
            (100 / 350, nothing, {"long": "dispatched", "short": "dispatched"}),
            (1.0, both(*(finish(n) for n in ("r", "a", "b", "c", "d", "long", "short"))), {}),
        ],
    ),
    Story(
        "alone a long prompt may run on lent tokens",
        budget(scheduling=LONG),
        [
            (0.0, submit("a", P1, 175), {"a": "dispatched"}),
            (0.0, submit("long", P1, 100), {}),
            (0.0, finish("a"), {}),
            (0.1, nothing, {"long": "dispatched"}),
            (1.0, finish("long"), {}),
        ],
    ),
    Story(
        "when the higher class falls silent what was lent counts as own",
        budget(scheduling=LONG),
        [
            (0.0, both(submit("r", P0), finish("r")), {"r": "dispatched"}),
            (4.9, both(submit("a", P1, 175), first_token("a")), {"a": "dispatched"}),
            (4.9, submit("long", P1, 120), {}),  # own share: 35 tokens by 5.0; all of C: 100 by 5.0
            (5.02, nothing, {"long": "dispatched"}),
            (6.0, both(finish("a"), finish("long")), {}),
        ],
    ),
    Story(
        "a short request beside an active class may run on lent tokens",
        budget(scheduling=LONG),
        [
            (0.0, submit("r", P0), {"r": "dispatched"}),
            (0.0, submit("a", P1, 175), {"a": "dispatched"}),
            (0.1, submit("b", P1, 50), {"b": "dispatched"}),
            (1.0, both(finish("r"), finish("a"), finish("b")), {}),
        ],
    ),
    Story(
        "an oversize prompt goes on a full bucket and leaves debt; the next one is not locked out",
        budget(),
        [
            (0.0, submit("a", P0, 1300), {"a": "dispatched"}),  # 300 − 1300 = −1000
            (0.0, submit("b", P0, 100), {}),
            (1.1, nothing, {"b": "dispatched"}),
            (1.1, submit("c", P0, 5000), {}),
            (1.4, nothing, {"c": "dispatched"}),
            (2.0, both(finish("a"), finish("b"), finish("c")), {}),
        ],
    ),
    Story(
        "what was estimated too low is owed, what was estimated too high comes back",
        budget(),
        [
            (0.0, submit("a", P0, 300), {"a": "dispatched"}),
            (0.0, finish("a", 500), {}),
            (0.0, submit("b", P0, 100), {}),
            (0.3, nothing, {"b": "dispatched"}),
            (0.3, submit("c", P0, 50), {}),
            (0.3, finish("b", 50), {"c": "dispatched"}),
            (0.3, finish("c"), {}),
        ],
    ),
]


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("story", STORIES, ids=lambda s: s.title)
def test_story(story: Story, kind: type[Driver]) -> None:
    """Each story is decided as told, at the instants told, under both drivers."""
    tell(story, kind)


def test_who_stands_behind_a_long_prompt_is_told_of_its_wait() -> None:
    """Lent tokens flow fast, but the long prompt ahead waits for its own share; so does all behind it."""

    def book(driver: Driver) -> None:
        driver.service = at_once
        driver.at(0, lambda: driver.submit("r", P0))
        arrivals(driver, P1, every=0.04, start=0, end=2.8, tokens=42)  # a little more than all of C
        driver.at(nanoseconds(2.8), lambda: driver.submit("long", P1, 100))
        driver.at(nanoseconds(2.8), lambda: driver.submit("short", P1, 10, timeout=0.15))

    with under_both(budget(scheduling=LONG, throttle=ENDLESS), book, 8) as driver:
        refusal = driver.tickets["short"].refusal
        assert refusal is not None
        assert refusal.outcome is Outcome.REJECTED_RATE
        assert refusal.retry_after_ns is not None
        long = driver.tickets["long"]
        assert seconds(refusal.retry_after_ns) == pytest.approx(seconds(long.queue_wait_ns), rel=0.2)
