"""Stories of waiting: bounds, time-outs, cancels, refunds, push-out, draining."""

import pytest

from gateway.policy.admission import RequestTooLong
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Stage
from tests.support.drivers import DRIVERS, Driver, assert_quiet
from tests.support.policy_settings import P0, P1, P2, nanoseconds, policy, upstream
from tests.support.stories import (
    Action,
    Story,
    both,
    cancel,
    drain,
    finish,
    first_token,
    nothing,
    see,
    submit,
    tell,
)

WIDE = upstream(max_in_flight=None, tokens_per_second=1000)
"""Room for everybody; C = 1000 tokens a second, shared 600 / 350 / 50."""
SMALL_BURSTS = {"burst_seconds": 0.5, "min_burst_tokens": 0}
"""Bursts of 300 / 175 / 25 tokens at that C."""


def levels_of(driver: Driver) -> list[int]:
    driver.pool.buckets.advance(driver.clock.now())
    return list(driver.pool.buckets.levels)


class Remembered:
    """Levels at one row, to be found again at a later one of the same instant."""

    def __init__(self) -> None:
        self.levels: list[int] = []

    def keep(self, driver: Driver) -> None:
        self.levels = levels_of(driver)

    def found(self, driver: Driver) -> None:
        assert levels_of(driver) == self.levels

    def differ(self, driver: Driver) -> None:
        assert levels_of(driver) != self.levels


def is_charged(name: str, millitokens: int) -> Action:
    def check(driver: Driver) -> None:
        assert driver.tickets[name].charged == millitokens

    return check


def is_running(name: str) -> Action:
    def check(driver: Driver) -> None:
        assert driver.tickets[name].stage is Stage.DISPATCHED

    return check


def gone_everywhere(driver: Driver) -> None:
    assert not driver.pool.room._expiries or all(
        e[2].stage is Stage.ENDED for e in driver.pool.room._expiries
    )
    assert_quiet(driver)


refunded = Remembered()

