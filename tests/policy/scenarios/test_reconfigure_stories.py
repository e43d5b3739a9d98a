"""Stories of other settings while running: levels, queues, leases and windows stay, and what is decided from
now on is decided by the new ones. Of other upstreams: test_regrouping_stories."""

from typing import Any

import pytest

from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Priority
from tests.support.drivers import DRIVERS, Driver, VirtualDriver
from tests.support.policy_settings import P0, P1, P2, nanoseconds, policy, upstream
from tests.support.stories import (
    Action,
    Story,
    both,
    cancel,
    engine_load,
    finish,
    first_token,
    health,
    nothing,
    reconfigure,
    see,
    submit,
    tell,
)

SMALL_BURSTS = {"burst_seconds": 0.5, "min_burst_tokens": 0}
"""Bursts of 300 / 175 / 25 tokens at 1000 tokens a second."""


def at_rate(tokens_per_second: float, **given: Any) -> PolicyParameters:
    """Room for everybody, and so many tokens."""
    place = upstream(max_in_flight=None, tokens_per_second=tokens_per_second)
    return policy(place, **{"capacity": SMALL_BURSTS, **given})


def places(count: int, **given: Any) -> PolicyParameters:
    return policy(upstream(max_in_flight=count), **given)


def levels(*tokens: float) -> Action:
    def check(driver: Driver) -> None:
        buckets = driver.pool.buckets
        buckets.advance(driver.clock.now())
        assert [buckets.level_tokens(p) for p in Priority] == pytest.approx(list(tokens))

    return see(check)


def tenant_has(tokens: int | None, requests: int | None) -> Action:
    def check(driver: Driver) -> None:
        buckets = driver.admission.tenants.buckets("t", driver.clock.now())
        assert [None if b is None else b.left for b in buckets] == [tokens, requests]

    return see(check)


def ends(*names: str) -> Action:
    return both(*(finish(name) for name in names))


