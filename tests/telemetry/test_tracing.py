import asyncio
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import StatusCode

from gateway.api.configuration import read_configuration
from gateway.api.errors import status_of
from gateway.config_reading import ConfigError
from gateway.policy.clock import ManualClock
from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.telemetry import tracing_export
from gateway.telemetry.endings import ended_at_the_door
from gateway.telemetry.tracing import Tracing
from gateway.telemetry.tracing_context import Trace, TracedId, read_parent, share_of_traces, trace_of
from gateway.telemetry.tracing_export import SpanMaker, SpanOutput
from tests.telemetry.conftest import MS

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
WALL_OFFSET_NS = 1_700_000_000 * 10**9
Facts = tuple[Trace, RequestEnded, int, int]


class Kept:
    """An exporter that keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[Facts] = []

    def put(self, *facts: Any) -> None:
        self.records.append(facts)

    async def close(self) -> None: ...


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def open_tracing(kept: Kept, clock: ManualClock) -> Callable[..., Tracing]:
    def open_tracing(ratio: float = 1.0, bits: Callable[[int], int] = random.getrandbits) -> Tracing:
        def wall_clock_ns() -> int:
            return clock.now() + WALL_OFFSET_NS

        return Tracing(kept, ratio, clock, status_of, wall_clock_ns=wall_clock_ns, bits=bits)

    return open_tracing


@pytest.fixture
def spans(kept: Kept, open_tracing: Callable[..., Tracing], ended: Callable[..., RequestEnded]) -> Any:
    """The spans of a request with these facts, that came at 0 and went to engines at `sent_at` (ms)."""

    def spans(
        sent_at: tuple[int, ...] = (),
        statuses: tuple[int | None, ...] = (),
        status: int | None = None,
        **facts: Any,
    ) -> list[ReadableSpan]:
        tracing = open_tracing()
        trace = tracing.begin([], "POST", "/v1/chat/completions", 0)
        for at, engines_status in zip(sent_at, statuses, strict=True):
            call, _ = trace.call("gpu0", "http://engine:8100", at * MS)
            call.status = engines_status
        trace.status = status
        tracing.ended(ended(request_id=TracedId("req-1", trace), **{"arrived_at": 1 * MS, **facts}))
        return list(SpanMaker("door", "1.2.3")(*kept.records[-1]))

    return spans


def milliseconds(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.start_time - WALL_OFFSET_NS) // MS, (span.end_time - WALL_OFFSET_NS) // MS


# ── the client's word ────────────────────────────────────────────────────────────────────────────────────


def parent_of(*values: str) -> tuple[int, ...] | None:
    parent = read_parent([(b"traceparent", value.encode()) for value in values])
    return None if parent is None else parent[:3]


@pytest.mark.parametrize(
    ("header", "flags"),
    [
        (f"00-{TRACE}-{SPAN}-01", 1),
        (f"00-{TRACE}-{SPAN}-00", 0),
        (f"00-{TRACE}-{SPAN}-ff", 3),  # of which two bits mean something
        (f" 00-{TRACE}-{SPAN}-01\t", 1),
        (f"cc-{TRACE}-{SPAN}-01", 1),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", 1),
    ],
)
def test_a_traceparent_is_read(header: str, flags: int) -> None:
    """Trace, span and flags, also of a version that is not known yet."""
    assert parent_of(header) == (int(TRACE, 16), int(SPAN, 16), flags)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "odd",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01.",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"00_{TRACE}_{SPAN}_01",
        f"00-{TRACE}-{SPAN}-0g",
    ],
)
def test_a_malformed_traceparent_is_none(header: str) -> None:
    """A trace that would be joined by guessing is not joined."""
    assert parent_of(header) is None


def test_two_parents_are_none() -> None:
    """Nobody knows which one it is, even if they are the same."""
    assert parent_of(f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01") is None


def test_state_may_come_in_parts_and_may_be_long() -> None:
    """Several headers are one list; a very long one is not kept for our own spans."""
    header = (b"traceparent", f"00-{TRACE}-{SPAN}-01".encode())
    states = [(b"tracestate", b"a=1"), (b"tracestate", b"b=2,c=3")]
    assert (read_parent([header, *states]) or ())[3] == b"a=1,b=2,c=3"
    assert (read_parent([header, (b"tracestate", b"a=" + b"1" * 600)]) or ())[3] == b""
    assert read_parent(states) is None


# ── ids ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_share_is_the_one_that_other_gateways_take() -> None:
    """Of the same traces as OpenTelemetry's own sampler, which other services beside this one ask."""
    draw = random.Random(7)
    for ratio in (0.0, 0.1, 0.5, 1.0):
        ours, theirs = share_of_traces(ratio), TraceIdRatioBased(ratio)
        for trace_id in (draw.getrandbits(128) for _ in range(200)):
            decision = theirs.should_sample(None, trace_id, "").decision
            assert ours(trace_id) == (decision is Decision.RECORD_AND_SAMPLE)


