"""Stories of tenants' own limits: refused at once, charged together with the class or not at all, settled
once on every ending."""

from contextlib import closing

import pytest

from gateway.policy.admission import Admission, Delivered, RequestTooLong
from gateway.policy.clock import ManualClock
from gateway.policy.events import Observer
from gateway.policy.outcome import Outcome
from gateway.policy.request import Stage, Usage
from tests.support.drivers import DRIVERS, Driver, VirtualDriver
from tests.support.policy_settings import P0, P1, P2, ask, nanoseconds, policy, upstream
from tests.support.stories import (
    Action,
    Story,
    both,
    cancel,
    drain,
    finish,
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
LIMITED = {"t": {"tokens_per_minute": 600, "requests_per_minute": 6}}


def left(tokens: int | None, requests: int | None, tenant: str = "t") -> Action:
    """What the tenant has left, in whole tokens and requests."""

    def check(driver: Driver) -> None:
        buckets = driver.admission.tenants.buckets(tenant, driver.clock.now())
        assert [None if b is None else b.left for b in buckets] == [tokens, requests]

    return see(check)


def by_own_limit(*names: str) -> Action:
    """Those were refused by their tenant's limit, and it says so in refusal and record."""

    def check(driver: Driver) -> None:
        for name in names:
            refusal = driver.tickets[name].refusal
            assert refusal is not None
            assert (refusal.by_tenant_limit, refusal.outcome) == (True, Outcome.REJECTED_RATE)
            assert driver.endings.record(name).by_tenant_limit

    return see(check)


def by_the_class(*names: str) -> Action:
    def check(driver: Driver) -> None:
        for name in names:
            refusal = driver.tickets[name].refusal
            assert refusal is not None
            assert not refusal.by_tenant_limit
            assert not driver.endings.record(name).by_tenant_limit

    return see(check)


def advice(name: str, seconds: float | None) -> Action:
    def check(driver: Driver) -> None:
        refusal = driver.tickets[name].refusal
        assert refusal is not None
        assert refusal.retry_after_ns == (None if seconds is None else nanoseconds(seconds))

    return see(check)


def inside(key: str, requests: int) -> Action:
    def check(driver: Driver) -> None:
        assert driver.admission.tenants.key_places.in_flight(key) == requests

    return see(check)


def class_has(tokens: int, priority: int = P0) -> Action:
    def check(driver: Driver) -> None:
        driver.pool.buckets.advance(driver.clock.now())
        assert driver.pool.buckets.level_tokens(priority) == pytest.approx(tokens)

    return see(check)


STORIES = [
    Story(
        "so many requests a minute, over all classes, and one more each time one has flowed in",
        policy(WIDE, tenants={"t": {"requests_per_minute": 3}}),
        [
            (0, submit("a", P0), {"a": "dispatched"}),
            (0, submit("b", P1), {"b": "dispatched"}),
            (0, submit("c", P2), {"c": "dispatched"}),
            (0, submit("d", P0), {"d": "rejected_rate"}),
            (0, both(by_own_limit("d"), advice("d", 20)), {}),
            (0, submit("other's", P0, tenant="u"), {"other's": "dispatched"}),
            (19.999_999_999, submit("e", P0), {"e": "rejected_rate"}),
            (20, submit("f", P0), {"f": "dispatched"}),
            (20, submit("g", P0), {"g": "rejected_rate"}),
            (21, both(*(finish(n) for n in ("a", "b", "c", "f", "other's"))), {}),
            (30, left(None, 0), {}),
        ],
    ),
    Story(
        "so many tokens a minute, refused at once with the wait, though the class could pay or let it wait",
        policy(SLOW, capacity=SMALL_BURSTS, tenants={"t": {"tokens_per_minute": 120}}),
        [
            (0, submit("a", P0, 100), {"a": "dispatched"}),
            (0, submit("b", P0, 21), {"b": "rejected_rate"}),
            (0, both(by_own_limit("b"), advice("b", 0.5), class_has(200), left(20, None)), {}),
            (0, submit("c", P0, 20), {"c": "dispatched"}),
            (0, submit("other's", P0, 200, tenant="u"), {}),  # waits: the class has 180
            (0.02, nothing, {"other's": "dispatched"}),
            (0.5, submit("d", P0, 1), {"d": "dispatched"}),
            (1, both(*(finish(n) for n in ("a", "c", "d", "other's"))), {}),
        ],
    ),
    Story(
        "0 refuses everything and no wait helps; no limit refuses nothing",
        policy(WIDE, tenants={"t": {"tokens_per_minute": 0}, "u": {"requests_per_minute": 0}, "v": {}}),
        [
            (0, submit("t", P0), {"t": "rejected_rate"}),
            (0, submit("u", P0, tenant="u"), {"u": "rejected_rate"}),
            (0, both(advice("t", None), advice("u", None), by_own_limit("t", "u")), {}),
            (0, submit("v", P0, 10**5, tenant="v"), {"v": "dispatched"}),
            (3600, submit("later", P0), {"later": "rejected_rate"}),
            (3601, finish("v"), {}),
        ],
    ),
    Story(
        "refused by its class a tenant keeps its tokens and its request",
        policy(SLOW, capacity=SMALL_BURSTS, throttle=0.1, tenants=LIMITED),
        [
            (0, submit("a", P0, 300), {"a": "dispatched"}),
            (0, left(300, 5), {}),
            (0, submit("b", P0, 200), {"b": "rejected_rate"}),
            (0, both(by_the_class("b"), left(300, 5)), {}),
            (0, both(finish("a"), left(300, 5)), {}),
        ],
    ),
    Story(
        "refused by its tenant a request leaves the class its tokens, and nothing of it waits",
        policy(SLOW, capacity=SMALL_BURSTS, tenants={"t": {"tokens_per_minute": 100}}),
        [
            (0, submit("a", P0, 60), {"a": "dispatched"}),
            (0, submit("b", P0, 50), {"b": "rejected_rate"}),
            (0, both(by_own_limit("b"), class_has(240)), {}),
            (0, finish("a"), {}),
        ],
    ),
    Story(
        "whoever ends while it waits gets all of it back: cancelled, timed out, pushed out, drained",
        policy(upstream(max_in_flight=1), wait=1, max_queued_requests=2, tenants=LIMITED),
        [
            (0, submit("holder", P0, tenant="u"), {"holder": "dispatched"}),
            (0, both(submit("a", P1, 100), submit("b", P1, 200)), {}),
            (0, left(300, 4), {}),
            (0.5, cancel("a"), {"a": "client_gone_queued"}),
            (0.5, left(405, 5), {}),
            (1, nothing, {"b": "queue_timeout"}),
            (1.1, left(600, 6), {}),
            (2, both(submit("c", P1, 100), submit("d", P1, 200)), {}),
            (2, submit("light", P1, 10, tenant="v"), {"d": "rejected_queue_full"}),
            (2, left(500, 5), {}),
            (2.1, drain(), {"c": "rejected_draining", "light": "rejected_draining"}),
            (2.1, left(600, 6), {}),
            (2.1, submit("e", P1, 100), {"e": "rejected_draining"}),
            (2.1, left(600, 6), {}),
            (3, finish("holder"), {}),
        ],
    ),
    Story(
        "whoever waits for tokens of its class is charged by its tenant meanwhile, and refunded if in vain",
        policy(SLOW, capacity=SMALL_BURSTS, tenants=LIMITED),
        [
            (0, submit("a", P0, 300, tenant="u"), {"a": "dispatched"}),
            (0, submit("b", P0, 100), {}),
            (0, left(500, 5), {}),
            (0.05, cancel("b"), {"b": "client_gone_queued"}),
            (0.05, left(600, 6), {}),
            (1, finish("a"), {}),
        ],
    ),
    Story(
        "with no engine up all of it comes back",
        policy(no_upstream_seconds=1, tenants=LIMITED),
        [
            (0, health("gpu0", False), {}),
            (0, submit("a", P0, 100), {}),
            (0, left(500, 5), {}),
            (1, nothing, {"a": "rejected_no_upstream"}),
            (1.1, left(600, 6), {}),
        ],
    ),
    Story(
        "where nothing ran all of it comes back, where something did the request counts",
        policy(WIDE, tenants=LIMITED),
        [
            (
                0,
                both(submit("refused", P0, 100), submit("aborted", P0, 100)),
                dict.fromkeys(("refused", "aborted"), "dispatched"),
            ),
            (0, left(400, 4), {}),
            (0, both(finish("refused", -1, outcome=Outcome.UPSTREAM_REFUSED), left(500, 5)), {}),
            (0, both(finish("refused", -1), left(500, 5)), {}),
            (0, both(finish("aborted", 30, outcome=Outcome.CLIENT_GONE_STREAMING), left(570, 5)), {}),
            (0, both(finish("aborted", -1), left(570, 5)), {}),
        ],
    ),
    Story(
        "settled by what was used, once, and the debt ends at max_debt_seconds",
        policy(
            WIDE,
            capacity={"max_debt_seconds": 10.0, "initial_output_tokens": 50, "output_weight": 1.0},
            tenants=LIMITED,
        ),
        [
            (0, submit("a", P0, 100), {"a": "dispatched"}),
            (0, left(450, 5), {}),
            (0, both(finish("a", output=10), finish("a", output=1000), left(490, 5)), {}),
            (0, submit("b", P0, 100), {"b": "dispatched"}),
            (0, both(left(340, 4), finish("b", output=400), left(-10, 4)), {}),
            (0, submit("c", P0, 1), {"c": "rejected_rate"}),
            (60, both(submit("d", P0, 100), finish("d", output=10**6)), {"d": "dispatched"}),
            (60, left(-100, 5), {}),
        ],
    ),
    Story(
        "dearer than the minute with its answer it passes on a full bucket, and is paid off before the next",
        policy(WIDE, capacity={"initial_output_tokens": 500, "output_weight": 2.0}, tenants=LIMITED),
        [
            (0, submit("a", P0, 600), {"a": "dispatched"}),  # 1600 tokens of 600 a minute
            (0, left(-1000, 5), {}),
            (0, submit("b", P0, 1, max_output_tokens=0), {"b": "rejected_rate"}),
            (0, advice("b", 100.1), {}),
            (100.1, submit("c", P0, 1, max_output_tokens=0), {"c": "dispatched"}),
            (101, submit("d", P0, 600), {"d": "rejected_rate"}),
            (160.2, submit("e", P0, 600), {"e": "dispatched"}),
            (161, both(*(finish(n, output=500) for n in "ae"), finish("c")), {}),
        ],
    ),
    Story(
        "a key has so many requests inside, waiting ones too, and each ending lets one in",
        policy(upstream(max_in_flight=1), wait=5, keys={"k": 2}, tenants={"t": {"requests_per_minute": 600}}),
        [
            (0, submit("a", P0, key="k"), {"a": "dispatched"}),
            (0, submit("b", P0, key="k"), {}),
            (0, submit("c", P0, key="k"), {"c": "rejected_rate"}),
            (0, both(by_own_limit("c"), inside("k", 2), left(None, 598)), {}),
            (0, submit("of another key", P1, key="l"), {}),
            (0, submit("of no key", P1), {}),
            (1, cancel("b"), {"b": "client_gone_queued"}),
            (1, submit("d", P0, key="k"), {}),
            (1, submit("e", P0, key="k"), {"e": "rejected_rate"}),
            (2, finish("a"), {"d": "dispatched"}),
            (2, submit("f", P1, key="k"), {}),
            (3, finish("d", -1, outcome=Outcome.UPSTREAM_REFUSED), {"of another key": "dispatched"}),
            (3, inside("k", 1), {}),
            (5, nothing, {"of no key": "queue_timeout"}),
            (7, nothing, {"f": "queue_timeout"}),
            (7.1, inside("k", 0), {}),
            (8, finish("of another key"), {}),
        ],
    ),
    Story(
        "a key that may have none inside is refused, and not told to wait",
        policy(WIDE, keys={"k": 0}),
        [
            (0, submit("a", P0, key="k"), {"a": "rejected_rate"}),
            (0, both(by_own_limit("a"), advice("a", None)), {}),
        ],
    ),
    Story(
        "its sub-tenants share a tenant's limits and one key's places",
        policy(WIDE, tenants={"t": {"requests_per_minute": 2}}, keys={"k": 3}),
        [
            (0, submit("a", P0, fairness_id="t/x", key="k"), {"a": "dispatched"}),
            (0, submit("b", P0, fairness_id="t/y", key="k"), {"b": "dispatched"}),
            (0, submit("c", P0, fairness_id="t/z", key="k"), {"c": "rejected_rate"}),
            (0, by_own_limit("c"), {}),
            (1, both(finish("a"), finish("b")), {}),
        ],
    ),
    Story(
        "sent back by its engine it is charged once, and once refunded",
        policy(upstream("a"), upstream("b"), tenants=LIMITED, keys={"k": 1}, wait=1),
        [
            (0, submit("r", P0, 100, key="k"), {"r": "dispatched@a"}),
            (0, both(left(500, 5), inside("k", 1)), {}),
            (0, requeue("r"), {"r": "dispatched@b"}),
            (0, both(left(500, 5), inside("k", 1)), {}),
            (0, both(finish("r", 40), left(560, 5), inside("k", 0)), {}),
            (0, submit("s", P0, 100, key="k"), {"s": "dispatched@b"}),
            (0, both(health("a", False), requeue("s")), {}),
            (0, both(left(460, 4), inside("k", 1)), {}),
            (0, cancel("s"), {"s": "client_gone_queued"}),
            (0, both(left(560, 5), inside("k", 0)), {}),
        ],
    ),
]


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("story", STORIES, ids=lambda s: s.title)
def test_story(story: Story, kind: type[Driver]) -> None:
    """Each story is decided as told, at the instants told, under both drivers."""
    tell(story, kind)


@pytest.mark.parametrize(
    ("tokens", "weight", "too_long"),
    [(600, 1.0, False), (601, 1.0, True), (300, 2.0, False), (301, 2.0, True), (1000, 0.5, False)],
)
def test_a_prompt_that_no_minute_can_pay(tokens: int, weight: float, too_long: bool) -> None:
    """Its weighted cost alone above the tenant's minute: an error at the door that leaves no trace."""
    driver = VirtualDriver(policy(WIDE, tenants=LIMITED, keys={"k": 1}, classes={P1: {"weight": weight}}))
    if not too_long:
        assert driver.submit("a", P1, tokens, key="k").stage is Stage.DISPATCHED
        return
    with pytest.raises(RequestTooLong, match="tenant 't' has 600 in a minute"):
        driver.submit("a", P1, tokens, key="k")
    left(600, 6)(driver)
    inside("k", 0)(driver)
    assert driver.log == driver.endings.records == []
    assert driver.submit("b", P1, tokens, tenant="u").stage is Stage.DISPATCHED


def test_a_model_that_nobody_serves_takes_nothing_of_the_tenant() -> None:
    """An unknown model is an error at the door, for the tenant's limits too."""
    driver = VirtualDriver(policy(upstream(models=("llama",)), tenants=LIMITED, keys={"k": 1}))
    with pytest.raises(KeyError):
        driver.submit("a", P1, key="k")
    left(600, 6)(driver)
    inside("k", 0)(driver)


def test_a_tenants_own_limit_is_no_miss_of_the_promise() -> None:
    """Those refused by the tenant's limit do not lower attainment of those offered; by the class, they do."""
    promised = {P0: {"ttft": 1.0, "max_queued_requests": 0}}
    driver = VirtualDriver(policy(classes=promised, tenants={"t": {"requests_per_minute": 1}}))
    driver.submit("a", P0)
    driver.first_token("a")
    for i in range(9):
        assert driver.submit(f"{i}", P0).outcome is Outcome.REJECTED_RATE

    def offered() -> float | None:
        return driver.admission.slo_monitor.attainment(P0, "all", "arrival", "offered", driver.clock.now())

    assert offered() is None
    driver.submit("other's", P0, tenant="u")
    assert driver.tickets["other's"].outcome is Outcome.REJECTED_QUEUE_FULL
    driver.finish("a")
    assert offered() == 0.5


class Detailed(Observer):
    wants_details = True


@pytest.mark.parametrize("observer", [Observer(), Detailed()], ids=["silent", "detailed"])
@pytest.mark.parametrize("late_ns", [0, 1, 1_000_000])
def test_those_whose_time_is_over_are_no_longer_inside(observer: Observer, late_ns: int) -> None:
    """A driver that wakes late has not yet ended a request whose time is over; all the same it holds neither
    a place of its key nor a charge, whoever listens."""
    clock = ManualClock()
    limits = {"t": {"requests_per_minute": 1}}
    admission = Admission(policy(wait=1, keys={"k": 1}, tenants=limits), clock, observer)
    holder = admission.submit(ask("holder", P0, tenant="u"))
    first = admission.submit(ask("first", P0, key="k"))
    clock.advance_to(nanoseconds(1) + late_ns)
    second = admission.submit(ask("second", P0, key="k"))
    assert first.outcome is Outcome.QUEUE_TIMEOUT
    assert second.stage is Stage.READY
    admission.finish(holder, Outcome.COMPLETED, Delivered(Usage(1, 0)))
    assert second.stage is Stage.DISPATCHED


def test_standing_shows_the_tenants_own_limits() -> None:
    """Where a tenant has limits they bind before the class's, each by itself."""
    tenants = {"t": {"tokens_per_minute": 600, "requests_per_minute": 6}, "u": {"requests_per_minute": 3}}
    with closing(VirtualDriver(policy(SLOW, capacity=SMALL_BURSTS, tenants=tenants))) as driver:
        driver.submit("a", P0, 100)
        mine = driver.admission.standing(P0, "m", "t")
        assert (mine.limit_tokens, mine.remaining_tokens, mine.full_after_ns) == (600, 500, nanoseconds(10))
        assert (mine.limit_requests, mine.remaining_requests) == (6, 5)
        assert mine.requests_after_ns == nanoseconds(10)
        others = driver.admission.standing(P0, "m", "u")
        assert (others.limit_tokens, others.remaining_tokens) == (300, 200)
        assert (others.limit_requests, others.remaining_requests) == (3, 3)


def test_a_tenant_in_debt_has_nothing_left() -> None:
    """And not less than that: a cost above the full minute has left its bucket below zero."""
    tenants = {"t": {"tokens_per_minute": 600}}
    with closing(VirtualDriver(policy(SLOW, capacity=SMALL_BURSTS, tenants=tenants))) as driver:
        driver.submit("a", P0, 100, max_output_tokens=0)
        driver.finish("a", outcome=Outcome.COMPLETED, delivered=Delivered(Usage(700, 0)))
        mine = driver.admission.standing(P0, "m", "t")
        assert (mine.limit_tokens, mine.remaining_tokens, mine.full_after_ns) == (600, 0, nanoseconds(70))
