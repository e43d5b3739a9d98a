"""The asyncio driver: waiting tasks, cancellation in every turn, its one timer, and permits that end once."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gateway.policy.admission import Admission, Delivered, RequestTooLong
from gateway.policy.clock import ManualClock
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import PRIORITIES, Priority, Stage, Ticket, Usage
from gateway.runtime.admission_gate import EARLY_NS, AdmissionGate, Permit, Refused
from tests.support.drivers import Endings
from tests.support.policy_settings import P0, P1, P2, ask, nanoseconds, policy, upstream
from tests.support.virtual_loop import NothingDue, VirtualLoop, virtual_loop

DONE = Delivered(Usage(1, 0))
TIGHT = {"burst_seconds": 0.5, "min_burst_tokens": 0}
SLOW = upstream(max_in_flight=1, tokens_per_second=1000)


class Bench:
    """A gate on a loop that jumps, and what it told."""

    def __init__(self, parameters: PolicyParameters, loop: VirtualLoop) -> None:
        self.loop, self.clock = loop, loop.clock
        self.endings = Endings()
        self.admission = Admission(parameters, loop.clock, self.endings)
        self.gate = AdmissionGate(self.admission, loop.clock, loop)

    def acquire(
        self, name: str, priority: Priority = P1, tokens: int = 1, **given: Any
    ) -> "asyncio.Task[Permit]":
        return self.loop.create_task(self.gate.acquire(ask(name, priority, tokens, **given)))

    @property
    def slots(self) -> Any:
        return self.admission.pools[0].slots[0]

    def waiting(self) -> int:
        return sum(self.admission.pools[0].depth(p) for p in PRIORITIES)

    def quiet(self) -> None:
        assert self.waiting() == 0
        assert self.slots.in_flight_total == self.slots.in_flight_tokens == 0


async def turns(count: int = 3) -> None:
    """Let everything that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


Scene = Callable[[Bench], Coroutine[Any, Any, None]]


def play(parameters: PolicyParameters, scene: Scene, loop_type: type[VirtualLoop] = VirtualLoop) -> Bench:
    with virtual_loop(loop_type(ManualClock())) as loop:
        bench = Bench(parameters, loop)
        loop.run_until_complete(scene(bench))
        bench.gate.close()
        return bench


def test_a_free_place_is_given_at_once() -> None:
    """With a place free acquire returns without waiting, and the permit names its upstream."""

    async def scene(b: Bench) -> None:
        permit = await b.gate.acquire(ask("a", P0))
        assert permit.upstream == "gpu0"
        assert b.slots.in_flight_total == 1
        permit.first_token()
        permit.finish(Outcome.COMPLETED, DONE)
        b.quiet()

    assert [r.outcome for r in play(policy(), scene).endings.records] == [Outcome.COMPLETED]


def test_waiting_tasks_go_in_the_policys_order() -> None:
    """Each end lets the next one go, higher classes first."""

    async def scene(b: Bench) -> None:
        order: list[str] = []

        async def client(name: str, priority: Priority) -> None:
            permit = await b.gate.acquire(ask(name, priority))
            order.append(name)
            await asyncio.sleep(1)
            permit.finish(Outcome.COMPLETED, DONE)

        names = [("first", P2), ("low", P2), ("normal", P1), ("high", P0)]
        await asyncio.gather(*(client(*n) for n in names))
        assert order == ["first", "high", "normal", "low"]
        assert b.clock.now() == pytest.approx(nanoseconds(4), abs=10)
        b.quiet()

    play(policy(), scene)


def test_a_refusal_is_raised_with_its_reason() -> None:
    """One who waited too long gets Refused, with the ticket and the refusal."""

    async def scene(b: Bench) -> None:
        held = await b.gate.acquire(ask("held", P0))
        with pytest.raises(Refused) as error:
            await b.gate.acquire(ask("late", P1))
        assert error.value.refusal.outcome is Outcome.QUEUE_TIMEOUT
        assert error.value.ticket.stage is Stage.ENDED
        assert b.clock.now() == pytest.approx(nanoseconds(2), abs=2 * EARLY_NS)
        held.finish(Outcome.COMPLETED, DONE)
        b.quiet()

    play(policy(wait=2), scene)


def test_errors_at_the_door_leave_nothing() -> None:
    """A request too long, or for a model nobody serves, raises and takes no place."""

    async def scene(b: Bench) -> None:
        with pytest.raises(RequestTooLong):
            await b.gate.acquire(ask("a", P0, 101))
        with pytest.raises(KeyError):
            await b.gate.acquire(ask("b", P0, model="unknown"))
        b.quiet()

    play(policy(upstream(models=("m",)), capacity={"max_request_tokens": 100}), scene)


