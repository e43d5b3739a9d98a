"""The division of a budget: between classes, tenants and replicas."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.shares import (
    FLOOR_PART,
    allowance,
    between_classes,
    between_replicas,
    places,
    raised,
    water_filled,
)

RATES = st.integers(0, 10**9)
FLOWS = st.lists(
    st.tuples(st.sampled_from("abcdef"), RATES.map(float), st.integers(1, 3).map(float)),
    max_size=6,
    unique_by=lambda flow: flow[0],
)


@pytest.mark.parametrize(
    ("demands", "active", "expected"),
    [
        ((600, 350, 50), (True, True, True), (600, 350, 50)),
        ((900, 900, 900), (True, True, True), (600, 350, 50)),
        ((900, 0, 900), (True, False, True), (900, 0, 100)),  # P0 is lent to first
        (
            (0, 0, 900),
            (False, False, True),
            (63.158, 36.842, 900),
        ),  # what nobody wants stays where it belongs
        ((100, 0, 900), (True, False, True), (452.941, 247.059, 300)),  # P2 stops at its ceiling
        ((0, 0, 0), (False, False, False), (600, 350, 50)),
    ],
)
def test_classes_lend_as_in_one_gateway(
    demands: tuple[float, ...], active: tuple[bool, ...], expected: tuple[float, ...]
) -> None:
    """Idle shares go to P0 first, not above a ceiling, and what nobody wants stays in proportion."""
    got = between_classes((600, 350, 50), demands, (1.0, 0.7, 0.3), active)
    assert sum(got) == pytest.approx(1000)
    assert got == pytest.approx(expected, abs=0.001)


@given(st.lists(RATES, min_size=3, max_size=3), st.lists(RATES, min_size=3, max_size=3), st.booleans())
def test_classes_keep_what_they_are_guaranteed(rates: list[int], demands: list[int], active: bool) -> None:
    """All of C is given, and no class gets less than it asks for within its rate."""
    got = between_classes(rates, [float(d) for d in demands], (1.0, 0.7, 0.3), [active] * 3)
    assert sum(got) == pytest.approx(sum(rates), abs=1e-3)
    for part, rate, wanted in zip(got, rates, demands, strict=True):
        assert part >= min(rate, wanted) - 1e-3


@given(RATES.map(float), FLOWS)
def test_water_fills_to_one_level(total: float, flows: list[tuple[str, float, float]]) -> None:
    """Nobody gets more than asked; who gets less has the same, per weight, as all others who do, and nobody
    has more."""
    parts = water_filled(total, flows)
    assert sum(parts.values()) <= total * (1 + 1e-9) + 1e-6
    assert sum(parts.values()) == pytest.approx(min(total, sum(f[1] for f in flows)), rel=1e-6, abs=1e-3)
    short = [parts[name] / weight for name, wanted, weight in flows if parts[name] < wanted - 1e-6]
    for level in short:
        assert level == pytest.approx(short[0], rel=1e-6, abs=1e-3)
    for name, _, weight in flows:
        if short:
            assert parts[name] / weight <= short[0] * (1 + 1e-6) + 1e-3


@given(RATES.map(float), st.lists(FLOWS, min_size=1, max_size=6))
def test_the_replicas_parts_add_up(total: float, asked: list[list[tuple[str, float, float]]]) -> None:
    """To the total, less at most one millitoken for each by rounding; everybody has its floor."""
    shares = between_replicas(total, asked)
    assert total - len(asked) - total * 1e-9 <= sum(shares) <= total + 1e-3
    assert min(shares) >= total * FLOOR_PART / len(asked) - 2


def test_the_same_request_has_the_same_chance_at_every_replica() -> None:
    """One tenant's overload by 80 to 15 to 5 is served in proportion."""
    shares = between_replicas(1000.0, [[("t", 1600.0, 1.0)], [("t", 300.0, 1.0)], [("t", 100.0, 1.0)]])
    assert [s / w for s, w in zip(shares, (1600, 300, 100), strict=True)] == pytest.approx(
        [0.5] * 3, abs=0.08
    )


def test_a_flood_at_one_replica_leaves_the_others_their_part() -> None:
    """A tenant that asks a hundred times as much gets no more than one that asks for its part."""
    flood, calm, elsewhere = ("flood", 9000.0, 1.0), ("calm", 100.0, 1.0), ("elsewhere", 100.0, 1.0)
    shares = between_replicas(300.0, [[flood, calm], [elsewhere]])
    assert shares == pytest.approx([200, 100], abs=6)


