"""Which headers cross the gateway, in which direction, and which it sets itself."""

import json
from collections.abc import AsyncIterator

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.raw_client import RawClient, RawResponse, ask, chat, get, post_chat
from tests.support.scripted_engine import (
    DONE,
    FINISH,
    ROLE,
    ScriptedEngine,
    plain,
    raw,
    scripted_engine,
    token,
    whole_answer,
)
from tests.support.scripted_upstream import STREAM_HEAD, answer, chunk

pytestmark = pytest.mark.anyio

KEY, CREDENTIAL = "headers-client-key", "headers-engine-credential"
BEARER = ("authorization", f"Bearer {KEY}")
SECRETS = [
    ("cookie", "session=cookie-of-the-client"),
    ("api-key", "api-key-of-the-client"),
    ("x-goog-api-key", "goog-key-of-the-client"),
    ("x-api-key", KEY),
    ("proxy-authorization", "Basic proxy-secret-of-the-client"),
]


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    """Four models at one engine: with a credential, without, and with a priority in either polarity."""
    settings = {
        "upstreams": [
            {"name": "guarded", "url": engine.url, "models": ["guarded"], "api_key": CREDENTIAL},
            {"name": "open", "url": engine.url, "models": ["open"]},
            {"name": "vllm", "url": engine.url, "models": ["vllm"], "engine_priority": "vllm"},
            {"name": "sglang", "url": engine.url, "models": ["sglang"], "engine_priority": "sglang"},
        ]
    }
    async with running_gateway(settings, keys={KEY: {"tenant": "team"}}) as gateway:
        yield gateway


# ── up ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("model", "credential"), [("guarded", f"Bearer {CREDENTIAL}"), ("open", None)])
@pytest.mark.parametrize("login", [[BEARER], []], ids=["bearer", "x-api-key"])
async def test_the_clients_secrets_stay_here(
    gateway: GatewayProcess,
    engine: ScriptedEngine,
    model: str,
    credential: str | None,
    login: list[tuple[str, str]],
) -> None:
    """The engine sees its own credential, or none, and nothing that the client logs in with anywhere."""
    engine.play = plain()
    for headers in ([*login, *SECRETS], [*login, *SECRETS, ("connection", "authorization, x-api-key")]):
        response = await ask(gateway.port, post_chat(chat() | {"model": model}, headers))
        assert response.status == 200
        assert engine.last.header("authorization") == credential
        assert KEY.encode() not in engine.last.raw
        assert b"of-the-client" not in engine.last.raw


