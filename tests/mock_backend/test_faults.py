"""Each fault of the mock GPU on the wire, byte by byte where it matters, and how faults are chosen.
A real process, real sockets; afterwards nothing is left in the GPU."""

import asyncio
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.mock_backend.child import MockGpuProcess
from gateway.mock_backend.faults import PROBE_KINDS, FaultKind, FaultOptions, FaultTable, parse_table
from gateway.mock_backend.faulty_answers import CRASHED
from tests.mock_backend.test_child import is_listening
from tests.mock_backend.test_server import idle, metrics, until
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, RawResponse, ask, chat, get, post

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("client")]


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
DONE = b"data: [DONE]\n\n"
QUEUE_FULL = (
    b'{"error":{"message":"The engine is currently busy and cannot accept new requests. '
    b'Please try again later or on a different instance.",'
    b'"type":"Service Unavailable","param":null,"code":503}}'
)
FAILED = (
    '{"error": {"message": "Internal server error", "type": "InternalServerError", '
    '"param": null, "code": 500}}'
)
ALLOWED = FaultOptions(allowed=True)
QUIET_SECONDS = 0.2
SILENT_SECONDS = 0.05


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gpu() -> AsyncIterator[MockGpuProcess]:
    gpu = await MockGpuProcess.start("h100_llama3_8b", faults=ALLOWED)
    yield gpu
    await gpu.stop()
    assert (gpu.returncode, await gpu.said()) == (0, "")


@pytest.fixture
async def client(gpu: MockGpuProcess) -> AsyncIterator[httpx.AsyncClient]:
    """For what is asked beside the faults; the GPU must be empty again soon after each test."""
    async with httpx.AsyncClient(base_url=gpu.url, timeout=30, trust_env=False) as client:
        yield client
        await until(client, idle)


def port_of(gpu: MockGpuProcess) -> int:
    return int(gpu.url.rpartition(":")[2])


def struck(fault: str, path: str = CHAT, **members: Any) -> bytes:
    """A request that names its fault; a stream of 6 tokens unless told otherwise."""
    given = {RESPONSES: {"input": "Hello", "max_output_tokens": 6}, MESSAGES: chat(max_tokens=6)}
    body = given.get(path, chat(max_tokens=6)) | {"model": "mock-gpu", "stream": True, **members}
    return post(path, body, [("x-mock-fault", fault)])


async def to_the_end(client: RawClient) -> tuple[bytes, bool]:
    """All that comes, and whether a reset was the end."""
    received = b""
    async with asyncio.timeout(15):
        try:
            while piece := await client._reader.read(65536):
                received += piece
        except ConnectionResetError:
            return received, True
    return received, False


async def wire(gpu: MockGpuProcess, request: bytes) -> tuple[bytes, bool]:
    async with RawClient(port_of(gpu)) as client:
        await client.send(request)
        return await to_the_end(client)


async def stays_silent(client: RawClient) -> bool:
    """Neither a byte nor an end comes for a while."""
    try:
        async with asyncio.timeout(QUIET_SECONDS):
            await client._reader.read(1)
    except TimeoutError:
        return True
    return False


def tokens(body: bytes) -> int:
    """Chat events with some content."""
    return sum(b'"content":"' in event and b'"content":""' not in event for event in body.split(b"\n\n"))


async def whole(gpu: MockGpuProcess, path: str = CHAT, **members: Any) -> RawResponse:
    """The same request without a fault."""
    response = await ask(port_of(gpu), struck("", path, **members).replace(b"x-mock-fault: \r\n", b""))
    assert response.status == 200
    assert response.whole
    return response


