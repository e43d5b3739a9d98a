"""Starting, draining, ending; engines that are not there yet."""

import asyncio
import signal
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.processes import children, is_running
from tests.support.raw_client import RawClient, RawResponse, ask, chat, get, post_chat, request_head
from tests.support.scripted_engine import (
    DONE,
    END,
    FINISH,
    ROLE,
    Held,
    ScriptedEngine,
    held_plain,
    held_stream,
    plain,
    scripted_engine,
    token,
)
from tests.support.scripted_upstream import STREAM_HEAD, RecordedRequest, ScriptedConnection, chunk

pytestmark = pytest.mark.anyio


def settings_for(engine: ScriptedEngine, **more: Any) -> dict[str, Any]:
    return {
        "upstreams": [{"name": "gpu0", "url": engine.url, "max_in_flight": 1}],
        "scheduling": {"deadline_drop": False},
        **more,
    }


def check_turned_away(response: RawResponse) -> None:
    assert (response.status, response.header("x-qos-outcome")) == (503, "rejected_draining")
    error = response.error
    assert (error["type"], error["code"]) == ("service_unavailable_error", "server_is_overloaded")
    assert 1 <= int(response.header("retry-after") or "") <= 60


async def _has_queued(gateway: GatewayProcess, count: int) -> bool:
    return await gateway.queued() == count


async def _ready_is(gateway: GatewayProcess, status: int) -> bool:
    return await gateway.readiness() == status


SHORT = {"max_tokens": 1}
BATCH = ("x-request-priority", "P2")


async def test_streams_may_end_and_the_rest_is_turned_away() -> None:
    """On SIGTERM readiness ends at once; who waits, for a place or for tokens, and who comes get 503 with
    advice; idle connections and half requests are closed; streams run to their end mark and are paid for, and
    then the process ends well."""
    async with scripted_engine() as engine:
        settings = settings_for(engine, capacity={"tokens_per_second": 1000})
        settings["upstreams"][0]["max_in_flight"] = 4
        async with running_gateway(settings) as gateway, AsyncExitStack() as stack:

            async def sent(id: str, *headers: tuple[str, str], **members: Any) -> RawClient:
                client = await stack.enter_async_context(RawClient(gateway.port))
                await client.send(post_chat(chat(**members), headers, id=id))
                return client

            idle = await sent("before", **SHORT)
            assert (await idle.response()).status == 200
            half = await stack.enter_async_context(RawClient(gateway.port))
            await half.send(request_head("POST", "/v1/chat/completions")[:-2])
            # More than P2 has at once: it goes, and leaves a debt behind that the next one waits out.
            engine.play = batch = held_plain()
            large = await sent("large", BATCH, max_tokens=400)
            await batch.begun.wait()
            engine.play = held = held_stream(ROLE, token("one"))
            streamers = [await sent(f"stream-{n}", stream=True, **SHORT) for n in range(3)]
            for streamer in streamers:
                await streamer.until(b"one")
            waiters = [await sent("throttled", BATCH, max_tokens=400)]
            waiters += [await sent(f"waits-{n}", **SHORT) for n in range(5)]
            await eventually(lambda: _has_queued(gateway, 6))
            gateway.signal(signal.SIGTERM)
            for waiter in waiters:
                check_turned_away(await waiter.response())
            assert await gateway.readiness() == 503
            for request in (post_chat(chat()), get("/v1/models")):
                check_turned_away(await ask(gateway.port, request))
            assert (await ask(gateway.port, get("/healthz"))).status == 200
            held.released.set()
            batch.released.set()
            assert (await large.response()).status == 200
            for streamer in streamers:
                rest = await streamer.rest()
                assert DONE in rest
                assert rest.endswith(b"0\r\n\r\n")
            assert (await idle.rest(), await half.rest()) == (b"", b"")
            await gateway.stop()
        lines = {line["request_id"]: line for line in gateway.endings()}
        outcomes = {id: line["outcome"] for id, line in lines.items()}
        served = {"before", "large", *(f"stream-{n}" for n in range(3))}
        assert {id for id, outcome in outcomes.items() if outcome == "completed"} == served
        assert {outcome for id, outcome in outcomes.items() if id not in served} == {"rejected_draining"}
        assert len(lines) == len(served) + 6 + 2
        assert all((line["cost"] > 0) == (id in served) for id, line in lines.items())
        assert {lines[f"stream-{n}"]["output_tokens"] for n in range(3)} == {1}


async def _endless(connection: ScriptedConnection, request: RecordedRequest) -> None:
    await connection.send(STREAM_HEAD + chunk(ROLE))
    while True:
        await connection.send(chunk(token("x" * 60_000)))


