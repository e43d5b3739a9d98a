"""Three buckets under one capacity, written down a second time: slow, in exact fractions, eager.

Amounts are tokens, times nanoseconds. Own text, own arithmetic: it shares nothing with the policy but the
contract.
"""

from collections.abc import Sequence
from fractions import Fraction

SECOND = 1_000_000_000
CLASSES = (0, 1, 2)


class ExactBuckets:
    """`busy_until[i]`: until when class i counts as active; a number too large to come while it has work.
    With a `grain` levels are rounded to it after each span, so that fractions stay small in long runs."""

    def __init__(
        self,
        rates: Sequence[Fraction],
        ceilings: Sequence[Fraction],
        burst_seconds: Fraction,
        min_burst: Fraction,
        now: int = 0,
        grain: Fraction | None = None,
    ) -> None:
        self.grain = grain
        self._ceiling_shares = list(ceilings)
        self._burst_seconds, self._min_burst = burst_seconds, min_burst
        self.now = Fraction(now)
        self.busy_until: list[int] = [now] * 3
        self.set_rates(rates)
        self.levels = list(self.bursts)
        self.own = list(self.bursts)

    def set_rates(self, rates: Sequence[Fraction]) -> None:
        self.rates = list(rates)
        self.capacity = sum(self.rates, Fraction(0))
        self.bursts = [max(r * self._burst_seconds, min(self._min_burst, self.capacity)) for r in self.rates]
        if hasattr(self, "levels"):
            self.levels = [min(x, b) for x, b in zip(self.levels, self.bursts, strict=True)]
            self.own = [min(x, b) for x, b in zip(self.own, self.levels, strict=True)]

    def held_down(self, i: int) -> bool:
        """Whether a higher class is active now."""
        return any(self.busy_until[h] > self.now for h in range(i))

    def ceiling_rate(self, i: int) -> Fraction:
        """Rates are whole millitokens per second, ceilings too."""
        return Fraction(int(self._ceiling_shares[i] * self.capacity * 1000), 1000)

    def pour(self) -> list[Fraction]:
        """Present inflow per class, tokens a second."""
        flow = [self.rates[i] if self.levels[i] < self.bursts[i] else Fraction(0) for i in CLASSES]
        over = self.capacity - sum(flow)
        for i in CLASSES:
            if self.levels[i] < self.bursts[i]:
                room = over
                if self.held_down(i):
                    ceiling = max(self.ceiling_rate(i), self.rates[i])
                    room = min(over, ceiling - self.rates[i])
                flow[i] += room
                over -= room
        return flow

    def run(self, until: int) -> None:
        while self.now < until:
            flow = self.pour()
            stops = [Fraction(until), *(Fraction(t) for t in self.busy_until if self.now < t < until)]
            stops += [
                self.now + (self.bursts[i] - self.levels[i]) / flow[i] * SECOND
                for i in CLASSES
                if flow[i] > 0
            ]
            stop = min(s for s in stops if s > self.now)
            span = (stop - self.now) / SECOND
            for i in CLASSES:
                self.levels[i] += flow[i] * span
                if self.held_down(i):
                    self.own[i] = min(self.own[i] + self.rates[i] * span, self.levels[i])
                else:
                    self.own[i] = self.levels[i]
            self.now = stop
        if self.grain is not None:
            self.levels = [Fraction(round(x / self.grain)) * self.grain for x in self.levels]
            self.own = [Fraction(round(x / self.grain)) * self.grain for x in self.own]

    def take(self, i: int, cost: Fraction, own_share: bool = False) -> Fraction:
        """What the own level gave is answered."""
        before = self.own[i]
        self.levels[i] -= cost
        self.own[i] = before - cost if own_share else min(before, self.levels[i])
        return before - self.own[i]

    def give_back(self, i: int, tokens: Fraction, of_own: Fraction) -> None:
        fits = min(tokens, self.bursts[i] - self.levels[i])
        self.levels[i] += fits
        if self.held_down(i):
            self.own[i] = min(self.own[i] + min(tokens, of_own), self.levels[i])
        else:
            self.own[i] = self.levels[i]
        over = tokens - fits
        for j in CLASSES:  # what does not fit is lent on, where no ceiling forbids it
            if self.held_down(j) and self._ceiling_shares[j] < 1:
                continue
            more = min(over, self.bursts[j] - self.levels[j])
            self.levels[j] += more
            over -= more
            if not self.held_down(j):
                self.own[j] = self.levels[j]
