"""Waiting for the one place at an engine: whose turn it is, who must give way, and when the place is free."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config_reading import ConfigError
from gateway.keys import load_keys
from gateway.settings import load_settings
from tests.support.crowd import Turnstile, crowd
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.metered import PLAIN_SUMS, as_key, exactly, left_to, nothing_runs
from tests.support.raw_client import RawClient, RawResponse, ask
from tests.support.scripted_engine import (
    DONE,
    FINISH,
    ROLE,
    ScriptedEngine,
    held_stream,
    plain,
    scripted_engine,
    token,
    whole_answer,
)

pytestmark = pytest.mark.anyio

LIMITS: dict[str, dict[str, Any]] = {
    "urgent": {"default": "P0"},
    "normal": {"ceiling": "P1"},
    "batch": {"ceiling": "P2"},
    "heavy": {"tokens_per_minute": 1000},
    "light": {},
    "trusted": {"trusts_subtenant": True},
    "untrusted": {},
    "no-places": {"max_in_flight": 0},
    "no-tokens": {"tokens_per_minute": 0},
    "no-requests": {"requests_per_minute": 0},
    "nulls": {"max_in_flight": None, "tokens_per_minute": None, "requests_per_minute": None},
}
KEYS = {key: {"tenant": key, **limits} for key, limits in LIMITS.items()}


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    """One place; three P1 may wait for it, and no P2."""
    upstream = {"name": "gpu0", "url": engine.url, "max_in_flight": 1, "engine_priority": "vllm"}
    settings = {
        "upstreams": [upstream],
        "capacity": PLAIN_SUMS,
        "scheduling": {"deadline_drop": False},
        "classes": {
            "P0": {"max_wait_seconds": 60},
            "P1": {"max_wait_seconds": 60, "max_queued_requests": 3},
            "P2": {"max_wait_seconds": 60, "max_queued_requests": 0},
        },
    }
    async with running_gateway(settings, keys=KEYS) as gateway:
        yield gateway


def named(name: str, key: str, tokens: int = 3, *headers: tuple[str, str]) -> bytes:
    """A request whose id is its name."""
    return as_key(key, exactly(tokens), *headers, id=name)


def queue_is_full(response: RawResponse) -> None:
    assert (response.status, response.header("x-qos-outcome")) == (429, "rejected_queue_full")
    assert response.error["code"] == "slow_down"
    assert 1 <= int(response.header("retry-after") or "") <= 60


async def _has_queued(gateway: GatewayProcess, count: int) -> bool:
    return await gateway.queued() == count


# ── whose turn it is ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_claim_above_the_ceiling_gains_nothing(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """A key for P1 that claims P0 waits as P1 behind a P0 that comes later, and engine, log and metrics all
    have it as P1."""
    engine.play = turnstile = Turnstile()
    asked = len(engine.requests)
    labels = {"claimed": "P0", "granted": "P1"}
    before = (await gateway.metrics()).total("class_claims_total", **labels)
    async with crowd(gateway) as people:
        await people.send("runs", named("runs", "urgent"))
        await people.send("climber", named("climber", "normal", 3, ("x-request-priority", "P0")))
        await people.send("later", named("later", "urgent"))
        turnstile.turn(3)
        answers = await people.answers()
    assert turnstile.came == ["runs", "later", "climber"]
    assert answers["climber"].header("x-qos-priority") == "P1"
    ranks = [json.loads(request.body)["priority"] for request in engine.requests[asked:]]
    assert ranks == [0, 0, 1]
    assert (await gateway.ending("climber"))["priority"] == "P1"
    page = await gateway.metrics()
    assert page.total("class_claims_total", **labels) == before + 1
    assert page.total("requests_total", tenant="normal", priority="P0") == 0


async def test_odd_claims_make_no_series(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Whatever stands in the header, the metrics know the three classes and no more."""
    engine.play = plain()
    oddities: list[str | bytes] = ["", " p0 ", "0", "P9", "-1", "P0,P2", "p" * 8192, b"P\xe9", "realtime\t"]
    await ask(gateway.port, as_key("urgent", exactly(3), ("x-request-priority", "0")))
    before = await gateway.metrics()
    for oddity in oddities:
        request = as_key("urgent", exactly(3), ("x-request-priority", oddity))
        assert (await ask(gateway.port, request)).status in (200, 400)
    after = await gateway.metrics()
    assert after.series == before.series
    for label in ("priority", "claimed", "granted"):
        assert set(after.values(label)) <= {"P0", "P1", "P2"}


