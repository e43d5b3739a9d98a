"""What happened, as frozen records, for whoever listens. The silent `Observer` is the default.

Listeners must not call back into the policy.
"""

from dataclasses import dataclass
from typing import NamedTuple

from gateway.policy.engine_load import EngineLoad
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Ask, Priority, Usage


class RequestEnded(NamedTuple):
    """One offered request, complete. Times are nanoseconds; None = does not apply.

    `usage` is what was settled: measured where the engine told, counted otherwise, None when nothing ran.
    `ttft_ns` counts from arrival, `upstream_ttft_ns` from dispatch. `by_tenant_limit`: refused by the
    tenant's own limit. `would_be`: how it would have been refused, had its class not been in observe mode.
    `requeued_at`: an engine had no room for it then, or the upstream `not_reached` could not be connected to,
    and it was sent again. `ask`, `seen` (what the policy saw when it arrived) and `order` are there when the
    request came to the policy and somebody `wants_details`.
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
    by_tenant_limit: bool = False
    would_be: Outcome | None = None
    requeued_at: int | None = None
    not_reached: str | None = None
    ask: Ask | None = None
    seen: "Seen | None" = None
    order: "Order | None" = None

    @property
    def requeued(self) -> bool:
        return self.requeued_at is not None


class Order(NamedTuple):
    """Running numbers, among all that the policy was told, of what happened to a request: what happened at
    one instant happened in this order."""

    arrived: int
    requeued: int | None
    first_token: int | None
    ended: int


class Seen(NamedTuple):
    """The state of the pool at a request's arrival. Tokens are weighted tokens, lists are by class."""

    bucket_tokens: tuple[float, ...]
    rates_tokens_per_second: tuple[float, ...]
    throttled: tuple[int, ...]
    ready: tuple[int, ...]
    upstreams: tuple["SeenUpstream", ...]


class SeenUpstream(NamedTuple):
    """`waiting` and `kv_usage` are the engine's own signals, corrected by what was sent since; None when
    it told none, or its last word is stale."""

    name: str
    healthy: bool
    in_flight: tuple[int, ...]
    in_flight_tokens: int
    pending_prefill_tokens: int
    waiting: float | None
    kv_usage: float | None


@dataclass(frozen=True, slots=True)
class RatesChanged:
    """A change of the class rates (millitokens per second), by whom and why: a law's `reason`, or `capacity`
    (an engine went or came) or `settings`. Those of the pool that these `upstreams` form; `order` is its
    running number as in `Order`. `applied` is False for what a law only advises in observe mode."""

    at: int
    law: str
    reason: str
    direction: str  # up | down | shift
    old_rates: tuple[int, ...]
    new_rates: tuple[int, ...]
    inputs: dict[str, float]
    upstreams: tuple[str, ...] = ()
    order: int = 0
    applied: bool = True


class Observer:
    """Hears everything, does nothing."""

    wants_details = False
    """Whether `RequestEnded.ask` and `.seen` are to be filled in, which costs some microseconds."""

    def ended(self, event: RequestEnded) -> None: ...

    def promoted(self, priority: Priority) -> None: ...

    def rates_changed(self, event: RatesChanged) -> None: ...

    def reconfigured(self, parameters: PolicyParameters, at: int) -> None:
        """Other settings are in force from now on."""

    def health_changed(self, upstream: str, healthy: bool, at: int) -> None: ...

    def trial_allowed(self, upstream: str, at: int) -> None:
        """An upstream that is down may get one request, to show whether it serves again."""

    def load_told(self, upstream: str, load: EngineLoad, at: int) -> None:
        """An engine's metrics page was read."""

    def queue_full(self, upstream: str, at: int) -> None:
        """An engine sent a request back because it had no room: a sign of congestion."""
