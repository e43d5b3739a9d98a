"""The data path to one upstream: requests out, responses in, connections kept alive in between.

`send` is what the gateway uses: bytes in, bytes out, no task and no header object per request. The same
transport serves `httpx.AsyncClient(transport=…)` for polls, where convenience counts more than
microseconds.

A request is sent again in one case only: the kept-alive connection it went out on ended within 25 ms, or
was reset within 250 ms, without a byte, so it had been closed before the request came. Everything else is
reported, because the engine may have begun. There are no proxies from the environment, no cookies, no
redirects and no retries.
"""

import asyncio
import ipaddress
import math
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from gateway.upstream.connection_pool import ConnectionPool
from gateway.upstream.dialing import connected_socket
from gateway.upstream.errors import (
    BadResponse,
    ConnectFailed,
    FirstByteTimeout,
    IdleTimeout,
    UpstreamAborted,
    UpstreamClosed,
    UpstreamError,
)
from gateway.upstream.http1 import Http1Connection, TransportTimeouts
from gateway.upstream.response import UpstreamResponse
from gateway.upstream.tls import usual_context
from gateway.upstream.upload import StreamedBody

__all__ = ["StreamedBody", "TransportTimeouts", "UpstreamResponse", "UpstreamTransport"]

METHODS_WITH_BODY = frozenset({b"POST", b"PUT", b"PATCH"})
"""Their requests say `content-length: 0` when there is no body; servers may insist on it (RFC 9110, 8.6)."""
OWN_HEADERS = frozenset({b"host", b"content-length", b"transfer-encoding"})
"""Written by the transport. It frames the body itself, so what a caller says about that is left out."""

HTTPX_ERRORS: dict[type[UpstreamError], type[httpx.TransportError]] = {
    ConnectFailed: httpx.ConnectError,
    FirstByteTimeout: httpx.ReadTimeout,
    IdleTimeout: httpx.ReadTimeout,
    UpstreamClosed: httpx.RemoteProtocolError,
    BadResponse: httpx.RemoteProtocolError,
    UpstreamAborted: httpx.ReadError,
}


