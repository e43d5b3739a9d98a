"""What the mock GPU answers beside generations: vectors, scores, rankings, tokens. A real process."""

import asyncio
import base64
import math
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.mock_backend.child import MockGpuProcess
from tests.mock_backend.test_server import CHAT, idle, metrics, until

pytestmark = pytest.mark.anyio

USAGE_KEYS = ["prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details"]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    gpu = await MockGpuProcess.start("seed_32k")
    async with httpx.AsyncClient(base_url=gpu.url, timeout=30, trust_env=False) as client:
        yield client
    await gpu.stop()


async def answer(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json={"model": "mock-gpu"} | body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def vectors(client: httpx.AsyncClient, *texts: str, **body: Any) -> list[list[float]]:
    data = (await answer(client, "/v1/embeddings", input=texts, **body))["data"]
    return [entry["embedding"] for entry in data]


async def test_embeddings_have_the_form_of_vllms(client: httpx.AsyncClient) -> None:
    """One vector of length 1 for each input, in order, and no output in the usage."""
    found = await answer(client, "/v1/embeddings", input=[[1, 2, 3], [4, 5]])
    assert list(found) == ["id", "object", "created", "model", "data", "usage"]
    assert found["id"].startswith("embd-")
    assert (found["object"], found["model"]) == ("list", "mock-gpu")
    assert [list(entry) for entry in found["data"]] == [["index", "object", "embedding"]] * 2
    assert [entry["index"] for entry in found["data"]] == [0, 1]
    assert all(math.hypot(*entry["embedding"]) == pytest.approx(1) for entry in found["data"])
    assert list(found["usage"]) == USAGE_KEYS
    assert list(found["usage"].values()) == [5, 5, 0, None]


async def test_the_same_text_has_the_same_vector_and_a_like_one_is_closer(client: httpx.AsyncClient) -> None:
    one, like, unlike = await vectors(client, "the old cat sat here", "the old dog sat here", "no such thing")
    assert await vectors(client, "the old cat sat here") == [one]
    assert math.dist(one, like) < math.dist(one, unlike)


async def test_a_vector_comes_with_as_many_dimensions_as_asked_and_in_base64(
    client: httpx.AsyncClient,
) -> None:
    """Base64 of little-endian 32-bit floats, as SDKs ask for."""
    (plain,) = await vectors(client, "some words", dimensions=12)
    (packed,) = await vectors(client, "some words", dimensions=12, encoding_format="base64")
    assert len(plain) == 12
    assert struct.unpack("<12f", base64.b64decode(packed)) == pytest.approx(plain)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_texts_with_more_words_in_common_have_a_higher_score(
    client: httpx.AsyncClient, path: str
) -> None:
    found = await answer(client, path, text_1="a red fox", text_2=["a red hen", "a red fox", "blue"])
    assert list(found) == ["id", "object", "created", "model", "data", "usage"]
    assert [list(entry) for entry in found["data"]] == [["index", "object", "score"]] * 3
    assert [entry["score"] for entry in found["data"]] == [0.5, 1.0, 0.0]
    assert list(found["usage"].values()) == [5 + 5 + 4, 14, 0, None]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
async def test_a_ranking_begins_with_the_best_document(client: httpx.AsyncClient, path: str) -> None:
    documents = ["blue", "a red hen", "a red fox"]
    found = await answer(client, path, query="a red fox", documents=documents, top_n=2)
    assert list(found) == ["id", "model", "usage", "results"]
    assert found["results"] == [
        {"index": 2, "document": {"text": "a red fox", "multi_modal": None}, "relevance_score": 1.0},
        {"index": 1, "document": {"text": "a red hen", "multi_modal": None}, "relevance_score": 0.5},
    ]
    assert found["usage"] == {"prompt_tokens": 14, "total_tokens": 14}


async def test_pooling_and_classification(client: httpx.AsyncClient) -> None:
    pooled = await answer(client, "/pooling", input="some words")
    assert [pooled["data"][0]["data"]] == await vectors(client, "some words")
    assert pooled["data"][0]["object"] == "pooling"
    (found,) = (await answer(client, "/classify", input=["some words"]))["data"]
    assert list(found) == ["index", "label", "probs", "num_classes"]
    assert sum(found["probs"]) == pytest.approx(1)
    assert found["label"] == f"LABEL_{found['probs'].index(max(found['probs']))}"


async def test_an_input_costs_its_prefill_and_nothing_more(client: httpx.AsyncClient) -> None:
    """Two prompts of 4000 tokens: 10 + 0.06104 × 8000 = 498 ms, with no token generated."""
    before = await until(client, idle)
    began = time.monotonic()
    await answer(client, "/v1/embeddings", input=[[7] * 4000, [8] * 4000])
    assert time.monotonic() - began > 0.498
    after = await metrics(client)
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed == {"prompt_tokens_total": 8000, "request_success_total:stop": 2}


async def test_a_client_that_leaves_aborts_its_inputs(client: httpx.AsyncClient) -> None:
    """Three prompts of 3.7 s each: a moment after the client has left, none is worked on."""
    before = await until(client, idle)
    began = time.monotonic()
    asking = asyncio.create_task(client.post("/v1/embeddings", json={"input": [[1] * 60_000] * 3}))
    await until(client, lambda samples: samples["kv_cache_usage_perc"] > 0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    after = await until(client, idle)
    assert after["request_success_total:abort"] - before["request_success_total:abort"] == 3
    assert time.monotonic() - began < 11


async def test_tokenize_and_detokenize_have_the_form_of_vllms(client: httpx.AsyncClient) -> None:
    found = await answer(client, "/tokenize", prompt="Hello world")
    assert list(found) == ["count", "max_model_len", "tokens", "token_strs"]
    assert (found["count"], found["max_model_len"], len(found["tokens"])) == (3, 131_072, 3)
    assert found["token_strs"] is None
    assert await answer(client, "/detokenize", tokens=found["tokens"]) == {"prompt": "Hello world"}
    strings = await answer(client, "/tokenize", prompt="Hello world", return_token_strs=True)
    assert strings["token_strs"] == ["Hell", "o wo", "rld"]


async def test_a_conversation_has_as_many_tokens_as_it_is_charged(client: httpx.AsyncClient) -> None:
    """By `/tokenize`, by the Anthropic count, and by a completion's usage."""
    tokenized = await answer(client, "/tokenize", messages=CHAT["messages"])
    counted = await answer(client, "/v1/messages/count_tokens", messages=CHAT["messages"])
    used = (await answer(client, "/v1/chat/completions", max_tokens=1, **CHAT))["usage"]["prompt_tokens"]
    assert tokenized["count"] == counted["input_tokens"] == used
    with_system = await answer(client, "/v1/messages/count_tokens", system="1234", messages=CHAT["messages"])
    assert with_system["input_tokens"] == used + 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/v1/messages/count_tokens", {"messages": 5}),
        ("/v1/embeddings", {"input": []}),
    ],
)
async def test_a_bad_body_is_a_400(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    refused = await client.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, 400)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/rerank"])
async def test_another_model_or_method_is_refused(client: httpx.AsyncClient, path: str) -> None:
    bodies = {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}}
    body = bodies.get(path, {"query": "x", "documents": ["y"]})
    refused = await client.post(path, json=body | {"model": "other"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "NotFoundError")
    assert (await client.get(path)).status_code == 405
