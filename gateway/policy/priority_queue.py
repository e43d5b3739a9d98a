"""Waiting requests of one class: fair between tenants, first come first served within one.

Theory: virtual counters as in the Virtual Token Counter of fair LLM serving (Sheng et al., OSDI 2024), a
form of start-time fair queueing. Each tenant has a counter of the service it received (cost in
millitokens); the tenant with the smallest counter goes next, ties by arrival. A tenant that comes back
after having nothing waiting is lifted to the smallest counter among those waiting, less `credit`: silence
earns so much and no more. Without any, one that asks for less than its share but not all the time would
begin level with one that always waits, and lose to it what it left unused a moment ago. (Linux' fair
scheduler places those that wake up in the same way.) Every operation is O(log n) in the number of waiting
tenants, and a step of the walk through those `less_served` is O(1).

Several queues may share one `ServiceCounters`: then fairness holds over all of them together.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import takewhile

from gateway.policy.request import Ticket

_COUNTERS_KEPT = 1024


def insert_by_arrival(ticket: Ticket, tickets: OrderedDict[int, Ticket]) -> None:
    """Behind those that came before it: mostly all of them. Of one that waits again most came after it."""
    newest = next(reversed(tickets), ticket.seq)
    tickets[ticket.seq] = ticket
    if newest > ticket.seq:
        earlier = list(takewhile(lambda seq: seq < ticket.seq, tickets))
        for seq in (ticket.seq, *reversed(earlier)):
            tickets.move_to_end(seq, last=False)


class ServiceCounters:
    """Service received per tenant, in millitokens. `credit`: how far a known tenant that comes back may be
    behind the least served of those that wait."""

    def __init__(self) -> None:
        self.credit = 0
        self._service: dict[str, int] = {}
        self._waiting: dict[str, int] = {}  # tenant → queues in which it waits
        self._queues: list[FairQueue] = []
        self._floor = 0  # counter of the last one served: where a busy spell that has ended stood

    def attach(self, queue: "FairQueue") -> None:
        self._queues.append(queue)

    def detach(self, queue: "FairQueue") -> None:
        """Nobody waits in that queue, nor will again."""
        self._queues.remove(queue)

    def enter(self, tenant: str) -> None:
        """The tenant starts to wait in one more queue."""
        queues = self._waiting.get(tenant, 0)
        if not queues:
            self._service[tenant] = self.of_waiting(tenant)
        self._waiting[tenant] = queues + 1
        if not queues and len(self._service) > _COUNTERS_KEPT + 2 * len(self._waiting):
            self._forget()

    def of_waiting(self, tenant: str) -> int:
        """The counter with which the tenant waits, or would if it came now. One that nobody knows has not
        been silent: it has no credit."""
        if tenant in self._waiting:
            return self._service[tenant]
        own = self._service.get(tenant)
        lowest = self._lowest()
        return max(0, lowest) if own is None else max(own, lowest - self.credit)

    def _lowest(self) -> int:
        """The smallest counter of those that wait, or of the last that did."""
        lowest: int | None = None
        for queue in self._queues:
            if queue.length:
                counter = queue.lowest_counter()
                if lowest is None or counter < lowest:
                    lowest = counter
        return self._floor if lowest is None else lowest

    def leave(self, tenant: str) -> None:
        queues = self._waiting[tenant] - 1
        if queues:
            self._waiting[tenant] = queues
        else:
            del self._waiting[tenant]

    def of(self, tenant: str) -> int:
        return self._service.get(tenant, 0)

    def serve(self, tenant: str, cost: int) -> None:
        """The tenant, the least served of the waiting ones, receives `cost`."""
        self._floor = max(self._floor, self.of(tenant))
        self.correct(tenant, cost)

    def serve_at_once(self, tenant: str, cost: int) -> None:
        """As if the tenant had entered a queue, been served there and left it."""
        if tenant in self._waiting or self._has_many(len(self._waiting) + 1):
            self.enter(tenant)
            self.serve(tenant, cost)
            self.leave(tenant)
        else:
            counter = self.of_waiting(tenant)
            self._service[tenant] = counter + cost
            if counter > self._floor:
                self._floor = counter

    def _has_many(self, waiting: int) -> bool:
        """Whether one more tenant than are known may be too many, while so many wait."""
        return len(self._service) >= _COUNTERS_KEPT + 2 * waiting

    def correct(self, tenant: str, difference: int) -> None:
        """Service turned out to be larger (or, negative, smaller) than what was counted."""
        if difference:
            self._service[tenant] = self.of(tenant) + difference
            if tenant in self._waiting:
                for queue in self._queues:
                    queue.place(tenant)

    def follow(self, other: "ServiceCounters") -> None:
        """Know what tenants were served elsewhere. Counters of two places have nothing in common but that the
        least served goes next: what counts is how far a tenant is ahead of that one."""
        if not self._service:
            self._floor = other._lowest()
        shift = self._lowest() - other._lowest()
        for tenant, service in other._service.items():
            more = service + shift - self.of(tenant)
            if tenant not in self._service:
                self._service[tenant] = service + shift
            elif more > 0:
                self.correct(tenant, more)

    def _forget(self) -> None:
        """Drop half of what is kept of tenants that do not wait, least served first: a return would lift
        most of those anyway."""
        silent = [t for t in self._service if t not in self._waiting]
        silent.sort(key=self._service.__getitem__)
        for tenant in silent[: max(len(silent) - _COUNTERS_KEPT // 2, 0)]:
            del self._service[tenant]

    def __len__(self) -> int:
        return len(self._service)


class FairQueue:
    """Tickets that wait, in the order of the least served tenant.

    With `sticky_head` a ticket once seen at the head stays there until it is taken or removed: later
    arrivals of a less served tenant do not push it back while it waits for its tokens.
    """

    def __init__(self, counters: ServiceCounters, sticky_head: bool = False) -> None:
        self.counters = counters
        counters.attach(self)
        self._sticky = sticky_head
        self._head: Ticket | None = None
        self._by_tenant: dict[str, OrderedDict[int, Ticket]] = {}
        self._places: dict[str, tuple[int, int, str]] = {}  # the entry of `_order` that is in force
        self._order: list[tuple[int, int, str]] = []  # (counter, seq of the tenant's first, tenant)
        self._first: tuple[int, int, str] | None = None  # in force, until places change; None: look
        self._costs: dict[str, int] = {}
        self._heaviest: list[tuple[int, str]] | None = None  # (−cost, tenant), some out of date
        self._last: list[tuple[int, str]] | None = None  # (−counter − cost, tenant), some out of date
        self.total_cost = 0
        self.length = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Ticket]:
        for tickets in list(self._by_tenant.values()):
            yield from list(tickets.values())

    def push(self, ticket: Ticket) -> None:
        """Add a ticket behind those of its tenant that came before it."""
        tenant = ticket.tenant
        tickets = self._by_tenant.get(tenant)
        if tickets is None:
            self.counters.enter(tenant)
            tickets = self._by_tenant[tenant] = OrderedDict()
            self._costs[tenant] = 0
        insert_by_arrival(ticket, tickets)
        self.length += 1
        self._add_cost(tenant, ticket.cost)
        self.place(tenant)

    def pass_through(self, ticket: Ticket) -> None:
        """As if pushed and popped at once, which is what an empty queue does."""
        self.counters.serve_at_once(ticket.tenant, ticket.cost)

    def peek(self) -> Ticket | None:
        """Who is next; None when nobody waits."""
        if self._head is not None:
            return self._head
        place = self._first_place()
        if place is None:
            return None
        head = self._by_tenant[place[2]][place[1]]
        if self._sticky:
            self._head = head
        return head

    def lowest_counter(self) -> int:
        """The smallest counter of a tenant that waits here; somebody does."""
        place = self._first_place()
        assert place is not None
        return place[0]

    def _first_place(self) -> tuple[int, int, str] | None:
        if self._first is not None:
            return self._first
        order = self._order
        while order:
            place = order[0]
            if self._places.get(place[2]) is place:
                self._first = place
                return place
            heappop(order)
        return None

    def pop(self) -> Ticket:
        """Take the head and count its cost as service to its tenant."""
        ticket = self.peek()
        if ticket is None:
            raise IndexError("nobody waits")
        self.remove(ticket)
        self.counters.serve(ticket.tenant, ticket.cost)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out, wherever it stands, without counting service."""
        if ticket is self._head:
            self._head = None
        tenant = ticket.tenant
        tickets = self._by_tenant[tenant]
        del tickets[ticket.seq]
        self.length -= 1
        self._add_cost(tenant, -ticket.cost)
        if tickets:
            self.place(tenant)
        else:
            del self._by_tenant[tenant]
            del self._costs[tenant]
            del self._places[tenant]
            self._first = None
            self.counters.leave(tenant)

    def place(self, tenant: str) -> None:
        """Put the tenant where its counter and its first ticket now belong."""
        tickets = self._by_tenant.get(tenant)
        if not tickets:
            return
        place = (self.counters.of(tenant), next(iter(tickets)), tenant)
        places, order = self._places, self._order
        if places.get(tenant) == place:
            return
        places[tenant] = place
        first = self._first
        if first is not None and (place < first or tenant == first[2]):
            self._first = None
        if self._last is not None:
            self._note_last(tenant)
        heappush(order, place)
        if len(order) > 2 * len(places) + 16:
            self._order = list(places.values())
            heapify(self._order)

    @property
    def tenants(self) -> int:
        """How many tenants wait."""
        return len(self._by_tenant)

    def waiting_of(self, tenant: str) -> int:
        """How many requests of the tenant wait."""
        return len(self._by_tenant.get(tenant, ()))

    def cost_of(self, tenant: str) -> int:
        """What waits of the tenant, in millitokens."""
        return self._costs.get(tenant, 0)

    @property
    def costs(self) -> Mapping[str, int]:
        """What waits of each tenant that does, in millitokens."""
        return self._costs

    def heaviest_tenant(self) -> tuple[str, int] | None:
        """The tenant with the largest waiting cost, and that cost in millitokens."""
        heap = self._heaviest
        if heap is None:  # nobody has asked since the queue was last empty: only now is it kept
            heap = self._heaviest = [(-cost, tenant) for tenant, cost in self._costs.items()]
            heapify(heap)
        while heap:
            cost, tenant = -heap[0][0], heap[0][1]
            if self._costs.get(tenant) == cost:
                return tenant, cost
            heappop(heap)
        return None

    def last_in_turn(self) -> tuple[str, int] | None:
        """The tenant whose newest will be the last one served, and the tenant's counter then."""
        heap = self._last
        if heap is None:
            heap = self._last = [(-self._final_counter(tenant), tenant) for tenant in self._costs]
            heapify(heap)
        while heap:
            counter, tenant = -heap[0][0], heap[0][1]
            if tenant in self._costs and self._final_counter(tenant) == counter:
                return tenant, counter
            heappop(heap)
        return None

    def less_served(self, counter: int) -> Iterator[str]:
        """The tenants that wait with a smaller counter, in no order: a walk from the top of the heap."""
        order, places = self._order, [0]
        while places:
            i = places.pop()
            if i < len(order) and order[i][0] < counter:
                if self._places.get(order[i][2]) is order[i]:
                    yield order[i][2]
                places += (2 * i + 1, 2 * i + 2)

    def newest_of(self, tenant: str) -> Ticket:
        tickets = self._by_tenant[tenant]
        return tickets[next(reversed(tickets))]

    def _final_counter(self, tenant: str) -> int:
        return self.counters.of(tenant) + self._costs[tenant]

    def _note_last(self, tenant: str) -> None:
        assert self._last is not None
        heappush(self._last, (-self._final_counter(tenant), tenant))
        if not self.length or len(self._last) > 2 * len(self._costs) + 64:
            self._last = None

    def _add_cost(self, tenant: str, cost: int) -> None:
        self.total_cost += cost
        self._costs[tenant] += cost
        if self._last is not None:
            self._note_last(tenant)
        if self._heaviest is not None:
            heappush(self._heaviest, (-self._costs[tenant], tenant))
            if not self.length or len(self._heaviest) > 2 * len(self._costs) + 64:
                self._heaviest = None
