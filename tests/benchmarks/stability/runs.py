"""One run of one scenario under one control, boiled down to figures."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

from gateway.policy.class_rates import RateLimits, Rates, rate_limits
from gateway.policy.clock import NANOSECONDS_PER_SECOND, to_nanoseconds
from gateway.policy.control_signals import Readings, Verdict
from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import MILLITOKENS, PolicyParameters
from gateway.policy.rate_controller import TICK_NS, ControlLaw, Step
from gateway.policy.request import PRIORITIES, Priority
from gateway.policy.severity_law import Gains, SeverityLaw
from gateway.simulator.experiment import Experiment, Run
from gateway.simulator.history import RateSteps
from gateway.simulator.report import make_report
from tests.benchmarks.stability.scenarios import (
    Control,
    Scenario,
    parameters_of,
    preset_of,
    workload_of,
)

MEAN_SECONDS = 10
Figures = dict[str, float | None]


@dataclass(frozen=True)
class Case:
    scenario: Scenario
    control: Control
    seed: int


def run_case(case: Case, traces: Path | None) -> Figures:
    scenario, control = case.scenario, case.control
    parameters, preset = parameters_of(control), preset_of(scenario)
    experiment = Experiment(
        workload_of(scenario.load, traces, case.seed),
        parameters,
        {"gpu0": preset},
        seed=case.seed,
        seconds=scenario.seconds,
        gateway=control.law is not None,
    )
    preset.clocks.append(experiment.clock)
    if experiment.admission is not None:
        loop = experiment.admission.pools[0].control
        if control.gain != 1:
            loop.law = SeverityLaw(parameters, Gains().times(control.gain))
        if control.lag_seconds:
            loop.law = LateLaw(loop.law, control.lag_seconds)
    run = experiment.run()
    counted = [r for r in run.records if r.arrived_at >= to_nanoseconds(scenario.from_seconds)]
    return {**_served(counted, parameters, scenario), **_control(run, parameters, scenario)}


class LateLaw:
    """A law that hears of the engines some seconds late; what its own gateway knows it knows at once."""

    def __init__(self, law: ControlLaw, seconds: int) -> None:
        self._law = law
        self._late_ns = seconds * NANOSECONDS_PER_SECOND
        self._heard: deque[Readings] = deque(maxlen=seconds * NANOSECONDS_PER_SECOND // TICK_NS + 1)

    @property
    def name(self) -> str:
        return self._law.name

    @property
    def severity(self) -> float | None:
        return self._law.severity

    def decide(self, readings: Readings, rates: Rates, limits: RateLimits) -> Step | None:
        self._heard.append(readings)
        then = self._heard[0]
        old = readings.at - self._late_ns
        verdicts: Sequence[Sequence[Verdict]] = [
            [verdict for verdict in own if verdict.ended_at <= old] for own in readings.verdicts
        ]
        late = then._replace(
            at=readings.at, held_back=readings.held_back, demand=readings.demand, verdicts=verdicts
        )
        return self._law.decide(late, rates, limits)


# ---------------------------------------------------------------------- what came of it


def _served(records: Sequence[RequestEnded], parameters: PolicyParameters, scenario: Scenario) -> Figures:
    seconds = scenario.seconds - scenario.from_seconds
    classes = make_report("", records, parameters, scenario.seconds).classes
    figures: Figures = {}
    for p in (Priority.P0, Priority.P1):
        figures[f"{p.name} of offered"] = classes[p].slo_met_of_offered
        figures[f"{p.name} of admitted"] = classes[p].slo_met_of_admitted
    batch = classes[Priority.P2]
    figures["P2 completed"] = batch.completed / max(batch.offered, 1)
    good = sum(record.charged for record in records if is_kept(record, parameters))
    figures["goodput"] = good / MILLITOKENS / seconds
    return figures


def is_kept(record: RequestEnded, parameters: PolicyParameters) -> bool:
    """Completed, and as its class was promised."""
    slo = parameters.classes[record.priority].slo
    if record.outcome is not Outcome.COMPLETED or slo is None:
        return record.outcome is Outcome.COMPLETED
    in_time = slo.ttft_ns is None or (record.ttft_ns is not None and record.ttft_ns <= slo.ttft_ns)
    return in_time and (slo.tpot_ns is None or record.tpot_ns is None or record.tpot_ns <= slo.tpot_ns)


def _control(run: Run, parameters: PolicyParameters, scenario: Scenario) -> Figures:
    first, last = scenario.from_seconds, scenario.seconds
    sent = [0] * int(last)
    for record in run.records:
        if record.queue_wait_ns is not None:
            second = (record.arrived_at + record.queue_wait_ns) // NANOSECONDS_PER_SECOND
            if second < last:
                sent[second] += 1
    figures: Figures = {"admitted CV": _variation(_means(sent, first, last))}
    if not run.initial_rates:
        return figures
    steps = RateSteps(run.initial_rates, run.rate_changes)
    capacity = [
        sum(steps.at(second * NANOSECONDS_PER_SECOND)) / MILLITOKENS for second in range(int(last) + 1)
    ]
    means = _means(capacity, first, last)
    floors = rate_limits(parameters, sum(run.initial_rates)).floors
    granted = [run.initial_rates, *(change.new_rates for change in run.rate_changes)]
    figures["C"] = fmean(means)
    figures["C CV"] = _variation(means)
    figures["C off, worst"] = max((_worst(capacity, *span) for span in scenario.settled), default=None)
    figures["C per minute"] = _slope(means)
    figures["changes/min"] = 60 * len(run.rate_changes) / last
    figures["above floor"] = (
        min(min(rates[p] - floors[p] for p in PRIORITIES) for rates in granted) / MILLITOKENS
    )
    return figures


def _means(values: Sequence[float], first: float, last: float) -> list[float]:
    """Of ten seconds each."""
    starts = range(int(first), int(last) - MEAN_SECONDS + 1, MEAN_SECONDS)
    return [fmean(values[start : start + MEAN_SECONDS]) for start in starts]


def _variation(means: Sequence[float]) -> float | None:
    mean = fmean(means)
    return pstdev(means) / mean if mean else None


def _worst(capacity: Sequence[float], first: float, last: float) -> float:
    """The largest distance of a mean over ten seconds from the final value, as a part of that: the mean of
    the last minute."""
    final = fmean(capacity[int(last) - 60 : int(last)])
    sliding = (
        fmean(capacity[start : start + MEAN_SECONDS])
        for start in range(int(first), int(last) - MEAN_SECONDS + 1)
    )
    return max(abs(mean - final) / final for mean in sliding)


def _slope(means: Sequence[float]) -> float:
    """The trend, as a part of the mean per minute: least squares."""
    n, mean = len(means), fmean(means)
    middle = (n - 1) / 2
    squares = sum((i - middle) ** 2 for i in range(n))
    slope = sum((i - middle) * (value - mean) for i, value in enumerate(means)) / squares if squares else 0.0
    return slope / mean * 60 / MEAN_SECONDS
