"""The façade of the policy: submit, first_token, finish, cancel, advance, next_deadline.

Every call is synchronous, reads the injected clock once, and leaves the policy in a settled state. What
was decided meanwhile, for this ticket and for others, is fetched with `take_decisions`: a ticket is now
DISPATCHED (with `ticket.upstream`) or ENDED with `ticket.refusal`. The driver then acts on it. It calls
`advance` when `next_deadline` has come; calling early does no harm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gateway.policy.budget_part import Parts
from gateway.policy.clock import NEVER, Clock
from gateway.policy.control_signals import Measured, Verdict
from gateway.policy.engine_load import EngineLoad
from gateway.policy.events import Observer, Order, RatesChanged, RequestEnded
from gateway.policy.input_estimator import InputEstimator
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import MILLITOKENS, PolicyParameters
from gateway.policy.pool import Pool
from gateway.policy.regrouping import first_pools, regrouped
from gateway.policy.request import PRIORITIES, Ask, Priority, Refusal, Stage, Ticket, Usage
from gateway.policy.slo_monitor import SloMonitor
from gateway.policy.standing import Standing, seen, standing
from gateway.policy.tenant_limits import TenantLimits
from gateway.policy.token_cost import (
    OutputReserve,
    cost_millitokens,
    usage_millitokens,
)
from gateway.policy.upstream_slots import UpstreamSlots

DRAINING = Refusal(Outcome.REJECTED_DRAINING, "the gateway is shutting down")


JUDGES_THE_ENGINE = frozenset(
    {Outcome.COMPLETED, Outcome.CLIENT_GONE_STREAMING, Outcome.CLIENT_STALLED, Outcome.UPSTREAM_TIMEOUT}
)
"""Endings that tell the control loop how an engine bears its load; others have other causes."""


class RequestTooLong(ValueError):
    """A request that can never be paid: waiting cannot help."""


class Delivered(NamedTuple):
    """What a dispatched request got: tokens (None when the engine never began or gave nothing), and the
    stream's last token and largest gap, in nanoseconds."""

    usage: Usage | None = None
    last_token_at: int | None = None
    max_gap_ns: int | None = None


NOTHING_DELIVERED = Delivered()


