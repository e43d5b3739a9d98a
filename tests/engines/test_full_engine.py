"""A real vLLM that is full: the gateway reads its load, holds requests back, takes back what was refused, and
gives up what nobody waits for any more."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.engines.engine_process import KV_TOKENS, QUEUE, SLOTS, EngineProcess
from tests.engines.traffic import (
    BUSY_SECONDS_MAX,
    LONG_ANSWER,
    LONG_PROMPT,
    asks,
    is_left_with,
    occupied,
    tiny_chat,
)
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, post_chat

pytestmark = pytest.mark.anyio

P2 = ("x-request-priority", "P2")
P0 = ("x-request-priority", "P0")
WAITING_HIGH, KV_HIGH = 2, 0.3
TRIES = 5
ABORT_SECONDS_MAX = 2.0
"""Between a client's leaving and the engine's being idle; 0.1 s where the machine has nothing else to do."""
REJECTIONS = "vllm:admission_rejections_total"


def settings(engine: EngineProcess, **capacity: float) -> dict[str, Any]:
    """Buckets that are no limit; the engine's page is read five times a second."""
    load = {"interval_seconds": 0.2, "waiting_high": WAITING_HIGH, "kv_high": KV_HIGH}
    return {
        "upstreams": [{"name": "vllm", "url": engine.url, "load": load}],
        "capacity": {"tokens_per_second": 1_000_000, **capacity},
        "classes": {p: {"max_wait_seconds": 60} for p in ("P0", "P1", "P2")},
        "scheduling": {"deadline_drop": False},
    }


@pytest.fixture(scope="module")
async def gateway(vllm: EngineProcess) -> AsyncIterator[GatewayProcess]:
    async with running_gateway(settings(vllm)) as gateway:
        yield gateway


async def upstream(gateway: GatewayProcess) -> dict[str, Any]:
    state: dict[str, Any] = (await gateway.state())["upstreams"]["vllm"]
    return state


async def sees(gateway: GatewayProcess, **numbers: float) -> None:
    """Until the operators' page says at least this of the engine."""

    async def seen() -> bool:
        state = await upstream(gateway)
        return all(state[name] is not None and state[name] >= number for name, number in numbers.items())

    await eventually(seen, seconds=BUSY_SECONDS_MAX)


async def has(gateway: GatewayProcess, in_flight: int, queued: int) -> None:
    """Until so many of its requests are at the engine and so many wait."""

    async def so() -> bool:
        return (await gateway.in_flight(), await gateway.queued()) == (in_flight, queued)

    await eventually(so, seconds=BUSY_SECONDS_MAX)


# ── its load ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_page_of_an_idle_engine(gateway: GatewayProcess) -> None:
    """Nothing waits, nothing is used, the page is fresh, and the engine's memory is the limit in tokens."""
    await sees(gateway, engine_waiting=0, engine_kv_usage=0)
    state = await upstream(gateway)
    assert (state["engine_waiting"], state["engine_kv_usage"]) == (0, 0)
    assert state["max_in_flight_tokens"] == KV_TOKENS
    age = (await gateway.metrics()).total("upstream_load_age_seconds", upstream="vllm")
    assert 0 <= age < 5


async def test_those_who_wait_inside_it(gateway: GatewayProcess, vllm: EngineProcess) -> None:
    """While more than the limit wait there, P2 waits here; when they have gone, it goes."""
    async with occupied(vllm, SLOTS + WAITING_HIGH + 1) as others:
        await sees(gateway, engine_waiting=WAITING_HIGH + 1)
        batch = asyncio.create_task(asks(gateway, "batch", P2))
        await has(gateway, in_flight=0, queued=1)
        await others.aclose()
        assert (await batch).status == 200
    assert (await gateway.ending("batch"))["queue_ms"] > 0


async def test_its_memory(gateway: GatewayProcess, vllm: EngineProcess) -> None:
    """While more of it is used than the limit, P2 waits here; P0 does not."""
    async with occupied(vllm, SLOTS, content=LONG_PROMPT, max_tokens=700) as others:
        await sees(gateway, engine_kv_usage=KV_HIGH + 0.01)
        batch = asyncio.create_task(asks(gateway, "batch-kv", P2))
        await has(gateway, in_flight=0, queued=1)
        urgent = asyncio.create_task(asks(gateway, "urgent-kv", P0))
        await has(gateway, in_flight=1, queued=1)
        await others.aclose()
        assert [(await each).status for each in (urgent, batch)] == [200, 200]


