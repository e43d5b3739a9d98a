"""Engines that are not worth their next request: they are left, tried again with one request, and taken back.
And requests that nothing has begun yet: they go to another engine, within the budget for such retries."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.simulator.decision_log import read_decision_log
from tests.support.decision_replay import offered, replayed
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, RawResponse, ask, chat, get, post_chat
from tests.support.scripted_engine import (
    DONE,
    END,
    FINISH,
    ROLE,
    Held,
    Script,
    ScriptedEngine,
    breaking_off,
    held_plain,
    held_stream,
    plain,
    raw,
    scripted_engine,
    streaming,
    token,
)
from tests.support.scripted_upstream import (
    STREAM_HEAD,
    RecordedRequest,
    ScriptedConnection,
    answer,
    chunk,
)

pytestmark = pytest.mark.anyio

FAILURES = 3
NEVER_AGAIN = {"failures": FAILURES, "open_seconds": 600}
BROKEN = plain(b'{"error":{"message":"CUDA error"}}', status="500 Internal Server Error")
FULL = plain(b'{"error":{"message":"queue full"}}', status="503 Service Unavailable")
ODD = plain(b'{"error":{"message":"no such field"}}', status="400 Bad Request")
STREAM = streaming(ROLE, token("one"), FINISH, DONE)


def upstream(name: str, url: str, **given: Any) -> dict[str, Any]:
    """Probed once, at the start, unless told otherwise."""
    return {"name": name, "url": url, "health": {"interval_seconds": 600}, **given}


def settings(*upstreams: dict[str, Any], **given: Any) -> dict[str, Any]:
    return {
        "upstreams": list(upstreams),
        "circuit_breaker": NEVER_AGAIN,
        "scheduling": {"deadline_drop": False},
        "classes": {"P1": {"max_wait_seconds": 60}},
        **given,
    }


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture
async def other() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


async def chats(gateway: GatewayProcess, **members: Any) -> RawResponse:
    return await ask(gateway.port, post_chat(chat(**members)))


async def is_healthy(gateway: GatewayProcess, name: str = "gpu0") -> bool:
    """By the metrics and by the operators' page alike."""
    by_state = bool((await gateway.state())["upstreams"][name]["healthy"])
    assert (await gateway.metrics()).total("upstream_healthy", upstream=name) == by_state
    return by_state


async def is_on_trial(gateway: GatewayProcess, name: str = "gpu0") -> bool:
    return bool((await gateway.state())["upstreams"][name]["on_trial"])


def said(gateway: GatewayProcess, event: str) -> list[str]:
    """The reasons on the log lines of this event."""
    return [line["reason"] for line in gateway.log if line["event"] == event]


@asynccontextmanager
async def refusing(**given: Any) -> AsyncIterator[tuple[GatewayProcess, ScriptedEngine]]:
    """A gateway with two engines; `gone` was alive when it started and takes no connections any more."""
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(scripted_engine())
        async with scripted_engine() as gone:
            upstreams = upstream("gone", gone.url), upstream("other", other.url)
            gateway = await stack.enter_async_context(running_gateway(settings(*upstreams, **given)))
            await eventually(lambda: bool(gone.probes))
            assert (await chats(gateway)).status == 200
            assert gone.requests
        yield gateway, other


# ── when an engine is left ───────────────────────────────────────────────────────────────────────────────


async def test_what_clients_do_wrong_is_no_failure(engine: ScriptedEngine) -> None:
    """Many 400, engines without room, and clients that leave, in a row, say nothing against an engine."""
    async with running_gateway(settings(upstream("gpu0", engine.url))) as gateway:
        for script, status in ((ODD, 400), (FULL, 503)):
            engine.play = script
            for _ in range(20 if script is ODD else 2 * FAILURES):
                assert (await chats(gateway)).status == status
            assert await is_healthy(gateway)
        engine.play = held = held_plain()
        for n in range(2 * FAILURES):
            async with RawClient(gateway.port) as client:
                await client.send(post_chat(chat(), id=f"gone-{n}"))
                await held.begun.wait()
                held.begun.clear()
            await gateway.ending(f"gone-{n}")
        assert await is_healthy(gateway)
        engine.play = plain()
        assert (await chats(gateway)).status == 200


