"""What several gateways with one budget do, in one run: `make bench-fleet`, or `python -m` with this package.

Three replicas before one engine with uneven load, held against one gateway with the same requests; the store
stopped, frozen and back empty; a replica killed; what sharing costs; a rolling restart. Real processes.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tests.benchmarks.fleet import outages, restarts, shares, store_cost
from tests.benchmarks.fleet.outages import How
from tests.benchmarks.fleet.verdicts import HEADINGS, Result, Verdict, say
from tests.benchmarks.proxy_cost.report import terminal_table
from tests.support.store_servers import BINARIES, StoreServer, binary_of

DEFAULT_OUT = Path("build/bench")
COMMITTED = Path("tests/benchmarks/results")
FILE_NAME = "fleet"
WIDTH = 150
"""Of tables that go elsewhere than to a terminal."""

HOW = """\
* Three gateways of the same settings, a budget of 24,000 tokens/s that stays (law `static`), and an engine
  that answers after 20 ms. 160 requests/s come at random (Poisson), 320 tokens each in the mean, sizes
  log-normal: 80 / 80 / 40 % of C in P0 / P1 / P2, twice C together. 80, 15 and 5 % of them come to the
  first, second and third replica. Each request is on a connection of its own.
* *Admitted* is what the request logs of all gateways say they let go, and when; the engine's own count is
  held against it. Costs are exact: prompts are token ids, and output costs nothing. Runs count from their
  tenth second on.
* *One gateway* has the same requests, at the same times, without a store.
* P0 asks for streams; its first token is in time within 2 s of the request; it may wait for tokens for 0.5 s.
  What was refused has missed it.
* The store comes back empty: it keeps nothing on disk. Times begin when it answers again. Replicas are
  looked at every 0.1 s, by their metrics.
* A request that meets a closed port, is hung up on without an answer, or gets a 503 goes to the next replica,
  as behind a balancer.
* Calls of the store are counted by the store (`INFO commandstats`); latency is that of plain requests at
  random times, 50/s at a gateway that shares and at one that does not, both at the same time.
"""


class Part(StrEnum):
    SHARES = "shares"
    STORE = "store"
    REPLICA = "replica"
    CALLS = "calls"
    LATENCY = "latency"
    RESTART = "restart"


TITLES = {
    Part.SHARES: "Three replicas, uneven load, twice C",
    Part.STORE: "The store away for 20 s, and back empty",
    Part.REPLICA: "A replica killed, the one with 80 % of the load",
    Part.CALLS: "Calls of the store",
    Part.LATENCY: "Latency of a plain request",
    Part.RESTART: "Rolling restart",
}


class Kind(StrEnum):
    REDIS = "redis"
    VALKEY = "valkey"
    BOTH = "both"


def main(
    only: Annotated[str | None, typer.Option(help=f"Some parts: --only {','.join(Part)}.")] = None,
    server: Annotated[Kind, typer.Option(help="Which store.")] = Kind.REDIS,
    runs: Annotated[int, typer.Option(min=1, help="Of the comparison with one gateway.")] = 5,
    seconds: Annotated[float, typer.Option(min=25, help="Of each of those.")] = 40.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of the comparison of latencies.")] = 9,
    out: Annotated[
        Path,
        typer.Option(
            help=f"Folder for {FILE_NAME}.md and {FILE_NAME}.json. The committed result is made on a quiet "
            f"machine with --out {COMMITTED}."
        ),
    ] = DEFAULT_OUT,
) -> None:
    """Several gateways with one budget: 12 minutes for each kind of store."""
    try:
        parts = [Part(name.strip()) for name in only.split(",")] if only else list(Part)
    except ValueError as error:
        raise typer.BadParameter(f"{error}; there are {', '.join(Part)}", param_hint="--only") from None
    kinds = [kind for kind in BINARIES if server in (kind, Kind.BOTH)]
    if missing := [kind for kind in kinds if binary_of(kind) is None]:
        raise typer.BadParameter(f"no {' and no '.join(missing)}-server here", param_hint="--server")
    told = [argument for argument in sys.argv[1:] if argument not in ("--out", str(out))]
    result = Result(" ".join(told), HOW)
    for kind in kinds:
        binary = binary_of(kind)
        assert binary is not None
        for part in parts:
            # asyncio's own loop: with uvloop the end of a forked process's pipes is not always told
            asyncio.run(_measure(part, kind, binary, result, runs, seconds, rounds))
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{FILE_NAME}.md").write_text(result.as_markdown(), encoding="utf-8")
    (out / f"{FILE_NAME}.json").write_text(result.as_json(), encoding="utf-8")
    say(f"written to {out / FILE_NAME}.md and .json")
    raise typer.Exit(0 if result.met else 1)


async def _measure(
    part: Part, kind: str, binary: str, result: Result, runs: int, seconds: float, rounds: int
) -> None:
    """Each on a store that has just been started."""
    measures: dict[Part, Sequence[tuple[str, Callable[[StoreServer], Awaitable[list[Verdict]]]]]] = {
        Part.SHARES: [("", partial(shares.measure, runs=runs, seconds=seconds))],
        Part.STORE: [(f", {how}", partial(outages.store_away, how=how)) for how in How],
        Part.REPLICA: [("", outages.replica_killed)],
        Part.CALLS: [("", store_cost.calls)],
        Part.LATENCY: [("", partial(store_cost.latency, rounds=rounds))],
        Part.RESTART: [("", restarts.measure)],
    }
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    for suffix, measure in measures[part]:
        store = StoreServer(binary)
        store.start()
        title = f"{TITLES[part]}{suffix} ({kind} {store_version(store)})"
        try:
            verdicts = await measure(store)
        finally:
            store.stop()
        result.sections.append((title, verdicts))
        console.print(terminal_table(title, HEADINGS, [verdict.row for verdict in verdicts]))


def store_version(store: StoreServer) -> str:
    with store.client() as client:
        told = client.info("server")
    return str(told.get("valkey_version") or told["redis_version"])


if __name__ == "__main__":
    typer.run(main)
