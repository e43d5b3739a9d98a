"""Stories of other upstreams while running: one more, one less, one elsewhere, other models. Who waits goes
on waiting where it can be served now, who runs ends where it is, and no token is lost or made."""

from typing import Any

import pytest

from gateway.policy.parameters import PolicyParameters, UpstreamParameters
from gateway.policy.request import Priority, Stage
from tests.support.drivers import DRIVERS, Driver, VirtualDriver
from tests.support.policy_settings import P0, P1, P2, policy, upstream
from tests.support.stories import (
    Action,
    Story,
    both,
    cancel,
    drain,
    finish,
    first_token,
    health,
    nothing,
    reconfigure,
    requeue,
    see,
    submit,
    tell,
    trial,
)

SMALL_BURSTS = {"burst_seconds": 0.5, "min_burst_tokens": 0}
"""Bursts of 300 / 175 / 25 tokens at 1000 tokens a second."""

TINY_BURSTS = {"burst_seconds": 0.01, "min_burst_tokens": 0}
"""Of P0 6 tokens at 1000 tokens a second: a tenant that comes back may be behind by no more."""


def engine(name: str, *models: str, places: int | None = 1, **given: Any) -> UpstreamParameters:
    return upstream(name, models=models or ("m",), max_in_flight=places, **given)


def wide(name: str, *models: str, rate: float = 1000, **given: Any) -> UpstreamParameters:
    """Room for everybody, and so many tokens a second."""
    return engine(name, *models, **{"places": None, "tokens_per_second": rate, **given})


def budget(*upstreams: UpstreamParameters, **given: Any) -> PolicyParameters:
    return policy(*upstreams, capacity=SMALL_BURSTS, **given)


def others(*upstreams: UpstreamParameters, **given: Any) -> Action:
    return reconfigure(policy(*upstreams, **given))


def levels(model: str, *tokens: float) -> Action:
    """Of the budget that the model is paid from."""

    def check(driver: Driver) -> None:
        pool = driver.admission._pool_of(model)
        assert pool is not None
        pool.buckets.advance(driver.clock.now())
        assert [pool.buckets.level_tokens(p) for p in Priority] == pytest.approx(list(tokens))

    return see(check)


def stage(name: str, wanted: Stage) -> Action:
    def check(driver: Driver) -> None:
        assert driver.tickets[name].stage is wanted

    return see(check)


def active(*priorities: Priority) -> Action:
    """Classes that count as active where model m is served."""

    def check(driver: Driver) -> None:
        buckets = driver.admission._pool_of("m").buckets  # type: ignore[union-attr]
        assert [p for p in Priority if buckets.active_until[p] > driver.clock.now()] == list(priorities)

    return see(check)


def leaving(*names: str) -> Action:
    """Upstreams that are left out and still serve what they have begun."""

    def check(driver: Driver) -> None:
        assert [slots.name for slots in driver.admission.leaving] == list(names)

    return see(check)


def may_try_again(name: str, again: bool, elsewhere: bool) -> Action:
    def check(driver: Driver) -> None:
        ticket = driver.tickets[name]
        assert driver.admission.may_requeue(ticket) is again
        assert driver.admission.may_go_elsewhere(ticket) is elsewhere

    return see(check)


def not_served(model: str) -> Action:
    def check(driver: Driver) -> None:
        assert not driver.admission.serves(model)
        with pytest.raises(KeyError):
            driver.submit("nobody's", P0, model=model)

    return see(check)


def ends(*names: str) -> Action:
    return both(*(finish(name) for name in names))


