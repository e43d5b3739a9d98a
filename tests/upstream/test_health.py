"""Signs of life and signs of service, and what an upstream may get by them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.policy.clock import ManualClock, to_nanoseconds
from gateway.runtime.system_clock import SystemClock
from gateway.upstream.circuit_breaker import Admittance, BreakerRules
from gateway.upstream.client import Upstream, UpstreamAddress
from gateway.upstream.health import HealthProbe, Hysteresis, ProbeRules, UpstreamHealth
from gateway.upstream.transport import TransportTimeouts
from tests.support.loops import until
from tests.support.scripted_upstream import ScriptedConnection, ScriptedUpstream, answer
from tests.support.virtual_loop import VirtualLoop, virtual_loop

ALL, TRIAL, NONE = Admittance.ALL, Admittance.TRIAL, Admittance.NONE


# ── hysteresis ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("results", "healthy"),
    [
        ("-", False),
        ("+-", True),
        ("+--", True),
        ("+---", False),
        ("+--+--", True),
        ("+" + "--+" * 20, True),
        ("-+", False),
        ("-++", True),
        ("-+-+", False),
        ("-++--", True),
        ("-++---", False),
        ("~", True),
        ("~~", True),
        ("~~~", False),
        ("~-", False),
        ("~+~~", True),
        ("~~+", True),
        ("+~~~", False),
        ("-+~", False),
        ("-++~~", True),
    ],
)
def test_probes_in_a_row(results: str, healthy: bool) -> None:
    """The very first failure counts, unless it is only late (`~`); after that three failures, or two passes,
    change the verdict."""
    hysteresis = Hysteresis(ProbeRules(fail_after=3, pass_after=2))
    for result in results:
        before = hysteresis.healthy
        changed = hysteresis.result(result == "+", late=result == "~")
        assert changed == (hysteresis.healthy != before)
    assert hysteresis.healthy is healthy


# ── what it may get ──────────────────────────────────────────────────────────────────────────────────────


class Watched:
    """The health of one upstream on a loop that jumps, and what was said of it."""

    def __init__(self, loop: VirtualLoop, failures: int = 2, open_seconds: float = 10) -> None:
        self.loop = loop
        self.clock = loop.clock
        self.said: list[tuple[Admittance, str]] = []
        self.taken = False
        rules = BreakerRules(failures, to_nanoseconds(open_seconds))
        self.health = UpstreamHealth("gpu0", rules, self.clock, self._on_change, lambda: self.taken, loop)

    def _on_change(self, name: str, admits: Admittance, why: str) -> None:
        assert name == "gpu0"
        assert admits is self.health.admits
        self.said.append((admits, why))

    def fail(self, times: int = 1) -> None:
        for _ in range(times):
            self.health.request_failed(self.clock.now(), "upstream_timeout")

    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    with virtual_loop(VirtualLoop(ManualClock())) as loop:
        yield loop


def test_it_is_put_on_trial_by_itself(loop: VirtualLoop) -> None:
    """When its time is over, with nobody asking; each change is told once and with the reason."""
    watched = Watched(loop)
    watched.fail(2)
    watched.wait(9.9)
    assert watched.said == [(NONE, "requests in a row failed: upstream_timeout")]
    watched.wait(0.2)
    watched.fail()
    watched.wait(9.9)
    assert watched.said[1:] == [
        (TRIAL, "10 s are over"),
        (NONE, "its trial request failed: upstream_timeout"),
    ]
    watched.wait(0.2)
    watched.health.request_began(watched.clock.now())
    watched.health.request_succeeded(watched.clock.now())
    assert watched.said[3:] == [(TRIAL, "10 s are over"), (ALL, "its trial request is being answered")]


def test_a_plain_trial(loop: VirtualLoop) -> None:
    """Without a first token it is the answer that ends the trial."""
    watched = Watched(loop)
    watched.fail(2)
    watched.wait(10.1)
    watched.health.request_succeeded(watched.clock.now())
    assert watched.said[-1] == (ALL, "its trial request was answered")


def test_probes_and_time_together(loop: VirtualLoop) -> None:
    """Both must allow the trial, whichever comes last; what changes nothing is not told."""
    watched = Watched(loop)
    watched.fail(2)
    watched.wait(1)
    watched.health.probed(False, "refused")
    watched.wait(1)
    watched.health.probed(True, "probe passed")
    watched.wait(7.9)
    assert len(watched.said) == 1
    watched.wait(0.2)
    assert watched.said[1:] == [(TRIAL, "10 s are over")]
    watched.health.probed(False, "refused")
    watched.wait(100)
    watched.health.probed(True, "probe passed")
    assert watched.said[2:] == [(NONE, "refused"), (TRIAL, "probe passed")]


def test_probes_that_pass_while_it_is_on_trial(loop: VirtualLoop) -> None:
    """While its place is free they say nothing, be it for long; once it is taken each lets one more in, up to
    a number."""
    watched = Watched(loop)
    watched.fail(2)
    watched.health.probe_passed()
    watched.wait(10.1)
    assert watched.said[1:] == [(TRIAL, "10 s are over")]
    for _ in range(9):
        watched.health.probe_passed()
    assert len(watched.said) == 2
    watched.taken = True
    for _ in range(9):
        watched.health.probe_passed()
    assert watched.said[2:] == [(TRIAL, "probe passed while its trial request runs")] * 2
    watched.health.request_succeeded(watched.clock.now())
    watched.health.probe_passed()
    assert watched.said[4:] == [(ALL, "its trial request was answered")]


def test_when_it_last_served(loop: VirtualLoop) -> None:
    """Answers count, failures and beginnings do not."""
    watched = Watched(loop)
    watched.wait(1)
    watched.health.request_succeeded(0)
    served_at = watched.health.served_at
    assert served_at == watched.clock.now()
    watched.wait(1)
    watched.fail()
    watched.health.request_began(watched.clock.now())
    assert watched.health.served_at == served_at


def test_no_timer_is_left(loop: VirtualLoop) -> None:
    """Closed while it is shut, it is not heard of again."""
    watched = Watched(loop)
    watched.fail(2)
    watched.health.close()
    watched.wait(100)
    assert len(watched.said) == 1


# ── probes ───────────────────────────────────────────────────────────────────────────────────────────────


class Probed:
    """An upstream whose answers a test sets (None: none at all), and its probe."""

    def __init__(self, upstream: ScriptedUpstream, engine: Upstream, rules: ProbeRules) -> None:
        self.upstream = upstream
        self.answer: bytes | None = answer()
        self.heard = False
        self.changes: list[tuple[bool, str]] = []
        self.passed = 0  # of the probes that changed nothing
        self.probe = HealthProbe(
            engine,
            rules,
            lambda healthy, why: self.changes.append((healthy, why)),
            self._on_passed,
            SystemClock(),
            self._is_heard,
        )

    def _on_passed(self) -> None:
        self.passed += 1

    def _is_heard(self, since: int) -> bool:
        assert 0 < since < SystemClock().now()
        return self.heard

    async def probes(self, *answers: bytes | None) -> bool:
        for self.answer in answers:
            await self.probe.probe()
        return self.probe.healthy


@asynccontextmanager
async def probed(credential: bytes | None = None, **rules: Any) -> AsyncIterator[Probed]:
    async def handler(connection: ScriptedConnection) -> None:
        while await connection.request() is not None:
            if made.answer is None:
                await connection.peer_closed.wait()
            else:
                await connection.send(made.answer)

    async with asyncio.timeout(20), ScriptedUpstream(handler) as upstream:
        engine = Upstream(UpstreamAddress("gpu0", upstream.url, credential=credential), TransportTimeouts())
        made = Probed(upstream, engine, ProbeRules(**{"interval_seconds": 0.1, **rules}))
        try:
            yield made
        finally:
            await engine.aclose()
        assert engine.transport.in_use == 0


OK = answer()
BROKEN = answer(status="503 Service Unavailable")
LATE = None


@pytest.mark.anyio
async def test_how_it_asks() -> None:
    """At the configured path, with the engine's own credential."""
    async with probed(b"Bearer secret", path="/live") as engine:
        assert await engine.probes(OK)
        (request,) = engine.upstream.requests
        assert (request.method, request.target) == ("GET", "/live")
        assert request.header("authorization") == "Bearer secret"


