"""Waiting requests of one class: order, fairness, removal, and memory that stays bounded."""

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.policy.priority_queue import FairQueue, ServiceCounters
from gateway.policy.request import Ticket
from tests.support.policy_settings import P1, ask


class Line:
    """A queue whose tickets are made on the fly."""

    def __init__(self, sticky: bool = False, counters: ServiceCounters | None = None) -> None:
        self.queue = FairQueue(ServiceCounters() if counters is None else counters, sticky_head=sticky)
        self.seq = 0

    def push(self, tenant: str = "t", cost: int = 1) -> Ticket:
        self.seq += 1
        ticket = Ticket(self.seq, ask(f"r{self.seq}", P1, tenant=tenant), 0)
        ticket.cost = cost
        self.queue.push(ticket)
        return ticket

    def pop(self) -> tuple[int, str]:
        ticket = self.queue.pop()
        return ticket.seq, ticket.tenant

    def tenants(self, count: int) -> str:
        return "".join(self.pop()[1] for _ in range(count))


def internals(queue: FairQueue) -> int:
    return len(queue._order) + len(queue._heaviest or ()) + len(queue._places) + len(queue._by_tenant)


def test_first_come_first_served_within_a_tenant() -> None:
    """A thousand requests of one instant leave in their order, a hundred removed at random."""
    line = Line()
    tickets = [line.push(cost=random.Random(i).randrange(9)) for i in range(1000)]
    gone = set(random.Random(7).sample(range(1000), 100))
    for i in gone:
        line.queue.remove(tickets[i])
    assert [line.pop()[0] for _ in range(900)] == [t.seq for i, t in enumerate(tickets) if i not in gone]
    assert len(line.queue) == line.queue.total_cost == 0
    assert line.queue.peek() is None
    with pytest.raises(IndexError):
        line.queue.pop()


def test_least_served_tenant_goes_next() -> None:
    """A tenant of cheap requests gets as many more of them as they are cheaper."""
    line = Line()
    for _ in range(12):
        line.push("a", 30)
        line.push("b", 10)
    assert line.tenants(12) == "abbbabbbabbb"


def test_equal_service_goes_by_arrival() -> None:
    """Tenants that are equal take turns in the order in which they came."""
    line = Line()
    for tenant in "cabcabcab":
        line.push(tenant, 5)
    assert line.tenants(9) == "cabcabcab"


def test_silence_earns_no_credit() -> None:
    """A tenant that returns is lifted to the least served of those that wait, and then takes its turn."""
    line = Line()
    line.push("b", 10)
    line.pop()
    for _ in range(100):
        line.push("a", 10)
    for _ in range(50):
        line.pop()
    for _ in range(10):
        line.push("b", 10)
    assert line.tenants(10).count("b") == 5


def test_a_newcomer_does_not_get_back_what_a_large_request_took() -> None:
    """However much the others were served before, a newcomer starts level with the least served of them."""
    line = Line()
    line.push("a", 1000)
    for _ in range(20):
        line.push("a", 10)
    line.pop()
    for _ in range(20):
        line.push("b", 10)
    assert line.tenants(10).count("a") == 5


def test_service_is_remembered_over_an_empty_queue() -> None:
    """One that was served more than others before the queue ran empty waits for them after it."""
    line = Line()
    for tenant in "abab":
        line.push(tenant, 10)
    line.push("a", 500)
    line.tenants(5)
    for tenant in "babb":
        line.push(tenant, 1)
    assert line.tenants(4) == "bbba"


def test_corrections_move_a_waiting_tenant() -> None:
    """Service that turned out larger or smaller than counted changes who is next."""
    line = Line()
    for tenant in "aabb":
        line.push(tenant, 10)
    assert line.tenants(1) == "a"
    line.queue.counters.correct("a", -10)
    assert line.tenants(1) == "a"
    for tenant in "aa":
        line.push(tenant, 10)
    line.queue.counters.correct("b", 100)
    assert line.tenants(2) == "aa"


