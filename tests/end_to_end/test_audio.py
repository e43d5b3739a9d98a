"""Sound goes up while it comes in, and its text, or sound again, comes back."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.api.audio_form import AUDIO_BYTES_PER_TOKEN, AUDIO_TOKENS_PER_SECOND
from tests.support.forms import BOUNDARY, CONTENT_TYPE, field, file, form
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, RawResponse, ask, post, request_head
from tests.support.scripted_engine import DONE, choice_event, event, streaming
from tests.support.scripted_upstream import (
    STREAM_HEAD,
    RecordedRequest,
    ScriptedConnection,
    ScriptedUpstream,
    answer,
    chunk,
)

pytestmark = pytest.mark.anyio

TRANSCRIPTIONS = "/v1/audio/transcriptions"
SOUND = bytes(range(256)) * 400
"""102,400 bytes: 320 tokens."""
JSON_HEADER = ("content-type: application/json",)
OUTPUT_RESERVE = 256
MODEL = field("model", "whisper-1")

Play = Callable[[ScriptedConnection, bytes], Awaitable[None]]


class SoundEngine:
    """An engine that is asked about everything but its health before it has read the request's body."""

    def __init__(self) -> None:
        self.play: Play = self.transcribe
        self.connections: list[ScriptedConnection] = []
        self.requests: list[RecordedRequest] = []
        self.text = b'{"text": "hello"}'

    async def handle(self, connection: ScriptedConnection) -> None:
        while (end := await connection._find(b"\r\n\r\n")) is not None:
            head = bytes(connection.unread[: end + 4])
            if b" /health " in head or b" /metrics " in head:
                await connection.request()
                await connection.send(answer(status="200 OK" if b" /health " in head else "404 Not Found"))
                continue
            self.connections.append(connection)
            await self.play(connection, head)
            if connection.peer_closed.is_set():
                return

    async def transcribe(self, connection: ScriptedConnection, head: bytes) -> None:
        """Read all of it and answer."""
        await self.read(connection)
        await connection.send(answer(self.text, headers=JSON_HEADER))

    async def read(self, connection: ScriptedConnection) -> RecordedRequest:
        request = await connection.request()
        if request is None:
            raise ConnectionResetError("the upload was given up")
        if request.header("transfer-encoding") == "chunked":
            request = RecordedRequest(
                request.head, await _chunks(connection), request.method, request.target, request.headers
            )
        self.requests.append(request)
        return request


async def _chunks(connection: ScriptedConnection) -> bytes:
    body = b""
    while True:
        end = await connection._find(b"\r\n")
        if end is None:
            raise ConnectionResetError("the upload was given up")
        size = int(connection.unread[:end], 16)
        assert await connection.received(end + 2 + size + 2)
        body += connection.unread[end + 2 : end + 2 + size]
        del connection.unread[: end + 2 + size + 2]
        if not size:
            return body


@asynccontextmanager
async def sound(**settings: Any) -> AsyncIterator[tuple[SoundEngine, GatewayProcess]]:
    engine = SoundEngine()
    async with (
        ScriptedUpstream(engine.handle) as upstream,
        running_gateway(
            {
                "upstreams": [{"name": "gpu0", "url": upstream.url, "models": ["whisper-1"]}],
                "capacity": {"initial_output_tokens": OUTPUT_RESERVE},
                **settings,
            }
        ) as gateway,
    ):
        yield engine, gateway


def headers(length: int | None, id: str = "a") -> list[tuple[str, str | bytes]]:
    framing = ("transfer-encoding", "chunked") if length is None else ("content-length", str(length))
    return [("content-type", CONTENT_TYPE), ("x-request-id", id), framing]


def upload(body: bytes, path: str = TRANSCRIPTIONS, id: str = "a") -> bytes:
    return request_head("POST", path, headers(len(body), id)) + body


def text(response: RawResponse) -> Any:
    assert response.status == 200, response.body
    assert response.whole
    return response.json


# ---------------------------------------------------------------------- up


