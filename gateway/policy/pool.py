"""One set of upstreams that serve the same models: its budget, its queues, its places.

Order of things at one instant, the same under every driver: refill the buckets; first tokens that count
as seen; pay those who wait for tokens; dispatch; end those whose time is over. So a request that can go
at the very moment its wait ends does go.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from gateway.policy.assumed_first_tokens import AssumedFirstTokens
from gateway.policy.budget_part import BudgetPart, RecentDemand, equal_part, with_waiting
from gateway.policy.capacity_loop import CapacityLoop
from gateway.policy.class_activity import ClassActivity
from gateway.policy.clock import NEVER
from gateway.policy.drain_rate import DrainRate
from gateway.policy.engine_load import EngineLoad
from gateway.policy.events import RatesChanged
from gateway.policy.parameters import MILLITOKENS, PolicyParameters
from gateway.policy.patience import wait_limit_ns
from gateway.policy.payment import Payment
from gateway.policy.refusals import Refusals
from gateway.policy.request import PRIORITIES, Priority, Refusal, Stage, Ticket
from gateway.policy.routes import Route
from gateway.policy.scheduler import Scheduler
from gateway.policy.token_bucket import BucketRules, TokenBuckets
from gateway.policy.turns import Turns
from gateway.policy.upstream_slots import UpstreamSlots
from gateway.policy.waiting_room import WAITING, WaitingRoom


class Pool:
    """`decide` is told of every ticket that was dispatched or refused."""

    def __init__(
        self,
        parameters: PolicyParameters,
        slots: list[UpstreamSlots],
        now: int,
        decide: Callable[[Ticket, int], None],
    ) -> None:
        self._decide = decide
        self.room = WaitingRoom(parameters.no_upstream_ns)
        self._take(parameters)
        capacity = _capacity(s for s in slots if s.healthy) or _capacity(slots)
        self.control = CapacityLoop(parameters, capacity, now)
        self.buckets = TokenBuckets(_bucket_rules(parameters), capacity, now)
        self.payment = Payment(self.buckets)
        self.throttled = self.payment.throttled
        self.scheduler = Scheduler(parameters.classes, parameters.scheduling.skip_limit)
        self.turns = Turns(self.scheduler, self.buckets, slots)
        self.activity = ClassActivity(self.buckets, now)
        self._recent_demand: RecentDemand | None = None  # where the budget is shared with other gateways
        self.assumed = AssumedFirstTokens()
        self._drain = [DrainRate() for _ in PRIORITIES]  # of all that wait
        self._refusals = Refusals(self)
        self._now = now
        self._set_credit()

    # ------------------------------------------------------------------ routes and upstreams

    @property
    def slots(self) -> list[UpstreamSlots]:
        return self.turns.slots

    @slots.setter
    def slots(self, slots: list[UpstreamSlots]) -> None:
        self.turns.slots = slots

    @property
    def name(self) -> str:
        """The first of its upstreams' names: the same at gateways that have one more, or one fewer."""
        return min(slots.name for slots in self.slots)

    def serves(self, model: str) -> bool:
        return self.room.routes.serve(model, self.slots)

    def route(self, model: str, is_long: bool, avoided: Sequence[UpstreamSlots] = ()) -> Route | None:
        """Where requests for a model may go; None when no upstream here serves it. To `avoided` ones only
        if there are no others."""
        return self.room.routes.for_model(model, is_long, self.slots, self._now, avoided)

    def set_health(self, upstream: UpstreamSlots, healthy: bool, now: int) -> None:
        self.catch_up(now)
        upstream.set_health(healthy)
        self.turns.may_have_changed()
        self.room.routes.health_changed(now)
        capacity = self._nominal_capacity()
        if capacity:  # with none healthy C keeps its last value
            self._put_in_force(self.control.nominal_changed(capacity, now), now)
        self._settle_down(now)

    def begin_trial(self, upstream: UpstreamSlots, now: int) -> None:
        self.catch_up(now)
        upstream.begin_trial()
        self.turns.may_have_changed()
        self._settle_down(now)

    def engine_load_told(self, upstream: UpstreamSlots, load: EngineLoad, now: int) -> None:
        self.catch_up(now)
        upstream.told(load, now)
        self.turns.may_have_changed()
        self._settle_down(now)

    def reconfigure(self, parameters: PolicyParameters, now: int, untold: int = 0) -> None:
        """Other settings from now on, up to which everything is caught up. Levels (cut to the new bursts),
        queues and leases stay; what waits keeps the deadline it was given. `untold`: so many gateways share
        the budget of these upstreams, of which nobody was told yet; each begins with an equal part."""
        self._take(parameters)
        self.scheduler.reconfigure(parameters.classes, parameters.scheduling.skip_limit)
        by_name = {upstream.name: upstream for upstream in parameters.upstreams}
        for slots in self.slots:
            slots.reconfigure(by_name[slots.name], parameters.scheduling)
        capacity = self._nominal_capacity() or self.control.limits.nominal
        if untold:
            self.control.shared = False
        rates = self.control.reconfigure(parameters, capacity, now)
        if untold:
            self._share(equal_part(rates, untold), now)
        in_force = self.buckets.rates if self.control.shared else rates
        self.buckets.reconfigure(_bucket_rules(parameters), in_force, now)
        self._set_credit()
        self.turns.may_have_changed()
        self._settle_down(now)

    def _take(self, parameters: PolicyParameters) -> None:
        self.classes = [parameters.classes[p] for p in PRIORITIES]
        self.scheduling = parameters.scheduling
        self.room.no_upstream_ns = parameters.no_upstream_ns

    def tick(self, now: int) -> None:
        """The control loop's turn, if it has come."""
        if now >= self.control.due:
            for priority, line in zip(PRIORITIES, self.throttled, strict=True):
                if len(line) and (head := line.peek()) and not self.payment.on_own_share(head, now):
                    self.control.signals.held_back(priority)
            rates = self.control.tick(self.slots, idle=self.activity.idle, now=now)
            if rates is not None:
                self._change_rates(rates, now)

    def follow(self, change: RatesChanged, now: int) -> None:
        """Put in force what a law has decided elsewhere."""
        self._change_rates(self.control.followed(change, idle=self.activity.idle), now)

    def _change_rates(self, rates: Sequence[int], now: int) -> None:
        self.catch_up(now)
        self._put_in_force(rates, now)
        self._settle_down(now)

    def _put_in_force(self, rates: Sequence[int], now: int) -> None:
        """Of a budget that is shared a gateway puts in force what it is given of it (`take_part`)."""
        if not self.control.shared:
            self.buckets.set_rates(rates, now)
            self._set_credit()

    def _set_credit(self) -> None:
        for priority in PRIORITIES:
            credit = self.payment.credit(priority, self.classes[priority].max_throttle_ns)
            self.throttled[priority].counters.credit = credit
            self.scheduler.ready[priority].counters.credit = credit

    def _nominal_capacity(self) -> int:
        return _capacity(s for s in self.slots if s.healthy)

    # ------------------------------------------------------------------ one budget for several gateways

    def take_part(self, part: BudgetPart, now: int) -> None:
        """What this gateway may use from now on."""
        self.catch_up(now)
        self._share(part, now)
        for priority in PRIORITIES:
            if part.active_elsewhere[priority]:
                self.turns.may_change_at(self.activity.elsewhere(priority, now))
        self._set_credit()
        self._settle_down(now)

    def _share(self, part: BudgetPart, now: int) -> None:
        if self._recent_demand is None:
            self._recent_demand = RecentDemand()
        self.control.take_part(part, now)
        self.buckets.take_part(part, now)

    def take_limits(self, engines: Mapping[str, tuple[int | None, int | None]], gateways: int) -> None:
        """What this gateway has of the upstreams' places and tokens."""
        for slots in self.slots:
            slots.take_parts(*engines.get(slots.name, (None, None)), gateways)
        self.turns.may_have_changed()

    def waiting_for_places(self, priority: Priority) -> tuple[int, int]:
        """How many have paid and wait, and how many tokens they may need: each as many as the largest of
        those that are next."""
        ready = self.scheduler.ready[priority]
        heads = ready.heads() if ready.length else ()
        return ready.length, ready.length * max((head.total_tokens for head in heads), default=0)

    @property
    def part_of_budget(self) -> float:
        """What of the budget of all gateways that share it this one may use; 1 where none is shared."""
        budget = sum(self.control.rates)
        return self.buckets.capacity / budget if self.control.shared and budget else 1.0

    def demand(self, priority: Priority, now: int) -> dict[str, int]:
        """What is asked here, in millitokens per second, by tenant."""
        asked = {} if self._recent_demand is None else self._recent_demand.per_second(priority, now)
        waiting = self.throttled[priority].costs
        return with_waiting(asked, waiting, self.classes[priority].max_throttle_ns)

    # ------------------------------------------------------------------ arrival

    def submit(self, ticket: Ticket, now: int) -> None:
        """Decide about a new request: dispatched, waiting, or refused."""
        self.advance(now)
        priority = ticket.priority
        ticket.pool = self
        self.activity.enters(priority)
        self.control.wake(now)
        self._asked(ticket, ticket.cost, now)
        wait_limit = wait_limit_ns(ticket, self.classes[priority], self.scheduling)
        ticket.deadline = ticket.arrived_at + wait_limit
        if self.classes[priority].observe:
            self._let_through(ticket, wait_limit, now)
            return
        line = self.throttled[priority]
        if not line.length and self.payment.affords(ticket, now):
            if not self.room.length and self._send_at_once(ticket, now):
                return
            self._hold(ticket, now)
            line.pass_through(ticket)
            self._pay(ticket, now)
        else:
            if not self.payment.on_own_share(ticket, now):
                self.control.signals.held_back(priority)
            refusal = self._refusals.too_long_a_wait(ticket, wait_limit, now)
            if refusal is not None:
                self.end_waiting(ticket, refusal, now)
                return
            while told := self._refusals.beyond_the_throttle(ticket, now):
                self.end_waiting(*told, now)
                if told.ticket is ticket:
                    return
            self._hold(ticket, now)
            line.push(ticket)
        self._dispatch(now)
        if ticket.stage is Stage.READY and (hopeless := self._refusals.no_place_in_time(ticket, now)):
            self.end_waiting(ticket, hopeless, now)
        while ticket.stage in WAITING and (told := self._refusals.beyond_the_bounds(ticket)):
            self.end_waiting(*told, now)
            self._proceed(now)

    def _send_at_once(self, ticket: Ticket, now: int) -> bool:
        """Dispatch a request that can pay and finds nobody waiting, if an upstream admits it: as if it had
        gone through both lines, of which nobody ever sees it in one."""
        upstream = self.scheduler.choose_at_once(ticket, self.buckets.limited(ticket.priority, now), now)
        if upstream is None:
            return False
        self.throttled[ticket.priority].pass_through(ticket)
        self.payment.charge(ticket, now)
        ticket.paid_at = now
        self._send(ticket, upstream, now)
        return True

    def _asked(self, ticket: Ticket, cost: int, now: int) -> None:
        """It asks for so much, or has turned out to need so much more, or (negative) less."""
        self.control.signals.asked(ticket.priority, cost)
        if self._recent_demand is not None:
            self._recent_demand.asked(ticket.priority, ticket.tenant, cost, now)

    def _hold(self, ticket: Ticket, now: int) -> None:
        """The ticket is about to wait somewhere: note its bytes and when its time is over."""
        if not self.depth(ticket.priority):
            self._drain[ticket.priority].begins(now)
        self.room.enter(ticket)

    # ------------------------------------------------------------------ paying and dispatching

    def _pay(self, ticket: Ticket, now: int) -> None:
        self.payment.charge(ticket, now)
        ticket.paid_at = now
        ticket.stage = Stage.READY
        self.turns.stand_ready(ticket, now)

    def _dispatch(self, now: int) -> None:
        while (choice := self.turns.next(now)) is not None:
            ticket, upstream, promoted = choice
            self.room.leave(ticket)
            ticket.promoted = promoted
            self._drain[ticket.priority].count(now)
            self._send(ticket, upstream, now)

    def _send(self, ticket: Ticket, upstream: UpstreamSlots, now: int) -> None:
        ticket.stage = Stage.DISPATCHED
        upstream.lease(ticket, now)
        if not ticket.ask.streaming:
            ticket.assumed_at = now + upstream.prefill.predict_ns(ticket.input_tokens)
            self.assumed.expect(ticket)
        self._decide(ticket, now)

    def _let_through(self, ticket: Ticket, wait_limit: int, now: int) -> None:
        """Observe: decide as if it counted, then send it whatever the decision. Who would have to wait is
        charged at once, who would be refused is not."""
        upstreams = [u for u in ticket.route.upstreams if u.usable] or list(ticket.route.upstreams)
        if ticket.would_be is None:
            ticket.would_be = self._refusals.would_be(ticket, wait_limit, now)
        if ticket.would_be is None:
            self.payment.charge(ticket, now)
        else:
            ticket.exempt = True
        self._send(ticket, min(upstreams, key=lambda upstream: upstream.burden), now)
        self.turns.may_have_changed()  # when the next long prompt's turn comes has changed

    def _proceed(self, now: int) -> None:
        p0, p1, p2 = self.throttled
        if p0.length or p1.length or p2.length:
            for ticket in self.payment.leaving(now):
                self._pay(ticket, now)
        self._dispatch(now)

    def _settle_down(self, now: int) -> None:
        if not self.room.length:
            return
        self._proceed(now)
        self._end_those_over(now)

    # ------------------------------------------------------------------ endings

    def first_token(self, ticket: Ticket, now: int) -> None:
        """The first token of a dispatched request was seen; said once."""
        self.catch_up(now)
        ticket.first_token_at = now
        self.control.signals.first_token(ticket, now)
        if ticket.had_engine_alone and ticket.dispatched_at is not None:
            ticket.upstream.prefill.learn(ticket.input_tokens, now - ticket.dispatched_at)
        ticket.upstream.prefilled(ticket)
        self.turns.may_have_changed()
        if self.room.length:
            self._dispatch(now)  # nobody can pay who could not a moment ago
            self._end_those_over(now)

    def cancel(self, ticket: Ticket, refusal: Refusal, now: int) -> None:
        """End a request that was not dispatched. It is taken out before anything else happens at this
        instant, so that it cannot be dispatched while it leaves."""
        self.buckets.advance(now)
        if ticket.stage in WAITING:
            self.end_waiting(ticket, refusal, now)
        self.advance(now)

    def cancel_all(self, refusal: Refusal, now: int) -> None:
        """End all that waits; nobody is dispatched meanwhile."""
        self.buckets.advance(now)
        for ticket in self.room.tickets():
            self.end_waiting(ticket, refusal, now)
        self.advance(now)

    def finish(self, ticket: Ticket, actual_cost: int, now: int) -> None:
        """End a dispatched request: settle, free its place, let the next ones go."""
        self.catch_up(now)
        self.control.signals.stream_ends(ticket, now)
        if not ticket.exempt:
            self._asked(ticket, actual_cost - ticket.cost, now)
            self._settle(ticket, actual_cost)
        ticket.upstream.release(ticket)
        self.turns.may_have_changed()
        self._leave(ticket, now)
        self._settle_down(now)

    def requeue(self, ticket: Ticket, heir: "Pool", now: int, elsewhere: bool = False) -> None:
        """The engine ran nothing of a dispatched request: it gives back place and tokens and waits again,
        before the others of its tenant, until the deadline it had. `heir`: the pool that serves its model,
        another one if that has changed meanwhile. `elsewhere`: for another engine."""
        self.catch_up(now)
        upstream: UpstreamSlots = ticket.upstream
        self._settle(ticket, 0)
        upstream.sent_back(ticket, now, full=not elsewhere)
        self.turns.may_have_changed()
        if elsewhere:
            ticket.not_reached = upstream.name
            others = [other for other in ticket.route.upstreams if other is not upstream]
            ticket.route = heir.room.routes.to(others, ticket.is_long, now)
        ticket.upstream = ticket.dispatched_at = ticket.paid_at = None
        ticket.assumed_at = NEVER
        ticket.promoted = False
        if heir is not self:
            heir.catch_up(now)
            self.hand_over(ticket, heir, ticket.route, now)
            self._settle_down(now)
        ticket.stage = Stage.THROTTLED
        heir._wait_again(ticket, now)

    def _wait_again(self, ticket: Ticket, now: int) -> None:
        self._hold(ticket, now)
        if self.payment.affords(ticket, now):
            self.throttled[ticket.priority].pass_through(ticket)
            self._pay(ticket, now)
        else:
            self.throttled[ticket.priority].push(ticket)
        self._settle_down(now)

    def _settle(self, ticket: Ticket, actual_cost: int) -> None:
        """Replace what was charged by what was used, in the bucket and in the tenant's service."""
        difference = actual_cost - ticket.charged
        self.payment.settle(ticket, actual_cost)
        if ticket.paid_at is None:  # only observed: it was not counted as service
            return
        self.throttled[ticket.priority].counters.correct(ticket.tenant, difference)
        self.scheduler.ready[ticket.priority].counters.correct(ticket.tenant, difference)

    def end_waiting(self, ticket: Ticket, refusal: Refusal, now: int) -> None:
        """Refuse a request that holds no lease, and give back all it took."""
        if ticket.stage is Stage.READY:
            self.scheduler.ready[ticket.priority].remove(ticket)
            self.turns.may_have_changed()  # another is the head now
            self.payment.give_back(ticket)
            self.room.leave(ticket)
        elif ticket.seq in ticket.route.waiting:
            self.throttled[ticket.priority].remove(ticket)
            self.room.leave(ticket)
        ticket.refusal = refusal
        self._leave(ticket, now)
        self._decide(ticket, now)

    def _leave(self, ticket: Ticket, now: int) -> None:
        ticket.stage = Stage.ENDED
        self._one_less(ticket, now)

    def _one_less(self, ticket: Ticket, now: int) -> None:
        self.turns.may_change_at(self.activity.leaves(ticket.priority, now))

    # ------------------------------------------------------------------ other upstreams

    def carry_on(self, other: "Pool") -> None:
        """Treat tenants and classes as the other pool did, which has served the same models. To be
        reconfigured next: until then nobody who moves from there to here loses its turn by that."""
        for priority in PRIORITIES:
            for lines, others in (
                (self.throttled[priority], other.throttled[priority]),
                (self.scheduler.ready[priority], other.scheduler.ready[priority]),
            ):
                lines.counters.follow(others.counters)
                lines.counters.credit = NEVER
        self.activity.carry_on(other.activity)
        self.scheduler.carry_on(other.scheduler)

    def reroute(self, ticket: Ticket, route: Route) -> None:
        """The request is for other upstreams of this pool now."""
        if ticket.stage in WAITING:
            self.room.leave(ticket)
        if ticket.stage is Stage.READY:
            self.scheduler.ready[ticket.priority].move(ticket, route)
        ticket.route = route
        if ticket.stage in WAITING:
            self.room.enter(ticket)

    def hand_over(self, ticket: Ticket, heir: "Pool", route: Route, now: int) -> None:
        """The request, waiting or in flight, is another pool's from now on, with what it has paid here."""
        if ticket.stage in WAITING:
            self.room.leave(ticket)
        if ticket.stage is Stage.THROTTLED:
            self.throttled[ticket.priority].remove(ticket)
        elif ticket.stage is Stage.READY:
            self.scheduler.ready[ticket.priority].remove(ticket)
        self._one_less(ticket, now)
        ticket.pool, ticket.route = heir, route
        heir._receive(ticket, now)

    def _receive(self, ticket: Ticket, now: int) -> None:
        self.activity.enters(ticket.priority)
        self.control.wake(now)
        if ticket.stage in WAITING:
            self._hold(ticket, now)
        if ticket.stage is Stage.THROTTLED:
            self.throttled[ticket.priority].push(ticket)
        elif ticket.stage is Stage.READY:
            self.turns.stand_ready(ticket, now)
        elif ticket.assumed_at <= now:
            ticket.upstream.prefilled(ticket)
        elif ticket.assumed_at < NEVER:
            self.assumed.expect(ticket)

    def routes_changed(self) -> None:
        """Everybody has been given a new route: forget the old ones, and those who are elsewhere now."""
        self.room.drop_expiries()
        for ready in self.scheduler.ready:
            ready.keep(self.room.routes)
        self.assumed.keep(self)
        self.turns.may_have_changed()

    # ------------------------------------------------------------------ time

    def advance(self, now: int) -> None:
        """Bring everything up to `now`. Early, or repeated, it does nothing."""
        self.catch_up(now)
        self._end_those_over(now)

    def catch_up(self, now: int) -> None:
        """Bring everything up to `now`, but leave those whose wait ends just now a last chance: what
        frees a place at this instant is still to come."""
        self.buckets.advance(now)
        if now > self._now:
            self._now = now
        if now >= self.assumed.next and self.assumed.come(now):
            self.turns.may_have_changed()
        if self.room.length:
            self._proceed(now)
            self._end_those_over(now - 1)

    def _end_those_over(self, until: int) -> None:
        """End those whose time was over by `until`. What they leave goes to others."""
        if not self.room.anybody_over(until):
            return
        now = self._now
        found = False
        while (ticket := self.room.over(until)) is not None:
            found = True
            self.end_waiting(ticket, self._refusals.waited_too_long(ticket, now), now)
        if found:
            self._proceed(now)

    def next_deadline(self, now: int) -> int:
        """When `advance` should be called next if nothing else happens; NEVER if it need not be.

        What was due up to the last advance has been seen to; what came due between that and `now` has not.
        """
        seen_to = self._now
        soonest = min(self.control.due, self.assumed.next)
        over = self.room.next_deadline()
        if over < NEVER:  # somebody waits
            soonest = min(soonest, over, self.turns.next_change(seen_to))
            soonest = self.payment.first(seen_to, soonest)
        return max(soonest, now + 1) if soonest < NEVER else NEVER

    # ------------------------------------------------------------------ reading

    def depth(self, priority: Priority) -> int:
        """Requests of the class that wait, for tokens or for a place."""
        return self.throttled[priority].length + self.scheduler.ready[priority].length

    @property
    def queued_bytes(self) -> list[int]:
        """Of those that wait, by class."""
        return self.room.queued_bytes

    def queue_limit(self, priority: Priority) -> int | None:
        return self.classes[priority].max_queued_requests

    def drained_after_ns(self, priority: Priority) -> int | None:
        """When the class's queue will have emptied; None if nothing has moved lately."""
        return self._drain[priority].time_for(max(self.depth(priority), 1), self._now)


def _capacity(upstreams: Iterable[UpstreamSlots]) -> int:
    """Millitokens a second."""
    return round(sum(upstream.tokens_per_second for upstream in upstreams) * MILLITOKENS)


def _bucket_rules(parameters: PolicyParameters) -> BucketRules:
    classes = [parameters.classes[p] for p in PRIORITIES]
    return BucketRules(
        shares=tuple(c.share for c in classes),
        ceiling_shares=tuple(c.ceiling_share for c in classes),
        burst_seconds=parameters.capacity.burst_seconds,
        min_burst_tokens=parameters.capacity.min_burst_tokens,
        max_debt_seconds=parameters.capacity.max_debt_seconds,
    )