@pytest.mark.parametrize(
    ("script", "stream", "why"),
    [
        (BROKEN, False, "upstream_error, status 500"),
        (plain(b"<html>oops</html>"), False, "upstream_refused, status 200"),
        (held_plain(), True, "upstream_timeout"),
        (breaking_off(ROLE, token("one")), True, "upstream_aborted, status 200"),
    ],
    ids=["500", "no-answer", "late", "breaks-off"],
)
async def test_failures_in_a_row(engine: ScriptedEngine, script: Script, stream: bool, why: str) -> None:
    """A success in between, be it the engine's word of a mistake, and counting begins anew; then nothing more
    is sent there, whoever waits is told after a while, and the gateway is not ready."""
    timeouts = {"first_byte_seconds": 0.4, "no_upstream_seconds": 0.3}
    async with running_gateway(settings(upstream("gpu0", engine.url), upstream_timeouts=timeouts)) as gateway:
        for between in (ODD, plain()):
            engine.play = script
            for _ in range(FAILURES - 1):
                await chats(gateway, stream=stream)
            engine.play = between
            await chats(gateway)
        engine.play = script
        for _ in range(FAILURES - 1):
            await chats(gateway, stream=stream)
        assert await is_healthy(gateway)
        assert await gateway.readiness() == 200
        await chats(gateway, stream=stream)
        await eventually(lambda: said(gateway, "upstream is down") == [f"requests in a row failed: {why}"])
        assert not await is_healthy(gateway)
        assert await gateway.readiness() == 503
        asked = len(engine.requests)
        engine.play = plain()
        refused = await chats(gateway)
        assert (refused.status, refused.header("x-qos-outcome")) == (503, "rejected_no_upstream")
        assert len(engine.requests) == asked


async def test_alive_but_serving_nobody(engine: ScriptedEngine, other: ScriptedEngine) -> None:
    """An engine that answers its probes and no requests gets no more of them, so the errors end."""
    engine.play, other.play = held_plain(), plain()
    probed = {"health": {"interval_seconds": 0.05}}
    upstreams = upstream("gpu0", engine.url, **probed), upstream("gpu1", other.url, **probed)
    async with running_gateway(settings(*upstreams, upstream_timeouts={"first_byte_seconds": 1})) as gateway:

        async def statuses() -> list[int]:
            responses = await asyncio.gather(*(chats(gateway) for _ in range(8)))
            return [response.status for response in responses]

        assert 504 in await statuses()
        while await is_healthy(gateway):
            await statuses()
        asked, probes = len(engine.requests), len(engine.probes)
        await eventually(lambda: len(engine.probes) > probes + 5)
        assert await statuses() + await statuses() == [200] * 16
        assert len(engine.requests) == asked
        assert await gateway.readiness() == 200
        assert await is_healthy(gateway, "gpu1")


# ── how it comes back ────────────────────────────────────────────────────────────────────────────────────


async def test_one_request_is_the_trial(engine: ScriptedEngine) -> None:
    """When the time is over one request goes, and the others wait for how it ends. If it fails, they wait on;
    if it succeeds, all go."""
    breaker = {"failures": FAILURES, "open_seconds": 0.5}
    given = settings(upstream("gpu0", engine.url), circuit_breaker=breaker)
    async with running_gateway(given) as gateway, AsyncExitStack() as stack:
        engine.play = BROKEN
        for _ in range(FAILURES):
            assert (await chats(gateway)).status == 500
        engine.play = first = Held(last=answer(status="500 Internal Server Error"))
        asked = len(engine.requests)
        clients = [await stack.enter_async_context(RawClient(gateway.port)) for _ in range(5)]
        for client in clients:
            await client.send(post_chat(chat()))
        await first.begun.wait()
        assert len(engine.requests) == asked + 1
        assert await is_on_trial(gateway)
        assert not await is_healthy(gateway)
        assert await gateway.readiness() == 200
        assert await gateway.queued() == 4
        engine.play = second = held_plain()
        first.released.set()
        await eventually(lambda: len(said(gateway, "upstream is down")) == 2)
        assert said(gateway, "upstream is down")[1] == "its trial request failed: upstream_error, status 500"
        await second.begun.wait()
        assert len(engine.requests) == asked + 2
        engine.play = plain()
        second.released.set()
        statuses = sorted([(await client.response()).status for client in clients])
        assert statuses == [200] * 4 + [500]
        assert await is_healthy(gateway)
        await eventually(lambda: said(gateway, "upstream serves again") == ["its trial request was answered"])
        assert said(gateway, "upstream is back") == ["0.5 s are over; the next request is a trial"] * 2


