"""A gateway before engines that answer with the very bytes that real ones have sent (tests/captures)."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest

from gateway.policy.request import Usage
from tests.support.captures import ANSWERS, ERRORS, FOLDER, FULL, HELP, STREAMS, Capture, Stream, captures
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, RawResponse, ask, chat, get, post, post_chat
from tests.support.scripted_engine import Script, ScriptedEngine, raw, scripted_engine
from tests.support.scripted_upstream import RecordedRequest, ScriptedConnection, answer

pytestmark = pytest.mark.anyio

OUTPUT_WEIGHT, CACHE_WEIGHT = 4, 0.1
TELLING = [stream for stream in STREAMS if stream.usage is not None]
"""Streams that say what was used: to a client that asked, or always."""
ASKED = [stream for stream in TELLING if stream.dialect in ("chat", "completions")]
BY_NAME = {stream.capture.name: stream for stream in STREAMS}
ANSWERED = "vllm/chat-nonstream"
numbers = itertools.count()


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    upstream = {
        "name": "gpu0",
        "url": engine.url,
        "health": {"interval_seconds": 0.1},
        "load": {"interval_seconds": 0.1, "waiting_high": 1000},
    }
    capacity = {
        "tokens_per_second": 1,
        "burst_seconds": 1_000_000,
        "output_weight": OUTPUT_WEIGHT,
        "cache_weight": CACHE_WEIGHT,
    }
    async with running_gateway({"upstreams": [upstream], "capacity": capacity}) as gateway:
        yield gateway
        await gateway.books_balance("P1", full=350_000)
        await tokens_add_up(gateway)


def playing(capture: Capture) -> Script:
    """Answer with the capture, and close behind it as it says."""
    return raw(capture.raw, close=True)


def asking(capture: Capture, body: bytes | dict[str, Any] | None = None) -> tuple[str, bytes]:
    """The captured request, or its path with this body; and an id of its own."""
    id = f"{capture.name.replace('/', '-')}-{next(numbers)}"
    content = capture.request_body if body is None else body
    return id, post(capture.target, content, [("x-request-id", id)])


def same_answer(response: RawResponse, capture: Capture, body: bytes) -> None:
    assert response.status == capture.status
    assert response.whole
    assert response.body == body
    content_type = capture.header(b"content-type")
    assert response.header("content-type") == (content_type and content_type.decode())
    assert response.header("x-request-id") != (capture.header(b"x-request-id") or b"").decode()


async def tokens_add_up(gateway: GatewayProcess) -> None:
    """What was counted for the metrics is what the log lines say."""
    page = await gateway.quiet()
    lines = [line for line in gateway.endings() if line["outcome"] == "completed"]
    for direction in ("input", "cached", "output"):
        logged = sum(line[f"{direction}_tokens"] or 0 for line in lines)
        assert page.total("tokens_total", direction=direction) == logged > 0


async def charged(gateway: GatewayProcess, id: str, usage: Usage) -> dict[str, Any]:
    """The log line of a request that has ended well, and that is charged so."""
    line = await gateway.ending(id)
    assert (line["outcome"], line["status"]) == ("completed", 200)
    assert line["input_tokens"] == usage.input_tokens
    assert (line["cached_tokens"], line["output_tokens"]) == (usage.cached_tokens, usage.output_tokens)
    fresh = usage.input_tokens - usage.cached_tokens * (1 - CACHE_WEIGHT)
    assert line["cost"] == pytest.approx(fresh + OUTPUT_WEIGHT * usage.output_tokens, abs=0.001)
    return line


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", TELLING, ids=str)
async def test_a_stream_that_says_what_was_used(
    gateway: GatewayProcess, engine: ScriptedEngine, stream: Stream
) -> None:
    """The client gets the engine's bytes, the engine the client's, and what it says was used is charged."""
    assert stream.usage is not None
    engine.play = playing(stream.capture)
    id, request = asking(stream.capture)
    same_answer(await ask(gateway.port, request), stream.capture, stream.capture.body)
    assert engine.last.body == stream.capture.request_body
    line = await charged(gateway, id, stream.usage)
    assert line["ttft_ms"] is not None


@pytest.mark.parametrize("name", ["vllm/chat-stream-no-usage", "llamacpp/chat-stream-no-usage"])
async def test_a_stream_that_does_not(gateway: GatewayProcess, engine: ScriptedEngine, name: str) -> None:
    """An engine that does not do what it is asked is taken at its tokens; its bytes pass all the same."""
    stream = BY_NAME[name]
    engine.play = playing(stream.capture)
    id, request = asking(stream.capture)
    same_answer(await ask(gateway.port, request), stream.capture, stream.capture.body)
    line = await gateway.ending(id)
    assert (line["outcome"], line["output_tokens"]) == ("completed", stream.token_events)
    assert line["cost"] == pytest.approx(
        line["input_tokens"] + OUTPUT_WEIGHT * stream.token_events, abs=0.001
    )


def unasked(capture: Capture) -> bytes:
    """The captured request of a client that does not ask for usage."""
    body = json.loads(capture.request_body)
    del body["stream_options"]
    return json.dumps(body).encode()


@pytest.mark.parametrize("stream", ASKED, ids=str)
async def test_a_client_that_did_not_ask_what_was_used(
    gateway: GatewayProcess, engine: ScriptedEngine, stream: Stream
) -> None:
    """The gateway asks in its place, takes the event that says nothing else out again, and charges by it."""
    assert stream.usage is not None
    engine.play = playing(stream.capture)
    id, request = asking(stream.capture, unasked(stream.capture))
    same_answer(await ask(gateway.port, request), stream.capture, stream.without_usage)
    assert json.loads(engine.last.body)["stream_options"] == {"include_usage": True}
    await charged(gateway, id, stream.usage)


# ── the same in other reads ──────────────────────────────────────────────────────────────────────────────


def in_data(capture: Capture) -> list[int]:
    """Two letters into the `data` of each event."""
    starts = itertools.accumulate(map(len, capture.events[:-1]), initial=0)
    return [
        capture.offsets[start + event.index(b"data: ") + 2]
        for start, event in zip(starts, capture.events, strict=True)
    ]


def in_blank_lines(capture: Capture) -> list[int]:
    """Between the two line ends that close each event."""
    return [capture.offsets[end - 1] for end in itertools.accumulate(map(len, capture.events))]


def in_chunk_sizes(capture: Capture) -> list[int]:
    """Behind the first digit of each chunk's length."""
    starts = itertools.accumulate(map(len, capture.chunks[:-1]), initial=0)
    return [
        capture.offsets[start] - 2 - len(b"%x" % len(chunk)) + 1
        for start, chunk in zip(starts, capture.chunks, strict=True)
    ]