@pytest.mark.parametrize("path", [TRANSCRIPTIONS, "/v1/audio/translations"])
async def test_a_form_reaches_the_engine_unchanged(path: str) -> None:
    """Byte for byte, with its boundary; the answer comes back as it is."""
    body = form(MODEL, field("language", "en"), file("file", SOUND))
    async with sound() as (engine, gateway):
        response = await ask(gateway.port, upload(body, path))
        assert text(response) == {"text": "hello"}
        assert response.header("x-qos-priority") == "P1"
        (request,) = engine.requests
        assert request.target == path
        assert request.body == body
        assert request.header("content-type") == CONTENT_TYPE.decode()
        assert request.header("content-length") == str(len(body))
        line = await gateway.ending("a")
        assert (line["outcome"], line["status"]) == ("completed", 200)
        assert line["ttft_ms"] is None


async def test_the_first_bytes_arrive_before_the_last_are_sent() -> None:
    """The engine reads along while the client still speaks."""
    body = form(MODEL, file("file", SOUND))
    begun = asyncio.Event()

    async def play(connection: ScriptedConnection, head: bytes) -> None:
        assert await connection.received(len(head) + 1000)
        begun.set()
        await engine.transcribe(connection, head)

    async with sound() as (engine, gateway):
        engine.play = play
        async with RawClient(gateway.port) as client:
            await client.send(request_head("POST", TRANSCRIPTIONS, headers(len(body))) + body[:5000])
            async with asyncio.timeout(10):
                await begun.wait()
            assert await gateway.in_flight() == 1
            await client.send(body[5000:])
            assert text(await client.response()) == {"text": "hello"}
        assert engine.requests[0].body == body


async def test_a_form_whose_length_nobody_knows() -> None:
    """In chunks it comes, and in chunks it goes on."""
    body = form(MODEL, file("file", SOUND))
    async with sound() as (engine, gateway):
        async with RawClient(gateway.port) as client:
            await client.send(request_head("POST", TRANSCRIPTIONS, headers(None)))
            for start in range(0, len(body), 7000):
                await client.send(chunk(body[start : start + 7000]))
            await client.send(chunk(b""))
            assert text(await client.response()) == {"text": "hello"}
        assert engine.requests[0].body == body


async def test_the_model_may_come_last() -> None:
    """Then all is kept until it is known, and all of it goes to the right engine."""
    body = form(file("file", SOUND), MODEL)
    async with sound() as (engine, gateway):
        async with RawClient(gateway.port) as client:
            await client.send(request_head("POST", TRANSCRIPTIONS, headers(len(body))) + body[:-60])
            await asyncio.sleep(0.2)  # the story: nothing may happen in it
            assert engine.connections == []
            await client.send(body[-60:])
            assert text(await client.response()) == {"text": "hello"}
        assert engine.requests[0].body == body


async def test_what_waits_for_its_place_is_kept() -> None:
    """A second upload is taken in while the first one has the only place, and goes up when it is free."""
    body = form(MODEL, file("file", SOUND * 5))
    proceed = asyncio.Event()

    async def play(connection: ScriptedConnection, head: bytes) -> None:
        await proceed.wait()
        await engine.transcribe(connection, head)

    async with ScriptedUpstream(lambda connection: engine.handle(connection)) as upstream:
        engine = SoundEngine()
        engine.play = play
        settings = {"upstreams": [{"name": "gpu0", "url": upstream.url, "max_in_flight": 1}]}
        async with running_gateway(settings) as gateway:
            first = asyncio.ensure_future(ask(gateway.port, upload(body, id="first")))
            await eventually(lambda: len(engine.connections) == 1)
            second = asyncio.ensure_future(ask(gateway.port, upload(body, id="second")))
            await eventually(lambda: gateway_has_queued(gateway))
            proceed.set()
            for response in await asyncio.gather(first, second):
                assert text(response) == {"text": "hello"}
            assert [request.body == body for request in engine.requests] == [True, True]


async def gateway_has_queued(gateway: GatewayProcess) -> bool:
    return await gateway.queued() == 1


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(file("file", b"x")), "model"),
        (form(MODEL, MODEL, file("file", b"x")), "model"),
        (form(MODEL, field("stream", "perhaps")), "stream"),
        (form(field("model", "another")), "model"),
        (b"hello", None),
    ],
)
async def test_forms_that_are_refused(body: bytes, param: str | None) -> None:
    """With the field that is wrong, before any engine hears of it."""
    async with sound() as (engine, gateway):
        response = await ask(gateway.port, upload(body))
        assert response.status in (400, 404)
        assert response.error["param"] == param
        assert engine.connections == []