async def test_a_stream_as_the_trial(engine: ScriptedEngine) -> None:
    """Its first token is enough: the others need not wait for its end."""
    breaker = {"failures": FAILURES, "open_seconds": 0.1}
    async with running_gateway(settings(upstream("gpu0", engine.url), circuit_breaker=breaker)) as gateway:
        engine.play = BROKEN
        for _ in range(FAILURES):
            await chats(gateway)
        engine.play = held = held_stream(ROLE, token("one"))
        async with RawClient(gateway.port) as client:
            await client.send(post_chat(chat(stream=True)))
            await client.until(b"one")
            await eventually(lambda: is_healthy(gateway))
            engine.play = plain()
            assert (await chats(gateway)).status == 200
            held.released.set()
            assert (await client.until(END)).endswith(DONE + b"\r\n" + END)


async def test_a_long_trial_keeps_nobody_out(engine: ScriptedEngine) -> None:
    """While a plain answer is made for long, the next probe that passes lets another request in; once that is
    answered all may come."""
    probed = {"health": {"interval_seconds": 0.2, "fail_after": 20}}
    given = settings(
        upstream("gpu0", engine.url, **probed), circuit_breaker={"failures": FAILURES, "open_seconds": 0.1}
    )
    async with running_gateway(given) as gateway, RawClient(gateway.port) as client:
        engine.play = BROKEN
        for _ in range(FAILURES):
            await chats(gateway)
        engine.play = long = held_plain()
        await client.send(post_chat(chat(), id="long"))
        await long.begun.wait()
        engine.play = plain()
        assert (await chats(gateway)).status == 200
        assert await is_healthy(gateway)
        assert await gateway.in_flight() == 1
        told = [
            "0.1 s are over; the next request is a trial",
            "probe passed while its trial request runs; the next request is a trial",
        ]
        await eventually(lambda: said(gateway, "upstream is back")[:2] == told)  # the log may be read late
        long.released.set()
        assert (await client.response()).status == 200


async def test_after_failed_probes(engine: ScriptedEngine) -> None:
    """What runs there runs on and is counted on; it is back after a probe and one request. Pages that cost
    nothing can be asked for meanwhile."""
    probed = {"health": {"interval_seconds": 0.05, "fail_after": 2}}
    async with running_gateway(settings(upstream("gpu0", engine.url, **probed))) as gateway:
        engine.play = held = held_stream(ROLE, token("one"))
        async with RawClient(gateway.port) as client:
            await client.send(post_chat(chat(stream=True)))
            await client.until(b"one")
            engine.healthy = False
            await eventually(lambda: said(gateway, "upstream is down") == ["probe of /health got 503"])
            assert await gateway.in_flight() == 1
            engine.healthy = True
            await eventually(lambda: is_on_trial(gateway))
            held.released.set()
            assert (await client.until(END)).endswith(DONE + b"\r\n" + END)
        await gateway.quiet()
        assert not await is_healthy(gateway)
        probes = len(engine.probes)
        await eventually(lambda: len(engine.probes) > probes + 5)
        assert not await is_healthy(gateway)
        engine.play = plain(b'{"object":"list","data":[]}')
        assert (await ask(gateway.port, get("/v1/models"))).status == 200
        assert not await is_healthy(gateway)
        engine.play = plain()
        assert (await chats(gateway)).status == 200
        assert await is_healthy(gateway)
        assert said(gateway, "upstream is back") == ["probe passed; the next request is a trial"]


# ── probes ───────────────────────────────────────────────────────────────────────────────────────────────


class Slow:
    """Probes of which these are answered late, or never if the gateway gives up first; by their number."""

    def __init__(self, *late: bool) -> None:
        self._late = late
        self.count = 0

    async def __call__(self, connection: ScriptedConnection, request: RecordedRequest) -> None:
        late = self._late[self.count % len(self._late)]
        self.count += 1
        if late:
            await connection.peer_closed.wait()
        else:
            await connection.send(answer())


class Flowing:
    """A stream of tokens until `stopped` is set; then it stands still until `ended` is."""

    def __init__(self) -> None:
        self.stopped, self.ended = asyncio.Event(), asyncio.Event()

    async def __call__(self, connection: ScriptedConnection, request: RecordedRequest) -> None:
        await connection.send(STREAM_HEAD)
        while not self.stopped.is_set():
            await connection.send(chunk(token("x")))
            await asyncio.sleep(0.05)
        await self.ended.wait()
        await connection.send(chunk(FINISH) + chunk(DONE) + END)


