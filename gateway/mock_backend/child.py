"""A mock GPU as a child process: of a gateway that has no engine of its own, or of whoever starts it again.

It is a process and not a task because its timing must not depend on the load of the gateway it stands behind.
The child lives no longer than its parent: it exits when its stdin, a pipe from the parent, is closed.
"""

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from urllib.parse import urlsplit

from .faults import FaultOptions
from .gpu_model import SchedulingPolicy, find_preset

READY_SECONDS_MAX = 20.0
EMBEDDED_RESTART_SECONDS = 1.0
_KEPT_STDERR_BYTES = 8192
_NO_FAULTS = FaultOptions()
_log = logging.getLogger(__name__)


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
        faults: FaultOptions = _NO_FAULTS,
        host: str = "127.0.0.1",
        port: int = 0,
        ready_seconds_max: float = READY_SECONDS_MAX,
    ) -> "MockGpuProcess":
        """Returns when the child accepts connections; no child is left behind when it does not."""
        find_preset(preset)
        options = ["--preset", preset, "--policy", policy, "--host", host, "--port", str(port)]
        for name, value in (("max-num-seqs", max_num_seqs), ("max-num-queued-reqs", max_num_queued_reqs)):
            options += [] if value is None else [f"--{name}", str(value)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.mock_backend", "--exit-with-parent"),
            *options,
            *faults.arguments(),
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

    async def said(self) -> str:
        """The end of what the child has written to stderr, once it has ended."""
        return await self._errors.text()

    async def ended(self) -> int:
        """Wait until the child has ended, and return its exit status."""
        status = await self._process.wait()
        await self.stop()
        return status

    async def stop(self, grace_seconds: float = 3.0) -> None:
        """End the child, by force after the grace. A second call does nothing."""
        await _end(self._process, self._errors, grace_seconds)


Start = Callable[[int], Awaitable[MockGpuProcess]]
"""Start a mock GPU on that port; 0 takes any free one."""


class RestartedMockGpu:
    """A mock GPU that comes back: when its process ends by itself, another takes its place and its port.
    `await RestartedMockGpu.start(…)`, then `url`, which stays the same, then `await stop()`."""

    def __init__(self, gpu: MockGpuProcess, start: Start, after_seconds: float) -> None:
        self.url = gpu.url
        self._gpu = gpu
        self._start = start
        self._after_seconds = after_seconds
        self._keeping = asyncio.create_task(self._keep())

    @classmethod
    async def start(cls, start: Start, after_seconds: float, port: int = 0) -> "RestartedMockGpu":
        """The first one must come up: raises MockGpuError, as `start` does."""
        return cls(await start(port), start, after_seconds)

    @property
    def pid(self) -> int:
        """Of the process that runs now, or ran last."""
        return self._gpu.pid

    async def stop(self) -> None:
        """End the process that runs, or the wait for the next."""
        self._keeping.cancel()
        await asyncio.wait([self._keeping])
        await self._gpu.stop()

    async def _keep(self) -> None:
        port = int(self.url.rpartition(":")[2])
        while True:
            status = await self._gpu.ended()
            _log.warning(
                "the mock GPU has ended with status %d; another one in %g s", status, self._after_seconds
            )
            await asyncio.sleep(self._after_seconds)
            try:
                self._gpu = await self._start(port)
            except MockGpuError as error:
                _log.error("%s", error)


class MockGpus:
    """The mock GPUs of one gateway, by upstream name and configured URL. The first ones start when this is
    made, all at once."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        """`urls` that are not of the form `mock://PRESET` are left alone. To be made inside the loop."""
        self._starting: dict[tuple[str, str], asyncio.Task[RestartedMockGpu]] = {}
        for name, url in urls.items():
            self._begin(name, url)

    def _begin(self, name: str, url: str) -> asyncio.Task[RestartedMockGpu] | None:
        if not url.startswith("mock:"):
            return None
        starting = self._starting.get((name, url))
        if starting is None:
            starting = asyncio.create_task(_start_embedded(parse_mock_url(url)))
            self._starting[name, url] = starting
        return starting

    async def url(self, name: str, url: str) -> str | None:
        """Where that one can be reached, once it can; None if `url` is no mock's. Raises MockGpuError."""
        starting = self._begin(name, url)
        if starting is None:
            return None
        try:
            return (await starting).url
        except MockGpuError:
            self._starting.pop((name, url), None)  # the next one who asks tries again
            raise

    async def stop_all_but(self, kept: Container[tuple[str, str]]) -> None:
        """End those that nobody uses any more, by name and configured URL."""
        await self._stop([key for key in self._starting if key not in kept])

    async def stop(self) -> None:
        await self._stop(list(self._starting))

    async def _stop(self, keys: Iterable[tuple[str, str]]) -> None:
        starting = [self._starting.pop(key) for key in keys]
        started = await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(gpu.stop() for gpu in started if isinstance(gpu, RestartedMockGpu)))


async def _start_embedded(preset: str) -> RestartedMockGpu:
    async def start(port: int) -> MockGpuProcess:
        return await MockGpuProcess.start(preset, port=port)

    return await RestartedMockGpu.start(start, EMBEDDED_RESTART_SECONDS)


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
