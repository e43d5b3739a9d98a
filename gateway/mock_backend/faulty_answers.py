"""How each fault is carried out: around the application, or in its place.

Most faults stand between the application and its client: they change what it sends, or let it pass up to a
point and then do something else. There the application is stopped by an exception out of its `send`, so
that it gives its sequences back as on any other way out. What no HTTP server would send is written to the
connection underneath.
"""

import asyncio
import http
import os
import socket
import struct
import zlib
from collections.abc import Awaitable, Callable, Mapping

from .app import MockGpuApp
from .asgi import EVENT_STREAM, START, Message, Receive, Send, client_gone, read_body, respond, response_body
from .faults import Fault, FaultKind
from .openai_answers import DONE
from .request_errors import RequestError, engine_failed

CRASHED = 70
"""The exit status of a process that was told to crash: EX_SOFTWARE of sysexits.h."""
_LAST_EVENTS = (DONE, b"event: response.completed\n", b"event: message_stop\n")
_LAST_CHUNK = b"0\r\n\r\n"
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""Lingering, for zero seconds."""

Act = Callable[[], Awaitable[None]]


class Cut(Exception):
    """The application is to send no more."""


class Exchange:
    """A request, the application that answers it, and the connection it came on."""

    def __init__(
        self,
        app: MockGpuApp,
        stop_listening: Callable[[float], None],
        scope: Message,
        receive: Receive,
        send: Send,
    ) -> None:
        self.app = app
        self.stop_listening = stop_listening
        self.send = send
        self._scope = scope
        self._receive = receive
        self._transport: asyncio.Transport = scope["transport"]

    @property
    def path(self) -> str:
        path: str = self._scope["path"]
        return path

    async def run(self, send: Send) -> None:
        """Have the application answer by way of `send`, until it has done or was cut."""
        try:
            await self.app(self._scope, self._receive, send)
        except Cut:
            pass

    async def taken(self) -> None:
        """The request has come whole, or its client has gone."""
        await read_body(self._receive)

    async def gone(self) -> None:
        await client_gone(self._receive)

    async def answer(self, error: RequestError) -> None:
        await respond(self.send, error.status, error.body(self.path))

    def write(self, data: bytes) -> None:
        """Past the server. Raises Cut when the connection has ended."""
        if self._transport.is_closing():
            raise Cut
        self._transport.write(data)

    async def flushed(self) -> None:
        """All that was sent is on its way, or never will be."""
        while self._transport.get_write_buffer_size() and not self._transport.is_closing():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        self._transport.close()

    async def reset(self) -> None:
        await self.flushed()
        if not self._transport.is_closing():
            connection: socket.socket = self._transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._transport.abort()

    async def crash(self) -> None:
        await self.flushed()
        os._exit(CRASHED)


async def _refuse(exchange: Exchange, fault: Fault) -> None:
    await exchange.taken()
    exchange.stop_listening(fault.seconds)
    await exchange.reset()


async def _reset_before_headers(exchange: Exchange, fault: Fault) -> None:
    await exchange.taken()
    await exchange.reset()


async def _reset_after_headers(exchange: Exchange, fault: Fault) -> None:
    async def send(message: Message) -> None:
        await exchange.send(message)
        await exchange.reset()
        raise Cut

    await exchange.run(send)


async def _reset_mid_stream(exchange: Exchange, fault: Fault) -> None:
    await _after_tokens(exchange, fault.after, exchange.reset)


async def _silence(exchange: Exchange, fault: Fault) -> None:
    await _after_tokens(exchange, fault.after, exchange.gone)


async def _silence_before_headers(exchange: Exchange, fault: Fault) -> None:
    await exchange.taken()  # and no more: whoever has struck waits for the client to go


async def _crash(exchange: Exchange, fault: Fault) -> None:
    if fault.after is None:
        await exchange.crash()
    await _after_tokens(exchange, fault.after, exchange.crash)


async def _error_event(exchange: Exchange, fault: Fault) -> None:
    async def end_in_error() -> None:
        await exchange.send(response_body(engine_failed().events(exchange.path)))
        await exchange.send(response_body(b"", more=False))

    async def not_whole(message: Message) -> None:
        if message["type"] == START and not _is_stream(message):
            await exchange.answer(engine_failed())
            raise Cut

    await _after_tokens(exchange, fault.after, end_in_error, not_whole)


async def _queue_full(exchange: Exchange, fault: Fault) -> None:
    await exchange.taken()
    await exchange.answer(exchange.app.refuse_for_want_of_room())


async def _error_500(exchange: Exchange, fault: Fault) -> None:
    await exchange.taken()
    await exchange.answer(engine_failed())


async def _drip(exchange: Exchange, fault: Fault) -> None:
    """The bytes of the wire, the framing included; the connection is not kept."""
    framed = False

    async def send(message: Message) -> None:
        nonlocal framed
        if message["type"] == START:
            framed = not any(name == b"content-length" for name, _ in message["headers"])
            data = _head(message, framed)
        elif framed:
            body, more = message["body"], message["more_body"]
            data = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"" if more else _LAST_CHUNK)
        else:
            data = message["body"]
        for byte in data:
            exchange.write(bytes((byte,)))
            await asyncio.sleep(fault.seconds)
        if message["type"] != START and not message["more_body"]:
            await exchange.close()

    await exchange.run(send)


async def _short_length(exchange: Exchange, fault: Fault) -> None:
    head: Message = {}

    async def send(message: Message) -> None:
        if message["type"] == START and not _is_stream(message):
            head.update(message)
        elif head:
            body = message["body"]
            promised = max(0, len(body) - fault.bytes)
            await exchange.send(_with_headers(head, {b"content-length": b"%d" % promised}))
            await exchange.send(response_body(body[:promised]))
            exchange.write(body[promised:])  # before the server holds the answer for complete, and may close
            await exchange.send(response_body(b"", more=False))
        elif message["type"] == START or message["more_body"]:
            await exchange.send(message)
        else:
            await exchange.send(message)
            exchange.write(b"x" * fault.bytes)

    await exchange.run(send)


async def _long_length(exchange: Exchange, fault: Fault) -> None:
    async def send(message: Message) -> None:
        if message["type"] == START:
            length = dict(message["headers"]).get(b"content-length")
            longer = {} if length is None else {b"content-length": b"%d" % (int(length) + fault.bytes)}
            await exchange.send(_with_headers(message, longer))
            return
        await exchange.send({**message, "more_body": True})
        if not message["more_body"]:
            await exchange.close()
            raise Cut

    await exchange.run(send)


async def _gzip(exchange: Exchange, fault: Fault) -> None:
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)

    def packed(message: Message) -> bytes:
        flush = zlib.Z_SYNC_FLUSH if message["more_body"] else zlib.Z_FINISH
        return packer.compress(message["body"]) + packer.flush(flush)

    await _rewritten(exchange, packed, {b"content-encoding": b"gzip"})


async def _huge_event(exchange: Exchange, fault: Fault) -> None:
    left = fault.after

    def padded(message: Message) -> bytes:
        """With blanks in front of the JSON, or behind it: it means what it meant."""
        nonlocal left
        body: bytes = message["body"]
        if body and not message["more_body"]:
            return body + b" " * fault.bytes
        if message["tokens"] and left is not None:
            left -= 1
            if left < 0:
                left = None
                return body.replace(b"data: ", b"data: " + b" " * fault.bytes, 1)
        return body

    await _rewritten(exchange, padded, {})


async def _no_done(exchange: Exchange, fault: Fault) -> None:
    async def send(message: Message) -> None:
        if message["type"] == START or not message["body"].startswith(_LAST_EVENTS):
            await exchange.send(message)

    await exchange.run(send)


async def _slow_health(exchange: Exchange, fault: Fault) -> None:
    try:
        async with asyncio.timeout(fault.seconds):
            await exchange.gone()
    except TimeoutError:
        await exchange.run(exchange.send)


async def _health_500(exchange: Exchange, fault: Fault) -> None:
    await respond(exchange.send, 500, b"", content_type=None)


CARRIED_OUT: Mapping[FaultKind, Callable[[Exchange, Fault], Awaitable[None]]] = {
    FaultKind.REFUSE: _refuse,
    FaultKind.RESET_BEFORE_HEADERS: _reset_before_headers,
    FaultKind.RESET_AFTER_HEADERS: _reset_after_headers,
    FaultKind.RESET_MID_STREAM: _reset_mid_stream,
    FaultKind.SILENCE: _silence,
    FaultKind.SILENCE_BEFORE_HEADERS: _silence_before_headers,
    FaultKind.DRIP: _drip,
    FaultKind.SHORT_LENGTH: _short_length,
    FaultKind.LONG_LENGTH: _long_length,
    FaultKind.QUEUE_FULL: _queue_full,
    FaultKind.ERROR_500: _error_500,
    FaultKind.GZIP: _gzip,
    FaultKind.HUGE_EVENT: _huge_event,
    FaultKind.ERROR_EVENT: _error_event,
    FaultKind.NO_DONE: _no_done,
    FaultKind.CRASH: _crash,
    FaultKind.SLOW_HEALTH: _slow_health,
    FaultKind.HEALTH_500: _health_500,
}


async def _after_tokens(exchange: Exchange, after: int | None, act: Act, see: Send | None = None) -> None:
    """Let `after` tokens of a stream pass, or half the body of a plain answer; then act, and nothing more
    passes. A stream of fewer tokens stays whole. `see` sees all before it passes."""
    left = after or 0

    async def send(message: Message) -> None:
        nonlocal left
        if see is not None:
            await see(message)
        if message["type"] == START:
            await exchange.send(message)
            return
        body, tokens = message["body"], message["tokens"]
        if body and not message["more_body"]:
            await exchange.send(response_body(body[: len(body) // 2]))
            left = 0
        elif not tokens or left:
            await exchange.send(message)
            left -= tokens
            if not tokens or left:
                return
        await act()
        raise Cut

    await exchange.run(send)


async def _rewritten(
    exchange: Exchange, body_of: Callable[[Message], bytes], headers: Mapping[bytes, bytes]
) -> None:
    """The answer with other bodies in its messages, and its head to match."""
    held: Message | None = None

    async def send(message: Message) -> None:
        nonlocal held
        if message["type"] == START and _is_stream(message):
            await exchange.send(_with_headers(message, headers))
        elif message["type"] == START:
            held = message
        else:
            body = body_of(message)
            if held is not None:
                length = {b"content-length": b"%d" % len(body)}
                await exchange.send(_with_headers(held, {**headers, **length}))
                held = None
            await exchange.send({**message, "body": body})

    await exchange.run(send)


def _is_stream(head: Message) -> bool:
    return (b"content-type", EVENT_STREAM) in head["headers"]


def _with_headers(head: Message, headers: Mapping[bytes, bytes]) -> Message:
    kept = [header for header in head["headers"] if header[0] not in headers]
    return {**head, "headers": [*kept, *headers.items()]}


def _head(message: Message, framed: bool) -> bytes:
    """The head of an answer as bytes, chunked if it is framed."""
    status = http.HTTPStatus(message["status"])
    headers = [*message["headers"], (b"connection", b"close")]
    if framed:
        headers.append((b"transfer-encoding", b"chunked"))
    lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
    lines += [b"%b: %b" % header for header in headers]
    return b"\r\n".join([*lines, b"\r\n"])
