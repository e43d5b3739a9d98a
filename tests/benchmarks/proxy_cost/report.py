"""The result as Markdown, as JSON, and as tables on a terminal: the same rows."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from tests.benchmarks.proxy_cost.figures import GOALS, Goal, Rounds, Spread, spread
from tests.benchmarks.proxy_cost.machine import Machine

COLUMNS: Mapping[str, tuple[str, int]] = {
    "plain_cpu_us": ("CPU per plain request, µs", 0),
    "turns_cpu_us": ("CPU per chunk, an engine's turns, µs", 1),
    "clocks_cpu_us": ("CPU per chunk, own clocks, µs", 1),
    "plain_per_second": ("plain requests/s", 0),
    "added_p50_ms": ("added latency P50, ms", 2),
    "added_p99_ms": ("added latency P99, ms", 2),
    "gap_p99_ms": ("gap P99, ms", 2),
    "added_gap_p99_ms": ("added gap P99, ms", 2),
    "chunks_per_read": ("chunks per read", 3),
}
"""Figure → heading and decimals."""

HOW = """\
* A chat completion with a prompt of some 900 bytes; an answer of 4 words, or a stream of 64 chunks. The
  engine is a stand-in that costs little. Engine and load have one core, the proxy under test another.
* CPU is user and system time of all processes and threads of the proxy, from `/proc`, over a number of
  requests that were all answered in full: plain ones over 64 connections, and 128 streams at once, both by
  wrk. The engine writes one chunk to every stream each 20 ms, as the iterations of a real one do, so each
  chunk is a read of its own. (Unpaced, chunks pile up before a slow proxy, which then reads many at once: a
  cost per chunk that falls as the proxy gets slower.)
* Gaps are those between chunks of 200 streams at 50 tokens/s, each on a clock of its own, read by a client
  that stamps every read. More than one chunk per read tells that a proxy was behind, or held chunks back;
  its cost per chunk is then understated. Latency is that of plain requests at random times, at half of the
  rate that this proxy reached in this round, 4,000/s at most. Added is what is more than straight to the
  engine in the same round.
* Every contender is checked before it is measured: status, all words, one event for each, `[DONE]`. One
  that answers wrongly, then or under load, is reported as such and has no figures.
* All are visited in every round, each round begins with another one. Ratios are taken in each round; given
  are the median over the rounds and, in brackets, the smallest and the largest.
"""


@dataclass(frozen=True)
class Result:
    machine: Machine
    cores: str
    date: str
    arguments: str
    versions: Mapping[str, str]
    remarks: Mapping[str, str]
    """How each contender was set up."""
    notes: Sequence[str]
    """Who is missing, and why."""
    load_before: float
    load_during: Sequence[float]
    """At the end of each round; what the run itself causes included."""
    rounds: Rounds

    @property
    def others_cpu(self) -> Spread | None:
        seen = (figures.others_cpu for each in self.rounds for figures in each.values())
        return Spread.of(fraction for fraction in seen if fraction is not None)

    def as_json(self) -> str:
        members = asdict(self)
        members["goals"] = [
            {**asdict(goal), "measured": _members(measured), "verdict": goal.verdict(measured)}
            for goal in GOALS
            for measured in [goal.measured(self.rounds)]
        ]
        members["medians"] = {
            name: {figure: _members(spread(self.rounds, name, figure)) for figure in COLUMNS}
            for name in contenders_of(self.rounds)
        }
        return json.dumps(members, indent=1, ensure_ascii=False) + "\n"

    def as_markdown(self) -> str:
        return "\n".join([*self._heading(), *self._tables(), "## How", "", HOW])

    def _heading(self) -> Iterator[str]:
        yield from ("# What a proxy costs, side by side", "")
        command = f'make bench ARGS="{self.arguments}"' if self.arguments else "make bench"
        yield f"`{command}`, {self.date}, {len(self.rounds)} rounds."
        yield from (f"{self.machine}. Cores: {self.cores}.", "", self.quiet, "")

    @property
    def quiet(self) -> str:
        others = self.others_cpu
        during = Spread.of(self.load_during)
        told = f"Load average before: {self.load_before:g}"
        if during is not None:
            told += f", during: {during.median:g} ({during.low:g} to {during.high:g}), this run included"
        if others is not None:
            told += f". Others used {others.median:.0%} of the cores ({others.low:.0%} to {others.high:.0%})"
            if others.high > 0.1:
                told += ": **not a quiet machine**, take the figures as provisional"
        return told + "."

    def _tables(self) -> Iterator[str]:
        yield from ("## The gateway against its goals", "")
        yield from (*markdown_table(GOAL_HEADINGS, goal_rows(self.rounds)), "")
        yield from ("## Figures", "", "Medians over the rounds; smallest and largest in brackets.", "")
        yield from (*markdown_table(*figure_rows(self.rounds)), "")
        yield from ("## Contenders", "")
        yield from (f"* {name} {self.versions[name]}: {self.remarks[name]}" for name in self.versions)
        yield from (f"* {note}" for note in self.notes)
        yield ""


def contenders_of(rounds: Rounds) -> list[str]:
    return list(dict.fromkeys(name for each in rounds for name in each))


# ---------------------------------------------------------------------- rows

GOAL_HEADINGS = ("figure", "against", "must be at most", "stretch", "measured", "verdict")


def goal_rows(rounds: Rounds) -> list[tuple[str, ...]]:
    return [_goal_row(goal, goal.measured(rounds)) for goal in GOALS]


def _goal_row(goal: Goal, measured: Spread | None) -> tuple[str, ...]:
    decimals = 2 if goal.must > 0.3 else 3
    times = "" if goal.peer is None else " ×"
    return (
        goal.title,
        goal.peer or "direct",
        f"{goal.must:.{decimals}f}{times}",
        "" if goal.stretch is None else f"{goal.stretch:.2f}{times}",
        shown(measured, decimals),
        goal.verdict(measured),
    )


def figure_rows(rounds: Rounds) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows: a column for each contender."""
    names = contenders_of(rounds)
    rows = [
        (heading, *(shown(spread(rounds, name, figure), decimals) for name in names))
        for figure, (heading, decimals) in COLUMNS.items()
    ]
    return ("", *names), rows


def shown(value: Spread | None, decimals: int) -> str:
    if value is None:
        return "–"
    if value.low == value.high:
        return f"{value.median:,.{decimals}f}"
    return f"{value.median:,.{decimals}f} ({value.low:,.{decimals}f} to {value.high:,.{decimals}f})"


def _members(value: Spread | None) -> dict[str, float] | None:
    return None if value is None else asdict(value)


# ---------------------------------------------------------------------- forms


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def terminal_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*headings, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table
