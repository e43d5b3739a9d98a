"""The control loop of a gateway that runs: it acts on a stalled engine, tells of it, and lets go again."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, chat, post_chat
from tests.support.scripted_engine import ROLE, ScriptedEngine, held_stream, scripted_engine, token

pytestmark = pytest.mark.anyio


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


def settings(engine: ScriptedEngine, **more: Any) -> dict[str, Any]:
    return {
        "upstreams": [{"name": "gpu0", "url": engine.url}],
        "controller": {"law": "severity"},
        **more,
    }


def told(gateway: GatewayProcess) -> list[dict[str, Any]]:
    """The log's lines on rates."""
    return [line for line in gateway.log if line["event"].startswith("rates")]


async def test_a_stalled_engine_gets_less_until_it_is_well(engine: ScriptedEngine) -> None:
    """A stream falls silent after its first token: C is cut, P2 first. State, metrics and log tell why. When
    the stream is over C grows again, without another request (all the way back: in virtual time)."""
    async with running_gateway(settings(engine)) as gateway:
        engine.play = held = held_stream(ROLE, token("one"))
        async with RawClient(gateway.port) as client:
            await client.send(post_chat(chat("hello", stream=True), [("x-request-priority", "P0")]))

            async def is_cut() -> bool:
                return (await gateway.state())["capacity_tokens_per_second"] < 11_000

            await eventually(is_cut)
            control = (await gateway.state())["controller"]
            change = control["last_changes"][-1]
            assert (control["law"], control["nominal_capacity_tokens_per_second"]) == ("severity", 12_000)
            assert control["severity"] > 1
            assert (change["reason"], change["direction"]) == ("gap", "down")
            assert change["rates_tokens_per_second"] == {"P0": 7080, "P1": 1200, "P2": 120}
            page = await gateway.metrics()
            assert page.total("controller_severity") > 1
            assert page.total("controller_changes_total", law="severity", direction="down", reason="gap") >= 1
            await eventually(lambda: bool(told(gateway)))
            line = told(gateway)[0]
            assert line["event"] == "rates changed"
            assert (line["law"], line["reason"], line["upstreams"]) == ("severity", "gap", ["gpu0"])
            assert line["x_gap"] > 1
            held.released.set()

        async def grows() -> bool:
            changes = (await gateway.state())["controller"]["last_changes"]
            return ("recovery", "up") in [(each["reason"], each["direction"]) for each in changes]

        await eventually(grows, seconds=60)
        await eventually(lambda: told(gateway)[-1]["reason"] == "recovery")
        assert {line["reason"] for line in told(gateway)} == {"gap", "recovery"}


async def test_in_observe_mode_it_only_says_what_it_would_do(engine: ScriptedEngine) -> None:
    """C stays, and the advice can be read."""
    async with running_gateway(settings(engine, mode="observe")) as gateway:
        engine.play = held = held_stream(ROLE, token("one"))
        async with RawClient(gateway.port) as client:
            await client.send(post_chat(chat("hello", stream=True), [("x-request-priority", "P0")]))

            async def advises() -> bool:
                return (await gateway.state())["controller"]["advice"] is not None

            await eventually(advises)
            state = await gateway.state()
            assert state["capacity_tokens_per_second"] == 12_000
            assert state["controller"]["advice"]["reason"] == "gap"
            assert sum(state["controller"]["advice"]["rates_tokens_per_second"].values()) < 12_000
            await eventually(lambda: bool(told(gateway)))
            assert {line["event"] for line in told(gateway)} == {"rates would change"}
            assert (await gateway.metrics()).total("controller_changes_total") == 0
            held.released.set()