async def test_a_second_model_that_comes_late() -> None:
    """The upload stops before the engine has a whole form that names two."""
    async with sound() as (engine, gateway):
        body = form(MODEL, file("file", SOUND), field("model", "another"))
        async with RawClient(gateway.port) as client:
            await client.send(request_head("POST", TRANSCRIPTIONS, headers(len(body))) + body[:50_000])
            await eventually(lambda: len(engine.connections) == 1)
            await client.send(body[50_000:])
            response = await client.response()
        assert (response.status, response.error["param"]) == (400, "model")
        await engine.connections[0].peer_closed.wait()
        assert engine.requests == []
        line = await gateway.ending("a")
        assert (line["outcome"], line["cost"]) == ("bad_request", 0)


async def test_a_body_that_is_no_form() -> None:
    """Told by its content-type alone."""
    async with sound() as (_, gateway):
        response = await ask(gateway.port, post(TRANSCRIPTIONS, {"model": "whisper-1"}))
        assert (response.status, response.error["param"]) == (400, "content-type")


async def test_an_upload_that_is_too_large() -> None:
    """Told in front where its length is, and where it is not as soon as the limit is passed."""
    async with sound(server={"max_body_bytes": 60_000}) as (engine, gateway):
        body = form(MODEL, file("file", SOUND))
        response = await ask(gateway.port, request_head("POST", TRANSCRIPTIONS, headers(len(body), "told")))
        assert (response.status, response.error["code"]) == (413, "request_too_large")
        assert engine.connections == []
        async with RawClient(gateway.port) as client:
            await client.send(request_head("POST", TRANSCRIPTIONS, headers(None, "untold")))
            await client.send(chunk(body[:50_000]))
            await eventually(lambda: len(engine.connections) == 1)
            await client.send(chunk(body[50_000:]))
            response = await client.response()
        assert (response.status, response.error["code"]) == (413, "request_too_large")
        await engine.connections[0].peer_closed.wait()
        line = await gateway.ending("untold")
        assert (line["outcome"], line["cost"]) == ("too_large", 0)


async def test_an_upload_that_is_too_slow() -> None:
    """After `body_read_seconds` of waiting for the client its place is free again, and nothing is charged."""
    async with sound(server={"body_read_seconds": 0.5}) as (engine, gateway):
        body = form(MODEL, file("file", SOUND))
        async with RawClient(gateway.port) as client:
            await client.send(request_head("POST", TRANSCRIPTIONS, headers(len(body))) + body[:50_000])
            await eventually(lambda: len(engine.connections) == 1)
            response = await client.response()
        assert (response.status, response.error["code"]) == (400, "request_body_timeout")
        await engine.connections[0].peer_closed.wait()
        line = await gateway.ending("a")
        assert (line["outcome"], line["cost"]) == ("bad_request", 0)
        assert (await gateway.quiet()).quiet


async def test_a_client_that_leaves_in_the_middle() -> None:
    """The engine's connection ends before its request is whole, so that nothing is charged."""
    async with sound() as (engine, gateway):
        body = form(MODEL, file("file", SOUND))
        async with RawClient(gateway.port) as client:
            await client.send(request_head("POST", TRANSCRIPTIONS, headers(len(body))) + body[:50_000])
            await eventually(lambda: len(engine.connections) == 1)
        async with asyncio.timeout(5):
            await engine.connections[0].peer_closed.wait()
        line = await gateway.ending("a")
        assert (line["outcome"], line["cost"]) == ("client_gone_streaming", 0)
        assert engine.requests == []
        await gateway.quiet()


async def test_a_client_that_leaves_before_the_model_is_known() -> None:
    """Nothing was begun for it."""
    async with sound() as (engine, gateway):
        async with RawClient(gateway.port) as client:
            await client.send(request_head("POST", TRANSCRIPTIONS, headers(1000)) + form(MODEL)[:30])
            await eventually(lambda: bool(gateway.is_running))
        line = await gateway.ending("a")
        assert line["outcome"] == "client_gone_queued"
        assert engine.connections == []


