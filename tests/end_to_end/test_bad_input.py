"""What a client can get wrong: each fault has its status, names what is wrong, and leaves nothing behind."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.processes import resident_bytes
from tests.support.raw_client import RawClient, ask, chat, get, post, post_chat, request_head
from tests.support.scripted_engine import ScriptedEngine, scripted_engine
from tests.support.scripted_upstream import chunk

pytestmark = pytest.mark.anyio

KEY = "bad-input-key"
BEARER = ("authorization", f"Bearer {KEY}")
CHAT_PATH = "/v1/chat/completions"
LIMIT = 1_000_000
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url, "models": ["mock-gpu"]}],
        "server": {"max_body_bytes": LIMIT, "body_read_seconds": 0.5},
        "capacity": {"tokens_per_second": 1, "burst_seconds": 1_000_000},
    }
    async with running_gateway(settings, keys={KEY: {"tenant": "team"}}) as gateway:
        yield gateway


@pytest.fixture(autouse=True)
async def nothing_is_left_behind(gateway: GatewayProcess) -> AsyncIterator[None]:
    """After each of these tests no place is taken, and no bucket has more than it should."""
    yield
    await eventually(lambda: _idle(gateway))


async def _idle(gateway: GatewayProcess) -> bool:
    upstream = (await gateway.state())["upstreams"]["gpu0"]
    return not (upstream["in_flight_tokens"] or upstream["pending_prefill_tokens"])


async def tokens(gateway: GatewayProcess) -> float:
    """In all buckets together."""
    classes: dict[str, dict[str, float]] = (await gateway.state())["classes"]
    return sum(each["bucket_tokens"] for each in classes.values())


async def refused(
    gateway: GatewayProcess, request: bytes, status: int, code: str | None, outcome: str
) -> dict[str, Any]:
    """The error of a request that is refused at the door, after a look at everything around it."""
    before = await tokens(gateway)
    response = await ask(gateway.port, request)
    assert response.status == status
    assert response.whole
    assert before <= await tokens(gateway) < before + 60, "the refill alone may change a bucket"
    assert response.header("x-qos-outcome") == outcome
    assert response.header("x-qos-error-source") == "gateway"
    assert response.header("x-request-id")
    assert response.header("date")
    assert response.header("server") == "qos-gateway"
    assert response.header("retry-after") is None
    assert response.error["code"] == code
    return response.error


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer wrong")],
        [("authorization", f"Bearer {KEY} more")],
        [("authorization", f"Basic {KEY}")],
        [("authorization", KEY)],
        [("authorization", b"Bearer caf\xe9")],
        [("authorization", "Bearer \N{SNOWMAN}".encode())],
        [("authorization", "Bearer " + "k" * 65536)],
        [("x-api-key", "")],
        [("x-api-key", "wrong")],
        [BEARER, BEARER],
        [BEARER, ("authorization", "Bearer other")],
        [BEARER, ("x-api-key", "other")],
    ],
    ids=range(16),
)
async def test_a_key_that_is_no_key(gateway: GatewayProcess, headers: list[tuple[str, str | bytes]]) -> None:
    """Missing, malformed, doubled, wrong: always 401, in words that do not repeat it."""
    error = await refused(gateway, post_chat(chat(), headers), 401, "invalid_api_key", "unauthorized")
    assert error["type"] == "invalid_request_error"
    assert KEY not in error["message"]


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", f"bearer {KEY}")],
        [("Authorization", f"BEARER   {KEY}")],
        [("x-api-key", KEY)],
        [BEARER, ("x-api-key", KEY)],
    ],
    ids=range(4),
)
async def test_a_key_in_another_form(gateway: GatewayProcess, headers: list[tuple[str, str]]) -> None:
    """The scheme is written in any case, and x-api-key will do as well."""
    assert (await ask(gateway.port, post_chat(chat(), headers))).status == 200


@pytest.mark.parametrize("path", ["/v1/models", CHAT_PATH, "/v1/completions"])
async def test_every_path_wants_a_key(gateway: GatewayProcess, path: str) -> None:
    """No path that leads to an engine is open."""
    request = get(path) if path == "/v1/models" else post(path, chat())
    await refused(gateway, request, 401, "invalid_api_key", "unauthorized")


async def test_no_key_is_told_before_the_body_has_come(gateway: GatewayProcess) -> None:
    """A client without a key need not upload anything to be told."""
    async with RawClient(gateway.port) as client:
        await client.send(request_head("POST", CHAT_PATH, [("content-length", str(200 * MEGABYTE))]))
        assert (await client.response()).status == 401


async def test_no_key_and_waiting_to_be_asked_for_the_body(gateway: GatewayProcess) -> None:
    """A client that waits for `100 Continue` gets its 401 in place of it."""
    headers = [("expect", "100-continue"), ("content-length", "5")]
    async with RawClient(gateway.port) as client:
        await client.send(request_head("POST", CHAT_PATH, headers))
        assert (await client.response()).status == 401
        assert await client.rest() == b""


# ── the priority header ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "values",
    [
        ["P9"],
        ["0"],
        ["-1"],
        ["P0,P2"],
        ["urgent"],
        ["P0 P1"],
        [b"P\xe9"],
        ["\N{FULLWIDTH LATIN CAPITAL LETTER P}0".encode()],
        ["p" * 8192],
        ["P0", "P1"],
        ["P0", "realtime", "batch"],
    ],
    ids=range(11),
)
async def test_a_priority_that_is_none(gateway: GatewayProcess, values: list[str | bytes]) -> None:
    """Unknown and contradicting values are refused by the header's name, and are never the highest class."""
    headers = [BEARER, *(("x-request-priority", value) for value in values)]
    error = await refused(gateway, post_chat(chat(), headers), 400, "invalid_priority", "bad_request")
    assert error["param"] == "x-request-priority"
    assert error["message"].startswith("header x-request-priority: ")
    assert len(error["message"]) < 200


