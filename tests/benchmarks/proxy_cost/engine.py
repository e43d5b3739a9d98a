"""The engine stand-in: a process that answers chat completions and costs little.

    python -m tests.benchmarks.proxy_cost.engine --port 0     # prints the port it has

How streams go is told by `POST /pace/MODE/MILLISECONDS` and holds for those that begin from then on:

* `turns`: as in the iterations of a real engine, every so many milliseconds all running streams write one
  chunk each. 0, as it starts: as fast as it can.
* `clocks`: every stream has a clock of its own, so that chunks come spread in time, as from many engines.
"""

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any, cast

import httptools
import msgspec
import uvloop

from tests.benchmarks.proxy_cost.engine_answers import (
    EMPTY,
    NOT_FOUND,
    OTHERS,
    PLAIN,
    STREAM,
    STREAM_WITH_USAGE,
)

CHAT = b"/v1/chat/completions"
PACE = b"/pace/"  # then MODE/MILLISECONDS


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _ChatRequest(msgspec.Struct):
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


_read_chat = msgspec.json.Decoder(_ChatRequest).decode


class Engine:
    """What its connections share: the pace, and the turns of the streams."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._own_clocks = False
        self._interval_seconds = 0.0
        self._running: list[_Stream] = []

    def set_pace(self, mode: bytes, milliseconds: float) -> None:
        self._own_clocks = mode == b"clocks"
        self._interval_seconds = milliseconds / 1000

    def begin(self, stream: "_Stream") -> None:
        if self._own_clocks:
            self._write_on_clock(stream, self._loop.time(), self._interval_seconds)
            return
        if not self._running:
            self._loop.call_soon(self._turn, self._loop.time())
        self._running.append(stream)

    def _turn(self, due: float) -> None:
        self._running = [stream for stream in self._running if stream.write_next()]
        if self._running:
            due = max(due + self._interval_seconds, self._loop.time())
            self._loop.call_at(due, self._turn, due)

    def _write_on_clock(self, stream: "_Stream", due: float, interval: float) -> None:
        if stream.write_next():
            self._loop.call_at(due + interval, self._write_on_clock, stream, due + interval, interval)


class _Stream:
    __slots__ = ("_pieces", "_transport")

    def __init__(self, transport: asyncio.Transport, pieces: Sequence[bytes]) -> None:
        self._transport = transport
        self._pieces = iter(pieces)

    def write_next(self) -> bool:
        """False: there was nothing left, or nobody is there any more."""
        piece = next(self._pieces, None)
        if piece is None or self._transport.is_closing():
            return False
        self._transport.write(piece)
        return True


class EngineProtocol(asyncio.Protocol):
    _transport: asyncio.Transport

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        self._body.clear()
        if self._url == CHAT:
            self._complete(body)
        elif self._url.startswith(PACE):
            mode, _, milliseconds = self._url.removeprefix(PACE).partition(b"/")
            self._engine.set_pace(mode, float(milliseconds))
            self._transport.write(EMPTY)
        else:
            self._transport.write(OTHERS.get(self._url, NOT_FOUND))

    def _complete(self, body: bytes) -> None:
        request = _read_chat(body)
        if not request.stream:
            self._transport.write(PLAIN)
            return
        options = request.stream_options
        pieces = STREAM_WITH_USAGE if options is not None and options.include_usage else STREAM
        self._engine.begin(_Stream(self._transport, pieces))


async def listen(port: int = 0) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    engine = Engine(loop)
    return await loop.create_server(lambda: EngineProtocol(engine), "127.0.0.1", port, backlog=1024)


async def _serve(port: int) -> None:
    server = await listen(port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.proxy_cost.engine")
    parser.add_argument("--port", type=int, default=0)
    arguments: Any = parser.parse_args()
    try:
        uvloop.run(_serve(arguments.port))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
