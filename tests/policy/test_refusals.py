"""Who is told no, when, and with what advice: stories under both drivers."""

from contextlib import closing

import pytest

from gateway.policy.outcome import Outcome
from gateway.policy.request import Refusal
from tests.support.drivers import DRIVERS, Driver, assert_quiet
from tests.support.policy_settings import P0, P1, P2, nanoseconds, policy, upstream
from tests.support.stories import Action, Story, both, cancel, finish, nothing, see, submit, tell
from tests.support.workloads import taking

WIDE = upstream(max_in_flight=None, tokens_per_second=1000)
"""Room for everybody; C = 1000 tokens a second, of which P0 has 600 and a burst of 300."""
SMALL_BURSTS = {"burst_seconds": 0.5, "min_burst_tokens": 0}
LINE = policy(WIDE, capacity=SMALL_BURSTS, throttle=1.0)
"""P0's line for tokens may hold 600."""


def refusal_of(driver: Driver, name: str) -> Refusal:
    refusal = driver.tickets[name].refusal
    assert refusal is not None
    return refusal


def advice_is(name: str, seconds: float) -> Action:
    def check(driver: Driver) -> None:
        assert refusal_of(driver, name).retry_after_ns == pytest.approx(nanoseconds(seconds), abs=1)

    return see(check)