@pytest.mark.parametrize(("flag", "ratio"), [("01", 0.0), ("00", 1.0)])
def test_the_client_decides_whether_its_trace_is_recorded(
    open_tracing: Callable[..., Tracing], flag: str, ratio: float
) -> None:
    """The ratio is for traces that begin here."""
    tracing = open_tracing(ratio)
    header = (b"traceparent", f"00-{TRACE}-{SPAN}-{flag}".encode())
    assert tracing.begin([header], "POST", "/", 0).sampled is (flag == "01")
    assert tracing.begin([], "POST", "/", 0).sampled is (ratio == 1.0)


def test_ids_are_never_zero(open_tracing: Callable[..., Tracing]) -> None:
    """Zero stands for none, and would make the header void."""
    drawn = iter([0, 5, 0, 0, 6, 0, 7])
    trace = open_tracing(bits=lambda _: next(drawn)).begin([], "POST", "/", 0)
    call, header = trace.call("gpu0", "http://engine", 0)
    assert (trace.span_id, trace.trace_id, call.span_id) == (5, 6, 7)
    assert header == (b"traceparent", b"00-%032x-%016x-01" % (6, 7))


def test_what_we_send_is_read_by_others(open_tracing: Callable[..., Tracing]) -> None:
    """OpenTelemetry's own reader finds our span in the header."""
    trace = open_tracing().begin([], "POST", "/", 0)
    call, (name, value) = trace.call("gpu0", "http://engine", 0)
    context = TraceContextTextMapPropagator().extract({name.decode(): value.decode()})
    (span,) = context.values()
    found = span.get_span_context()
    assert (found.trace_id, found.span_id, found.trace_flags) == (trace.trace_id, call.span_id, 1)


def test_an_id_with_a_trace_is_an_id() -> None:
    """It is compared, written and cut as text, and only the text itself has no trace."""
    trace: Any = object()
    traced = TracedId("req-1", trace)
    assert (traced, hash(traced), f"{traced}") == ("req-1", hash("req-1"), "req-1")
    assert trace_of(traced) is trace
    assert trace_of("req-1") is trace_of(traced[:3]) is None


# ── spans ────────────────────────────────────────────────────────────────────────────────────────────────


def test_times_are_those_of_the_record(spans: Any) -> None:
    """From the head's arrival to the end; waiting ends when it is sent; on the wall's clock."""
    server, queue, engine = spans(sent_at=(3001,), statuses=(200,), status=200)
    assert [span.name for span in (server, queue, engine)] == ["POST /v1/chat/completions", "queue", "engine"]
    assert milliseconds(server) == (0, 6500)
    assert milliseconds(queue) == (1, 3001)
    assert milliseconds(engine) == (3001, 6500)
    assert [event.timestamp - WALL_OFFSET_NS for event in engine.events] == [3501 * MS]
    assert [span.kind for span in (server, queue, engine)] == [
        SpanKind.SERVER,
        SpanKind.INTERNAL,
        SpanKind.CLIENT,
    ]
    assert server.resource.attributes["service.name"] == "door"


def test_a_request_that_waits_a_second_time_in_vain(spans: Any) -> None:
    """Sent back by its engine at 2 s, refused at 4 s: two waits, and one call that ended between them."""
    facts = {
        "outcome": Outcome.QUEUE_TIMEOUT,
        "requeued_at": 2000 * MS,
        "ended_at": 4000 * MS,
        "ttft_ns": None,
    }
    server, first, second, engine = spans(sent_at=(500,), statuses=(503,), **facts)
    assert [milliseconds(span) for span in (server, first, second, engine)] == [
        (0, 4000),
        (1, 500),
        (2000, 4000),
        (500, 2000),
    ]
    assert server.attributes["http.response.status_code"] == 429


def test_an_engine_that_was_not_reached(spans: Any) -> None:
    """The first of two calls has an error and no status; what follows does not hang on it."""
    facts = {"requeued_at": 2000 * MS, "not_reached": "gpu0"}
    *_, first, second = spans(sent_at=(500, 3000), statuses=(None, 200), status=200, **facts)
    assert (first.attributes["error.type"], first.events) == ("upstream_refused", ())
    assert (second.status.status_code, len(second.events)) == (StatusCode.UNSET, 1)


def test_what_the_door_refuses_has_not_waited(kept: Kept, open_tracing: Callable[..., Tracing]) -> None:
    """A wrong key, with a path that is nowhere: one span, named without what the client made up."""
    tracing = open_tracing()
    trace = tracing.begin([], "BREW", "", 5 * MS)
    tracing.ended(ended_at_the_door(TracedId("req-1", trace), Outcome.NOT_FOUND, 5 * MS, 6 * MS))
    (span,) = SpanMaker("door", "1")(*kept.records[0])
    assert (span.name, milliseconds(span)) == ("HTTP", (5, 6))
    assert span.attributes is not None
    assert span.attributes["http.request.method"] == "_OTHER"
    assert {"http.route", "qos.tenant", "gen_ai.request.model"}.isdisjoint(span.attributes)