COMES_AND_GOES = [
    Story(
        "one more takes who waits at once",
        policy(engine("a")),
        [
            (0, both(submit("x", P0), submit("y", P0)), {"x": "dispatched@a"}),
            (1, others(engine("a"), engine("b")), {"y": "dispatched@b"}),
            (2, ends("x", "y"), {}),
        ],
    ),
    Story(
        "one that is left out serves what it has begun, and gets nothing more",
        policy(engine("a"), engine("b")),
        [
            (
                0,
                both(*(submit(n, P0) for n in "xyz")),
                {"x": "dispatched@a", "y": "dispatched@b"},
            ),
            (1, both(others(engine("b")), leaving("a")), {}),
            (2, both(first_token("x"), finish("x"), leaving()), {}),
            (3, finish("y"), {"z": "dispatched@b"}),
            (4, finish("z"), {}),
        ],
    ),
    Story(
        "one that is left out idle is forgotten at once",
        policy(engine("a"), engine("b")),
        [
            (0, submit("x", P0), {"x": "dispatched@a"}),
            (1, both(others(engine("a")), leaving()), {}),
            (2, finish("x"), {}),
        ],
    ),
    Story(
        "who waits for a model that nobody serves any longer is told so at once, who runs ends",
        budget(wide("a"), engine("b", "n", tokens_per_second=1000), engine("c", "k")),
        [
            (0, both(submit("x", P0, 100), submit("y", P0, model="n")), dict.fromkeys("xy", "dispatched")),
            (0, both(submit("w", P0, 400), submit("z", P0, model="n")), {}),
            (
                0,
                reconfigure(budget(engine("c", "k"))),
                {"w": "rejected_no_upstream", "z": "rejected_no_upstream"},
            ),
            (0, both(not_served("m"), not_served("n"), leaving("a", "b")), {}),
            (0, both(may_try_again("x", False, False), may_try_again("y", False, False)), {}),
            (1, both(finish("x"), leaving("b"), finish("y"), leaving()), {}),
        ],
    ),
    Story(
        "what was paid by those who are refused is there for the others",
        budget(wide("a", "m", rate=500), wide("b", "n", rate=500, accepts="any")),
        [
            (0, both(health("a", False), submit("x", P0, 100)), {}),
            (0, levels("m", 50, 87.5, 12.5), {}),
            (
                0,
                reconfigure(budget(wide("a", "k", rate=500), wide("b", "n", rate=500))),
                {"x": "rejected_no_upstream"},
            ),
            (0, levels("k", 150, 87.5, 12.5), {}),
        ],
    ),
    Story(
        "the same name at another address is another engine",
        policy(engine("a")),
        [
            (0, both(submit("x", P0), submit("y", P0), submit("z", P0)), {"x": "dispatched@a"}),
            (1, both(others(engine("a", address="there")), leaving("a")), {"y": "dispatched@a"}),
            (2, both(finish("x"), leaving()), {}),
            (3, finish("y"), {"z": "dispatched@a"}),
            (4, finish("z"), {}),
        ],
    ),
    Story(
        "one that comes back still has what it had begun",
        policy(engine("a"), engine("b")),
        [
            (0, both(*(submit(n, P0) for n in "xyz")), {"x": "dispatched@a", "y": "dispatched@b"}),
            (1, both(others(engine("b")), leaving("a")), {}),
            (2, both(others(engine("a"), engine("b")), leaving()), {}),
            (3, finish("x"), {"z": "dispatched@a"}),
            (4, ends("y", "z"), {}),
        ],
    ),
    Story(
        "one that was down when it left counts as up when it comes back",
        policy(engine("a"), engine("b")),
        [
            (0, both(submit("x", P0), submit("y", P0)), {"x": "dispatched@a", "y": "dispatched@b"}),
            (0, health("a", False), {}),
            (1, others(engine("b")), {}),
            (2, others(engine("a", places=2), engine("b")), {}),
            (2, submit("z", P0), {"z": "dispatched@a"}),
            (3, ends("x", "y", "z"), {}),
        ],
    ),
    Story(
        "all of them are replaced",
        policy(engine("a"), engine("b")),
        [
            (
                0,
                both(*(submit(n, P0) for n in "uvwxy")),
                {"u": "dispatched@a", "v": "dispatched@b"},
            ),
            (
                1,
                both(others(engine("c"), engine("d")), leaving("a", "b")),
                {"w": "dispatched@c", "x": "dispatched@d"},
            ),
            (2, ends("u", "v"), {}),
            (3, finish("w"), {"y": "dispatched@c"}),
            (4, ends("x", "y"), {}),
        ],
    ),
    Story(
        "one on trial leaves, and its trial ends there",
        policy(engine("a", places=3), engine("b")),
        [
            (0, health("a", False), {}),
            (0, trial("a"), {}),
            (
                0,
                both(submit("x", P0), submit("y", P0), submit("z", P0)),
                {"x": "dispatched@a", "y": "dispatched@b"},
            ),
            (1, others(engine("b")), {}),
            (2, finish("x"), {}),
            (3, finish("y"), {"z": "dispatched@b"}),
            (4, finish("z"), {}),
        ],
    ),
]

