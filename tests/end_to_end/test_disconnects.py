"""Clients that leave: at each place where a request can be when its client goes away."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, ask, chat, post_chat, request_head
from tests.support.scripted_engine import (
    DONE,
    FINISH,
    ROLE,
    Held,
    ScriptedEngine,
    held_plain,
    held_stream,
    plain,
    scripted_engine,
    streaming,
    token,
    usage_event,
)
from tests.support.scripted_upstream import STREAM_HEAD, RecordedRequest, ScriptedConnection, answer, chunk

pytestmark = pytest.mark.anyio

CHAT_PATH = "/v1/chat/completions"
Leave = Callable[[RawClient], Awaitable[None]]
TOKENS = [token(word) for word in ("one", " two", " three", " four", " five")]
OUTPUT_WEIGHT = 4


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    """One place at the engine, and buckets that hardly refill, so that each token can be accounted for."""
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url, "max_in_flight": 1}],
        "capacity": {"tokens_per_second": 1, "burst_seconds": 1_000_000, "output_weight": OUTPUT_WEIGHT},
        "classes": {"P1": {"max_queued_requests": 2, "max_wait_seconds": 60}},
        "scheduling": {"deadline_drop": False},
    }
    async with running_gateway(settings) as gateway:
        yield gateway
        await gateway.books_balance("P1", full=350_000)


@pytest.fixture(params=[RawClient.leave, RawClient.reset], ids=["close", "reset"])
def leave(request: pytest.FixtureRequest) -> Leave:
    """The two ways to go."""
    chosen: Leave = request.param
    return chosen


@pytest.fixture
def id(request: pytest.FixtureRequest) -> str:
    """A request id that no other test uses."""
    name: str = request.node.name
    return name.replace("[", "-").replace("]", "")


async def closed_towards_the_engine(held: Held) -> None:
    async with asyncio.timeout(1):
        for connection in held.connections:
            await connection.peer_closed.wait()


def cost(line: dict[str, Any]) -> float:
    """What the tokens of this line cost."""
    return float(line["input_tokens"] + OUTPUT_WEIGHT * line["output_tokens"])


async def test_while_uploading(
    gateway: GatewayProcess, engine: ScriptedEngine, leave: Leave, id: str
) -> None:
    """A client that leaves before its request is whole has cost nothing."""
    asked = len(engine.requests)
    async with RawClient(gateway.port) as client:
        await client.send(
            request_head("POST", CHAT_PATH, [("content-length", "100"), ("x-request-id", id)]) + b'{"model"'
        )
        await leave(client)
    line = await gateway.ending(id)
    assert (line["outcome"], line["status"], line["cost"]) == ("client_gone_queued", 499, 0)
    assert len(engine.requests) == asked


async def test_while_queued(gateway: GatewayProcess, engine: ScriptedEngine, leave: Leave, id: str) -> None:
    """Its place in the queue is free at once, and the engine never hears of it."""
    engine.play = held = held_plain()
    asked = len(engine.requests)
    async with RawClient(gateway.port) as first, RawClient(gateway.port) as leaver:
        await first.send(post_chat(chat("first"), id=f"{id}-first"))
        await held.begun.wait()
        await leaver.send(post_chat(chat("leaver"), id=id))
        async with RawClient(gateway.port) as second, RawClient(gateway.port) as third:
            await second.send(post_chat(chat("second"), id=f"{id}-second"))
            await eventually(lambda: _has_queued(gateway, 2))
            await leave(leaver)
            line = await gateway.ending(id)
            assert (line["outcome"], line["status"], line["cost"]) == ("client_gone_queued", 499, 0)
            assert await gateway.queued() == 1
            await third.send(post_chat(chat("third"), id=f"{id}-third"))
            await eventually(lambda: _has_queued(gateway, 2))
            held.released.set()
            for client in (first, second, third):
                assert (await client.response()).status == 200
    contents = [request.body for request in engine.requests[asked:]]
    assert [b"leaver" in body for body in contents] == [False, False, False]


async def _has_queued(gateway: GatewayProcess, count: int) -> bool:
    return await gateway.queued() == count


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_before_the_engine_has_answered(
    gateway: GatewayProcess, engine: ScriptedEngine, leave: Leave, id: str, stream: bool
) -> None:
    """The engine sees the close within a second, the place is free, and the prompt is paid for."""
    engine.play = held = held_plain()
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(chat("word " * 40, stream=stream), id=id))
        await held.begun.wait()
        await leave(client)
    await closed_towards_the_engine(held)
    line = await gateway.ending(id)
    assert (line["outcome"], line["status"]) == ("client_gone_streaming", 499)
    assert line["output_tokens"] == 0
    assert line["cost"] == cost(line) >= 50


async def test_in_the_middle_of_a_plain_answer(
    gateway: GatewayProcess, engine: ScriptedEngine, leave: Leave, id: str
) -> None:
    """An answer that the engine has begun to send is not fetched to its end for nobody."""
    engine.play = held = Held(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(chat(), id=id))
        await held.begun.wait()
        await leave(client)
    await closed_towards_the_engine(held)
    assert (await gateway.ending(id))["outcome"] == "client_gone_streaming"


async def test_in_the_middle_of_a_stream(
    gateway: GatewayProcess, engine: ScriptedEngine, leave: Leave, id: str
) -> None:
    """What was produced is paid for, not what was reserved, and the engine stops within a second."""
    engine.play = held = held_stream(ROLE, *TOKENS)
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(chat(stream=True, max_tokens=1000), id=id))
        assert (await client.head())[0] == 200
        await client.until(b" five")
        await leave(client)
    await closed_towards_the_engine(held)
    line = await gateway.ending(id)
    assert (line["outcome"], line["status"]) == ("client_gone_streaming", 200)
    assert line["output_tokens"] == 5
    assert line["cost"] == cost(line) < 40


async def test_behind_the_end_mark(
    gateway: GatewayProcess, engine: ScriptedEngine, leave: Leave, id: str
) -> None:
    """An SDK that hangs up after [DONE], before the body ends, has all it wanted."""
    events = [ROLE, *TOKENS, FINISH, usage_event(9, 5), DONE]
    engine.play = held = Held(STREAM_HEAD + b"".join(map(chunk, events)))
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(chat(stream=True), id=id))
        await client.until(b"[DONE]")
        await leave(client)
    await closed_towards_the_engine(held)
    line = await gateway.ending(id)
    assert (line["outcome"], line["input_tokens"], line["output_tokens"]) == ("completed", 9, 5)
    assert line["cost"] == cost(line)


async def test_on_a_connection_that_was_used_before(
    gateway: GatewayProcess, engine: ScriptedEngine, leave: Leave, id: str
) -> None:
    """Leaving is noticed as well when it is not the connection's first request."""
    async with RawClient(gateway.port) as client:
        for n, script in enumerate((plain(), streaming(ROLE, *TOKENS, FINISH, DONE))):
            engine.play = script
            await client.send(post_chat(chat(stream=n == 1), id=f"{id}-{n}"))
            assert (await client.response()).whole
        engine.play = held = held_plain()
        await client.send(post_chat(chat(), id=id))
        await held.begun.wait()
        await leave(client)
    await closed_towards_the_engine(held)
    assert (await gateway.ending(id))["outcome"] == "client_gone_streaming"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_with_another_request_behind(
    gateway: GatewayProcess, engine: ScriptedEngine, leave: Leave, id: str, stream: bool
) -> None:
    """A client that has sent its next request already is missed no later."""
    engine.play = held = held_stream(ROLE) if stream else held_plain()
    asked = len(engine.requests)
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(chat(stream=stream), id=id) + post_chat(chat("next"), id=f"{id}-next"))
        await held.begun.wait()
        await leave(client)
    await closed_towards_the_engine(held)
    assert (await gateway.ending(id))["outcome"] == "client_gone_streaming"
    assert len(engine.requests) == asked + 1


