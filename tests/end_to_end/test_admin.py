"""The admin API: what it tells, what it changes, and whom it lets."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, ask, chat, check_error, get, post, post_chat, request_head
from tests.support.scripted_engine import (
    DONE,
    FINISH,
    ScriptedEngine,
    held_stream,
    scripted_engine,
    streaming,
    token,
    usage_event,
)

pytestmark = pytest.mark.anyio

TOKEN = "operators-token-of-this-test"
KEYS = {
    "key-of-acme": {"tenant": "acme", "tokens_per_minute": 100_000, "max_in_flight": 7},
    "key-of-globex": {"tenant": "globex", "ceiling": "P2"},
}
ACME = [("authorization", "Bearer key-of-acme")]
SPEAKS = streaming(token("Hello"), FINISH, usage_event(5, 2), DONE)
LOOKS = ("state", "tenants", "slo", "changes", "decisions", "history", "settings")


def settings(engine: ScriptedEngine, **given: Any) -> dict[str, Any]:
    return {"upstreams": [{"name": "gpu0", "url": engine.url, "api_key": "key-of-the-engine"}], **given}


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    """Without a token."""
    async with running_gateway(settings(engine), keys=KEYS) as gateway:
        yield gateway


@pytest.fixture(scope="module")
async def admin(gateway: GatewayProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.operations + "/admin", trust_env=False) as client:
        yield client


async def look(admin: httpx.AsyncClient, path: str, **query: Any) -> Any:
    response = await admin.get(path, params=query)
    assert response.status_code == 200, response.text
    return response.json()


async def change(admin: httpx.AsyncClient, tree: dict[str, Any], **headers: str) -> Any:
    response = await admin.patch("/settings", json=tree, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


async def logged(gateway: GatewayProcess, **members: Any) -> dict[str, Any]:
    """The one line with these members, once it is written."""

    def lines() -> list[dict[str, Any]]:
        return [line for line in gateway.log if members.items() <= line.items()]

    await eventually(lambda: bool(lines()))
    (line,) = lines()
    return line


# ── what it tells ────────────────────────────────────────────────────────────────────────────────────────


async def test_tenants_with_what_they_hold_and_have_left(
    gateway: GatewayProcess, engine: ScriptedEngine, admin: httpx.AsyncClient
) -> None:
    """One that runs counts in its class and against its limits, and its place is free again when it has
    ended; those with nothing here come after, and are left out first."""
    held = engine.play = held_stream(token("a"), then=(FINISH, usage_event(5, 2), DONE))
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(chat(stream=True), [*ACME, ("x-request-priority", "P0")]))
        await held.begun.wait()
        page = await look(admin, "/tenants")
        assert ([tenant["tenant"] for tenant in page["tenants"]], page["total"]) == (["acme", "globex"], 2)
        acme = page["tenants"][0]
        assert (acme["in_flight"], acme["waiting"]) == (
            {"P0": 1, "P1": 0, "P2": 0},
            {"P0": 0, "P1": 0, "P2": 0},
        )
        assert acme["tokens"]["per_minute"] == 100_000
        assert 0 < acme["tokens"]["left"] < 100_000
        assert acme["requests"] is None
        assert acme["keys"] == [{"key": "key-0", "in_flight": 1, "max_in_flight": 7}]
        first = await look(admin, "/tenants", limit=1)
        assert ([tenant["tenant"] for tenant in first["tenants"]], first["total"]) == (["acme"], 2)
        held.released.set()
        assert (await client.response()).whole
    await gateway.quiet()
    page = await look(admin, "/tenants")
    assert not any(sum(tenant["in_flight"].values()) for tenant in page["tenants"])


async def test_promises_and_decisions_tell_of_a_stream(
    gateway: GatewayProcess, engine: ScriptedEngine, admin: httpx.AsyncClient
) -> None:
    """It is judged in its class's window, counted, measured, and listed by its id, without prompt or key."""
    engine.play = SPEAKS
    before = (await look(admin, "/slo"))["classes"]["P1"]
    body = chat("a prompt that nobody may see", stream=True)
    assert (await ask(gateway.port, post_chat(body, ACME, id="told-of"))).status == 200
    assert (await ask(gateway.port, post_chat(chat(), [("authorization", "Bearer wrong")]))).status == 401
    await gateway.ending("told-of")
    page = await look(admin, "/slo")
    after = page["classes"]["P1"]
    for view in ("arrival", "dispatch"):
        for of in ("admitted", "offered"):
            kept, was = after["attainment"][view][of]["all"], before["attainment"][view][of]["all"]
            assert kept["counted"] == was["counted"] + 1
            assert kept["ratio"] == kept["kept"] / kept["counted"]
    assert after["endings_last_minute"]["completed"] == before["endings_last_minute"].get("completed", 0) + 1
    assert after["quantiles_seconds"]["ttft"]["p50"] <= after["quantiles_seconds"]["ttft"]["p99"]
    assert after["standing"] in ("kept", "at_risk", "broken")
    assert page["classes"]["P2"]["standing"] == "no_promise"

    done = await look(admin, "/decisions", outcome="completed", limit=1)
    assert [each["request_id"] for each in done["decisions"]] == ["told-of"]
    assert (done["decisions"][0]["tenant"], done["decisions"][0]["output_tokens"]) == ("acme", 2)
    refused = await look(admin, "/decisions", outcome="unauthorized", priority="P1")
    assert [each["outcome"] for each in refused["decisions"]] == ["unauthorized"]
    everything = "".join([(await admin.get(f"/{page}")).text for page in LOOKS])
    for secret in ("nobody may see", "key-of-acme", "key-of-the-engine", "Bearer"):
        assert secret not in everything


