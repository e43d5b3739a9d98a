"""C follows how near the engines are to breaking a promise.

P0 is promised 1 s and 60 ms a token, so x is 1 at a wait of 150 ms, at gaps of 51 ms and at 0.9 of the KV
memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.severity_law import Gains, SeverityLaw
from tests.support.control import Bench, judged, parameters
from tests.support.policy_settings import P0, P1, P2

PLENTY = (3000, 3000, 3000)
AT_LIMIT = {"gap_ms": 51.0}


def bench(**given: object) -> Bench:
    made = parameters(**given)
    return Bench(SeverityLaw(made), made)


def after_a_first_cut() -> Bench:
    """Now growth is by the small step."""
    law = bench()
    law.tell(0, gap_ms=51.0 * 1.0001)
    return law


@pytest.mark.parametrize(
    ("told", "x"),
    [
        ({"gap_ms": 25.5}, 0.5),
        ({"wait_ms": 300.0}, 2.0),
        ({"kv": 0.45}, 0.5),
        ({"gap_ms": 25.5, "wait_ms": 75.0, "kv": 0.81}, 0.9),
        ({}, None),
    ],
)
def test_x_is_the_largest_part_of_a_limit(told: dict, x: float | None) -> None:
    """Of the signals that have samples."""
    law = bench()
    law.tell(1, **told)
    assert law.law.severity == (None if x is None else pytest.approx(x))


@pytest.mark.parametrize(("x", "factor"), [(1.5, 0.95), (2, 0.9), (3, 0.8), (4, 0.7), (40, 0.7)])
def test_beyond_the_limit_c_is_cut_by_how_far(x: float, factor: float) -> None:
    """A tenth for each 1, three tenths at most; P2 gives first."""
    law = bench()
    step = law.tell(1, gap_ms=51 * x, wait_ms=0.0)
    assert step is not None
    assert step.reason == "gap"
    assert law.capacity == pytest.approx(1000 * factor, abs=0.01)


def test_no_class_is_cut_before_those_below_it_are_at_their_floors() -> None:
    """However long it lasts, and never below the floors."""
    law = bench()
    for second in range(1, 30):
        law.tell(second, gap_ms=80.0)
        p0, p1, p2 = law.tokens
        assert p2 == 10 or (p0, p1) == (600, 350)
        assert p1 == 100 or p0 == 600
    assert law.tokens == [300, 100, 10]


@pytest.mark.parametrize(("gap_ms", "grown"), [(51, 1.6), (45.9, 3.2), (40.8, 4.8), (30.6, 8), (5.1, 8)])
def test_growth_is_smaller_the_nearer_the_limit(gap_ms: float, grown: float) -> None:
    """0.8 % of C0 × min(1, 0.2 + 2 (1 − x)), if a bucket held something back."""
    law = after_a_first_cut()
    law.rates = law.limits.at_shares(1_200_000)
    law.tell(3, gap_ms=gap_ms, held_back="P2", demand=PLENTY)
    assert law.capacity == pytest.approx(1200 + grown, abs=0.01)


def test_growth_is_large_until_the_limit_was_seen() -> None:
    """A first C that is far too small is soon out of the way."""
    law = bench()
    for second in range(1, 11):
        law.tell(second, gap_ms=10, held_back="P1", demand=PLENTY)
    assert law.capacity == pytest.approx(1500)
    law.tell(11, gap_ms=52)
    law.tell(12, gap_ms=10, held_back="P1", demand=PLENTY)
    assert law.capacity < 1510


def test_without_need_c_stays() -> None:
    """Nobody is held back, and C is C0 or more: no step, however easy it is."""
    law = bench()
    law.tell(1, gap_ms=5, demand=PLENTY)
    law.rates = law.limits.at_shares(1_500_000)
    law.tell(2, gap_ms=5, demand=PLENTY)
    assert law.steps == []


def test_c_comes_back_to_c0_unasked() -> None:
    """By 2 % of C0 a tick while x is at most 0.8, P0 first, and not above C0."""
    law = bench()
    for second in range(1, 10):
        law.tell(second, gap_ms=300)
    assert law.tokens == [300, 100, 10]
    law.tell(10, gap_ms=45)
    assert law.capacity == 410
    for second in range(11, 60):
        law.tell(second, gap_ms=40)
    assert law.tokens == [600, 350, 50]


def test_a_p0_that_was_held_back_comes_first_with_more_than_its_share() -> None:
    """1.4 times as much; what is beyond goes to the others."""
    law = after_a_first_cut()
    law.rates = law.limits.at_shares(1_000_000)
    for second in range(2, 200):
        law.tell(second, gap_ms=20, held_back="P0 P1", demand=PLENTY)
    p0, p1, _ = law.tokens
    assert p0 / law.capacity == pytest.approx(0.84, abs=0.001)
    assert p1 > 350


def test_what_p0_got_before_the_others_comes_back_when_it_is_easy() -> None:
    """By 2 % of C0 a tick, at the same C, unless P0 is short."""
    law = after_a_first_cut()
    law.rates = (900_000, 290_000, 10_000)
    law.tell(2, gap_ms=10, held_back="P0", demand=(0, 0, 0))
    law.tell(3, gap_ms=45)
    assert law.tokens == [900, 290, 10]
    law.tell(4, gap_ms=10)
    assert law.tokens == [880, 310, 10]
    for second in range(5, 30):
        law.tell(second, gap_ms=10)
    assert law.tokens == [720, 420, 60]


def test_the_tightest_promise_counts_where_p0_has_none() -> None:
    """P1's 3 s and 100 ms, if those are all there are; without any only the memory counts."""
    law = bench(classes={P0: {}})
    law.tell(1, gap_ms=85 * 1.5)
    assert law.law.severity == pytest.approx(1.5)
    law = bench(classes={P0: {}, P1: {}})
    law.tell(1, gap_ms=1000, wait_ms=1000, kv=0.9)
    assert law.law.severity == 1


