"""Three buckets under one capacity: arithmetic by hand, and against an exact slow oracle."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.policy.clock import NEVER
from gateway.policy.request import Priority
from gateway.policy.token_bucket import UNITS_PER_TOKEN, BucketRules, TokenBuckets, split_rates
from tests.support.bucket_oracle import ExactBuckets
from tests.support.policy_settings import P0, P1, P2, nanoseconds

SHARES = (0.60, 0.35, 0.05)
CEILINGS = (1.0, 1.0, 0.5)
SECOND = 1_000_000_000


def buckets(
    tokens_per_second: float = 1000,
    ceilings: tuple[float, ...] = CEILINGS,
    burst_seconds: float = 0.5,
    min_burst: int = 0,
    shares: tuple[float, ...] = SHARES,
    max_debt_seconds: float = 10,
) -> TokenBuckets:
    rules = BucketRules(shares, ceilings, burst_seconds, min_burst, max_debt_seconds)
    return TokenBuckets(rules, round(tokens_per_second * 1000), 0)


def levels(b: TokenBuckets) -> list[float]:
    return [b.level_tokens(p) for p in Priority]


def own_levels(b: TokenBuckets) -> list[float]:
    return [own / UNITS_PER_TOKEN for own in b.own_levels]


def at(b: TokenBuckets, seconds: float) -> TokenBuckets:
    b.advance(nanoseconds(seconds))
    return b


def spend(b: TokenBuckets, priority: Priority, tokens: float, own: bool = False) -> int:
    return b.take(priority, round(tokens * 1000), own)


def active(b: TokenBuckets, priority: Priority, until: float | None = None) -> TokenBuckets:
    b.active_until[priority] = NEVER if until is None else nanoseconds(until)
    return b


def empty(b: TokenBuckets) -> TokenBuckets:
    for p in Priority:
        b.take(p, b.levels[p] // SECOND, False)
    return b


# ---------------------------------------------------------------------- sizes


@pytest.mark.parametrize("capacity", [1, 7, 1000, 999_999_937, 12_000_000])
@pytest.mark.parametrize("shares", [SHARES, (1 / 3, 1 / 3, 1 / 3), (1.0, 0.0, 0.0), (0.333, 0.333, 0.334)])
def test_rates_add_up_to_capacity(capacity: int, shares: tuple[float, ...]) -> None:
    """Σ rates = C exactly, each within a rounding of its share."""
    rates = split_rates(capacity, shares)
    assert sum(rates) == capacity
    for rate, share in zip(rates, shares, strict=True):
        assert abs(rate - share * capacity) <= 2 + 1e-9 * capacity


@pytest.mark.parametrize(
    ("tokens_per_second", "burst_seconds", "min_burst", "expected"),
    [
        (1000, 0.5, 0, [300, 175, 25]),
        (1000, 0.5, 8192, [1000, 1000, 1000]),
        (1000, 2.0, 500, [1200, 700, 500]),
        (12000, 0.5, 8192, [8192, 8192, 8192]),
        (100000, 0.5, 8192, [30000, 17500, 8192]),
        (1, 0.5, 8192, [1, 1, 1]),
        (1000, 3600, 0, [2_160_000, 1_260_000, 180_000]),
    ],
)
def test_bursts_and_full_start(
    tokens_per_second: float, burst_seconds: float, min_burst: int, expected: list[float]
) -> None:
    """burst = max(rate × burst_seconds, min(min_burst_tokens, C × 1 s)), and buckets start full."""
    b = buckets(tokens_per_second, burst_seconds=burst_seconds, min_burst=min_burst)
    assert [burst / UNITS_PER_TOKEN for burst in b.bursts] == expected
    assert levels(b) == expected == own_levels(b)


# ---------------------------------------------------------------------- refill and lending


def test_all_busy_each_gets_its_share() -> None:
    """With every bucket short, each fills by its own rate."""
    assert levels(at(empty(buckets()), 0.25)) == [150, 87.5, 12.5]


def test_idle_share_is_lent_at_once_in_class_order() -> None:
    """What full buckets do not take goes to P0 while it has room, then P1, then P2."""
    b = buckets()
    spend(b, P1, 175)
    spend(b, P2, 25)
    assert levels(at(b, 0.1)) == [300, 95, 5]
    b = buckets()
    spend(b, P2, 25)
    assert levels(at(b, 0.01)) == [300, 175, 10]
    b = buckets()
    spend(b, P0, 300)
    spend(b, P2, 25)
    assert levels(at(b, 0.1)) == [95, 175, 5]


def test_a_bucket_that_fills_on_the_way_passes_the_rest_on() -> None:
    """Refill over a long span is cut where a bucket becomes full."""
    b = buckets()
    spend(b, P0, 60)
    spend(b, P1, 175)
    # P0 gets 600 + 50 (P2's) until full at 60/650 s; P1 350 a second until then, then 1000.
    full = 60 / 650
    expected = 350 * full + 1000 * (0.15 - full)
    assert levels(at(b, 0.15)) == pytest.approx([300, expected, 25])


def test_ceiling_while_a_higher_class_is_active() -> None:
    """Beside an active higher class P2 takes in no more than half of C, alone all of it."""
    b = active(buckets(min_burst=8192), P0)
    spend(b, P2, 1000)
    assert levels(at(b, 1)) == [1000, 1000, 500]
    b = active(buckets(min_burst=8192), P0, until=0.4)
    spend(b, P2, 1000)
    assert levels(at(b, 1)) == [1000, 1000, 0.4 * 500 + 0.6 * 1000]


def test_no_ceiling_from_a_lower_or_equal_class() -> None:
    """Activity of the class itself, or of one below, limits nothing."""
    b = active(active(buckets(min_burst=8192, ceilings=(0.7, 0.5, 0.5)), P1), P2)
    spend(b, P1, 1000)
    assert levels(at(b, 1))[1] == 1000


def test_a_share_of_nothing_lives_on_lent_tokens() -> None:
    """A class without a share fills from what others leave, up to its ceiling."""
    b = active(buckets(shares=(0.6, 0.4, 0.0), min_burst=8192), P0)
    spend(b, P2, 1000)
    assert levels(at(b, 1)) == [1000, 1000, 500]
    spend(b, P0, 1000)
    spend(b, P1, 1000)
    assert levels(at(b, 1.5)) == [300, 200, 500]


def test_tiny_capacity_works() -> None:
    """One token a second is a legal capacity."""
    b = empty(buckets(tokens_per_second=1))
    assert levels(at(b, 1)) == [0.3, 0.175, 0.025]


def test_time_does_not_go_back() -> None:
    """A time already passed changes nothing."""
    b = at(empty(buckets()), 0.1)
    before = list(b.levels)
    b.advance(nanoseconds(0.05))
    b.advance(nanoseconds(0.1))
    assert b.levels == before


# ---------------------------------------------------------------------- charge and settle


def test_a_cost_above_the_burst_goes_on_a_full_bucket_and_leaves_debt() -> None:
    """An oversize request is affordable when the bucket is full, and the long-run rate holds after it."""
    b = buckets()
    assert b.affords(P0, 10_000_000, False)
    spend(b, P0, 10_000)
    assert b.level_tokens(P0) == -9_700
    assert not b.affords(P0, 1, False)
    at(b, 9.7)  # P1 and P2 are full: all of C flows in
    assert b.level_tokens(P0) == 0
    assert not b.affords(P0, 10_000_000, False)
    assert at(b, 10).affords(P0, 10_000_000, False)


def test_a_bucket_a_hair_short_does_not_pay() -> None:
    """What is not there cannot be spent."""
    b = buckets()
    spend(b, P0, 200)
    assert b.affords(P0, 100_000, False)
    assert not b.affords(P0, 100_001, False)


def test_overshoot_is_carried_as_debt() -> None:
    """Capacity 100, 10 a second: an estimate of 10 that used 300 is paid off in 21 s."""
    b = TokenBuckets(BucketRules((1.0, 0.0, 0.0), (1, 1, 1), 10, 0, 1000), 10_000, 0)
    spend(b, P0, 10)
    assert b.settle(P0, 10_000, 300_000, False, 0) == 300_000
    assert b.level_tokens(P0) == -200
    due = b.time_until(P0, 10_000, False, nanoseconds(100))
    assert due == nanoseconds(21)


def test_settlement_debt_is_bounded() -> None:
    """A debit stops at max_debt_seconds × rate below zero; what lies beyond is forgiven and said."""
    b = buckets(max_debt_seconds=2)
    spend(b, P1, 175)
    assert b.settle(P1, 175_000, 5_000_000, False, 0) == 175_000 + 700_000
    assert b.level_tokens(P1) == -700
    assert b.settle(P1, 0, 1_000, False, 0) == 0
    assert b.level_tokens(P1) == -700


def test_an_oversize_debt_is_not_deepened_by_settlement() -> None:
    """Below the debt limit already, a settlement takes nothing more."""
    b = buckets(max_debt_seconds=1)
    spend(b, P1, 100_000)
    assert b.settle(P1, 100_000_000, 200_000_000, False, 0) == 100_000_000


def test_refund_beyond_the_burst_goes_to_the_others() -> None:
    """A refund that the bucket has no room for is lent on, and nothing comes from nowhere."""
    b = buckets()
    spend(b, P0, 300)
    spend(b, P1, 100)
    at(b, 0.5)  # everybody full again
    spend(b, P1, 100)
    assert b.settle(P0, 300_000, 200_000, False, 0) == 200_000
    assert levels(b) == [300, 175, 25]


def test_refund_lent_on_respects_ceilings() -> None:
    """What does not fit is not given to a class that a ceiling limits just now."""
    b = active(buckets(), P0)
    spend(b, P2, 25)
    b.settle(P0, 300_000, 0, False, 0)
    assert levels(b) == [300, 175, 0]


# ---------------------------------------------------------------------- own level


def test_own_level_grows_by_own_share_while_limited() -> None:
    """While a higher class is active lent tokens raise the level but not the own level."""
    b = active(buckets(), P0)
    spend(b, P1, 175)
    at(b, 0.1)
    assert levels(b)[1] == 100
    assert own_levels(b)[1] == 35
    assert not b.affords(P1, 36_000, True)
    assert b.affords(P1, 35_000, True)
    assert b.affords(P1, 100_000, False)


def test_lent_tokens_count_as_own_once_nobody_above_is_active() -> None:
    """With no higher class active the whole level is the class's own."""
    b = active(buckets(), P0, until=0.1)
    spend(b, P1, 175)
    assert own_levels(at(b, 0.1))[1] == 35
    assert own_levels(at(b, 0.11))[1] == 110


