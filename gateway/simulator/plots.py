"""Pictures of a comparison, for those who have matplotlib: an optional extra, imported here alone."""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.policy.request import PRIORITIES, Priority
from gateway.simulator.comparison import Comparison
from gateway.simulator.contenders import Contender
from gateway.simulator.report import NANOSECONDS_PER_MILLISECOND
from gateway.simulator.trial import LATENCIES, QUANTILES, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOW_TO_GET = "no plots: matplotlib is not installed; get it with: pip install 'qos-gateway[plots]'"

_WIDTH, _HEIGHT, _DPI = 12.0, 2.6, 110  # inches a figure and a row of axes, dots an inch
_LATENCY_LABELS = {"ttft": "first token, s", "tpot": "time per token, ms", "max_gap": "largest gap, ms"}


def available() -> bool:
    return find_spec("matplotlib") is not None


def draw(folder: Path, comparison: Comparison) -> list[Path]:
    """Rates and attainment over time, and the distributions of latencies; the files written."""
    import matplotlib

    matplotlib.use("Agg")  # into files, without a display
    paths = [folder / "rates_and_attainment.png", folder / "latencies.png"]
    _over_time(paths[0], comparison)
    _distributions(paths[1], comparison)
    return paths


def _colours(comparison: Comparison) -> dict[str, str]:
    names = cycle(f"C{number}" for number in range(10))
    return {contender.title: colour for contender, colour in zip(comparison.contenders, names, strict=False)}


def _axes(rows: int, columns: int) -> tuple[Any, Any]:
    from matplotlib import pyplot

    return pyplot.subplots(
        rows, columns, figsize=(_WIDTH, _HEIGHT * rows), squeeze=False, layout="constrained"
    )


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    pyplot.close(figure)


def _over_time(path: Path, comparison: Comparison) -> None:
    """A row for each class, a line for each seed: the rate of its bucket beside its attainment, or beside the
    work done where nothing is promised."""
    figure, axes = _axes(len(PRIORITIES), 2)
    colours = _colours(comparison)
    for priority, (rates, beside) in zip(PRIORITIES, axes, strict=True):
        for trial in comparison.trials:
            moments = [m for m in trial.history if m.priority is priority]
            seconds = [m.second for m in moments]
            look = _look(trial, comparison, colours)
            if moments and moments[0].bucket_rate is not None:
                rates.plot(seconds, [m.bucket_rate for m in moments], drawstyle="steps-pre", **look)
            if _is_promised_something(comparison, priority):
                met = [
                    float("nan") if m.slo_met_of_offered is None else m.slo_met_of_offered for m in moments
                ]
                beside.plot(seconds, met, **look)
            else:
                beside.plot(seconds, _smooth([m.settled_tokens_per_second for m in moments]), **look)
        _describe(rates, f"{priority.name}: rate of its bucket, tokens/s")
        rates.set_ylim(bottom=0)
        if _is_promised_something(comparison, priority):
            _describe(beside, f"{priority.name}: SLO met of offered, last 10 s")
            beside.set_ylim(-0.03, 1.03)
        else:
            _describe(beside, f"{priority.name}: settled weighted tokens/s")
            beside.set_ylim(bottom=0)
    for below in axes[-1]:
        below.set_xlabel("seconds")
    _legend(axes[0][1])  # where also a run without a gateway has a line
    _save(figure, path)


def _distributions(path: Path, comparison: Comparison) -> None:
    """A row for each class, a column for each latency: which part of the requests was at most so late."""
    figure, axes = _axes(len(PRIORITIES), len(LATENCIES))
    colours = _colours(comparison)
    for priority, row in zip(PRIORITIES, axes, strict=True):
        for name, own in zip(LATENCIES, row, strict=True):
            for trial in comparison.trials:
                values = trial.latencies[priority, name]
                if values:
                    shown = [milliseconds / _unit_ms(name) for milliseconds in values]
                    own.plot(shown, QUANTILES, **_look(trial, comparison, colours))
            if name == "ttft":
                own.set_xscale("log")  # from milliseconds to minutes
            else:
                own.set_xlim(left=0)
            _mark_promise(own, priority, name, comparison.contenders[0])
            _describe(own, f"{priority.name}: {_LATENCY_LABELS[name]}")
    _legend(axes[0][0])
    _save(figure, path)


def _smooth(values: Sequence[float]) -> list[float]:
    """Mean of each value and those before it, ten at most."""
    windows = (values[max(end - 10, 0) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def _unit_ms(latency: str) -> float:
    return 1000.0 if latency == "ttft" else 1.0


def _is_promised_something(comparison: Comparison, priority: Priority) -> bool:
    return any(contender.parameters.classes[priority].slo for contender in comparison.contenders)


def _look(trial: Trial, comparison: Comparison, colours: dict[str, str]) -> dict[str, Any]:
    """The seeds of a configuration share its colour; the first one stands in the legend."""
    is_first = comparison.trials[0].seed == trial.seed
    return {
        "color": colours[trial.title],
        "linewidth": 1.0,
        "alpha": 0.9 if is_first else 0.4,
        "label": trial.title if is_first else None,
    }


def _mark_promise(axes: "Axes", priority: Priority, name: str, contender: Contender) -> None:
    slo = contender.parameters.classes[priority].slo
    target = None if slo is None else {"ttft": slo.ttft_ns, "tpot": slo.tpot_ns}.get(name, slo.max_gap_ns)
    if target is not None:
        x = target / NANOSECONDS_PER_MILLISECOND / _unit_ms(name)
        axes.axvline(x, color="grey", linestyle=":", linewidth=1.0, label="promised")


def _describe(axes: "Axes", title: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)


def _legend(axes: "Axes") -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
