"""A bucket that holds one full minute of a limit and is refilled evenly.

Exactness: one token (or request) is 60 × 10⁹ units, so that a limit of n per minute flows in at n units per
nanosecond, and every level is a whole number.
"""

from gateway.policy.clock import NANOSECONDS_PER_SECOND, NEVER
from gateway.policy.parameters import MILLITOKENS

MINUTE_NS = 60 * NANOSECONDS_PER_SECOND
UNITS_PER_MILLI = MINUTE_NS // MILLITOKENS
"""Of a token, or of a request: both are counted in thousandths."""


class MinuteBucket:
    """Holds one minute of `per_minute`; amounts are thousandths. Starts full."""

    def __init__(self, per_minute: int, now: int) -> None:
        self.per_minute = per_minute
        self._level = self._full = per_minute * MINUTE_NS
        self._now = now

    def advance(self, now: int) -> None:
        if now > self._now:
            self._level = min(self._level + self.per_minute * (now - self._now), self._full)
            self._now = now

    def reconfigure(self, per_minute: int, now: int) -> None:
        """Another limit from now on. What is left is kept, up to the new full minute."""
        self.advance(now)
        self.per_minute = per_minute
        self._full = per_minute * MINUTE_NS
        self._level = min(self._level, self._full)

    def affords(self, amount: int) -> bool:
        return self._level >= min(amount * UNITS_PER_MILLI, self._full) and self._full > 0

    def wait_ns(self, amount: int) -> int:
        """Until it affords the amount if nothing else is taken; NEVER for a limit of 0."""
        return self._time_for(min(amount * UNITS_PER_MILLI, self._full) - self._level)

    def take(self, amount: int) -> None:
        self._level -= amount * UNITS_PER_MILLI

    def give(self, amount: int) -> None:
        self._level = min(self._level + amount * UNITS_PER_MILLI, self._full)

    def debit(self, amount: int, max_debt_seconds: float) -> None:
        """Take more at settlement, but not further than the debt limit."""
        lowest = -round(max_debt_seconds * NANOSECONDS_PER_SECOND) * self.per_minute
        room = max(self._level - lowest, 0) // UNITS_PER_MILLI
        self.take(min(amount, room))

    @property
    def left(self) -> int:
        """Whole tokens or requests; below zero is debt."""
        return self._level // MINUTE_NS

    @property
    def full_after_ns(self) -> int:
        return self._time_for(self._full - self._level) if self.per_minute else 0

    def _time_for(self, missing: int) -> int:
        return max(-(-missing // self.per_minute), 0) if self.per_minute else NEVER
