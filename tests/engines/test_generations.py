"""Every API through the gateway to a real vLLM: what the client gets, and what it is charged."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.engines.engine_process import MODEL, EngineProcess
from tests.engines.traffic import LONG_PROMPT, asks, events, post_message, tiny_chat
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import ask, post, post_chat

pytestmark = pytest.mark.anyio

OUTPUT_WEIGHT, CACHE_WEIGHT = 4, 0.1
MESSAGES: Any = [{"role": "user", "content": "Say something about dictionaries."}]
PROMPT_TOKENS, GENERATED_TOKENS = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"


@pytest.fixture(scope="module")
async def gateway(vllm: EngineProcess) -> AsyncIterator[GatewayProcess]:
    """Buckets that hardly refill, so that each token can be accounted for. When all is over the log lines add
    up to what the engine itself has counted."""
    settings = {
        "upstreams": [{"name": "vllm", "url": vllm.url}],
        "capacity": {
            "tokens_per_second": 1,
            "burst_seconds": 1_000_000,
            "output_weight": OUTPUT_WEIGHT,
            "cache_weight": CACHE_WEIGHT,
        },
        "scheduling": {"deadline_drop": False},
    }
    before = await vllm.metrics()
    async with running_gateway(settings) as gateway:
        yield gateway
        await gateway.books_balance("P1", full=350_000)
        lines = gateway.endings()
        inputs, outputs = (sum(line[key] or 0 for line in lines) for key in ("input_tokens", "output_tokens"))
        # In its own sum vLLM counts a prompt once for each of its choices.
        inputs += sum(line["input_tokens"] for line in gateway.endings("two-choices"))

        async def agree() -> bool:
            page = await vllm.metrics()
            counted = [page.total(name) - before.total(name) for name in (PROMPT_TOKENS, GENERATED_TOKENS)]
            return counted == [inputs, outputs]

        await eventually(agree)


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx.AsyncClient(trust_env=False)
    base = gateway.api + "/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="any", http_client=http, max_retries=0) as client:
        yield client


def named(id: str) -> dict[str, Any]:
    """Arguments that give a request of the SDK this id, and make its answer repeat."""
    return {"extra_headers": {"x-request-id": id}, "model": MODEL, "temperature": 0}


async def charged(gateway: GatewayProcess, id: str, input: int, output: int, cached: int = 0) -> None:
    """The log line tells these tokens and their cost, and nothing went wrong."""
    line = await gateway.ending(id)
    assert (line["outcome"], line["status"], line["upstream"]) == ("completed", 200, "vllm")
    assert (line["input_tokens"], line["cached_tokens"], line["output_tokens"]) == (input, cached, output)
    cost = input - (1 - CACHE_WEIGHT) * cached + OUTPUT_WEIGHT * output
    assert line["cost"] == pytest.approx(cost, abs=0.001)
    if line["streaming"]:
        assert 0 < line["ttft_ms"] <= line["duration_ms"]


# ── chat ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_plain_chat(gateway: GatewayProcess, client: openai.AsyncOpenAI) -> None:
    """It is charged by the usage in it, and the id is the client's own."""
    raw = await client.chat.completions.with_raw_response.create(
        messages=MESSAGES, max_tokens=12, **named("plain-chat")
    )
    answer = raw.parse()
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert raw.headers["x-request-id"] == "plain-chat"
    assert raw.headers["x-qos-priority"] == "P1"
    assert answer.usage
    assert answer.usage.completion_tokens == 12
    details = answer.usage.prompt_tokens_details
    cached = (details and details.cached_tokens) or 0
    await charged(gateway, "plain-chat", answer.usage.prompt_tokens, 12, cached)


async def test_a_streamed_chat(gateway: GatewayProcess, client: openai.AsyncOpenAI) -> None:
    """It says what the plain one says. It is charged by its usage, which the client did not ask for and does
    not see."""
    plain = await client.chat.completions.create(messages=MESSAGES, max_tokens=12, **named("the-same-plain"))
    stream = await client.chat.completions.create(
        messages=MESSAGES, max_tokens=12, stream=True, **named("streamed-chat")
    )
    chunks = [chunk async for chunk in stream]
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == plain.choices[0].message.content != ""
    assert chunks[-1].choices[0].finish_reason == "length"
    line = await gateway.ending("streamed-chat")
    assert plain.usage
    await charged(gateway, "streamed-chat", plain.usage.prompt_tokens, 12, line["cached_tokens"])


async def test_a_streamed_chat_with_usage(gateway: GatewayProcess, client: openai.AsyncOpenAI) -> None:
    """Who asks for usage gets it: one last chunk without choices."""
    stream = await client.chat.completions.create(
        messages=MESSAGES,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        **named("with-usage"),
    )
    *chunks, last = [chunk async for chunk in stream]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage
    assert last.usage.completion_tokens == 12
    line = await gateway.ending("with-usage")
    await charged(gateway, "with-usage", last.usage.prompt_tokens, 12, line["cached_tokens"])


