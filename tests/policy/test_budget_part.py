"""One gateway's buckets of several: demand, bursts, debts and prospects, and that no token is made."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.policy.budget_part import BudgetPart, RecentDemand, equal_part, with_waiting
from gateway.policy.clock import NEVER
from gateway.policy.request import PRIORITIES, Priority
from gateway.policy.token_bucket import UNITS_PER_MILLITOKEN, UNITS_PER_TOKEN, BucketRules, TokenBuckets
from tests.support.policy_settings import P0, P1, P2, nanoseconds

BUDGET = (600_000, 350_000, 50_000)
RULES = BucketRules((0.60, 0.35, 0.05), (1.0, 1.0, 0.5), 0.5, 100, 10)


def part(*rates: int, budget: tuple[int, ...] = BUDGET, gateways: int = 2, **given: object) -> BudgetPart:
    """`rates` in tokens per second, all of them its own."""
    mine = tuple(rate * 1000 for rate in rates)
    return BudgetPart(
        **{"own_rates": mine, "prospects": mine, **given}, rates=mine, budget=budget, gateways=gateways
    )  # type: ignore[arg-type]


def buckets(taken: BudgetPart | None = None) -> TokenBuckets:
    made = TokenBuckets(RULES, sum(BUDGET), 0)
    if taken is not None:
        made.take_part(taken, 0)
    return made


def bursts(b: TokenBuckets) -> list[float]:
    return [burst / UNITS_PER_TOKEN for burst in b.bursts]


# ---------------------------------------------------------------------- what is asked


def test_demand_is_told_per_second_of_the_last_two() -> None:
    """By class and tenant; what is older than two seconds is forgotten."""
    recent = RecentDemand()
    recent.asked(P0, "a", 1000, 0)
    recent.asked(P0, "a", 3000, nanoseconds(1))
    recent.asked(P0, "b", 500, nanoseconds(1))
    recent.asked(P2, "a", 10, nanoseconds(1))
    assert recent.per_second(P0, nanoseconds(1.9)) == {"a": 2000, "b": 250}
    assert recent.per_second(P2, nanoseconds(1.9)) == {"a": 5}
    assert recent.per_second(P0, nanoseconds(2)) == {"a": 1500, "b": 250}
    assert recent.per_second(P0, nanoseconds(3)) == {}
    assert recent.per_second(P1, nanoseconds(1.9)) == {}


def test_a_steady_stream_is_told_as_it_is() -> None:
    """To within the quarter of a second in which it is counted, whenever somebody asks."""
    recent = RecentDemand()
    for step in range(1, 500):
        recent.asked(P1, "t", 1000, nanoseconds(step / 100))
        if step > 200:
            assert 87_000 <= recent.per_second(P1, nanoseconds(step / 100))["t"] <= 100_000


def test_demand_of_a_class_that_nobody_asks_takes_no_memory() -> None:
    """However long requests come, only two seconds of them are kept."""
    recent = RecentDemand()
    for step in range(10_000):
        recent.asked(P1, f"t{step}", 1, nanoseconds(step / 10))
    assert len(recent.per_second(P1, nanoseconds(999.9))) <= 20


def test_what_waits_is_asked_within_two_seconds_or_the_throttle() -> None:
    """The longer of the two, beside what came."""
    assert with_waiting({"a": 100}, {"a": 4000, "b": 2000}, nanoseconds(0.5)) == {"a": 2100, "b": 1000}
    assert with_waiting({}, {"a": 4000}, nanoseconds(8)) == {"a": 500}


# ---------------------------------------------------------------------- bursts, debts, prospects


def test_an_equal_part_is_the_nth() -> None:
    """Rounded down, so that all together have no more than the budget."""
    given = equal_part((10, 5, 1), 3)
    assert given.rates == given.own_rates == given.prospects == (3, 1, 0)
    assert (given.budget, given.gateways, given.decides) == ((10, 5, 1), 3, False)


def test_bursts_are_those_of_an_equal_part_at_least() -> None:
    """Little is asked, and still a request goes through at once; with more they grow with the rate."""
    assert bursts(buckets(part(0, 0, 0))) == [150, 87.5, 50]
    assert bursts(buckets(part(600, 0, 0))) == [300, 87.5, 60]
    assert bursts(buckets(part(*(rate // 1000 for rate in BUDGET), gateways=1))) == bursts(buckets())


parts_of_two = st.tuples(*(st.integers(0, rate) for rate in BUDGET))


@settings(max_examples=100, deadline=None)
@given(parts_of_two)
def test_bursts_of_two_together_are_at_most_twice_those_of_one(mine: tuple[int, ...]) -> None:
    """However the budget is divided between them."""
    theirs = tuple(rate - got for rate, got in zip(BUDGET, mine, strict=True))
    both = [buckets(BudgetPart(rates, rates, rates, BUDGET, 2)).bursts for rates in (mine, theirs)]
    for one, other, whole in zip(*both, buckets().bursts, strict=True):
        assert one + other <= 2 * whole + 2


def test_levels_stay_at_a_new_part_and_are_cut_to_its_bursts() -> None:
    """A part is no refill, whether it is larger or smaller."""
    b = buckets(part(600, 350, 50, gateways=1))
    assert [b.level_tokens(p) for p in PRIORITIES] == [300, 175, 100]
    b.take_part(part(300, 175, 25), 0)
    assert [b.level_tokens(p) for p in PRIORITIES] == [150, 87.5, 50]
    b.take_part(part(600, 350, 50, gateways=1), 0)
    assert [b.level_tokens(p) for p in PRIORITIES] == [150, 87.5, 50]


def test_with_no_rate_nothing_flows() -> None:
    """Nor is anything divided by it."""
    b = buckets(part(0, 0, 0))
    for p in PRIORITIES:
        b.take(p, b.levels[p] // 10**9, False)
    b.advance(nanoseconds(100))
    assert b.levels == [0, 0, 0]
    assert b.predicted_wait_ns(P0, 1000, 0, False) == NEVER
    assert b.time_until(P0, 1000, False, nanoseconds(1000)) == NEVER


def test_waits_are_predicted_by_the_prospects() -> None:
    """Not by the little that a gateway has because it asks for little."""
    b = buckets(part(0, 0, 0, prospects=(300_000, 175_000, 25_000)))
    b.take(P0, 150_000, False)
    assert b.predicted_wait_ns(P0, 30_000, 0, False) == nanoseconds(0.1)


def test_long_prompts_wait_for_what_is_not_lent() -> None:
    """Prospects beyond the class's budget would be lent by others."""
    b = buckets(part(0, 500, 0, own_rates=(0, 350_000, 0), prospects=(0, 900_000, 0)))
    b.active_until[P0] = NEVER
    b.take(P1, 175_000, True)
    assert b.predicted_wait_ns(P1, 35_000, 0, True) == nanoseconds(0.1)
    b.advance(nanoseconds(0.1))
    assert b.own_levels[P1] == 35 * UNITS_PER_TOKEN
    assert b.levels[P1] > b.own_levels[P1]