def test_cancelling_a_waiting_task_takes_it_out_of_line() -> None:
    """A waiting acquire that is cancelled leaves nothing behind, and the next one moves up."""

    async def scene(b: Bench) -> None:
        held = await b.gate.acquire(ask("held", P0))
        gone, kept = b.acquire("gone"), b.acquire("kept")
        await turns()
        gone.cancel()
        await turns()
        assert gone.cancelled()
        assert b.waiting() == 1
        held.finish(Outcome.COMPLETED, DONE)
        (await kept).finish(Outcome.COMPLETED, DONE)
        b.quiet()

    outcomes = {r.request_id: r.outcome for r in play(policy(), scene).endings.records}
    assert outcomes["gone"] is Outcome.CLIENT_GONE_QUEUED


@pytest.mark.parametrize("grant_first", [True, False])
def test_cancel_and_grant_in_one_turn(grant_first: bool) -> None:
    """A place freed in the turn in which its next holder is cancelled goes to the one after."""

    async def scene(b: Bench) -> None:
        held = await b.gate.acquire(ask("a", P1))
        second, third = b.acquire("b"), b.acquire("c")
        await turns()
        if grant_first:
            held.finish(Outcome.COMPLETED, DONE)
            second.cancel()
        else:
            second.cancel()
            held.finish(Outcome.COMPLETED, DONE)
        permit = await asyncio.wait_for(third, 0.05)
        assert second.cancelled()
        assert b.slots.in_flight_total == 1
        permit.finish(Outcome.COMPLETED, DONE)
        b.quiet()

    ended = {r.request_id: r for r in play(policy(), scene).endings.records}
    assert len(ended) == 3
    assert ended["b"].outcome is Outcome.CLIENT_GONE_QUEUED
    assert ended["b"].charged == 0


def test_cancel_and_refusal_in_one_turn() -> None:
    """One who is refused and cancelled in one turn has ended once, as refused."""

    async def scene(b: Bench) -> None:
        held = await b.gate.acquire(ask("held", P0))
        task = b.acquire("b")
        await turns()
        b.gate.drain()
        task.cancel()
        await turns()
        assert task.cancelled()
        held.finish(Outcome.COMPLETED, DONE)
        b.quiet()

    outcomes = [r.outcome for r in play(policy(), scene).endings.records]
    assert outcomes == [Outcome.REJECTED_DRAINING, Outcome.COMPLETED]


def test_a_client_that_leaves_just_as_its_tokens_have_come() -> None:
    """Leaving while the timer that would pay it is still to run takes no place and costs nothing."""

    async def scene(b: Bench) -> None:
        first = await b.gate.acquire(ask("a", P0, 300))
        first.finish(Outcome.COMPLETED, Delivered(Usage(300, 0)))
        task = b.acquire("b", P0, 100)
        await turns()
        assert b.waiting() == 1
        b.clock.advance(0.2)  # the loop was busy; its timer has not run
        task.cancel()
        await turns()
        b.quiet()
        permit = await b.gate.acquire(ask("c", P0, 100))
        permit.finish(Outcome.COMPLETED, Delivered(Usage(100, 0)))

    ended = {r.request_id: r for r in play(policy(SLOW, capacity=TIGHT), scene).endings.records}
    assert ended["b"].outcome is Outcome.CLIENT_GONE_QUEUED
    assert ended["b"].charged == 0
    assert ended["c"].queue_wait_ns == 0


def test_a_late_loop_does_not_serve_one_whose_time_is_over() -> None:
    """A place freed after a wait has ended does not go to the one who waited, though its timer is late."""

    async def scene(b: Bench) -> None:
        held = await b.gate.acquire(ask("held", P0))
        task = b.acquire("b")
        await turns()
        b.clock.advance(2.5)
        held.finish(Outcome.COMPLETED, DONE)
        with pytest.raises(Refused) as error:
            await task
        assert error.value.refusal.outcome is Outcome.QUEUE_TIMEOUT
        b.quiet()

    play(policy(wait=2), scene)


def test_a_permit_ends_once() -> None:
    """Only the first end of a permit counts: one record, one settlement, one place."""

    async def scene(b: Bench) -> None:
        one = await b.gate.acquire(ask("a", P0, 100))
        two = await b.gate.acquire(ask("b", P0, 100))
        one.finish(Outcome.UPSTREAM_ABORTED, Delivered(Usage(50, 0)))
        one.finish(Outcome.COMPLETED, Delivered(Usage(999, 0)))
        one.first_token()
        b.gate.abandon(one.ticket)
        assert b.slots.in_flight_total == 1
        two.finish(Outcome.COMPLETED)
        two.finish(Outcome.COMPLETED)
        b.quiet()

    bench = play(policy(upstream(max_in_flight=2, tokens_per_second=1000), capacity=TIGHT), scene)
    assert [(r.outcome, r.charged) for r in bench.endings.records] == [
        (Outcome.UPSTREAM_ABORTED, 50_000),
        (Outcome.COMPLETED, 0),
    ]
    assert bench.admission.pools[0].buckets.level_tokens(P0) == 250