def test_fairness_spans_queues_that_share_counters() -> None:
    """What a tenant got in one line counts in the other."""
    counters = ServiceCounters()
    one, other = Line(counters=counters), Line(counters=counters)
    for tenant in "ab":
        one.push(tenant, 10)
        other.push(tenant, 10)
    assert one.tenants(1) == "a"
    assert other.tenants(1) == "b"


def test_a_chosen_head_is_not_bypassed() -> None:
    """With a sticky head, one that has been seen at the head stays there until it leaves."""
    line = Line(sticky=True)
    for _ in range(3):
        line.push("a", 100)
    line.pop()
    head = line.queue.peek()
    line.push("b", 1)
    line.queue.counters.correct("a", 500)
    assert line.queue.peek() is head
    assert line.tenants(2) == "ab"


def test_a_sticky_head_that_leaves_makes_room() -> None:
    """When the chosen head is removed the next is chosen afresh."""
    line = Line(sticky=True)
    head = line.push("a", 100)
    assert line.queue.peek() is head
    line.push("b", 1)
    line.queue.remove(head)
    assert line.tenants(1) == "b"
    assert line.queue.peek() is None


def test_heaviest_tenant_and_its_newest() -> None:
    """The tenant with the largest waiting cost is found whatever came and went, and its newest too."""
    line = Line()
    assert line.queue.heaviest_tenant() is None
    a = [line.push("a", 10) for _ in range(5)]
    b = line.push("b", 45)
    assert line.queue.heaviest_tenant() == ("a", 50)
    assert line.queue.newest_of("a") is a[-1]
    line.queue.remove(a[-1])
    assert line.queue.heaviest_tenant() == ("b", 45)
    line.queue.remove(b)
    assert line.queue.heaviest_tenant() == ("a", 40)
    assert line.queue.newest_of("a") is a[-2]


class Oracle:
    """The same order, computed by looking through everything."""

    def __init__(self) -> None:
        self.waiting: list[Ticket] = []
        self.service: defaultdict[str, int] = defaultdict(int)
        self.last_served = 0

    def push(self, ticket: Ticket) -> None:
        present = {t.tenant for t in self.waiting}
        if ticket.tenant not in present:
            least = min((self.service[t] for t in present), default=self.last_served)
            self.service[ticket.tenant] = max(self.service[ticket.tenant], least)
        self.waiting.append(ticket)

    def head(self) -> Ticket | None:
        firsts: dict[str, Ticket] = {}
        for ticket in self.waiting:
            firsts.setdefault(ticket.tenant, ticket)
        return min(firsts.values(), key=lambda t: (self.service[t.tenant], t.seq), default=None)

    def pop(self) -> Ticket:
        head = self.head()
        assert head is not None
        self.waiting.remove(head)
        self.last_served = max(self.last_served, self.service[head.tenant])
        self.service[head.tenant] += head.cost
        return head

    def heaviest(self) -> int | None:
        costs: defaultdict[str, int] = defaultdict(int)
        for ticket in self.waiting:
            costs[ticket.tenant] += ticket.cost
        return max(costs.values(), default=None)


queue_operations = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from("abcd"), st.integers(0, 50)),
        st.tuples(st.just("pop"), st.just(""), st.just(0)),
        st.tuples(st.just("remove"), st.just(""), st.integers(0, 100)),
        st.tuples(st.just("correct"), st.sampled_from("abcd"), st.integers(-30, 30)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(queue_operations)
def test_order_is_the_oracles(operations: list[tuple[str, str, int]]) -> None:
    """Head, length, total and heaviest cost are those of an exhaustive search, after every operation."""
    line, oracle = Line(), Oracle()
    for what, tenant, number in operations:
        if what == "push":
            oracle.push(line.push(tenant, number))
        elif what == "pop" and oracle.waiting:
            assert line.queue.pop() is oracle.pop()
        elif what == "remove" and oracle.waiting:
            ticket = oracle.waiting.pop(number % len(oracle.waiting))
            line.queue.remove(ticket)
        elif what == "correct" and number:
            line.queue.counters.correct(tenant, number)
            oracle.service[tenant] += number
        assert line.queue.peek() is oracle.head()
        assert len(line.queue) == len(oracle.waiting) == len(list(line.queue))
        assert line.queue.total_cost == sum(t.cost for t in oracle.waiting)
        heaviest = line.queue.heaviest_tenant()
        assert (heaviest and heaviest[1]) == oracle.heaviest()
        assert internals(line.queue) <= 6 * 4 + 100


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), min_size=30, max_size=120),
    st.integers(1, 30),
)
def test_backlogged_tenants_get_equal_service(requests: list[tuple[str, int]], served: int) -> None:
    """Among tenants that always have something waiting, service differs by one largest request at most."""
    line = Line()
    for tenant in "abc":
        for _ in range(40):
            line.push(tenant, 40)
    for tenant, cost in requests:
        line.push(tenant, cost)
    got = dict.fromkeys("abc", 0)
    for _ in range(served):
        ticket = line.queue.pop()
        got[ticket.tenant] += ticket.cost
        assert max(got.values()) - min(got.values()) <= 40


