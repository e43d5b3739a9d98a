"""What was promised, what was measured, and whether that is enough: a table on the terminal and in files."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from tests.benchmarks.proxy_cost.machine import Machine, load_average
from tests.benchmarks.proxy_cost.report import markdown_table

HEADINGS = ("figure", "goal", "measured", "verdict")


@dataclass(frozen=True)
class Verdict:
    figure: str
    goal: str
    """Empty: it is told for what it is worth."""
    measured: str
    met: bool | None = None

    @property
    def row(self) -> tuple[str, ...]:
        verdict = "" if self.met is None else "ok" if self.met else "not met"
        return self.figure, self.goal, self.measured, verdict


def at_most(figure: str, limit: float, measured: float, form: str = "{:.1f}", more: str = "") -> Verdict:
    told = form.format(measured) + (f" ({more})" if more else "")
    return Verdict(figure, "at most " + form.format(limit), told, measured <= limit)


def at_least(figure: str, limit: float, measured: float, form: str = "{:.1f}", more: str = "") -> Verdict:
    told = form.format(measured) + (f" ({more})" if more else "")
    return Verdict(figure, "at least " + form.format(limit), told, measured >= limit)


@dataclass
class Result:
    """Sections in the order in which they were measured."""

    arguments: str
    how: str
    machine: Machine = field(default_factory=Machine.this_one)
    load_before: float = field(default_factory=load_average)
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    sections: list[tuple[str, Sequence[Verdict]]] = field(default_factory=list)

    @property
    def met(self) -> bool:
        return all(verdict.met is not False for _, verdicts in self.sections for verdict in verdicts)

    def as_markdown(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        command = f'make bench-fleet ARGS="{self.arguments}"' if self.arguments else "make bench-fleet"
        yield from ("# What several gateways with one budget do", "")
        yield from (f"`{command}`, {self.date}. {self.machine}.", "")
        yield from (f"Load average before: {self.load_before:g}.", "")
        for title, verdicts in self.sections:
            yield from (f"## {title}", "", *markdown_table(HEADINGS, [v.row for v in verdicts]), "")
        yield from ("## How", "", self.how)

    def as_json(self) -> str:
        members = asdict(self)
        members["sections"] = [
            {"title": title, "verdicts": [asdict(verdict) for verdict in verdicts]}
            for title, verdicts in self.sections
        ]
        return json.dumps(members, indent=1, ensure_ascii=False) + "\n"


def say(line: str) -> None:
    """Progress, beside the result."""
    print(f"{datetime.now(UTC):%H:%M:%S} {line}", file=sys.stderr, flush=True)
