"""Time as the policy knows it: whole nanoseconds from an arbitrary origin, never going back.

Nanoseconds are integers because a floating-point clock asked again "exactly on time" is often a hair
short, and a driver that waits for such an instant never gets past it.
"""

from typing import Protocol

NANOSECONDS_PER_SECOND = 1_000_000_000
NEVER = 1 << 62
"""A time that does not come (about 146 years)."""


class Clock(Protocol):
    """Something that tells the time in nanoseconds; successive answers never decrease."""

    def now(self) -> int: ...


class ManualClock:
    """A clock that moves only when told to. Ships with the policy because every test needs it."""

    def __init__(self, now: int = 0) -> None:
        self._now = now

    def now(self) -> int:
        return self._now

    def advance_to(self, now: int) -> None:
        if now < self._now:
            raise ValueError(f"the clock stands at {self._now} ns and cannot go back to {now} ns")
        self._now = now

    def advance(self, seconds: float) -> int:
        self.advance_to(self._now + to_nanoseconds(seconds))
        return self._now


def to_nanoseconds(seconds: float) -> int:
    """Seconds to whole nanoseconds, rounded up so that a wake-up is never early; NEVER at the most."""
    if seconds >= NEVER / NANOSECONDS_PER_SECOND:
        return NEVER
    whole = int(seconds * NANOSECONDS_PER_SECOND)
    return whole if whole >= seconds * NANOSECONDS_PER_SECOND else whole + 1


def to_seconds(nanoseconds: int) -> float:
    return nanoseconds / NANOSECONDS_PER_SECOND
