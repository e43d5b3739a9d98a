"""Records of requests → figures per class, and a table of them. The same records give the same bytes.

Attainment is the SLO monitor's, from arrival, over the whole run: a request kept its promise if its first
token and its time per output token did. `of offered` counts those refused as broken promises, `of admitted`
leaves them out. Percentiles are nearest-rank, over the requests that have the figure.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from gateway.policy.clock import NEVER, to_nanoseconds, to_seconds
from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import MILLITOKENS, PolicyParameters, SloTargets, SloWindow
from gateway.policy.request import PRIORITIES, Priority
from gateway.policy.slo_monitor import SloMonitor

NANOSECONDS_PER_MILLISECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class ClassReport:
    """Times are milliseconds; None where nobody has the figure."""

    offered: int
    completed: int
    slo_met_of_offered: float | None
    slo_met_of_admitted: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    max_gap_p50_ms: float | None
    max_gap_p99_ms: float | None
    max_gap_ms: float | None
    goodput_requests_per_second: float
    goodput_tokens_per_second: float
    """Of the requests that were served as promised and ended while the run lasted; tokens are unweighted, in
    and out."""
    settled_tokens_per_second: float
    """Weighted tokens of the requests that ended while the run lasted."""
    own_share_tokens_per_second: float
    refusals: Mapping[str, int]
    """Endings other than completion, by outcome."""


class LongDispatch(NamedTuple):
    at_seconds: float
    """When it was sent to an engine."""
    priority: Priority
    input_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    title: str
    seconds: float
    classes: Mapping[Priority, ClassReport]
    long_dispatches: tuple[LongDispatch, ...]
    """Prompts over `long_prompt_tokens` below P0, as they were sent, while requests still arrived."""


def make_report(
    title: str, records: Sequence[RequestEnded], parameters: PolicyParameters, seconds: float
) -> Report:
    """`records` are all that arrived in `seconds` from time 0 on."""
    capacity = sum(upstream.tokens_per_second for upstream in parameters.upstreams)
    monitor = SloMonitor(parameters.classes, SloWindow(max(len(records), 1), NEVER))
    by_class: dict[Priority, list[RequestEnded]] = {p: [] for p in PRIORITIES}
    for record in records:
        monitor.record(record)
        by_class[record.priority].append(record)
    classes = {
        p: _class_report(
            own, monitor, p, parameters.classes[p].slo, parameters.classes[p].share * capacity, seconds
        )
        for p, own in by_class.items()
    }
    return Report(title, seconds, classes, _long_dispatches(records, parameters, seconds))


def served_as_promised(record: RequestEnded, slo: SloTargets | None) -> bool:
    """Answered, and within each promise that is given and could be measured."""
    if record.outcome is not Outcome.COMPLETED or slo is None:
        return record.outcome is Outcome.COMPLETED
    pairs = (
        (record.ttft_ns, slo.ttft_ns),
        (record.tpot_ns, slo.tpot_ns),
        (record.max_gap_ns, slo.max_gap_ns),
    )
    return all(measured is None or target is None or measured <= target for measured, target in pairs)


def _class_report(
    records: Sequence[RequestEnded],
    monitor: SloMonitor,
    priority: Priority,
    slo: SloTargets | None,
    own_share: float,
    seconds: float,
) -> ClassReport:
    end = to_nanoseconds(seconds)
    refusals = Counter(r.outcome.value for r in records if r.outcome is not Outcome.COMPLETED)
    ttft = _milliseconds(records, lambda r: r.ttft_ns)
    tpot = _milliseconds(records, lambda r: r.tpot_ns)
    gaps = _milliseconds(records, lambda r: r.max_gap_ns)
    settled = sum(r.charged for r in records if r.ended_at <= end)
    good = [r.usage for r in records if r.ended_at <= end and served_as_promised(r, slo)]
    good_tokens = sum(usage.input_tokens + usage.output_tokens for usage in good if usage is not None)
    return ClassReport(
        offered=len(records),
        completed=len(records) - sum(refusals.values()),
        slo_met_of_offered=monitor.attainment(priority, "all", "arrival", "offered", end),
        slo_met_of_admitted=monitor.attainment(priority, "all", "arrival", "admitted", end),
        ttft_p50_ms=percentile(ttft, 0.50),
        ttft_p99_ms=percentile(ttft, 0.99),
        tpot_p50_ms=percentile(tpot, 0.50),
        tpot_p99_ms=percentile(tpot, 0.99),
        max_gap_p50_ms=percentile(gaps, 0.50),
        max_gap_p99_ms=percentile(gaps, 0.99),
        max_gap_ms=gaps[-1] if gaps else None,
        goodput_requests_per_second=len(good) / seconds,
        goodput_tokens_per_second=good_tokens / seconds,
        settled_tokens_per_second=settled / MILLITOKENS / seconds,
        own_share_tokens_per_second=own_share,
        refusals=dict(sorted(refusals.items())),
    )


def _milliseconds(
    records: Iterable[RequestEnded], figure: Callable[[RequestEnded], int | None]
) -> list[float]:
    """In ascending order."""
    return sorted(ns / NANOSECONDS_PER_MILLISECOND for r in records if (ns := figure(r)) is not None)


def percentile(ascending: Sequence[float], part: float) -> float | None:
    """The smallest value that at least this part of the values does not exceed."""
    if not ascending:
        return None
    return ascending[max(ceil(part * len(ascending)) - 1, 0)]


def jain_index(amounts: Sequence[float]) -> float:
    """Jain's index of fairness, (Σx)² / (n Σx²): 1 when all have the same, 1/n when one has all.

    Nobody has anything: that is equal too. (Jain, Chiu and Hawe, DEC-TR-301, 1984)."""
    squares = sum(amount * amount for amount in amounts)
    return sum(amounts) ** 2 / (len(amounts) * squares) if squares else 1.0


def _long_dispatches(
    records: Iterable[RequestEnded], parameters: PolicyParameters, seconds: float
) -> tuple[LongDispatch, ...]:
    limit = parameters.scheduling.long_prompt_tokens
    sent = (
        LongDispatch(to_seconds(r.arrived_at + r.queue_wait_ns), r.priority, r.usage.input_tokens)
        for r in records
        if r.priority is not Priority.P0 and r.queue_wait_ns is not None
        if r.usage is not None and r.usage.input_tokens > limit
    )
    return tuple(sorted(dispatch for dispatch in sent if dispatch.at_seconds < seconds))


# ---------------------------------------------------------------------- the table

_LABEL_WIDTH = 30
_CELL_WIDTH = 11


def render(reports: Sequence[Report]) -> str:
    """Runs side by side, a column for each class of each."""
    columns = [(report, priority) for report in reports for priority in PRIORITIES]
    wide = _CELL_WIDTH * len(PRIORITIES)
    titles = "".join(f"{report.title[: wide - 3]:>{wide}}" for report in reports)
    lines = [f"{'':{_LABEL_WIDTH}}{titles}".rstrip(), _line("", [p.name for _, p in columns])]
    for label, show in _ROWS:
        lines.append(_line(label, [show(report.classes[p]) for report, p in columns]))
    outcomes = sorted({name for report, p in columns for name in report.classes[p].refusals})
    lines += [_line(name, [str(r.classes[p].refusals.get(name, 0)) for r, p in columns]) for name in outcomes]
    for report in reports:
        lines += ["", _told_of_long_prompts(report)]
    return "\n".join(lines) + "\n"


def _line(label: str, cells: Sequence[str]) -> str:
    return (f"{label:{_LABEL_WIDTH}}" + "".join(f"{cell:>{_CELL_WIDTH}}" for cell in cells)).rstrip()


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


_ROWS: tuple[tuple[str, Callable[[ClassReport], str]], ...] = (
    ("offered", lambda c: str(c.offered)),
    ("completed", lambda c: str(c.completed)),
    ("SLO met of offered", lambda c: _shown(c.slo_met_of_offered, 4)),
    ("SLO met of admitted", lambda c: _shown(c.slo_met_of_admitted, 4)),
    ("first token P50, ms", lambda c: _shown(c.ttft_p50_ms, 0)),
    ("first token P99, ms", lambda c: _shown(c.ttft_p99_ms, 0)),
    ("per output token P50, ms", lambda c: _shown(c.tpot_p50_ms, 1)),
    ("per output token P99, ms", lambda c: _shown(c.tpot_p99_ms, 1)),
    ("largest gap P99, ms", lambda c: _shown(c.max_gap_p99_ms, 0)),
    ("largest gap, ms", lambda c: _shown(c.max_gap_ms, 0)),
    ("settled tokens/s", lambda c: _shown(c.settled_tokens_per_second, 0)),
    ("own share, tokens/s", lambda c: _shown(c.own_share_tokens_per_second, 0)),
)


def _told_of_long_prompts(report: Report) -> str:
    times = [dispatch.at_seconds for dispatch in report.long_dispatches]
    told = f"{report.title}: {len(times)} long prompts sent to the engine in {report.seconds:g} s"
    if len(times) > 1:
        apart = [later - earlier for earlier, later in pairwise(times)]
        told += f",\n    at least {min(apart):.1f} s and on average {sum(apart) / len(apart):.1f} s apart"
    return told
