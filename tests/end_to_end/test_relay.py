"""What an engine streams is what the client gets, byte for byte and at once; and what was used is known."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, ask, chat, get, post, post_chat
from tests.support.scripted_engine import (
    DONE,
    END,
    FINISH,
    ROLE,
    Script,
    ScriptedEngine,
    choice_event,
    event,
    held_stream,
    plain,
    raw,
    scripted_engine,
    streaming,
    token,
    usage_event,
    whole_answer,
)
from tests.support.scripted_upstream import STREAM_HEAD, RecordedRequest, ScriptedConnection, chunk

pytestmark = pytest.mark.anyio

USAGE = usage_event(9, 5)
WORDS = [token(word) for word in ("one", " two", " three", " four", " five")]
PLAIN_STREAM = [ROLE, *WORDS, FINISH, USAGE, DONE]


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url, "max_in_flight": 150}],
        "capacity": {"tokens_per_second": 1, "burst_seconds": 1_000_000, "output_weight": 4},
    }
    async with running_gateway(settings) as gateway:
        yield gateway
        await gateway.books_balance("P1", full=350_000)


PIECES = (1, 7, 1 << 30)
PIECES_MAX = 3000


def in_pieces(data: bytes, size: int) -> Script:
    """Stream `data` in chunks of this size, each in a write of its own; after many the rest comes at once."""

    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await connection.send(STREAM_HEAD)
        cut = min(len(data), PIECES_MAX * size)
        for start in range(0, cut, size):
            await connection.send(chunk(data[start : start + size]))
            await asyncio.sleep(0)
        await connection.send((chunk(data[cut:]) if cut < len(data) else b"") + END)

    return script


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────

PECULIAR_STREAMS = {
    "plain": b"".join(PLAIN_STREAM),
    "utf-8": b"".join([ROLE, token("你好🌍"), token("é" * 40), FINISH, USAGE, DONE]),
    "other line ends in text": b"".join(
        [
            ROLE,
            token("a\u2028b\u2029c\x85d"),
            event({"choices": [], "usage": None, "x": "\u2028"}),
            USAGE,
            DONE,
        ]
    ),
    "crlf": b"".join(PLAIN_STREAM).replace(b"\n", b"\r\n"),
    "cr": b"".join(PLAIN_STREAM).replace(b"\n", b"\r"),
    "comments": b": working\n\n" * 3 + ROLE + b": glued\n" + WORDS[0] + FINISH + b":\n\n" + USAGE + DONE,
    "names and ids": b"event: message\nid: 7\nretry: 10\n" + WORDS[0] + FINISH + USAGE + DONE,
    "data in two lines": ROLE + b'data: {"choices":[{"index":0,\ndata: "delta":{"content":"x"}}]}\n\n' + DONE,
    "no space behind the colon": b"".join(PLAIN_STREAM).replace(b"data: ", b"data:"),
    "byte order mark": b"\xef\xbb\xbf" + b"".join(PLAIN_STREAM),
    "no json": ROLE + b"data: {broken\n\n" + b"data: 7\n\n" + WORDS[0] + FINISH + USAGE + DONE,
    "an event of a megabyte": ROLE + WORDS[0] + token("x" * (1 << 20)) + FINISH + USAGE + DONE,
    "no blank line at the end": b"".join(PLAIN_STREAM)[:-1],
}


@pytest.mark.parametrize("name", PECULIAR_STREAMS)
async def test_bytes_out_are_bytes_in(gateway: GatewayProcess, engine: ScriptedEngine, name: str) -> None:
    """For a client that asked for usage itself not one byte is touched, however the stream is cut: byte by
    byte, in sevens, in one piece."""
    data = PECULIAR_STREAMS[name]
    ids = [f"bytes-{name.replace(' ', '-')}-{size}" for size in PIECES]
    for id, size in zip(ids, PIECES, strict=True):
        engine.play = in_pieces(data, size)
        body = chat(stream=True, stream_options={"include_usage": True})
        response = await ask(gateway.port, post_chat(body, id=id))
        assert (response.status, response.whole) == (200, True)
        assert response.body == data
    for id in ids:
        line = await gateway.ending(id)
        assert line["outcome"] == "completed"
        assert line["ttft_ms"] is not None
        if USAGE in data:
            assert (line["input_tokens"], line["output_tokens"]) == (9, 5)


@pytest.mark.parametrize("size", PIECES, ids=["byte by byte", "in sevens", "in one piece"])
@pytest.mark.parametrize("name", PECULIAR_STREAMS)
async def test_bytes_out_are_bytes_in_but_for_the_usage_chunk(
    gateway: GatewayProcess, engine: ScriptedEngine, name: str, size: int
) -> None:
    """For a client that did not ask for usage the one chunk is missing, and nothing else."""
    data = PECULIAR_STREAMS[name]
    engine.play = in_pieces(data, size)
    response = await ask(gateway.port, post_chat(chat(stream=True)))
    assert (response.status, response.whole) == (200, True)
    forms = [USAGE, USAGE.replace(b"data: ", b"data:")]
    forms += [form.replace(b"\n", end) for form in forms for end in (b"\r\n", b"\r")]
    expected = data
    for form in forms:
        expected = expected.replace(form, b"")
    assert response.body == expected


async def test_each_event_passes_at_once(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """An engine that waits until the client has an event before it sends the next comes to its end."""
    received = asyncio.Semaphore(0)

    async def lockstep(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await connection.send(STREAM_HEAD)
        for n in range(20):
            await connection.send(chunk(token(f"<{n}>")))
            await received.acquire()
        await connection.send(chunk(DONE) + END)

    engine.play = lockstep
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(chat(stream=True), [("accept-encoding", "gzip, br")]))
        _, headers = await client.head()
        for n in range(20):
            await client.until(b"<%d>" % n)
            received.release()
        assert await client.until(b"0\r\n\r\n")
    assert engine.last.header("accept-encoding") == "identity"
    names = {name for name, _ in headers}
    assert names.isdisjoint({"content-encoding", "content-length"})
    assert ("cache-control", "no-cache, no-transform") in headers
    assert ("x-accel-buffering", "no") in headers


async def test_streams_that_end_with_the_connection(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """An engine that frames its stream by closing the connection is relayed with a proper end."""
    head = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    engine.play = raw(head + b"".join(PLAIN_STREAM), close=True)
    response = await ask(gateway.port, post_chat(chat(stream=True)))
    assert response.whole
    assert response.body == b"".join(PLAIN_STREAM).replace(USAGE, b"")


async def test_streams_with_a_length(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """A length that the stream no longer has, its usage chunk taken out, is not passed on."""
    data = b"".join(PLAIN_STREAM)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(data)
    engine.play = raw(head + data)
    response = await ask(gateway.port, post_chat(chat(stream=True)))
    assert response.whole
    assert response.header("content-length") is None
    assert response.body == data.replace(USAGE, b"")


async def test_plain_answers(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """A plain answer in chunks arrives whole, with one framing, and every byte as it was."""
    body = whole_answer(content="Grüße 🌍") + b" \n"
    pieces = b"".join(chunk(body[n : n + 5]) for n in range(0, len(body), 5)) + END
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    engine.play = raw(head + pieces)
    response = await ask(gateway.port, post_chat(chat()))
    assert response.body == body
    assert response.header("content-length") == str(len(body))


async def test_a_compressed_stream(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """An engine that compresses unasked is read all the same: events at once, usage known, label and body
    agree."""
    go_on = asyncio.Event()
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)

    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        head = STREAM_HEAD.replace(b"\r\n", b"\r\ncontent-encoding: gzip\r\n", 1)
        first = packer.compress(ROLE + WORDS[0]) + packer.flush(zlib.Z_SYNC_FLUSH)
        await connection.send(head + chunk(first))
        await go_on.wait()
        rest = packer.compress(b"".join(PLAIN_STREAM[2:])) + packer.flush()
        await connection.send(b"".join(chunk(rest[n : n + 5]) for n in range(0, len(rest), 5)) + END)

    engine.play = script
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(chat(stream=True), [("accept-encoding", "gzip")], id="packed"))
        _, headers = await client.head()
        assert "content-encoding" not in {name for name, _ in headers}
        assert ROLE + WORDS[0] in await client.until(WORDS[0])
        go_on.set()
        rest = await client.until(b"0\r\n\r\n")
    assert DONE in rest
    assert USAGE not in rest
    line = await gateway.ending("packed")
    assert (line["outcome"], line["input_tokens"], line["output_tokens"]) == ("completed", 9, 5)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_compressed_answer(gateway: GatewayProcess, engine: ScriptedEngine, coding: str) -> None:
    """So is a plain answer, whose length becomes that of what is in it."""
    content = whole_answer(9, 5, content="word " * 200_000)
    packed = gzip.compress(content) if coding == "gzip" else zlib.compress(content)
    engine.play = plain(packed, headers=(f"content-encoding: {coding}",))
    response = await ask(gateway.port, post_chat(chat(), id=f"packed-{coding}"))
    assert response.body == content
    assert response.header("content-encoding") is None
    line = await gateway.ending(f"packed-{coding}")
    assert (line["input_tokens"], line["output_tokens"]) == (9, 5)


async def test_a_hundred_and_fifty_streams(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """There is no limit on connections behind the one that is configured."""
    engine.play = held = held_stream(ROLE, *WORDS)
    async with AsyncExitStack() as stack:
        for _ in range(150):
            client = await stack.enter_async_context(RawClient(gateway.port))
            await client.send(post_chat(chat(stream=True), [("x-request-priority", "P0")]))
        await eventually(lambda: len(held.connections) == 150)
        assert await gateway.in_flight() == 150


@pytest.mark.parametrize("status", ["201 Created", "202 Accepted"])
async def test_other_successes(gateway: GatewayProcess, engine: ScriptedEngine, status: str) -> None:
    """A completion under another 2xx is a completion: passed on as such, and charged."""
    engine.play = plain(whole_answer(40, 10), status=status)
    response = await ask(gateway.port, post_chat(chat(), id=f"success-{status[:3]}"))
    assert response.status == int(status[:3])
    assert response.body == whole_answer(40, 10)
    line = await gateway.ending(f"success-{status[:3]}")
    assert (line["outcome"], line["cost"], line["status"]) == ("completed", 40 + 4 * 10, int(status[:3]))


# ── usage ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("members", "asked_upstream", "shown"),
    [
        ({"stream": True}, {"include_usage": True}, False),
        (
            {"stream": True, "stream_options": {"include_usage": False}},
            {"include_usage": True},
            False,
        ),
        ({"stream": True, "stream_options": {"include_usage": True}}, {"include_usage": True}, True),
        (
            {"stream": True, "stream_options": {"more": [1.0], "include_usage": None}},
            {"more": [1.0], "include_usage": True},
            False,
        ),
        ({"stream": True, "stream_options": None}, {"include_usage": True}, False),
        ({"stream": False}, None, False),
        ({}, None, False),
    ],
    ids=["absent", "false", "true", "more", "null", "plain", "not said"],
)
async def test_usage_is_asked_for(
    gateway: GatewayProcess,
    engine: ScriptedEngine,
    request: pytest.FixtureRequest,
    members: dict[str, Any],
    asked_upstream: dict[str, Any] | None,
    shown: bool,
) -> None:
    """The gateway asks where the client did not, keeps its other options, and shows the chunk to those who
    want it; the charge is exact for all."""

    async def script(connection: ScriptedConnection, received: RecordedRequest) -> None:
        asked = json.loads(received.body)
        wants_usage = (asked.get("stream_options") or {}).get("include_usage")
        events = [ROLE, *WORDS, FINISH, *([USAGE] if wants_usage else []), DONE]
        play = streaming(*events) if asked.get("stream") else plain(whole_answer(9, 5))
        await play(connection, received)

    engine.play = script
    id = request.node.callspec.id.replace(" ", "-")
    response = await ask(gateway.port, post_chat(chat(**members), id=f"usage-{id}"))
    received = json.loads(engine.last.body)
    assert received.pop("stream_options", None) == asked_upstream
    sent = chat(**members)
    sent.pop("stream_options", None)
    assert received == sent
    if members.get("stream"):
        assert response.body.count(USAGE) == shown
        assert response.body.count(b'"choices":[]') == shown
    line = await gateway.ending(f"usage-{id}")
    assert (line["input_tokens"], line["output_tokens"], line["cost"]) == (9, 5, 29)


async def test_running_totals_are_not_added_up(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Usage in every chunk is a running total; the last one counts."""
    running = [
        choice_event(
            {"content": "x"}, usage={"prompt_tokens": 10, "completion_tokens": n, "total_tokens": 10 + n}
        )
        for n in range(1, 51)
    ]
    engine.play = streaming(ROLE, *running, FINISH, usage_event(10, 50), DONE)
    await ask(gateway.port, post_chat(chat(stream=True), id="running"))
    line = await gateway.ending("running")
    assert (line["input_tokens"], line["output_tokens"]) == (10, 50)


