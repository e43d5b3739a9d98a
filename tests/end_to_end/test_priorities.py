"""Who goes first, who is promoted, and who is told no: with one place at the engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, RawResponse, ask, chat, post_chat
from tests.support.scripted_engine import ScriptedEngine, plain, scripted_engine
from tests.support.scripted_upstream import RecordedRequest, ScriptedConnection

pytestmark = pytest.mark.anyio

TOUR = Path(__file__).parents[2] / "config" / "tour.yaml"


class Turnstile:
    """An engine that finishes one request each time it is told to, and notes who came in which order."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self._turns = asyncio.Semaphore(0)

    async def __call__(self, connection: ScriptedConnection, request: RecordedRequest) -> None:
        self.came.append(json.loads(request.body)["messages"][0]["content"])
        await self._turns.acquire()
        await plain()(connection, request)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self._turns.release()


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url, "max_in_flight": 1}],
        "capacity": {"tokens_per_second": 1000, "burst_seconds": 100, "min_burst_tokens": 0},
        "classes": {
            "P0": {"max_wait_seconds": 60},
            "P1": {"max_wait_seconds": 2},
            "P2": {"max_wait_seconds": 2, "max_throttle_seconds": 0, "max_queued_requests": 2},
        },
        "scheduling": {"deadline_drop": False},
    }
    async with running_gateway(settings) as gateway:
        yield gateway


class Crowd:
    """Requests that wait for their answers, sent one after the other so that their order is known."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway
        self._clients: list[RawClient] = []

    async def send(self, name: str, **headers: str) -> RawClient:
        client = RawClient(self._gateway.port)
        await client.__aenter__()
        self._clients.append(client)
        before = await self._gateway.queued() + await self._gateway.in_flight()
        fields = [("x-request-priority", name[:2])]
        fields += [(key.replace("_", "-"), value) for key, value in headers.items()]
        await client.send(post_chat(chat(name, max_tokens=1), fields))

        async def has_come() -> bool:
            return await self._gateway.queued() + await self._gateway.in_flight() > before

        await eventually(has_come)
        return client

    async def answers(self) -> list[RawResponse]:
        return [await client.response() for client in self._clients]

    async def leave(self) -> None:
        for client in self._clients:
            await client.leave()


@asynccontextmanager
async def crowd(gateway: GatewayProcess, *names: str) -> AsyncIterator[Crowd]:
    people = Crowd(gateway)
    try:
        for name in names:
            await people.send(name)
        yield people
    finally:
        await people.leave()


# ── order ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_urgent_overtake(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """P0 that comes last goes before the P1 and P2 that wait; inside a class the first come first."""
    engine.play = turnstile = Turnstile()
    async with crowd(gateway, "P1 runs", "P2 a", "P2 b", "P1 a", "P1 b", "P0 a", "P0 b") as people:
        turnstile.turn(7)
        answers = await people.answers()
    assert {answer.status for answer in answers} == {200}
    assert turnstile.came == ["P1 runs", "P0 a", "P0 b", "P1 a", "P1 b", "P2 a", "P2 b"]
    waited = [int(answer.header("x-qos-queue-ms") or "") for answer in answers]
    assert waited[0] <= waited[6] <= waited[1]


async def test_a_class_passed_over_is_promoted(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """P1 goes first after it was passed over twice, which is counted and logged."""
    engine.play = turnstile = Turnstile()
    before = (await gateway.metrics()).total("promotions_total", priority="P1")
    async with crowd(gateway, "P0 runs", "P1 a", *(f"P0 {n}" for n in range(6))) as people:
        turnstile.turn(8)
        await people.answers()
    assert turnstile.came == ["P0 runs", "P0 0", "P0 1", "P1 a", "P0 2", "P0 3", "P0 4", "P0 5"]
    page = await gateway.quiet()
    assert page.total("promotions_total", priority="P1") == before + 1
    assert [line["promoted"] for line in gateway.endings()[-8:]].count(True) == 1


# ── no ───────────────────────────────────────────────────────────────────────────────────────────────────


def check_refusal(response: RawResponse, status: int, outcome: str, type: str, code: str) -> str:
    """The message of a refusal that an SDK will retry by itself."""
    assert (response.status, response.whole) == (status, True)
    assert response.header("x-qos-outcome") == outcome
    assert response.header("x-qos-error-source") == "gateway"
    seconds = int(response.header("retry-after") or "")
    milliseconds = int(response.header("retry-after-ms") or "")
    assert 1 <= seconds <= 60
    assert (seconds - 1) * 1000 < milliseconds <= seconds * 1000
    error = response.error
    assert (error["type"], error["code"]) == (type, code)
    message: str = error["message"]
    return message


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_a_full_queue(gateway: GatewayProcess, engine: ScriptedEngine, stream: bool) -> None:
    """One more than may wait is told to slow down, at once and with a status; the others are served."""
    engine.play = turnstile = Turnstile()
    async with crowd(gateway, "P0 runs", "P2 a", "P2 b") as people:
        body = chat("P2 c", max_tokens=1, stream=stream)
        refused = await ask(gateway.port, post_chat(body, [("x-request-priority", "P2")]))
        turnstile.turn(3)
        assert [answer.status for answer in await people.answers()] == [200] * 3
    message = check_refusal(refused, 429, "rejected_queue_full", "rate_limit_error", "slow_down")
    assert message == "the P2 queue is full (2 waiting)"
    assert refused.header("x-qos-priority") == "P2"
    assert refused.header("x-ratelimit-limit-requests") == "2"
    assert refused.header("x-ratelimit-remaining-requests") == "0"


@pytest.mark.parametrize(("priority", "code"), [("P1", "slow_down"), ("P2", "resource_unavailable")])
async def test_a_wait_that_was_too_long(
    gateway: GatewayProcess, engine: ScriptedEngine, priority: str, code: str
) -> None:
    """Who gets no place within the class's longest wait is told so, and the engine never sees him."""
    engine.play = turnstile = Turnstile()
    async with crowd(gateway, "P0 runs", f"{priority} waits") as people:
        refused = await people._clients[1].response()
        turnstile.turn()
        assert (await people._clients[0].response()).status == 200
    message = check_refusal(refused, 429, "queue_timeout", "rate_limit_error", code)
    assert message.startswith(f"{priority} request got no ")
    assert "place at an engine after 2" in message
    assert int(refused.header("x-qos-queue-ms") or "") >= 1990
    assert turnstile.came == ["P0 runs"]


