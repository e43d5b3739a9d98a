"""Gateway processes without the time that importing takes: forked from one that has imported everything.

    process = await start_gateway(["serve", "--config", "gateway.yaml"], environ)

What is forked runs the same command line in a process of its own, with its own standard streams,
environment, signals and end; only its modules are there already. `FRESH_PROCESSES=1` starts `python -m
gateway` each time, as the tests of the command line always do.
"""

import asyncio
import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from typing import Any

STREAM_BYTES_MAX = 16 * 1024 * 1024
_MESSAGE_BYTES_MAX = 1024 * 1024


async def start_gateway(arguments: Sequence[str], environ: Mapping[str, str]) -> "Process | ForkedProcess":
    """`python -m gateway ARGUMENTS`."""
    other_python = any(environ[name] != os.environ.get(name) for name in environ if name.startswith("PYTHON"))
    if other_python or os.environ.get("FRESH_PROCESSES"):
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", *arguments),
            stdout=PIPE,
            stderr=PIPE,
            env=dict(environ),
            limit=STREAM_BYTES_MAX,
        )
    return await ForkedProcess.start(arguments, environ)


class ForkedProcess:
    """As asyncio's `Process`, as far as tests need it."""

    def __init__(self, pid: int, pipes: Sequence["_Pipe"]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout, self.stderr, self._status = (pipe.reader for pipe in pipes)
        self._pipes = pipes
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def start(cls, arguments: Sequence[str], environ: Mapping[str, str]) -> "ForkedProcess":
        pipes = [os.pipe() for _ in range(3)]
        theirs = [write for _, write in pipes]
        try:
            pid = _Nursery.the_one().fork(arguments, environ, theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return cls(pid, [await _Pipe.reading(read) for read, _ in pipes])

    async def wait(self) -> int:
        await asyncio.shield(self._watching)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def _watch(self) -> None:
        self.returncode = int(await self._status.readline())
        for pipe in self._pipes:  # a loop that ends before their last events leaves them open
            await pipe.ended.wait()


class _Pipe(asyncio.StreamReaderProtocol):
    """What comes out of one of the process's pipes, and when no more will."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader(limit=STREAM_BYTES_MAX)
        self.ended = asyncio.Event()
        super().__init__(self.reader)

    @classmethod
    async def reading(cls, descriptor: int) -> "_Pipe":
        loop = asyncio.get_running_loop()
        _, pipe = await loop.connect_read_pipe(cls, os.fdopen(descriptor, "rb", 0))
        return pipe

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ended.set()


class _Nursery:
    """The process that forks, from the side of those who ask it to."""

    _instance: "_Nursery | None" = None

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._control, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES_MAX)
        command = [sys.executable, "-m", "tests.support.nursery", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        atexit.register(self._end)

    @classmethod
    def the_one(cls) -> "_Nursery":
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def fork(self, arguments: Sequence[str], environ: Mapping[str, str], descriptors: list[int]) -> int:
        """`descriptors`: standard output, standard error, and what gets a line with the exit status."""
        wanted = json.dumps([list(arguments), dict(environ), os.getcwd()]).encode()
        socket.send_fds(self._control, [wanted], descriptors)
        return int(self._control.recv(64))

    def _end(self) -> None:
        self._control.close()
        self._process.wait()


# ---------------------------------------------------------------------- the process itself


def _serve(control: socket.socket) -> Callable[[], Any] | None:
    """Fork whenever that is asked for; in the child the answer is what it has to do. None at the end."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poller = select.poll()
    for descriptor in (control.fileno(), woken):
        poller.register(descriptor, select.POLLIN)
    running: dict[int, int] = {}  # by pid, what gets the status
    while True:
        ready = {descriptor for descriptor, _ in poller.poll()}
        if woken in ready:
            os.read(woken, 4096)
            _bury(running)
        if control.fileno() not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES_MAX, 3)
        if not message:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return None
        output, errors, status = descriptors
        pid = os.fork()
        if not pid:
            control.close()
            for descriptor in (woken, wake, status, *running.values()):
                os.close(descriptor)
            return _child(*json.loads(message), output, errors)
        running[pid] = status
        os.close(output)
        os.close(errors)
        control.send(b"%d" % pid)


def _bury(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        teller = running.pop(pid)
        os.write(teller, b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(teller)


def _child(
    arguments: list[str], environ: dict[str, str], folder: str, output: int, errors: int
) -> Callable[[], Any]:
    from gateway.__main__ import main

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor, standard in ((output, 1), (errors, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = ["gateway", *arguments]
    return main


def _import_all() -> None:
    import gateway.__main__
    import gateway.api.app
    import gateway.api.configuration
    import gateway.server
    import gateway.telemetry.log_setup  # noqa: F401


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _import_all()
    act = _serve(socket.socket(fileno=int(sys.argv[1])))
    if act is not None:
        act()
