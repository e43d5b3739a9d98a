"""`/v1/responses`: other names, typed events and no `[DONE]`, and the same budget, times and endings."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.raw_client import RawClient, RawResponse, ask, get, post
from tests.support.scripted_engine import (
    END,
    Held,
    Script,
    ScriptedEngine,
    breaking_off,
    held_plain,
    plain,
    scripted_engine,
    streaming,
)
from tests.support.scripted_upstream import STREAM_HEAD, RecordedRequest, ScriptedConnection, chunk
from tests.support.typed_streams import (
    last_event,
    llamacpp_response_events,
    numbered,
    response_closing,
    response_deltas,
    response_events,
    response_object,
    response_opening,
    response_usage,
    typed_event,
)

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
WORDS = ["one", " two", " three", " four", " five"]
SILENCE_SECONDS = 0.5


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    """Input and output cost the same, and the buckets hardly refill."""
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url}],
        "capacity": {"tokens_per_second": 1, "burst_seconds": 1_000_000, "output_weight": 1},
        "scheduling": {"deadline_drop": False},
    }
    async with running_gateway(settings) as gateway:
        yield gateway
        await gateway.books_balance("P1", full=350_000)


def body(input: object = "hello", **members: Any) -> dict[str, Any]:
    return {"model": "m", "input": input, **members}


def post_response(body: bytes | dict[str, Any], id: str, *headers: tuple[str, str]) -> bytes:
    return post(PATH, body, [("x-request-id", id), *headers])


async def send(gateway: GatewayProcess, id: str, *headers: tuple[str, str], **members: Any) -> RawResponse:
    return await ask(gateway.port, post_response(body(**members), id, *headers))


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
    prompt = await reserved(gateway, engine, model="unknown-0", max_output_tokens=0)
    assert await reserved(gateway, engine, model="unknown-1", max_output_tokens=100) == prompt + 100
    assert await reserved(gateway, engine, model="unknown-2", max_tokens=7) == prompt + 256


async def test_a_stream_is_timed_and_charged(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """The first delta is the first token, whatever was announced before, and the usage of the last event is
    what it costs. Nothing is asked for and nothing taken out."""

    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await connection.send(STREAM_HEAD + b"".join(map(chunk, response_opening())))
        await asyncio.sleep(SILENCE_SECONDS)
        events = [*response_deltas(WORDS), *response_closing(WORDS, response_usage(10, 5))]
        await connection.send(b"".join(map(chunk, events)) + END)

    engine.play = script
    sent = b'{ "model":"m", "input":"hello", "max_output_tokens":1e2, "stream":true}'
    response = await ask(gateway.port, post_response(sent, "timed"))
    assert (response.status, response.whole) == (200, True)
    assert response.body == b"".join(response_events(WORDS, 10, 5))
    assert engine.last.body == sent
    line = await gateway.ending("timed")
    assert (line["outcome"], line["status"], line["streaming"]) == ("completed", 200, True)
    assert (line["input_tokens"], line["output_tokens"], line["cost"]) == (10, 5, 15)
    assert SILENCE_SECONDS * 1000 <= line["ttft_ms"] < 20_000
    assert line["tpot_ms"] is not None


async def test_the_stream_of_another_engine(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """llama.cpp numbers no events, and tells what it found in its cache."""
    events = llamacpp_response_events(WORDS, 10, 5)
    engine.play = streaming(*events)
    response = await send(gateway, "llama", stream=True)
    assert response.body == b"".join(events)
    line = await gateway.ending("llama")
    assert (line["outcome"], line["input_tokens"], line["cached_tokens"]) == ("completed", 10, 9)
    assert line["cost"] == pytest.approx(1 + 0.1 * 9 + 5)


async def test_a_stream_that_comes_byte_by_byte(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Reads, chunks and events need not coincide."""
    events = response_events(WORDS, 10, 5)
    stream = b"".join(events)
    engine.play = streaming(*[stream[n : n + 1] for n in range(len(stream))])
    assert (await send(gateway, "bytes", stream=True)).body == stream
    line = await gateway.ending("bytes")
    assert (line["outcome"], line["cost"], line["output_tokens"]) == ("completed", 15, 5)


