"""What each rule for long prompts buys: `make long-prompts ARGS="--trace FILE"`.

A recorded trace on virtual time, once for each way to set the rules: prompts over `long_prompt_tokens` are
batch (P2), the others realtime (P0). The policy is the real one, the engine is the mock GPU's model.

* Capacity: `tokens_per_second` is what the engine carries of this trace, in weighted tokens: those of some
  thousand requests, asked for all at once and without a gateway, over the time they take.
* Load: the trace is stretched in time until it offers 70 % of that. Rows of one time stamp are spread at
  random up to the next one, as some traces are written in steps of seconds.
* A refused request is lost, nobody comes back. P2 is as patient as batch is: ten minutes.
* A rule that is off is out of reach: lane and pending prefill without end, a duty that asks for no distance.
* That long prompts are paid by P2's own share alone cannot be switched off. Hence two blocks: the shares as
  shipped, and a share of P2 that has room for all of them.

The same trace, options and seed give the same table, byte for byte; how far it is goes to stderr.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from random import Random
from typing import Any

from gateway.mock_backend.gpu_model import PRESETS, GpuPreset
from gateway.policy.clock import to_nanoseconds, to_seconds
from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import MILLITOKENS, PolicyParameters, SchedulingParameters
from gateway.policy.request import PRIORITIES, Priority
from gateway.policy_parameters import policy_parameters
from gateway.settings import Settings
from gateway.simulator.experiment import Experiment
from gateway.simulator.report import NANOSECONDS_PER_MILLISECOND, make_report, percentile
from gateway.simulator.workload import (
    Arrival,
    Caller,
    Lengths,
    OpenStream,
    ReplayStream,
    TraceRow,
    Workload,
    generator,
    read_trace,
)

P0, P1, P2 = Priority

DEFAULT_PRESETS = ("a100_llama3_8b", "seed_32k")
DEFAULT_LOAD = 0.7
ROOMY_P2_SHARE = 0.6
"""Of long prompts in Mooncake's conversations, which are 81 % of the tokens, at 70 % load."""
CAPACITY_SAMPLE = 1000
"""So many that the time it takes the engine to run empty is a small part."""
BATCH_WAIT_SECONDS = 600.0
PROGRESS_EVERY_SECONDS = 5.0

SHORT_AS = {"P0": (P0,), "P1": (P1,), "P0+P1": (P0, P1)}

ENDLESS = 10**9
OFF: Mapping[str, Mapping[str, Any]] = {
    "lane": {"long_prompt_lane": ENDLESS},
    "duty": {"long_prompt_duty": math.inf},
    "pending": {"max_pending_prefill_tokens": ENDLESS},
}

# ---------------------------------------------------------------------- the workload


def spread(rows: Sequence[TraceRow], random: Random) -> list[TraceRow]:
    """Each row somewhere in the time from its stamp on that is the shortest step between two stamps."""
    stamps = [at for at, _ in groupby(rows, key=lambda row: row.at)]
    step = min((later - earlier for earlier, later in pairwise(stamps)), default=0)
    moved = [row._replace(at=row.at + int(step * random.random())) for row in rows]
    return sorted(moved, key=lambda row: row.at)


def by_length(
    rows: Sequence[TraceRow], long_prompt_tokens: int, short_as: Sequence[Priority], random: Random
) -> dict[Priority, list[TraceRow]]:
    """Long prompts are P2; the class of each other one is drawn from `short_as`."""
    classes: dict[Priority, list[TraceRow]] = {p: [] for p in PRIORITIES}
    for row in rows:
        short = random.choice(short_as)
        classes[P2 if row.lengths.input_tokens > long_prompt_tokens else short].append(row)
    return classes


@dataclass(frozen=True)
class WatchedStream:
    """A stream whose arrivals are told of, in nanoseconds of virtual time."""

    stream: OpenStream
    told: Callable[[int], None]

    @property
    def caller(self) -> Caller:
        return self.stream.caller

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        for arrival in self.stream.arrivals(random):
            self.told(arrival.at)
            yield arrival


# ---------------------------------------------------------------------- capacity and load


def weighted_tokens(lengths: Lengths, output_weight: float) -> float:
    return lengths.input_tokens + output_weight * lengths.output_tokens


