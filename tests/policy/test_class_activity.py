"""A class is active while it has requests, and for a while after."""

from gateway.policy.class_activity import ACTIVE_ELSEWHERE_NS, ACTIVITY_TAIL_NS, ClassActivity
from gateway.policy.clock import NEVER
from tests.policy.test_token_bucket import buckets
from tests.support.policy_settings import P0, P1, P2


def test_until_five_seconds_after_the_last_request() -> None:
    """The first of two that ends changes nothing; the buckets are told, and whoever asks."""
    told = buckets()
    activity = ClassActivity(told, 0)
    activity.enters(P0)
    activity.enters(P0)
    assert told.active_until == [NEVER, 0, 0]
    assert activity.leaves(P0, 10) == NEVER
    assert activity.here(P0, 10**18)
    assert activity.leaves(P0, 20) == 20 + ACTIVITY_TAIL_NS
    assert activity.idle
    assert told.active_until == [20 + ACTIVITY_TAIL_NS, 0, 0]
    assert activity.here(P0, 19 + ACTIVITY_TAIL_NS)
    assert not activity.here(P0, 20 + ACTIVITY_TAIL_NS)


def test_what_is_active_elsewhere_is_not_ones_own() -> None:
    """It limits the classes below, for a second or as long as the own one does, and is not told on."""
    told = buckets()
    activity = ClassActivity(told, 0)
    assert activity.elsewhere(P1, 50) == 50 + ACTIVE_ELSEWHERE_NS
    assert told.active_until == [0, 50 + ACTIVE_ELSEWHERE_NS, 0]
    assert not activity.here(P1, 50)
    activity.enters(P1)
    assert activity.elsewhere(P1, 60) == NEVER


def test_what_was_active_before_goes_on_to_be() -> None:
    """Of a pool that others have come from, with its tail but without its requests, which come by themselves;
    what lasts longer here stays."""
    former, own = (ClassActivity(buckets(), 0) for _ in range(2))
    for priority in (P0, P1, P2):
        former.enters(priority)
    former.leaves(P0, 100)
    former.leaves(P1, 100)
    own.enters(P1)
    own.leaves(P1, 300)
    own.carry_on(former)
    assert own.here(P0, 99 + ACTIVITY_TAIL_NS)
    assert not own.here(P0, 100 + ACTIVITY_TAIL_NS)
    assert own.here(P1, 299 + ACTIVITY_TAIL_NS)
    assert not own.here(P2, 1)
    assert own.idle
