"""How stable the control laws are: `make stability ARGS="--traces FOLDER"`.

Laws and scenarios in virtual time, several seeds each, beside `static` and no gateway at all. The policy is
the real one, the engine is the mock GPU's model (`a100_llama3_8b`). The report has the mean over the seeds
and, behind ±, their standard deviation; the same options give the same report, byte for byte. `--traces`
names a folder with recorded traffic: its conversations' lengths then take the place of the built-in ones,
and the traces themselves are scenarios too.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tests.benchmarks.stability.report import lines_of, targets
from tests.benchmarks.stability.runs import Case, Figures, run_case
from tests.benchmarks.stability.scenarios import Scenario, scenarios

DEFAULT_SEEDS = 5
DEFAULT_OUT = Path("build/stability.txt")
QUICK = ("steady overload, 2×", "1 demand 1× → 2× → 1×")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    chosen = list(_chosen(arguments))
    seeds = range(1, (2 if arguments.quick else arguments.seeds) + 1)
    cases = [Case(s, control, seed) for s in chosen for control in s.controls for seed in seeds]
    try:
        results = _run(cases, arguments.processes, arguments.traces)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    lengths = "built-in lengths" if arguments.traces is None else "recorded lengths"
    report = [f"Stability of the control laws: {len(seeds)} seeds, {lengths}", ""]
    for scenario in chosen:
        report += [*lines_of(scenario, results), ""]
    report += targets(results)
    text = "\n".join(report) + "\n"
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text, encoding="utf-8")
    print(text, end="")
    print(f"written to {arguments.out}", file=sys.stderr)
    return 0


def _chosen(arguments: argparse.Namespace) -> Iterator[Scenario]:
    for scenario in scenarios(with_traces=arguments.traces is not None):
        wanted = QUICK if arguments.quick else arguments.only
        if not wanted or any(scenario.name.startswith(name) for name in wanted):
            yield scenario


def _run(cases: Sequence[Case], processes: int, traces: Path | None) -> dict[tuple[str, str], list[Figures]]:
    """By scenario and control, in the order of the seeds. How far it is goes to stderr."""
    results: dict[tuple[str, str], list[Figures]] = {}
    began = time.monotonic()
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        figures = pool.map(partial(run_case, traces=traces), cases)
        for number, (case, one) in enumerate(zip(cases, figures, strict=True), start=1):
            results.setdefault((case.scenario.name, case.control.title), []).append(one)
            _tell(number, len(cases), time.monotonic() - began, case)
    return results


def _tell(number: int, of: int, seconds: float, case: Case) -> None:
    if sys.stderr.isatty():
        bar = "█" * (30 * number // of)
        left = seconds / number * (of - number)
        print(f"\r{bar:░<30} {number}/{of}, {left:4.0f} s left", end="", file=sys.stderr, flush=True)
        if number == of:
            print(file=sys.stderr)
    elif number % 20 == 0 or number == of:
        print(f"{number} of {of} runs, {seconds:.0f} s: {case.scenario.name}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.stability", description=__doc__.split("\n\n")[1]
    )
    parser.add_argument("--seeds", type=int, default=DEFAULT_SEEDS)
    parser.add_argument("--quick", action="store_true", help="two scenarios, two seeds")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="scenarios whose names begin so")
    parser.add_argument("--traces", type=Path, help="a folder with recorded traffic")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    return parser


if __name__ == "__main__":
    sys.exit(main())
