"""Which classes are active: those that have requests here, and for a while after the last one has ended.

The buckets go by it: below an active class lending has its ceiling, and long prompts their own share.
"""

from gateway.policy.clock import NANOSECONDS_PER_SECOND, NEVER
from gateway.policy.request import PRIORITIES, Priority
from gateway.policy.token_bucket import TokenBuckets

ACTIVITY_TAIL_NS = 5 * NANOSECONDS_PER_SECOND
"""A class counts as active for so long after its last request ended: its next one is likely near."""
ACTIVE_ELSEWHERE_NS = NANOSECONDS_PER_SECOND
"""One that is active at another gateway counts as active for so long after this was heard."""


class ClassActivity:
    def __init__(self, buckets: TokenBuckets, now: int) -> None:
        self._buckets = buckets
        self.requests = [0, 0, 0]
        """Of each class, waiting or in flight."""
        self._until = [now] * len(PRIORITIES)  # by requests of this gateway

    @property
    def idle(self) -> bool:
        return not any(self.requests)

    def enters(self, priority: Priority) -> None:
        self.requests[priority] += 1
        self._buckets.active_until[priority] = NEVER

    def leaves(self, priority: Priority, now: int) -> int:
        """When its class stops to be active, NEVER while it has other requests."""
        self.requests[priority] -= 1
        if self.requests[priority]:
            return NEVER
        until = now + ACTIVITY_TAIL_NS
        self._until[priority] = self._buckets.active_until[priority] = until
        return until

    def elsewhere(self, priority: Priority, now: int) -> int:
        """The class is active at another gateway: until when it counts as that here."""
        until = max(self._buckets.active_until[priority], now + ACTIVE_ELSEWHERE_NS)
        self._buckets.active_until[priority] = until
        return until

    def here(self, priority: Priority, now: int) -> bool:
        """Whether it is active by requests of this gateway."""
        return bool(self.requests[priority]) or self._until[priority] > now

    def carry_on(self, other: "ClassActivity") -> None:
        """What was active there goes on to be."""
        mine, others = self._buckets.active_until, other._buckets.active_until
        for priority in PRIORITIES:
            if (until := others[priority]) < NEVER:
                mine[priority] = max(mine[priority], until)
            self._until[priority] = max(self._until[priority], other._until[priority])
