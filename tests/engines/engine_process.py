"""A real engine as a process of its own, on a port of its own.

    engine = EngineProcess(vllm_command(model), log_file)
    engine.start()          # waits until /health says 200
    ...                     # engine.url, engine.metrics()
    engine.kill()           # SIGKILL, its children included; `start` brings it back at the same address
    engine.stop()

It may use the processor only when nobody else wants it, and reaches no network but loopback.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.engines import vllm_environment

START_SECONDS_MAX = 300.0
"""40 s where two cores are free."""
STOP_SECONDS_MAX = 20.0
LOG_LINES_SHOWN = 40

SLOTS = 2
QUEUE = 10
"""vLLM counts those that run as well."""
CONTEXT_TOKENS = 2048
KV_BLOCKS, BLOCK_TOKENS = 80, 32
"""So few that a handful of requests fills them. Smaller blocks are not to be had on a CPU."""
KV_TOKENS = KV_BLOCKS * BLOCK_TOKENS
MODEL = "tiny"


class EngineFailed(Exception):
    """It ended, or did not come up in time; the end of its log is in the message."""


@dataclass(frozen=True, slots=True)
class Command:
    """How an engine is started; `{port}` among the arguments becomes its port."""

    arguments: Sequence[str]
    folder: Path
    environ: Mapping[str, str] = field(default_factory=dict)


def vllm_command(model: Path) -> Command:
    """vLLM with two slots and little memory, started beside the model's folder so that no path of this
    machine stands in its answers."""
    flags = {
        "host": "127.0.0.1",
        "port": "{port}",
        "served-model-name": MODEL,
        "dtype": "float32",
        "max-model-len": str(CONTEXT_TOKENS),
        "max-num-seqs": str(SLOTS),
        "max-num-queued-reqs": str(QUEUE),
        "scheduling-policy": "priority",
        "block-size": str(BLOCK_TOKENS),
        "num-gpu-blocks-override": str(KV_BLOCKS),
    }
    switches = ("--enforce-eager", "--enable-prompt-tokens-details")
    given = [part for name, value in flags.items() for part in (f"--{name}", value)]
    environ = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    command = str(vllm_environment.command())
    return Command([command, "serve", f"./{model.name}", *given, *switches], model.parent, environ)


def llama_server() -> str | None:
    """Where llama.cpp's server is, if it is anywhere; none is to be had without a long build from source."""
    return os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")


def llama_command(server: str, model: Path) -> Command:
    """llama.cpp's server with as many slots, each with as much context."""
    context = str(SLOTS * CONTEXT_TOKENS)
    arguments = ["-m", model.name, "--host", "127.0.0.1", "--port", "{port}", "--alias", MODEL]
    sizes = ["-np", str(SLOTS), "-c", context, "-t", "1"]
    switches = ["--metrics", "--no-warmup", "--offline"]
    return Command([server, *arguments, *sizes, *switches], model.parent)


class EngineProcess:
    def __init__(self, command: Command, log: Path) -> None:
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        self.start_seconds = 0.0
        """How long the last start took."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Answers when the engine does. Raises EngineFailed."""
        began = time.monotonic()
        nice = ["nice", "-n", "5"] if shutil.which("nice") else []
        arguments = [part.format(port=self.port) for part in self._command.arguments]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*nice, *arguments],
                cwd=self._command.folder,
                env={**os.environ, **self._command.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, so that its workers end with it
            )
        try:
            self._wait_until_healthy(began + START_SECONDS_MAX)
        except BaseException:
            self.kill()
            raise
        self.start_seconds = time.monotonic() - began

    def _wait_until_healthy(self, until: float) -> None:
        assert self._process is not None
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise EngineFailed(f"it ended with status {self._process.returncode}{self._last_words()}")
            if self._is_healthy():
                return
            time.sleep(0.2)  # it is not this process that has to do something
        raise EngineFailed(f"no 200 from /health within {START_SECONDS_MAX:g} s{self._last_words()}")

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "; its log ends so:\n" + "\n".join(lines[-LOG_LINES_SHOWN:])

    def kill(self) -> None:
        """SIGKILL to it and all that it started, and no word of good-bye on any connection."""
        if self._process is not None:
            _signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        """Let it end by itself; what is left of it after that is killed."""
        if self._process is not None and self.is_running:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    async def metrics(self) -> "EngineMetrics":
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            page = await client.get(f"{self.url}/metrics")
        assert page.status_code == 200
        return EngineMetrics(page.text)


class EngineMetrics:
    """One reading of an engine's own page. It has hundreds of series, so only those asked for are read."""

    def __init__(self, text: str) -> None:
        self.text = text

    def total(self, name: str) -> float:
        """Sum of the samples of this name, as the page has it. At least one must be there."""
        samples = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.text, re.MULTILINE)
        assert samples, f"{name} is not on the page"
        return sum(map(float, samples))


def _signal_group(pid: int, number: int) -> None:
    """The group outlives its first process for as long as a worker runs."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass  # all of it has ended


def _free_port() -> int:
    """A fixed one is needed, since an engine that comes back must come back at the same address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