# ── the connection goes ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_reset_before_headers(gpu: MockGpuProcess, stream: bool) -> None:
    assert await wire(gpu, struck("reset_before_headers", stream=stream)) == (b"", True)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_reset_after_headers(gpu: MockGpuProcess, stream: bool) -> None:
    """The whole head, and not a byte of the body."""
    received, reset = await wire(gpu, struck("reset_after_headers", stream=stream))
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert received.index(b"\r\n\r\n") == len(received) - 4
    assert reset


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_reset_mid_stream(gpu: MockGpuProcess, after: int) -> None:
    """Exactly so many tokens arrive, and none of what would come behind them."""
    received, reset = await wire(gpu, struck(f"reset_mid_stream; after={after}"))
    assert (tokens(received), reset) == (after, True)
    assert b'"role":"assistant"' in received
    assert DONE not in received


async def test_reset_in_a_plain_answer(gpu: MockGpuProcess) -> None:
    """Half of what content-length promised."""
    received, reset = await wire(gpu, struck("reset_mid_stream", stream=False))
    head, _, body = received.partition(b"\r\n\r\n")
    length = len((await whole(gpu, stream=False)).body)
    assert b"content-length: %d" % length in head.split(b"\r\n")
    assert (len(body), reset) == (length // 2, True)


async def test_sequences_of_a_broken_stream_leave_the_gpu(
    gpu: MockGpuProcess, client: httpx.AsyncClient
) -> None:
    """Long before their end, and counted as aborted."""
    before = (await metrics(client))["request_success_total:abort"]
    await wire(gpu, struck("reset_mid_stream; after=2", max_tokens=50_000, n=3))
    assert (await until(client, idle))["request_success_total:abort"] == before + 3


async def test_a_stream_of_fewer_tokens_stays_whole(gpu: MockGpuProcess) -> None:
    response = await ask(port_of(gpu), struck("reset_mid_stream; after=7"))
    assert response.whole
    assert response.body.endswith(DONE)


# ── nothing comes, or slowly ─────────────────────────────────────────────────────────────────────────────


async def test_silence(gpu: MockGpuProcess, client: httpx.AsyncClient) -> None:
    """Some tokens, then nothing; what is generated meanwhile goes when the client does."""
    async with RawClient(port_of(gpu)) as raw:
        await raw.send(struck("silence; after=2", max_tokens=50_000))
        assert (await raw.head())[0] == 200
        received = b"".join([await raw.chunk() for _ in range(1 + 2)])
        assert tokens(received) == 2
        assert await stays_silent(raw)
        assert (await metrics(client))["num_requests_running"] == 1
    await until(client, idle)


async def test_silence_in_a_plain_answer(gpu: MockGpuProcess) -> None:
    async with RawClient(port_of(gpu)) as raw:
        await raw.send(struck("silence", stream=False))
        _, headers = await raw.head()
        await raw.read(int(dict(headers)["content-length"]) // 2)
        assert await stays_silent(raw)


async def test_silence_before_headers(gpu: MockGpuProcess) -> None:
    async with RawClient(port_of(gpu)) as raw:
        await raw.send(struck("silence_before_headers"))
        assert await stays_silent(raw)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_drip(gpu: MockGpuProcess, stream: bool) -> None:
    """The same answer in many small pieces, its head as well."""
    async with RawClient(port_of(gpu)) as raw:
        await raw.send(struck("drip", stream=stream, max_tokens=1))
        pieces = []
        async with asyncio.timeout(15):
            while piece := await raw._reader.read(65536):
                pieces.append(piece)
    received = b"".join(pieces)
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert len(pieces) > len(received) / 10
    body = received.partition(b"\r\n\r\n")[2]
    if stream:
        assert body.endswith(b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE))
    else:
        assert json.loads(body)["choices"][0]["finish_reason"] == "length"


# ── the framing lies ─────────────────────────────────────────────────────────────────────────────────────


async def test_short_length(gpu: MockGpuProcess) -> None:
    """The rest of the answer lies on the kept connection, in front of the next."""
    async with RawClient(port_of(gpu)) as raw:
        await raw.send(struck("short_length; bytes=9", stream=False))
        response = await raw.response()
        rest = await raw.read(9)
        assert json.loads(response.body + rest)["object"] == "chat.completion"
        await raw.send(get("/version"))
        assert (await raw.response()).status == 200


async def test_bytes_behind_the_end_of_a_stream(gpu: MockGpuProcess) -> None:
    async with RawClient(port_of(gpu)) as raw:
        await raw.send(struck("short_length; bytes=9"))
        response = await raw.response()
        assert response.whole
        assert response.body.endswith(DONE)
        assert await raw.read(9) == b"x" * 9


async def test_long_length(gpu: MockGpuProcess) -> None:
    """An orderly end of the connection before the promised end of the body."""
    received, reset = await wire(gpu, struck("long_length; bytes=9", stream=False))
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"content-length: %d" % (len(body) + 9) in head.split(b"\r\n")
    assert json.loads(body)["object"] == "chat.completion"
    assert not reset


async def test_no_last_chunk(gpu: MockGpuProcess) -> None:
    """All events of a stream, and the connection ends where the last chunk would be."""
    received, reset = await wire(gpu, struck("long_length"))
    assert tokens(received) == 6
    assert received.endswith(DONE + b"\r\n")
    assert not reset


# ── the engine's errors ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_queue_full(gpu: MockGpuProcess, client: httpx.AsyncClient, stream: bool) -> None:
    """Byte by byte what vLLM says, as JSON even to a stream, without retry advice, and counted like it."""
    name = "admission_rejections_total:max_num_queued_reqs"
    before = (await metrics(client))[name]
    response = await ask(port_of(gpu), struck("queue_full", stream=stream))
    assert (response.status, response.body) == (503, QUEUE_FULL)
    assert response.header("content-type") == "application/json"
    assert response.header("retry-after") is None
    assert (await metrics(client))[name] == before + 1


async def test_error_500(gpu: MockGpuProcess) -> None:
    response = await ask(port_of(gpu), struck("error_500"))
    assert (response.status, response.json) == (500, json.loads(FAILED))
    told = (await ask(port_of(gpu), struck("error_500", MESSAGES))).json
    error = {"type": "InternalServerError", "message": "Internal server error"}
    assert told == {"type": "error", "error": error}


async def test_error_event(gpu: MockGpuProcess) -> None:
    """Behind some tokens the error in vLLM's form, its end mark, and an orderly end of the body."""
    response = await ask(port_of(gpu), struck("error_event; after=2", max_tokens=50_000))
    assert (response.status, response.whole, tokens(response.body)) == (200, True, 2)
    assert response.body.endswith(b"\n\ndata: " + FAILED.encode() + b"\n\n" + DONE)


async def test_error_event_of_messages(gpu: MockGpuProcess) -> None:
    """The events of Anthropic's API have names."""
    response = await ask(port_of(gpu), struck("error_event; after=2", MESSAGES))
    *_, error, done, rest = response.body.split(b"\n\n")
    assert error.startswith(b'event: error\ndata: {"type": "error", "error": {"type": "')
    assert (done + b"\n\n", rest) == (DONE, b"")


async def test_error_event_of_a_plain_answer(gpu: MockGpuProcess) -> None:
    """There it is the status."""
    response = await ask(port_of(gpu), struck("error_event", stream=False))
    assert (response.status, response.json) == (500, json.loads(FAILED))


# ── odd bodies ───────────────────────────────────────────────────────────────────────────────────────────


async def test_gzip(gpu: MockGpuProcess) -> None:
    """Of a stream each event can be unpacked when it comes."""
    async with RawClient(port_of(gpu)) as raw:
        await raw.send(struck("gzip"))
        _, headers = await raw.head()
        assert dict(headers)["content-encoding"] == "gzip"
        unpacker, events = zlib.decompressobj(wbits=31), []
        while piece := await raw.chunk():
            events.append(unpacker.decompress(piece))
    assert unpacker.eof
    assert all(event.startswith(b"data: ") and event.endswith(b"\n\n") for event in events if event)
    assert tokens(b"".join(events)) == 6
    assert DONE in events


async def test_gzip_of_a_plain_answer(gpu: MockGpuProcess) -> None:
    response = await ask(port_of(gpu), struck("gzip", stream=False))
    assert response.whole
    assert response.header("content-encoding") == "gzip"
    assert json.loads(zlib.decompress(response.body, wbits=31))["object"] == "chat.completion"


async def test_huge_event(gpu: MockGpuProcess) -> None:
    """One event of a stream is as large as asked, and says what it would have said."""
    size = 4_000_000
    response = await ask(port_of(gpu), struck(f"huge_event; after=2; bytes={size}"))
    _role, *events = [event for event in response.body.split(b"\n\n") if b"content" in event]
    assert [len(event) > size for event in events] == [False, False, True, False, False, False]
    words = [json.loads(event[6:])["choices"][0]["delta"]["content"] for event in events]
    assert words == [" the", " sun", " and", " sea", " are", " old"]


async def test_huge_plain_answer(gpu: MockGpuProcess) -> None:
    response = await ask(port_of(gpu), struck("huge_event; bytes=4000000", stream=False))
    assert response.whole
    assert len(response.body) > 4_000_000
    assert response.json["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("path", "last"),
    [
        (CHAT, DONE),
        (RESPONSES, b"event: response.completed\n"),
        (MESSAGES, b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
    ],
    ids=["chat", "responses", "messages"],
)
async def test_no_done(gpu: MockGpuProcess, path: str, last: bytes) -> None:
    """A stream that lacks its last event ends in order all the same."""
    assert (await whole(gpu, path)).body.count(last) == 1
    response = await ask(port_of(gpu), struck("no_done", path))
    assert response.whole
    assert last not in response.body
    assert response.body.count(b"\n\n") == (await whole(gpu, path)).body.count(b"\n\n") - 1


# ── health ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_faults_of_probes(gpu: MockGpuProcess, client: httpx.AsyncClient) -> None:
    """They strike `/health` and nothing else."""
    await client.post("/faults", json=[{"kind": "health_500", "probability": 1}])
    assert (await client.get("/health")).status_code == 500
    assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
    await client.post("/faults", json=[{"kind": "slow_health", "probability": 1, "seconds": 60}])
    async with RawClient(port_of(gpu)) as raw:
        await raw.send(get("/health"))
        assert await stays_silent(raw)
    await client.post("/faults", json=[{"kind": "slow_health", "probability": 1, "seconds": 0.05}])
    assert (await client.get("/health")).status_code == 200
    await client.delete("/faults")


# ── other answers ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", FaultKind)
async def test_answers_of_any_sort(gpu: MockGpuProcess, client: httpx.AsyncClient, kind: FaultKind) -> None:
    """Refusals, vectors, empty bodies: what a fault makes of them is no trouble to the process."""
    if kind in {FaultKind.CRASH, FaultKind.REFUSE, *PROBE_KINDS}:
        return
    header = [("x-mock-fault", kind.value)]
    embedding = {"model": "mock-gpu", "input": "Hello"}
    for request in (
        post(CHAT, chat(stream=True) | {"model": "another"}, header),
        post("/v1/embeddings", embedding, header),
        post("/tokenize", b"{", header),
        get("/health", header),
        get("/nowhere", header),
        post("/health", b"", header),
    ):
        async with RawClient(port_of(gpu)) as raw:
            await raw.send(request)
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    await raw._reader.read(1)
            except (TimeoutError, ConnectionError):
                pass
    assert (await client.get("/health")).status_code == 200


# ── how a fault is chosen ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("earthquake", "unknown fault 'earthquake'; known faults: refuse, reset_before_headers"),
        ("silence; after=-1", "after of silence must be a whole number from 0"),
        ("slow_health", "slow_health is a fault of /health"),
    ],
)
async def test_a_bad_header_is_told(gpu: MockGpuProcess, header: str, says: str) -> None:
    response = await ask(port_of(gpu), struck(header))
    assert response.status == 400
    assert response.json["error"]["param"] == "x-mock-fault"
    assert says in response.json["error"]["message"]