STORIES = [
    Story(
        "a tenant that fills the line for tokens is refused its own excess",
        LINE,
        [
            (0.0, submit("a", P0, 300), {"a": "dispatched"}),
            (0.0, both(*(submit(f"x{i}", P0, 100, tenant="x") for i in range(6))), {}),
            (0.0, submit("x6", P0, 100, tenant="x"), {"x6": "rejected_rate"}),
            (0.0, advice_is("x6", 700 / 600), {}),
            (0.0, submit("y0", P0, 100, tenant="y"), {"x5": "rejected_rate"}),
            (0.0, submit("y1", P0, 100, tenant="y"), {"x4": "rejected_rate"}),
            (0.0, submit("z0", P0, 150, tenant="z"), {"x3": "rejected_rate", "x2": "rejected_rate"}),
            (0.1, nothing, {"x0": "dispatched"}),  # the others' full buckets lend all they get
            (0.2, nothing, {"y0": "dispatched"}),
            (0.35, nothing, {"z0": "dispatched"}),
            (0.45, nothing, {"x1": "dispatched"}),
            (0.55, nothing, {"y1": "dispatched"}),
            (1.0, both(*(finish(n) for n in ("a", "x0", "x1", "y0", "y1", "z0"))), {}),
        ],
    ),
    Story(
        "the chosen head of the line is not pushed out, whoever's it is",
        LINE,
        [
            (0.0, submit("a", P0, 300), {"a": "dispatched"}),
            (0.0, submit("x", P0, 300, tenant="x"), {}),
            (0.0, both(*(submit(n, P0, 90, tenant=n) for n in "uvw")), {}),
            (0.0, submit("y", P0, 60, tenant="y"), {"y": "rejected_rate"}),
            (0.0, advice_is("y", 630 / 600), {}),
            (0.3, nothing, {"x": "dispatched"}),
            (0.39, nothing, {"u": "dispatched"}),
            (0.48, nothing, {"v": "dispatched"}),
            (0.57, nothing, {"w": "dispatched"}),
            (1.0, both(*(finish(n) for n in "axuvw")), {}),
        ],
    ),
    Story(
        "of equals the one that comes is refused",
        LINE,
        [
            (0.0, submit("a", P0, 300), {"a": "dispatched"}),
            (0.0, both(submit("x0", P0, 100, tenant="x"), submit("x1", P0, 200, tenant="x")), {}),
            (0.0, submit("y0", P0, 250, tenant="y"), {}),
            (0.0, submit("z0", P0, 300, tenant="z"), {"z0": "rejected_rate"}),
            (0.1, nothing, {"x0": "dispatched"}),
            (0.35, nothing, {"y0": "dispatched"}),
            (0.55, nothing, {"x1": "dispatched"}),
            (1.0, both(*(finish(n) for n in ("a", "x0", "x1", "y0"))), {}),
        ],
    ),
    Story(
        "full of paid ones, the heaviest tenant loses its newest, and its tokens come back",
        policy(
            upstream(max_in_flight=1, tokens_per_second=1000),
            capacity=SMALL_BURSTS,
            max_queued_requests=3,
        ),
        [
            (0.0, submit("a", P0, 10), {"a": "dispatched"}),
            (0.0, both(submit("x0", P0, 100, tenant="x"), submit("x1", P0, 100, tenant="x")), {}),
            (0.0, submit("y0", P0, 80, tenant="y"), {}),
            (0.0, submit("z0", P0, 100, tenant="z"), {"x1": "rejected_queue_full"}),
            (0.0, see(lambda d: _has_left(d, 10)), {}),
            (0.0, submit("w0", P0, 100, tenant="w"), {"w0": "rejected_queue_full"}),
            (
                0.1,
                both(cancel("x0"), cancel("y0"), cancel("z0"), finish("a")),
                dict.fromkeys(("x0", "y0", "z0"), "client_gone_queued"),
            ),
        ],
    ),
    Story(
        "what a tenant has waiting counts together, for tokens and for places",
        policy(
            upstream(max_in_flight=1, tokens_per_second=1000),
            capacity=SMALL_BURSTS,
            max_queued_requests=3,
        ),
        [
            (0.0, submit("a", P0, 50), {"a": "dispatched"}),
            (0.0, submit("x ready", P0, 200, tenant="x"), {}),
            (0.0, submit("x throttled", P0, 150, tenant="x"), {}),
            (0.0, submit("y throttled", P0, 250, tenant="y"), {}),
            (0.0, submit("z", P0, 20, tenant="z"), {"x throttled": "rejected_queue_full"}),
            (
                0.01,
                both(cancel("x ready"), cancel("y throttled"), cancel("z")),
                dict.fromkeys(("x ready", "y throttled", "z"), "client_gone_queued"),
            ),
            (0.02, finish("a"), {}),
        ],
    ),
    Story(
        "bytes make room as requests do, as many as it takes",
        policy(max_queued_bytes=100),
        [
            (0.0, submit("a", P0), {"a": "dispatched"}),
            (0.0, both(*(submit(f"x{i}", P0, 10, tenant="x", body_bytes=30) for i in range(3))), {}),
            (
                0.0,
                submit("y", P0, 1, tenant="y", body_bytes=70),
                {"x2": "rejected_queue_full", "x1": "rejected_queue_full"},
            ),
            (0.1, finish("a"), {"x0": "dispatched"}),
            (0.2, finish("x0"), {"y": "dispatched"}),
            (0.3, finish("y"), {}),
        ],
    ),
    Story(
        "a client whose time-out is shorter than its own prefill goes at once or not at all",
        policy(upstream(max_in_flight=1, tokens_per_second=100), capacity={"min_burst_tokens": 10**6}),
        [
            (0.0, submit("a", P0, 50, timeout=0.1), {"a": "dispatched"}),
            (0.1, submit("b", P0, 50, timeout=0.1), {}),
            (0.1 + 1e-9, nothing, {"b": "queue_timeout"}),
            (0.2, submit("c", P0, 50, timeout=1.5), {}),
            (1.2, finish("a"), {"c": "dispatched"}),
            (1.3, submit("d", P0, 50, timeout=1.5), {}),
            (2.3, nothing, {"d": "queue_timeout"}),
            (2.4, finish("c"), {}),
        ],
    ),
    Story(
        "who cannot wait for tokens is refused at once",
        policy(WIDE, capacity=SMALL_BURSTS),
        [
            (0.0, submit("a", P0, 300), {"a": "dispatched"}),
            (0.0, submit("b", P0, 60, timeout=0.15), {"b": "rejected_rate"}),  # 0.06 of it is prefill
            (0.0, submit("c", P0, 60, timeout=0.16), {}),
            (0.06, nothing, {"c": "dispatched"}),
            (1.0, both(finish("a"), finish("c")), {}),
        ],
    ),
]


def _has_left(driver: Driver, tokens: int) -> None:
    assert driver.pool.buckets.level_tokens(P0) == pytest.approx(tokens)


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("story", STORIES, ids=lambda s: s.title)
def test_story(story: Story, kind: type[Driver]) -> None:
    """Each story is decided as told, at the instants told, under both drivers."""
    tell(story, kind)


def queue_of(driver: Driver, requests: int, at: float, **given: object) -> None:
    """Tenant x asks for so many at once, at an engine that does ten a second, one by one."""
    driver.service = taking(0.1)
    for i in range(requests):
        driver.at(
            nanoseconds(at),
            lambda i=i: driver.submit(f"x{i}", P1, tenant="x", **given),  # type: ignore[misc]
        )


