"""Whom vLLM runs first, when all wait inside it: with `engine_priority: vllm` those of the higher class."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from tests.engines.engine_process import SLOTS, EngineProcess
from tests.engines.traffic import BUSY_SECONDS_MAX, is_left_with, occupied, tiny_chat
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, post_chat

pytestmark = pytest.mark.anyio

_TOKEN = re.compile(rb'"content":"[^"]')
TOKENS = 40
"""Enough for a quarter of a second: who runs later is seen to begin later, however late one looks."""


@asynccontextmanager
async def a_gateway(engine: EngineProcess, engine_priority: str) -> AsyncIterator[GatewayProcess]:
    """One that lets everybody through to the engine, so that the order is the engine's."""
    upstream = {
        "name": "vllm",
        "url": engine.url,
        "engine_priority": engine_priority,
        "load": {"waiting_high": 1000},
    }
    settings = {
        "upstreams": [upstream],
        "capacity": {"tokens_per_second": 1_000_000},
        "scheduling": {"deadline_drop": False, "max_pending_prefill_tokens": 100_000},
    }
    async with running_gateway(settings) as gateway:
        yield gateway


async def has_passed_on(gateway: GatewayProcess, requests: int) -> bool:
    return await gateway.in_flight() == requests


async def order_of_first_tokens(
    gateway: GatewayProcess, engine: EngineProcess, requests: dict[str, tuple[str, int | None]]
) -> list[str]:
    """Send these, by name with class and the client's own hint, one after the other into an engine without a
    free slot; then free its slots. Answers the names in the order in which their first tokens came."""
    began: list[str] = []

    async def one(name: str, priority: str, hint: int | None) -> None:
        hints = {} if hint is None else {"priority": hint}
        body = tiny_chat(name, max_tokens=TOKENS, stream=True, **hints)
        async with RawClient(gateway.port) as client:
            await client.send(post_chat(body, [("x-request-priority", priority)], id=name))
            status, _ = await client.head()
            assert status == 200
            while piece := await client.chunk():
                if name not in began and _TOKEN.search(piece):
                    began.append(name)

    async with occupied(engine, SLOTS) as others, asyncio.TaskGroup() as tasks:
        for n, (name, (priority, hint)) in enumerate(requests.items()):
            tasks.create_task(one(name, priority, hint))
            await eventually(partial(has_passed_on, gateway, n + 1), seconds=BUSY_SECONDS_MAX)
        await is_left_with(engine, SLOTS, len(requests))
        await others.aclose()
    return began


BATCH: dict[str, tuple[str, int | None]] = {f"batch-{n}": ("P2", None) for n in range(4)}
URGENT: dict[str, tuple[str, int | None]] = {f"urgent-{n}": ("P0", None) for n in range(2)}


async def test_higher_classes_go_first(vllm: EngineProcess) -> None:
    """Those of P0 came last and run first; the others keep their order, P1 before P2."""
    async with a_gateway(vllm, "vllm") as gateway:
        normal: dict[str, tuple[str, int | None]] = {f"normal-{n}": ("P1", None) for n in range(2)}
        order = await order_of_first_tokens(gateway, vllm, BATCH | normal | URGENT)
    classes = [name.partition("-")[0] for name in order]
    assert classes == ["urgent"] * 2 + ["normal"] * 2 + ["batch"] * 4
    assert set(order[4:6]) == {"batch-0", "batch-1"}


@pytest.mark.parametrize("engine_priority", ["none", "vllm"])
async def test_what_clients_say_to_the_engine(vllm: EngineProcess, engine_priority: str) -> None:
    """A `priority` in a body moves nobody forward, whether the gateway sets its own or not."""
    async with a_gateway(vllm, engine_priority) as gateway:
        pushing: dict[str, tuple[str, int | None]] = {f"pushing-{n}": ("P2", -1000) for n in range(2)}
        order = await order_of_first_tokens(gateway, vllm, BATCH | pushing)
    assert [name.partition("-")[0] for name in order] == ["batch"] * 4 + ["pushing"] * 2


async def test_without_it_they_run_as_they_come(vllm: EngineProcess) -> None:
    """The class stays in the gateway: vLLM runs first who came first."""
    async with a_gateway(vllm, "none") as gateway:
        order = await order_of_first_tokens(gateway, vllm, BATCH | URGENT)
    assert [name.partition("-")[0] for name in order] == ["batch"] * 4 + ["urgent"] * 2