def test_abandoning_a_dispatched_request_gives_everything_back() -> None:
    """A client that leaves before anything was sent to the engine pays nothing."""

    async def scene(b: Bench) -> None:
        permit = await b.gate.acquire(ask("a", P0, 100))
        b.gate.abandon(permit.ticket)
        b.quiet()

    bench = play(policy(SLOW, capacity=TIGHT), scene)
    assert [(r.outcome, r.charged) for r in bench.endings.records] == [(Outcome.CLIENT_GONE_QUEUED, 0)]
    assert bench.admission.pools[0].buckets.level_tokens(P0) == 300


# ---------------------------------------------------------------------- the timer


def timers(loop: VirtualLoop) -> list[asyncio.TimerHandle]:
    return [handle for handle in loop._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]


def test_one_timer_for_everybody() -> None:
    """However many wait, one timer runs, set for the first of their deadlines, and none when nobody waits."""

    async def scene(b: Bench) -> None:
        held = await b.gate.acquire(ask("held", P0))
        assert timers(b.loop) == []
        tasks = [b.acquire(f"{i}", P1, timeout=100 - i) for i in range(50)]
        await turns()
        (timer,) = timers(b.loop)
        assert timer.when() == pytest.approx(51, abs=2 * EARLY_NS / 1e9)
        for task in tasks:
            task.cancel()
        held.finish(Outcome.COMPLETED, DONE)
        await turns()
        await asyncio.sleep(100)
        assert timers(b.loop) == []
        b.quiet()

    play(policy(), scene)


def test_an_earlier_deadline_moves_the_timer() -> None:
    """Each request ends at its own time, in whatever order they came."""

    async def scene(b: Bench) -> None:
        held = await b.gate.acquire(ask("held", P0))
        ended: dict[str, float] = {}

        async def client(name: str, seconds: float) -> None:
            with pytest.raises(Refused):
                await b.gate.acquire(ask(name, P1, timeout=seconds))
            ended[name] = b.loop.time()

        await asyncio.gather(*(client(f"{t}", t) for t in (5, 3, 4, 1, 2)))
        assert ended == pytest.approx({"1": 1, "2": 2, "3": 3, "4": 4, "5": 5}, abs=2 * EARLY_NS / 1e9)
        held.finish(Outcome.COMPLETED, DONE)

    play(policy(), scene)


class HastyLoop(VirtualLoop):
    """Calls every timer at nine tenths of its time."""

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return super().call_later(delay * 0.9, callback, *args, context=context)


def test_timers_called_early_do_no_harm() -> None:
    """On a loop that calls its timers early nobody is refused or paid before the time, nor much after it."""

    async def scene(b: Bench) -> None:
        first = await b.gate.acquire(ask("a", P0, 300))
        first.finish(Outcome.COMPLETED, Delivered(Usage(300, 0)))
        paid = await b.gate.acquire(ask("b", P0, 120))
        assert paid.ticket.dispatched_at == pytest.approx(nanoseconds(0.12), abs=2 * EARLY_NS)
        assert paid.ticket.dispatched_at >= nanoseconds(0.12)
        with pytest.raises(Refused):
            await b.gate.acquire(ask("c", P0, 1, timeout=1.0))
        prefill = paid.ticket.upstream.prefill.predict_ns(1)  # the client needs that of its time-out
        late = b.clock.now() - (nanoseconds(1.12) - prefill)
        assert 0 <= late <= 4 * EARLY_NS
        paid.finish(Outcome.COMPLETED, DONE)
        b.quiet()

    play(policy(SLOW, capacity=TIGHT), scene, HastyLoop)


def test_advance_called_early_and_often_changes_nothing() -> None:
    """Any number of needless wake-ups leaves the decisions and their instants as they are."""

    def run(nudges: int) -> list[tuple[int, str]]:
        told: list[tuple[int, str]] = []

        async def scene(b: Bench) -> None:
            def decided(ticket: Ticket) -> None:
                told.append((b.clock.now(), f"{ticket.ask.request_id} {ticket.stage.value}"))

            for i in range(nudges):
                b.loop.call_at(i * 0.0013, b.gate._wake)
            for i in range(6):
                b.gate.submit(ask(f"{i}", PRIORITIES[i % 3], 100), decided)
            await asyncio.sleep(3)

        play(policy(upstream(max_in_flight=None, tokens_per_second=1000), capacity=TIGHT, wait=1), scene)
        return told

    plain = run(0)
    assert len(plain) == 6
    nudged = run(997)
    assert [what for _, what in plain] == [what for _, what in nudged]
    for (one, _), (other, _) in zip(plain, nudged, strict=True):
        assert abs(one - other) <= 2 * EARLY_NS