def test_a_debt_is_that_of_an_equal_part_at_least() -> None:
    """What a request used more than it had paid is not forgiven because its gateway's rate has gone down."""
    b = buckets(part(0, 0, 0))
    assert b.settle(P0, 0, 10**9, False, 0) == 3_000_000 + 150_000


# ---------------------------------------------------------------------- no token is made


steps = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 10**8 - 7, 10**8, 10**9, 7 * 10**9]),
        st.tuples(*(st.integers(0, rate) for rate in BUDGET)),
        st.integers(1, 4),
        st.sampled_from(PRIORITIES),
        st.lists(st.booleans(), min_size=2, max_size=2),
    ),
    max_size=25,
)


@settings(max_examples=100, deadline=None)
@given(steps, st.sampled_from([1, 1000, 40_000, 400_000]))
def test_no_more_is_paid_than_flowed_in(run: list[tuple[int, ...]], cost: int) -> None:
    """Over any parts and times: what was paid is at most the first levels and the rates by their time, and
    one cost above its burst for each class."""
    b, now, inflow, paid = buckets(), 0, sum(buckets().levels), 0
    for passed, rates, gateways, greedy, active in run:
        now += passed  # type: ignore[operator]
        inflow += sum(b.rates) * passed  # type: ignore[operator]
        for p, is_active in zip((P0, P1), active, strict=True):  # type: ignore[call-overload]
            b.active_until[p] = NEVER if is_active else now
        given = BudgetPart(rates, rates, rates, BUDGET, gateways)  # type: ignore[arg-type]
        b.take_part(given, now)
        for _ in range(50):
            if b.affords(greedy, cost, False):  # type: ignore[arg-type]
                b.take(greedy, cost, False)  # type: ignore[arg-type]
                paid += cost * 10**9
        assert all(level <= burst for level, burst in zip(b.levels, b.bursts, strict=True))
        assert paid + sum(b.levels) <= inflow
        assert all(own <= level for own, level in zip(b.own_levels, b.levels, strict=True))


