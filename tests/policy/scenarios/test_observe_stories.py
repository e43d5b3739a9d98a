"""Stories of observe mode: all is decided and recorded, and nothing enforced."""

import pytest

from gateway.policy.outcome import Outcome
from gateway.policy.request import Priority, Stage
from tests.support.drivers import DRIVERS, Driver, VirtualDriver
from tests.support.policy_settings import P0, P1, P2, policy, upstream
from tests.support.stories import (
    Action,
    Story,
    both,
    drain,
    engine_load,
    finish,
    first_token,
    health,
    nothing,
    see,
    submit,
    tell,
)

SLOW = upstream(max_in_flight=None, tokens_per_second=1000)
SMALL_BURSTS = {"burst_seconds": 0.5, "min_burst_tokens": 0}
"""Bursts of 300 / 175 / 25 tokens at 1000 tokens a second."""
LIMITED = {"t": {"tokens_per_minute": 600, "requests_per_minute": 6}}


def would_be(**expected: Outcome | None) -> Action:
    def check(driver: Driver) -> None:
        assert {name: driver.tickets[name].would_be for name in expected} == expected

    return see(check)


def level(priority: Priority, tokens: float) -> Action:
    def check(driver: Driver) -> None:
        driver.pool.buckets.advance(driver.clock.now())
        assert driver.pool.buckets.level_tokens(priority) == pytest.approx(tokens)

    return see(check)


def tenant_has(tokens: int, requests: int) -> Action:
    def check(driver: Driver) -> None:
        buckets = driver.admission.tenants.buckets("t", driver.clock.now())
        assert [b.left for b in buckets if b is not None] == [tokens, requests]

    return see(check)


def leases(*in_flight: int) -> Action:
    def check(driver: Driver) -> None:
        assert driver.pool.slots[0].in_flight == list(in_flight)

    return see(check)


def sent(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "dispatched")


def ends(*names: str) -> Action:
    return both(*(finish(name) for name in names))


