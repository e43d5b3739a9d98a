"""Paths beside chat and completions: what they cost, what they need, and what passes through."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import httpx
import openai
import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, RawResponse, ask, chat, get, post, post_chat, request_head
from tests.support.scripted_engine import (
    DONE,
    ScriptedEngine,
    event,
    held_plain,
    held_stream,
    plain,
    raw,
    scripted_engine,
    streaming,
    token,
    usage_event,
)
from tests.support.scripted_upstream import STREAM_HEAD, answer, chunk
from tests.support.typed_streams import anthropic_error

pytestmark = pytest.mark.anyio

KEY, LIMITED = "a-key", "a-limited-key"
KEYS: dict[str, dict[str, Any]] = {KEY: {"tenant": "t"}, LIMITED: {"tenant": "l", "models": ["other"]}}
BEARER = ("authorization", f"Bearer {KEY}")

READING = ("/v1/embeddings", "/pooling", "/classify", "/v1/score", "/score", "/v1/rerank", "/rerank")
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
HELPING = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
EXTRA = "/v2/extra"
INPUTS = [("embed this", 3), (["embed", "this one"], 4), ([1, 2, 3], 3), ([[1, 2, 3], [4, 5]], 5), ([], 1)]
"""What may be embedded or completed, and what is reserved for it: 4 bytes are a token, ids are counted."""


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    """One place, a refill that hardly shows, and a path that the operator allows besides."""
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url, "max_in_flight": 1}],
        "server": {"max_body_bytes": 20_000},
        "capacity": {"tokens_per_second": 1, "burst_seconds": 1e6, "max_request_tokens": 2000},
        "scheduling": {"deadline_drop": False},
        "paths": [EXTRA],
    }
    async with running_gateway(settings, keys=KEYS) as gateway:
        yield gateway


def embedding(input: object, **members: Any) -> dict[str, Any]:
    return {"model": "m", "input": input, **members}


_numbers = count()


def unknown_model() -> str:
    """One of which no bytes per token have been learned."""
    return f"unknown-{next(_numbers)}"


def used(**usage: int) -> bytes:
    """An engine's answer that says what it has used."""
    return json.dumps({"object": "list", "data": [], "usage": usage}).encode()


async def send(
    gateway: GatewayProcess, path: str, body: bytes | dict[str, Any], id: str, *headers: tuple[str, str]
) -> RawResponse:
    return await ask(gateway.port, post(path, body, [BEARER, ("x-request-id", id), *headers]))


# ── what is only read ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", READING)
async def test_what_is_read_costs_its_input(
    gateway: GatewayProcess, engine: ScriptedEngine, path: str
) -> None:
    """Charged is exactly what the engine says it has read, and nothing is set aside for an answer. The body
    goes up as it came, even where it asks for a stream; the answer comes back as it is."""
    said = used(prompt_tokens=321, total_tokens=321, completion_tokens=0)
    engine.play = plain(said)
    body = b'{"model" : "m", "input": "x", "query": "x", "documents": ["x"], "stream": true, "new": 1e2}'
    id = "reads" + path
    response = await send(gateway, path + "?truncate=1", body, id)
    assert (response.status, response.body) == (200, said)
    assert (engine.last.target, engine.last.body) == (path + "?truncate=1", body)
    ending = await gateway.ending(id)
    assert (ending["outcome"], ending["cost"], ending["streaming"]) == ("completed", 321, False)
    assert (ending["input_tokens"], ending["output_tokens"], ending["ttft_ms"]) == (321, 0, None)