STORIES = [
    Story(
        "a place that comes free at the very instant of the time-out is still given",
        policy(wait=2),
        [
            (0.0, submit("a", P0), {"a": "dispatched"}),
            (0.5, submit("b", P1), {}),
            (2.5, finish("a"), {"b": "dispatched"}),
            (3.0, finish("b"), {}),
        ],
    ),
    Story(
        "a nanosecond after the time-out is too late",
        policy(wait=2),
        [
            (0.0, submit("a", P0), {"a": "dispatched"}),
            (0.5, submit("b", P1), {}),
            (2.5, nothing, {"b": "queue_timeout"}),
            (2.6, finish("a"), {}),
        ],
    ),
    Story(
        "everybody waits as long as its own class allows",
        policy(classes={P0: {"wait": 2}, P1: {"wait": 15}, P2: {"wait": 120}}),
        [
            (0.0, submit("a", P0), {"a": "dispatched"}),
            (1.0, both(submit("p0", P0), submit("p1", P1), submit("p2", P2)), {}),
            (3.0, nothing, {"p0": "queue_timeout"}),
            (16.0, nothing, {"p1": "queue_timeout"}),
            (121.0, nothing, {"p2": "queue_timeout"}),
            (122.0, finish("a"), {}),
        ],
        after=gone_everywhere,
    ),
    Story(
        "the client's own time-out is kept where it is shorter",
        policy(wait=2),
        [
            (0.0, submit("a", P0), {"a": "dispatched"}),
            (0.0, both(submit("b", P0, timeout=1), submit("c", P0, timeout=9)), {}),
            (1.0, nothing, {"b": "queue_timeout"}),
            (2.0, nothing, {"c": "queue_timeout"}),
            (3.0, finish("a"), {}),
        ],
    ),
    Story(
        "with deadline drop the wait ends at 0.6 of the first-token target",
        policy(wait=60, scheduling={"deadline_drop": True}, classes={P0: {"ttft": 1.0}, P1: {"ttft": 3.0}}),
        [
            (0.0, submit("a", P0), {"a": "dispatched"}),
            (0.0, both(submit("b", P0), submit("c", P1), submit("d", P2)), {}),
            (0.6, nothing, {"b": "queue_timeout"}),
            (1.8, nothing, {"c": "queue_timeout"}),
            (60.0, nothing, {"d": "queue_timeout"}),
            (61.0, finish("a"), {}),
        ],
    ),
    Story(
        "a cancel takes a request out of every stage, and twice is once",
        policy(upstream(max_in_flight=1, tokens_per_second=1000), capacity=SMALL_BURSTS),
        [
            (0.0, submit("running", P0, 200), {"running": "dispatched"}),
            (0.0, submit("ready", P0, 100), {}),
            (0.0, submit("throttled", P0, 50), {}),
            (0.01, both(cancel("throttled"), cancel("throttled")), {"throttled": "client_gone_queued"}),
            (0.02, both(cancel("ready"), cancel("ready")), {"ready": "client_gone_queued"}),
            (0.03, cancel("running"), {}),
            (0.04, both(finish("running"), finish("running"), cancel("running")), {}),
            (0.05, submit("next", P0), {"next": "dispatched"}),
            (0.06, submit("after", P0), {}),
            (0.07, finish("running"), {}),
            (0.08, finish("next"), {"after": "dispatched"}),
            (0.09, finish("after"), {}),
        ],
        after=gone_everywhere,
    ),
    Story(
        "one who left, timed out or was drained before dispatch pays nothing",
        policy(upstream(max_in_flight=0, tokens_per_second=1000), capacity=SMALL_BURSTS, wait=1),
        [
            (0.0, see(refunded.keep), {}),
            (0.0, both(submit("a", P0, 100), submit("b", P1, 150), submit("c", P2, 20)), {}),
            (0.0, see(refunded.differ), {}),
            (0.0, both(cancel("a"), cancel("b"), cancel("c")), dict.fromkeys("abc", "client_gone_queued")),
            (0.0, see(refunded.found), {}),
            (0.0, submit("d", P1, 150), {}),
            (1.0, nothing, {"d": "queue_timeout"}),
            (1.1, see(is_charged("d", 0)), {}),
            (2.0, submit("e", P1, 150), {}),
            (2.0, drain(), {"e": "rejected_draining"}),
            (2.0, see(refunded.found), {}),
        ],
    ),
    Story(
        "never accepted by the engine is refunded in full, ended twice is settled once",
        policy(WIDE, capacity=SMALL_BURSTS),
        [
            (0.0, see(refunded.keep), {}),
            (0.0, submit("a", P1, 150), {"a": "dispatched"}),
            (0.0, see(is_charged("a", 150_000)), {}),
            (0.0, both(finish("a", -1), finish("a", 10_000), finish("a")), {}),
            (0.0, see(refunded.found), {}),
            (0.0, see(is_charged("a", 0)), {}),
        ],
    ),
    Story(
        "five of one millisecond on a bucket for one: the others wait for their tokens in order",
        policy(WIDE, capacity=SMALL_BURSTS, classes={P0: {"share": 1.0}, P1: {"share": 0}, P2: {"share": 0}}),
        # C = 1000, burst 500
        [
            (0.0, both(*(submit(n, P0, 300) for n in "abcde")), {"a": "dispatched"}),
            (0.1, nothing, {"b": "dispatched"}),
            (0.4, nothing, {"c": "dispatched"}),
            (0.7, nothing, {"d": "dispatched"}),
            (1.0, nothing, {"e": "dispatched"}),
            (1.1, both(*(finish(n) for n in "abcde")), {}),
        ],
    ),
    Story(
        "a bucket that cannot pay in time refuses at once, whichever limit is the smallest",
        policy(
            WIDE,
            capacity=SMALL_BURSTS,
            wait=60,
            throttle=1.0,
            scheduling={"deadline_drop": True},
            classes={P1: {"wait": 0.4}, P2: {"ttft": 0.5}},
        ),
        [
            (
                0.0,
                both(*(submit(f"all{p}", p, n) for p, n in ((P0, 300), (P1, 175), (P2, 25)))),
                {f"all{p}": "dispatched" for p in (P0, P1, P2)},
            ),
            (
                0.0,
                submit("too much for the throttle", P0, 601, tenant="x"),
                {},
            ),  # oversize: waits for a full bucket
            (0.0, submit("behind it", P0, 301), {"behind it": "rejected_rate"}),
            (0.0, submit("impatient", P0, 200, timeout=0.8), {"impatient": "rejected_rate"}),
            (0.0, submit("longer than the wait", P1, 141), {"longer than the wait": "rejected_rate"}),
            (0.0, submit("within the wait", P1, 139), {}),
            (0.0, submit("past the deadline drop", P2, 16), {"past the deadline drop": "rejected_rate"}),
            (0.0, submit("before it", P2, 14), {}),
            (0.28, nothing, {"before it": "dispatched"}),
            (139 / 350, nothing, {"within the wait": "dispatched"}),
            (0.5, nothing, {"too much for the throttle": "dispatched"}),
            (
                1.0,
                both(
                    *(
                        finish(n)
                        for n in (
                            "all0",
                            "all1",
                            "all2",
                            "before it",
                            "within the wait",
                            "too much for the throttle",
                        )
                    )
                ),
                {},
            ),
        ],
    ),
    Story(
        "the queue is bounded in requests, for each class by itself",
        policy(classes={P0: {"max_queued_requests": 5}, P2: {"max_queued_requests": 3}}),
        [
            (0.0, submit("a", P1), {"a": "dispatched"}),
            (0.0, both(*(submit(f"b{i}", P2) for i in range(4))), {"b3": "rejected_queue_full"}),
            (0.1, submit("high", P0), {}),
            (0.2, submit("free", P1), {}),
            (1.0, finish("a"), {"high": "dispatched"}),
            (2.0, finish("high"), {"free": "dispatched"}),
            (3.0, finish("free"), {"b0": "dispatched"}),
            (3.0, submit("b4", P2), {}),
            (
                4.0,
                both(cancel("b1"), cancel("b2"), cancel("b4"), finish("b0")),
                dict.fromkeys(("b1", "b2", "b4"), "client_gone_queued"),
            ),
        ],
    ),
    Story(
        "the queue is bounded in bytes, what runs does not count",
        policy(classes={P1: {"max_queued_bytes": 100}}),
        [
            (0.0, submit("a", P1, body_bytes=10**6), {"a": "dispatched"}),
            (0.1, submit("b", P1, body_bytes=60), {}),
            (0.2, submit("c", P1, body_bytes=41), {"c": "rejected_queue_full"}),
            (0.3, submit("d", P1, body_bytes=40), {}),
            (0.4, submit("e", P1, body_bytes=0), {}),
            (0.5, submit("f", P0, body_bytes=10**6), {}),
            (1.0, finish("a"), {"f": "dispatched"}),
            (1.1, finish("f"), {"b": "dispatched"}),
            (1.2, submit("g", P1, body_bytes=60), {}),
            (
                1.3,
                both(cancel("d"), cancel("e"), cancel("g"), finish("b")),
                dict.fromkeys("deg", "client_gone_queued"),
            ),
        ],
    ),
    Story(
        "a cap of 0 means direct service or nothing",
        policy(
            upstream(max_in_flight=1, tokens_per_second=1000),
            capacity=SMALL_BURSTS,
            max_queued_requests=0,
            classes={P2: {"max_queued_requests": None}},
        ),
        [
            (0.0, submit("a", P0, 200), {"a": "dispatched"}),
            (0.1, submit("b", P0), {"b": "rejected_queue_full"}),
            (0.2, finish("a"), {}),
            (0.3, submit("c", P0, 300), {"c": "dispatched"}),
            (0.4, finish("c"), {}),
            (0.4, submit("no tokens yet", P0, 300), {"no tokens yet": "rejected_queue_full"}),
            (0.7, submit("d", P0, 300), {"d": "dispatched"}),
            (0.8, finish("d"), {}),
        ],
    ),
    Story(
        "full of throttled ones, the heaviest tenant loses its newest",
        policy(WIDE, capacity=SMALL_BURSTS, max_queued_requests=3),
        [
            (0.0, submit("a", P0, 300), {"a": "dispatched"}),
            (0.0, both(submit("x1", P0, 100, tenant="x"), submit("x2", P0, 100, tenant="x")), {}),
            (0.0, submit("y1", P0, 150, tenant="y"), {}),
            (0.0, submit("z1", P0, 10, tenant="z"), {"x2": "rejected_queue_full"}),
            (0.0, submit("y2", P0, 10, tenant="y"), {"y2": "rejected_queue_full"}),
            (0.1, nothing, {"x1": "dispatched"}),
            (0.25, nothing, {"y1": "dispatched"}),
            (0.26, nothing, {"z1": "dispatched"}),
            (1.0, both(*(finish(n) for n in ("a", "x1", "y1", "z1"))), {}),
        ],
    ),
    Story(
        "one that could never fit pushes nobody out",
        policy(WIDE, capacity=SMALL_BURSTS, max_queued_bytes=100),
        [
            (0.0, submit("a", P0, 300), {"a": "dispatched"}),
            (
                0.0,
                both(
                    submit("x1", P0, 100, tenant="x", body_bytes=50),
                    submit("x2", P0, 100, tenant="x", body_bytes=50),
                ),
                {},
            ),
            (0.0, submit("y", P0, 1, tenant="y", body_bytes=101), {"y": "rejected_queue_full"}),
            (0.1, nothing, {"x1": "dispatched"}),
            (0.2, nothing, {"x2": "dispatched"}),
            (1.0, both(*(finish(n) for n in ("a", "x1", "x2"))), {}),
        ],
    ),
    Story(
        "when the chosen head is pushed out the next one is paid at once if it can be",
        policy(WIDE, capacity=SMALL_BURSTS, max_queued_requests=1),
        [
            (0.0, submit("a", P0, 250), {"a": "dispatched"}),
            (0.0, submit("x", P0, 200, tenant="x"), {}),
            (0.0, submit("y", P0, 20, tenant="y"), {"x": "rejected_queue_full", "y": "dispatched"}),
            (0.0, see(is_running("y")), {}),
            (1.0, both(finish("a"), finish("y")), {}),
        ],
    ),
    Story(
        "throttled tenants take turns by what they got",
        policy(WIDE, capacity=SMALL_BURSTS),
        [
            (0.0, submit("a", P0, 300), {"a": "dispatched"}),
            (0.0, both(*(submit(f"x{i}", P0, 100, tenant="x") for i in range(3))), {}),
            (0.0, both(*(submit(f"y{i}", P0, 50, tenant="y") for i in range(3))), {}),
            (0.1, nothing, {"x0": "dispatched"}),
            (0.15, nothing, {"y0": "dispatched"}),
            (0.2, nothing, {"y1": "dispatched"}),
            (0.3, nothing, {"x1": "dispatched"}),
            (0.35, nothing, {"y2": "dispatched"}),
            (0.45, nothing, {"x2": "dispatched"}),
            (1.0, both(*(finish(n) for n in ("a", "x0", "x1", "x2", "y0", "y1", "y2"))), {}),
        ],
    ),
    Story(
        "what was paid at once counts as service when tenants are throttled",
        policy(WIDE, capacity=SMALL_BURSTS),
        [
            (0.0, submit("x0", P0, 200, tenant="x"), {"x0": "dispatched"}),
            (0.0, submit("y0", P0, 100, tenant="y"), {"y0": "dispatched"}),
            (0.0, submit("z0", P0, 50, tenant="z"), {}),
            (0.0, both(submit("x1", P0, 10, tenant="x"), submit("y1", P0, 10, tenant="y")), {}),
            (0.05, nothing, {"z0": "dispatched"}),
            (0.06, nothing, {"y1": "dispatched"}),
            (0.07, nothing, {"x1": "dispatched"}),
            (1.0, both(*(finish(n) for n in ("x0", "x1", "y0", "y1", "z0"))), {}),
        ],
    ),
    Story(
        "what was paid and given back does not count as service",
        policy(
            upstream("open", models=("m",), max_in_flight=None, tokens_per_second=500),
            upstream("full", models=("m", "full"), max_in_flight=0, tokens_per_second=500),
            capacity=SMALL_BURSTS,
        ),
        [
            (0.0, submit("x0", P0, 200, tenant="x", model="full"), {}),
            (0.0, cancel("x0"), {"x0": "client_gone_queued"}),
            (0.0, submit("y0", P0, 100, tenant="y"), {"y0": "dispatched"}),
            (0.0, submit("z0", P0, 200, tenant="z"), {"z0": "dispatched"}),
            (0.0, submit("w0", P0, 50, tenant="w"), {}),
            (0.0, both(submit("y1", P0, 10, tenant="y"), submit("x1", P0, 10, tenant="x")), {}),
            (0.05, nothing, {"w0": "dispatched"}),
            (0.06, nothing, {"x1": "dispatched"}),
            (0.07, nothing, {"y1": "dispatched"}),
            (1.0, both(*(finish(n) for n in ("w0", "x1", "y0", "y1", "z0"))), {}),
        ],
    ),
    Story(
        "draining refuses all that waits and all that comes, and lets what runs end",
        policy(upstream(max_in_flight=2, tokens_per_second=1000), capacity=SMALL_BURSTS),
        [
            (0.0, both(submit("a", P0), submit("b", P1, 100)), {"a": "dispatched", "b": "dispatched"}),
            (0.1, both(submit("ready", P1, 10), submit("cheap", P2, 1), submit("dear", P1, 900)), {}),
            (
                0.2,
                drain(),
                {"ready": "rejected_draining", "cheap": "rejected_draining", "dear": "rejected_draining"},
            ),
            (0.3, submit("late", P0), {"late": "rejected_draining"}),
            (0.4, finish("a"), {}),
            (9.0, first_token("b"), {}),
            (9.1, finish("b"), {}),
        ],
        after=gone_everywhere,
    ),
    Story(
        "draining while heads keep others off dispatches nobody on the way",
        policy(upstream(max_in_flight=None, max_in_flight_tokens=100)),
        [
            (0.0, submit("a", P0, 60), {"a": "dispatched"}),
            (0.1, both(submit("large", P0, 60), submit("small", P1, 10)), {}),
            (0.2, drain(), {"large": "rejected_draining", "small": "rejected_draining"}),
            (0.3, finish("a"), {}),
        ],
    ),
]


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("story", STORIES, ids=lambda s: s.title)
def test_story(story: Story, kind: type[Driver]) -> None:
    """Each story is decided as told, at the instants told, under both drivers."""
    tell(story, kind)


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
def test_ghosts_take_no_places(kind: type[Driver]) -> None:
    """Five time out, five new ones are accepted, a hundred times; the place then goes to a live one."""
    driver = kind(policy(wait=1, max_queued_requests=5))
    driver.submit("holder", P0)
    for batch in range(100):
        driver.at(nanoseconds(batch * 2), lambda batch=batch: _five(driver, batch))  # type: ignore[misc]
    driver.at(nanoseconds(200.5), lambda: driver.submit("live", P1))
    driver.at(nanoseconds(200.75), lambda: driver.finish("holder"))
    driver.run(201)
    told = [what.split("@")[0] for _, _, what in driver.log]
    assert told == ["dispatched", *["queue_timeout"] * 500, "dispatched"]
    assert driver.log[-1][:2] == (nanoseconds(200.75), "live")
    driver.finish("live")
    assert_quiet(driver)
    assert len(driver.pool.room._expiries) <= 64
    for line in (driver.pool.throttled[P1], *driver.pool.scheduler.ready[P1]._lines.values()):
        assert len(line) == len(line._places) == 0
        assert len(line._order) + len(line._heaviest or ()) <= 100
    driver.close()


