"""A run over time: rates from events, attainment and work from records."""

from dataclasses import replace

import pytest

from gateway.policy.events import RatesChanged
from gateway.policy.outcome import Outcome
from gateway.policy.request import PRIORITIES, Priority
from gateway.simulator.experiment import Experiment, Run
from gateway.simulator.history import RateSteps, history, step_seconds
from gateway.simulator.workload import CHAT_LENGTHS, Caller, PoissonStream, Workload
from tests.simulator.test_experiment import DEFAULTS, SEED_32K
from tests.simulator.test_report import SECOND, completed, refused

P0, P1, P2 = Priority


def change(
    at_seconds: float, old: tuple[int, ...], new: tuple[int, ...], applied: bool = True
) -> RatesChanged:
    at = round(at_seconds * SECOND)
    return RatesChanged(at, "severity", "gap", "down", old, new, {"gap": 1.5}, applied=applied)


def test_rates_are_those_of_the_last_change() -> None:
    """From its very instant on."""
    steps = RateSteps((60, 35, 5), [change(1, (60, 35, 5), (60, 30, 1)), change(3, (60, 30, 1), (60, 35, 5))])
    assert steps.at(0) == steps.at(SECOND - 1) == (60, 35, 5)
    assert steps.at(SECOND) == steps.at(3 * SECOND - 1) == (60, 30, 1)
    assert steps.at(10 * SECOND) == (60, 35, 5)


def test_changes_of_several_pools_add_up() -> None:
    """Each event tells the rates of its own pool; what is shown is all of them together."""
    steps = RateSteps(
        (120, 70, 10), [change(1, (60, 35, 5), (50, 30, 4)), change(2, (60, 35, 5), (60, 35, 0))]
    )
    assert steps.at(5 * SECOND) == (110, 65, 4)


def test_advice_that_was_not_taken_changes_nothing() -> None:
    steps = RateSteps((60, 35, 5), [change(1, (60, 35, 5), (50, 30, 4), applied=False)])
    assert steps.at(5 * SECOND) == (60, 35, 5)


def test_attainment_and_work_are_told_as_they_were() -> None:
    """P0 is in time at first, then late; a refusal is one of the offered ones."""
    records = [
        completed(P0, 0, first=100, per_token=20),
        completed(P0, 14 * SECOND, first=1100, per_token=20),
        refused(P0, Outcome.REJECTED_RATE)._replace(arrived_at=15 * SECOND, ended_at=15 * SECOND + 1),
    ]
    run = Run(20.0, records, 0, None, (60_000, 35_000, 5000), [change(4, (60, 35, 5), (60, 35, 1000))])
    moments = {(m.second, m.priority): m for m in history(run, DEFAULTS)}
    assert len(moments) == 20 * len(PRIORITIES)
    assert moments[1, P0].slo_met_of_offered == 1.0
    assert moments[1, P0].settled_tokens_per_second == pytest.approx(144)
    assert moments[2, P0].settled_tokens_per_second == 0
    assert moments[12, P0].slo_met_of_offered is None
    assert (moments[16, P0].slo_met_of_offered, moments[16, P0].slo_met_of_admitted) == (0.0, 0.0)
    assert [moments[second, P0].arrived_per_second for second in (1, 2, 15, 16)] == [1, 0, 1, 1]
    assert [moments[second, P2].bucket_rate for second in (3, 4)] == pytest.approx([5, 5.995])


def test_long_runs_have_no_more_points_than_a_picture() -> None:
    assert (step_seconds(60), step_seconds(600), step_seconds(3600)) == (1, 1, 6)


def test_the_events_of_a_law_become_the_rates() -> None:
    """With a law that acts, what is read off the events is what the buckets have at the end."""
    parameters = replace(DEFAULTS, law="severity")
    stream = PoissonStream(Caller(P1, "t"), 9.0, CHAT_LENGTHS)
    run = Experiment(Workload(open=(stream,)), parameters, {"gpu0": SEED_32K}, seed=1, seconds=60).run()
    assert run.admission is not None
    (pool,) = run.admission.pools
    assert run.rate_changes
    steps = RateSteps(run.initial_rates, run.rate_changes)
    assert steps.at(10**18) == tuple(pool.buckets.rates)


def test_without_a_gateway_there_are_no_rates() -> None:
    stream = PoissonStream(Caller(P1, "t"), 2.0, CHAT_LENGTHS)
    workload = Workload(open=(stream,))
    run = Experiment(workload, DEFAULTS, {"gpu0": SEED_32K}, seed=1, seconds=5, gateway=False).run()
    assert {moment.bucket_rate for moment in history(run, DEFAULTS)} == {None}