async def test_the_bucket_pays_for_embeddings(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """P2's level falls by the tokens of the engine's answer, whatever was reserved."""
    engine.play = plain(used(prompt_tokens=50, total_tokens=50))
    before, began = await gateway.bucket("P2"), asyncio.get_running_loop().time()
    assert (await send(gateway, "/v1/embeddings", embedding("x" * 400), "pays")).status == 200
    await gateway.quiet()
    refilled = asyncio.get_running_loop().time() - began + 1
    assert before - 50 <= await gateway.bucket("P2") <= before - 50 + refilled


@pytest.mark.parametrize(
    ("path", "claim", "granted"),
    [
        ("/v1/embeddings", None, "P2"),
        ("/v1/embeddings", "P0", "P0"),
        ("/v1/rerank", None, "P1"),
        ("/score", "batch", "P2"),
    ],
)
async def test_embeddings_are_batch_work_unless_they_say_otherwise(
    gateway: GatewayProcess, engine: ScriptedEngine, path: str, claim: str | None, granted: str
) -> None:
    """The route's default holds for embeddings alone; a claim stands above it."""
    engine.play = plain(used(prompt_tokens=1))
    headers = [("x-request-priority", claim)] if claim else []
    id = f"class-{path}-{claim}"
    response = await send(gateway, path, {"model": "m", "query": "x", "documents": ["y"]}, id, *headers)
    assert response.header("x-qos-priority") == granted
    assert (await gateway.ending(id))["priority"] == granted


async def reserved(gateway: GatewayProcess, engine: ScriptedEngine, path: str, body: dict[str, Any]) -> int:
    """The tokens that are held at the engine while such a request runs."""
    engine.play = held = held_plain()
    body = {"model": unknown_model()} | body
    asking = asyncio.create_task(send(gateway, path, body, "reserves"))
    async with asyncio.timeout(10):
        await held.begun.wait()
    upstream = (await gateway.state())["upstreams"]["gpu0"]
    held.released.set()
    assert (await asking).status == 200
    assert json.loads(engine.last.body) == body
    await gateway.quiet()
    tokens: int = upstream["in_flight_tokens"]
    return tokens


@pytest.mark.parametrize(("input", "tokens"), INPUTS, ids=range(5))
async def test_the_forms_of_an_input(
    gateway: GatewayProcess, engine: ScriptedEngine, input: object, tokens: int
) -> None:
    """Text, texts, token ids or lists of those: a token for 4 bytes, and ids are counted exactly. An empty
    list is the engine's to judge."""
    assert await reserved(gateway, engine, "/v1/embeddings", {"input": input}) == tokens
    answers = max(1, len(input)) if isinstance(input, list) and input and not isinstance(input[0], int) else 1
    completion = {"prompt": input, "max_tokens": 2}
    assert await reserved(gateway, engine, "/v1/completions", completion) == tokens + 2 * answers


def _text(index: int, text: str, finish_reason: str | None = None) -> bytes:
    return event({"id": "c", "choices": [{"index": index, "text": text, "finish_reason": finish_reason}]})


@pytest.mark.parametrize("input", [input for input, _ in INPUTS], ids=range(5))
async def test_the_stream_of_a_completion(
    gateway: GatewayProcess, engine: ScriptedEngine, request: pytest.FixtureRequest, input: object
) -> None:
    """Whatever form the prompt has it goes up as it is; text is a token, usage is asked for and taken out
    again, and the charge is exact."""
    texts = [_text(0, word) for word in ("a", " b", " c", " d", " e")]
    finish = _text(0, "", "length")
    engine.play = streaming(*texts, finish, usage_event(4, 5), DONE)
    id = f"completes-{request.node.callspec.id}"
    body = {"model": unknown_model(), "prompt": input, "stream": True}
    response = await send(gateway, "/v1/completions", body, id)
    assert response.body == b"".join([*texts, finish, DONE])
    assert json.loads(engine.last.body) == body | {"stream_options": {"include_usage": True}}
    line = await gateway.ending(id)
    assert (line["outcome"], line["output_tokens"], line["cost"]) == ("completed", 5, 4 + 4 * 5)
    assert line["ttft_ms"] is not None
    assert line["tpot_ms"] is not None


@pytest.mark.parametrize("all_finish", [True, False], ids=["all", "one"])
async def test_a_completion_of_several_prompts(
    gateway: GatewayProcess, engine: ScriptedEngine, all_finish: bool
) -> None:
    """Their texts come mixed, each counts, and without an end mark the stream is whole only when every one
    of them has its finish reason."""
    events = [_text(0, "a"), _text(1, "b"), _text(0, "", "stop"), _text(1, "c")]
    if all_finish:
        events.append(_text(1, "", "length"))
    engine.play = streaming(*events)
    body = {"model": unknown_model(), "prompt": [[1, 2, 3], [4, 5]], "stream": True}
    id = f"several-{all_finish}"
    response = await send(gateway, "/v1/completions", body, id)
    assert response.body.startswith(b"".join(events))
    assert response.whole == all_finish
    line = await gateway.ending(id)
    assert line["outcome"] == ("completed" if all_finish else "upstream_aborted")
    assert (line["input_tokens"], line["output_tokens"]) == (5, 3)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": "12345678", "documents": ["1234", {"text": "1234"}, "1234"]}),
        ("/v1/score", {"text_1": "12345678", "text_2": ["1234", "1234", "1234"]}),
        ("/score", {"queries": ["12345678"] * 3, "items": ["1234"] * 3}),
    ],
)
async def test_a_query_is_read_with_each_text(
    gateway: GatewayProcess, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    """Three pairs of 2 and 1 tokens are 9."""
    assert await reserved(gateway, engine, path, body) == 9


async def test_an_input_that_can_never_be_read(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """A 400 that names the field where there is one name for it."""
    asked = len(engine.requests)
    for path, body, param in (
        ("/v1/embeddings", {"input": [7] * 2001}, "input"),
        ("/rerank", {"query": "x" * 400, "documents": ["y"] * 20}, "documents"),
        (EXTRA, {"anything": "x" * 15_000}, None),
    ):
        response = await send(gateway, path, {"model": unknown_model()} | body, "never")
        assert (response.status, response.error["code"]) == (400, "request_too_large")
        assert response.error["param"] == param
    assert len(engine.requests) == asked


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b'{"input": "x"}', "model", "missing_required_parameter"),
        (b'{"model": "m", "input": "x", "input": "y"}', "input", "duplicate_key"),
        (b'{"model": "m", "input": ["x", ]}', None, "invalid_json"),
    ],
)
async def test_a_body_that_cannot_be_read(
    gateway: GatewayProcess, body: bytes, param: str | None, code: str
) -> None:
    """As for chat: what is paid must be understood."""
    response = await send(gateway, "/v1/embeddings", body, "wrong")
    assert (response.status, response.error["param"], response.error["code"]) == (400, param, code)


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b'[{"index": 0, "score": 0.5}]', 200),
        ("application/octet-stream", b"\x00\x01\xff", 200),
        ("application/json", b'{"data": [', 502),
    ],
)
async def test_answers_of_other_forms(
    gateway: GatewayProcess, engine: ScriptedEngine, content_type: str, body: bytes, status: int
) -> None:
    """Some engines answer with a list, or with the vectors as bytes: that passes and the estimate stands.
    What is broken is no answer."""
    engine.play = raw(answer(body, headers=(f"content-type: {content_type}",)))
    id = f"form-{len(body)}"
    question = {"model": unknown_model(), "query": "x" * 8, "documents": ["y"]}
    response = await send(gateway, "/v1/rerank", question, id)
    assert response.status == status
    ending = await gateway.ending(id)
    if status == 200:
        assert (response.body, response.header("content-type")) == (body, content_type)
        assert (ending["outcome"], ending["cost"]) == ("completed", 3)
    else:
        assert (ending["outcome"], ending["cost"]) == ("upstream_refused", 0)


