"""What listeners share about endings."""

from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.request import Priority

_WAITED_IN_VAIN = frozenset({Outcome.QUEUE_TIMEOUT, Outcome.REJECTED_NO_UPSTREAM})


def milliseconds(nanoseconds: int | None) -> float | None:
    """To the microsecond; cheaper than rounding a float."""
    return None if nanoseconds is None else nanoseconds // 1000 / 1000


def queue_wait_ns(event: RequestEnded) -> int | None:
    """From arrival to dispatch, or to the end of a wait that was in vain: leaving those out would make
    the waits look shorter the more of them fail. None for one that did not wait."""
    if event.queue_wait_ns is None and event.outcome in _WAITED_IN_VAIN:
        return event.ended_at - event.arrived_at
    return event.queue_wait_ns


REFUSAL_REASONS = (
    *("class_budget", "tenant_limit", "queue_full", "queue_timeout"),
    *("no_upstream", "draining"),
)
_REASON_BY_OUTCOME = {
    Outcome.REJECTED_RATE: "class_budget",
    Outcome.REJECTED_QUEUE_FULL: "queue_full",
    Outcome.QUEUE_TIMEOUT: "queue_timeout",
    Outcome.REJECTED_NO_UPSTREAM: "no_upstream",
    Outcome.REJECTED_DRAINING: "draining",
}


def refusal_reason(event: RequestEnded) -> str | None:
    """For want of what the gateway refused the request; None for one that it did not refuse, or that could
    not have been served by anybody (a bad request, a wrong key)."""
    return "tenant_limit" if event.by_tenant_limit else _REASON_BY_OUTCOME.get(event.outcome)


def ended_at_the_door(
    request_id: str,
    outcome: Outcome,
    arrived_at: int,
    ended_at: int,
    *,
    priority: Priority = Priority.P1,
    tenant: str = "",
    model: str = "",
    streaming: bool = False,
) -> RequestEnded:
    """The record of a request that the policy never saw. What is not known yet stays empty."""
    return RequestEnded(
        request_id=request_id,
        priority=priority,
        tenant=tenant,
        model=model,
        outcome=outcome,
        streaming=streaming,
        upstream=None,
        arrived_at=arrived_at,
        ended_at=ended_at,
        queue_wait_ns=None,
        ttft_ns=None,
        upstream_ttft_ns=None,
        tpot_ns=None,
        max_gap_ns=None,
        usage=None,
        estimated_cost=0,
        charged=0,
        promoted=False,
    )
