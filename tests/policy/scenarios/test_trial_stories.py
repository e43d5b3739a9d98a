"""Stories of upstreams that are left, and get one request as a trial before all may come back; and of
requests whose upstream was not reached, which go to another one."""

from collections.abc import Callable

import pytest

from gateway.policy.events import Observer
from gateway.policy.outcome import Outcome
from tests.support.drivers import DRIVERS, Driver
from tests.support.policy_settings import P0, P1, P2, nanoseconds, policy, upstream
from tests.support.stories import (
    Action,
    Story,
    both,
    cancel,
    finish,
    health,
    nothing,
    requeue,
    see,
    submit,
    tell,
    trial,
)

WIDE = upstream(max_in_flight=None)
A, B = upstream("a", max_in_flight=2), upstream("b", max_in_flight=2)


def ends(*names: str) -> Action:
    return both(*(finish(name) for name in names))


def capacity(tokens_per_second: float) -> Action:
    def check(driver: Driver) -> None:
        assert driver.pool.buckets.capacity == tokens_per_second * 1000

    return see(check)


STORIES = [
    Story(
        "one request goes, the others wait until it is known to be well",
        policy(WIDE),
        [
            (0, health("gpu0", False), {}),
            (1, both(submit("a", P1), submit("b", P0), submit("c", P2)), {}),
            (2, trial("gpu0"), {"b": "dispatched"}),
            (3, health("gpu0", True), {"a": "dispatched", "c": "dispatched"}),
            (4, ends("a", "b", "c"), {}),
        ],
    ),
    Story(
        "a trial that fails lets nobody in",
        policy(WIDE),
        [
            (0, health("gpu0", False), {}),
            (1, both(submit("a", P1), submit("b", P1)), {}),
            (2, trial("gpu0"), {"a": "dispatched"}),
            (3, both(health("gpu0", False), finish("a", -1)), {}),
            (11, nothing, {"b": "rejected_no_upstream"}),
        ],
    ),
    Story(
        "a trial that ends without a verdict makes the next one the trial",
        policy(WIDE),
        [
            (0, both(health("gpu0", False), submit("a", P0), submit("b", P0), submit("c", P0)), {}),
            (2, trial("gpu0"), {"a": "dispatched"}),
            (3, finish("a"), {"b": "dispatched"}),
            (4, requeue("b"), {}),
            (4.25, nothing, {"b": "dispatched"}),
            (5, both(health("gpu0", True), ends("b")), {"c": "dispatched"}),
            (6, ends("c"), {}),
        ],
    ),
    Story(
        "requests that it had before are no trial, and their ends change nothing",
        policy(WIDE),
        [
            (0, submit("old", P0), {"old": "dispatched"}),
            (1, both(health("gpu0", False), submit("a", P0), submit("b", P0)), {}),
            (2, trial("gpu0"), {"a": "dispatched"}),
            (3, finish("old"), {}),
            (4, both(health("gpu0", True), ends("a")), {"b": "dispatched"}),
            (5, ends("b"), {}),
        ],
    ),
    Story(
        "a new trial does not wait for the end of the old one",
        policy(WIDE),
        [
            (0, both(health("gpu0", False), submit("a", P0), submit("b", P0), submit("c", P0)), {}),
            (1, trial("gpu0"), {"a": "dispatched"}),
            (2, health("gpu0", False), {}),
            (3, trial("gpu0"), {"b": "dispatched"}),
            (4, finish("a"), {}),
            (5, both(health("gpu0", True), ends("b")), {"c": "dispatched"}),
            (6, ends("c"), {}),
        ],
    ),
    Story(
        "the limits of the upstream hold for a trial too",
        policy(upstream(max_in_flight=1)),
        [
            (0, submit("old", P0), {"old": "dispatched"}),
            (1, both(health("gpu0", False), submit("a", P0)), {}),
            (2, trial("gpu0"), {}),
            (3, finish("old"), {"a": "dispatched"}),
            (4, ends("a"), {}),
        ],
    ),
    Story(
        "nobody but the trial can go, so the others are told after a while",
        policy(WIDE, no_upstream_seconds=3),
        [
            (0, both(health("gpu0", False), submit("a", P0)), {}),
            (1, trial("gpu0"), {"a": "dispatched"}),
            (2, submit("b", P0), {}),
            (5, nothing, {"b": "rejected_no_upstream"}),
            (6, ends("a"), {}),
        ],
    ),
    Story(
        "where little is asked the trial comes all the same, wherever the upstream stands in the list",
        policy(A, B),
        [
            (0, both(health("b", False), submit("one", P0)), {"one": "dispatched"}),
            (1, ends("one"), {}),
            (2, trial("b"), {}),
            (3, submit("two", P0), {"two": "dispatched@b"}),
            (4, both(health("b", True), ends("two")), {}),
        ],
    ),
    Story(
        "the others are served elsewhere meanwhile",
        policy(A, B),
        [
            (0, health("a", False), {}),
            (1, trial("a"), {}),
            (2, both(submit("r", P0), submit("s", P0)), {"r": "dispatched@a", "s": "dispatched@b"}),
            (3, submit("t", P0), {"t": "dispatched@b"}),
            (4, ends("r", "s", "t"), {}),
        ],
    ),
    Story(
        "one on trial adds nothing to the capacity",
        policy(upstream("a", tokens_per_second=100), upstream("b", tokens_per_second=30)),
        [
            (0, both(capacity(130), health("a", False), capacity(30)), {}),
            (1, both(trial("a"), capacity(30)), {}),
            (2, both(health("a", True), capacity(130)), {}),
        ],
    ),
    Story(
        "in observe mode it gets its trial, or it would never be back",
        policy(A, B, observe=True),
        [
            (0, health("a", False), {}),
            (1, trial("a"), {}),
            (2, both(submit("r", P0), submit("s", P0)), {"r": "dispatched@a", "s": "dispatched@b"}),
            (3, ends("r", "s"), {}),
        ],
    ),
    Story(
        "one whose upstream was not reached goes to another, though that one is more busy",
        policy(A, B),
        [
            (0, submit("one", P0, 5), {"one": "dispatched@a"}),
            (0, submit("two", P0, 5), {"two": "dispatched@b"}),
            (0, finish("one"), {}),
            (1, submit("r", P0), {"r": "dispatched@a"}),
            (1, requeue("r", reached=False), {"r": "dispatched@b"}),
            (2, ends("two", "r"), {}),
        ],
    ),
    Story(
        "it waits for that other one, and keeps nobody off the first",
        policy(upstream("a"), upstream("b")),
        [
            (0, submit("r", P0), {"r": "dispatched@a"}),
            (0, submit("holder", P0), {"holder": "dispatched@b"}),
            (1, requeue("r", reached=False), {}),
            (2, submit("other", P0), {"other": "dispatched@a"}),
            (3, finish("other"), {}),
            (4, finish("holder"), {"r": "dispatched@b"}),
            (5, ends("r"), {}),
        ],
    ),
    Story(
        "and if that one goes down, for its return",
        policy(upstream("a"), upstream("b")),
        [
            (0, submit("r", P0), {"r": "dispatched@a"}),
            (0, submit("holder", P0), {"holder": "dispatched@b"}),
            (1, requeue("r", reached=False), {}),
            (2, both(health("b", False), finish("holder")), {}),
            (3, health("b", True), {"r": "dispatched@b"}),
            (4, ends("r"), {}),
        ],
    ),
    Story(
        "it waits no longer than it might have anyway, and may leave",
        policy(upstream("a"), upstream("b"), wait=5),
        [
            (0, submit("r", P0), {"r": "dispatched@a"}),
            (0, submit("s", P0), {"s": "dispatched@b"}),
            (0.5, submit("t", P0), {}),
            (1, requeue("r", reached=False), {}),
            (1.25, nothing, {"t": "dispatched@a"}),
            (1.5, requeue("t", reached=False), {}),
            (2, cancel("t"), {"t": "client_gone_queued"}),
            (5, nothing, {"r": "queue_timeout"}),
            (6, ends("s"), {}),
        ],
    ),
]