async def test_the_past_is_told_once(gateway: GatewayProcess, admin: httpx.AsyncClient) -> None:
    """Who asks with the number of the last sample gets only newer ones."""

    async def some() -> bool:
        return len((await look(admin, "/history"))["samples"]) >= 2

    await eventually(some)
    samples = (await look(admin, "/history"))["samples"]
    numbers = [sample["number"] for sample in samples]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert samples[0]["seconds_ago"] > samples[-1]["seconds_ago"] >= 0
    assert sum(samples[-1]["rate_tokens_per_second"]) == samples[-1]["capacity_tokens_per_second"]
    later = (await look(admin, "/history", after=numbers[-1]))["samples"]
    assert all(sample["number"] > numbers[-1] for sample in later)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/tenants?limit=0", "limit"),
        ("/decisions?limit=100000", "limit"),
        ("/decisions?priority=P9", "priority"),
        ("/decisions?outcome=good", "outcome"),
        ("/changes?kind=mood", "kind"),
        ("/history?after=x", "after"),
    ],
)
async def test_a_wrong_question_is_told_what_is_wrong(
    admin: httpx.AsyncClient, path: str, param: str
) -> None:
    response = await admin.get(path)
    assert response.status_code == 422
    error = response.json()["error"]
    check_error(error)
    assert error["param"] == param


# ── what it changes ──────────────────────────────────────────────────────────────────────────────────────


async def test_settings_change_while_it_runs(
    gateway: GatewayProcess, engine: ScriptedEngine, admin: httpx.AsyncClient
) -> None:
    """Shares, rates, promises, law and mode are in force with the answer, each change is on record with what
    was and what is and by whom, and a reload goes back to the file and says what it overrides."""
    wanted = {
        "mode": "observe",
        "capacity": {"tokens_per_second": 5_000},
        "classes": {"P0": {"share": 0.5, "slo": {"ttft_seconds": 0.25}}, "P1": {"share": 0.45}},
        "controller": {"law": "compliance"},
        "upstreams": {"gpu0": {"max_in_flight": 9}},
    }
    names = {
        "mode",
        "capacity.tokens_per_second",
        "classes.P0.share",
        "classes.P0.slo.ttft_seconds",
        "classes.P1.share",
        "controller.law",
        "upstreams.gpu0.max_in_flight",
    }
    told = await change(admin, wanted, **{"x-operator": "mira"})
    assert (set(told.pop("changed")), told) == (names, {"needs_restart": []})

    whole = await look(admin, "/state")
    assert (whole["mode"], whole["modes"]["P2"]) == ("observe", "observe")
    assert set(whole["set_at_run_time"]) == names
    pool = whole["pools"][0]
    assert pool["classes"]["P0"]["rate_tokens_per_second"] == 2_500
    assert (pool["controller"]["law"], pool["upstreams"]["gpu0"]["max_in_flight"]) == ("compliance", 9)
    assert (await look(admin, "/slo"))["classes"]["P0"]["targets"]["ttft_seconds"] == 0.25
    shown = await look(admin, "/settings")
    assert shown["settings"]["classes"]["P0"]["share"] == 0.5
    assert shown["set_at_run_time"]["mode"] == {"configured": "enforce", "now": "observe"}

    line = await logged(gateway, event="operator action", action="settings", done=True)
    assert line["operator"] == "mira"
    assert line["by"].startswith("127.0.0.1:")
    assert line["values"]["classes.P0.share"] == {"old": 0.6, "new": 0.5}
    (action,) = (await look(admin, "/changes", kind="settings"))["changes"]
    assert action["what"]["values"] == line["values"]
    both = (await look(admin, "/changes", limit=1))["changes"]
    assert sorted(each["kind"] for each in both if each["kind"] != "upstream") == ["rates", "settings"]
    (rates,) = (await look(admin, "/changes", kind="rates", limit=1))["changes"]
    assert (rates["what"]["reason"], rates["what"]["new_rates_tokens_per_second"][0]) == ("settings", 2_500)

    response = await admin.post("/reload")
    assert (response.status_code, set(response.json()["overrides"])) == (200, names)
    assert (await gateway.state())["classes"]["P0"]["rate_tokens_per_second"] == 7_200
    assert (await look(admin, "/settings"))["set_at_run_time"] == {}
    line = await logged(gateway, event="the reload overrides what was set at run time")
    assert set(line["settings"]) == names