async def test_usage_with_every_chunk(gateway: GatewayProcess) -> None:
    """The continuous usage that a client asks for passes, and its last word counts."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await asks(gateway, "continuous", stream=True, stream_options=options)
    counted = [event["usage"]["completion_tokens"] for event in events(response.body)]
    assert len(counted) > 4
    assert counted == sorted(counted)
    assert counted[-1] == 8
    line = await gateway.ending("continuous")
    await charged(gateway, "continuous", line["input_tokens"], 8, line["cached_tokens"])


async def test_several_choices_in_one_stream(gateway: GatewayProcess) -> None:
    """Their chunks come interleaved; all of them are charged, their prompt once."""
    response = await asks(gateway, "two-choices", stream=True, n=2, temperature=1, max_tokens=6)
    assert response.body.endswith(b"data: [DONE]\n\n")
    assert {choice["index"] for event in events(response.body) for choice in event["choices"]} == {0, 1}
    line = await gateway.ending("two-choices")
    await charged(gateway, "two-choices", line["input_tokens"], 12, line["cached_tokens"])


async def test_what_the_engine_had_in_its_cache(gateway: GatewayProcess) -> None:
    """The second time most of a long prompt is cached, and costs a tenth."""
    first = await asks(gateway, "cached-1", content=LONG_PROMPT)
    again = await asks(gateway, "cached-2", content=LONG_PROMPT)
    details = again.json["usage"]["prompt_tokens_details"]
    tokens = first.json["usage"]["prompt_tokens"]
    assert details["cached_tokens"] > tokens // 2
    await charged(gateway, "cached-1", tokens, 8, (await gateway.ending("cached-1"))["cached_tokens"])
    await charged(gateway, "cached-2", tokens, 8, details["cached_tokens"])


# ── the other APIs ───────────────────────────────────────────────────────────────────────────────────────


async def test_completions(gateway: GatewayProcess, client: openai.AsyncOpenAI) -> None:
    """Plain and streamed they say the same and are charged the same."""
    plain = await client.completions.create(prompt="A list", max_tokens=7, **named("completion"))
    stream = await client.completions.create(
        prompt="A list", max_tokens=7, stream=True, **named("completion-stream")
    )
    chunks = [chunk async for chunk in stream]
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text != ""
    assert plain.usage
    for id in ("completion", "completion-stream"):
        await charged(gateway, id, plain.usage.prompt_tokens, 7)


async def test_several_prompts_at_once(gateway: GatewayProcess, client: openai.AsyncOpenAI) -> None:
    """Texts and lists of token ids; all of them are charged."""
    answer = await client.completions.create(
        prompt=["The dictionary", "A list"], n=1, max_tokens=4, **named("prompts")
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage
    await charged(gateway, "prompts", answer.usage.prompt_tokens, 8)
    await client.completions.create(prompt=[10, 20, 30, 40, 50], max_tokens=4, **named("ids"))
    await charged(gateway, "ids", 5, 4)


async def test_responses(gateway: GatewayProcess, client: openai.AsyncOpenAI) -> None:
    """Plain and streamed they say the same; the stream ends with its own last event."""
    asked: Any = {"input": "hello there", "max_output_tokens": 8}
    plain = await client.responses.create(**asked, **named("response"))
    stream = await client.responses.create(**asked, stream=True, **named("response-stream"))
    received = [event async for event in stream]
    assert received[0].type == "response.created"
    assert received[-1].type in ("response.completed", "response.incomplete")
    said = "".join(event.delta for event in received if event.type == "response.output_text.delta")
    assert said == plain.output_text != ""
    assert plain.usage
    for id in ("response", "response-stream"):
        cached = (await gateway.ending(id))["cached_tokens"]
        await charged(gateway, id, plain.usage.input_tokens, 8, cached)


async def test_messages(gateway: GatewayProcess) -> None:
    """Anthropic's form, plain and streamed, with its own limit and its own events."""
    body = {"model": MODEL, "max_tokens": 8, "messages": MESSAGES, "temperature": 0}
    plain = await ask(gateway.port, post_message(body, id="message"))
    streamed = await ask(gateway.port, post_message({**body, "stream": True}, id="message-stream"))
    assert (plain.status, streamed.status, streamed.whole) == (200, 200, True)
    received = list(events(streamed.body))
    assert (received[0]["type"], received[-1]["type"]) == ("message_start", "message_stop")
    deltas = [event["delta"] for event in received if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == plain.json["content"][0]["text"] != ""
    for id in ("message", "message-stream"):
        cached = (await gateway.ending(id))["cached_tokens"]
        await charged(gateway, id, _whole_input(plain.json["usage"]), 8, cached)


async def test_messages_that_the_engine_had_in_its_cache(gateway: GatewayProcess) -> None:
    """Anthropic's usage counts what was cached apart from the rest; the charge counts all of it."""
    content = f"In another form: {LONG_PROMPT}"
    body = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": content}]}
    first, again = [await ask(gateway.port, post_message(body, id=id)) for id in ("message-1", "message-2")]
    tokens = _whole_input(first.json["usage"])
    assert _whole_input(again.json["usage"]) == tokens
    cached = again.json["usage"]["cache_read_input_tokens"]
    assert cached > tokens // 2
    await charged(gateway, "message-2", tokens, 8, cached)


def _whole_input(usage: dict[str, Any]) -> int:
    return sum(
        usage[part] for part in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    )


# ── what needs no budget ─────────────────────────────────────────────────────────────────────────────────


async def test_tokens_of_a_text(gateway: GatewayProcess) -> None:
    """Tokenize counts a chat as its prompt is charged, and detokenize gives a text back; both are free."""
    chat = {"model": MODEL, "messages": MESSAGES}
    counted = await ask(gateway.port, post("/tokenize", chat, [("x-request-id", "count")]))
    asked = await ask(gateway.port, post_chat(tiny_chat(MESSAGES[0]["content"]), id="counted"))
    assert counted.json["count"] == asked.json["usage"]["prompt_tokens"]
    split = await ask(gateway.port, post("/tokenize", {"model": MODEL, "prompt": "Good day"}))
    joined = {"model": MODEL, "tokens": split.json["tokens"]}
    text = await ask(gateway.port, post("/detokenize", joined, [("x-request-id", "join")]))
    assert text.json == {"prompt": "Good day"}
    for id in ("count", "join"):
        line = await gateway.ending(id)
        assert (line["outcome"], line["cost"]) == ("completed", 0)
