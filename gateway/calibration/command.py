"""`qos-gateway calibrate`: the measurement with a progress bar around it."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .engine import Engine
from .probes import Bounds, Calibration
from .rendering import as_yaml

BAR_EVERY_SECONDS = 0.2


def warning(url: str, bounds: Bounds) -> str:
    """What is said before anything is sent."""
    return (
        f"This loads {url} for up to {bounds.seconds:g} s with up to {bounds.tokens:,} tokens, as much at "
        "once as it takes; whoever else uses it will wait, and a metered one will charge."
    )


async def calibrate(
    url: str, model: str | None, api_key: str | None, bounds: Bounds, tpot_target: float
) -> str:
    """The YAML. Raises `EngineProblem`, and ValueError for a URL that is none."""
    engine = Engine(url, model, api_key)
    began = time.monotonic()
    try:
        with progress(bounds.seconds) as show:
            suggestion = await Calibration(engine, bounds, tpot_target, show).run()
    finally:
        await engine.aclose()
    seconds = time.monotonic() - began
    return as_yaml(suggestion, engine.url, engine.model, seconds=seconds, tokens=engine.tokens_used)


@contextmanager
def progress(seconds: float) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal's standard error, which is full when the time is over; elsewhere a line for each
    thing that is begun."""
    if not sys.stderr.isatty():
        yield lambda doing: print(doing, file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=seconds)
        began = time.monotonic()
        ticking = asyncio.create_task(_repeat(lambda: bars.update(task, completed=time.monotonic() - began)))
        try:
            yield lambda doing: bars.update(task, description=doing)
        finally:
            ticking.cancel()


async def _repeat(show: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(BAR_EVERY_SECONDS)
        show()