class UpstreamTransport(httpx.AsyncBaseTransport):
    """Keep-alive HTTP/1.1 to the origin of `url`; the path of `url`, if any, is put before every target.

    Idle connections are closed after `idle_retire_seconds`, sooner if the upstream turns out to close them
    sooner, and at most `max_idle` are kept. The number of connections in use is the caller's to limit.
    """

    def __init__(
        self,
        url: str,
        *,
        timeouts: TransportTimeouts | None = None,
        verify: ssl.SSLContext | bool = True,
        idle_retire_seconds: float = 4.0,
        max_idle: int = 512,
    ) -> None:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(f"an upstream's url is http://… or https://…, not {url!r}")
        if parsed.userinfo or parsed.query or parsed.fragment:
            raise ValueError("an upstream's url has no credentials, query or fragment")
        tls = parsed.scheme == "https"
        self._host = parsed.raw_host.decode("ascii")
        self._is_address = _is_address(self._host)
        self._port = parsed.port or (443 if tls else 80)
        if tls and isinstance(verify, bool):
            verify = usual_context(verify)
        self._tls = verify if tls and isinstance(verify, ssl.SSLContext) else None
        self._prefix = parsed.raw_path.rstrip(b"/")
        self._host_line = b"host: " + parsed.netloc + b"\r\n"
        self._timeouts = timeouts or TransportTimeouts()
        self._pool = ConnectionPool(retire_seconds=idle_retire_seconds, max_idle=max_idle)

    @property
    def in_use(self) -> int:
        """Connections that carry an exchange or are being opened for one."""
        return self._pool.in_use

    @property
    def idle(self) -> int:
        return self._pool.idle

    @property
    def idle_retire_seconds(self) -> float:
        """The age at which idle connections are closed now: as configured, or less if so learned."""
        return self._pool.retire_seconds

    async def send(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes | StreamedBody = b"",
        *,
        timeouts: TransportTimeouts | None = None,
    ) -> UpstreamResponse:
        """Send one request and wait for the response's head. Raises `UpstreamError`.

        `target` is path and query. `host` (unless given) and the body's framing are added; of the other
        headers the caller has taken out what concerns only the client's connection.

        The head may come before all of a streamed body has gone up. The rest follows while the response is
        read, unless its status is an error. What the source of the body raises is raised here, or by `read`.
        """
        timeouts = timeouts or self._timeouts
        no_body = method == b"HEAD"
        if isinstance(body, StreamedBody):
            head = self._head(method, target, headers, body.framing)
            return await self._send_streamed(head, body, no_body, timeouts)
        framing = b"content-length: %d\r\n" % len(body) if body or method in METHODS_WITH_BODY else b""
        head = self._head(method, target, headers, framing)
        connection = self._pool.take(asyncio.get_running_loop().time())
        reused = connection is not None
        if connection is None:
            connection = await self._connect(timeouts)
        response = connection.start(head, body, no_body=no_body, reused=reused, timeouts=timeouts)
        try:
            await response.head()
        except UpstreamClosed as closed:
            if not closed.resend_is_safe:
                raise
        else:
            return response
        connection = await self._connect(timeouts)
        response = connection.start(head, body, no_body=no_body, reused=False, timeouts=timeouts)
        await response.head()
        return response

    async def _send_streamed(
        self, head: bytes, body: StreamedBody, no_body: bool, timeouts: TransportTimeouts
    ) -> UpstreamResponse:
        """On a connection of its own: only a fresh one cannot be stale, and pieces can be taken but once."""
        connection = await self._connect(timeouts)
        response = connection.start_upload(head, body, no_body=no_body, timeouts=timeouts)
        await response.head()
        return response

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """`send` behind httpx types. Of the request's URL only path and query count; the origin is ours."""
        body = await request.aread()
        headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"host"]
        timeouts = _httpx_timeouts(request, self._timeouts)
        method = request.method.encode("ascii")
        try:
            response = await self.send(method, request.url.raw_path, headers, body, timeouts=timeouts)
        except UpstreamError as error:
            raise _httpx_error(error) from error
        return httpx.Response(
            response.status,
            headers=response.headers,
            stream=_HttpxStream(response),
            extensions={
                "http_version": b"HTTP/" + response.http_version.encode("ascii"),
                "reason_phrase": response.reason,
            },
        )

    async def aclose(self) -> None:
        """Close all connections, those in use as well."""
        await self._pool.aclose()

    def _head(
        self, method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]], framing: bytes
    ) -> bytes:
        """`framing` is a whole line, or nothing."""
        parts = [method, b" ", self._prefix, target, b" HTTP/1.1\r\n", self._host_line]
        lines = 3  # the request line, host, and the empty line at the end
        for name, value in headers:
            lowered = name.lower()
            if lowered in OWN_HEADERS:
                if lowered == b"host":
                    parts[5] = b"host: " + value + b"\r\n"
                continue
            parts += (name, b": ", value, b"\r\n")
            lines += 1
        if framing:
            parts.append(framing)
            lines += 1
        parts.append(b"\r\n")
        head = b"".join(parts)
        # Counting is the cheapest proof that no value smuggles in a line of its own.
        if head.count(b"\n") != lines or head.count(b"\r") != lines:
            raise ValueError("line break inside a request header")
        return head

    async def _connect(self, timeouts: TransportTimeouts) -> Http1Connection:
        if self._pool.closed:
            raise ConnectFailed("the transport is closed")
        loop = asyncio.get_running_loop()
        connection = self._pool.new(loop)
        seconds = timeouts.connect_seconds
        try:
            async with asyncio.timeout(None if seconds == math.inf else seconds):
                given: dict[str, Any] = {"host": self._host, "port": self._port}
                if not self._is_address:
                    given = {"sock": await connected_socket(loop, self._host, self._port)}
                await loop.create_connection(
                    lambda: connection,
                    **given,
                    ssl=self._tls,
                    server_hostname=self._host if self._tls is not None else None,
                )
        except TimeoutError as error:
            connection.abandon()
            raise ConnectFailed(f"no connection within {seconds:g} s", timed_out=True) from error
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be looked up
            connection.abandon()
            raise ConnectFailed(f"no connection: {error}") from error
        except BaseException:
            connection.abandon()
            raise
        if connection.closed:
            raise ConnectFailed("closed as soon as it was open")
        return connection


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class _HttpxStream(httpx.AsyncByteStream):
    def __init__(self, response: UpstreamResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while piece := await self._response.read():
                yield piece
        except UpstreamError as error:
            raise _httpx_error(error) from error

    async def aclose(self) -> None:
        self._response.abort()


def _httpx_error(error: UpstreamError) -> httpx.TransportError:
    if isinstance(error, ConnectFailed) and error.timed_out:
        return httpx.ConnectTimeout(error.message)
    return HTTPX_ERRORS[type(error)](error.message)


def _httpx_timeouts(request: httpx.Request, default: TransportTimeouts) -> TransportTimeouts:
    """The time-outs of an httpx client or call, where there are any: None is no limit, as in httpx."""
    given = request.extensions.get("timeout")
    if not given:
        return default
    read = given.get("read", default.first_byte_seconds)
    connect = given.get("connect", default.connect_seconds)
    read = math.inf if read is None else read
    return TransportTimeouts(
        connect_seconds=math.inf if connect is None else connect, first_byte_seconds=read, idle_seconds=read
    )
