"""When a promise is broken often enough to wake somebody: multi-window, multi-burn-rate.

A promise kept for a fraction `target` of requests leaves an *error budget* of 1 − target. The *burn rate*
is the part of requests that missed, divided by that budget: at 1 the budget of a period is used up just
when the period ends. An alert asks for a burn rate over a long window, so that it stands for budget that is
really gone, and over a short one as well, so that it ends soon after the cause does.

    missed(long) > factor × budget   and   missed(short) > factor × budget

The pairs below are those of the SRE Workbook (Google, chapter 5) for a period of 30 days: they stand for
2 %, 5 %, 10 % and 10 % of its budget.

Two things that the book's figures leave out. A loose target has a budget so large that 14.4 times of it is
more than all requests: the threshold then lies halfway between the budget and everything. And a target of
1 has no budget at all, so that a single request would wake somebody: it is reckoned as one in a thousand.
"""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["critical", "warning"]

BUDGET_LEAST = 0.001


@dataclass(frozen=True, slots=True)
class BurnWindow:
    """Windows and `hold` (how long it must be so) in Prometheus' notation."""

    long: str
    short: str
    factor: float
    hold: str
    severity: Severity


BURN_WINDOWS = (
    BurnWindow("1h", "5m", 14.4, "2m", "critical"),
    BurnWindow("6h", "30m", 6.0, "15m", "critical"),
    BurnWindow("1d", "2h", 3.0, "1h", "warning"),
    BurnWindow("3d", "6h", 1.0, "3h", "warning"),
)

ALL_WINDOWS = tuple(dict.fromkeys(each for w in BURN_WINDOWS for each in (w.short, w.long)))


def missed_ratio_threshold(target: float, factor: float) -> float:
    """The part of requests from which on the budget burns `factor` times too fast."""
    budget = max(1 - target, BUDGET_LEAST)
    return round(min(factor * budget, budget + (1 - budget) / 2), 6)
