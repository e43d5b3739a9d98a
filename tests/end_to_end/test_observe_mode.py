"""Observe mode: all is decided and written down, and nobody is told no."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.policy.request import PRIORITIES
from gateway.policy_parameters import is_observed
from gateway.settings import Settings
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.metered import PLAIN_SUMS, as_key, exactly, honest
from tests.support.raw_client import RawClient, RawResponse, ask
from tests.support.scripted_engine import ScriptedEngine, held_plain, scripted_engine

pytestmark = pytest.mark.anyio

LIMITS: dict[str, dict[str, Any]] = {
    "free": {},
    "nothing": {"requests_per_minute": 0},
    "one-at-a-time": {"max_in_flight": 1},
    "batch": {"ceiling": "P2"},
    "narrow": {"models": ["other"]},
}
KEYS = {key: {"tenant": key, **limits} for key, limits in LIMITS.items()}


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def unwell() -> AsyncIterator[ScriptedEngine]:
    """An engine for the model `unwell` that answers requests but fails its probes."""
    async with scripted_engine() as engine:
        engine.healthy = False
        engine.play = honest()
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine, unwell: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    """One place, no queue for P0, and buckets of 600, 350 and 50 tokens. Only P1 is enforced."""
    settings = {
        "mode": "observe",
        "upstreams": [
            {"name": "gpu0", "url": engine.url, "models": ["mock-gpu", "any"], "max_in_flight": 1},
            {"name": "unwell", "url": unwell.url, "models": ["unwell", "any"]},
        ],
        "capacity": {**PLAIN_SUMS, "burst_seconds": 1000, "max_request_tokens": 2000},
        "scheduling": {"deadline_drop": False},
        "classes": {
            "P0": {"max_queued_requests": 0},
            "P1": {"max_queued_requests": 0, "mode": "enforce"},
            "P2": {"max_throttle_seconds": 0},
        },
        "classification": {"on_exceed": "reject"},
    }
    async with running_gateway(settings, keys=KEYS) as gateway:
        yield gateway


def claiming(priority: str) -> tuple[str, str]:
    return ("x-request-priority", priority)


async def passes(gateway: GatewayProcess, id: str, response: RawResponse, would_be: str | None) -> None:
    """The client has its answer and knows of nothing; the log knows, and only what really counts was paid."""
    assert response.status == 200
    assert response.header("x-qos-outcome") is None
    line = await gateway.ending(id)
    assert (line["outcome"], line.get("would_be")) == ("completed", would_be)
    assert (line["cost"] == 0) == (would_be is not None)


async def observed(gateway: GatewayProcess, priority: str, outcome: str) -> float:
    page = await gateway.metrics()
    return page.total("observed_refusals_total", priority=priority, outcome=outcome)


@pytest.mark.parametrize(
    ("key", "priority", "tokens", "model", "would_be"),
    [
        ("free", "P0", 10, "mock-gpu", None),
        ("nothing", "P0", 10, "mock-gpu", "rejected_rate"),
        ("free", "P0", 3000, "mock-gpu", "bad_request"),
        ("free", "P2", 10, "unwell", "rejected_no_upstream"),
    ],
    ids=["nothing wrong", "limit of its tenant", "too large", "no engine"],
)
async def test_who_would_be_refused_is_served(
    gateway: GatewayProcess,
    engine: ScriptedEngine,
    request: pytest.FixtureRequest,
    key: str,
    priority: str,
    tokens: int,
    model: str,
    would_be: str | None,
) -> None:
    """The answer is the engine's; what would have been said instead is in the log line and counted."""
    engine.play = honest()
    id = request.node.callspec.id.replace(" ", "-")
    before = await observed(gateway, priority, would_be or "")
    response = await ask(gateway.port, as_key(key, exactly(tokens, model=model), claiming(priority), id=id))
    await passes(gateway, id, response, would_be)
    assert await observed(gateway, priority, would_be or "") == before + (would_be is not None)


