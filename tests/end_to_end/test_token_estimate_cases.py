"""What is set aside for a request before anybody knows what it will use: never nothing, never for ever."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.metered import PLAIN_SUMS, Left, Spent, as_key, left_to
from tests.support.raw_client import RawClient, ask, chat
from tests.support.scripted_engine import ScriptedEngine, held_plain, plain, scripted_engine
from tests.support.scripted_upstream import RecordedRequest, ScriptedConnection

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
LIMITS_OF_AN_ANSWER: dict[str, dict[str, Any]] = {
    "the-larger-last": {"max_tokens": 1, "max_completion_tokens": 10_000},
    "the-larger-first": {"max_completion_tokens": 10_000, "max_tokens": 1},
    "one-of-them-null": {"max_tokens": None, "max_completion_tokens": 10_000},
    "the-other-one-null": {"max_tokens": 10_000, "max_completion_tokens": None},
}
"""Few of them, and the others of P1 as well: after twenty answers a class reserves what it has learned."""
NOTHING_TO_COUNT: dict[str, tuple[str, dict[str, Any]]] = {
    "no-messages": (CHAT, {"messages": []}),
    "empty-content": (CHAT, {"messages": [{"role": "user", "content": ""}]}),
    "content-null": (CHAT, {"messages": [{"role": "user", "content": None}]}),
    "empty-prompt": ("/v1/completions", {"prompt": ""}),
    "no-token-ids": ("/v1/completions", {"prompt": []}),
    "another-shape": ("/v1/embeddings", {"something": "else"}),
}
KEYS: dict[str, dict[str, Any]] = {
    "small": {"tokens_per_minute": 100},
    **{key: {"tokens_per_minute": 100} for key in LIMITS_OF_AN_ANSWER},
    **{key: {"tokens_per_minute": 50} for key in NOTHING_TO_COUNT},
    "pictures": {"tokens_per_minute": 5000},
    "loose": {"tokens_per_minute": 100_000},
}


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url}],
        "capacity": PLAIN_SUMS,
        "scheduling": {"deadline_drop": False},
    }
    async with running_gateway(settings, keys=KEYS) as gateway:
        yield gateway


async def reserved(gateway: GatewayProcess) -> int:
    """Tokens set aside for what is at the engine."""
    tokens: int = (await gateway.state())["upstreams"]["gpu0"]["in_flight_tokens"]
    return tokens


async def test_an_answer_reserves_no_more_than_there_can_be(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """A short prompt without a limit on its answer passes on a full bucket, though more is set aside for the
    answer than the bucket holds; while the bucket is not full the next one is told when it will be."""
    engine.play = held = held_plain()
    spent = Spent(gateway, "small")
    request = as_key("small", chat("hi"), path=CHAT)
    async with RawClient(gateway.port) as client:
        await client.send(request)
        await held.begun.wait()
        assert await reserved(gateway) > 100
        held.released.set()
        assert (await client.response()).status == 200
    await spent.exactly(3 + 2)
    refused = await ask(gateway.port, request)
    assert (refused.status, refused.header("x-qos-outcome")) == (429, "rejected_rate")
    wait = float(refused.error["message"].removesuffix(" s").rpartition(" ")[2])
    assert 0 < wait <= 3.1  # five tokens at 100 a minute


async def test_a_prompt_that_can_never_be_paid(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """A prompt above a whole minute's tokens is the client's fault, told at once and without a promise that
    coming back would help."""
    asked = len(engine.requests)
    before = await left_to(gateway, "small")
    response = await ask(gateway.port, as_key("small", chat("word " * 4000), path=CHAT))
    assert (response.status, response.error["code"]) == (400, "request_too_large")
    assert (response.error["type"], response.error["param"]) == ("invalid_request_error", "messages")
    assert "100 in a minute" in response.error["message"]
    for name in ("retry-after", "retry-after-ms", "x-should-retry"):
        assert response.header(name) is None
    assert response.header("x-qos-queue-ms") == "0"
    assert (await left_to(gateway, "small")).tokens >= before.tokens
    assert len(engine.requests) == asked


@pytest.mark.parametrize("key", LIMITS_OF_AN_ANSWER)
async def test_the_larger_limit_of_an_answer_is_reserved(
    gateway: GatewayProcess, engine: ScriptedEngine, key: str
) -> None:
    """Of ten at once that each may answer with ten thousand tokens one passes on a bucket of a hundred,
    whichever of the two names says so."""
    engine.play = held = held_plain()
    request = as_key(key, chat("hi", **LIMITS_OF_AN_ANSWER[key]), path=CHAT)
    asked = [asyncio.create_task(ask(gateway.port, request)) for _ in range(10)]
    await held.begun.wait()
    await eventually(lambda: sum(task.done() for task in asked) == 9)
    assert len(held.connections) == 1
    held.released.set()
    assert sorted([(await task).status for task in asked]) == [200] + [429] * 9


@pytest.mark.parametrize("key", NOTHING_TO_COUNT)
async def test_nothing_to_count_is_not_nothing(
    gateway: GatewayProcess, engine: ScriptedEngine, key: str
) -> None:
    """A request without anything to read costs at least a token, and not so much that nine others wait."""
    engine.play = held = held_plain()
    path, members = NOTHING_TO_COUNT[key]
    body = {"model": key, "max_tokens": 1, **members}
    request = as_key(key, body, ("x-request-priority", "P2"), path=path)
    asked = [asyncio.create_task(ask(gateway.port, request)) for _ in range(10)]
    await eventually(lambda: len(held.connections) == 10)
    assert (await left_to(gateway, key)).tokens <= 42
    held.released.set()
    assert [(await task).status for task in asked] == [200] * 10


PICTURE = base64.b64encode(bytes(range(256)) * 9000).decode()
"""Three megabytes, as they stand in a body."""
PARTS: dict[str, tuple[dict[str, Any], int]] = {
    "image_url": ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}, 1024),
    "input_image": ({"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}"}, 1024),
    "input_audio": ({"type": "input_audio", "input_audio": {"data": PICTURE, "format": "wav"}}, 512),
}


@pytest.mark.parametrize("kind", PARTS)
async def test_pictures_and_sound_are_not_text(
    gateway: GatewayProcess, engine: ScriptedEngine, kind: str
) -> None:
    """Three megabytes of base64 count as one picture (or sound) beside the text, and pass as they came."""
    engine.play = held = held_plain()
    part, tokens = PARTS[kind]
    content = [{"type": "text", "text": "word " * 80}, part]
    body = json.dumps({"model": kind, "messages": [{"role": "user", "content": content}], "max_tokens": 10})
    async with RawClient(gateway.port) as client:
        await client.send(as_key("pictures", body.encode(), path=CHAT))
        await held.begun.wait()
        assert tokens + 100 + 10 <= await reserved(gateway) <= tokens + 100 + 10 + 50
        held.released.set()
        assert (await client.response()).status == 200
    assert engine.last.body == body.encode()


LOOSE: list[dict[str, Any]] = [
    {"messages": [{"role": "assistant", "content": None, "tool_calls": None}]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "no such part", "of": {"some": ["shape"]}}]}]},
    {"messages": [{"role": "user", "content": [7, None, "text", [[]]]}]},
    {"messages": [None, 7, "text", {}]},
    {"messages": [], "tools": [{"type": "function", "function": {"parameters": {"type": "array"}}}]},
    {"messages": [], "tools": [{"type": "function", "function": None}], "tool_choice": None},
    {"messages": [], "tools": None, "functions": {}, "response_format": None, "stop": None},
]


async def test_loose_shapes_are_the_engines_to_judge(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Nulls and shapes that no schema has are counted somehow, go up as they are, and the engine's verdict
    comes back."""
    verdict = b'{"error":{"message":"content: field required","type":"BadRequestError","param":null}}'
    counted: list[int] = []

    async def judge(connection: ScriptedConnection, request: RecordedRequest) -> None:
        counted.append(await reserved(gateway))
        await plain(verdict, status="422 Unprocessable Content")(connection, request)

    engine.play = judge
    for members in LOOSE:
        body = json.dumps({"model": "loose", **members}).encode()
        response = await ask(gateway.port, as_key("loose", body, path=CHAT))
        assert (response.status, response.body) == (422, verdict)
        assert engine.last.body == body
    assert len(counted) == len(LOOSE)
    assert all(tokens > 256 for tokens in counted)  # the answer alone reserves as many
    assert Left.told_by(await ask(gateway.port, as_key("loose", b"{"))).tokens == 100_000
