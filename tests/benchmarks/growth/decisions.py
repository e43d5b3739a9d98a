"""The micro-benchmarks of `tests/benchmarks/micro`, run by pytest-benchmark, as rows."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.growth.table import Row

DECISIONS_PER_SECOND = 30_000
GROWTH_MAX = 1.5
FEW, MANY = 10, 10_000
"""Queued: the cost at the one may be so many times that at the other."""
MICRO = Path(__file__).parents[1] / "micro"
_TIMER = "--benchmark-timer=time.process_time"
"""CPU time: whom else the machine serves meanwhile does not count, as far as that can be kept apart."""
_COLLECT = ("-o", "python_files=bench_*.py", "-o", "python_functions=bench_*")


def rows(seconds: float) -> Iterator[Row]:
    """Each benchmark takes about `seconds`. Times are medians, with the shortest in brackets: how far the two
    are apart tells how much else the machine had to do."""
    found = _run(seconds)
    for name in found:
        yield _row(name, found)


def _run(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        options = [f"--benchmark-json={result}", f"--benchmark-max-time={seconds}", "--benchmark-quiet"]
        command = [sys.executable, "-m", "pytest", "-p", "benchmark", _TIMER, *_COLLECT, *options, str(MICRO)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the micro-benchmarks have failed:\n{done.stdout}{done.stderr}")
        return {each["name"]: each for each in json.loads(result.read_text())["benchmarks"]}


def _microseconds(benchmark: Any, figure: str = "median") -> float:
    """Of one call, be it one of several that a round makes."""
    seconds: float = benchmark["stats"][figure]
    return seconds * 1e6 / benchmark["extra_info"].get("calls", 1)


def _row(name: str, found: dict[str, Any]) -> Row:
    cost = _microseconds(found[name])
    what = name.partition("[")[0].removeprefix("bench_").replace("_", " ")
    parameters = found[name]["params"] or {}
    words = ", ".join(f"{key.replace('_', ' ')} {value:,}" for key, value in parameters.items())
    what += f": {words}" if words else ""
    measured = f"{cost:,.1f} µs ({_microseconds(found[name], 'min'):,.1f})"
    if not name.startswith("bench_decision"):
        return Row(what, measured)
    queued = parameters["queued"]
    if queued == FEW:
        rate = 1e6 / cost
        return Row(
            what, f"{measured}, {rate:,.0f}/s", f"≥ {DECISIONS_PER_SECOND:,}/s", rate >= DECISIONS_PER_SECOND
        )
    ratio = cost / _microseconds(found[name.replace(f"[{queued}-", f"[{FEW}-")])
    measured = f"{measured}, × {ratio:.2f}"
    if queued < MANY:
        return Row(what, measured)
    return Row(what, measured, f"≤ × {GROWTH_MAX:g} of {FEW}", ratio <= GROWTH_MAX)
