"""Keys: what they entitle to, and that neither they nor prompts appear anywhere."""

import asyncio
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import ask, chat, get, post, post_chat
from tests.support.scripted_engine import ScriptedEngine, breaking_off, plain, scripted_engine, token

pytestmark = pytest.mark.anyio

SECRET = "keep-this-to-yourself"
URGENT, NORMAL, BATCH = (f"{SECRET}-{name}" for name in ("urgent", "normal", "batch"))
FOREIGN = f"{SECRET}-schlüssel-鍵"
KEYS: dict[str, dict[str, Any]] = {
    URGENT: {"tenant": "urgent", "default": "P0"},
    NORMAL: {"tenant": "normal", "ceiling": "P1"},
    BATCH: {"tenant": "batch", "ceiling": "P2"},
    FOREIGN: {"tenant": "foreign"},
}


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


def _settings(engine: ScriptedEngine) -> dict[str, Any]:
    upstream = {"name": "gpu0", "url": engine.url, "models": ["mock-gpu"], "api_key": f"{SECRET}-engine"}
    return {
        "upstreams": [upstream],
        "logging": {"level": "debug"},
        "server": {"operations_token": f"{SECRET}-operator"},
    }


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    """With a second engine that was up when the gateway started and takes no connections any more."""
    settings, token = _settings(engine), f"{SECRET}-operator"
    async with scripted_engine() as gone:
        left = {"name": "gone", "url": gone.url, "models": ["gone"], "api_key": f"{SECRET}-gone"}
        settings["upstreams"].append({**left, "health": {"interval_seconds": 600}})
        context = running_gateway(settings, keys=KEYS, token=token)
        gateway = await context.__aenter__()
        await eventually(lambda: bool(gone.probes))
    try:
        yield gateway
    finally:
        await context.__aexit__(*sys.exc_info())


def bearer(key: str) -> tuple[str, bytes]:
    return ("authorization", f"Bearer {key}".encode())


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
        (plain(), get("/v1/models", [("x-api-key", f"{SECRET}\xe9".encode("latin-1"))])),
        (plain(), post_chat(prompt | {"model": "gone"}, [bearer(URGENT)])),
        (plain(), post(f"/v1/chat/completions?k%65y={SECRET}&Api_Key={SECRET}", prompt, [wrong])),
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
    assert (await ask(gateway.port, get(f"/{SECRET}", [wrong]))).status == 404
    page = await gateway.quiet()
    assert SECRET not in page.text
    assert page.outcomes()["upstream_refused"] > 1
    headers = {"authorization": f"Bearer {SECRET}-operator"}
    async with httpx.AsyncClient(base_url=gateway.operations, trust_env=False, headers=headers) as client:
        state = await client.get("/admin/state")
    assert state.status_code == 200
    assert SECRET not in state.text
    assert [line for line in gateway.lines if SECRET in line] == []


async def test_keys_in_the_query_go_no_further(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """However their names are written they stay here, and what else is asked for passes."""
    engine.play = plain()
    query = f"k%65y={SECRET}&API-KEY={SECRET}&api%5fkey={SECRET}&apikey={SECRET}&x=1&access_token={SECRET}&y"
    request = post(f"/v1/chat/completions?{query}", chat(), [bearer(URGENT)])
    assert (await ask(gateway.port, request)).status == 200
    assert engine.last.target == "/v1/chat/completions?x=1&y"


async def test_a_key_that_is_not_ascii(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """It is let in when it is sent in the coding it was written in, and is unknown in any other."""
    engine.play = plain()
    for coding, status in (("utf-8", 200), ("utf-16-be", 401), ("gb18030", 401)):
        given = f"Bearer {FOREIGN}".encode() if coding == "utf-8" else b"Bearer " + _visible(FOREIGN, coding)
        response = await ask(gateway.port, post_chat(chat(), [("authorization", given)]))
        assert response.status == status
        response = await ask(gateway.port, post_chat(chat(), [("x-api-key", given[7:])]))
        assert response.status == status


def _visible(text: str, coding: str) -> bytes:
    """Without the bytes that no header may have."""
    return bytes(byte for byte in text.encode(coding) if byte > 32 and byte != 127)


FAULTY = """
from gateway.api.access import Access

find = Access.caller


def caller(access, headers):
    found = find(access, headers)
    if (b"x-request-id", b"faulty") in headers:
        raise ZeroDivisionError(f"headers {headers}, {dict(headers)[b'authorization'].decode()}")
    return found


Access.caller = caller
"""
"""Python runs a `sitecustomize` of its path at the start: here is a programming error for one."""


async def test_a_fault_tells_no_key(engine: ScriptedEngine, tmp_path: Path) -> None:
    """Not even one whose own message has all of the request's headers in it."""
    (tmp_path / "sitecustomize.py").write_text(FAULTY, encoding="utf-8")
    settings = {**_settings(engine), "server": {}}
    async with running_gateway(settings, keys=KEYS, environ={"PYTHONPATH": str(tmp_path)}) as gateway:
        response = await ask(gateway.port, post_chat(chat(), [bearer(URGENT)], id="faulty"))
        assert (response.status, response.error["code"]) == (500, "internal_error")
        assert SECRET.encode() not in response.body
        assert (await gateway.ending("faulty"))["outcome"] == "internal_error"
        page = await gateway.quiet()
        assert SECRET not in page.text
        assert any("ZeroDivisionError" in line for line in gateway.lines)
        assert [line for line in gateway.lines if SECRET in line] == []
        await gateway.kill()


BAD_UPSTREAMS = [
    {"name": "a", "url": "http://h", "api_key": f"{SECRET}-1", "no_such_key": 1},
    {"name": "b", "url": f"http://user:{SECRET}-2@h"},
    {"name": "c", "url": f"http://h/?api_key={SECRET}-3"},
    {"name": "d", "url": "http://h", "api_key": [f"{SECRET}-4"]},
    {"name": "e", "url": "http://h", "api_key": {"value": f"{SECRET}-5"}},
    {"name": "f", "url": "http://h", "api-key": f"{SECRET}-6"},
]


@pytest.mark.parametrize("broken", ["values", "yaml", "keys"])
async def test_a_bad_file_is_told_without_its_keys(tmp_path: Path, broken: str) -> None:
    """What is wrong is told by place and kind; a key near by, or in the wrong place, is not repeated."""
    config = tmp_path / "gateway.yaml"
    settings: dict[str, Any] = {"server": {"port": 0, "operations_port": 0}}
    if broken == "values":
        settings["upstreams"] = BAD_UPSTREAMS
        settings["server"]["operations_token"] = [f"{SECRET}-token"]
    if broken == "keys":
        settings["keys_file"] = "keys.yaml"
        keys = [{"id": "a", "sha256": f"{SECRET}-a"}, {"id": "b", "key": f"{SECRET}-b", "tenant": "t"}]
        (tmp_path / "keys.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    text = yaml.safe_dump(settings)
    if broken == "yaml":
        text += f'upstreams: [{{name: a, url: http://h, api_key: "{SECRET}\n'
    config.write_text(text, encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "serve", "--config", str(config)), stdout=PIPE, stderr=STDOUT
    )
    async with asyncio.timeout(30):
        out, _ = await process.communicate()
    assert process.returncode not in (0, None)
    assert out
    assert SECRET not in out.decode()
