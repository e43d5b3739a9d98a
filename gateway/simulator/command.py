"""`qos-gateway simulate`, from its options to its files: checks, runs, shows, writes."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gateway.config_reading import ConfigError
from gateway.mock_backend.gpu_model import find_preset
from gateway.simulator import plots
from gateway.simulator.comparison import Comparison, render
from gateway.simulator.contenders import Contender, read_contenders
from gateway.simulator.decision_log import read_decision_log, with_older
from gateway.simulator.many_trials import cores, run_jobs
from gateway.simulator.report_files import write_report
from gateway.simulator.traffic import (
    DEFAULT_MIX,
    ClassesBy,
    Crowd,
    LogReplay,
    Mix,
    OpenTraffic,
    Synthetic,
    TraceReplay,
    Traffic,
    is_coarse,
    logged_requests,
)
from gateway.simulator.trial import Job, Trial
from gateway.simulator.workload import CHAT_LENGTHS, LengthSource, read_trace, recorded_lengths

DEFAULT_RATE = 12.0
DEFAULT_SECONDS = 300.0
SECONDS_WORTH_A_PROCESS = 600.0


class Mistake(ValueError):
    """Something that was asked for makes no sense; the text names the option, or the file and line or key."""


@dataclass(frozen=True)
class Asked:
    """The options. None = not given."""

    configs: tuple[Path, ...] = ()
    trace: Path | None = None
    decision_log: Path | None = None
    rate: float | None = None
    burstiness: float = 1.0
    lengths: Path | None = None
    clients: int = 0
    think: float = 1.0
    mix: str | None = None
    classes_by: str = "auto"
    scale: float = 1.0
    retries: int | None = None
    seconds: float | None = None
    preset: str | None = None
    straight: bool = False
    seeds: int = 1
    seed: int = 1
    out: Path | None = None
    plots: bool = True
    processes: int | None = None


@dataclass(frozen=True)
class Plan:
    """All that was asked for, read and checked."""

    contenders: Sequence[Contender]
    traffic: Traffic
    seeds: range
    notes: Sequence[str]
    """What the reader of the report should know about the traffic."""

    @property
    def jobs(self) -> list[Job]:
        return [Job(c, self.traffic, seed) for c in self.contenders for seed in self.seeds]


def simulate(asked: Asked) -> None:
    """Print the table, write the files. Raises Mistake; OSError where a file cannot be written."""
    plan = read_plan(asked)
    if asked.out is not None:
        _make_folder(asked.out)
    for note in plan.notes:
        print(note, file=sys.stderr)
    jobs = plan.jobs
    began = time.perf_counter()
    with _progress_bar([job.traffic.seconds for job in jobs]) as told:
        trials = run_jobs(jobs, asked.processes or _processes(jobs), told)
    print(_speed(jobs, trials, time.perf_counter() - began), file=sys.stderr)
    comparison = Comparison(plan.contenders, trials)
    print(render(comparison), end="", flush=True)
    if asked.out is not None:
        written = write_report(asked.out, comparison, _options(asked))
        if asked.plots and plots.available():
            written += plots.draw(asked.out, comparison)
        elif asked.plots:
            print(plots.HOW_TO_GET, file=sys.stderr)
        print(f"written to {asked.out}: {', '.join(path.name for path in written)}", file=sys.stderr)


def _processes(jobs: Sequence[Job]) -> int:
    """One for each core, but where the work takes no longer than starting them."""
    seconds = sum(job.traffic.seconds for job in jobs)
    return cores() if seconds > SECONDS_WORTH_A_PROCESS else 1


# ---------------------------------------------------------------------- what was asked for


def read_plan(asked: Asked) -> Plan:
    """Raises Mistake."""
    _check_numbers(asked)
    try:
        if asked.preset is not None:
            find_preset(asked.preset)
        contenders = read_contenders(asked.configs, asked.preset, asked.straight)
        traffic, notes = _traffic(asked, contenders[-1])
    except (ConfigError, ValueError) as error:
        raise Mistake(str(error)) from error
    except OSError as error:
        raise Mistake(f"{error.filename}: {error.strerror or error}") from error
    for contender in contenders:
        lacking = sorted(model for model in traffic.models if not contender.serves(model))
        if lacking and contender.gateway:
            raise Mistake(
                f"{asked.decision_log}: asks for the model {lacking[0]}, which no upstream of "
                f"{contender.title} serves"
            )
    seeds = range(asked.seed, asked.seed + asked.seeds)
    return Plan(contenders, traffic, seeds, notes)


def _make_folder(path: Path) -> None:
    """Now, since a long run should not end in a file that cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Mistake(f"--out: {path}: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise Mistake(f"--out: {path}: cannot be written to")


def _check_numbers(asked: Asked) -> None:
    above_zero = ("rate", "scale", "seconds", "seeds", "processes")
    not_below_zero = ("burstiness", "clients", "think", "retries")
    for name in (*above_zero, *not_below_zero):
        value = getattr(asked, name)
        if value is None:
            continue
        is_good = value > 0 if name in above_zero else value >= 0
        if not is_good or value == float("inf"):
            expected = "a number above 0" if name in above_zero else "a number from 0 on"
            raise Mistake(f"--{name}: found {value:g}, expected {expected}")
    given = [name for name in ("trace", "decision_log", "rate") if getattr(asked, name) is not None]
    if len(given) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise Mistake(f"{names} were given, of which one can say when requests come")


def _traffic(asked: Asked, contender: Contender) -> tuple[Traffic, list[str]]:
    try:
        mix = DEFAULT_MIX if asked.mix is None else Mix.parse(asked.mix)
    except ValueError as error:
        raise Mistake(f"--mix: {error}") from error
    lengths: LengthSource = CHAT_LENGTHS
    if asked.lengths is not None:
        lengths = recorded_lengths(read_trace(asked.lengths))
    notes: list[str] = []
    source = _open_traffic(asked, mix, lengths, contender, notes)
    crowd = None
    if asked.clients:
        retries = 2 if asked.retries is None else asked.retries  # as the SDKs do unless told otherwise
        crowd = Crowd(asked.clients, asked.think, retries, lengths, mix)
    whole = DEFAULT_SECONDS if source is None else source.seconds
    seconds = whole if asked.seconds is None else asked.seconds
    if not isinstance(source, Synthetic | None):
        seconds = min(seconds, whole)
    return Traffic(seconds, source, crowd, asked.retries or 0), notes


def _open_traffic(
    asked: Asked, mix: Mix, lengths: LengthSource, contender: Contender, notes: list[str]
) -> OpenTraffic | None:
    if asked.trace is not None:
        return _trace(asked.trace, asked, mix, contender, notes)
    if asked.decision_log is not None:
        return _log(asked.decision_log, asked, notes)
    if asked.rate is None and asked.clients:
        return None
    rate = DEFAULT_RATE if asked.rate is None else asked.rate
    seconds = DEFAULT_SECONDS if asked.seconds is None else asked.seconds
    return Synthetic(rate * asked.scale, asked.burstiness, lengths, mix, seconds)


def _trace(path: Path, asked: Asked, mix: Mix, contender: Contender, notes: list[str]) -> TraceReplay:
    rows = read_trace(path)
    ways = [way.value for way in ClassesBy]
    if asked.classes_by not in ways:
        raise Mistake(f"--classes-by: found {asked.classes_by!r}, expected one of {', '.join(ways)}")
    try:
        limit = contender.parameters.scheduling.long_prompt_tokens
        trace = TraceReplay(rows, asked.scale, mix, ClassesBy(asked.classes_by), limit)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    notes.append(f"{path.name}: {len(rows)} requests in {trace.seconds:,.0f} s at --scale {asked.scale:g}")
    if is_coarse(rows):
        notes.append("its time stamps come in steps; requests are spread over each step at random")
    return trace


def _log(path: Path, asked: Asked, notes: list[str]) -> LogReplay:
    runs = read_decision_log(*with_older(path))
    try:
        log = LogReplay(logged_requests(runs), asked.scale)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    notes.append(
        f"{path.name}: {len(log.requests)} requests in {log.seconds:,.0f} s at --scale {asked.scale:g}"
    )
    if log.without_answer:
        says = "of them got no answer; its length is drawn from the answers of their class"
        notes.append(f"{log.without_answer} {says}")
    lost = sum(run.lost_lines for run in runs)
    if lost:
        notes.append(f"the log says that up to {lost} of its lines are missing")
    return log


def _options(asked: Asked) -> Mapping[str, Any]:
    """As they were given, without those that change nothing of the outcome."""
    options = {name: value for name, value in asdict(asked).items() if value not in (None, ())}
    for name in ("out", "plots", "processes"):
        options.pop(name, None)
    options["configs"] = [path.name for path in asked.configs]
    return {name: value.name if isinstance(value, Path) else value for name, value in options.items()}


# ---------------------------------------------------------------------- on the terminal


@contextmanager
def _progress_bar(seconds: Sequence[float]) -> Iterator[Callable[[int, float], None]]:
    """Of all runs together, on a terminal; nothing elsewhere. `seconds` says how long each of them is."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    done = [0.0] * len(seconds)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{len(seconds)} runs" if len(seconds) > 1 else "running", total=sum(seconds))

        def told(number: int, part: float) -> None:
            done[number] = part * seconds[number]
            bar.update(task, completed=sum(done))

        yield told


def _speed(jobs: Sequence[Job], trials: Sequence[Trial], wall_seconds: float) -> str:
    simulated = sum(job.traffic.seconds for job in jobs)
    cpu = sum(trial.cpu_seconds for trial in trials)
    runs = "1 run" if len(trials) == 1 else f"{len(trials)} runs"
    told = f"{runs}, {simulated:,.0f} s of traffic in {wall_seconds:,.1f} s"
    factors = simulated / wall_seconds, simulated / max(cpu, 1e-9)
    return f"{told}: {factors[0]:,.0f} × real time, {factors[1]:,.0f} × per core"
