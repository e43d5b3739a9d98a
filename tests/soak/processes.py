"""The processes of a soak run: a gateway that is looked at from outside, and engines that are killed."""

import asyncio
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from gateway.keys import hash_key
from tests.support.gateway_process import (
    READY_SECONDS_MAX,
    GatewayProcess,
    Settings,
    write_configuration,
)
from tests.support.loops import eventually
from tests.support.processes import resident_bytes

ENGINE_NAMES = ("gpu0", "gpu1")
AFTERMATH_SECONDS = 1.5
"""So long after its engine is back a request may still show that it was away: the connections of before are
found dead one by one, and its breaker opens once more for a trial."""


class WatchedGateway(GatewayProcess):
    """A gateway that tells how many tasks it has, and what the system knows of it."""

    @classmethod
    async def launch(
        cls, settings: Settings, folder: Path, keys: Mapping[str, Mapping[str, Any]]
    ) -> "WatchedGateway":
        """Answers when the ports are open, whether or not an engine is up."""
        entries = [
            {"id": f"key-{n}", "sha256": hash_key(key), **rest} for n, (key, rest) in enumerate(keys.items())
        ]
        config = write_configuration(folder, settings, entries)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.soak.watched_gateway", "serve", "--config", str(config)),
            stdout=PIPE,
            stderr=PIPE,
            env={name: value for name, value in os.environ.items() if not name.startswith("QOS_")},
            limit=16 * 1024 * 1024,
        )
        gateway = cls(process, folder, None)
        try:
            await gateway._find_ports()
        except BaseException:
            await gateway.kill()
            raise
        return gateway

    async def tasks(self) -> int:
        """Its asyncio tasks at this moment."""
        told = self._times_told()
        os.kill(self.pid, signal.SIGUSR1)
        await eventually(lambda: self._times_told() > told)
        return int([line for line in self.log if line["event"] == "tasks"][-1]["tasks"])

    def _times_told(self) -> int:
        return sum(line["event"] == "tasks" for line in self.log)

    @property
    def resident_bytes(self) -> int:
        return resident_bytes(self.pid)

    @property
    def open_files(self) -> int:
        """File descriptors, sockets included."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@dataclass
class Outage:
    """From its kill until an engine is known to be back, in seconds of the monotonic clock."""

    engine: str
    began: float
    ended: float = float("inf")

    def meets(self, start: float, end: float) -> bool:
        return start <= self.ended + AFTERMATH_SECONDS and end >= self.began


@dataclass
class Engine:
    """One engine on a port of its own, which stays the same when it is started again."""

    name: str
    port: int
    outages: list[Outage] = field(default_factory=list)
    _process: Process | None = None

    @classmethod
    def named(cls, name: str) -> Self:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return cls(name, free.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.soak.engine", str(self.port)), stdout=PIPE
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(READY_SECONDS_MAX):
            said = await self._process.stdout.readline()
        assert said == b"ready\n", f"{self.name} did not start"

    async def stop(self) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
            self._process = None

    async def restart(self) -> None:
        """Kill it as it stands, with all that it is doing, and start another in its place."""
        outage = Outage(self.name, time.monotonic())
        self.outages.append(outage)
        await self.stop()
        await self.start()
        outage.ended = time.monotonic()
