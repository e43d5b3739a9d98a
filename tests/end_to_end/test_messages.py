"""`/v1/messages`: Anthropic's bodies, streams and errors, and the same budget, times and endings."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, RawResponse, ask, get, post
from tests.support.scripted_engine import (
    Held,
    Script,
    ScriptedEngine,
    breaking_off,
    held_plain,
    plain,
    raw,
    scripted_engine,
    streaming,
)
from tests.support.scripted_upstream import STREAM_HEAD, chunk
from tests.support.typed_streams import (
    anthropic_error,
    check_anthropic_error,
    last_event,
    message_closing,
    message_delta_event,
    message_events,
    message_opening,
    read_event,
    typed_event,
)

pytestmark = pytest.mark.anyio

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
WORDS = ["one", " two", " three", " four", " five"]
KEY, LIMITED, ONCE, FREE = "a-key", "a-limited-key", "a-slow-key", "a-free-key"
KEYS: dict[str, dict[str, Any]] = {
    KEY: {"tenant": "t"},
    LIMITED: {"tenant": "l", "models": ["other"]},
    ONCE: {"tenant": "o", "requests_per_minute": 1},
    FREE: {"tenant": "f", "default": "P0"},
}
SEEN = [*message_opening(input_tokens=14, output_tokens=0), *map(message_delta_event, WORDS)]


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    """Input and output cost the same, the buckets hardly refill, and messages are batch work unless they say
    otherwise."""
    settings = {
        "upstreams": [
            {"name": "gpu0", "url": engine.url, "models": ["m", "other", "unknown-0", "unknown-1"]}
        ],
        "upstream_timeouts": {"first_byte_seconds": 2.0},
        "server": {"max_body_bytes": 20_000},
        "capacity": {"tokens_per_second": 1, "burst_seconds": 1_000_000, "output_weight": 1},
        "scheduling": {"deadline_drop": False},
        "classification": {"routes": {PATH: "P2"}},
    }
    async with running_gateway(settings, keys=KEYS) as gateway:
        yield gateway
        await gateway.books_balance("P2", full=50_000)


def body(content: object = "hi", **members: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": content}], **members}


def post_message(
    body: bytes | dict[str, Any], id: str, *headers: tuple[str, str], key: str = KEY, path: str = PATH
) -> bytes:
    given = [("x-api-key", key), ("anthropic-version", "2023-06-01"), ("x-request-id", id), *headers]
    return post(path, body, given)


async def send(gateway: GatewayProcess, id: str, *headers: tuple[str, str], **members: Any) -> RawResponse:
    return await ask(gateway.port, post_message(body(**members), id, *headers))


def message(**usage: int) -> bytes:
    """A plain answer."""
    content = [{"type": "text", "text": "Good day"}]
    said = {"id": "chatcmpl-b1", "type": "message", "role": "assistant", "content": content, "model": "m"}
    return json.dumps({**said, "stop_reason": "end_turn", "usage": usage}).encode()


# ── what it costs and how it is timed ────────────────────────────────────────────────────────────────────


async def reserved(gateway: GatewayProcess, engine: ScriptedEngine, **members: Any) -> int:
    """The tokens that are held at the engine while such a request runs."""
    engine.play = held = held_plain()
    asking = asyncio.create_task(send(gateway, "reserves", **members))
    async with asyncio.timeout(10):
        await held.begun.wait()
    tokens: int = (await gateway.state())["upstreams"]["gpu0"]["in_flight_tokens"]
    held.released.set()
    assert (await asking).status == 200
    await gateway.quiet()
    return tokens


async def test_the_limit_of_its_output_is_reserved(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """By this API's own name for it; another API's name is no limit here."""
    prompt = await reserved(gateway, engine, model="unknown-0", max_tokens=0)
    more = {"model": "unknown-1", "max_tokens": 100, "max_output_tokens": 200}
    assert await reserved(gateway, engine, **more) == prompt + 100


@pytest.mark.parametrize("end", [[], [b"data: [DONE]\n\n"]], ids=["", "with [DONE]"])
async def test_a_stream_is_timed_and_charged(
    gateway: GatewayProcess, engine: ScriptedEngine, end: list[bytes]
) -> None:
    """By its usage, which nobody had to ask for; its bytes and the body's are as they were. Some vLLMs end it
    with a mark of another API's."""
    events = [*message_events(WORDS, 14, 8), *end]
    engine.play = streaming(*events)
    sent = b'{"model":"m", "max_tokens":8,"stream": true,"messages":[{"role":"user","content":"hi"}]}'
    id = f"stream-{len(end)}"
    response = await ask(gateway.port, post_message(sent, id))
    assert (response.status, response.whole, response.body) == (200, True, b"".join(events))
    assert engine.last.body == sent
    line = await gateway.ending(id)
    assert (line["outcome"], line["streaming"], line["priority"]) == ("completed", True, "P2")
    assert (line["input_tokens"], line["output_tokens"], line["cost"]) == (14, 8, 22)
    assert line["ttft_ms"] is not None
    assert line["tpot_ms"] is not None


