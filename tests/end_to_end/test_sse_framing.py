"""Reads, lines, events and tokens do not coincide: whatever an engine cuts where, the client has its bytes,
each event as soon as it is whole, and the gateway has seen what they say.

Keys, the decision log and tokens to count are on, as in earnest: nothing of it may hold up a stream.
"""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterable
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.raw_client import RawClient, ask, chat, post
from tests.support.scripted_engine import (
    DONE,
    END,
    FINISH,
    ROLE,
    ScriptedEngine,
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
    message_delta_event,
    message_opening,
    response_delta,
    response_opening,
)

pytestmark = pytest.mark.anyio

KEY = "a-key"
BEARER = ("authorization", f"Bearer {KEY}")
WORDS = [token(word) for word in ("one", " two", " three", " four", " five")]
ASKS = {"stream_options": {"include_usage": True}}
CHAT_PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(
    engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[GatewayProcess]:
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url}],
        "capacity": {"tokens_per_second": 1, "burst_seconds": 1_000_000, "output_weight": 4},
        "scheduling": {"deadline_drop": False},
        "decision_log": str(tmp_path_factory.mktemp("log") / "decisions.jsonl"),
    }
    async with running_gateway(settings, keys={KEY: {"tenant": "t"}}) as gateway:
        yield gateway
        await gateway.books_balance("P1", full=350_000)


@pytest.fixture
def id(request: pytest.FixtureRequest) -> str:
    """A request id that no other test uses."""
    name: str = request.node.name
    return "".join(c if c.isalnum() else "-" for c in name)


def asking(id: str, path: str = CHAT_PATH, **members: Any) -> bytes:
    """A request for a stream."""
    given = chat() if path == CHAT_PATH else {"model": "mock-gpu"}
    headers = [BEARER, ("x-request-id", id), ("accept-encoding", "gzip, br")]
    return post(path, {**given, "stream": True, **members}, headers)