@pytest.mark.anyio
async def test_without_a_credential_none_is_sent() -> None:
    """An engine that needs none gets none."""
    async with probed() as engine:
        assert await engine.probes(OK)
        assert engine.upstream.requests[0].header("authorization") is None


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("said", "why"),
    [
        (BROKEN, "probe of /health got 503"),
        (answer(status="302 Found", headers=("location: /",)), "probe of /health got 302"),
        (b"hello\r\n\r\n", "Expected HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + b"x" * 100_000, "longer than 65536 bytes"),
        (LATE, "0.1 s"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n{", "0.1 s"),
    ],
    ids=["status", "redirect", "no http", "endless", "late", "half"],
)
async def test_what_is_no_sign_of_life(said: bytes | None, why: str) -> None:
    """Anything but a whole answer with a status of success, in time."""
    async with probed(fail_after=1) as engine:
        assert await engine.probes(OK)
        assert not await engine.probes(said)
        ((healthy, told),) = engine.changes
        assert not healthy
        assert why in told


@pytest.mark.anyio
async def test_an_answer_that_drips() -> None:
    """Byte after byte is not silence, and no answer either: the limit is for all of it."""

    async def drips(connection: ScriptedConnection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n")
        while True:
            await connection.send(b"x")
            await asyncio.sleep(0.01)

    async with asyncio.timeout(20), ScriptedUpstream(drips) as upstream:
        engine = Upstream(UpstreamAddress("gpu0", upstream.url), TransportTimeouts())
        changes: list[str] = []
        rules = ProbeRules(interval_seconds=0.1, fail_after=1)
        probe = HealthProbe(
            engine,
            rules,
            lambda healthy, why: changes.append(why),
            lambda: None,
            SystemClock(),
            lambda since: False,
        )
        await probe.probe()
        assert changes == ["no whole answer from /health within 0.1 s"]
        await upstream.all_closed()
        await engine.aclose()


@pytest.mark.anyio
async def test_a_refused_connection() -> None:
    """Nobody listens: that is an answer, too."""
    async with ScriptedUpstream(lambda connection: asyncio.sleep(0)) as upstream:
        url = upstream.url
    engine = Upstream(UpstreamAddress("gpu0", url), TransportTimeouts())
    changes: list[bool] = []
    probe = HealthProbe(
        engine,
        ProbeRules(),
        lambda healthy, why: changes.append(healthy),
        lambda: None,
        SystemClock(),
        lambda since: True,
    )
    await probe.probe()
    assert changes == [False]


@pytest.mark.anyio
async def test_late_from_the_start() -> None:
    """It takes as many as later; one that says no counts at once, also after late ones."""
    async with probed(fail_after=3) as engine:
        assert await engine.probes(LATE, LATE)
        assert not await engine.probes(LATE)
    async with probed(fail_after=3) as engine:
        assert await engine.probes(LATE)
        assert not await engine.probes(BROKEN)


@pytest.mark.anyio
async def test_which_probes_pass() -> None:
    """Told are those that pass and change nothing: not the one that brings the engine back, no late one that
    is excused, and none before it is back."""
    async with probed(fail_after=1, pass_after=2) as engine:
        engine.heard = True
        await engine.probes(OK, OK, LATE, OK)
        assert engine.passed == 3
        await engine.probes(BROKEN, OK, OK)
        assert [healthy for healthy, _ in engine.changes] == [False, True]
        assert engine.passed == 3
        await engine.probes(OK)
        assert engine.passed == 4


@pytest.mark.anyio
async def test_late_while_answers_come() -> None:
    """A busy engine is left alone while it is heard of; once it is silent its probes count again."""
    async with probed(fail_after=2) as engine:
        engine.heard = True
        assert await engine.probes(LATE, LATE, LATE)
        engine.heard = False
        assert await engine.probes(LATE)
        engine.heard = True
        assert await engine.probes(LATE)
        engine.heard = False
        assert await engine.probes(LATE)
        assert not await engine.probes(LATE)
        assert [healthy for healthy, _ in engine.changes] == [False]


@pytest.mark.anyio
async def test_what_an_engine_says_of_itself_counts_though_answers_come() -> None:
    """One that is being taken out of service fails its probes while its last streams run on."""
    async with probed(fail_after=2) as engine:
        engine.heard = True
        assert not await engine.probes(OK, BROKEN, BROKEN)


@pytest.mark.anyio
async def test_answers_do_not_bring_one_back() -> None:
    """Streams that were begun before say nothing of new requests."""
    async with probed(fail_after=1) as engine:
        engine.heard = True
        assert not await engine.probes(BROKEN, LATE, LATE)
        assert await engine.probes(OK)


@pytest.mark.anyio
async def test_probes_go_on() -> None:
    """At their pace, until the task is cancelled."""
    async with probed(interval_seconds=0.01) as engine:
        task = asyncio.create_task(engine.probe.run())
        await until(lambda: len(engine.upstream.requests) >= 5)
        engine.answer = BROKEN
        await until(lambda: engine.changes != [])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(engine.upstream.connections) == 1
