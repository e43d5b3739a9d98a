"""How well each class is served, for `/admin/slo`: promises, latencies, endings."""

from collections import Counter
from dataclasses import dataclass

from gateway.policy.admission import Admission
from gateway.policy.clock import to_seconds
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import SloTargets
from gateway.policy.request import PRIORITIES, Priority
from gateway.policy.slo_monitor import SLOS, VIEWS, WHOLES
from gateway.telemetry.recent import Latencies, Recent, quantile

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Kept:
    """Of the promises that requests in the window were due: how many were kept. `ratio` is null where there
    was none."""

    ratio: float | None
    kept: int
    counted: int


@dataclass(frozen=True, slots=True)
class Targets:
    ttft_seconds: float | None
    tpot_seconds: float | None
    max_gap_seconds: float | None


@dataclass(frozen=True, slots=True)
class ClassPromise:
    """`attainment[view][of][slo]`, views from arrival and from dispatch, of those admitted and of those
    offered. `quantiles_seconds` are of streams that ended in the window, from arrival. `standing` sums up:
    kept | at_risk (below the target) | broken (below `tighten_below`) | no_traffic | no_promise."""

    standing: str
    targets: Targets | None
    attainment: dict[str, dict[str, dict[str, Kept]]]
    streams: int
    quantiles_seconds: dict[str, dict[str, float | None]]
    endings_last_minute: dict[str, int]
    endings_total: dict[str, int]


@dataclass(frozen=True, slots=True)
class Promises:
    target: float
    tighten_below: float
    window_seconds: float
    window_requests: int
    classes: dict[str, ClassPromise]


def promises(admission: Admission, recent: Recent, now: int) -> Promises:
    window, control = admission.parameters.slo, admission.parameters.control
    return Promises(
        control.target,
        control.tighten_below,
        to_seconds(window.window_ns),
        window.window_requests,
        {p.name: _promise(admission, recent, p, now) for p in PRIORITIES},
    )


def _promise(admission: Admission, recent: Recent, priority: Priority, now: int) -> ClassPromise:
    parameters = admission.parameters
    targets = parameters.classes[priority].slo
    attainment = {
        view: {of: {slo: _kept(admission, priority, slo, view, of, now) for slo in SLOS} for of in WHOLES}
        for view in VIEWS
    }
    latencies = recent.latencies(priority, now - parameters.slo.window_ns)
    headline = attainment["arrival"]["admitted"]["all"].ratio
    control = parameters.control
    return ClassPromise(
        standing=_standing(targets, headline, control.target, control.tighten_below),
        targets=None if targets is None else _targets(targets),
        attainment=attainment,
        streams=len(latencies),
        quantiles_seconds=_quantiles(latencies),
        endings_last_minute=_counts(recent.last_minute(priority)),
        endings_total=_counts(recent.totals[priority]),
    )


def _kept(admission: Admission, priority: Priority, slo: str, view: str, of: str, now: int) -> Kept:
    kept, counted = admission.slo_monitor.counts(priority, slo, view, of, now)
    return Kept(kept / counted if counted else None, kept, counted)


def _standing(targets: SloTargets | None, attained: float | None, target: float, tighten_below: float) -> str:
    if targets is None or targets == SloTargets():
        return "no_promise"
    if attained is None:
        return "no_traffic"
    return "kept" if attained >= target else "at_risk" if attained >= tighten_below else "broken"


def _targets(targets: SloTargets) -> Targets:
    return Targets(_seconds(targets.ttft_ns), _seconds(targets.tpot_ns), _seconds(targets.max_gap_ns))


def _quantiles(latencies: list[Latencies]) -> dict[str, dict[str, float | None]]:
    measured = {
        "ttft": [each.ttft for each in latencies if each.ttft is not None],
        "tpot": [each.tpot for each in latencies if each.tpot is not None],
        "max_gap": [each.max_gap for each in latencies if each.max_gap is not None],
    }
    for values in measured.values():
        values.sort()
    return {
        name: {label: _seconds(quantile(values, part)) for label, part in QUANTILES.items()}
        for name, values in measured.items()
    }


def _counts(counts: Counter[Outcome]) -> dict[str, int]:
    return {outcome.value: counts[outcome] for outcome in Outcome if counts[outcome]}


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else to_seconds(nanoseconds)