OTHER_MODELS = [
    Story(
        "a model is served by one more",
        policy(engine("a"), engine("b", "n")),
        [
            (0, both(submit("x", P0), submit("y", P0)), {"x": "dispatched@a"}),
            (0, submit("z", P0, model="n"), {"z": "dispatched@b"}),
            (1, others(engine("a"), engine("b", "m", "n", places=2)), {"y": "dispatched@b"}),
            (2, ends("x", "y", "z"), {}),
        ],
    ),
    Story(
        "a place that a request of another model leaves is given to who waits for it",
        policy(engine("a", "m", "n"), engine("b", "n")),
        [
            (0, submit("x", P0, model="n"), {"x": "dispatched@a"}),
            (0, submit("z", P0), {}),
            (1, others(engine("a", "m"), engine("b", "n")), {}),
            (2, both(first_token("x"), finish("x")), {"z": "dispatched@a"}),
            (3, finish("z"), {}),
        ],
    ),
    Story(
        "so is its room for prompts, also when the first token is only assumed",
        policy(
            engine("a", "m", "n", places=9, tokens_per_second=1000),
            engine("b", "n"),
            scheduling={"max_pending_prefill_tokens": 50},
            capacity={"min_burst_tokens": 10**6, "burst_seconds": 100},
        ),
        [
            (0, submit("x", P1, 100, model="n", streaming=False), {"x": "dispatched@a"}),
            (0, submit("z", P1), {}),
            (
                0.05,
                others(
                    engine("a", "m", places=9, tokens_per_second=1000),
                    engine("b", "n"),
                    scheduling={"max_pending_prefill_tokens": 50},
                    capacity={"min_burst_tokens": 10**6, "burst_seconds": 100},
                ),
                {},
            ),
            (0.1, nothing, {"z": "dispatched@a"}),
            (1, ends("x", "z"), {}),
        ],
    ),
    Story(
        "an answer that is not streamed has its first token when it would have had, in another budget too",
        policy(
            engine("a", places=9, tokens_per_second=1000),
            engine("b", "n"),
            engine("c", "n"),
            scheduling={"max_pending_prefill_tokens": 50},
            capacity={"min_burst_tokens": 10**6, "burst_seconds": 100},
        ),
        [
            (0, submit("x", P1, 100, streaming=False), {"x": "dispatched@a"}),
            (0, submit("z", P1), {}),
            (
                0.05,
                others(
                    engine("a", "m", "n", places=9, tokens_per_second=1000),
                    engine("b", "n"),
                    engine("c", "n"),
                    scheduling={"max_pending_prefill_tokens": 50},
                    capacity={"min_burst_tokens": 10**6, "burst_seconds": 100},
                ),
                {},
            ),
            (0.1, nothing, {"z": "dispatched@a"}),
            (1, ends("x", "z"), {}),
        ],
    ),
    Story(
        "one that accepts long prompts no longer gets none of those that wait",
        policy(engine("a"), engine("b"), scheduling={"long_prompt_tokens": 100}),
        [
            (0, both(submit("x", P0), submit("y", P0)), {"x": "dispatched@a", "y": "dispatched@b"}),
            (0, both(submit("long", P0, 200), submit("short", P0)), {}),
            (
                1,
                others(engine("a", accepts="short"), engine("b"), scheduling={"long_prompt_tokens": 100}),
                {},
            ),
            (2, finish("x"), {"short": "dispatched@a"}),
            (3, finish("y"), {"long": "dispatched@b"}),
            (4, ends("long", "short"), {}),
        ],
    ),
    Story(
        "a long prompt waits for the lane of its engine as before, and then for that of the new one",
        policy(engine("a", places=9), scheduling={"long_prompt_tokens": 100}),
        [
            (
                0,
                both(submit("x", P1, 200), submit("y", P1, 200), submit("z", P1, 200)),
                {"x": "dispatched@a"},
            ),
            (1, others(engine("a", "m", "n", places=9), scheduling={"long_prompt_tokens": 100}), {}),
            (
                2,
                others(engine("a", places=9), engine("b", places=9), scheduling={"long_prompt_tokens": 100}),
                {"y": "dispatched@b"},
            ),
            (3, first_token("y"), {"z": "dispatched@b"}),
            (4, ends("x", "y", "z"), {}),
        ],
    ),
]

