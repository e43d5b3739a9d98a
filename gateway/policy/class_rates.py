"""Arithmetic of class rates: whole millitokens per second that always add up to C exactly.

C0 is what the healthy upstreams are good for, `share_i × C0` what a class gets then. C is what a law allows
just now. Where C falls the lowest class gives first: P2 down to its floor, then P1, last P0, so that a fault
which all share never turns the order of the classes around. Where C grows, what a class lacks of
`share_i × max(C0, C)` is restored first, P0 before P1 before P2; once nobody lacks anything that is growth by
share. Both are undone by each other and need no memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import PRIORITIES
from gateway.policy.token_bucket import split_rates

Rates = tuple[int, ...]
"""Of the classes, in millitokens per second."""


@dataclass(frozen=True, slots=True)
class RateLimits:
    """All in millitokens per second but the shares; tuples are by class."""

    nominal: int
    """C0."""
    shares: tuple[float, ...]
    floors: Rates
    ceiling_shares: tuple[float, ...]
    lowest: int
    """Of C: its own bound, or the sum of the floors where that is more."""
    highest: int

    def within(self, capacity: float) -> int:
        """The capacity, kept between its bounds."""
        return min(max(int(capacity), self.lowest), self.highest)

    def at_shares(self, capacity: int) -> Rates:
        """C split by the shares, and below C0 cut as a law cuts."""
        nominal = tuple(split_rates(self.nominal, self.shares))
        return self.moved_to(nominal, capacity)

    def moved_to(self, rates: Rates, capacity: int, p0_part: float = 1.0) -> Rates:
        change = self.within(capacity) - sum(rates)
        return self.grown(rates, change, p0_part) if change > 0 else cut(rates, -change, self.floors)

    def grown(self, rates: Rates, by: int, p0_part: float = 1.0) -> Rates:
        """`p0_part`: of its share of a C above C0, what P0 is due before the others get theirs."""
        capacity = sum(rates) + by
        due = split_rates(max(self.nominal, capacity), self.shares)
        if capacity > self.nominal:
            due[0] = max(due[0], int(min(self.shares[0] * p0_part, self.ceiling_shares[0]) * capacity))
        return restored(rates, by, due)

    def nearer_to_shares(self, rates: Rates, by: int) -> Rates:
        """The same sum: those that have more than their share of it, P2 first, give up to `by` to those that
        have less, P0 first."""
        due = split_rates(sum(rates), self.shares)
        left = cut(rates, by, [min(rate, wanted) for rate, wanted in zip(rates, due, strict=True)])
        return restored(left, sum(rates) - sum(left), due)

    def repaired(self, rates: Rates) -> Rates:
        """The same sum as far as the bounds allow, with no class below its floor."""
        lacking = tuple(max(floor - rate, 0) for rate, floor in zip(rates, self.floors, strict=True))
        raised = tuple(rate + more for rate, more in zip(rates, lacking, strict=True))
        return self.moved_to(cut(raised, sum(lacking), self.floors), sum(rates))


def rate_limits(parameters: PolicyParameters, nominal: int) -> RateLimits:
    classes = [parameters.classes[p] for p in PRIORITIES]
    low, high = parameters.control.capacity_bounds
    shares = tuple(c.share for c in classes)
    floors = tuple(
        min(int(c.floor * nominal), due) for c, due in zip(classes, split_rates(nominal, shares), strict=True)
    )
    return RateLimits(
        nominal=nominal,
        shares=shares,
        floors=floors,
        ceiling_shares=tuple(c.ceiling_share for c in classes),
        lowest=max(int(low * nominal), sum(floors)),
        highest=int(high * nominal),
    )


def cut(rates: Rates, by: int, floors: Sequence[int]) -> Rates:
    """Take `by` from P2 down to its floor, then from P1, last from P0."""
    left = list(rates)
    for i in reversed(range(len(left))):
        taken = min(by, max(left[i] - floors[i], 0))
        left[i] -= taken
        by -= taken
    return tuple(left)


def restored(rates: Rates, by: int, due: Sequence[int]) -> Rates:
    """Give `by` to those that have less than their due, P0 first; P0 takes what rounding leaves."""
    given = list(rates)
    for i, wanted in enumerate(due):
        more = min(by, max(wanted - given[i], 0))
        given[i] += more
        by -= more
    given[0] += by
    return tuple(given)


def scaled(rates: Rates, part: int, whole: int) -> Rates:
    """`part` / `whole` of each; the sum is that part of the sum, and P0 takes what rounding leaves."""
    new = [rate * part // whole for rate in rates]
    new[0] += sum(rates) * part // whole - sum(new)
    return tuple(new)
