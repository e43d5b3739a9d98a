"""The mock GPU as its clients see it: a real process, real sockets."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from gateway.mock_backend.child import MockGpuProcess

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {"model": "mock-gpu", "messages": [{"role": "user", "content": "Say something."}]}
PROMPT_TOKENS = 4

# As vLLM sends them.
ROLE_CHUNK = (
    '{"id":"chatcmpl-af23a099d13e0c2a","object":"chat.completion.chunk","created":1796017556,"model":"tiny",'
    '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
    '"prompt_token_ids":null,"prompt_text":null}'
)
TOKEN_CHUNK = (
    '{"id":"chatcmpl-af23a099d13e0c2a","object":"chat.completion.chunk","created":1796017556,"model":"tiny",'
    '"choices":[{"index":0,"delta":{"content":" di"},"logprobs":null,"finish_reason":null,"token_ids":null}]}'
)
LAST_CHUNK = (
    '{"id":"chatcmpl-af23a099d13e0c2a","object":"chat.completion.chunk","created":1796017556,"model":"tiny",'
    '"choices":[{"index":0,"delta":{"content":" has"},"logprobs":null,"finish_reason":"length",'
    '"stop_reason":null,"token_ids":null}],"system_fingerprint":"vllm-0.32.0-abe85fb1"}'
)
COMPLETION_CHUNK = (
    '{"id":"cmpl-9d93ce599188c5ec","object":"text_completion","created":1796017562,"model":"tiny",'
    '"choices":[{"index":0,"text":" si","logprobs":null,"finish_reason":null,"stop_reason":null,'
    '"prompt_token_ids":null,"token_ids":null}]}'
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gpu() -> AsyncIterator[MockGpuProcess]:
    process = await MockGpuProcess.start("seed_32k")
    yield process
    await process.stop()


@pytest.fixture(scope="module")
async def client(gpu: MockGpuProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gpu.url, timeout=30, trust_env=False) as client:
        yield client


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[str]:
    """The data of a stream's events, read to its end."""
    response = await client.post(path, json=body | {"stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("\n\n")
    events = response.text.split("\n\n")[:-1]
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    """Samples by name; `request_success_total` and `admission_rejections_total` by name and reason."""
    page = (await client.get("/metrics")).text
    samples = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"vllm:(\w+)\{(.*)\} (\S+)", line).groups()  # type: ignore[union-attr]
            assert 'model_name="mock-gpu"' in labels
            assert labels.startswith('engine="0",') == (name != "admission_rejections_total")
            reason = re.search(r'reason="(\w+)"', labels)
            samples[name + (f":{reason[1]}" if reason else "")] = float(value)
    return samples


async def until(client: httpx.AsyncClient, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Reads the metrics until they fulfil the condition, for ten seconds at most."""
    deadline = time.monotonic() + 10
    while True:
        samples = await metrics(client)
        if holds(samples):
            return samples
        assert time.monotonic() < deadline, samples
        await asyncio.sleep(0.01)


def idle(samples: dict[str, float]) -> bool:
    return samples["num_requests_running"] == samples["num_requests_waiting"] == 0


def shape(chunk: str) -> Any:
    """The keys of a chunk in their order, and the values that are fixed."""

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return [(key, of(inner)) for key, inner in value.items()]
        return [of(inner) for inner in value] if isinstance(value, list) else type(value)

    return of(json.loads(chunk))


async def test_a_chat_stream_has_the_form_of_vllms(client: httpx.AsyncClient) -> None:
    """A role chunk, a chunk for each token, the finish reason in the last of them, [DONE]."""
    role, *tokens, last, done = await stream(client, "/v1/chat/completions", CHAT | {"max_tokens": 4})
    assert shape(role) == shape(ROLE_CHUNK)
    assert [shape(token) for token in tokens] == [shape(TOKEN_CHUNK)] * 3
    assert shape(last) == shape(LAST_CHUNK)
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert len({json.loads(chunk)["id"] for chunk in (role, *tokens, last)}) == 1


async def test_a_completion_stream_has_the_form_of_vllms(client: httpx.AsyncClient) -> None:
    body = {"model": "mock-gpu", "prompt": "x", "max_tokens": 3}
    *tokens, last, done = await stream(client, "/v1/completions", body)
    assert [shape(token) for token in tokens] == [shape(COMPLETION_CHUNK)] * 2
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"


async def test_each_event_is_one_write(gpu: MockGpuProcess) -> None:
    """On the wire an event is exactly one chunk of the transfer coding."""
    body = json.dumps(CHAT | {"max_tokens": 3, "stream": True}).encode()
    host, _, port = gpu.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    assert b"transfer-encoding: chunked" in await reader.readuntil(b"\r\n\r\n")
    chunks = []
    while size := int(await reader.readline(), 16):
        chunks.append((await reader.readexactly(size + 2))[:-2])
    writer.close()
    await writer.wait_closed()
    assert len(chunks) == 1 + 3 + 1
    assert all(chunk.startswith(b"data: ") and chunk.count(b"\n\n") == 1 for chunk in chunks)


async def test_usage_comes_in_a_last_chunk_only_when_asked_for(client: httpx.AsyncClient) -> None:
    plain = await stream(client, "/v1/chat/completions", CHAT | {"max_tokens": 2})
    assert not any("usage" in event for event in plain)
    body = CHAT | {"max_tokens": 2, "stream_options": {"include_usage": True}}
    *others, usage, done = await stream(client, "/v1/chat/completions", body)
    assert not any("usage" in event for event in others)
    assert json.loads(usage)["choices"] == []
    counted = json.loads(usage)["usage"]
    assert (counted["prompt_tokens"], counted["completion_tokens"], counted["total_tokens"]) == (4, 2, 6)
    assert done == "[DONE]"


async def test_continuous_usage_counts_along(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await stream(client, "/v1/chat/completions", CHAT | {"max_tokens": 3, "stream_options": options})
    counted = [json.loads(event)["usage"]["completion_tokens"] for event in events[:-1]]
    assert counted == [0, 1, 2, 3, 3]


async def test_n_answers_are_streamed_side_by_side(client: httpx.AsyncClient) -> None:
    body = CHAT | {"n": 2, "max_tokens": 3, "stream_options": {"include_usage": True}}
    *events, usage, _ = await stream(client, "/v1/chat/completions", body)
    choices = [json.loads(event)["choices"][0] for event in events]
    assert [choice["index"] for choice in choices] == [0, 1] * 4
    assert [choice["finish_reason"] for choice in choices] == [None] * 6 + ["length"] * 2
    assert json.loads(usage)["usage"]["completion_tokens"] == 6


async def test_a_whole_chat_answer(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 5, "n": 2})).json()
    assert answer["object"] == "chat.completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(len(choice["message"]["content"]) == 4 * 5 for choice in answer["choices"])
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (PROMPT_TOKENS, 10)


async def test_a_whole_completion_of_a_list_of_prompts(client: httpx.AsyncClient) -> None:
    body = {"model": "mock-gpu", "prompt": [[1, 2, 3], [4]], "max_tokens": 2}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert [choice["text"] for choice in answer["choices"]] == [" the sun"] * 2
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 4, 8)


async def test_the_clients_request_id_is_kept(client: httpx.AsyncClient) -> None:
    headers = {"x-request-id": "my-id-123"}
    response = await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1}, headers=headers)
    assert response.headers["x-request-id"] == "my-id-123"
    assert response.json()["id"] == "chatcmpl-my-id-123"


async def test_an_answer_takes_the_time_the_model_says(client: httpx.AsyncClient) -> None:
    """20 iterations of 10.1 ms or more, however busy this machine is."""
    started = time.monotonic()
    await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 20})
    assert time.monotonic() - started > 19 * 0.0101


async def test_errors_have_vllms_form(client: httpx.AsyncClient) -> None:
    unknown = await client.post("/v1/chat/completions", json=CHAT | {"model": "nope"})
    assert unknown.status_code == 404
    assert unknown.json() == {
        "error": {
            "message": "The model `nope` does not exist. Valid aliases: mock-gpu.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    }
    malformed = await client.post("/v1/chat/completions", content=b'{"model":"mock-gpu", "messages": [')
    assert malformed.status_code == 400
    assert malformed.json()["error"]["type"] == "Bad Request"
    too_long = await client.post("/v1/completions", json={"prompt": "x" * 4 * 131_073, "stream": True})
    assert too_long.status_code == 400
    assert "maximum context length is 131072 tokens" in too_long.json()["error"]["message"]


async def test_unknown_paths_and_wrong_methods(client: httpx.AsyncClient) -> None:
    nowhere = await client.get("/v1/nothing")
    assert (nowhere.status_code, nowhere.text) == (404, '{"detail":"Not Found"}')
    wrong = await client.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


async def test_models_version_and_health(client: httpx.AsyncClient) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("mock-gpu", 131_072)
    assert set((await client.get("/version")).json()) == {"version"}
    health = await client.get("/health")
    assert (health.status_code, health.content) == (200, b"")


async def test_metrics_tell_the_memory_and_count_what_was_done(client: httpx.AsyncClient) -> None:
    page = (await client.get("/metrics")).text
    block_size, blocks = (re.search(rf'{key}="(\d+)"', page) for key in ("block_size", "num_gpu_blocks"))
    assert block_size is not None
    assert blocks is not None
    assert int(block_size[1]) * int(blocks[1]) == 430_000
    before = await until(client, idle)
    await stream(client, "/v1/chat/completions", CHAT | {"max_tokens": 3, "n": 2})
    await client.post("/v1/chat/completions", json=CHAT)
    after = await metrics(client)
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == 3 * PROMPT_TOKENS
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 2 * 3 + 128
    assert after["request_success_total:length"] - before["request_success_total:length"] == 2
    assert after["request_success_total:stop"] - before["request_success_total:stop"] == 1
    assert after["request_success_total:abort"] == before["request_success_total:abort"]


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_aborts_its_sequences(client: httpx.AsyncClient, streamed: bool) -> None:
    """Answers of 50,000 tokens would run for many minutes; a moment after the client has left, none does."""
    before = await until(client, idle)
    body = CHAT | {"max_tokens": 50_000, "n": 3, "stream": streamed}
    asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
    busy = await until(client, lambda samples: samples["num_requests_running"] == 3)
    assert busy["kv_cache_usage_perc"] > 0
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    after = await until(client, idle)
    assert after["kv_cache_usage_perc"] == 0
    assert after["request_success_total:abort"] - before["request_success_total:abort"] == 3


async def test_a_client_that_leaves_during_its_prefill_frees_the_memory_at_once() -> None:
    """Before the 8 s of its prefill are over."""
    gpu = await MockGpuProcess.start("seed_32k")
    try:
        async with httpx.AsyncClient(base_url=gpu.url, timeout=30, trust_env=False) as client:
            started = time.monotonic()
            body = {"prompt": "x" * 4 * 131_000, "max_tokens": 1}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(client, lambda samples: samples["kv_cache_usage_perc"] > 0.3)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            samples = await until(client, idle)
            assert samples["kv_cache_usage_perc"] == 0
            assert samples["request_success_total:abort"] == 1
            assert time.monotonic() - started < 8
    finally:
        await gpu.stop()


async def test_the_queue_follows_the_priority_in_the_body() -> None:
    """With one place, priority -1 overtakes an earlier 5."""
    gpu = await MockGpuProcess.start("seed_32k", policy="priority", max_num_seqs=1)
    try:
        async with httpx.AsyncClient(base_url=gpu.url, timeout=30, trust_env=False) as client:
            finished: list[int] = []

            async def ask(priority: int, tokens: int) -> None:
                await client.post(
                    "/v1/chat/completions", json=CHAT | {"priority": priority, "max_tokens": tokens}
                )
                finished.append(priority)

            blocker = asyncio.create_task(ask(0, 30))
            await until(client, lambda samples: samples["num_requests_running"] == 1)
            late = asyncio.create_task(ask(5, 2))
            await until(client, lambda samples: samples["num_requests_waiting"] == 1)
            urgent = asyncio.create_task(ask(-1, 2))
            await asyncio.gather(blocker, late, urgent)
            assert finished == [0, -1, 5]
    finally:
        await gpu.stop()


# ---------------------------------------------------------------------------- a full queue

QUEUE_FULL = (
    b'{"error":{"message":"The engine is currently busy and cannot accept new requests. '
    b'Please try again later or on a different instance.","type":"Service Unavailable",'
    b'"param":null,"code":503}}'
)
"""As vLLM sends it."""


@pytest.fixture(scope="module")
async def bounded() -> AsyncIterator[httpx.AsyncClient]:
    """A mock GPU that takes two sequences, waiting and running."""
    gpu = await MockGpuProcess.start("seed_32k", max_num_queued_reqs=2)
    async with httpx.AsyncClient(base_url=gpu.url, timeout=30, trust_env=False) as client:
        yield client
    await gpu.stop()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/embeddings", {"input": "word"}),
    ],
)
async def test_a_full_engine_answers_503_as_vllm_does(
    bounded: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    """JSON even for a stream, and no advice when to come back; counted on the metrics page."""
    before = await until(bounded, idle)
    held = asyncio.create_task(
        bounded.post("/v1/chat/completions", json=CHAT | {"max_tokens": 50_000, "n": 2})
    )
    await until(bounded, lambda samples: samples["num_requests_running"] == 2)
    refused = await bounded.post(path, json=body)
    assert (refused.status_code, refused.content) == (503, QUEUE_FULL)
    assert refused.headers["content-type"] == "application/json"
    assert "retry-after" not in refused.headers
    after = await metrics(bounded)
    name = "admission_rejections_total:max_num_queued_reqs"
    assert after[name] - before[name] == 1
    assert after["num_requests_running"] == 2
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held


async def test_each_answer_and_each_input_counts_against_the_queue_limit(bounded: httpx.AsyncClient) -> None:
    """Three do not fit where two may be, even when nobody else is there."""
    await until(bounded, idle)
    three_answers = await bounded.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1, "n": 3})
    three_inputs = await bounded.post("/v1/embeddings", json={"input": ["a", "b", "c"]})
    assert [three_answers.status_code, three_inputs.status_code] == [503, 503]
    two = await bounded.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert two.status_code == 200