async def test_an_engine_that_refuses_in_the_middle() -> None:
    """Its word reaches a client that still sends, and its connection is not used again."""

    async def play(connection: ScriptedConnection, head: bytes) -> None:
        assert await connection.received(len(head) + 1000)
        await connection.send(
            answer(b'{"error": "too loud"}', status="422 Unprocessable", headers=JSON_HEADER)
        )
        await connection.peer_closed.wait()

    async with sound() as (engine, gateway):
        engine.play = play
        body = form(MODEL, file("file", SOUND * 40))
        async with RawClient(gateway.port) as client:
            await client.send(request_head("POST", TRANSCRIPTIONS, headers(len(body))) + body[:50_000])
            response = await client.response()
            assert (response.status, response.body) == (422, b'{"error": "too loud"}')
            assert response.header("x-qos-error-source") == "upstream"
            assert response.header("connection") == "close"
            await client.send(body[50_000:])  # which is dropped, and does not hurt
            assert await client.rest() == b""
        line = await gateway.ending("a")
        assert (line["outcome"], line["cost"]) == ("upstream_error", 0)
        assert len(engine.connections) == 1


# ---------------------------------------------------------------------- back, and what it costs


async def cost_of(gateway: GatewayProcess, id: str = "a") -> tuple[int, int]:
    line = await gateway.ending(id)
    assert line["outcome"] == "completed"
    return line["input_tokens"], line["output_tokens"]


