"""Prometheus itself, from the machine's packages: its tools, and a server over loopback.

    async with running_prometheus(gateway.operations_port, rules, folder) as prometheus:
        await prometheus.has_scraped(2)
        await prometheus.ask("up")

They take long, so they run where `OBSERVE_CHECK=1` asks for them (`make observe-check`).
"""

import asyncio
import os
import shutil
import socket
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.observability.expressions import JOB
from tests.support.loops import eventually

START_SECONDS_MAX = 30.0
SCRAPE_SECONDS_MAX = 30.0

Sample = dict[str, str]


def demanded(tool: str) -> str:
    """Where the tool is. Skips the test where `make observe-check` is not what runs it, and fails there if
    the tool is missing."""
    if not os.environ.get("OBSERVE_CHECK"):
        pytest.skip(f"{tool} is only asked for by `make observe-check`")
    found = shutil.which(tool)
    assert found is not None, f"{tool} is not installed; on Debian: apt-get install prometheus"
    return found


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


class Prometheus:
    def __init__(self, process: Process, port: int) -> None:
        self.process = process
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30)

    async def is_ready(self) -> bool:
        assert self.process.returncode is None, "Prometheus has ended"
        try:
            return (await self.client.get("/-/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async def ask(self, expr: str) -> list[tuple[Sample, float]]:
        """The labels and values of an instant query's result, those that are a number."""
        response = await self.client.post("/api/v1/query", data={"query": expr})
        answer = response.json()
        assert answer["status"] == "success", (expr, answer)
        data = answer["data"]
        found = [({}, data["result"])] if data["resultType"] == "scalar" else None
        samples = found or [(each["metric"], each["value"]) for each in data["result"]]
        return [(labels, float(value)) for labels, (_, value) in samples if isfinite(float(value))]

    async def has_scraped(self, times: int) -> None:
        """Answers after so many further scrapes of the gateway."""
        before = await self._scrapes()

        async def enough() -> bool:
            return await self._scrapes() >= before + times

        await eventually(enough, seconds=SCRAPE_SECONDS_MAX)

    async def _scrapes(self) -> float:
        found = await self.ask(f'sum(sum_over_time(up{{job="{JOB}"}}[10m]))')
        return found[0][1] if found else 0

    async def rules(self) -> list[dict[str, Any]]:
        """All rules, once each was evaluated."""

        async def evaluated() -> bool:
            return all(rule["lastEvaluation"] > "0001-01-02" for rule in await self._rules())

        await eventually(evaluated, seconds=SCRAPE_SECONDS_MAX)
        return await self._rules()

    async def _rules(self) -> list[dict[str, Any]]:
        groups = (await self.client.get("/api/v1/rules")).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


@asynccontextmanager
async def running_prometheus(port: int, rules: str, folder: Path) -> AsyncIterator[Prometheus]:
    """Scrapes the operators' port of a gateway every second; its data and configuration are in `folder`."""
    (folder / "rules.yml").write_text(rules, encoding="utf-8")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": JOB, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]},
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    own_port = _free_port()
    process = await asyncio.create_subprocess_exec(
        demanded("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{own_port}",
        "--log.level=error",
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    prometheus = Prometheus(process, own_port)
    try:
        await eventually(prometheus.is_ready, seconds=START_SECONDS_MAX)
        yield prometheus
    finally:
        await prometheus.client.aclose()
        if process.returncode is None:
            process.terminate()
        await process.wait()
