"""Pass an engine's stream on as it comes, and know how it ended.

Back-pressure is the reader's: the next piece is read only when the last one was taken. Nothing is held
back but the beginning of an event that may be the usage chunk the client did not ask for.
"""

from collections.abc import Awaitable, Callable
from enum import Enum

from gateway.policy.clock import Clock
from gateway.upstream.client import Response
from gateway.upstream.errors import IdleTimeout, UpstreamError
from gateway.upstream.stream_observer import StreamObserver


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
    write: Callable[[bytes], Awaitable[None]],
    on_first_token: Callable[[], None],
    clock: Clock,
    *,
    needs_end_mark: bool = True,
) -> StreamEnd:
    """Relay until the stream's end, and say which end it was. Of a stream whose end marks are not known
    (`needs_end_mark` False) a body that ends in order is a complete one."""
    waiting_for_first = True
    try:
        while piece := await response.read():
            out = observer.feed(piece, clock.now())
            if waiting_for_first and observer.first_token_at is not None:
                waiting_for_first = False
                on_first_token()
            if out:
                await write(out)
    except UpstreamError as error:
        was_told = observer.error is not None  # in a whole event: one that is cut off tells nobody anything
        await _write_held(observer, write, clock)
        if was_told:
            return StreamEnd.ERROR_EVENT
        if observer.done:
            return StreamEnd.COMPLETE
        return StreamEnd.SILENT if isinstance(error, IdleTimeout) else StreamEnd.BROKEN_OFF
    await _write_held(observer, write, clock)
    if observer.error is not None:
        return StreamEnd.ERROR_EVENT
    marked = observer.done or observer.finished
    return StreamEnd.COMPLETE if marked or not needs_end_mark else StreamEnd.BROKEN_OFF


async def _write_held(
    observer: StreamObserver, write: Callable[[bytes], Awaitable[None]], clock: Clock
) -> None:
    held = observer.end(clock.now())
    if held:
        await write(held)
