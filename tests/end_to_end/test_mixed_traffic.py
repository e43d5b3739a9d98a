"""Everything at once: three hundred requests that end in every way there is, and nothing left behind."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.processes import open_sockets
from tests.support.raw_client import RawClient, ask, chat, post_chat, request_head
from tests.support.scripted_engine import (
    DONE,
    FINISH,
    ROLE,
    Script,
    ScriptedEngine,
    breaking_off,
    event,
    held_plain,
    held_stream,
    plain,
    scripted_engine,
    streaming,
    token,
    usage_event,
)
from tests.support.scripted_upstream import RecordedRequest, ScriptedConnection

pytestmark = pytest.mark.anyio

REQUESTS = 300
SEED = 20
WORDS = [token(word) for word in ("one", " two", " three")]

SCRIPTS: dict[str, Script] = {
    "plain": plain(),
    "stream": streaming(ROLE, *WORDS, FINISH, usage_event(5, 3), DONE),
    "bad request": plain(b'{"error":{}}', status="400 Bad Request"),
    "server error": plain(b'{"error":{}}', status="500 Internal Server Error"),
    "no json": plain(b"sorry"),
    "reset": breaking_off(ROLE, *WORDS),
    "reset before a token": breaking_off(ROLE),
    "in-band error": streaming(ROLE, WORDS[0], event({"error": {"message": "full"}}), DONE),
    "no end": streaming(ROLE, *WORDS),
}
"""What the engine does, by what the prompt says; a prompt of `leave …` is held until its client has left."""

OUTCOMES = {
    "plain": "completed",
    "stream": "completed",
    "bad request": "upstream_error",
    "server error": "upstream_error",
    "no json": "upstream_refused",
    "reset": "upstream_aborted",
    "reset before a token": "upstream_aborted",
    "in-band error": "upstream_error",
    "no end": "upstream_aborted",
    "wrong body": "bad_request",
    "wrong priority": "bad_request",
    "wrong path": "not_found",
    "leave while uploading": "client_gone_queued",
    "leave before the head": "client_gone_streaming",
    "leave in the stream": "client_gone_streaming",
}


async def play(connection: ScriptedConnection, request: RecordedRequest) -> None:
    what = json.loads(request.body)["messages"][0]["content"]
    if what == "leave before the head":
        await held_plain()(connection, request)
    elif what == "leave in the stream":
        await held_stream(ROLE, *WORDS)(connection, request)
    else:
        await SCRIPTS[what](connection, request)


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        engine.play = play
        yield engine


async def one(gateway: GatewayProcess, engine: ScriptedEngine, id: str, what: str, priority: str) -> None:
    """One request to its end, and a look at what its client saw."""
    headers = [("x-request-priority", priority)]
    stream = what not in ("plain", "no json", "leave before the head")
    whole = post_chat(chat(what, stream=stream), headers, id=id)
    if what == "leave while uploading":
        async with RawClient(gateway.port) as client:
            await client.send(
                request_head("POST", "/v1/chat/completions", [("content-length", "5"), ("x-request-id", id)])
            )
    elif what == "leave before the head":
        async with RawClient(gateway.port) as client:
            await client.send(whole)
            await _reached(engine, id)
    elif what == "leave in the stream":
        async with RawClient(gateway.port) as client:
            await client.send(whole)
            await client.until(b" three")
    else:
        if what == "wrong body":
            whole = post_chat(chat(n=0), headers, id=id)
        elif what == "wrong priority":
            whole = post_chat(chat(), [("x-request-priority", "P7")], id=id)
        elif what == "wrong path":
            whole = whole.replace(b"/v1/chat", b"/v2/chat", 1)
        response = await ask(gateway.port, whole)
        assert response.whole == (OUTCOMES[what] != "upstream_aborted")
        assert response.header("x-request-id") == id


async def _reached(engine: ScriptedEngine, id: str) -> None:
    mark = f"x-request-id: {id}-".encode()
    await eventually(lambda: any(mark in request.head for request in engine.requests), seconds=20)


async def test_three_hundred_requests(engine: ScriptedEngine) -> None:
    """However they end, each is counted once under the right name, all gauges go back to 0, the buckets
    lack exactly what was used, and no connection stays open."""
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url, "max_in_flight": 20}],
        "capacity": {"tokens_per_second": 1, "burst_seconds": 1_000_000},
        "circuit_breaker": {"failures": 1000},
        "scheduling": {"deadline_drop": False},
        "classes": {name: {"max_wait_seconds": 60} for name in ("P0", "P1", "P2")},
    }
    chance = random.Random(SEED)
    whats = [list(OUTCOMES)[n % len(OUTCOMES)] for n in range(REQUESTS)]
    chance.shuffle(whats)
    async with running_gateway(settings) as gateway:
        sockets = open_sockets(gateway.pid)
        priorities = [chance.choice(("P0", "P1", "P2")) for _ in whats]
        at_once = asyncio.Semaphore(60)

        async def limited(n: int) -> None:
            async with at_once:
                await one(gateway, engine, f"mixed-{n:03}", whats[n], priorities[n])

        await asyncio.gather(*map(limited, range(REQUESTS)))
        page = await gateway.quiet()
        assert page.total("requests_total") == REQUESTS
        assert page.outcomes() == Counter(OUTCOMES[what] for what in whats)
        assert page.are_numbers
        outcomes = {line["request_id"]: line["outcome"] for line in gateway.endings()}
        assert outcomes == {f"mixed-{n:03}": OUTCOMES[what] for n, what in enumerate(whats)}
        for priority, share in (("P0", 0.60), ("P1", 0.35), ("P2", 0.05)):
            await gateway.books_balance(priority, full=share * 1_000_000)
        kept_alive = 20
        assert open_sockets(gateway.pid) <= sockets + kept_alive + 2
