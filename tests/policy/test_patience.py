"""How long a request may wait, what is ahead of it, and how fast places come."""

from typing import Any

import pytest

from gateway.policy.parameters import SchedulingParameters
from gateway.policy.patience import class_wait_limit_ns, cost_ahead, wait_limit_ns
from gateway.policy.priority_queue import FairQueue, ServiceCounters
from gateway.policy.request import Ticket
from gateway.policy.routes import Route
from gateway.policy.upstream_slots import UpstreamSlots
from tests.support.policy_settings import P1, ask, class_parameters, nanoseconds, upstream

DROPPING = SchedulingParameters(deadline_drop=True)
PATIENT = SchedulingParameters(deadline_drop=False)
_seq = iter(range(10**9))


@pytest.mark.parametrize(
    ("wait", "ttft", "scheduling", "limit"),
    [
        (15, None, DROPPING, 15),
        (15, 2, PATIENT, 15),
        (15, 2, DROPPING, 1.2),
        (1, 2, DROPPING, 1),
        (0, 2, DROPPING, 0),
    ],
)
def test_what_the_class_allows(
    wait: float, ttft: float | None, scheduling: SchedulingParameters, limit: float
) -> None:
    """The smaller of its wait limit and, where late ones are dropped, 0.6 of what it promises."""
    assert class_wait_limit_ns(class_parameters(P1, wait=wait, ttft=ttft), scheduling) == nanoseconds(limit)


def test_a_class_that_promises_only_a_pace_drops_nobody() -> None:
    """Without a first-token promise there is no deadline to drop at."""
    assert class_wait_limit_ns(class_parameters(P1, wait=9, tpot=0.05), DROPPING) == nanoseconds(9)


def ticket(tokens: int = 1, tenant: str = "t", *speeds: float, **given: Any) -> Ticket:
    """One that may go to upstreams of these speeds, in prompt tokens a second."""
    made = Ticket(next(_seq), ask("r", P1, tokens, tenant=tenant, **given), 0)
    made.cost = tokens * 1000
    slots = [
        UpstreamSlots(upstream(str(i), tokens_per_second=speed), PATIENT) for i, speed in enumerate(speeds)
    ]
    made.route = Route(slots, long=False)
    return made


@pytest.mark.parametrize(
    ("timeout", "speeds", "limit"),
    [
        (None, (100,), 15),
        (20, (100,), 15),
        (16, (100,), 14),
        (16, (100, 1000), 15),
        (10, (100, 50), 8),
        (2, (100,), 0),
        (1, (100,), 0),
        (0, (100,), 0),
    ],
)
def test_what_the_client_allows(timeout: float | None, speeds: tuple[float, ...], limit: float) -> None:
    """Its own time-out less the prefill of its 200 tokens at the quickest of its upstreams; never below zero,
    and never more than the class allows."""
    one = ticket(200, "t", *speeds, timeout=timeout)
    assert wait_limit_ns(one, class_parameters(P1, wait=15), PATIENT) == nanoseconds(limit)


# ---------------------------------------------------------------------- cost ahead


def line(**waiting: tuple[int, ...]) -> FairQueue:
    """Costs that wait, by tenant, in order of arrival; tokens of one millitoken."""
    queue = FairQueue(ServiceCounters(), sticky_head=True)
    for tenant, costs in waiting.items():
        for cost in costs:
            one = Ticket(next(_seq), ask("r", P1, 1, tenant=tenant), 0)
            one.cost = cost
            queue.push(one)
    return queue


@pytest.mark.parametrize(
    ("waiting", "tenant", "cost", "ahead"),
    [
        ({}, "a", 10, 0),
        ({"a": (5, 5)}, "a", 10, 10),  # its own
        ({"a": (5, 5, 5, 5)}, "b", 10, 10),  # while b gets 10 so does a
        ({"a": (5,)}, "b", 10, 5),  # no more than there is
        ({"a": (5,) * 9, "b": (5,) * 9}, "c", 10, 20),
        ({"a": (5,) * 9, "b": (5,) * 9, "c": (10,)}, "c", 10, 50),  # 10 of its own, and 20 of each other
        ({"a": (90,)}, "b", 10, 90),  # the head is never bypassed
        ({"a": (90, 90)}, "b", 10, 90),
    ],
)
def test_what_is_paid_before(waiting: dict[str, tuple[int, ...]], tenant: str, cost: int, ahead: int) -> None:
    """Its own tenant's, as much of everybody else's as its tenant gets until then, and the chosen head's."""
    assert cost_ahead(line(**waiting), tenant, cost) == ahead
