"""A bucket that holds one minute, written down a second time in exact fractions.

Own text, own arithmetic: it shares nothing with the policy but the contract.
"""

from fractions import Fraction

MINUTE = 60_000_000_000  # nanoseconds


class ExactMinute:
    """Tokens (or requests) are fractions, amounts given and taken are thousandths; a debit at settlement
    counts in whole thousandths."""

    def __init__(self, per_minute: int, now: int = 0) -> None:
        self.per_minute, self.now = per_minute, now
        self.level = Fraction(per_minute)

    def run(self, until: int) -> None:
        inflow = Fraction(self.per_minute * (until - self.now), MINUTE)
        self.level = min(self.level + inflow, Fraction(self.per_minute))
        self.now = until

    def affords(self, thousandths: int) -> bool:
        return self.per_minute > 0 and self.level >= min(Fraction(thousandths, 1000), self.per_minute)

    def take(self, thousandths: int) -> None:
        self.level -= Fraction(thousandths, 1000)

    def give(self, thousandths: int) -> None:
        self.level = min(self.level + Fraction(thousandths, 1000), Fraction(self.per_minute))

    def debit(self, thousandths: int, debt_seconds: Fraction) -> None:
        room = max(self.level + debt_seconds * self.per_minute / 60, Fraction(0))
        self.take(min(thousandths, int(room * 1000)))

    def change(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self.level = min(self.level, Fraction(per_minute))