class Admission:
    def __init__(self, parameters: PolicyParameters, clock: Clock, observer: Observer | None = None) -> None:
        self.parameters = parameters
        self._clock = clock
        self._observer = observer or Observer()
        self.slo_monitor = SloMonitor(parameters.classes, parameters.slo)
        self.input_estimator = InputEstimator()
        self._output_reserves = [OutputReserve(parameters.capacity) for _ in PRIORITIES]
        self.tenants = TenantLimits(parameters, clock.now())
        self._decided: list[Ticket] = []
        self._seq = 0
        self._draining = False
        self._follows = False
        self._parts: Parts | None = None  # as last told, where several gateways share
        now = clock.now()
        self.leaving: list[UpstreamSlots] = []
        """Upstreams that are configured no longer and still serve what they have begun."""
        self.pools = first_pools(parameters, now, self._decide)
        self._slots = _by_name(self.pools)

    # ------------------------------------------------------------------ what drivers call

    def serves(self, model: str) -> bool:
        return self._pool_of(model) is not None

    def submit(self, ask: Ask) -> Ticket:
        """Offer a request. Raises RequestTooLong for one that can never be served, KeyError for a model
        that no upstream serves."""
        now = self._clock.now()
        self._tick(now)
        ticket = Ticket(self._next(), ask, now)
        observed = self.parameters.classes[ask.priority].observe
        self._price(ticket)
        try:
            self._check_size(ticket)
        except RequestTooLong:
            if not observed:
                raise
            ticket.would_be = Outcome.BAD_REQUEST
        ticket.is_long = ask.input_tokens > self.parameters.scheduling.long_prompt_tokens
        for pool in self.pools:
            ticket.route = pool.route(ask.model, ticket.is_long)
            if ticket.route is not None:
                break
        else:
            raise KeyError(ask.model)
        if self._observer.wants_details:
            pool.catch_up(now)
            ticket.seen = seen(pool, now)
        if self._draining:
            self._refuse_at_once(ticket, DRAINING, now)
            return ticket
        refusal = self.tenants.refusal(ticket, now) if ticket.would_be is None else None
        if refusal is not None:  # perhaps only because of some whose time is over by now
            self._advance_to(now)
            refusal = self.tenants.refusal(ticket, now, again=True)
        if refusal is not None and not observed:
            self._refuse_at_once(ticket, refusal, now)
            return ticket
        if refusal is not None:
            ticket.would_be = refusal.outcome
        self.tenants.reserve(ticket, now, charge=ticket.would_be is None)
        pool.submit(ticket, now)
        if ticket.exempt:
            self.tenants.forgive(ticket, now)
        return ticket

    def first_token(self, ticket: Ticket) -> None:
        """The first token of a stream was seen."""
        if ticket.stage is Stage.DISPATCHED and ticket.first_token_at is None:
            now = self._clock.now()
            self._tick(now)
            ticket.first_token_seq = self._next()
            ticket.pool.first_token(ticket, now)

    def finish(self, ticket: Ticket, outcome: Outcome, delivered: Delivered = NOTHING_DELIVERED) -> None:
        """A dispatched request has ended. Only the first call counts."""
        if ticket.stage is not Stage.DISPATCHED:
            return
        now = self._clock.now()
        self._tick(now)
        self._next()
        usage = delivered.usage
        weight = self.parameters.classes[ticket.priority].weight
        actual = usage_millitokens(weight, usage, self.parameters.capacity) if usage is not None else 0
        ticket.outcome = outcome
        if outcome is Outcome.COMPLETED and usage is not None and ticket.ask.max_output_tokens != 0:
            self._output_reserves[ticket.priority].observe(usage.output_tokens // ticket.ask.sequences)
        self.tenants.settle(ticket, None if usage is None or ticket.exempt else actual, now)
        ticket.pool.finish(ticket, actual, now)
        self._let_go()
        self._report(ticket, delivered, now)

    def may_requeue(self, ticket: Ticket) -> bool:
        """Whether a dispatched request of which its engine ran nothing may try again: once, and not where
        nothing is enforced."""
        observed = self.parameters.classes[ticket.priority].observe
        new = ticket.requeued_at is ticket.first_token_at is None and bool(ticket.route.upstreams)
        return ticket.stage is Stage.DISPATCHED and new and not observed and not ticket.exempt

    def may_go_elsewhere(self, ticket: Ticket) -> bool:
        """Whether one whose engine was not reached may try again, at another one that is up."""
        others = (upstream for upstream in ticket.route.upstreams if upstream is not ticket.upstream)
        return self.may_requeue(ticket) and any(upstream.healthy for upstream in others)

    def requeue(self, ticket: Ticket, *, reached: bool = True) -> None:
        """The engine of a dispatched request ran nothing of it: it had no room, or was not `reached`. The
        request waits again, in the second case for another engine, and will be decided about again."""
        if not self.may_requeue(ticket):
            raise ValueError(f"{ticket} cannot be sent again")
        now = ticket.requeued_at = self._clock.now()
        self._tick(now)
        ticket.requeued_seq = self._next()
        if reached:
            self._observer.queue_full(ticket.upstream.name, now)
        heir = self._pool_of(ticket.ask.model)
        assert heir is not None
        ticket.pool.requeue(ticket, heir, now, elsewhere=not reached)
        self._let_go()
        if self._draining:
            ticket.pool.cancel(ticket, DRAINING, now)

    def cancel(self, ticket: Ticket, outcome: Outcome = Outcome.CLIENT_GONE_QUEUED) -> None:
        """Take a waiting request out. A dispatched or ended one is left alone."""
        if ticket.stage in (Stage.THROTTLED, Stage.READY):
            self._next()
            ticket.pool.cancel(ticket, Refusal(outcome, "the client left"), self._clock.now())

    def advance(self) -> None:
        now = self._clock.now()
        self._tick(now)
        self._advance_to(now)

    def next_deadline(self) -> int:
        """Nanoseconds on the injected clock; NEVER when nothing is due."""
        now = self._clock.now()
        soonest = NEVER
        for pool in self.pools:
            deadline = pool.next_deadline(now)
            if deadline < soonest:
                soonest = deadline
        return soonest

    def take_decisions(self) -> Sequence[Ticket]:
        """Tickets dispatched or refused since the last call, in order."""
        decided = self._decided
        if decided:
            self._decided = []
        return decided

    def drain(self) -> None:
        """Refuse all that waits and all that will come; what is in flight goes on."""
        self._draining = True
        self._next()
        now = self._clock.now()
        for pool in self.pools:
            pool.cancel_all(DRAINING, now)

    @property
    def draining(self) -> bool:
        return self._draining

    def set_upstream_health(self, name: str, healthy: bool) -> None:
        pool, slots = self._slots[name]
        if slots.healthy != healthy or slots.on_trial:
            now = self._clock.now()
            self._tick(now)
            self._observer.health_changed(name, healthy, now)
            pool.set_health(slots, healthy, now)
            self._tell_changes(pool)

    def set_upstream_trial(self, name: str) -> None:
        """An upstream that is down may get one request, to show whether it serves again, or one more beside
        it. What comes of it is told with `set_upstream_health`, before the request ends."""
        pool, slots = self._slots[name]
        now = self._clock.now()
        self._observer.trial_allowed(name, now)
        pool.begin_trial(slots, now)

    def engine_load_told(self, name: str, load: EngineLoad) -> None:
        """The upstream's metrics page was read."""
        pool, slots = self._slots[name]
        now = self._clock.now()
        self._observer.load_told(name, load, now)
        pool.engine_load_told(slots, load, now)

    def reconfigure(self, parameters: PolicyParameters) -> None:
        """Other settings from now on. Nothing that waits or runs is disturbed, no level is refilled; an
        upstream that is there no longer serves what it has begun, and who waits for a model that nobody
        serves any longer is refused."""
        now = self._clock.now()
        self._tick(now)
        self._next()
        self._advance_to(now)
        self._observer.reconfigured(parameters, now)
        regrouping = _served(parameters) != _served(self.parameters)
        self.parameters = parameters
        for reserve in self._output_reserves:
            reserve.reconfigure(parameters.capacity)
        self.tenants.reconfigure(parameters, now)
        self.slo_monitor.reconfigure(parameters.classes, parameters.slo)
        if regrouping:
            self._regroup(parameters, now)
        for pool in self.pools:
            pool.reconfigure(parameters, now, self._untold(pool))
            self._tell_changes(pool)

    def standing(self, priority: Priority, model: str, tenant: str) -> Standing:
        """What is left to the tenant in the class where the model is served; in the first pool if it is
        served nowhere."""
        pool = self._pool_of(model) or self.pools[0]
        return standing(pool, priority, self.tenants, tenant, self._clock.now())

    def _pool_of(self, model: str) -> Pool | None:
        for pool in self.pools:
            if pool.serves(model):
                return pool
        return None

    @property
    def at_work(self) -> list[UpstreamSlots]:
        """All upstreams in use, and those that still serve what they have begun (perhaps of one name)."""
        return [*(slots for pool in self.pools for slots in pool.slots), *self.leaving]

    def upstream(self, name: str) -> UpstreamSlots:
        return self._slots[name][1]

    # ------------------------------------------------------------------ the control loops

    def follow_rates(self) -> None:
        """From now on no law acts; changes of the rates come with `rates_told`, as another policy made
        them."""
        self._follows = True
        for pool in self.pools:
            pool.control.follows = True

    def rates_told(self, change: RatesChanged) -> None:
        """Put a change in force that a law has made elsewhere."""
        now = self._clock.now()
        self._tick(now)
        self._next()
        for pool in self.pools:
            is_meant = {slots.name for slots in pool.slots} == set(change.upstreams)
            if is_meant and change.applied and change.new_rates != pool.control.rates:
                pool.follow(change, now)

    def _tick(self, now: int) -> None:
        """The laws whose turn has come act before anything else at this instant."""
        for pool in self.pools:
            if now >= pool.control.due:
                pool.tick(now)
                self._tell_changes(pool)

    def _tell_changes(self, pool: Pool) -> None:
        names = tuple(slots.name for slots in pool.slots)
        for change in pool.control.take_changes():
            self._observer.rates_changed(replace(change, upstreams=names, order=self._next()))

    # ------------------------------------------------------------------ one budget for several gateways

    def take_parts(self, parts: Parts) -> None:
        """What this gateway may use from now on of what it shares with others."""
        now = self._clock.now()
        self._tick(now)
        self._next()
        self._parts = parts
        self.tenants.share(parts.gateways, now)
        self.tenants.key_places.take_parts(parts.keys, parts.gateways)
        for (tenant, what), told in parts.minutes.items():
            if (minute := self.tenants.part_of(tenant, what, now)) is not None:
                minute.take_part(*told, now)
        for pool in self.pools:
            pool.take_limits(parts.engines, parts.gateways)
            if (part := parts.pools.get(pool.name)) is not None:
                pool.take_part(part, now)
            self._tell_changes(pool)

    def _untold(self, pool: Pool) -> int:
        """How many share a pool of which this one has no part yet; 0 where it has one, or nobody shares."""
        parts = self._parts
        if parts is None or (pool.control.shared and pool.name in parts.pools):
            return 0
        return parts.gateways

    def pooled(self, measured: Mapping[str, Measured]) -> None:
        """What all gateways have measured, by pool: for the law of the one that decides."""
        for pool in self.pools:
            if (of_all := measured.get(pool.name)) is not None:
                pool.control.pooled(of_all.readings(), of_all.at)
                self._tell_changes(pool)

    # ------------------------------------------------------------------ inside

    def _advance_to(self, now: int) -> None:
        for pool in self.pools:
            pool.advance(now)

    def _regroup(self, parameters: PolicyParameters, now: int) -> None:
        self.pools, self.leaving = regrouped(self.pools, self.leaving, parameters, now, self._decide)
        self._slots = _by_name(self.pools)
        for pool in self.pools:
            pool.control.follows = pool.control.follows or self._follows
            if self._parts is not None:
                pool.take_limits(self._parts.engines, self._parts.gateways)
        self._let_go()

    def _let_go(self) -> None:
        """Of upstreams that are configured no longer, those where nothing runs any more."""
        if self.leaving:
            self.leaving = [slots for slots in self.leaving if slots.in_flight_total]

    def _next(self) -> int:
        """The running number of what the policy is being told."""
        self._seq += 1
        return self._seq

    def _price(self, ticket: Ticket) -> None:
        ask, capacity = ticket.ask, self.parameters.capacity
        ticket.output_reserve = self._output_reserves[ask.priority].reserve(ask)
        answers_per_prompt = ask.sequences // ask.prompts
        ticket.total_tokens = ask.input_tokens * answers_per_prompt + ticket.output_reserve
        weight = self.parameters.classes[ask.priority].weight
        ticket.cost = cost_millitokens(weight, ask.input_tokens, 0, ticket.output_reserve, capacity)

    def _check_size(self, ticket: Ticket) -> None:
        """Raises RequestTooLong."""
        ask, capacity = ticket.ask, self.parameters.capacity
        tokens, limit = ask.input_tokens + ticket.output_reserve, capacity.max_request_tokens
        if limit is not None and tokens > limit:
            raise RequestTooLong(f"this request needs about {tokens} tokens; at most {limit} are allowed")
        per_minute = self.tenants.tokens_per_minute(ask.tenant)
        if per_minute:
            weight = self.parameters.classes[ask.priority].weight
            prompt = cost_millitokens(weight, ask.input_tokens, 0, 0, capacity) // MILLITOKENS
            if prompt > per_minute:
                says = f"this prompt costs about {prompt} tokens; tenant '{ask.tenant}' has {per_minute}"
                raise RequestTooLong(f"{says} in a minute")

    def _refuse_at_once(self, ticket: Ticket, refusal: Refusal, now: int) -> None:
        ticket.stage = Stage.ENDED
        ticket.refusal = refusal
        self._decide(ticket, now)

    def _decide(self, ticket: Ticket, now: int) -> None:
        if ticket.refusal is not None:
            ticket.outcome = ticket.refusal.outcome
            self.tenants.settle(ticket, None, now)
            self._report(ticket, NOTHING_DELIVERED, now)
        elif ticket.promoted:
            self._observer.promoted(ticket.priority)
        self._decided.append(ticket)

    def _report(self, ticket: Ticket, delivered: Delivered, now: int) -> None:
        event = _ended(ticket, delivered, now)
        if self._observer.wants_details:
            order = Order(ticket.seq, ticket.requeued_seq, ticket.first_token_seq, self._seq)
            event = event._replace(ask=ticket.ask, seen=ticket.seen, order=order)
        sample = self.slo_monitor.record(event)
        if sample is not None and sample.admitted and event.outcome in JUDGES_THE_ENGINE:
            kept = sample.met.dispatch_all
            if kept is not None and ticket.dispatched_at is not None:
                verdict = Verdict(ticket.dispatched_at, now, kept)
                ticket.pool.control.signals.judged(ticket.priority, verdict)
        self._observer.ended(event)


def _ended(ticket: Ticket, delivered: Delivered, now: int) -> RequestEnded:
    assert ticket.outcome is not None
    ask, usage = ticket.ask, delivered.usage
    dispatched, first = ticket.dispatched_at, ticket.first_token_at
    tpot = None
    if first is not None and delivered.last_token_at is not None and usage is not None:
        steps = usage.output_tokens // ask.sequences - 1
        if steps > 0:
            tpot = (delivered.last_token_at - first) // steps
    return RequestEnded(
        request_id=ask.request_id,
        priority=ask.priority,
        tenant=ask.tenant,
        model=ask.model,
        outcome=ticket.outcome,
        streaming=ask.streaming,
        upstream=ticket.upstream.name if ticket.upstream is not None else None,
        arrived_at=ticket.arrived_at,
        ended_at=now,
        queue_wait_ns=ticket.queue_wait_ns,
        ttft_ns=None if first is None else first - ticket.arrived_at,
        upstream_ttft_ns=None if first is None or dispatched is None else first - dispatched,
        tpot_ns=tpot,
        max_gap_ns=delivered.max_gap_ns,
        usage=usage,
        estimated_cost=ticket.cost,
        charged=ticket.charged,
        promoted=ticket.promoted,
        by_tenant_limit=ticket.refusal is not None and ticket.refusal.by_tenant_limit,
        would_be=ticket.would_be,
        requeued_at=ticket.requeued_at,
        not_reached=ticket.not_reached,
    )


def _by_name(pools: Sequence[Pool]) -> dict[str, tuple[Pool, UpstreamSlots]]:
    return {slots.name: (pool, slots) for pool in pools for slots in pool.slots}


def _served(parameters: PolicyParameters) -> list[tuple[object, ...]]:
    """Which requests may go to which engines."""
    return [(u.name, u.address, set(u.models), u.accepts) for u in parameters.upstreams]