@pytest.mark.parametrize("shrinks", [False, True])
def test_parts_that_change_ten_times_a_second_lose_nothing_that_is_paid(shrinks: bool) -> None:
    """A busy class pays all that its rates bring, though its part goes up and down with each slice."""
    b, now, paid, inflow = buckets(part(300, 175, 25)), 0, 0, 0
    spend_all(b, 1000)
    start = sum(b.levels)
    for slice_number in range(100):
        low = shrinks and slice_number % 2
        b.take_part(part(100 if low else 300, 175, 25), now)
        inflow += sum(b.rates) * 10**8
        for _ in range(10):
            now += 10**7
            b.advance(now)
            paid += spend_all(b, 1000)
    assert paid == start + inflow - sum(b.levels)
    assert paid > 0.99 * inflow


def spend_all(b: TokenBuckets, cost: int) -> int:
    """Units."""
    spent = 0
    for p in Priority:
        while b.affords(p, cost, False):
            b.take(p, cost, False)
            spent += cost * 10**9
    return spent


def test_two_that_hand_a_rate_to_and_fro_pay_no_more_than_one() -> None:
    """The sum of what both pay is the sum of the rates, and their first levels."""
    pair, now, paid = [buckets(part(300, 175, 25)) for _ in range(2)], 0, 0
    start = sum(sum(b.levels) for b in pair)
    for turn in range(200):
        for b, mine in zip(pair, (500, 100) if turn % 2 else (100, 500), strict=True):
            b.take_part(part(mine, 175, 25), now)
        now += 10**8
        for b in pair:
            b.advance(now)
            paid += spend_all(b, 7000)
    assert paid <= start + sum(BUDGET) * now
    assert paid > 0.97 * sum(BUDGET) * now


def test_lent_tokens_need_no_class_of_ones_own() -> None:
    """A gateway that has a rate of P0 alone serves P2 from what overflows once P0 and P1 are full: as much as
    the ceiling allows while P0 is active, and all of it afterwards."""
    for p0_until, part_lent in ((NEVER, RULES.ceiling_shares[P2]), (0, 1.0)):
        b = buckets(part(600, 0, 0))
        b.take(P2, b.levels[P2] // UNITS_PER_MILLITOKEN, False)
        b.active_until[P0] = p0_until
        b.advance(nanoseconds(0.05))
        assert b.level_tokens(P2) == part_lent * 600 * 0.05


def test_neighbours_in_time_agree() -> None:
    """How often the buckets are looked at between two parts changes nothing."""
    ways = []
    for looks in ([], [0.03], [i / 1000 for i in range(100)]):
        b = buckets(part(120, 330, 7))
        spend_all(b, 1000)
        for at in looks:
            b.advance(nanoseconds(at))
        b.take_part(part(330, 20, 41), nanoseconds(0.1))
        b.advance(nanoseconds(0.3))
        ways.append((b.levels, b.own_levels))
    assert all(one == other for one, other in pairwise(ways))
