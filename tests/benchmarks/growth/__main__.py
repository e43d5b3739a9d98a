"""How cost grows with the work: what a decision costs while others wait, memory, and the start.

    make bench-growth
    make bench-growth ARGS="memory --queued 2000"

One Markdown table for each part, with what is demanded beside it. Figures of one run go together; on a
shared machine two runs do not.
"""

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tests.benchmarks.growth import decisions, memory, start_up
from tests.benchmarks.growth.table import Row, table
from tests.benchmarks.proxy_cost.machine import Machine, load_average


class Part(StrEnum):
    DECISIONS = "decisions"
    MEMORY = "memory"
    START_UP = "start-up"


TITLES = {
    Part.DECISIONS: "Decisions of the policy, readers of the data path: CPU time, medians (and the shortest)",
    Part.MEMORY: "Resident memory",
    Part.START_UP: "Start-up",
}


def main(
    parts: Annotated[list[Part] | None, typer.Argument(help="Default: all.", show_default=False)] = None,
    runs: Annotated[int, typer.Option(min=1, help="Of the start.")] = 5,
    queued: Annotated[int, typer.Option(min=1, help="Requests, each with its connection.")] = 5000,
    streams: Annotated[int, typer.Option(min=1, help="Each with two connections.")] = 1000,
    seconds: Annotated[float, typer.Option(min=0.01, help="Of each micro-benchmark.")] = 1.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the Markdown there too.")] = None,
) -> None:
    """What a decision, a waiting request and a start cost, and how that grows."""
    text = f"{Machine.this_one()}\n\nLoad average before: {load_average()}\n"
    print(text, flush=True)
    for part in parts or list(Part):
        measured = table(TITLES[part], asyncio.run(_rows(part, runs, queued, streams, seconds)))
        print(measured, flush=True)
        text += "\n" + measured
    if out is not None:
        out.write_text(text, encoding="utf-8")


async def _rows(part: Part, runs: int, queued: int, streams: int, seconds: float) -> list[Row]:
    match part:
        case Part.DECISIONS:
            return list(await asyncio.to_thread(lambda: [*decisions.rows(seconds)]))
        case Part.MEMORY:
            return [row async for row in memory.rows(queued, streams)]
        case Part.START_UP:
            return await start_up.rows(runs)


if __name__ == "__main__":
    typer.run(main)