async def test_a_wait_longer_than_the_clients_own(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """A client that tells its time-out is not kept waiting beyond it."""
    engine.play = turnstile = Turnstile()
    async with crowd(gateway, "P0 runs") as people:
        client = await people.send("P0 waits", x_stainless_read_timeout="0.2")
        refused = await client.response()
        turnstile.turn()
    check_refusal(refused, 429, "queue_timeout", "rate_limit_error", "slow_down")
    waited = float(refused.error["message"].removesuffix(" s").rpartition(" ")[2])
    assert 0.19 <= waited <= 0.21  # the client's 0.2 s less the prefill that would still have to come


async def test_an_empty_bucket(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """What the class cannot pay in time is refused at once, with the bucket, its rate and the wait."""
    large = chat("x", n=4, max_tokens=230)  # a wait of 48 s, so that a retry is worth while
    headers = [("x-request-priority", "P2")]
    turnstile = engine.play = Turnstile()
    async with RawClient(gateway.port) as first:
        await first.send(post_chat(large, headers))
        await eventually(lambda: len(turnstile.came) == 1)
        refused = await ask(gateway.port, post_chat(large, headers))
        turnstile.turn()
        assert (await first.response()).status == 200
    message = check_refusal(refused, 429, "rejected_rate", "rate_limit_error", "rate_limit_exceeded")
    assert message.startswith("the P2 token bucket (50 tokens/s) could pay this request in about ")
    wait_ms = float(message.split()[-2]) * 1000
    assert 0.9 * wait_ms <= int(refused.header("retry-after-ms") or "") <= 1.5 * wait_ms
    assert refused.header("x-should-retry") is None
    assert refused.header("x-ratelimit-limit-tokens") == "5000"
    assert int(refused.header("x-ratelimit-remaining-tokens") or "") < 2000
    assert (refused.header("x-ratelimit-reset-tokens") or "").endswith("s")


# ── the README's tour ────────────────────────────────────────────────────────────────────────────────────


async def test_the_tour() -> None:
    """On the tour's small engine six batch requests at once are two answers and four refusals, and a normal
    request behind sixteen urgent ones is promoted."""
    settings: dict[str, Any] = yaml.safe_load(TOUR.read_text(encoding="utf-8"))
    async with running_gateway(settings) as gateway:
        batch = post_chat(chat("Summarise a book", max_tokens=200), [("x-request-priority", "P2")])
        asked = [asyncio.create_task(ask(gateway.port, batch)) for _ in range(6)]
        done, pending = await asyncio.wait(asked, timeout=1)
        refused = [task.result() for task in done]
        assert len(refused) == 4
        for response in refused:
            check_refusal(response, 429, "rejected_rate", "rate_limit_error", "rate_limit_exceeded")
            assert int(response.header("retry-after-ms") or "") > 1000
        urgent = post_chat(chat("hi", max_tokens=20), [("x-request-priority", "P0")])
        crowd = [asyncio.create_task(ask(gateway.port, urgent)) for _ in range(16)]
        await eventually(lambda: _waits(gateway))
        normal = post_chat(chat("hi", max_tokens=20), [("x-request-priority", "P1")])
        assert (await ask(gateway.port, normal)).status == 200
        assert any(not task.done() for task in crowd)
        assert {(await task).status for task in crowd} == {200}
        assert (await gateway.metrics()).total("promotions_total", priority="P1") == 1
        for task in pending:  # their 200 tokens each would take a while yet
            task.cancel()
        await asyncio.wait(pending)


async def _waits(gateway: GatewayProcess) -> bool:
    return await gateway.queued() > 0
