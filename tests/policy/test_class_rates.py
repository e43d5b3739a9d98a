"""Rates always add up to C; who gives first, and who gets back first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.class_rates import RateLimits, cut, rate_limits, restored, scaled
from tests.support.policy_settings import P0, P1, P2, policy

FLOORS = {P0: {"floor": 0.30}, P1: {"floor": 0.10}, P2: {"floor": 0.01}}


def limits(nominal: int = 1000, **classes: object) -> RateLimits:
    return rate_limits(policy(classes=classes or FLOORS), nominal)  # type: ignore[arg-type]


def test_shares_of_c0() -> None:
    """At C0 each class has its share."""
    assert limits().at_shares(1000) == (600, 350, 50)


def test_the_floors_bound_c_where_they_add_up_to_more() -> None:
    """C may fall to a fifth of C0, but no class below its floor."""
    assert (limits().lowest, limits().highest) == (410, 3000)
    assert rate_limits(policy(), 1000).lowest == 200


@pytest.mark.parametrize(
    ("by", "left"),
    [
        (30, (600, 350, 20)),
        (40, (600, 350, 10)),
        (100, (600, 290, 10)),
        (290, (600, 100, 10)),
        (590, (300, 100, 10)),
        (900, (300, 100, 10)),
    ],
)
def test_the_lowest_class_gives_first(by: int, left: tuple[int, ...]) -> None:
    """P2 down to its floor, then P1, last P0, and nobody below the floor."""
    assert cut((600, 350, 50), by, (300, 100, 10)) == left


@pytest.mark.parametrize(
    ("rates", "capacity", "grown"),
    [
        ((300, 100, 10), 500, (390, 100, 10)),  # P0 comes first
        ((580, 100, 10), 750, (600, 140, 10)),  # then P1
        ((600, 350, 10), 980, (600, 350, 30)),  # then P2
        ((600, 350, 50), 1100, (660, 385, 55)),  # nobody lacks anything: by share
        ((660, 300, 40), 1100, (660, 385, 55)),  # what was cut above C0 is restored as well
    ],
)
def test_what_was_cut_is_restored_p0_first(
    rates: tuple[int, ...], capacity: int, grown: tuple[int, ...]
) -> None:
    """Only then growth goes by share."""
    assert limits().moved_to(rates, capacity) == grown


def test_a_p0_that_is_short_may_be_ahead_of_its_share() -> None:
    """Up to the given part of its share, and never above its ceiling."""
    assert limits().moved_to((600, 350, 50), 1100, p0_part=1.25) == (700, 350, 50)
    assert limits().moved_to((820, 180, 50), 1100, p0_part=1.25) == (825, 225, 50)
    tight = {**FLOORS, P0: {"floor": 0.3, "ceiling_share": 0.61}}
    held = rate_limits(policy(classes=tight), 1000)
    assert held.moved_to((600, 350, 50), 1100, p0_part=1.25) == (671, 379, 50)


def test_another_c0_scales_all() -> None:
    """In proportion, to the unit."""
    assert scaled((600, 390, 10), 500, 1000) == (300, 195, 5)
    assert scaled((601, 389, 10), 1, 3) == (201, 129, 3)


def test_rates_are_repaired_when_a_floor_rises() -> None:
    """The class below it is lifted, at the cost of the lowest that can give."""
    high = rate_limits(policy(classes={**FLOORS, P1: {"floor": 0.3}}), 1000)
    assert high.repaired((700, 200, 100)) == (690, 300, 10)


rates = st.tuples(*(st.integers(0, 10**12) for _ in range(3)))


@given(rates, st.integers(0, 10**13), rates)
def test_nothing_is_lost_or_made(now: tuple[int, ...], by: int, other: tuple[int, ...]) -> None:
    """A cut takes what was asked for as far as floors allow, restoring gives exactly that."""
    floors = tuple(min(a, b) for a, b in zip(now, other, strict=True))
    left = cut(now, by, floors)
    assert sum(now) - sum(left) == min(by, sum(now) - sum(floors))
    assert all(floor <= after <= before for floor, after, before in zip(floors, left, now, strict=True))
    assert sum(restored(now, by, other)) == sum(now) + by


@given(st.integers(1000, 10**12), st.lists(st.floats(0.1, 4), min_size=1, max_size=20))
def test_any_walk_keeps_sum_floors_and_bounds(nominal: int, walk: list[float]) -> None:
    """However C moves."""
    bounds = limits(nominal)
    now = bounds.at_shares(nominal)
    for times in walk:
        capacity = bounds.within(nominal * times)
        now = bounds.moved_to(now, capacity)
        assert sum(now) == capacity
        assert all(rate >= floor for rate, floor in zip(now, bounds.floors, strict=True))
        assert bounds.lowest <= capacity <= bounds.highest