async def test_what_does_not_fit_its_memory_waits_here(vllm: EngineProcess) -> None:
    """Requests whose answers would fill it come a few at a time, so the engine throws nobody out."""
    before = await vllm.metrics()
    answer = KV_TOKENS // 2 - 100
    async with (
        running_gateway(settings(vllm, initial_output_tokens=answer)) as gateway,
        AsyncExitStack() as s,
    ):
        await sees(gateway, engine_kv_usage=0)
        clients = [await s.enter_async_context(RawClient(gateway.port)) for _ in range(4)]
        for client in clients:
            await client.send(post_chat(tiny_chat(max_tokens=answer, stream=True), [P0]))
        await has(gateway, in_flight=2, queued=2)
        await sees(gateway, engine_kv_usage=0.1)
        for client in clients:
            await client.leave()
        await has(gateway, in_flight=0, queued=0)
    await is_left_with(vllm, 0, 0)
    name = "vllm:num_preemptions_total"
    assert (await vllm.metrics()).total(name) == before.total(name)


# ── its own limit ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_full_queue(gateway: GatewayProcess, vllm: EngineProcess) -> None:
    """What vLLM sends back waits for a place here, and is served when there is one; the client notices
    nothing but the wait. It is sent again after a quarter of a second, and on a busy machine the engine may
    not have been emptied by then: in that case another one is tried."""
    for n in range(TRIES):
        before = (await gateway.metrics()).total("upstream_queue_full_total")
        async with occupied(vllm, QUEUE) as others:
            asking = asyncio.create_task(asks(gateway, f"sent-back-{n}", P0))
            await has(gateway, in_flight=0, queued=1)
            await others.aclose()
            response = await asking
        assert (await gateway.metrics()).total("upstream_queue_full_total") == before + 1
        line = await gateway.ending(f"sent-back-{n}")
        assert line["requeued"]
        if response.status == 200:
            break
    assert response.json["usage"]["completion_tokens"] == line["output_tokens"] == 8
    assert line["outcome"] == "completed"
    assert line["queue_ms"] > 0


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_a_queue_that_stays_full(gateway: GatewayProcess, vllm: EngineProcess, stream: bool) -> None:
    """The second refusal is the client's, in vLLM's own words, and costs nothing; vLLM counts two."""
    async with occupied(vllm, QUEUE):
        before = await vllm.metrics()
        response = await asks(gateway, f"stays-full-{stream}", P0, stream=stream)
        after = await vllm.metrics()
    assert (response.status, response.header("x-qos-error-source")) == (503, "upstream")
    assert response.json["error"]["type"] == "Service Unavailable"
    assert after.total(REJECTIONS) == before.total(REJECTIONS) + 2
    line = await gateway.ending(f"stays-full-{stream}")
    assert (line["outcome"], line["status"], line["cost"]) == ("upstream_error", 503, 0)
    assert (await gateway.metrics()).total("upstream_healthy", upstream="vllm") == 1


# ── clients that leave ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "plain"])
async def test_a_client_that_leaves(gateway: GatewayProcess, vllm: EngineProcess, stream: bool) -> None:
    """The engine stops at once, instead of writing a thousand tokens for nobody."""
    id = f"leaves-{stream}"
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(tiny_chat(max_tokens=2000, stream=stream), [P0], id=id))
        if stream:
            await client.until(b'"content":"')
        await is_left_with(vllm, 1, 0)
        await client.leave()
        left_at = asyncio.get_running_loop().time()
        await is_left_with(vllm, 0, 0)
        assert asyncio.get_running_loop().time() - left_at < ABORT_SECONDS_MAX
    line = await gateway.ending(id)
    assert line["outcome"] == "client_gone_streaming"
    assert 0 < line["cost"] < 4 * LONG_ANSWER


async def test_a_client_that_leaves_while_it_waits_in_the_engine(
    gateway: GatewayProcess, vllm: EngineProcess
) -> None:
    """Its place in vLLM's own queue is free again."""
    async with occupied(vllm, SLOTS):
        async with RawClient(gateway.port) as client:
            await client.send(post_chat(tiny_chat(stream=True), [P0], id="leaves-early"))
            await is_left_with(vllm, SLOTS, 1)
        await is_left_with(vllm, SLOTS, 0)
    assert (await gateway.ending("leaves-early"))["outcome"] == "client_gone_streaming"
