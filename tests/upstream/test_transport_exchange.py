"""One exchange after another: what goes out, what comes in, and what counts as a whole response."""

import asyncio
import socket

import pytest

from gateway.upstream.errors import BadResponse, UpstreamAborted
from gateway.upstream.transport import UpstreamTransport
from tests.support.loops import both_loops
from tests.support.scripted_upstream import STREAM_HEAD, ScriptedConnection, answer, chunk
from tests.support.transports import always, once, talking_to

pytestmark = pytest.mark.anyio
anyio_backend = both_loops()


async def test_the_request_goes_out_as_it_was_given() -> None:
    """Host and content-length are added, everything else is passed on byte for byte and in order."""
    async with talking_to(always(answer(b"hello"))) as (transport, upstream):
        headers = [(b"X-Test", b"a b"), (b"accept", b"*/*"), (b"x-test", b"\xe9")]
        response = await transport.send(b"POST", b"/v1/x?q=1%20", headers, b'{"a":1}')
        assert await response.read_all(100) == b"hello"
        host = f"127.0.0.1:{upstream.port}".encode()
        assert upstream.requests[0].raw == (
            b"POST /v1/x?q=1%20 HTTP/1.1\r\nhost: " + host + b"\r\n"
            b"X-Test: a b\r\naccept: */*\r\nx-test: \xe9\r\ncontent-length: 7\r\n\r\n"
            b'{"a":1}'
        )


async def test_the_path_of_the_url_is_put_before_the_target() -> None:
    """A base path in the upstream's URL becomes part of every request line."""
    async with talking_to(always(answer()), path="/base/") as (transport, upstream):
        await (await transport.send(b"GET", b"/v1/models", [])).read_all(100)
        assert upstream.requests[0].target == "/base/v1/models"


async def test_a_given_host_replaces_ours_and_given_framing_is_left_out() -> None:
    """There is one host and one framing, whatever the caller passes."""
    async with talking_to(always(answer())) as (transport, upstream):
        headers = [(b"Host", b"engine.test"), (b"Content-Length", b"99"), (b"Transfer-Encoding", b"chunked")]
        await (await transport.send(b"POST", b"/", headers, b"abc")).read_all(100)
        request = upstream.requests[0]
        assert request.header("host") == "engine.test"
        assert request.header("content-length") == "3"
        assert request.header("transfer-encoding") is None


@pytest.mark.parametrize(("method", "expected"), [(b"POST", "0"), (b"GET", None), (b"DELETE", None)])
async def test_an_empty_body_is_announced_where_one_is_expected(method: bytes, expected: str | None) -> None:
    """POST says content-length 0, GET says nothing."""
    async with talking_to(always(answer())) as (transport, upstream):
        await (await transport.send(method, b"/", [])).read_all(100)
        assert upstream.requests[0].header("content-length") == expected


@pytest.mark.parametrize("value", [b"a\r\nx-admin: yes", b"a\nb", b"a\rb"])
async def test_a_line_break_in_a_header_is_refused(value: bytes) -> None:
    """No value can smuggle in a line of its own; that is the caller's fault, and nothing is sent."""
    async with talking_to(always(answer())) as (transport, upstream):
        with pytest.raises(ValueError, match="line break"):
            await transport.send(b"GET", b"/", [(b"x-a", value)])
        assert not upstream.connections


async def test_ipv6_literals() -> None:
    """An IPv6 address in the URL is connected to, and bracketed in the host header."""
    if not _has_ipv6():
        pytest.skip("no IPv6 here")
    async with talking_to(always(answer(b"six")), host="::1") as (transport, upstream):
        assert await (await transport.send(b"GET", b"/", [])).read_all(100) == b"six"
        assert upstream.requests[0].header("host") == f"[::1]:{upstream.port}"


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("url", ["ftp://host/", "host:80", "http://", "http://u:p@host/", "http://host/?q=1"])
def test_an_url_that_is_no_upstream_is_refused(url: str) -> None:
    """Mistakes in the configuration show at once."""
    with pytest.raises(ValueError, match="upstream's url"):
        UpstreamTransport(url)