# ── what needs neither bucket nor lease ──────────────────────────────────────────────────────────────────


async def test_help_is_given_while_nothing_else_can_go() -> None:
    """The only place is held by a stream and the bucket is in debt: a chat request is refused, embeddings
    wait, and tokens and models are told at once, without a token or a place."""
    async with scripted_engine() as engine:
        settings = {
            "upstreams": [{"name": "gpu0", "url": engine.url, "max_in_flight": 1}],
            "capacity": {"tokens_per_second": 1, "burst_seconds": 100},
            "scheduling": {"deadline_drop": False},
        }
        async with running_gateway(settings) as gateway, RawClient(gateway.port) as streamer:
            engine.play = held = held_stream(token("one"))
            await streamer.send(post_chat(chat(stream=True)))
            await streamer.until(b"one")
            level = await gateway.bucket("P1")
            assert level < 0
            engine.play = plain(b'{"count":1}')
            assert (await ask(gateway.port, post_chat(chat()))).status == 429
            waiting = asyncio.create_task(ask(gateway.port, post("/v1/embeddings", embedding("x"))))
            await eventually(lambda: _has_queued(gateway, 1))
            for path in HELPING:
                body = b'{ "model":"m","prompt" : "x", "tokens":[1.0], "priority": -5}'
                response = await ask(gateway.port, post(path + "?a=%20b&c", body))
                assert (response.status, response.body) == (200, b'{"count":1}')
                assert (engine.last.method, engine.last.target) == ("POST", path + "?a=%20b&c")
                assert engine.last.body == body
                assert response.header("x-qos-queue-ms") == "0"
            for method in ("GET", "HEAD"):
                response = await _asked(gateway, method, "/v1/models?x=1")
                assert (response.status, response.body) == (200, b'{"count":1}' if method == "GET" else b"")
                assert (engine.last.target, engine.last.body) == ("/v1/models?x=1", b"")
            assert await gateway.in_flight() == 1
            assert await gateway.queued() == 1
            assert await gateway.bucket("P1") >= level
            assert not waiting.done()
            held.released.set()
            await streamer.until(b"[DONE]")
            assert (await waiting).status == 200