def test_memory_follows_what_waits() -> None:
    """After any churn the queue's own containers are in proportion to the tenants that wait."""
    line = Line(sticky=True)
    chance = random.Random(3)
    waiting: list[Ticket] = []
    for _ in range(20_000):
        if len(waiting) < 5:
            waiting.append(line.push(chance.choice("abcde"), chance.randrange(100)))
        else:
            line.queue.peek()
            line.queue.remove(waiting.pop(chance.randrange(5)))
        assert internals(line.queue) <= 5 * 8 + 90
    for ticket in waiting:
        line.queue.remove(ticket)
    assert len(line.queue) == line.queue.total_cost == 0
    assert not line.queue._by_tenant
    assert not line.queue._places
    assert not line.queue._costs


@pytest.mark.parametrize("cost", [0, 1, 1000])
def test_tenants_that_come_once_are_forgotten(cost: int) -> None:
    """However many tenants have been, the memory for their service is bounded."""
    line = Line()
    for i in range(20_000):
        line.push(f"tenant {i}", cost)
        line.pop()
    assert len(line.queue.counters) <= 1100


def test_tenants_that_wait_are_never_forgotten() -> None:
    """Counters of tenants that wait are kept however many they are."""
    line = Line()
    for i in range(5000):
        line.push(f"tenant {i}", 1)
    for _ in range(5000):
        line.pop()
    assert len(line.queue) == 0


# ---------------------------------------------------------------------- other places


def served(counters: ServiceCounters, **costs: int) -> ServiceCounters:
    for tenant, cost in costs.items():
        counters.correct(tenant, cost)
    return counters


def test_counters_that_follow_others_know_who_was_served_there() -> None:
    """New ones as if they were the others."""
    line = Line()
    line.queue.counters.credit = 10**9
    served(line.queue.counters, u=100, v=3, w=50)
    for tenant in "uvw":
        line.push(tenant)
    other = Line()
    other.queue.counters.follow(line.queue.counters)
    other.queue.counters.credit = 10**9
    for tenant in "uuvw":
        other.push(tenant)
    assert other.tenants(4) == "vwuu"


def test_what_counts_is_how_far_one_is_ahead_of_the_least_served() -> None:
    """Where much was served and where little: the larger lead holds, and a tenant that waits is put in its
    new place."""
    line, other = Line(), Line()
    served(line.queue.counters, u=1000, v=1005, w=1050)
    served(other.queue.counters, u=10, v=40, x=20)
    for tenant in "uvw":
        line.push(tenant)
    for tenant in "uvx":
        other.push(tenant)
    counters = line.queue.counters
    counters.follow(other.queue.counters)
    assert [counters.of(tenant) for tenant in "uvwx"] == [1000, 1030, 1050, 1010]
    counters.credit = 10**9
    line.push("x")
    assert line.tenants(4) == "uxvw"


def test_following_what_followed_changes_nothing() -> None:
    """To and fro."""
    line, other = Line(), Line()
    served(line.queue.counters, u=1000, v=1005)
    for tenant in "uv":
        line.push(tenant)
    before = dict(line.queue.counters._service)
    for _ in range(3):
        other.queue.counters.follow(line.queue.counters)
        line.queue.counters.follow(other.queue.counters)
    assert line.queue.counters._service == before