BUDGETS = [
    Story(
        "who has gone elsewhere is active there, and here for five seconds more",
        budget(wide("a", "m", "n", places=0), wide("b"), wide("c", "n", places=0)),
        [
            (0, submit("x", P0, model="n"), {}),
            (1, both(reconfigure(budget(wide("a"), wide("b"), wide("c", "n", places=0))), active(P0)), {}),
            (5.9, active(P0), {}),
            (6, active(), {}),
            (7, cancel("x"), {"x": "client_gone_queued"}),
        ],
    ),
    Story(
        "one more adds to the rate and to no level",
        budget(wide("a")),
        [
            (0, submit("x", P0, 200), {"x": "dispatched"}),
            (0, both(reconfigure(budget(wide("a"), wide("b"))), levels("m", 100, 175, 25)), {}),
            (0.1, levels("m", 100 + 120 + 0, 175 + 70, 25 + 10), {}),
            (1, finish("x"), {}),
        ],
    ),
    Story(
        "budgets that are joined add up, debts too, and are cut to the new bursts",
        budget(wide("a"), wide("b", "n", rate=2000)),
        [
            (0, submit("x", P0, 500), {"x": "dispatched"}),
            (0, submit("y", P1, 300, model="n"), {"y": "dispatched"}),
            (0, both(levels("m", -200, 175, 25), levels("n", 600, 50, 50)), {}),
            (
                0,
                both(
                    reconfigure(budget(wide("a"), wide("b", "n", rate=2000), wide("c", "*"))),
                    levels("m", 400, 225, 75),
                ),
                {},
            ),
            (0, both(reconfigure(budget(wide("c", "*", rate=200))), levels("m", 60, 35, 5)), {}),
            (1, ends("x", "y"), {}),
        ],
    ),
    Story(
        "a budget that is split is split by tokens per second",
        budget(wide("a"), wide("b", rate=3000)),
        [
            (0, submit("x", P0, 1600), {"x": "dispatched"}),
            (0, submit("y", P1, 300), {"y": "dispatched"}),
            (0, levels("m", -400, 400, 100), {}),
            (0, reconfigure(budget(wide("a"), wide("b", "n", rate=3000))), {}),
            (0, both(levels("m", -100, 100, 25), levels("n", -300, 300, 75)), {}),
            (1, ends("x", "y"), {}),
        ],
    ),
    Story(
        "what has flowed in by then is shared as well",
        budget(wide("a"), wide("b")),
        [
            (0, submit("x", P0, 600), {"x": "dispatched"}),
            (0.1, reconfigure(budget(wide("a"), wide("b", "n"))), {}),
            (0.1, both(levels("m", 100, 175, 25), levels("n", 100, 175, 25)), {}),
            (1, finish("x"), {}),
        ],
    ),
    Story(
        "or in three",
        budget(wide("a"), wide("b", rate=2000), wide("c", rate=3000)),
        [
            (0, submit("x", P0, 600), {"x": "dispatched"}),
            (0, reconfigure(budget(wide("c", rate=3000), wide("a", "k"), wide("b", "n", rate=2000))), {}),
            (0, both(levels("m", 600, 525, 75), levels("k", 200, 175, 25), levels("n", 400, 350, 50)), {}),
            (1, finish("x"), {}),
        ],
    ),
    Story(
        "upstreams that change sides take with them what was theirs, once",
        budget(wide("a1"), wide("a2"), wide("a3"), wide("b1", "n"), wide("b2", "n")),
        [
            (0, submit("x", P0, 300), {"x": "dispatched"}),
            (0, submit("y", P0, 500, model="n"), {"y": "dispatched"}),
            (0, both(levels("m", 600, 525, 75), levels("n", 100, 350, 50)), {}),
            (
                0,
                reconfigure(budget(wide("a1"), wide("a2"), wide("a3", "n"), wide("b1"), wide("b2", "n"))),
                {},
            ),
            (0, both(levels("m", 450, 525, 75), levels("n", 250, 350, 50)), {}),
            (1, ends("x", "y"), {}),
        ],
    ),
    Story(
        "upstreams that are down take their part as well, and keep it until they are up",
        budget(wide("a"), wide("b")),
        [
            (0, health("b", False), {}),
            (0, submit("x", P0, 100), {"x": "dispatched@a"}),
            (0, levels("m", 200, 175, 25), {}),
            (0, reconfigure(budget(wide("a"), wide("b", "n"))), {}),
            (0, both(levels("m", 100, 87.5, 12.5), levels("n", 100, 87.5, 12.5)), {}),
            (0, both(health("b", True), levels("n", 100, 87.5, 12.5)), {}),
            (1, finish("x"), {}),
        ],
    ),
    Story(
        "new upstreams alone start with full buckets",
        budget(wide("a")),
        [
            (0, submit("x", P0, 500), {"x": "dispatched"}),
            (0, both(reconfigure(budget(wide("a"), wide("b", "n"))), levels("n", 300, 175, 25)), {}),
            (0, both(reconfigure(budget(wide("c"))), levels("m", 300, 175, 25)), {}),
            (1, finish("x"), {}),
        ],
    ),
    Story(
        "a lease is settled where its engine is, and where its model is served when the engine has left",
        budget(wide("a", "m", "n"), wide("b", "n")),
        [
            (0, submit("x", P0, 300, model="n"), {"x": "dispatched@a"}),
            (0, submit("y", P0, 300, model="n"), {"y": "dispatched@b"}),
            (0, reconfigure(budget(wide("a"), wide("c", "n"))), {}),
            (0, both(levels("m", 0, 175, 25), levels("n", 300, 175, 25)), {}),
            (0, both(finish("x", 100), levels("m", 200, 175, 25), levels("n", 300, 175, 25)), {}),
            (0, both(finish("y", 450), levels("m", 200, 175, 25), levels("n", 150, 175, 25)), {}),
        ],
    ),
    Story(
        "what was never charged is not settled at an engine that has left",
        budget(wide("a"), observe=True, throttle=0.1),
        [
            (0, both(submit("x", P0, 300), submit("y", P0, 200)), dict.fromkeys("xy", "dispatched")),
            (0, reconfigure(budget(wide("b"))), {}),
            (0, both(finish("y", 250), levels("m", 300, 175, 25)), {}),
            (0, both(finish("x", 400), levels("m", 200, 175, 25)), {}),
        ],
    ),
    Story(
        "who waits for tokens is paid from the new budget, woken in time",
        budget(wide("a"), wide("b", "n")),
        [
            (0, both(submit("x", P0, 500), submit("y", P0, 250)), {"x": "dispatched"}),
            (0, submit("z", P0, 300, model="n"), {"z": "dispatched"}),
            (0.0, reconfigure(budget(wide("a", "m", "n", rate=4000), wide("b", "n"))), {}),
            (0.15, nothing, {"y": "dispatched"}),  # −200 + 0.15 × 3000
            (1, ends("x", "y", "z"), {}),
        ],
    ),
    Story(
        "a class counts as active for its five seconds in the new budget too",
        budget(wide("a")),
        [
            (0, submit("x", P0), {"x": "dispatched"}),
            (0, both(finish("x"), submit("y", P1)), {"y": "dispatched"}),
            (1, both(reconfigure(budget(wide("b"))), active(P0, P1)), {}),
            (2, both(reconfigure(budget(wide("b"), wide("c", "n"), wide("d", "n"))), active(P0, P1)), {}),
            (
                3,
                both(reconfigure(budget(wide("b"), wide("c", "m", "n"), wide("d", "n"))), active(P0, P1)),
                {},
            ),
            (4.9, active(P0, P1), {}),
            (5, both(active(P1), finish("y"), active(P1)), {}),
        ],
    ),
]

