"""What a noisy neighbour costs the others of its class: `make noisy-neighbour`, or
`python -m tests.benchmarks.noisy_neighbour`.

Ten tenants of P1 share an engine on virtual time. Nine ask for 80 % of their fair share each, the tenth for
ten times that; then the same nine come at the same times without it, and then one of them by itself. The
policy is the real one with its default settings, the engine the model of the mock GPU; the same seeds give
the same table.

* Fair share: a tenth of what P1 gets done while all ten ask for three times as much as there is. Jain's
  index, (Σx)² / (n Σx²) of the ten tenants' weighted tokens, is of those runs.
* Service: requests completed, and their weighted tokens (input + output weight × output), of the requests
  that arrived after the first 20 s, in parts of what the same tenants got without the tenth. "Worst" is the
  one of the nine that lost most, all seeds together; ± is the standard deviation from seed to seed.
* What binds. C: `tokens_per_second` as configured, P0 idle, so P1 borrows all of it. Slots: `max_in_flight`
  as configured, and more tokens than the engine can use. Own share: P0 asks for all of C, so P1 has its
  35 % (and the idle P2's part, as far as P0 leaves it).
* Sizes. Else all send conversations; mixed: one of the nine sends requests of a tenth of that size, one of
  four times that.
* Requests come independently of each other. A refused one is lost; retried: it comes back when it is told
  to, until it is served.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean, stdev

from gateway.simulator.report import percentile
from tests.support.noisy_neighbour import (
    NINE,
    NOISY,
    PRESET,
    SCENARIOS,
    WARM_UP_SECONDS,
    Comparison,
    Job,
    Service,
    compare,
    total,
)

# ---------------------------------------------------------------------- the tables

_TITLE_WIDTH = 22


def _of_nine(runs: Sequence[Mapping[str, Service]]) -> Service:
    return total([run[tenant] for run in runs for tenant in NINE])


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f} ±{stdev(values) if len(values) > 1 else math.nan:.3f}"


def _told(service: Service) -> list[str]:
    """Refused and timed out in per cent of the requests offered, P50 and P99 of the first token."""
    offered, ttft = max(service.offered, 1), sorted(service.ttft_ms)
    times = (percentile(ttft, part) for part in (0.5, 0.99))
    return [
        f"{100 * service.refused / offered:.1f}",
        f"{100 * service.timed_out / offered:.1f}",
        *("-" if ms is None else f"{ms:,.0f}" for ms in times),
    ]


def _tokens(service: Service) -> float:
    return service.tokens


def _completed(service: Service) -> float:
    return service.completed


def service_table(compared: Mapping[str, Comparison]) -> str:
    heads = (
        *(("fair share", 12), ("tokens kept", 15), ("worst", 7), ("requests kept", 15), ("worst", 7)),
        *(("noisy got", 11), ("Jain, least", 13)),
    )
    lines = [f"{'':{_TITLE_WIDTH}}" + "".join(f"{head:>{width}}" for head, width in heads)]
    for name, c in compared.items():
        seconds = c.measured_seconds * len(c.noisy)
        noisy = total([run[NOISY] for run in c.noisy]).tokens / seconds / c.fair_share
        cells = (
            f"{c.fair_share:,.0f}",
            _spread(c.kept(_tokens)),
            f"{c.worst(_tokens):.3f}",
            _spread(c.kept(_completed)),
            f"{c.worst(_completed):.3f}",
            f"{noisy:.2f}",
            f"{min(c.jain):.4f}",
        )
        row = "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, heads, strict=True))
        lines.append(f"{SCENARIOS[name].title:{_TITLE_WIDTH}}{row}")
    return "\n".join(lines)


def latency_table(compared: Mapping[str, Comparison]) -> str:
    who = ("nine, with the tenth", "nine, without", "one alone", "the tenth")
    heads = "".join(
        f"  {head:>{width}}" for head, width in (("refused", 7), ("late", 5), ("P50", 5), ("P99", 5))
    )
    lines = [
        f"{'':{_TITLE_WIDTH}}" + "".join(f"{name:>30}" for name in who),
        f"{'':{_TITLE_WIDTH}}" + heads * len(who),
    ]
    for name, c in compared.items():
        noisy = total([run[NOISY] for run in c.noisy])
        services = (_of_nine(c.noisy), _of_nine(c.quiet), total(c.alone), noisy)
        cells = [cell for service in services for cell in zip(_told(service), (7, 5, 5, 5), strict=True)]
        row = "".join(f"  {cell:>{width}}" for cell, width in cells)
        lines.append(f"{SCENARIOS[name].title:{_TITLE_WIDTH}}{row}")
    return "\n".join(lines)


def tenants_table(compared: Mapping[str, Comparison]) -> str:
    lines = [f"{'':{_TITLE_WIDTH}}" + "".join(f"{tenant.removeprefix('tenant '):>7}" for tenant in NINE)]
    for name, c in compared.items():
        kept = (c.kept_by(tenant, _tokens) for tenant in NINE)
        lines.append(f"{SCENARIOS[name].title:{_TITLE_WIDTH}}" + "".join(f"{part:>7.3f}" for part in kept))
    return "\n".join(lines)


def render(compared: Mapping[str, Comparison]) -> str:
    return "\n\n".join(
        (
            "Service of the nine with the tenth, in parts of that without it; the tenth's, in fair shares",
            service_table(compared),
            "Refused and late: % of requests offered; P50, P99: first token, ms",
            latency_table(compared),
            "Tokens kept by each of the nine, all seeds together",
            tenants_table(compared),
        )
    )


# ---------------------------------------------------------------------- the command


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.noisy_neighbour", description=__doc__.split("\n\n")[1]
    )
    parser.add_argument("--scenario", choices=tuple(SCENARIOS), nargs="+", default=tuple(SCENARIOS))
    parser.add_argument("--seconds", type=float, default=100.0, help="virtual time of each run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.seconds <= WARM_UP_SECONDS or min(arguments.seeds, arguments.processes) < 1:
        parser.error(f"--seconds above {WARM_UP_SECONDS:g}, --seeds and --processes of at least 1")
    started = time.monotonic()
    with ProcessPoolExecutor(arguments.processes) as pool:

        def do(work: Callable[[Job], dict[str, Service]], jobs: list[Job]) -> list[dict[str, Service]]:
            results = []
            for result in pool.map(work, jobs):
                results.append(result)
                if sys.stderr.isatty():
                    print(f"\r{len(results)} of {len(jobs)} runs", end="", file=sys.stderr, flush=True)
            return results

        try:
            compared = compare(arguments.scenario, range(1, arguments.seeds + 1), arguments.seconds, do)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            print("\nstopped", file=sys.stderr)
            return 130
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    print(f"{PRESET}, {arguments.seeds} seeds of {arguments.seconds:g} s\n\n{render(compared)}\n")
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
