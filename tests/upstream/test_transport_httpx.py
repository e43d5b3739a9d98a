"""The transport under httpx."""

import httpx
import pytest

from gateway.upstream.transport import UpstreamTransport
from tests.support.loops import both_loops
from tests.support.scripted_upstream import (
    STREAM_HEAD,
    Handler,
    ScriptedConnection,
    ScriptedUpstream,
    answer,
    chunk,
)
from tests.support.transports import always, once, talking_to

pytestmark = pytest.mark.anyio
anyio_backend = both_loops()


async def silent(connection: ScriptedConnection) -> None:
    await connection.request()
    await connection.peer_closed.wait()


async def test_an_httpx_client_over_the_transport() -> None:
    """Method, path, query, headers and body go out; status, headers and body come back."""
    reply = answer(b'{"ok": true}', status="201 Made", headers=("content-type: application/json",))
    async with (
        talking_to(always(reply), path="/base") as (transport, upstream),
        httpx.AsyncClient(transport=transport, base_url="http://engine") as client,
    ):
        response = await client.post("/v1/x", params={"q": "a b"}, json={"a": 1}, headers={"x-a": "b"})
        assert (response.status_code, response.reason_phrase) == (201, "Made")
        assert response.http_version == "HTTP/1.1"
        assert response.json() == {"ok": True}
        request = upstream.requests[0]
        assert (request.method, request.target) == ("POST", "/base/v1/x?q=a+b")
        assert request.header("host") == f"127.0.0.1:{upstream.port}"
        assert request.header("content-length") == str(len(request.body))
        assert request.header("x-a") == "b"
        assert request.body == b'{"a":1}'


async def test_a_stream_under_httpx() -> None:
    """Pieces are handed on, and leaving early closes the connection."""

    async def handler(connection: ScriptedConnection) -> None:
        await connection.answer(STREAM_HEAD + chunk(b"one"))
        await connection.peer_closed.wait()

    async with (
        talking_to(handler) as (transport, upstream),
        httpx.AsyncClient(transport=transport, base_url="http://engine") as client,
    ):
        async with client.stream("GET", "/") as response:
            assert await anext(response.aiter_raw()) == b"one"
            assert transport.in_use == 1
        assert transport.in_use == 0
        await upstream.all_closed()


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (once(b""), httpx.RemoteProtocolError),
        (once(b"nonsense\r\n"), httpx.RemoteProtocolError),
        (once(STREAM_HEAD), httpx.ReadError),
        (silent, httpx.ReadTimeout),
    ],
    ids=["closed", "bad response", "aborted", "timeout"],
)
async def test_our_errors_become_httpx_errors(handler: Handler, expected: type[Exception]) -> None:
    """Whoever uses httpx sees httpx exceptions only."""
    async with (
        talking_to(handler) as (transport, _),
        httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=0.5) as client,
    ):
        with pytest.raises(expected):
            await client.get("/")
        assert transport.in_use == 0


async def test_a_failed_connection_under_httpx() -> None:
    """Refused is `ConnectError`."""
    async with ScriptedUpstream(silent) as gone:
        url = gone.url
    async with httpx.AsyncClient(transport=UpstreamTransport(url), base_url="http://engine") as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("/")


async def test_proxies_in_the_environment_and_cookies_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upstream is called directly, and nothing it sets is sent back to it."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with talking_to(always(answer(headers=("set-cookie: a=b",)))) as (transport, upstream):
        for _ in range(2):
            await (await transport.send(b"GET", b"/", [])).read_all(100)
        assert upstream.requests[1].header("cookie") is None


async def test_redirects_are_answers_like_others() -> None:
    """Nothing is followed."""
    reply = answer(status="307 Temporary Redirect", headers=("location: /elsewhere",))
    async with talking_to(always(reply)) as (transport, upstream):
        response = await transport.send(b"POST", b"/", [], b"x")
        assert response.status == 307
        assert await response.read_all(100) == b"{}"
        assert len(upstream.requests) == 1