def test_ordinary_charges_use_lent_tokens_first() -> None:
    """A charge eats the lent part before the own part."""
    b = active(buckets(), P0)
    spend(b, P1, 175)
    at(b, 0.1)
    assert spend(b, P1, 50) == 0
    assert (levels(b)[1], own_levels(b)[1]) == (50, 35)
    assert spend(b, P1, 20) == 5 * UNITS_PER_TOKEN
    assert (levels(b)[1], own_levels(b)[1]) == (30, 30)


def test_full_refund_restores_the_own_level() -> None:
    """Charged and refunded in full leaves level and own level as they were, lent tokens or not."""
    for own_share in (False, True):
        for cost in (10, 35, 60, 95):
            b = active(buckets(), P0)
            spend(b, P1, 175)
            at(b, 0.1)
            before = (list(b.levels), list(b.own_levels))
            own_units = spend(b, P1, cost, own_share)
            b.settle(P1, cost * 1000, 0, own_share, own_units)
            assert (b.levels, b.own_levels) == before


def test_oversize_from_the_own_share() -> None:
    """A long prompt above the burst waits for a full own level and leaves both levels in debt."""
    b = active(buckets(), P0)
    assert b.affords(P1, 400_000, True)
    spend(b, P1, 400, own=True)
    assert (levels(b)[1], own_levels(b)[1]) == (-225, -225)
    at(b, 0.4)
    assert levels(b)[1] == 175
    assert own_levels(b)[1] == -225 + 140
    at(b, 1)  # all are full, and yet its own share goes on to pay
    assert own_levels(b)[1] == -225 + 350
    assert not b.affords(P1, 400_000, True)


