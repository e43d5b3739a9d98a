"""Who waits, for tokens or for a place: with how many bytes, and until when."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from gateway.policy.clock import NEVER
from gateway.policy.priority_queue import insert_by_arrival
from gateway.policy.request import PRIORITIES, Stage, Ticket
from gateway.policy.routes import Routes

WAITING = (Stage.THROTTLED, Stage.READY)


class WaitingRoom:
    """`no_upstream_ns`: how long to wait for upstreams that are all down."""

    def __init__(self, no_upstream_ns: int) -> None:
        self.no_upstream_ns = no_upstream_ns
        self.queued_bytes = [0] * len(PRIORITIES)
        self.routes = Routes()
        self.length = 0
        self._expiries: list[tuple[int, int, Ticket]] = []  # some of tickets that wait no longer

    # ------------------------------------------------------------------ coming and going

    def tickets(self) -> list[Ticket]:
        """All that wait here, by arrival."""
        tickets = (ticket for route in self.routes for ticket in route.waiting.values())
        return sorted(tickets, key=lambda ticket: ticket.seq)

    def enter(self, ticket: Ticket) -> None:
        self.queued_bytes[ticket.priority] += ticket.ask.body_bytes
        self.length += 1
        insert_by_arrival(ticket, ticket.route.waiting)
        heappush(self._expiries, (ticket.deadline, ticket.seq, ticket))

    def leave(self, ticket: Ticket) -> None:
        self.queued_bytes[ticket.priority] -= ticket.ask.body_bytes
        self.length -= 1
        del ticket.route.waiting[ticket.seq]
        if len(self._expiries) > 2 * self.length + 64:
            self.drop_expiries()

    def drop_expiries(self) -> None:
        """Know once of each who is here when its time is over, and of nobody else."""
        self._expiries = [(ticket.deadline, ticket.seq, ticket) for ticket in self.tickets()]
        heapify(self._expiries)

    # ------------------------------------------------------------------ time

    def anybody_over(self, until: int) -> bool:
        """Whether `over` may find somebody: a quick look before the closer one."""
        return bool(self.routes.down) or (bool(self._expiries) and self._expiries[0][0] <= until)

    def over(self, until: int) -> Ticket | None:
        """One whose time was over by then, to be ended before the next is asked for."""
        while self._expiries and self._expiries[0][0] <= until:
            ticket = heappop(self._expiries)[2]
            if ticket.stage in WAITING:
                return ticket
        at, _, gives_up = min(self._without_upstream(), default=(NEVER, 0, None))
        return gives_up if at <= until else None

    def next_deadline(self) -> int:
        """When the next one's time is over; NEVER when nobody waits."""
        while self._expiries and self._expiries[0][2].stage not in WAITING:
            heappop(self._expiries)
        if not self._expiries:
            return NEVER
        first = min(self._expiries[0][0], NEVER)
        return min([first, *(at for at, _, _ in self._without_upstream())]) if self.routes.down else first

    def _without_upstream(self) -> Iterator[tuple[int, int, Ticket]]:
        """When and who gives up first of those that wait for upstreams that are all down, of each route."""
        for route in self.routes.down:
            if route.down_since is not None and route.waiting:
                seq, oldest = next(iter(route.waiting.items()))
                yield max(oldest.arrived_at, route.down_since) + self.no_upstream_ns, seq, oldest