async def test_streams_without_usage_are_counted(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """An engine that never tells is charged by the pieces that were seen, and by the estimated prompt."""
    engine.play = streaming(ROLE, *WORDS * 12, FINISH, DONE)
    await ask(gateway.port, post_chat(chat("word " * 20, stream=True), id="uncounted"))
    line = await gateway.ending("uncounted")
    assert line["output_tokens"] == 60
    assert 20 <= line["input_tokens"] <= 40
    assert line["cost"] == line["input_tokens"] + 4 * 60


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"reasoning_content": "x"},
        {"reasoning": "x"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"refusal": "x"},
    ],
    ids=lambda delta: next(iter(delta)),
)
async def test_the_first_token_is_the_first_that_says_something(
    gateway: GatewayProcess, engine: ScriptedEngine, delta: dict[str, Any]
) -> None:
    """Comments, the role and empty text come before the first token; reasoning and tool calls are tokens."""
    go_on = asyncio.Event()

    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await connection.send(STREAM_HEAD + chunk(b": working\n\n") + chunk(ROLE) + chunk(token("")))
        await go_on.wait()
        await connection.send(b"".join(map(chunk, (choice_event(delta), token("y"), FINISH, DONE))) + END)

    engine.play = script
    id = f"first-{next(iter(delta))}"
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(chat(stream=True), id=id))
        await client.until(token(""))
        silent_since = asyncio.get_running_loop().time()
        await asyncio.sleep(0.1)
        silent_ms = (asyncio.get_running_loop().time() - silent_since) * 1000
        go_on.set()
        await client.until(b"[DONE]")
    assert (await gateway.ending(id))["ttft_ms"] >= silent_ms