async def test_a_plain_response(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Untouched, and charged by its usage."""
    said = json.dumps(response_object("completed", response_usage(10, 5))).encode()
    engine.play = plain(said)
    response = await send(gateway, "plain", max_output_tokens=50)
    assert (response.status, response.body) == (200, said)
    line = await gateway.ending("plain")
    assert (line["outcome"], line["cost"], line["ttft_ms"]) == ("completed", 15, None)


async def test_what_is_no_response(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """A list, or half a body, is a fault of the engine, and costs nothing."""
    for said in (b"[]", b'{"id":'):
        engine.play = plain(said)
        response = await send(gateway, f"no-{len(said)}")
        assert (response.status, response.error["code"]) == (502, "upstream_unavailable")
        assert (await gateway.ending(f"no-{len(said)}"))["cost"] == 0


@pytest.mark.parametrize(("tier", "granted"), [("flex", "P2"), ("priority", "P0"), ("auto", "P1")])
async def test_a_class_is_claimed_by_the_service_tier(
    gateway: GatewayProcess, engine: ScriptedEngine, tier: str, granted: str
) -> None:
    """As for chat."""
    engine.play = plain(json.dumps(response_object("completed", response_usage(1, 1))).encode())
    response = await send(gateway, f"tier-{tier}", service_tier=tier)
    assert response.header("x-qos-priority") == granted


# ── how it may end ───────────────────────────────────────────────────────────────────────────────────────

SEEN = [*response_opening(), *response_deltas(WORDS)]


async def test_an_incomplete_response_is_complete(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """It reached its limit, and says so at its end."""
    ended = response_object("incomplete", response_usage(10, 5))
    engine.play = streaming(*SEEN, numbered("response.incomplete", 9, response=ended))
    assert (await send(gateway, "incomplete", stream=True)).whole
    line = await gateway.ending("incomplete")
    assert (line["outcome"], line["cost"]) == ("completed", 15)


@pytest.mark.parametrize(
    ("id", "script"), [("ended", streaming(*SEEN)), ("reset", breaking_off(*SEEN))], ids=["ended", "reset"]
)
async def test_a_stream_without_its_last_event(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str, script: Script
) -> None:
    """It was cut, however politely: the client is told in an event of this API, the next by its number, and
    pays for what it has."""
    engine.play = script
    response = await send(gateway, id, stream=True)
    assert response.body.startswith(b"".join(SEEN))
    name, error = last_event(response)
    assert name == error["type"] == "error"
    assert (error["code"], error["param"], error["sequence_number"]) == ("upstream_aborted", None, 9)
    assert "broke off" in error["message"]
    line = await gateway.ending(id)
    assert (line["outcome"], line["status"], line["output_tokens"]) == ("upstream_aborted", 200, 5)
    assert line["cost"] == line["input_tokens"] + 5


FAILED = response_object("failed", None, error={"code": "server_error", "message": "out of memory"})
FAILED_WITH_USAGE = FAILED | {"usage": response_usage(10, 7)}


@pytest.mark.parametrize(
    ("error", "output_tokens"),
    [
        (typed_event("error", {"type": "error", "message": "out of memory", "sequence_number": 9}), 5),
        (typed_event("error", {"error": {"message": "out of memory", "code": 500}}), 5),
        (numbered("response.failed", 9, response=FAILED), 5),
        (numbered("response.failed", 9, response=FAILED_WITH_USAGE), 7),
    ],
    ids=["typed", "untyped", "failed", "failed-with-usage"],
)
async def test_an_error_inside_the_stream(
    gateway: GatewayProcess, engine: ScriptedEngine, error: bytes, output_tokens: int
) -> None:
    """It passes as it is, the stream ends in order, and what was used is paid."""
    engine.play = streaming(*SEEN, error)
    id = f"error-{len(error)}"
    response = await send(gateway, id, stream=True)
    assert (response.body, response.whole) == (b"".join(SEEN) + error, True)
    line = await gateway.ending(id)
    assert (line["outcome"], line["output_tokens"]) == ("upstream_error", output_tokens)
    assert line["cost"] == line["input_tokens"] + output_tokens


@pytest.mark.parametrize(
    ("events", "mark", "outcome", "output_tokens"),
    [
        (SEEN, b" five", "client_gone_streaming", 5),
        (response_events(WORDS, 10, 6), b"response.completed", "completed", 6),
        ([*SEEN, numbered("response.failed", 9, response=FAILED)], b"out of memory", "upstream_error", 5),
    ],
    ids=["in the middle", "at the end", "at an error"],
)
async def test_a_client_that_hangs_up(
    gateway: GatewayProcess,
    engine: ScriptedEngine,
    events: list[bytes],
    mark: bytes,
    outcome: str,
    output_tokens: int,
) -> None:
    """It pays for what was produced; one that hangs up at the end mark has all it wanted. The engine is let
    go at once."""
    engine.play = held = Held(STREAM_HEAD + b"".join(map(chunk, events)))
    id = f"leaves-{outcome}"
    async with RawClient(gateway.port) as client:
        await client.send(post_response(body(stream=True, max_output_tokens=1000), id))
        await client.until(mark)
        await client.until(b"\n\n\r\n")
    async with asyncio.timeout(5):
        await held.connections[0].peer_closed.wait()
    line = await gateway.ending(id)
    assert (line["outcome"], line["output_tokens"]) == (outcome, output_tokens)
    assert line["cost"] == line["input_tokens"] + output_tokens


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────


async def test_what_is_refused_is_refused_in_openais_shape(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """With the field's own name in this API; a look is not taken for a request."""
    asked = len(engine.requests)
    for members, param, code in (
        ({"model": None}, "model", "missing_required_parameter"),
        ({"max_output_tokens": -1}, "max_output_tokens", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_value"),
        ({"input": "x " * 400_000}, "input", "request_too_large"),
        ({"background": True}, "background", "unsupported_value"),
    ):
        response = await send(gateway, "refused", **members)
        assert (response.status, response.error["param"], response.error["code"]) == (400, param, code)
    response = await ask(gateway.port, get(PATH))
    assert (response.status, response.error["code"]) == (405, "method_not_allowed")
    response = await ask(gateway.port, get(PATH + "/resp_1"))
    assert (response.status, response.error["code"]) == (404, "not_found")
    assert len(engine.requests) == asked


async def test_a_response_in_the_foreground_may_say_so(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """`background: false` is what everybody gets."""
    engine.play = plain(json.dumps(response_object("completed", response_usage(1, 1))).encode())
    assert (await send(gateway, "foreground", background=False, store=True)).status == 200


async def test_the_engines_own_error(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Status and body pass untouched, and nothing is charged."""
    said = b'{"error":{"message":"no such tool","type":"BadRequestError","param":null,"code":400}}'
    engine.play = plain(said, status="400 Bad Request")
    response = await send(gateway, "engine-says-no", stream=True)
    assert (response.status, response.body) == (400, said)
    assert response.header("x-qos-error-source") == "upstream"
    line = await gateway.ending("engine-says-no")
    assert (line["outcome"], line["cost"]) == ("upstream_error", 0)


# ── the official client and the mock GPU ─────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
async def mocked() -> AsyncIterator[GatewayProcess]:
    settings = {"upstreams": [{"name": "gpu0", "url": "mock://h100_llama3_8b", "models": ["mock-gpu"]}]}
    async with running_gateway(settings) as gateway:
        yield gateway


@pytest.fixture
async def client(mocked: GatewayProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx.AsyncClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=mocked.api + "/v1", api_key="any", http_client=http) as client:
        yield client


async def test_the_sdk_gets_a_response(mocked: GatewayProcess, client: openai.AsyncOpenAI) -> None:
    """Whole, with the text and what it has used, and that is what it costs."""
    answer = await client.responses.create(
        model="mock-gpu", instructions="Be brief.", input="Say something.", max_output_tokens=5
    )
    assert len(answer.output_text) == 4 * 5
    assert answer.usage
    assert (answer.usage.output_tokens, answer.status) == (5, "incomplete")
    await mocked.quiet()
    line = mocked.endings()[-1]
    assert (line["outcome"], line["input_tokens"]) == ("completed", answer.usage.input_tokens)
    assert line["cost"] == answer.usage.input_tokens + 4 * 5


async def test_the_sdk_streams_a_response(mocked: GatewayProcess, client: openai.AsyncOpenAI) -> None:
    """Event by event: a delta for each token, and the whole response at the end."""
    stream = await client.responses.create(
        model="mock-gpu",
        input=[{"role": "user", "content": "Say something."}],
        max_output_tokens=5,
        stream=True,
    )
    events = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) == 5
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "".join(deltas)
    assert last.response.usage
    await mocked.quiet()
    line = mocked.endings()[-1]
    assert (line["outcome"], line["output_tokens"], line["streaming"]) == ("completed", 5, True)
    assert line["input_tokens"] == last.response.usage.input_tokens
    assert line["ttft_ms"] > 0


async def test_the_sdk_raises_what_is_refused(client: openai.AsyncOpenAI) -> None:
    """By the gateway or by the engine."""
    with pytest.raises(openai.NotFoundError, match="'gpt-none'"):
        await client.responses.create(model="gpt-none", input="x")
    with pytest.raises(openai.BadRequestError, match="max_output_tokens=200000") as caught:
        await client.responses.create(model="mock-gpu", input="x", max_output_tokens=200_000)
    assert caught.value.response.headers["x-qos-error-source"] == "upstream"


async def test_the_sdk_is_told_of_a_broken_stream() -> None:
    """It gets an event of a type that it knows, and then the end of the connection."""
    async with scripted_engine() as engine:
        engine.play = breaking_off(*SEEN)
        settings = {"upstreams": [{"name": "gpu0", "url": engine.url}]}
        async with running_gateway(settings) as gateway, httpx.AsyncClient(trust_env=False) as http:
            client = openai.AsyncOpenAI(base_url=gateway.api + "/v1", api_key="any", http_client=http)
            stream = await client.responses.create(model="m", input="x", stream=True)
            kinds: list[str] = []

            async def read() -> None:
                async for event in stream:
                    kinds.append(event.type)  # noqa: PERF401 – what came before the exception counts

            with pytest.raises(openai.APIConnectionError):
                await read()
            assert kinds[-2:] == ["response.output_text.delta", "error"]
