"""Running processes: the engine stand-in and the contenders, from start to end."""

import asyncio
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.benchmarks.proxy_cost.client import Connection, Exchange, WrongAnswer, chat_request
from tests.benchmarks.proxy_cost.contenders import DIRECT, ROOT, Contender, Setting, free_key
from tests.benchmarks.proxy_cost.cores import Cores
from tests.benchmarks.proxy_cost.cpu_time import tree_cpu_seconds

READY_SECONDS_MAX = 90.0
"""LiteLLM imports for a while, longer still the first time."""
ANSWER_SECONDS_MAX = 10.0
STOP_SECONDS_MAX = 5.0
RETRY_SECONDS = 0.25


class NotStarted(Exception):
    """The contender ended, or did not answer rightly in time; the message says what was seen last."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@dataclass(frozen=True)
class Target:
    """Where load goes: a running contender, or the engine itself."""

    name: str
    url: str
    headers: Mapping[str, str]
    pid: int

    def cpu_seconds(self) -> float:
        return tree_cpu_seconds(self.pid)

    async def check(self) -> None:
        """Raise WrongAnswer, OSError or TimeoutError unless both kinds of answer are right."""
        (await self._ask(stream=False)).check_plain()
        (await self._ask(stream=True)).check_stream()

    async def _ask(self, *, stream: bool) -> Exchange:
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            connection = await Connection.open(self.url)
            try:
                return await connection.exchange(chat_request(self.url, self.headers, stream=stream))
            finally:
                connection.close()

    async def check_until_right(self, process: Process, log: Path) -> None:
        """While it starts it may refuse connections or answer anything. Raises NotStarted."""
        deadline = time.monotonic() + READY_SECONDS_MAX
        while True:
            try:
                return await self.check()
            except (WrongAnswer, OSError, TimeoutError) as error:
                seen = str(error) or repr(error)
            if process.returncode is not None:
                raise NotStarted(f"ended with status {process.returncode}: {last_words(log)}")
            if time.monotonic() > deadline:
                raise NotStarted(f"{seen}; its log: {last_words(log)}")
            await asyncio.sleep(RETRY_SECONDS)


def last_words(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-600:].strip() or "(empty)"


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Ours, without the gateway's settings and without proxies."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("QOS_") and not name.lower().endswith("_proxy")
    }
    return {**kept, **more}


async def stop(process: Process) -> None:
    """With all that it has started: it leads a session of its own."""
    if process.returncode is not None:
        return
    _signal_group(process.pid, signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_SECONDS_MAX):
            await process.wait()
    except TimeoutError:
        _signal_group(process.pid, signal.SIGKILL)
        await process.wait()


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass  # it has just ended


@asynccontextmanager
async def running_engine() -> AsyncIterator[Target]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.benchmarks.proxy_cost.engine"),
        stdin=DEVNULL,
        stdout=PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        target = Target(DIRECT, f"http://127.0.0.1:{port}", {}, process.pid)
        await target.check()
        yield target
    finally:
        await stop(process)


async def set_pace(engine_url: str, mode: Literal["turns", "clocks"], interval_ms: float) -> None:
    """How streams go that begin from now on; see `engine`."""
    connection = await Connection.open(engine_url)
    head = f"POST /pace/{mode}/{interval_ms:g} HTTP/1.1\r\nhost: engine\r\ncontent-length: 0\r\n\r\n"
    await connection.exchange(head.encode())
    connection.close()


@asynccontextmanager
async def running_contender(
    contender: Contender, engine: Target, cores: Cores, folder: Path
) -> AsyncIterator[Target]:
    """Started on the proxy's core, and answering rightly. Raises NotStarted."""
    folder = folder / contender.name
    folder.mkdir()
    setting = Setting(folder, engine.url, free_port(), free_port(), free_key())
    headers = {"authorization": f"Bearer {setting.key}"} if contender.takes_key else {}
    log = folder / "log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *cores.on_proxy_core(contender.command(setting)),
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            cwd=ROOT,
            env=environment(contender.environ(setting)),
            start_new_session=True,
        )
    try:
        target = Target(contender.name, f"http://127.0.0.1:{setting.port}", headers, process.pid)
        await target.check_until_right(process, log)
        yield target
    finally:
        await stop(process)
