"""Pass an engine's stream on as it comes, and know how it ended.

Back-pressure is the reader's: of a stream whose reader is slow no more is read. Nothing is held back but the
beginning of an event that may be the usage chunk the client did not ask for.

A piece is passed on where it arrives, inside the callback that has read it, and no task is woken for it. Only
where that cannot be (a decoded body, a server that is not ours) one piece is awaited after another.
"""

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Protocol

from gateway.policy.clock import Clock
from gateway.upstream.client import Response
from gateway.upstream.errors import IdleTimeout, UpstreamError
from gateway.upstream.response import UpstreamResponse
from gateway.upstream.stream_observer import StreamObserver


class DirectWriter(Protocol):
    """Writes to the client from a callback."""

    on_writable: Callable[[], None] | None

    def write_now(self, piece: bytes) -> bool:
        """False when the reader is slow: the next piece had better wait for `on_writable`."""
        ...


class Reader(Protocol):
    """The client, as far as a stream needs it."""

    async def write(self, piece: bytes) -> None: ...
    def direct(self) -> DirectWriter | None: ...
    def held_up(self) -> None:
        """It has not taken what was written from a callback."""
        ...

    def taken(self) -> None: ...


class StreamEnd(Enum):
    COMPLETE = "complete"
    ERROR_EVENT = "error event"
    """The engine reported an error inside the stream; the client has it, however the body ended then."""
    BROKEN_OFF = "broken off"
    """The connection ended, or the body did, without an end mark or a finish reason."""
    SILENT = "silent"
    """Nothing came for `idle_seconds`."""


async def relay_stream(
    response: Response,
    observer: StreamObserver,
    reader: Reader,
    clock: Clock,
    *,
    needs_end_mark: bool = True,
) -> StreamEnd:
    """Relay until the stream's end, and say which end it was. Of a stream whose end marks are not known
    (`needs_end_mark` False) a body that ends in order is a complete one."""
    direct = reader.direct() if isinstance(response, UpstreamResponse) else None
    try:
        if direct is not None and isinstance(response, UpstreamResponse):
            await _pass_on_directly(response, observer, reader, direct, clock)
        else:
            await _pass_on(response, observer, reader.write, clock)
    except UpstreamError as error:
        was_told = observer.error is not None  # in a whole event: one that is cut off tells nobody anything
        await _write_held(observer, reader.write, clock)
        if was_told:
            return StreamEnd.ERROR_EVENT
        if observer.done:
            return StreamEnd.COMPLETE
        return StreamEnd.SILENT if isinstance(error, IdleTimeout) else StreamEnd.BROKEN_OFF
    await _write_held(observer, reader.write, clock)
    if observer.error is not None:
        return StreamEnd.ERROR_EVENT
    marked = observer.done or observer.finished
    return StreamEnd.COMPLETE if marked or not needs_end_mark else StreamEnd.BROKEN_OFF


async def _pass_on(
    response: Response, observer: StreamObserver, write: Callable[[bytes], Awaitable[None]], clock: Clock
) -> None:
    while piece := await response.read():
        out = observer.feed(piece, clock.now())
        if out:
            await write(out)


async def _pass_on_directly(
    response: UpstreamResponse, observer: StreamObserver, reader: Reader, direct: DirectWriter, clock: Clock
) -> None:
    observe, now, write_now = observer.feed, clock.now, direct.write_now

    def pass_on(piece: bytes) -> None:
        out = observe(piece, now())
        if out and not write_now(out):
            reader.held_up()
            response.hold()

    def go_on() -> None:
        reader.taken()
        response.go_on()

    direct.on_writable = go_on
    try:
        await response.pass_to(pass_on)
    finally:
        direct.on_writable = None
        reader.taken()


async def _write_held(
    observer: StreamObserver, write: Callable[[bytes], Awaitable[None]], clock: Clock
) -> None:
    held = observer.end(clock.now())
    if held:
        await write(held)
