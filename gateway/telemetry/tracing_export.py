"""Records of requests → spans → an OpenTelemetry collector (OTLP over HTTP), all in a thread of its own.

    POST /v1/chat/completions   SERVER    from the head's arrival to the request's end
      queue                     INTERNAL  each wait for a place
      engine                    CLIENT    each time it was sent to an engine; event `first_token`

Attributes are those of OpenTelemetry's conventions for HTTP and for generative AI, and `qos.…` for what only
this gateway knows: never what was asked or answered, never a key. The SDK's `BatchSpanProcessor` keeps at
most `OTEL_BSP_MAX_QUEUE_SIZE` (2048) requests and drops more; what the collector cannot be given within ten
seconds is lost, with one warning until it is back.
"""

import asyncio
import logging
import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, Final
from urllib.parse import urlsplit

import requests
import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode

from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import MILLITOKENS
from gateway.policy.request import PRIORITIES
from gateway.telemetry.labels import REQUEST_ID_LENGTH_MAX, clean
from gateway.telemetry.tracing_context import SPAN_ID_BITS, EngineCall, Trace, nonzero

FLUSH_SECONDS = 2.0
"""How long the end of the gateway waits for the collector to take what is left."""
SWITCH_SECONDS = 0.0005
"""How long a thread may keep Python to itself. The spans of a request take 0.4 ms to write out, and hundreds
are written at once: with Python's own 5 ms the event loop waits that long at each wake-up meanwhile."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
_OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_BROKEN = frozenset(
    {
        Outcome.UPSTREAM_REFUSED,
        Outcome.UPSTREAM_TIMEOUT,
        Outcome.UPSTREAM_ERROR,
        Outcome.UPSTREAM_ABORTED,
    }
)
"""An engine's fault, also where its status said that all was well."""
_OURS = frozenset({Outcome.INTERNAL_ERROR, Outcome.REJECTED_DRAINING})
_CLASS_NAMES = [p.name for p in PRIORITIES]
_LIBRARY: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

_log = structlog.get_logger("gateway")

Attributes = dict[str, str | bool | int | float]


class _Record(ReadableSpan):
    """A request that has ended, in the place of a span in the SDK's queue: its spans are made when it is
    their turn, in the thread that sends them."""

    def __init__(self, trace: Trace, event: RequestEnded, status: int, wall_offset_ns: int) -> None:
        self._context = _SAMPLED  # all that is asked of a span before it is sent
        self.facts = trace, event, status, wall_offset_ns


_SAMPLED = SpanContext(1, 1, False, TraceFlags(TraceFlags.SAMPLED))


class SpanOutput:
    """Takes records, and sends spans through `exporter`."""

    def __init__(self, exporter: SpanExporter, endpoint: str, service_name: str, version: str) -> None:
        self._exporter = _Sender(exporter, endpoint, SpanMaker(service_name, version))
        self._processor = BatchSpanProcessor(self._exporter)
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_interval, SWITCH_SECONDS))

    def put(self, trace: Trace, event: RequestEnded, status: int, wall_offset_ns: int) -> None:
        self._processor.on_end(_Record(trace, event, status, wall_offset_ns))

    async def close(self) -> None:
        """Send what is left, for at most `FLUSH_SECONDS`."""
        loop, flushed = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]
            with suppress(RuntimeError):  # the loop has not waited so long
                loop.call_soon_threadsafe(flushed.set)

        threading.Thread(target=flush, name="trace flush", daemon=True).start()
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await flushed.wait()
        except TimeoutError:
            self._exporter.shutdown()
        sys.setswitchinterval(self._switch_interval)


def collector(endpoint: str, headers: Mapping[str, str]) -> SpanExporter:
    """One that takes OTLP over HTTP; `OTEL_EXPORTER_OTLP_…` in the environment says what is not said here.
    Proxies and passwords that the environment names for other programs are not for it."""
    session = requests.Session()
    session.trust_env = False
    return OTLPSpanExporter(endpoint=endpoint, headers=dict(headers), session=session)


