"""An engine's own load, and which classes it keeps out.

The engine's metrics page tells how many requests wait inside it and how much of its KV memory is used. Both
are old by up to a scrape interval, so they are corrected by what this gateway has sent and got since:

    waiting ≈ waiting on the page + (own prompts without a first token: now − when the page came)
    KV use  ≈ KV use on the page + (own tokens in flight: now − when the page came) / KV size

Past the first threshold the gate closes for P2, past the second for P1 as well; for P0 never. The second is
twice `waiting_high`, and half of the way from `kv_high` to full. A page older than `load_stale_ns` says
nothing: then the gateway's own counts are all there is, and they never stop dispatch by themselves.
"""

from dataclasses import dataclass

from gateway.policy.clock import NEVER
from gateway.policy.parameters import UpstreamParameters
from gateway.policy.request import Priority


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What a metrics page said; None = it did not say.

    `kv_usage` is a fraction from 0 to 1; `kv_tokens` is how many tokens the KV memory holds in all.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    kv_tokens: int | None = None


class LoadGate:
    """`own_prefills` and `own_tokens` are this gateway's counts at that upstream: requests without a first
    token, and tokens in flight."""

    def __init__(self, parameters: UpstreamParameters) -> None:
        self._parameters = parameters
        self._load: EngineLoad | None = None
        self._own_prefills = 0
        self._own_tokens = 0
        self.stale_at = NEVER
        """When the last page stops to count; NEVER if there is none that does."""

    @property
    def is_known(self) -> bool:
        """Whether there ever was a page."""
        return self._load is not None

    def told(self, load: EngineLoad, own_prefills: int, own_tokens: int, now: int) -> None:
        self._load = load
        self._own_prefills = own_prefills
        self._own_tokens = own_tokens
        self.stale_at = now + self._parameters.load_stale_ns

    def reconfigure(self, parameters: UpstreamParameters) -> None:
        self._parameters = parameters

    def waiting(self, own_prefills: int, now: int) -> float | None:
        """Requests that wait inside the engine just now; None where nothing fresh is known."""
        load = self._fresh(now)
        if load is None or load.waiting is None:
            return None
        return max(load.waiting + own_prefills - self._own_prefills, 0)

    def kv_usage(self, own_tokens: int, now: int) -> float | None:
        """Used fraction of the KV memory just now; None where nothing fresh is known."""
        load = self._fresh(now)
        if load is None or load.kv_usage is None:
            return None
        since = (own_tokens - self._own_tokens) / load.kv_tokens if load.kv_tokens else 0.0
        return max(load.kv_usage + since, 0.0)

    def closes(self, priority: Priority, own_prefills: int, own_tokens: int, now: int) -> bool:
        """Whether a request of the class must wait for the engine to catch up."""
        if now >= self.stale_at or self._load is None or priority is Priority.P0:
            return False
        waiting_limit, kv_limit = self._parameters.waiting_high, self._parameters.kv_high
        if priority is Priority.P1:
            waiting_limit, kv_limit = 2 * waiting_limit, (1 + kv_limit) / 2
        waiting = self.waiting(own_prefills, now)
        if waiting is not None and waiting > waiting_limit:
            return True
        used = self.kv_usage(own_tokens, now)
        return used is not None and used > kv_limit

    def _fresh(self, now: int) -> EngineLoad | None:
        return self._load if now < self.stale_at else None