@pytest.mark.parametrize(
    ("value", "granted"),
    [
        ("P0", "P0"),
        (" p0 ", "P0"),
        ("REALTIME", "P0"),
        ("normal", "P1"),
        ("Batch", "P2"),
        ("P2,batch", "P2"),
        ("", "P1"),
    ],
)
async def test_a_priority_that_is_one(gateway: GatewayProcess, value: str, granted: str) -> None:
    """Names in any case and with spaces around; an empty value claims nothing."""
    response = await ask(gateway.port, post_chat(chat(), [BEARER, ("x-request-priority", value)]))
    assert (response.status, response.header("x-qos-priority")) == (200, granted)


# ── the body ─────────────────────────────────────────────────────────────────────────────────────────────

MESSAGES = '"messages":[{"role":"user","content":"hi"}]'
GOOD = f'"model":"mock-gpu",{MESSAGES}'


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ("", None, "invalid_json"),
        ("hello", None, "invalid_json"),
        ("[]", None, "invalid_json"),
        ("null", None, "invalid_json"),
        ('"text"', None, "invalid_json"),
        ("{" + GOOD, None, "invalid_json"),
        ("{" + GOOD + "} {}", None, "invalid_json"),
        ("{" + GOOD + ",}", None, "invalid_json"),
        ("{" + GOOD + ',"temperature":NaN}', None, "invalid_json"),
        ("{" + GOOD + ',"temperature":Infinity}', None, "invalid_json"),
        ("{" + GOOD + ',"temperature":-}', None, "invalid_json"),
        ("{}", "model", "missing_required_parameter"),
        ("{" + MESSAGES + "}", "model", "missing_required_parameter"),
        ('{"model":null,' + MESSAGES + "}", "model", "missing_required_parameter"),
        ('{"model":"",' + MESSAGES + "}", "model", "invalid_value"),
        ('{"model":7,' + MESSAGES + "}", "model", "invalid_value"),
        ('{"model":"mock-gpu"}', "messages", "missing_required_parameter"),
        ('{"model":"mock-gpu","messages":"hi"}', "messages", "invalid_value"),
        ('{"model":"mock-gpu","messages":{}}', "messages", "invalid_value"),
        ("{" + GOOD + ',"stream":"true"}', "stream", "invalid_value"),
        ("{" + GOOD + ',"stream":1}', "stream", "invalid_value"),
        ("{" + GOOD + ',"stream_options":7}', "stream_options", "invalid_value"),
        ("{" + GOOD + ',"stream_options":{"include_usage":"yes"}}', None, "invalid_value"),
        ("{" + GOOD + ',"max_tokens":-1}', "max_tokens", "invalid_value"),
        ("{" + GOOD + ',"max_tokens":-1000000}', "max_tokens", "invalid_value"),
        ("{" + GOOD + ',"max_tokens":1.5}', "max_tokens", "invalid_value"),
        ("{" + GOOD + ',"max_tokens":1e308}', "max_tokens", "invalid_value"),
        ("{" + GOOD + ',"max_tokens":1' + "0" * 30 + "}", "max_tokens", "invalid_value"),
        ("{" + GOOD + ',"max_tokens":"100"}', "max_tokens", "invalid_value"),
        ("{" + GOOD + ',"max_tokens":true}', "max_tokens", "invalid_value"),
        ("{" + GOOD + ',"max_tokens":[]}', "max_tokens", "invalid_value"),
        ("{" + GOOD + ',"max_completion_tokens":"1"}', "max_completion_tokens", "invalid_value"),
        ("{" + GOOD + ',"n":0}', "n", "invalid_value"),
        ("{" + GOOD + ',"n":129}', "n", "invalid_value"),
        ("{" + GOOD + ',"service_tier":7}', "service_tier", "invalid_value"),
        ("{" + GOOD + ',"max_tokens":1,"max_tokens":100000}', "max_tokens", "duplicate_key"),
        ("{" + GOOD + ',"stream":false,"str\\u0065am":true}', "stream", "duplicate_key"),
        ("{" + GOOD + ',"model":"mock-gpu"}', "model", "duplicate_key"),
        ("{" + GOOD + ',"x":' + "[" * 5000 + "]" * 5000 + "}", None, "invalid_json"),
        ("[" * 20000, None, "invalid_json"),
        ('{"a":' * 20000, None, "invalid_json"),
        ("{" + GOOD + ',"x":' + "[" * 20000 + "]" * 20000 + "}", None, "invalid_json"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else None,
)
async def test_a_body_that_is_wrong(gateway: GatewayProcess, body: str, param: str | None, code: str) -> None:
    """400 at once, with the field in `param` and in the message, and nothing reaches the engine."""
    error = await refused(gateway, post_chat(body.encode(), [BEARER]), 400, code, "bad_request")
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
        assert param in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize("body", [b"\xff\xfe{", b'{"model":"\xff","messages":[]}', b"\x00", b"\x1f\x8b\x08"])