async def test_the_model_list_is_asked_for_with_the_engines_credential(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """Each engine is asked with what it wants, none with the client's key."""
    engine.play = plain(b'{"object":"list","data":[]}')
    asked = len(engine.requests)
    assert (await ask(gateway.port, get("/v1/models", [BEARER]))).status == 200
    credentials = [request.header("authorization") for request in engine.requests[asked:]]
    assert sorted(map(str, credentials)) == [f"Bearer {CREDENTIAL}", "None", "None", "None"]


async def test_what_the_engine_is_told(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Ordinary headers pass; those of the connection, the coding, and the gateway's own do not."""
    engine.play = plain()
    headers = [
        BEARER,
        ("content-type", "text/plain"),
        ("user-agent", "some client"),
        ("openai-organization", "org"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("accept", "text/event-stream"),
        ("accept-encoding", "gzip, br"),
        ("connection", "keep-alive, x-of-this-hop"),
        ("x-of-this-hop", "1"),
        ("keep-alive", "timeout=5"),
        ("te", "trailers"),
        ("x-qos-priority", "P0"),
        ("x-request-priority", "P2"),
        ("x-request-id", "given"),
    ]
    await ask(gateway.port, post_chat(chat() | {"model": "open"}, headers))
    received = engine.last
    for name, value in headers[2:6]:
        assert received.header(name) == value
    assert received.header("host") == engine.url.removeprefix("http://")
    assert received.header("content-type") == "application/json"
    assert received.header("accept-encoding") == "identity"
    assert received.header("content-length") == str(len(received.body))
    names = [name for name, _ in received.headers]
    assert len(names) == len(set(names))
    unwanted = {"connection", "x-of-this-hop", "keep-alive", "te", "x-qos-priority", "x-request-priority"}
    assert unwanted.isdisjoint(names)


async def test_request_ids_are_unique_at_the_engine(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Two clients may give the same id; the engine, which takes it for an identity, gets two."""
    engine.play = plain()
    for _ in range(2):
        response = await ask(gateway.port, post_chat(chat() | {"model": "open"}, [BEARER], id="same"))
        assert response.header("x-request-id") == "same"
    one, other = (request.header("x-request-id") or "" for request in engine.requests[-2:])
    assert one != other
    assert one.startswith("same")
    assert other.startswith("same")


@pytest.mark.parametrize("id", ["x" * 200, "two words", b"caf\xe9"], ids=["long", "spaced", "not ascii"])
async def test_an_id_that_cannot_be_one(
    gateway: GatewayProcess, engine: ScriptedEngine, id: str | bytes
) -> None:
    """An id that might not be repeated safely is replaced."""
    engine.play = plain()
    response = await ask(gateway.port, post_chat(chat() | {"model": "open"}, [BEARER, ("x-request-id", id)]))
    assert (response.header("x-request-id") or "").startswith("req-")


@pytest.mark.parametrize(
    ("model", "ranks"), [("vllm", {"P0": 0, "P1": 1, "P2": 2}), ("sglang", {"P0": 2, "P1": 1, "P2": 0})]
)
async def test_the_class_in_the_engines_polarity(
    gateway: GatewayProcess, engine: ScriptedEngine, model: str, ranks: dict[str, int]
) -> None:
    """Where the operator wants it the class is told to the engine, in place of what the client put there."""
    engine.play = plain()
    for priority, rank in ranks.items():
        for members in ({}, {"priority": 77}):
            body = chat(**members) | {"model": model}
            await ask(gateway.port, post_chat(body, [BEARER, ("x-request-priority", priority)]))
            assert json.loads(engine.last.body) == chat(priority=rank) | {"model": model}


# ── down ─────────────────────────────────────────────────────────────────────────────────────────────────

NOT_PASSED = (
    "Date: Thu, 01 Jan 1970 00:00:00 GMT",
    "Server: engine",
    "Via: 1.1 engine",
    "Set-Cookie: engine=1",
    "Connection: keep-alive, X-Of-This-Hop",
    "X-Of-This-Hop: 1",
    "Keep-Alive: timeout=5",
    "X-Request-Id: engines-own",
    "X-RateLimit-Remaining-Tokens: 77",
    "x-qos-priority: P0",
    "Alt-Svc: h3=':443'",
)
PASSED = ("X-Engine: one", "OpenAI-Processing-Ms: 12", "X-Tabbed: a\tb", "X-Engine-Two: x", "X-Engine-Two: y")
STREAM = b"".join(map(chunk, (ROLE, token("x"), FINISH, DONE))) + chunk(b"")


def _with_headers(response: bytes) -> bytes:
    lines = "".join(f"{line}\r\n" for line in (*NOT_PASSED, *PASSED)).encode()
    return response.replace(b"\r\n", b"\r\n" + lines, 1)


@pytest.mark.parametrize(
    ("response", "stream"),
    [
        (answer(whole_answer(), headers=("content-type: application/json",)), False),
        (STREAM_HEAD + STREAM, True),
        (
            answer(b'{"error":{}}', status="422 Unprocessable", headers=("content-type: application/json",)),
            True,
        ),
    ],
    ids=["plain", "stream", "error"],
)
async def test_what_the_client_is_told(
    gateway: GatewayProcess, engine: ScriptedEngine, response: bytes, stream: bool
) -> None:
    """The engine's own headers pass; each of those that the gateway says itself comes once, from it."""
    engine.play = raw(_with_headers(response))
    received = await ask(
        gateway.port, post_chat(chat(stream=stream) | {"model": "open"}, [BEARER], id="down")
    )
    check_own_headers(received)
    assert received.header("x-request-id") == "down"
    assert received.header("x-qos-priority") == "P1"
    assert received.header("x-ratelimit-remaining-tokens") != "77"
    names = [name for name, _ in received.headers]
    assert {"via", "set-cookie", "x-of-this-hop", "keep-alive", "alt-svc"}.isdisjoint(names)
    for line in PASSED:
        name, _, value = line.partition(": ")
        assert (name.lower(), value) in received.headers


def check_own_headers(response: RawResponse) -> None:
    assert response.header("date") not in (None, "Thu, 01 Jan 1970 00:00:00 GMT")
    assert response.header("server") == "qos-gateway"
    assert response.header("x-request-id")
    assert (response.header("content-length") is None) != (response.header("transfer-encoding") is None)


async def test_limits_are_told(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Every proxied answer says what its class has left, and when it will be full again."""
    engine.play = plain()
    body = chat() | {"model": "open"}
    for priority in ("P0", "P1", "P2"):
        response = await ask(gateway.port, post_chat(body, [BEARER, ("x-request-priority", priority)]))
        for what in ("tokens", "requests"):
            limit = int(response.header(f"x-ratelimit-limit-{what}") or "")
            remaining = int(response.header(f"x-ratelimit-remaining-{what}") or "")
            assert 0 <= remaining <= limit
            reset = response.header(f"x-ratelimit-reset-{what}") or ""
            assert reset.rstrip("ms").replace("m", "").isdigit()
        assert response.header("x-ratelimit-limit-tokens") == "8192"
        assert int(response.header("x-qos-queue-ms") or "") < 1000


async def test_an_answer_to_head_has_no_body(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Nothing follows the headers, so the next answer on the connection is where it should be."""
    engine.play = plain(b'{"object":"list","data":[]}')
    request = get("/v1/models", [BEARER])
    async with RawClient(gateway.port) as client:
        await client.send(request.replace(b"GET", b"HEAD", 1))
        assert (await client.response("HEAD")).status == 200
        await client.send(request)
        assert (await client.response()).json["data"] == []
