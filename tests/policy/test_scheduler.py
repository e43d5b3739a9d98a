"""Who goes next, held against a slow oracle over all small sequences."""

from itertools import product
from math import ceil
from typing import Any

import pytest

from gateway.policy.parameters import SchedulingParameters
from gateway.policy.request import PRIORITIES, Priority, Ticket
from gateway.policy.routes import Route
from gateway.policy.scheduler import Scheduler
from gateway.policy.upstream_slots import UpstreamSlots
from tests.support.policy_settings import P0, P1, P2, ask, class_parameters, upstream

UNLIMITED = [False, False, False]


class Bench:
    """A scheduler with its upstreams, and as little else as possible."""

    def __init__(
        self,
        *upstreams: Any,
        holdback: tuple[float, ...] = (1.0, 1.0, 1.0),
        skip_limit: tuple[int, int] = (2, 19),
        **scheduling: Any,
    ) -> None:
        rules = SchedulingParameters(
            **{"long_prompt_tokens": 10**9, "max_pending_prefill_tokens": 10**9, **scheduling}
        )
        self.slots = [UpstreamSlots(u, rules) for u in upstreams or (upstream(),)]
        classes = {p: class_parameters(p, holdback=holdback[p]) for p in PRIORITIES}
        self.scheduler = Scheduler(classes, {P1: skip_limit[0], P2: skip_limit[1]})
        self.route = Route(self.slots, False)
        self.long_route = Route(self.slots, True)
        self.seq = 0
        self.in_flight: list[Ticket] = []
        self.rules = rules

    def arrive(
        self, priority: Priority, tokens: int = 1, tenant: str = "t", route: Route | None = None
    ) -> Ticket:
        self.seq += 1
        ticket = Ticket(self.seq, ask(f"r{self.seq}", priority, tokens, tenant=tenant), 0)
        ticket.total_tokens = ticket.cost = tokens
        ticket.is_long = tokens > self.rules.long_prompt_tokens
        ticket.route = route or (self.long_route if ticket.is_long else self.route)
        self.scheduler.ready[priority].push(ticket)
        return ticket

    def go(self) -> list[tuple[Priority, bool]]:
        """Dispatch all who can go: class and whether promoted."""
        gone = []
        while (choice := self.scheduler.choose(UNLIMITED, 0)) is not None:
            self.scheduler.dispatched(choice, UNLIMITED, 0)
            choice.upstream.lease(choice.ticket, 0)
            self.in_flight.append(choice.ticket)
            gone.append((choice.ticket.priority, choice.promoted))
        return gone

    def end(self, ticket: Ticket | None = None) -> None:
        if ticket is None:
            ticket = self.in_flight[0]
        self.in_flight.remove(ticket)
        ticket.upstream.release(ticket)


class Oracle:
    """The rules of the contract for one upstream with a number of places, said as plainly as possible."""

    def __init__(self, places: int, holdback: tuple[float, ...], skip_limit: tuple[int, int]) -> None:
        self.places, self.holdback = places, holdback
        self.limit = {P1: skip_limit[0], P2: skip_limit[1]}
        self.waiting = dict.fromkeys(PRIORITIES, 0)
        self.skipped = {P1: 0, P2: 0}
        self.taken = 0

    def go(self) -> list[tuple[Priority, bool]]:
        gone = []
        while (chosen := self.choose()) is not None:
            priority = chosen[0]
            for other in self.skipped:
                if other == priority:
                    self.skipped[other] = 0
                elif self.waiting[other]:
                    self.skipped[other] += 1
            self.waiting[priority] -= 1
            self.taken += 1
            gone.append(chosen)
        return gone

    def choose(self) -> tuple[Priority, bool] | None:
        if self.taken == self.places:
            return None
        for priority in (P2, P1):
            if self.waiting[priority] and self.skipped[priority] >= self.limit[priority]:
                return priority, True
        for priority in PRIORITIES:
            part = max(ceil(self.holdback[priority] * self.places), 1)
            if self.waiting[priority] and self.taken < part:
                return priority, False
        return None


@pytest.mark.parametrize(
    ("places", "holdback", "skip_limit"),
    [(1, (1, 1, 1), (1, 2)), (2, (1, 1, 0.5), (1, 3)), (3, (1, 0.6, 0.3), (2, 2))],
)
def test_all_small_sequences(places: int, holdback: tuple[float, ...], skip_limit: tuple[int, int]) -> None:
    """For every sequence of six arrivals and endings the same go as in the oracle, promoted or not."""
    for sequence in product("012e", repeat=6):
        bench = Bench(upstream(max_in_flight=places), holdback=holdback, skip_limit=skip_limit)
        oracle = Oracle(places, holdback, skip_limit)
        for event in sequence:
            if event == "e":
                if not oracle.taken:
                    break  # the same as a shorter sequence
                bench.end()
                oracle.taken -= 1
            else:
                bench.arrive(Priority(int(event)))
                oracle.waiting[Priority(int(event))] += 1
            assert bench.go() == oracle.go(), sequence
            assert bench.scheduler.skipped == oracle.skipped, sequence