def _five(driver: Driver, batch: int) -> None:
    assert driver.pool.depth(P1) == 0
    for i in range(5):
        driver.submit(f"{batch}.{i}", P1)
    assert driver.pool.depth(P1) == 5


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
def test_thousands_that_leave_a_long_queue_are_forgotten(kind: type[Driver]) -> None:
    """What the policy remembers is in proportion to what waits now, not to what once waited."""
    driver = kind(policy(wait=3600))
    driver.submit("holder", P0)
    for i in range(3000):
        driver.submit(f"{i}", P1)
    for i in range(3000):
        driver.cancel(f"{i}")
    assert len(driver.pool.room._expiries) <= 64
    driver.finish("holder")
    assert_quiet(driver)
    driver.close()


@pytest.mark.parametrize(
    ("parameters", "tokens", "given", "too_long"),
    [
        (policy(capacity={"max_request_tokens": 100}), 100, {}, False),
        (policy(capacity={"max_request_tokens": 100}), 101, {}, True),
        (policy(capacity={"max_request_tokens": None}), 10**9, {}, False),
        (policy(capacity={"max_request_tokens": 100, "initial_output_tokens": 50}), 51, {}, True),
        (
            policy(capacity={"max_request_tokens": 100, "initial_output_tokens": 50}),
            51,
            {"max_output_tokens": 49},
            False,
        ),
        (
            policy(capacity={"max_request_tokens": 100, "initial_output_tokens": 50}),
            51,
            {"max_output_tokens": 0},
            False,
        ),
    ],
)
def test_a_request_too_long_leaves_no_trace(
    parameters: PolicyParameters, tokens: int, given: dict[str, int], too_long: bool
) -> None:
    """One that can never succeed is an error at the door, not a refusal, and takes nothing."""
    driver = DRIVERS[0](parameters)
    before = levels_of(driver)
    if not too_long:
        assert driver.submit("a", P1, tokens, **given).stage is Stage.DISPATCHED
        return
    with pytest.raises(RequestTooLong, match="100 are allowed"):
        driver.submit("a", P1, tokens, **given)
    assert driver.log == driver.endings.records == []
    assert levels_of(driver) == before
    assert_quiet(driver)


def test_a_model_that_nobody_serves_leaves_no_trace() -> None:
    """An unknown model is an error at the door and takes nothing."""
    driver = DRIVERS[0](policy(upstream(models=("llama", "qwen"))))
    assert driver.admission.serves("llama")
    assert not driver.admission.serves("gpt")
    before = levels_of(driver)
    with pytest.raises(KeyError):
        driver.submit("a", P1, model="gpt")
    assert driver.log == driver.endings.records == []
    assert levels_of(driver) == before
    assert driver.submit("b", P1, model="qwen").stage is Stage.DISPATCHED