async def test_a_body_that_is_no_text(gateway: GatewayProcess, body: bytes) -> None:
    """Bytes that are no UTF-8 are no JSON."""
    await refused(gateway, post_chat(body, [BEARER]), 400, "invalid_json", "bad_request")


async def test_a_model_nobody_serves(gateway: GatewayProcess) -> None:
    """404 that names the model, shortened if it is long, and makes no series of its own."""
    before = (await gateway.metrics()).series
    for n in range(20):
        body = chat() | {"model": f"no-model-{n}" + "x" * 1000 * n}
        error = await refused(gateway, post_chat(body, [BEARER]), 404, "model_not_found", "not_found")
        assert error["param"] == "model"
        assert f"no-model-{n}" in error["message"]
        assert len(error["message"]) < 200
    assert (await gateway.metrics()).series <= before + 2


async def test_a_request_that_can_never_be_served(gateway: GatewayProcess) -> None:
    """More tokens than are allowed is the client's fault and no matter of waiting."""
    body = chat("word " * 150_000)
    response = await ask(gateway.port, post_chat(body, [BEARER]))
    assert response.status == 400
    assert response.error["code"] == "request_too_large"
    assert response.header("retry-after") is None


async def test_a_body_in_a_coding(gateway: GatewayProcess) -> None:
    """A compressed body is refused by the header's name, unread: it might be a bomb."""
    body = gzip.compress(b"0" * 10 * MEGABYTE)
    request = post_chat(body, [BEARER, ("content-encoding", "gzip")])
    error = await refused(gateway, request, 400, "unsupported_content_encoding", "bad_request")
    assert error["param"] == "content-encoding"


async def test_a_length_over_the_limit(gateway: GatewayProcess) -> None:
    """A body that announces to be too large is refused before it comes."""
    async with RawClient(gateway.port) as client:
        headers = [BEARER, ("content-length", str(LIMIT + 1))]
        await client.send(request_head("POST", CHAT_PATH, headers))
        response = await client.response()
    assert (response.status, response.error["code"]) == (413, "request_too_large")
    assert response.header("connection") == "close"


async def test_an_endless_upload(gateway: GatewayProcess) -> None:
    """A body without a length is refused when it has passed the limit, in bounded memory."""
    before = resident_bytes(gateway.pid)
    async with RawClient(gateway.port) as client:
        await client.send(
            request_head("POST", CHAT_PATH, [BEARER, ("transfer-encoding", "chunked")])
            + chunk(b"x" * LIMIT)
            + chunk(b"x")
        )
        assert (await client.response()).status == 413
        for _ in range(64):
            await client.send(chunk(b"x" * MEGABYTE))
    assert resident_bytes(gateway.pid) - before < 16 * MEGABYTE


async def test_a_body_of_exactly_the_limit(gateway: GatewayProcess) -> None:
    """The limit itself is allowed."""
    body = json.dumps(chat()).encode()
    response = await ask(gateway.port, post_chat(body + b" " * (LIMIT - len(body)), [BEARER]))
    assert response.status == 200


