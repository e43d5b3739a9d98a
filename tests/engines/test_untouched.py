"""What passes through the gateway as the engine wrote it: answers, streams, and the engine's own errors."""

import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.engines.engine_process import MODEL, EngineProcess
from tests.engines.traffic import JSON, asks, tiny_chat
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.raw_client import RawResponse, ask, get, post

pytestmark = pytest.mark.anyio

MESSAGES: Any = [{"role": "user", "content": "Say something about dictionaries."}]
TOO_LONG: Any = [{"role": "user", "content": "word and more " * 3000}]
CHAT, COMPLETIONS, RESPONSES, MESSAGES_API = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
TRIES = 10
_OF_THIS_ANSWER = re.compile(
    rb'"(?:id|item_id)":"[^"]*"|"created(?:_at)?":\d+(?:\.\d+)?|,"system_fingerprint":"[^"]*"'
)
"""Ids and times; and the engine's fingerprint, which vLLM writes into the last chunk of a stream. That is the
usage chunk where one is asked for, and it goes when that is taken out."""


@pytest.fixture(scope="module")
async def gateway(vllm: EngineProcess) -> AsyncIterator[GatewayProcess]:
    async with running_gateway({"upstreams": [{"name": "vllm", "url": vllm.url}]}) as gateway:
        yield gateway


async def both_ways(
    gateway: GatewayProcess, engine: EngineProcess, request: bytes, method: str = "POST"
) -> tuple[RawResponse, RawResponse]:
    """The answer of the engine and the one through the gateway, which are the same. Now and then vLLM puts
    two tokens into one piece of a stream, so it may take another try."""
    for _ in range(TRIES):
        direct = await ask(engine.port, request, method)
        through = await ask(gateway.port, request, method)
        if _of_any_answer(through) == _of_any_answer(direct):
            break
    assert _of_any_answer(through) == _of_any_answer(direct) != b""
    assert through.status == direct.status
    assert (direct.whole, through.whole) == (True, True)
    assert through.header("content-type") == direct.header("content-type")
    return direct, through


def _of_any_answer(response: RawResponse) -> bytes:
    """The bytes but for what differs each time."""
    return _OF_THIS_ANSWER.sub(b"", response.body)


@pytest.mark.parametrize(
    ("path", "members"),
    [
        (CHAT, {"max_tokens": 8, "messages": MESSAGES}),
        (COMPLETIONS, {"max_tokens": 8, "prompt": "The dictionary"}),
        (RESPONSES, {"max_output_tokens": 8, "input": "hello there"}),
        (MESSAGES_API, {"max_tokens": 8, "messages": MESSAGES}),
    ],
    ids=["chat", "completions", "responses", "messages"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_answers(
    gateway: GatewayProcess, vllm: EngineProcess, path: str, members: dict[str, Any], stream: bool
) -> None:
    """The same bytes come with and without the gateway, also in a stream out of which its usage was taken."""
    request = post(path, {"model": MODEL, "temperature": 0, "stream": stream, **members}, [JSON])
    direct, _ = await both_ways(gateway, vllm, request)
    assert direct.status == 200


async def test_the_models(gateway: GatewayProcess, vllm: EngineProcess) -> None:
    """With one engine and no keys the list is the engine's own."""
    direct, _ = await both_ways(gateway, vllm, get("/v1/models"), "GET")
    assert [model["id"] for model in direct.json["data"]] == [MODEL]


async def test_a_field_that_nobody_knows(gateway: GatewayProcess) -> None:
    """It is the engine's to say what it takes: this one takes anything."""
    assert (await asks(gateway, "unknown-field", frobnicate=True)).status == 200


@pytest.mark.parametrize(
    ("path", "members", "status", "says"),
    [
        (CHAT, {"model": "nope", "messages": MESSAGES}, 404, "does not exist"),
        (CHAT, {"model": "nope", "messages": MESSAGES, "stream": True}, 404, "does not exist"),
        (CHAT, {"messages": TOO_LONG}, 400, "maximum context length is 2048"),
        (CHAT, {"messages": TOO_LONG, "stream": True}, 400, "maximum context length is 2048"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 5000}, 400, "cannot be greater than max_model_len"),
        (CHAT, {"messages": MESSAGES, "temperature": 9}, 400, "temperature must be in"),
        (CHAT, {"messages": MESSAGES, "top_p": "much"}, 400, "valid number"),
        (CHAT, {"messages": []}, 400, "empty conversation"),
        (CHAT, {"messages": MESSAGES, "n": 2, "temperature": 0}, 400, "n must be 1"),
        (RESPONSES, {"input": "hi", "max_output_tokens": 5000}, 400, "max_output_tokens=5000"),
        (MESSAGES_API, {"messages": MESSAGES, "max_tokens": 5000}, 400, "max_model_len"),
        (MESSAGES_API, {"messages": MESSAGES}, 400, "Field required"),
        ("/v1/embeddings", {"input": "hi"}, 404, "Not Found"),
    ],
)
async def test_errors(
    gateway: GatewayProcess,
    vllm: EngineProcess,
    path: str,
    members: dict[str, Any],
    status: int,
    says: str,
) -> None:
    """Status and body are the engine's, whatever their form, and the request costs nothing."""
    id = f"error-{len(gateway.endings())}"
    request = post(path, {"model": MODEL, **members}, [JSON, ("x-request-id", id)])
    direct, through = await both_ways(gateway, vllm, request)
    assert through.body == direct.body
    assert (through.status, through.header("x-qos-error-source")) == (status, "upstream")
    assert says in through.body.decode()
    line = await gateway.ending(id)
    assert (line["outcome"], line["status"], line["cost"]) == ("upstream_error", status, 0)


@pytest.mark.parametrize(
    "body", [b'{"model":"tiny","messages":[', b"", b"[]", b'{"messages":[]}', b'{"model":"tiny"}']
)
async def test_what_the_gateway_refuses_itself(gateway: GatewayProcess, body: bytes) -> None:
    """What is no JSON object with a model and messages never reaches the engine."""
    response = await ask(gateway.port, post(CHAT, body))
    assert (response.status, response.header("x-qos-error-source")) == (400, "gateway")


async def test_errors_as_the_sdk_raises_them(gateway: GatewayProcess) -> None:
    """The engine's 404 and 400 become the classes that callers catch."""
    async with openai.AsyncOpenAI(base_url=gateway.api + "/v1", api_key="any") as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="nope", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            await client.chat.completions.create(model=MODEL, messages=TOO_LONG)
    assert caught.value.param == "input_tokens"


async def test_errors_say_nothing_against_the_engine(gateway: GatewayProcess) -> None:
    """After many of them in a row it still counts as healthy."""
    for n in range(6):
        assert (await asks(gateway, f"wrong-{n}", temperature=9)).status == 400
    assert (await gateway.metrics()).total("upstream_healthy", upstream="vllm") == 1
    assert (await asks(gateway, "right", **tiny_chat(max_tokens=1))).status == 200
