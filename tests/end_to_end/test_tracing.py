"""Traces across client, gateway and engine, at a collector that reads what OpenTelemetry's SDK sends."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import ask, chat, get, post_chat
from tests.support.scripted_engine import (
    DONE,
    END,
    FINISH,
    ROLE,
    ScriptedEngine,
    plain,
    raw,
    scripted_engine,
    token,
    usage_event,
    whole_answer,
)
from tests.support.scripted_upstream import (
    STREAM_HEAD,
    RecordedRequest,
    ScriptedConnection,
    ScriptedUpstream,
    answer,
    chunk,
)

pytestmark = pytest.mark.anyio

KEY, POOR_KEY, COLLECTOR_KEY = "tracing-client-key", "tracing-poor-key", "tracing-collector-key"
LOGIN = ("authorization", f"Bearer {KEY}")
PROMPT, ANSWER = "what-the-client-asks", "what-the-engine-says"
CLIENTS_TRACE, CLIENTS_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "20", "OTEL_EXPORTER_OTLP_TIMEOUT": "0.5"}
"""Sent after 20 ms, and given up after half a second."""


class Collector:
    """What has been sent to it, by trace id (hexadecimal)."""

    def __init__(self) -> None:
        self.upstream = ScriptedUpstream(self._handle)
        self.bodies: list[bytes] = []
        self.traces: dict[str, list[Span]] = {}
        self.services: set[str] = set()

    async def _handle(self, connection: ScriptedConnection) -> None:
        while (request := await connection.request()) is not None:
            assert (request.method, request.target) == ("POST", "/v1/traces")
            assert request.header("x-collector-key") == COLLECTOR_KEY
            self._take(request.body)
            await connection.send(answer(b"", headers=("content-type: application/x-protobuf",)))

    def _take(self, body: bytes) -> None:
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services.add(_attributes(resource.resource)["service.name"])
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.traces.setdefault(span.trace_id.hex(), []).append(span)

    async def trace(self, trace_id: str) -> "SentTrace":
        """Of one request: it is sent as a whole."""
        await eventually(lambda: trace_id in self.traces)
        return SentTrace(self.traces[trace_id])


class SentTrace:
    def __init__(self, spans: list[Span]) -> None:
        (self.server,) = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
        self.queues = [span for span in spans if span.name == "queue"]
        self.engines = [span for span in spans if span.name == "engine"]
        self.says: dict[str, Any] = _attributes(self.server)
        for child in (*self.queues, *self.engines):
            assert child.parent_span_id == self.server.span_id
            times = (self.server.start_time_unix_nano, child.start_time_unix_nano, child.end_time_unix_nano)
            assert sorted(times) == list(times)
            assert child.end_time_unix_nano <= self.server.end_time_unix_nano
        assert len({span.span_id for span in spans}) == len(spans)

    @property
    def is_error(self) -> bool:
        return self.server.status.code == Status.STATUS_CODE_ERROR


def _attributes(of: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


def _seen_by(request: RecordedRequest) -> list[str]:
    """Version, trace id, span id and flags, as the engine got them."""
    header = request.header("traceparent")
    assert header is not None
    return header.split("-")


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def collector() -> AsyncIterator[Collector]:
    collector = Collector()
    async with collector.upstream:
        yield collector


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine, collector: Collector) -> AsyncIterator[GatewayProcess]:
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url}],
        "tracing": {
            "endpoint": f"{collector.upstream.url}/v1/traces",
            "service_name": "door",
            "headers": {"x-collector-key": COLLECTOR_KEY},
        },
    }
    keys = {KEY: {"tenant": "team"}, POOR_KEY: {"tenant": "poor", "requests_per_minute": 1}}
    async with running_gateway(settings, keys=keys, environ=SOON) as gateway:
        yield gateway


# ── the chain ────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_is_a_span_with_its_wait_and_its_engine_as_children(
    gateway: GatewayProcess, engine: ScriptedEngine, collector: Collector
) -> None:
    """The engine's parent is our span of it; all of them tell what happened, and nothing of what was said."""
    events = [ROLE, token(ANSWER), token("more"), FINISH, usage_event(21, 2), DONE]
    engine.play = raw(STREAM_HEAD + b"".join(map(chunk, events)) + END)
    body = chat(PROMPT, stream=True)
    assert (await ask(gateway.port, post_chat(body, [LOGIN], id="chain"))).status == 200

    version, trace_id, span_id, flags = _seen_by(engine.last)
    trace = await collector.trace(trace_id)
    (queue,), (call,) = trace.queues, trace.engines
    assert (version, flags) == ("00", "01")
    assert (trace.server.name, trace.server.parent_span_id) == ("POST /v1/chat/completions", b"")
    assert (call.span_id.hex(), call.kind) == (span_id, Span.SPAN_KIND_CLIENT)
    assert queue.end_time_unix_nano == call.start_time_unix_nano
    (first_token,) = call.events
    assert first_token.name == "first_token"
    assert call.start_time_unix_nano < first_token.time_unix_nano < call.end_time_unix_nano

    line = await gateway.ending("chain")
    assert line["trace_id"] == trace_id
    assert (
        trace.says.items()
        >= {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "mock-gpu",
            "gen_ai.usage.input_tokens": 21,
            "gen_ai.usage.output_tokens": 2,
            "qos.priority": "P1",
            "qos.outcome": "completed",
            "qos.tenant": "team",
            "qos.cost": line["cost"],
            "qos.request_id": "chain",
        }.items()
    )
    assert _attributes(call).items() >= {"qos.upstream": "gpu0", "http.response.status_code": 200}.items()
    assert not trace.is_error
    assert collector.services == {"door"}
    said = b"".join(collector.bodies)
    assert not [secret for secret in (PROMPT, ANSWER, KEY) if secret.encode() in said]