def behind_chunks(capture: Capture) -> list[int]:
    """Inside the line end of each chunk."""
    return [capture.offsets[end - 1] + 2 for end in itertools.accumulate(map(len, capture.chunks))]


class InStep:
    """Plays a stream in pieces, each sent when the client has all events that the pieces before have
    completed, so that the gateway reads them one by one."""

    def __init__(self, stream: Stream, cuts: Iterable[int], *, asked: bool) -> None:
        self._stream = stream
        self._left_out = None if asked else stream.usage_event
        self._borders = [0, *cuts, len(stream.capture.raw)]
        self._got = bytearray()
        self._came = asyncio.Event()

    async def __call__(self, connection: ScriptedConnection, request: RecordedRequest) -> None:
        for start, end in itertools.pairwise(self._borders):
            await connection.send(self._stream.capture.raw[start:end])
            while len(self._got) < self._complete_bytes(end):
                self._came.clear()
                await self._came.wait()
        connection.close()

    def _complete_bytes(self, end: int) -> int:
        """Length of the events for the client that are whole in so many bytes of the capture."""
        length = position = 0
        for index, event in enumerate(self._stream.capture.events):
            position += len(event)
            if self._stream.capture.offsets[position - 1] >= end:
                break
            length += 0 if index == self._left_out else len(event)
        return length

    async def read_by(self, client: RawClient) -> bytes:
        """The body, as the client gets it."""
        status, _ = await client.head()
        assert status == 200
        while piece := await client.chunk():
            self._got += piece
            self._came.set()
        return bytes(self._got)


