"""One set of upstreams that serve the same models: its budget, its queues, its places.

Order of things at one instant, the same under every driver: refill the buckets; first tokens that count
as seen; pay those who wait for tokens; dispatch; end those whose time is over. So a request that can go
at the very moment its wait ends does go.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from gateway.policy.clock import NANOSECONDS_PER_SECOND, NEVER, to_seconds
from gateway.policy.drain_rate import DrainRate
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import MILLITOKENS, PolicyParameters, UpstreamParameters
from gateway.policy.priority_queue import FairQueue, ServiceCounters
from gateway.policy.rate_controller import control_law
from gateway.policy.request import PRIORITIES, Priority, Refusal, Stage, Ticket
from gateway.policy.scheduler import Route, Scheduler
from gateway.policy.token_bucket import UNITS_PER_TOKEN, BucketRules, TokenBuckets
from gateway.policy.upstream_slots import UpstreamSlots

ACTIVITY_TAIL_NS = 5 * NANOSECONDS_PER_SECOND
"""A class counts as active for so long after its last request ended: its next one is likely near."""
DEADLINE_DROP_PART = 0.6
"""Of the TTFT promise: one who has waited so long must still have time for its prefill."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a class has left: tokens in its bucket and places in its queue (None: not limited)."""

    limit_tokens: int
    remaining_tokens: int
    full_after_ns: int
    limit_requests: int | None
    remaining_requests: int | None
    drained_after_ns: int