async def test_a_clients_trace_goes_on(
    gateway: GatewayProcess, engine: ScriptedEngine, collector: Collector
) -> None:
    """Our span is the child of the client's, and what else its headers say goes on to the engine."""
    engine.play = plain()
    theirs = [
        ("traceparent", f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-01"),
        ("tracestate", "vendor=1,other=2"),
        ("baggage", "user=7"),
    ]
    assert (await ask(gateway.port, post_chat(chat(), [LOGIN, *theirs]))).status == 200
    _, trace_id, span_id, flags = _seen_by(engine.last)
    trace = await collector.trace(CLIENTS_TRACE)
    assert (trace_id, flags) == (CLIENTS_TRACE, "01")
    assert trace.server.parent_span_id.hex() == CLIENTS_SPAN
    assert trace.server.trace_state == "vendor=1,other=2"
    assert trace.engines[0].span_id.hex() == span_id != CLIENTS_SPAN
    assert engine.last.header("tracestate") == "vendor=1,other=2"
    assert engine.last.header("baggage") == "user=7"


async def test_a_trace_that_the_client_does_not_record_is_not_recorded_here(
    gateway: GatewayProcess, engine: ScriptedEngine, collector: Collector
) -> None:
    """The engine is told the same, and of the trace there is the id in the log alone."""
    engine.play = plain()
    unrecorded = CLIENTS_TRACE[::-1]
    header = ("traceparent", f"00-{unrecorded}-{CLIENTS_SPAN}-00")
    assert (await ask(gateway.port, post_chat(chat(), [LOGIN, header], id="unrecorded"))).status == 200
    _, trace_id, span_id, flags = _seen_by(engine.last)
    assert (trace_id, flags) == (unrecorded, "00")
    assert span_id != CLIENTS_SPAN
    assert (await gateway.ending("unrecorded"))["trace_id"] == unrecorded
    assert (await ask(gateway.port, post_chat(chat(), [LOGIN]))).status == 200
    await collector.trace(_seen_by(engine.last)[1])  # sent later, so that one would have come before
    assert unrecorded not in collector.traces


async def test_a_header_that_is_no_traceparent_begins_a_new_trace(
    gateway: GatewayProcess, engine: ScriptedEngine, collector: Collector
) -> None:
    """The state that came with it belongs to a trace that is not known, and is left out; baggage is not."""
    engine.play = plain()
    header = f"ff-{CLIENTS_TRACE}-{CLIENTS_SPAN}-01"
    headers = [LOGIN, ("traceparent", header), ("tracestate", "vendor=1"), ("baggage", "user=7")]
    assert (await ask(gateway.port, post_chat(chat(), headers))).status == 200
    _, trace_id, _, _ = _seen_by(engine.last)
    assert trace_id != CLIENTS_TRACE
    assert (await collector.trace(trace_id)).server.parent_span_id == b""
    assert engine.last.header("tracestate") is None
    assert engine.last.header("baggage") == "user=7"


async def test_two_requests_with_the_same_id_keep_their_traces_apart(
    gateway: GatewayProcess, engine: ScriptedEngine, collector: Collector
) -> None:
    """Clients choose their ids, and may choose the same at the same time."""
    both_are_there = asyncio.Barrier(2)

    async def play(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await both_are_there.wait()
        await plain()(connection, request)

    engine.play = play
    traces = [f"{number:032x}" for number in (0xA, 0xB)]
    headers = [("traceparent", f"00-{trace}-{CLIENTS_SPAN}-01") for trace in traces]
    asked = (ask(gateway.port, post_chat(chat(), [LOGIN, header], id="same")) for header in headers)
    assert [response.status for response in await asyncio.gather(*asked)] == [200, 200]
    calls = {_seen_by(request)[1]: _seen_by(request)[2] for request in engine.requests[-2:]}
    for trace_id in traces:
        trace = await collector.trace(trace_id)
        assert [call.span_id.hex() for call in trace.engines] == [calls[trace_id]]


# ── endings ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_that_is_sent_twice_has_a_span_for_each_time(
    gateway: GatewayProcess, engine: ScriptedEngine, collector: Collector
) -> None:
    """An engine that had no room, the second wait, and the engine that had."""
    first = len(engine.requests)

    async def play(connection: ScriptedConnection, request: RecordedRequest) -> None:
        full = len(engine.requests) == first + 1
        await (plain(b"{}", status="503 Service Unavailable") if full else plain())(connection, request)

    engine.play = play
    assert (await ask(gateway.port, post_chat(chat(), [LOGIN]))).status == 200
    sent = [_seen_by(request) for request in engine.requests[first:]]
    trace = await collector.trace(sent[0][1])
    assert [call.span_id.hex() for call in trace.engines] == [span_id for _, _, span_id, _ in sent]
    assert [_attributes(call)["http.response.status_code"] for call in trace.engines] == [503, 200]
    assert [call.status.code for call in trace.engines] == [
        Status.STATUS_CODE_ERROR,
        Status.STATUS_CODE_UNSET,
    ]
    assert len(trace.queues) == 2
    assert trace.engines[0].end_time_unix_nano == trace.queues[1].start_time_unix_nano
    assert not trace.is_error


async def test_an_engines_error_is_one_of_the_service(
    gateway: GatewayProcess, engine: ScriptedEngine, collector: Collector
) -> None:
    """Status and outcome stand at our span, which is an error, as is the engine's."""
    engine.play = plain(b'{"error": {}}', status="500 Internal Server Error")
    assert (await ask(gateway.port, post_chat(chat(), [LOGIN]))).status == 500
    trace = await collector.trace(_seen_by(engine.last)[1])
    assert trace.is_error
    assert (trace.says["qos.outcome"], trace.says["error.type"]) == ("upstream_error", "upstream_error")
    assert _attributes(trace.engines[0])["error.type"] == "500"


async def test_who_is_refused_has_a_span_that_says_so(
    gateway: GatewayProcess, engine: ScriptedEngine, collector: Collector
) -> None:
    """Whether the policy refuses or the door: the outcome, no engine, and no error of the service."""
    engine.play = plain()
    poor = ("authorization", f"Bearer {POOR_KEY}")
    parents = [("traceparent", f"00-{number:032x}-{CLIENTS_SPAN}-01") for number in (1, 2, 3)]
    assert (await ask(gateway.port, post_chat(chat(), [poor, parents[0]]))).status == 200
    assert (await ask(gateway.port, post_chat(chat(), [poor, parents[1]]))).status == 429
    assert (await ask(gateway.port, post_chat(chat(), [parents[2]]))).status == 401
    refused, unknown = await collector.trace(f"{2:032x}"), await collector.trace(f"{3:032x}")
    said = [(t.says["http.response.status_code"], t.says["qos.outcome"]) for t in (refused, unknown)]
    assert said == [(429, "rejected_rate"), (401, "unauthorized")]
    assert "qos.tenant" not in unknown.says
    for trace in (refused, unknown):
        assert (trace.engines, trace.is_error) == ([], False)


async def test_what_needs_no_budget_is_traced_too(
    gateway: GatewayProcess, engine: ScriptedEngine, collector: Collector
) -> None:
    """The list of models goes to the engine with our span's id, and has not waited."""
    engine.play = plain(b'{"object": "list", "data": []}')
    assert (await ask(gateway.port, get("/v1/models", [LOGIN]), "GET")).status == 200
    _, trace_id, span_id, _ = _seen_by(engine.last)
    trace = await collector.trace(trace_id)
    assert trace.server.name == "GET /v1/models"
    assert ([call.span_id.hex() for call in trace.engines], trace.queues) == ([span_id], [])


async def test_another_collector_needs_a_restart(gateway: GatewayProcess) -> None:
    """A reload says so, and keeps the one it has."""
    config = gateway.folder / "gateway.yaml"
    before = config.read_text(encoding="utf-8")
    config.write_text(before.replace("service_name: door", "service_name: window"), encoding="utf-8")
    told = (await gateway.ask_to_reload()).json()
    assert told == {"changed": [], "needs_restart": ["tracing.service_name"]}
    config.write_text(before, encoding="utf-8")
    assert (await gateway.ask_to_reload()).json() == {"changed": [], "needs_restart": []}


# ── without ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_without_tracing_the_clients_headers_are_the_engines(engine: ScriptedEngine) -> None:
    """Whatever they are: nothing is looked at, changed or added, and no trace is in the log."""
    engine.play = plain(whole_answer())
    odd = [("traceparent", "odd"), ("tracestate", "a=1"), ("tracestate", "b=2"), ("baggage", "user=7")]
    settings = {"upstreams": [{"name": "gpu0", "url": engine.url}]}
    async with running_gateway(settings) as gateway:
        assert (await ask(gateway.port, post_chat(chat(), odd, id="odd"))).status == 200
        names = {name for name, _ in odd}
        assert [header for header in engine.last.headers if header[0] in names] == odd
        assert (await ask(gateway.port, post_chat(chat()))).status == 200
        assert names.isdisjoint(name for name, _ in engine.last.headers)
        assert "trace_id" not in await gateway.ending("odd")


async def test_a_collector_that_is_away_costs_no_request(engine: ScriptedEngine) -> None:
    """One warning says that traces do not arrive, and requests and the gateway's end go as ever."""
    engine.play = plain()
    async with ScriptedUpstream(lambda connection: asyncio.sleep(0)) as nobody:
        port = nobody.port
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url}],
        "tracing": {"endpoint": f"http://127.0.0.1:{port}/v1/traces"},
    }
    async with running_gateway(settings, environ=SOON) as gateway:

        def warnings() -> list[dict[str, Any]]:
            return [line for line in gateway.log if line["event"] == "traces do not reach the collector"]

        for _ in range(3):
            assert (await ask(gateway.port, post_chat(chat()))).status == 200
        await eventually(lambda: bool(warnings()))
        for _ in range(3):
            assert (await ask(gateway.port, post_chat(chat()))).status == 200
        await gateway.quiet()
    assert [line["level"] for line in warnings()] == ["warning"]
