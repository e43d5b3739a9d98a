"""Engines behind TLS: who is believed, and that nothing else changes."""

import asyncio
import ssl
from pathlib import Path

import pytest

from gateway.upstream.client import Upstream, UpstreamAddress
from gateway.upstream.errors import ConnectFailed
from gateway.upstream.tls import client_context
from gateway.upstream.transport import StreamedBody, TransportTimeouts, UpstreamTransport
from tests.support.certificates import self_signed, server_context, signed_by
from tests.support.loops import both_loops, until
from tests.support.scripted_upstream import STREAM_HEAD, ScriptedConnection, ScriptedUpstream, answer, chunk
from tests.support.transports import always

pytestmark = pytest.mark.anyio
anyio_backend = both_loops()

PATIENT = TransportTimeouts(connect_seconds=10)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `localhost`, signed by itself."""
    return self_signed(tmp_path_factory.mktemp("tls"))


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
        trusting = client_context(certificate)
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


async def says_hello(address: UpstreamAddress) -> None:
    """One exchange with the engine at this address; raises what comes in its way."""
    engine = Upstream(address, PATIENT)
    try:
        response = await engine.get("/", b"*/*")
        assert await response.read_all(100) == b"hello"
    finally:
        await engine.aclose()


async def test_a_private_authority(certificate: Path, tmp_path: Path) -> None:
    """Whoever was signed by the authority in the file is believed; another file does not help."""
    stranger = self_signed(tmp_path, "stranger.test")
    tls = server_context(signed_by(certificate, tmp_path))
    async with asyncio.timeout(20), ScriptedUpstream(always(answer(b"hello")), tls=tls) as upstream:
        url = f"https://localhost:{upstream.port}"
        await says_hello(UpstreamAddress("engine", url, tls_ca_file=certificate))
        with pytest.raises(ConnectFailed):
            await says_hello(UpstreamAddress("engine", url, tls_ca_file=stranger))
        with pytest.raises(ConnectFailed):
            await says_hello(UpstreamAddress("engine", url))
        await says_hello(UpstreamAddress("engine", url, tls_verify=False))


async def test_a_certificate_that_is_no_authority(tmp_path: Path) -> None:
    """The engine's own certificate in the file is enough."""
    own = self_signed(tmp_path, ca=False)
    async with (
        asyncio.timeout(20),
        ScriptedUpstream(always(answer(b"hello")), tls=server_context(own)) as upstream,
    ):
        await says_hello(UpstreamAddress("engine", f"https://localhost:{upstream.port}", tls_ca_file=own))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_the_right_signature_under_the_wrong_name(tmp_path: Path, host: str) -> None:
    """A certificate for another name is refused, however well it is signed."""
    other = self_signed(tmp_path, "other.test")
    async with (
        asyncio.timeout(20),
        ScriptedUpstream(always(answer(b"hello")), tls=server_context(other)) as upstream,
    ):
        with pytest.raises(ConnectFailed, match=r"[Hh]ostname|IP address") as caught:
            await says_hello(UpstreamAddress("engine", f"https://{host}:{upstream.port}", tls_ca_file=other))
        assert isinstance(caught.value.__cause__, ssl.SSLCertVerificationError)
        assert upstream.requests == []


async def test_an_upstream_that_does_not_speak_tls(certificate: Path) -> None:
    """Plain HTTP where TLS is expected is a failed connection."""

    async def handler(connection: ScriptedConnection) -> None:
        await connection.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with asyncio.timeout(20), ScriptedUpstream(handler) as upstream:
        with pytest.raises(ConnectFailed):
            await says_hello(
                UpstreamAddress("engine", f"https://localhost:{upstream.port}", tls_ca_file=certificate)
            )


async def test_a_stream_and_an_upload_over_tls(certificate: Path) -> None:
    """Pieces go up and come down as they are; leaving closes the connection."""

    async def handler(connection: ScriptedConnection) -> None:
        request = await connection.request()
        assert request is not None
        await connection.send(STREAM_HEAD + chunk(request.body[-3:]))
        await connection.peer_closed.wait()

    async def pieces() -> object:
        for _ in range(40):
            yield b"x" * 50_000
        yield b"end"

    async with (
        asyncio.timeout(20),
        ScriptedUpstream(handler, tls=server_context(certificate)) as upstream,
    ):
        transport = UpstreamTransport(
            f"https://localhost:{upstream.port}", verify=client_context(certificate)
        )
        response = await transport.send(b"POST", b"/", [], StreamedBody(pieces(), 2_000_003))
        assert await response.read() == b"end"
        response.abort()
        assert transport.in_use == 0
        await until(lambda: upstream.open_connections == 0)
        await transport.aclose()


def test_a_file_without_certificates_is_refused(tmp_path: Path) -> None:
    """Neither a missing file nor one of something else is taken for trust in nobody, or in all."""
    with pytest.raises(OSError, match="No such file"):
        client_context(tmp_path / "none.pem")
    other = tmp_path / "other.pem"
    other.write_text("hello")
    with pytest.raises(ssl.SSLError):
        client_context(other)
