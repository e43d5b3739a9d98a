"""The seed scenario with real processes: `make seed-scenario`, or `python -m tests.benchmarks.seed_scenario`.

(a) 64 users read their answers from a mock GPU while one prompt of 32,768 tokens arrives: the longest wait of
anyone between two tokens, before and after. (b) A P0 and a P1 conversation a second beside P2 clients that
always have another such prompt: first straight to the engine, then through the gateway as it is configured by
default. The figures are measured at the client. A gateway cannot shorten a stall, only say how often.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import uvloop

from gateway.demo.gateway_process import GatewayProcess
from gateway.demo.load_client import LoadClient
from gateway.mock_backend.child import MockGpuProcess
from gateway.policy.parameters import PolicyParameters
from gateway.policy_parameters import policy_parameters
from gateway.settings import Settings
from gateway.simulator.report import Report, make_report, percentile, render
from gateway.simulator.workload import CHAT_LENGTHS, Caller, LengthSource, read_trace, recorded_lengths
from tests.support.seed_scenario import (
    LONG_PROMPT_AT_SECONDS,
    PRESET,
    QUIET_FROM_SECONDS,
    STALL_SECONDS,
    endless_long_prompts,
    stalled_users,
)

PROGRESS_EVERY_SECONDS = 1.0
PROGRESS_LINE_EVERY_SECONDS = 15.0
"""Where the output is no terminal."""
NANOSECONDS_PER_MILLISECOND = 1_000_000


@dataclass
class TokenTimes:
    """When tokens came, by request, of the class `name`."""

    name: str
    of: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def __call__(self, caller: Caller, number: int, now: int) -> None:
        if caller.priority.name == self.name:
            self.of[number].append(now)

    def gaps_ms(self, from_seconds: float, to_seconds: float) -> list[float]:
        """Ascending; of gaps that end in that time."""
        low, high = from_seconds * 1e9, to_seconds * 1e9
        return sorted(
            (later - earlier) / NANOSECONDS_PER_MILLISECOND
            for times in self.of.values()
            for earlier, later in pairwise(times)
            if low <= later < high
        )


@asynccontextmanager
async def progress(title: str, client: LoadClient, seconds: float) -> AsyncIterator[None]:
    terminal = sys.stdout.isatty()

    async def show() -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_EVERY_SECONDS if terminal else PROGRESS_LINE_EVERY_SECONDS)
            elapsed = time.monotonic() - started
            told = f"{title}: {elapsed:4.0f} of {seconds:g} s, {client.ended} ended, {client.in_flight} open"
            print(f"\r{told:<78}" if terminal else told, end="" if terminal else "\n", flush=True)

    task = asyncio.create_task(show())
    try:
        yield
    finally:
        task.cancel()
        if terminal:
            print(f"\r{'':<78}\r", end="", flush=True)


async def measure_stall(engine_url: str, parameters: PolicyParameters, seed: int) -> str:
    times = TokenTimes("P0")
    client = LoadClient(engine_url, parameters, seed=seed, on_tokens=times)
    async with progress("(a) straight to the engine", client, STALL_SECONDS):
        await client.run(stalled_users(), STALL_SECONDS, wait_for_last=False)
    before = times.gaps_ms(QUIET_FROM_SECONDS, LONG_PROMPT_AT_SECONDS)
    after = times.gaps_ms(LONG_PROMPT_AT_SECONDS, STALL_SECONDS)
    return (
        f"(a) {len(times.of)} users, one prompt of 32,768 tokens, no gateway: gaps between tokens\n"
        f"    before it: median {percentile(before, 0.5):,.1f} ms, largest {before[-1]:,.1f} ms\n"
        f"    with it:   median {percentile(after, 0.5):,.1f} ms, largest {after[-1]:,.1f} ms\n"
        + told_of_generator(client)
    )


async def measure_load(
    title: str, url: str, parameters: PolicyParameters, lengths: LengthSource, seconds: float, seed: int
) -> tuple[Report, str]:
    client = LoadClient(url, parameters, seed=seed)
    async with progress(f"(b) {title}", client, seconds):
        await client.run(endless_long_prompts(lengths), seconds)
    given_up = ", ".join(f"{count} {name}" for name, count in sorted(client.dropped.items())) or "none"
    told = f"{title}: requests given up unanswered when the time was over: {given_up}\n"
    return make_report(title, client.records, parameters, seconds), told + told_of_generator(client)


def told_of_generator(client: LoadClient) -> str:
    """Whether the figures are those of the engine and the gateway, or of a load generator out of breath."""
    late = sorted(ns / NANOSECONDS_PER_MILLISECOND for ns in client.lateness_ns)
    return (
        f"    load generator: {len(late)} requests, late by {percentile(late, 0.5):.2f} ms in the median, "
        f"{percentile(late, 0.99):.2f} ms at P99, {late[-1]:.2f} at most; {client.cpu_share:.0%} of a core\n"
    )


async def run(arguments: argparse.Namespace, lengths: LengthSource) -> None:
    parameters = policy_parameters(Settings())
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    loop.add_signal_handler(signal.SIGTERM, this.cancel)
    gpu = await MockGpuProcess.start(PRESET)
    try:
        if "a" in arguments.only:
            print(await measure_stall(gpu.url, parameters, arguments.seed))
        if "b" in arguments.only:
            await compare(gpu, parameters, lengths, arguments.seconds, arguments.seed)
    finally:
        await gpu.stop()


async def compare(
    gpu: MockGpuProcess, parameters: PolicyParameters, lengths: LengthSource, seconds: float, seed: int
) -> None:
    straight, told = await measure_load("straight", gpu.url, parameters, lengths, seconds, seed)
    gateway = await GatewayProcess.start(gpu.url)
    try:
        guarded, told_too = await measure_load("gateway", gateway.url, parameters, lengths, seconds, seed)
    finally:
        await gateway.stop()
    print(
        f"(b) {seconds:g} s each: one P0 and one P1 conversation a second, and endless P2 prompts of 32,768\n"
    )
    print(render([straight, guarded]))
    print(told + told_too)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.seed_scenario", description=__doc__.split("\n\n")[1]
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="how long each half of (b) lasts")
    parser.add_argument("--trace", type=Path, help="CSV with input_tokens and output_tokens to draw from")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("a", "b", "ab"), default="ab")
    arguments = parser.parse_args()
    if arguments.seconds <= 0:
        parser.error("--seconds must be above 0")
    try:
        lengths = CHAT_LENGTHS if arguments.trace is None else recorded_lengths(read_trace(arguments.trace))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        uvloop.run(run(arguments, lengths))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("\nstopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
