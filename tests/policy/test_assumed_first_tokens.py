"""Answers that nobody sees begin count as begun at the time that was predicted."""

from gateway.policy.assumed_first_tokens import AssumedFirstTokens
from gateway.policy.clock import NEVER
from gateway.policy.parameters import SchedulingParameters
from gateway.policy.request import Stage, Ticket
from gateway.policy.upstream_slots import UpstreamSlots
from tests.support.policy_settings import P1, ask, upstream


class Bench:
    """An engine, and requests that it reads; what is pending there is told in requests."""

    def __init__(self) -> None:
        self.assumed = AssumedFirstTokens()
        self.engine = UpstreamSlots(upstream(max_in_flight=None), SchedulingParameters())
        self.seq = 0

    def send(self, at: int, pool: object = None) -> Ticket:
        self.seq += 1
        ticket = Ticket(self.seq, ask(f"r{self.seq}", P1, 10), 0)
        ticket.stage, ticket.pool = Stage.DISPATCHED, pool
        self.engine.lease(ticket, 0)
        ticket.assumed_at = at
        self.assumed.expect(ticket)
        return ticket

    def pending(self) -> int:
        return self.engine.prefills


def test_each_counts_at_its_time() -> None:
    """Not before; those of one instant together."""
    bench = Bench()
    for at in (30, 10, 10):
        bench.send(at)
    assert bench.assumed.next == 10
    assert not bench.assumed.come(9)
    assert bench.pending() == 3
    assert bench.assumed.come(10)
    assert bench.pending() == 1
    assert bench.assumed.next == 30
    assert bench.assumed.come(99)
    assert (bench.pending(), bench.assumed.next) == (0, NEVER)


def test_one_that_is_over_or_was_sent_again_does_not_count_at_its_former_time() -> None:
    """Its end has freed its room already; sent again, it has another time."""
    bench = Bench()
    over, again = bench.send(10), bench.send(10)
    over.stage = Stage.ENDED
    again.assumed_at = 50
    bench.assumed.expect(again)
    assert not bench.assumed.come(10)
    assert bench.pending() == 2
    assert bench.assumed.come(50)
    assert bench.pending() == 1


def test_those_that_are_another_pools_now_are_let_go() -> None:
    """That one has been told of them."""
    bench, mine, other = Bench(), object(), object()
    for at, pool in ((10, other), (20, mine), (30, other)):
        bench.send(at, pool)
    bench.assumed.keep(mine)
    assert (len(bench.assumed), bench.assumed.next) == (1, 20)
    assert not bench.assumed.come(19)
    assert bench.pending() == 3