@pytest.mark.parametrize(
    ("key", "priority", "would_be"),
    [
        ("free", "P0", "rejected_queue_full"),
        ("one-at-a-time", "P2", "rejected_rate"),
        ("free", "P2", None),
    ],
    ids=["no place and no queue", "too many of the key", "would wait"],
)
async def test_nobody_waits(
    gateway: GatewayProcess,
    engine: ScriptedEngine,
    request: pytest.FixtureRequest,
    key: str,
    priority: str,
    would_be: str | None,
) -> None:
    """Two are at the engine at once though it has one place and the key one request."""
    engine.play = held = held_plain()
    id = request.node.callspec.id.replace(" ", "-")
    before = await observed(gateway, priority, would_be or "")
    async with RawClient(gateway.port) as first, RawClient(gateway.port) as second:
        for n, client in enumerate((first, second)):
            body = exactly(5)
            await client.send(as_key(key, body, claiming(priority), id=f"{id}-{n}"))
            await eventually(lambda n=n: len(held.connections) == n + 1)  # type: ignore[misc]
        assert await gateway.in_flight() == 2
        held.released.set()
        await passes(gateway, f"{id}-0", await first.response(), None)
        await passes(gateway, f"{id}-1", await second.response(), would_be)
    assert await observed(gateway, priority, would_be or "") == before + (would_be is not None)


async def test_an_empty_bucket_is_written_down(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Who spends the class's last tokens pays; who comes then would be refused, passes, and leaves the bucket
    as it is."""
    engine.play = honest()
    level = int(await gateway.bucket("P2"))
    for n, (tokens, would_be) in enumerate(((level, None), (level, "rejected_rate"), (40, "rejected_rate"))):
        id = f"bucket-{n}"
        response = await ask(gateway.port, as_key("free", exactly(tokens), claiming("P2"), id=id))
        await passes(gateway, id, response, would_be)
        assert 0 <= await gateway.bucket("P2") < level / 2


async def test_a_class_may_be_enforced(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """The class's own mode stands above the general one: for P1 limits, sizes and places hold."""
    engine.play = honest()
    asked = len(engine.requests)
    normal = claiming("P1")
    for key, tokens, status in (("nothing", 10, 429), ("free", 3000, 400)):
        response = await ask(gateway.port, as_key(key, exactly(tokens), normal, id=f"enforced-{key}"))
        assert response.status == status
        assert response.header("x-qos-outcome")
    assert len(engine.requests) == asked
    engine.play = held = held_plain()
    async with RawClient(gateway.port) as holder:
        await holder.send(as_key("free", exactly(5), claiming("P2")))
        await held.begun.wait()
        full = await ask(gateway.port, as_key("free", exactly(5), normal))
        assert (full.status, full.header("x-qos-outcome")) == (429, "rejected_queue_full")
        held.released.set()
        assert (await holder.response()).status == 200
    assert "would_be" not in await gateway.ending("enforced-nothing")
    assert (await gateway.metrics()).total("observed_refusals_total", priority="P1") == 0


async def test_keys_hold_all_the_same(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Who may use the gateway, and which models, is not a matter of quality of service; a claim above the
    ceiling is lowered, where it would be refused otherwise."""
    engine.play = honest()
    assert (await ask(gateway.port, as_key("wrong", exactly(5)))).status == 401
    assert (await ask(gateway.port, as_key("narrow", exactly(5)))).status == 403
    lowered = await ask(gateway.port, as_key("batch", exactly(5), claiming("P0")))
    assert (lowered.status, lowered.header("x-qos-priority")) == (200, "P2")


async def test_observing_is_said_at_the_start(gateway: GatewayProcess) -> None:
    """One warning names the classes in which nothing is enforced."""
    said = [line for line in gateway.log if line["event"].startswith("observe mode")]
    assert [line["classes"] for line in said] == [["P0", "P2"]]


@pytest.mark.parametrize(
    ("mode", "of_p2", "observed"),
    [
        ("enforce", None, []),
        ("observe", None, ["P0", "P1", "P2"]),
        ("enforce", "observe", ["P2"]),
        ("observe", "enforce", ["P0", "P1"]),
    ],
)
def test_which_classes_are_observed(mode: str, of_p2: str | None, observed: list[str]) -> None:
    """A class without a mode of its own has the general one."""
    settings = Settings.model_validate({"mode": mode, "classes": {"P2": {"mode": of_p2}}})
    assert [p.name for p in PRIORITIES if is_observed(settings, p)] == observed