async def _has_queued(gateway: GatewayProcess, count: int) -> bool:
    return await gateway.queued() == count


async def _asked(gateway: GatewayProcess, method: str, path: str) -> RawResponse:
    return await ask(gateway.port, request_head(method, path, [BEARER]), method)


@pytest.mark.parametrize("path", [*READING, *HELPING, EXTRA])
async def test_every_path_wants_a_key(gateway: GatewayProcess, engine: ScriptedEngine, path: str) -> None:
    """Without one, or with a wrong one, nothing reaches the engine."""
    asked = len(engine.requests)
    for headers in ([], [("authorization", "Bearer other")]):
        response = await ask(gateway.port, post(path, embedding("x"), headers))
        assert (response.status, response.header("x-qos-outcome")) == (401, "unauthorized")
        if path.startswith("/v1/messages"):
            assert anthropic_error(response)["type"] == "authentication_error"
        else:
            assert response.error["code"] == "invalid_api_key"
    assert (await ask(gateway.port, get(path))).status in (401, 405)
    assert len(engine.requests) == asked


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_the_model_list_wants_a_key_and_nothing_else(
    gateway: GatewayProcess, engine: ScriptedEngine, method: str
) -> None:
    """With it, it is the engine's own page, query and all."""
    page = b'{"object":"list","data":[{"id":"m"}]}'
    engine.play = plain(page)
    asked = len(engine.requests)
    for headers in ([], [("authorization", "Bearer other")]):
        response = await ask(gateway.port, request_head(method, "/v1/models", headers), method)
        assert (response.status, response.header("x-qos-outcome")) == (401, "unauthorized")
    assert len(engine.requests) == asked
    response = await _asked(gateway, method, "/v1/models?after=a%2Fb")
    assert (response.status, response.body) == (200, page if method == "GET" else b"")
    assert response.header("content-length") == str(len(page))
    assert engine.last.target == "/v1/models?after=a%2Fb"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 200, None),
        (b'{"prompt": "x"}', 200, None),
        (b'{"model": null, "messages": 5, "stream": "yes", "max_tokens": -1}', 200, None),
        (b'{"model": "", "tokens": []}', 200, None),
        (b'{"prompt": "x", "prompt": "y"}', 400, "duplicate_key"),
        (b'{"model": 5}', 400, "invalid_value"),
        (b'{"prompt": "\xff"}', 400, "invalid_json"),
        (b"[" * 5000, 400, "invalid_json"),
        (b'"x"', 400, "invalid_json"),
        (b'{"prompt": "' + b"x" * 20_000 + b'"}', 413, "request_too_large"),
    ],
    ids=range(10),
)
async def test_what_a_request_for_help_may_say(
    gateway: GatewayProcess, engine: ScriptedEngine, body: bytes, status: int, code: str | None
) -> None:
    """Whatever the engine likes. Only what two readers could read differently stays here, and what is too
    large."""
    engine.play = plain(b'{"count":1}')
    asked = len(engine.requests)
    response = await send(gateway, "/tokenize", body, "says")
    assert response.status == status
    if code is None:
        assert engine.last.body == body
    else:
        assert response.error["code"] == code
        assert len(engine.requests) == asked


