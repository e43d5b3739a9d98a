"""The closed list of endings. Every request ends exactly once, with one of these.

Dashboards, logs and status codes agree because they all share this list; `api/errors.py` translates it
to HTTP and a test walks the list to see that nothing is missing.
"""

from enum import StrEnum


class Outcome(StrEnum):
    COMPLETED = "completed"

    REJECTED_RATE = "rejected_rate"
    """A class or tenant bucket cannot pay in time."""
    REJECTED_QUEUE_FULL = "rejected_queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    REJECTED_NO_UPSTREAM = "rejected_no_upstream"
    REJECTED_DRAINING = "rejected_draining"

    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    BAD_REQUEST = "bad_request"
    TOO_LARGE = "too_large"

    UPSTREAM_REFUSED = "upstream_refused"
    """No usable answer: connection refused, closed before a status, or a body that is no valid answer."""
    UPSTREAM_TIMEOUT = "upstream_timeout"
    UPSTREAM_ERROR = "upstream_error"
    """The engine answered with an error status, or with an error event inside a stream."""
    UPSTREAM_ABORTED = "upstream_aborted"
    """The stream broke off after its 200."""

    CLIENT_GONE_QUEUED = "client_gone_queued"
    CLIENT_GONE_STREAMING = "client_gone_streaming"
    CLIENT_STALLED = "client_stalled"
    """The client read nothing for `write_idle_seconds` and was dropped."""

    INTERNAL_ERROR = "internal_error"


CALLERS_OWN = frozenset(
    {Outcome.UNAUTHORIZED, Outcome.FORBIDDEN, Outcome.NOT_FOUND, Outcome.BAD_REQUEST, Outcome.TOO_LARGE}
)
"""Endings that say nothing of the service: they count neither as offered nor as missed."""
