"""The two drivers of the policy behind one face, so that one story runs under both.

A driver books actions at virtual times, plays the engine where asked to (`service`), and keeps a log of
every decision: (nanoseconds, name of the request, what was decided).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from gateway.policy.admission import NOTHING_DELIVERED, Admission, Delivered
from gateway.policy.clock import NANOSECONDS_PER_SECOND, ManualClock
from gateway.policy.engine_load import EngineLoad
from gateway.policy.events import Observer, RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import PRIORITIES, Priority, Stage, Ticket, Usage
from gateway.runtime.admission_gate import AdmissionGate
from gateway.simulator.virtual_time import VirtualGate, VirtualTime
from tests.support.policy_settings import ask, nanoseconds
from tests.support.virtual_loop import VirtualLoop

DISPATCHED, PROMOTED = "dispatched", "promoted"
Decision = tuple[int, str, str]
A_HAIR = 2e-10  # seconds; less than half a nanosecond
Service = Callable[[Ticket], tuple[float, float] | None]
"""Seconds from dispatch to the first token and to the end; None = the story ends it."""


class Endings(Observer):
    """Remembers the record of every request that ended, promotions, and engines that were full."""

    def __init__(self) -> None:
        self.records: list[RequestEnded] = []
        self.promotions: list[Priority] = []
        self.full: list[str] = []

    def record(self, name: str) -> RequestEnded:
        """The one record of that request."""
        (found,) = (r for r in self.records if r.request_id == name)
        return found

    def ended(self, event: RequestEnded) -> None:
        self.records.append(event)

    def promoted(self, priority: Priority) -> None:
        self.promotions.append(priority)

    def queue_full(self, upstream: str, at: int) -> None:
        self.full.append(upstream)


class Driver(ABC):
    def __init__(self, parameters: PolicyParameters, clock: ManualClock) -> None:
        self.clock = clock
        self.endings = Endings()
        self.admission = Admission(parameters, clock, self.endings)
        self.tickets: dict[str, Ticket] = {}
        self.log: list[Decision] = []
        self.service: Service | None = None
        self.on_end: Callable[[Ticket], None] | None = None

    @property
    def seconds(self) -> float:
        return self.clock.now() / NANOSECONDS_PER_SECOND

    @property
    def pool(self) -> Any:
        return self.admission.pools[0]

    # ------------------------------------------------------------------ what a story does

    def submit(self, name: str, priority: Priority, tokens: int = 1, **given: Any) -> Ticket:
        ticket = self._submit(ask(name, priority, tokens, **given))
        self.tickets[name] = ticket
        return ticket

    def finish(
        self,
        name: str,
        used: int | None = None,
        output: int = 0,
        outcome: Outcome = Outcome.COMPLETED,
        delivered: Delivered | None = None,
    ) -> None:
        """`used` input tokens; by default what was asked for; −1 means that the engine never began."""
        ticket = self.tickets[name]
        if delivered is None:
            tokens = ticket.ask.input_tokens if used is None else used
            delivered = NOTHING_DELIVERED if tokens < 0 else Delivered(Usage(tokens, output))
        self._finish(ticket, outcome, delivered)
        if self.on_end is not None:
            self.on_end(ticket)

    def first_token(self, name: str) -> None:
        self._first_token(self.tickets[name])

    def cancel(self, name: str) -> None:
        self._cancel(self.tickets[name])

    def requeue(self, name: str, reached: bool = True) -> None:
        """Its engine had no room for it, or was not reached."""
        self._requeue(self.tickets[name], reached)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.clock.now() + nanoseconds(seconds), action)

    # ------------------------------------------------------------------ decisions

    def decided(self, ticket: Ticket) -> None:
        name = ticket.ask.request_id
        self.tickets[name] = ticket
        if ticket.refusal is not None:
            self.log.append((self.clock.now(), name, ticket.refusal.outcome.value))
            if self.on_end is not None:
                self.on_end(ticket)
            return
        what = PROMOTED if ticket.promoted else DISPATCHED
        self.log.append((self.clock.now(), name, f"{what}@{ticket.upstream.name}"))
        times = self.service(ticket) if self.service is not None else None
        if times is not None:
            first, end = times
            if first < end:
                self.after(first, lambda: self.first_token(name))
            self.after(end, lambda: self.finish(name))

    # ------------------------------------------------------------------ what each driver does its own way

    @abstractmethod
    def at(self, time: int, action: Callable[[], None]) -> None: ...

    @abstractmethod
    def run(self, until_seconds: float) -> None: ...

    @abstractmethod
    def _submit(self, request: Any) -> Ticket: ...

    @abstractmethod
    def _finish(self, ticket: Ticket, outcome: Outcome, delivered: Delivered) -> None: ...

    @abstractmethod
    def _first_token(self, ticket: Ticket) -> None: ...

    @abstractmethod
    def _cancel(self, ticket: Ticket) -> None: ...

    @abstractmethod
    def _requeue(self, ticket: Ticket, reached: bool) -> None: ...

    @abstractmethod
    def health(self, name: str, healthy: bool) -> None: ...

    @abstractmethod
    def trial(self, name: str) -> None: ...

    @abstractmethod
    def engine_load(self, name: str, load: EngineLoad) -> None: ...

    @abstractmethod
    def reconfigure(self, parameters: PolicyParameters) -> None: ...

    @abstractmethod
    def drain(self) -> None: ...

    def close(self) -> None:
        return None


class VirtualDriver(Driver):
    def __init__(self, parameters: PolicyParameters) -> None:
        self.time = VirtualTime()
        super().__init__(parameters, self.time.clock)
        self.gate = VirtualGate(self.admission, self.time, self.decided)

    def at(self, time: int, action: Callable[[], None]) -> None:
        self.time.at(time, action)

    def run(self, until_seconds: float) -> None:
        self.time.run(nanoseconds(until_seconds))

    def _submit(self, request: Any) -> Ticket:
        ticket = self.admission.submit(request)
        self.gate.settle()
        return ticket

    def _finish(self, ticket: Ticket, outcome: Outcome, delivered: Delivered) -> None:
        self.admission.finish(ticket, outcome, delivered)
        self.gate.settle()

    def _first_token(self, ticket: Ticket) -> None:
        self.admission.first_token(ticket)
        self.gate.settle()

    def _cancel(self, ticket: Ticket) -> None:
        self.admission.cancel(ticket)
        self.gate.settle()

    def _requeue(self, ticket: Ticket, reached: bool) -> None:
        self.admission.requeue(ticket, reached=reached)
        self.gate.settle()

    def health(self, name: str, healthy: bool) -> None:
        self.admission.set_upstream_health(name, healthy)
        self.gate.settle()

    def trial(self, name: str) -> None:
        self.admission.set_upstream_trial(name)
        self.gate.settle()

    def engine_load(self, name: str, load: EngineLoad) -> None:
        self.admission.engine_load_told(name, load)
        self.gate.settle()

    def reconfigure(self, parameters: PolicyParameters) -> None:
        self.admission.reconfigure(parameters)
        self.gate.settle()

    def drain(self) -> None:
        self.admission.drain()
        self.gate.settle()


class AsyncioDriver(Driver):
    """The asyncio gate on a loop that jumps. Booked actions keep their order at one instant, and come
    before the gate's own timer."""

    def __init__(self, parameters: PolicyParameters) -> None:
        clock = ManualClock()
        super().__init__(parameters, clock)
        self.loop = VirtualLoop(clock)
        self.gate = AdmissionGate(self.admission, clock, self.loop, timer_slack_ns=0)
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._seq = 0
        self._next: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None

    def at(self, time: int, action: Callable[[], None]) -> None:
        self._seq += 1
        entry = (max(time, self.clock.now()), self._seq, action)
        heappush(self._agenda, entry)
        if self._agenda[0] is entry:
            self._arm()

    def _run_due(self) -> None:
        while self._agenda and self._agenda[0][0] <= self.clock.now():
            action = heappop(self._agenda)[2]
            try:
                action()
            except BaseException as error:
                self._failure = self._failure or error
                self.loop.stop()
                return
        if self._agenda:
            self._arm()

    def _arm(self) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next = self.loop.call_at(self._agenda[0][0] / NANOSECONDS_PER_SECOND - A_HAIR, self._run_due)

    def run(self, until_seconds: float) -> None:
        end = nanoseconds(until_seconds)
        self.loop.call_at(end / NANOSECONDS_PER_SECOND + A_HAIR, self.loop.stop)
        self.loop.run_forever()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self.gate.close()
        self.loop.close()

    def _submit(self, request: Any) -> Ticket:
        return self.gate.submit(request, self.decided)

    def _finish(self, ticket: Ticket, outcome: Outcome, delivered: Delivered) -> None:
        self.gate.finish(ticket, outcome, delivered)

    def _first_token(self, ticket: Ticket) -> None:
        self.gate.first_token(ticket)

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.stage not in (Stage.THROTTLED, Stage.READY):
            return
        self.log.append((self.clock.now(), ticket.ask.request_id, Outcome.CLIENT_GONE_QUEUED.value))
        self.gate.abandon(ticket)
        assert ticket.outcome is Outcome.CLIENT_GONE_QUEUED
        if self.on_end is not None:
            self.on_end(ticket)

    def _requeue(self, ticket: Ticket, reached: bool) -> None:
        """What the gate's own `requeue` does, which waits for the decision."""
        ticket.waiter = self.decided
        self.admission.requeue(ticket, reached=reached)
        self.gate._settle()

    def health(self, name: str, healthy: bool) -> None:
        self.gate.set_upstream_health(name, healthy)

    def trial(self, name: str) -> None:
        self.gate.set_upstream_trial(name)

    def engine_load(self, name: str, load: EngineLoad) -> None:
        self.gate.engine_load_told(name, load)

    def reconfigure(self, parameters: PolicyParameters) -> None:
        self.gate.reconfigure(parameters)

    def drain(self) -> None:
        self.gate.drain()


DRIVERS: tuple[type[Driver], ...] = (VirtualDriver, AsyncioDriver)


def assert_same_decisions(one: list[Decision], other: list[Decision]) -> None:
    """The same decisions, in the same order, at the same instants."""
    for a, b in zip(one, other, strict=False):
        assert a == b
    assert len(one) == len(other)


def assert_quiet(driver: Driver) -> None:
    """Nobody waits, nothing is in flight, and every container of the policy is empty."""
    for pool in driver.admission.pools:
        assert [pool.depth(p) for p in PRIORITIES] == [0, 0, 0]
        assert pool.queued_bytes == [0, 0, 0]
        assert pool.room.tickets() == []
        assert [line.total_cost for line in pool.throttled] == [0, 0, 0]
        for slots in pool.slots:
            assert slots.in_flight == [0, 0, 0]
            assert slots.in_flight_total == slots.in_flight_tokens == 0
            assert slots.pending_prefill_tokens == slots.long_prefills == slots.prefills == 0
    assert not driver.admission.tenants.key_places._in_flight
