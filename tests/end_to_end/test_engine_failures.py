"""Engines that fail: before their answer, in the middle of it, or with an error of their own."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawResponse, ask, chat, check_error, get, post, post_chat
from tests.support.scripted_engine import (
    DONE,
    END,
    FINISH,
    ROLE,
    Held,
    Script,
    ScriptedEngine,
    breaking_off,
    event,
    held_plain,
    held_stream,
    plain,
    raw,
    scripted_engine,
    streaming,
    token,
    usage_event,
)
from tests.support.scripted_upstream import STREAM_HEAD, answer, chunk

pytestmark = pytest.mark.anyio

WORDS = [token(word) for word in ("one", " two", " three")]
RATE = 1.0
BURST_SECONDS = 1_000_000
OUTPUT_WEIGHT = 4


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url}],
        "upstream_timeouts": {"first_byte_seconds": 0.5, "idle_seconds": 0.5},
        "circuit_breaker": {"failures": 1000},
        "capacity": {
            "tokens_per_second": RATE,
            "burst_seconds": BURST_SECONDS,
            "output_weight": OUTPUT_WEIGHT,
        },
    }
    async with running_gateway(settings) as gateway:
        yield gateway
        await gateway.books_balance("P1", full=0.35 * BURST_SECONDS * RATE)


async def failed(
    gateway: GatewayProcess, id: str, status: int, outcome: str, code: str, **members: Any
) -> RawResponse:
    """A request that the engine fails before its answer, after a look at what the client is told."""
    response = await ask(gateway.port, post_chat(chat(**members), id=id))
    assert (response.status, response.whole) == (status, True)
    assert response.header("x-qos-outcome") == outcome
    assert response.header("x-qos-error-source") == "gateway"
    assert 1 <= int(response.header("retry-after") or 0) <= 60
    assert (response.error["type"], response.error["code"]) == ("server_error", code)
    line = await gateway.ending(id)
    assert (line["outcome"], line["status"], line["cost"], line["upstream"]) == (outcome, status, 0, "gpu0")
    return response


def last_event(response: RawResponse) -> dict[str, Any]:
    """The error that a broken stream ends with, behind a blank line, and no end of the body."""
    assert (response.status, response.whole) == (200, False)
    *_, last, rest = response.body.split(b"\n\n")
    assert rest == b""
    assert last.startswith(b"data: ")
    error: dict[str, Any] = json.loads(last.removeprefix(b"data: "))["error"]
    check_error(error)
    return error


# ── before the answer ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_no_answer_in_time(gateway: GatewayProcess, engine: ScriptedEngine, stream: bool) -> None:
    """504, the engine's connection is closed, and everything is refunded."""
    engine.play = held = held_plain()
    await failed(gateway, f"late-{stream}", 504, "upstream_timeout", "upstream_timeout", stream=stream)
    await eventually(lambda: held.connections[0].peer_closed.is_set())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-",
        b"hello\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"HTTP/1.1 999 Hm\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nx: a\x01b\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: br\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}",
    ],
    ids=["nothing", "half a head", "no http", "two lengths", "status", "header", "brotli", "no gzip"],
)
async def test_no_answer_at_all(
    gateway: GatewayProcess, engine: ScriptedEngine, request: pytest.FixtureRequest, data: bytes
) -> None:
    """An engine that hangs up, or talks nonsense, in place of an answer is a 502, and is asked once only."""
    engine.play = raw(data, close=True) if data else _hang_up
    asked = len(engine.requests)
    id = f"none-{request.node.callspec.id.replace(' ', '-')}"
    await failed(gateway, id, 502, "upstream_refused", "upstream_unavailable")
    assert len(engine.requests) == asked + 1


async def _hang_up(connection: Any, request: Any) -> None:
    # Not at once: a close that crosses the request on a connection used before may be tried again.
    await asyncio.sleep(0.05)
    connection.close()


@pytest.mark.parametrize(
    "body",
    [b"", b"ok", b"[]", b'"text"', b'{"choices":', b"<html></html>"],
    ids=["empty", "text", "list", "string", "half", "html"],
)
async def test_an_answer_that_is_none(
    gateway: GatewayProcess, engine: ScriptedEngine, request: pytest.FixtureRequest, body: bytes
) -> None:
    """200 with a body that no client can read is a 502."""
    engine.play = plain(body)
    id = f"invalid-{request.node.callspec.id}"
    await failed(gateway, id, 502, "upstream_refused", "upstream_unavailable")


