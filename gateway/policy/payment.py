"""Who has paid: the class buckets, and the lines of those for whom these hold too little.

A request is charged when it leaves the line, or at once where nobody stands there; what it was charged is
replaced by what it used, or given back if it does not run. In the line the order is that of fair turns, and
the head, once seen, is not pushed back.
"""

from collections.abc import Iterator

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.priority_queue import FairQueue, ServiceCounters
from gateway.policy.request import PRIORITIES, Priority, Ticket
from gateway.policy.token_bucket import UNITS_PER_MILLITOKEN, TokenBuckets


class Payment:
    def __init__(self, buckets: TokenBuckets) -> None:
        self.buckets = buckets
        self.throttled = [FairQueue(ServiceCounters(), sticky_head=True) for _ in PRIORITIES]

    def on_own_share(self, ticket: Ticket, now: int) -> bool:
        """Long prompts below P0 are not paid with lent tokens while a higher class is active."""
        return ticket.is_long and self.buckets.limited(ticket.priority, now)

    def affords(self, ticket: Ticket, now: int) -> bool:
        return self.buckets.affords(ticket.priority, ticket.cost, self.on_own_share(ticket, now))

    def charge(self, ticket: Ticket, now: int) -> None:
        ticket.on_own_share = self.on_own_share(ticket, now)
        ticket.own_units = self.buckets.take(ticket.priority, ticket.cost, ticket.on_own_share)
        ticket.charged = ticket.cost

    def leaving(self, now: int) -> Iterator[Ticket]:
        """Those that can pay now, each taken out of its line before it is told, to be charged before the next
        one is asked for."""
        for line in self.throttled:
            while line.length:
                head = line.peek()
                assert head is not None
                if not self.affords(head, now):
                    break
                yield line.pop()

    def first(self, now: int, before: int) -> int:
        """When the first of the heads can pay, if that is before then; else `before`."""
        for priority, line in zip(PRIORITIES, self.throttled, strict=True):
            if line.length:
                head = line.peek()
                assert head is not None
                own = self.on_own_share(head, now)
                horizon = before - now if before > now else 1
                paid = self.buckets.time_until(priority, head.cost, own, horizon + 1)
                if paid < before:
                    before = paid
        return before

    def settle(self, ticket: Ticket, actual_cost: int) -> None:
        """Replace what was charged by what was used."""
        ticket.charged = self.buckets.settle(
            ticket.priority, ticket.charged, actual_cost, ticket.on_own_share, ticket.own_units
        )

    def give_back(self, ticket: Ticket) -> None:
        """All that was charged to one that has paid and will not run."""
        self.buckets.settle(ticket.priority, ticket.charged, 0, ticket.on_own_share, ticket.own_units)
        self.throttled[ticket.priority].counters.correct(ticket.tenant, -ticket.charged)
        ticket.charged = 0

    def credit(self, priority: Priority, throttle_ns: int) -> int:
        """How far behind a tenant may be that comes back, millitokens: by as much as its class lets one ask
        for at once, which is its burst and what its rate pays within the throttle time."""
        burst = self.buckets.bursts[priority] // UNITS_PER_MILLITOKEN
        return burst + self.buckets.rates[priority] * throttle_ns // NANOSECONDS_PER_SECOND
