"""Requests that nobody wrote: whatever comes in, there is an answer in the right form, and never a 500.

`FUZZ_EXAMPLES=5000` in the environment makes it so many of each kind instead of some dozens.
"""

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.odd_bodies import MESSAGES, PATHS, RESPONSES, bodies
from tests.support.raw_client import RawClient, RawResponse, check_error, post, request_head
from tests.support.scripted_engine import (
    DONE,
    FINISH,
    ROLE,
    ScriptedEngine,
    plain,
    scripted_engine,
    streaming,
    token,
    usage_event,
)
from tests.support.scripted_upstream import RecordedRequest, ScriptedConnection
from tests.support.typed_streams import check_anthropic_error, message_events, response_events

pytestmark = pytest.mark.anyio

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
KEY = "fuzz-key"
BEARER = ("authorization", f"Bearer {KEY}")
WORDS = ["one", " two"]
STREAMS = {
    MESSAGES: streaming(*message_events(WORDS, input=5, output=2)),
    RESPONSES: streaming(*response_events(WORDS, input=5, output=2)),
}
CHAT_STREAM = streaming(ROLE, *map(token, WORDS), FINISH, usage_event(5, 2), DONE)


def many(usual: int) -> Any:
    """So many examples, or as many as the environment says."""
    return settings(
        max_examples=EXAMPLES or usual,
        deadline=None,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


class Engine:
    """Answers all that comes; `unreadable` is what an engine could not have read, or two could read
    differently."""

    def __init__(self) -> None:
        self.unreadable: list[bytes] = []

    async def __call__(self, connection: ScriptedConnection, request: RecordedRequest) -> None:
        streams = False
        if request.body:
            try:
                body = json.loads(request.body, object_pairs_hook=_without_doubles)
                streams = body.get("stream") is True
            except (ValueError, AttributeError, RecursionError):
                self.unreadable.append(request.raw)
        path = request.target.partition("?")[0]
        script = STREAMS.get(path, CHAT_STREAM) if streams and path.startswith("/v1/") else plain()
        await script(connection, request)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


@pytest.fixture(scope="module")
async def play() -> Engine:
    return Engine()


@pytest.fixture(scope="module")
async def engine(play: Engine) -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        engine.play = play
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    """At the end it must be quiet, and must not have printed a traceback."""
    given = {
        "upstreams": [{"name": "gpu0", "url": engine.url, "models": ["mock-gpu"]}],
        "server": {"body_read_seconds": 1},
        "capacity": {"tokens_per_second": 1, "burst_seconds": 10**9},
    }
    async with running_gateway(given, keys={KEY: {"tenant": "team"}}) as gateway:
        yield gateway
        assert "internal_error" not in (await gateway.metrics()).outcomes()


async def answer_to(gateway: GatewayProcess, request: bytes, method: str = "POST") -> RawResponse:
    """There is one, it is whole, and if the gateway refuses it says so in the form of that API."""
    async with RawClient(gateway.port) as client:
        await client.send(request)
        response = await client.response(method)
    assert response.status < 500, response
    assert response.whole
    if response.status >= 400 and method != "HEAD":
        assert response.header("content-type") == "application/json"
        if response.json.get("type") == "error":
            check_anthropic_error(response.json)
        else:
            assert response.json.keys() == {"error"}
            check_error(response.json["error"])
    return response


@many(200)
@given(st.sampled_from(PATHS).flatmap(lambda path: st.tuples(st.just(path), bodies(path))))
async def test_any_body(gateway: GatewayProcess, play: Engine, given: tuple[str, bytes]) -> None:
    """It is served, or refused as the client's fault; and what two readers could read differently reaches no
    engine."""
    path, body = given
    play.unreadable.clear()
    response = await answer_to(gateway, post(path, body, [BEARER]))
    assert response.status in (200, 400, 404, 413)
    assert play.unreadable == []
    anthropic = response.status >= 400 and response.json.get("type") == "error"
    assert anthropic == (path == MESSAGES and response.status >= 400)


_VALUES = st.binary(max_size=40).map(lambda value: value.replace(b"\r", b"").replace(b"\n", b""))
_NAMES = st.sampled_from(
    [
        *("x-request-priority", "x-request-id", "authorization", "x-api-key", "content-type", "accept"),
        *("x-stainless-timeout", "x-stainless-read-timeout", "x-stainless-retry-count", "traceparent"),
        *("openai-project", "x-llm-d-inference-fairness-id", "cookie", "origin", "te", "connection", "x-odd"),
        *(
            "content-encoding",
            "accept-encoding",
            "range",
            "if-none-match",
            "forwarded",
            "x-http-method-override",
        ),
    ]
)
_PLAUSIBLE = st.sampled_from(
    [b"", b"1", b"-1", b"1e400", b"nan", b"P0", b"batch", b"Bearer " + KEY.encode(), b"gzip", b"*", b"close"]
)
_HEADERS = st.lists(st.tuples(_NAMES, _VALUES | _PLAUSIBLE), max_size=5)
_QUERIES = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="#"), max_size=30)
_METHODS = st.sampled_from(
    ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "QUERY", "odd"]
)
_PLACES = st.sampled_from([*PATHS, "/v1/models", "/healthz", "/readyz", "/openapi.json", "/", "/metrics"]) | (
    _QUERIES.map(lambda path: "/" + path)
)


@many(200)
@given(_METHODS, _PLACES, _QUERIES, _HEADERS, st.booleans())
async def test_any_method_address_and_headers(
    gateway: GatewayProcess, method: str, place: str, query: str, headers: list[Any], with_key: bool
) -> None:
    """Well-framed requests of any method to anywhere with any headers are answered."""
    target = f"{place}?{query}" if query else place
    given = [BEARER, *headers] if with_key else headers
    body = b'{"model":"mock-gpu","prompt":"Hi","input":"Hi","messages":[{"role":"user","content":"Hi"}]}'
    head = request_head(method, target, [*given, ("content-length", str(len(body)))])
    await answer_to(gateway, head + body, method)


@many(100)
@given(
    st.binary(min_size=1, max_size=300)
    | st.binary(max_size=60).map(lambda line: b"POST /v1/chat/completions HTTP/1.1\r\n" + line)
)
async def test_any_bytes(gateway: GatewayProcess, data: bytes) -> None:
    """What is no HTTP is told so, half a request is waited for, and the next client is served in any case."""
    async with RawClient(gateway.port) as client:
        await client.send(data + b"\r\n\r\n")
        client.end_sending()
        received = await client.rest()
    if received:
        assert received.startswith(b"HTTP/1.1 4"), received
        check_error(json.loads(received.partition(b"\r\n\r\n")[2])["error"])
    assert (await answer_to(gateway, request_head("GET", "/healthz"), "GET")).status == 200
