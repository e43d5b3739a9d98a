"""Stories of upstreams on trial that get another request beside the one that is there."""

from collections.abc import Callable

import pytest

from tests.support.drivers import DRIVERS, Driver
from tests.support.policy_settings import P0, P1, policy, upstream
from tests.support.stories import Story, both, cancel, finish, health, nothing, submit, tell, trial

WIDE = upstream(max_in_flight=None)
DOWN = health("gpu0", False)
A, B = upstream("a", max_in_flight=None), upstream("b", max_in_flight=None)

STORIES = [
    Story(
        "one more each time it is said, and of those that are there only the last one's end frees the place",
        policy(WIDE),
        [
            (0, both(DOWN, *(submit(name, P0) for name in "abcd")), {}),
            (1, trial("gpu0"), {"a": "dispatched"}),
            (2, trial("gpu0"), {"b": "dispatched"}),
            (3, finish("a"), {}),
            (4, finish("b"), {"c": "dispatched"}),
            (5, trial("gpu0"), {"d": "dispatched"}),
            (6, both(finish("c"), finish("d")), {}),
        ],
    ),
    Story(
        "a place that nobody took is one place, however often it is offered",
        policy(WIDE),
        [
            (0, DOWN, {}),
            (1, both(trial("gpu0"), trial("gpu0"), trial("gpu0")), {}),
            (2, submit("a", P0), {"a": "dispatched"}),
            (3, submit("b", P0), {}),
            (4, trial("gpu0"), {"b": "dispatched"}),
            (5, both(finish("a"), finish("b")), {}),
        ],
    ),
    Story(
        "the success of the second lets all in while the first still runs",
        policy(WIDE),
        [
            (0, both(DOWN, *(submit(name, P1) for name in "abcd")), {}),
            (1, trial("gpu0"), {"a": "dispatched"}),
            (2, trial("gpu0"), {"b": "dispatched"}),
            (3, both(health("gpu0", True), finish("b")), {"c": "dispatched", "d": "dispatched"}),
            (4, both(finish("c"), finish("d")), {}),
            (60, finish("a"), {}),
        ],
    ),
    Story(
        "the failure of one lets nobody in, and the others' ends change nothing in the next trial",
        policy(WIDE),
        [
            (0, both(DOWN, *(submit(name, P0) for name in "abcd")), {}),
            (1, trial("gpu0"), {"a": "dispatched"}),
            (2, trial("gpu0"), {"b": "dispatched"}),
            (3, both(DOWN, finish("b", -1)), {}),
            (4, trial("gpu0"), {"c": "dispatched"}),
            (5, finish("a"), {}),
            (6, finish("c"), {"d": "dispatched"}),
            (7, finish("d"), {}),
        ],
    ),
    Story(
        "who waits does not wait longer for it",
        policy(WIDE, no_upstream_seconds=3),
        [
            (0, both(DOWN, submit("a", P0)), {}),
            (1, both(trial("gpu0"), submit("b", P0), submit("c", P0)), {"a": "dispatched"}),
            (2, trial("gpu0"), {"b": "dispatched"}),
            (4, nothing, {"c": "rejected_no_upstream"}),
            (5, both(finish("a"), finish("b")), {}),
        ],
    ),
    Story(
        "the upstream's own limit holds",
        policy(upstream(max_in_flight=1)),
        [
            (0, both(DOWN, submit("a", P0), submit("b", P0)), {}),
            (1, trial("gpu0"), {"a": "dispatched"}),
            (2, trial("gpu0"), {}),
            (3, finish("a"), {"b": "dispatched"}),
            (4, finish("b"), {}),
        ],
    ),
    Story(
        "of two on trial the one that has nobody goes first",
        policy(A, B),
        [
            (0, both(health("a", False), health("b", False), submit("long", P0, 100)), {}),
            (1, trial("a"), {"long": "dispatched@a"}),
            (2, both(trial("a"), trial("b")), {}),
            (3, submit("r", P0), {"r": "dispatched@b"}),
            (4, submit("s", P0), {"s": "dispatched@a"}),
            (5, submit("t", P0), {}),
            (6, cancel("t"), {"t": "client_gone_queued"}),
            (7, both(finish("long"), finish("r"), finish("s")), {}),
        ],
    ),
]


@pytest.mark.parametrize("kind", DRIVERS)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.title)
def test_story(story: Story, kind: Callable[..., Driver]) -> None:
    """Under both drivers."""
    tell(story, kind)
