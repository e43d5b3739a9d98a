"""Resident memory of a gateway process for each request that waits and for each stream that runs.

Figures are differences: the process before and after so many more, when everything else that it will ever
import is there. Clients and engine are in this process, so what sockets hold in the kernel is nobody's.
"""

import asyncio
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.benchmarks.growth.table import Row
from tests.support.gateway_process import GatewayProcess
from tests.support.loops import eventually
from tests.support.processes import resident_bytes
from tests.support.raw_client import chat, post_chat
from tests.support.scripted_engine import ROLE, ScriptedEngine, held_plain, scripted_engine, token
from tests.support.scripted_upstream import STREAM_HEAD, RecordedRequest, ScriptedConnection, chunk

BODY_BYTES = 2048
QUEUED_BYTES_MAX = 60_000
WARM = 200
"""So many come before the first reading."""
PACE_SECONDS = 2.0
SETTLING_SECONDS = 180.0

_CLASS = {
    "max_queued_requests": None,
    "max_queued_bytes": None,
    "max_wait_seconds": 3600,
    "max_throttle_seconds": 3600,
    "holdback": 1.0,
}


async def rows(queued: int, streams: int) -> AsyncIterator[Row]:
    per_request = await _queued(queued)
    yield Row(
        f"each of {queued:,} queued requests with a body of {BODY_BYTES:,} bytes",
        f"{per_request / 1000:,.1f} KB",
        f"≤ {QUEUED_BYTES_MAX / 1000:g} KB",
        per_request <= QUEUED_BYTES_MAX,
    )
    per_stream = await _streaming(streams)
    yield Row(
        f"each of {streams:,} streams, a token every {PACE_SECONDS:g} s", f"{per_stream / 1000:,.1f} KB"
    )


async def _queued(number: int) -> float:
    async with scripted_engine() as engine:
        engine.play = held_plain()
        async with _gateway(engine, max_in_flight=1) as gateway:
            with _clients() as connect:

                async def more(count: int) -> None:
                    for _ in range(count):
                        connect(gateway.port, post_chat(_body()))
                        await asyncio.sleep(0)

                async def all_wait() -> bool:
                    return await gateway.queued() >= expected

                expected = WARM - 1
                await more(WARM)
                await eventually(all_wait, seconds=SETTLING_SECONDS)
                before = resident_bytes(gateway.pid)
                expected += number
                await more(number)
                await eventually(all_wait, seconds=SETTLING_SECONDS)
                return (resident_bytes(gateway.pid) - before) / number


async def _streaming(number: int) -> float:
    async with scripted_engine() as engine:
        engine.play = _paced
        async with _gateway(engine, max_in_flight=None) as gateway:
            with _clients() as connect:

                async def more(count: int) -> None:
                    for _ in range(count):
                        connect(gateway.port, post_chat(_body(stream=True)))
                        await asyncio.sleep(0)

                async def all_run() -> bool:
                    return await gateway.in_flight() >= expected

                expected = WARM
                await more(WARM)
                await eventually(all_run, seconds=SETTLING_SECONDS)
                await asyncio.sleep(2 * PACE_SECONDS)  # some tokens for everybody
                before = resident_bytes(gateway.pid)
                expected += number
                await more(number)
                await eventually(all_run, seconds=SETTLING_SECONDS)
                await asyncio.sleep(2 * PACE_SECONDS)
                return (resident_bytes(gateway.pid) - before) / number


def _body(**members: Any) -> bytes:
    around = len(json.dumps(chat("", **members)))
    return json.dumps(chat("x" * (BODY_BYTES - around), **members)).encode()


async def _paced(connection: ScriptedConnection, request: RecordedRequest) -> None:
    await connection.send(STREAM_HEAD + chunk(ROLE))
    while True:
        await connection.send(chunk(token(" word")))
        await asyncio.sleep(PACE_SECONDS)


@contextlib.asynccontextmanager
async def _gateway(engine: ScriptedEngine, max_in_flight: int | None) -> AsyncIterator[GatewayProcess]:
    """A process of its own that has built all its pages."""
    settings: dict[str, Any] = {
        "upstreams": [{"name": "gpu0", "url": engine.url, "max_in_flight": max_in_flight}],
        "capacity": {"tokens_per_second": 1e9},
        "classes": dict.fromkeys(("P0", "P1", "P2"), _CLASS),
        "scheduling": {"deadline_drop": False, "max_pending_prefill_tokens": 10**9},
    }
    os.environ["FRESH_PROCESSES"] = "1"  # what is forked shares its parent's memory
    with tempfile.TemporaryDirectory() as folder:
        gateway = await GatewayProcess.start(settings, Path(folder))
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
                for address in (gateway.api, gateway.operations):
                    (await client.get(address + "/openapi.json")).raise_for_status()
            yield gateway
        finally:
            await gateway.kill()


@contextlib.contextmanager
def _clients() -> Iterator[Callable[[int, bytes], None]]:
    """Each call is a connection that asks once and reads nothing."""
    opened: list[socket.socket] = []

    def connect(port: int, request: bytes) -> None:
        client = socket.create_connection(("127.0.0.1", port))
        opened.append(client)
        client.sendall(request)

    try:
        yield connect
    finally:
        for client in opened:
            client.close()
