"""What a refusal owes to an SDK: a status before anything else, an error it can read, and a time to come back
at which coming back works."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import structlog

from gateway.api.app import Gateway
from gateway.api.configuration import Configuration
from gateway.api.inference import create_tenant_app
from gateway.settings import Settings
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.metered import PLAIN_SUMS, as_key, exactly, honest, nothing_runs
from tests.support.raw_client import RawClient, ask, check_error, request_head
from tests.support.scripted_engine import (
    ROLE,
    Script,
    ScriptedEngine,
    held_plain,
    held_stream,
    plain,
    scripted_engine,
)

pytestmark = pytest.mark.anyio

MESSAGES: Any = [{"role": "user", "content": "hi"}]
LIMITS: dict[str, dict[str, Any]] = {
    "free": {},
    "requests": {"requests_per_minute": 60},
    "tokens": {"tokens_per_minute": 6000},
    "places": {"max_in_flight": 1},
    "nothing": {"requests_per_minute": 0},
}
KEYS = {key: {"tenant": key, **limits} for key, limits in LIMITS.items()}


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def away() -> AsyncIterator[ScriptedEngine]:
    """An engine for the model `away` that a test may let fail its probes."""
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine, away: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    """One place, for which P1 waits not for long, and of P2 not more than one."""
    probes = {"interval_seconds": 0.1, "fail_after": 1}
    settings = {
        "upstreams": [
            {"name": "gpu0", "url": engine.url, "models": ["mock-gpu", "any"], "max_in_flight": 1},
            {"name": "away", "url": away.url, "models": ["away", "any"], "health": probes},
        ],
        "upstream_timeouts": {"first_byte_seconds": 0.5, "no_upstream_seconds": 0.3},
        "capacity": PLAIN_SUMS,
        "scheduling": {"deadline_drop": False},
        "classes": {
            "P0": {"max_wait_seconds": 60},
            "P1": {"max_wait_seconds": 0.3},
            "P2": {"max_wait_seconds": 60, "max_queued_requests": 1},
        },
    }
    async with running_gateway(settings, keys=KEYS) as gateway:
        yield gateway


def claiming(priority: str) -> tuple[str, str]:
    return ("x-request-priority", priority)


async def _has_queued(gateway: GatewayProcess, count: int) -> bool:
    return await gateway.queued() == count


class Holder:
    """Somebody who has the one place, until `release`."""

    def __init__(self, gateway: GatewayProcess, engine: ScriptedEngine) -> None:
        self._gateway = gateway
        self._engine = engine
        self._held = held_stream(ROLE)
        self._client = RawClient(gateway.port)

    async def __aenter__(self) -> "Holder":
        self._engine.play = self._held
        await self._client.__aenter__()
        return self

    async def take(self, key: str = "free") -> None:
        await self._client.send(as_key(key, exactly(3, stream=True), claiming("P0")))
        await self._held.begun.wait()

    async def release(self, then: Script | None = None) -> None:
        """Free the place; whoever comes next gets this answer, at once."""
        self._engine.play = then or honest()
        self._held.released.set()
        assert (await self._client.response()).whole

    async def __aexit__(self, *_: object) -> None:
        await self._client.leave()


# ── come back later ──────────────────────────────────────────────────────────────────────────────────────


class Bench(NamedTuple):
    gateway: GatewayProcess
    engine: ScriptedEngine
    away: ScriptedEngine
    stack: AsyncExitStack

    async def holder(self, key: str = "free") -> Holder:
        holder = await self.stack.enter_async_context(Holder(self.gateway, self.engine))
        await holder.take(key)
        return holder


async def _nothing() -> None:
    return None


class Cause(NamedTuple):
    """Why a request would be refused now: one with this key, class and model, with this outcome. `mend` takes
    the cause away; where it is time that does, there is nothing to mend."""

    outcome: str
    key: str = "free"
    priority: str = "P0"
    model: str = "mock-gpu"
    mend: Callable[[], Awaitable[None]] = _nothing


async def no_requests_left(bench: Bench) -> Cause:
    request = as_key("requests", exactly(3), claiming("P0"))
    while (await ask(bench.gateway.port, request)).status == 200:
        pass
    return Cause("rejected_rate", key="requests")


async def no_tokens_left(bench: Bench) -> Cause:
    request = as_key("tokens", exactly(6000), claiming("P0"))
    assert (await ask(bench.gateway.port, request)).status == 200
    return Cause("rejected_rate", key="tokens")


async def no_place_of_the_key(bench: Bench) -> Cause:
    holder = await bench.holder("places")
    return Cause("rejected_rate", key="places", mend=holder.release)


async def a_full_queue(bench: Bench) -> Cause:
    holder = await bench.holder()
    waiting = await bench.stack.enter_async_context(RawClient(bench.gateway.port))
    await waiting.send(as_key("free", exactly(3), claiming("P2")))
    await eventually(lambda: _has_queued(bench.gateway, 1))
    return Cause("rejected_queue_full", priority="P2", mend=holder.release)


async def too_long_a_wait(bench: Bench) -> Cause:
    return Cause("queue_timeout", priority="P1", mend=(await bench.holder()).release)


async def no_engine(bench: Bench) -> Cause:
    async def is_up() -> bool:
        return bool((await bench.gateway.state())["upstreams"]["away"]["healthy"])

    async def is_down() -> bool:
        return not await is_up()

    async def mend() -> None:
        bench.away.healthy = True

    bench.stack.callback(setattr, bench.away, "healthy", True)
    bench.away.healthy = False
    bench.away.play = honest()
    await eventually(is_down)
    return Cause("rejected_no_upstream", model="away", mend=mend)


CAUSES = (no_requests_left, no_tokens_left, no_place_of_the_key, a_full_queue, too_long_a_wait, no_engine)


class Attempts:
    """What an SDK sent and got, by its HTTP client's hooks. After each refusal `mend` is called."""

    def __init__(self, mend: Callable[[], Awaitable[None]]) -> None:
        self._mend = mend
        self.refusals: list[httpx.Response] = []
        self.waits: list[float] = []
        """Seconds from a refusal to the next attempt."""
        self._refused_at: float | None = None
        self.client = httpx.AsyncClient(
            trust_env=False, event_hooks={"request": [self._sent], "response": [self._got]}
        )

    async def _sent(self, request: httpx.Request) -> None:
        if self._refused_at is not None:
            self.waits.append(asyncio.get_running_loop().time() - self._refused_at)
            self._refused_at = None

    async def _got(self, response: httpx.Response) -> None:
        if response.status_code == 200:
            return
        await response.aread()
        self.refusals.append(response)
        self._refused_at = asyncio.get_running_loop().time()
        await self._mend()


