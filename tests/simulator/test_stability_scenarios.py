"""The stability suite's own parts: its loads, its late and hasty laws, its figures."""

from dataclasses import replace
from random import Random

import pytest

from gateway.policy.control_signals import Verdict
from gateway.policy.severity_law import SeverityLaw
from gateway.simulator.workload import CHAT_LENGTHS
from tests.benchmarks.stability import runs
from tests.benchmarks.stability.report import lines_of, spread, targets
from tests.benchmarks.stability.runs import Case, LateLaw, run_case
from tests.benchmarks.stability.scenarios import (
    SEVERITY,
    STATIC,
    Load,
    Scenario,
    Slowdown,
    SteppedPoisson,
    scenarios,
    steady,
)
from tests.support.control import Bench, parameters
from tests.support.policy_settings import P0, nanoseconds

SHORT = Scenario("short", 40, steady(2), (STATIC, SEVERITY), settled=((20, 40),), from_seconds=10)


def test_a_load_changes_when_it_is_told_to() -> None:
    """So many requests a second in each step."""
    stream = SteppedPoisson(Load(((0, 1), (100, 3), (200, 0.5))), CHAT_LENGTHS)
    times = []
    for arrival in stream.arrivals(Random(1)):
        if arrival.at > nanoseconds(300):
            break
        times.append(arrival.at / 1e9)
    assert times == sorted(times)
    counts = [sum(start <= at < start + 100 for at in times) for start in (0, 100, 200)]
    assert counts == [pytest.approx(600, rel=0.1), pytest.approx(1800, rel=0.1), pytest.approx(300, rel=0.2)]


def test_a_late_law_hears_of_the_engine_late() -> None:
    """By so many ticks; of its own gateway at once."""
    made = parameters()
    law = Bench(LateLaw(SeverityLaw(made), 3), made)
    for second in range(1, 4):
        law.tell(second, gap_ms=30)
    for second in range(4, 8):
        law.tell(second, gap_ms=100)
    assert [at for at, _ in law.steps] == [7]


def test_figures_of_means_over_ten_seconds() -> None:
    """How far C strays, how much it varies, where it drifts."""
    flat, climbing = [100.0] * 120, [100.0 + second for second in range(120)]
    assert runs._worst(flat, 0, 120) == 0
    assert runs._worst(climbing, 60, 120) == pytest.approx(25 / 189.5, abs=0.01)
    means = runs._means(climbing, 0, 120)
    assert (len(means), means[0]) == (12, 104.5)
    assert runs._slope(means) == pytest.approx(60 / 159.5)
    assert runs._variation([1, 1, 1]) == 0


def test_a_slower_engine_serves_less_well() -> None:
    """For as long as it is slower."""
    whole = run_case(Case(SHORT, STATIC, 1), None)
    slow = run_case(Case(replace(SHORT, slowdown=Slowdown(3, 0, 40)), STATIC, 1), None)
    later = run_case(Case(replace(SHORT, slowdown=Slowdown(3, 1000, 1040)), STATIC, 1), None)
    assert later == whole
    assert (slow["P0 of admitted"] or 0) < 0.5 < (whole["P0 of admitted"] or 0)


def test_a_report_has_a_line_for_each_control() -> None:
    """With mean and spread, and the figures that are to be reached."""
    results = {
        (SHORT.name, control.title): [run_case(Case(SHORT, control, seed), None) for seed in (1, 2)]
        for control in SHORT.controls
    }
    title, heading, *rows = lines_of(SHORT, results)
    assert title.startswith("short")
    assert "P0 of offered" in heading
    assert [row.split()[0] for row in rows] == ["static", "severity"]
    assert all("±" in row for row in rows)
    assert spread([{"a": 1.0}, {"a": None}], "a", "{:.1f}".format) == "1.0"
    assert len(list(targets(results))) == 9


def test_the_scenarios_are_all_there() -> None:
    """With recorded traffic four more; no two have one name, and no row of one has the same title twice."""
    chosen = list(scenarios(with_traces=True))
    assert len(chosen) - len(list(scenarios(with_traces=False))) == 4
    assert len({scenario.name for scenario in chosen}) == len(chosen)
    for scenario in chosen:
        assert len({control.title for control in scenario.controls}) == len(scenario.controls)


def test_verdicts_that_are_not_there_yet_are_not_heard() -> None:
    """Of a law that is late."""
    heard = []

    class Listening(SeverityLaw):
        def decide(self, readings, rates, limits):  # type: ignore[no-untyped-def]
            heard.append(len(readings.verdicts[P0]))

    made = parameters()
    law = Bench(LateLaw(Listening(made), 2), made)
    for second in range(1, 5):
        law.tell(second, verdicts={P0: [Verdict(0, nanoseconds(1.5), True)]})
    assert heard == [0, 0, 0, 1]