ORDER = [
    Story(
        "the least served goes next at the new engines too",
        policy(engine("a")),
        [
            (0, both(submit("v0", P0, tenant="v"), submit("u0", P0, 100, tenant="u")), {"v0": "dispatched"}),
            (1, finish("v0"), {"u0": "dispatched"}),
            (2, both(*(submit(n, P0, tenant=n[0]) for n in ("u1", "v1", "u2"))), {}),
            (3, others(engine("b")), {"v1": "dispatched@b"}),
            (4, finish("u0"), {}),
            (4, finish("v1"), {"u1": "dispatched@b"}),
            (5, finish("u1"), {"u2": "dispatched@b"}),
            (6, finish("u2"), {}),
        ],
    ),
    Story(
        "and in a budget split off, and in one joined",
        policy(engine("a", "m", "n"), engine("b", "m")),
        [
            (
                0,
                both(
                    submit("h1", P0, 1, tenant="v"),
                    submit("h2", P0, 100, tenant="u"),
                    submit("u1", P0, 1, tenant="u", model="n"),
                    submit("v1", P0, 1, tenant="v", model="n"),
                ),
                {"h1": "dispatched@a", "h2": "dispatched@b"},
            ),
            (1, others(engine("a", "n"), engine("b", "m")), {}),
            (2, finish("h1"), {"v1": "dispatched@a"}),
            (3, others(engine("a", "n"), engine("c", "m", "n", places=0), engine("b", "m")), {}),
            (4, finish("v1"), {"u1": "dispatched@a"}),
            (5, ends("h2", "u1"), {}),
        ],
    ),
    Story(
        "first come first served within a tenant, wherever they had waited",
        policy(engine("a", places=0), engine("b", "n", places=0), engine("c", "k", "n", places=0)),
        [
            (0, both(*(submit(f"{i}", P1, model="nmm"[i % 3]) for i in range(7))), {}),
            (
                1,
                others(engine("b", "m", "n", places=None), engine("c", "n", places=0), engine("a", places=0)),
                dict.fromkeys("0123456", "dispatched@b"),
            ),
            (2, ends(*"0123456"), {}),
        ],
    ),
    Story(
        "a tenant that has waited all the while loses nothing, however much another was served before",
        policy(engine("a", tokens_per_second=1000), capacity=TINY_BURSTS, throttle=0),
        [
            (0, submit("h", P0, tenant="h"), {"h": "dispatched@a"}),
            (1, submit("u0", P0, 100, tenant="u"), {}),
            (2, submit("v0", P0, 1, tenant="v"), {}),
            (3, finish("h"), {"u0": "dispatched@a"}),
            (4, submit("u1", P0, tenant="u"), {}),
            (5, submit("v1", P0, 4, tenant="v"), {}),
            (6, submit("v2", P0, 4, tenant="v"), {}),
            (7, submit("v3", P0, 4, tenant="v"), {}),
            (8, finish("u0"), {"v0": "dispatched@a"}),
            (
                9,
                others(engine("b", tokens_per_second=1000), capacity=TINY_BURSTS, throttle=0),
                {"v1": "dispatched@b"},
            ),
            (10, finish("v1"), {"v2": "dispatched@b"}),
            (11, finish("v2"), {"v3": "dispatched@b"}),
            (12, finish("v3"), {"u1": "dispatched@b"}),
            (13, ends("v0", "u1"), {}),
        ],
    ),
    Story(
        "classes keep their order, and who was passed over is not passed over more often",
        policy(engine("a"), scheduling={"skip_limit": {P1: 2, P2: 19}}),
        [
            (0, both(*(submit(f"p{i}", P0) for i in range(5))), {"p0": "dispatched"}),
            (0, both(submit("batch", P2), submit("q", P1)), {}),
            (1, finish("p0"), {"p1": "dispatched"}),
            (1, others(engine("b"), scheduling={"skip_limit": {P1: 2, P2: 19}}), {"p2": "dispatched@b"}),
            (2, finish("p2"), {"q": "promoted@b"}),
            (3, both(finish("p1"), finish("q")), {"p3": "dispatched@b"}),
            (4, finish("p3"), {"p4": "dispatched@b"}),
            (5, finish("p4"), {"batch": "dispatched@b"}),
            (6, finish("batch"), {}),
        ],
    ),
    Story(
        "who waits is told no when its time is over, as if nothing had been",
        policy(engine("a", places=0), wait=4),
        [
            (0, submit("x", P0), {}),
            (1, submit("y", P0, timeout=2), {}),
            (2, others(engine("b", places=0), wait=60), {}),
            (3, nothing, {"y": "queue_timeout"}),
            (3, others(engine("c", places=0), engine("d", "n"), wait=60), {}),
            (4, nothing, {"x": "queue_timeout"}),
        ],
    ),
    Story(
        "the time without an engine goes on",
        policy(engine("a")),
        [
            (0, health("a", False), {}),
            (1, submit("x", P0), {}),
            (5, others(engine("a", "m", "n")), {}),
            (8, others(engine("a", "m"), engine("b", "n")), {}),
            (11, nothing, {"x": "rejected_no_upstream"}),
        ],
    ),
    Story(
        "it begins for those whose last engine that was up is left out",
        policy(engine("a"), engine("b")),
        [
            (0, health("a", False), {}),
            (0, both(submit("x", P0), submit("y", P0)), {"x": "dispatched@b"}),
            (5, others(engine("a")), {}),
            (15, nothing, {"y": "rejected_no_upstream"}),
            (16, finish("x"), {}),
        ],
    ),
    Story(
        "nobody is cut short by others who have waited longer without an engine",
        policy(engine("a"), engine("b", "n")),
        [
            (0, health("a", False), {}),
            (1, both(submit("x", P0), submit("h", P0, model="n")), {"h": "dispatched@b"}),
            (1, submit("y", P0, model="n"), {}),
            (8, health("b", False), {}),
            (9, others(engine("a", "m", "n"), engine("b", "m", "n")), {}),
            (18, nothing, {"x": "rejected_no_upstream", "y": "rejected_no_upstream"}),
            (19, finish("h"), {}),
        ],
    ),
]

