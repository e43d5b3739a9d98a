"""The transport under httpx, and over TLS."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from gateway.upstream.errors import ConnectFailed
from gateway.upstream.transport import TransportTimeouts, UpstreamTransport
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


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for `localhost`, signed by itself, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("tls")
    key, signed = folder / "key.pem", folder / "signed.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(key), "-out", str(signed)),
        ],
        check=True,
        capture_output=True,
    )
    both = folder / "both.pem"
    both.write_bytes(key.read_bytes() + signed.read_bytes())
    return both


def server_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


async def test_tls(certificate: Path) -> None:
    """Over TLS the name is sent and checked, connections are kept, and large bodies arrive both ways."""
    names: list[str | None] = []
    context = server_context(certificate)
    context.sni_callback = lambda _socket, name, _context: names.append(name)
    body = b"y" * 3_000_000
    async with (
        asyncio.timeout(20),
        ScriptedUpstream(always(answer(body)), host="127.0.0.1", tls=context) as upstream,
    ):
        trusting = ssl.create_default_context(cafile=str(certificate))
        transport = UpstreamTransport(f"https://localhost:{upstream.port}", verify=trusting)
        for _ in range(2):
            response = await transport.send(b"POST", b"/", [], b"x" * 1_000_000)
            assert await response.read_all(len(body)) == body
            assert (transport.in_use, transport.idle) == (0, 1)
        assert names == ["localhost"]
        assert len(upstream.connections) == 1
        response = await transport.send(b"GET", b"/", [])
        response.abort()
        assert transport.in_use == 0
        await transport.aclose()
        await upstream.all_closed()


async def test_an_untrusted_certificate_is_a_failed_connection(certificate: Path) -> None:
    """Nothing is sent to somebody who cannot prove who he is, unless the check is switched off."""
    async with (
        asyncio.timeout(20),
        ScriptedUpstream(always(answer()), tls=server_context(certificate)) as upstream,
    ):
        url = f"https://localhost:{upstream.port}"
        checking = UpstreamTransport(url, timeouts=TransportTimeouts(connect_seconds=10))
        with pytest.raises(ConnectFailed) as caught:
            await checking.send(b"GET", b"/", [])
        assert isinstance(caught.value.__cause__, ssl.SSLError)
        assert checking.in_use == 0
        await checking.aclose()
        trusting = UpstreamTransport(url, verify=False)
        assert await (await trusting.send(b"GET", b"/", [])).read_all(100) == b"{}"
        await trusting.aclose()
