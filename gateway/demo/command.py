"""`qos-gateway demo`: the same load first straight at the engine, then through the gateway.

Engine and gateway are processes of their own; all figures are measured here, at the client.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console
from rich.live import Live

from gateway.mock_backend.child import MockGpuProcess
from gateway.policy.parameters import PolicyParameters
from gateway.policy_parameters import policy_parameters
from gateway.settings import Settings
from gateway.simulator.report import Report, make_report, percentile

from .gateway_process import GatewayProcess
from .load import BATCH_CLIENTS, CONVERSATIONS_PER_SECOND, DOCUMENT, PRESET, mixed_load
from .load_client import LoadClient
from .table import GapWatch, Half, closing_words, live_line, live_table, summary_table

REDRAW_SECONDS = 0.5
LINE_SECONDS = 5.0
"""Where the output is no terminal."""


async def run_demo(seconds: float, seed: int, console: Console) -> None:
    """`seconds` for each half. No process outlives this, however it ends. Raises `MockGpuError`, and
    RuntimeError when the gateway does not start."""
    this = asyncio.current_task()
    assert this is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, this.cancel)
    parameters = policy_parameters(Settings())
    console.print(_announcement(seconds), soft_wrap=True)
    gpu = await MockGpuProcess.start(PRESET)
    try:
        without = await _measure("without control", gpu.url, parameters, seconds, seed, console)
        gateway = await GatewayProcess.start(gpu.url)
        try:
            with_control = await _measure("with control", gateway.url, parameters, seconds, seed, console)
        finally:
            await gateway.stop()
    finally:
        await gpu.stop()
    console.print(summary_table(without, with_control))
    for sentence in closing_words(without, with_control, parameters):
        console.print(sentence, soft_wrap=True, highlight=False)


def _announcement(seconds: float) -> str:
    return (
        f"{CONVERSATIONS_PER_SECOND:g} P0 and {CONVERSATIONS_PER_SECOND:g} P1 conversations a second, and "
        f"{BATCH_CLIENTS} P2 clients that always have a prompt of {DOCUMENT.input_tokens:,} tokens, on a "
        f"mock GPU ({PRESET}): {seconds:g} s straight at the engine, then {seconds:g} s through the gateway."
    )


async def _measure(
    title: str, url: str, parameters: PolicyParameters, seconds: float, seed: int, console: Console
) -> Half:
    gaps = GapWatch()
    client = LoadClient(url, parameters, seed=seed, on_tokens=gaps)
    async with _shown(title, client, gaps, parameters, seconds, console):
        await client.run(mixed_load(seconds), seconds)
    report = make_report(title, client.records, parameters, seconds)
    console.print(_told_of_client(title, client), soft_wrap=True, highlight=False)
    return Half(report, client.taken, client.dropped)


@asynccontextmanager
async def _shown(
    title: str,
    client: LoadClient,
    gaps: GapWatch,
    parameters: PolicyParameters,
    seconds: float,
    console: Console,
) -> AsyncIterator[None]:
    """The figures so far, while the block runs: a table that changes, or a line now and then."""
    began = time.monotonic()

    def heading() -> str:
        elapsed = time.monotonic() - began
        when = f"{elapsed:.0f} of {seconds:g} s" if elapsed < seconds else "waiting for the last answers"
        return f"{title}, {when}"

    def report() -> Report:
        return make_report(title, client.records, parameters, seconds)

    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:

            def draw() -> None:
                table = live_table(heading(), report(), client.open, gaps.largest_ms)
                live.update(table, refresh=True)

            async with _every(REDRAW_SECONDS, draw):
                yield
    else:

        def tell() -> None:
            line = live_line(heading(), report(), client.open, gaps.largest_ms)
            console.print(line, soft_wrap=True, highlight=False)

        async with _every(LINE_SECONDS, tell):
            yield


@asynccontextmanager
async def _every(seconds: float, show: Callable[[], None]) -> AsyncIterator[None]:
    async def repeat() -> None:
        while True:
            await asyncio.sleep(seconds)
            show()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()


def _told_of_client(title: str, client: LoadClient) -> str:
    """Whether the figures are those of engine and gateway, or of a client that was out of breath."""
    late = sorted(ns / 1e6 for ns in client.lateness_ns)
    return (
        f"{title}: {len(late)} requests sent, {percentile(late, 0.99) or 0:.1f} ms late at P99; "
        f"the client used {client.cpu_share:.0%} of a core."
    )
