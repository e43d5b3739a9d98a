"""From the start of the process to `/readyz` 200, with an engine that is up already."""

import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, Process
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.benchmarks.growth.table import Row
from tests.benchmarks.proxy_cost.running import free_port
from tests.support.raw_client import get
from tests.support.scripted_engine import scripted_engine

READY_SECONDS_MAX = 1.0
_ASK_AGAIN_SECONDS = 0.005
_GIVE_UP_SECONDS = 60.0


@dataclass(frozen=True)
class Start:
    wall_seconds: float
    cpu_seconds: float
    """User and system time of the process until then."""


async def rows(runs: int) -> list[Row]:
    async with scripted_engine() as engine:
        starts = [await _start(engine.url) for _ in range(runs)]
    wall = sorted(start.wall_seconds for start in starts)
    cpu = statistics.median(start.cpu_seconds for start in starts)
    median = statistics.median(wall)
    spread = f"{median:.2f} s ({wall[0]:.2f} to {wall[-1]:.2f})"
    what = f"start to ready, median of {runs}"
    return [
        Row(what, spread, f"< {READY_SECONDS_MAX:.1f} s", median < READY_SECONDS_MAX),
        Row("CPU time of the process until then", f"{cpu:.2f} s"),
    ]


async def _start(engine_url: str) -> Start:
    port, operations_port = free_port(), free_port()
    server = {"port": port, "operations_port": operations_port}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "gateway.yaml"
        config.write_text(yaml.safe_dump({"server": server, "upstreams": [{"name": "a", "url": engine_url}]}))
        command = (sys.executable, "-m", "gateway", "serve", "--config", str(config))
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL)
        try:
            async with asyncio.timeout(_GIVE_UP_SECONDS):
                while not await _is_ready(port):
                    if process.returncode is not None:
                        raise RuntimeError(f"the gateway has ended with status {process.returncode}")
                    await asyncio.sleep(_ASK_AGAIN_SECONDS)
            return Start(time.perf_counter() - began, _cpu_seconds(process))
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()


async def _is_ready(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(get("/readyz", [("connection", "close")]))
        return b" 200 " in await reader.readline()
    finally:
        writer.close()


def _cpu_seconds(process: Process) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