def carried_tokens_per_second(
    preset: GpuPreset, rows: Sequence[TraceRow], parameters: PolicyParameters
) -> float:
    """Weighted tokens of requests that are all there from the beginning, over the time the engine takes."""
    sample = [TraceRow(0, row.lengths) for row in rows[:: max(len(rows) // CAPACITY_SAMPLE, 1)]]
    workload = Workload(open=[ReplayStream(Caller(P0), sample)])
    presets = {parameters.upstreams[0].name: preset}
    records = Experiment(workload, parameters, presets, seed=0, seconds=1, gateway=False).run().records
    tokens = sum(record.charged for record in records) / MILLITOKENS
    return tokens / to_seconds(max(record.ended_at for record in records))


def parameters_for(
    preset: GpuPreset, tokens_per_second: float, p2_share: float | None = None
) -> PolicyParameters:
    """The gateway's defaults with the limits of this engine and the patience of batch. A share of P2 other
    than the default is taken from P0 and P1 in proportion. Rates stay as they are: the rules alone count."""
    defaults = replace(policy_parameters(Settings()), law="static")
    classes = dict(defaults.classes)
    if p2_share is not None:
        shrink = (1 - p2_share) / (1 - classes[P2].share)
        shares = {P0: classes[P0].share * shrink, P1: classes[P1].share * shrink, P2: p2_share}
        classes = {p: replace(classes[p], share=share) for p, share in shares.items()}
    patience = to_nanoseconds(BATCH_WAIT_SECONDS)
    classes[P2] = replace(classes[P2], max_throttle_ns=patience, max_wait_ns=patience)
    upstream = replace(
        defaults.upstreams[0],
        tokens_per_second=tokens_per_second,
        max_in_flight=preset.max_num_seqs,
        max_in_flight_tokens=preset.kv_tokens,
    )
    return replace(defaults, classes=classes, upstreams=(upstream,))


# ---------------------------------------------------------------------- one run


class Meter:
    busy_ns = 0


@dataclass(frozen=True)
class MeteredPreset(GpuPreset):
    """Adds up the iterations it is asked about; the engine asks once for each that it runs."""

    meter: Meter = field(default_factory=Meter, compare=False)

    def iteration_ns(self, prefill_tokens: int, attention: float, decoding: int, kv_tokens: int) -> int:
        duration = super().iteration_ns(prefill_tokens, attention, decoding, kv_tokens)
        self.meter.busy_ns += duration
        return duration


@dataclass(frozen=True)
class Row:
    """Of the watched class, then of P2, then of the GPU. Times are milliseconds, parts are fractions.

    P2's tokens (input + output) are those of answers that ended while requests still arrived; the GPU is
    `busy` a part of the time until the last answer ended.
    """

    title: str
    ttft: tuple[float | None, ...]  # P50, P90, P99
    gap: tuple[float | None, ...]  # P50, P90, P99, largest
    tpot_p99: float | None
    slo_met_of_offered: float | None
    refused: float
    batch_completed: int
    batch_tokens_per_second: float
    batch_refused: float
    batch_timed_out: float
    busy: float


@dataclass(frozen=True)
class Trial:
    """What is the same in all rows of a block."""

    workload: Workload
    preset: GpuPreset
    parameters: PolicyParameters
    seed: int
    seconds: float
    watched: Priority = P0

    def straight(self) -> Row:
        return self._row("straight", self.parameters.scheduling, gateway=False)

    def rows(self, *, alone: bool = False) -> Iterator[Row]:
        for title, scheduling in ways(self.parameters.scheduling, alone=alone):
            yield self._row(title, scheduling, gateway=True)

    def _row(self, title: str, scheduling: SchedulingParameters, *, gateway: bool) -> Row:
        parameters = replace(self.parameters, scheduling=scheduling)
        metered = MeteredPreset(**asdict(self.preset))
        presets = {parameters.upstreams[0].name: metered}
        experiment = Experiment(
            self.workload, parameters, presets, seed=self.seed, seconds=self.seconds, gateway=gateway
        )
        records = experiment.run().records
        classes = make_report(title, records, parameters, self.seconds).classes
        own, batch = classes[self.watched], classes[P2]
        ttft, gap, tpot = (
            _milliseconds(records, self.watched, name) for name in ("ttft_ns", "max_gap_ns", "tpot_ns")
        )
        timed_out = batch.refusals.get(Outcome.QUEUE_TIMEOUT, 0)
        return Row(
            title=title,
            ttft=tuple(percentile(ttft, part) for part in (0.5, 0.9, 0.99)),
            gap=tuple(percentile(gap, part) for part in (0.5, 0.9, 0.99, 1.0)),
            tpot_p99=percentile(tpot, 0.99),
            slo_met_of_offered=own.slo_met_of_offered,
            refused=(own.offered - own.completed) / max(own.offered, 1),
            batch_completed=batch.completed,
            batch_tokens_per_second=_batch_tokens(records, to_nanoseconds(self.seconds)) / self.seconds,
            batch_refused=(batch.offered - batch.completed - timed_out) / max(batch.offered, 1),
            batch_timed_out=timed_out / max(batch.offered, 1),
            busy=metered.meter.busy_ns / max(record.ended_at for record in records),
        )


def _milliseconds(records: Sequence[RequestEnded], priority: Priority, figure: str) -> list[float]:
    """In ascending order."""
    values = (getattr(record, figure) for record in records if record.priority is priority)
    return sorted(ns / NANOSECONDS_PER_MILLISECOND for ns in values if ns is not None)


def _batch_tokens(records: Sequence[RequestEnded], until: int) -> int:
    usages = (record.usage for record in records if record.priority is P2 and record.ended_at <= until)
    return sum(usage.input_tokens + usage.output_tokens for usage in usages if usage is not None)


def ways(on: SchedulingParameters, *, alone: bool) -> Iterator[tuple[str, SchedulingParameters]]:
    """All three rules, each off, none of them, and if wanted each alone."""

    def without(names: Sequence[str]) -> SchedulingParameters:
        return replace(on, **{setting: value for name in names for setting, value in OFF[name].items()})

    yield "all three rules", on
    for name in OFF:
        yield f"  without {name}", without([name])
    if alone:
        for name in OFF:
            yield f"  {name} alone", without([other for other in OFF if other != name])
    yield "none of the three", without(list(OFF))


# ---------------------------------------------------------------------- the table

_TITLE_WIDTH = 20
_COLUMNS: tuple[tuple[str, str, int, Callable[[Row], str]], ...] = (
    # over several columns, over this one, width, what it shows
    ("first token, ms", "P50", 9, lambda r: _ms(r.ttft[0])),
    ("", "P90", 10, lambda r: _ms(r.ttft[1])),
    ("", "P99", 10, lambda r: _ms(r.ttft[2])),
    ("largest gap, ms", "P50", 8, lambda r: _ms(r.gap[0])),
    ("", "P90", 7, lambda r: _ms(r.gap[1])),
    ("", "P99", 7, lambda r: _ms(r.gap[2])),
    ("", "max", 7, lambda r: _ms(r.gap[3])),
    ("TPOT", "P99", 6, lambda r: _ms(r.tpot_p99)),
    ("SLO", "met", 7, lambda r: "-" if r.slo_met_of_offered is None else f"{r.slo_met_of_offered:.3f}"),
    ("refused", "%", 8, lambda r: _percent(r.refused)),
    ("P2: completed", "", 8, lambda r: str(r.batch_completed)),
    ("", "tokens/s", 9, lambda r: f"{r.batch_tokens_per_second:,.0f}"),
    ("refused", "%", 8, lambda r: _percent(r.batch_refused)),
    ("timeout", "%", 8, lambda r: _percent(r.batch_timed_out)),
    ("GPU", "busy %", 7, lambda r: _percent(r.busy)),
)


def heading(watched: Priority) -> str:
    groups: list[list[Any]] = []
    for over, _, width, _ in _COLUMNS:
        if over:
            groups.append([over, 0])
        groups[-1][1] += width
    first = f"{watched.name}:".ljust(_TITLE_WIDTH) + "".join(f"{over:>{width}}" for over, width in groups)
    second = " " * _TITLE_WIDTH + "".join(f"{name:>{width}}" for _, name, width, _ in _COLUMNS)
    return f"{first}\n{second}"


def line(row: Row) -> str:
    return f"{row.title:{_TITLE_WIDTH}}" + "".join(f"{show(row):>{width}}" for _, _, width, show in _COLUMNS)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _percent(part: float) -> str:
    return f"{100 * part:.1f}"


# ---------------------------------------------------------------------- the command


class Progress:
    """On stderr, every few seconds: how far the present run is."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._told_at = time.monotonic()

    def __call__(self, virtual_ns: int) -> None:
        now = time.monotonic()
        if now - self._told_at >= PROGRESS_EVERY_SECONDS:
            self._told_at = now
            told = f"    at {to_seconds(virtual_ns):,.0f} of {self._seconds:,.0f} virtual seconds"
            print(told, file=sys.stderr, flush=True)


def compare(preset: GpuPreset, rows: Sequence[TraceRow], arguments: argparse.Namespace) -> Iterator[str]:
    """The lines of one preset's table, each as soon as it is known."""
    parameters = parameters_for(preset, 1.0)
    weight, limit = parameters.capacity.output_weight, parameters.scheduling.long_prompt_tokens
    seed, short_as = arguments.seed, SHORT_AS[arguments.short_as]
    classes = by_length(rows, limit, short_as, generator(seed, "classes"))
    tokens = {p: sum(weighted_tokens(row.lengths, weight) for row in classes[p]) for p in PRIORITIES}
    recorded = sum(tokens.values()) / to_seconds(rows[-1].at)
    carried = arguments.tokens_per_second or carried_tokens_per_second(preset, rows, parameters)
    stretch = arguments.stretch or recorded / (arguments.load * carried)
    whole = to_seconds(rows[-1].at) * stretch + 1
    seconds = whole if arguments.seconds is None else min(arguments.seconds, whole)
    progress = Progress(seconds)
    workload = Workload(
        open=[
            WatchedStream(ReplayStream(Caller(p, p.name), classes[p], 1 / stretch), progress)
            for p in PRIORITIES
            if classes[p]
        ]
    )
    yield (
        f"{preset.name}: tokens_per_second {carried:,.0f} (input + {weight:g} × output); "
        f"time × {stretch:.2f} offers {recorded / stretch / carried:.0%} of it,\n"
        f"{tokens[P2] / sum(tokens.values()):.0%} of that in {len(classes[P2])} prompts over {limit} tokens; "
        f"{seconds:,.0f} s, seed {seed}\n"
    )
    yield heading(short_as[0])
    for number, share in enumerate(arguments.p2_share):
        own = parameters_for(preset, carried, share)
        trial = Trial(workload, preset, own, seed, seconds, short_as[0])
        if not number:
            yield line(trial.straight())
        yield "shares " + " / ".join(f"{own.classes[p].share:.1%}" for p in PRIORITIES)
        yield from map(line, trial.rows(alone=arguments.alone))
    yield ""


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.long_prompt_rules", description=__doc__.split("\n\n")[1]
    )
    parser.add_argument(
        "--trace", type=Path, required=True, help="CSV with arrival_s, input_tokens and output_tokens"
    )
    parser.add_argument("--preset", nargs="+", choices=sorted(PRESETS), default=DEFAULT_PRESETS)
    parser.add_argument("--load", type=_positive, default=DEFAULT_LOAD, help="offered, of what is carried")
    parser.add_argument("--stretch", type=_positive, help="slow the trace down by this factor instead")
    parser.add_argument("--tokens-per-second", type=_positive, help="instead of what the preset carries")
    parser.add_argument(
        "--p2-share", nargs="+", type=_positive, default=(None, ROOMY_P2_SHARE), help="a block for each"
    )
    parser.add_argument("--short-as", choices=SHORT_AS, default="P0", help="class of the other prompts")
    parser.add_argument("--alone", action="store_true", help="also each rule without the two others")
    parser.add_argument("--seconds", type=_positive, help="stop the arrivals at this virtual time")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if any(share is not None and share >= 1 for share in arguments.p2_share):
        parser.error("--p2-share must be below 1")
    try:
        rows = spread(read_trace(arguments.trace), generator(arguments.seed, "spread"))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        for name in arguments.preset:
            for told in compare(PRESETS[name], rows, arguments):
                print(told, flush=True)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
