"""Who is told no, and with what word. Decides only; the pool acts on it.

Two limits make a class's newcomers give way: the line of those who wait for tokens may be as long as the
class's throttle time pays for, and all that wait stay within the class's bounds. For an arrival beyond them
a tenant loses its newest request: in the line for tokens the one whose newest would be served last, beyond
the bounds the one with the largest waiting cost. It is the arrival itself, if that is its tenant. So a
tenant that asks for far more than its turn is refused its own excess, and not the others theirs.
"""

from typing import TYPE_CHECKING, NamedTuple

from gateway.policy.clock import NEVER, to_seconds
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import MILLITOKENS
from gateway.policy.patience import DISPATCHES_MIN, HOPELESS, class_wait_limit_ns, cost_ahead
from gateway.policy.request import Priority, Refusal, Stage, Ticket
from gateway.policy.upstream_slots import Admits

if TYPE_CHECKING:
    from gateway.policy.pool import Pool


class Told(NamedTuple):
    """Who is to be refused, and how."""

    ticket: Ticket
    refusal: Refusal


class Refusals:
    def __init__(self, pool: "Pool") -> None:
        self._pool = pool

    # ------------------------------------------------------------------ short of tokens

    def too_long_a_wait(self, ticket: Ticket, wait_limit: int, now: int) -> Refusal | None:
        """The no to a request for which tokens would come too late, None if they may be in time."""
        pool, priority = self._pool, ticket.priority
        line = pool.throttled[priority]
        ahead = cost_ahead(line, ticket.tenant, ticket.cost)
        own_share = pool.payment.on_own_share(ticket, now)
        wait = pool.buckets.predicted_wait_ns(priority, ticket.cost, ahead, own_share)
        head = line.peek()
        if head is not None and pool.payment.on_own_share(head, now):  # it waits for less than what flows in
            wait = max(wait, pool.buckets.predicted_wait_ns(priority, head.cost, 0, own_share=True))
        if wait <= min(wait_limit, pool.classes[priority].max_throttle_ns):
            return None
        return self._too_few_tokens(priority, wait)

    def beyond_the_throttle(self, arrival: Ticket, now: int) -> Told | None:
        """Who must go so that the line for tokens, with the arrival, is no longer than the class may be
        throttled; None when it is not. The head, which was chosen, never must."""
        pool, priority = self._pool, arrival.priority
        line, limits = pool.throttled[priority], pool.classes[priority]
        wait = pool.buckets.predicted_wait_ns(priority, arrival.cost, line.total_cost, own_share=False)
        longest = min(limits.max_throttle_ns, class_wait_limit_ns(limits, pool.scheduling))
        last = line.last_in_turn()
        if wait <= longest or last is None:
            return None
        tenant, counter = last
        victim = line.newest_of(tenant)
        own = line.counters.of_waiting(arrival.tenant) + line.cost_of(arrival.tenant) + arrival.cost
        if counter <= own or victim is line.peek():
            victim = arrival
        return Told(victim, self._too_few_tokens(priority, wait))

    def _too_few_tokens(self, priority: Priority, wait: int) -> Refusal:
        if wait >= NEVER:
            return Refusal(Outcome.REJECTED_RATE, f"the {priority.name} token bucket lets nothing pass", None)
        rate = self._pool.buckets.prospect(priority, own_share=False) / MILLITOKENS
        detail = (
            f"the {priority.name} token bucket ({rate:g} tokens/s) could pay this request "
            f"in about {to_seconds(wait):.3g} s"
        )
        return Refusal(Outcome.REJECTED_RATE, detail, wait)

    # ------------------------------------------------------------------ short of places

    def no_place_in_time(self, ticket: Ticket, now: int) -> Refusal | None:
        """The no to a paid request for which a place would come far too late."""
        priority = ticket.priority
        line = self._pool.scheduler.ready[priority].line(ticket.route)
        ahead = min(len(line), line.waiting_of(ticket.tenant) * line.tenants)
        wait = self._pool.turns.places[priority].time_for(ahead, now, least=DISPATCHES_MIN)
        if wait is None or wait <= HOPELESS * (ticket.deadline - now):
            return None
        detail = f"a {priority.name} request would get a place in about {to_seconds(wait):.3g} s: too late"
        return Refusal(Outcome.QUEUE_TIMEOUT, detail, wait)

    def beyond_the_bounds(self, arrival: Ticket) -> Told | None:
        """Who must go so that the class, which the arrival has joined, is back within its bounds; None when
        it is."""
        pool, priority = self._pool, arrival.priority
        limits, size = pool.classes[priority], arrival.ask.body_bytes
        if not (
            _above(pool.depth(priority), limits.max_queued_requests)
            or _above(pool.queued_bytes[priority], limits.max_queued_bytes)
        ):
            return None
        never_fits = limits.max_queued_requests == 0 or _above(size, limits.max_queued_bytes)
        victim = arrival if never_fits else self._newest_of_the_heaviest(arrival)
        detail = f"the {priority.name} queue is full ({pool.depth(priority) - 1} waiting)"
        return Told(victim, self._come_back(Outcome.REJECTED_QUEUE_FULL, priority, detail))

    def _newest_of_the_heaviest(self, arrival: Ticket) -> Ticket:
        line = self._pool.throttled[arrival.priority]
        ready = self._pool.scheduler.ready[arrival.priority]
        throttled = line.heaviest_tenant()
        heavy = {*ready.heavy_tenants()} if throttled is None else {throttled[0], *ready.heavy_tenants()}

        def waiting_cost(tenant: str) -> int:
            return line.cost_of(tenant) + ready.cost_of(tenant)

        heaviest = max(sorted(heavy), key=waiting_cost)
        if waiting_cost(heaviest) <= waiting_cost(arrival.tenant):
            return arrival
        newest = line.newest_of(heaviest) if line.waiting_of(heaviest) else ready.newest_of(heaviest)
        assert newest is not None
        return newest

    # ------------------------------------------------------------------ waited in vain

    def waited_too_long(self, ticket: Ticket, now: int) -> Refusal:
        waited = f"after {to_seconds(now - ticket.arrived_at):.3g} s"
        if not ticket.route.healthy:
            return Refusal(Outcome.REJECTED_NO_UPSTREAM, f"no engine that serves this model is up, {waited}")
        what = "no tokens of its class" if ticket.stage is Stage.THROTTLED else "no place at an engine"
        detail = f"{ticket.priority.name} request got {what} {waited}"
        return self._come_back(Outcome.QUEUE_TIMEOUT, ticket.priority, detail)

    def _come_back(self, outcome: Outcome, priority: Priority, detail: str) -> Refusal:
        """A refusal with the queue's drain estimate as advice."""
        return Refusal(outcome, detail, self._pool.drained_after_ns(priority))

    # ------------------------------------------------------------------ observed only

    def would_be(self, ticket: Ticket, wait_limit: int, now: int) -> Outcome | None:
        """How a request of an observed class would be refused just now, None if it would go or may wait.
        Nobody waits in an observed class, so how long a wait for a place would last is not known."""
        pool, limits = self._pool, self._pool.classes[ticket.priority]
        if not ticket.route.healthy:
            return Outcome.REJECTED_NO_UPSTREAM
        waits = not pool.payment.affords(ticket, now)
        if waits and (refusal := self.too_long_a_wait(ticket, wait_limit, now)) is not None:
            return refusal.outcome
        limited = pool.buckets.limited(ticket.priority, now)
        verdicts = [u.admits(ticket, limits.holdback, limited, now) for u in ticket.route.upstreams]
        waits = waits or Admits.YES not in verdicts
        no_queue = limits.max_queued_requests == 0 or _above(ticket.ask.body_bytes, limits.max_queued_bytes)
        return Outcome.REJECTED_QUEUE_FULL if waits and no_queue else None


def _above(value: int, limit: int | None) -> bool:
    return limit is not None and value > limit