async def test_a_stream_without_a_token(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """An empty answer has no time to its first token, and no gaps; nothing on the page is NaN."""
    engine.play = streaming(ROLE, FINISH, usage_event(3, 0), DONE)
    await ask(gateway.port, post_chat(chat(stream=True), id="empty"))
    line = await gateway.ending("empty")
    assert (line["outcome"], line["ttft_ms"], line["tpot_ms"]) == ("completed", None, None)
    assert (await gateway.metrics()).are_numbers


async def test_text_completions(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """The older endpoint's streams have `text` in place of a delta; they are timed and charged alike."""
    texts = [event({"id": "c", "choices": [{"index": 0, "text": word}]}) for word in ("a", " b", " c")]
    end = event({"id": "c", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
    engine.play = streaming(*texts, end, usage_event(4, 3), DONE)
    body = {"model": "mock-gpu", "prompt": "abc", "stream": True}
    response = await ask(gateway.port, post("/v1/completions", body, [("x-request-id", "texts")]))
    assert response.body == b"".join([*texts, end, DONE])
    line = await gateway.ending("texts")
    assert (line["input_tokens"], line["output_tokens"]) == (4, 3)
    assert line["ttft_ms"] is not None
    assert line["tpot_ms"] is not None


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────

ODD_BODY = (
    b'{ "messages" : [{"role":"user","content":"\\u00e9 \xc3\xa9 \xf0\x9f\x8c\x8d"}],"seed":9007199254740993,'
    b'"a":1.0,"b":1E2,"unknown":{"z":[{}],"y":null},\t"model":"mock-gpu" , "temperature":0.70 }\n'
)


async def test_a_body_is_passed_on_as_it_came(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Where nothing must change nothing does: order, spacing, numbers, escapes, unknown members."""
    engine.play = plain()
    await ask(gateway.port, post_chat(ODD_BODY))
    assert engine.last.body == ODD_BODY


async def test_a_body_changes_only_where_it_must(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Where usage must be asked for all other bytes stay, and equal requests stay equal."""
    engine.play = streaming(*PLAIN_STREAM)
    body = ODD_BODY.replace(b'"a":1.0', b'"stream":true')
    for _ in range(2):
        await ask(gateway.port, post_chat(body))
    one, other = engine.requests[-2:]
    assert one.body == other.body
    assert one.body.replace(b'"stream_options":{"include_usage":true},', b"") == body


async def test_hints_to_the_engine_stay_here(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """`priority` and `request_id` in the body, and their headers, are not the client's to give."""
    engine.play = plain()
    body = chat(priority=-100, request_id="mine", user="someone")
    headers = [("x-vllm-priority", "-100"), ("x-data-parallel-rank", "0"), ("x-request-priority", "P2")]
    assert (await ask(gateway.port, post_chat(body, headers))).status == 200
    assert json.loads(engine.last.body) == chat(user="someone")
    names = {name for name, _ in engine.last.headers}
    assert names.isdisjoint({"x-vllm-priority", "x-data-parallel-rank", "x-request-priority"})


async def test_hints_with_escapes_in_their_names(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Spelling a member's name with escapes does not smuggle it past."""
    engine.play = plain()
    body = json.dumps(chat())[:-1].encode() + b', "pri\\u006frity": -1, "\\u0072equest_id":"x"}'
    assert (await ask(gateway.port, post_chat(body))).status == 200
    assert json.loads(engine.last.body) == chat()


async def test_the_query_string_is_kept(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """What stands behind the question mark goes to the engine."""
    engine.play = plain(b'{"object":"list","data":[]}')
    await ask(gateway.port, get("/v1/models?limit=2&after=a%20b"))
    assert engine.last.target == "/v1/models?limit=2&after=a%20b"
    engine.play = plain()
    await ask(gateway.port, post("/v1/chat/completions?api-version=1", chat()))
    assert engine.last.target == "/v1/chat/completions?api-version=1"