STORIES = [
    Story(
        "levels stay, cut to the new bursts, and nothing is refilled",
        at_rate(1000),
        [
            (0, submit("a", P0, 200), {"a": "dispatched"}),
            (0, both(reconfigure(at_rate(2000)), levels(100, 175, 25)), {}),
            (0, both(reconfigure(at_rate(100)), levels(30, 17.5, 2.5)), {}),
            (0, both(reconfigure(at_rate(1000)), levels(30, 17.5, 2.5)), {}),
            (1, finish("a"), {}),
        ],
    ),
    Story(
        "a debt stays too",
        at_rate(1000),
        [
            (0, submit("a", P0, 500), {"a": "dispatched"}),
            (0, both(reconfigure(at_rate(4000)), levels(-200, 175, 25)), {}),
            (0.02, levels(-200 + 48, 175 + 28, 25 + 4), {}),
            (1, finish("a"), {}),
        ],
    ),
    Story(
        "who waits for tokens gets them at the new rate, woken in time",
        at_rate(1000, classes={P0: {"share": 1.0}, P1: {"share": 0}, P2: {"share": 0}}),
        [
            (0, both(submit("a", P0, 500), submit("b", P0, 500), submit("c", P0, 500)), {"a": "dispatched"}),
            (
                0.25,
                reconfigure(at_rate(10_000, classes={P0: {"share": 1}, P1: {"share": 0}, P2: {"share": 0}})),
                {},
            ),
            (0.275, nothing, {"b": "dispatched"}),
            (0.325, nothing, {"c": "dispatched"}),
            (1, ends("a", "b", "c"), {}),
        ],
    ),
    Story(
        "who waits keeps the deadline it was given",
        places(1, wait=2),
        [
            (0, submit("holder", P0), {"holder": "dispatched"}),
            (0, submit("a", P0), {}),
            (0.5, reconfigure(places(1, wait=1)), {}),
            (0.5, submit("b", P0), {}),
            (1.5, nothing, {"b": "queue_timeout"}),
            (1.6, reconfigure(places(1, wait=60)), {}),
            (2, nothing, {"a": "queue_timeout"}),
            (3, finish("holder"), {}),
        ],
    ),
    Story(
        "more places are given at once; with fewer nobody loses one, and the next waits until there is room",
        places(2),
        [
            (0, both(*(submit(n, P0) for n in "abcd")), {"a": "dispatched", "b": "dispatched"}),
            (1, reconfigure(places(3)), {"c": "dispatched"}),
            (2, reconfigure(places(1)), {}),
            (3, ends("a", "b"), {}),
            (4, finish("c"), {"d": "dispatched"}),
            (5, finish("d"), {}),
        ],
    ),
    Story(
        "holdback, lane and pending prefill hold from now on",
        policy(
            upstream(max_in_flight=4),
            classes={P2: {"holdback": 0.5}},
            scheduling={"long_prompt_tokens": 100, "max_pending_prefill_tokens": 50},
        ),
        [
            (0, both(*(submit(n, P2) for n in "abc")), {"a": "dispatched", "b": "dispatched"}),
            (0, submit("d", P1, 60), {}),
            (
                1,
                reconfigure(
                    policy(
                        upstream(max_in_flight=4),
                        scheduling={"long_prompt_tokens": 100, "max_pending_prefill_tokens": 100},
                    )
                ),
                {"d": "dispatched", "c": "dispatched"},
            ),
            (2, ends(*"abcd"), {}),
        ],
    ),
    Story(
        "the token limit falls back to what the engine told, and a set one stands above it again",
        policy(upstream(max_in_flight=None, max_in_flight_tokens=50)),
        [
            (0, engine_load(kv_tokens=100), {}),
            (0, both(*(submit(n, P0, 50) for n in "abc")), {"a": "dispatched"}),
            (1, reconfigure(policy(upstream(max_in_flight=None))), {"b": "dispatched"}),
            (
                2,
                reconfigure(policy(upstream(max_in_flight=None, max_in_flight_tokens=150))),
                {"c": "dispatched"},
            ),
            (3, ends(*"abc"), {}),
        ],
    ),
    Story(
        "an engine's load is judged by the new thresholds at once",
        policy(upstream(max_in_flight=None, waiting_high=4)),
        [
            (0, engine_load(waiting=6), {}),
            (0, submit("a", P2), {}),
            (1, reconfigure(policy(upstream(max_in_flight=None, waiting_high=10))), {"a": "dispatched"}),
            (2, finish("a"), {}),
        ],
    ),
    Story(
        "shorter queues keep those who wait, and refuse the next",
        places(1, max_queued_requests=5),
        [
            (0, submit("holder", P0), {"holder": "dispatched"}),
            (0, both(*(submit(n, P1) for n in "abcd")), {}),
            (1, reconfigure(places(1, max_queued_requests=2)), {}),
            (1, submit("e", P1), {"e": "rejected_queue_full"}),
            (2, finish("holder"), {"a": "dispatched"}),
            (3, both(cancel("b"), cancel("c")), dict.fromkeys("bc", "client_gone_queued")),
            (3, both(submit("f", P1), submit("g", P1)), {"g": "rejected_queue_full"}),
            (4, finish("a"), {"d": "dispatched"}),
            (5, finish("d"), {"f": "dispatched"}),
            (6, finish("f"), {}),
        ],
    ),
    Story(
        "the time without an engine is the new one",
        places(1, no_upstream_seconds=10, wait=60),
        [
            (0, health("gpu0", False), {}),
            (1, submit("a", P0), {}),
            (2, reconfigure(places(1, no_upstream_seconds=3, wait=60)), {}),
            (4, nothing, {"a": "rejected_no_upstream"}),
        ],
    ),
    Story(
        "C follows the healthy ones, and with none up keeps its last value",
        at_rate(1000),
        [
            (0, submit("a", P0, 200), {"a": "dispatched"}),
            (0, health("gpu0", False), {}),
            (0, both(reconfigure(at_rate(5000)), levels(100, 175, 25)), {}),
            (0.1, levels(200, 175, 25), {}),  # 1000 a second: the bursts are as they were
            (0.1, both(health("gpu0", True), levels(200, 175, 25)), {}),
            (0.12, levels(260, 210, 30), {}),
            (1, finish("a"), {}),
        ],
    ),
    Story(
        "other shares from now on",
        at_rate(1000),
        [
            (
                0,
                both(submit("a", P0, 300), submit("b", P1, 175), submit("c", P2, 25)),
                dict.fromkeys("abc", "dispatched"),
            ),
            (
                0,
                reconfigure(
                    at_rate(1000, classes={P0: {"share": 0.2}, P1: {"share": 0.2}, P2: {"share": 0.6}})
                ),
                {},
            ),
            (0.1, levels(20, 20, 60), {}),
            (1, ends(*"abc"), {}),
        ],
    ),
    Story(
        "a tenant's limits: what was used stays used, and a limit no longer set is none",
        policy(
            upstream(max_in_flight=None), tenants={"t": {"tokens_per_minute": 600, "requests_per_minute": 6}}
        ),
        [
            (0, submit("a", P0, 500), {"a": "dispatched"}),
            (
                0,
                reconfigure(policy(upstream(max_in_flight=None), tenants={"t": {"tokens_per_minute": 6000}})),
                {},
            ),
            (0, both(tenant_has(100, None), submit("b", P0, 200)), {"b": "rejected_rate"}),
            (1, both(tenant_has(200, None), submit("c", P0, 200)), {"c": "dispatched"}),
            (1, both(finish("a", 100), tenant_has(400, None)), {}),
            (1, reconfigure(policy(upstream(max_in_flight=None))), {}),
            (1, submit("d", P0, 10_000), {"d": "dispatched"}),
            (2, ends("c", "d"), {}),
        ],
    ),
    Story(
        "a key's places",
        policy(upstream(max_in_flight=None), keys={"k": 1}),
        [
            (0, submit("a", P0, key="k"), {"a": "dispatched"}),
            (0, submit("b", P0, key="k"), {"b": "rejected_rate"}),
            (1, reconfigure(policy(upstream(max_in_flight=None), keys={"k": 2})), {}),
            (1, submit("c", P0, key="k"), {"c": "dispatched"}),
            (2, reconfigure(policy(upstream(max_in_flight=None), keys={"k": 1})), {}),
            (2, finish("a"), {}),
            (2, submit("d", P0, key="k"), {"d": "rejected_rate"}),
            (3, finish("c"), {}),
            (3, submit("e", P0, key="k"), {"e": "dispatched"}),
            (4, finish("e"), {}),
        ],
    ),
    Story(
        "a class only observed lets newcomers through, and its leases count when it is enforced again",
        places(1),
        [
            (0, submit("a", P1), {"a": "dispatched"}),
            (1, reconfigure(places(1, observe=True)), {}),
            (1, both(submit("b", P1), submit("c", P1)), {"b": "dispatched", "c": "dispatched"}),
            (2, reconfigure(places(1)), {}),
            (2, submit("d", P1), {}),
            (3, ends("a", "b"), {}),
            (4, finish("c"), {"d": "dispatched"}),
            (5, finish("d"), {}),
        ],
    ),
    Story(
        "what was never charged while observed is not settled when enforced",
        at_rate(1000, observe=True, throttle=0.1),
        [
            (0, both(submit("a", P0, 300), submit("b", P0, 200)), {"a": "dispatched", "b": "dispatched"}),
            (0, levels(0, 175, 25), {}),
            (0, reconfigure(at_rate(1000)), {}),
            (0, both(finish("b", 10_000), levels(0, 175, 25)), {}),
            (0, both(finish("a", 100), levels(200, 175, 25)), {}),
        ],
    ),
    Story(
        "weights and reserves: the charge was made by the old ones, the end is settled by the new",
        at_rate(1000, capacity={**SMALL_BURSTS, "initial_output_tokens": 50, "output_weight": 1.0}),
        [
            (0, submit("a", P0, 50), {"a": "dispatched"}),
            (0, levels(200, 175, 25), {}),
            (
                0,
                reconfigure(
                    at_rate(
                        1000,
                        capacity={**SMALL_BURSTS, "initial_output_tokens": 10, "output_weight": 2.0},
                    )
                ),
                {},
            ),
            (0, submit("b", P0, 50), {"b": "dispatched"}),
            (0, levels(130, 175, 25), {}),
            (0, both(finish("a", output=10), finish("b", output=10), levels(160, 175, 25)), {}),
        ],
    ),
    Story(
        "upstreams may be told in another order",
        policy(upstream("a"), upstream("b", max_in_flight=2)),
        [
            (
                0,
                both(*(submit(n, P0) for n in "xyz")),
                {"x": "dispatched@a", "y": "dispatched@b", "z": "dispatched@b"},
            ),
            (1, submit("w", P0), {}),
            (
                2,
                reconfigure(policy(upstream("b", max_in_flight=2), upstream("a", max_in_flight=2))),
                {"w": "dispatched@a"},
            ),
            (3, ends(*"wxyz"), {}),
        ],
    ),
    Story(
        "an engine's speed is taken for the new one while there is nothing learned",
        policy(
            upstream(max_in_flight=None, tokens_per_second=100),
            scheduling={"max_pending_prefill_tokens": 50},
            capacity={"min_burst_tokens": 10**6, "burst_seconds": 100},
        ),
        [
            (
                0,
                reconfigure(
                    policy(
                        upstream(max_in_flight=None, tokens_per_second=1000),
                        scheduling={"max_pending_prefill_tokens": 50},
                        capacity={"min_burst_tokens": 10**6, "burst_seconds": 100},
                    )
                ),
                {},
            ),
            (0, submit("a", P1, 100, streaming=False), {"a": "dispatched"}),
            (0, submit("b", P1), {}),
            (0.1, nothing, {"b": "dispatched"}),
            (1, ends("a", "b"), {}),
        ],
    ),
    Story(
        "the lane made wider takes the next at once",
        policy(upstream(max_in_flight=None), scheduling={"long_prompt_tokens": 100}),
        [
            (0, both(submit("a", P1, 200), submit("b", P1, 200)), {"a": "dispatched"}),
            (
                1,
                reconfigure(
                    policy(
                        upstream(max_in_flight=None),
                        scheduling={"long_prompt_tokens": 100, "long_prompt_lane": 2},
                    )
                ),
                {"b": "dispatched"},
            ),
            (2, both(first_token("a"), ends("a", "b")), {}),
        ],
    ),
]


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("story", STORIES, ids=lambda s: s.title)
def test_story(story: Story, kind: type[Driver]) -> None:
    """Each story is decided as told, at the instants told, under both drivers."""
    tell(story, kind)


