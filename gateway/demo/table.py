"""What the demo shows: figures of one half while it runs, and of both halves side by side at the end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from gateway.policy.clock import to_seconds
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import PRIORITIES, Priority
from gateway.simulator.report import NANOSECONDS_PER_MILLISECOND, ClassReport, Report
from gateway.simulator.workload import Caller


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _part(value: float | None) -> str:
    """Never 100 % of anything that was not all of it."""
    return "-" if value is None else f"{int(value * 1000) / 10:g} %"


def _refused(report: ClassReport) -> str:
    return str(report.offered - report.completed)


_GAP = "largest gap, ms"
_FIGURES: tuple[tuple[str, Callable[[ClassReport], str]], ...] = (
    ("requests ended", lambda c: str(c.offered)),
    ("refused or failed", _refused),
    ("TTFT P50, ms", lambda c: _number(c.ttft_p50_ms)),
    ("TTFT P99, ms", lambda c: _number(c.ttft_p99_ms)),
    ("TPOT P50, ms", lambda c: _number(c.tpot_p50_ms, 1)),
    ("TPOT P99, ms", lambda c: _number(c.tpot_p99_ms, 1)),
    (_GAP, lambda c: _number(c.max_gap_ms)),
    ("SLO kept", lambda c: _part(c.slo_met_of_offered)),
)


@dataclass(frozen=True, slots=True)
class Half:
    """What one half of the demo came to."""

    report: Report
    taken: Mapping[Priority, int]
    """Requests that the engine has begun or queued."""
    given_up: Mapping[str, int]
    """Requests of batch clients that nobody waited for when the time was over, by class."""


class GapWatch:
    """The longest wait so far between two pieces of one answer, by class, also of answers that go on."""

    def __init__(self) -> None:
        self.largest_ms: dict[Priority, float] = {}
        self._last: dict[int, int] = {}

    def __call__(self, caller: Caller, number: int, now: int) -> None:
        last = self._last.get(number)
        self._last[number] = now
        if last is not None:
            gap_ms = (now - last) / NANOSECONDS_PER_MILLISECOND
            self.largest_ms[caller.priority] = max(gap_ms, self.largest_ms.get(caller.priority, 0.0))


def live_table(
    title: str, report: Report, open_requests: Mapping[Priority, int], gaps_ms: Mapping[Priority, float]
) -> Table:
    """The classes of one half, one line each."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for name in ("", "under way", *(name for name, _ in _FIGURES)):
        table.add_column(name, justify="right")
    for priority in PRIORITIES:
        figures = report.classes[priority]
        shown = {name: show(figures) for name, show in _FIGURES}
        shown[_GAP] = _number(gaps_ms.get(priority))
        table.add_row(priority.name, str(open_requests.get(priority, 0)), *shown.values())
    return table


def live_line(
    title: str, report: Report, open_requests: Mapping[Priority, int], gaps_ms: Mapping[Priority, float]
) -> str:
    """The same in short, where there is no terminal to draw on."""
    told = []
    for priority in PRIORITIES:
        figures = report.classes[priority]
        told.append(
            f"{priority.name} {open_requests.get(priority, 0)} under way, {figures.offered} ended, "
            f"largest gap {_number(gaps_ms.get(priority))} ms, SLO kept {_part(figures.slo_met_of_offered)}"
        )
    return f"{title}: {'; '.join(told)}"


def summary_table(without: Half, with_control: Half) -> Table:
    """Each class without control beside the same class with it."""
    table = Table(box=box.SIMPLE)
    table.add_column("")
    for priority in PRIORITIES:
        table.add_column(f"{priority.name}\nwithout", justify="right")
        table.add_column("\nwith", justify="right")
    columns = [(half, priority) for priority in PRIORITIES for half in (without, with_control)]
    for name, show in _FIGURES:
        table.add_row(name, *(show(half.report.classes[priority]) for half, priority in columns))
    table.add_row("given up at end", *(str(half.given_up.get(p.name, 0)) for half, p in columns))
    return table


def closing_words(without: Half, with_control: Half, parameters: PolicyParameters) -> list[str]:
    """What the table says, in sentences, whichever way it turned out."""
    words = [
        _told_of_class(priority, without.report, with_control.report, parameters)
        for priority in PRIORITIES
        if parameters.classes[priority].slo is not None
    ]
    words.append(
        f"Long prompts (P2) that the engine took: {without.taken.get(Priority.P2, 0)} without, "
        f"{with_control.taken.get(Priority.P2, 0)} with control. A gateway cannot shorten the stall that one "
        "causes, only say how often there is one."
    )
    refused = _endings(with_control.report)
    if refused:
        words.append(
            f"With control, not served: {refused}. A refusal comes at once and says when to come back."
        )
    return words


def _told_of_class(
    priority: Priority, without: Report, with_control: Report, parameters: PolicyParameters
) -> str:
    slo = parameters.classes[priority].slo
    assert slo is not None
    promises = []
    if slo.ttft_ns is not None:
        promises.append(f"first token within {to_seconds(slo.ttft_ns):g} s")
    if slo.tpot_ns is not None:
        promises.append(f"{to_seconds(slo.tpot_ns) * 1000:g} ms per token")
    before = without.classes[priority].slo_met_of_offered
    after = with_control.classes[priority].slo_met_of_offered
    told = (
        f"{priority.name} ({', '.join(promises)}): kept for {_part(before)} of its requests without, "
        f"{_part(after)} with control."
    )
    if before is not None and after is not None and after <= before and after < 1:
        told += " Control did not help it here."
    return told


def _endings(report: Report) -> str:
    counts: Sequence[str] = [
        f"{count} {priority.name} ({outcome})"
        for priority in PRIORITIES
        for outcome, count in report.classes[priority].refusals.items()
    ]
    return ", ".join(counts)