async def test_again_and_again(gateway: GatewayProcess, engine: ScriptedEngine, id: str) -> None:
    """The only place is free for the next request each time its holder walks out of its stream."""
    for n in range(20):
        engine.play = held = held_stream(ROLE, *TOKENS)
        async with RawClient(gateway.port) as client:
            await client.send(post_chat(chat(stream=True), id=f"{id}-{n}"))
            await client.until(b" five")
        await closed_towards_the_engine(held)
        engine.play = plain()
        assert (await ask(gateway.port, post_chat(chat(), id=f"{id}-{n}-next"))).status == 200


async def test_each_of_them_is_counted_once(gateway: GatewayProcess, engine: ScriptedEngine, id: str) -> None:
    """Thirty leavers, five at each place, are thirty records with the right endings."""
    before = (await gateway.quiet()).outcomes()
    for n in range(5):
        await _leave_at_each_place(gateway, engine, f"{id}-{n}")
    after = (await gateway.quiet()).outcomes()
    assert after - before == {"client_gone_queued": 10, "client_gone_streaming": 15, "completed": 10}


async def _leave_at_each_place(gateway: GatewayProcess, engine: ScriptedEngine, id: str) -> None:
    async with RawClient(gateway.port) as client:
        await client.send(
            request_head("POST", CHAT_PATH, [("content-length", "9"), ("x-request-id", f"{id}-u")])
        )
    engine.play = held = held_plain()
    async with RawClient(gateway.port) as holder:
        await holder.send(post_chat(chat(), id=f"{id}-holder"))
        await held.begun.wait()
        async with RawClient(gateway.port) as client:
            await client.send(post_chat(chat(), id=f"{id}-q"))
            await eventually(lambda: _has_queued(gateway, 1))
        held.released.set()
        assert (await holder.response()).status == 200
    for place, script, mark in (
        ("w", held_plain(), b""),
        ("f", held_stream(ROLE), b"\r\n\r\n"),
        ("m", held_stream(ROLE, *TOKENS), b" five"),
        ("d", held_stream(ROLE, FINISH, DONE), b"[DONE]"),
    ):
        engine.play = script
        async with RawClient(gateway.port) as client:
            await client.send(post_chat(chat(stream=place != "w"), id=f"{id}-{place}"))
            await script.begun.wait()
            if mark:
                await client.until(mark)
        await closed_towards_the_engine(script)


