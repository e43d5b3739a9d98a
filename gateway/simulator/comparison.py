"""Trials of several configurations side by side: each figure's mean and spread over the seeds, and a table.

The spread is the standard deviation of the sample (n − 1); there is none with one seed. The same trials give
the same bytes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

from gateway.policy.clock import to_seconds
from gateway.policy.parameters import SloTargets
from gateway.policy.request import PRIORITIES, Priority
from gateway.simulator.contenders import Contender
from gateway.simulator.report import NANOSECONDS_PER_MILLISECOND, ClassReport
from gateway.simulator.trial import Trial


class Figure(NamedTuple):
    name: str
    label: str
    digits: int
    value: Callable[[Trial, Priority], float | None]


def _of_class(value: Callable[[ClassReport], float | None]) -> Callable[[Trial, Priority], float | None]:
    return lambda trial, priority: value(trial.classes[priority])


def _refused_part(of: ClassReport) -> float | None:
    return (of.offered - of.completed) / of.offered if of.offered else None


FIGURES = (
    Figure("offered", "offered", 0, _of_class(lambda c: c.offered)),
    Figure("retries", "of these retries", 0, lambda trial, priority: trial.retries[priority]),
    Figure("completed", "completed", 0, _of_class(lambda c: c.completed)),
    Figure("refused_part", "refused or failed, part", 3, _of_class(_refused_part)),
    Figure("slo_met_of_offered", "SLO met of offered", 4, _of_class(lambda c: c.slo_met_of_offered)),
    Figure("slo_met_of_admitted", "SLO met of admitted", 4, _of_class(lambda c: c.slo_met_of_admitted)),
    Figure("ttft_p50_ms", "first token P50, ms", 0, _of_class(lambda c: c.ttft_p50_ms)),
    Figure("ttft_p99_ms", "first token P99, ms", 0, _of_class(lambda c: c.ttft_p99_ms)),
    Figure("tpot_p50_ms", "per output token P50, ms", 1, _of_class(lambda c: c.tpot_p50_ms)),
    Figure("tpot_p99_ms", "per output token P99, ms", 1, _of_class(lambda c: c.tpot_p99_ms)),
    Figure("max_gap_p50_ms", "largest gap P50, ms", 0, _of_class(lambda c: c.max_gap_p50_ms)),
    Figure("max_gap_p99_ms", "largest gap P99, ms", 0, _of_class(lambda c: c.max_gap_p99_ms)),
    Figure(
        "goodput_requests_per_second",
        "goodput, requests/s",
        2,
        _of_class(lambda c: c.goodput_requests_per_second),
    ),
    Figure(
        "goodput_tokens_per_second", "goodput, tokens/s", 0, _of_class(lambda c: c.goodput_tokens_per_second)
    ),
    Figure(
        "settled_tokens_per_second",
        "settled weighted tokens/s",
        0,
        _of_class(lambda c: c.settled_tokens_per_second),
    ),
)
"""Of each class."""

ONLY_IF_ANY = ("retries", "refused_part")
"""Figures that the table leaves out where they are 0."""

IN_ALL = ("offered", "completed", "goodput_requests_per_second", "goodput_tokens_per_second")
"""Figures that can be added up over the classes."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """`values` has one for each seed, None where that run has none; mean and spread are of the others."""

    values: tuple[float | None, ...]

    @property
    def mean(self) -> float | None:
        known = self._known
        return fmean(known) if known else None

    @property
    def spread(self) -> float | None:
        known = self._known
        return stdev(known) if len(known) > 1 else None

    @property
    def _known(self) -> list[float]:
        return [value for value in self.values if value is not None]

    def shown(self, digits: int) -> str:
        if self.mean is None:
            return "-"
        spread = "" if self.spread is None else f" ± {self.spread:,.{digits}f}"
        return f"{self.mean:,.{digits}f}{spread}"


@dataclass(frozen=True, slots=True)
class Row:
    """`priority` None: of all classes together."""

    priority: Priority | None
    name: str
    label: str
    digits: int
    estimates: tuple[Estimate, ...]
    """One for each contender."""


@dataclass(frozen=True)
class Comparison:
    contenders: Sequence[Contender]
    trials: Sequence[Trial]
    """Those of each contender together, in the order of the seeds."""

    def of(self, contender: Contender) -> list[Trial]:
        return [trial for trial in self.trials if trial.title == contender.title]

    def rows(self) -> Iterator[Row]:
        groups = [self.of(contender) for contender in self.contenders]
        for p in PRIORITIES:
            for figure in FIGURES:
                yield Row(
                    p,
                    figure.name,
                    figure.label,
                    figure.digits,
                    tuple(Estimate(tuple(figure.value(t, p) for t in trials)) for trials in groups),
                )
            for outcome in self._refusals(p):
                counts = [tuple(t.classes[p].refusals.get(outcome, 0) for t in trials) for trials in groups]
                yield Row(p, outcome, outcome, 0, tuple(Estimate(each) for each in counts))
        for figure in FIGURES:
            if figure.name in IN_ALL:
                sums = [tuple(_sum(figure, trial) for trial in trials) for trials in groups]
                estimates = tuple(Estimate(each) for each in sums)
                yield Row(None, figure.name, figure.label, figure.digits, estimates)

    def _refusals(self, priority: Priority) -> list[str]:
        return sorted({name for trial in self.trials for name in trial.classes[priority].refusals})


def _sum(figure: Figure, trial: Trial) -> float:
    return sum(figure.value(trial, p) or 0 for p in PRIORITIES)


# ---------------------------------------------------------------------- the table

_LABEL_WIDTH = 28
_GUTTER = 3
_NAMES = {Priority.P0: "P0, realtime", Priority.P1: "P1, normal", Priority.P2: "P2, batch"}


def render(comparison: Comparison) -> str:
    """A block of lines for each class that was asked for, a column for each configuration. Lines of which
    nobody has the figure are left out."""
    titles = [contender.title for contender in comparison.contenders]
    rows = [row for row in _asked_for(comparison) if _says_something(row)]
    shown = [(row, [estimate.shown(row.digits) for estimate in row.estimates]) for row in rows]
    widths = [
        max(len(text) for text in (title, *(cells[column] for _, cells in shown))) + _GUTTER
        for column, title in enumerate(titles)
    ]
    lines = [_line("", titles, widths)]
    for priority in (*PRIORITIES, None):
        block = [(row, cells) for row, cells in shown if row.priority is priority]
        if block:
            lines += ["", _heading(priority, comparison.contenders)]
            lines += [_line(f"  {row.label}", cells, widths) for row, cells in block]
    return "\n".join(lines) + "\n"


def _asked_for(comparison: Comparison) -> list[Row]:
    rows = list(comparison.rows())
    there = {row.priority for row in rows if row.name == "offered" and any(e.mean for e in row.estimates)}
    return [row for row in rows if row.priority in there]


def _says_something(row: Row) -> bool:
    if row.name in ONLY_IF_ANY:
        return any(estimate.mean for estimate in row.estimates)
    return any(estimate.mean is not None for estimate in row.estimates)


def _line(label: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    told = zip(cells, widths, strict=True)
    return (f"{label:{_LABEL_WIDTH}}" + "".join(f"{cell:>{width}}" for cell, width in told)).rstrip()


def _heading(priority: Priority | None, contenders: Sequence[Contender]) -> str:
    if priority is None:
        return "all classes"
    promises = {promise(contender.parameters.classes[priority].slo) for contender in contenders}
    told = promises.pop() if len(promises) == 1 else "each by its own configuration's promise"
    return f"{_NAMES[priority]}: {told}"


def promise(slo: SloTargets | None) -> str:
    if slo is None:
        return "no promise"
    parts = {
        "first token in {:g} s": None if slo.ttft_ns is None else to_seconds(slo.ttft_ns),
        "{:g} ms per token": None if slo.tpot_ns is None else slo.tpot_ns / NANOSECONDS_PER_MILLISECOND,
        "no gap over {:g} ms": _milliseconds(slo.max_gap_ns),
    }
    return ", ".join(text.format(value) for text, value in parts.items() if value is not None) or "no promise"


def _milliseconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / NANOSECONDS_PER_MILLISECOND


def slo_of(slo: SloTargets | None) -> Mapping[str, float | None] | None:
    """In the names and units of the configuration."""
    if slo is None:
        return None
    values = {"ttft": slo.ttft_ns, "tpot": slo.tpot_ns, "max_gap": slo.max_gap_ns}
    return {f"{name}_seconds": None if ns is None else to_seconds(ns) for name, ns in values.items()}
