"""One HTTP/1.1 connection to an upstream: an asyncio protocol around httptools.

All work happens in callbacks. A connection is idle (in the pool), or it carries exactly one exchange:
`start` writes the request and answers the response object, `data_received` feeds the parser and hands the
body bytes of each read on as one piece. The exchange ends in `_finish` (all read: back to the pool, or
closed if the connection cannot be trusted any longer) or in `fail`; both let go of the response, so neither
can happen twice. A body that is streamed up has a task of its own (`upload.py`), which ends with the
exchange.

Time-outs cost no timer per request: a connection has one timer, armed for the earliest moment at which
anything could be due; it looks at the stamps when it fires, and is armed again for the rest.
"""

import asyncio
import math
import select
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gateway.upstream.errors import (
    BadResponse,
    FirstByteTimeout,
    IdleTimeout,
    UpstreamAborted,
    UpstreamClosed,
    UpstreamError,
)
from gateway.upstream.response import UpstreamResponse
from gateway.upstream.response_head import HEAD_BYTES_MAX, check_head, ends_with_connection
from gateway.upstream.upload import StreamedBody, pump

UNREAD_BYTES_MAX = 64 * 1024
"""Above this the upstream is held back; one more read of the socket (256 KiB) may be on its way."""
UNREAD_BYTES_RESUME = 32 * 1024
JOIN_BYTES_MAX = 64 * 1024
"""Up to here copying the body behind the head is cheaper than a second system call and packet."""
TURNS_TO_READ = 3
"""Of the event loop: after so many, what lay at the socket has been read."""
STALE_SECONDS = 0.025
"""A kept-alive connection that ends this soon after the request was written was closed before it came: no
engine answers a prompt by hanging up within 25 ms, while a close that crosses the request shows at once."""
STALE_RESET_SECONDS = 0.25
"""The same for a reset, with which a system answers what comes to a closed connection; on a busy machine it
may take a while. An engine that had read the whole request would end the connection without one."""
TIMER_SLACK_SECONDS = 0.002
"""Event loops keep time in milliseconds, so a timer may fire a little before it is due."""


@dataclass(frozen=True, slots=True)
class TransportTimeouts:
    """How long each phase of an exchange may take, in seconds. `math.inf` means no limit."""

    connect_seconds: float = 5.0
    first_byte_seconds: float = 300.0
    """From the request's last byte to the whole response head, and to the first byte of the body where that
    takes longer than `idle_seconds`: queueing and prefill happen here. An upstream that takes no byte of a
    request for so long is given up as well."""
    idle_seconds: float = 60.0
    """Longest silence inside a body. Time in which we hold the upstream back, or it waits for more of the
    request, does not count."""


class Owner(Protocol):
    """Who a connection belongs to: the pool."""

    def opened(self, connection: "Http1Connection") -> None: ...
    def put_back(self, connection: "Http1Connection") -> None: ...
    def dropped(self, connection: "Http1Connection") -> None: ...
    def closed_by_peer(self, connection: "Http1Connection") -> None: ...
    def lost(self, connection: "Http1Connection") -> None: ...