@pytest.mark.parametrize("outcome", Outcome)
def test_which_endings_are_errors(spans: Any, outcome: Outcome) -> None:
    """The service's own faults and the engines', also after a 200; no refusal, and no client that leaves."""
    began_well, *_ = spans(sent_at=(2,), statuses=(200,), status=200, outcome=outcome)
    broken = {
        Outcome.UPSTREAM_REFUSED,
        Outcome.UPSTREAM_TIMEOUT,
        Outcome.UPSTREAM_ERROR,
        Outcome.UPSTREAM_ABORTED,
        Outcome.INTERNAL_ERROR,
        Outcome.REJECTED_DRAINING,
    }
    assert (began_well.status.status_code is StatusCode.ERROR) is (outcome in broken)
    server, *_ = spans(outcome=outcome)
    usual = status_of(outcome)
    assert server.attributes["http.response.status_code"] == usual
    if usual >= 500 or (outcome in broken and usual < 400):
        assert server.attributes["error.type"] == outcome.value
    else:
        assert server.status.status_code is StatusCode.UNSET


def test_an_engines_4xx_is_an_error_of_the_call_alone(spans: Any) -> None:
    """The client's mistake is none of the service, though the call has failed."""
    server, _, engine = spans(sent_at=(2,), statuses=(422,), status=422, outcome=Outcome.UPSTREAM_ERROR)
    assert server.status.status_code is StatusCode.UNSET
    assert (engine.status.status_code, engine.attributes["error.type"]) == (StatusCode.ERROR, "422")


# ── sending ──────────────────────────────────────────────────────────────────────────────────────────────


class Stuck(SpanExporter):
    """Takes a batch and does not come back before it is told to give up."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.given_up = threading.Event()

    def export(self, spans: Any) -> SpanExportResult:
        self.asked.set()
        self.given_up.wait(30)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.given_up.set()


@pytest.fixture
def facts(spans: Any, kept: Kept) -> Facts:
    spans(sent_at=(2,), statuses=(200,), status=200)
    return kept.records[-1]


@pytest.mark.anyio
async def test_what_is_left_is_sent_at_the_end(facts: Facts) -> None:
    """Records become spans in the sender, all of a request together."""
    exporter = InMemorySpanExporter()
    output = SpanOutput(exporter, "http://collector", "door", "1")
    output.put(*facts)
    output.put(*facts)
    await output.close()
    assert [span.name for span in exporter.get_finished_spans()] == [
        "POST /v1/chat/completions",
        "queue",
        "engine",
    ] * 2


@pytest.mark.anyio
async def test_a_collector_that_hangs_holds_nobody_up(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither requests, of which the oldest are dropped in the end, nor for long the gateway's end."""
    monkeypatch.setattr(tracing_export, "FLUSH_SECONDS", 0.05)
    exporter = Stuck()
    output = SpanOutput(exporter, "http://collector", "door", "1")
    for _ in range(600):
        output.put(*facts)
    assert await asyncio.to_thread(exporter.asked.wait, 10)
    for _ in range(3000):
        output.put(*facts)
    assert not exporter.given_up.is_set()
    await output.close()
    assert exporter.given_up.is_set()


def test_without_the_packages_tracing_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the setting and what to install; without the setting nobody misses them."""
    monkeypatch.delitem(sys.modules, "gateway.telemetry.tracing_export")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    config = tmp_path / "gateway.yaml"
    config.write_text("tracing: {}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"gateway\.yaml: tracing: .*pip install 'qos-gateway\[otel\]'"):
        read_configuration(config)
    config.write_text("tracing: null", encoding="utf-8")
    assert read_configuration(config).settings.tracing is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "endpoint: collector:4318",
            'tracing.endpoint: found "collector:4318", expected http://host:port/path or',
        ),
        ("endpoint: grpc://collector:4317", "tracing.endpoint: found"),
        ("sample_ratio: 2", "tracing.sample_ratio: found 2, expected a fraction from 0 to 1"),
        ("service_name: ''", "tracing.service_name: found"),
        (
            r'headers: {x-key: "hid\nden"}',
            "tracing.headers.x-key: found a value that is not shown, expected text",
        ),
        ("headers: {x-key: 5}", "tracing.headers.x-key: found a value that is not shown, expected text"),
        ("sampling: 1", "tracing.sampling: unknown key, did you mean sample_ratio?"),
    ],
)
def test_errors_name_the_setting_and_repeat_no_secret(tmp_path: Path, text: str, says: str) -> None:
    """What the operator reads of a setting that cannot be used."""
    config = tmp_path / "gateway.yaml"
    config.write_text(f"tracing:\n  {text}", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_configuration(config)
    (problem,) = refused.value.problems
    assert says in problem
    assert "hid" not in problem.partition("found")[2]
