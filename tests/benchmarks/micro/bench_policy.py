"""What one decision of the policy costs while many others wait, in virtual time.

One process, one thread, no I/O, the default law. `queued` requests wait all the time, spread over so many
tenants; a round is one that comes, one that is granted its place, gets its first token, and ends.
"""

from collections import deque
from typing import Any

import pytest

from gateway.policy.admission import Admission, Delivered
from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.outcome import Outcome
from gateway.policy.request import PRIORITIES, Ask, Stage, Ticket, Usage
from gateway.policy_parameters import policy_parameters
from gateway.settings import Settings

STEP_NS = 50_000
DELIVERED = Delivered(Usage(200, 50))
IN_FLIGHT = 128


class Crowd:
    """The default configuration without holdback or bounds on queues, a full engine, and `queued` waiting."""

    def __init__(self, queued: int, tenants: int, **settings: Any) -> None:
        unbounded = {
            "max_queued_requests": None,
            "max_queued_bytes": None,
            "max_wait_seconds": 1e6,
            "holdback": 1.0,
        }
        given = {
            "capacity": {"tokens_per_second": 1e9},
            "classes": {p.name: unbounded for p in PRIORITIES},
            "scheduling": {"deadline_drop": False},
        }
        self._now = NANOSECONDS_PER_SECOND
        self._tenants = tenants
        self._number = 0
        parameters = policy_parameters(Settings.model_validate({**given, **settings}))
        self.admission = Admission(parameters, self)
        self.running: deque[Ticket] = deque()
        for _ in range(IN_FLIGHT + queued):
            self.submit()

    def now(self) -> int:
        return self._now

    def submit(self) -> Ticket:
        number = self._number
        self._number = number + 1
        self._now += STEP_NS
        tenant = f"tenant-{number % self._tenants}"
        ask = Ask("request", PRIORITIES[number % 3], tenant, "model", 200, 50, body_bytes=2000)
        ticket = self.admission.submit(ask)
        self._collect()
        return ticket

    def finish(self) -> None:
        ticket = self.running.popleft()
        self._now += STEP_NS
        self.admission.finish(ticket, Outcome.COMPLETED, DELIVERED)
        self._collect()

    def round(self) -> None:
        self.submit()
        self.finish()
        self.admission.next_deadline()

    def second(self) -> None:
        """A second passes, with a tick of the control loop in it."""
        self._now += NANOSECONDS_PER_SECOND
        self.admission.advance()
        self._collect()

    def _collect(self) -> None:
        while decided := self.admission.take_decisions():
            for ticket in decided:
                if ticket.stage is Stage.DISPATCHED:
                    self.running.append(ticket)
                    self.admission.first_token(ticket)

    @property
    def waiting(self) -> int:
        return sum(pool.scheduler.ready[p].length for pool in self.admission.pools for p in PRIORITIES)


@pytest.mark.parametrize("tenants", [1, 100, 10_000])
@pytest.mark.parametrize("queued", [10, 1_000, 10_000])
def bench_decision(benchmark: Any, queued: int, tenants: int) -> None:
    """submit → grant → first token → finish"""
    crowd = Crowd(queued, tenants)
    benchmark(crowd.round)
    assert (crowd.waiting, len(crowd.running)) == (queued, IN_FLIGHT)


@pytest.mark.parametrize("queued", [10, 1_000, 3_000])
def bench_refusal(benchmark: Any, queued: int) -> None:
    """refused, its class's queue of `queued` being full"""
    full = {"max_queued_requests": queued, "max_queued_bytes": None, "max_wait_seconds": 1e6}
    crowd = Crowd(3 * queued + 200, 100, classes={p.name: full for p in PRIORITIES})
    ticket = benchmark(crowd.submit)
    assert ticket.stage is Stage.ENDED
    assert ticket.refusal is not None
    assert ticket.refusal.outcome is Outcome.REJECTED_QUEUE_FULL


@pytest.mark.parametrize("queued", [10, 1_000, 10_000])
def bench_controller_tick(benchmark: Any, queued: int) -> None:
    """a tick of the control loop"""
    crowd = Crowd(queued, 100)
    benchmark(crowd.second)
    assert crowd.waiting == queued
    assert crowd.admission.next_deadline() <= crowd.now() + NANOSECONDS_PER_SECOND
