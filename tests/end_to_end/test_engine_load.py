"""What an engine's metrics page says decides who is sent there."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from gateway.mock_backend.child import MockGpuProcess
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, RawResponse, ask, chat, post_chat
from tests.support.scripted_engine import ScriptedEngine, held_plain, plain, scripted_engine
from tests.support.scripted_upstream import answer

pytestmark = pytest.mark.anyio

READ = "the engine's load is known"
UNREAD = "the engine's load is not known: own counts only"


def page(waiting: int = 0, kv_usage: float = 0.0, kv_tokens: int | str = "None") -> bytes:
    labels = 'engine="0",model_name="m"'
    text = (
        "# TYPE vllm:num_requests_running gauge\n"
        f"vllm:num_requests_running{{{labels}}} 4.0\n"
        f"vllm:num_requests_waiting{{{labels}}} {float(waiting)}\n"
        f"vllm:kv_cache_usage_perc{{{labels}}} {kv_usage}\n"
        f'vllm:cache_config_info{{block_size="16",kv_cache_size_tokens="{kv_tokens}"}} 1.0\n'
    )
    return answer(text.encode())


def settings(*upstreams: dict[str, Any], stale: float = 600) -> dict[str, Any]:
    """Pages are read ten times a second, and requests may wait for long."""
    load = {"interval_seconds": 0.1, "stale_after_seconds": stale}
    return {
        "upstreams": [{**each, "load": {**load, **each.get("load", {})}} for each in upstreams],
        "capacity": {"tokens_per_second": 1_000_000},
        "classes": {p: {"max_wait_seconds": 600, "max_throttle_seconds": 600} for p in ("P0", "P1", "P2")},
        "scheduling": {"deadline_drop": False},
    }


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        engine.metrics_page = page()
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    async with running_gateway(settings({"name": "gpu0", "url": engine.url})) as gateway:
        yield gateway


@pytest.fixture(scope="module")
async def forgetful_gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    """One to which a page is stale soon."""
    async with running_gateway(settings({"name": "gpu0", "url": engine.url}, stale=1.5)) as gateway:
        yield gateway


async def told(gateway: GatewayProcess, engine: ScriptedEngine, waiting: int = 0, **signals: Any) -> None:
    """Let the page say this, and wait until the gateway has read it."""
    engine.metrics_page = page(waiting, **signals)

    async def read() -> bool:
        says = (await gateway.state())["upstreams"]["gpu0"]
        usage = signals.get("kv_usage", 0.0)
        return bool(says["engine_waiting"] == waiting and says["engine_kv_usage"] == usage)

    await eventually(read)


class Waiting:
    """Requests that were sent, one of each class given, and that the gateway holds back."""

    def __init__(self, clients: Sequence[RawClient]) -> None:
        self._clients = clients

    async def answers(self) -> list[RawResponse]:
        return [await client.response() for client in self._clients]


@asynccontextmanager
async def held_back(gateway: GatewayProcess, *classes: str) -> AsyncIterator[Waiting]:
    async with AsyncExitStack() as stack:
        clients = []
        for priority in classes:
            client = await stack.enter_async_context(RawClient(gateway.port))
            await client.send(post_chat(chat(max_tokens=1), [("x-request-priority", priority)]))
            clients.append(client)

        async def all_wait() -> bool:
            classes_now = (await gateway.state())["classes"]
            return all(classes_now[priority]["ready"] == 1 for priority in classes)

        await eventually(all_wait)
        yield Waiting(clients)


async def served(gateway: GatewayProcess, priority: str) -> bool:
    response = await ask(gateway.port, post_chat(chat(max_tokens=1), [("x-request-priority", priority)]))
    return response.status == 200


def said(gateway: GatewayProcess, event: str) -> int:
    return sum(line["event"] == event for line in gateway.log)


# ── who is held ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_full_engine_is_kept_for_the_urgent(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """While many wait inside the engine P1 and P2 wait here, P0 does not, and nobody is promoted past that;
    as soon as the page says that nobody waits there, those who waited here go."""
    await told(gateway, engine, waiting=100)
    before = len(engine.requests)
    async with held_back(gateway, "P2", "P1") as waiting:
        for _ in range(25):
            assert await served(gateway, "P0")
        assert await gateway.queued() == 2
        assert len(engine.requests) == before + 25
        engine.metrics_page = page()
        answers = await waiting.answers()
    assert [response.status for response in answers] == [200, 200]
    assert all(int(response.header("x-qos-queue-ms") or "") > 0 for response in answers)
    assert (await gateway.metrics()).total("promotions_total") == 0


@pytest.mark.parametrize("signals", [{"waiting": 6}, {"kv_usage": 0.93}], ids=["waiting", "kv"])
async def test_an_engine_that_fills(
    gateway: GatewayProcess, engine: ScriptedEngine, signals: dict[str, Any]
) -> None:
    """P2 is held first: P1 still goes."""
    await told(gateway, engine, **signals)
    async with held_back(gateway, "P2") as waiting:
        assert await served(gateway, "P1")
        assert await served(gateway, "P0")
        assert await gateway.queued() == 1
        engine.metrics_page = page()
        assert [response.status for response in await waiting.answers()] == [200]


async def test_the_engines_memory_is_the_limit_in_tokens(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """Where no limit is configured, no more tokens are in flight than fit the KV memory that the page
    tells."""
    assert (await gateway.state())["upstreams"]["gpu0"]["max_in_flight_tokens"] is None
    await told(gateway, engine, waiting=1, kv_tokens=1000)
    assert (await gateway.state())["upstreams"]["gpu0"]["max_in_flight_tokens"] == 1000
    engine.play = held = held_plain()
    large = post_chat(chat("word " * 1000, max_tokens=1), [("x-request-priority", "P0")])
    async with RawClient(gateway.port) as first, RawClient(gateway.port) as second:
        await first.send(large)
        await held.begun.wait()
        await second.send(large)

        async def waits() -> bool:
            return await gateway.queued() == 1

        await eventually(waits)
        held.released.set()
        assert [(await client.response()).status for client in (first, second)] == [200, 200]
    age = (await gateway.metrics()).total("upstream_load_age_seconds", upstream="gpu0")
    assert 0 <= age < 10
    engine.play = plain()
    await told(gateway, engine, kv_tokens=1_000_000)


# ── pages that cannot be read ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (answer(status="404 Not Found"), "/metrics got 404"),
        (answer(b"<html><body>vllm:num_requests_waiting 100</body></html>"), "/metrics has no metric"),
        (b"", "no whole page from /metrics within"),
    ],
    ids=["404", "html", "silence"],
)
async def test_a_page_that_is_no_longer_there(
    forgetful_gateway: GatewayProcess, engine: ScriptedEngine, then: bytes, why: str
) -> None:
    """What it said last holds until it is stale, and then those it held back go, though nothing else happens.
    That the page cannot be read is logged once, and that it can be again."""
    gateway = forgetful_gateway
    await told(gateway, engine, waiting=100)
    read, unread = said(gateway, READ), said(gateway, UNREAD)
    async with held_back(gateway, "P2", "P1") as waiting:
        engine.metrics_page = then
        assert [response.status for response in await waiting.answers()] == [200, 200]
    assert (await gateway.state())["upstreams"]["gpu0"]["engine_waiting"] is None
    await eventually(lambda: said(gateway, UNREAD) > unread)
    assert await served(gateway, "P2")
    await told(gateway, engine, waiting=3)
    await eventually(lambda: said(gateway, READ) > read)
    assert (said(gateway, UNREAD), said(gateway, READ)) == (unread + 1, read + 1)
    line = [line for line in gateway.log if line["event"] == UNREAD][-1]
    assert (line["level"], line["upstream"]) == ("warning", "gpu0")
    assert line["reason"].startswith(why)


async def test_an_engine_without_such_a_page() -> None:
    """Own counts are all there is: every class is served, one warning tells why."""
    async with scripted_engine() as engine:
        async with running_gateway(settings({"name": "gpu0", "url": engine.url})) as gateway:
            for priority in ("P0", "P1", "P2"):
                assert await served(gateway, priority)
            await eventually(lambda: said(gateway, UNREAD) > 0)
            upstream = (await gateway.state())["upstreams"]["gpu0"]
            keys = ("engine_waiting", "engine_kv_usage", "max_in_flight_tokens")
            assert [upstream[key] for key in keys] == [None] * 3
            metrics = (await gateway.metrics()).text
            assert 'qos_gateway_upstream_load_age_seconds{upstream="gpu0"}' not in metrics
        assert (said(gateway, UNREAD), said(gateway, READ)) == (1, 0)


# ── several engines, each by its own settings ────────────────────────────────────────────────────────────


async def test_each_engine_is_asked_in_its_own_way() -> None:
    """At the configured path and with the engine's own key; a configured limit stands above the size of its
    memory. The embedded engine has such a page as well."""
    async with scripted_engine() as engine:
        engine.play = plain(b"sglang:num_queue_reqs 3\nsglang:max_total_num_tokens 1000\n")
        own = {
            "name": "gpu0",
            "url": engine.url,
            "api_key": "engine-key",
            "max_in_flight_tokens": 50_000,
            "load": {"path": "/engine/metrics"},
        }
        async with running_gateway(settings(own, {"name": "gpu1", "url": "mock://seed_32k"})) as gateway:
            await eventually(lambda: said(gateway, READ) == 2)
            upstreams = (await gateway.state())["upstreams"]
        assert engine.last.target == "/engine/metrics"
        assert engine.last.header("authorization") == "Bearer engine-key"
    keys = ("engine_waiting", "engine_kv_usage", "max_in_flight_tokens")
    assert [upstreams["gpu0"][key] for key in keys] == [3, None, 50_000]
    assert [upstreams["gpu1"][key] for key in keys] == [0, 0.0, 430_000]


async def test_requests_from_elsewhere_fill_the_engine() -> None:
    """What others send to the engine directly keeps P2 out; when they leave it goes."""
    gpu = await MockGpuProcess.start("h100_llama3_8b", max_num_seqs=2)
    try:
        async with (
            running_gateway(settings({"name": "gpu0", "url": gpu.url})) as gateway,
            AsyncExitStack() as others,
        ):
            body = post_chat(chat(max_tokens=20_000, stream=True))
            for _ in range(12):
                client = await others.enter_async_context(RawClient(int(gpu.url.rpartition(":")[2])))
                await client.send(body)

            async def full() -> bool:
                upstream = (await gateway.state())["upstreams"]["gpu0"]
                return bool(upstream["engine_waiting"] == 10)

            await eventually(full)
            async with held_back(gateway, "P2", "P1") as waiting:
                urgent = asyncio.create_task(served(gateway, "P0"))

                async def urgent_is_sent() -> bool:
                    return await gateway.in_flight() == 1

                await eventually(urgent_is_sent)
                assert await gateway.queued() == 2
                await others.aclose()
                assert await urgent
                assert [response.status for response in await waiting.answers()] == [200, 200]
    finally:
        await gpu.stop()


async def test_an_engine_that_takes_less_than_it_is_sent() -> None:
    """Of a burst of forty an engine with room for ten sends the rest back; they wait for places, and no
    client hears of it."""
    gpu = await MockGpuProcess.start("h100_llama3_8b", max_num_seqs=4, max_num_queued_reqs=10)
    try:
        async with running_gateway(settings({"name": "gpu0", "url": gpu.url})) as gateway:
            body = post_chat(chat(max_tokens=20))
            answers = await asyncio.gather(*(ask(gateway.port, body) for _ in range(40)))
            assert [response.status for response in answers] == [200] * 40
            assert (await gateway.metrics()).total("upstream_queue_full_total") >= 1
            assert (await gateway.state())["upstreams"]["gpu0"]["engine_limit"] in range(10, 40)
    finally:
        await gpu.stop()