CUTS = [in_data, in_blank_lines, in_chunk_sizes, behind_chunks]


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "unasked"])
@pytest.mark.parametrize("cut", CUTS, ids=[cut.__name__ for cut in CUTS])
@pytest.mark.parametrize("name", ["vllm/chat-stream-usage", "llamacpp/chat-stream-usage"])
async def test_reads_that_end_in_odd_places(
    gateway: GatewayProcess,
    engine: ScriptedEngine,
    name: str,
    cut: Callable[[Capture], list[int]],
    asked: bool,
) -> None:
    """An event reaches the client before the next one is whole, and the bytes are the same as ever."""
    stream = BY_NAME[name]
    assert stream.usage is not None
    engine.play = play = InStep(stream, cut(stream.capture), asked=asked)
    id, request = asking(stream.capture, None if asked else unasked(stream.capture))
    async with RawClient(gateway.port) as client:
        await client.send(request)
        body = await play.read_by(client)
    assert body == (stream.capture.body if asked else stream.without_usage)
    await charged(gateway, id, stream.usage)


def dribbling(capture: Capture) -> Script:
    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        for byte in capture.raw:
            await connection.send(bytes([byte]))
            await asyncio.sleep(0)
        connection.close()

    return script


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "unasked"])
@pytest.mark.parametrize("name", ["vllm/chat-stream-usage", "llamacpp/completion-stream-usage"])
async def test_byte_by_byte(gateway: GatewayProcess, engine: ScriptedEngine, name: str, asked: bool) -> None:
    """Head, framing and body in writes of one byte."""
    stream = BY_NAME[name]
    assert stream.usage is not None
    engine.play = dribbling(stream.capture)
    id, request = asking(stream.capture, None if asked else unasked(stream.capture))
    expected = stream.capture.body if asked else stream.without_usage
    same_answer(await ask(gateway.port, request), stream.capture, expected)
    await charged(gateway, id, stream.usage)


# ── plain answers ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_plain_answer(gateway: GatewayProcess, engine: ScriptedEngine, name: str) -> None:
    """It passes as it is, and what it says was used is charged."""
    capture = Capture(name)
    engine.play = playing(capture)
    id, request = asking(capture)
    same_answer(await ask(gateway.port, request), capture, capture.body)
    if "priority" not in json.loads(capture.request_body):  # which is the gateway's to say
        assert engine.last.body == capture.request_body
    await charged(gateway, id, ANSWERS[name])


@pytest.mark.parametrize("name", ERRORS)
async def test_a_refusal_by_the_engine(gateway: GatewayProcess, engine: ScriptedEngine, name: str) -> None:
    """Status and body are the engine's own, whether a stream was asked for or not, and it costs nothing."""
    capture = Capture(name)
    engine.play = playing(capture)
    ids = [f"refused-{next(numbers)}" for _ in range(2)]
    for id, streamed in zip(ids, (True, False), strict=True):
        response = await ask(gateway.port, post_chat(chat(stream=streamed), id=id))
        same_answer(response, capture, capture.body)
        assert response.header("x-qos-error-source") == "upstream"
    for id in ids:
        line = await gateway.ending(id)
        assert (line["outcome"], line["status"], line["cost"]) == ("upstream_error", ERRORS[name], 0)


def one_after_another(*answers: Capture) -> Script:
    left = iter(answers)

    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await playing(next(left))(connection, request)

    return script


