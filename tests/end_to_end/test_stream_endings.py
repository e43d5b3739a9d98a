"""After the 200 the status is spent: every way in which a stream can end, and what its client then has."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawResponse, ask, chat, post, post_chat
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
    plain,
    raw,
    scripted_engine,
    streaming,
    token,
    usage_event,
    whole_answer,
)
from tests.support.scripted_upstream import STREAM_HEAD, RecordedRequest, ScriptedConnection, answer, chunk
from tests.support.typed_streams import (
    message_closing,
    message_delta_event,
    message_opening,
    numbered,
    response_closing,
    response_deltas,
    response_object,
    response_opening,
    response_usage,
    typed_event,
)

pytestmark = pytest.mark.anyio

WORDS = ["one", " two", " three"]
IDLE_SECONDS = 0.3
OUTPUT_WEIGHT = 4


@dataclass(frozen=True)
class Dialect:
    """A stream of one API, in parts: what its engines say before, between, at the end, and of a fault."""

    name: str
    path: str
    body: dict[str, Any]
    seen: list[bytes]
    closing: list[bytes]
    error: bytes
    after_error: bytes = b""

    def request(self, id: str, **members: Any) -> bytes:
        body = {"model": "mock-gpu", "stream": True, **self.body, **members}
        return post(self.path, body, [("x-request-id", id)])


def _text(text: str, finish_reason: str | None = None) -> bytes:
    return event({"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


USAGE = usage_event(9, 3)
ERROR = event({"error": {"message": "engine full", "type": "server_error", "code": 500}})
ANTHROPIC_ERROR = {"type": "error", "error": {"type": "internal_error", "message": "engine full"}}
MESSAGES = [{"role": "user", "content": "Hello"}]
FAILED = response_object("failed", None, error={"code": "server_error", "message": "engine full"})
DIALECTS = (
    Dialect(
        name="chat",
        path="/v1/chat/completions",
        body={"messages": MESSAGES},
        seen=[ROLE, *map(token, WORDS)],
        closing=[FINISH, DONE],
        error=ERROR,
        after_error=DONE,
    ),
    Dialect(
        name="completions",
        path="/v1/completions",
        body={"prompt": "Hello"},
        seen=list(map(_text, WORDS)),
        closing=[_text("", "length"), DONE],
        error=ERROR,
        after_error=DONE,
    ),
    Dialect(
        name="responses",
        path="/v1/responses",
        body={"input": "Hello"},
        seen=[*response_opening(), *response_deltas(WORDS)],
        closing=response_closing(WORDS, response_usage(9, 3)),
        error=numbered("response.failed", 7, response=FAILED),
    ),
    Dialect(
        name="messages",
        path="/v1/messages",
        body={"messages": MESSAGES, "max_tokens": 10},
        seen=[*message_opening(input_tokens=9, output_tokens=0), *map(message_delta_event, WORDS)],
        closing=message_closing(output_tokens=3),
        error=typed_event("error", ANTHROPIC_ERROR),
        after_error=DONE,
    ),
)


@pytest.fixture(params=DIALECTS, ids=lambda dialect: dialect.name)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    chosen: Dialect = request.param
    return chosen


@pytest.fixture
def id(request: pytest.FixtureRequest) -> str:
    """A request id that no other test uses."""
    name: str = request.node.name
    return "".join(c if c.isalnum() else "-" for c in name)


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    """One place, so that whoever does not give it back is found out, and buckets that hardly refill."""
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url, "max_in_flight": 1}],
        "upstream_timeouts": {"first_byte_seconds": 15, "idle_seconds": IDLE_SECONDS},
        "circuit_breaker": {"failures": 1000},
        "capacity": {"tokens_per_second": 1, "burst_seconds": 1_000_000, "output_weight": OUTPUT_WEIGHT},
        "scheduling": {"deadline_drop": False},
    }
    async with running_gateway(settings) as gateway:
        yield gateway
        await gateway.books_balance("P1", full=350_000)


def told_by_the_gateway(response: RawResponse, came: bytes) -> None:
    """Behind what came stands an event with the gateway's own error, in the words of the API, and no end of
    the body."""
    assert (response.status, response.whole) == (200, False)
    assert response.body.startswith(came)
    rest = response.body.removeprefix(came)
    *_, last, nothing = rest.split(b"\n\n")
    assert nothing == b""
    data = json.loads(last.rpartition(b"data: ")[2])
    assert "the engine's stream" in (data.get("error") or data)["message"]
    assert rest.count(b"the engine's stream") == 1


# ── the engine's own error ───────────────────────────────────────────────────────────────────────────────


def falling_silent(*events: bytes) -> Script:
    return Held(STREAM_HEAD + b"".join(map(chunk, events)))


def hanging_up(*events: bytes) -> Script:
    return raw(STREAM_HEAD + b"".join(map(chunk, events)), close=True)


@pytest.mark.parametrize(
    "ends",
    [streaming, breaking_off, hanging_up, falling_silent],
    ids=["in order", "reset", "hang up", "silence"],
)
async def test_an_error_event_is_the_last_word(
    gateway: GatewayProcess, engine: ScriptedEngine, dialect: Dialect, id: str, ends: Any
) -> None:
    """The client has it as the engine wrote it, and then the end of the body, whatever became of the
    connection behind it; nothing is added, nothing is asked again, and what came before is paid."""
    asked = len(engine.requests)
    events = [*dialect.seen, dialect.error]
    if dialect.after_error:
        events.append(dialect.after_error)
    engine.play = ends(*events)
    response = await ask(gateway.port, dialect.request(id))
    assert (response.status, response.whole) == (200, True)
    assert response.body == b"".join(events)
    line = await gateway.ending(id)
    assert (line["outcome"], line["status"], line["output_tokens"]) == ("upstream_error", 200, 3)
    assert line["cost"] == line["input_tokens"] + OUTPUT_WEIGHT * 3
    assert len(engine.requests) == asked + 1


async def test_an_error_event_without_its_end_mark(
    gateway: GatewayProcess, engine: ScriptedEngine, dialect: Dialect, id: str
) -> None:
    """A reset right behind it changes nothing either."""
    engine.play = breaking_off(*dialect.seen, dialect.error)
    response = await ask(gateway.port, dialect.request(id))
    assert (response.body, response.whole) == (b"".join([*dialect.seen, dialect.error]), True)
    assert (await gateway.ending(id))["outcome"] == "upstream_error"


async def test_an_error_in_the_place_of_an_answer(
    gateway: GatewayProcess, engine: ScriptedEngine, dialect: Dialect, id: str
) -> None:
    """An error event may be all there is; then no token was made, and none is paid."""
    engine.play = streaming(dialect.error)
    response = await ask(gateway.port, dialect.request(id))
    assert (response.body, response.whole) == (dialect.error, True)
    line = await gateway.ending(id)
    assert (line["outcome"], line["ttft_ms"], line["output_tokens"]) == ("upstream_error", None, 0)
    assert line["cost"] == line["input_tokens"]


async def test_half_an_error_event_is_none(
    gateway: GatewayProcess, engine: ScriptedEngine, dialect: Dialect, id: str
) -> None:
    """Who was cut off while saying what was wrong has said nothing: the gateway says it."""
    engine.play = breaking_off(*dialect.seen, dialect.error[:-20])
    response = await ask(gateway.port, dialect.request(id))
    told_by_the_gateway(response, b"".join(dialect.seen))
    line = await gateway.ending(id)
    assert (line["outcome"], line["output_tokens"]) == ("upstream_aborted", 3)


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ends", [breaking_off, hanging_up], ids=["reset", "hang up"])
async def test_an_end_mark_is_an_end(
    gateway: GatewayProcess, engine: ScriptedEngine, dialect: Dialect, id: str, ends: Any
) -> None:
    """Behind it the connection may go as it likes."""
    events = [*dialect.seen, *dialect.closing]
    engine.play = ends(*events)
    response = await ask(gateway.port, dialect.request(id))
    assert (response.body, response.whole) == (b"".join(events), True)
    assert (await gateway.ending(id))["outcome"] == "completed"


@pytest.mark.parametrize(
    ("ends", "length"),
    [(breaking_off, 0), (breaking_off, 3), (hanging_up, 1), (falling_silent, 3)],
    ids=["reset at once", "reset", "hang up", "silence"],
)
async def test_a_cut_is_a_cut(
    gateway: GatewayProcess, engine: ScriptedEngine, dialect: Dialect, id: str, ends: Any, length: int
) -> None:
    """In each dialect: what came, one error event, no invented finish reason, no end of the body; the place
    is free for the next request."""
    opening = len(dialect.seen) - len(WORDS)
    came = dialect.seen[: opening + length] if length else dialect.seen[:opening]
    engine.play = ends(*came)
    response = await ask(gateway.port, dialect.request(id))
    told_by_the_gateway(response, b"".join(came))
    for invented in (b'_reason":"', b"[DONE]", b"message_stop", b"response.completed"):
        assert invented not in response.body
    line = await gateway.ending(id)
    assert (line["outcome"], line["output_tokens"]) == ("upstream_aborted", length)
    assert line["cost"] == line["input_tokens"] + OUTPUT_WEIGHT * length
    engine.play = plain()
    assert (await ask(gateway.port, post_chat(chat()))).status == 200


HALF_USAGE = USAGE[: USAGE.index(b"completion_tokens")]
LENGTH_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
CLOSING_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
BEFORE = b"".join([ROLE, *map(token, WORDS), FINISH])


@pytest.mark.parametrize("asks", [False, True], ids=["unasked", "asked"])
@pytest.mark.parametrize(
    ("data", "outcome"),
    [
        (STREAM_HEAD + chunk(BEFORE) + chunk(HALF_USAGE) + END, "completed"),
        (CLOSING_HEAD + BEFORE + HALF_USAGE, "completed"),
        (STREAM_HEAD + chunk(BEFORE) + chunk(HALF_USAGE), "upstream_aborted"),
        (LENGTH_HEAD % len(BEFORE + USAGE) + BEFORE + HALF_USAGE, "upstream_aborted"),
    ],
    ids=["whole body", "framed by its end", "no last chunk", "length not reached"],
)
async def test_an_end_inside_the_usage_chunk(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str, data: bytes, outcome: str, asks: bool
) -> None:
    """Half of it is no business of a client that did not ask for the whole; the charge is what was seen."""
    engine.play = raw(data, close=True)
    members = {"stream_options": {"include_usage": True}} if asks else {}
    response = await ask(gateway.port, post_chat(chat(stream=True, **members), id=id))
    came = BEFORE + HALF_USAGE if asks else BEFORE
    if outcome == "completed":
        assert (response.body, response.whole) == (came, True)
    else:
        told_by_the_gateway(response, came)
        assert asks or response.body.removeprefix(came).startswith(b'data: {"error":')
    line = await gateway.ending(id)
    assert (line["outcome"], line["output_tokens"]) == (outcome, 3)
    assert line["cost"] == line["input_tokens"] + OUTPUT_WEIGHT * 3


async def test_the_sdk_is_told_of_a_cut_inside_an_event(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """It raises the gateway's words, and not that half an event is no JSON."""
    engine.play = breaking_off(ROLE, token("one"), token("two")[:40])
    async with httpx.AsyncClient(trust_env=False) as http:
        client = openai.AsyncOpenAI(base_url=gateway.api + "/v1", api_key="any", http_client=http)
        stream = await client.chat.completions.create(model="m", messages=[], stream=True)
        texts: list[str | None] = []

        async def read() -> None:
            async for part in stream:
                texts.append(part.choices[0].delta.content)  # noqa: PERF401 – what came before counts

        with pytest.raises(openai.APIError, match="broke off"):
            await read()
    assert texts == ["", "one"]


