"""Prompts are priced by what their model's answers teach, or by its tokenizer; huge ones hold nobody up."""

import asyncio
import http.client
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.raw_client import RawClient, get, post_chat
from tests.support.sample_texts import KINDS, Prompts, trained_tokenizer, unseen_half, write_tokenizer
from tests.support.scripted_engine import (
    DONE,
    END,
    FINISH,
    ScriptedEngine,
    plain,
    scripted_engine,
    token,
    whole_answer,
)
from tests.support.scripted_upstream import STREAM_HEAD, RecordedRequest, ScriptedConnection, chunk

pytestmark = pytest.mark.anyio

LIMIT_TOKENS = 3000
TEMPLATE_TOKENS, MESSAGE_TOKENS = 9, 4
HUGE_BYTES = 9_000_000
EVENT_SECONDS = 0.02
GAP_SECONDS_MAX = 0.5
PROBE_SECONDS_MAX = 0.5
"""Some 0.1 s on a quiet machine; a prompt that is counted on the event loop holds all up for seconds."""


@asynccontextmanager
async def gateway_for(engine: ScriptedEngine, **settings: Any) -> AsyncIterator[GatewayProcess]:
    base: dict[str, Any] = {
        "upstreams": [{"name": "gpu0", "url": engine.url}],
        "capacity": {"tokens_per_second": 1e9, "max_request_tokens": LIMIT_TOKENS},
    }
    async with running_gateway({**base, **settings}) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


async def estimate(client: RawClient, model: str, *contents: str) -> int:
    """What the gateway thinks that a prompt beyond the limit is, from its refusal."""
    messages = [{"role": "user", "content": text} for text in contents]
    await client.send(post_chat({"model": model, "messages": messages, "max_tokens": 0}))
    response = await client.response()
    assert (response.status, response.error["code"]) == (400, "request_too_large")
    found = re.search(r"about (\d+) tokens", response.error["message"])
    assert found
    return int(found[1])


async def teach(client: RawClient, engine: ScriptedEngine, prompts: Prompts, model: str, times: int) -> None:
    """Requests whose answers say how many tokens they were."""
    for _ in range(times):
        body, tokens = prompts.next(model)
        engine.play = plain(whole_answer(prompt=tokens))
        await client.send(post_chat(body))
        assert (await client.response()).status == 200