async def test_the_table_at_run_time(client: httpx.AsyncClient) -> None:
    """POST replaces it, a bad one changes nothing, GET tells it and what has struck, DELETE empties it."""
    table = [{"kind": "error_500", "probability": 1.0}, {"kind": "silence", "probability": 0.0, "after": 3}]
    assert (await client.post("/faults", json=table)).json()["faults"] == table
    for _ in range(3):
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 500
    for path in ("/health", "/metrics", "/v1/models"):
        assert (await client.get(path)).status_code == 200
    bad = await client.post("/faults", json=[{"kind": "error_500", "probability": 1.5}])
    assert bad.status_code == 400
    assert "the probability of error_500 must be from 0 to 1, not 1.5" in bad.json()["error"]["message"]
    told = (await client.get("/faults")).json()
    assert told["faults"] == table
    assert told["struck"]["error_500"] >= 3
    assert (await client.delete("/faults")).json()["faults"] == []
    assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
    assert (await client.put("/faults")).status_code == 405


@asynccontextmanager
async def started(faults: FaultOptions) -> AsyncIterator[MockGpuProcess]:
    gpu = await MockGpuProcess.start("h100_llama3_8b", faults=faults)
    try:
        yield gpu
    finally:
        await gpu.stop()


async def statuses(gpu: MockGpuProcess, count: int) -> list[int]:
    async with httpx.AsyncClient(base_url=gpu.url, trust_env=False) as client:
        return [(await client.post("/tokenize", json={"prompt": "x"})).status_code for _ in range(count)]