class _Sender(SpanExporter):
    """Makes the spans, and says once that they do not arrive, and once that they do again."""

    def __init__(self, exporter: SpanExporter, endpoint: str, maker: "SpanMaker") -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._maker = maker
        self._arrives = True
        self._library = _Listening()
        logging.getLogger(_LIBRARY).addFilter(self._library)
        logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)  # it quotes clients' odd tracestates

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        made = [
            span for record in spans if isinstance(record, _Record) for span in self._maker(*record.facts)
        ]
        self._library.words.clear()
        result = self._exporter.export(made)
        arrives = result is SpanExportResult.SUCCESS
        if arrives and not self._arrives:
            _log.info("traces reach the collector again", endpoint=self._endpoint)
        elif self._arrives and not arrives:
            reason = self._library.words[0] if self._library.words else "unknown"
            _log.warning("traces do not reach the collector", endpoint=self._endpoint, reason=reason)
        self._arrives = arrives
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Listening(logging.Filter):
    """The exporter's library has a line for each attempt; the first one of a batch says what is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        self.words.append(record.getMessage())
        return False


class SpanMaker:
    """The spans of a request, by its record: SERVER first, then its children."""

    def __init__(self, service_name: str, version: str) -> None:
        self._resource = Resource.create({"service.name": service_name, "service.version": version})
        self._scope = InstrumentationScope("qos-gateway", version)

    def __call__(
        self, trace: Trace, event: RequestEnded, status: int, wall_offset_ns: int
    ) -> Iterator[ReadableSpan]:
        flags = TraceFlags(trace.flags)
        state = TraceState.from_header([trace.tracestate.decode("latin-1")]) if trace.tracestate else None
        parent = (
            None
            if trace.parent_id is None
            else SpanContext(trace.trace_id, trace.parent_id, True, flags, state)
        )
        ours = SpanContext(trace.trace_id, trace.span_id, False, flags, state)

        def span(name: str, span_id: int, start: int, end: int, **more: Any) -> ReadableSpan:
            return ReadableSpan(
                name,
                context=SpanContext(trace.trace_id, span_id, False, flags, state),
                parent=parent if span_id == trace.span_id else ours,
                resource=self._resource,
                instrumentation_scope=self._scope,
                start_time=start + wall_offset_ns,
                end_time=end + wall_offset_ns,
                **more,
            )

        yield span(
            _name(trace),
            trace.span_id,
            trace.began_at,
            event.ended_at,
            kind=SpanKind.SERVER,
            attributes=_server_attributes(trace, event, status),
            status=_status(_server_fault(event.outcome, status)),
        )
        for start, end in waits(trace, event):
            span_id = nonzero(random.getrandbits, SPAN_ID_BITS)
            yield span("queue", span_id, start, end, kind=SpanKind.INTERNAL, attributes={})
        for call, end in calls(trace, event):
            is_last = call is trace.calls[-1]
            fault = _engine_fault(call, event.outcome, is_last)
            first_token = () if event.ttft_ns is None or not is_last else (event.arrived_at + event.ttft_ns,)
            yield span(
                "engine",
                call.span_id,
                call.sent_at,
                end,
                kind=SpanKind.CLIENT,
                attributes=_engine_attributes(trace, event, call, fault),
                events=[Event("first_token", {}, at + wall_offset_ns) for at in first_token],
                status=_status(fault),
            )


# ── when ─────────────────────────────────────────────────────────────────────────────────────────────────


def waits(trace: Trace, event: RequestEnded) -> list[tuple[int, int]]:
    """Start and end of each wait for a place, a second one where an engine had sent the request back. What
    the door ended has not waited: its record has the door's own time of arrival."""
    if event.arrived_at == trace.began_at:
        return []
    starts = [event.arrived_at] if event.requeued_at is None else [event.arrived_at, event.requeued_at]
    pairs = zip_longest(starts, trace.calls[: len(starts)])
    return [(start, event.ended_at if call is None else call.sent_at) for start, call in pairs]


def calls(trace: Trace, event: RequestEnded) -> list[tuple[EngineCall, int]]:
    """Each call of an engine with its end."""
    ends = [event.ended_at] * len(trace.calls)
    if event.requeued_at is not None and ends:
        ends[0] = event.requeued_at
    return list(zip(trace.calls, ends, strict=True))


# ── what ─────────────────────────────────────────────────────────────────────────────────────────────────


def _name(trace: Trace) -> str:
    method = trace.method if trace.method in _METHODS else "HTTP"
    return f"{method} {trace.path}" if trace.path else method


def _server_attributes(trace: Trace, event: RequestEnded, status: int) -> Attributes:
    attributes: Attributes = {
        "http.request.method": trace.method if trace.method in _METHODS else "_OTHER",
        "http.response.status_code": status,
        "qos.priority": _CLASS_NAMES[event.priority],
        "qos.outcome": event.outcome.value,
        "qos.request_id": clean(event.request_id, REQUEST_ID_LENGTH_MAX),
        "qos.cost": event.charged / MILLITOKENS,
        **_generative(trace, event),
    }
    if trace.path:
        attributes |= {"http.route": trace.path, "url.path": trace.path}
    if event.tenant:
        attributes["qos.tenant"] = clean(event.tenant)
    if event.streaming:
        attributes["gen_ai.request.stream"] = True
    if event.usage is not None:
        attributes["gen_ai.usage.input_tokens"] = event.usage.input_tokens
        attributes["gen_ai.usage.output_tokens"] = event.usage.output_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = event.usage.cached_tokens
    if event.promoted:
        attributes["qos.promoted"] = True
    if event.would_be is not None:
        attributes["qos.would_be"] = event.would_be.value
    if _server_fault(event.outcome, status):
        attributes["error.type"] = event.outcome.value
    return attributes


def _engine_attributes(trace: Trace, event: RequestEnded, call: EngineCall, fault: str | None) -> Attributes:
    at = urlsplit(call.url)
    attributes: Attributes = {
        "http.request.method": trace.method if trace.method in _METHODS else "_OTHER",
        "server.address": at.hostname or "",
        "server.port": at.port or (443 if at.scheme == "https" else 80),
        "qos.upstream": call.upstream,
        **_generative(trace, event),
    }
    if call.status is not None:
        attributes["http.response.status_code"] = call.status
    if fault is not None:
        attributes["error.type"] = fault
    return attributes


def _generative(trace: Trace, event: RequestEnded) -> Attributes:
    attributes: Attributes = {}
    if trace.path in _OPERATIONS:
        attributes["gen_ai.operation.name"] = _OPERATIONS[trace.path]
    if event.model:
        attributes["gen_ai.request.model"] = clean(event.model)
    return attributes


def _server_fault(outcome: Outcome, status: int) -> str | None:
    """What makes it an error of the service: a client's own mistake is none, nor a budget that is spent."""
    broken_off = status < 400 and outcome in _BROKEN | _OURS
    return outcome.value if status >= 500 or broken_off else None


def _engine_fault(call: EngineCall, outcome: Outcome, is_last: bool) -> str | None:
    """For a caller every error status is one."""
    if call.status is not None and call.status >= 400:
        return str(call.status)
    if is_last and outcome is not Outcome.COMPLETED:
        return outcome.value if outcome in _BROKEN else None
    return Outcome.UPSTREAM_REFUSED.value if call.status is None else None


def _status(fault: str | None) -> Status:
    return Status(StatusCode.UNSET) if fault is None else Status(StatusCode.ERROR)