class Http1Connection(asyncio.Protocol):
    __slots__ = (
        "_active_at",
        "_barren_bytes",
        "_body_begun",
        "_closed",
        "_descriptor",
        "_head_bytes",
        "_headers",
        "_keep_alive",
        "_loop",
        "_no_body",
        "_now",
        "_owner",
        "_parser",
        "_parts",
        "_paused",
        "_reason",
        "_response",
        "_reused",
        "_started_at",
        "_surplus",
        "_timeouts",
        "_timer",
        "_timer_at",
        "_transport",
        "_unsent_bytes",
        "_upload",
        "_upload_unfinished",
        "_version",
        "_writable",
        "_writing",
        "_written_at",
        "idle_since",
        "on_body",
    )

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self.idle_since = 0.0
        self._owner = owner
        self._loop = loop
        self._now = loop.time
        self._transport: asyncio.Transport | None = None
        self._descriptor = -1
        self._closed = False
        self._response: UpstreamResponse | None = None
        self._timeouts = TransportTimeouts()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._reused = False
        self._no_body = False
        self._writing = False
        self._unsent_bytes = 0
        self._upload: asyncio.Task[None] | None = None
        self._upload_unfinished = False  # once it is, it stays so: nothing else may follow it
        self._writable: asyncio.Future[None] | None = None
        self._started_at = self._written_at = self._active_at = 0.0
        # What the parser finds, collected until the feed is over.
        self._parts: list[bytes] = []
        self.on_body: Callable[[bytes], None] = self._parts.append
        self._reason = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._barren_bytes = 0
        self._body_begun = False
        self._keep_alive = False
        self._surplus = False
        self._paused = False
        self._version = ""  # of the first response; a server does not change it between responses
        self._parser: HttpResponseParser | None = HttpResponseParser(self)

    # What the transport and the pool call.

    @property
    def closed(self) -> bool:
        return self._closed

    def start(
        self, head: bytes, body: bytes, *, no_body: bool, reused: bool, timeouts: TransportTimeouts
    ) -> UpstreamResponse:
        """Write a request. `no_body`: the response to it has none whatever its headers say (HEAD)."""
        transport = self._transport
        assert transport is not None
        self._response = response = UpstreamResponse(self, self._loop)
        self._timeouts = timeouts
        self._no_body = no_body
        self._reused = reused
        self._head_bytes = self._barren_bytes = 0
        self._body_begun = False
        self._started_at = self._written_at = now = self._now()
        if len(body) <= JOIN_BYTES_MAX:
            transport.write(head + body if body else head)
        else:
            transport.write(head)
            transport.write(body)
        if self._writing:
            self._unsent_bytes = transport.get_write_buffer_size()
        self._watch(now + timeouts.first_byte_seconds)
        return response

    def start_upload(
        self, head: bytes, body: StreamedBody, *, no_body: bool, timeouts: TransportTimeouts
    ) -> UpstreamResponse:
        """Write a request's head, and its body as it comes."""
        response = self.start(head, b"", no_body=no_body, reused=False, timeouts=timeouts)
        self._upload_unfinished = True
        self._upload = self._loop.create_task(pump(body, self))
        return response

    def drained(self, unread_bytes: int) -> None:
        """The reader has taken a piece."""
        if self._paused and unread_bytes < UNREAD_BYTES_RESUME and self._transport is not None:
            self._paused = False
            self._active_at = self._now()
            self._transport.resume_reading()

    def hold(self) -> None:
        """Read no more until `drained`."""
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def fail(self, error: Exception) -> None:
        """End the exchange, if there is one, with this error, and the connection with it."""
        response = self._response
        self.close()
        if response is not None:
            response.fail(error)

    def give_up(self, why: str) -> None:
        """End whatever is under way, for a reason of our own."""
        waits_for_head = self._response is not None and not self._response.status
        self.fail(UpstreamClosed(why) if waits_for_head else UpstreamAborted(why))

    def close(self) -> None:
        """Close at once, whatever is still to be read or written. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._response = None
        self._stop_upload()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._owner.dropped(self)
        if self._transport is not None:
            self._transport.abort()

    def abandon(self) -> None:
        """Close a connection whose making failed or was given up. The loop may have opened it by then, and
        uvloop closes its socket without a word to us: nobody is to wait for that word."""
        self.close()
        self.connection_lost(None)

    def has_input(self) -> bool:
        """Ask the kernel whether an idle connection has something to read, which can only be its end."""
        if self._descriptor < 0 or not hasattr(select, "poll"):
            return False
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(0))

    # What an upload calls.

    async def write_piece(self, *parts: bytes) -> None:
        """Write, and wait until the next piece may come: nothing is taken from a source that is faster than
        the upstream."""
        for _ in range(TURNS_TO_READ):
            if self._closed or self._paused or not self.has_input():
                break
            # An answer has come before the end. Were its upstream gone, the write would fail and it be lost.
            await asyncio.sleep(0)
        transport = self._transport
        if transport is None or self._closed:
            return
        for part in parts:
            transport.write(part)
        if self._writing:
            self._unsent_bytes = transport.get_write_buffer_size()
            self._written_at = self._now()
            self._writable = self._loop.create_future()
            await self._writable

    def upload_ended(self) -> None:
        """The whole body is written: from here on the upstream's time counts."""
        self._upload = None
        self._upload_unfinished = False
        self._written_at = self._now()

    def upload_failed(self, error: Exception) -> None:
        """There will be no more of the body: the exchange ends with this error."""
        self._upload = None
        self.fail(error)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        self._owner.opened(self)
        if self._closed:
            transport.abort()
            return
        # Of a request above the high mark the low mark tells when the kernel has taken the last byte.
        transport.set_write_buffer_limits(high=JOIN_BYTES_MAX, low=0)
        connected_socket = transport.get_extra_info("socket")
        if connected_socket is not None:
            self._descriptor = connected_socket.fileno()

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            # Nobody asked: either the upstream says good-bye or it is out of step.
            self._ended(None)
            return
        self._active_at = self._now()
        awaiting_head = not response.status
        if awaiting_head:
            self._head_bytes += len(data)
        fault: Exception | None = None
        try:
            self._parser.feed_data(data)  # type: ignore[union-attr]
        except (HttpParserError, HttpParserUpgrade) as error:
            fault = error
        parts = self._parts
        unread_bytes = 0
        if parts:
            self._body_begun = True
            if response.sink is not None and not response.complete and fault is None:
                # The usual read of a stream, of which there are very many: nothing else is to be seen to.
                self._barren_bytes = 0
                piece = parts[0] if len(parts) == 1 else b"".join(parts)
                parts.clear()
                try:
                    response.sink(piece)
                except Exception as error:
                    response.sink_failed(error)
                return
            unread_bytes = self._hand_on(response, parts)
        elif not awaiting_head:
            self._barren_bytes += len(data)
        if response.complete:
            self._finish(response, fault)
        elif fault is not None:
            self._malformed(response, fault)
        elif awaiting_head or self._barren_bytes > HEAD_BYTES_MAX:
            self._progress(response)
            if response.status >= 400:
                self._stop_upload()  # refused: what it does not want is not sent (RFC 9112, 9.5)
        if unread_bytes > UNREAD_BYTES_MAX and self._response is response:
            self.hold()
        response.wake()

    def eof_received(self) -> None:
        self._ended(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended(exc)
        self._parser = None  # it holds our bound methods: a cycle
        self._transport = None
        self._owner.lost(self)

    def pause_writing(self) -> None:
        self._writing = True

    def resume_writing(self) -> None:
        self._writing = False
        self._written_at = self._now()
        if self._writable is not None:
            if not self._writable.done():
                self._writable.set_result(None)
            self._writable = None

    # What the parser calls, `on_body` (a list's append) aside.

    def on_message_begin(self) -> None:
        response = self._response
        if response is None or response.complete:
            self._surplus = True
            raise BadResponse("bytes after the end of the response")

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        response, parser, headers, reason = self._response, self._parser, self._headers, self._reason
        assert response is not None
        assert parser is not None
        self._headers = []
        self._reason = b""
        status = parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            return
        if not self._version:
            self._version = parser.get_http_version()
        check_head(status, self._version, headers, self._head_bytes)
        self._keep_alive = parser.should_keep_alive()
        response.begin(status, reason, headers, self._version)
        if self._no_body:
            response.complete = True

    def on_message_complete(self) -> None:
        response = self._response
        if response is not None and response.status:
            response.complete = True
            if self._headers:
                self._headers = []  # trailers

    # The rest is ours.

    def _hand_on(self, response: UpstreamResponse, parts: list[bytes]) -> int:
        """Pass this read's body bytes on as one piece; answer how many bytes now wait to be read."""
        self._barren_bytes = 0
        piece = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if self._no_body:
            self._surplus = True
            return 0
        return response.deliver(piece)

    def _finish(self, response: UpstreamResponse, fault: Exception | None) -> None:
        self._response = None
        response.finish()
        transport = self._transport
        if not self._keep_alive or self._surplus or fault is not None or transport is None or self._closed:
            self.close()
            return
        if self._upload_unfinished or transport.get_write_buffer_size():
            self.close()  # answered early: nobody knows whether the rest of the upload would still be read
            return
        if self._paused:
            self._paused = False
            transport.resume_reading()
        if self._no_body:
            self._parser = HttpResponseParser(self)  # the old one waits for the body that HEAD leaves out
        self._owner.put_back(self)

    def _stop_upload(self) -> None:
        if self._upload is not None:
            self._upload.cancel()
            self._upload = None

    def _malformed(self, response: UpstreamResponse, fault: Exception) -> None:
        error: UpstreamError
        if response.status:
            error = UpstreamAborted(f"malformed body: {fault}")
        elif isinstance(fault.__context__, BadResponse):
            error = fault.__context__
        else:
            error = BadResponse(f"not an HTTP/1.x response: {fault}")
        if error is not fault.__context__:
            error.__cause__ = fault
        self.fail(error)

    def _progress(self, response: UpstreamResponse) -> None:
        """After a read that brought (part of) a head, or too much of what is neither head nor body."""
        if not response.status:
            if self._head_bytes > HEAD_BYTES_MAX:
                self.fail(BadResponse("the header block is too large"))
        elif self._barren_bytes > HEAD_BYTES_MAX:
            self.fail(UpstreamAborted("malformed body: endless chunk extensions or trailers"))
        else:
            self._watch(self._active_at + self._timeouts.idle_seconds)

    def _ended(self, exc: Exception | None) -> None:
        """The upstream is gone: `exc` is None for an orderly end."""
        if self._closed:
            return
        response = self._response
        if response is None:
            self._owner.closed_by_peer(self)
            self.close()
        elif not response.status:
            self._ended_before_head(exc)
        elif exc is None and ends_with_connection(response):
            self._keep_alive = False
            self._finish(response, None)
            response.wake()
        else:
            error = UpstreamAborted(f"the body broke off: {exc or 'connection closed'}")
            error.__cause__ = exc
            self.fail(error)

    def _ended_before_head(self, exc: Exception | None) -> None:
        elapsed = self._now() - self._started_at
        limit = STALE_RESET_SECONDS if isinstance(exc, ConnectionResetError) else STALE_SECONDS
        stale = self._reused and not self._head_bytes and elapsed <= limit
        if stale:
            self._owner.closed_by_peer(self)
        error = UpstreamClosed(f"no response: {exc or 'connection closed'}", resend_is_safe=stale)
        error.__cause__ = exc
        self.fail(error)

    def _watch(self, due: float) -> None:
        """See to it that the timer fires when something may be due."""
        if self._timer is not None:
            if self._timer_at <= due:
                return
            self._timer.cancel()
            self._timer = None
        if due != math.inf:
            self._timer_at = due
            self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        response = self._response
        if response is None:
            return
        now = self._now()
        due = self._due(response, now)
        if now < due - TIMER_SLACK_SECONDS:
            self._watch(due)
        elif response.status:
            limits = self._timeouts
            seconds = limits.idle_seconds
            if not self._body_begun:
                seconds = max(seconds, limits.first_byte_seconds)
            self.fail(IdleTimeout(f"no byte of the body for {seconds:g} s"))
        else:
            what = "request not taken" if self._writing else "no response head"
            self.fail(FirstByteTimeout(f"{what} for {self._timeouts.first_byte_seconds:g} s"))

    def _due(self, response: UpstreamResponse, now: float) -> float:
        since = self._written_at
        if self._writing and self._transport is not None:
            # An upload lives as long as the upstream takes bytes of it.
            left = self._transport.get_write_buffer_size()
            if left < self._unsent_bytes:
                self._unsent_bytes = left
                since = self._written_at = now
        elif self._upload is not None:
            since = now  # the upstream waits for us
        if not response.status:
            return since + self._timeouts.first_byte_seconds
        idle_at = (now if self._paused else max(since, self._active_at)) + self._timeouts.idle_seconds
        # Engines that stream send the head first and then read the prompt: that is no silence yet.
        return idle_at if self._body_begun else max(idle_at, since + self._timeouts.first_byte_seconds)