@pytest.mark.parametrize("cause_of", CAUSES, ids=lambda cause: cause.__name__)
async def test_an_sdk_comes_back_when_told_and_succeeds(
    gateway: GatewayProcess,
    engine: ScriptedEngine,
    away: ScriptedEngine,
    cause_of: Callable[[Bench], Awaitable[Cause]],
) -> None:
    """Each refusal that time mends says when, in whole seconds and in milliseconds, and the SDK's own retry
    at that time is served."""
    engine.play = honest()
    async with AsyncExitStack() as stack:
        cause = await cause_of(Bench(gateway, engine, away, stack))
        attempts = Attempts(cause.mend)
        sdk = openai.AsyncOpenAI(
            base_url=gateway.api + "/v1", api_key=cause.key, http_client=attempts.client, max_retries=1
        )
        async with sdk:
            while not attempts.refusals:  # a unit may have come back just now
                answer = await sdk.completions.create(
                    model=cause.model,
                    prompt=[1] * 100,
                    max_tokens=0,
                    extra_headers=dict([claiming(cause.priority)]),
                )
                assert answer.choices
    (refusal,) = attempts.refusals
    assert refusal.status_code == (503 if cause.outcome == "rejected_no_upstream" else 429)
    assert refusal.headers["x-qos-outcome"] == cause.outcome
    assert refusal.headers["content-type"] == "application/json"
    assert refusal.json().keys() == {"error"}
    check_error(refusal.json()["error"])
    seconds, milliseconds = int(refusal.headers["retry-after"]), int(refusal.headers["retry-after-ms"])
    assert 1 <= seconds <= 60
    assert (seconds - 1) * 1000 < milliseconds <= seconds * 1000
    (wait,) = attempts.waits
    assert wait >= milliseconds / 1000


