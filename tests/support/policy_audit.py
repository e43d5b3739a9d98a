"""What must hold after every step of any run, whatever was asked for, and at its end.

Everything that the policy counts is counted once more from the requests that are inside; every change of a
bucket is entered into books that must balance; each dispatch is held against the order of the contract; each
request must end once, with one record.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any

from gateway.policy.clock import NEVER
from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import PRIORITIES, Priority, Stage, Ticket
from gateway.policy.scheduler import Choice
from gateway.policy.token_bucket import UNITS_PER_MILLITOKEN
from gateway.policy.upstream_slots import UpstreamSlots
from tests.support.drivers import VirtualDriver, assert_quiet
from tests.support.policy_books import BucketBooks, TenantTwin

SECOND = 1_000_000_000
ACTIVE_NS = 5 * SECOND
PAUSE_NS = SECOND // 4
WAITING = (Stage.THROTTLED, Stage.READY)
INSIDE = (*WAITING, Stage.DISPATCHED)
P0 = Priority.P0

NEVER_AT_AN_ENGINE = frozenset(
    {
        Outcome.REJECTED_RATE,
        Outcome.REJECTED_QUEUE_FULL,
        Outcome.QUEUE_TIMEOUT,
        Outcome.REJECTED_NO_UPSTREAM,
        Outcome.REJECTED_DRAINING,
        Outcome.CLIENT_GONE_QUEUED,
    }
)


class Audit:
    """Listens to a driver from its first request on. Tell it of each request before it is submitted
    (`offer`), of each lease before it ends (`releases`), and call it when the driver has settled. It takes
    ended requests out of `driver.tickets`, so that its work is in proportion to what is inside."""

    def __init__(self, driver: VirtualDriver) -> None:
        self.driver = driver
        self.admission = driver.admission
        self.pools = [PoolAudit(self, pool) for pool in self.admission.pools]
        self.gone: list[PoolAudit] = []  # of other upstreams, with requests that are still at those
        self.tenants = TenantTwin(self.admission.tenants, self.admission.parameters)
        self.offered: set[str] = set()
        self.records: dict[str, RequestEnded] = {}  # of those that ended since the last look
        self.ended_charged = 0
        self.net_of_others = 0  # of pools that are forgotten
        self.paused: dict[UpstreamSlots, int] = {}
        self.met: Counter[str] = Counter()
        driver.endings.ended = self._ended  # type: ignore[method-assign]
        self.regrouping = False
        self._regroup = self.admission._regroup
        self.admission._regroup = self._regrouped  # type: ignore[method-assign]

    @property
    def now(self) -> int:
        return self.driver.clock.now()

    @property
    def parameters(self) -> PolicyParameters:
        return self.admission.parameters

    # ------------------------------------------------------------------ what it is told

    def offer(self, name: str) -> None:
        self.offered.add(name)

    def withdraw(self, name: str) -> None:
        """It was an error at the door: there must be no trace of it."""
        self.offered.remove(name)
        assert name not in self.records
        assert name not in self.driver.tickets

    def releases(self, upstream: UpstreamSlots) -> None:
        self.paused.pop(upstream, None)

    def sends_back(self, upstream: UpstreamSlots) -> None:
        self.paused[upstream] = self.now + PAUSE_NS

    def _ended(self, event: RequestEnded) -> None:
        assert event.request_id in self.offered, f"{event.request_id} ended twice"
        self.offered.remove(event.request_id)
        self.records[event.request_id] = event
        self.met[event.outcome.value] += 1
        self.met["would be " + event.would_be.value if event.would_be else "enforced"] += 1
        self.met["by the tenant's limit"] += event.by_tenant_limit
        self.met["sent back"] += event.requeued
        self.ended_charged += event.charged
        for pool in (*self.pools, *self.gone):
            pool.ended(event)
        assert event.ended_at == self.now
        if event.outcome in NEVER_AT_AN_ENGINE:
            assert (event.charged, event.upstream, event.usage) == (0, None, None)

    # ------------------------------------------------------------------ other upstreams

    def _regrouped(self, parameters: PolicyParameters, now: int) -> None:
        """Levels and requests are with other pools now: none of them lost, none made."""
        old = [*self.pools, *self.gone]
        served = {pool: _models(pool.pool.slots) for pool in self.pools}
        engines = {slots for pool in self.pools for slots in pool.pool.slots}
        self.regrouping = True
        self._regroup(parameters, now)
        self.regrouping = False
        ours = {pool.pool: pool for pool in old}
        self.pools = [ours.get(pool) or PoolAudit(self, pool) for pool in self.admission.pools]
        self.gone = [pool for pool in old if pool not in self.pools]
        fresh = [pool for pool in self.pools if engines.isdisjoint(pool.pool.slots)]
        assert not ours.keys() & {pool.pool for pool in fresh}
        assert all(pool.pool.buckets.levels == pool.pool.buckets.bursts for pool in fresh)
        before = [pool.books.levels for pool in old]
        after = [pool.pool.buckets.levels for pool in {*old, *self.pools}.difference(fresh)]
        assert [sum(levels) for levels in zip(*after, strict=True)] == [
            sum(levels) for levels in zip(*before, strict=True)
        ]
        for pool in self.pools:
            models = _models(pool.pool.slots)
            for former, those in served.items():
                if former is not pool and ("*" in those | models or those & models):
                    pool.carry_on(former)
        for pool in {*old, *self.pools}:
            pool.count_again(now)
        self.net_of_others += sum(pool.books.net for pool in self.gone if not pool.entered)
        self.gone = [pool for pool in self.gone if pool.entered]
        self.met["other upstreams"] += 1
        self.met["upstream left with leases"] += len(self.admission.leaving)

    # ------------------------------------------------------------------ after every step

    def __call__(self) -> None:
        assert not self.admission.take_decisions()
        self._look_at_the_ended()
        for pool in (*self.pools, *self.gone):
            pool.look()
        inside = self.driver.tickets.values()
        for slots in self.admission.leaving:
            assert sum(look_at_places(slots, inside)) > 0
        assert self.net() == self.ended_charged + sum(t.charged for t in inside)
        self.tenants.look(self.driver.tickets.values(), self.now)
        assert self.driver.tickets.keys() == self.offered
        assert self.admission.next_deadline() > self.now

    def net(self) -> int:
        """Millitokens charged and not given back."""
        return self.net_of_others + sum(pool.books.net for pool in (*self.pools, *self.gone))

    def nothing_was_forgotten(self) -> None:
        """Time has passed, and the driver was woken when the policy wanted it: but for what is due at this
        very instant nothing is left to decide."""
        gate = self.driver.gate
        no_time_passed = gate._about_to_ask  # there was something else at this instant
        due = no_time_passed or gate._armed_for <= self.now + 1  # at once is in the next nanosecond
        self.admission.advance()
        assert due or not self.admission._decided, f"{self.admission._decided}: could have been before"
        gate.settle()

    def _look_at_the_ended(self) -> None:
        for name, ticket in list(self.driver.tickets.items()):
            if ticket.stage is not Stage.ENDED:
                continue
            del self.driver.tickets[name]
            record = self.records[name]
            assert ticket.outcome is record.outcome
            assert (ticket.charged, ticket.tenant_reserved) == (record.charged, False)
            latest = max(ticket.deadline, record.arrived_at + 1, ticket.requeued_at or 0)
            if record.queue_wait_ns is None:
                assert record.ended_at <= latest, "it waited past its deadline"
            elif not ticket.exempt and ticket.paid_at is not None:
                assert record.arrived_at + record.queue_wait_ns <= latest
        self.records.clear()

    # ------------------------------------------------------------------ at the end

    def nothing_is_left(self) -> None:
        """No request, no ghost of one, and nothing more to do."""
        assert_quiet(self.driver)
        assert not self.offered
        assert not self.driver.tickets
        assert self.admission.next_deadline() == NEVER
        assert not self.admission.leaving
        for pool in self.pools:
            pool.nothing_is_left()
        assert self.net() == self.ended_charged
        assert not self.tenants.nothing_is_left()


class PoolAudit:
    def __init__(self, audit: Audit, pool: Any) -> None:
        self.audit, self.pool = audit, pool
        self.books = BucketBooks(pool)
        self.inside = [0, 0, 0]
        self.entered: set[str] = set()  # those who were not refused before they came here
        self.last_left = [-ACTIVE_NS] * 3
        self.since = [10**9] * 3  # dispatches of others since the class's own last one
        self._submit, self._dispatched = pool.submit, pool.scheduler.dispatched
        self._hand_over, self._choose_at_once = pool.hand_over, pool.scheduler.choose_at_once
        pool.submit, pool.scheduler.dispatched = self._submitted, self._chosen
        pool.scheduler.choose_at_once = self._chosen_at_once
        pool.hand_over = self._handed_over

    def _submitted(self, ticket: Ticket, now: int) -> None:
        self.inside[ticket.priority] += 1
        self.entered.add(ticket.ask.request_id)
        self._submit(ticket, now)

    def _handed_over(self, ticket: Ticket, heir: Any, *given: Any) -> None:
        """To be sent again where its model is served by now. When there are other upstreams, all is counted
        again afterwards."""
        for pool in self.audit.pools if not self.audit.regrouping else ():
            if pool.pool is heir:
                pool.inside[ticket.priority] += 1
                pool.entered.add(ticket.ask.request_id)
                self._leaves(ticket.ask.request_id, ticket.priority)
        self._hand_over(ticket, heir, *given)

    def ended(self, event: RequestEnded) -> None:
        if event.request_id in self.entered:
            self._leaves(event.request_id, event.priority)

    def _leaves(self, name: str, priority: Priority) -> None:
        self.entered.remove(name)
        self.inside[priority] -= 1
        self.last_left[priority] = self.audit.now

    def carry_on(self, former: "PoolAudit") -> None:
        """It serves what the other one did."""
        self.since = [max(n, others) for n, others in zip(self.since, former.since, strict=True)]
        for p in PRIORITIES:
            if not former.inside[p]:
                self.last_left[p] = max(self.last_left[p], former.last_left[p])

    def count_again(self, now: int) -> None:
        """Requests came from other pools and went to others."""
        inside = [t for t in self.audit.driver.tickets.values() if t.pool is self.pool and t.stage in INSIDE]
        self.entered = {t.ask.request_id for t in inside}
        for p in PRIORITIES:
            before, self.inside[p] = self.inside[p], sum(t.priority is p for t in inside)
            if before and not self.inside[p]:
                self.last_left[p] = now
        self.books.levels = list(self.pool.buckets.levels)

    # ------------------------------------------------------------------ who goes

    def limited(self, now: int) -> tuple[bool, bool, bool]:
        """For each class whether a higher one has requests, or had one in the last five seconds."""
        p0, p1 = (self.inside[p] > 0 or now < self.last_left[p] + ACTIVE_NS for p in (0, 1))
        return False, p0, p0 or p1

    def _chosen(self, choice: Choice, limited: Sequence[bool], now: int) -> None:
        assert tuple(limited) == self.limited(now)
        expected = self.next_in_order(now)
        assert expected is not None
        head, upstreams, promoted = expected
        assert (choice.ticket, choice.promoted) == (head, promoted)
        assert choice.upstream in upstreams
        assert choice.upstream.in_flight_tokens == min(u.in_flight_tokens for u in upstreams)
        if promoted:
            limit = self.audit.parameters.scheduling.skip_limit[head.priority]
            assert self.since[head.priority] >= limit
            self.audit.met["promoted"] += 1
        self._goes(head)
        self._dispatched(choice, limited, now)

    def _chosen_at_once(self, ticket: Ticket, limited: bool, now: int) -> UpstreamSlots | None:
        """By the contract again: it is alone, so all that counts is whether there is a place for it. One
        whose class is due would be promoted, which is not for here to say."""
        assert not self.pool.room.length
        assert limited == self.limited(now)[ticket.priority]
        skip_limit = self.audit.parameters.scheduling.skip_limit
        is_due = self.pool.scheduler.skipped.get(ticket.priority, 0) >= skip_limit.get(ticket.priority, NEVER)
        free = [u for u in ticket.route.upstreams if self.verdict(ticket, u, limited, False, now) == "free"]
        chosen = self._choose_at_once(ticket, limited, now)
        assert (chosen is None) == (is_due or not free)
        if chosen is not None:
            assert chosen in free
            assert chosen.in_flight_tokens == min(upstream.in_flight_tokens for upstream in free)
            self.audit.met["at once"] += 1
            self._goes(ticket)
        return chosen

    def _goes(self, ticket: Ticket) -> None:
        self.audit.met["dispatched"] += 1
        self.since = [
            0 if p is ticket.priority else n + 1 for p, n in zip(PRIORITIES, self.since, strict=True)
        ]

    def next_in_order(self, now: int) -> tuple[Ticket, list[UpstreamSlots], bool] | None:
        """Who goes next by the contract, where it may go, and whether it is a promotion: a class that is due,
        P2 before P1, and then by class. One that waits only for room keeps those behind it off:
        everybody, if it is of P0 or due; the later ones of its own class in any case."""
        scheduler, limited = self.pool.scheduler, self.limited(now)
        kept_off: set[UpstreamSlots] = set()
        skip_limit = self.audit.parameters.scheduling.skip_limit
        due = [p for p in reversed(PRIORITIES[1:]) if scheduler.skipped[p] >= skip_limit[p]]
        for priority, promoted in [*((p, True) for p in due), *((p, False) for p in PRIORITIES)]:
            waited_for = set(kept_off)
            for head in scheduler.ready[priority].heads():
                free, lacking = [], set()
                for upstream in set(head.route.upstreams) - waited_for:
                    verdict = self.verdict(head, upstream, limited[priority], promoted, now)
                    if verdict == "free":
                        free.append(upstream)
                    elif verdict in ("room", "prefill"):
                        lacking.add(upstream)
                        if verdict == "room" and (promoted or priority is P0):
                            kept_off.add(upstream)
                if free:
                    return head, free, promoted
                waited_for |= lacking
        return None

    def verdict(self, ticket: Ticket, upstream: UpstreamSlots, limited: bool, lifted: bool, now: int) -> str:
        """What the ticket lacks at the upstream: nothing (`free`), `room`, `prefill`, or anything else."""
        scheduling, below = self.audit.parameters.scheduling, ticket.priority is not P0
        limits = upstream.parameters
        part = 1.0 if lifted else self.audit.parameters.classes[ticket.priority].holdback
        if not upstream.healthy or now < self.audit.paused.get(upstream, 0):
            return "down"
        if upstream.load.closes(ticket.priority, upstream.prefills, upstream.in_flight_tokens, now):
            return "busy"
        if below and ticket.is_long:
            taken = upstream.long_prefills >= scheduling.long_prompt_lane
            if taken or (limited and now < upstream.next_long_at):
                return "lane"
        learned = upstream.engine_limit.at(now, sent_back_before=ticket.requeued)
        known = [limit for limit in (limits.max_in_flight, learned) if limit is not None]
        places, tokens = min(known, default=None), upstream.max_in_flight_tokens
        if places is not None and sum(upstream.in_flight) >= part_of(places, part):
            return "room"
        fits = tokens is None or upstream.in_flight_tokens + ticket.total_tokens <= part_of(tokens, part)
        alone = tokens != 0 and sum(upstream.in_flight) == 0
        if not fits and not alone:
            return "room"
        pending = upstream.pending_prefill_tokens
        too_much = pending + ticket.input_tokens > scheduling.max_pending_prefill_tokens
        return "prefill" if below and not lifted and pending and too_much else "free"

    # ------------------------------------------------------------------ what is inside

    def look(self) -> None:
        tickets = [t for t in self.audit.driver.tickets.values() if t.pool is self.pool]
        waiting = [t for t in tickets if t.stage in WAITING]
        running = [t for t in tickets if t.stage is Stage.DISPATCHED]
        self._look_at_places(running)
        self._look_at_queues(waiting)
        self._look_at_charges(tickets)
        assert (
            self.inside
            == self.pool.activity.requests
            == [sum(t.priority is p for t in tickets) for p in PRIORITIES]
        )
        assert self.pool.buckets.limits(self.audit.now) == self.limited(self.audit.now)
        assert self.next_in_order(self.audit.now) is None, "somebody could go and waits"

    def _look_at_places(self, running: list[Ticket]) -> None:
        if self not in self.audit.pools:
            assert all(t.upstream in self.audit.admission.leaving for t in running)
            return
        for ticket in running:
            if ticket.first_token_at is not None or self.audit.now > ticket.assumed_at:
                assert not ticket.prefilling
            elif ticket.ask.streaming or self.audit.now < ticket.assumed_at:
                assert ticket.prefilling
        for slots in self.pool.slots:
            look_at_places(slots, running)

    def _look_at_queues(self, waiting: list[Ticket]) -> None:
        pool, now = self.pool, self.audit.now
        by_route = {id(r): list(r.waiting.values()) for r in pool.room.routes if r.waiting}
        assert sum(len(tickets) for tickets in by_route.values()) == len(waiting)
        for ticket in waiting:
            assert ticket.deadline > now or now in (ticket.arrived_at, ticket.requeued_at)
            assert ticket in by_route[id(ticket.route)]
            assert ticket.upstream is ticket.dispatched_at is None
        for p in PRIORITIES:
            mine = [t for t in waiting if t.priority is p]
            throttled = [t for t in mine if t.stage is Stage.THROTTLED]
            line, ready = pool.throttled[p], pool.scheduler.ready[p]
            assert pool.depth(p) == len(mine)
            assert pool.queued_bytes[p] == sum(t.ask.body_bytes for t in mine)
            assert sorted(t.seq for t in line) == sorted(t.seq for t in throttled)
            assert len(line) == len(throttled)
            assert line.total_cost == sum(t.cost for t in throttled)
            assert ready.length == len(mine) - len(throttled)
            assert sum(len(one) for one in ready._lines.values()) == ready.length
            for tenant in {t.tenant for t in mine}:
                assert line.cost_of(tenant) == sum(t.cost for t in throttled if t.tenant == tenant)
                waits_ready = [t.cost for t in mine if t.tenant == tenant and t.stage is Stage.READY]
                assert ready.cost_of(tenant) == sum(waits_ready)

    def _look_at_charges(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            paid = ticket.stage is not Stage.THROTTLED and not ticket.exempt
            assert ticket.charged == (ticket.cost if paid else 0)
        buckets = self.pool.buckets
        for p in PRIORITIES:
            assert buckets.own_levels[p] <= buckets.levels[p] <= buckets.bursts[p]
            head = self.pool.throttled[p].peek()
            if head is not None:
                own_share = head.is_long and self.limited(self.audit.now)[p]
                level = buckets.own_levels[p] if own_share else buckets.levels[p]
                assert level < min(head.cost * UNITS_PER_MILLITOKEN, buckets.bursts[p]), "it could be paid"

    def nothing_is_left(self) -> None:
        pool = self.pool
        assert pool.room._expiries == []
        assert not pool.assumed
        assert pool.activity.requests == self.inside == [0, 0, 0]
        assert not any(route.waiting for route in pool.room.routes)
        for p in PRIORITIES:
            ready = pool.scheduler.ready[p]
            for line in (pool.throttled[p], *ready._lines.values()):
                assert line.peek() is line._head is None
                assert not [kept for kept in vars(line).values() if isinstance(kept, dict | list) and kept]
                assert line.total_cost == len(line) == 0
                assert not line.counters._waiting
                assert len(line.counters) <= 1100


def look_at_places(slots: UpstreamSlots, inside: Iterable[Ticket]) -> list[int]:
    """The upstream's counts are those of the requests there; answers how many of each class."""
    mine = [t for t in inside if t.upstream is slots and t.stage is Stage.DISPATCHED]
    prefilling = [t for t in mine if t.prefilling]
    assert slots.in_flight == [sum(t.priority is p for t in mine) for p in PRIORITIES]
    assert slots.leases == {t.seq: t for t in mine}
    assert slots.in_flight_total == len(mine)
    assert slots.in_flight_tokens == sum(t.total_tokens for t in mine)
    assert slots.prefills == len(prefilling)
    assert slots.pending_prefill_tokens == sum(t.input_tokens for t in prefilling)
    assert slots.long_prefills == sum(t.is_long and t.priority is not P0 for t in prefilling)
    return slots.in_flight


def _models(engines: Iterable[UpstreamSlots]) -> set[str]:
    return {model for slots in engines for model in slots.parameters.models}


def part_of(limit: int, part: float) -> int:
    return max(ceil(limit * part - 1e-9), 1) if limit else 0