def test_closing_takes_the_timer_away() -> None:
    """After close no timer is left to run."""

    async def scene(b: Bench) -> None:
        await b.gate.acquire(ask("held", P0))
        b.gate.submit(ask("b", P1), lambda _: None)
        assert len(timers(b.loop)) == 1
        b.gate.close()
        assert timers(b.loop) == []

    play(policy(wait=2), scene)


def test_a_decision_may_cause_the_next_one() -> None:
    """A callback that ends its request at once lets the next go in the same turn, a thousand deep."""

    async def scene(b: Bench) -> None:
        told: list[str] = []

        def decided(ticket: Ticket) -> None:
            told.append(ticket.ask.request_id)
            b.loop.call_soon(b.gate.finish, ticket, Outcome.COMPLETED, DONE)

        for i in range(1000):
            b.gate.submit(ask(f"{i}", P1), decided)
        await turns(1010)
        assert told == [f"{i}" for i in range(1000)]
        b.quiet()

    play(policy(), scene)


def test_health_and_drain_reach_those_who_wait() -> None:
    """An upstream that comes back serves, and draining refuses, in the turn in which they are told."""

    async def scene(b: Bench) -> None:
        b.gate.set_upstream_health("gpu0", False)
        served, refused = b.acquire("served", P0), b.acquire("refused", P1)
        await turns()
        b.gate.set_upstream_health("gpu0", True)
        permit = await asyncio.wait_for(served, 0.01)
        b.gate.drain()
        with pytest.raises(Refused) as error:
            await asyncio.wait_for(refused, 0.01)
        assert error.value.refusal.outcome is Outcome.REJECTED_DRAINING
        permit.finish(Outcome.COMPLETED, DONE)
        b.quiet()

    play(policy(), scene)


# ---------------------------------------------------------------------- interleavings


@pytest.mark.parametrize(("seed", "places"), [(1, 1), (2, 2), (3, 3), (4, 5)])
def test_random_interleavings(seed: int, places: int) -> None:
    """Over two thousand steps of acquire, release, cancel and time-out free + held = places, and nobody
    waits while a place is free."""
    chance = random.Random(seed)

    async def scene(b: Bench) -> None:
        tasks: list[asyncio.Task[Permit]] = []
        held: list[Permit] = []

        def release() -> None:
            held.pop(chance.randrange(len(held))).finish(Outcome.COMPLETED, DONE)

        def cancel() -> None:
            chance.choice(tasks).cancel()

        for step in range(500):
            for _ in range(chance.randrange(1, 4)):  # several things in one turn of the loop
                what = chance.choices(["acquire", "release", "cancel"], [5, 4, 2])[0]
                if what == "acquire" and len(tasks) < 12:
                    timeout = chance.choice([None, 0.002, 0.02])
                    tasks.append(
                        b.acquire(f"{step} {len(tasks)}", chance.choice(PRIORITIES), timeout=timeout)
                    )
                elif what == "release" and held:
                    release()
                elif what == "cancel" and tasks:
                    cancel()
            if chance.random() < 0.2:
                await asyncio.sleep(chance.choice([0.001, 0.004, 0.03]))
            await turns(4)
            still = []
            for task in tasks:
                if not task.done():
                    still.append(task)
                elif not task.cancelled() and task.exception() is None:
                    held.append(task.result())
            tasks = still
            assert b.slots.in_flight_total == len(held) <= places
            assert b.waiting() == len(tasks)
            assert not tasks or len(held) == places
        for task in tasks:
            task.cancel()
        await turns(4)
        while held:
            release()
        b.quiet()

    bench = play(policy(upstream(max_in_flight=places), classes={P2: {"holdback": 1.0}}), scene)
    assert len(bench.endings.records) == len({r.request_id for r in bench.endings.records})


# ---------------------------------------------------------------------- the loop itself


def test_the_virtual_loop_jumps() -> None:
    """Hours pass at once, timers run in order, and a loop in which nothing is due says so."""
    with virtual_loop() as loop:
        told: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            told.append((name, loop.time()))

        async def both() -> None:
            await asyncio.gather(sleeper("late", 7200), sleeper("early", 0.000_000_001))

        loop.run_until_complete(both())
        assert told == [("early", 1e-9), ("late", 7200.0)]
        assert loop.clock.now() == nanoseconds(7200)
        with pytest.raises(NothingDue):
            loop.run_until_complete(loop.create_future())
