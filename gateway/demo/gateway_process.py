"""The gateway as a process of its own, on ports of its own."""

import asyncio
import json
import os
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from pathlib import Path

import yaml

READY_SECONDS_MAX = 30.0
STOP_SECONDS_MAX = 5.0


class GatewayProcess:
    """`await GatewayProcess.start(engine_url)`, then `url`, then `await stop()`. Default settings, but for
    the engine and the ports."""

    def __init__(self, process: Process, config: Path) -> None:
        self._process = process
        self._config = config
        self._last_lines: deque[str] = deque(maxlen=20)
        self._reader: asyncio.Task[None] | None = None
        self.url = ""

    @classmethod
    async def start(cls, engine_url: str) -> "GatewayProcess":
        settings = {
            "server": {"port": 0, "operations_port": 0, "drain_seconds": 0},
            "upstreams": [{"name": "gpu0", "url": engine_url}],
            "logging": {"format": "json"},
        }
        descriptor, path = tempfile.mkstemp(suffix=".yaml", text=True)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yaml.safe_dump(settings, file)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "serve", "--config", path),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env={name: value for name, value in os.environ.items() if not name.startswith("QOS_")},
            start_new_session=True,  # Ctrl-C is for whoever started this, who then stops it
        )
        gateway = cls(process, Path(path))
        try:
            async with asyncio.timeout(READY_SECONDS_MAX):
                await gateway._wait_until_ready()
        except BaseException:
            await gateway.stop()
            raise
        gateway._reader = asyncio.create_task(gateway._read_on())
        return gateway

    @property
    def pid(self) -> int:
        return self._process.pid

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS_MAX)
            except TimeoutError:
                self._process.kill()
        await self._process.wait()
        if self._reader is not None:
            self._reader.cancel()
        self._config.unlink(missing_ok=True)

    async def _wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._last_lines.append(line.decode(errors="replace"))
            try:
                told = json.loads(line)
            except ValueError:
                continue
            if told.get("event") == "ready":
                self.url = told["api"].removesuffix("/v1")
                return
        raise RuntimeError("the gateway did not start:\n" + "".join(self._last_lines))

    async def _read_on(self) -> None:
        """Take its log lines, so that it never waits for somebody to read them."""
        assert self._process.stdout is not None
        while await self._process.stdout.read(65_536):
            pass