async def test_late_probes_while_streams_flow(engine: ScriptedEngine) -> None:
    """Beside fifty streams every third probe late is never so many in a row; all of them late says nothing
    while tokens come; when none come any more, it does, and the streams run on to their ends."""
    in_a_row = 8  # a busy machine may stand still for three
    probed = {"health": {"interval_seconds": 0.1, "fail_after": in_a_row}}
    given = settings(upstream("gpu0", engine.url, **probed), capacity={"tokens_per_second": 1_000_000})
    async with running_gateway(given) as gateway, AsyncExitStack() as stack:
        engine.play = flowing = Flowing()
        clients = [await stack.enter_async_context(RawClient(gateway.port)) for _ in range(50)]
        for client in clients:
            await client.send(post_chat(chat(stream=True)))
        for client in clients:
            await client.until(b"x")
        for late in ((False, False, True), (True,)):
            engine.probed = slow = Slow(*late)
            await eventually(lambda slow=slow: slow.count >= 2 * in_a_row)
            assert await is_healthy(gateway)
            assert said(gateway, "upstream is down") == []
        flowing.stopped.set()
        await eventually(lambda: said(gateway, "upstream is down") != [])
        assert not await is_healthy(gateway)
        flowing.ended.set()
        for client in clients:
            assert (await client.until(END)).endswith(DONE + b"\r\n" + END)


async def test_probes_log_in(engine: ScriptedEngine) -> None:
    """They carry the engine's credential, which is not the client's."""
    given = settings(upstream("gpu0", engine.url, api_key="for-the-engine"))
    async with running_gateway(given) as gateway:
        await eventually(lambda: bool(engine.probes))
        assert (await ask(gateway.port, post_chat(chat(), [("authorization", "Bearer mine")]))).status == 200
    for request in (*engine.probes, engine.last):
        assert request.header("authorization") == "Bearer for-the-engine"


async def test_one_that_hangs_holds_up_no_other(engine: ScriptedEngine, other: ScriptedEngine) -> None:
    """Requests and probes of an engine with another model go on while this one answers nothing at all."""
    probed = {"health": {"interval_seconds": 0.05}}
    given = settings(
        upstream("gpu0", engine.url, models=["hangs"]),
        upstream("gpu1", other.url, models=["runs"], **probed),
    )
    async with running_gateway(given) as gateway, RawClient(gateway.port) as client:
        engine.play = engine.probed = held = held_plain()
        await client.send(post_chat(chat(model="hangs")))
        await held.begun.wait()
        probes = len(other.probes)
        for _ in range(20):
            assert (await chats(gateway, model="runs")).status == 200
        await eventually(lambda: len(other.probes) > probes + 3)
        assert not held.released.is_set()
        held.released.set()
        assert (await client.response()).status == 200


# ── another engine instead ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_a_refused_connection(stream: bool) -> None:
    """The client has its answer from another engine and knows of nothing; the log does. After some, the
    engine that refuses is not tried any more."""
    async with refusing() as (gateway, other):
        other.play = STREAM if stream else plain()
        sent = 0
        while await is_healthy(gateway, "gone"):
            response = await ask(gateway.port, post_chat(chat(stream=stream), id=f"r{sent}"))
            assert (response.status, response.whole) == (200, True)
            sent += 1
        lines = [await gateway.ending(f"r{n}") for n in range(sent)]
        assert {(line["outcome"], line["upstream"]) for line in lines} == {("completed", "other")}
        assert sum(line.get("requeued", False) for line in lines) == FAILURES
        assert len(other.requests) == sent
        assert said(gateway, "upstream is down") == ["requests in a row failed: upstream_refused"]
        assert (await gateway.metrics()).total("upstream_queue_full_total") == 0


async def test_no_budget_no_retry() -> None:
    """`upstream_retry_budget: 0`: the client is told, and may try again itself."""
    async with refusing(upstream_retry_budget=0) as (gateway, other):
        for _ in range(FAILURES):
            response = await chats(gateway)
            assert (response.status, response.header("x-qos-outcome")) == (502, "upstream_refused")
        assert (await chats(gateway)).status == 200
        assert len(other.requests) == 1


async def test_retries_are_a_part_of_all_requests() -> None:
    """An engine that goes on refusing uses up what was saved, and then the clients are told."""
    breaker = {"failures": 1000, "open_seconds": 600}
    async with refusing(circuit_breaker=breaker, upstream_retry_budget=0.001) as (gateway, other):
        other.play = plain()
        asked, status = 1, 200
        async with asyncio.timeout(60), RawClient(gateway.port) as client:
            while status == 200:
                await client.send(post_chat(chat()))
                status = (await client.response()).status
                asked += 1
        assert status == 502
        await gateway.quiet()
        retried = sum(line.get("requeued", False) for line in gateway.endings())
        assert 10 <= retried <= 10 + 0.001 * asked
        assert len(other.requests) == asked - 2