# ---------------------------------------------------------------------- rates change


def test_new_rates_keep_levels_cut_to_the_new_burst() -> None:
    """A change of C keeps what is in the buckets, up to the new bursts."""
    b = buckets()
    spend(b, P0, 250)
    spend(b, P1, 10_000)
    b.set_rates(split_rates(100_000, SHARES), 0)
    assert levels(b) == pytest.approx([30, 175 - 10_000, 2.5])
    b.set_rates(split_rates(10_000_000, SHARES), 0)
    assert levels(b) == pytest.approx([30, 175 - 10_000, 2.5])


def test_refill_up_to_the_change_uses_the_old_rates() -> None:
    """The time before a change is refilled at the old rates."""
    b = empty(buckets())
    b.set_rates(split_rates(2_000_000, SHARES), nanoseconds(0.1))
    assert levels(b) == [60, 35, 5]
    assert levels(at(b, 0.2)) == [180, 105, 15]


# ---------------------------------------------------------------------- prediction


def test_predicted_wait_formula() -> None:
    """(tokens missing + cost ahead) / max(own rate, inflow of the last second)."""
    b = empty(buckets())
    assert b.predicted_wait_ns(P1, 70_000, 35_000, False) == nanoseconds(0.3)
    assert b.predicted_wait_ns(P0, 60_000, 0, False) == nanoseconds(0.1)
    assert b.predicted_wait_ns(P0, 10**9, 0, False) == nanoseconds(
        0.5
    )  # an oversize one waits for a full bucket
    assert buckets().predicted_wait_ns(P0, 300_000, 0, False) == 0


