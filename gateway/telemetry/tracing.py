"""Distributed tracing, where it is configured: a request's ids at the door, its spans when it has ended.

While a request is under way there are only its ids (`tracing_context.py`), for the engine must be told whose
child it is. When it has ended its record goes to a queue, and what becomes of it there, spans and packets to
the collector, is another thread's work (`tracing_export.py`), the only one that OpenTelemetry's SDK is needed
for: it is imported when tracing is on.
"""

import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from gateway.policy.clock import Clock
from gateway.policy.events import Observer, RequestEnded
from gateway.policy.outcome import Outcome
from gateway.telemetry.tracing_context import (
    Header,
    RandomBits,
    Trace,
    read_parent,
    share_of_traces,
    trace_of,
)

INSTALL = "pip install 'qos-gateway[otel]'"


class Exporter(Protocol):
    """Where the records of sampled requests go."""

    def put(self, trace: Trace, event: RequestEnded, status: int, wall_offset_ns: int) -> None:
        """Must not wait. `wall_offset_ns` is wall clock − policy's clock; `status` the answer's."""

    async def close(self) -> None:
        """Send what is there, if that can be done soon."""


class Tracing(Observer):
    """`status_of` tells the usual HTTP status of an outcome where the edge has not said which was sent."""

    def __init__(
        self,
        exporter: Exporter,
        sample_ratio: float,
        clock: Clock,
        status_of: Callable[[Outcome], int],
        *,
        wall_clock_ns: Callable[[], int] = time.time_ns,
        bits: RandomBits = random.getrandbits,
    ) -> None:
        self._exporter = exporter
        self._is_sampled = share_of_traces(sample_ratio)
        self._clock = clock
        self._status_of = status_of
        self._wall_clock_ns = wall_clock_ns
        self._bits = bits

    def begin(self, headers: Iterable[Header], method: str, path: str, began_at: int) -> Trace:
        """The trace of a request that came with these headers: the client's, or a new one."""
        return Trace(
            read_parent(headers),
            is_sampled=self._is_sampled,
            bits=self._bits,
            method=method,
            path=path,
            began_at=began_at,
        )

    def ended(self, event: RequestEnded) -> None:
        trace = trace_of(event.request_id)
        if trace is not None and trace.sampled:
            status = self._status_of(event.outcome) if trace.status is None else trace.status
            self._exporter.put(trace, event, status, self._wall_clock_ns() - self._clock.now())

    async def close(self) -> None:
        await self._exporter.close()


def why_no_export() -> str | None:
    """What keeps traces from being sent; None if nothing does."""
    try:
        import gateway.telemetry.tracing_export  # noqa: F401
    except ImportError:
        return f"the packages that send traces are missing: {INSTALL}"
    return None


def open_exporter(endpoint: str, service_name: str, headers: Mapping[str, str], version: str) -> Exporter:
    """To be asked for where `why_no_export` has nothing to say."""
    from gateway.telemetry.tracing_export import SpanOutput, collector

    return SpanOutput(collector(endpoint, headers), endpoint, service_name, version)