# ── one answer for one thing ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seconds", ["0.000000001", "0.0001", "0.001", "0.01"])
async def test_no_time_to_wait(gateway: GatewayProcess, engine: ScriptedEngine, seconds: str) -> None:
    """A client whose patience ends as it enters the queue is told the same as one that waited in vain; with
    the place free it is served."""
    hasty = as_key("free", exactly(3), claiming("P0"), ("x-stainless-read-timeout", seconds))
    async with Holder(gateway, engine) as holder:
        await holder.take()
        for _ in range(5):
            response = await ask(gateway.port, hasty)
            assert (response.status, response.header("x-qos-outcome")) == (429, "queue_timeout")
            assert (response.error["type"], response.error["code"]) == ("rate_limit_error", "slow_down")
            assert 1 <= int(response.header("retry-after") or "") <= 60
        await holder.release()
    await nothing_runs(gateway)
    assert (await ask(gateway.port, hasty)).status == 200


@pytest.mark.parametrize("priority", ["P1", "P0"], ids=["time-out", "engine's own refusal"])
async def test_a_stream_that_waits_gets_its_real_status(
    gateway: GatewayProcess, engine: ScriptedEngine, priority: str
) -> None:
    """Nothing goes out before it is known how a stream will begin: one that waited in vain, and one that the
    engine refuses after it has waited, have a status and a body that say so."""
    said = b'{"error":{"message":"busy","type":"engine","param":null,"code":"busy"}}'
    async with Holder(gateway, engine) as holder, RawClient(gateway.port) as client:
        await holder.take()
        await client.send(as_key("free", exactly(3, stream=True), claiming(priority)))
        await eventually(lambda: _has_queued(gateway, 1))
        if priority == "P1":
            response = await client.response()
            assert response.header("x-qos-outcome") == "queue_timeout"
            assert response.error["code"] == "slow_down"
            assert int(response.header("x-qos-queue-ms") or "") >= 299
            await holder.release()
        else:
            await holder.release(plain(said, status="429 Too Many Requests"))
            response = await client.response()
            assert response.body == said
            assert response.header("x-qos-error-source") == "upstream"
    assert (response.status, response.whole) == (429, True)
    assert response.header("content-type") == "application/json"


# ── errors that an SDK can read ──────────────────────────────────────────────────────────────────────────

