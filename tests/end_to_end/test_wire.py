"""HTTP as clients speak it: curl, keep-alive, pipelining, uploads in pieces."""

import json
from collections.abc import AsyncIterator

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.raw_client import RawClient, ask, chat, get, post_chat, request_head
from tests.support.scripted_upstream import chunk

pytestmark = pytest.mark.anyio

FORM = ("content-type", "application/x-www-form-urlencoded")
JSON = ("content-type", "application/json")
CHAT_PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
async def gateway() -> AsyncIterator[GatewayProcess]:
    """The gateway without a configuration of its own: embedded mock GPU, no keys."""
    async with running_gateway({}) as gateway:
        yield gateway


async def test_the_first_curl_of_the_readme(gateway: GatewayProcess) -> None:
    """A streamed chat as curl sends it ends in [DONE], says its class, and shows in the metrics."""
    before = await gateway.metrics()
    body = b'{"model":"mock-gpu","stream":true,"messages":[{"role":"user","content":"hi"}],"max_tokens":8}'
    headers = [("user-agent", "curl/8.5.0"), ("accept", "*/*"), ("x-request-priority", "P0"), FORM]
    response = await ask(gateway.port, post_chat(body, headers, id="first-curl"))
    assert response.status == 200
    assert response.whole
    assert response.header("content-type") == "text/event-stream; charset=utf-8"
    assert response.header("x-qos-priority") == "P0"
    assert response.header("x-request-id") == "first-curl"
    assert response.body.endswith(b"data: [DONE]\n\n")
    await gateway.ending("first-curl")
    after = await gateway.metrics()
    for name, labels in (
        ("requests_total", {"priority": "P0", "outcome": "completed"}),
        ("time_to_first_token_seconds_count", {"priority": "P0"}),
        ("time_per_output_token_seconds_count", {"priority": "P0"}),
    ):
        assert after.total(name, **labels) == before.total(name, **labels) + 1


@pytest.mark.parametrize("headers", [[], [FORM], [("content-type", "text/plain; charset=utf-8")], [JSON]])
async def test_the_content_type_does_not_matter(
    gateway: GatewayProcess, headers: list[tuple[str, str]]
) -> None:
    """The body is JSON, whatever a client calls it."""
    response = await ask(gateway.port, post_chat(chat(max_tokens=2), headers))
    assert response.status == 200
    assert response.json["usage"]["completion_tokens"] == 2


async def test_a_connection_is_used_again(gateway: GatewayProcess) -> None:
    """Plain answers, streams, refusals and the model list follow each other on one connection."""
    async with RawClient(gateway.port) as client:
        for body, status in (
            (chat(max_tokens=2), 200),
            (chat(max_tokens=2, stream=True), 200),
            (b"no json", 400),
            (chat(max_tokens=2), 200),
        ):
            await client.send(post_chat(body))
            response = await client.response()
            assert (response.status, response.whole) == (status, True)
        await client.send(get("/v1/models"))
        assert (await client.response()).json["data"][0]["id"] == "mock-gpu"


async def test_pipelined_requests_are_answered_in_order(gateway: GatewayProcess) -> None:
    """Three requests sent at once get their answers one after the other."""
    async with RawClient(gateway.port) as client:
        requests = [post_chat(chat(max_tokens=n, stream=n == 2), id=f"pipelined-{n}") for n in (3, 2, 1)]
        await client.send(b"".join(requests))
        for n in (3, 2, 1):
            response = await client.response()
            assert response.header("x-request-id") == f"pipelined-{n}"
            assert response.whole


async def test_an_upload_in_chunks(gateway: GatewayProcess) -> None:
    """A body without a length, in pieces of any size, is one body."""
    body = json.dumps(chat("Grüße aus 北京 " * 20, max_tokens=2), ensure_ascii=False).encode()
    async with RawClient(gateway.port) as client:
        await client.send(request_head("POST", CHAT_PATH, [JSON, ("transfer-encoding", "chunked")]))
        for start in range(0, len(body), 7):
            await client.send(chunk(body[start : start + 7]))
        await client.send(chunk(b""))
        response = await client.response()
    assert response.status == 200
    assert response.json["usage"]["completion_tokens"] == 2