async def test_a_plain_answer_that_stops(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Half a plain answer is none: the client gets a status that says so."""
    engine.play = raw(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", close=True)
    await failed(gateway, "half", 502, "upstream_refused", "upstream_unavailable")


async def test_a_plain_answer_that_falls_silent(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """So is one that comes to a standstill, which is a matter of time."""
    engine.play = Held(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
    await failed(gateway, "standstill", 504, "upstream_timeout", "upstream_timeout")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"error": {"message": "out of memory", "code": 500}}),
        ("/v1/responses", {"status": "failed", "error": {"code": "server_error", "message": "no memory"}}),
    ],
)
async def test_a_success_that_is_none(
    gateway: GatewayProcess, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    """A 200 whose body reports a failure passes as it is, counts as the engine's error, and no answer is
    charged."""
    engine.play = plain(json.dumps(body).encode())
    asked = chat() if path.endswith("completions") else {"model": "mock-gpu", "input": "Hello"}
    response = await ask(gateway.port, post(path, asked, [("x-request-id", path[1:].replace("/", "-"))]))
    assert (response.status, response.json) == (200, body)
    line = await gateway.ending(path[1:].replace("/", "-"))
    assert (line["outcome"], line["output_tokens"]) == ("upstream_error", 0)


async def test_a_stream_that_was_not_asked_for(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """A stream in answer to a plain request is nothing its client could read."""
    engine.play = streaming(ROLE, *WORDS, DONE)
    await failed(gateway, "unasked", 502, "upstream_refused", "upstream_unavailable")


async def test_a_plain_answer_to_a_streaming_request(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """An engine that answers whole where a stream was asked for is passed on as it is."""
    engine.play = plain()
    response = await ask(gateway.port, post_chat(chat(stream=True), id="whole"))
    assert response.json["choices"]
    assert (await gateway.ending("whole"))["outcome"] == "completed"


async def test_an_engine_that_takes_no_connections() -> None:
    """Nobody listens there any more: 502 at once, and a full refund."""
    async with scripted_engine() as engine:
        settings = {
            "upstreams": [{"name": "gpu0", "url": engine.url, "health": {"interval_seconds": 600}}],
            "capacity": {"tokens_per_second": RATE},
        }
        context = running_gateway(settings)
        gateway = await context.__aenter__()
    try:
        for n, stream in enumerate((True, False)):
            id = f"refused-{n}"
            await failed(gateway, id, 502, "upstream_refused", "upstream_unavailable", stream=stream)
        response = await ask(gateway.port, get("/v1/models"))
        assert (response.status, response.error["code"]) == (502, "upstream_unavailable")
        assert await gateway.in_flight() == 0
    finally:
        await context.__aexit__(None, None, None)


# ── the engine's own errors ──────────────────────────────────────────────────────────────────────────────


ERROR_STATUSES = (
    "400 Bad Request",
    "404 Not Found",
    "413 Content Too Large",
    "422 Unprocessable Content",
    "429 Too Many Requests",
    "500 Internal Server Error",
    "503 Service Unavailable",
    "529 Overloaded",
)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_error_statuses_pass_untouched(
    gateway: GatewayProcess, engine: ScriptedEngine, stream: bool
) -> None:
    """Status, body, type and retry advice are the engine's, with a mark whose they are, and cost nothing."""
    headers = ("content-type: application/problem+json; charset=utf-8", "retry-after: 7")
    for status in ERROR_STATUSES:
        body = b'{"object":"error", "message":"no \xc3\xa9","code":' + status[:3].encode() + b"}\n"
        engine.play = raw(answer(body, status=status, headers=headers))
        response = await ask(gateway.port, post_chat(chat(stream=stream), id=f"{status[:3]}-{stream}"))
        assert response.status == int(status[:3])
        assert response.body == body
        assert response.header("content-type") == "application/problem+json; charset=utf-8"
        assert response.header("retry-after") == "7"
        assert response.header("x-qos-error-source") == "upstream"
        assert response.header("x-qos-outcome") is None
    for status in ERROR_STATUSES:
        line = await gateway.ending(f"{status[:3]}-{stream}")
        assert (line["outcome"], line["status"], line["cost"]) == ("upstream_error", int(status[:3]), 0)


async def test_the_engine_stays_in_use_after_client_errors(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """Many 400 in a row say nothing about the engine's health."""
    engine.play = plain(b"{}", status="400 Bad Request")
    for _ in range(20):
        assert (await ask(gateway.port, post_chat(chat()))).status == 400
    assert (await gateway.metrics()).total("upstream_healthy") == 1
    engine.play = plain()
    assert (await ask(gateway.port, post_chat(chat()))).status == 200


# ── in the middle of a stream ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("id", "script", "tokens"),
    [
        ("reset", breaking_off(ROLE, *WORDS), 3),
        ("reset-early", breaking_off(ROLE), 0),
        ("closed", raw(STREAM_HEAD + b"".join(map(chunk, (ROLE, *WORDS))), close=True), 3),
        ("closed-in-a-chunk", raw(STREAM_HEAD + chunk(ROLE) + b"100\r\ndata: {", close=True), 0),
        ("closed-in-an-event", breaking_off(ROLE, *WORDS, WORDS[0][:30]), 3),
        ("ended", streaming(ROLE, *WORDS), 3),
        ("nothing-came", raw(STREAM_HEAD + END), 0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_stream_that_breaks_off(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str, script: Script, tokens: int
) -> None:
    """The client gets what came, then an error event and no proper end; what came is paid for."""
    engine.play = script
    response = await ask(gateway.port, post_chat(chat(stream=True), id=id))
    assert response.header("x-qos-error-source") is None
    error = last_event(response)
    assert (error["type"], error["code"]) == ("server_error", "upstream_aborted")
    assert b'"finish_reason":"stop"' not in response.body
    for word in WORDS[:tokens]:
        assert response.body.count(word) == 1
    line = await gateway.ending(id)
    assert (line["outcome"], line["output_tokens"]) == ("upstream_aborted", tokens)
    assert line["cost"] == line["input_tokens"] + OUTPUT_WEIGHT * tokens


async def test_a_stream_that_falls_silent(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Silence beyond the limit ends the stream with an error event, and the engine's connection with it."""
    engine.play = held = held_stream(ROLE, *WORDS)
    response = await ask(gateway.port, post_chat(chat(stream=True), id="silent"))
    assert "silent" in last_event(response)["message"]
    line = await gateway.ending("silent")
    assert (line["outcome"], line["output_tokens"]) == ("upstream_aborted", 3)
    await eventually(lambda: held.connections[0].peer_closed.is_set())


async def test_an_error_inside_the_stream(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """An error event is the engine's own word: passed on as it is, and not taken for success."""
    error = event({"error": {"message": "engine full", "type": "server_error", "code": 500}})
    engine.play = streaming(ROLE, *WORDS, error, DONE)
    response = await ask(gateway.port, post_chat(chat(stream=True), id="inside"))
    assert response.whole
    assert response.body == b"".join([ROLE, *WORDS, error, DONE])
    line = await gateway.ending("inside")
    assert (line["outcome"], line["output_tokens"]) == ("upstream_error", 3)
    assert line["cost"] == line["input_tokens"] + OUTPUT_WEIGHT * 3


@pytest.mark.parametrize(
    "script",
    [
        streaming(ROLE, *WORDS, FINISH),
        streaming(ROLE, *WORDS, FINISH, usage_event(2, 3)),
        streaming(ROLE, *WORDS, FINISH, DONE[:-2]),
        raw(STREAM_HEAD + b"".join(map(chunk, (ROLE, *WORDS, FINISH, DONE))), close=True),
    ],
    ids=["no-mark", "no-mark-but-usage", "half-a-mark", "no-end-of-body"],
)
async def test_a_stream_that_ends_in_its_own_way(
    gateway: GatewayProcess, engine: ScriptedEngine, request: pytest.FixtureRequest, script: Script
) -> None:
    """A finish reason, or the end mark, is an end, whatever else is missing."""
    engine.play = script
    id = f"ends-{request.node.callspec.id}"
    response = await ask(gateway.port, post_chat(chat(stream=True), id=id))
    assert (response.status, response.whole) == (200, True)
    line = await gateway.ending(id)
    assert (line["outcome"], line["output_tokens"]) == ("completed", 3)
