"""What goes back to the client: the engine's answer, a stream, or the gateway's own word."""

from collections.abc import Callable

from gateway.api.channel import Channel
from gateway.api.error_forms import ErrorForm
from gateway.api.errors import Problem
from gateway.api.headers import Header
from gateway.policy.clock import Clock
from gateway.upstream.relay import DirectWriter

LARGE_ANSWER_BYTES = 64 * 1024


class Reply:
    """The response of one exchange. `common_headers` are asked for once, when it starts; `errors` is how the
    client's API writes them.

    `writing_since` is when the write that is under way began (ns), None between writes: a reader that takes
    nothing shows there.
    """

    __slots__ = ("_channel", "_clock", "_common_headers", "_errors", "_method", "status", "writing_since")

    def __init__(
        self,
        channel: Channel,
        method: str,
        clock: Clock,
        common_headers: Callable[[], list[Header]],
        errors: ErrorForm,
    ) -> None:
        self._channel = channel
        self._method = method
        self._clock = clock
        self._common_headers = common_headers
        self._errors = errors
        self.status: int | None = None
        self.writing_since: int | None = None

    @property
    def started(self) -> bool:
        return self.status is not None

    async def start(
        self, status: int, headers: list[Header], *, length: int | None = None, close: bool = False
    ) -> None:
        """The head. Without a `length` the body ends where it ends. `close`: the connection behind it."""
        headers += self._common_headers()
        self.writing_since = self._clock.now()
        await self._channel.start(status, headers, length=length, close=close)
        self.writing_since = None
        self.status = status

    async def write(self, piece: bytes) -> None:
        self.writing_since = self._clock.now()
        await self._channel.write(piece)
        self.writing_since = None

    async def finish(self) -> None:
        self.writing_since = self._clock.now()
        await self._channel.finish()
        self.writing_since = None

    async def whole(self, status: int, headers: list[Header], body: bytes) -> None:
        """A response with a body of known length."""
        length = None if status == 204 else len(body)
        if self._method == "HEAD":
            body = b""
        if len(body) > LARGE_ANSWER_BYTES:
            # The last write returns at once. With one more behind it the exchange lasts, and a stall is
            # noticed, until the reader has taken nearly all.
            await self.start(status, headers, length=length)
            await self.write(body)
            await self.finish()
            return
        headers += self._common_headers()
        self.writing_since = self._clock.now()
        await self._channel.whole(status, headers, body, length)
        self.writing_since = None
        self.status = status

    def direct(self) -> DirectWriter | None:
        """For a stream that has begun: how to write it from a callback, if that can be. Whoever does so says
        with `held_up` and `taken` whether the reader takes it."""
        return self._channel.direct()

    def held_up(self) -> None:
        """The reader has not taken what was written."""
        if self.writing_since is None:
            self.writing_since = self._clock.now()

    def taken(self) -> None:
        self.writing_since = None

    async def problem(self, problem: Problem, random: Callable[[], float]) -> None:
        """The gateway's own answer. Where it closes the connection, `finish` is still to be called."""
        headers = [
            (b"content-type", b"application/json"),
            (b"x-qos-outcome", problem.outcome.value.encode()),
            (b"x-qos-error-source", b"gateway"),
            *problem.headers,
            *problem.retry_headers(random),
        ]
        body = self._errors.body(problem)
        if not problem.close:
            await self.whole(problem.status, headers, body)
            return
        await self.unfinished(problem.status, headers, body)

    async def unfinished(self, status: int, headers: list[Header], body: bytes) -> None:
        """A whole response to a request that is still coming in: the connection cannot be used again.
        `finish` is still to be called."""
        await self.start(status, headers, length=len(body), close=True)
        await self.write(body)

    async def error_event(self, problem: Problem, number: int, mid_event: bool) -> None:
        """The last event of a stream that broke off, with its number where events have one. No end of the
        body follows, so that the client's HTTP library sees that it was cut."""
        gap = b"\n\n" if mid_event else b""
        await self.write(gap + self._errors.event(problem, number))

    def cut(self) -> None:
        self._channel.cut()

    def close(self) -> None:
        """There will be no more of it. It lets go of the exchange, which holds it: both are freed at once."""
        self._common_headers = list