async def test_bad_input_changes_nothing(gateway: GatewayProcess, admin: httpx.AsyncClient) -> None:
    """Each is a 4xx of OpenAI's shape that names the field, where it is one field's fault; a good part of a
    bad change is not taken over either."""
    before = await look(admin, "/settings")
    json_ = {"content-type": "application/json"}
    for body, headers, status, param in (
        (b'{"controller":{"law":"magic"}}', json_, 422, "controller.law"),
        (b'{"mode":"observe","classes":{"P0":{"share":0.9}}}', json_, 422, "classes"),
        (b'{"capacity":{"tokens_per_second":-1}}', json_, 422, "capacity.tokens_per_second"),
        (b'{"upstreams":{"gpu0":{"url":"http://x"}}}', json_, 422, "upstreams.gpu0.url"),
        (b'{"server":{"operations_token":"x"}}', json_, 422, "server.operations_token"),
        (b'{"mode":"observe"', json_, 400, None),
        (b"", json_, 400, None),
        (b'{"mode":"observe"}', {}, 415, None),
        (b'{"mode":"observe"}', {"content-type": "text/plain"}, 415, None),
        (b'{"mode":"' + b"o" * 70_000 + b'"}', json_, 413, None),
    ):
        response = await admin.patch("/settings", content=body, headers=headers)
        assert response.status_code == status, (body[:80], response.text)
        error = response.json()["error"]
        check_error(error)
        assert error["param"] == param
        assert param is None or error["message"].startswith(param)
    assert await look(admin, "/settings") == before
    refused = [
        each for each in (await look(admin, "/changes"))["changes"] if each["what"].get("done") is False
    ]
    assert len(refused) == 5


# ── whom it lets ─────────────────────────────────────────────────────────────────────────────────────────


async def test_pages_of_other_sites_change_and_read_nothing(gateway: GatewayProcess) -> None:
    """Without a token: a form, a page of another origin and a name that was pointed here are refused, also as
    a request that would do nothing; curl, and a page of the gateway's own, are not."""
    port = gateway.operations_port
    own = ("origin", "http://gateway")
    json_ = ("content-type", "application/json")
    form = ("content-type", "application/x-www-form-urlencoded")
    for headers, status in (
        ([json_], 200),
        ([json_, own], 200),
        ([json_, own, ("sec-fetch-site", "same-origin")], 200),
        ([json_, ("origin", "http://evil.example")], 403),
        ([json_, ("origin", "http://gateway:1")], 403),
        ([json_, ("origin", "null")], 403),
        ([json_, ("sec-fetch-site", "cross-site")], 403),
        ([json_, ("sec-fetch-site", "same-site")], 403),
        ([form], 415),
        ([("content-type", "text/plain; charset=application/json")], 415),
    ):
        response = await ask(port, post("/admin/reload", b"", headers))
        assert response.status == status, headers
        if status != 200:
            assert response.error
    for path in ("/", "/metrics", "/openapi.json", *(f"/admin/{page}" for page in LOOKS)):
        rebound = f"GET {path} HTTP/1.1\r\nhost: evil.example:{port}\r\n\r\n".encode()
        assert (await ask(port, rebound, "GET")).status == 403
    rebound = b"POST /admin/drain HTTP/1.1\r\nhost: evil.example\r\ncontent-length: 0\r\n\r\n"
    assert (await ask(port, rebound)).status == 403
    assert await gateway.is_ready()


