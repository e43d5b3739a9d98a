"""Places at one upstream: who holds a lease, and whether one more may be sent there now.

A lease is held from dispatch to the last byte. Limits (design names): `max_in_flight` and
`max_in_flight_tokens`, of which a class may fill ⌈holdback × limit⌉; below P0 the long-prompt lane, its
duty, and the pending prefill, so that waiting happens here in order and not inside a FIFO engine.

Where several gateways share the engine each has a part of the first two. Lane, duty and pending prefill are
each gateway's own.
"""

from enum import Enum
from functools import lru_cache
from math import ceil

from gateway.policy.clock import NANOSECONDS_PER_SECOND, NEVER
from gateway.policy.engine_limit import EngineLimit
from gateway.policy.engine_load import EngineLoad, LoadGate
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import SchedulingParameters, UpstreamParameters
from gateway.policy.prefill_model import PrefillModel
from gateway.policy.request import Priority, Ticket

P0 = Priority.P0
QUEUE_FULL_PAUSE_NS = NANOSECONDS_PER_SECOND // 4
"""After an engine sent a request back, or was not reached: so long, or until a request there ends, nothing
more is sent."""


class Admits(Enum):
    YES = "yes"
    NO_ROOM = "no room"
    """Slots or tokens are taken; another request's end will free them."""
    NO_PREFILL_ROOM = "no prefill room"
    """The engine still works on prompts sent before."""
    LANE_TAKEN = "lane taken"
    """A long prompt must wait for another one, or for its turn."""
    ENGINE_BUSY = "engine busy"
    """The engine's own load keeps the class out, or it has just sent a request back."""
    DOWN = "down"