def test_predicted_wait_knows_what_was_lent_lately() -> None:
    """A class that took in all of C in the last second expects that to go on, except for its own share."""
    b = buckets()
    for i in range(1, 31):
        spend(b, P1, 100 if i > 1 else 175)
        at(b, i / 10)
    spend(b, P1, b.level_tokens(P1))
    assert b.recent_inflow(P1) == pytest.approx(1_000_000, rel=0.06)
    assert b.predicted_wait_ns(P1, 100_000, 0, False) == pytest.approx(nanoseconds(0.1), rel=0.06)
    assert b.predicted_wait_ns(P1, 70_000, 0, True) == nanoseconds(0.2)


def test_nothing_flows_is_no_wait_that_helps() -> None:
    """A class without rate or inflow is told that waiting does not help."""
    b = empty(buckets(shares=(1.0, 0.0, 0.0)))
    assert b.predicted_wait_ns(P2, 1000, 0, False) == 0  # a burst of nothing holds nothing back
    b = empty(buckets(shares=(1.0, 0.0, 0.0), min_burst=100))
    assert b.predicted_wait_ns(P2, 1000, 0, False) == NEVER


# ---------------------------------------------------------------------- against the oracle

times = st.sampled_from([0, 1, 2, 7, 1000, 999_983, 10_000_019, 50_000_000, 400_000_000, 3 * SECOND + 1])
classes = st.sampled_from(list(Priority))
costs = st.integers(0, 900_000)
operations = st.one_of(
    st.tuples(st.just("take"), classes, costs, st.booleans()),
    st.tuples(st.just("force"), classes, st.integers(0, 3_000_000), st.booleans()),
    st.tuples(st.just("settle"), st.integers(0, 30), st.integers(0, 2_000_000)),
    st.tuples(st.just("refund"), st.integers(0, 30)),
    st.tuples(st.just("rates"), st.sampled_from([1_000, 150_000, 1_000_000, 1_234_567, 9_000_000])),
    st.tuples(st.just("active"), classes, st.sampled_from([0, 1, 30_000_000, 2 * SECOND, NEVER])),
)
runs = st.lists(st.tuples(times, operations), min_size=1, max_size=25)
ceilings_tried = st.sampled_from([(1.0, 1.0, 0.5), (1.0, 1.0, 1.0), (1.0, 0.5, 0.25), (1.0, 0.8, 0.05)])
bursts_tried = st.sampled_from([(0.5, 0), (0.5, 8192), (0.01, 100), (5.0, 0), (0.0, 0)])