SENT_BACK = [
    Story(
        "who is sent back by an engine that has left goes to one that is there now",
        policy(engine("a")),
        [
            (0, submit("x", P0), {"x": "dispatched@a"}),
            (1, others(engine("b")), {}),
            (2, both(others(engine("c")), may_try_again("x", True, True), leaving("a")), {}),
            (3, both(requeue("x"), leaving()), {"x": "dispatched@c"}),
            (4, finish("x"), {}),
        ],
    ),
    Story(
        "one that was not reached may not go elsewhere where nobody else serves its model",
        policy(engine("a"), engine("b")),
        [
            (0, submit("x", P0), {"x": "dispatched@a"}),
            (0, may_try_again("x", True, True), {}),
            (1, both(others(engine("a"), engine("b", "n")), may_try_again("x", True, False)), {}),
            (2, both(others(engine("a", address="there")), may_try_again("x", True, True)), {}),
            (2, health("a", False), {}),
            (2, may_try_again("x", True, False), {}),
            (3, finish("x", -1), {}),
        ],
    ),
    Story(
        "sent back by an engine that serves its model no longer, it waits at those that do",
        policy(engine("a", "m", "n"), engine("b", "n")),
        [
            (0, submit("x", P0, model="n"), {"x": "dispatched@a"}),
            (0, submit("z", P0), {}),
            (1, others(engine("a", "m"), engine("b", "n")), {}),
            (2, requeue("x"), {"x": "dispatched@b"}),
            (2.25, nothing, {"z": "dispatched@a"}),
            (3, ends("x", "z"), {}),
        ],
    ),
    Story(
        "what it gives back there pays for others at once",
        budget(wide("a", "m", "n"), wide("b", "n")),
        [
            (0, submit("x", P0, 600, model="n"), {"x": "dispatched@a"}),
            (0, reconfigure(budget(wide("a", "m"), wide("b", "n"))), {}),
            (0, submit("z", P0, 100), {}),
            (0, both(levels("m", 0, 175, 25), levels("n", 0, 175, 25)), {}),
            (0, both(requeue("x"), stage("z", Stage.READY), stage("x", Stage.THROTTLED)), {}),
            (0, levels("m", 200, 175, 25), {}),
            (0.25, nothing, {"z": "dispatched@a"}),
            (0.3, nothing, {"x": "dispatched@b"}),
            (1, ends("x", "z"), {}),
        ],
    ),
    Story(
        "one that waits again is before the others of its tenant",
        policy(engine("a")),
        [
            (0, both(*(submit(n, P0) for n in "xyz")), {"x": "dispatched@a"}),
            (1, requeue("x"), {}),
            (1.1, others(engine("b", places=1)), {"x": "dispatched@b"}),
            (2, finish("x"), {"y": "dispatched@b"}),
            (3, finish("y"), {"z": "dispatched@b"}),
            (4, finish("z"), {}),
        ],
    ),
    Story(
        "one that was not reached keeps away from that engine while there are others",
        policy(engine("a"), engine("b")),
        [
            (0, both(submit("x", P0), submit("h", P0)), {"x": "dispatched@a", "h": "dispatched@b"}),
            (1, requeue("x", reached=False), {}),
            (2, others(engine("a", "m", "n"), engine("b", "m", "n")), {}),
            (3, others(engine("a", "m"), engine("b", "m", address="there", places=0)), {}),
            (4, others(engine("a", "m"), engine("b", "m", address="there")), {"x": "dispatched@b"}),
            (5, ends("x", "h"), {}),
        ],
    ),
    Story(
        "and goes there when there are none, or at its new address",
        policy(engine("a"), engine("b")),
        [
            (0, both(submit("x", P0), submit("h", P0)), {"x": "dispatched@a", "h": "dispatched@b"}),
            (1, requeue("x", reached=False), {}),
            (2, others(engine("a", address="there", places=0), engine("b")), {}),
            (2.5, others(engine("a", address="there"), engine("b", "m", "n")), {"x": "dispatched@a"}),
            (3, requeue("h", reached=False), {}),
            (3.5, others(engine("b")), {"h": "dispatched@b"}),
            (4, ends("x", "h"), {}),
        ],
    ),
    Story(
        "an engine that has just sent one back is left alone for its quarter of a second all the same",
        policy(engine("a")),
        [
            (0, both(submit("x", P0), submit("y", P0)), {"x": "dispatched@a"}),
            (1, requeue("x"), {}),
            (1.1, others(engine("a", "m", "n")), {}),
            (1.25, nothing, {"x": "dispatched@a"}),
            (2, finish("x"), {"y": "dispatched@a"}),
            (3, finish("y"), {}),
        ],
    ),
]