# ── statuses ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("status", ["201 Created", "202 Accepted"])
async def test_a_stream_under_another_success(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str, status: str
) -> None:
    """It is a stream and a success all the same, under the status that the engine gave it, and charged."""
    head = STREAM_HEAD.replace(b"200 OK", status.encode())
    engine.play = raw(head + chunk(BEFORE + USAGE + DONE) + END)
    response = await ask(gateway.port, post_chat(chat(stream=True), id=id))
    assert (response.status, response.body) == (int(status[:3]), BEFORE + DONE)
    line = await gateway.ending(id)
    assert (line["outcome"], line["cost"]) == ("completed", 9 + OUTPUT_WEIGHT * 3)


@pytest.mark.parametrize(
    "name", ["text/event-stream", "Text/Event-Stream; Charset=UTF-8", "text/event-stream;charset=utf-8"]
)
async def test_a_stream_by_any_spelling_of_its_type(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str, name: str
) -> None:
    """Names of media types know no case, and may have parameters."""
    head = STREAM_HEAD.replace(b"text/event-stream", name.encode())
    engine.play = raw(head + chunk(BEFORE + USAGE + DONE) + END)
    response = await ask(gateway.port, post_chat(chat(stream=True), id=id))
    assert response.body == BEFORE + DONE
    assert (await gateway.ending(id))["ttft_ms"] is not None


