"""A stream is passed on to its end, and the end has one name, whatever came before it."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from gateway.policy.clock import ManualClock
from gateway.upstream.errors import IdleTimeout, UpstreamAborted, UpstreamError
from gateway.upstream.relay import StreamEnd, relay_stream
from gateway.upstream.stream_observer import Dialect, StreamObserver
from tests.support.bare_connection import Exchange, begin
from tests.support.scripted_engine import DONE, FINISH, ROLE, event, token, usage_event
from tests.support.typed_streams import (
    message_closing,
    message_delta_event,
    response_closing,
    response_delta,
    response_usage,
    typed_event,
)

pytestmark = pytest.mark.anyio

RESET = UpstreamAborted("reset")
SILENCE = IdleTimeout("silence")
ONE = token("one")
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ERROR = event({"error": {"message": "engine full", "code": 500}})
TYPED_ERROR = typed_event("error", {"type": "error", "error": {"message": "engine full"}})
RESPONSE_END = response_closing(["one"], response_usage(1, 1))
MESSAGE_END = message_closing(input_tokens=1, output_tokens=1)


class Pieces:
    """A response that brings these pieces, and then ends in order or fails."""

    def __init__(self, pieces: list[bytes], error: UpstreamError | None) -> None:
        self._pieces = pieces
        self._error = error

    async def read(self) -> bytes:
        if self._pieces:
            return self._pieces.pop(0)
        if self._error is not None:
            raise self._error
        return b""


class Reader:
    """A client. With `directly` it can be written to from a callback, and is slow after these pieces."""

    def __init__(self, *, directly: bool = False, slow_after: Iterable[int] = ()) -> None:
        self.written: list[bytes] = []
        self.is_held_up = False
        self.on_writable: Callable[[], None] | None = None
        self._directly = directly
        self._slow_after = frozenset(slow_after)

    async def write(self, piece: bytes) -> None:
        self.written.append(piece)

    def direct(self) -> "Reader | None":
        return self if self._directly else None

    def write_now(self, piece: bytes) -> bool:
        self.written.append(piece)
        return len(self.written) not in self._slow_after

    def held_up(self) -> None:
        self.is_held_up = True

    def taken(self) -> None:
        self.is_held_up = False


async def relayed(
    pieces: list[bytes],
    error: UpstreamError | None = None,
    *,
    dialect: Dialect = "chat",
    strip: bool = False,
    needs_end_mark: bool = True,
    directly: bool = False,
) -> tuple[StreamEnd, bytes]:
    observer, reader = StreamObserver(dialect, strip), Reader(directly=directly)
    response: Any = Pieces(list(pieces), error)
    feed = None
    if directly:
        exchange = begin(asyncio.get_running_loop())
        response = exchange.response
        feed = feeding(exchange, pieces, error)
        next(feed)  # the head, and the first piece before anybody is there to take it
    relaying = asyncio.ensure_future(
        relay_stream(response, observer, reader, ManualClock(), needs_end_mark=needs_end_mark)
    )
    for _ in feed or ():
        await asyncio.sleep(0)
    end = await relaying
    assert all(reader.written), "an empty piece would end a chunked body"
    assert not reader.is_held_up
    assert reader.on_writable is None
    return end, b"".join(reader.written)


def feeding(exchange: Exchange, pieces: list[bytes], error: UpstreamError | None) -> Iterator[None]:
    connection = exchange.connection
    connection.data_received(HEAD)
    for number, piece in enumerate(pieces):
        connection.data_received(b"%x\r\n%b\r\n" % (len(piece), piece))
        if number == 0:
            yield
        yield
    if error is not None:
        connection.fail(error)
    else:
        connection.data_received(b"0\r\n\r\n")
    yield


BOTH_WAYS = pytest.mark.parametrize("directly", [False, True], ids=["awaited", "directly"])


@BOTH_WAYS
@pytest.mark.parametrize(
    ("dialect", "pieces", "error", "expected"),
    [
        ("chat", [ROLE, ONE, FINISH, DONE], None, StreamEnd.COMPLETE),
        ("chat", [ROLE, ONE, FINISH], None, StreamEnd.COMPLETE),
        ("chat", [ROLE, ONE, DONE], None, StreamEnd.COMPLETE),
        ("chat", [ROLE, ONE], None, StreamEnd.BROKEN_OFF),
        ("chat", [], None, StreamEnd.BROKEN_OFF),
        ("chat", [ROLE, ONE, FINISH, DONE], RESET, StreamEnd.COMPLETE),
        ("chat", [ROLE, ONE, FINISH, DONE], SILENCE, StreamEnd.COMPLETE),
        ("chat", [ROLE, ONE, FINISH], RESET, StreamEnd.BROKEN_OFF),
        ("chat", [ROLE, ONE], RESET, StreamEnd.BROKEN_OFF),
        ("chat", [ROLE, ONE], SILENCE, StreamEnd.SILENT),
        ("chat", [ROLE, ONE, ERROR], None, StreamEnd.ERROR_EVENT),
        ("chat", [ROLE, ONE, ERROR, DONE], None, StreamEnd.ERROR_EVENT),
        ("chat", [ROLE, ONE, ERROR], RESET, StreamEnd.ERROR_EVENT),
        ("chat", [ROLE, ONE, ERROR], SILENCE, StreamEnd.ERROR_EVENT),
        ("chat", [ROLE, ONE, ERROR, DONE], RESET, StreamEnd.ERROR_EVENT),
        ("chat", [ROLE, ONE, ERROR, ONE[:30]], RESET, StreamEnd.ERROR_EVENT),
        ("chat", [ROLE, ONE, ERROR[:30]], RESET, StreamEnd.BROKEN_OFF),
        ("chat", [ROLE, ONE, b"event: error\ndata: {"], RESET, StreamEnd.BROKEN_OFF),
        ("responses", [response_delta("one", 4), *RESPONSE_END], RESET, StreamEnd.COMPLETE),
        ("responses", [response_delta("one", 4)], None, StreamEnd.BROKEN_OFF),
        ("responses", [response_delta("one", 4), TYPED_ERROR], RESET, StreamEnd.ERROR_EVENT),
        ("messages", [message_delta_event("one"), *MESSAGE_END], RESET, StreamEnd.COMPLETE),
        ("messages", [message_delta_event("one"), *MESSAGE_END[:-1]], None, StreamEnd.COMPLETE),
        ("messages", [message_delta_event("one"), TYPED_ERROR], RESET, StreamEnd.ERROR_EVENT),
        ("messages", [message_delta_event("one"), TYPED_ERROR[:40]], RESET, StreamEnd.BROKEN_OFF),
    ],
)
async def test_how_a_stream_ended(
    dialect: Dialect, pieces: list[bytes], error: UpstreamError | None, expected: StreamEnd, directly: bool
) -> None:
    """An error that the engine has told, then the end mark, speak louder than how the connection went."""
    assert await relayed(pieces, error, dialect=dialect, directly=directly) == (expected, b"".join(pieces))


async def test_a_stream_whose_end_marks_are_not_known() -> None:
    """It is complete when its body ends in order, and not when it is cut."""
    assert (await relayed([b"data: x\n\n"], needs_end_mark=False))[0] is StreamEnd.COMPLETE
    assert (await relayed([b"data: x\n\n"], RESET, needs_end_mark=False))[0] is StreamEnd.BROKEN_OFF


@BOTH_WAYS
@pytest.mark.parametrize("error", [None, RESET], ids=["in order", "reset"])
async def test_half_a_usage_chunk_at_the_end(error: UpstreamError | None, directly: bool) -> None:
    """It does not reach a client that did not ask for usage, nor does its text count as anything."""
    usage = usage_event(3, 1)
    for length in (1, len(usage) // 2, len(usage) - 3):
        end, out = await relayed([ROLE, ONE, FINISH, usage[:length]], error, strip=True, directly=directly)
        assert end is (StreamEnd.COMPLETE if error is None else StreamEnd.BROKEN_OFF)
        assert out == ROLE + ONE + FINISH


async def test_the_first_token_is_told_once() -> None:
    """And before it is written, so that the place of a trial is free when the client reads on."""
    told: list[int] = []
    reader = Reader()
    response = Pieces([ROLE, ONE, ONE, FINISH, DONE], None)
    await relay_stream(
        response,  # type: ignore[arg-type]
        StreamObserver("chat", False, lambda: told.append(len(reader.written))),
        reader,
        ManualClock(),
    )
    assert told == [1]


async def test_a_slow_reader_holds_the_engine_back() -> None:
    """Written to from a callback, it says when it is behind: nothing more is read until it has caught up."""
    exchange, reader = begin(asyncio.get_running_loop()), Reader(directly=True, slow_after=(2,))
    exchange.connection.data_received(HEAD)
    relaying = asyncio.ensure_future(
        relay_stream(exchange.response, StreamObserver("chat", False), reader, ManualClock())
    )
    await asyncio.sleep(0)
    for number, piece in enumerate((ROLE, ONE)):
        assert (reader.is_held_up, exchange.transport.paused) == (False, False), number
        exchange.connection.data_received(b"%x\r\n%b\r\n" % (len(piece), piece))
    assert (reader.is_held_up, exchange.transport.paused) == (True, True)
    assert reader.on_writable is not None
    reader.on_writable()
    assert (reader.is_held_up, exchange.transport.paused) == (False, False)
    for piece in (FINISH, DONE, b""):
        exchange.connection.data_received(b"%x\r\n%b\r\n" % (len(piece), piece))
    assert await relaying is StreamEnd.COMPLETE
    assert reader.written == [ROLE, ONE, FINISH, DONE]


@pytest.mark.parametrize("ended", [False, True], ids=["in the middle", "with the end behind it"])
async def test_what_goes_wrong_in_writing_ends_the_relay(ended: bool) -> None:
    """It is not the engine's fault, and not silently dropped."""

    class Broken(Reader):
        def write_now(self, piece: bytes) -> bool:
            raise RuntimeError("no")

    exchange = begin(asyncio.get_running_loop())
    exchange.connection.data_received(HEAD)
    relaying = asyncio.ensure_future(
        relay_stream(
            exchange.response,
            StreamObserver("chat", False),
            Broken(directly=True),
            ManualClock(),
        )
    )
    await asyncio.sleep(0)
    exchange.connection.data_received(b"%x\r\n%b\r\n" % (len(ROLE), ROLE))
    if ended:
        exchange.connection.data_received(b"0\r\n\r\n")
    with pytest.raises(RuntimeError, match="no"):
        await relaying
