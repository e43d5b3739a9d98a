"""Who waits where and until when: memory that stays bounded, patience with upstreams that are all down."""

import random
from typing import Any

from gateway.policy.clock import NEVER
from gateway.policy.parameters import SchedulingParameters
from gateway.policy.request import Priority, Stage, Ticket
from gateway.policy.upstream_slots import UpstreamSlots
from gateway.policy.waiting_room import WaitingRoom
from tests.support.policy_settings import P0, P1, P2, ask, upstream


class Bench:
    """A room with two upstreams; times are plain numbers. Patience is 10."""

    def __init__(self) -> None:
        self.room = WaitingRoom(10)
        self.a, self.b = (UpstreamSlots(upstream(name), SchedulingParameters()) for name in "ab")
        self.seq = 0

    def ticket(self, *upstreams: UpstreamSlots, until: int = 1000, now: int = 0, **given: Any) -> Ticket:
        self.seq += 1
        given = {"priority": P1, **given}
        ticket = Ticket(self.seq, ask(f"r{self.seq}", **given), now)
        ticket.deadline = until
        ticket.route = self.room.routes.to(upstreams or (self.a,), False, now)
        return ticket

    def enter(self, *upstreams: UpstreamSlots, **given: Any) -> Ticket:
        ticket = self.ticket(*upstreams, **given)
        self.room.enter(ticket)
        return ticket

    def end(self, ticket: Ticket) -> None:
        self.room.leave(ticket)
        ticket.stage = Stage.ENDED

    def over(self, until: int) -> list[int]:
        """All whose time is over by then, ended in turn."""
        found = []
        while (ticket := self.room.over(until)) is not None:
            found.append(ticket.seq)
            self.end(ticket)
        return found

    def down(self, *upstreams: UpstreamSlots, at: int) -> None:
        for slots in upstreams:
            slots.set_health(False)
        self.room.routes.health_changed(at)


def test_each_is_over_at_its_own_time_those_of_one_instant_by_arrival() -> None:
    """And not before; who has left is not found."""
    bench = Bench()
    times = [5, 3, 5, 9, 3]
    tickets = [bench.enter(until=at) for at in times]
    bench.end(tickets[3])
    assert bench.room.next_deadline() == 3
    assert bench.over(2) == []
    assert bench.over(4) == [2, 5]
    assert bench.room.next_deadline() == 5
    assert bench.over(100) == [1, 3]
    assert bench.room.next_deadline() == NEVER


def test_bytes_by_class() -> None:
    """Counted while they wait."""
    bench = Bench()
    sizes: list[tuple[Priority, int]] = [(P0, 1), (P2, 20), (P0, 300)]
    tickets = [bench.enter(priority=p, body_bytes=n) for p, n in sizes]
    assert bench.room.queued_bytes == [301, 0, 20]
    bench.end(tickets[0])
    bench.end(tickets[1])
    assert bench.room.queued_bytes == [300, 0, 0]


def test_thousands_that_came_and_went_leave_nothing() -> None:
    """However long some wait meanwhile, in whatever order the others leave."""
    bench = Bench()
    staying = [bench.enter(until=10**6 + i) for i in range(50)]
    chance = random.Random(1)
    passing: list[Ticket] = []
    for i in range(5000):
        passing.append(bench.enter(until=10**6 - i))
        if len(passing) > 20:
            bench.end(passing.pop(chance.randrange(20)))
        assert len(bench.room._expiries) <= 2 * 71 + 65
    for ticket in passing:
        bench.end(ticket)
    assert bench.room.next_deadline() == 10**6
    assert bench.over(2 * 10**6) == [t.seq for t in staying]
    assert bench.room._expiries == []


def test_other_routes_for_all_a_thousand_times_leave_nothing() -> None:
    """Each is known once, with the time it had."""
    bench = Bench()
    tickets = [bench.enter(until=100 + i) for i in range(10)]
    for _ in range(1000):
        bench.room.routes.forget()
        for ticket in tickets:
            bench.room.leave(ticket)
            ticket.route = bench.room.routes.to((bench.a, bench.b), False, 0)
            bench.room.enter(ticket)
        bench.room.drop_expiries()
    assert len(bench.room._expiries) == 10
    assert len(list(bench.room.routes)) == 1
    assert bench.room.next_deadline() == 100
    assert bench.room.tickets() == tickets
    assert bench.over(104) == [1, 2, 3, 4, 5]


def test_one_route_to_the_same_upstreams() -> None:
    """Long prompts have their own."""
    bench = Bench()
    route = bench.room.routes.to((bench.a, bench.b), False, 0)
    assert bench.room.routes.to([bench.a, bench.b], False, 5) is route
    assert bench.room.routes.to((bench.a, bench.b), True, 0) is not route
    assert bench.room.routes.to((bench.a,), False, 0) is not route


def test_patience_with_upstreams_that_are_down() -> None:
    """Counts from when the last of them went, or from the arrival of who came later; back in time, and nobody
    gives up."""
    bench = Bench()
    bench.enter(bench.a, bench.b)
    bench.down(bench.a, at=1)
    assert bench.room.next_deadline() == 1000
    bench.down(bench.b, at=4)
    bench.down(bench.b, at=6)
    bench.enter(bench.a, bench.b, now=7)
    assert bench.room.next_deadline() == 14
    assert bench.over(13) == []
    assert bench.over(14) == [1]
    assert bench.room.next_deadline() == 17
    bench.b.set_health(True)
    bench.room.routes.health_changed(16)
    assert bench.over(999) == []
    assert bench.room.next_deadline() == 1000


def test_a_route_made_while_they_are_down_begins_then() -> None:
    """Nothing is known of the time before."""
    bench = Bench()
    bench.down(bench.a, at=0)
    bench.enter(bench.a, now=5)
    assert bench.room.next_deadline() == 15


def test_who_comes_back_stands_by_its_arrival() -> None:
    """Of those without an engine the first to come gives up first, whatever order they were entered in; over
    several routes too."""
    bench = Bench()
    tickets = [bench.ticket(*([bench.a] if i % 2 else [bench.a, bench.b]), now=i) for i in range(6)]
    for i in (1, 4, 5, 0, 2, 3):
        bench.room.enter(tickets[i])
    assert bench.room.tickets() == tickets
    assert [list(route.waiting) for route in bench.room.routes] == [[1, 3, 5], [2, 4, 6]]
    bench.down(bench.a, bench.b, at=2)
    assert bench.room.next_deadline() == 12
    assert bench.over(12) == [1, 2, 3]
    assert bench.over(20) == [4, 5, 6]


def test_its_own_time_may_be_over_sooner_than_the_patience() -> None:
    """Whichever comes first."""
    bench = Bench()
    bench.down(bench.a, at=0)
    bench.enter(until=7)
    bench.enter(until=70)
    assert bench.room.next_deadline() == 7
    assert bench.over(9) == [1]
    assert bench.room.next_deadline() == 10
