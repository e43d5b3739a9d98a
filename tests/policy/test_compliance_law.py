"""The classic rule, event by event, and what keeps it from its old mistakes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.compliance_law import ComplianceLaw
from tests.support.control import Bench, judged, parameters
from tests.support.policy_settings import P0, P1, P2


def bench() -> Bench:
    made = parameters("compliance")
    return Bench(ComplianceLaw(made, now=0), made)


def well(at: float) -> dict:
    return {P0: judged(998, 2, at), P1: judged(100, 0, at)}


# ── the rule ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_p0_that_is_well_and_half_idle_gives() -> None:
    """P0 at 0.998 uses half its rate: one change, P0 gives 5 %, P1 and P2 get it by their shares, Σ = C."""
    law = bench()
    step = law.tell(5, verdicts=well(4), demand=(300, 300, 10))
    assert step is not None
    assert step.reason == "p0_does_not_use_its_rate"
    assert law.tokens == [570, 376.25, 53.75]
    assert law.capacity == 1000
    assert law.tell(6, verdicts=well(5.5), demand=(300, 300, 10)) is None
    assert len(law.steps) == 1


def test_it_keeps_1_2_times_its_demand_and_its_floor() -> None:
    """What it gives it can spare."""
    law = bench()
    law.tell(5, verdicts=well(4), demand=(490, 0, 0))
    assert law.tokens[0] == 588
    for second in range(10, 300, 5):
        law.tell(second, verdicts=well(second - 1), demand=(0, 0, 0))
    assert law.tokens[0] == 300


def test_a_p0_below_its_promise_cuts_c_from_below() -> None:
    """P0 at 0.94: C × 0.90, P2 falls first."""
    law = bench()
    step = law.tell(5, verdicts={P0: judged(94, 6, 4)}, held_back="P0 P1 P2")
    assert step is not None
    assert step.reason == "p0_below_promise"
    assert law.tokens == [600, 290, 10]
    for second, expected in ((10, [600, 200, 10]), (15, [600, 119, 10]), (20, [546.1, 100, 10])):
        law.tell(second, verdicts={P0: judged(94, 6, second - 1)})
        assert law.tokens == pytest.approx(expected, abs=0.01)


def test_growth_when_all_are_well_and_somebody_was_held_back() -> None:
    """C × 1.05, by share; the bucket may have been short at any time since the last change."""
    law = bench()
    law.tell(3, held_back="P1")
    step = law.tell(5, verdicts=well(4), demand=(600, 900, 300))
    assert step is not None
    assert (step.reason, law.tokens) == ("demand", [630, 367.5, 52.5])


def test_no_growth_while_nobody_is_held_back() -> None:
    """More capacity helps nobody: demand is the limit."""
    law = bench()
    for second in range(5, 100, 5):
        law.tell(second, verdicts=well(second - 1), demand=(600, 300, 10))
    assert law.steps == []


def test_p0_takes_back_what_it_gave_when_it_is_held_back() -> None:
    """5 % of its rate, from P2 and then P1, up to its share."""
    law = bench()
    for second in range(5, 25, 5):
        law.tell(second, verdicts=well(second - 1), demand=(100, 300, 10))
    given = law.tokens[0]
    step = law.tell(25, verdicts=well(24), held_back="P0", demand=(700, 300, 10))
    assert step is not None
    assert step.reason == "p0_held_back"
    assert law.tokens[0] == pytest.approx(given * 1.05)
    assert law.tokens[2] < 55
    for second in range(30, 60, 5):
        law.tell(
            second, verdicts={P0: judged(100, 0, second - 1), P1: judged(97, 3, second - 1)}, held_back="P0"
        )
    assert law.tokens[0] == 600
    assert law.capacity == 1000


def test_p1_below_its_promise_gets_from_p2() -> None:
    """While P0 is well: a tenth of P2's rate."""
    law = bench()
    step = law.tell(5, verdicts={P0: judged(100, 0, 4), P1: judged(90, 10, 4)})
    assert step is not None
    assert (step.reason, law.tokens) == ("p1_below_promise", [600, 355, 45])


# ── when it keeps still ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kept", [95, 96, 98])
def test_nothing_in_the_dead_band(kept: int) -> None:
    """Between 0.95 and 0.99 no step, whoever is held back."""
    law = bench()
    law.tell(5, verdicts={P0: judged(kept, 100 - kept, 4)}, held_back="P0 P1 P2")
    assert law.steps == []


