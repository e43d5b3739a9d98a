"""The mock GPU's answers on `/v1/responses` and `/v1/messages` beside vLLM's. A real process."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.mock_backend.child import MockGpuProcess
from tests.mock_backend.test_server import idle, shape, until

pytestmark = pytest.mark.anyio

RESPONSE = {"model": "mock-gpu", "input": "hello there", "max_output_tokens": 3}
MESSAGE: dict[str, Any] = {
    "model": "mock-gpu",
    "max_tokens": 3,
    "messages": [{"role": "user", "content": "hello there"}],
}
INPUT_TOKENS = 3

# As vLLM sends them, the first of two alike left out.
RESPONSE_OBJECT = (
    '{"id":"resp_8180a6cf61026482","created_at":1796017563,"incomplete_details":%s,"instructions":null,'
    '"metadata":null,"model":"tiny","object":"response","output":%s,"parallel_tool_calls":true,'
    '"temperature":0.0,"tool_choice":"none","tools":[],"top_p":1.0,"background":false,"max_output_tokens":8,'
    '"max_tool_calls":null,"previous_response_id":null,"prompt":null,"reasoning":null,"service_tier":"auto",'
    '"status":"in_progress","text":null,"top_logprobs":null,"truncation":"disabled","usage":%s,"user":null,'
    '"presence_penalty":0.0,"frequency_penalty":0.0,"kv_transfer_params":null,"ec_transfer_params":null,'
    '"input_messages":null,"output_messages":null}'
)
RESPONSE_USAGE = (
    '{"input_tokens":17,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":0,'
    '"input_tokens_per_turn":[],"cached_tokens_per_turn":[]},"output_tokens":8,"output_tokens_details":'
    '{"reasoning_tokens":0,"tool_output_tokens":0,"output_tokens_per_turn":[],'
    '"tool_output_tokens_per_turn":[]},"total_tokens":25}'
)
PART = '{"annotations":[],"text":" t","type":"output_text","logprobs":%s}'
ITEM = '{"id":"msg_8f8dec2a","content":[%s],"role":"assistant","status":"x","type":"message","phase":null}'
WHOLE_ITEM = ITEM % (PART % "null")
BEGUN = RESPONSE_OBJECT % ("null", "[]", "null")
ENDED = RESPONSE_OBJECT % ('{"reason":"max_output_tokens"}', f"[{WHOLE_ITEM}]", RESPONSE_USAGE)
RESPONSE_EVENTS = {
    "response.created": '{"response":' + BEGUN + ',"sequence_number":0,"type":""}',
    "response.in_progress": '{"response":' + BEGUN + ',"sequence_number":1,"type":""}',
    "response.output_item.added": '{"item":%s,"output_index":0,"sequence_number":2,"type":""}' % (ITEM % ""),
    "response.content_part.added": (
        '{"content_index":0,"item_id":"msg_8f","output_index":0,"part":%s,"sequence_number":3,"type":""}'
        % (PART % "[]")
    ),
    "response.output_text.delta": (
        '{"content_index":0,"delta":" di","item_id":"msg_8f","logprobs":[],"output_index":0,'
        '"sequence_number":4,"type":""}'
    ),
    "response.output_text.done": (
        '{"content_index":0,"item_id":"msg_8f","logprobs":[],"output_index":0,"sequence_number":9,'
        '"text":" di","type":""}'
    ),
    "response.content_part.done": (
        '{"content_index":0,"item_id":"msg_8f","output_index":0,"part":%s,"sequence_number":10,"type":""}'
        % (PART % "null")
    ),
    "response.output_item.done": '{"item":'
    + WHOLE_ITEM
    + ',"output_index":0,"sequence_number":11,"type":""}',
    "response.completed": '{"response":' + ENDED + ',"sequence_number":12,"type":""}',
}
MESSAGE_EVENTS = {
    "message_start": (
        '{"type":"","message":{"id":"chatcmpl-b7","type":"message","role":"assistant","content":[],'
        '"model":"tiny","stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":14,"output_tokens":0}}}'
    ),
    "content_block_start": '{"type":"","content_block":{"type":"text","text":""},"index":0}',
    "content_block_delta": '{"type":"","delta":{"type":"text_delta","text":" di"},"index":0}',
    "content_block_stop": '{"type":"","index":0}',
    "message_delta": (
        '{"type":"","delta":{"stop_reason":"max_tokens","stop_sequence":null},'
        '"usage":{"input_tokens":14,"output_tokens":8}}'
    ),
    "message_stop": '{"type":""}',
}
WHOLE_MESSAGE = (
    '{"id":"chatcmpl-b1","type":"message","role":"assistant","content":[{"type":"text","text":"x"}],'
    '"model":"tiny","stop_reason":"max_tokens","usage":{"input_tokens":14,"output_tokens":8}}'
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    gpu = await MockGpuProcess.start("seed_32k")
    async with httpx.AsyncClient(base_url=gpu.url, timeout=30, trust_env=False) as client:
        yield client
    await gpu.stop()


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and data of a stream's events."""
    response = await client.post(path, json=body | {"stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    named = [event.split("\ndata: ") for event in events]
    assert all(name.startswith("event: ") for name, _ in named)
    return [(name.removeprefix("event: "), data) for name, data in named]


@pytest.mark.parametrize(
    ("path", "body", "vllms", "delta"),
    [
        ("/v1/responses", RESPONSE, RESPONSE_EVENTS, "response.output_text.delta"),
        ("/v1/messages", MESSAGE, MESSAGE_EVENTS, "content_block_delta"),
    ],
    ids=["responses", "messages"],
)
async def test_a_stream_has_the_form_of_vllms(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], vllms: dict[str, str], delta: str
) -> None:
    """Each event once, but for a delta for each token; names, members and their order are vLLM's."""
    events = await stream(client, path, body)
    expected = [name for name in vllms for _ in range(3 if name == delta else 1)]
    assert [name for name, _ in events] == expected
    for name, data in events:
        assert json.loads(data)["type"] == name
        assert shape(data) == shape(vllms[name]), name


async def test_a_response_from_created_to_completed(client: httpx.AsyncClient) -> None:
    """Events are numbered, the deltas are the text, one response is meant by all, and usage comes at the
    end."""
    events = [json.loads(data) for _, data in await stream(client, "/v1/responses", RESPONSE)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    first, last = events[0]["response"], events[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == text
    assert (first["id"], first["status"], first["usage"]) == (last["id"], "in_progress", None)
    assert (last["status"], last["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert last["usage"]["input_tokens"] == INPUT_TOKENS
    assert last["usage"]["output_tokens"] == 3
    assert last["usage"]["total_tokens"] == INPUT_TOKENS + 3


async def test_a_whole_response(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/responses", json=RESPONSE)
    assert shape(answer.text) == shape(ENDED)
    assert len(answer.json()["output"][0]["content"][0]["text"]) == 4 * 3
    ended = (await client.post("/v1/responses", json={"input": "x", "min_tokens": 2})).json()
    assert (ended["status"], ended["max_output_tokens"], ended["usage"]["output_tokens"]) == (
        "completed",
        None,
        2,
    )


async def test_a_whole_message(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/messages", json=MESSAGE, headers={"x-request-id": "my-id"})
    assert shape(answer.text) == shape(WHOLE_MESSAGE)
    found = answer.json()
    assert found["id"] == "chatcmpl-my-id"
    assert len(found["content"][0]["text"]) == 4 * 3
    assert found["usage"] == {"input_tokens": INPUT_TOKENS, "output_tokens": 3}
    ended = (await client.post("/v1/messages", json=MESSAGE | {"max_tokens": 9, "min_tokens": 2})).json()
    assert (ended["stop_reason"], ended["usage"]["output_tokens"]) == ("end_turn", 2)


async def test_the_beginning_comes_while_the_prompt_is_read(client: httpx.AsyncClient) -> None:
    """A response is created at once; its first item begins with the first token. A prompt of 16,000 tokens
    takes a second."""
    body = RESPONSE | {"input": "x" * 64_000, "stream": True}
    async with client.stream("POST", "/v1/responses", json=body) as response:
        received = ""
        async for text in response.aiter_text():
            received += text
            if "response.in_progress" in received:
                break
        assert "response.output_item.added" not in received
    await until(client, idle)


async def test_errors(client: httpx.AsyncClient) -> None:
    """On the path of messages they have Anthropic's form."""
    unknown = await client.post("/v1/messages", json=MESSAGE | {"model": "nope"})
    assert unknown.status_code == 404
    assert unknown.json()["type"] == "error"
    assert unknown.json()["error"]["type"] == "NotFoundError"
    unknown = await client.post("/v1/responses", json=RESPONSE | {"model": "nope"})
    assert unknown.json()["error"]["param"] == "model"
