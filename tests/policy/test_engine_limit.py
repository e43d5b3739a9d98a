"""An engine's own limit, learned from what it sends back."""

import pytest

from gateway.policy.engine_limit import FORGOTTEN_AFTER_NS, EngineLimit


def test_nothing_is_known_before_a_request_comes_back() -> None:
    limit = EngineLimit()
    limit.sent(7)
    limit.completed()
    assert limit.at(0) is None


@pytest.mark.parametrize(("known", "tried"), [(1, 2), (3, 4), (8, 10), (100, 125)])
def test_more_are_tried_when_as_many_have_completed(known: int, tried: int) -> None:
    """A quarter more, one at least; not before, and not by those that were sent back once."""
    limit = EngineLimit()
    limit.sent_back(known, now=0)
    for _ in range(known - 1):
        limit.completed()
    assert limit.at(1, sent_back_before=False) == known
    limit.completed()
    assert (limit.at(1), limit.at(1, sent_back_before=False)) == (known, tried)


def test_what_was_tried_and_not_sent_back_is_proven() -> None:
    """As far as it was tried."""
    limit = EngineLimit()
    limit.sent_back(8, now=0)
    for _ in range(8):
        limit.completed()
    limit.sent(9)
    for _ in range(8):
        limit.completed()
    assert (limit.at(1), limit.at(1, sent_back_before=False)) == (9, 11)


def test_it_is_forgotten_after_a_while_without_a_no() -> None:
    limit = EngineLimit()
    limit.sent_back(5, now=0)
    limit.sent_back(4, now=10)
    assert (limit.at(FORGOTTEN_AFTER_NS + 9), limit.at(FORGOTTEN_AFTER_NS + 10)) == (4, None)


def test_a_burst_comes_back_in_any_order() -> None:
    """The least that any of them tells holds; the first of all tells nothing."""
    limit = EngineLimit()
    for sent_before in (30, 10, 0, 25):
        limit.sent_back(sent_before, now=1)
    assert limit.at(2) == 10
