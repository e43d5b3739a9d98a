"""Where one message ends and the next begins, in both directions: to that there is one answer only."""

import json
from collections.abc import AsyncIterator

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.raw_client import RawClient, ask, chat, get, post, post_chat, request_head
from tests.support.scripted_engine import (
    DONE,
    END,
    FINISH,
    ROLE,
    ScriptedEngine,
    held_plain,
    plain,
    raw,
    scripted_engine,
    streaming,
    token,
    usage_event,
    whole_answer,
)
from tests.support.scripted_upstream import (
    RecordedRequest,
    ScriptedConnection,
    ScriptedUpstream,
    answer,
    chunk,
)

pytestmark = pytest.mark.anyio

CHAT_PATH = "/v1/chat/completions"
CHUNKED = ("transfer-encoding", "chunked")
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n"
BODY = json.dumps(chat()).encode()
LENGTH = b"content-length: %d\r\n" % len(BODY)
HIDDEN = b"GET /v1/models HTTP/1.1\r\nhost: g\r\n\r\n"
"""What somebody would like to pass off as the body of another request."""


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


async def _refuses_uploads(connection: ScriptedConnection) -> None:
    while await connection.received(3):
        if not connection.unread.startswith(b"GET"):
            connection.stop_reading()
            await connection.send(answer(b'{"error":"too large"}', status="413 Content Too Large"))
            return
        await connection.answer(answer())


@pytest.fixture(scope="module")
async def hasty() -> AsyncIterator[ScriptedUpstream]:
    async with ScriptedUpstream(_refuses_uploads) as upstream:
        yield upstream


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine, hasty: ScriptedUpstream) -> AsyncIterator[GatewayProcess]:
    settings = {
        "upstreams": [
            {"name": "gpu0", "url": engine.url, "models": ["mock-gpu"]},
            {"name": "hasty", "url": hasty.url, "models": ["hasty"]},
        ],
        "circuit_breaker": {"failures": 1000},
        "capacity": {"tokens_per_second": 1_000_000},
    }
    async with running_gateway(settings) as gateway:
        yield gateway


# ── from the client ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + LENGTH + LENGTH + b"\r\n" + BODY,
        HEAD + b"content-length: %d, %d\r\n\r\n" % (len(BODY), len(BODY)) + BODY,
        HEAD + b"content-length: +%d\r\n\r\n" % len(BODY) + BODY,
        HEAD + b"content-length: 0x10\r\n\r\n" + BODY,
        HEAD + LENGTH + b"transfer-encoding: chunked\r\n\r\n" + chunk(BODY) + END,
        HEAD + b"transfer-encoding: chunked\r\n" + LENGTH + b"\r\n" + END + HIDDEN,
        HEAD + b"transfer-encoding: identity\r\n" + LENGTH + b"\r\n" + BODY,
        HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(BODY) + END,
        HEAD + b"transfer-encoding: chunked, identity\r\n\r\n" + chunk(BODY) + END,
        HEAD + b"transfer-encoding: xchunked\r\n\r\n" + chunk(BODY) + END,
        HEAD + b"transfer-encoding : chunked\r\n\r\n" + chunk(BODY) + END,
        HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n" + BODY,
        HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 17 + b"\r\n" + BODY,
        HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}x\r\n" + END,
        HEAD + b"x-folded: one\r\n two\r\n" + LENGTH + b"\r\n" + BODY,
        HEAD + b"x: a\rb: c\r\n" + LENGTH + b"\r\n" + BODY,
        (HEAD + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY,
        HEAD.replace(b"1.1", b"3.7") + LENGTH + b"\r\n" + BODY,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=[
        *("length twice", "list of lengths", "signed length", "hexadecimal length", "length and chunks"),
        *("chunks and length", "identity", "chunked twice", "chunked not last", "unknown coding"),
        *("space before colon", "negative chunk", "huge chunk", "chunk too long", "folded header"),
        *("bare CR", "bare LF", "version", "HTTP/2"),
    ],
)
async def test_a_request_that_could_be_read_in_two_ways(
    gateway: GatewayProcess, engine: ScriptedEngine, request_bytes: bytes
) -> None:
    """It is told so and closed, and nothing of it reaches an engine."""
    asked = len(engine.requests)
    async with RawClient(gateway.port) as client:
        await client.send(request_bytes)
        response = await client.response()
        assert (response.status, response.error["code"]) == (400, "invalid_http")
        assert response.header("connection") == "close"
        assert await client.rest() == b""
    assert len(engine.requests) == asked
    await gateway.quiet()


async def test_extensions_and_trailers_of_chunks(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """They are read and dropped, and the next request is where it should be."""
    engine.play = plain()
    async with RawClient(gateway.port) as client:
        for _ in range(2):
            await client.send(request_head("POST", CHAT_PATH, [CHUNKED]))
            await client.send(b'%x;a="b c";d\r\n%b\r\n0;last\r\nx-trailer: 1\r\n\r\n' % (len(BODY), BODY))
            assert (await client.response()).status == 200
            assert engine.last.body == BODY
            assert engine.last.header("x-trailer") is None


@pytest.mark.parametrize("again", [BODY, b"\x00" * 100_000, b"x: " + b"y" * 1_000_000])
async def test_more_than_the_length_says(
    gateway: GatewayProcess, engine: ScriptedEngine, again: bytes
) -> None:
    """A request is answered as what it says it is; what follows is no request, is told so, and cuts nobody
    off."""
    engine.play = held = held_plain()
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(BODY, id="liar") + again[:60_000])
        await held.begun.wait()
        await client.send(again[60_000:])
        held.released.set()
        assert (await client.response()).status == 200
        response = await client.response()
        assert (response.status, response.error["code"]) == (400, "invalid_http")
        assert await client.rest() == b""
    assert engine.last.body == BODY


