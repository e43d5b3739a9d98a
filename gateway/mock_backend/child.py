"""A mock GPU as a child process, for a gateway that has no engine of its own (`mock://PRESET`).

It is a process and not a task because its timing must not depend on the load of the gateway it stands behind.
The child lives no longer than its parent: it exits when its stdin, a pipe from the parent, is closed.
"""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from .gpu_model import SchedulingPolicy, find_preset

READY_SECONDS_MAX = 20.0
_KEPT_STDERR_BYTES = 8192


class MockGpuError(Exception):
    """The child did not get ready; the message ends with what it said on stderr."""


def parse_mock_url(url: str) -> str:
    """The preset that `mock://PRESET` names, or a ValueError that lists the presets there are."""
    parts = urlsplit(url)
    if parts.scheme != "mock" or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not of the form mock://PRESET, as in mock://seed_32k")
    return find_preset(parts.netloc).name


class MockGpuProcess:
    """A running mock GPU. `await MockGpuProcess.start("seed_32k")`, then `url`, then `await stop()`."""

    def __init__(self, process: Process, url: str, errors: "_StderrTail") -> None:
        self._process = process
        self._errors = errors
        self.url = url
        """`http://127.0.0.1:PORT`, without a slash at the end."""

    @classmethod
    async def start(
        cls,
        preset: str,
        *,
        policy: SchedulingPolicy = "fcfs",
        max_num_seqs: int | None = None,
        max_num_queued_reqs: int | None = None,
        ready_seconds_max: float = READY_SECONDS_MAX,
    ) -> "MockGpuProcess":
        """Returns when the child accepts connections; no child is left behind when it does not."""
        find_preset(preset)
        process = await asyncio.create_subprocess_exec(
            *_command(preset, policy, max_num_seqs, max_num_queued_reqs),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,  # a Ctrl-C is meant for the gateway, which still drains its streams
        )
        errors = _StderrTail(process)
        try:
            async with asyncio.timeout(ready_seconds_max):
                url = await _read_url(process)
        except TimeoutError as error:
            said = await _end(process, errors, grace_seconds=0)
            raise MockGpuError(f"the mock GPU was not ready in {ready_seconds_max} s: {said}") from error
        except BaseException:
            await _end(process, errors, grace_seconds=0)
            raise
        if url is None:
            said = await _end(process, errors, grace_seconds=0)
            raise MockGpuError(f"the mock GPU did not start: {said}")
        return cls(process, url, errors)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The child's exit status; None while it runs."""
        return self._process.returncode

    async def stop(self, grace_seconds: float = 3.0) -> None:
        """End the child, by force after the grace. A second call does nothing."""
        await _end(self._process, self._errors, grace_seconds)


class MockGpus:
    """The mock GPUs of one gateway, by upstream name. They start when this is made, all at once."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        """`urls` that are not of the form `mock://PRESET` are left alone. To be made inside the loop."""
        self._starting = {
            name: asyncio.create_task(MockGpuProcess.start(parse_mock_url(url)))
            for name, url in urls.items()
            if url.startswith("mock:")
        }

    async def url(self, name: str) -> str | None:
        """Where that one can be reached, once it can; None if there is none of that name."""
        starting = self._starting.get(name)
        return None if starting is None else (await starting).url

    async def stop(self) -> None:
        started = await asyncio.gather(*self._starting.values(), return_exceptions=True)
        await asyncio.gather(*(gpu.stop() for gpu in started if isinstance(gpu, MockGpuProcess)))


class _StderrTail:
    """Reads a child's stderr, so that it never blocks on it, and keeps the end."""

    def __init__(self, process: Process) -> None:
        assert process.stderr is not None
        self._task = asyncio.create_task(self._read(process.stderr))
        self._kept = b""

    async def text(self) -> str:
        """What was kept, complete once the child has ended."""
        await asyncio.wait([self._task])
        return self._kept.decode(errors="replace").strip()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(4096):
            self._kept = (self._kept + part)[-_KEPT_STDERR_BYTES:]


def _command(
    preset: str, policy: SchedulingPolicy, max_num_seqs: int | None, max_num_queued_reqs: int | None
) -> list[str]:
    command = [sys.executable, "-m", "gateway.mock_backend", "--preset", preset, "--policy", policy]
    command += ["--host", "127.0.0.1", "--port", "0", "--exit-with-parent"]
    if max_num_seqs is not None:
        command += ["--max-num-seqs", str(max_num_seqs)]
    if max_num_queued_reqs is not None:
        command += ["--max-num-queued-reqs", str(max_num_queued_reqs)]
    return command


async def _read_url(process: Process) -> str | None:
    """The URL of the ready line; None when the child ends without one."""
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    match line.split():
        case ["ready", url, _]:
            return url
        case _:
            return None


async def _end(process: Process, errors: _StderrTail, grace_seconds: float) -> str:
    """End the process and return the last it said on stderr."""
    assert process.stdin is not None
    if process.returncode is None:
        _signal(process.terminate)
        try:
            await asyncio.wait_for(process.wait(), grace_seconds)
        except TimeoutError:
            _signal(process.kill)
    await process.wait()
    process.stdin.close()
    return await errors.text()


def _signal(send: Callable[[], None]) -> None:
    try:
        send()
    except ProcessLookupError:
        pass  # it has just ended