class UpstreamSlots:
    def __init__(self, parameters: UpstreamParameters, scheduling: SchedulingParameters) -> None:
        self.name = parameters.name
        self.parameters = parameters
        self._scheduling = scheduling
        self.healthy = True
        self.on_trial = False  # down, but it may get one request to show that it serves
        self._trial_seq: int | None = None  # of that request, while it is in flight
        self.max_in_flight: int | None = parameters.max_in_flight
        self.max_in_flight_tokens: int | None = parameters.max_in_flight_tokens
        self._parts: tuple[int | None, int | None] = (None, None)  # of both, as far as they were told
        self._gateways = 1  # that share them
        self.in_flight = [0, 0, 0]  # per class
        self.in_flight_total = 0
        self.leases: dict[int, Ticket] = {}  # by seq, in the order of dispatch
        self.in_flight_tokens = 0
        self.prefills = 0  # requests without a first token
        self.pending_prefill_tokens = 0
        self.long_prefills = 0  # below P0
        self.next_long_at = 0  # the duty rule's next turn
        self._last_long: tuple[int, int] | None = None  # seq of who took the last turn, and when it had come
        self.prefill = PrefillModel(parameters.tokens_per_second)
        self.load = LoadGate(parameters)
        self.paused_until = 0
        self.engine_limit = EngineLimit()
        self._kv_tokens: int | None = None

    # ------------------------------------------------------------------ may it go?

    def admits(
        self, ticket: Ticket, holdback: float, limited: bool, now: int, lifted: bool = False
    ) -> Admits:
        """Whether the ticket may be sent now. `limited`: a higher class is active, so the long prompts'
        duty applies. `lifted`: a promotion; holdback and pending prefill do not hold it back."""
        if not self.healthy and not self.usable:
            return Admits.DOWN
        if now < self.paused_until:
            return Admits.ENGINE_BUSY
        if ticket.priority is P0:
            return Admits.YES if self._has_room(ticket, 1.0 if lifted else holdback, now) else Admits.NO_ROOM
        if self.load.is_known and self.load.closes(
            ticket.priority, self.prefills, self.in_flight_tokens, now
        ):
            return Admits.ENGINE_BUSY
        if ticket.is_long and not self._lane_free(limited, now):
            return Admits.LANE_TAKEN
        if not self._has_room(ticket, 1.0 if lifted else holdback, now):
            return Admits.NO_ROOM
        if not lifted and not self._has_prefill_room(ticket):
            return Admits.NO_PREFILL_ROOM
        return Admits.YES

    @property
    def usable(self) -> bool:
        """Up, or on trial with nobody there yet to be the trial."""
        return self.healthy or (self.on_trial and self._trial_seq is None)

    @property
    def burden(self) -> tuple[int, bool]:
        """The least goes first. Of two that are equal the one on trial does, or where little is asked it
        would never get the request that brings it back."""
        return self.in_flight_tokens, self.healthy

    @property
    def last_long(self) -> Ticket | None:
        """The long prompt below P0 that was sent last, while it is in flight."""
        return None if self._last_long is None else self.leases.get(self._last_long[0])

    @property
    def full(self) -> bool:
        """Nobody at all can be sent here: a quick look before the closer one of `admits`."""
        return not self.usable or (
            self.max_in_flight is not None and self.in_flight_total >= self.max_in_flight
        )

    def next_change(self, now: int) -> int:
        """When time alone may let somebody in: the long prompts' next turn, the end of a pause, a page
        growing stale. NEVER if it will not."""
        soonest = NEVER
        for at in (self.next_long_at, self.paused_until, self.load.stale_at, self.engine_limit.expires_at):
            if now < at < soonest:
                soonest = at
        return soonest

    def _lane_free(self, limited: bool, now: int) -> bool:
        if self.long_prefills >= self._scheduling.long_prompt_lane:
            return False
        return not limited or now >= self.next_long_at

    def _has_room(self, ticket: Ticket, holdback: float, now: int) -> bool:
        limit = self._places(ticket, now)
        if limit is not None and self.in_flight_total >= _part(holdback, limit):
            return False
        limit = self.max_in_flight_tokens
        if limit is None:
            return True
        if limit == 0:
            return False
        if self.in_flight_tokens + ticket.total_tokens <= _part(holdback, limit):
            return True
        return self.in_flight_total == 0 and self._may_go_alone(limit)

    def _may_go_alone(self, limit: int) -> bool:
        """A request that is too large for the limit goes when nothing else is there. Of several gateways only
        where this one has an equal part of the engine at least: else others are there."""
        whole = self.whole_limits[1]
        return not self._gateways or whole is None or limit >= whole // self._gateways

    def _places(self, ticket: Ticket, now: int) -> int | None:
        """The smaller of the configured limit and the engine's own."""
        configured = self.max_in_flight
        if now >= self.engine_limit.expires_at:
            return configured
        return _smaller(configured, self.engine_limit.at(now, sent_back_before=ticket.requeued))

    def _has_prefill_room(self, ticket: Ticket) -> bool:
        pending = self.pending_prefill_tokens
        return not pending or pending + ticket.input_tokens <= self._scheduling.max_pending_prefill_tokens

    # ------------------------------------------------------------------ the lease

    def lease(self, ticket: Ticket, now: int) -> None:
        if self.on_trial and self._trial_seq is None:
            self._trial_seq = ticket.seq
        ticket.upstream = self
        ticket.dispatched_at = now
        self.in_flight[ticket.priority] += 1
        self.in_flight_total += 1
        self.leases[ticket.seq] = ticket
        self.engine_limit.sent(self.in_flight_total)
        self.in_flight_tokens += ticket.total_tokens
        alone = self.pending_prefill_tokens <= ticket.input_tokens
        ticket.prefilling = True
        ticket.had_engine_alone = alone
        self.prefills += 1
        self.pending_prefill_tokens += ticket.input_tokens
        if ticket.is_long and ticket.priority is not P0:
            self.long_prefills += 1
            self._last_long = ticket.seq, self.next_long_at
            duty = self._scheduling.long_prompt_duty
            prefill_ns = self.prefill.predict_ns(ticket.input_tokens)
            self.next_long_at = now + ceil(prefill_ns / duty) if duty else NEVER

    def prefilled(self, ticket: Ticket) -> None:
        """The first token was seen, or counts as seen. Repeating it changes nothing."""
        if not ticket.prefilling:
            return
        ticket.prefilling = False
        self.prefills -= 1
        self.pending_prefill_tokens -= ticket.input_tokens
        if ticket.is_long and ticket.priority is not P0:
            self.long_prefills -= 1

    def release(self, ticket: Ticket) -> None:
        self.prefilled(ticket)
        if ticket.seq == self._trial_seq:
            self._trial_seq = None
        self.paused_until = 0
        self.in_flight[ticket.priority] -= 1
        self.in_flight_total -= 1
        del self.leases[ticket.seq]
        if ticket.outcome is Outcome.COMPLETED:
            self.engine_limit.completed()
        self.in_flight_tokens -= ticket.total_tokens

    def sent_back(self, ticket: Ticket, now: int, *, full: bool) -> None:
        """The engine ran nothing of it, because it was `full` or not reached: the lease ends, the long
        prompts' turn that it took comes back, and nothing more is sent there for a moment."""
        sent_before = list(self.leases).index(ticket.seq)
        self.release(ticket)
        if full and self.in_flight_total:
            self.engine_limit.sent_back(sent_before, now)
        elif full:
            self.engine_limit.forget()  # it takes not even one: that has another cause
        self.paused_until = now + QUEUE_FULL_PAUSE_NS
        if self._last_long is not None and self._last_long[0] == ticket.seq:
            self.next_long_at = self._last_long[1]

    # ------------------------------------------------------------------ up, down, on trial

    def set_health(self, healthy: bool) -> None:
        self.healthy = healthy
        self.on_trial = False
        self.engine_limit.forget()

    def begin_trial(self) -> None:
        """The next request is a trial, and the only one until it has ended, a trial is begun again beside it,
        or the health is set."""
        self.healthy = False
        self.on_trial = True
        self._trial_seq = None

    # ------------------------------------------------------------------ what the engine says

    def told(self, load: EngineLoad, now: int) -> None:
        """Its metrics page."""
        self.load.told(load, self.prefills, self.in_flight_tokens, now)
        self._kv_tokens = load.kv_tokens or self._kv_tokens
        self._set_limits()

    def reconfigure(self, parameters: UpstreamParameters, scheduling: SchedulingParameters) -> None:
        self.parameters = parameters
        self._scheduling = scheduling
        self.prefill.reconfigure(parameters.tokens_per_second)
        self.load.reconfigure(parameters)
        self._set_limits()

    def tokens_by_class(self) -> list[int]:
        """In flight."""
        tokens = [0, 0, 0]
        for ticket in self.leases.values():
            tokens[ticket.priority] += ticket.total_tokens
        return tokens

    def take_parts(self, places: int | None, tokens: int | None, gateways: int) -> None:
        """What this gateway has of the engine's limits, of which others have the rest; of what it was not yet
        told of limit / gateways, and one at least."""
        self._parts = places, tokens
        self._gateways = gateways
        self._set_limits()

    @property
    def whole_limits(self) -> tuple[int | None, int | None]:
        """In requests and in tokens, for all who share the engine. The KV size is the limit in tokens where
        none is configured."""
        tokens = self.parameters.max_in_flight_tokens
        return self.parameters.max_in_flight, self._kv_tokens if tokens is None else tokens

    def _set_limits(self) -> None:
        self.max_in_flight, self.max_in_flight_tokens = (
            self._of_it(whole, part) for whole, part in zip(self.whole_limits, self._parts, strict=True)
        )

    def _of_it(self, whole: int | None, part: int | None) -> int | None:
        if not whole:
            return whole
        return min(whole, max(whole // self._gateways, 1) if part is None else part)

    @property
    def tokens_per_second(self) -> float:
        return self.parameters.tokens_per_second

    def __repr__(self) -> str:
        return f"<UpstreamSlots {self.name} in_flight={self.in_flight}>"


def _smaller(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


@lru_cache
def _part(holdback: float, limit: int) -> int:
    """⌈fraction × limit⌉, at least 1 of a limit that lets anything pass."""
    return max(ceil(holdback * limit - 1e-9), 1) if limit else 0
