"""Requests for the tiny model, and others that keep an engine busy."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tests.engines.engine_process import MODEL, SLOTS, EngineProcess
from tests.support.gateway_process import GatewayProcess
from tests.support.raw_client import Headers, RawClient, RawResponse, ask, chat, post, post_chat

BUSY_SECONDS_MAX = 60.0
"""The engine shares its processor with everything else here."""
LONG_ANSWER = 1200
"""Tokens of an answer that lasts for seconds, two of which fit the engine's memory."""
LONG_PROMPT = "All that a dictionary knows, from the first word to the last one. " * 20
"""Some 500 tokens."""
JSON = ("content-type", "application/json")
"""vLLM insists on it; the gateway adds it by itself."""
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


def tiny_chat(content: str = "Hello", **members: Any) -> dict[str, Any]:
    """A chat whose answer is the same each time."""
    return chat(content, **{"model": MODEL, "temperature": 0, "max_tokens": 8, **members})


async def asks(
    gateway: GatewayProcess, id: str, *headers: tuple[str, str], content: str = "Hello", **members: Any
) -> RawResponse:
    """A chat through the gateway."""
    return await ask(gateway.port, post_chat(tiny_chat(content, **members), headers, id=id))


def post_message(body: dict[str, Any], headers: Headers = (), *, id: str) -> bytes:
    return post("/v1/messages", body, [("anthropic-version", "2023-06-01"), ("x-request-id", id), *headers])


def events(body: bytes) -> Iterator[dict[str, Any]]:
    """The JSON of each event."""
    for line in body.decode().splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


async def is_left_with(engine: EngineProcess, running: int, waiting: int) -> None:
    """Until vLLM has so many requests and no others."""
    async with asyncio.timeout(BUSY_SECONDS_MAX):
        while True:
            page = await engine.metrics()
            if (page.total(RUNNING), page.total(WAITING)) == (running, waiting):
                return
            await asyncio.sleep(0.05)  # a page costs the engine as much as some tokens


@asynccontextmanager
async def occupied(
    engine: EngineProcess, requests: int, content: str = "Hello", **members: Any
) -> AsyncIterator[AsyncExitStack]:
    """vLLM with so many requests from elsewhere, past the gateway: those without a slot wait in it. They
    leave at the end of the block, or when what is yielded is closed."""
    wanted = {"max_tokens": LONG_ANSWER, "stream": True, **members}
    async with AsyncExitStack() as others:
        for n in range(requests):
            client = await others.enter_async_context(RawClient(engine.port))
            body = tiny_chat(f"{n}: {content}", **wanted)  # each its own, since equal ones share memory
            await client.send(post_chat(body, [JSON]))
        await is_left_with(engine, min(requests, SLOTS), max(requests - SLOTS, 0))
        yield others
    await is_left_with(engine, 0, 0)
