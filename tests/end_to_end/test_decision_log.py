"""The decision log of a gateway that runs: all of each request in one line, and nothing of its content."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.policy.events import RequestEnded
from gateway.simulator.decision_log import read_decision_log, with_older
from tests.support.decision_replay import offered, replayed
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, ask, chat, post_chat
from tests.support.scripted_engine import (
    DONE,
    FINISH,
    ROLE,
    ScriptedEngine,
    held_stream,
    plain,
    scripted_engine,
    streaming,
    token,
    usage_event,
)

pytestmark = pytest.mark.anyio

PROMPT = "what-nobody-else-may-read"
KEY = "a-key-to-keep"
STREAM = streaming(ROLE, token("one"), FINISH, usage_event(9, 1), DONE)


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


def settings(engine: ScriptedEngine, log: Path, **more: Any) -> dict[str, Any]:
    """Buckets that hardly fill: what is spent is spent."""
    return {
        "upstreams": [{"name": "gpu0", "url": engine.url, "max_in_flight": 2, "api_key": f"{KEY}-engine"}],
        "capacity": {"tokens_per_second": 1, "burst_seconds": 1_000_000, "initial_output_tokens": 20_000},
        "scheduling": {"deadline_drop": False},
        "decision_log": str(log),
        **more,
    }


def request(id: str, priority: str = "P1", key: str = KEY, **members: Any) -> bytes:
    headers = [("authorization", f"Bearer {key}"), ("x-request-priority", priority)]
    return post_chat(chat(PROMPT, **{"max_tokens": 10, **members}), headers, id=id)


async def is_queued(gateway: GatewayProcess) -> bool:
    return await gateway.queued() == 1


def logged(log: Path) -> list[RequestEnded]:
    (run,) = read_decision_log(*with_older(log))
    return run.requests


async def test_mixed_requests_until_the_end(engine: ScriptedEngine, tmp_path: Path) -> None:
    """However a request ends, also at shutdown, it has one line; prompts and keys are nowhere; and a
    replay of the log on virtual time ends the same."""
    log = tmp_path / "decisions.jsonl"
    keys = {KEY: {"tenant": "team", "ceiling": "P0"}}
    async with running_gateway(settings(engine, log), keys=keys) as gateway:
        engine.play = plain()
        assert (await ask(gateway.port, request("plain"))).status == 200
        engine.play = STREAM
        assert (await ask(gateway.port, request("stream", "P0", stream=True))).whole
        assert (await ask(gateway.port, request("bad", n=0))).status == 400
        assert (await ask(gateway.port, request("unknown", key=f"{KEY}-not"))).status == 401

        engine.play = held_stream(ROLE, token("one"))
        async with RawClient(gateway.port) as client:
            await client.send(request("gone", stream=True))
            await client.until(b"one")
        await gateway.ending("gone")

        engine.play = held = held_stream(ROLE, token("one"))
        async with (
            RawClient(gateway.port) as large,
            RawClient(gateway.port) as other,
            RawClient(gateway.port) as waiter,
        ):
            await large.send(request("large", "P2", stream=True, max_tokens=20_000))
            await large.until(b"one")
            assert (await ask(gateway.port, request("rate", "P2"))).status == 429
            await other.send(request("other", "P0", stream=True))
            await other.until(b"one")
            await waiter.send(request("waits"))
            await eventually(lambda: is_queued(gateway))
            gateway.signal(signal.SIGTERM)
            assert (await waiter.response()).status == 503
            held.released.set()
            assert DONE in await large.rest()
            assert DONE in await other.rest()
        await gateway.stop()

    requests = logged(log)
    assert {r.request_id: r.outcome.value for r in requests} == {
        "plain": "completed",
        "stream": "completed",
        "bad": "bad_request",
        "unknown": "unauthorized",
        "gone": "client_gone_streaming",
        "large": "completed",
        "rate": "rejected_rate",
        "other": "completed",
        "waits": "rejected_draining",
    }
    assert len(requests) == 9
    text = log.read_text(encoding="utf-8")
    assert PROMPT not in text
    assert KEY not in text
    assert log.stat().st_mode & 0o077 == 0

    (run,) = read_decision_log(log)
    again = {r.request_id: r for r in replayed(run)}
    assert again.keys() == {r.request_id for r in offered(run)}
    for one in offered(run):
        other_one = again[one.request_id]
        for what in ("outcome", "upstream", "queue_wait_ns", "estimated_cost", "charged", "promoted"):
            assert getattr(one, what) == getattr(other_one, what)


async def test_full_files_are_put_aside_while_it_runs(engine: ScriptedEngine, tmp_path: Path) -> None:
    """Each begins with the configuration; together they have one line for each request."""
    log = tmp_path / "log"
    engine.play = plain()
    limits = {"decision_log_max_bytes": 20_000, "decision_log_files": 50}
    async with running_gateway(settings(engine, log, **limits)) as gateway:
        for batch in range(10):
            ids = [f"r{batch}{n}" for n in range(10)]
            await asyncio.gather(*(ask(gateway.port, request(id)) for id in ids))
            await gateway.quiet()
    paths = with_older(log)
    assert len(paths) > 5
    for path in paths:
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        assert json.loads(first)["event"] == "configuration"
    told = [r.request_id for r in logged(log)]
    assert sorted(told) == sorted(f"r{batch}{n}" for batch in range(10) for n in range(10))


async def test_without_the_setting_there_is_no_log(engine: ScriptedEngine) -> None:
    """It is off by default."""
    given = settings(engine, Path("unused"), decision_log=None)
    async with running_gateway(given) as gateway:
        engine.play = plain()
        assert (await ask(gateway.port, request("plain"))).status == 200
        assert os.listdir(gateway.folder) == ["gateway.yaml"]


async def test_a_log_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    """With the name of the setting, before anything listens."""
    config = tmp_path / "gateway.yaml"
    config.write_text("decision_log: absent/log.jsonl\n", encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "serve", "--config", str(config)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, told = await process.communicate()
    assert process.returncode == 2
    assert re.search(r'decision_log: found "[^"]*", whose folder does not exist', told.decode())
