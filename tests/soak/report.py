"""What a soak run says at its end: a table of checks, each with its figure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EXAMPLES_MAX = 5


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table at the end."""

    name: str
    figure: str
    wanted: str
    holds: bool
    examples: Sequence[str] = ()
    """Of what broke it, a few."""


def none_of(name: str, found: Iterable[str], among: int | None = None) -> Check:
    """Holds if nothing was found."""
    examples = list(found)
    figure = f"{len(examples)}" if among is None else f"{len(examples)} of {among:,}"
    return Check(name, figure, "0", not examples, examples[:EXAMPLES_MAX])


@dataclass
class Report:
    checks: list[Check]
    table: list[str]
    told: list[str]

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    def lines(self) -> list[str]:
        width = max(len(check.name) for check in self.checks)
        shown = ["", "how they ended:", *self.table, "", *self.told, ""]
        for check in self.checks:
            verdict = "ok" if check.holds else "BROKEN"
            shown.append(f"  {check.name:{width}}  {check.figure:>24}  wanted {check.wanted:24} {verdict}")
            shown += [f"      {example}" for example in check.examples]
        return shown