async def test_nobody_else_to_ask(engine: ScriptedEngine) -> None:
    """Where the other engine serves another model, or is down as well, it is told at once."""
    async with scripted_engine() as gone:
        given = settings(
            upstream("gone", gone.url, models=["mock-gpu", "any"]),
            upstream("gpu1", engine.url, models=["other", "any"]),
        )
        context = running_gateway(given)
        gateway = await context.__aenter__()
        await eventually(lambda: bool(gone.probes))
    try:
        assert (await chats(gateway)).status == 502
        assert engine.requests == []
        engine.play = BROKEN
        for _ in range(FAILURES):
            assert (await chats(gateway, model="other")).status == 500
        assert (await chats(gateway, model="any")).status == 502
    finally:
        await context.__aexit__(None, None, None)


async def test_a_connection_closed_meanwhile_costs_no_retry(engine: ScriptedEngine) -> None:
    """An engine may close a kept connection at the very moment it is used: the request goes out on a new one,
    whatever the budget, and that is no failure."""

    async def once(connection: ScriptedConnection, request: RecordedRequest) -> None:
        if getattr(connection, "used", False):
            connection.close()
            return
        connection.used = True  # type: ignore[attr-defined]
        await plain()(connection, request)

    engine.play = once
    given = settings(upstream("gpu0", engine.url), upstream_retry_budget=0, circuit_breaker={"failures": 1})
    async with running_gateway(given) as gateway:
        for _ in range(5):
            assert (await chats(gateway)).status == 200
        assert await is_healthy(gateway)


# ── and when not ─────────────────────────────────────────────────────────────────────────────────────────


async def _reads_and_hangs_up(connection: ScriptedConnection, request: RecordedRequest) -> None:
    await asyncio.sleep(0.1)
    connection.close()


@pytest.mark.parametrize(
    ("script", "stream", "status"),
    [
        (_reads_and_hangs_up, False, 502),
        (_reads_and_hangs_up, True, 502),
        (held_plain(), False, 504),
        (plain(b"bad gateway", status="502 Bad Gateway"), False, 502),
        (raw(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", close=True), False, 502),
        (breaking_off(ROLE, token("one")), True, 200),
    ],
    ids=["hangs-up", "hangs-up-stream", "late", "502", "half", "breaks-off"],
)
async def test_what_may_have_begun_is_not_sent_again(
    engine: ScriptedEngine, other: ScriptedEngine, script: Script, stream: bool, status: int
) -> None:
    """One generation in all, though another engine stands by and there is budget."""
    engine.play = other.play = script
    given = settings(
        *(upstream(name, each.url) for name, each in (("gpu0", engine), ("gpu1", other))),
        upstream_timeouts={"first_byte_seconds": 0.5},
    )
    async with running_gateway(given) as gateway:
        response = await ask(gateway.port, post_chat(chat(stream=stream), id="r"))
        assert response.status == status
        line = await gateway.ending("r")
        assert "requeued" not in line
        assert len(engine.requests) + len(other.requests) == 1
        assert response.body.count(b'"one"') <= 1


# ── afterwards ───────────────────────────────────────────────────────────────────────────────────────────


async def test_the_decision_log_has_it_all(tmp_path: Path) -> None:
    """Trials and engines that were not reached are in it, and a replay on virtual time ends the same."""
    log = tmp_path / "decisions.jsonl"
    breaker = {"failures": FAILURES, "open_seconds": 0.3}
    async with refusing(decision_log=str(log), circuit_breaker=breaker) as (gateway, other):
        other.play = plain()
        sent = 0
        while await is_healthy(gateway, "gone"):
            assert (await ask(gateway.port, post_chat(chat(), id=f"refused-{sent}"))).status == 200
            sent += 1
        other.play = BROKEN
        for n in range(FAILURES):
            await ask(gateway.port, post_chat(chat(), id=f"broken-{n}"))
        other.play = plain()
        ids = [f"later-{n}" for n in range(6)]
        await asyncio.gather(*(ask(gateway.port, post_chat(chat(), id=id)) for id in ids))
    (run,) = read_decision_log(log)
    assert sum(request.not_reached == "gone" for request in run.requests) >= FAILURES
    again = {request.request_id: request for request in replayed(run)}
    assert again.keys() == {request.request_id for request in offered(run)}
    for one in offered(run):
        two = again[one.request_id]
        for what in ("outcome", "upstream", "queue_wait_ns", "charged", "requeued_at", "not_reached"):
            assert getattr(one, what) == getattr(two, what), (one.request_id, what)