def test_nothing_within_the_cool_down() -> None:
    """Five seconds between two changes, however bad it is."""
    law = bench()
    for tenth in range(1, 200):
        at = tenth / 10
        law.tell(at, verdicts={P0: judged(50, 50, at)})
    times = [at for at, _ in law.steps]
    assert times[0] == 5
    assert all(later - earlier >= 5 for earlier, later in pairwise(times))
    assert len(times) == 3


def test_too_few_samples_say_nothing() -> None:
    """Nineteen broken promises are no twenty."""
    law = bench()
    assert law.tell(5, verdicts={P0: judged(0, 19, 4)}) is None
    assert law.tell(6, verdicts={P0: judged(0, 20, 4)}) is not None


def test_after_five_minutes_five_samples_do() -> None:
    """A class that asks seldom is judged as well."""
    law = bench()
    assert law.tell(299, verdicts={P0: judged(0, 5, 290)}) is None
    step = law.tell(300, verdicts={P0: judged(0, 5, 290)})
    assert step is not None
    assert step.reason == "p0_below_promise"


def test_samples_from_before_the_last_change_are_spent() -> None:
    """What was dispatched under other rates says nothing of these."""
    law = bench()
    law.tell(5, verdicts={P0: judged(0, 50, 4)})
    for second in range(6, 60):
        law.tell(second, verdicts={P0: judged(0, 50, 4)}, held_back="P0")
    assert len(law.steps) == 1


# ── always ───────────────────────────────────────────────────────────────────────────────────────────────


@given(
    st.lists(
        st.tuples(
            st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40),
            st.sets(st.sampled_from(["P0", "P1", "P2"])), st.integers(0, 2000), st.booleans(),
        ),
        max_size=40,
    )
)  # fmt: skip
def test_any_sequence_keeps_sum_floors_and_bounds(told: list[tuple]) -> None:
    """Σ rates = C, no class below its floor, C within its bounds; nobody is cut for the engine while a lower
    class is above its floor."""
    law = bench()
    for number, (kept0, late0, kept1, late1, held, demand, overdue) in enumerate(told, start=1):
        at, before = number * 3, law.rates
        law.tell(
            at,
            verdicts={P0: judged(kept0, late0, at - 1), P1: judged(kept1, late1, at - 1)},
            held_back=" ".join(held),
            demand=(demand, demand, demand),
            overdue={P0: [at - 1] * 5} if overdue else {},
        )
        assert law.limits.lowest <= sum(law.rates) <= law.limits.highest
        assert all(rate >= floor for rate, floor in zip(law.rates, law.limits.floors, strict=True))
        if sum(law.rates) < sum(before):
            if law.rates[P1] < before[P1] or law.rates[P0] < before[P0]:
                assert law.rates[P2] == law.limits.floors[P2]
            if law.rates[P0] < before[P0]:
                assert law.rates[P1] == law.limits.floors[P1]


# ── traps ────────────────────────────────────────────────────────────────────────────────────────────────


def cut_down() -> Bench:
    """To its floors."""
    law = bench()
    for second in range(5, 60, 5):
        law.tell(second, verdicts={P0: judged(0, 100, second - 1)})
    assert law.capacity == 410
    return law


def test_a_cut_heals_when_there_is_little_demand() -> None:
    """Without a sample, and with nobody held back: by 5 % of C0 every five seconds, P0 first, to C0."""
    law = cut_down()
    for second in range(60, 125):
        law.tell(second)
    assert law.tokens == [600, 350, 50]
    law.tell(200)
    assert law.capacity == 1000


def test_refused_requests_leave_no_sample() -> None:
    """While requests are held back and none is judged, C waits; after five minutes of that it tries more."""
    law = cut_down()
    quiet_at = round(law.steps[-1][0]) + 300
    for second in range(60, quiet_at):
        law.tell(second, held_back="P0 P1 P2")
    assert law.capacity == 410
    law.tell(quiet_at, held_back="P0 P1 P2")
    assert law.capacity == 460


def test_slow_requests_count_before_they_report() -> None:
    """Twenty streams that are late already are twenty broken promises."""
    law = bench()
    step = law.tell(5, overdue={P0: [1.0] * 20}, held_back="P0")
    assert step is not None
    assert step.reason == "p0_below_promise"
    assert law.tell(10, overdue={P0: [1.0] * 20}) is None, "those were sent before the change"


def test_old_samples_of_a_silent_class_do_not_hold_the_others() -> None:
    """P0 was let down and asks no more: P1, which is well, may have more again."""
    law = bench()
    law.tell(5, verdicts={P0: judged(0, 100, 4)})
    for second in range(6, 60):
        verdicts = {P0: judged(0, 100, 4), P1: judged(100, 0, second - 0.5)}
        law.tell(second, verdicts=verdicts, held_back="P1")
    assert law.capacity > 1000