async def test_a_seed_repeats_its_faults() -> None:
    """About as often as the table says, in the same places, however often health is probed in between."""
    faults = FaultOptions(parse_table(["error_500=0.3", "queue_full=0.2", "health_500=0.5"]), seed=7)
    async with started(faults) as one, started(faults) as two:
        async with httpx.AsyncClient(base_url=two.url, trust_env=False) as client:
            assert 500 in [(await client.get("/health")).status_code for _ in range(20)]
        first = await statuses(one, 100)
        assert await statuses(two, 100) == first
    assert 10 < first.count(500) < 50
    assert 5 < first.count(503) < 40


async def test_nothing_can_be_named_unless_it_is_allowed() -> None:
    """A mock with faults of its own, and one without any, take the header for one they do not know."""
    for table in (FaultTable(), parse_table(["silence=0"])):
        async with started(FaultOptions(table)) as gpu:
            assert (await ask(port_of(gpu), struck("error_500"))).status == 200
            assert (await ask(port_of(gpu), get("/faults"))).status == 404


# ── the process, the port ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("fault", "came"), [("crash", 0), ("crash; after=2", 2)])
async def test_crash(fault: str, came: int) -> None:
    """The process is gone at once, with what was sent before on its way."""
    async with started(ALLOWED) as gpu:
        received, _ = await wire(gpu, struck(fault))
        assert tokens(received) == came
        assert bool(received) == bool(came)
        assert await gpu.ended() == CRASHED


async def test_refuse() -> None:
    """The request is reset, kept connections close, streams go on, new connections are refused for a time;
    then it is as before, on the same port."""
    async with started(ALLOWED) as gpu:
        port = port_of(gpu)
        async with RawClient(port) as kept, RawClient(port) as streaming:
            await kept.send(get("/version"))
            assert (await kept.response()).status == 200
            await streaming.send(post(CHAT, chat(max_tokens=100, stream=True)))
            await streaming.head()
            assert await wire(gpu, struck("refuse; seconds=0.5")) == (b"", True)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            assert await to_the_end(kept) == (b"", False)
            assert (await to_the_end(streaming))[0].endswith(DONE + b"\r\n0\r\n\r\n")
        await eventually(lambda: is_listening(gpu.url))
        assert (await ask(port, get("/version"))).status == 200
        assert await wire(gpu, struck("refuse; seconds=60")) == (b"", True)
        await gpu.stop()
        assert (gpu.returncode, await gpu.said()) == (0, "")