# ── the outer trim ───────────────────────────────────────────────────────────────────────────────────────


def target_after(kept: int, broken: int, seconds: int, gap_ms: float = 50.0) -> float:
    law = bench()
    for second in range(seconds + 1):
        law.tell(second, gap_ms=gap_ms, verdicts={P0: judged(kept, broken, second)})
    law.tell(seconds + 1, gap_ms=gap_ms)
    assert law.law.severity is not None
    return gap_ms / 60 / law.law.severity


def test_the_target_for_gaps_follows_what_became_of_p0() -> None:
    """Down by 5 % for each ten seconds in which too many promises were broken, not below 0.6."""
    assert target_after(90, 10, 9) == pytest.approx(0.85)
    assert target_after(90, 10, 10) == pytest.approx(0.85 * 0.95)
    assert target_after(90, 10, 20) == pytest.approx(0.85 * 0.95**2)
    assert target_after(90, 10, 300) == pytest.approx(0.6)
    assert target_after(97, 3, 100) == pytest.approx(0.85)
    assert target_after(100, 0, 100) == pytest.approx(0.85)


def test_the_target_comes_back_when_all_is_kept() -> None:
    """By 2 % each ten seconds, up to what it was."""
    law = bench()
    for second in range(31):
        law.tell(second, gap_ms=50, verdicts={P0: judged(90, 10, second)})
    for second in range(31, 52):
        law.tell(second, gap_ms=50, verdicts={P0: judged(100, 0, second)})
    law.tell(52, gap_ms=50)
    assert law.law.severity is not None
    assert 50 / 60 / law.law.severity == pytest.approx(0.85 * 0.95**3 * 1.02**2)


def test_promises_broken_for_another_reason_do_not_trim() -> None:
    """While gaps are far from their limit they are not what is wrong; nor do nineteen requests tell."""
    assert target_after(90, 10, 100, gap_ms=20) == pytest.approx(0.85)
    assert target_after(0, 1, 15) == pytest.approx(0.85)


# ── always ───────────────────────────────────────────────────────────────────────────────────────────────

figure = st.none() | st.floats(0, 10_000)


@given(
    st.lists(
        st.tuples(
            figure, figure, st.none() | st.floats(0, 1.5), st.sets(st.sampled_from(["P0", "P1", "P2"])),
            st.integers(0, 5000), st.integers(0, 30), st.integers(0, 30),
        ),
        max_size=60,
    ),
    st.floats(0.1, 10),
)  # fmt: skip
def test_any_sequence_keeps_sum_floors_and_bounds(told: list[tuple], gain: float) -> None:
    """Σ rates = C, floors and bounds, one tick's largest steps, and the order in which classes give."""
    made = parameters()
    law = Bench(SeverityLaw(made, Gains().times(gain)), made)
    for second, (gap, wait, kv, held, demand, kept, broken) in enumerate(told, start=1):
        before = law.rates
        law.tell(
            second,
            gap_ms=gap,
            wait_ms=wait,
            kv=kv,
            held_back=" ".join(held),
            demand=(demand, demand, demand),
            verdicts={P0: judged(kept, broken, second)},
        )
        assert law.limits.lowest <= sum(law.rates) <= law.limits.highest
        assert all(rate >= floor for rate, floor in zip(law.rates, law.limits.floors, strict=True))
        if sum(law.rates) < sum(before):
            assert law.rates[P2] == law.limits.floors[P2] or law.rates[:2] == before[:2]
            assert law.rates[P1] == law.limits.floors[P1] or law.rates[P0] == before[P0]
        elif sum(law.rates) > sum(before):
            assert all(after >= was for after, was in zip(law.rates, before, strict=True))


# ── traps ────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_growth_beyond_what_is_asked_for() -> None:
    """Who asks for less than C, in bunches, is held back by bursts: a larger C would help nobody, and be far
    too large when more is asked for."""
    law = bench()
    for second in range(1, 100):
        law.tell(second, gap_ms=10, held_back="P0", demand=(700, 200, 50))
    assert law.steps == []
    for second in range(100, 200):
        law.tell(second, gap_ms=10, held_back="P0", demand=(700, 300, 200))
    assert law.capacity == 1200


def test_no_growth_in_the_dark() -> None:
    """Where no gap and no wait can be seen, nothing would tell when it is too much; up to C0 it may."""
    law = bench()
    law.rates = law.limits.at_shares(500_000)
    for second in range(1, 100):
        law.tell(second, kv=0.3, held_back="P0 P1 P2", demand=PLENTY)
    assert law.tokens == [600, 350, 50]


def test_refused_requests_leave_no_sample() -> None:
    """Where all is refused nothing is measured; C comes back all the same."""
    law = bench()
    for second in range(1, 10):
        law.tell(second, gap_ms=300)
    assert law.capacity == 410
    for second in range(10, 45):
        law.tell(second, held_back="P0 P1 P2", demand=PLENTY)
    assert law.capacity == 1000
