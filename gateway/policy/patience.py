"""How long a request may wait, and whether waiting can help.

The wait limit counts from arrival to dispatch: the smallest of `max_wait_seconds`, 0.6 × the TTFT promise
(with `deadline_drop`: a survivor must still have time for its prefill), and the client's own time-out less
the predicted prefill. A request that would be late anyway is told so when it arrives:

* short of tokens: predicted wait = (tokens missing + cost ahead) / rate, see `token_bucket`;
* short of a place: requests ahead / dispatches per second since the class has been backlogged.

What is ahead of a request is what its tenant's fair turn lets pass: until it is served its own, everybody
else who waits and had less gets as much.
"""

from gateway.policy.parameters import ClassParameters, SchedulingParameters
from gateway.policy.priority_queue import FairQueue
from gateway.policy.request import Ticket

DEADLINE_DROP_PART = 0.6
"""Of the TTFT promise: one who has waited so long must still have time for its prefill."""

HOPELESS = 2.0
"""A place is predicted from the recent past: only one that would come so many times too late is given up."""

DISPATCHES_MIN = 8
"""And only one that is predicted from so many dispatches."""

_TENANTS_WALKED = 64
"""Where more have had less than one that comes, all that waits counts as ahead of it."""


def class_wait_limit_ns(limits: ClassParameters, scheduling: SchedulingParameters) -> int:
    """What the class itself allows."""
    slo = limits.slo
    if scheduling.deadline_drop and slo is not None and slo.ttft_ns is not None:
        return min(limits.max_wait_ns, round(DEADLINE_DROP_PART * slo.ttft_ns))
    return limits.max_wait_ns


def wait_limit_ns(ticket: Ticket, limits: ClassParameters, scheduling: SchedulingParameters) -> int:
    """What the class and the client allow; 0 when it must go at once to be of use to the client."""
    longest = class_wait_limit_ns(limits, scheduling)
    told = ticket.ask.client_timeout_ns
    if told is None:
        return longest
    prefill: int = min(u.prefill.predict_ns(ticket.input_tokens) for u in ticket.route.upstreams)
    return min(longest, max(told - prefill, 0))


def cost_ahead(line: FairQueue, tenant: str, cost: int) -> int:
    """What will be paid before a request of that cost which the tenant adds to the line, millitokens."""
    head = line.peek()
    if head is None:
        return 0
    ahead = own = line.cost_of(tenant)
    until = line.counters.of_waiting(tenant) + own + cost
    for walked, other in enumerate(line.less_served(until)):
        if walked == _TENANTS_WALKED:
            return line.total_cost
        if other != tenant:
            ahead += min(line.cost_of(other), until - line.counters.of(other))
    return max(ahead, head.cost)