async def test_hints_and_secrets_do_not_go_along(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """The headers of a request for help are treated as those of any other."""
    engine.play = plain(b'{"count":1}')
    hints = [("x-vllm-priority", "-5"), ("x-data-parallel-rank", "0"), ("x-request-priority", "P0")]
    await send(gateway, "/tokenize", {"prompt": "x"}, "hints", *hints, ("cookie", "a=b"), ("x-own", "yes"))
    for name in ("x-vllm-priority", "x-data-parallel-rank", "x-request-priority", "cookie", "authorization"):
        assert engine.last.header(name) is None
    assert engine.last.header("x-own") == "yes"
    assert engine.last.header("content-type") == "application/json"


async def test_the_engines_word_on_a_request_for_help(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """Status and body pass, be they what they may; each is recorded once."""
    refusal = b'{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}'
    engine.play = plain(refusal, status="400 Bad Request")
    response = await send(gateway, "/tokenize", {"prompt": "x"}, "no")
    assert (response.status, response.body) == (400, refusal)
    assert response.header("x-qos-error-source") == "upstream"
    engine.play = raw(answer(b"not json", headers=("content-type: text/plain",)))
    response = await send(gateway, "/detokenize", {"tokens": [1]}, "odd")
    assert (response.status, response.body) == (200, b"not json")
    engine.play = raw(b"", close=True)
    response = await send(gateway, "/tokenize", {"prompt": "x"}, "none")
    assert (response.status, response.error["code"]) == (502, "upstream_unavailable")
    endings = [await gateway.ending(id) for id in ("no", "odd", "none")]
    assert [ending["outcome"] for ending in endings] == ["upstream_error", "completed", "upstream_refused"]
    assert [(ending["cost"], ending["tenant"]) for ending in endings] == [(0, "t")] * 3
    assert [ending["status"] for ending in endings] == [400, 200, 502]


async def test_a_client_that_leaves_takes_its_question_along(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """The engine's connection is closed at once."""
    engine.play = held = held_plain()
    async with RawClient(gateway.port) as client:
        await client.send(post("/tokenize", {"prompt": "x"}, [BEARER, ("x-request-id", "leaves")]))
        async with asyncio.timeout(10):
            await held.begun.wait()
    async with asyncio.timeout(10):
        await held.connections[0].peer_closed.wait()
    assert (await gateway.ending("leaves"))["outcome"] == "client_gone_queued"


async def test_a_model_that_the_key_may_not_use(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Neither for what is paid nor for help; without a model there is nothing to forbid."""
    engine.play = plain(b'{"count":1}')
    limited = [("authorization", f"Bearer {LIMITED}")]
    for path, body, status in (
        ("/v1/embeddings", embedding("x"), 403),
        ("/tokenize", {"model": "m", "prompt": "x"}, 403),
        ("/tokenize", {"model": "other", "prompt": "x"}, 200),
        ("/tokenize", {"prompt": "x"}, 200),
    ):
        assert (await ask(gateway.port, post(path, body, limited))).status == status


async def test_the_engine_that_serves_the_model_is_asked() -> None:
    """A model nobody serves is 404; one whose engine is down, or none when all are, is 503."""
    async with scripted_engine() as one, scripted_engine() as other:
        upstreams = [
            {"name": name, "url": engine.url, "models": [name], "health": {"interval_seconds": 0.1}}
            for name, engine in (("one", one), ("other", other))
        ]
        one.play, other.play = plain(b'{"count":1}'), plain(b'{"count":2}')
        async with running_gateway({"upstreams": upstreams}) as gateway:

            async def told(**body: Any) -> tuple[int, bytes]:
                response = await ask(gateway.port, post("/tokenize", body))
                return response.status, response.body if response.status == 200 else b""

            assert await told(model="one", prompt="x") == (200, b'{"count":1}')
            assert await told(model="other", prompt="x") == (200, b'{"count":2}')
            assert await told(model="third", prompt="x") == (404, b"")
            one.healthy = False
            await eventually(lambda: _is_down(gateway, "one"))
            assert await told(model="one", prompt="x") == (503, b"")
            assert await told(prompt="x") == (200, b'{"count":2}')
            other.healthy = False
            await eventually(lambda: _is_down(gateway, "other"))
            response = await ask(gateway.port, post("/tokenize", {"prompt": "x"}))
            assert (response.status, response.header("x-qos-outcome")) == (503, "rejected_no_upstream")
            assert response.header("retry-after") == "1"


async def _is_down(gateway: GatewayProcess, upstream: str) -> bool:
    return (await gateway.metrics()).total("upstream_healthy", upstream=upstream) == 0


# ── paths that an operator allows ────────────────────────────────────────────────────────────────────────


async def test_an_allowed_path_is_a_generation(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Its body goes up as it came, its answer is settled by what the engine says it has used."""
    engine.play = plain(used(prompt_tokens=7, completion_tokens=3, total_tokens=10))
    body = b'{"model":"m", "text": "x", "max_new_tokens": 5}'
    assert (await send(gateway, EXTRA, body, "extra")).status == 200
    assert (engine.last.target, engine.last.body) == (EXTRA, body)
    ending = await gateway.ending("extra")
    assert (ending["priority"], ending["cost"]) == ("P1", 7 + 4 * 3)


async def test_the_stream_of_an_allowed_path(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """It is passed on in whatever form it has, nothing is added to the body, and a stream that ends in order
    has ended well; one that breaks off has not."""
    events = [b'data: {"text":"one"}\n\n', b"event: x\ndata: two\n\n"]
    body = b'{"model":"m","stream":true,"text":"x"}'
    for id, end, outcome in (
        ("whole", b"0\r\n\r\n", "completed"),
        ("broken", b"", "upstream_aborted"),
    ):
        engine.play = raw(STREAM_HEAD + b"".join(map(chunk, events)) + end, close=not end)
        response = await send(gateway, EXTRA, body, id)
        assert response.status == 200
        assert response.body.startswith(b"".join(events))
        assert response.whole == (outcome == "completed")
        assert engine.last.body == body
        assert (await gateway.ending(id))["outcome"] == outcome


async def test_a_look_at_an_allowed_path_is_free(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """GET and HEAD need a key and nothing more; other methods are not for it."""
    engine.play = plain(b'{"count":1}')
    for method, body in (("GET", b'{"count":1}'), ("HEAD", b"")):
        response = await _asked(gateway, method, EXTRA + "?x=1")
        assert (response.status, response.body) == (200, body)
        assert response.header("content-length") == "11"
        assert (engine.last.method, engine.last.target) == ("GET", EXTRA + "?x=1")
    response = await _asked(gateway, "DELETE", EXTRA)
    assert (response.status, response.header("allow")) == (405, "GET, HEAD, POST")


@pytest.mark.parametrize(
    "path",
    [
        "/v2/extra/",
        "/v1/tokenize",
        "/v2/rerank",
        "/v1/responses/resp_1",
        "/v1/responses/",
        "/v1/audio/voices",
    ],
)
async def test_what_was_not_allowed_is_not_there(
    gateway: GatewayProcess, engine: ScriptedEngine, path: str
) -> None:
    """One path is one path."""
    asked = len(engine.requests)
    response = await send(gateway, path, embedding("x"), "nowhere")
    assert (response.status, response.error["code"]) == (404, "not_found")
    assert len(engine.requests) == asked


async def test_the_openapi_page_lists_the_paths(gateway: GatewayProcess) -> None:
    """With their methods, and a priority and a 429 where something is paid."""
    paths = json.loads((await ask(gateway.port, get("/openapi.json"), "GET")).body)["paths"]
    for path in (*READING, *HELPING, *GENERATING):
        assert list(paths[path]) == ["post"]
        assert paths[path]["post"]["summary"]
        assert ("429" in paths[path]["post"]["responses"]) == (path not in HELPING)
    assert list(paths["/v1/models"]) == ["get", "head"]
    assert list(paths[EXTRA]) == ["get", "head", "post"]
    assert "parameters" in paths[EXTRA]["post"]
    assert "parameters" not in paths[EXTRA]["get"]


# ── the whole of it, with the mock GPU ───────────────────────────────────────────────────────────────────


async def test_the_mock_gpu_and_the_sdk() -> None:
    """Embeddings through the OpenAI SDK cost what a tokenizer says they should."""
    async with (
        running_gateway({"upstreams": [{"name": "gpu0", "url": "mock://seed_32k"}]}) as gateway,
        httpx.AsyncClient(trust_env=False, base_url=gateway.api) as http,
    ):
        client = openai.AsyncOpenAI(base_url=gateway.api + "/v1", api_key="any", http_client=http)
        texts = ["a first text", "and another one"]
        counts = [(await http.post("/tokenize", json={"prompt": t})).json()["count"] for t in texts]
        found = await client.embeddings.create(model="mock-gpu", input=texts)
        assert [len(each.embedding) for each in found.data] == [8, 8]
        assert found.usage.prompt_tokens == sum(counts) == 7
        asked = {"model": "mock-gpu", "query": "another one", "documents": texts}
        ranked = (await http.post("/v1/rerank", json=asked)).json()
        assert [result["index"] for result in ranked["results"]] == [1, 0]
        await gateway.quiet()
        embedded, ranking = gateway.endings()[-2:]
        assert (embedded["priority"], embedded["cost"], embedded["output_tokens"]) == ("P2", 7, 0)
        assert (ranking["priority"], ranking["cost"]) == ("P1", ranked["usage"]["prompt_tokens"])