def test_windows_stay() -> None:
    """What was judged by the old promises stays so, and the new ones judge what comes."""
    driver = VirtualDriver(policy(upstream(max_in_flight=None), classes={P0: {"ttft": 1.0}}))

    def one(name: str, at: float, first: float) -> None:
        driver.at(nanoseconds(at), lambda: driver.submit(name, P0))
        driver.at(nanoseconds(at + first), lambda: driver.first_token(name))
        driver.at(nanoseconds(at + first), lambda: driver.finish(name))

    def kept() -> float | None:
        return driver.admission.slo_monitor.attainment(P0, "all", "arrival", "offered", driver.clock.now())

    one("a", 0, 0.5)
    driver.run(1)
    driver.reconfigure(policy(upstream(max_in_flight=None), classes={P0: {"ttft": 0.1}}))
    assert kept() == 1.0
    one("b", 2, 0.5)
    driver.run(3)
    assert kept() == 0.5


def test_lengths_learned_stay() -> None:
    """What answers have shown stands, and another first guess does not replace it."""
    driver = VirtualDriver(policy(upstream(max_in_flight=None), capacity={"initial_output_tokens": 77}))
    for i in range(20):
        driver.submit(f"{i}", P1)
        driver.finish(f"{i}", 1, output=9)
    driver.reconfigure(policy(upstream(max_in_flight=None), capacity={"initial_output_tokens": 500}))
    assert driver.submit("learned", P1).output_reserve == 9
    assert driver.submit("guessed", P2).output_reserve == 500