async def test_a_length_that_lies_low(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Half a body is no JSON, and the other half no request."""
    asked = len(engine.requests)
    async with RawClient(gateway.port) as client:
        await client.send(request_head("POST", CHAT_PATH, [("content-length", "10")]) + BODY)
        assert (await client.response()).error["code"] == "invalid_json"
        assert (await client.response()).error["code"] == "invalid_http"
        assert await client.rest() == b""
    assert len(engine.requests) == asked


async def test_a_client_that_wants_to_close(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """It has its answer whole, and the connection ends behind it."""
    for script, stream in ((plain(), False), (streaming(ROLE, token("x"), FINISH, DONE), True)):
        engine.play = script
        async with RawClient(gateway.port) as client:
            await client.send(post_chat(chat(stream=stream), [("connection", "close")]))
            response = await client.response()
            assert (response.status, response.whole, response.header("connection")) == (200, True, "close")
            assert await client.rest() == b""


async def test_very_many_headers(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """They pass, in order, as long as the head is not too large; then it is refused by that name."""
    engine.play = plain()
    many = [(f"x-{n}", "y") for n in range(10_000)]
    assert (await ask(gateway.port, post_chat(chat(), many))).status == 200
    assert [header for header in engine.last.headers if header[1] == "y"] == many
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(chat(), [(f"x-{n}", "y" * 100) for n in range(10_000)]))
        response = await client.response()
    assert (response.status, response.error["code"]) == (431, "headers_too_large")


# ── from the engine ──────────────────────────────────────────────────────────────────────────────────────


def _chunked_json(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(chunk(body[n : n + 5]) for n in range(0, len(body), 5)) + END


def _counted_stream() -> bytes:
    events = b"".join([ROLE, token("x"), FINISH, usage_event(3, 1), DONE])
    return answer(events, headers=("content-type: text/event-stream",))


async def test_one_framing_whatever_the_engines_was(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """An answer put in place of the engine's, a stream with a length of which an event was taken out, JSON in
    chunks, HEAD and 204: each ends where it says, so one connection serves them all."""
    models = get("/v1/models")
    listed = b'{"object":"list","data":[]}'
    tokens = post("/tokenize", {"model": "mock-gpu", "prompt": "Hello"})
    async with RawClient(gateway.port) as client:
        for script, request, method, status, body in (
            (raw(answer(b"<html>" * 100)), post_chat(chat()), "POST", 502, None),
            (raw(_counted_stream()), post_chat(chat(stream=True)), "POST", 200, None),
            (raw(_chunked_json(whole_answer())), post_chat(chat()), "POST", 200, whole_answer()),
            (raw(_chunked_json(listed)), models, "GET", 200, listed),
            (raw(_chunked_json(listed)), models.replace(b"GET", b"HEAD", 1), "HEAD", 200, b""),
            (raw(_chunked_json(b"[1,2]")), tokens, "POST", 200, b"[1,2]"),
            (raw(b"HTTP/1.1 204 No Content\r\n\r\n"), tokens, "POST", 204, b""),
            (raw(b"HTTP/1.1 304 Not Modified\r\n\r\n"), tokens, "POST", 304, b""),
            (
                raw(answer(b'{"error":1}', status="422 No", headers=("x: y",))),
                post_chat(chat()),
                "POST",
                422,
                b'{"error":1}',
            ),
            (plain(), post_chat(chat()), "POST", 200, whole_answer()),
        ):
            engine.play = script
            await client.send(request)
            response = await client.response(method)
            assert (response.status, response.whole) == (status, True)
            assert body is None or response.body == body
            if status == 204:
                names = {name.lower() for name, _ in response.headers}
                assert names.isdisjoint({"content-length", "transfer-encoding"})


UNASKED = answer(b'{"choices":[{"message":{"content":"for somebody else"}}]}')


async def _two_answers(connection: ScriptedConnection, request: RecordedRequest) -> None:
    await connection.send(answer(whole_answer()) + UNASKED)


async def _another_answer_later(connection: ScriptedConnection, request: RecordedRequest) -> None:
    await connection.send(answer(whole_answer()))
    await connection.send(UNASKED)


async def _chunks_and_length(connection: ScriptedConnection, request: RecordedRequest) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
    await connection.send(head + chunk(whole_answer()) + END)


async def test_an_answer_nobody_asked_for(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """It reaches nobody: the connection it came on is not used again."""
    for script in (_two_answers, _another_answer_later):
        for _ in range(5):
            engine.play = script
            assert (await ask(gateway.port, post_chat(chat()))).body == whole_answer()
        engine.play = plain()
        assert (await ask(gateway.port, post_chat(chat()))).body == whole_answer()


async def test_an_answer_that_could_be_read_in_two_ways(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """An engine that gives a length and chunks as well has given no answer."""
    engine.play = _chunks_and_length
    response = await ask(gateway.port, post_chat(chat()))
    assert (response.status, response.header("x-qos-outcome")) == (502, "upstream_refused")


async def test_an_engine_that_does_not_wait_for_the_end(gateway: GatewayProcess) -> None:
    """It refuses a large upload before it has read it and closes: the client has that answer, or is told that
    the engine has gone; nothing is charged or left behind."""
    body = chat() | {"model": "hasty", "metadata": "x" * 8_000_000}
    response = await ask(gateway.port, post(CHAT_PATH, body, [("x-request-id", "large")]))
    assert response.status in (413, 502)
    assert (await gateway.ending("large"))["cost"] == 0
