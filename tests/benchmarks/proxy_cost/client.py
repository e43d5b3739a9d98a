"""A lean client that stamps each read: connections for one exchange at a time, over asyncio transports."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from tests.benchmarks.proxy_cost.engine_answers import CHUNKS, DONE, MODEL, TEXT

PROMPT = "The harbour master counts the ships that come in with the tide. " * 14
"""About 900 bytes."""
_DATA = b"data: "
_CHUNK = b"data: {"


class WrongAnswer(Exception):
    """What came is not what the engine said; the message tells what."""


def chat_body(*, stream: bool) -> bytes:
    messages = [{"role": "user", "content": PROMPT}]
    return json.dumps({"model": MODEL, "messages": messages, "stream": stream, "max_tokens": CHUNKS}).encode()


def chat_request(url: str, headers: Mapping[str, str], *, stream: bool) -> bytes:
    body = chat_body(stream=stream)
    given = {
        "host": urlsplit(url).netloc,
        "content-type": "application/json",
        "content-length": str(len(body)),
        **headers,
    }
    lines = ["POST /v1/chat/completions HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(slots=True)
class Exchange:
    """One request and what came. Times are `time.perf_counter_ns`."""

    sent_at: int = 0
    ended_at: int = 0
    status: int = 0
    body: list[bytes] = field(default_factory=list)
    """One entry per read that had some of it."""
    read_at: list[int] = field(default_factory=list)
    """When those reads were."""

    @property
    def chunks_by_read(self) -> list[int]:
        """How many chunks began in each read, `[DONE]` not counted; reads where none did are left out."""
        counts = []
        tail = b""
        for data in self.body:
            counts.append((tail + data).count(_CHUNK))
            tail = (tail + data)[-len(_CHUNK) + 1 :]
        return [count for count in counts if count]

    def check_plain(self) -> None:
        """Raise WrongAnswer unless it is the engine's answer."""
        self._check_status()
        try:
            answer = json.loads(b"".join(self.body))
            complete = answer["choices"][0]["message"]["content"] and answer["usage"]["completion_tokens"]
        except (ValueError, LookupError, TypeError) as error:
            raise WrongAnswer(f"not a chat completion: {error!r}") from error
        if not complete:
            raise WrongAnswer("a chat completion without content or usage")

    def check_stream(self) -> None:
        """Raise WrongAnswer unless all words came, each in an event of its own, and `[DONE]`."""
        self._check_status()
        body = b"".join(self.body)
        if not body.rstrip().endswith(DONE.rstrip()):
            raise WrongAnswer(f"no [DONE] at the end of {len(body)} bytes")
        events = [event.removeprefix(_DATA) for event in body.split(b"\n\n") if event.startswith(_DATA)]
        try:
            words = [_content(json.loads(event)) for event in events[:-1]]
        except (ValueError, LookupError, TypeError) as error:
            raise WrongAnswer(f"not a stream of chunks: {error!r}") from error
        if "".join(words) != TEXT:
            raise WrongAnswer(f"{len(''.join(words))} characters of the {len(TEXT)} that were sent")
        if sum(map(bool, words)) != CHUNKS - 2:
            raise WrongAnswer(f"{sum(map(bool, words))} words of the {CHUNKS - 2} that were sent")

    def _check_status(self) -> None:
        if self.status != 200:
            said = b"".join(self.body)[:300].decode(errors="replace")
            raise WrongAnswer(f"status {self.status}: {said}")


def _content(chunk: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


class Connection(asyncio.Protocol):
    """`await connection.exchange(request)`; then the next. Raises ConnectionError when the peer hangs up."""

    _transport: asyncio.Transport
    _parser: Any

    def __init__(self) -> None:
        self._exchange = Exchange()
        self._ended: asyncio.Future[Exchange] | None = None
        self.idle = True

    @classmethod
    async def open(cls, url: str) -> "Connection":
        parts = urlsplit(url)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, parts.hostname or "", parts.port or 80)
        return connection

    def exchange(self, request: bytes) -> "asyncio.Future[Exchange]":
        """The request goes out before this returns."""
        self.idle = False
        self._parser = httptools.HttpResponseParser(self)
        self._exchange = Exchange()
        self._ended = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self._ended.set_exception(ConnectionResetError("closed between two requests"))
            return self._ended
        self._exchange.sent_at = time.perf_counter_ns()
        self._transport.write(request)
        return self._ended

    def close(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter_ns()
        exchange = self._exchange
        reads_before = len(exchange.body)
        self._parser.feed_data(data)
        if len(exchange.body) > reads_before:
            exchange.body[reads_before:] = [b"".join(exchange.body[reads_before:])]
            exchange.read_at.append(now)
        if self.idle and self._ended is not None and not self._ended.done():
            exchange.status = self._parser.get_status_code()
            exchange.ended_at = now
            self._ended.set_result(exchange)

    def on_body(self, body: bytes) -> None:
        self._exchange.body.append(body)

    def on_message_complete(self) -> None:
        self.idle = True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ConnectionResetError("the connection ended before the answer did"))
