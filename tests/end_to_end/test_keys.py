"""Keys: what they entitle to, and that neither they nor prompts appear anywhere."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.raw_client import ask, chat, get, post_chat
from tests.support.scripted_engine import ScriptedEngine, breaking_off, plain, scripted_engine, token

pytestmark = pytest.mark.anyio

SECRET = "keep-this-to-yourself"
URGENT, NORMAL, BATCH = (f"{SECRET}-{name}" for name in ("urgent", "normal", "batch"))
KEYS: dict[str, dict[str, Any]] = {
    URGENT: {"tenant": "urgent", "default": "P0"},
    NORMAL: {"tenant": "normal", "ceiling": "P1"},
    BATCH: {"tenant": "batch", "ceiling": "P2"},
}


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


def _settings(engine: ScriptedEngine) -> dict[str, Any]:
    upstream = {"name": "gpu0", "url": engine.url, "api_key": f"{SECRET}-engine"}
    return {
        "upstreams": [upstream],
        "logging": {"level": "debug"},
        "server": {"operations_token": f"{SECRET}-operator"},
    }


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    async with running_gateway(_settings(engine), keys=KEYS, token=f"{SECRET}-operator") as gateway:
        yield gateway


def bearer(key: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {key}")


@pytest.mark.parametrize(
    ("key", "claim", "granted"),
    [
        (URGENT, None, "P0"),
        (URGENT, "P2", "P2"),
        (NORMAL, None, "P1"),
        (NORMAL, "P0", "P1"),
        (NORMAL, "P2", "P2"),
        (BATCH, None, "P2"),
        (BATCH, "realtime", "P2"),
    ],
)
async def test_a_claim_is_never_above_the_ceiling(
    gateway: GatewayProcess, engine: ScriptedEngine, key: str, claim: str | None, granted: str
) -> None:
    """The class is the key's default, or what was claimed and is allowed; a lowered claim is counted."""
    engine.play = plain()
    headers = [bearer(key), *([("x-request-priority", claim)] if claim else [])]
    labels = {"claimed": "P0", "granted": granted}
    before = (await gateway.metrics()).total("class_claims_total", **labels)
    response = await ask(gateway.port, post_chat(chat(), headers))
    assert (response.status, response.header("x-qos-priority")) == (200, granted)
    claimed_p0 = claim in ("P0", "realtime") or granted == "P0"
    assert (await gateway.metrics()).total("class_claims_total", **labels) == before + claimed_p0


async def test_a_service_tier_is_a_claim_too(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """`priority` is P0 and `flex` P2, below the ceiling; `auto` is the key's default; the header wins."""
    engine.play = plain()
    for key, tier, header, granted in (
        (NORMAL, "priority", None, "P1"),
        (URGENT, "flex", None, "P2"),
        (URGENT, "auto", None, "P0"),
        (URGENT, "priority", "P2", "P2"),
        (NORMAL, "no-such-tier", None, "P1"),
    ):
        headers = [bearer(key), *([("x-request-priority", header)] if header else [])]
        response = await ask(gateway.port, post_chat(chat(service_tier=tier), headers))
        assert response.header("x-qos-priority") == granted


async def test_a_claim_above_the_ceiling_may_be_refused(engine: ScriptedEngine) -> None:
    """Where the operator prefers it, such a claim is a 403."""
    settings = {
        "upstreams": [{"name": "gpu0", "url": engine.url}],
        "classification": {"on_exceed": "reject"},
    }
    engine.play = plain()
    async with running_gateway(settings, keys=KEYS) as gateway:
        headers = [bearer(NORMAL), ("x-request-priority", "P0")]
        response = await ask(gateway.port, post_chat(chat(), headers))
        assert (response.status, response.error["code"]) == (403, "priority_not_allowed")
        assert response.error["type"] == "permission_error"
        assert response.header("x-qos-outcome") == "forbidden"
        assert (await ask(gateway.port, post_chat(chat(), headers[:1]))).status == 200


async def test_tenants_and_not_keys_are_named(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Log and metrics speak of the key's tenant."""
    engine.play = plain()
    await ask(gateway.port, post_chat(chat(), [bearer(BATCH)], id="named"))
    assert (await gateway.ending("named"))["tenant"] == "batch"
    assert (await gateway.metrics()).total("requests_total", tenant="batch", outcome="completed") > 0


async def test_the_operators_port_wants_its_token(gateway: GatewayProcess) -> None:
    """With a token configured all but the health paths are closed without it."""
    async with httpx.AsyncClient(base_url=gateway.operations, trust_env=False) as client:
        for path in ("/metrics", "/admin/state"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Bearer {URGENT}"}):
                response = await client.get(path, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["message"]
        for path in ("/healthz", "/readyz"):
            assert (await client.get(path)).status_code == 200


async def test_secrets_appear_nowhere(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Neither a key of any kind nor a word of a prompt or an answer is in log, metrics, state or errors."""
    secret = SECRET.encode()
    prompt = chat(f"{SECRET}-prompt", stream=True)
    wrong = bearer(f"{SECRET}-wrong")
    for script, request in (
        (plain(), post_chat(prompt, [wrong])),
        (plain(), post_chat(prompt, [("authorization", f"Basic {SECRET}")])),
        (plain(), post_chat(prompt, [wrong, bearer(URGENT)])),
        (plain(), get(f"/v1/models?api_key={SECRET}", [wrong])),
        (plain(), post_chat(f'{{"model":"m","prompt":"{SECRET}"'.encode(), [bearer(URGENT)])),
        (plain(), post_chat(chat() | {"messages": SECRET}, [bearer(URGENT)])),
        (plain(), post_chat(prompt | {"stream": SECRET}, [bearer(URGENT)])),
        (plain(b"no json", headers=(f"x: {SECRET}",)), post_chat(prompt, [bearer(URGENT)])),
        (breaking_off(token("Hello")), post_chat(prompt, [bearer(URGENT)])),
    ):
        engine.play = script
        response = await ask(gateway.port, request)
        assert secret not in response.body
        assert all(SECRET not in value for _, value in response.headers)
    engine.play = plain()
    for key in KEYS:
        assert (await ask(gateway.port, post_chat(prompt, [bearer(key)]))).status == 200
    page = await gateway.quiet()
    assert SECRET not in page.text
    assert SECRET not in str(await gateway.state())
    assert [line for line in gateway.lines if SECRET in line] == []