async def test_what_does_not_end_is_broken_off() -> None:
    """After `drain_seconds` a stalled stream gets an error event, a request without an answer a status, one
    that reads nothing or uploads for ever nothing, and the process ends well all the same."""
    async with scripted_engine() as engine:
        settings = settings_for(engine, server={"drain_seconds": 0.5})
        settings["upstreams"][0]["max_in_flight"] = 9
        async with running_gateway(settings) as gateway:
            held = [held_stream(ROLE, token("one")), held_plain()]
            held.append(Held(STREAM_HEAD + b"".join(map(chunk, (ROLE, FINISH, DONE)))))
            clients = [RawClient(gateway.port, receive_buffer_bytes=8192) for _ in range(5)]
            for client in clients:
                await client.__aenter__()
            for id, client, script in zip(("stream", "plain", "done"), clients, held, strict=False):
                engine.play = script
                await client.send(post_chat(chat(stream=id != "plain"), id=id))
                await script.begun.wait()
            await clients[0].until(b"one")
            await clients[2].until(b"[DONE]")
            engine.play = _endless
            await clients[3].send(post_chat(chat(stream=True), id="reads-nothing"))
            await clients[4].send(
                request_head(
                    "POST", "/v1/chat/completions", [("content-length", "9"), ("x-request-id", "up")]
                )
            )
            await eventually(lambda: _has_in_flight(gateway, 4))
            told_at = asyncio.get_running_loop().time()
            gateway.signal(signal.SIGTERM)
            stream, answered = await clients[0].rest(), await clients[1].response()
            assert b"shutting down" in stream
            assert b"server_is_overloaded" in stream
            assert not stream.endswith(b"0\r\n\r\n")
            check_turned_away(answered)
            await gateway.stop()
            assert 0.5 <= asyncio.get_running_loop().time() - told_at < 10
            for client in clients:
                await client.leave()
            outcomes = {line["request_id"]: line["outcome"] for line in gateway.endings()}
        draining = "rejected_draining"
        assert outcomes.pop("done") == "completed"
        assert outcomes.pop("reads-nothing") in (draining, "client_stalled")
        assert outcomes == {"stream": draining, "plain": draining, "up": draining}


async def _has_in_flight(gateway: GatewayProcess, count: int) -> bool:
    return await gateway.in_flight() == count


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
async def test_a_second_signal_ends_at_once(number: signal.Signals) -> None:
    """Who cannot wait for the streams to end presses Ctrl-C twice, or sends SIGTERM again."""
    async with scripted_engine() as engine, running_gateway(settings_for(engine)) as gateway:
        engine.play = held_stream(ROLE, token("one"))
        async with RawClient(gateway.port) as client:
            await client.send(post_chat(chat(stream=True), id="cut"))
            await client.until(b"one")
            gateway.signal(number)
            await eventually(lambda: _ready_is(gateway, 503))
            gateway.signal(number)
            assert b"shutting down" in await client.rest()
        await gateway.stop()
        assert [line["outcome"] for line in gateway.endings("cut")] == ["rejected_draining"]


async def test_engines_come_and_go() -> None:
    """Without an engine the gateway starts, is alive and not ready; requests wait for one, for a while; one
    that comes is used at once, and one that fails its probes is left. Proxies of the environment are not
    asked for the way."""
    async with scripted_engine() as engine:
        port = int(engine.url.rpartition(":")[2])
    settings = {
        "upstreams": [
            {
                "name": "gpu0",
                "url": f"http://127.0.0.1:{port}",
                "health": {"interval_seconds": 0.1, "fail_after": 2},
            }
        ],
        "upstream_timeouts": {"no_upstream_seconds": 1},
        "scheduling": {"deadline_drop": False},
    }
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy"), "http://127.0.0.1:9")
    async with running_gateway(settings, environ=nowhere, ready=False) as gateway:
        await eventually(lambda: _ready_is(gateway, 503))
        assert (await ask(gateway.port, get("/healthz"), "GET")).status == 200
        response = await ask(gateway.port, post_chat(chat(), id="in-vain"))
        assert (response.status, response.header("x-qos-outcome")) == (503, "rejected_no_upstream")
        assert response.error["code"] == "server_is_overloaded"
        assert 1 <= int(response.header("retry-after") or "") <= 60
        assert (await gateway.ending("in-vain"))["cost"] == 0
        assert (await ask(gateway.port, get("/v1/models"))).status == 503
        waiting = asyncio.create_task(ask(gateway.port, post_chat(chat(), id="patient")))
        await eventually(lambda: _has_queued(gateway, 1))
        async with scripted_engine(port) as engine:
            engine.play = plain()
            assert (await waiting).status == 200
            await eventually(gateway.is_ready)
            assert (await gateway.metrics()).total("upstream_healthy") == 1
            engine.play = held = held_stream(ROLE, token("one"))
            async with RawClient(gateway.port) as client:
                await client.send(post_chat(chat(stream=True)))
                await client.until(b"one")
                engine.healthy = False
                await eventually(lambda: _ready_is(gateway, 503))
                held.released.set()
                assert (await client.until(b"0\r\n\r\n")).endswith(DONE + b"\r\n" + END)
            engine.healthy = True
            await eventually(gateway.is_ready)
        await eventually(lambda: _is_logged(gateway, "upstream is back", 2))
        assert _is_logged(gateway, "upstream is down", 2)


def _is_logged(gateway: GatewayProcess, event: str, times: int) -> bool:
    return [line["event"] for line in gateway.log].count(event) >= times


async def test_the_mock_gpu_ends_with_the_gateway() -> None:
    """Its process is gone even after a bad end; after a good one this is looked at in all these tests."""
    async with running_gateway({}) as gateway:
        (gpu,) = children(gateway.pid)
        assert is_running(gpu)
        await gateway.kill()
        await eventually(lambda: not is_running(gpu))
