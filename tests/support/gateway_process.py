"""The gateway as users run it: `python -m gateway serve` as a process of its own, met only over sockets.

    async with running_gateway(settings, keys={"id": "key"}) as gateway:
        ...  # gateway.api, gateway.operations, gateway.metrics(), gateway.ending("request-id")

Both ports are free ones, learned from what the gateway prints. At the end of the block it gets SIGTERM,
and must by then be quiet: nothing in flight, nothing queued, one log line for each request counted.
"""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from math import isfinite
from pathlib import Path
from typing import Any, Self

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.keys import hash_key
from tests.support.loops import eventually
from tests.support.nursery import ForkedProcess, start_gateway
from tests.support.processes import children, is_running

READY_SECONDS_MAX = 30.0
END_SECONDS_MAX = 20.0
TRACES = ("Traceback", '"event":"internal error"', "but it is pending", "never retrieved", "never awaited")
"""What a gateway that was ended in good order has not printed."""
Settings = Mapping[str, Any]


def laid_over(base: Settings, given: Settings) -> dict[str, Any]:
    """`base` with the values of `given`, mapping by mapping."""
    merged = dict(base)
    for key, value in given.items():
        inner = merged.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[key] = laid_over(inner, value) if both else value  # type: ignore[arg-type]
    return merged


