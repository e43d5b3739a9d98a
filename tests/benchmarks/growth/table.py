"""A figure with what it should be beside it, and many of them as Markdown."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    what: str
    measured: str
    target: str = ""
    met: bool | None = None
    """None: nothing is demanded."""

    def __str__(self) -> str:
        verdict = "" if self.met is None else "yes" if self.met else "**no**"
        return f"| {self.what} | {self.measured} | {self.target} | {verdict} |"


def table(title: str, rows: Iterable[Row]) -> str:
    head = ("| | measured | target | met |", "|---|--:|--:|---|")
    return "\n".join([f"## {title}", "", *head, *map(str, rows), ""])
