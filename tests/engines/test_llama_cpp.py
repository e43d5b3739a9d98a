"""llama.cpp's server behind the gateway: where it differs from vLLM."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.engines.engine_process import CONTEXT_TOKENS, MODEL, SLOTS, EngineProcess, llama_server
from tests.engines.traffic import asks, events, post_message, tiny_chat
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, ask, post, post_chat

if llama_server() is None:
    pytest.skip("llama-server is not on the PATH, and LLAMA_SERVER names none", allow_module_level=True)

pytestmark = pytest.mark.anyio

MESSAGES: Any = [{"role": "user", "content": "Say something about dictionaries."}]
TOO_LONG = "word and more " * 3000
RUNNING, WAITING = "llamacpp:requests_processing", "llamacpp:requests_deferred"


@pytest.fixture(scope="module")
async def gateway(llama: EngineProcess) -> AsyncIterator[GatewayProcess]:
    """Its page is read five times a second, and the buckets hardly refill."""
    upstream = {"name": "llama", "url": llama.url, "load": {"interval_seconds": 0.2}}
    settings = {
        "upstreams": [upstream],
        "capacity": {"tokens_per_second": 1, "burst_seconds": 1_000_000, "output_weight": 1},
        "scheduling": {"deadline_drop": False},
    }
    async with running_gateway(settings) as gateway:
        yield gateway
        await gateway.books_balance("P1", full=350_000)


async def charged(gateway: GatewayProcess, id: str, input: int, output: int) -> None:
    line = await gateway.ending(id)
    assert (line["outcome"], line["upstream"]) == ("completed", "llama")
    assert (line["input_tokens"], line["output_tokens"]) == (input, output)
    assert line["cost"] == pytest.approx(input - 0.9 * line["cached_tokens"] + output, abs=0.001)


async def test_a_chat(gateway: GatewayProcess) -> None:
    """Plain and streamed it says the same and is charged by its usage, which who did not ask for it does not
    see."""
    content = MESSAGES[0]["content"]
    plain = await asks(gateway, "plain", content=content)
    streamed = await asks(gateway, "streamed", content=content, stream=True)
    assert (plain.status, streamed.status, streamed.whole) == (200, 200, True)
    received = list(events(streamed.body))
    assert all(event["choices"] and "usage" not in event for event in received)
    said = "".join(event["choices"][0]["delta"].get("content") or "" for event in received)
    assert said == plain.json["choices"][0]["message"]["content"] != ""
    assert streamed.body.endswith(b"data: [DONE]\n\n")
    for id in ("plain", "streamed"):
        await charged(gateway, id, plain.json["usage"]["prompt_tokens"], 8)


async def test_usage_for_who_asks(gateway: GatewayProcess) -> None:
    """Its last chunk comes through."""
    response = await asks(gateway, "asked", stream=True, stream_options={"include_usage": True})
    *_, last = events(response.body)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)
    await charged(gateway, "asked", last["usage"]["prompt_tokens"], 8)


async def test_the_other_apis(gateway: GatewayProcess) -> None:
    """Completions, responses and messages, plain and streamed, each charged by its own usage."""
    wanted: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "The dictionary", "max_tokens": 8},
        "/v1/responses": {"input": "hello there", "max_output_tokens": 8},
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    }
    for path, members in wanted.items():
        inputs = set()
        for stream in (False, True):
            id = f"{path}-{stream}".replace("/", "-")
            body = {"model": MODEL, "temperature": 0, "stream": stream, **members}
            response = await ask(gateway.port, post(path, body, [("x-request-id", id)]))
            assert (response.status, response.whole) == (200, True)
            line = await gateway.ending(id)
            assert (line["outcome"], line["output_tokens"]) == ("completed", 8)
            inputs.add(line["input_tokens"])
        assert len(inputs) == 1


async def test_the_sdk(gateway: GatewayProcess) -> None:
    """The official client reads its chats and streams."""
    base, http = gateway.api + "/v1", httpx.AsyncClient(trust_env=False)
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=base, api_key="any", http_client=http) as client:
        plain = await client.chat.completions.create(**asked)
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == plain.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_any_model_is_its_own(gateway: GatewayProcess) -> None:
    """It ignores the name; who may use which is for `models` of the upstream and of the keys to say."""
    response = await asks(gateway, "any-model", model="nope")
    assert response.status == 200
    assert (await gateway.ending("any-model"))["model"] == "nope"


async def test_a_prompt_that_is_too_long(gateway: GatewayProcess, llama: EngineProcess) -> None:
    """Its own error, of its own form, untouched and free of charge."""
    body = tiny_chat(TOO_LONG)
    direct = await ask(llama.port, post_chat(body))
    through = await ask(gateway.port, post_chat(body, id="too-long"))
    assert (through.status, through.body) == (direct.status, direct.body)
    assert through.json["error"]["type"] == "exceed_context_size_error"
    assert through.json["error"]["n_ctx"] == CONTEXT_TOKENS
    assert through.header("x-qos-error-source") == "upstream"
    assert (await gateway.ending("too-long"))["cost"] == 0


async def test_its_load(gateway: GatewayProcess, llama: EngineProcess) -> None:
    """Under its own names the gateway reads how many wait inside; of its memory the page says nothing."""
    readers = [RawClient(llama.port) for _ in range(SLOTS + 2)]
    for reader in readers:
        await reader.__aenter__()
        await reader.send(post_chat(tiny_chat(max_tokens=1900, stream=True)))

    async def seen() -> bool:
        state = (await gateway.state())["upstreams"]["llama"]
        return bool(state["engine_waiting"] == 2)

    try:
        await eventually(seen)
    finally:
        for reader in readers:
            await reader.leave()
    assert (await gateway.state())["upstreams"]["llama"]["engine_kv_usage"] is None

    async def idle() -> bool:
        page = await llama.metrics()
        return (page.total(RUNNING), page.total(WAITING)) == (0, 0)

    await eventually(idle)


async def test_a_client_that_leaves(gateway: GatewayProcess, llama: EngineProcess) -> None:
    """It stops writing for nobody."""
    async with RawClient(gateway.port) as client:
        wanted = tiny_chat(max_tokens=1900, stream=True)
        await client.send(post_chat(wanted, id="leaves"))
        await client.until(b'"content":"')

    async def idle() -> bool:
        return (await llama.metrics()).total(RUNNING) == 0

    await eventually(idle)
    assert (await gateway.ending("leaves"))["outcome"] == "client_gone_streaming"


async def test_messages_in_anthropics_form(gateway: GatewayProcess) -> None:
    """What it had in its cache is counted apart, and charged with the rest."""
    body = {"model": MODEL, "max_tokens": 8, "messages": MESSAGES, "temperature": 0}
    response = await ask(gateway.port, post_message(body, id="message"))
    usage = response.json["usage"]
    whole = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    await charged(gateway, "message", whole, 8)