@pytest.mark.parametrize("name", FULL)
async def test_a_full_engine_is_asked_once_more(
    gateway: GatewayProcess, engine: ScriptedEngine, name: str
) -> None:
    """vLLM's 503 sends the request back into the queue; what it gets the second time is its answer."""
    stream = BY_NAME["vllm/chat-stream-usage"] if "stream" in name else None
    second = Capture("vllm/chat-nonstream") if stream is None else stream.capture
    engine.play = one_after_another(Capture(name), second)
    asked = len(engine.requests)
    id, request = asking(Capture(name))
    response = await ask(gateway.port, request)
    same_answer(response, second, second.body if stream is None else stream.without_usage)
    assert len(engine.requests) == asked + 2
    assert engine.requests[-1].body == engine.requests[-2].body
    line = await charged(gateway, id, Usage(42, 12))
    assert line["requeued"] is True


@pytest.mark.parametrize("name", FULL)
async def test_an_engine_that_stays_full(gateway: GatewayProcess, engine: ScriptedEngine, name: str) -> None:
    """Its second 503 is the client's, untouched and free."""
    engine.play = playing(Capture(name))
    asked = len(engine.requests)
    id, request = asking(Capture(name))
    response = await ask(gateway.port, request)
    same_answer(response, Capture(name), Capture(name).body)
    assert response.header("x-qos-error-source") == "upstream"
    assert len(engine.requests) == asked + 2
    line = await gateway.ending(id)
    assert (line["outcome"], line["cost"], line["requeued"]) == ("upstream_error", 0, True)


# ── what costs no tokens ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "capture", [c for c in captures() if c.name.split("/")[1] in HELP and "health" not in c.name], ids=str
)
async def test_an_answer_without_tokens(
    gateway: GatewayProcess, engine: ScriptedEngine, capture: Capture
) -> None:
    """Tokens of a text, text of tokens and the list of models pass as they are, at no cost."""
    engine.play = playing(capture)
    id, request = asking(capture)
    if capture.request.startswith(b"GET "):
        request = get(capture.target, [("x-request-id", id)])
    same_answer(await ask(gateway.port, request), capture, capture.body)
    line = await gateway.ending(id)
    assert (line["outcome"], line["cost"]) == ("completed", 0)


@pytest.mark.parametrize("name", ["vllm/health", "llamacpp/health"])
async def test_a_healthy_engine_is_known_to_be_one(
    gateway: GatewayProcess, engine: ScriptedEngine, name: str
) -> None:
    """With and without a body, and with a connection that ends each time; where probes of before came too
    late for a busy machine, the first answer to a request shows it."""
    engine.probed = playing(Capture(name))
    engine.play = playing(Capture(ANSWERED))
    seen = len(engine.probes)

    async def healthy() -> bool:
        assert (await ask(gateway.port, asking(Capture(ANSWERED))[1])).status == 200
        return (await gateway.metrics()).total("upstream_healthy", upstream="gpu0") == 1

    try:
        await eventually(lambda: len(engine.probes) > seen + 5)
        await eventually(healthy)
    finally:
        engine.probed = None


@pytest.mark.parametrize(
    ("name", "waiting", "kv_usage"), [("vllm", 8, 0.0009766817238432424), ("llamacpp", 4, None)]
)
async def test_the_load_of_an_engine_at_work(
    gateway: GatewayProcess, engine: ScriptedEngine, name: str, waiting: int, kv_usage: float | None
) -> None:
    """Found on its whole metrics page."""
    page = (FOLDER / name / "metrics-under-load.txt").read_bytes()
    engine.metrics_page = answer(page, headers=("content-type: text/plain; version=1.0.0; charset=utf-8",))

    async def read() -> bool:
        says = (await gateway.state())["upstreams"]["gpu0"]
        return bool((says["engine_waiting"], says["engine_kv_usage"]) == (waiting, kv_usage))

    await eventually(read)