def classes_in_turn(bench: Bench, count: int) -> str:
    """Which classes get one place, all three always waiting."""
    for p in PRIORITIES:
        for _ in range(2):
            bench.arrive(p)
    told = ""
    for _ in range(count):
        ((priority, _),) = bench.go()
        told += str(int(priority))
        bench.arrive(priority)
        bench.end()
    return told


def test_shares_under_full_load() -> None:
    """With all classes always waiting P1 gets every third place and P2 every twentieth."""
    told = classes_in_turn(Bench(), 1200)
    assert told.startswith("001" * 6 + "0" + "2" + "1")
    assert told.count("2") == 60
    assert 0.32 * 1200 <= told.count("1") <= 400


def test_both_due_p2_first_then_p1() -> None:
    """When both are due P2 goes first and P1 next."""
    bench = Bench(skip_limit=(2, 2))
    for p in (P0, P0, P0, P1, P2):
        bench.arrive(p)
    gone = []
    for _ in range(5):
        gone += bench.go()
        bench.end()
    assert gone == [(P0, False), (P0, False), (P2, True), (P1, True), (P0, False)]


def test_an_empty_class_is_not_skipped() -> None:
    """A class that has nobody waiting is not passed over, and one that goes starts counting afresh."""
    bench = Bench(skip_limit=(2, 19))
    for _ in range(5):
        bench.arrive(P0)
        bench.go()
        bench.end()
    assert bench.scheduler.skipped == {P1: 0, P2: 0}
    bench.arrive(P0)
    bench.arrive(P1)
    bench.go()
    bench.end()
    assert bench.scheduler.skipped[P1] == 1
    bench.go()
    assert bench.scheduler.skipped[P1] == 0


def test_held_back_heads_are_counted_as_skipped() -> None:
    """A head that only holdback holds is passed over all the same, and its promotion takes the last place."""
    bench = Bench(upstream(max_in_flight=2), holdback=(1, 1, 0.5), skip_limit=(2, 2))
    bench.arrive(P2)
    assert bench.go() == [(P2, False)]
    kept = bench.in_flight[0]
    bench.arrive(P2)
    for _ in range(2):
        bench.arrive(P0)
        assert bench.go() == [(P0, False)]
        bench.end(bench.in_flight[-1])
    assert bench.go() == [(P2, True)]
    assert kept in bench.in_flight
    assert len(bench.in_flight) == 2


def test_a_taken_lane_is_not_a_skip() -> None:
    """A head that waits for the lane, or whose upstream is down, is not passed over."""
    bench = Bench(upstream(max_in_flight=None), long_prompt_tokens=100)
    bench.arrive(P1, 200)
    bench.go()
    bench.arrive(P1, 200)
    for _ in range(9):
        bench.arrive(P0)
        bench.go()
    assert bench.scheduler.skipped[P1] == 0
    bench = Bench(upstream("a", max_in_flight=None), upstream("b", max_in_flight=None))
    bench.slots[1].healthy = False
    bench.arrive(P1, route=Route(bench.slots[1:], False))
    for _ in range(9):
        bench.arrive(P0)
        bench.go()
    assert bench.scheduler.skipped[P1] == 0


def test_being_passed_over_elsewhere_is_no_skip() -> None:
    """A dispatch to an upstream that a class cannot use does not pass that class over."""
    bench = Bench(upstream("a", max_in_flight=None), upstream("b", max_in_flight=0))
    only_b = Route(bench.slots[1:], False)
    bench.arrive(P1, route=only_b)
    for _ in range(5):
        bench.arrive(P0, route=Route(bench.slots[:1], False))
        bench.go()
    assert bench.scheduler.skipped[P1] == 0


def test_p0_that_waits_for_room_keeps_others_off() -> None:
    """While a large P0 request waits for tokens to come free nobody smaller takes them."""
    bench = Bench(upstream(max_in_flight=None, max_in_flight_tokens=100))
    bench.arrive(P1, 60)
    bench.go()
    bench.arrive(P0, 60)
    bench.arrive(P1, 10)
    bench.arrive(P2, 10)
    assert bench.go() == []
    bench.end()
    assert bench.go() == [(P0, False), (P1, False), (P2, False)]


def test_p0_that_waits_leaves_other_upstreams_alone() -> None:
    """A waiting P0 head keeps the others off its own upstreams only."""
    bench = Bench(upstream("a", max_in_flight=0), upstream("b", max_in_flight=1))
    bench.arrive(P0, route=Route(bench.slots[:1], False))
    bench.arrive(P2)
    assert bench.go() == [(P2, False)]
    assert bench.in_flight[0].upstream.name == "b"


def test_a_due_class_that_waits_for_room_gets_it() -> None:
    """One who is due and needs more room than is free sees nobody smaller take it first."""
    bench = Bench(upstream(max_in_flight=None, max_in_flight_tokens=100), skip_limit=(1, 19))
    bench.arrive(P0, 50)
    bench.arrive(P1, 90)
    assert bench.go() == [(P0, False)]
    bench.arrive(P0, 10)
    assert bench.go() == []
    bench.end()
    assert bench.go() == [(P1, True), (P0, False)]