# ── places that are easily forgotten ─────────────────────────────────────────────────────────────────────


async def test_between_head_and_first_byte(
    gateway: GatewayProcess, engine: ScriptedEngine, leave: Leave, id: str
) -> None:
    """The client has its status and no byte of a body: the prompt is paid, and nothing else."""
    engine.play = held = Held(STREAM_HEAD)
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(chat(stream=True, max_tokens=1000), id=id))
        assert (await client.head())[0] == 200
        await leave(client)
    await closed_towards_the_engine(held)
    line = await gateway.ending(id)
    assert (line["outcome"], line["status"], line["output_tokens"]) == ("client_gone_streaming", 200, 0)
    assert line["cost"] == line["input_tokens"]


async def test_asked_to_go_on_with_the_upload(
    gateway: GatewayProcess, engine: ScriptedEngine, leave: Leave, id: str
) -> None:
    """A client that waited for `100 Continue` may still think better of it."""
    asked = len(engine.requests)
    headers = [("content-length", "100"), ("expect", "100-continue"), ("x-request-id", id)]
    async with RawClient(gateway.port) as client:
        await client.send(request_head("POST", CHAT_PATH, headers))
        await client.until(b"100 Continue\r\n\r\n")
        await leave(client)
    assert (await gateway.ending(id))["outcome"] == "client_gone_queued"
    assert len(engine.requests) == asked


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_half_a_connection_is_none(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str, stream: bool
) -> None:
    """A client that ends its own half, and could still read, is taken for gone, as most servers do: the two
    look the same until something is written."""
    engine.play = held = held_stream(ROLE, *TOKENS) if stream else held_plain()
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(chat(stream=stream), id=id))
        await held.begun.wait()
        if stream:
            await client.until(b" five")
        client.end_sending()
        await closed_towards_the_engine(held)
        assert b"[DONE]" not in await client.rest()
    line = await gateway.ending(id)
    assert (line["outcome"], line["output_tokens"]) == ("client_gone_streaming", 5 if stream else 0)


async def test_while_waiting_for_another_try(
    gateway: GatewayProcess, engine: ScriptedEngine, leave: Leave, id: str
) -> None:
    """A request that its engine had no room for waits again; one that leaves meanwhile has cost nothing, and
    is not sent a second time."""
    refuse, urgent = asyncio.Event(), held_plain()

    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        if b"leaver" in request.body:
            await refuse.wait()
            await connection.send(answer(status="503 Service Unavailable"))
        else:
            await urgent(connection, request)

    engine.play = script
    asked = len(engine.requests)
    async with RawClient(gateway.port) as client, RawClient(gateway.port) as other:
        await client.send(post_chat(chat("leaver", stream=True), id=id))
        await eventually(lambda: len(engine.requests) == asked + 1)
        await other.send(post_chat(chat(), [("x-request-priority", "P0")], id=f"{id}-urgent"))
        await eventually(lambda: _has_queued(gateway, 1))
        refuse.set()
        await urgent.begun.wait()  # before the leaver's second turn, since it goes first
        assert await gateway.queued() == 1
        await leave(client)
        line = await gateway.ending(id)
        assert (line["outcome"], line["status"], line["cost"]) == ("client_gone_queued", 499, 0)
        assert await gateway.queued() == 0
        urgent.released.set()
        assert (await other.response()).status == 200
    assert [b"leaver" in request.body for request in engine.requests[asked:]] == [True, False]