async def test_a_stream_that_comes_byte_by_byte(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Reads, chunks and events need not coincide."""
    stream = b"".join(message_events(WORDS, 14, 8))
    engine.play = streaming(*[stream[n : n + 1] for n in range(len(stream))])
    assert (await send(gateway, "bytes", stream=True)).body == stream
    line = await gateway.ending("bytes")
    assert (line["outcome"], line["cost"]) == ("completed", 22)


CACHE = {"cache_read_input_tokens": 4, "cache_creation_input_tokens": 2}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_cached_input_is_input_too(
    gateway: GatewayProcess, engine: ScriptedEngine, stream: bool
) -> None:
    """`input_tokens` leaves out what came from the cache, which costs a tenth, and what went into it. A
    stream tells its input at the start and its output at the end."""
    opening = message_opening(input_tokens=10, output_tokens=1, **CACHE)
    closing = message_closing(output_tokens=8)
    events = [*opening, *map(message_delta_event, WORDS), *closing]
    said = message(input_tokens=10, output_tokens=8, **CACHE)
    engine.play = streaming(*events) if stream else plain(said)
    id = f"cached-{stream}"
    response = await send(gateway, id, stream=stream)
    assert response.body == (b"".join(events) if stream else said)
    line = await gateway.ending(id)
    assert (line["input_tokens"], line["cached_tokens"], line["output_tokens"]) == (16, 4, 8)
    assert line["cost"] == pytest.approx(12 + 0.1 * 4 + 8)
    assert (line["ttft_ms"] is None) == (not stream)


async def test_what_is_no_message(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """A list, or half a body, is a fault of the engine, and costs nothing."""
    for said in (b"[]", b'{"id":'):
        engine.play = plain(said)
        response = await send(gateway, f"no-{len(said)}")
        assert (response.status, anthropic_error(response)["type"]) == (502, "api_error")
        assert (await gateway.ending(f"no-{len(said)}"))["cost"] == 0


@pytest.mark.parametrize(
    ("tier", "granted"), [(None, "P2"), ("auto", "P2"), ("standard_only", "P2"), ("priority", "P0")]
)
async def test_anthropics_own_tiers_claim_nothing(
    gateway: GatewayProcess, engine: ScriptedEngine, tier: str | None, granted: str
) -> None:
    """They say which capacity may be used: the route's class holds, even for a key that has a higher default.
    Other tiers are claims as everywhere."""
    engine.play = plain(message(input_tokens=1, output_tokens=1))
    asked = body() if tier is None else body(service_tier=tier)
    response = await ask(gateway.port, post_message(asked, f"tier-{tier}", key=FREE))
    assert response.header("x-qos-priority") == granted


# ── how it may end ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("id", "script"), [("ended", streaming(*SEEN)), ("reset", breaking_off(*SEEN))], ids=["ended", "reset"]
)
async def test_a_stream_without_its_end_mark(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str, script: Script
) -> None:
    """It was cut, however politely: the client is told in an event of this API, and pays for what it has."""
    engine.play = script
    response = await send(gateway, id, stream=True)
    assert response.body.startswith(b"".join(SEEN))
    name, data = last_event(response)
    assert name == "error"
    error = check_anthropic_error(data)
    assert error["type"] == "api_error"
    assert "broke off" in error["message"]
    line = await gateway.ending(id)
    assert (line["outcome"], line["status"], line["cost"]) == ("upstream_aborted", 200, 14 + 5)


@pytest.mark.parametrize("end", [[], [b"data: [DONE]\n\n"]], ids=["", "with [DONE]"])
async def test_an_error_inside_the_stream(
    gateway: GatewayProcess, engine: ScriptedEngine, end: list[bytes]
) -> None:
    """It passes as it is, the stream ends in order, and what was seen is paid."""
    error = {"type": "error", "error": {"type": "internal_error", "message": "out of memory"}}
    events = [*SEEN, typed_event("error", error), *end]
    engine.play = streaming(*events)
    id = f"error-{len(end)}"
    response = await send(gateway, id, stream=True)
    assert (response.body, response.whole) == (b"".join(events), True)
    line = await gateway.ending(id)
    assert (line["outcome"], line["cost"]) == ("upstream_error", 14 + 5)


@pytest.mark.parametrize(
    ("id", "events", "mark", "outcome", "output_tokens"),
    [
        ("middle", SEEN, b" five", "client_gone_streaming", 5),
        ("end", message_events(WORDS, 14, 8), b'"message_stop"', "completed", 8),
    ],
)
async def test_a_client_that_hangs_up(
    gateway: GatewayProcess,
    engine: ScriptedEngine,
    id: str,
    events: list[bytes],
    mark: bytes,
    outcome: str,
    output_tokens: int,
) -> None:
    """It pays for what was produced; one that hangs up at the end mark has all it wanted. The engine is let
    go at once."""
    engine.play = held = Held(STREAM_HEAD + b"".join(map(chunk, events)))
    async with RawClient(gateway.port) as client:
        await client.send(post_message(body(stream=True, max_tokens=1000), f"leaves-{id}"))
        await client.until(mark)
        await client.until(b"\n\n\r\n")
    async with asyncio.timeout(5):
        await held.connections[0].peer_closed.wait()
    line = await gateway.ending(f"leaves-{id}")
    assert (line["outcome"], line["output_tokens"]) == (outcome, output_tokens)
    assert line["cost"] == 14 + output_tokens


async def test_an_engine_that_has_not_counted_when_its_client_leaves(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """A start that says 0 input is no free prompt: the estimate stands."""
    events = [*message_opening(input_tokens=0, output_tokens=0), *map(message_delta_event, WORDS)]
    engine.play = Held(STREAM_HEAD + b"".join(map(chunk, events)))
    async with RawClient(gateway.port) as client:
        await client.send(post_message(body("word " * 40, stream=True), "uncounted"))
        await client.until(b" five")
    line = await gateway.ending("uncounted")
    assert line["input_tokens"] >= 40
    assert line["cost"] == line["input_tokens"] + 5


# ── headers ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", [PATH, COUNT_PATH])
async def test_the_key_stays_here_and_the_version_passes(
    gateway: GatewayProcess, engine: ScriptedEngine, path: str
) -> None:
    """So does whatever else an Anthropic client says to the engine, in headers and in the query."""
    engine.play = plain(message(input_tokens=1, output_tokens=1))
    headers = [("anthropic-beta", "some-2026"), ("x-stainless-lang", "python")]
    response = await ask(gateway.port, post_message(body(), "headers", *headers, path=path + "?beta=true"))
    assert (response.status, engine.last.target) == (200, path + "?beta=true")
    assert engine.last.header("x-api-key") is None
    assert engine.last.header("authorization") is None
    assert engine.last.header("anthropic-version") == "2023-06-01"
    assert engine.last.header("anthropic-beta") == "some-2026"
    assert KEY.encode() not in engine.last.raw


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", [PATH, COUNT_PATH])
async def test_who_may_not(gateway: GatewayProcess, engine: ScriptedEngine, path: str) -> None:
    """401 without a key or with a wrong one, 403 for a model that is not the key's, 404 for one that nobody
    has: in Anthropic's words, and with the same headers as elsewhere."""
    asked = len(engine.requests)
    for request, status, type, outcome in (
        (post(path, body()), 401, "authentication_error", "unauthorized"),
        (post_message(body(), "x", key="wrong", path=path), 401, "authentication_error", "unauthorized"),
        (post_message(body(), "x", key=LIMITED, path=path), 403, "permission_error", "forbidden"),
        (post_message(body(model="gpt-none"), "x", path=path), 404, "not_found_error", "not_found"),
        (post_message(b"{", "x", path=path), 400, "invalid_request_error", "bad_request"),
        (post_message(body("x" * 20_000), "x", path=path), 413, "request_too_large", "too_large"),
        (get(path, [("x-api-key", KEY)]), 405, "invalid_request_error", "bad_request"),
    ):
        response = await ask(gateway.port, request)
        assert (response.status, anthropic_error(response)["type"]) == (status, type)
        assert response.header("x-qos-outcome") == outcome
        assert response.header("x-qos-error-source") == "gateway"
        assert response.header("x-request-id")
    assert len(engine.requests) == asked


async def test_the_message_names_the_field(gateway: GatewayProcess) -> None:
    """Anthropic's shape has no member for it."""
    for members, field in (
        ({"max_tokens": "8"}, "max_tokens"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"stream": 1}, "stream"),
    ):
        error = anthropic_error(await send(gateway, "field", **members))
        assert error["type"] == "invalid_request_error"
        assert field in error["message"]
    error = anthropic_error(await send(gateway, "header", ("x-request-priority", "P9")))
    assert "x-request-priority" in error["message"]