STORIES = [
    Story(
        "leases count but never block: all go at once, and who would only have waited is no refusal",
        policy(upstream(max_in_flight=2), observe=True, max_queued_requests=1),
        [
            (0, both(*(submit(n, P1) for n in "abcde")), sent(*"abcde")),
            (0, leases(0, 5, 0), {}),
            (0, would_be(**dict.fromkeys("abcde")), {}),
            (1, ends(*"abcde"), {}),
        ],
    ),
    Story(
        "an enforced class waits for places that observed ones hold",
        policy(upstream(max_in_flight=2), classes={P2: {"observe": True}}),
        [
            (0, both(*(submit(n, P2) for n in "abc")), sent(*"abc")),
            (1, submit("p0", P0), {}),
            (2, finish("a"), {}),
            (3, finish("b"), {"p0": "dispatched"}),
            (4, submit("d", P2), sent("d")),
            (5, ends("c", "d", "p0"), {}),
        ],
    ),
    Story(
        "neither engine load nor lane, duty, pending prefill or holdback hold it up",
        policy(
            upstream(max_in_flight=10, max_in_flight_tokens=500),
            classes={P2: {"observe": True, "holdback": 0.1}},
            scheduling={"long_prompt_tokens": 100, "max_pending_prefill_tokens": 50},
        ),
        [
            (0, submit("p0", P0), sent("p0")),
            (0, engine_load(waiting=100, kv_usage=1.0), {}),
            (0, both(*(submit(n, P2, 400) for n in "abc")), sent(*"abc")),
            (0, submit("p1", P1), {}),
            (1, both(first_token("a"), first_token("b"), first_token("c")), {}),
            (5, ends("a", "b"), {"p1": "dispatched"}),  # 401 of 500 tokens are left, and the page is stale
            (6, ends("c", "p0", "p1"), {}),
        ],
    ),
    Story(
        "who would wait for tokens is charged at once, who would be refused is not charged",
        policy(SLOW, capacity=SMALL_BURSTS, observe=True, throttle=0.5),
        [
            (0, submit("a", P0, 200), sent("a")),
            (0, submit("waits", P0, 300), sent("waits")),
            (0, level(P0, -200), {}),
            (0, submit("refused", P0, 200), sent("refused")),
            (0, level(P0, -200), {}),
            (0, would_be(a=None, waits=None, refused=Outcome.REJECTED_RATE), {}),
            (0.1, level(P0, -100), {}),  # the others' full buckets lend
            (0.1, both(finish("refused", 10**6), level(P0, -100)), {}),
            (0.1, both(finish("waits", 100), level(P0, 100)), {}),
            (0.1, both(finish("a", -1), level(P0, 300)), {}),
        ],
    ),
    Story(
        "settled as ever: a debit where more was used",
        policy(SLOW, capacity={**SMALL_BURSTS, "max_debt_seconds": 1.0}, observe=True),
        [
            (0, submit("a", P0, 100), sent("a")),
            (0, both(finish("a", 400), finish("a", 10**6), level(P0, -100)), {}),
            (0, submit("b", P0, 1), sent("b")),
            (0, both(finish("b", 10**6), level(P0, -600)), {}),
        ],
    ),
    Story(
        "one over its tenant's limits goes, charged nowhere; one that its class would refuse neither",
        policy(SLOW, capacity=SMALL_BURSTS, observe=True, throttle=0.1, tenants=LIMITED, keys={"k": 2}),
        [
            (0, submit("a", P0, 300, key="k"), sent("a")),
            (0, tenant_has(300, 5), {}),
            (0, submit("class_", P0, 200, key="k"), sent("class_")),
            (0, both(level(P0, 0), tenant_has(300, 5)), {}),
            (0, submit("key", P1, 100, key="k"), sent("key")),
            (0, submit("tenant", P1, 301), sent("tenant")),
            (0, both(level(P1, 175), tenant_has(300, 5)), {}),
            (
                0,
                would_be(
                    a=None,
                    class_=Outcome.REJECTED_RATE,
                    key=Outcome.REJECTED_RATE,
                    tenant=Outcome.REJECTED_RATE,
                ),
                {},
            ),
            (0, both(ends("class_", "key", "tenant"), tenant_has(300, 5)), {}),
            (0, both(finish("a", 100), tenant_has(500, 5), level(P0, 200)), {}),
        ],
    ),
    Story(
        "too large for any limit it goes as well",
        policy(SLOW, capacity={**SMALL_BURSTS, "max_request_tokens": 1000}, observe=True, tenants=LIMITED),
        [
            (0, submit("a", P0, 1001, tenant="u"), sent("a")),
            (0, submit("b", P0, 601), sent("b")),
            (0, would_be(a=Outcome.BAD_REQUEST, b=Outcome.BAD_REQUEST), {}),
            (0, both(level(P0, 300), tenant_has(600, 6)), {}),
            (0, ends("a", "b"), {}),
        ],
    ),
    Story(
        "to the healthy one of two, and with none up to the least loaded of those that are down",
        policy(upstream("a"), upstream("b"), observe=True),
        [
            (0, health("a", False), {}),
            (0, both(submit("r", P0, 10), submit("s", P0, 5)), {"r": "dispatched@b", "s": "dispatched@b"}),
            (0, health("b", False), {}),
            (0, submit("t", P0), {"t": "dispatched@a"}),
            (0, would_be(r=None, s=None, t=Outcome.REJECTED_NO_UPSTREAM), {}),
            (0, ends("r", "s", "t"), {}),
        ],
    ),
    Story(
        "where none may queue, who would have to is refused in thought only",
        policy(
            upstream(max_in_flight=1, tokens_per_second=1000),
            capacity=SMALL_BURSTS,
            observe=True,
            classes={P0: {"max_queued_requests": 0}, P1: {"max_queued_bytes": 50}},
        ),
        [
            (0, submit("a", P0, 200), sent("a")),
            (0, submit("no_place", P0), sent("no_place")),
            (0, submit("fits", P1, body_bytes=50), sent("fits")),
            (0, submit("too_many_bytes", P1, body_bytes=51), sent("too_many_bytes")),
            (
                0,
                would_be(
                    a=None,
                    no_place=Outcome.REJECTED_QUEUE_FULL,
                    fits=None,
                    too_many_bytes=Outcome.REJECTED_QUEUE_FULL,
                ),
                {},
            ),
            (0, ends("a", "no_place", "fits", "too_many_bytes"), {}),
            (0, submit("no_tokens", P0, 301), sent("no_tokens")),
            (0, would_be(no_tokens=Outcome.REJECTED_QUEUE_FULL), {}),
            (0, finish("no_tokens"), {}),
        ],
    ),
    Story(
        "long prompts are paid from the own share in thought as well",
        policy(
            SLOW,
            capacity=SMALL_BURSTS,
            classes={P1: {"observe": True, "throttle": 0.5}},
            scheduling={"long_prompt_tokens": 100},
        ),
        [
            (0, submit("p0", P0), sent("p0")),
            (0, submit("l0", P1, 175), sent("l0")),
            (0.2, submit("l1", P1, 101), sent("l1")),  # 70 of the own share, 101 in 0.09 s
            (0.2, submit("l2", P1, 175), sent("l2")),  # 206 missing at 350 a second
            (0.2, would_be(l0=None, l1=None, l2=Outcome.REJECTED_RATE), {}),
            (1, ends("p0", "l0", "l1", "l2"), {}),
        ],
    ),
    Story(
        "draining is no matter of limits: it refuses them too",
        policy(observe=True),
        [
            (0, submit("a", P0), sent("a")),
            (1, drain(), {}),
            (1, submit("b", P0), {"b": "rejected_draining"}),
            (2, finish("a"), {}),
        ],
    ),
    Story(
        "an answer that is not streamed is taken for started after its predicted prefill",
        policy(
            upstream(max_in_flight=None, tokens_per_second=1000),
            classes={P2: {"observe": True}},
            scheduling={"max_pending_prefill_tokens": 100},
            capacity={"min_burst_tokens": 10**6},
        ),
        [
            (0, submit("a", P2, 500, streaming=False), sent("a")),
            (0, submit("p1", P1, 50), {}),
            (0.5, nothing, sent("p1")),
            (1, ends("a", "p1"), {}),
        ],
    ),
]


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("story", STORIES, ids=lambda s: s.title)
def test_story(story: Story, kind: type[Driver]) -> None:
    """Each story is decided as told, at the instants told, under both drivers."""
    tell(story, kind)


