"""Stories of upstreams: none up, health, capacity, pools, and which of several."""

import pytest

from gateway.policy.request import Priority
from tests.support.drivers import DRIVERS, Driver
from tests.support.policy_settings import P0, P1, P2, policy, upstream
from tests.support.stories import Action, Story, both, finish, health, nothing, submit, tell

SMALL_BURSTS = {"burst_seconds": 0.5, "min_burst_tokens": 0}


def budget_is(*tokens_per_second: float) -> Action:
    """The capacity of each pool."""

    def check(driver: Driver) -> None:
        assert [pool.buckets.capacity for pool in driver.admission.pools] == [
            t * 1000 for t in tokens_per_second
        ]
        for pool in driver.admission.pools:
            assert sum(pool.buckets.rates) == pool.buckets.capacity

    return check


def level_is(priority: Priority, tokens: float, pool: int = 0) -> Action:
    def check(driver: Driver) -> None:
        buckets = driver.admission.pools[pool].buckets
        buckets.advance(driver.clock.now())
        assert buckets.level_tokens(priority) == pytest.approx(tokens, abs=1e-3)

    return check


def ends(*names: str) -> Action:
    return both(*(finish(name) for name in names))


STORIES = [
    Story(
        "with no upstream one waits, and is then told that none is up",
        policy(no_upstream_seconds=5, wait=60),
        [
            (0, health("gpu0", False), {}),
            (1, submit("a", P0), {}),
            (2, submit("b", P2), {}),
            (6, nothing, {"a": "rejected_no_upstream"}),
            (7, nothing, {"b": "rejected_no_upstream"}),
        ],
    ),
    Story(
        "whichever limit fires first the answer is that none is up",
        policy(no_upstream_seconds=5, classes={P0: {"wait": 2}, P1: {"wait": 60}}),
        [
            (0, health("gpu0", False), {}),
            (1, both(submit("a", P0), submit("b", P1), submit("c", P1, timeout=1)), {}),
            (2, nothing, {"c": "rejected_no_upstream"}),
            (3, nothing, {"a": "rejected_no_upstream"}),
            (6, nothing, {"b": "rejected_no_upstream"}),
        ],
    ),
    Story(
        "the time without an upstream counts from when it went down",
        policy(no_upstream_seconds=5, wait=60),
        [
            (0, submit("running", P0), {"running": "dispatched"}),
            (1, submit("a", P0), {}),
            (10, health("gpu0", False), {}),
            (11, finish("running"), {}),
            (12, submit("b", P0), {}),
            (15, nothing, {"a": "rejected_no_upstream"}),
            (17, nothing, {"b": "rejected_no_upstream"}),
        ],
    ),
    Story(
        "health back in time serves those who waited, even at the very last instant",
        policy(upstream(max_in_flight=None), no_upstream_seconds=5, wait=60),
        [
            (0, health("gpu0", False), {}),
            (1, submit("a", P2), {}),
            (3, submit("b", P0), {}),
            (4, health("gpu0", True), {"b": "dispatched", "a": "dispatched"}),
            (5, health("gpu0", False), {}),
            (6, submit("c", P0), {}),
            (11, health("gpu0", True), {"c": "dispatched"}),
            (12, ends("a", "b", "c"), {}),
        ],
    ),
    Story(
        "an upstream that goes down keeps what it runs",
        policy(upstream("a"), upstream("b", max_in_flight=2), no_upstream_seconds=5, wait=60),
        [
            (0, submit("r0", P0), {"r0": "dispatched@a"}),
            (1, health("a", False), {}),
            (2, both(submit("r1", P0), submit("r2", P0)), {"r1": "dispatched@b", "r2": "dispatched@b"}),
            (3, submit("r3", P0), {}),
            (4, finish("r0"), {}),
            (9, finish("r1"), {"r3": "dispatched@b"}),
            (10, submit("r4", P0), {}),
            (11, health("a", True), {"r4": "dispatched@a"}),
            (12, ends("r2", "r3", "r4"), {}),
        ],
    ),
    Story(
        "C is the sum over the healthy, keeps its last value with none, and levels are kept",
        policy(
            upstream("a", max_in_flight=None, tokens_per_second=1000),
            upstream("b", max_in_flight=None, tokens_per_second=3000),
            capacity=SMALL_BURSTS,
        ),
        [
            (0, budget_is(4000), {}),
            (
                0,
                both(submit("x", P0, 1200 + 500), submit("y", P1, 600)),
                {"x": "dispatched@a", "y": "dispatched@b"},
            ),
            (0, both(level_is(P0, -500), level_is(P1, 100)), {}),
            (0, health("a", False), {}),
            (0, both(budget_is(3000), level_is(P0, -500), level_is(P1, 100)), {}),
            (0, health("b", False), {}),
            (0, both(budget_is(3000), level_is(P0, -500), level_is(P1, 100)), {}),
            (0, health("a", True), {}),
            (0, both(budget_is(1000), level_is(P0, -500), level_is(P1, 100)), {}),
            (0, health("b", True), {}),
            (0, both(budget_is(4000), level_is(P0, -500), level_is(P1, 100)), {}),
            (0.1, both(level_is(P0, -500 + 240), level_is(P1, 240)), {}),
            (1, both(finish("x", -1), finish("y", -1)), {}),
        ],
    ),
    Story(
        "time passed with none up still refills at the last capacity",
        policy(
            upstream(max_in_flight=None, tokens_per_second=1000),
            capacity=SMALL_BURSTS,
            no_upstream_seconds=60,
        ),
        [
            (0.0, submit("x", P0, 300), {"x": "dispatched"}),
            (0.0, health("gpu0", False), {}),
            (0.0, submit("y", P0, 200), {}),
            (0.2, level_is(P0, 200), {}),
            (0.5, health("gpu0", True), {"y": "dispatched"}),
            (0.5, level_is(P0, 300), {}),
            (1.0, ends("x", "y"), {}),
        ],
    ),
    Story(
        "models of different upstreams have budgets, queues and places of their own",
        policy(
            upstream("a", models=("llama",), tokens_per_second=1000),
            upstream("b", models=("qwen",), tokens_per_second=2000),
            capacity=SMALL_BURSTS,
            max_queued_requests=1,
        ),
        [
            (0.0, budget_is(1000, 2000), {}),
            (0.0, submit("l0", P0, 300, model="llama"), {"l0": "dispatched@a"}),
            (0.0, both(level_is(P0, 0, 0), level_is(P0, 600, 1)), {}),
            (0.0, submit("q0", P0, 600, model="qwen"), {"q0": "dispatched@b"}),
            (0.0, both(submit("l1", P0, 100, model="llama"), submit("q1", P0, 100, model="qwen")), {}),
            (0.0, submit("l2", P0, 1, model="llama"), {"l2": "rejected_queue_full"}),
            (0.1, finish("l0"), {"l1": "dispatched@a"}),
            (0.2, health("a", False), {}),
            (0.2, budget_is(1000, 2000), {}),
            (0.3, finish("q0"), {"q1": "dispatched@b"}),
            (0.4, ends("l1", "q1"), {}),
        ],
    ),
    Story(
        "upstreams that share a model have one budget",
        policy(
            upstream("a", models=("llama",), tokens_per_second=1000),
            upstream("b", models=("qwen",), tokens_per_second=2000),
            upstream("c", models=("llama", "qwen"), tokens_per_second=4000),
        ),
        [
            (0, budget_is(7000), {}),
            (0, submit("l0", P1, 10, model="llama"), {"l0": "dispatched@a"}),
            (0, submit("q0", P1, 10, model="qwen"), {"q0": "dispatched@b"}),
            (0, submit("l1", P1, 10, model="llama"), {"l1": "dispatched@c"}),
            (0, both(submit("q1", P1, 10, model="qwen"), submit("l2", P1, 10, model="llama")), {}),
            (1, finish("q0"), {"q1": "dispatched@b"}),
            (2, finish("l1"), {"l2": "dispatched@c"}),
            (3, ends("l0", "l2", "q1"), {}),
        ],
    ),
    Story(
        "the least loaded by tokens in flight is taken",
        policy(upstream("a", max_in_flight=None), upstream("b", max_in_flight=None)),
        [
            (0, submit("r0", P1, 100), {"r0": "dispatched@a"}),
            (1, submit("r1", P1, 10), {"r1": "dispatched@b"}),
            (2, submit("r2", P1, 80), {"r2": "dispatched@b"}),
            (3, submit("r3", P1, 20), {"r3": "dispatched@b"}),
            (4, submit("r4", P1, 1), {"r4": "dispatched@a"}),
            (5, finish("r0"), {}),
            (6, submit("r5", P1, 1), {"r5": "dispatched@a"}),
            (7, ends("r1", "r2", "r3", "r4", "r5"), {}),
        ],
    ),
    Story(
        "an upstream set aside for long prompts takes no others",
        policy(
            upstream("long", accepts="long", max_in_flight=1),
            upstream("short", accepts="short", max_in_flight=1),
            scheduling={"long_prompt_tokens": 100},
        ),
        [
            (0, submit("s0", P1, 100), {"s0": "dispatched@short"}),
            (1, submit("s1", P1, 1), {}),
            (2, submit("l0", P1, 101), {"l0": "dispatched@long"}),
            (3, submit("l1", P1, 101), {}),
            (4, finish("l0"), {"l1": "dispatched@long"}),
            (5, finish("s0"), {"s1": "dispatched@short"}),
            (6, ends("l1", "s1"), {}),
        ],
    ),
    Story(
        "P0 that waits for one model does not hold up another",
        policy(upstream("a", models=("llama",)), upstream("b", models=("llama", "qwen"))),
        [
            (
                0,
                both(submit("l0", P1, model="llama"), submit("q0", P1, model="qwen")),
                {"l0": "dispatched@a", "q0": "dispatched@b"},
            ),
            (1, submit("urgent", P0, model="qwen"), {}),
            (2, submit("l1", P2, model="llama"), {}),
            (3, finish("l0"), {"l1": "dispatched@a"}),
            (4, finish("q0"), {"urgent": "dispatched@b"}),
            (5, ends("l1", "urgent"), {}),
        ],
    ),
]


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("story", STORIES, ids=lambda s: s.title)
def test_story(story: Story, kind: type[Driver]) -> None:
    """Each story is decided as told, at the instants told, under both drivers."""
    tell(story, kind)


def test_advice_of_refusals() -> None:
    """A refusal tells the class's bucket, its rate and the wait; one without an upstream promises no time."""
    parameters = policy(
        upstream(tokens_per_second=1000), capacity=SMALL_BURSTS, throttle=0.1, no_upstream_seconds=1
    )
    driver = DRIVERS[0](parameters)
    driver.submit("a", P0, 300)
    refused = driver.submit("b", P0, 120).refusal
    assert refused is not None
    assert refused.retry_after_ns == 200_000_000
    assert "P0" in refused.detail
    assert "600" in refused.detail
    assert "0.2 s" in refused.detail
    driver.health("gpu0", False)
    driver.submit("c", P1, 1)
    driver.run(2)
    gone = driver.tickets["c"].refusal
    assert gone is not None
    assert gone.retry_after_ns is None
