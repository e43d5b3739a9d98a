"""uvicorn's HTTP/1.1 for clients that mean no good, or offer more than is spoken here.

* What is no HTTP is refused in the same shape as everything else.
* A head, or the trailers behind a body, may have `HEAD_BYTES_MAX` bytes, and a head `HEAD_SECONDS`.
* Trailers are read and dropped: as headers they would come after the decisions that headers are for.
* An offer to go on in another protocol (`Upgrade: h2c`) is passed over. The parser takes all behind such a
  head for the other protocol, the body too; so a fresh one gets the head once more, without the offer.
* A connection has one timer, armed for the earliest moment at which it could be closed; when it fires it
  looks whether that is so now.
"""

import asyncio
import math
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.api.channel import SCOPE_KEY
from gateway.api.cycle import Cycle
from gateway.api.errors import error_body

HEAD_BYTES_MAX = 256 * 1024
HEAD_SECONDS = 30.0
TIMER_SLACK_SECONDS = 0.002
"""Event loops keep time in milliseconds, so a timer may fire a little before it is due."""
PIPELINED_MAX = 8
"""With so many requests waiting behind the one that is served, no more is read."""
PIPELINED_IN_ONE_READ_MAX = 1000
"""One read may bring thousands of small ones."""
_OFFER = frozenset({b"upgrade", b"connection", b"http2-settings"})


class _Flow(FlowControl):
    """Whoever would read on, waits while it is `crowded`."""

    crowded = False

    def resume_reading(self) -> None:
        if not self.crowded:
            super().resume_reading()


class GatewayProtocol(HttpToolsProtocol):
    """A client may send its next requests before it has the answer to the first. Reading goes on meanwhile,
    up to `PIPELINED_MAX` of them, and it is the running request that learns when the client has gone."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        self._in_head = False
        self._head_since = 0.0
        self._barren_bytes = 0  # read since the last piece of a body, or the end of a head
        self._running: Cycle | None = None
        self._due = self._timer_at = math.inf
        self._fault: tuple[int, str, str] | None = None  # of what came behind requests still to be answered
        self._close_at(self.loop.time() + self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        running = self._running
        if running is not None and not running.response_complete:
            running.gone()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._running is not None:
            self._running.writable()

    def data_received(self, data: bytes) -> None:
        if self._fault is not None:
            return  # nobody knows where the next request begins
        due, self._due = self._due, math.inf
        while data:
            try:
                self.parser.feed_data(data)
            except HttpParserUpgrade as offer:
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = HttpRequestParser(self)
                continue
            except HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return
            break
        self._barren_bytes += len(data)
        if self._barren_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._refuse(431, "the header block is too large", "headers_too_large")
        elif self._in_head:
            self._close_at(self._head_since + HEAD_SECONDS)
        elif self._running is None or self._running.response_complete:
            # Blank lines, or the rest of a body that nobody waits for: no reason to keep it any longer.
            self._close_at(min(due, self.loop.time() + self.timeout_keep_alive))

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg.rstrip("."), "invalid_http")

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
            else:
                self._close_at(self.loop.time() + self.timeout_keep_alive)
            self.flow.crowded = len(self.pipeline) >= PIPELINED_MAX
            self.flow.resume_reading()
        if self._fault is not None and not self.transport.is_closing():
            self._refuse(*self._fault)

    # What the parser calls.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_since = self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._barren_bytes = 0
        if self._is_offer() or self._fault is not None:
            return
        if len(self.pipeline) >= PIPELINED_IN_ONE_READ_MAX:
            self._refuse(400, "too many requests at once on one connection", "too_many_pipelined")
            return
        cycle = self._new_cycle()
        former, self.cycle = self.cycle, cycle
        if former is None or former.response_complete:
            self._start_asgi_task(cycle, self.app)
            return
        self.pipeline.appendleft((cycle, self.app))
        if len(self.pipeline) >= PIPELINED_MAX:
            self.flow.crowded = True
            self.flow.pause_reading()

    def on_body(self, body: bytes) -> None:
        self._barren_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._barren_bytes = 0
        if not self._is_offer():
            super().on_message_complete()

    # The rest is ours.

    def _new_cycle(self) -> Cycle:
        """Of the request whose head has been read."""
        scope, parser = self.scope, self.parser
        url, version = parse_url(self.url), parser.get_http_version()
        path = url.path.decode("ascii")
        scope["method"] = parser.get_method().decode("ascii")
        scope["http_version"] = version
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = url.path
        scope["query_string"] = url.query or b""
        cycle = Cycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        scope[SCOPE_KEY] = cycle  # type: ignore[literal-required]
        return cycle

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        assert isinstance(cycle, Cycle)
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _is_offer(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
        lines += (b"%b: %b\r\n" % header for header in self.headers if header[0] not in _OFFER)
        return b"".join([*lines, b"\r\n"])

    def _close_at(self, time: float) -> None:
        """Close the connection then, unless more has been read."""
        self._due = time
        timer = self.timeout_keep_alive_task
        if timer is None or self._timer_at > time:
            if timer is not None:
                timer.cancel()
            self._arm(time)

    def _arm(self, time: float) -> None:
        self._timer_at = time
        self.timeout_keep_alive_task = self.loop.call_at(time, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self._due - self.loop.time() > TIMER_SLACK_SECONDS:
            if self._due != math.inf:
                self._arm(self._due)
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Say what is wrong and close, when those before it have their answers."""
        running = self._running
        if running is not None and not running.response_complete:
            if not running.more_body:
                self._fault = (status, message, code)
                return
            running.gone()
        if running is None or running.response_complete or not running.response_started:
            body = error_body(message, "invalid_request_error", None, code)
            lines = [b"%b: %b\r\n" % header for header in self.server_state.default_headers]
            lines += (b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body),)
            self.transport.write(b"".join([STATUS_LINE[status], *lines, b"connection: close\r\n\r\n", body]))
        self.transport.close()