Step = tuple[int, tuple[object, ...]]


class Run:
    """Buckets under a list of operations, with the sums that conservation speaks of."""

    def __init__(self, ceilings: tuple[float, ...], burst_seconds: float, min_burst: int) -> None:
        self.b = buckets(
            ceilings=ceilings, burst_seconds=burst_seconds, min_burst=min_burst, max_debt_seconds=0.5
        )
        self.now = 0
        self.charges: list[tuple[Priority, int, bool, int, Fraction]] = []
        self.slack = 0  # units that rounding to nanoseconds may have moved so far
        self.net_taken = 0  # takes − refunds
        self.poured = 0  # ∫ C dt
        self.owed = 0  # by oversize requests and by settlements

    def step(self, wait: int, operation: tuple[object, ...]) -> None:
        self.now += wait
        if wait % 2:
            for p in Priority:
                self.b.time_until(p, 10**9, False, SECOND)  # which finds out how it flows from here on
        self.pass_time(wait)
        self.slack += 8 * self.b.capacity if wait else 0
        self.poured += wait * self.b.capacity
        getattr(self, f"_{operation[0]}")(*operation[1:])

    def pass_time(self, wait: int) -> None:
        self.b.advance(self.now)

    def charge(self, priority: Priority, cost: int, own: bool) -> None:
        self.owed += max(cost * SECOND - max(self.b.levels[priority], 0), 0)
        own_units = self.b.take(priority, cost, own)
        self.charges.append((priority, cost, own, own_units, self.charged(priority, cost, own)))
        self.net_taken += cost * SECOND

    def charged(self, priority: Priority, cost: int, own: bool) -> Fraction:
        return Fraction(0)

    def settled(self, priority: Priority, tokens: Fraction, own: bool, of_own: Fraction) -> None: ...

    def _take(self, priority: Priority, cost: int, own: bool) -> None:
        if self.b.affords(priority, cost, own):
            level = self.b.own_levels[priority] if own else self.b.levels[priority]
            assert cost * SECOND <= level or level == self.b.bursts[priority]
            self.charge(priority, cost, own)

    def _force(self, priority: Priority, cost: int, own: bool) -> None:
        """A charge that does not ask, to bring the levels into every corner."""
        self.charge(priority, cost, own)

    def _settle(self, which: int, actual: int) -> None:
        if not self.charges:
            return
        priority, charged, own, own_units, of_own = self.charges.pop(which % len(self.charges))
        before = self.b.levels[priority]
        stays = self.b.settle(priority, charged, actual, own, own_units)
        if actual <= charged:
            assert stays == actual
        else:
            lowest = -round(0.5 * self.b.rates[priority]) * SECOND
            assert charged <= stays <= actual
            assert self.b.levels[priority] >= min(lowest, before)
            if stays < actual:
                assert self.b.levels[priority] - lowest < SECOND
        self.settled(priority, Fraction(charged - stays, 1000), own, of_own)
        self.owed += max(stays - charged, 0) * SECOND
        self.net_taken += (stays - charged) * SECOND

    def _refund(self, which: int) -> None:
        self._settle(which, 0)

    def _rates(self, capacity: int) -> None:
        self.b.set_rates(split_rates(capacity, SHARES), self.now)
        assert sum(self.b.rates) == self.b.capacity == capacity

    def _active(self, priority: Priority, span: int) -> None:
        self.b.active_until[priority] = NEVER if span == NEVER else self.now + span