async def test_what_the_engine_tells_is_paid() -> None:
    """Tokens as they are; seconds by the fifty; and without a word what was estimated."""
    body = form(MODEL, file("file", SOUND))
    estimate = -(-len(body) // AUDIO_BYTES_PER_TOKEN)
    async with sound() as (engine, gateway):
        for id, members, expected in [
            ("tokens", {"usage": {"type": "tokens", "input_tokens": 70, "output_tokens": 9}}, (70, 9)),
            ("seconds", {"usage": {"type": "duration", "seconds": 3}}, (3 * AUDIO_TOKENS_PER_SECOND, 2)),
            ("nothing", {}, (estimate, None)),
        ]:
            engine.text = json.dumps({"text": "hello", **members}).encode()
            text(await ask(gateway.port, upload(body, id=id)))
            told = await cost_of(gateway, id)
            assert told[0] == expected[0]
            assert told[1] == expected[1] or expected[1] is None


@pytest.mark.parametrize("kind", ["text/plain; charset=utf-8", "text/vtt", "application/x-subrip"])
async def test_answers_that_are_no_json(kind: str) -> None:
    """Plain text and subtitles are answers too."""
    async with sound() as (engine, gateway):

        async def play(connection: ScriptedConnection, head: bytes) -> None:
            await engine.read(connection)
            await connection.send(answer(b"1\nhello", headers=(f"content-type: {kind}",)))

        engine.play = play
        response = await ask(gateway.port, upload(form(MODEL, file("file", SOUND))))
        assert (response.status, response.body, response.whole) == (200, b"1\nhello", True)
        assert response.header("content-type") == kind


TYPED = [
    event({"type": "transcript.text.delta", "delta": "hel"}),
    event({"type": "transcript.text.delta", "delta": "lo"}),
    event({"type": "transcript.text.done", "text": "hello"}),
]
CHUNKS = [choice_event({"content": "hel"}), choice_event({"content": "lo"}), choice_event({}, "stop"), DONE]


@pytest.mark.parametrize("events", [TYPED, CHUNKS], ids=["typed events", "chunks"])
async def test_a_streamed_transcript(events: list[bytes]) -> None:
    """Passed on as it is; each piece of text counts as a token."""
    async with sound() as (engine, gateway):

        async def play(connection: ScriptedConnection, head: bytes) -> None:
            request = await engine.read(connection)
            await streaming(*events)(connection, request)

        engine.play = play
        body = form(MODEL, field("stream", "true"), file("file", SOUND))
        response = await ask(gateway.port, upload(body))
        assert response.status == 200
        assert response.whole
        assert response.body == b"".join(events)
        line = await gateway.ending("a")
        assert (line["outcome"], line["output_tokens"]) == ("completed", 2)


async def test_a_transcript_that_breaks_off() -> None:
    """An error event, and no orderly end."""
    async with sound() as (engine, gateway):

        async def play(connection: ScriptedConnection, head: bytes) -> None:
            await engine.read(connection)
            await connection.send(STREAM_HEAD + chunk(TYPED[0]))
            connection.close()

        engine.play = play
        body = form(MODEL, field("stream", "true"), file("file", SOUND))
        response = await ask(gateway.port, upload(body))
        assert not response.whole
        assert response.body.startswith(TYPED[0])
        assert b"upstream_aborted" in response.body
        assert (await gateway.ending("a"))["outcome"] == "upstream_aborted"


async def speaking(engine: SoundEngine, pieces: list[bytes], *, cut: bool = False) -> Play:
    async def play(connection: ScriptedConnection, head: bytes) -> None:
        await engine.read(connection)
        await connection.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for piece in pieces:
            await connection.send(chunk(piece))
        if cut:
            connection.close()
        else:
            await connection.send(chunk(b""))

    return play


SPEECH = {"model": "whisper-1", "input": "Say this, please. " * 20, "voice": "alloy"}


async def test_spoken_text_comes_as_it_is_made() -> None:
    """The client has the first sound before the last is made; it costs its text and what was reserved."""
    proceed = asyncio.Event()
    async with sound() as (engine, gateway):

        async def play(connection: ScriptedConnection, head: bytes) -> None:
            await engine.read(connection)
            await connection.send(
                b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            await connection.send(chunk(b"\xff\xfbfirst"))
            await proceed.wait()
            await connection.send(chunk(b"last") + chunk(b""))

        engine.play = play
        async with RawClient(gateway.port) as client:
            await client.send(post("/v1/audio/speech", SPEECH, [("x-request-id", "a")]))
            status, received = await client.head()
            assert status == 200
            assert ("content-type", "audio/mpeg") in received
            assert await client.chunk() == b"\xff\xfbfirst"
            proceed.set()
            assert await client.chunk() == b"last"
            assert await client.chunk() == b""
        tokens, output = await cost_of(gateway)
        assert len(SPEECH["input"]) // 5 <= tokens <= len(SPEECH["input"]) // 2
        assert output > 0


async def test_speech_that_breaks_off() -> None:
    """The client sees that it is not whole."""
    async with sound() as (engine, gateway):
        engine.play = await speaking(engine, [b"first"], cut=True)
        response = await ask(gateway.port, post("/v1/audio/speech", SPEECH, [("x-request-id", "a")]))
        assert (response.status, response.body, response.whole) == (200, b"first", False)
        assert (await gateway.ending("a"))["outcome"] == "upstream_aborted"


async def test_a_listener_that_does_not_read_holds_the_engine_back() -> None:
    """However much sound there is, hardly any of it is kept."""
    async with sound() as (engine, gateway):
        engine.play = await speaking(engine, [b"x" * 65536] * 1000)
        async with RawClient(gateway.port, receive_buffer_bytes=4096) as client:
            await client.send(post("/v1/audio/speech", SPEECH, [("x-request-id", "a")]))
            await client.head()
            (connection,) = engine.connections
            sent = -1
            while sent != connection.sent_bytes:  # until the engine is stuck
                sent = connection.sent_bytes
                await asyncio.sleep(0.2)
            assert sent < 32 * 1024 * 1024
        assert (await gateway.ending("a"))["outcome"] == "client_gone_streaming"


async def test_the_boundary_is_the_clients() -> None:
    """Whatever it is, quoted or not."""
    async with sound() as (engine, gateway):
        quoted = b'multipart/form-data; boundary="' + BOUNDARY + b'"'
        body = form(MODEL, file("file", SOUND))
        given: list[tuple[str, str | bytes]] = [("content-type", quoted), ("content-length", str(len(body)))]
        assert text(await ask(gateway.port, request_head("POST", TRANSCRIPTIONS, given) + body))
        assert engine.requests[0].header("content-type") == quoted.decode()