async def test_the_status_page_is_closed_to_all_else(gateway: GatewayProcess) -> None:
    """Its files come with a policy that allows no script, style or connection but the gateway's own."""
    for path, kind in (
        ("/", "text/html"),
        ("/status/style.css", "text/css"),
        ("/status/script.js", "text/javascript"),
        ("/status/icon.svg", "image/svg+xml"),
    ):
        response = await ask(gateway.operations_port, get(path), "GET")
        assert (response.status, (response.header("content-type") or "").split(";")[0]) == (200, kind)
        policy = response.header("content-security-policy") or ""
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert response.header("x-content-type-options") == "nosniff"
        assert b"http://" not in response.body.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"https://" not in response.body


async def test_drain_with_a_token(engine: ScriptedEngine) -> None:
    """Strangers see no more than an empty page, and are in the log. Drained, it takes nothing, finishes what
    it has, says so, lets its settings be, and still runs; the token is in no log line."""
    held = engine.play = held_stream(token("a"))
    given = settings(engine, server={"operations_token": TOKEN})
    async with running_gateway(given, token=TOKEN) as gateway, RawClient(gateway.port) as client:
        port, allowed = gateway.operations_port, [("authorization", f"Bearer {TOKEN}")]
        for path in ("/metrics", "/openapi.json", *(f"/admin/{page}" for page in LOOKS)):
            for headers in ([], [("authorization", "Bearer wrong")], [("authorization", f"Bearer {TOKEN}x")]):
                response = await ask(port, get(path, headers), "GET")
                assert (response.status, response.header("www-authenticate")) == (401, "Bearer")
            assert (await ask(port, get(path, allowed), "GET")).status == 200
        patch = request_head("PATCH", "/admin/settings", [("content-length", "0")])
        for request in (patch, post("/admin/reload", b""), post("/admin/drain", b"")):
            assert (await ask(port, request)).status == 401
        said = "the operators' port was asked without its token"
        await eventually(lambda: any(line["event"] == said for line in gateway.log))
        assert (await ask(port, get("/"), "GET")).status == 200
        named = f"GET /admin/state HTTP/1.1\r\nhost: ops.example.com\r\nauthorization: Bearer {TOKEN}\r\n\r\n"
        assert (await ask(port, named.encode(), "GET")).status == 200

        await client.send(post_chat(chat(stream=True)))
        await held.begun.wait()
        for _ in range(2):
            response = await ask(port, post("/admin/drain", b"", allowed))
            assert (response.status, response.json) == (200, {"draining": True, "in_flight": 1})
        assert await gateway.readiness() == 503
        assert (await ask(gateway.port, post_chat(chat()))).status == 503
        assert (await ask(port, post("/admin/reload", b"", allowed))).status == 422
        held.released.set()
        assert (await client.response()).whole
        assert gateway.is_running
        await logged(gateway, action="drain", done=True)
    assert TOKEN not in "\n".join(gateway.lines)


async def test_all_of_it_is_documented(gateway: GatewayProcess, admin: httpx.AsyncClient) -> None:
    """Each path and method with what it answers, and the shape of a change."""
    page = (await admin.get(gateway.operations + "/openapi.json")).json()
    documented = {(path, method) for path, methods in page["paths"].items() for method in methods}
    wanted = {(f"/admin/{look}", "get") for look in LOOKS}
    wanted |= {
        ("/admin/settings", "patch"),
        ("/admin/reload", "post"),
        ("/admin/drain", "post"),
        ("/", "get"),
    }
    assert wanted <= documented
    body = page["paths"]["/admin/settings"]["patch"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"mode", "classes", "capacity", "controller", "slo", "upstreams"} <= body["properties"].keys()
    assert not {"server", "keys_file", "state", "decision_log"} & body["properties"].keys()