async def test_the_head_is_offered_as_received() -> None:
    """Status, reason, version and headers in the order and spelling of the upstream."""
    data = b"HTTP/1.1 418 I'm a teapot\r\nX-One: 1\r\nx-Empty:\r\nx-one: 2\r\nContent-Length: 0\r\n\r\n"
    async with talking_to(always(data)) as (transport, _):
        response = await transport.send(b"GET", b"/", [])
        assert (response.status, response.reason, response.http_version) == (418, b"I'm a teapot", "1.1")
        assert response.headers[:3] == [(b"X-One", b"1"), (b"x-Empty", b""), (b"x-one", b"2")]
        assert response.lower_headers()[0] == (b"x-one", b"1")
        assert response.header(b"x-one") == b"1"
        assert response.header(b"x-none") is None
        assert response.complete
        assert await response.read() == b""
        assert await response.read() == b""


async def test_pieces_are_handed_on_as_they_come() -> None:
    """A piece is there as soon as it has come, and not later; between them there is nothing to read."""
    proceed = asyncio.Event()

    async def handler(connection: ScriptedConnection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD)
        for piece in (b"one", b"two"):
            await proceed.wait()
            proceed.clear()
            await connection.send(chunk(piece[:1]) + chunk(piece[1:]))
        await connection.send(chunk(b""))

    async with talking_to(handler) as (transport, _):
        response = await transport.send(b"POST", b"/", [], b"x")
        assert response.read_nowait() is None
        proceed.set()
        assert await response.read() == b"one"
        assert not response.complete
        assert response.read_nowait() is None
        proceed.set()
        assert await response.read() == b"two"
        assert await response.read() == b""
        assert response.read_nowait() == b""
        assert response.complete


@pytest.mark.parametrize(
    ("method", "data"),
    [
        (b"HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"),
        (b"HEAD", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"),
        (b"GET", b"HTTP/1.1 204 No Content\r\n\r\n"),
        (b"GET", b"HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n"),
        (b"GET", b"HTTP/1.1 204 No Content\r\ntransfer-encoding: chunked\r\n\r\n"),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\ntransfer-encoding: chunked\r\n\r\n"),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n"),
    ],
)
async def test_responses_without_a_body(method: bytes, data: bytes) -> None:
    """HEAD, 204 and 304 end with their head, and the connection serves the next request."""
    async with talking_to(always(data)) as (transport, upstream):
        for _ in range(3):
            response = await transport.send(method, b"/", [])
            assert await response.read_all(100) == b""
        assert transport.idle == 1
        assert len(upstream.connections) == 1


async def test_head_and_get_take_turns_on_one_connection() -> None:
    """A response to HEAD leaves nothing behind that could be taken for the next one."""

    async def handler(connection: ScriptedConnection) -> None:
        while (request := await connection.request()) is not None:
            whole = answer(b"hello")
            await connection.send(whole[: -len(b"hello")] if request.method == "HEAD" else whole)

    async with talking_to(handler) as (transport, upstream):
        for method, body in [(b"HEAD", b""), (b"GET", b"hello")] * 3:
            assert await (await transport.send(method, b"/", [])).read_all(100) == body
        assert len(upstream.connections) == 1


async def test_a_body_after_head_spoils_the_connection() -> None:
    """An upstream that sends a body with HEAD does not get to desync the next response."""
    async with talking_to(always(answer(b"HTTP/1.1 500 Trap\r\n\r\n"))) as (transport, upstream):
        for _ in range(2):
            response = await transport.send(b"HEAD", b"/", [])
            assert (response.status, await response.read_all(100)) == (200, b"")
        assert transport.idle == 0
        assert len(upstream.connections) == 2


async def test_interim_responses_are_skipped() -> None:
    """1xx responses and their headers do not show."""
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n"
    async with talking_to(always(interim + answer(b"done"))) as (transport, _):
        response = await transport.send(b"POST", b"/", [], b"x")
        assert (response.status, response.reason) == (200, b"OK")
        assert response.headers == [(b"content-length", b"4")]
        assert await response.read_all(100) == b"done"
        assert transport.idle == 1


async def test_chunked_with_extensions_and_trailers() -> None:
    """Extensions and trailers are read and dropped, and the connection is kept."""
    data = STREAM_HEAD + b"5;a=b\r\nhello\r\n0\r\nx-trailer: 1\r\n\r\n"
    async with talking_to(always(data)) as (transport, _):
        for _ in range(2):
            response = await transport.send(b"GET", b"/", [])
            assert await response.read_all(100) == b"hello"
            assert response.header(b"x-trailer") is None
        assert transport.idle == 1


async def test_a_body_without_framing_ends_with_the_connection() -> None:
    """Neither length nor chunks: all up to the end is body, and the connection is not used again."""
    async with talking_to(once(b"HTTP/1.1 200 OK\r\n\r\nall of it")) as (transport, upstream):
        for _ in range(2):
            response = await transport.send(b"GET", b"/", [])
            assert await response.read_all(100) == b"all of it"
            assert response.complete
            assert (transport.in_use, transport.idle) == (0, 0)
        assert len(upstream.connections) == 2