DRAINING = [
    Story(
        "a shutdown after it refuses all that waits, and what runs ends",
        policy(engine("a")),
        [
            (0, both(submit("x", P0), submit("y", P0), submit("z", P2)), {"x": "dispatched@a"}),
            (1, others(engine("b")), {"y": "dispatched@b"}),
            (2, drain(), {"z": "rejected_draining"}),
            (2, submit("w", P0), {"w": "rejected_draining"}),
            (3, both(requeue("x"), leaving()), {"x": "rejected_draining"}),
            (4, finish("y"), {}),
        ],
    ),
    Story(
        "in a shutdown it admits nobody",
        policy(engine("a")),
        [
            (0, both(submit("x", P0), submit("y", P0)), {"x": "dispatched@a"}),
            (1, drain(), {"y": "rejected_draining"}),
            (2, both(others(engine("a"), engine("b")), submit("z", P0)), {"z": "rejected_draining"}),
            (3, both(others(engine("b")), leaving("a")), {}),
            (4, both(finish("x"), leaving()), {}),
        ],
    ),
    Story(
        "who has just left is not found again",
        policy(engine("a")),
        [
            (0, both(submit("x", P0), submit("y", P0), submit("z", P1)), {"x": "dispatched@a"}),
            (1, both(cancel("y"), others(engine("b"))), {"y": "client_gone_queued", "z": "dispatched@b"}),
            (2, both(submit("w", P1), others(engine("b", "m", "n"))), {}),
            (3, cancel("w"), {"w": "client_gone_queued"}),
            (4, ends("x", "z"), {}),
        ],
    ),
]


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
@pytest.mark.parametrize(
    "story", [*COMES_AND_GOES, *OTHER_MODELS, *BUDGETS, *ORDER, *SENT_BACK, *DRAINING], ids=lambda s: s.title
)
def test_story(story: Story, kind: type[Driver]) -> None:
    """Each story is decided as told, at the instants told, under both drivers."""
    tell(story, kind)