class TwinRun(Run):
    """The same with the oracle beside it."""

    def __init__(self, ceilings: tuple[float, ...], burst_seconds: float, min_burst: int) -> None:
        super().__init__(ceilings, burst_seconds, min_burst)
        self.exact = ExactBuckets(
            [Fraction(r, 1000) for r in self.b.rates],
            [Fraction(str(c)) for c in ceilings],
            Fraction(str(burst_seconds)),
            Fraction(min_burst),
        )

    def pass_time(self, wait: int) -> None:
        super().pass_time(wait)
        self.exact.run(self.now)

    def charged(self, priority: Priority, cost: int, own: bool) -> Fraction:
        return self.exact.take(priority, Fraction(cost, 1000), own)

    def settled(self, priority: Priority, tokens: Fraction, own: bool, of_own: Fraction) -> None:
        if tokens >= 0:
            self.exact.give_back(priority, tokens, of_own)
        else:
            self.exact.take(priority, -tokens, own)

    def _rates(self, capacity: int) -> None:
        super()._rates(capacity)
        self.exact.set_rates([Fraction(r, 1000) for r in self.b.rates])

    def _active(self, priority: Priority, span: int) -> None:
        super()._active(priority, span)
        self.exact.busy_until[priority] = self.b.active_until[priority]


@settings(max_examples=150, deadline=None)
@given(runs, ceilings_tried, bursts_tried)
def test_levels_are_what_the_exact_arithmetic_says(
    run: list[Step], ceilings: tuple[float, ...], burst: tuple[float, int]
) -> None:
    """Over any mix of operations and time jumps levels agree with exact fractions within nanoseconds of C."""
    twin = TwinRun(ceilings, *burst)
    b, exact = twin.b, twin.exact
    for wait, operation in run:
        twin.step(wait, operation)
        for p in Priority:
            assert b.levels[p] <= b.bursts[p]
            assert b.own_levels[p] <= b.levels[p]
            assert abs(b.levels[p] - exact.levels[p] * UNITS_PER_TOKEN) <= twin.slack
            assert abs(b.own_levels[p] - exact.own[p] * UNITS_PER_TOKEN) <= twin.slack


@settings(max_examples=200, deadline=None)
@given(runs, ceilings_tried, bursts_tried)
def test_conservation(run: list[Step], ceilings: tuple[float, ...], burst: tuple[float, int]) -> None:
    """Takes − refunds in any interval ≤ ∫C dt + Σ bursts + what oversize requests and settlements owe."""
    state = Run(ceilings, *burst)
    bursts = sum(state.b.bursts)
    trace = [(0, 0, 0)]
    for wait, operation in run:
        state.step(wait, operation)
        bursts = max(bursts, sum(state.b.bursts))
        trace.append((state.net_taken, state.poured, state.owed))
    for i, (taken_before, poured_before, owed_before) in enumerate(trace):
        for taken, poured, owed in trace[i + 1 :]:
            assert taken - taken_before <= (poured - poured_before) + bursts + (owed - owed_before)


@settings(max_examples=150, deadline=None)
@given(runs, st.lists(st.integers(1, 3 * SECOND), max_size=20), ceilings_tried, bursts_tried)
def test_lazy_is_eager(
    run: list[Step], cuts: list[int], ceilings: tuple[float, ...], burst: tuple[float, int]
) -> None:
    """Refilling in between, at any instants, gives what one refill gives, within a few nanoseconds of C."""
    lazy, eager = Run(ceilings, *burst), Run(ceilings, *burst)
    end = sum(wait for wait, _ in run)
    for wait, operation in run:
        if operation[0] == "take":  # whether it pays may hang on the very nanosecond
            operation = ("force", *operation[1:])
        if operation[0] in ("settle", "refund"):  # where a debit stops, too
            continue
        for cut in sorted({c % max(end, 1) for c in cuts}):
            if eager.now < cut < eager.now + wait:
                eager.b.advance(cut)
        lazy.step(wait, operation)
        eager.step(wait, operation)
        slack = (lazy.slack + 1) * (1 + len(cuts))
        for p in Priority:
            assert abs(eager.b.levels[p] - lazy.b.levels[p]) <= slack
            assert abs(eager.b.own_levels[p] - lazy.b.own_levels[p]) <= slack


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 400_000), min_size=3, max_size=3),
    st.lists(st.integers(1, SECOND), min_size=1, max_size=20),
    ceilings_tried,
    st.booleans(),
)
def test_a_limited_class_takes_in_no_more_than_its_ceiling(
    spent: list[int], waits: list[int], ceilings: tuple[float, ...], p1_active: bool
) -> None:
    """Beside an active higher class inflow is at most ceiling × C × Δt, and never below its share."""
    b = active(buckets(ceilings=ceilings, min_burst=8192), P1 if p1_active else P0)
    for p in Priority:
        b.take(p, spent[p] * 10, False)
    limited = (P2,) if p1_active else (P1, P2)
    now = 0
    for wait in waits:
        before = list(b.levels)
        now += wait
        b.advance(now)
        for p in limited:
            gained = b.levels[p] - before[p]
            ceiling = max(int(b.capacity * ceilings[p]), b.rates[p])
            assert gained <= ceiling * wait
            assert gained >= min(b.rates[p] * wait, b.bursts[p] - before[p])