ERROR = b'{"error":{"message":"no such parameter","type":"BadRequestError","param":"foo","code":"odd"}}'
FAULTS: dict[str, tuple[Script, str, str, type[openai.APIStatusError], int, str]] = {
    "a limit": (plain(), "nothing", "mock-gpu", openai.RateLimitError, 429, "rate_limit_exceeded"),
    "no answer": (plain(b"?"), "free", "mock-gpu", openai.InternalServerError, 502, "upstream_unavailable"),
    "no engine": (plain(), "free", "away", openai.InternalServerError, 503, "server_is_overloaded"),
    "too late": (held_plain(), "free", "mock-gpu", openai.InternalServerError, 504, "upstream_timeout"),
    "the engine's": (
        plain(ERROR, status="422 Unprocessable Content"),
        *("free", "mock-gpu", openai.UnprocessableEntityError, 422, "odd"),
    ),
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("name", FAULTS)
async def test_an_sdk_raises_its_own_error(
    gateway: GatewayProcess, engine: ScriptedEngine, away: ScriptedEngine, name: str, stream: bool
) -> None:
    """The class, message and code of an error are there for a client of either kind."""
    script, key, model, raised, status, code = FAULTS[name]
    engine.play = script
    away.healthy = name != "no engine"
    http = httpx.AsyncClient(trust_env=False)
    sdk = openai.AsyncOpenAI(base_url=gateway.api + "/v1", api_key=key, http_client=http, max_retries=0)

    async def as_wanted() -> bool:
        state = (await gateway.state())["upstreams"]["away"]
        return bool(state["healthy"] or state["on_trial"]) == away.healthy

    await eventually(as_wanted)
    async with sdk:
        with pytest.raises(raised) as caught:
            await sdk.chat.completions.create(model=model, messages=MESSAGES, stream=stream)
    away.healthy = True
    error = caught.value
    assert type(error) is raised
    assert (error.status_code, error.code) == (status, code)
    assert error.message
    assert error.type


async def test_paths_of_its_own_err_alike(gateway: GatewayProcess) -> None:
    """Health, documentation and the operators' pages have the same errors as everything else."""
    for port, method, path, status in (
        (gateway.port, "POST", "/healthz", 405),
        (gateway.port, "DELETE", "/openapi.json", 405),
        (gateway.operations_port, "GET", "/nothing", 404),
        (gateway.operations_port, "POST", "/metrics", 405),
    ):
        response = await ask(port, request_head(method, path))
        assert (response.status, response.error["type"]) == (status, "invalid_request_error")


# ── a fault of the gateway ───────────────────────────────────────────────────────────────────────────────


class _Faulty:
    """A part of the gateway with a programming error in it."""

    async def read(self, *_: object) -> Any:
        raise ZeroDivisionError("not for clients")

    send = read
    address = None

    def close(self) -> None:
        return None

    async def aclose(self) -> None:
        return None


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("where", ["at the door", "at the engine"])
async def test_a_fault_of_the_gateway_is_told_as_one(where: str, stream: bool) -> None:
    """A fault in the middle of a request is a 500 in the usual shape, tells nothing of the inside, is logged,
    and leaves place and tokens as they were."""
    async with scripted_engine() as engine:
        upstreams = [{"name": "gpu0", "url": engine.url}]
        await _a_fault(
            Gateway(Configuration(Settings.model_validate({"upstreams": upstreams}))), where, stream
        )


async def _a_fault(gateway: Gateway, where: str, stream: bool) -> None:
    with structlog.testing.capture_logs() as log:
        edge = await gateway.start()
        (pool,) = edge.admission.pools
        full = list(pool.buckets.levels)
        if where == "at the door":
            edge.prompt_reader = _Faulty()  # type: ignore[assignment]
        else:
            (engine,) = edge.engines
            engine.upstream = _Faulty()  # type: ignore[assignment]
        http = httpx.AsyncClient(transport=httpx.ASGITransport(create_tenant_app(edge)))
        sdk = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="x", http_client=http, max_retries=0)
        try:
            async with sdk:
                with pytest.raises(openai.InternalServerError) as caught:
                    await sdk.chat.completions.create(model="m", messages=MESSAGES, stream=stream)
        finally:
            await gateway.stop()
    error = caught.value
    assert (error.status_code, error.type, error.code) == (500, "server_error", "internal_error")
    assert error.response.headers["x-qos-outcome"] == "internal_error"
    assert "not for clients" not in error.response.text
    assert (pool.slots[0].in_flight_total, pool.slots[0].in_flight_tokens) == (0, 0)
    assert list(pool.buckets.levels) == full
    assert [line["event"] for line in log if line["log_level"] == "error"] == ["internal error", "request"]
    assert [line["outcome"] for line in log if line["event"] == "request"] == ["internal_error"]
