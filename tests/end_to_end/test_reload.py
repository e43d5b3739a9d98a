"""Another configuration while the gateway runs: all of it or nothing, and nobody notices who need not."""

import asyncio
import signal
from typing import Any

import pytest

from gateway.keys import hash_key
from tests.support.gateway_process import GatewayProcess, Settings, laid_over, running_gateway
from tests.support.loops import eventually
from tests.support.processes import children
from tests.support.raw_client import RawClient, RawResponse, ask, chat, get, post_chat
from tests.support.scripted_engine import (
    DONE,
    FINISH,
    Held,
    ScriptedEngine,
    held_plain,
    held_stream,
    plain,
    scripted_engine,
    streaming,
    token,
    usage_event,
)
from tests.support.scripted_upstream import answer

pytestmark = pytest.mark.anyio

PATIENT = {p: {"max_wait_seconds": 600, "max_throttle_seconds": 600} for p in ("P0", "P1", "P2")}


def settings(*engines: ScriptedEngine, **given: Any) -> dict[str, Any]:
    """Engines of these names and addresses: gpu0, gpu1, …"""
    upstreams = [upstream(engine, f"gpu{number}") for number, engine in enumerate(engines)]
    base = {
        "upstreams": upstreams,
        "capacity": {"tokens_per_second": 1_000_000},
        "classes": PATIENT,
        "scheduling": {"deadline_drop": False},
    }
    return laid_over(base, given)


def upstream(engine: ScriptedEngine, name: str, **given: Any) -> dict[str, Any]:
    """Probed often, and patiently: the first probe that a busy machine answers late would take it down, and
    then the request that a story holds back would be its trial."""
    return {"name": name, "url": engine.url, "health": {"interval_seconds": 1}, **given}


async def logged(gateway: GatewayProcess, event: str, count: int = 1) -> list[dict[str, Any]]:
    """The log lines that begin so, once there are as many."""

    def lines() -> list[dict[str, Any]]:
        return [line for line in gateway.log if line["event"].startswith(event)]

    await eventually(lambda: len(lines()) >= count)
    assert len(lines()) == count
    return lines()


async def in_queue(gateway: GatewayProcess, count: int) -> None:
    async def waits() -> bool:
        return await gateway.queued() == count

    await eventually(waits)


def key(name: str, **rest: Any) -> dict[str, Any]:
    return {"id": name, "sha256": hash_key(name), **rest}


