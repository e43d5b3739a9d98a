"""A soak run from its first request to its table."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.books import CACHE_WEIGHT, OUTPUT_WEIGHT, WEIGHTS, Books
from tests.soak.clients import Clients
from tests.soak.levels import Levels, inflow_checks, logged_requests
from tests.soak.processes import ENGINE_NAMES, Engine, WatchedGateway
from tests.soak.report import Check, Report, none_of
from tests.soak.traffic import KEYS, MODEL, WRITE_IDLE_SECONDS, Plan, Plans, body_of
from tests.support.loops import eventually
from tests.support.raw_client import ask, post

MEGABYTE = 1 << 20
WARM_UP = 0.2
"""Of the run: what memory grows by meanwhile does not count."""
RESTING_SECONDS_MAX = 20.0
MEMORY_EVERY_SECONDS = 0.5
PRIMING_TOKENS = 100_000
"""Charged to each class at the start, so that no bucket is full again before the end."""


@dataclass(frozen=True, slots=True)
class Options:
    seconds: float = 600.0
    connections: int = 200
    think_seconds: float = 2.0
    restart_every_seconds: float = 30.0
    reload_every_seconds: float | None = None
    progress_every_seconds: float = 10.0
    memory_growth_max: float = 0.10
    seed: int = 1


@dataclass
class Watch:
    """Looks at the gateway's memory every second."""

    gateway: WatchedGateway
    memory: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the beginning, bytes)"""

    async def run(self) -> None:
        began = time.monotonic()
        while True:
            self.memory.append((time.monotonic() - began, self.gateway.resident_bytes))
            await asyncio.sleep(MEMORY_EVERY_SECONDS)

    def growth(self, seconds: float, allowed: float) -> Check:
        """The median of the last tenth of the time against that of the tenth behind the warm-up."""

        def median(start: float, end: float) -> float:
            within = [size for at, size in self.memory if start * seconds <= at <= end * seconds + 1]
            return statistics.median(within)

        early, late = median(WARM_UP, WARM_UP + 0.1), median(0.9, 1.0)
        figure = f"{late / early - 1:+.1%} ({early / MEGABYTE:.1f} to {late / MEGABYTE:.1f} MiB)"
        return Check("growth of memory after warm-up", figure, f"< {allowed:.0%}", late / early - 1 < allowed)


def settings(engines: Sequence[Engine], folder: Path, p2_queue: int = 20) -> dict[str, Any]:
    """Buckets that are never short, and get so little that each token can be followed. Time-outs are longer
    than an engine waits for its turn on a busy machine."""
    return {
        "server": {"write_idle_seconds": WRITE_IDLE_SECONDS},
        "keys_file": "keys.yaml",
        "decision_log": str(folder / "decisions.jsonl"),
        "upstreams": [
            {
                "name": engine.name,
                "url": engine.url,
                "models": [MODEL],
                "max_in_flight": 10,
                "tokens_per_second": 1,
                "health": {"interval_seconds": 0.5, "fail_after": 2},
            }
            for engine in engines
        ],
        "upstream_timeouts": {"first_byte_seconds": 8, "idle_seconds": 6, "no_upstream_seconds": 3},
        "circuit_breaker": {"failures": 10, "open_seconds": 1},
        "capacity": {
            "burst_seconds": 10**10,
            "output_weight": OUTPUT_WEIGHT,
            "cache_weight": CACHE_WEIGHT,
        },
        "scheduling": {"max_pending_prefill_tokens": 20_000},
        "controller": {"law": "static"},
        "classes": {
            "P0": {"max_wait_seconds": 2, "weight": WEIGHTS["P0"]},
            "P1": {"max_wait_seconds": 4, "weight": WEIGHTS["P1"]},
            "P2": {"max_wait_seconds": 6, "weight": WEIGHTS["P2"], "max_queued_requests": p2_queue},
        },
        "logging": {"format": "json"},
    }


async def soak(options: Options, tell: Callable[[str], None] = print) -> Report:
    """Start everything, let it run for so long, and look at what is left."""
    engines = [Engine.named(name) for name in ENGINE_NAMES]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gateway = await WatchedGateway.launch(settings(engines, folder), folder, KEYS)
        try:
            report = await _Soak(options, gateway, engines, tell).run()
            report.checks.append(await _ends(gateway))
        finally:
            if gateway.is_running:
                await gateway.kill()
            for engine in engines:
                await engine.stop()
    return report


async def _ends(gateway: WatchedGateway) -> Check:
    """SIGTERM, and what comes of it."""
    began = time.monotonic()
    try:
        await gateway.stop()
    except (AssertionError, TimeoutError) as error:
        return Check("end on SIGTERM", "no good one", "status 0", False, [repr(error)[:400]])
    return Check("end on SIGTERM", f"after {time.monotonic() - began:.1f} s", "status 0", True)


class _Soak:
    def __init__(
        self,
        options: Options,
        gateway: WatchedGateway,
        engines: Sequence[Engine],
        tell: Callable[[str], None],
    ) -> None:
        self._options = options
        self._gateway = gateway
        self._engines = engines
        self._tell = tell
        self._watch = Watch(gateway)
        self._plans = Plans(options.seed)
        self._reloads: list[int] = []
        self._clients = Clients(
            gateway.port,
            self._plans,
            connections=options.connections,
            think_seconds=options.think_seconds,
            seed=options.seed,
        )

    async def run(self) -> Report:
        await eventually(self._no_engine_is_up, seconds=RESTING_SECONDS_MAX)
        files, tasks = await self._open_at_rest()
        primed = await self._prime()
        before = await Levels.read(self._gateway)
        await self._load()
        quiet = await self._at_rest()
        after = await Levels.read(self._gateway)
        for engine in self._engines:
            await engine.stop()
        checks = [self._watch.growth(self._options.seconds, self._options.memory_growth_max)]
        checks += await self._given_back(files, tasks, quiet)
        lines = [line for line in self._gateway.endings() if line["request_id"] not in primed]
        outages = [outage for engine in self._engines for outage in engine.outages]
        books = Books(self._clients.seen, lines, outages)
        checks += await self._counts(lines, len(primed))
        checks += books.checks()
        checks += inflow_checks(before, after, books.spent(), self._gateway.folder / "decisions.jsonl")
        checks.append(none_of("tracebacks and internal errors in the log", self._broken_lines()))
        if self._options.reload_every_seconds is not None:
            failed = [f"status {status}" for status in self._reloads if not 200 <= status < 300]
            checks.append(none_of("reloads that failed", failed, len(self._reloads)))
        return Report(checks, books.table(), [self._told(len(outages))])

    # ------------------------------------------------------------------ the load

    async def _load(self) -> None:
        options = self._options
        until = time.monotonic() + options.seconds
        parts = [self._clients.run(until), self._watch.run(), self._restart(), self._progress(until)]
        if options.reload_every_seconds is not None:
            parts.append(self._reload(options.reload_every_seconds))
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # a fault, unless it is that of the clients
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _restart(self) -> None:
        every = self._options.restart_every_seconds
        while True:
            for engine in self._engines:
                await asyncio.sleep(every)
                await engine.restart()

    async def _reload(self, every: float) -> None:
        while True:
            await asyncio.sleep(every)
            folder = self._gateway.folder
            changed = settings(self._engines, folder, p2_queue=20 + len(self._reloads) % 2)
            self._gateway.write(changed)
            self._reloads.append((await self._gateway.ask_to_reload()).status_code)

    async def _progress(self, until: float) -> None:
        while True:
            await asyncio.sleep(self._options.progress_every_seconds)
            seen = self._clients.seen
            failed = sum(each.status is not None and each.status >= 500 for each in seen)
            left = max(until - time.monotonic(), 0)
            self._tell(
                f"{self._options.seconds - left:5.0f} s: {len(seen):,} requests, "
                f"{self._clients.in_flight} open, "
                f"{failed:,} times 5xx, {sum(s.fault is not None for s in seen)} without an answer; "
                f"{self._gateway.resident_bytes / MEGABYTE:.1f} MiB, {self._gateway.open_files} files, "
                f"{sum(len(e.outages) for e in self._engines)} engines killed"
            )

    def _told(self, outages: int) -> str:
        took = self._options.seconds
        peak = max(size for _, size in self._watch.memory) / MEGABYTE
        return (
            f"{len(self._clients.seen):,} requests of {self._options.connections} connections in {took:g} s, "
            f"{outages} engines killed, {len(self._reloads)} reloads; memory at most {peak:.1f} MiB"
        )

    # ------------------------------------------------------------------ before and after

    async def _no_engine_is_up(self) -> bool:
        upstreams = (await self._gateway.state())["upstreams"].values()
        return not any(upstream["healthy"] for upstream in upstreams)

    async def _open_at_rest(self) -> tuple[int, int]:
        """Open files and tasks while nothing runs and no engine is there to be connected to."""
        await self._gateway.metrics()
        return self._gateway.open_files, await self._gateway.tasks()

    async def _prime(self) -> set[str]:
        """Let each class spend something, so that from here on all that flows in stays; answers the ids."""
        for engine in self._engines:
            await engine.start()

        async def all_up() -> bool:
            state = await self._gateway.state()
            return all(upstream["healthy"] for upstream in state["upstreams"].values())

        primed = []
        while (
            not await all_up()
        ):  # it is up again when a request has succeeded there, so there must be two at once
            primed += [("P0", 5)] * 4
            await asyncio.gather(*(self._prime_one(f"prime-{len(primed) - n}", "P0", 5) for n in range(4)))
        for priority in WEIGHTS:
            primed.append((priority, PRIMING_TOKENS))
            await self._prime_one(f"prime-{len(primed)}", priority, PRIMING_TOKENS)
        await self._gateway.quiet()
        return {f"prime-{number + 1}" for number in range(len(primed))}

    async def _prime_one(self, id: str, priority: str, tokens: int) -> None:
        plan = Plan(id, "plain", "/v1/completions", False, tokens, 1, 0, pause_ms=20.0)
        headers = self._plans.headers(plan, "soak-key-a", priority)
        response = await ask(self._gateway.port, post(plan.path, body_of(plan), headers))
        assert response.status == 200, response

    async def _at_rest(self) -> float:
        """Wait until every gauge is 0; answers how long that took (seconds)."""
        began = time.monotonic()

        async def empty() -> bool:
            return not any((await self._gauges()).values())

        try:
            await eventually(empty, seconds=RESTING_SECONDS_MAX)
        except TimeoutError:
            pass  # the checks will say which
        return time.monotonic() - began

    async def _gauges(self) -> dict[str, float]:
        page, state = await self._gateway.metrics(), await self._gateway.state()
        upstreams, classes = state["upstreams"].values(), state["classes"].values()
        return {
            "in_flight": page.total("in_flight"),
            "queue_depth": page.total("queue_depth"),
            "queue_bytes": page.total("queue_bytes"),
            "throttled and ready": sum(each["throttled"] + each["ready"] for each in classes),
            "places taken": sum(sum(each["in_flight"].values()) for each in upstreams),
            "in-flight tokens": sum(each["in_flight_tokens"] for each in upstreams),
            "pending prefill": sum(each["pending_prefill_tokens"] for each in upstreams),
        }

    async def _given_back(self, files: int, tasks: int, quiet_after: float) -> list[Check]:
        async def settled() -> bool:
            now = await self._open_at_rest()
            return now[0] <= files and now[1] <= tasks

        try:
            await eventually(settled, seconds=RESTING_SECONDS_MAX)
        except TimeoutError:
            pass
        files_now, tasks_now = await self._open_at_rest()
        checks = [
            Check("open files", f"{files_now}", f"<= {files}, as before", files_now <= files),
            Check("asyncio tasks", f"{tasks_now}", f"<= {tasks}, as before", tasks_now <= tasks),
        ]
        for name, value in (await self._gauges()).items():
            checks.append(Check(name, f"{value:g}", f"0, was so after {quiet_after:.1f} s", value == 0))
        return checks

    async def _counts(self, lines: list[dict[str, Any]], primed: int) -> list[Check]:
        page = await self._gateway.metrics()
        sent = len(self._clients.seen)
        counted = sum(page.outcomes().values()) - primed
        path = self._gateway.folder / "decisions.jsonl"

        async def written() -> bool:
            return logged_requests(path) - primed >= len(lines)

        try:
            await eventually(written, seconds=RESTING_SECONDS_MAX)
        except TimeoutError:
            pass
        figures = {
            "requests counted by outcome": counted,
            "log lines of requests": len(lines),
            "decision log lines of requests": logged_requests(path) - primed,
        }
        return [
            Check(name, f"{figure:,}", f"{sent:,}, as were sent", figure == sent)
            for name, figure in figures.items()
        ]

    def _broken_lines(self) -> list[str]:
        marks = ("Traceback", '"event":"internal error"', '"level":"critical"', "never retrieved")
        return [line for line in self._gateway.lines if any(mark in line for mark in marks)]
