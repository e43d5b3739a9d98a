"""How fast a queue empties, while more come than can go: told to those who find it full, and to those for
whom their turn would come too late.

Only what has left since the queue was last empty counts, the latest 32 of it. Before that a dispatch says how
often somebody asked, not how often a place comes free.
"""

from collections import deque

from gateway.policy.clock import NANOSECONDS_PER_SECOND, NEVER

_KEPT = 32
_AGE_MIN_NS = NANOSECONDS_PER_SECOND // 2


class DrainRate:
    def __init__(self) -> None:
        self._since = NEVER
        self._marks: deque[int] = deque(maxlen=_KEPT + 1)  # the beginning, then each that left

    def begins(self, now: int) -> None:
        """The first one waits."""
        self._since = now
        self._marks.clear()
        self._marks.append(now)

    def count(self, now: int) -> None:
        """One has left the queue for an engine."""
        self._marks.append(now)

    def time_for(self, requests: int, now: int, least: int = 1) -> int | None:
        """Nanoseconds until so many more will have left; None when fewer than `least` have, or in the first
        half second."""
        left = len(self._marks) - 1
        if left < least or now - self._since < _AGE_MIN_NS:
            return None
        return requests * (now - self._marks[0]) // left