@settings(max_examples=200, deadline=None)
@given(runs, classes, st.integers(1, 2_000_000), st.booleans(), ceilings_tried, bursts_tried)
def test_time_until_is_the_first_instant_that_affords(
    run: list[Step],
    priority: Priority,
    cost: int,
    own: bool,
    ceilings: tuple[float, ...],
    burst: tuple[float, int],
) -> None:
    """At the time answered the bucket affords the cost, a nanosecond earlier it does not."""

    def brought_here() -> TokenBuckets:
        state = Run(ceilings, *burst)
        for wait, operation in run:
            state.step(wait, operation)
        return state.b

    def pays(b: TokenBuckets, now: int) -> bool:
        return b.affords(priority, cost, own and b.limited(priority, now))

    b = brought_here()
    now = b._now
    own_now = own and b.limited(priority, now)
    before = (list(b.levels), list(b.own_levels))
    horizon = 600 * SECOND
    when = b.time_until(priority, cost, own_now, horizon)
    assert (b.levels, b.own_levels) == before
    if when == NEVER:
        b.advance(now + horizon)
        assert not pays(b, now + horizon)
        return
    b.advance(when)
    assert pays(b, when)
    if when > now:
        earlier = brought_here()
        earlier.advance(when - 1)
        assert not pays(earlier, when - 1)


# ---------------------------------------------------------------------- levels that move


units = st.integers(-(10**17), 10**17)


@given(
    st.lists(st.tuples(units, units), min_size=3, max_size=3),
    st.lists(st.integers(1, 10**9), min_size=1, max_size=5),
)
def test_levels_that_are_shared_out_are_neither_lost_nor_made(
    levels_and_less: list[tuple[int, int]], weights: list[int]
) -> None:
    """Debts too; each gets its part to one unit, and no own level is above its level."""
    donor, heirs = buckets(), [buckets() for _ in weights]
    donor.levels = [level for level, _ in levels_and_less]
    donor.own_levels = [level - abs(less) for level, less in levels_and_less]
    before = list(donor.levels), list(donor.own_levels)
    whole = rest = sum(weights)
    for heir, weight in zip(heirs, weights, strict=True):
        heir.empty()
        heir.put_in(donor.take_out(weight, rest))
        rest -= weight
    assert donor.levels == donor.own_levels == [0, 0, 0]
    for i in Priority:
        assert sum(heir.levels[i] for heir in heirs) == before[0][i]
        assert sum(heir.own_levels[i] for heir in heirs) == before[1][i]
        for heir, weight in zip(heirs, weights, strict=True):
            assert heir.own_levels[i] <= heir.levels[i]
            assert abs(heir.levels[i] - Fraction(before[0][i] * weight, whole)) <= len(weights)


def test_levels_that_are_put_in_are_cut_to_the_bursts_with_the_next_rates() -> None:
    """And not before: the rates may grow by what brought the levels."""
    b = buckets(1000)
    b.put_in(buckets(1000).take_out(1, 2))
    assert levels(b) == [450, 262.5, 37.5]
    b.set_rates(split_rates(1_200_000, SHARES), 0)
    assert levels(b) == [360, 210, 30]
    assert own_levels(b) == [360, 210, 30]