STATUSES = (
    "400 Bad Request",
    "404 Not Found",
    "413 Content Too Large",
    "422 Unprocessable Content",
    "429 Too Many Requests",
    "500 Internal Server Error",
    "503 Service Unavailable",
)


async def test_an_error_that_takes_a_while(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """An engine may think before it refuses a stream: status, bytes and type are still its own, nothing is
    charged, and what clients did wrong says nothing against it."""

    async def refuse(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await asyncio.sleep(0.05)
        status = json.loads(request.body)["messages"][0]["content"]
        body = b'{"error": {"message":"no \xc3\xa9", "code":' + status[:3].encode() + b"}}\n"
        await connection.send(answer(body, status=status, headers=("content-type: application/json",)))

    engine.play = refuse
    for status in STATUSES:
        response = await ask(gateway.port, post_chat(chat(status, stream=True), id=f"slow-{status[:3]}"))
        assert response.status == int(status[:3])
        assert response.body == b'{"error": {"message":"no \xc3\xa9", "code":' + status[:3].encode() + b"}}\n"
        assert response.header("content-type") == "application/json"
        assert response.header("content-length") == str(len(response.body))
        line = await gateway.ending(f"slow-{status[:3]}")
        assert (line["outcome"], line["status"], line["cost"]) == ("upstream_error", int(status[:3]), 0)
    assert (await gateway.metrics()).total("upstream_healthy", upstream="gpu0") == 1


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_silence_between_events_is_not_the_wait_for_the_first(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str
) -> None:
    """A stream may stand still for so long, and the engine is let go; the first byte may take much longer."""
    engine.play = held = Held(STREAM_HEAD + chunk(ROLE) + chunk(token("one")))
    response = await ask(gateway.port, post_chat(chat(stream=True), id=f"{id}-silent"))
    told_by_the_gateway(response, ROLE + token("one"))
    assert b"silent" in response.body
    await eventually(lambda: held.connections[0].peer_closed.is_set())
    assert await gateway.in_flight() == 0

    async def late(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await asyncio.sleep(3 * IDLE_SECONDS)
        await streaming(ROLE, token("one"), FINISH, DONE)(connection, request)

    async def late_after_its_head(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await connection.send(STREAM_HEAD)
        await asyncio.sleep(3 * IDLE_SECONDS)
        await connection.send(b"".join(map(chunk, (ROLE, token("one"), FINISH, DONE))) + END)

    for name, script in (("late", late), ("head", late_after_its_head), ("plain", _late_plain)):
        engine.play = script
        stream = script is not _late_plain
        response = await ask(gateway.port, post_chat(chat(stream=stream), id=f"{id}-{name}"))
        assert (response.status, response.whole) == (200, True)
        line = await gateway.ending(f"{id}-{name}")
        assert line["outcome"] == "completed"
        assert not stream or line["ttft_ms"] >= 3 * IDLE_SECONDS * 1000


async def _late_plain(connection: ScriptedConnection, request: RecordedRequest) -> None:
    await asyncio.sleep(3 * IDLE_SECONDS)
    await connection.send(answer(whole_answer(), headers=("content-type: application/json",)))


# ── nobody else ──────────────────────────────────────────────────────────────────────────────────────────


async def test_what_has_begun_here_is_not_finished_elsewhere() -> None:
    """After a word of the answer the other engine is not asked, though it is idle and well: the client has
    that word once, and an error."""
    async with scripted_engine() as one, scripted_engine() as other:
        engines = {"one": one, "other": other}
        for engine in engines.values():
            engine.play = breaking_off(ROLE, token("Hel"))
        upstreams = [{"name": name, "url": engine.url} for name, engine in engines.items()]
        async with running_gateway({"upstreams": upstreams}) as gateway:
            response = await ask(gateway.port, post_chat(chat(stream=True), id="begun"))
            told_by_the_gateway(response, ROLE + token("Hel"))
            assert response.body.count(b"Hel") == 1
            line = await gateway.ending("begun")
        assert (line["outcome"], line["status"]) == ("upstream_aborted", 200)
        assert {name: len(engine.requests) for name, engine in engines.items()} == {
            line["upstream"]: 1,
            ({"one", "other"} - {line["upstream"]}).pop(): 0,
        }