def told(driver: Driver, *names: str) -> list[tuple[float, str]]:
    return [(at / 1e9, what.split("@")[0]) for at, name, what in driver.log if name in names]


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
def test_a_hopeless_wait_is_told_at_arrival(kind: type[Driver]) -> None:
    """Who would get its place in more than twice the time it has left is told so at once, with the time it
    would take; another tenant's turn comes much sooner."""
    with closing(kind(policy(classes={P1: {"wait": 1}}))) as driver:
        queue_of(driver, 30, 0)
        driver.at(nanoseconds(0.85), lambda: driver.submit("x late", P1, tenant="x"))
        driver.at(nanoseconds(0.85), lambda: driver.submit("x, with more time", P1, tenant="x", timeout=0.5))
        driver.at(nanoseconds(0.85), lambda: driver.submit("y", P1, tenant="y"))
        driver.at(nanoseconds(0.85), lambda: driver.submit("above it", P0, tenant="x"))
        driver.run(5)
        # dispatched: one each 0.1 s from 0.1 to 0.8; 21 wait, and then itself
        assert told(driver, "x late", "x, with more time") == [(0.85, "queue_timeout")] * 2
        assert refusal_of(driver, "x late").outcome is Outcome.QUEUE_TIMEOUT
        assert refusal_of(driver, "x late").retry_after_ns == nanoseconds(22 * 0.85 / 8)
        assert told(driver, "above it", "y") == [(0.9, "dispatched"), (1.1, "dispatched")]
        assert driver.endings.record("x late").ended_at == nanoseconds(0.85)
        assert_quiet(driver)


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
def test_a_young_backlog_lets_everybody_wait(kind: type[Driver]) -> None:
    """Before half a second or eight dispatches have shown how fast places come nobody is given up."""
    with closing(kind(policy(classes={P1: {"wait": 1}}))) as driver:
        queue_of(driver, 500, 0)
        driver.at(nanoseconds(0.55), lambda: driver.submit("x late", P1, tenant="x"))
        driver.run(5)
        assert told(driver, "x late") == [(1.1, "dispatched")]  # the others left at 1.0


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
def test_a_fast_engine_has_hopeless_waits_too(kind: type[Driver]) -> None:
    """At a thousand requests a second the last dispatches are milliseconds old, and tell as much."""
    with closing(kind(policy(classes={P1: {"wait": 1}}))) as driver:
        driver.service = taking(0.001)
        for i in range(4000):
            driver.at(0, lambda i=i: driver.submit(f"x{i}", P1, tenant="x"))  # type: ignore[misc]
        driver.at(nanoseconds(0.7), lambda: driver.submit("x late", P1, tenant="x"))
        driver.run(5)
        assert told(driver, "x late") == [(0.7, "queue_timeout")]
        assert refusal_of(driver, "x late").retry_after_ns == pytest.approx(nanoseconds(3.3), rel=0.05)


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
def test_a_tenant_of_many_requests_does_not_take_a_light_ones_places(kind: type[Driver]) -> None:
    """Over seconds of a flood, in a short queue, each request of the light tenant is served."""
    with closing(kind(policy(max_queued_requests=5, wait=10))) as driver:
        driver.service = taking(0.1)
        for i in range(500):
            driver.at(nanoseconds(i / 50), lambda i=i: driver.submit(f"x{i}", P2, tenant="x"))  # type: ignore[misc]
        for i in range(30):
            driver.at(
                nanoseconds(0.31 + i / 3),
                lambda i=i: driver.submit(f"y{i}", P2, tenant="y"),  # type: ignore[misc]
            )
        driver.run(30)
        light = [what.split("@")[0] for _, name, what in driver.log if name.startswith("y")]
        assert light == ["dispatched"] * 30


def test_what_a_refusal_says() -> None:
    """For tokens: class, rate and wait; for a queue: how full; for time: how long it waited, and for what."""
    with closing(DRIVERS[0](policy(WIDE, capacity=SMALL_BURSTS, throttle=0.1, wait=2))) as driver:
        driver.submit("a", P0, 300)
        driver.submit("b", P0, 120)
        assert refusal_of(driver, "b").detail == (
            "the P0 token bucket (600 tokens/s) could pay this request in about 0.2 s"
        )
    with closing(DRIVERS[0](policy(max_queued_requests=1, wait=2))) as full:
        for name in "abc":
            full.submit(name, P1)
        assert refusal_of(full, "c").detail == "the P1 queue is full (1 waiting)"
        full.run(3)
        assert refusal_of(full, "b").detail == "P1 request got no place at an engine after 2 s"
