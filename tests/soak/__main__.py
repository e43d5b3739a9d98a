"""Ten minutes of everything at once: `make soak`, or `python -m tests.soak`.

A real gateway in front of two engines that are killed and started again, and 200 connections that finish,
leave, read slowly or not at all, send nonsense and wrong keys, while the engines reset, fall silent, lie and
refuse. At the end nothing may be left, nothing may have grown, and every request must have ended as the books
say. Ends with status 1 where a check does not hold.
"""

import argparse
import asyncio
import signal
import sys
from functools import partial

import uvloop

from tests.soak.report import Report
from tests.soak.run import Options, soak


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Options()
    parser.add_argument("--seconds", type=float, default=default.seconds, help="default %(default)g")
    parser.add_argument("--connections", type=int, default=default.connections, help="default %(default)d")
    parser.add_argument(
        "--think",
        type=float,
        default=default.think_seconds,
        help="mean seconds between two requests (%(default)g)",
    )
    parser.add_argument(
        "--restart-every",
        type=float,
        default=default.restart_every_seconds,
        help="seconds between two kills of an engine (%(default)g)",
    )
    parser.add_argument("--reload", action="store_true", help="reload a changed configuration every minute")
    parser.add_argument("--seed", type=int, default=default.seed)
    given = parser.parse_args()
    options = Options(
        seconds=given.seconds,
        connections=given.connections,
        think_seconds=given.think,
        restart_every_seconds=given.restart_every,
        reload_every_seconds=60.0 if given.reload else None,
        seed=given.seed,
    )
    try:
        report = uvloop.run(_interruptible(options))
    except asyncio.CancelledError:
        print("stopped before its end", file=sys.stderr)
        return 130
    print("\n".join(report.lines()))
    return 0 if report.holds else 1


async def _interruptible(options: Options) -> Report:
    """Ctrl-C ends the run, and with it the processes that it has started."""
    task = asyncio.ensure_future(soak(options, partial(print, flush=True)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    return await task


if __name__ == "__main__":
    sys.exit(main())
