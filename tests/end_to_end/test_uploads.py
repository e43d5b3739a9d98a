"""Bodies that are too large, too slow, or from somebody who may send none: refused early, in bounded room."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.processes import resident_bytes
from tests.support.raw_client import RawClient, RawResponse, ask, chat, post_chat, request_head
from tests.support.scripted_engine import ScriptedEngine, held_plain, plain, scripted_engine
from tests.support.scripted_upstream import chunk

pytestmark = pytest.mark.anyio

KEY = "uploads-key"
BEARER = ("authorization", f"Bearer {KEY}")
CHAT_PATH = "/v1/chat/completions"
CHUNKED = ("transfer-encoding", "chunked")
MEGABYTE = 1 << 20
LIMIT = 10 * MEGABYTE
"""As configured when nothing is."""
OFFERED = 200 * MEGABYTE
READ_SECONDS = 2.0
PIECE = b"x" * MEGABYTE


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url, "max_in_flight": 1}],
        "server": {"body_read_seconds": READ_SECONDS},
        "capacity": {"max_request_tokens": None, "tokens_per_second": 1_000_000_000},
    }
    async with running_gateway(settings, keys={KEY: {"tenant": "team"}}) as gateway:
        yield gateway


@pytest.fixture(autouse=True)
async def memory_stays_small(gateway: GatewayProcess) -> AsyncIterator[None]:
    before = resident_bytes(gateway.pid)
    yield
    await gateway.quiet()
    assert resident_bytes(gateway.pid) - before < 3 * LIMIT


async def offered(client: RawClient, pieces: int) -> None:
    """Send megabytes for as long as they are taken."""
    try:
        for _ in range(pieces):
            await client.send(chunk(PIECE))
    except ConnectionError:
        pass


async def refused(client: RawClient, request: bytes, pieces: int = OFFERED // MEGABYTE) -> RawResponse:
    """The answer to an upload that would be 200 MB; it comes before all of that is sent."""
    await client.send(request)
    sending = asyncio.create_task(offered(client, pieces))
    response = await client.response()
    assert not sending.done()
    await client.leave()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    return response


@pytest.mark.parametrize("headers", [[], [("authorization", "Bearer wrong")]], ids=["none", "wrong"])
async def test_without_a_key(gateway: GatewayProcess, headers: list[tuple[str, str]]) -> None:
    """Told so while the upload still runs."""
    async with RawClient(gateway.port) as client:
        response = await refused(client, request_head("POST", CHAT_PATH, [*headers, CHUNKED]))
    assert (response.status, response.header("connection")) == (401, "close")


async def test_without_end(gateway: GatewayProcess) -> None:
    """Refused when it passes the limit, wherever it would have ended."""
    async with RawClient(gateway.port) as client:
        response = await refused(client, request_head("POST", CHAT_PATH, [BEARER, CHUNKED]))
    assert (response.status, response.error["code"]) == (413, "request_too_large")
    assert response.header("connection") == "close"


async def test_compressed(gateway: GatewayProcess) -> None:
    """A little that would be much is refused unread, whether it has a length or not."""
    bomb = gzip.compress(b"0" * (OFFERED // 4), 1)
    coded = ("content-encoding", "gzip")
    whole = await ask(gateway.port, post_chat(bomb, [BEARER, coded]))
    head = request_head("POST", CHAT_PATH, [BEARER, coded, CHUNKED])
    pieces = await ask(gateway.port, head + chunk(bomb) + chunk(b""))
    for response in (whole, pieces):
        assert (response.status, response.error["param"]) == (400, "content-encoding")


@pytest.mark.parametrize("framed", ["length", "chunks"])
async def test_drop_by_drop(gateway: GatewayProcess, framed: str) -> None:
    """However steadily it drips, the whole body has its time and no more, and holds no place meanwhile."""
    framing = CHUNKED if framed == "chunks" else ("content-length", "1000")
    async with RawClient(gateway.port) as client:
        await client.send(request_head("POST", CHAT_PATH, [BEARER, framing]))
        answered = asyncio.create_task(client.response())
        drops = 0
        while not answered.done():
            assert (await ask(gateway.port, post_chat(chat(), [BEARER]))).status == 200
            if not answered.done():
                await client.send(chunk(b" ") if framed == "chunks" else b" ")
                drops += 1
            await asyncio.wait([answered], timeout=0.1)  # the story: a drop each tenth of a second
        assert (await answered).error["code"] == "request_body_timeout"
    assert drops > 3


async def test_uploads_hold_no_place(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Three clients in the middle of a large upload leave the only place at the engine to another."""
    body = json.dumps(chat("x" * (4 * MEGABYTE))).encode()
    engine.play = held = held_plain()
    clients = [RawClient(gateway.port) for _ in range(3)]
    for client in clients:
        await client.__aenter__()
        await client.send(post_chat(body, [BEARER])[:-MEGABYTE])
    assert await gateway.in_flight() == 0
    assert await gateway.queued() == 0
    async with RawClient(gateway.port) as other:
        await other.send(post_chat(chat(), [BEARER]))
        await held.begun.wait()
        held.released.set()
        assert (await other.response()).status == 200
    engine.play = plain()
    for client in clients:
        await client.leave()


async def test_the_largest_that_is_allowed(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """One byte below and at the limit it is served, one above it is not."""
    engine.play = plain()
    body = json.dumps(chat()).encode()
    for length, status in ((LIMIT - 1, 200), (LIMIT, 200), (LIMIT + 1, 413)):
        request = post_chat(body + b" " * (length - len(body)), [BEARER])
        async with RawClient(gateway.port) as client:
            sending = asyncio.create_task(client.send(request))
            assert (await client.response()).status == status
            await asyncio.gather(sending, return_exceptions=True)
