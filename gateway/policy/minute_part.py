"""A tenant's minute where several gateways share it: the part that this one may use.

The store of all holds the bucket, and lets each gateway use it *up to a mark*, which is moved on about ten
times a second while the tenant is in use here (`gateway/fleet`). A gateway counts what it has used since it
started, refunds less, and tells the count; what it may use is the mark less the count. A tenant that the
store has not been told of, and every tenant while the store is silent, fills by limit / gateways: up to so
much, from which in the second case a larger request is paid too, into debt.

The store charges what a count has grown from one telling to the next. What was used before a tenant was told
of, or told of again, is charged with the second telling: the first one says the count that was told last.
That is one part at most, since more had flowed in here meanwhile.
"""

from typing import NamedTuple

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.minute_bucket import MINUTE_NS, UNITS_PER_MILLI, MinuteBucket
from gateway.policy.parameters import MILLITOKENS

IN_USE_NS = 70 * NANOSECONDS_PER_SECOND
"""After the last request: a minute fills the bucket again."""
MORE_AFTER_NS = NANOSECONDS_PER_SECOND // 4
"""By when the mark has been moved on, where the tenant has more left than may be used here."""


class AllowanceUse(NamedTuple):
    """Thousandths of a token or request."""

    per_minute: int
    used: int
    wanted: int
    """For the next second."""
    largest: int
    """Of the requests that want it."""


class MinutePart(MinuteBucket):
    def __init__(self, per_minute: int, gateways: int, now: int) -> None:
        super().__init__(per_minute, now)
        self._gateways = gateways
        self._used = 0
        self._last_told = 0
        self._is_told = False
        self._mark: int | None = None
        self._in_use_until = now
        self._second = now
        self._asked = self._asked_before = 0
        self._largest = self._largest_before = 0
        self._total = self._full
        self._inflow = self._part
        self._level = self._inflow * UNITS_PER_MILLI

    @property
    def _part(self) -> int:
        """Thousandths, of each gateway."""
        return self.per_minute * MILLITOKENS // self._gateways

    @property
    def _store_is_silent(self) -> bool:
        return self._mark is not None and self._inflow > 0

    def _fill_by_part(self) -> None:
        """Until there is a mark again; what is left stays, cut to the part."""
        self._mark, self._inflow = None, self._part
        self._level = min(self._level, self._inflow * UNITS_PER_MILLI)

    # ------------------------------------------------------------------ as any bucket

    def advance(self, now: int) -> None:
        passed = now - self._now
        if passed <= 0:
            return
        self._total = min(self._total + self.per_minute * passed, self._full)
        if self._inflow:
            part = self._inflow * UNITS_PER_MILLI
            self._level = min(self._level + self._inflow * passed // MILLITOKENS, max(part, self._level))
        self._now = now
        if now >= self._in_use_until and self._is_told:
            if not self._store_is_silent:  # it has filled up meanwhile, though not in here
                self._level = self._full
            self._is_told = False
            self._fill_by_part()

    def reconfigure(self, per_minute: int, now: int) -> None:
        super().reconfigure(per_minute, now)
        self._total = min(self._total, self._full)
        if self._mark is None:
            self._fill_by_part()

    def affords(self, amount: int) -> bool:
        return self._full > 0 and self._level >= self._needed(amount)

    def wait_ns(self, amount: int) -> int:
        needed = self._needed(amount)
        if self._store_is_silent:
            return max(-(-(needed - self._level) * MILLITOKENS // self._inflow), 0)
        if self.per_minute and self._total >= needed:
            return 0 if self._level >= needed else MORE_AFTER_NS
        return self._time_for(needed - self._total)

    def _needed(self, amount: int) -> int:
        most = min(self._inflow * UNITS_PER_MILLI, self._full) if self._store_is_silent else self._full
        return min(amount * UNITS_PER_MILLI, most)

    def take(self, amount: int) -> None:
        super().take(amount)
        self._total -= amount * UNITS_PER_MILLI
        self._used += amount

    def give(self, amount: int) -> None:
        super().give(amount)
        self._total = min(self._total + amount * UNITS_PER_MILLI, self._full)
        self._used -= amount

    def debit(self, amount: int, max_debt_seconds: float) -> None:
        """Beyond the part that is here: the debt is the tenant's."""
        lowest = -round(max_debt_seconds * NANOSECONDS_PER_SECOND) * self.per_minute
        room = max(max(self._total, self._level) - lowest, 0) // UNITS_PER_MILLI
        self.take(min(amount, room))

    @property
    def left(self) -> int:
        return (self._level if self._store_is_silent else self._total) // MINUTE_NS

    @property
    def full_after_ns(self) -> int:
        if self._store_is_silent:
            return self.wait_ns(self.per_minute * MILLITOKENS)
        return self._time_for(self._full - self._total) if self.per_minute else 0

    # ------------------------------------------------------------------ several gateways

    def share(self, gateways: int, now: int) -> None:
        """With so many."""
        self.advance(now)
        self._gateways = gateways
        if self._mark is None:
            self._fill_by_part()

    def asked(self, amount: int, now: int) -> None:
        """A request came that costs so much; it may be refused."""
        self._in_use_until = now + IN_USE_NS
        self._turn_second(now)
        self._asked += amount
        self._largest = max(self._largest, amount)

    def use(self, now: int) -> AllowanceUse | None:
        """What is to be told now; None while the tenant is not in use."""
        self.advance(now)
        if now >= self._in_use_until:
            return None
        self._turn_second(now)
        self._last_told = self._used if self._is_told else max(self._last_told, self._used - self._part)
        self._is_told = True
        wanted = max(self._asked, self._asked_before)
        largest = max(self._largest, self._largest_before)
        return AllowanceUse(self.per_minute * MILLITOKENS, self._last_told, wanted, largest)

    @property
    def owes(self) -> bool:
        """Whether the store has yet to hear of something that was used or given back."""
        return self._is_told and self._used != self._last_told

    def tell_no_more(self, now: int) -> None:
        """Others were used later, and there are too many to tell of all."""
        self.advance(now)
        if self._is_told:
            self._is_told = False
            self._fill_by_part()

    def take_part(self, mark: int, left: int, inflow: int, now: int) -> None:
        """Use up to the mark; `left` to all; `inflow` per minute besides. All in thousandths."""
        self.advance(now)
        self._total = min(left * UNITS_PER_MILLI, self._full)
        if mark != self._mark or not inflow:
            self._level = (mark - self._used) * UNITS_PER_MILLI
        self._mark, self._inflow = mark, inflow

    def _turn_second(self, now: int) -> None:
        passed = now - self._second
        if passed >= NANOSECONDS_PER_SECOND:
            recent = passed < 2 * NANOSECONDS_PER_SECOND
            self._asked_before, self._asked = self._asked if recent else 0, 0
            self._largest_before, self._largest = self._largest if recent else 0, 0
            self._second = now
