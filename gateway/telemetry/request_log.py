"""One structured line per request, when it ends. It says who, which class, how it ended and how long the
parts took; never what was asked, and never a key."""

from collections.abc import Callable
from typing import Any

import structlog

from gateway.policy.events import Observer, RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import MILLITOKENS
from gateway.policy.request import PRIORITIES
from gateway.telemetry.endings import milliseconds, queue_wait_ns
from gateway.telemetry.labels import REQUEST_ID_LENGTH_MAX, clean
from gateway.telemetry.log_setup import json_lines
from gateway.telemetry.tracing_context import trace_of

_CLASS_NAMES = [p.name for p in PRIORITIES]

_LEVELS = {
    Outcome.INTERNAL_ERROR: "error",
    Outcome.UPSTREAM_REFUSED: "warning",
    Outcome.UPSTREAM_TIMEOUT: "warning",
    Outcome.UPSTREAM_ERROR: "warning",
    Outcome.UPSTREAM_ABORTED: "warning",
}
"""The rest is everyday life and logged as `info`."""


class RequestLog(Observer):
    """To be made after `configure_logging`, whose output and level it keeps until `take_logging`.

    The policy does not know the HTTP status. The edge says with `answered` which one it sent; where it
    did not, `status_of` tells the usual one for the outcome.
    """

    def __init__(self, status_of: Callable[[Outcome], int]) -> None:
        self._status_of = status_of
        self._answered: dict[str, int] = {}
        self.take_logging()

    def take_logging(self) -> None:
        """Write as logging is configured now."""
        log = structlog.get_logger().bind()
        self._write = json_lines("request") or (
            lambda level, fields: getattr(log, level)("request", **fields)
        )

    def answered(self, request_id: str, status: int) -> None:
        """This status was sent, and the request will end."""
        self._answered[request_id] = status

    def ended(self, event: RequestEnded) -> None:
        self.write(event, self._answered.pop(event.request_id, None))

    def write(self, event: RequestEnded, status: int | None = None) -> None:
        outcome, usage = event.outcome, event.usage
        fields: dict[str, Any] = {
            "request_id": clean(event.request_id, REQUEST_ID_LENGTH_MAX),
            "tenant": clean(event.tenant) or None,
            "model": clean(event.model) or None,
            "priority": _CLASS_NAMES[event.priority],
            "outcome": outcome.value,
            "status": self._status_of(outcome) if status is None else status,
            "streaming": event.streaming,
            "upstream": event.upstream,
            "queue_ms": milliseconds(queue_wait_ns(event)),
            "ttft_ms": milliseconds(event.ttft_ns),
            "tpot_ms": milliseconds(event.tpot_ns),
            "max_gap_ms": milliseconds(event.max_gap_ns),
            "duration_ms": milliseconds(event.ended_at - event.arrived_at),
            "input_tokens": None if usage is None else usage.input_tokens,
            "cached_tokens": None if usage is None else usage.cached_tokens,
            "output_tokens": None if usage is None else usage.output_tokens,
            "cost": event.charged / MILLITOKENS,
            "promoted": event.promoted,
        }
        if event.would_be is not None or event.requeued:
            fields |= _seldom(event)
        trace = trace_of(event.request_id)
        if trace is not None:
            fields["trace_id"] = trace.hex_id
        self._write(_LEVELS.get(outcome, "info"), fields)


def _seldom(event: RequestEnded) -> dict[str, object]:
    """What few requests have to say is left out of the others' lines."""
    said: dict[str, object] = {}
    if event.would_be is not None:
        said["would_be"] = event.would_be.value
    if event.requeued:
        said["requeued"] = True
    return said