async def test_a_slow_upload(gateway: GatewayProcess) -> None:
    """A body that does not come in time is given up, and holds no place meanwhile."""
    async with RawClient(gateway.port) as client:
        await client.send(request_head("POST", CHAT_PATH, [BEARER, ("content-length", "100")]) + b"{")
        response = await client.response()
    assert response.status == 400
    assert response.error["code"] == "request_body_timeout"
    assert response.header("connection") == "close"


# ── addresses and methods ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/chat/completions/",
        "/v2/chat/completions",
        "/sleep",
        "/update_weights",
        "/v1/load_lora_adapter",
        "/metrics",
        "/admin/state",
        "/v1/models/../../sleep",
        "/v1/%2e%2e/sleep",
        "//v1/models",
        "/" + "x" * 5000,
    ],
)
async def test_a_path_that_leads_nowhere(gateway: GatewayProcess, engine: ScriptedEngine, path: str) -> None:
    """Only listed paths exist on the tenants' port, whatever the engine has behind it."""
    asked = len(engine.requests)
    error = await refused(gateway, post(path, chat(), [BEARER]), 404, "not_found", "not_found")
    assert len(error["message"]) < 300
    assert len(engine.requests) == asked


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT_PATH, "POST"),
        ("PUT", CHAT_PATH, "POST"),
        ("DELETE", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
    ],
)
async def test_a_method_that_does_not_fit(
    gateway: GatewayProcess, method: str, path: str, allowed: str
) -> None:
    """405 names the methods that do."""
    response = await ask(gateway.port, request_head(method, path, [BEARER]))
    assert (response.status, response.header("allow")) == (405, allowed)
    assert response.error["code"] == "method_not_allowed"


# ── no HTTP at all ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: abc\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nx: a\x00b\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: g\r\n\r\n",
    ],
    ids=range(11),
)
async def test_what_is_no_http(gateway: GatewayProcess, data: bytes) -> None:
    """Refused in the same shape as everything else, and the connection is closed."""
    async with RawClient(gateway.port) as client:
        await client.send(data)
        response = await client.response()
        assert response.status == 400
        assert response.error["code"] == "invalid_http"
        assert response.header("server") == "qos-gateway"
        assert await client.rest() == b""


async def test_a_head_without_end(gateway: GatewayProcess) -> None:
    """A head that grows and grows is refused before it fills memory."""
    before = resident_bytes(gateway.pid)
    async with RawClient(gateway.port) as client:
        await client.send(b"GET /v1/models HTTP/1.1\r\nhost: g\r\nx-long: ")
        with pytest.raises(ConnectionError):
            await _send_all(client, (b"a" * MEGABYTE for _ in range(256)))
    assert resident_bytes(gateway.pid) - before < 32 * MEGABYTE


async def test_trailers_without_end(gateway: GatewayProcess) -> None:
    """So are headers behind the body."""
    before = resident_bytes(gateway.pid)
    async with RawClient(gateway.port) as client:
        await client.send(request_head("POST", CHAT_PATH, [BEARER, ("transfer-encoding", "chunked")]))
        await client.send(b"2\r\n{}\r\n0\r\n")
        with pytest.raises(ConnectionError):
            await _send_all(client, (b"x-%d: %b\r\n" % (n, b"a" * MEGABYTE) for n in range(256)))
    assert resident_bytes(gateway.pid) - before < 32 * MEGABYTE


async def _send_all(client: RawClient, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        await client.send(piece)


async def test_trailers_are_no_headers(gateway: GatewayProcess) -> None:
    """What stands behind the body does not speak for it."""
    body = json.dumps(chat()).encode()
    async with RawClient(gateway.port) as client:
        await client.send(request_head("POST", CHAT_PATH, [BEARER, ("transfer-encoding", "chunked")]))
        await client.send(chunk(body) + b"0\r\nx-request-priority: P0\r\n\r\n")
        response = await client.response()
    assert (response.status, response.header("x-qos-priority")) == (200, "P1")


async def test_a_crowd_of_bad_clients(gateway: GatewayProcess) -> None:
    """A hundred hostile bodies at once disturb nobody."""
    deep = b"[" * 20000
    requests = [post_chat(deep, [BEARER]) for _ in range(50)]
    requests += [post_chat(b'{"a":' * 5000, [BEARER]) for _ in range(50)]
    answers = await asyncio.gather(*(ask(gateway.port, request) for request in requests))
    assert {answer.status for answer in answers} == {400}
    await eventually(gateway.is_ready)