async def test_a_request_that_dribbles_in(gateway: GatewayProcess) -> None:
    """A request may come byte by byte."""
    async with RawClient(gateway.port) as client:
        for byte in post_chat(chat(max_tokens=1)):
            await client.send(bytes([byte]))
        assert (await client.response()).status == 200


async def test_an_upload_that_waits_to_be_asked_for(gateway: GatewayProcess) -> None:
    """`Expect: 100-continue` is answered before the body, as curl wants it for a large one."""
    body = json.dumps(chat("x" * 2000, max_tokens=1)).encode()
    headers = [JSON, ("content-length", str(len(body))), ("expect", "100-continue")]
    async with RawClient(gateway.port) as client:
        await client.send(request_head("POST", CHAT_PATH, headers))
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(body)
        assert (await client.response()).status == 200


async def test_an_offer_of_http_2_is_passed_over(gateway: GatewayProcess) -> None:
    """A client that offers to upgrade is served in HTTP/1.1, and may use the connection again or be told
    that it is closed."""
    offer = [("connection", "Upgrade, HTTP2-Settings"), ("upgrade", "h2c"), ("http2-settings", "AAMAAABk")]
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(chat(max_tokens=2), offer))
        response = await client.response()
        assert response.status == 200
        if response.header("connection") != "close":
            await client.send(post_chat(chat(max_tokens=2)))
            assert (await client.response()).status == 200


async def test_an_old_client(gateway: GatewayProcess) -> None:
    """HTTP/1.0 gets a whole answer, and the connection is closed behind it."""
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(chat(max_tokens=2)).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        response = await client.response()
        assert response.json["usage"]["completion_tokens"] == 2
        assert await client.rest() == b""


async def test_the_model_list_without_a_body(gateway: GatewayProcess) -> None:
    """HEAD has the headers of GET and nothing behind them; the connection stays in step."""
    async with RawClient(gateway.port) as client:
        await client.send(request_head("HEAD", "/v1/models"))
        head = await client.response("HEAD")
        await client.send(get("/v1/models?limit=2"))
        page = await client.response()
    assert (head.status, page.status) == (200, 200)
    assert head.header("content-length") in (None, page.header("content-length"))


async def test_an_address_in_full(gateway: GatewayProcess) -> None:
    """A request line as proxies get it leads to the same place."""
    request = post_chat(chat(max_tokens=1)).replace(b"POST /", b"POST http://gateway/", 1)
    assert (await ask(gateway.port, request)).status == 200


@pytest.mark.parametrize("path", ["/v1/nothing", CHAT_PATH])
async def test_a_head_request_that_is_refused_gets_a_head(gateway: GatewayProcess, path: str) -> None:
    """Its length is told, and no byte of a body follows."""
    async with RawClient(gateway.port) as client:
        await client.send(request_head("HEAD", path))
        status, headers = await client.head()
        assert status in (404, 405)
        assert int(dict(headers)["content-length"]) > 0
        assert await client.rest() == b""


async def test_a_flood_of_pipelined_requests_is_not_hoarded(gateway: GatewayProcess) -> None:
    """So many small ones in one read are answered as far as they were taken, and then told no: one
    connection cannot fill the memory."""
    async with RawClient(gateway.port) as client:
        await client.send(request_head("GET", "/healthz") * 20_000)
        answered = await client.rest()
    assert 0 < answered.count(b'{"status":"ok"}') <= 1_100
    assert answered.count(b"too_many_pipelined") == 1


async def test_a_few_more_than_are_read_ahead(gateway: GatewayProcess) -> None:
    """All of them are answered, in order, on one connection."""
    async with RawClient(gateway.port) as client:
        await client.send(request_head("GET", "/healthz") * 50)
        for _ in range(50):
            assert (await client.response("GET")).status == 200