SUBTENANT_HEADERS = ("x-llm-d-inference-fairness-id", "openai-project")


@pytest.mark.parametrize(
    ("key", "header", "fair"),
    [
        ("trusted", "x-llm-d-inference-fairness-id", True),
        ("trusted", "openai-project", True),
        ("untrusted", "x-llm-d-inference-fairness-id", False),
        ("untrusted", "openai-project", False),
    ],
)
async def test_subtenants_take_turns(
    gateway: GatewayProcess, engine: ScriptedEngine, key: str, header: str, fair: bool
) -> None:
    """Where a key may name them, one that comes late is served between the many of one that floods; where it
    may not, the name changes nothing. No engine sees it."""
    engine.play = turnstile = Turnstile()
    asked = len(engine.requests)
    id = f"{key}{SUBTENANT_HEADERS.index(header)}"
    loud, quiet = [f"{id}-loud{n}" for n in range(6)], [f"{id}-quiet{n}" for n in range(2)]
    async with crowd(gateway) as people:
        for name in loud + quiet:
            who = "loud" if name in loud else "quiet"
            claim = ("x-request-priority", "P0")
            await people.send(name, named(name, key, 3, (header, f"{id}-{who}"), claim))
        turnstile.turn(8)
        assert {answer.status for answer in (await people.answers()).values()} == {200}
    assert sorted(turnstile.came) == sorted(loud + quiet)
    assert [name for name in turnstile.came if name in loud] == loud
    if fair:
        assert [name for name in turnstile.came[1:5] if name in quiet] == quiet
    else:
        assert turnstile.came[-2:] == quiet
    for request in engine.requests[asked:]:
        assert not {name for name, _ in request.headers} & set(SUBTENANT_HEADERS)


# ── who must give way ────────────────────────────────────────────────────────────────────────────────────


