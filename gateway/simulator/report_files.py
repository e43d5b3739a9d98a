"""What a comparison leaves behind in a folder. The same comparison writes the same bytes.

* `report.txt`: the table of the terminal.
* `report.json`, `report.csv`: every figure of every class, mean, spread and the value of each seed.
* `history.csv`: rates of the class buckets, attainment and work done, over time.
* `rate_changes.csv`: each change of the rates with its reason.
* `latencies.csv`: the distributions of first token, time per token and largest gap, as quantiles.
"""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.policy.clock import to_seconds
from gateway.policy.parameters import MILLITOKENS
from gateway.policy.request import PRIORITIES
from gateway.simulator.comparison import Comparison, render, slo_of
from gateway.simulator.contenders import Contender
from gateway.simulator.trial import QUANTILES

Cells = Sequence[object]


def write_report(folder: Path, comparison: Comparison, asked: Mapping[str, Any]) -> list[Path]:
    """`asked` is what the simulation was called with. OSError where the folder cannot be written to."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "report.txt", folder / "report.json"]
    written[0].write_text(render(comparison), encoding="utf-8")
    tree = json.dumps(_tree(comparison, asked), indent=1, ensure_ascii=False)
    written[1].write_text(tree + "\n", encoding="utf-8")
    for name, rows in (
        ("report.csv", _report(comparison)),
        ("history.csv", _history(comparison)),
        ("rate_changes.csv", _rate_changes(comparison)),
        ("latencies.csv", _latencies(comparison)),
    ):
        written.append(folder / name)
        with written[-1].open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
    return written


def _tree(comparison: Comparison, asked: Mapping[str, Any]) -> dict[str, Any]:
    classes: dict[str, dict[str, Any]] = {}
    for row in comparison.rows():
        name = "all" if row.priority is None else row.priority.name
        estimates = zip(comparison.contenders, row.estimates, strict=True)
        classes.setdefault(name, {})[row.name] = {
            contender.title: {"mean": e.mean, "standard_deviation": e.spread, "by_seed": e.values}
            for contender, e in estimates
        }
    return {
        "asked": asked,
        "configurations": {c.title: _told_of(c) for c in comparison.contenders},
        "classes": classes,
    }


def _told_of(contender: Contender) -> dict[str, Any]:
    parameters = contender.parameters
    return {
        "gateway": contender.gateway,
        "law": parameters.law if contender.gateway else None,
        "engines": {
            upstream.name: {
                "preset": contender.presets[upstream.name].name,
                "tokens_per_second": upstream.tokens_per_second,
            }
            for upstream in parameters.upstreams
        },
        "classes": {
            p.name: {"share": parameters.classes[p].share, "slo": slo_of(parameters.classes[p].slo)}
            for p in PRIORITIES
        },
    }


def _report(comparison: Comparison) -> Iterable[Cells]:
    seeds = dict.fromkeys(trial.seed for trial in comparison.trials)
    names = [f"seed_{seed}" for seed in seeds]
    yield ("configuration", "class", "figure", "mean", "standard_deviation", *names)
    for row in comparison.rows():
        name = "all" if row.priority is None else row.priority.name
        for contender, estimate in zip(comparison.contenders, row.estimates, strict=True):
            values = map(_cell, (estimate.mean, estimate.spread, *estimate.values))
            yield (contender.title, name, row.name, *values)


def _history(comparison: Comparison) -> Iterable[Cells]:
    yield (
        "configuration",
        "seed",
        "second",
        "class",
        "bucket_rate_tokens_per_second",
        "slo_met_of_offered",
        "slo_met_of_admitted",
        "arrived_requests_per_second",
        "settled_tokens_per_second",
    )
    for trial in comparison.trials:
        for second, priority, *figures in trial.history:
            yield (trial.title, trial.seed, second, priority.name, *map(_cell, figures))


def _rate_changes(comparison: Comparison) -> Iterable[Cells]:
    rates = [f"{when}_{p.name}_tokens_per_second" for when in ("old", "new") for p in PRIORITIES]
    yield ("configuration", "seed", "second", "law", "reason", "direction", "applied", *rates, "inputs")
    for trial in comparison.trials:
        for change in trial.rate_changes:
            values = [_cell(rate / MILLITOKENS) for rate in (*change.old_rates, *change.new_rates)]
            inputs = "; ".join(f"{name}={_cell(value)}" for name, value in change.inputs.items())
            words = (change.law, change.reason, change.direction, str(change.applied).lower())
            yield (trial.title, trial.seed, _cell(to_seconds(change.at)), *words, *values, inputs)


def _latencies(comparison: Comparison) -> Iterable[Cells]:
    yield ("configuration", "seed", "class", "latency", "quantile", "milliseconds")
    for trial in comparison.trials:
        for (priority, name), values in trial.latencies.items():
            for part, value in zip(QUANTILES, values, strict=False):
                yield (trial.title, trial.seed, priority.name, name, part, _cell(value))


def _cell(value: object) -> object:
    """Six significant digits are more than these figures mean; what nobody has is empty."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
