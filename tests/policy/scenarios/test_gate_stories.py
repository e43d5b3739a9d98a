"""Stories of places: holdback, token limits, long prompts, pending prefill, promotion."""

import pytest

from gateway.policy.engine_load import EngineLoad
from tests.support.drivers import DRIVERS, Driver
from tests.support.policy_settings import P0, P1, P2, policy, upstream
from tests.support.stories import Story, both, cancel, finish, first_token, nothing, submit, tell

HELD_BACK = {P0: {"holdback": 1.0}, P1: {"holdback": 0.9}, P2: {"holdback": 0.7}}
LONG = {"long_prompt_tokens": 100, "long_prompt_duty": 0.04}


def many(priority: int, names: list[str], tokens: int = 1):  # type: ignore[no-untyped-def]
    return both(*(submit(name, priority, tokens) for name in names))  # type: ignore[arg-type]


def ends(*names: str):  # type: ignore[no-untyped-def]
    return both(*(finish(name) for name in names))


BATCH = [f"b{i}" for i in range(10)]

STORIES = [
    Story(
        "ten batch streams leave a place for who comes after",
        policy(upstream(max_in_flight=4), classes=HELD_BACK),
        [
            (0, many(P2, BATCH), dict.fromkeys(BATCH[:3], "dispatched")),
            (30, submit("urgent", P0), {"urgent": "dispatched"}),
            (31, submit("urgent too", P0), {}),
            (40, finish("urgent"), {"urgent too": "dispatched"}),
            (50, finish("urgent too"), {}),
            (60, ends("b0", "b1", "b2"), dict.fromkeys(BATCH[3:6], "dispatched")),
            (61, both(*(cancel(n) for n in BATCH[6:])), dict.fromkeys(BATCH[6:], "client_gone_queued")),
            (99, ends("b3", "b4", "b5"), {}),
        ],
    ),
    Story(
        "total in flight may reach 100, 90 and 70 per cent",
        policy(
            upstream(max_in_flight=10),
            classes=HELD_BACK,
            scheduling={"skip_limit": {P1: 99, P2: 99}},
        ),
        [
            (0, many(P2, BATCH[:8]), dict.fromkeys(BATCH[:7], "dispatched")),
            (1, many(P1, ["n0", "n1", "n2"]), {"n0": "dispatched", "n1": "dispatched"}),
            (2, many(P0, ["r0", "r1"]), {"r0": "dispatched"}),
            (3, finish("b0"), {"r1": "dispatched"}),
            (4, finish("b1"), {}),
            (5, finish("b2"), {"n2": "dispatched"}),
            (6, ends("b3", "b4"), {}),
            (7, finish("b5"), {"b7": "dispatched"}),
            (8, ends("b6", "b7", "n0", "n1", "n2", "r0", "r1"), {}),
        ],
    ),
    Story(
        "a promotion lifts holdback once, and is told",
        policy(upstream(max_in_flight=4), classes=HELD_BACK, scheduling={"skip_limit": {P1: 2, P2: 2}}),
        [
            (0, many(P2, BATCH[:5]), dict.fromkeys(BATCH[:3], "dispatched")),
            (1, submit("r0", P0), {"r0": "dispatched"}),
            (2, finish("r0"), {}),
            (3, submit("r1", P0), {"r1": "dispatched"}),
            (4, finish("r1"), {"b3": "promoted"}),
            (5, submit("r2", P0), {}),
            (6, finish("b0"), {"r2": "dispatched"}),
            (7, ends("r2"), {}),
            (8, ends("b1", "b2"), {"b4": "dispatched"}),
            (9, ends("b3", "b4"), {}),
        ],
    ),
    Story(
        "who is due is promoted also where nobody else waits any more",
        policy(upstream(max_in_flight=1), scheduling={"skip_limit": {P1: 1, P2: 19}}),
        [
            (0, submit("first", P0), {"first": "dispatched"}),
            (1, both(submit("passed over", P1), submit("second", P0)), {}),
            (2, finish("first"), {"second": "dispatched"}),
            (3, cancel("passed over"), {"passed over": "client_gone_queued"}),
            (4, finish("second"), {}),
            (5, submit("due", P1), {"due": "promoted"}),
            (6, finish("due"), {}),
            (7, submit("next", P1), {"next": "dispatched"}),
            (8, finish("next"), {}),
        ],
    ),
    Story(
        "tokens in flight are limited, and one above the limit goes alone",
        policy(upstream(max_in_flight=None, max_in_flight_tokens=100)),
        [
            (0, submit("a", P1, 60), {"a": "dispatched"}),
            (1, submit("b", P1, 40), {"b": "dispatched"}),
            (2, submit("c", P1, 1), {}),
            (3, finish("b"), {"c": "dispatched"}),
            (4, submit("huge", P1, 500), {}),
            (5, finish("a"), {}),
            (6, finish("c"), {"huge": "dispatched"}),
            (7, submit("d", P0, 1), {}),
            (8, finish("huge"), {"d": "dispatched"}),
            (9, finish("d"), {}),
        ],
    ),
    Story(
        "a token limit is held back like places are, reserved output included",
        policy(
            upstream(max_in_flight=None, max_in_flight_tokens=100),
            classes=HELD_BACK,
            capacity={"initial_output_tokens": 10},
        ),
        [
            (0, submit("a", P2, 60), {"a": "dispatched"}),  # 70 with its answer
            (1, submit("b", P2, 1), {}),
            (2, submit("c", P1, 11), {}),
            (3, submit("d", P0, 20), {"d": "dispatched"}),
            (4, submit("e", P0, 1, max_output_tokens=0), {}),
            (5, both(cancel("b"), cancel("c"), cancel("e")), dict.fromkeys("bce", "client_gone_queued")),
            (6, ends("a", "d"), {}),
        ],
    ),
    Story(
        "P0 that waits for tokens in flight is not overtaken by smaller ones",
        policy(upstream(max_in_flight=None, max_in_flight_tokens=100)),
        [
            (0, submit("a", P1, 60), {"a": "dispatched"}),
            (1, submit("b", P0, 60), {}),
            (2, submit("c", P1, 30), {}),
            (3, finish("a"), {"b": "dispatched", "c": "dispatched"}),
            (4, ends("b", "c"), {}),
        ],
    ),
    Story(
        "one long prompt below P0 at a time, and short ones pass it",
        policy(upstream(max_in_flight=None), scheduling=LONG),
        [
            (0.0, submit("l0", P1, 101), {"l0": "dispatched"}),
            (
                0.1,
                both(submit("l1", P1, 101), submit("l2", P2, 101), submit("l0 of P0", P0, 101)),
                {"l0 of P0": "dispatched"},
            ),
            (0.2, submit("short", P1, 100), {"short": "dispatched"}),
            (0.3, first_token("l0"), {"l1": "dispatched"}),
            (0.4, finish("l1"), {"l2": "dispatched"}),
            (0.5, ends("l0", "l2", "l0 of P0", "short"), {}),
        ],
    ),
    Story(
        "a long prompt whose answer is not streamed leaves the lane after its predicted prefill",
        policy(upstream(max_in_flight=None, tokens_per_second=1000), scheduling=LONG),
        [
            (0.0, submit("l0", P1, 500, streaming=False), {"l0": "dispatched"}),
            (0.1, submit("l1", P1, 101), {}),
            (0.5, nothing, {"l1": "dispatched"}),
            (0.6, ends("l0", "l1"), {}),
        ],
    ),
    Story(
        "long prompts below an active class are spaced by duty, on each upstream by itself",
        policy(
            upstream("gpu0", max_in_flight=None, tokens_per_second=1000),
            upstream("gpu1", max_in_flight=None, tokens_per_second=1000),
            scheduling=LONG,
        ),
        # 200 tokens take 0.2 s of prefill: at 4 % one every 5 s
        [
            (0.0, submit("r", P0), {"r": "dispatched@gpu0"}),
            (0.0, submit("l0", P1, 200), {"l0": "dispatched@gpu1"}),
            (0.0, submit("l1", P1, 200), {"l1": "dispatched@gpu0"}),
            (0.2, both(first_token("l0"), first_token("l1")), {}),
            (0.3, submit("l2", P1, 200), {}),
            (1.0, submit("s", P1, 100), {"s": "dispatched@gpu1"}),
            (2.0, ends("l0", "s"), {}),
            (5.0, nothing, {"l2": "dispatched@gpu1"}),
            (5.1, first_token("l2"), {}),
            (5.2, submit("l3", P2, 200), {"l3": "dispatched@gpu0"}),
            (9.0, both(first_token("l3"), finish("l1"), finish("l2"), finish("l3")), {}),
            (9.0, both(submit("l4", P2, 400), submit("l5", P2, 200)), {}),
            (9.5, finish("r"), {}),
            (10.0, nothing, {"l4": "dispatched@gpu1"}),  # l2's turn is over; 400 tokens: next in 10 s
            (10.2, nothing, {"l5": "dispatched@gpu0"}),
            (11.0, both(first_token("l4"), first_token("l5"), submit("l6", P2, 200)), {}),
            (12.0, finish("l4"), {}),
            (14.5, nothing, {"l6": "dispatched@gpu1"}),  # nobody above is active any more
            (15.0, ends("l5", "l6"), {}),
        ],
    ),
    Story(
        "prompts without a first token are limited below P0, in order",
        policy(upstream(max_in_flight=None), scheduling={"max_pending_prefill_tokens": 100}),
        [
            (0, submit("a", P1, 60), {"a": "dispatched"}),
            (1, submit("b", P1, 50), {}),
            (2, submit("c", P1, 10), {}),
            (3, submit("r", P0, 500), {"r": "dispatched"}),
            (4, first_token("a"), {}),
            (5, first_token("r"), {"b": "dispatched", "c": "dispatched"}),
            (6, submit("d", P2, 200), {}),
            (7, both(first_token("b"), first_token("c")), {"d": "dispatched"}),
            (8, submit("e", P1, 1), {}),
            (9, finish("d"), {"e": "dispatched"}),
            (10, ends("a", "b", "c", "e", "r"), {}),
        ],
    ),
    Story(
        "a large prompt is not starved by the small ones of its class",
        policy(upstream(max_in_flight=None), scheduling={**LONG, "max_pending_prefill_tokens": 50}),
        [
            (0, submit("s0", P1, 40), {"s0": "dispatched"}),
            (1, submit("l", P1, 200), {}),
            (2, submit("s1", P1, 10), {}),
            (3, submit("s2", P1, 10), {}),
            (4, first_token("s0"), {"l": "dispatched"}),
            (5, first_token("l"), {"s1": "dispatched", "s2": "dispatched"}),
            (6, ends("s0", "s1", "s2", "l"), {}),
        ],
    ),
    Story(
        "an engine that tells its memory limits the tokens in flight, a configured limit stands above it",
        policy(
            upstream("told", max_in_flight=None, models=("a",)),
            upstream("set", max_in_flight=None, models=("b",), max_in_flight_tokens=50),
        ),
        [
            (0, lambda d: d.admission.engine_load_told("told", EngineLoad(kv_tokens=30)), {}),
            (0, lambda d: d.admission.engine_load_told("set", EngineLoad(kv_tokens=30)), {}),
            (
                1,
                both(submit("a0", P1, 20, model="a"), submit("a1", P1, 20, model="a")),
                {"a0": "dispatched@told"},
            ),
            (
                2,
                both(submit("b0", P1, 20, model="b"), submit("b1", P1, 20, model="b")),
                {"b0": "dispatched@set", "b1": "dispatched@set"},
            ),
            (3, finish("a0"), {"a1": "dispatched@told"}),
            (4, ends("a1", "b0", "b1"), {}),
        ],
    ),
]


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("story", STORIES, ids=lambda s: s.title)
def test_story(story: Story, kind: type[Driver]) -> None:
    """Each story is decided as told, at the instants told, under both drivers."""
    driver = tell(story, kind)
    promoted = [what for _, _, what in driver.log if what.startswith("promoted")]
    assert len(driver.endings.promotions) == len(promoted)