def test_the_record_tells_what_would_have_been() -> None:
    """Completed, uncharged, and with the refusal that was not given; nobody was told no by a limit."""
    driver = VirtualDriver(policy(observe=True, tenants={"t": {"requests_per_minute": 0}}))
    driver.submit("a", P0, 100)
    driver.finish("a", 100)
    record = driver.endings.record("a")
    assert (record.outcome, record.would_be) == (Outcome.COMPLETED, Outcome.REJECTED_RATE)
    assert (record.charged, record.estimated_cost, record.queue_wait_ns) == (0, 100_000, 0)
    assert not record.by_tenant_limit


def test_nothing_observed_is_sent_again() -> None:
    """What its engine sends back is passed on as it is: without the gateway it would have been so."""
    driver = VirtualDriver(policy(upstream("a"), upstream("b"), classes={P1: {"observe": True}}))
    driver.submit("a", P1)
    assert not driver.admission.may_requeue(driver.tickets["a"])
    with pytest.raises(ValueError, match="cannot be sent again"):
        driver.requeue("a")
    assert driver.tickets["a"].stage is Stage.DISPATCHED
    driver.submit("b", P0)
    assert driver.admission.may_requeue(driver.tickets["b"])


def test_observing_remembers_no_more_than_enforcing() -> None:
    """Tens of thousands of sub-tenants that come once are forgotten, and none is taken for served less than
    nothing."""
    driver = VirtualDriver(policy(classes={P1: {"observe": True}}))
    for i in range(10_000):
        driver.submit(f"{i}", P1, 100, fairness_id=f"t/{i}")
        driver.finish(f"{i}", 1 + i % 300)
    for counters in (driver.pool.throttled[P1].counters, driver.pool.scheduler.ready[P1].counters):
        assert len(counters) <= 1100
        assert all(service >= 0 for service in counters._service.values())
    assert driver.pool.room._expiries == []


def test_one_class_observed_changes_nothing_for_the_others() -> None:
    """While P2 is only observed P0 and P1 are decided about as before."""
    driver = VirtualDriver(
        policy(SLOW, capacity=SMALL_BURSTS, throttle=0.1, classes={P2: {"observe": True}}, wait=1)
    )
    for name, priority in (("a", P0), ("b", P1), ("c", P2)):
        driver.submit(name, priority, 300)
        driver.submit(f"{name} too", priority, 300)
    told = {name: what.split("@")[0] for _, name, what in driver.log}
    assert told == {
        "a": "dispatched",
        "a too": "rejected_rate",
        "b": "dispatched",
        "b too": "rejected_rate",
        "c": "dispatched",
        "c too": "dispatched",
    }
