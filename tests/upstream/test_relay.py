"""A stream is passed on to its end, and the end has one name, whatever came before it."""

import pytest

from gateway.policy.clock import ManualClock
from gateway.upstream.errors import IdleTimeout, UpstreamAborted, UpstreamError
from gateway.upstream.relay import StreamEnd, relay_stream
from gateway.upstream.stream_observer import Dialect, StreamObserver
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


async def relayed(
    pieces: list[bytes],
    error: UpstreamError | None = None,
    *,
    dialect: Dialect = "chat",
    strip: bool = False,
    needs_end_mark: bool = True,
) -> tuple[StreamEnd, bytes]:
    observer = StreamObserver(dialect, strip)
    out: list[bytes] = []

    async def write(piece: bytes) -> None:
        out.append(piece)

    response = Pieces(list(pieces), error)
    end = await relay_stream(
        response,  # type: ignore[arg-type]
        observer,
        write,
        lambda: None,
        ManualClock(),
        needs_end_mark=needs_end_mark,
    )
    assert all(out), "an empty piece would end a chunked body"
    return end, b"".join(out)


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
    dialect: Dialect, pieces: list[bytes], error: UpstreamError | None, expected: StreamEnd
) -> None:
    """An error that the engine has told, then the end mark, speak louder than how the connection went."""
    assert await relayed(pieces, error, dialect=dialect) == (expected, b"".join(pieces))


async def test_a_stream_whose_end_marks_are_not_known() -> None:
    """It is complete when its body ends in order, and not when it is cut."""
    assert (await relayed([b"data: x\n\n"], needs_end_mark=False))[0] is StreamEnd.COMPLETE
    assert (await relayed([b"data: x\n\n"], RESET, needs_end_mark=False))[0] is StreamEnd.BROKEN_OFF


@pytest.mark.parametrize("error", [None, RESET], ids=["in order", "reset"])
async def test_half_a_usage_chunk_at_the_end(error: UpstreamError | None) -> None:
    """It does not reach a client that did not ask for usage, nor does its text count as anything."""
    usage = usage_event(3, 1)
    for length in (1, len(usage) // 2, len(usage) - 3):
        end, out = await relayed([ROLE, ONE, FINISH, usage[:length]], error, strip=True)
        assert end is (StreamEnd.COMPLETE if error is None else StreamEnd.BROKEN_OFF)
        assert out == ROLE + ONE + FINISH


async def test_the_first_token_is_told_once() -> None:
    """And before it is written, so that the place of a trial is free when the client reads on."""
    told: list[int] = []
    written: list[bytes] = []

    async def write(piece: bytes) -> None:
        written.append(piece)

    response = Pieces([ROLE, ONE, ONE, FINISH, DONE], None)
    await relay_stream(
        response,  # type: ignore[arg-type]
        StreamObserver("chat", False),
        write,
        lambda: told.append(len(written)),
        ManualClock(),
    )
    assert told == [1]
