"""What goes back to the client: the engine's answer, a stream, or the gateway's own word."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gateway.api.error_forms import ErrorForm
from gateway.api.errors import Problem
from gateway.api.headers import Header
from gateway.policy.clock import Clock

LARGE_ANSWER_BYTES = 64 * 1024


class Reply:
    """The response of one exchange. `common_headers` are asked for once, when it starts; `errors` is how the
    client's API writes them.

    `writing_since` is when the write that is under way began (ns), None between writes: a reader that takes
    nothing shows there.
    """

    __slots__ = ("_clock", "_common_headers", "_errors", "_scope", "_send", "status", "writing_since")

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
        clock: Clock,
        common_headers: Callable[[], list[Header]],
        errors: ErrorForm,
    ) -> None:
        self._scope = scope
        self._send = send
        self._clock = clock
        self._common_headers = common_headers
        self._errors = errors
        self.status: int | None = None
        self.writing_since: int | None = None

    @property
    def started(self) -> bool:
        return self.status is not None

    async def start(self, status: int, headers: list[Header]) -> None:
        headers += self._common_headers()
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, piece: bytes) -> None:
        self.writing_since = self._clock.now()
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self.writing_since = None

    async def finish(self, last: bytes = b"") -> None:
        self.writing_since = self._clock.now()
        await self._send({"type": "http.response.body", "body": last})
        self.writing_since = None

    async def whole(self, status: int, headers: list[Header], body: bytes) -> None:
        """A response with a body of known length."""
        if status != 204:
            headers.append((b"content-length", b"%d" % len(body)))
        if self._scope["method"] == "HEAD":
            body = b""
        await self.start(status, headers)
        if len(body) > LARGE_ANSWER_BYTES:
            # The last write returns at once. With one more behind it the exchange lasts, and a stall is
            # noticed, until the reader has taken nearly all.
            await self.write(body)
            body = b""
        await self.finish(body)

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
        framing = ((b"connection", b"close"), (b"content-length", b"%d" % len(body)))
        await self.start(status, [*headers, *framing])
        await self.write(body)

    async def error_event(self, problem: Problem, number: int, mid_event: bool) -> None:
        """The last event of a stream that broke off, with its number where events have one. No end of the
        body follows, so that the client's HTTP library sees that it was cut."""
        gap = b"\n\n" if mid_event else b""
        await self.write(gap + self._errors.event(problem, number))

    def cut(self) -> None:
        """Drop the connection: closing it in good order would wait for the reader to take the rest."""
        transport = self._scope.get("transport")
        if transport is not None:
            transport.abort()
