"""An engine's metrics page, read again and again."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.policy.engine_load import EngineLoad
from gateway.upstream.client import Upstream, UpstreamAddress
from gateway.upstream.load_poller import PAGE_BYTES_MAX, LoadPoller, LoadRules, next_due
from gateway.upstream.transport import TransportTimeouts
from tests.support.loops import both_loops, until
from tests.support.scripted_upstream import ScriptedConnection, ScriptedUpstream, answer

pytestmark = pytest.mark.anyio
anyio_backend = both_loops()


def page(waiting: int) -> bytes:
    return answer(b"vllm:num_requests_waiting %d\n" % waiting)


class Polled:
    """An upstream whose answers a test sets, its poller, and what that one said."""

    def __init__(self, upstream: ScriptedUpstream, poller: Callable[["Polled"], LoadPoller]) -> None:
        self.upstream = upstream
        self.answer = page(0)
        self.loads: list[int | None] = []
        self.changes: list[tuple[bool, str]] = []
        self.requests_at_first_change = 0
        self.poller = poller(self)

    def on_load(self, name: str, load: EngineLoad) -> None:
        assert name == "gpu0"
        self.loads.append(load.waiting)

    def on_change(self, name: str, readable: bool, why: str) -> None:
        assert name == "gpu0"
        if not self.changes:
            self.requests_at_first_change = len(self.upstream.requests)
        self.changes.append((readable, why))

    async def poll(self, answer: bytes) -> None:
        self.answer = answer
        await self.poller.poll()


@asynccontextmanager
async def polled(credential: bytes | None = None, **rules: Any) -> AsyncIterator[Polled]:
    async def handler(connection: ScriptedConnection) -> None:
        while await connection.request() is not None:
            await connection.send(made.answer)

    def poller(made: Polled) -> LoadPoller:
        return LoadPoller(engine, LoadRules(**rules), made.on_load, made.on_change)

    async with asyncio.timeout(20), ScriptedUpstream(handler) as upstream:
        address = UpstreamAddress("gpu0", upstream.url, credential=credential)
        engine = Upstream(address, TransportTimeouts())
        made = Polled(upstream, poller)
        try:
            yield made
        finally:
            await engine.aclose()
        assert engine.transport.in_use == 0


async def test_each_page_is_told() -> None:
    """Every page's load is handed on; that pages can be read is said once."""
    async with polled() as engine:
        for waiting in (3, 3, 0):
            await engine.poll(page(waiting))
        assert engine.loads == [3, 3, 0]
        assert engine.changes == [(True, "page read")]


async def test_how_it_asks() -> None:
    """At the configured path, with the engine's credential, on a connection kept for the next time."""
    async with polled(b"Bearer secret", path="/engine/metrics") as engine:
        await engine.poll(page(1))
        await engine.poll(page(2))
        assert len(engine.upstream.connections) == 1
        for request in engine.upstream.requests:
            assert (request.method, request.target) == ("GET", "/engine/metrics")
            assert request.header("authorization") == "Bearer secret"


async def test_changes_are_said_once() -> None:
    """However often and for whatever reasons a page cannot be read, one line says so, and one that it can."""
    async with polled() as engine:
        await engine.poll(page(1))
        await engine.poll(answer(status="404 Not Found"))
        await engine.poll(answer(b"<html>hello</html>"))
        await engine.poll(page(2))
        await engine.poll(answer(b"<html>hello</html>"))
        assert engine.loads == [1, 2]
        assert engine.changes == [
            (True, "page read"),
            (False, "/metrics got 404"),
            (True, "page read"),
            (False, "/metrics has no metric of an engine that is known here"),
        ]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (answer(b"vllm:num_requests_waiting 1\n", status="503 Service Unavailable"), "/metrics got 503"),
        (answer(status="307 Temporary Redirect", headers=("location: /metrics/",)), "/metrics got 307"),
        (answer(b"vllm:num_requests_waiting 1\n" + b"#" * PAGE_BYTES_MAX), "the body is longer than"),
        (answer(b"\x00\xff", headers=("content-encoding: gzip",)), "malformed body"),
        (answer(b"", headers=("content-encoding: br",)), "content-encoding"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", ""),
        (page(1)[:-5], "no whole page from /metrics within 0.2 s"),
        (b"", "no whole page from /metrics within 0.2 s"),
    ],
)
async def test_what_cannot_be_read(said: bytes, why: str) -> None:
    """Whatever an engine answers, or does not: no load, and a reason."""
    async with polled(page_seconds_max=0.2) as engine:
        await engine.poll(said)
        assert engine.loads == []
        ((readable, reason),) = engine.changes
        assert not readable
        assert reason.startswith(why)
        await engine.poll(page(4))
        assert engine.loads == [4]


async def test_a_compressed_page() -> None:
    """A proxy in front of the engine may compress unasked."""
    async with polled() as engine:
        body = gzip.compress(b"vllm:num_requests_waiting 7\n")
        await engine.poll(answer(body, headers=("content-encoding: gzip",)))
        assert engine.loads == [7]


async def test_an_engine_that_is_down() -> None:
    """It is asked on, and read as soon as it answers."""
    async with polled() as engine:
        port = engine.upstream.port
        engine.upstream._server.close()
        await engine.upstream._server.wait_closed()
        await engine.poll(page(1))
        await engine.poll(page(1))
        assert engine.loads == []
        ((readable, why),) = engine.changes
        assert not readable
        assert why.startswith("no connection")
        async with ScriptedUpstream(engine.upstream.handler, port=port):
            await engine.poll(page(2))
            assert engine.loads == [2]


async def test_a_slow_engine_is_not_asked_twice_at_once() -> None:
    """Beats that come while a page is awaited are left out; a new one is asked for when its time is over."""
    async with polled(interval_seconds=0.01, page_seconds_max=0.3) as engine:
        engine.answer = b""
        task = asyncio.create_task(engine.poller.run())
        await until(lambda: bool(engine.upstream.requests))
        await until(lambda: bool(engine.changes))
        assert engine.changes == [(False, "no whole page from /metrics within 0.3 s")]
        assert engine.requests_at_first_change == 1
        engine.answer = page(5)
        await until(lambda: len(engine.loads) >= 2)
        task.cancel()
        await asyncio.wait([task])


async def test_it_ends_when_cancelled() -> None:
    """In the middle of a page as well, and the connection is closed then."""
    async with polled() as engine:
        engine.answer = page(1)[:-5]
        task = asyncio.create_task(engine.poller.run())
        await until(lambda: bool(engine.upstream.requests))
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await engine.upstream.all_closed()
        assert (engine.loads, engine.changes) == ([], [])


@pytest.mark.parametrize(
    ("now", "due"),
    [(10.0, 11.0), (10.25, 11.0), (11.0, 11.0), (11.5, 12.0), (19.75, 20.0), (9.9995, 11.0)],
)
def test_the_beat(now: float, due: float) -> None:
    """Beats keep their distance from the first one, whatever a page took; missed ones are not made up for."""
    assert next_due(10.0, 1.0, now) == due