def test_least_loaded_upstream() -> None:
    """Among upstreams that admit, the one with the fewest tokens in flight is taken."""
    bench = Bench(*(upstream(name, max_in_flight=None) for name in "abc"))
    names = []
    for tokens in (50, 30, 20, 5, 30, 10):
        bench.arrive(P1, tokens)
        bench.go()
        names.append(bench.in_flight[-1].upstream.name)
    assert names == ["a", "b", "c", "c", "c", "b"]


def test_first_come_first_served_across_prompt_lengths() -> None:
    """Within a class a short prompt does not overtake an earlier long one that waits for a place."""
    bench = Bench(upstream(max_in_flight=None, max_in_flight_tokens=300), long_prompt_tokens=100)
    for p in (P0, P1):
        bench.arrive(p, 90)
        bench.go()
        bench.arrive(p, 250)
        bench.arrive(p, 10)
        assert bench.go() == []
        bench.end()
        assert bench.go() == [(p, False), (p, False)]
        bench.end()
        bench.end()


def test_a_large_prompt_is_not_starved_by_small_ones_of_its_class() -> None:
    """A prompt above the pending-prefill limit waits for the engine to be free, small ones wait behind."""
    bench = Bench(upstream(max_in_flight=None), long_prompt_tokens=100, max_pending_prefill_tokens=50)
    bench.arrive(P1, 30)
    assert bench.go() == [(P1, False)]
    bench.arrive(P1, 200)
    bench.arrive(P1, 10)
    assert bench.go() == []
    bench.slots[0].prefilled(bench.in_flight[0])
    assert bench.go() == [(P1, False)]
    assert bench.in_flight[-1].is_long
    bench.slots[0].prefilled(bench.in_flight[-1])
    assert bench.go() == [(P1, False)]


def test_one_that_waits_for_the_lane_is_overtaken() -> None:
    """A long prompt that waits for the lane does not hold up short ones of its class."""
    bench = Bench(upstream(max_in_flight=None), long_prompt_tokens=100)
    for tokens in (200, 200, 10):
        bench.arrive(P1, tokens)
    assert bench.go() == [(P1, False), (P1, False)]
    assert [t.input_tokens for t in bench.in_flight] == [200, 10]


def test_tenants_take_turns_across_routes() -> None:
    """Fairness between tenants holds over all the lines of a class together."""
    bench = Bench()
    other = Route(bench.slots, False)
    for _ in range(4):
        bench.arrive(P1, 10, tenant="a")
    for _ in range(4):
        bench.arrive(P1, 10, tenant="b", route=other)
    tenants = ""
    for _ in range(8):
        bench.go()
        tenants += bench.in_flight[-1].tenant
        bench.end()
    assert tenants == "abababab"


# ---------------------------------------------------------------------- other routes


def test_who_is_given_another_route_keeps_its_turn() -> None:
    """And its tenant, which never stops to wait, its counter: the least served stays the least served though
    there is no credit."""
    bench = Bench(upstream("a"), upstream("b"))
    ready = bench.scheduler.ready[P1]
    ready.counters.correct("u", 100)
    for tenant in "vu":
        bench.arrive(P1, tenant=tenant)
    ready.counters.correct("v", -50)
    tickets = [bench.arrive(P1, tenant=tenant) for tenant in "uvu"]
    before = dict(ready.counters._service), [head.seq for head in ready.heads()]
    for number in range(1000):
        route = Route(bench.slots[:1] if number % 2 else bench.slots, False)
        waiting = sorted((t for line in ready._lines.values() for t in line), key=lambda t: t.seq)
        for ticket in waiting:
            ready.move(ticket, route)
        ready.keep([route, Route([], False)])
        assert (dict(ready.counters._service), [head.seq for head in ready.heads()]) == before
        assert [t.seq for t in waiting] == [1, 2, 3, 4, 5]
    assert all(t.route is route for t in tickets)
    assert ready.length == 5
    assert list(ready._lines) == [route]
    assert len(ready.counters._queues) == 1
    assert ready.counters._waiting == {"u": 1, "v": 1}
    order = []
    while bench.scheduler.anybody_ready:
        assert bench.go() == [(P1, False)]
        order.append(bench.in_flight[-1].seq)
        bench.end()
    assert order == [1, 4, 2, 3, 5]


def test_one_that_waits_again_is_moved_before_those_that_came_later() -> None:
    """Whoever is moved first."""
    bench = Bench()
    first, second = bench.arrive(P1), bench.arrive(P1)
    first.requeued_at = 1
    route = Route(bench.slots, False)
    for ticket in (second, first):
        bench.scheduler.ready[P1].move(ticket, route)
    assert bench.scheduler.ready[P1].heads() == [first]


def test_who_was_passed_over_elsewhere_was_passed_over() -> None:
    """The larger count holds."""
    one, other = Bench().scheduler, Bench().scheduler
    one.skipped = {P1: 1, P2: 7}
    other.skipped = {P1: 2, P2: 3}
    one.carry_on(other)
    assert one.skipped == {P1: 2, P2: 7}
    assert other.skipped == {P1: 2, P2: 3}
