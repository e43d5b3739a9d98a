"""The gateway in front of a mock GPU that has a bad day: what the client sees, what is recorded, and that
nothing is left of it, neither in the gateway nor in the GPU. Both are processes of their own."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from gateway.mock_backend.child import MockGpuProcess, RestartedMockGpu
from gateway.mock_backend.faults import FaultKind, FaultOptions
from tests.mock_backend.test_server import idle, metrics, until
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawResponse, ask, chat, post_chat

pytestmark = pytest.mark.anyio

DONE = b"data: [DONE]\n\n"
TOKENS = 6
FULL_P1 = 0.35 * 1_000_000


@dataclass(frozen=True)
class Seen:
    """What becomes of a request with this fault."""

    fault: str
    outcome: str
    status: int = 200
    whole: bool = True
    """The client gets an end of the body that is one."""
    tokens: int | None = None
    """Paid for; None: all."""


STREAMS = [
    Seen("reset_before_headers", "upstream_refused", 502, tokens=0),
    Seen("reset_after_headers", "upstream_aborted", whole=False, tokens=0),
    Seen("reset_mid_stream; after=3", "upstream_aborted", whole=False, tokens=3),
    Seen("silence; after=3", "upstream_aborted", whole=False, tokens=3),
    Seen("silence_before_headers", "upstream_timeout", 504, tokens=0),
    Seen("drip; seconds=0", "completed"),
    Seen("short_length", "completed"),
    Seen("long_length", "completed"),
    Seen("queue_full", "upstream_error", 503, tokens=0),
    Seen("error_500", "upstream_error", 500, tokens=0),
    Seen("gzip", "completed"),
    Seen("huge_event; after=1; bytes=4000000", "completed"),
    Seen("error_event; after=2", "upstream_error", tokens=2),
    Seen("no_done", "completed"),
    Seen("crash; after=2", "upstream_aborted", whole=False, tokens=2),
]
PLAIN = [
    Seen("reset_before_headers", "upstream_refused", 502, tokens=0),
    Seen("reset_after_headers", "upstream_refused", 502, tokens=0),
    Seen("reset_mid_stream", "upstream_refused", 502, tokens=0),
    Seen("silence", "upstream_timeout", 504, tokens=0),
    Seen("silence_before_headers", "upstream_timeout", 504, tokens=0),
    Seen("drip; seconds=0", "completed"),
    Seen("short_length", "upstream_refused", 502, tokens=0),
    Seen("long_length", "upstream_refused", 502, tokens=0),
    Seen("queue_full", "upstream_error", 503, tokens=0),
    Seen("error_500", "upstream_error", 500, tokens=0),
    Seen("gzip", "completed"),
    Seen("huge_event; bytes=4000000", "completed"),
    Seen("error_event", "upstream_error", 500, tokens=0),
    Seen("no_done", "completed"),
    Seen("crash", "upstream_refused", 502, tokens=0),
]
ELSEWHERE = {FaultKind.REFUSE, FaultKind.SLOW_HEALTH, FaultKind.HEALTH_500}
"""Kinds with a test of their own."""


@pytest.fixture(scope="module")
async def gpu() -> AsyncIterator[RestartedMockGpu]:
    async def start(port: int) -> MockGpuProcess:
        return await MockGpuProcess.start("h100_llama3_8b", faults=FaultOptions(allowed=True), port=port)

    gpu = await RestartedMockGpu.start(start, after_seconds=0)
    yield gpu
    await gpu.stop()


@pytest.fixture(scope="module")
async def engine(gpu: RestartedMockGpu) -> AsyncIterator[httpx.AsyncClient]:
    """The mock itself, asked past the gateway."""
    async with httpx.AsyncClient(base_url=gpu.url, timeout=30, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
async def gateway(gpu: RestartedMockGpu) -> AsyncIterator[GatewayProcess]:
    """It goes on using its engine, whatever happens."""
    settings = {
        "upstreams": [{"name": "gpu0", "url": gpu.url, "health": {"interval_seconds": 600}}],
        "upstream_timeouts": {"first_byte_seconds": 1, "idle_seconds": 0.5},
        "circuit_breaker": {"failures": 1000},
        "capacity": {"tokens_per_second": 1, "burst_seconds": 1_000_000},
    }
    async with running_gateway(settings) as gateway:
        yield gateway
        await gateway.books_balance("P1", full=FULL_P1)


async def struck(gateway: GatewayProcess, fault: str | None, id: str, *, stream: bool) -> RawResponse:
    headers = [] if fault is None else [("x-mock-fault", fault)]
    body = chat(stream=stream, max_tokens=TOKENS)
    return await ask(gateway.port, post_chat(body, headers, id=id))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
def test_all_kinds_are_here(stream: bool) -> None:
    kinds = [seen.fault.partition(";")[0] for seen in (STREAMS if stream else PLAIN)]
    assert sorted([*kinds, *ELSEWHERE]) == sorted(FaultKind)


@pytest.mark.parametrize(
    ("stream", "seen"),
    [
        pytest.param(stream, seen, id=f"{'stream' if stream else 'plain'}-{seen.fault.partition(';')[0]}")
        for stream, table in ((True, STREAMS), (False, PLAIN))
        for seen in table
    ],
)
async def test_what_becomes_of_it(
    gateway: GatewayProcess, gpu: RestartedMockGpu, engine: httpx.AsyncClient, stream: bool, seen: Seen
) -> None:
    """Status, outcome and price are those of the table; the next request is served as if nothing had been."""
    id = f"{seen.fault.partition(';')[0]}-{stream}"
    pid = gpu.pid
    response = await struck(gateway, seen.fault, id, stream=stream)
    assert (response.status, response.whole) == (seen.status, seen.whole)
    line = await gateway.ending(id)
    assert (line["outcome"], line["status"]) == (seen.outcome, seen.status)
    _check_answer(response, seen, stream)
    if seen.tokens == 0 and seen.status != 200:
        assert line["cost"] == 0
    else:
        assert line["output_tokens"] == (TOKENS if seen.tokens is None else seen.tokens)
    if seen.fault.startswith("crash"):
        await eventually(lambda: gpu.pid != pid, seconds=30)
    assert (await gateway.quiet()).quiet
    await until(engine, idle)
    assert (await struck(gateway, None, f"after-{id}", stream=stream)).status == 200
    assert (await gateway.ending(f"after-{id}"))["outcome"] == "completed"


def _check_answer(response: RawResponse, seen: Seen, stream: bool) -> None:
    assert response.header("content-encoding") is None
    if seen.outcome == "completed":
        assert response.header("x-qos-error-source") is None
        if stream:
            assert response.body.count(b'"content":"') == 1 + TOKENS
            assert response.body.endswith(DONE) == (not seen.fault.startswith("no_done"))
        else:
            assert response.json["usage"]["completion_tokens"] == TOKENS
    elif seen.status != 200:
        source = "upstream" if seen.outcome == "upstream_error" else "gateway"
        assert response.header("x-qos-error-source") == source
        assert "message" in response.json["error"]
    else:
        events = response.body.removesuffix(DONE).removesuffix(b"\n\n").split(b"\n\n")
        error = json.loads(events[-1].removeprefix(b"data: "))["error"]
        mine = "upstream_aborted" if seen.outcome == "upstream_aborted" else 500
        assert error["code"] == mine


async def test_an_engine_out_of_reach(
    gateway: GatewayProcess, gpu: RestartedMockGpu, engine: httpx.AsyncClient
) -> None:
    """`refuse`: clients are told at once while it lasts, and served when it is over."""
    refused = await struck(gateway, "refuse; seconds=1", "refuse-0", stream=False)
    ids = ["refuse-0"]
    while refused.status != 200:
        assert (refused.status, refused.header("x-qos-outcome")) == (502, "upstream_refused")
        ids.append(f"refuse-{len(ids)}")
        refused = await struck(gateway, None, ids[-1], stream=False)
    assert len(ids) > 2
    lines = [await gateway.ending(id) for id in ids[:-1]]
    assert {(line["outcome"], line["cost"]) for line in lines} == {("upstream_refused", 0)}
    await gateway.quiet()
    await until(engine, idle)


async def test_faults_at_random(gateway: GatewayProcess, engine: httpx.AsyncClient) -> None:
    """A crowd of requests of which most are struck: each ends once, as one of the kinds does that were
    asked for, and nothing is left."""
    kinds = {
        "reset_before_headers": "upstream_refused",
        "reset_mid_stream": "upstream_aborted",
        "error_500": "upstream_error",
        "error_event": "upstream_error",
        "gzip": "completed",
        "long_length": "completed",
    }
    table = [{"kind": kind, "probability": 0.14} for kind in kinds]
    assert (await engine.post("/faults", json=table)).status_code == 200
    before = (await gateway.quiet()).outcomes()
    count = 60
    await asyncio.gather(*(struck(gateway, None, f"random-{n}", stream=True) for n in range(count)))
    assert (await engine.delete("/faults")).json()["faults"] == []
    ended = (await gateway.quiet()).outcomes() - before
    assert ended.total() == count
    assert set(ended) == set(kinds.values())
    samples = await until(engine, idle)
    assert samples["kv_cache_usage_perc"] == 0
    assert (await metrics(engine))["num_requests_waiting"] == 0


async def test_failing_probes(gpu: RestartedMockGpu, engine: httpx.AsyncClient) -> None:
    """`health_500` and `slow_health` have the engine taken out, and it comes back when they end."""
    probed = {"interval_seconds": 0.2, "fail_after": 2}
    settings = {"upstreams": [{"name": "gpu0", "url": gpu.url, "health": probed}]}
    async with running_gateway(settings) as gateway:

        async def is_healthy() -> bool:
            return (await gateway.metrics()).total("upstream_healthy") == 1

        async def is_down() -> bool:
            return not await is_healthy()

        for fault in ("health_500", "slow_health"):
            table = [{"kind": fault, "probability": 1}]
            assert (await engine.post("/faults", json=table)).status_code == 200
            await eventually(is_down)
            await engine.delete("/faults")
            await eventually(gateway.is_ready)
            assert (await struck(gateway, None, f"trial-{fault}", stream=False)).status == 200
            await eventually(is_healthy)