def write_configuration(folder: Path, settings: Settings, keys: list[dict[str, Any]] | None) -> Path:
    """Unless the settings say otherwise both ports are free ones, and rates stay as they are, so that books
    can be kept."""
    own: dict[str, Any] = {"server": {"port": 0, "operations_port": 0}, "controller": {"law": "static"}}
    if keys is not None:
        (folder / "keys.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
        own["keys_file"] = "keys.yaml"
    config = folder / "gateway.yaml"
    config.write_text(yaml.safe_dump(laid_over(own, settings)), encoding="utf-8")
    return config


class MetricsPage:
    """One reading of `/metrics`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples with these labels; the `qos_gateway_` before the name is left out."""
        name = "qos_gateway_" + name
        return sum(s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items())

    def outcomes(self) -> Counter[str]:
        """Requests by outcome, without those that never came."""
        counts: Counter[str] = Counter()
        for sample in self._samples:
            if sample.name == "qos_gateway_requests_total" and sample.value:
                counts[sample.labels["outcome"]] += int(sample.value)
        return counts

    def values(self, label: str) -> set[str]:
        """All that this label is anywhere."""
        return {sample.labels[label] for sample in self._samples if label in sample.labels}

    @property
    def series(self) -> int:
        return len(self._samples)

    @property
    def are_numbers(self) -> bool:
        """No sample is NaN or infinite."""
        return all(isfinite(sample.value) for sample in self._samples)

    @property
    def quiet(self) -> bool:
        return not any(self.total(name) for name in ("in_flight", "queue_depth", "queue_bytes"))


class GatewayProcess:
    def __init__(self, process: Process | ForkedProcess, folder: Path, token: str | None) -> None:
        self._process = process
        self.folder = folder
        self.lines: list[str] = []
        """What was printed so far, both streams."""
        self._log: list[dict[str, Any]] = []
        self._parsed = 0
        self._reading = [
            asyncio.create_task(self._read(stream)) for stream in (process.stdout, process.stderr) if stream
        ]
        self._told_to_end = False
        self._started_at = asyncio.get_running_loop().time()
        self.port = self.operations_port = 0
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._client = httpx.AsyncClient(trust_env=False, timeout=10, headers=headers)

    @classmethod
    async def start(
        cls,
        settings: Settings,
        folder: Path,
        *,
        keys: list[dict[str, Any]] | None = None,
        environ: Mapping[str, str] | None = None,
        token: str | None = None,
        ready: bool = True,
    ) -> Self:
        """Answers when the ports are open, and unless told otherwise `/readyz` says 200."""
        config = write_configuration(folder, settings, keys)
        process = await start_gateway(["serve", "--config", str(config)], {**os.environ, **(environ or {})})
        gateway = cls(process, folder, token)
        try:
            await gateway._find_ports()
            if ready:
                await eventually(gateway.is_ready, seconds=READY_SECONDS_MAX)
        except BaseException:
            await gateway.kill()
            raise
        return gateway

    async def _find_ports(self) -> None:
        def announced() -> bool:
            assert self._process.returncode is None, self.lines
            return any(line["event"] == "ready" for line in self.log)

        await eventually(announced, seconds=READY_SECONDS_MAX)
        line = next(line for line in self.log if line["event"] == "ready")
        self.port = httpx.URL(line["api"]).port or 0
        self.operations_port = httpx.URL(line["operations"]).port or 0

    async def _read(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            self.lines.append(line.decode().rstrip("\n"))

    # ------------------------------------------------------------------ where it is, what it says

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def operations(self) -> str:
        return f"http://127.0.0.1:{self.operations_port}"

    async def is_ready(self) -> bool:
        return await self.readiness() == 200

    async def readiness(self) -> int:
        return (await self._client.get(self.api + "/readyz")).status_code

    async def metrics(self) -> MetricsPage:
        response = await self._client.get(self.operations + "/metrics")
        assert response.status_code == 200
        return MetricsPage(response.text)

    async def state(self) -> dict[str, Any]:
        """The state of the only pool."""
        response = await self._client.get(self.operations + "/admin/state")
        assert response.status_code == 200
        pools: list[dict[str, Any]] = response.json()["pools"]
        assert len(pools) == 1
        return pools[0]

    async def bucket(self, priority: str) -> float:
        """Tokens that the class has left."""
        state = await self.state()
        level: float = state["classes"][priority]["bucket_tokens"]
        return level

    async def in_flight(self) -> int:
        upstreams = (await self.state())["upstreams"].values()
        return sum(count for upstream in upstreams for count in upstream["in_flight"].values())

    async def queued(self) -> int:
        """Requests that wait, for tokens or for a place."""
        classes = (await self.state())["classes"].values()
        return sum(each["throttled"] + each["ready"] for each in classes)

    # ------------------------------------------------------------------ another configuration

    def write(self, settings: Settings, keys: list[dict[str, Any]] | None = None) -> None:
        """Put another configuration where its own is, for the next reload."""
        write_configuration(self.folder, settings, keys)

    def hang_up(self) -> None:
        """SIGHUP: read the configuration again."""
        self._process.send_signal(signal.SIGHUP)

    async def ask_to_reload(self) -> httpx.Response:
        return await self._client.post(self.operations + "/admin/reload")

    async def reload(self, settings: Settings, keys: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Take this configuration; what the gateway says has changed."""
        self.write(settings, keys)
        response = await self.ask_to_reload()
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    # ------------------------------------------------------------------ its log

    @property
    def log(self) -> list[dict[str, Any]]:
        """The log lines so far, parsed."""
        for line in self.lines[self._parsed :]:
            self._parsed += 1
            if line.startswith("{"):
                self._log.append(json.loads(line))
        return self._log

    def endings(self, request_id: str | None = None) -> list[dict[str, Any]]:
        """The lines of requests that ended; of one request, by the id that its client gave it."""
        lines = [line for line in self.log if line["event"] == "request"]
        return lines if request_id is None else [line for line in lines if line["request_id"] == request_id]

    async def ending(self, request_id: str) -> dict[str, Any]:
        """The line of this request, once it has ended; there must be one only."""
        await eventually(lambda: bool(self.endings(request_id)))
        (line,) = self.endings(request_id)
        return line

    # ------------------------------------------------------------------ its end

    async def quiet(self) -> MetricsPage:
        """The metrics, once nothing is in flight or waits and each request counted has its log line."""

        async def all_ended() -> bool:
            page = await self.metrics()
            return page.quiet and page.total("requests_total") == len(self.endings())

        try:
            await eventually(all_ended)
        except TimeoutError:
            page = await self.metrics()
            counted, logged = page.total("requests_total"), len(self.endings())
            raise AssertionError(f"quiet: {page.quiet}, counted: {counted}, logged: {logged}") from None
        return await self.metrics()

    async def books_balance(self, priority: str, full: float) -> None:
        """The bucket holds what it began with, less what each log line says it cost, plus at most what can
        have flowed in: all that the gateway's capacity gave since it started."""
        await self.quiet()
        spent = sum(line["cost"] for line in self.endings() if line["priority"] == priority)
        state = await self.state()
        level = state["classes"][priority]["bucket_tokens"]
        lived = asyncio.get_running_loop().time() - self._started_at
        inflow = state["capacity_tokens_per_second"] * lived
        assert full - spent <= level <= full - spent + inflow
        for upstream in state["upstreams"].values():
            assert (upstream["in_flight_tokens"], upstream["pending_prefill_tokens"]) == (0, 0)

    def signal(self, number: int) -> None:
        self._told_to_end = True
        self._process.send_signal(number)

    async def exit_status(self, seconds: float = END_SECONDS_MAX) -> int:
        """Wait for its end."""
        async with asyncio.timeout(seconds):
            status = await self._process.wait()
            await asyncio.gather(*self._reading)
        await self._client.aclose()
        return status

    async def kill(self) -> None:
        """End it by force, if it still runs, and say nothing."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self.exit_status()

    async def stop(self) -> None:
        """SIGTERM, unless it was told already, and then a good end that leaves nothing running."""
        started = children(self.pid) if self.is_running else []
        if self.is_running and not self._told_to_end:
            self.signal(signal.SIGTERM)
        assert await self.exit_status() == 0, self.lines[-20:]
        assert not any(map(is_running, started))
        assert [line for line in self.lines if any(trace in line for trace in TRACES)] == []


@asynccontextmanager
async def running_gateway(
    settings: Settings,
    *,
    keys: Mapping[str, Mapping[str, Any]] | None = None,
    environ: Mapping[str, str] | None = None,
    token: str | None = None,
    ready: bool = True,
) -> AsyncIterator[GatewayProcess]:
    """A gateway for the length of the block. `keys` maps each key to the rest of its entry; `token` is what
    the operators' port wants, if the settings say so."""
    entries = (
        None
        if keys is None
        else [{"id": f"key-{n}", "sha256": hash_key(k), **rest} for n, (k, rest) in enumerate(keys.items())]
    )
    with tempfile.TemporaryDirectory() as folder:
        gateway = await GatewayProcess.start(
            settings, Path(folder), keys=entries, environ=environ, token=token, ready=ready
        )
        try:
            yield gateway
            if gateway.is_running:
                await gateway.quiet()
        except BaseException:
            await gateway.kill()
            raise
        if gateway.is_running:
            await gateway.stop()