async def test_in_the_same_moment(
    gateway: GatewayProcess, engine: ScriptedEngine, leave: Leave, id: str
) -> None:
    """Clients that send and are gone leave nothing behind, wherever the news finds their requests."""
    engine.play = streaming(ROLE, *TOKENS, FINISH, DONE)
    for n in range(15):
        async with RawClient(gateway.port) as client:
            await client.send(post_chat(chat(stream=n % 3 > 0), id=f"{id}-{n}"))
            if n % 3 == 1:
                await client.read(1)
            await leave(client)
    await gateway.quiet()
    assert (await ask(gateway.port, post_chat(chat(stream=True), id=f"{id}-next"))).whole


# ── with all that stands before a request in earnest ─────────────────────────────────────────────────────

KEY = "a-key"
BEARER = ("authorization", f"Bearer {KEY}")


@pytest.fixture(scope="module")
async def guarded(
    engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[GatewayProcess]:
    """A key that may run one request at a time, and is refused a second at once."""
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url}],
        "capacity": {"tokens_per_second": 1, "burst_seconds": 1_000_000, "output_weight": 1},
        "scheduling": {"deadline_drop": False},
        "decision_log": str(tmp_path_factory.mktemp("log") / "decisions.jsonl"),
    }
    async with running_gateway(settings, keys={KEY: {"tenant": "t", "max_in_flight": 1}}) as gateway:
        yield gateway
        await gateway.books_balance("P1", full=350_000)


async def walks_out(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str, *, stream: bool, used_before: bool
) -> None:
    """One client that leaves, on a connection of its own or one that it has used before."""
    async with RawClient(gateway.port) as client:
        if used_before:
            engine.play = plain()
            await client.send(post_chat(chat(), [BEARER], id=f"{id}-before"))
            assert (await client.response()).status == 200
        engine.play = held = held_stream(ROLE, *TOKENS) if stream else held_plain()
        await client.send(post_chat(chat(stream=stream), [BEARER], id=id))
        await held.begun.wait()
        if stream:
            await client.until(b" five")
            refused = await ask(gateway.port, post_chat(chat(), [BEARER], id=f"{id}-second"))
            assert (refused.status, refused.header("x-qos-outcome")) == (429, "rejected_rate")
    await closed_towards_the_engine(held)


@pytest.mark.parametrize("used_before", [False, True], ids=["fresh", "used before"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_the_only_place_of_a_key(
    guarded: GatewayProcess, engine: ScriptedEngine, stream: bool, used_before: bool
) -> None:
    """Twenty times its holder walks out, and as soon as the engine has seen that, the key may ask again."""
    for n in range(20 if stream else 5):
        id = f"key-{stream}-{used_before}-{n}"
        await walks_out(guarded, engine, id, stream=stream, used_before=used_before)
        engine.play = plain()
        response = await ask(guarded.port, post_chat(chat(), [BEARER], id=f"{id}-next"))
        assert response.status == 200
        line = await guarded.ending(id)
        assert line["outcome"] == "client_gone_streaming"
        assert line["cost"] == line["input_tokens"] + (5 if stream else 0)


async def test_what_the_bucket_lacks_afterwards(guarded: GatewayProcess, engine: ScriptedEngine) -> None:
    """The prompt and the twenty tokens that were made: neither nothing nor the four thousand it asked for."""
    await guarded.quiet()
    loop = asyncio.get_running_loop()
    began, before = loop.time(), await guarded.bucket("P1")
    engine.play = held = held_stream(ROLE, *TOKENS * 4)
    async with RawClient(guarded.port) as client:
        await client.send(post_chat(chat("word " * 40, stream=True, max_tokens=4000), [BEARER], id="bucket"))
        for _ in range(4):
            await client.until(b" five")
    await closed_towards_the_engine(held)
    line = await guarded.ending("bucket")
    assert (line["outcome"], line["output_tokens"]) == ("client_gone_streaming", 20)
    assert line["cost"] == line["input_tokens"] + 20
    spent = before - await guarded.bucket("P1")
    refilled = loop.time() - began + 1
    assert line["cost"] - refilled <= spent <= line["cost"]