def test_tokens_too_are_given_by_arrival_within_a_tenant() -> None:
    """Wherever they had waited for them; only who had been chosen already is still before them."""
    driver = VirtualDriver(budget(wide("a", rate=1), wide("b", "n", rate=1), wide("c", "n", rate=1)))
    for number in range(8):
        driver.submit(f"{number}", P0, 50, model="mn"[number % 2])
    assert [name for _, name, _ in driver.log] == ["0", "1"]
    driver.reconfigure(budget(wide("a", "m", "n"), wide("b", "n"), wide("c", "n")))
    driver.run(9)
    assert "".join(name for _, name, _ in driver.log) == "01324567"


def test_the_larger_part_of_a_group_keeps_its_pool() -> None:
    """Whichever is told first: fewer requests have to move."""
    driver = VirtualDriver(policy(engine("a"), engine("b"), engine("c"), engine("d", "n")))
    before = driver.pool
    driver.reconfigure(policy(engine("a", "k"), engine("b"), engine("c"), engine("d", "n")))
    assert driver.admission._pool_of("m") is before
    assert len(driver.admission.pools) == 3
    driver.reconfigure(policy(engine("d", "n"), engine("a", "k", "m"), engine("b", "k"), engine("c", "n")))
    assert driver.admission._pool_of("k") is not before
    assert [[slots.name for slots in pool.slots] for pool in driver.admission.pools] == [
        ["a", "b"],
        ["d", "c"],
    ]


def test_a_thousand_reloads_leave_nothing() -> None:
    """Of those who wait each is known once, of those who have left nothing."""
    driver = VirtualDriver(policy(engine("a", places=0), throttle=0))
    for number in range(20):
        driver.submit(f"{number}", P1, tenant=f"t{number % 3}")
    for number in range(1000):
        names = "abc"[: number % 3 + 1]
        driver.reconfigure(policy(*(engine(name, "m", f"{name}{number}", places=0) for name in names)))
    (pool,) = driver.admission.pools
    ready = pool.scheduler.ready[P1]
    assert len(pool.room._expiries) == ready.length == 20
    assert len(list(pool.room.routes)) == len(ready._lines) == len(ready.counters._queues) == 1
    assert len(pool.throttled[P1].counters._queues) == 1
    assert driver.admission.leaving == []
    driver.reconfigure(policy(engine("d", places=None)))
    assert [name for _, name, _ in driver.log] == sorted((str(n) for n in range(20)), key=int)
    assert len(driver.admission._slots) == 1
