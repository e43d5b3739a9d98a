"""The official client in front of the gateway: what it sends, what it gets, which errors it raises."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio.to_thread
import httpx
import openai
import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.scripted_engine import plain, scripted_engine, whole_answer

pytestmark = pytest.mark.anyio

KEY, NARROW_KEY = "sdk-key-for-everything", "sdk-key-for-one-model"
KEYS = {KEY: {"tenant": "team"}, NARROW_KEY: {"tenant": "guest", "models": ["mock-gpu"]}}
SETTINGS = {"upstreams": [{"name": "gpu0", "url": "mock://h100_llama3_8b", "models": ["mock-gpu", "other"]}]}
MESSAGES: Any = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
async def gateway() -> AsyncIterator[GatewayProcess]:
    async with running_gateway(SETTINGS, keys=KEYS) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with asynchronous(gateway) as client:
        yield client


def asynchronous(gateway: GatewayProcess, key: str = KEY, **options: Any) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(trust_env=False)
    return openai.AsyncOpenAI(base_url=gateway.api + "/v1", api_key=key, http_client=http, **options)


async def synchronously(gateway: GatewayProcess, use: Callable[[openai.OpenAI], Any]) -> Any:
    """Run `use` with the synchronous client, in a thread."""

    def run() -> Any:
        http = httpx.Client(trust_env=False)
        with openai.OpenAI(base_url=gateway.api + "/v1", api_key=KEY, http_client=http) as client:
            return use(client)

    return await anyio.to_thread.run_sync(run)


async def test_a_plain_chat(client: openai.AsyncOpenAI) -> None:
    """A chat completion comes back as the engine wrote it."""
    answer = await client.chat.completions.create(model="mock-gpu", messages=MESSAGES, max_tokens=5)
    assert answer.choices[0].message.content
    assert answer.usage
    assert answer.usage.completion_tokens == 5


async def test_a_streamed_chat(client: openai.AsyncOpenAI) -> None:
    """A stream has a chunk for each token, and no chunk with usage that nobody asked for."""
    stream = await client.chat.completions.create(
        model="mock-gpu", messages=MESSAGES, max_tokens=5, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert len([chunk for chunk in chunks if chunk.choices[0].delta.content]) == 5
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_a_streamed_chat_with_usage(client: openai.AsyncOpenAI) -> None:
    """The usage chunk comes last, and once, for the client that asks for it."""
    stream = await client.chat.completions.create(
        model="mock-gpu",
        messages=MESSAGES,
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5


async def test_the_synchronous_client(gateway: GatewayProcess) -> None:
    """Chat, stream and model list work through the synchronous client as well."""

    def use(client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model="mock-gpu", messages=MESSAGES, max_tokens=3)
        assert answer.choices[0].message.content
        stream = client.chat.completions.create(
            model="mock-gpu", messages=MESSAGES, max_tokens=3, stream=True
        )
        assert sum(bool(chunk.choices[0].delta.content) for chunk in stream) == 3
        assert [model.id for model in client.models.list()] == ["mock-gpu"]

    await synchronously(gateway, use)


async def test_completions(client: openai.AsyncOpenAI) -> None:
    """The older endpoint streams and answers whole."""
    answer = await client.completions.create(model="mock-gpu", prompt="Once upon", max_tokens=4)
    stream = await client.completions.create(model="mock-gpu", prompt="Once upon", max_tokens=4, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == answer.choices[0].text != ""


async def test_several_answers_to_several_prompts(client: openai.AsyncOpenAI) -> None:
    """A list of prompts with `n` brings prompts × n choices."""
    answer = await client.completions.create(model="mock-gpu", prompt=["One", "Two"], n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


async def test_the_list_of_models(client: openai.AsyncOpenAI) -> None:
    """The engine's models are listed, and cost neither tokens nor a place."""
    assert [model.id async for model in client.models.list()] == ["mock-gpu"]


