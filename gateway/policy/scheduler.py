"""Who goes next when a place is free.

Strict order P0 > P1 > P2, with one exception that lets nobody starve. Each time a class with a waiting,
paid head is passed over though its upstream is healthy and its lane free (holdback ignored), its skip
count rises. At `skip_limit` the class is *due*: it goes first once, holdback and pending prefill lifted
for that one, and its count restarts. If both are due, P2 goes first. With limits 2 and 19, P1 gets about
one dispatch in three and P2 one in twenty, however full P0 is.

A head of P0, or of a due class, that waits only for room keeps the classes behind it off its upstreams:
otherwise a large request would see small ones take each place that becomes free. For the same reason no
head of a class overtakes an earlier one of that class at an upstream where that one waits for room; only
one that waits for the lane is overtaken.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gateway.policy.clock import NEVER
from gateway.policy.parameters import ClassParameters
from gateway.policy.priority_queue import FairQueue, ServiceCounters
from gateway.policy.request import PRIORITIES, Priority, Ticket
from gateway.policy.routes import Route
from gateway.policy.upstream_slots import Admits, UpstreamSlots

P0 = Priority.P0
YES, NO_ROOM, NO_PREFILL_ROOM = Admits.YES, Admits.NO_ROOM, Admits.NO_PREFILL_ROOM


class ReadyClass:
    """The paid requests of one class, in one fair line per route."""

    def __init__(self) -> None:
        self.counters = ServiceCounters()
        self._lines: dict[Route, FairQueue] = {}
        self.length = 0

    def push(self, ticket: Ticket) -> bool:
        """Whether the ticket is now the head of its line."""
        line = self._lines.get(ticket.route)
        if line is None:
            line = self._lines[ticket.route] = FairQueue(self.counters)
        line.push(ticket)
        self.length += 1
        return line.peek() is ticket

    def pop(self, ticket: Ticket) -> None:
        """Take this head out of its line."""
        popped = self._lines[ticket.route].pop()
        assert popped is ticket
        self.length -= 1

    def remove(self, ticket: Ticket) -> None:
        self._lines[ticket.route].remove(ticket)
        self.length -= 1

    def move(self, ticket: Ticket, route: Route) -> None:
        """Give a ticket another route. It is never out of all lines, which would cost its tenant its turn."""
        former = self._lines[ticket.route]
        ticket.route = route
        self.push(ticket)
        former.remove(ticket)
        self.length -= 1

    def keep(self, routes: Iterable[Route]) -> None:
        """Forget the lines of all other routes; nobody waits there."""
        kept = set(routes)
        for route in [route for route in self._lines if route not in kept]:
            self.counters.detach(self._lines.pop(route))

    def heads(self) -> list[Ticket]:
        """The first of each line, least served tenant first."""
        heads = []
        for line in self._lines.values():
            if line.length:
                head = line.peek()
                assert head is not None
                heads.append(head)
        if len(heads) > 1:
            heads.sort(key=lambda t: (self.counters.of(t.tenant), t.seq))
        return heads

    def line(self, route: Route) -> FairQueue:
        return self._lines[route]

    def cost_of(self, tenant: str) -> int:
        """What waits of the tenant in all lines, in millitokens."""
        return sum(line.cost_of(tenant) for line in self._lines.values())

    def heavy_tenants(self) -> Iterator[str]:
        """The tenant with the largest waiting cost of each line."""
        for line in self._lines.values():
            heaviest = line.heaviest_tenant()
            if heaviest is not None:
                yield heaviest[0]

    def newest_of(self, tenant: str) -> Ticket | None:
        newest = [line.newest_of(tenant) for line in self._lines.values() if line.waiting_of(tenant)]
        return max(newest, key=lambda ticket: ticket.seq, default=None)


class Choice(NamedTuple):
    ticket: Ticket
    upstream: UpstreamSlots
    promoted: bool


class Scheduler:
    def __init__(
        self,
        classes: Mapping[Priority, ClassParameters],
        skip_limit: Mapping[Priority, int],
    ) -> None:
        self.ready = [ReadyClass() for _ in PRIORITIES]
        self.skipped: dict[Priority, int] = {}
        self.reconfigure(classes, skip_limit)

    def reconfigure(
        self, classes: Mapping[Priority, ClassParameters], skip_limit: Mapping[Priority, int]
    ) -> None:
        """Other settings; the counts stay."""
        self._holdback = [classes[p].holdback for p in PRIORITIES]
        self._due_at = {p: skip_limit[p] for p in reversed(PRIORITIES) if p in skip_limit}  # P2 before P1
        self.skipped = {p: self.skipped.get(p, 0) for p in skip_limit}

    def carry_on(self, other: "Scheduler") -> None:
        """Who was passed over there was passed over."""
        for priority, count in other.skipped.items():
            self.skipped[priority] = max(self.skipped.get(priority, 0), count)

    @property
    def anybody_ready(self) -> bool:
        p0, p1, p2 = self.ready
        return bool(p0.length or p1.length or p2.length)

    def choose(self, limited: Sequence[bool], now: int) -> Choice | None:
        """Who is to be dispatched now, and where; None when nobody can go. Changes nothing but the
        places in line: `dispatched` must follow."""
        kept_off: set[UpstreamSlots] = set()
        for priority, limit in self._due_at.items():
            if self.skipped[priority] >= limit and self.ready[priority].length:
                found = self._find(priority, limited[priority], now, kept_off, promoted=True)
                if found is not None:
                    return found
        for priority in PRIORITIES:
            if self.ready[priority].length:
                found = self._find(priority, limited[priority], now, kept_off, promoted=False)
                if found is not None:
                    return found
        return None

    def choose_at_once(self, ticket: Ticket, limited: bool, now: int) -> UpstreamSlots | None:
        """Where a request goes that finds nobody waiting, counted as gone: what `choose` and `dispatched`
        come to for one that is alone, at less than half the cost. None, and nothing changed, if no upstream
        admits it, or its class is due."""
        priority = ticket.priority
        if self.skipped.get(priority, 0) >= self._due_at.get(priority, NEVER):
            return None
        holdback = self._holdback[priority]
        best: UpstreamSlots | None = None
        for upstream in ticket.route.upstreams:
            admitted = upstream.admits(ticket, holdback, limited, now) is YES
            if admitted and (best is None or upstream.burden < best.burden):
                best = upstream
        if best is not None:
            self.ready[priority].counters.serve_at_once(ticket.tenant, ticket.cost)
            if priority in self.skipped:
                self.skipped[priority] = 0
        return best

    def _find(
        self, priority: Priority, limited: bool, now: int, kept_off: set[UpstreamSlots], promoted: bool
    ) -> Choice | None:
        holdback = self._holdback[priority]
        keeps_off = promoted or priority is P0
        waited_for = set(kept_off)  # by an earlier head of this class: no later one overtakes it there
        for head in self.ready[priority].heads():
            best: UpstreamSlots | None = None
            short_of_room: list[tuple[UpstreamSlots, Admits]] = []
            for upstream in head.route.upstreams:
                if upstream in waited_for:
                    continue
                verdict = upstream.admits(head, holdback, limited, now, lifted=promoted)
                if verdict is YES:
                    if best is None or upstream.burden < best.burden:
                        best = upstream
                elif verdict is NO_ROOM or verdict is NO_PREFILL_ROOM:
                    short_of_room.append((upstream, verdict))
            if best is not None:
                return Choice(head, best, promoted)
            for upstream, verdict in short_of_room:
                waited_for.add(upstream)
                if keeps_off and verdict is NO_ROOM:
                    kept_off.add(upstream)
        return None

    def dispatched(self, choice: Choice, limited: Sequence[bool], now: int) -> None:
        """Take the chosen one out of its line, and count who was passed over for it.

        Call before the lease changes the upstream, so that all see the place that was free."""
        chosen = choice.ticket
        self.ready[chosen.priority].pop(chosen)
        for priority in self.skipped:
            if priority is chosen.priority:
                self.skipped[priority] = 0
            elif self.ready[priority].length and self._could_go(
                priority, choice.upstream, limited[priority], now
            ):
                self.skipped[priority] += 1

    def _could_go(self, priority: Priority, upstream: UpstreamSlots, limited: bool, now: int) -> bool:
        for head in self.ready[priority].heads():
            if upstream in head.route.upstreams:
                verdict = upstream.admits(head, 1.0, limited, now)
                if verdict is YES or verdict is NO_ROOM or verdict is NO_PREFILL_ROOM:
                    return True
        return False
