"""Places of keys where several gateways share them."""

import pytest

from gateway.policy.admission import Admission
from gateway.policy.budget_part import Parts
from gateway.policy.clock import ManualClock
from gateway.policy.key_places import ALL_TOLD_MAX, TOLD_MAX, KeyPlaces, PlacesUse
from gateway.policy.outcome import Outcome
from tests.support.policy_settings import P1, ask, policy, upstream

SECOND = 1_000_000_000


def places(limit: int = 10, gateways: int = 0, part: int | None = None) -> KeyPlaces:
    made = KeyPlaces({"k": limit})
    if gateways:
        made.take_parts({} if part is None else {"k": part}, gateways)
    return made


def fits(keys: KeyPlaces, key: str = "k") -> int:
    """How many requests are let in, which is then undone."""
    taken = 0
    while not keys.full(key) and taken < 1000:
        keys.take(key)
        taken += 1
    for _ in range(taken):
        keys.free(key)
    return taken


def wanted(keys: KeyPlaces, now: int = 0) -> int:
    (use,) = keys.use(now)
    return use.wanted


def test_a_gateway_that_shares_nothing_has_all_places() -> None:
    """And tells of none that were wanted."""
    keys = places()
    assert fits(keys) == 10
    keys.wanted("k", 0)
    assert list(keys.use(0)) == [PlacesUse("k", 10, 0, 0)]


@pytest.mark.parametrize(
    ("limit", "gateways", "part", "fit"),
    [
        (10, 3, 4, 4),
        (10, 3, 0, 0),
        (10, 3, 12, 10),
        (10, 3, None, 3),
        (2, 3, None, 1),
        (0, 3, None, 0),
        (0, 3, 2, 0),
        (10, 1, 4, 4),
        (10, 1, None, 10),
    ],
)
def test_of_several_each_has_its_part(limit: int, gateways: int, part: int | None, fit: int) -> None:
    """limit / gateways while it was not told, one at least; never above the limit; and the part that was
    told also where no other gateway is known, as after the store has lost everything."""
    assert fits(places(limit, gateways, part)) == fit


def test_a_key_without_a_limit_has_none() -> None:
    """Nor is anything told of it."""
    keys = places(gateways=2)
    keys.take("other")
    assert not keys.full("other")
    assert [use.key for use in keys.use(0)] == ["k"]


def test_who_was_refused_would_like_a_place_for_two_seconds() -> None:
    """As many as were refused a moment ago, beside those in use."""
    keys = places(gateways=2, part=1)
    keys.take("k")
    assert keys.full("k")
    keys.wanted("k", 0)
    keys.wanted("k", SECOND)
    assert list(keys.use(SECOND)) == [PlacesUse("k", 10, 1, 3)]
    keys.free("k")
    assert wanted(keys, 3 * SECOND - 1) == 2
    assert wanted(keys, 3 * SECOND) == 0
    keys.wanted("k", 4 * SECOND)
    assert wanted(keys, 4 * SECOND) == 1


def test_a_lower_limit_counts_at_once() -> None:
    """Whatever part was told; who is inside stays, and nobody follows until enough have left."""
    keys = places(gateways=2, part=8)
    for _ in range(8):
        keys.take("k")
    keys.reconfigure({"k": 3})
    for left in range(7, 2, -1):
        keys.free("k")
        assert (keys.in_flight("k"), keys.full("k")) == (left, left >= 3)
    keys.free("k")
    assert fits(keys) == 1


def test_a_higher_limit_waits_for_a_part_of_it() -> None:
    """Only the store knows who has the others."""
    keys = places(gateways=2, part=5)
    keys.reconfigure({"k": 100})
    assert fits(keys) == 5


def test_a_key_that_comes_back_has_no_part_of_its_former_life() -> None:
    """It begins as any that nobody was told of."""
    keys = places(gateways=2, part=9)
    keys.reconfigure({})
    assert fits(keys) == 1000
    keys.reconfigure({"k": 10})
    assert fits(keys) == 5


def test_of_many_keys_those_in_use_or_wanted_are_told() -> None:
    """Each would cost the store something ten times a second."""
    keys = KeyPlaces({f"k{i}": 2 for i in range(ALL_TOLD_MAX + 1)})
    keys.take_parts({}, 2)
    assert list(keys.use(0)) == []
    keys.take("k3")
    keys.wanted("k4", 0)
    assert {use.key for use in keys.use(0)} == {"k3", "k4"}
    keys.free("k3")
    assert [use.key for use in keys.use(3 * SECOND)] == []


def test_a_refused_request_is_wanted_once_and_takes_no_place() -> None:
    """Though the policy looks again after it has ended those whose time is over."""
    admission = Admission(policy(upstream(max_in_flight=None), keys={"k": 10}), ManualClock())
    admission.take_parts(Parts(2, {}, {}, {"k": 1}, {}))
    first = admission.submit(ask("a", P1, key="k"))
    second = admission.submit(ask("b", P1, key="k"))
    assert second.outcome is Outcome.REJECTED_RATE
    assert list(admission.tenants.key_places.use(0)) == [PlacesUse("k", 10, 1, 2)]
    admission.finish(first, Outcome.COMPLETED)
    assert list(admission.tenants.key_places.use(0)) == [PlacesUse("k", 10, 0, 1)]


def test_no_more_are_told_of_than_a_call_can_carry() -> None:
    """However many keys have requests in flight."""
    keys = KeyPlaces({f"k{i}": 1 for i in range(3 * TOLD_MAX)})
    keys.take_parts({}, 2)
    for i in range(3 * TOLD_MAX):
        keys.take(f"k{i}")
    assert len(list(keys.use(0))) == TOLD_MAX