async def test_who_fills_the_queue_makes_room(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """For another tenant the one that fills the queue loses its newest request, which is told at once and
    gets its tokens back; its own next one is refused. A higher class has a queue of its own."""
    engine.play = turnstile = Turnstile()
    async with crowd(gateway) as people:
        await people.send("runs", named("runs", "light"))
        for name in ("heavy0", "heavy1", "heavy2"):
            await people.send(name, named(name, "heavy", 100))
        assert (await left_to(gateway, "heavy")).tokens <= 750
        async with RawClient(gateway.port) as light:
            await light.send(named("light", "light", 50))
            queue_is_full(await people.answer("heavy2"))
            assert await gateway.queued() == 3
            assert 800 <= (await left_to(gateway, "heavy")).tokens <= 850
            queue_is_full(await ask(gateway.port, named("heavy3", "heavy", 100)))
            await people.send("urgent", named("urgent", "urgent"))
            turnstile.turn(5)
            assert (await light.response()).status == 200
        for name in ("runs", "heavy0", "heavy1", "urgent"):
            assert (await people.answer(name)).status == 200
    assert turnstile.came[:2] == ["runs", "urgent"]
    assert sorted(turnstile.came[2:]) == ["heavy0", "heavy1", "light"]
    await gateway.quiet()
    assert (await gateway.ending("heavy2"))["cost"] == 0


async def test_no_queue_is_direct_service(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """A class that may not queue is served while a place is free, and refused while none is."""
    for _ in range(2):
        engine.play = plain()
        assert (await ask(gateway.port, as_key("batch", exactly(3)))).status == 200
        engine.play = held = held_stream(ROLE)
        async with RawClient(gateway.port) as holder:
            await holder.send(as_key("urgent", exactly(3, stream=True)))
            await held.begun.wait()
            queue_is_full(await ask(gateway.port, as_key("batch", exactly(3))))
            held.released.set()
            assert (await holder.response()).whole
        await nothing_runs(gateway)


@pytest.mark.parametrize("key", ["no-places", "no-tokens", "no-requests"])
async def test_a_limit_of_nothing(gateway: GatewayProcess, engine: ScriptedEngine, key: str) -> None:
    """A key with a limit of 0 gets nothing, on an idle gateway and the first time too, is not told to come
    back, and was warned of at the start."""
    asked = len(engine.requests)
    for _ in range(2):
        response = await ask(gateway.port, as_key(key, exactly(1)))
        assert (response.status, response.header("x-qos-outcome")) == (429, "rejected_rate")
        assert response.error["code"] == "rate_limit_exceeded"
        assert response.header("x-should-retry") == "false"
        assert response.header("retry-after") == "60"
    assert len(engine.requests) == asked
    warned = [line["setting"] for line in gateway.log if line["event"] == "this limit is 0: nothing passes"]
    assert len(warned) == 4
    assert "classes.P2.max_queued_requests" in warned


async def test_null_is_no_limit(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Where a key says null it may do as much as its class."""
    engine.play = plain()
    for _ in range(5):
        assert (await ask(gateway.port, as_key("nulls", exactly(3000)))).status == 200


@pytest.mark.parametrize("limit", ["tokens_per_minute", "requests_per_minute", "max_in_flight"])
def test_a_keys_limit_below_zero_is_refused(tmp_path: Path, limit: str) -> None:
    """At the start, by name."""
    path = tmp_path / "keys.yaml"
    path.write_text(f"- {{id: a, sha256: {'0' * 64}, {limit}: -1}}", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"keys\[0\]\.{limit}: found -1"):
        load_keys(path)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("classes: {P2: {max_queued_requests: -1}}", r"classes\.P2\.max_queued_requests"),
        ("upstreams: [{name: a, url: http://a, max_in_flight: -1}]", r"upstreams\[0\]\.max_in_flight"),
    ],
)
def test_a_limit_below_zero_is_refused(tmp_path: Path, text: str, name: str) -> None:
    """At the start, by name."""
    path = tmp_path / "gateway.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{name}: found -1"):
        load_settings(path, {})


# ── until the last byte ──────────────────────────────────────────────────────────────────────────────────


async def test_a_place_is_taken_until_the_stream_ends(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """The next request goes to the engine after the last byte of the stream before it, not after its head."""
    engine.play = held = held_stream(ROLE, token("one"), then=(FINISH, DONE))
    asked = len(engine.requests)
    async with RawClient(gateway.port) as first, RawClient(gateway.port) as second:
        await first.send(as_key("urgent", exactly(3, stream=True)))
        await first.until(b"one")
        engine.play = plain()
        await second.send(as_key("urgent", exactly(3)))
        await eventually(lambda: _has_queued(gateway, 1))
        assert len(engine.requests) == asked + 1
        held.released.set()
        assert (await first.until(b"0\r\n\r\n")).count(b"[DONE]") == 1
        assert (await second.response()).status == 200
    assert len(engine.requests) == asked + 2


async def test_a_place_is_taken_until_a_large_answer_is_read(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """So it does after a plain answer that its client reads slowly."""
    engine.play = plain(whole_answer(content="x" * 16_000_000))
    asked = len(engine.requests)
    async with (
        RawClient(gateway.port, receive_buffer_bytes=4096) as first,
        RawClient(gateway.port) as second,
    ):
        await first.send(as_key("urgent", exactly(3)))
        _, headers = await first.head()
        engine.play = plain()
        await second.send(as_key("urgent", exactly(3)))
        await eventually(lambda: _has_queued(gateway, 1))
        await first.read(1_000_000)
        assert (await gateway.queued(), len(engine.requests)) == (1, asked + 1)
        length = int(dict(headers)["content-length"])
        await first.read(length - 1_000_000)
        assert (await second.response()).status == 200
    assert len(engine.requests) == asked + 2
