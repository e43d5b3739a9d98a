"""What happened, as frozen records, for whoever listens. The silent `Observer` is the default.

Listeners must not call back into the policy.
"""

from dataclasses import dataclass
from typing import NamedTuple

from gateway.policy.outcome import Outcome
from gateway.policy.request import Priority, Usage


class RequestEnded(NamedTuple):
    """One offered request, complete. Times are nanoseconds; None = does not apply.

    `usage` is what was settled: measured where the engine told, counted otherwise, None when nothing ran.
    `ttft_ns` counts from arrival, `upstream_ttft_ns` from dispatch.
    """

    request_id: str
    priority: Priority
    tenant: str
    model: str
    outcome: Outcome
    streaming: bool
    upstream: str | None
    arrived_at: int
    ended_at: int
    queue_wait_ns: int | None
    ttft_ns: int | None
    upstream_ttft_ns: int | None
    tpot_ns: int | None
    max_gap_ns: int | None
    usage: Usage | None
    estimated_cost: int
    charged: int
    promoted: bool


@dataclass(frozen=True, slots=True)
class RatesChanged:
    """A change of the class rates (millitokens per second), by whom and why."""

    at: int
    law: str
    reason: str
    direction: str  # up | down | shift
    old_rates: tuple[int, ...]
    new_rates: tuple[int, ...]
    inputs: dict[str, float]


class Observer:
    """Hears everything, does nothing."""

    def ended(self, event: RequestEnded) -> None: ...

    def promoted(self, priority: Priority) -> None: ...

    def rates_changed(self, event: RatesChanged) -> None: ...