async def test_what_is_not_there_near_messages(gateway: GatewayProcess) -> None:
    """Whoever asks for batches of messages reads Anthropic's errors; others read OpenAI's."""
    response = await ask(gateway.port, post_message(body(), "batches", path="/v1/messages/batches"))
    assert (response.status, anthropic_error(response)["type"]) == (404, "not_found_error")
    response = await ask(gateway.port, post_message(body(), "other", path="/v1/messagesx"))
    assert (response.status, response.error["code"]) == (404, "not_found")


async def test_who_comes_too_often(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """429, which limit it was, and when to come back."""
    engine.play = plain(message(input_tokens=1, output_tokens=1))
    first, second = [await ask(gateway.port, post_message(body(), f"often-{n}", key=ONCE)) for n in (0, 1)]
    assert (first.status, second.status) == (200, 429)
    error = anthropic_error(second)
    assert error["type"] == "rate_limit_error"
    assert "'o'" in error["message"]
    assert second.header("x-qos-outcome") == "rejected_rate"
    assert 0 < int(second.header("retry-after") or "") <= 60
    assert 0 < int(second.header("retry-after-ms") or "") <= 60_000
    assert second.header("x-ratelimit-remaining-requests") == "0"


async def test_engines_that_fail(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """502 without an answer, 504 without one in time, both with advice; an engine's own error is its own."""
    for script, status, type in (
        (raw(b"", close=True), 502, "api_error"),
        (held_plain(), 504, "timeout_error"),
    ):
        engine.play = script
        response = await send(gateway, f"fails-{status}", stream=True)
        assert (response.status, anthropic_error(response)["type"]) == (status, type)
        assert response.header("retry-after")
    said = b'{"type":"error","error":{"type":"BadRequestError","message":"no such tool"}}'
    engine.play = plain(said, status="400 Bad Request")
    response = await send(gateway, "fails-400")
    assert (response.status, response.body) == (400, said)
    assert response.header("x-qos-error-source") == "upstream"


async def test_no_engine_is_up() -> None:
    """503 with the type of an overloaded service, for messages and for their count."""
    async with scripted_engine() as engine:
        engine.healthy = False
        settings = {
            "upstreams": [
                {"name": "gpu0", "url": engine.url, "health": {"interval_seconds": 0.1, "fail_after": 1}}
            ],
            "upstream_timeouts": {"no_upstream_seconds": 0.1},
        }
        async with running_gateway(settings, ready=False) as gateway:

            async def is_down() -> bool:
                return (await gateway.metrics()).total("upstream_healthy", upstream="gpu0") == 0

            await eventually(is_down)
            for path in (PATH, COUNT_PATH):
                response = await ask(gateway.port, post(path, body()))
                assert (response.status, anthropic_error(response)["type"]) == (503, "overloaded_error")
                assert response.header("x-qos-outcome") == "rejected_no_upstream"
                assert response.header("retry-after")


# ── the whole of it, with the mock GPU ───────────────────────────────────────────────────────────────────


async def test_the_mock_gpu() -> None:
    """Plain and streamed, what is charged is what the mock says it has used, and what it counts before."""
    settings = {"upstreams": [{"name": "gpu0", "url": "mock://h100_llama3_8b", "models": ["mock-gpu"]}]}
    async with running_gateway(settings) as gateway:
        asked = body("Say something.", model="mock-gpu", max_tokens=5, system="Be brief.")
        counted = (await ask(gateway.port, post(COUNT_PATH, asked))).json["input_tokens"]
        whole = (await ask(gateway.port, post_message(asked, "plain"))).json
        assert whole["usage"] == {"input_tokens": counted, "output_tokens": 5}
        stream = await ask(gateway.port, post_message(asked | {"stream": True}, "stream"))
        *events, rest = stream.body.split(b"\n\n")
        assert rest == b""
        data = [event for _, event in map(read_event, events)]
        assert [event["type"] for event in data] == [
            "message_start",
            "content_block_start",
            *["content_block_delta"] * 5,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert "".join(event["delta"]["text"] for event in data[2:7]) == whole["content"][0]["text"]
        assert data[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "max_tokens"
        for id in ("plain", "stream"):
            line = await gateway.ending(id)
            assert (line["outcome"], line["cost"]) == ("completed", counted + 4 * 5)
        refused = await ask(gateway.port, post_message(asked | {"max_tokens": 200_000}, "long"))
        assert (refused.status, refused.header("x-qos-error-source")) == (400, "upstream")
        assert "max_tokens=200000" in check_anthropic_error(refused.json)["message"]