@pytest.mark.parametrize(
    "data",
    [
        answer(b"x", headers=("connection: close",)),
        b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\nx",
        answer(b"x") + answer(b"never asked for"),
        answer(b"x") + b"HT",
    ],
)
async def test_connections_that_are_not_kept(data: bytes) -> None:
    """`connection: close`, HTTP/1.0 and surplus bytes: the response is good, the connection is closed."""
    async with talking_to(always(data)) as (transport, upstream):
        for _ in range(2):
            response = await transport.send(b"GET", b"/", [])
            assert await response.read_all(100) == b"x"
            assert (transport.in_use, transport.idle) == (0, 0)
        await upstream.all_closed()
        assert len(upstream.connections) == 2


async def test_http_1_0_with_keep_alive_is_kept() -> None:
    """HTTP/1.0 keeps a connection where it says so."""
    data = b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 1\r\n\r\nx"
    async with talking_to(always(data)) as (transport, _):
        response = await transport.send(b"GET", b"/", [])
        assert await response.read_all(100) == b"x"
        assert response.http_version == "1.0"
        assert transport.idle == 1


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"<html>",
        b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 banana OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\ncontent-length: -3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999999\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: identity\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nx-big: " + b"a" * 70_000 + b"\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x-many: a\r\n" * 7_000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nx-endless: " + b"a" * 70_000,
    ],
    ids=lambda data: data[:60].decode().replace("\r\n", "|"),
)
async def test_what_is_no_trustworthy_http_response_is_refused(data: bytes) -> None:
    """Not HTTP/1.x, framing that could be read in two ways, or a head beyond 64 KiB."""
    async with talking_to(always(data)) as (transport, upstream):
        with pytest.raises(BadResponse) as caught:
            await transport.send(b"GET", b"/", [])
        assert caught.value.phase == "head"
        assert transport.in_use == 0
        await upstream.all_closed()


@pytest.mark.parametrize(
    "tail",
    [
        b"zz\r\n",
        b"5\r\nhelloXX",
        b"3;" + b"e" * 70_000,
        b"0\r\n" + b"x-trailer: a\r\n" * 6_000,
        b"0\r\nx-trailer: " + b"a" * 70_000,
    ],
    ids=["no size", "no line end", "endless extension", "many trailers", "endless trailer"],
)
async def test_malformed_chunks_break_the_body_off(tail: bytes) -> None:
    """What came before the fault is delivered, then the reader is told, every time it asks."""
    proceed = asyncio.Event()

    async def handler(connection: ScriptedConnection) -> None:
        await connection.answer(STREAM_HEAD + chunk(b"good"))
        await proceed.wait()
        await connection.send(tail)
        await connection.peer_closed.wait()

    async with talking_to(handler) as (transport, upstream):
        response = await transport.send(b"GET", b"/", [])
        assert await response.read() == b"good"
        proceed.set()
        for _ in range(2):
            with pytest.raises(UpstreamAborted):
                await response.read_all(1000)
        assert transport.in_use == 0
        await upstream.all_closed()


async def test_read_all_has_a_limit() -> None:
    """A body beyond the limit is given up and its connection closed."""
    async with talking_to(always(STREAM_HEAD + chunk(b"a" * 60) + chunk(b"b" * 60))) as (transport, upstream):
        response = await transport.send(b"GET", b"/", [])
        with pytest.raises(UpstreamAborted, match="100"):
            await response.read_all(100)
        assert transport.in_use == 0
        await upstream.all_closed()


async def test_large_upload() -> None:
    """A body of many socket buffers arrives unchanged, and the connection is kept."""
    body = bytes(range(256)) * 32 * 1024
    async with talking_to(always(answer(b"taken"))) as (transport, upstream):
        for _ in range(2):
            response = await transport.send(b"POST", b"/", [], body)
            assert await response.read_all(100) == b"taken"
        assert [request.body == body for request in upstream.requests] == [True, True]
        assert len(upstream.connections) == 1


async def test_nagle_is_off() -> None:
    """Small writes leave at once."""
    async with talking_to(always(answer())) as (transport, _):
        await (await transport.send(b"GET", b"/", [])).read_all(100)
        (connection,) = transport._pool._idle
        connected = connection._transport.get_extra_info("socket")
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
