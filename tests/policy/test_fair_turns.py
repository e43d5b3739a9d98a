"""What a tenant that comes back finds, who is the last in turn, and who has had less."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.parameters import MILLITOKENS
from gateway.policy.patience import cost_ahead
from gateway.policy.priority_queue import FairQueue, ServiceCounters
from gateway.policy.request import Ticket
from tests.support.drivers import VirtualDriver
from tests.support.policy_settings import P1, P2, ask, policy, upstream

_seq = iter(range(10**9))


def queue(credit: int = 0) -> FairQueue:
    counters = ServiceCounters()
    counters.credit = credit
    return FairQueue(counters)


def push(line: FairQueue, tenant: str, cost: int) -> None:
    ticket = Ticket(next(_seq), ask("r", P1, 1, tenant=tenant), 0)
    ticket.cost = cost
    line.push(ticket)


def served(line: FairQueue, requests: int) -> str:
    return "".join(line.pop().tenant for _ in range(requests))


def beside_one_that_always_waits(line: FairQueue) -> None:
    """Tenant b is served once, then a fifty times and goes on waiting."""
    push(line, "b", 10)
    line.pop()
    for _ in range(100):
        push(line, "a", 10)
    served(line, 50)


def test_silence_earns_the_credit_and_no_more() -> None:
    """Who comes back goes first until it has had its credit; then it takes turns."""
    line = queue(credit=30)
    beside_one_that_always_waits(line)
    for _ in range(9):
        push(line, "b", 10)
    assert served(line, 9) == "bbbababab"


def test_who_left_less_unused_than_the_credit_gets_only_that() -> None:
    """The credit is a bound: one that was served nearly as much is only so far ahead."""
    line = queue(credit=10_000)
    beside_one_that_always_waits(line)
    line.counters.correct("b", 480)  # it has 490, a has 500
    for _ in range(5):
        push(line, "b", 10)
    assert served(line, 5) == "babab"


def test_nobody_knows_a_newcomer() -> None:
    """A name that was never served has earned nothing: new names get nobody ahead."""
    line = queue(credit=30)
    beside_one_that_always_waits(line)
    for _ in range(4):
        push(line, "new", 10)
    assert [line.pop().tenant for _ in range(4)].count("new") == 2


def test_what_is_ahead_of_one_that_comes_back() -> None:
    """Nothing of one that had more, for as long as the credit lasts."""
    line = queue(credit=300)
    beside_one_that_always_waits(line)
    assert cost_ahead(line, "b", 100) == cost_ahead(line, "b", 300) == 10  # the head
    assert cost_ahead(line, "b", 320) == 20
    assert cost_ahead(line, "new", 100) == 100


def test_where_many_have_had_less_all_that_waits_is_ahead() -> None:
    """A line of thousands of tenants is not walked through for each arrival."""
    line = queue()
    for i in range(64):
        push(line, f"{i}", 10)
    assert cost_ahead(line, "a", 1) == 64
    push(line, "one more", 10)
    assert cost_ahead(line, "a", 1) == line.total_cost == 650


def test_the_counter_of_one_that_would_come() -> None:
    """What is told of a tenant before it waits is what it waits with then."""
    line = queue(credit=30)
    beside_one_that_always_waits(line)
    for tenant in ("b", "new", "a"):
        told = line.counters.of_waiting(tenant)
        push(line, tenant, 10)
        assert line.counters.of(tenant) == told


def test_the_credit_is_what_a_class_lets_one_ask_for_at_once() -> None:
    """Its burst and what its rate pays within the throttle time, for both lines of the class; with other
    settings another."""

    def settings(throttle: float):  # type: ignore[no-untyped-def]
        one_engine = upstream(tokens_per_second=1000)
        return policy(one_engine, throttle=throttle, capacity={"burst_seconds": 1.0, "min_burst_tokens": 0})

    driver = VirtualDriver(settings(2))
    for throttle in (2, 4):
        driver.admission.reconfigure(settings(throttle))
        for priority, rate in ((P1, 350), (P2, 50)):
            expected = rate * (1 + throttle) * MILLITOKENS
            assert driver.pool.throttled[priority].counters.credit == expected
            assert driver.pool.scheduler.ready[priority].counters.credit == expected


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("push", "push", "pop", "correct")), st.sampled_from("abcdef"), st.integers(0, 50)
        ),
        max_size=60,
    ),
    st.integers(0, 60),
    st.integers(-50, 400),
)
def test_last_and_less_served_are_those_of_a_search(
    operations: list[tuple[str, str, int]], credit: int, counter: int
) -> None:
    """After any history the last in turn has the largest counter plus waiting cost, and less served are
    exactly those with a smaller counter."""
    line = queue(credit)
    for what, tenant, number in operations:
        if what == "push":
            push(line, tenant, number)
        elif what == "pop" and len(line):
            line.pop()
        elif what == "correct":
            line.counters.correct(tenant, number - 25)
        waiting = {ticket.tenant for ticket in line}
        final = {t: line.counters.of(t) + line.cost_of(t) for t in waiting}
        last = line.last_in_turn()
        assert (last is None) == (not waiting)
        if last is not None:
            assert final[last[0]] == last[1] == max(final.values())
        found = list(line.less_served(counter))
        assert sorted(found) == sorted(t for t in waiting if line.counters.of(t) < counter)
        assert len(line._last or ()) <= 2 * 6 + 70
