"""Figures of many runs → tables, and what is to be reached beside what was."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, stdev

from tests.benchmarks.stability.runs import Figures
from tests.benchmarks.stability.scenarios import LAWS, STATIC, STATIC_SWEEP, Scenario

Results = Mapping[tuple[str, str], Sequence[Figures]]

_COLUMNS: tuple[tuple[str, int, Callable[[float], str]], ...] = (
    ("P0 of offered", 15, lambda v: f"{v:.3f}"),
    ("P0 of admitted", 15, lambda v: f"{v:.3f}"),
    ("P1 of offered", 15, lambda v: f"{v:.3f}"),
    ("P2 completed", 15, lambda v: f"{v:.3f}"),
    ("goodput", 15, lambda v: f"{v:,.0f}"),
    ("C", 15, lambda v: f"{v:,.0f}"),
    ("C CV", 14, lambda v: f"{v:.3f}"),
    ("C off, worst", 14, lambda v: f"{v:.2f}"),
    ("C per minute", 16, lambda v: f"{v:+.3f}"),
    ("admitted CV", 14, lambda v: f"{v:.3f}"),
    ("changes/min", 13, lambda v: f"{v:.0f}"),
)
_TITLE = 24


def lines_of(scenario: Scenario, results: Results) -> Iterator[str]:
    yield f"{scenario.name} ({scenario.seconds:g} s, counted from {scenario.from_seconds:g} s on)"
    yield " " * _TITLE + "".join(f"{name:>{width}}" for name, width, _ in _COLUMNS)
    for control in scenario.controls:
        runs = results[scenario.name, control.title]
        cells = (f"{spread(runs, name, show):>{width}}" for name, width, show in _COLUMNS)
        yield f"{control.title:{_TITLE}}" + "".join(cells)


def spread(runs: Sequence[Figures], name: str, show: Callable[[float], str]) -> str:
    """mean ±standard deviation, over the runs that have the figure."""
    values = [value for run in runs if (value := run.get(name)) is not None]
    if not values:
        return "-"
    if len(values) == 1:
        return show(values[0])
    return f"{show(fmean(values))} ±{show(stdev(values)).lstrip('+')}"


def mean(results: Results, scenario: str, control: str, name: str) -> float | None:
    values = [v for run in results.get((scenario, control), ()) if (v := run.get(name)) is not None]
    return fmean(values) if values else None


_STEADY, _OTHER, _STEP = "steady overload, 2×", "the same, mix 20/50/30", "1 demand 1× → 2× → 1×"


def targets(results: Results) -> Iterator[str]:
    """What is to be reached, and what each law reaches; a static C that is right by a sweep beside them."""
    yield f"{'to be reached':58}" + "".join(f"{law.title:>13}" for law in LAWS)
    rows: list[tuple[str, float, bool, Callable[[str], float | None]]] = [
        (
            "P0 kept of offered at 2×, at least",
            0.92,
            True,
            lambda c: mean(results, _STEADY, c, "P0 of offered"),
        ),
        ("P0 kept of admitted, at least", 0.98, True, lambda c: mean(results, _STEADY, c, "P0 of admitted")),
        (
            "P0 kept of offered, mix 20/50/30, at least",
            0.95,
            True,
            lambda c: mean(results, _OTHER, c, "P0 of offered"),
        ),
        (
            "goodput over static at the C it was given, at least",
            1.05,
            True,
            lambda c: _gain(results, c, (STATIC.title,)),
        ),
        (
            "goodput over the best static of the sweep, at least",
            1.05,
            True,
            lambda c: _gain(results, c, _sweep()),
        ),
        (
            "C off its final value after the steps, at most",
            0.15,
            False,
            lambda c: mean(results, _STEP, c, "C off, worst"),
        ),
        (
            "variation of the admitted rate at 2×, at most",
            0.20,
            False,
            lambda c: mean(results, _STEADY, c, "admitted CV"),
        ),
        (
            "lowest rate above its floor in any run, tokens/s, at least",
            0.0,
            True,
            lambda c: _lowest(results, c),
        ),
    ]
    for title, wanted, is_least, of in rows:
        cells = []
        for law in LAWS:
            value = of(law.title)
            ok = value is not None and (value >= wanted if is_least else value <= wanted)
            cells.append("-" if value is None else f"{value:.3f}{' ' if ok else ' ✗'}")
        yield f"{title:52}{wanted:6g}" + "".join(f"{cell:>13}" for cell in cells)


def _sweep() -> tuple[str, ...]:
    return (STATIC.title, *(control.title for control in STATIC_SWEEP))


def _gain(results: Results, control: str, over: Sequence[str]) -> float | None:
    """Goodput over the best one of the others, over both mixes the mean."""
    ratios = []
    for scenario in (_STEADY, _OTHER):
        own = mean(results, scenario, control, "goodput")
        others = [g for title in over if (g := mean(results, scenario, title, "goodput")) is not None]
        if own is not None and others:
            ratios.append(own / max(others))
    return fmean(ratios) if ratios else None


def _lowest(results: Results, control: str) -> float | None:
    runs = [run for (_, title), some in results.items() if title == control for run in some]
    values = [value for run in runs if (value := run.get("above floor")) is not None]
    return min(values, default=None)