def test_the_small_tenants_of_a_message_count_by_their_number() -> None:
    """What stands for nine tenants gets nine parts of ten."""
    shares = between_replicas(1000.0, [[("big", 5000.0, 1.0)], [("rest of b", 5000.0, 9.0)]])
    assert shares == pytest.approx([100, 900], abs=15)


@given(st.integers(0, 500), st.lists(st.integers(0, 300), min_size=1, max_size=8), st.integers(0, 100))
def test_places_add_up_to_the_limit(limit: int, wanted: list[int], turn: int) -> None:
    """All places are given, nobody who asks for more gets less, and who gets less than asked is short by no
    more than a place against any other."""
    got = places(limit, wanted, turn)
    assert sum(got) == limit
    assert min(got) >= 0
    ordered = sorted(zip(wanted, got, strict=True))
    for (_, few), (_, more) in pairwise(ordered):
        assert more >= few - 1
    for want, have in ordered:
        if have < want:
            assert have >= max(got) - 1


WANTED = st.lists(st.integers(0, 60), min_size=3, max_size=3)


@given(st.integers(0, 200), st.lists(WANTED, min_size=1, max_size=6), st.integers(0, 100))
def test_places_by_class_add_up_to_the_limit(limit: int, by_class: list[list[int]], turn: int) -> None:
    """All places are given, and where there are enough nobody gets less than it wants."""
    wanted = [sum(each) for each in by_class]
    got = places(limit, wanted, turn, by_class)
    assert sum(got) == limit
    assert min(got) >= 0
    if sum(wanted) <= limit:
        assert all(have >= want for have, want in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    ("by_class", "expected"),
    [
        ([(100, 0, 0), (0, 0, 100)], [95, 5]),  # P0 goes first, but never all the time
        ([(30, 0, 0), (0, 0, 100)], [30, 70]),
        ([(0, 100, 0), (0, 0, 100)], [95, 5]),
        ([(100, 100, 0), (0, 100, 100)], [78, 22]),
        ([(100, 0, 0), (100, 0, 0)], [50, 50]),
        ([(10, 0, 0), (0, 0, 0)], [55, 45]),  # what nobody wants is spread evenly
    ],
)
def test_places_go_by_class_first(by_class: list[tuple[int, int, int]], expected: list[int]) -> None:
    """A replica with batch alone keeps no places that P0 waits for at another one."""
    got = places(100, [sum(each) for each in by_class], 0, by_class)
    assert got == pytest.approx(expected, abs=1)


def test_the_last_place_goes_around() -> None:
    """One place that three want is each one's in turn."""
    assert {tuple(places(1, [1, 1, 1], turn)) for turn in range(3)} == {(1, 0, 0), (0, 1, 0), (0, 0, 1)}


@given(
    st.lists(RATES, min_size=3, max_size=3),
    st.lists(RATES, min_size=3, max_size=3),
    st.integers(-(10**9), 3 * 10**9),
)
def test_more_only_of_what_is_free(wanted: list[int], held: list[int], free: int) -> None:
    """Down at once; up never beyond what is free, except that nothing is taken away which is wanted."""
    got = raised(wanted, held, float(free))
    kept = sum(min(w, h) for w, h in zip(wanted, held, strict=True))
    assert sum(got) <= max(free, kept)
    for g, w, h in zip(got, wanted, held, strict=True):
        assert min(w, h) <= g <= w


@given(
    st.integers(-1000, 10**6),
    st.lists(st.integers(0, 10**6), min_size=1, max_size=5),
    st.integers(0, 4),
    st.integers(0, 10**6),
)
def test_allowances_add_up_to_the_level(level: int, wanted: list[int], turn: int, largest: int) -> None:
    """Of a tenant's bucket no more is handed out than it holds; all wants are met where they can be, and else
    one request at least of the one whose turn it is."""
    turn %= len(wanted)
    first = wanted[turn], min(largest, wanted[turn])
    got = [allowance(level, w, sum(wanted), len(wanted), first, i == turn) for i, w in enumerate(wanted)]
    assert sum(got) <= max(level, 0)
    assert got[turn] >= min(first[1], max(level, 0))
    if sum(wanted) <= level:
        assert all(g >= w for g, w in zip(got, wanted, strict=True))