async def test_a_class_is_claimed_with_extra_headers(client: openai.AsyncOpenAI) -> None:
    """`extra_headers` with x-request-priority puts the request into its class, and the answer says so."""
    response = await client.chat.completions.with_raw_response.create(
        model="mock-gpu", messages=MESSAGES, max_tokens=1, extra_headers={"x-request-priority": "realtime"}
    )
    assert response.headers["x-qos-priority"] == "P0"
    assert int(response.headers["x-qos-queue-ms"]) >= 0
    assert response.headers["x-request-id"]


async def test_a_class_is_claimed_with_the_service_tier(client: openai.AsyncOpenAI) -> None:
    """`service_tier="flex"` is P2."""
    response = await client.chat.completions.with_raw_response.create(
        model="mock-gpu", messages=MESSAGES, max_tokens=1, service_tier="flex"
    )
    assert response.headers["x-qos-priority"] == "P2"


async def test_a_wrong_key(gateway: GatewayProcess) -> None:
    """An unknown key is an AuthenticationError, which no SDK retries."""
    async with asynchronous(gateway, "a-key-nobody-knows") as client:
        with pytest.raises(openai.AuthenticationError, match="not known here") as caught:
            await client.chat.completions.create(model="mock-gpu", messages=MESSAGES)
    assert caught.value.code == "invalid_api_key"
    assert caught.value.type == "invalid_request_error"
    assert "a-key-nobody-knows" not in str(caught.value)


async def test_a_model_the_key_may_not_use(gateway: GatewayProcess) -> None:
    """A served model outside the key's list is a PermissionDeniedError that names it."""
    async with asynchronous(gateway, NARROW_KEY) as client:
        with pytest.raises(openai.PermissionDeniedError, match="'other'") as caught:
            await client.chat.completions.create(model="other", messages=MESSAGES)
        assert (caught.value.code, caught.value.param) == ("model_not_allowed", "model")
        answer = await client.chat.completions.create(model="mock-gpu", messages=MESSAGES, max_tokens=1)
    assert answer.choices


async def test_a_model_nobody_serves(client: openai.AsyncOpenAI) -> None:
    """An unknown model is a NotFoundError that names it."""
    with pytest.raises(openai.NotFoundError, match="'gpt-none'") as caught:
        await client.chat.completions.create(model="gpt-none", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_a_wrong_field(client: openai.AsyncOpenAI) -> None:
    """A field of the wrong type is a BadRequestError that names the field."""
    with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
        await client.chat.completions.create(model="mock-gpu", messages=MESSAGES, max_tokens=-1)
    assert caught.value.param == "max_tokens"


async def test_the_engines_own_error(client: openai.AsyncOpenAI) -> None:
    """What the engine refuses comes back in the engine's words."""
    with pytest.raises(openai.BadRequestError, match="cannot be greater than") as caught:
        await client.completions.create(model="mock-gpu", prompt="Hm", max_tokens=200_000)
    assert caught.value.response.headers["x-qos-error-source"] == "upstream"


async def test_a_body_over_the_limit(gateway: GatewayProcess) -> None:
    """Too large a body is told as what it is, not as a lost connection that an SDK would retry."""
    async with asynchronous(gateway, max_retries=0) as client:
        with pytest.raises(openai.APIStatusError, match="larger than") as caught:
            await client.completions.create(model="mock-gpu", prompt="x" * 11_000_000)
    assert caught.value.status_code == 413
    assert caught.value.code == "request_too_large"


async def test_a_refused_request_is_retried_when_it_was_told_to() -> None:
    """The SDK's own retry comes after the advised wait, finds its tokens there, and is counted as one."""
    async with scripted_engine() as engine:
        engine.play = plain(whole_answer(10, 100))
        settings = {
            "upstreams": [{"name": "gpu0", "url": engine.url}],
            "capacity": {"tokens_per_second": 1000, "min_burst_tokens": 0},
            "classes": {"P0": {"max_throttle_seconds": 0}},
        }
        async with running_gateway(settings) as gateway, asynchronous(gateway) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(
                    model="mock-gpu", messages=MESSAGES, extra_headers={"x-request-priority": "P0"}
                )
                assert answer.choices
            page = await gateway.quiet()
            assert page.outcomes() == {"completed": 2, "rejected_rate": page.total("client_retries_total")}
            assert page.total("client_retries_total") >= 1
