"""A real vLLM that dies in the middle of an answer, and comes back."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio.to_thread
import pytest

from tests.engines.engine_process import EngineProcess
from tests.engines.traffic import asks, events, post_message, tiny_chat
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, post_chat

pytestmark = pytest.mark.anyio

NOTICED_SECONDS_MAX = 15.0
OPEN_SECONDS = 1


@pytest.fixture
async def gateway(vllm: EngineProcess) -> AsyncIterator[GatewayProcess]:
    """Probes come five times a second; nobody waits for an engine that is down."""
    health = {"interval_seconds": 0.2, "fail_after": 2}
    settings = {
        "upstreams": [{"name": "vllm", "url": vllm.url, "health": health}],
        "upstream_timeouts": {"no_upstream_seconds": 0},
        "circuit_breaker": {"open_seconds": OPEN_SECONDS},
        "capacity": {"tokens_per_second": 1_000_000},
    }
    async with running_gateway(settings) as gateway:
        yield gateway


@pytest.fixture
async def mortal(vllm: EngineProcess) -> AsyncIterator[EngineProcess]:
    """The same engine, which runs again when the test is over."""
    yield vllm
    if not vllm.is_running:
        await anyio.to_thread.run_sync(vllm.start)


async def upstream(gateway: GatewayProcess) -> dict[str, Any]:
    state: dict[str, Any] = (await gateway.state())["upstreams"]["vllm"]
    return state


async def is_healthy(gateway: GatewayProcess) -> bool:
    by_state = bool((await upstream(gateway))["healthy"])
    assert (await gateway.metrics()).total("upstream_healthy", upstream="vllm") == by_state
    return by_state


async def test_a_death_and_a_return(gateway: GatewayProcess, mortal: EngineProcess) -> None:
    """Streams in progress end with an error event and not cleanly; then there is no engine, and requests are
    told so at once. When it is back one request shows that it serves, and all is as before."""
    assert await is_healthy(gateway)
    async with RawClient(gateway.port) as chatting, RawClient(gateway.port) as messaging:
        wanted = tiny_chat(max_tokens=1000, stream=True)
        await chatting.send(post_chat(wanted, id="cut-chat"))
        await messaging.send(post_message(wanted, id="cut-message"))
        responses = [asyncio.create_task(client.response()) for client in (chatting, messaging)]

        async def both_run() -> bool:
            return await gateway.in_flight() == 2 and (await upstream(gateway))["pending_prefill_tokens"] == 0

        await eventually(both_run, seconds=NOTICED_SECONDS_MAX)
        mortal.kill()
        chat, message = await asyncio.gather(*responses)
    assert (chat.status, chat.whole) == (200, False)
    assert (message.status, message.whole) == (200, False)
    assert list(events(chat.body))[-1]["error"]["type"] == "server_error"
    assert list(events(message.body))[-1]["type"] == "error"
    for id in ("cut-chat", "cut-message"):
        line = await gateway.ending(id)
        assert (line["outcome"], line["status"]) == ("upstream_aborted", 200)
        assert 0 < line["output_tokens"] < 1000

    async def is_down() -> bool:
        return not await is_healthy(gateway)

    await eventually(is_down, seconds=NOTICED_SECONDS_MAX)
    for n in range(3):
        refused = await asks(gateway, f"nobody-{n}")
        assert (refused.status, refused.header("x-qos-outcome")) == (503, "rejected_no_upstream")
        assert int(refused.header("retry-after") or 0) > 0
        assert (await gateway.ending(f"nobody-{n}"))["cost"] == 0

    await anyio.to_thread.run_sync(mortal.start)

    async def is_on_trial() -> bool:
        return bool((await upstream(gateway))["on_trial"])

    await eventually(is_on_trial, seconds=NOTICED_SECONDS_MAX)
    assert not await is_healthy(gateway)
    assert (await asks(gateway, "trial")).status == 200
    assert await is_healthy(gateway)
    assert (await asks(gateway, "as-before")).status == 200
