"""How fast a queue empties, for the advice given to those who find it full."""

from gateway.policy.clock import NANOSECONDS_PER_SECOND

_SPAN_NS = 5 * NANOSECONDS_PER_SECOND
_SPAN_MIN_NS = NANOSECONDS_PER_SECOND
"""Free places fill in an instant after a silence; that says nothing of how fast they come free."""


class DrainRate:
    """Dispatches counted in two alternating spans of five seconds."""

    def __init__(self, now: int) -> None:
        self._since = now
        self._before = 0
        self._current = 0

    def count(self, now: int) -> None:
        self._turn(now)
        self._current += 1

    def time_for(self, requests: int, now: int) -> int | None:
        """Nanoseconds until that many will have left; None when nothing has moved lately."""
        self._turn(now)
        left = self._before + self._current
        if not left:
            return None
        span = now - self._since + (_SPAN_NS if self._before else 0)
        return max(requests, 1) * max(span, _SPAN_MIN_NS) // left

    def _turn(self, now: int) -> None:
        elapsed = now - self._since
        if elapsed >= 2 * _SPAN_NS:
            self._before, self._current, self._since = 0, 0, now
        elif elapsed >= _SPAN_NS:
            self._before, self._current, self._since = self._current, 0, self._since + _SPAN_NS