async def test_estimates_follow_the_answers() -> None:
    """At first a token is four bytes; after two hundred answers about prose, code and Chinese a prompt of
    each is known within a fifth, and another model's prompts still count four bytes."""
    async with scripted_engine() as engine, gateway_for(engine) as gateway, RawClient(gateway.port) as client:
        text = unseen_half("code")[:40_000]
        assert await estimate(client, "m", text) == -(-len(text.encode()) // 4)
        await teach(client, engine, Prompts(*KINDS), "m", 200)
        for kind, characters in (("prose", 40_000), ("code", 40_000), ("chinese", 1100)):
            text = unseen_half(kind)[:characters] * (1 if kind != "chinese" else 6)
            real = len(trained_tokenizer().encode(text)) + TEMPLATE_TOKENS + MESSAGE_TOKENS
            assert await estimate(client, "m", text) == pytest.approx(real, rel=0.2), kind
        assert await estimate(client, "other", text) == -(-len(text.encode()) // 4)


async def test_counts_that_are_not_of_the_text_teach_nothing() -> None:
    """With pictures or sound, or where the engine does not read just the text, its count is another thing."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    async with scripted_engine() as engine, gateway_for(engine) as gateway, RawClient(gateway.port) as client:
        engine.play = plain(whole_answer(prompt=1500))
        for part in (picture, sound):
            body = {"model": "m", "messages": [{"role": "user", "content": [part, {"text": "What is it?"}]}]}
            for _ in range(10):
                await client.send(post_chat(body))
                assert (await client.response()).status == 200
        messages = [{"role": "user", "content": "And then?"}]
        for _ in range(10):
            await client.send(post_chat({"model": "m", "messages": messages, "truncate_prompt_tokens": 1500}))
            assert (await client.response()).status == 200
        assert await estimate(client, "m", "word " * 4000) == 5000
        await client.send(post_chat({"model": "m", "messages": messages}))
        assert (await client.response()).status == 200
        assert await estimate(client, "m", "word " * 4000) > 5000


async def test_a_tokenizer_counts_exactly(tokenizer_file: Path) -> None:
    """From the first request on, and with the chat template too once some answers have shown it."""
    texts = [unseen_half("code")[:9000], unseen_half("prose")[:7000]]
    exact = sum(len(trained_tokenizer().encode(text)) for text in texts)
    assert exact > LIMIT_TOKENS
    settings = {"tokenizers": {"m": str(tokenizer_file)}}
    async with (
        scripted_engine() as engine,
        gateway_for(engine, **settings) as gateway,
        RawClient(gateway.port) as client,
    ):
        assert await estimate(client, "m", *texts) == exact
        await teach(client, engine, Prompts(*KINDS, seed=2), "m", 40)
        template = TEMPLATE_TOKENS + len(texts) * MESSAGE_TOKENS
        assert await estimate(client, "m", *texts) == pytest.approx(exact + template, abs=2)
        long = unseen_half("code")[:200_000]
        counted = len(trained_tokenizer().encode(long))
        assert await estimate(client, "m", long) == pytest.approx(
            counted, rel=0.15
        )  # counted up to the limit


# ------------------------------------------------------------------ huge prompts


class Ticking:
    """A stream with an event every 20 ms until it is told to stop; any other request has a plain answer."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.stopped = asyncio.Event()

    async def __call__(self, connection: ScriptedConnection, request: RecordedRequest) -> None:
        if len(request.body) > HUGE_BYTES:
            await plain()(connection, request)
            return
        await connection.send(STREAM_HEAD)
        self.begun.set()
        while not self.stopped.is_set():
            await connection.send(chunk(token("tick")))
            await asyncio.sleep(EVENT_SECONDS)
        await connection.send(chunk(FINISH) + chunk(DONE) + END)


async def largest_gap(client: RawClient) -> float:
    """Seconds between two pieces of the stream that the client receives, to its end."""
    now = asyncio.get_running_loop().time
    times = [now()]
    while await client.chunk():
        times.append(now())
    return max(later - earlier for earlier, later in pairwise(times))


async def slowest_probe(port: int, until: asyncio.Event) -> float:
    """Seconds that `/healthz` took at most, asked again and again."""
    now = asyncio.get_running_loop().time
    slowest = 0.0
    async with RawClient(port) as client:
        while not until.is_set():
            began = now()
            await client.send(get("/healthz"))
            assert (await client.response("GET")).status == 200
            slowest = max(slowest, now() - began)
            await asyncio.sleep(EVENT_SECONDS)
    return slowest


async def longest_stall(until: asyncio.Event) -> float:
    """Seconds that this very loop was late at most: what the machine does to everybody."""
    now = asyncio.get_running_loop().time
    longest = 0.0
    while not until.is_set():
        began = now()
        await asyncio.sleep(EVENT_SECONDS / 4)
        longest = max(longest, now() - began - EVENT_SECONDS / 4)
    return longest


def post_huge(port: int, body: bytes) -> int:
    """By a thread, so that the loop that measures has nothing to do with it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"content-type": "application/json", "x-request-priority": "P0"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("counted", "limit", "status"),
    [(False, None, 200), (True, 131_072, 400)],
    ids=["estimated and passed on", "counted and refused"],
)
async def test_huge_prompts_hold_no_stream_up(
    counted: bool, limit: int | None, status: int, tokenizer_file: Path
) -> None:
    """While five clients send nine megabytes each, a stream goes on and the gateway answers its probes. The
    bounds are for a machine that has time for us: its own stalls come on top, for the engine's and the
    gateway's side."""
    text = unseen_half("code")
    text = (text * (HUGE_BYTES // len(text) + 1))[:HUGE_BYTES]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    settings: dict[str, Any] = {"capacity": {"tokens_per_second": 1e9, "max_request_tokens": limit}}
    if counted:
        settings["tokenizers"] = {"m": str(tokenizer_file)}
    async with (
        scripted_engine() as engine,
        gateway_for(engine, **settings) as gateway,
        RawClient(gateway.port) as client,
    ):
        ticking = engine.play = Ticking()
        await client.send(post_chat({"model": "m", "stream": True, "messages": []}))
        assert (await client.head())[0] == 200
        measured = asyncio.gather(
            largest_gap(client),
            slowest_probe(gateway.port, ticking.stopped),
            longest_stall(ticking.stopped),
        )
        posts = [asyncio.to_thread(post_huge, gateway.port, body) for _ in range(5)]
        assert await asyncio.gather(*posts) == [status] * 5
        ticking.stopped.set()
        gap, probe, stall = await measured
        assert gap < GAP_SECONDS_MAX + 2 * stall
        assert probe < PROBE_SECONDS_MAX + 2 * stall
