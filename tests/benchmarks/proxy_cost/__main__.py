"""What the gateway costs beside its peers, in one run: `make bench`, or `python -m` with this package.

CPU per plain request and per streamed chunk, added latency, added gaps between chunks; medians of rounds in
which all take turns, and the gateway's ratios to each peer with their spread, beside what they should be.
`make bench-peers` installs the peers; one that is missing is left out, with a note.
"""

import asyncio
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.benchmarks.proxy_cost.contenders import CONTENDERS, DIRECT, Contender
from tests.benchmarks.proxy_cost.cores import Cores
from tests.benchmarks.proxy_cost.machine import Machine, load_average
from tests.benchmarks.proxy_cost.report import GOAL_HEADINGS, Result, figure_rows, goal_rows, terminal_table
from tests.benchmarks.proxy_cost.rounds import CLOCK_STREAMS, QUICK, Contestant, Plan, Race
from tests.benchmarks.proxy_cost.running import NotStarted, Target, running_contender, running_engine
from tests.benchmarks.proxy_cost.wrk import WrkMissing, find_wrk

DEFAULT_OUT = Path("build/bench")
COMMITTED = Path("tests/benchmarks/results")
FILE_NAME = "proxy_cost"
SLOW_TO_START = "litellm"
FILE_WIDTH = 140
"""Of tables that go elsewhere than to a terminal."""

Run = Callable[[Contender], Awaitable[Target]]


def main(
    rounds: Annotated[int | None, typer.Option(min=1, help="Default: 5; with --quick 1.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smoke of under a minute, without LiteLLM.")
    ] = False,
    only: Annotated[str | None, typer.Option(help="Some of them: --only direct,qos-gateway,nginx.")] = None,
    out: Annotated[
        Path,
        typer.Option(
            help=f"Folder for {FILE_NAME}.md and {FILE_NAME}.json. The committed result is made on a quiet "
            f"machine with --out {COMMITTED}."
        ),
    ] = DEFAULT_OUT,
) -> None:
    """What the gateway costs beside its peers: CPU, latency, gaps between chunks."""
    console = Console(stderr=True)
    try:
        find_wrk()
        wanted = _wanted(only, quick)
    except (WrkMissing, ValueError) as error:
        console.print(str(error), style="red")
        raise typer.Exit(2) from None
    plan = QUICK if quick else Plan()
    if rounds is not None:
        plan = replace(plan, rounds=rounds)
    try:
        result = uvloop.run(_run(wanted, plan, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(130) from None
    _show(result)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{FILE_NAME}.md").write_text(result.as_markdown(), encoding="utf-8")
    (out / f"{FILE_NAME}.json").write_text(result.as_json(), encoding="utf-8")
    console.print(f"written to {out / FILE_NAME}.md and .json")


def _wanted(only: str | None, quick: bool) -> list[Contender]:
    """Raises ValueError for a name that nobody has."""
    if only is None:
        return [c for c in CONTENDERS if not quick or c.name != SLOW_TO_START]
    names = [name.strip() for name in only.split(",") if name.strip() and name.strip() != DIRECT]
    known = {c.name for c in CONTENDERS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only: {', '.join(unknown)}; there are {DIRECT}, {', '.join(sorted(known))}")
    return [c for c in CONTENDERS if c.name in names]


@dataclass
class Lineup:
    """Who runs, and why others do not."""

    targets: list[Target] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    async def start(self, wanted: Sequence[Contender], run: Run, console: Console) -> None:
        for contender in wanted:
            name, version = contender.name, contender.version()
            if version is None:
                self.notes.append(f"{name}: absent, not measured (`make bench-peers` installs it)")
                continue
            console.print(f"starting {name} {version}")
            try:
                self.targets.append(await run(contender))
            except NotStarted as error:
                self.notes.append(f"{name} {version}: did not start, not measured: {error}")
                continue
            self.versions[name], self.remarks[name] = version, contender.remarks

    def judge(self, contestants: Sequence[Contestant]) -> None:
        for contestant in contestants:
            name = contestant.target.name
            if contestant.wrong is not None:
                self.notes.append(f"{name}: answered wrongly, its figures do not count: {contestant.wrong}")
            elif contestant.slow:
                self.notes.append(f"{name}: too slow for {CLOCK_STREAMS} streams at 50 tokens/s, so no gaps")


async def _run(wanted: Sequence[Contender], plan: Plan, console: Console) -> Result:
    load_before, machine, cores = load_average(), Machine.this_one(), Cores.of_this_machine()
    cores.pin_this_process()
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    lineup = Lineup()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="proxy-cost-")))
        engine = await stack.enter_async_context(running_engine())

        async def run(contender: Contender) -> Target:
            return await stack.enter_async_context(running_contender(contender, engine, cores, folder))

        await lineup.start(wanted, run, console)
        race = Race(engine, lineup.targets, plan)
        with _progress(console) as progress:
            bar = progress.add_task("", total=race.steps)
            async for step in race.run():
                progress.update(bar, description=step, advance=1)
                if not console.is_terminal:
                    console.print(step)
    lineup.judge(race.contestants)
    return Result(
        machine=machine,
        cores=str(cores),
        date=datetime.now(UTC).date().isoformat(),
        arguments=" ".join(sys.argv[1:]),
        versions=lineup.versions,
        remarks=lineup.remarks,
        notes=lineup.notes,
        load_before=load_before,
        load_during=race.load_during,
        rounds=race.rounds,
    )


def _progress(console: Console) -> Progress:
    """It draws seldom: it runs on the core of the load."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    hidden = not console.is_terminal
    return Progress(*columns, console=console, refresh_per_second=1, transient=True, disable=hidden)


def _show(result: Result) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    console.print(terminal_table("The gateway against its goals", GOAL_HEADINGS, goal_rows(result.rounds)))
    console.print(terminal_table("Medians (smallest to largest)", *figure_rows(result.rounds)))
    for note in result.notes:
        console.print(note, markup=False)
    console.print(result.quiet)


if __name__ == "__main__":
    typer.run(main)