@pytest.mark.parametrize("kind", DRIVERS)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.title)
def test_story(story: Story, kind: Callable[..., Driver]) -> None:
    """Under both drivers."""
    tell(story, kind)


class _Listener(Observer):
    def __init__(self) -> None:
        self.told: list[tuple[str, object, int]] = []

    def health_changed(self, upstream: str, healthy: bool, at: int) -> None:
        self.told.append((upstream, healthy, at))

    def trial_allowed(self, upstream: str, at: int) -> None:
        self.told.append((upstream, "trial", at))


def test_what_is_told_of_trials() -> None:
    """Each change, also from trial to down; saying again what is known already is no change."""
    driver = DRIVERS[0](policy())
    listener = driver.admission._observer = _Listener()
    slots = driver.admission.upstream("gpu0")
    driver.health("gpu0", True)
    for act, *args in (
        (driver.health, False),
        (driver.health, False),
        (driver.trial,),
        (driver.health, False),
        (driver.trial,),
        (driver.health, True),
    ):
        act("gpu0", *args)
        assert slots.healthy == (args == [True])
        assert slots.on_trial == (act == driver.trial)
    assert [what for _, what, _ in listener.told] == [False, "trial", False, "trial", True]


def test_who_may_go_elsewhere() -> None:
    """Only with another upstream of its model that is up, and only once, whatever it was sent back for."""
    upstreams = [
        upstream(name, models=models) for name, models in (("a", ("m",)), ("b", ("m",)), ("c", ("n",)))
    ]
    driver = DRIVERS[0](policy(*upstreams))
    admission = driver.admission
    ticket = driver.submit("r", P0)
    assert admission.may_go_elsewhere(ticket)
    driver.health("b", False)
    assert not admission.may_go_elsewhere(ticket)
    driver.trial("b")
    assert not admission.may_go_elsewhere(ticket)
    driver.health("b", True)
    driver.requeue("r", reached=False)
    assert ticket.upstream.name == "b"
    assert not admission.may_go_elsewhere(ticket)
    with pytest.raises(ValueError, match="cannot be sent again"):
        driver.requeue("r", reached=False)


def test_what_is_told_of_one_that_was_not_reached() -> None:
    """No engine was full; the record names the one that was not reached, and the one it was at."""
    driver = DRIVERS[0](policy(A, B))
    driver.submit("r", P0, 100)
    driver.at(nanoseconds(1), lambda: driver.requeue("r", reached=False))
    driver.at(nanoseconds(2), lambda: driver.finish("r"))
    driver.run(3)
    record = driver.endings.record("r")
    assert driver.endings.full == []
    assert (record.requeued_at, record.not_reached, record.upstream) == (nanoseconds(1), "a", "b")
    assert (record.outcome, record.charged) == (Outcome.COMPLETED, 100_000)