@pytest.mark.parametrize("asks", [False, True], ids=["unasked", "asked"])
async def test_characters_cut_between_their_bytes(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str, asks: bool
) -> None:
    """Each byte in a write of its own: no character is replaced, there is one first token, and the charge is
    the engine's count."""
    event_bytes = token("你好🌍")
    usage = usage_event(3, 2)
    stream = event_bytes + usage + DONE

    async def byte_by_byte(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await connection.send(STREAM_HEAD)
        for at in range(len(stream)):
            await connection.send(chunk(stream[at : at + 1]))
            await asyncio.sleep(0.002)  # or the writes become one read
        await connection.send(END)

    engine.play = byte_by_byte
    before = await gateway.metrics()
    response = await ask(gateway.port, asking(id, **(ASKS if asks else {})))
    assert response.body == (stream if asks else event_bytes + DONE)
    assert "\ufffd" not in response.body.decode()
    line = await gateway.ending(id)
    assert (line["outcome"], line["input_tokens"], line["output_tokens"]) == ("completed", 3, 2)
    assert line["cost"] == 3 + 4 * 2
    after = await gateway.metrics()
    for name in ("time_to_first_token_seconds_count", "upstream_time_to_first_token_seconds_count"):
        assert after.total(name) == before.total(name) + 1


# ── where reads may end ──────────────────────────────────────────────────────────────────────────────────


class Lockstep:
    """An engine that sends the next piece when the client has all it can have of those before."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = list(pieces)
        self.go_on = asyncio.Semaphore(0)

    async def __call__(self, connection: ScriptedConnection, request: RecordedRequest) -> None:
        await connection.send(STREAM_HEAD)
        for piece in self.pieces:
            await connection.send(chunk(piece))
            await self.go_on.acquire()
        await connection.send(chunk(DONE) + END)


async def read_in_step(client: RawClient, engine: Lockstep, events: list[bytes]) -> bytes:
    """The whole body. Before the engine may go on, the client has each event that was whole by then; one that
    ends in CR LF is whole at the CR."""
    ends = []
    for each in events:
        ends.append((ends[-1] if ends else 0) + len(each))
    body, sent = b"", 0
    for piece in engine.pieces:
        sent += len(piece)
        whole = [end for end, each in zip(ends, events, strict=True) if end - each.endswith(b"\r\n") <= sent]
        while len(body) < min(sent, whole[-1] if whole else 0):
            body += await client.chunk()
        engine.go_on.release()
    while piece := await client.chunk():
        body += piece
    return body


def cut_at(stream: bytes, places: Iterable[int]) -> list[bytes]:
    at = [0, *sorted(places), len(stream)]
    return [stream[a:b] for a, b in pairwise(at) if a < b]


def inside_the_name(events: list[bytes]) -> list[bytes]:
    stream = b"".join(events)
    return cut_at(stream, [n + 2 for n in range(len(stream)) if stream.startswith(b"data:", n)])


def inside_the_blank_line(events: list[bytes]) -> list[bytes]:
    """Before the last byte of each event."""
    ends = [len(b"".join(events[: n + 1])) for n in range(len(events))]
    return cut_at(b"".join(events), [end - 1 for end in ends])


def after_a_bit_of_the_next(events: list[bytes]) -> list[bytes]:
    ends = [len(b"".join(events[: n + 1])) for n in range(len(events) - 1)]
    return cut_at(b"".join(events), [end + 40 for end in ends])


def all_in_one(events: list[bytes]) -> list[bytes]:
    return [b"".join(events)]


@pytest.mark.parametrize("asks", [False, True], ids=["unasked", "asked"])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("cut", [inside_the_name, inside_the_blank_line, after_a_bit_of_the_next, all_in_one])
async def test_events_cut_anywhere(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str, cut: Any, line_end: bytes, asks: bool
) -> None:
    """Five events are five, however they fall into reads, and none waits for the read behind the one that
    completes it."""
    events = [word.replace(b"\n", line_end) for word in WORDS]
    engine.play = lockstep = Lockstep(cut(events))
    async with RawClient(gateway.port) as client:
        await client.send(asking(id, **(ASKS if asks else {})))
        await client.head()
        assert await read_in_step(client, lockstep, events) == b"".join([*events, DONE])
    line = await gateway.ending(id)
    assert (line["outcome"], line["output_tokens"]) == ("completed", 5)


TINY = [b'data: {"choices":[{"text":"<%02d>"}]}\n\n' % n for n in range(20)]


@pytest.mark.parametrize(
    ("path", "members", "opening", "events"),
    [
        ("/v1/completions", {"prompt": "x"}, [], TINY),
        ("/v1/completions", {"prompt": "x"}, [b"\xef\xbb\xbf: hello\n\n"], TINY),
        ("/v1/completions", {"prompt": "x"}, [], [e.replace(b"data: ", b"data:") for e in TINY]),
        (
            "/v1/responses",
            {"input": "x"},
            response_opening(),
            [response_delta(f"<{n}>", n + 4) for n in range(20)],
        ),
        (
            "/v1/messages",
            {"messages": chat()["messages"], "max_tokens": 99},
            message_opening(input_tokens=1, output_tokens=0),
            [message_delta_event(f"<{n}>") for n in range(20)],
        ),
    ],
    ids=["completions", "byte order mark", "no space", "responses", "messages"],
)
async def test_no_event_waits_for_the_next(
    gateway: GatewayProcess,
    engine: ScriptedEngine,
    id: str,
    path: str,
    members: dict[str, Any],
    opening: list[bytes],
    events: list[bytes],
) -> None:
    """Be it 40 bytes: no layer of the gateway collects, compresses or measures it first, and others are told
    not to."""
    engine.play = lockstep = Lockstep([*opening, *events])
    async with RawClient(gateway.port) as client:
        await client.send(asking(id, path, **members))
        status, headers = await client.head()
        body = await read_in_step(client, lockstep, [*opening, *events])
    assert (status, body) == (200, b"".join([*opening, *events, DONE]))
    assert {name for name, _ in headers}.isdisjoint({"content-encoding", "content-length"})
    assert ("cache-control", "no-cache, no-transform") in headers
    assert ("x-accel-buffering", "no") in headers
    assert (await gateway.ending(id))["output_tokens"] == 20


# ── what lines may be ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("asks", [False, True], ids=["unasked", "asked"])
async def test_other_line_ends_are_text(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str, asks: bool
) -> None:
    """U+2028, U+2029 and U+0085 end no line, neither in the answer's text nor beside its usage."""
    text = token("a\u2028b\u2029c\x85d")
    counted = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
    usage = event({"id": "c", "choices": [], "note": "x\u2028y\u2029z\x85", "usage": counted})
    assert b"\xe2\x80\xa8" in text
    assert b"\xe2\x80\xa8" in usage
    engine.play = streaming(text, usage, DONE)
    response = await ask(gateway.port, asking(id, **(ASKS if asks else {})))
    assert response.body == text + (usage if asks else b"") + DONE
    line = await gateway.ending(id)
    assert (line["input_tokens"], line["output_tokens"], line["cost"]) == (7, 4, 7 + 4 * 4)
    engine.play = streaming(text, DONE)
    await ask(gateway.port, asking(f"{id}-uncounted"))
    assert (await gateway.ending(f"{id}-uncounted"))["output_tokens"] == 1


async def test_comments_are_neither_data_nor_tokens(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str
) -> None:
    """The SDK sees one bit of text and no broken JSON, and the first token is the text, not what kept the
    connection alive before it."""
    took_ms = 0.0

    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        nonlocal took_ms
        loop = asyncio.get_running_loop()
        began = loop.time()
        await connection.send(STREAM_HEAD)
        for _ in range(3):
            await asyncio.sleep(0.1)
            await connection.send(chunk(b": working\n\n"))
        await connection.send(chunk(ROLE))
        await asyncio.sleep(0.2)
        took_ms = (loop.time() - began) * 1000
        rest = (b": still working\n" + token("x"), usage_event(3, 1), DONE)
        await connection.send(b"".join(map(chunk, rest)) + END)

    engine.play = script
    async with httpx.AsyncClient(trust_env=False) as http:
        client = openai.AsyncOpenAI(base_url=gateway.api + "/v1", api_key=KEY, http_client=http)
        stream = await client.chat.completions.create(
            **chat(), stream=True, extra_headers={"x-request-id": id}
        )
        texts = [part.choices[0].delta.content async for part in stream]
    assert texts == ["", "x"]
    line = await gateway.ending(id)
    assert (line["outcome"], line["output_tokens"]) == ("completed", 1)
    assert took_ms <= line["ttft_ms"] < took_ms + 5000


@pytest.mark.parametrize("asks", [False, True], ids=["unasked", "asked"])
async def test_an_event_too_long_to_be_read(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str, asks: bool
) -> None:
    """It passes whole, in pieces as they come, and those behind it are read again."""
    long = token("x" * (3 << 20))
    engine.play = streaming(ROLE, WORDS[0], long, WORDS[1], FINISH, usage_event(3, 9), DONE)
    response = await ask(gateway.port, asking(id, **(ASKS if asks else {})))
    usage = usage_event(3, 9) if asks else b""
    assert response.body == ROLE + WORDS[0] + long + WORDS[1] + FINISH + usage + DONE
    line = await gateway.ending(id)
    assert (line["outcome"], line["output_tokens"]) == ("completed", 9)


# ── codings ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("always", [False, True], ids=["when asked", "always"])
async def test_engines_that_compress(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str, always: bool, stream: bool
) -> None:
    """Whether they do it for those who can read it or for everybody: label, length and body agree, and usage
    and times are known."""
    content = b"".join([ROLE, *WORDS, FINISH, usage_event(9, 5), DONE]) if stream else whole_answer(9, 5)
    media_type = "text/event-stream" if stream else "application/json"

    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        packs = always or "gzip" in (request.header("accept-encoding") or "")
        coding = ("content-encoding: gzip",) if packs else ()
        body = gzip.compress(content) if packs else content
        await connection.send(answer(body, headers=(f"content-type: {media_type}", *coding)))

    engine.play = script
    response = await ask(gateway.port, asking(id, stream=stream))
    assert response.whole
    assert response.header("content-encoding") is None
    assert response.body == content.replace(usage_event(9, 5), b"")
    assert response.header("content-length") == (None if stream else str(len(content)))
    line = await gateway.ending(id)
    assert (line["input_tokens"], line["output_tokens"]) == (9, 5)
    assert (line["ttft_ms"] is not None) == stream


# ── one connection ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_behind_a_running_stream(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str
) -> None:
    """A request sent while the answer before it still streams is answered behind it, and neither answer has
    a byte of the other."""
    lockstep = Lockstep(WORDS)

    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        play = lockstep if json.loads(request.body).get("stream") else plain()
        await play(connection, request)

    engine.play = script
    async with RawClient(gateway.port) as client:
        await client.send(asking(f"{id}-1"))
        await client.head()
        await client.send(asking(f"{id}-2", stream=False) + asking(f"{id}-3", stream=False))
        assert await read_in_step(client, lockstep, WORDS) == b"".join([*WORDS, DONE])
        for n in (2, 3):
            response = await client.response()
            assert (response.status, response.body) == (200, whole_answer())
            assert response.header("x-request-id") == f"{id}-{n}"


async def test_a_stream_framed_by_its_length(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str
) -> None:
    """Where the engine gives a length and the connection is used again, both answers are whole."""
    data = b"".join([ROLE, *WORDS, FINISH, usage_event(9, 5), DONE])
    engine.play = raw(answer(data, headers=("content-type: text/event-stream",)))
    async with RawClient(gateway.port) as client:
        for n, members in enumerate(({}, ASKS)):
            await client.send(asking(f"{id}-{n}", **members))
            response = await client.response()
            assert (response.whole, response.header("content-length")) == (True, None)
            assert response.body == (data if members else data.replace(usage_event(9, 5), b""))