def bearer(name: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {name}")]


# ── engines come and go ──────────────────────────────────────────────────────────────────────────────────


async def test_no_stream_notices_that_its_engine_leaves() -> None:
    """An engine that is taken out serves what it has begun to the end, is not probed any more, and gets
    nothing new; the one in its place is probed and used at once."""
    async with scripted_engine() as first, scripted_engine() as second:
        begun = first.play = held_stream(token("a"), then=(token("b"), FINISH, usage_event(5, 2), DONE))
        second.play = plain()
        async with running_gateway(settings(first)) as gateway, RawClient(gateway.port) as client:
            await client.send(post_chat(chat(stream=True)))
            await begun.begun.wait()
            await gateway.reload(settings(upstreams=[upstream(second, "new")]))
            probes = len(first.probes)
            assert (await ask(gateway.port, post_chat(chat()))).status == 200
            assert (len(first.requests), len(second.requests)) == (1, 1)
            await eventually(lambda: len(second.probes) >= 3)
            assert len(first.probes) <= probes + 1  # one may have been on its way
            page = await gateway.metrics()
            assert page.total("in_flight", upstream="gpu0") == 1
            assert page.values("upstream") >= {"gpu0", "new"}
            begun.released.set()
            response = await client.response()
            assert (response.status, response.whole) == (200, True)
            assert response.body.endswith(DONE)
            assert 'upstream_healthy{upstream="gpu0"}' not in (await gateway.quiet()).text
            assert sorted(line["output_tokens"] for line in gateway.endings()) == [2, 2]


async def test_an_engine_that_comes_takes_those_who_wait() -> None:
    """Requests that wait for a place go to an engine that is added, in their order, without a new request."""
    async with scripted_engine() as first, scripted_engine() as second:
        held = first.play = held_plain()
        second.play = plain()
        limit = {"max_in_flight": 1}
        only = settings(upstreams=[upstream(first, "gpu0", **limit)])
        both = settings(upstreams=[upstream(first, "gpu0", **limit), upstream(second, "gpu1", **limit)])
        async with running_gateway(only) as gateway:
            running = asyncio.create_task(ask(gateway.port, post_chat(chat(), id="first")))
            await held.begun.wait()
            waiting = []
            for name in ("second", "third"):
                waiting.append(asyncio.create_task(ask(gateway.port, post_chat(chat(), id=name))))
                await in_queue(gateway, len(waiting))
            await gateway.reload(both)
            assert [r.status for r in await asyncio.gather(*waiting)] == [200, 200]
            ids = [request.header("x-request-id") for request in second.requests]
            assert [str(i).split("-")[0] for i in ids] == ["second", "third"]
            held.released.set()
            assert (await running).status == 200


async def test_engines_change_under_load() -> None:
    """Forty reloads, each with other engines, while streams run: every stream is whole, each request is
    counted once, and nothing stays taken."""
    async with scripted_engine() as a, scripted_engine() as b, scripted_engine() as c:
        engines = (a, b, c)
        for engine in engines:
            engine.play = streaming(token("x"), token("y"), FINISH, usage_event(5, 2), DONE)
        async with running_gateway(settings(a)) as gateway:
            over = asyncio.Event()
            responses: list[RawResponse] = []

            async def talk() -> None:
                while not over.is_set():
                    async with RawClient(gateway.port) as client:
                        for _ in range(5):
                            await client.send(post_chat(chat(stream=True)))
                            responses.append(await client.response())

            talkers = [asyncio.create_task(talk()) for _ in range(8)]
            for step in range(40):
                chosen = [engine for bit, engine in enumerate(engines) if (step % 7 + 1) >> bit & 1]
                names = [upstream(engine, f"gpu{(step + n) % 4}") for n, engine in enumerate(chosen)]
                await gateway.reload(settings(upstreams=names))
            over.set()
            await asyncio.gather(*talkers)
            assert {(r.status, r.whole, r.body.count(DONE)) for r in responses} == {(200, True, 1)}
            page = await gateway.quiet()
            assert page.outcomes() == {"completed": len(responses)}
            assert page.total("config_reloads_total", result="ok") == 40
            assert all(engine.requests for engine in engines)


async def test_a_model_that_nobody_serves_any_longer() -> None:
    """Who waits for it is told at once; who is being served is not disturbed; the next one gets a 404."""
    async with scripted_engine() as engine:
        held = engine.play = held_plain()
        named = {"max_in_flight": 1, "models": ["mock-gpu"]}
        other = {"max_in_flight": 1, "models": ["other"]}
        async with running_gateway(settings(upstreams=[upstream(engine, "gpu0", **named)])) as gateway:
            running = asyncio.create_task(ask(gateway.port, post_chat(chat())))
            await held.begun.wait()
            waiting = asyncio.create_task(ask(gateway.port, post_chat(chat())))
            await in_queue(gateway, 1)
            await gateway.reload(settings(upstreams=[upstream(engine, "gpu0", **other)]))
            refused = await waiting
            assert (refused.status, refused.header("x-qos-outcome")) == (503, "rejected_no_upstream")
            assert int(refused.header("retry-after") or 0) >= 1
            assert (await ask(gateway.port, post_chat(chat()))).status == 404
            held.released.set()
            assert (await running).status == 200


async def test_an_engine_whose_key_changes() -> None:
    """It is asked with the new one from then on, and its probes as well; what it has begun goes on."""
    async with scripted_engine() as engine:
        held = engine.play = held_plain()
        before = settings(upstreams=[upstream(engine, "gpu0", api_key="old-secret")])
        after = settings(upstreams=[upstream(engine, "gpu0", api_key="new-secret")])
        async with running_gateway(before) as gateway:
            running = asyncio.create_task(ask(gateway.port, post_chat(chat())))
            await held.begun.wait()
            assert (await gateway.reload(after))["changed"] == ["upstreams.gpu0.api_key"]
            engine.play = plain()
            assert (await ask(gateway.port, post_chat(chat()))).status == 200
            assert [r.header("authorization") for r in engine.requests] == [
                "Bearer old-secret",
                "Bearer new-secret",
            ]
            await eventually(lambda: engine.probes[-1].header("authorization") == "Bearer new-secret")
            held.released.set()
            assert (await running).status == 200
            assert not any("secret" in line for line in gateway.lines)


async def test_what_is_known_of_an_engine_stays_known() -> None:
    """An engine that is down is still down after a reload that does not touch it."""
    async with scripted_engine() as good, scripted_engine() as bad:
        bad.healthy = False
        both = settings(good, bad)
        async with running_gateway(both) as gateway:

            async def is_down() -> bool:
                return (await gateway.metrics()).total("upstream_healthy", upstream="gpu1") == 0

            await eventually(is_down)
            await gateway.reload(laid_over(both, {"capacity": {"tokens_per_second": 900_000}}))
            assert await is_down()
            for _ in range(4):
                assert (await ask(gateway.port, post_chat(chat()))).status == 200
            assert (len(good.requests), len(bad.requests)) == (4, 0)


async def test_an_embedded_engine_that_comes_and_goes() -> None:
    """A mock GPU named by a reload is started, and ended when a reload leaves it out."""
    async with scripted_engine() as engine, running_gateway(settings(engine)) as gateway:
        mock = {"name": "mock", "url": "mock://h100_llama3_8b"}
        await gateway.reload(settings(upstreams=[mock]))
        response = await ask(gateway.port, post_chat(chat(max_tokens=2)))
        assert (response.status, len(engine.requests)) == (200, 0)
        await gateway.reload(settings(engine))

        await eventually(lambda: not children(gateway.pid))
        assert (await ask(gateway.port, post_chat(chat()))).status == 200


# ── budgets, keys, rules ─────────────────────────────────────────────────────────────────────────────────


async def test_no_reload_fills_a_bucket() -> None:
    """Ten reloads of the same give nobody a token; a larger rate acts at once and begins where the level was;
    a smaller burst cuts it."""
    async with scripted_engine() as engine:
        engine.play = plain()
        slow = settings(
            engine, capacity={"tokens_per_second": 1, "burst_seconds": 100_000, "output_weight": 4}
        )
        async with running_gateway(slow) as gateway:
            full = await gateway.bucket("P1")
            for _ in range(5):
                assert (await ask(gateway.port, post_chat(chat(max_tokens=1000)))).status == 200
            await gateway.quiet()
            level = await gateway.bucket("P1")
            assert level < full
            for _ in range(10):
                assert await gateway.reload(slow) == {"changed": [], "needs_restart": []}
            assert level <= await gateway.bucket("P1") < level + 30
            larger = laid_over(slow, {"capacity": {"tokens_per_second": 2}})
            assert (await gateway.reload(larger))["changed"] == ["capacity.tokens_per_second"]
            assert level <= await gateway.bucket("P1") < level + 60
            smaller = laid_over(slow, {"capacity": {"burst_seconds": 10, "min_burst_tokens": 0}})
            await gateway.reload(smaller)
            assert await gateway.bucket("P1") == pytest.approx(3.5, abs=0.01)


async def test_keys_come_and_go() -> None:
    """A new key is let in, a removed one is not and keeps what it has begun, a limit carries over."""
    async with scripted_engine() as engine:
        held = engine.play = held_plain()
        async with running_gateway(settings(engine), keys={"a": {"requests_per_minute": 3}}) as gateway:
            a = {"requests_per_minute": 3}
            running = asyncio.create_task(ask(gateway.port, post_chat(chat(), bearer("a"))))
            await held.begun.wait()
            assert (await ask(gateway.port, post_chat(chat(), bearer("b")))).status == 401
            told = await gateway.reload(settings(engine), [key("b")])
            assert told["changed"] == ["keys_file"]
            engine.play = plain()
            assert (await ask(gateway.port, post_chat(chat(), bearer("a")))).status == 401
            assert (await ask(gateway.port, post_chat(chat(), bearer("b")))).status == 200
            held.released.set()
            assert (await running).status == 200
            entry = {"id": "key-0", "sha256": hash_key("a")}
            await gateway.reload(settings(engine), [{**entry, **a}, key("b")])
            statuses = [(await ask(gateway.port, post_chat(chat(), bearer("a")))).status for _ in range(4)]
            assert statuses.count(200) <= 3
            assert statuses[-1] == 429


async def test_rules_of_the_door_are_taken_over() -> None:
    """The class header's name, a path that is let through, and the largest body."""
    async with scripted_engine() as engine:
        engine.play = plain()
        async with running_gateway(settings(engine)) as gateway:
            assert (await ask(gateway.port, post_chat(chat(), [("x-class", "P0")]))).header(
                "x-qos-priority"
            ) == "P1"
            assert (await ask(gateway.port, get("/extra"), "GET")).status == 404
            await gateway.reload(
                settings(
                    engine,
                    classification={"header": ["x-class"]},
                    paths=["/extra"],
                    server={"max_body_bytes": 1000},
                )
            )
            assert (await ask(gateway.port, post_chat(chat(), [("x-class", "P0")]))).header(
                "x-qos-priority"
            ) == "P0"
            assert (await ask(gateway.port, get("/extra"), "GET")).status == 200
            assert (await ask(gateway.port, post_chat(chat("x" * 2000)))).status == 413
            assert b'"/extra"' in (await ask(gateway.port, get("/openapi.json"), "GET")).body


async def test_the_log_gets_another_level() -> None:
    async with scripted_engine() as engine:
        quiet = settings(engine, logging={"level": "error"})
        async with running_gateway(settings(engine)) as gateway:
            await gateway.reload(quiet)
            await gateway.reload(laid_over(quiet, {"capacity": {"tokens_per_second": 500_000}}))
            await gateway.reload(settings(engine))
            (reload,) = await logged(gateway, "configuration reloaded")
            assert sorted(reload["changed"]) == ["capacity.tokens_per_second", "logging.level"]


async def test_an_engine_without_room_whose_model_has_gone() -> None:
    """A reload comes between the head and the body of an engine's 503: the request cannot be sent again, is
    told so, and has given back all that it held."""
    async with scripted_engine() as engine:
        refusal = answer(b'{"error":{"message":"busy","code":503}}', status="503 Service Unavailable")
        head, body = refusal[:-5], refusal[-5:]
        held = engine.play = Held(head, body)
        named = [upstream(engine, "gpu0", models=["mock-gpu"])]
        async with running_gateway(settings(upstreams=named)) as gateway:
            running = asyncio.create_task(ask(gateway.port, post_chat(chat())))
            await held.begun.wait()
            await gateway.reload(settings(upstreams=[upstream(engine, "gpu0", models=["other"])]))
            held.released.set()
            response = await running
            assert (response.status, response.header("x-qos-error-source")) == (503, "gateway")
            assert await gateway.in_flight() == 0


async def test_what_needs_a_restart_is_said() -> None:
    """Ports and the like stay as they were, are named in answer and log, and the rest is taken over."""
    async with scripted_engine() as engine, running_gateway(settings(engine)) as gateway:
        other = settings(engine, server={"port": 1, "drain_seconds": 1}, metrics={"max_label_values": 3})
        told = await gateway.reload(other)
        assert sorted(told["needs_restart"]) == ["metrics.max_label_values", "server.port"]
        assert told["changed"] == ["server.drain_seconds"]
        assert await gateway.is_ready()
        (line,) = await logged(gateway, "these settings only change at a restart")
        assert sorted(line["settings"]) == sorted(told["needs_restart"])


# ── what is wrong changes nothing ────────────────────────────────────────────────────────────────────────

WRONG: dict[str, str | None] = {
    "bad YAML": "capacity: [",
    "unknown field": "capacty: {}",
    "negative limit": "upstreams: [{name: gpu0, url: 'http://127.0.0.1:1', max_in_flight: -1}]",
    "duplicate key": "capacity: {}\ncapacity: {}",
    "no engine": "upstreams: []",
    "missing keys file": "keys_file: nowhere.yaml",
    "tokenizer that is none": "tokenizers: {m: gateway.yaml}",
    "half written": "upstreams: [{name: gpu0, url: 'http://127",
    "missing file": None,
}


async def test_a_wrong_configuration_changes_nothing() -> None:
    """Of each of these the answer and the log say what is wrong, it is counted, the old settings stay in
    force as a whole, and a good one is taken over afterwards."""
    async with scripted_engine() as engine:
        engine.play = plain()
        good = settings(engine)
        async with running_gateway(good) as gateway:
            config = gateway.folder / "gateway.yaml"
            before = await gateway.state()
            for number, text in enumerate(WRONG.values(), start=1):
                config.unlink(missing_ok=True)
                if text is not None:
                    config.write_text(text, encoding="utf-8")
                response = await gateway.ask_to_reload()
                assert (response.status_code, response.json().keys()) == (422, {"error"}), text
                message = response.json()["error"]["message"]
                lines = await logged(gateway, "the configuration was not reloaded; the old one", number)
                assert lines[-1]["reason"] == message
                assert "gateway.yaml" in message or "nowhere.yaml" in message
                assert (await ask(gateway.port, post_chat(chat()))).status == 200
                after = await gateway.state()
                assert after["capacity_tokens_per_second"] == before["capacity_tokens_per_second"]
                assert after["upstreams"].keys() == before["upstreams"].keys()
            page = await gateway.metrics()
            assert page.total("config_reloads_total", result="failed") == len(WRONG)
            told = await gateway.reload(settings(engine, capacity={"tokens_per_second": 500_000}))
            assert told["changed"] == ["capacity.tokens_per_second"]
            assert (await gateway.state())["capacity_tokens_per_second"] == 500_000


# ── how it is asked for ──────────────────────────────────────────────────────────────────────────────────


async def test_hangup_reloads_as_well() -> None:
    """Also while streams run, which do not notice, and several in a row."""
    async with scripted_engine() as engine:
        held = engine.play = held_stream(token("a"))
        async with running_gateway(settings(engine)) as gateway, RawClient(gateway.port) as client:
            await client.send(post_chat(chat(stream=True)))
            await held.begun.wait()
            for rate in (500_000, 400_000):
                gateway.write(settings(engine, capacity={"tokens_per_second": rate}))
                gateway.hang_up()

                async def has_come(rate: int = rate) -> bool:
                    return (await gateway.state())["capacity_tokens_per_second"] == rate

                await eventually(has_come)
            (gateway.folder / "gateway.yaml").write_text("what: ever", encoding="utf-8")
            gateway.hang_up()
            await eventually(lambda: any("was not reloaded" in line for line in gateway.lines))
            held.released.set()
            response = await client.response()
            assert (response.whole, response.body.endswith(DONE)) == (True, True)


async def test_reloading_is_for_operators() -> None:
    """With an operations token it is asked for, GET is no way to it, and tenants have no such path."""
    async with scripted_engine() as engine:
        wanted: Settings = settings(engine, server={"operations_token": "op"})
        async with running_gateway(wanted, token="op") as gateway:
            request = b"POST /admin/reload HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n%b\r\n"
            for header, status in (
                (b"", 401),
                (b"authorization: Bearer wrong\r\n", 401),
                (b"authorization: Bearer op\r\n", 200),
            ):
                assert (await ask(gateway.operations_port, request % header)).status == status
            allowed = [("authorization", "Bearer op")]
            assert (await ask(gateway.operations_port, get("/admin/reload", allowed), "GET")).status == 405
            assert (await ask(gateway.port, request % b"authorization: Bearer op\r\n")).status == 404


async def test_a_gateway_that_drains_takes_no_other_configuration() -> None:
    async with scripted_engine() as engine:
        held = engine.play = held_stream(token("a"))
        async with running_gateway(settings(engine)) as gateway, RawClient(gateway.port) as client:
            await client.send(post_chat(chat(stream=True)))
            await held.begun.wait()
            gateway.signal(signal.SIGTERM)
            await eventually(lambda: any('"draining"' in line for line in gateway.lines))
            response = await gateway.ask_to_reload()
            assert response.status_code == 422
            assert "shutting down" in response.json()["error"]["message"]
            held.released.set()
            assert (await client.response()).whole
            assert await gateway.exit_status() == 0
