"""The policy's driver on real time: waiting requests ↔ decisions, and one timer.

Every call goes straight into the façade and returns; whoever is decided about meanwhile has its
`on_decision` called within the same turn of the event loop. A `Permit` ties a lease to its one ending.
"""

import asyncio
from collections.abc import Callable, Mapping

from gateway.policy.admission import NOTHING_DELIVERED, Admission, Delivered
from gateway.policy.budget_part import Parts
from gateway.policy.clock import NANOSECONDS_PER_SECOND, NEVER, Clock
from gateway.policy.control_signals import Measured
from gateway.policy.engine_load import EngineLoad
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Ask, Refusal, Stage, Ticket

OnDecision = Callable[[Ticket], None]

EARLY_NS = 1_000_000
"""uvloop counts in whole milliseconds and may call a timer half of one early. A wake-up before its time does
nothing but book the next one, so a timer is set this much later."""


class Refused(Exception):
    """The policy said no to a request."""

    def __init__(self, ticket: Ticket, refusal: Refusal) -> None:
        super().__init__(refusal.detail)
        self.ticket = ticket
        self.refusal = refusal


class Permit:
    """A dispatched request's right to its place. It ends exactly once; later calls do nothing."""

    __slots__ = ("_gate", "ticket")

    def __init__(self, gate: "AdmissionGate", ticket: Ticket) -> None:
        self._gate = gate
        self.ticket = ticket

    @property
    def upstream(self) -> str:
        name: str = self.ticket.upstream.name
        return name

    @property
    def engine(self) -> tuple[str, str]:
        """Name and address of the upstream."""
        parameters = self.ticket.upstream.parameters
        return parameters.name, parameters.address

    def first_token(self) -> None:
        self._gate.first_token(self.ticket)

    def finish(self, outcome: Outcome, delivered: Delivered = NOTHING_DELIVERED) -> None:
        self._gate.finish(self.ticket, outcome, delivered)


class AdmissionGate:
    def __init__(
        self,
        admission: Admission,
        clock: Clock,
        loop: asyncio.AbstractEventLoop | None = None,
        timer_slack_ns: int = EARLY_NS,
    ) -> None:
        self.admission = admission
        self._clock = clock
        self._loop = loop or asyncio.get_running_loop()
        self._timer_slack_ns = timer_slack_ns
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = NEVER

    # ------------------------------------------------------------------ requests

    def submit(self, ask: Ask, on_decision: OnDecision) -> Ticket:
        """Offer a request; `on_decision` is called once with the ticket, perhaps before this returns.

        Raises RequestTooLong, and KeyError for a model that nobody serves.
        """
        ticket = self.admission.submit(ask)
        ticket.waiter = on_decision
        self._settle()
        return ticket

    async def acquire(self, ask: Ask) -> Permit:
        """Wait for a place. Raises Refused; if the waiting task is cancelled nothing stays taken."""
        decided: asyncio.Future[None] = self._loop.create_future()
        ticket = self.submit(ask, _resolving(decided))
        return await self._decision(ticket, decided)

    async def requeue(self, permit: Permit, *, reached: bool = True) -> Permit:
        """The engine had no room for it, or was not `reached`: wait for another place. Raises Refused; see
        `acquire`."""
        decided: asyncio.Future[None] = self._loop.create_future()
        ticket = permit.ticket
        ticket.waiter = _resolving(decided)
        self.admission.requeue(ticket, reached=reached)
        self._settle()
        return await self._decision(ticket, decided)

    async def _decision(self, ticket: Ticket, decided: asyncio.Future[None]) -> Permit:
        if not decided.done():
            try:
                await decided
            except asyncio.CancelledError:
                self.abandon(ticket)
                raise
        if ticket.refusal is not None:
            raise Refused(ticket, ticket.refusal)
        return Permit(self, ticket)

    def abandon(self, ticket: Ticket) -> None:
        """The client left before anything was sent to an engine, waiting or just dispatched."""
        ticket.waiter = None
        if ticket.stage is Stage.DISPATCHED:
            self.finish(ticket, Outcome.CLIENT_GONE_QUEUED)
        else:
            self.admission.cancel(ticket)
            self._settle()

    def first_token(self, ticket: Ticket) -> None:
        self.admission.first_token(ticket)
        self._settle()

    def finish(self, ticket: Ticket, outcome: Outcome, delivered: Delivered = NOTHING_DELIVERED) -> None:
        self.admission.finish(ticket, outcome, delivered)
        self._settle()

    # ------------------------------------------------------------------ operations

    def set_upstream_health(self, name: str, healthy: bool) -> None:
        self.admission.set_upstream_health(name, healthy)
        self._settle()

    def set_upstream_trial(self, name: str) -> None:
        self.admission.set_upstream_trial(name)
        self._settle()

    def engine_load_told(self, name: str, load: EngineLoad) -> None:
        self.admission.engine_load_told(name, load)
        self._settle()

    def reconfigure(self, parameters: PolicyParameters) -> None:
        """See `Admission.reconfigure`."""
        self.admission.reconfigure(parameters)
        self._settle()

    def take_parts(self, parts: Parts) -> None:
        """See `Admission.take_parts`."""
        self.admission.take_parts(parts)
        self._settle()

    def pooled(self, measured: Mapping[str, Measured]) -> None:
        """See `Admission.pooled`."""
        self.admission.pooled(measured)
        self._settle()

    def advance(self) -> None:
        """Bring the policy up to the present, and tell those decided about by it."""
        self.admission.advance()
        self._settle()

    def drain(self) -> None:
        self.admission.drain()
        self._settle()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ------------------------------------------------------------------ inside

    def _settle(self) -> None:
        """Tell those decided about, and see to the next wake-up."""
        while decisions := self.admission.take_decisions():
            for ticket in decisions:
                waiter, ticket.waiter = ticket.waiter, None
                if waiter is not None:
                    waiter(ticket)
        deadline = self.admission.next_deadline()
        if deadline < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            delay_ns = max(deadline - self._clock.now(), 0) + self._timer_slack_ns
            self._timer_at = deadline
            self._timer = self._loop.call_later(delay_ns / NANOSECONDS_PER_SECOND, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._timer_at = NEVER
        self.advance()


def _resolving(decided: asyncio.Future[None]) -> OnDecision:
    def on_decision(_: Ticket) -> None:
        if not decided.done():
            decided.set_result(None)

    return on_decision