class Pool:
    """`decide` is told of every ticket that was dispatched or refused."""

    def __init__(
        self,
        parameters: PolicyParameters,
        upstreams: list[UpstreamParameters],
        now: int,
        decide: Callable[[Ticket], None],
    ) -> None:
        self._parameters = parameters
        self._classes = [parameters.classes[p] for p in PRIORITIES]
        self._decide = decide
        self.slots = [UpstreamSlots(u, parameters.scheduling) for u in upstreams]
        self._routes: dict[tuple[tuple[str, ...], bool], Route] = {}
        self._law = control_law(parameters.law, [c.share for c in self._classes])
        self.buckets = TokenBuckets(_bucket_rules(parameters), self._nominal_capacity(), now)
        self.throttled = [FairQueue(ServiceCounters(), sticky_head=True) for _ in PRIORITIES]
        self.scheduler = Scheduler(parameters.classes, parameters.scheduling.skip_limit)
        self.queued_bytes = [0, 0, 0]
        self._requests = [0, 0, 0]  # waiting or in flight
        self._expiries: list[tuple[int, int, Ticket]] = []
        self._assumed_first_tokens: list[tuple[int, int, Ticket]] = []
        self._drain = [DrainRate(now) for _ in PRIORITIES]
        self._long_ready = 0
        self._nobody_can_go = False  # the last look found so, and nothing has changed since
        self._now = now

    # ------------------------------------------------------------------ routes and upstreams

    def route(self, model: str, is_long: bool) -> Route | None:
        """Where requests for a model may go; None when no upstream here serves it."""
        serving = [s for s in self.slots if serves(s.parameters, model)]
        wanted = "long" if is_long else "short"
        fitting = [s for s in serving if s.parameters.accepts in ("any", wanted)] or serving
        if not fitting:
            return None
        key = (tuple(s.name for s in fitting), is_long)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = Route(fitting, is_long)
            if not route.healthy:
                route.down_since = self._now
        return route

    def waiting(self) -> list[Ticket]:
        return [ticket for route in self._routes.values() for ticket in route.waiting.values()]

    def set_health(self, upstream: UpstreamSlots, healthy: bool, now: int) -> None:
        self._catch_up(now)
        upstream.healthy = healthy
        self._nobody_can_go = False
        for route in self._routes.values():
            if route.healthy:
                route.down_since = None
            elif route.down_since is None:
                route.down_since = now
        capacity = self._nominal_capacity()
        if capacity:  # with none healthy C keeps its last value
            self.buckets.set_rates(self._law.rates(capacity), now)
        self._settle_down(now)

    def look_again(self) -> None:
        """A limit changed: who could not go may be able to now."""
        self._nobody_can_go = False

    def _nominal_capacity(self) -> int:
        return round(sum(s.tokens_per_second for s in self.slots if s.healthy) * MILLITOKENS)

    # ------------------------------------------------------------------ arrival

    def submit(self, ticket: Ticket, now: int) -> None:
        """Decide about a new request: dispatched, waiting, or refused."""
        self.advance(now)
        priority = ticket.priority
        ticket.pool = self
        self._requests[priority] += 1
        self.buckets.active_until[priority] = NEVER
        wait_limit = self._wait_limit_ns(ticket)
        ticket.deadline = ticket.arrived_at + wait_limit
        line = self.throttled[priority]
        if not len(line) and self.buckets.affords(priority, ticket.cost, self._on_own_share(ticket, now)):
            self._hold(ticket)
            line.pass_through(ticket)
            self._pay(ticket, now)
        else:
            refusal = self._too_long_a_wait(ticket, wait_limit, now)
            if refusal is not None:
                self._end_waiting(ticket, refusal, now)
                return
            self._hold(ticket)
            line.push(ticket)
        self._dispatch(now)
        if ticket.stage is not Stage.DISPATCHED:
            self._make_room(ticket, now)

    def _hold(self, ticket: Ticket) -> None:
        """The ticket now waits somewhere: note its bytes and when its time is over."""
        self.queued_bytes[ticket.priority] += ticket.ask.body_bytes
        ticket.route.waiting[ticket.seq] = ticket
        heappush(self._expiries, (ticket.deadline, ticket.seq, ticket))

    def _wait_limit_ns(self, ticket: Ticket) -> int:
        limits = self._classes[ticket.priority]
        longest = limits.max_wait_ns
        slo = limits.slo
        if self._parameters.scheduling.deadline_drop and slo is not None and slo.ttft_ns is not None:
            longest = min(longest, round(DEADLINE_DROP_PART * slo.ttft_ns))
        if ticket.ask.client_timeout_ns is not None:
            longest = min(longest, ticket.ask.client_timeout_ns)
        return longest

    def _too_long_a_wait(self, ticket: Ticket, wait_limit: int, now: int) -> Refusal | None:
        priority = ticket.priority
        wait = self.buckets.predicted_wait_ns(
            priority, ticket.cost, self.throttled[priority].total_cost, self._on_own_share(ticket, now)
        )
        head = self.throttled[priority].peek()
        if head is not None and self._on_own_share(head, now):  # it waits for less than all that flows in
            wait = max(wait, self.buckets.predicted_wait_ns(priority, head.cost, 0, own_share=True))
        if wait <= min(wait_limit, self._classes[priority].max_throttle_ns):
            return None
        rate = self.buckets.rates[priority] / MILLITOKENS
        if wait >= NEVER:
            return Refusal(Outcome.REJECTED_RATE, f"the {priority.name} token bucket lets nothing pass", None)
        detail = (
            f"the {priority.name} token bucket ({rate:g} tokens/s) could pay this request "
            f"in about {to_seconds(wait):.3g} s"
        )
        return Refusal(Outcome.REJECTED_RATE, detail, wait)

    def _on_own_share(self, ticket: Ticket, now: int) -> bool:
        """Long prompts below P0 are not paid with lent tokens while a higher class is active."""
        return ticket.is_long and self.buckets.limited(ticket.priority, now)

    def _make_room(self, arrival: Ticket, now: int) -> None:
        """Bring the class back within its bounds: the tenant with the largest throttled cost loses its
        newest request; where nobody is throttled, or nothing would make the arrival fit, the arrival
        itself."""
        priority = arrival.priority
        limits = self._classes[priority]
        line = self.throttled[priority]
        never_fits = limits.max_queued_requests == 0 or _above(
            arrival.ask.body_bytes, limits.max_queued_bytes
        )
        while _above(self.depth(priority), limits.max_queued_requests) or _above(
            self.queued_bytes[priority], limits.max_queued_bytes
        ):
            heaviest = line.heaviest_tenant()
            victim = arrival
            if heaviest is not None and heaviest[0] != arrival.tenant and not never_fits:
                victim = line.newest_of(heaviest[0])
            detail = f"the {priority.name} queue is full ({self.depth(priority) - 1} waiting)"
            self._end_waiting(victim, self._come_back(Outcome.REJECTED_QUEUE_FULL, victim, detail), now)
            if victim is arrival:
                return
            self._proceed(now)

    def _come_back(self, outcome: Outcome, ticket: Ticket, detail: str) -> Refusal:
        """A refusal with the queue's drain estimate as advice."""
        wait = self._drain[ticket.priority].time_for(self.depth(ticket.priority), self._now)
        return Refusal(outcome, detail, wait)

    # ------------------------------------------------------------------ paying and dispatching

    def _pay(self, ticket: Ticket, now: int) -> None:
        ticket.on_own_share = self._on_own_share(ticket, now)
        ticket.own_units = self.buckets.take(ticket.priority, ticket.cost, ticket.on_own_share)
        ticket.charged = ticket.cost
        ticket.paid_at = now
        ticket.stage = Stage.READY
        self.scheduler.ready[ticket.priority].push(ticket)
        self._long_ready += ticket.is_long
        self._nobody_can_go = False

    def _pay_throttled(self, now: int) -> None:
        for priority, line in zip(PRIORITIES, self.throttled, strict=True):
            while (head := line.peek() if len(line) else None) is not None:
                if not self.buckets.affords(priority, head.cost, self._on_own_share(head, now)):
                    break
                line.pop()
                self._pay(head, now)

    def _dispatch(self, now: int) -> None:
        if self._nobody_can_go and not self._long_ready:  # only long prompts can go by mere passing of time
            return
        while self.scheduler.anybody_ready and not all(slots.full for slots in self.slots):
            limited = self.buckets.limits(now)
            choice = self.scheduler.choose(limited, now)
            if choice is None:
                break
            self.scheduler.dispatched(choice, limited, now)
            ticket = choice.ticket
            self._no_longer_waiting(ticket)
            self._long_ready -= ticket.is_long
            ticket.promoted = choice.promoted
            ticket.stage = Stage.DISPATCHED
            choice.upstream.lease(ticket, now)
            self._drain[ticket.priority].count(now)
            if not ticket.ask.streaming:
                assumed = now + choice.upstream.prefill.predict_ns(ticket.input_tokens)
                heappush(self._assumed_first_tokens, (assumed, ticket.seq, ticket))
            self._decide(ticket)
        self._nobody_can_go = True

    def _proceed(self, now: int) -> None:
        self._pay_throttled(now)
        self._dispatch(now)

    def _settle_down(self, now: int) -> None:
        self._proceed(now)
        if self._expire(now):
            self._proceed(now)

    # ------------------------------------------------------------------ endings

    def first_token(self, ticket: Ticket, now: int) -> None:
        """The first token of a dispatched request was seen; said once."""
        self._catch_up(now)
        ticket.first_token_at = now
        if ticket.had_engine_alone and ticket.dispatched_at is not None:
            ticket.upstream.prefill.learn(ticket.input_tokens, now - ticket.dispatched_at)
        ticket.upstream.prefilled(ticket)
        self._nobody_can_go = False
        self._settle_down(now)

    def cancel(self, ticket: Ticket, refusal: Refusal, now: int) -> None:
        """End a request that was not dispatched. It is taken out before anything else happens at this
        instant, so that it cannot be dispatched while it leaves."""
        self.buckets.advance(now)
        if ticket.stage in (Stage.THROTTLED, Stage.READY):
            self._end_waiting(ticket, refusal, now)
        self.advance(now)

    def cancel_all(self, refusal: Refusal, now: int) -> None:
        """End all that waits; nobody is dispatched meanwhile."""
        self.buckets.advance(now)
        for ticket in self.waiting():
            self._end_waiting(ticket, refusal, now)
        self.advance(now)

    def finish(self, ticket: Ticket, actual_cost: int, now: int) -> None:
        """End a dispatched request: settle, free its place, let the next ones go."""
        self._catch_up(now)
        charged = ticket.charged
        ticket.charged = self.buckets.settle(
            ticket.priority, charged, actual_cost, ticket.on_own_share, ticket.own_units
        )
        difference = actual_cost - charged
        self.throttled[ticket.priority].counters.correct(ticket.tenant, difference)
        self.scheduler.ready[ticket.priority].counters.correct(ticket.tenant, difference)
        ticket.upstream.release(ticket)
        self._nobody_can_go = False
        self._leave(ticket, now)
        self._settle_down(now)

    def _end_waiting(self, ticket: Ticket, refusal: Refusal, now: int) -> None:
        """Refuse a request that holds no lease, and give back all it took."""
        if ticket.stage is Stage.READY:
            self.scheduler.ready[ticket.priority].remove(ticket)
            self._long_ready -= ticket.is_long
            self._nobody_can_go = False  # another is the head now
            self.buckets.settle(ticket.priority, ticket.charged, 0, ticket.on_own_share, ticket.own_units)
            self.throttled[ticket.priority].counters.correct(ticket.tenant, -ticket.charged)
            ticket.charged = 0
            self._no_longer_waiting(ticket)
        elif ticket.seq in ticket.route.waiting:
            self.throttled[ticket.priority].remove(ticket)
            self._no_longer_waiting(ticket)
        ticket.refusal = refusal
        self._leave(ticket, now)
        self._decide(ticket)

    def _no_longer_waiting(self, ticket: Ticket) -> None:
        self.queued_bytes[ticket.priority] -= ticket.ask.body_bytes
        del ticket.route.waiting[ticket.seq]
        booked = len(self._expiries)
        if booked > 64 and booked > 2 * sum(self.depth(p) for p in PRIORITIES) + 64:
            self._expiries = [e for e in self._expiries if e[2].stage in (Stage.THROTTLED, Stage.READY)]
            heapify(self._expiries)

    def _leave(self, ticket: Ticket, now: int) -> None:
        ticket.stage = Stage.ENDED
        self._requests[ticket.priority] -= 1
        if not self._requests[ticket.priority]:
            self.buckets.active_until[ticket.priority] = now + ACTIVITY_TAIL_NS

    # ------------------------------------------------------------------ time

    def advance(self, now: int) -> None:
        """Bring everything up to `now`. Early, or repeated, it does nothing."""
        self._catch_up(now)
        if self._expire(now):
            self._proceed(now)

    def _catch_up(self, now: int) -> None:
        """Bring everything up to `now`, but leave those whose wait ends just now a last chance: what
        frees a place at this instant is still to come."""
        self.buckets.advance(now)
        self._now = max(self._now, now)
        assumed = self._assumed_first_tokens
        while assumed and assumed[0][0] <= now:
            ticket = heappop(assumed)[2]
            if ticket.stage is Stage.DISPATCHED:
                ticket.upstream.prefilled(ticket)
                self._nobody_can_go = False
        self._proceed(now)
        if self._expire(now - 1):
            self._proceed(now)

    def _expire(self, until: int) -> bool:
        """End those whose time was over by `until`; whether there were any."""
        now = self._now
        over = []
        expiries = self._expiries
        while expiries and expiries[0][0] <= until:
            ticket = heappop(expiries)[2]
            if ticket.stage in (Stage.THROTTLED, Stage.READY):
                over.append(ticket)
        for ticket in over:
            self._end_waiting(ticket, self._waited_too_long(ticket), now)
        for route in self._routes.values():
            while (ticket_and_time := self._first_without_upstream(route)) and ticket_and_time[1] <= until:
                over.append(ticket_and_time[0])
                self._end_waiting(ticket_and_time[0], self._waited_too_long(ticket_and_time[0]), now)
        return bool(over)

    def _waited_too_long(self, ticket: Ticket) -> Refusal:
        waited = f"after {to_seconds(self._now - ticket.arrived_at):.3g} s"
        if not ticket.route.healthy:
            return Refusal(Outcome.REJECTED_NO_UPSTREAM, f"no engine that serves this model is up, {waited}")
        name = ticket.priority.name
        what = "no tokens of its class" if ticket.stage is Stage.THROTTLED else "no place at an engine"
        return self._come_back(Outcome.QUEUE_TIMEOUT, ticket, f"{name} request got {what} {waited}")

    def _first_without_upstream(self, route: Route) -> tuple[Ticket, int] | None:
        """Who of those waiting for upstreams that are all down gives up first, and when."""
        if route.down_since is None or not route.waiting:
            return None
        oldest = next(iter(route.waiting.values()))
        return oldest, max(oldest.arrived_at, route.down_since) + self._parameters.no_upstream_ns

    def next_deadline(self, now: int) -> int:
        """When `advance` should be called next if nothing else happens; NEVER if it need not be.

        What was due up to the last advance has been seen to; what came due between that and `now` has not.
        """
        seen_to = self._now
        times = [NEVER]
        if self._assumed_first_tokens:
            times.append(self._assumed_first_tokens[0][0])
        waiting = False
        while self._expiries and self._expiries[0][2].stage not in (Stage.THROTTLED, Stage.READY):
            heappop(self._expiries)
        if self._expiries:
            waiting = True
            times.append(self._expiries[0][0])
        if waiting:
            times.append(self.buckets.next_activity_end(seen_to))
            times.extend(s.next_long_at for s in self.slots if s.next_long_at > seen_to)
            times.extend(at[1] for r in self._routes.values() if (at := self._first_without_upstream(r)))
            times.extend(self._paying_times(seen_to, min(times)))
        return max(min(times), now + 1) if min(times) < NEVER else NEVER

    def _paying_times(self, now: int, before: int) -> list[int]:
        times = []
        for priority in PRIORITIES:
            head = self.throttled[priority].peek()
            if head is not None:
                own = self._on_own_share(head, now)
                times.append(self.buckets.time_until(priority, head.cost, own, max(before - now, 1) + 1))
        return times

    # ------------------------------------------------------------------ reading

    def depth(self, priority: Priority) -> int:
        """Requests of the class that wait, for tokens or for a place."""
        return len(self.throttled[priority]) + self.scheduler.ready[priority].length

    def standing(self, priority: Priority) -> Standing:
        level, burst = self.buckets.levels[priority], self.buckets.bursts[priority]
        rate, depth = self.buckets.rates[priority], self.depth(priority)
        limit = self._classes[priority].max_queued_requests
        return Standing(
            limit_tokens=burst // UNITS_PER_TOKEN,
            remaining_tokens=max(level, 0) // UNITS_PER_TOKEN,
            full_after_ns=-(-(burst - level) // rate) if rate else 0,
            limit_requests=limit,
            remaining_requests=None if limit is None else max(limit - depth, 0),
            drained_after_ns=(self._drain[priority].time_for(depth, self._now) or 0) if depth else 0,
        )


def serves(upstream: UpstreamParameters, model: str) -> bool:
    return model in upstream.models or "*" in upstream.models


def _above(value: int, limit: int | None) -> bool:
    return limit is not None and value > limit


def _bucket_rules(parameters: PolicyParameters) -> BucketRules:
    classes = [parameters.classes[p] for p in PRIORITIES]
    return BucketRules(
        shares=tuple(c.share for c in classes),
        ceiling_shares=tuple(c.ceiling_share for c in classes),
        burst_seconds=parameters.capacity.burst_seconds,
        min_burst_tokens=parameters.capacity.min_burst_tokens,
        max_debt_seconds=parameters.capacity.max_debt_seconds,
    )
