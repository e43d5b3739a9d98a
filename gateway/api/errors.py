"""Outcome → status, error body, retry advice: one table, in OpenAI's words.

`{"error": {"message", "type", "param", "code"}}`, with `retry-after` (whole seconds) and `retry-after-ms`
where coming back can help. The advice carries up to 40 % jitter, so that those refused together do not
return together. Other APIs' forms of the same are in `error_forms.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import msgspec

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.outcome import Outcome
from gateway.policy.request import Priority, Refusal

Header = tuple[bytes, bytes]

RETRY_AFTER_SECONDS_MAX = 60.0
WAITING_IN_VAIN_SECONDS = 3600.0
"""Of a bucket that lets nothing pass: beyond the longest advice, so that no SDK retries by itself."""
JITTER = 0.4


@dataclass(frozen=True, slots=True)
class Shape:
    """How an outcome looks to a client. `retry_seconds` is the advice where the policy gave none; None
    means that coming back does not help."""

    status: int
    type: str
    code: str | None
    retry_seconds: float | None = None


SHAPES: dict[Outcome, Shape] = {
    Outcome.REJECTED_RATE: Shape(429, "rate_limit_error", "rate_limit_exceeded", WAITING_IN_VAIN_SECONDS),
    Outcome.REJECTED_QUEUE_FULL: Shape(429, "rate_limit_error", "slow_down", 1.0),
    Outcome.QUEUE_TIMEOUT: Shape(429, "rate_limit_error", "slow_down", 1.0),
    Outcome.REJECTED_NO_UPSTREAM: Shape(503, "service_unavailable_error", "server_is_overloaded", 2.0),
    Outcome.REJECTED_DRAINING: Shape(503, "service_unavailable_error", "server_is_overloaded", 1.0),
    Outcome.UNAUTHORIZED: Shape(401, "invalid_request_error", "invalid_api_key"),
    Outcome.FORBIDDEN: Shape(403, "permission_error", "forbidden"),
    Outcome.NOT_FOUND: Shape(404, "invalid_request_error", "not_found"),
    Outcome.BAD_REQUEST: Shape(400, "invalid_request_error", "invalid_request"),
    Outcome.TOO_LARGE: Shape(413, "invalid_request_error", "request_too_large"),
    Outcome.UPSTREAM_REFUSED: Shape(502, "server_error", "upstream_unavailable", 1.0),
    Outcome.UPSTREAM_TIMEOUT: Shape(504, "server_error", "upstream_timeout", 1.0),
    Outcome.UPSTREAM_ABORTED: Shape(502, "server_error", "upstream_aborted", 1.0),
    Outcome.INTERNAL_ERROR: Shape(500, "server_error", "internal_error"),
}
"""Endings with a body of the gateway's own. `completed` and `upstream_error` have the engine's."""

STATUS_WITHOUT_BODY: dict[Outcome, int] = {
    Outcome.COMPLETED: 200,
    Outcome.UPSTREAM_ERROR: 502,
    Outcome.CLIENT_GONE_QUEUED: 499,
    Outcome.CLIENT_GONE_STREAMING: 499,
    Outcome.CLIENT_STALLED: 499,
}
"""For the log, where no status was sent or the engine's own is not known."""


def status_of(outcome: Outcome) -> int:
    shape = SHAPES.get(outcome)
    return shape.status if shape is not None else STATUS_WITHOUT_BODY[outcome]


class Problem(Exception):
    """Something the gateway itself tells the client instead of an answer.

    `code`, `status`, `retry_seconds` stand in for the table's where given; `headers` are added.
    """

    def __init__(
        self,
        outcome: Outcome,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_seconds: float | None = None,
        headers: tuple[Header, ...] = (),
        close: bool = False,
    ) -> None:
        super().__init__(message)
        shape = SHAPES[outcome]
        self.outcome = outcome
        self.message = message
        self.param = param
        self.code = code if code is not None else shape.code
        self.type = shape.type
        self.status = status if status is not None else shape.status
        self.retry_seconds = retry_seconds if retry_seconds is not None else shape.retry_seconds
        self.headers = headers
        self.close = close
        """The connection cannot be used again: the request's body was not read to its end."""

    @classmethod
    def of_refusal(cls, refusal: Refusal, priority: Priority, probe_seconds: float) -> "Problem":
        """`probe_seconds` is the advice while no engine is up."""
        late_batch = refusal.outcome is Outcome.QUEUE_TIMEOUT and priority is Priority.P2
        wait = refusal.retry_after_ns
        advised = None if wait is None else wait / NANOSECONDS_PER_SECOND
        if refusal.outcome is Outcome.REJECTED_NO_UPSTREAM:
            advised = probe_seconds
        return cls(
            refusal.outcome,
            refusal.detail,
            code="resource_unavailable" if late_batch else None,
            retry_seconds=advised,
        )

    def body(self) -> bytes:
        return error_body(self.message, self.type, self.param, self.code)

    def retry_headers(self, random: Callable[[], float]) -> list[Header]:
        """Retry advice in (0, 60] s; a longer wait is said to be not worth an automatic retry."""
        if self.retry_seconds is None:
            return []
        seconds = self.retry_seconds * (1.0 + JITTER * random())
        advised = min(max(seconds, 0.001), RETRY_AFTER_SECONDS_MAX)
        headers = [
            (b"retry-after", str(ceil(advised)).encode()),
            (b"retry-after-ms", str(ceil(advised * 1000)).encode()),
        ]
        if self.retry_seconds > RETRY_AFTER_SECONDS_MAX:
            headers.append((b"x-should-retry", b"false"))
        return headers


def error_body(message: str, type: str, param: str | None, code: str | None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": type, "param": param, "code": code}})
