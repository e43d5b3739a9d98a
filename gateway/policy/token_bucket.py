"""Three token buckets under one capacity, with lending.

Theory. The capacity C is split by shares: `rate_i = share_i × C`, and the rates always add up to C. Bucket
i holds at most `burst_i`. While a bucket is full its inflow overflows into the others, P0 first, then P1,
then P2; a class below an *active* higher one takes no more than `ceiling_share_i × C` in all. So an idle
share is lent at once and taken back at once: shares are guarantees, not limits. (The hierarchical token
bucket of Linux' traffic control lends in the same way; here lending is by strict class order, and nothing
is owed back.)

Within each bucket a second account, the *own level*, says how much of the level the class's own share has
paid. While a higher class is active it grows by `rate_i` alone; otherwise lent tokens count as own. Long
prompts below P0 are paid from it, so that lending never lets them stall the higher class more often than
the class's share allows. Ordinary charges use lent tokens first: own level = min(own level, level); a
refund gives back to the own level first what the charge took from it.

A cost above `burst_i` is affordable when the bucket is full and leaves it in debt, so the long-run rate
holds and no request is locked out. Debits at settlement stop at `max_debt_seconds × rate_i` below zero.

Exactness. Levels are integers of 10⁻¹² token; rates are integers of millitokens per second. One
nanosecond at one millitoken per second is exactly one unit, so refilling for any whole number of
nanoseconds is exact and takes no remainder along. Refill is piecewise linear: it is cut where a bucket
fills and where a higher class's activity ends. Between two cuts all inflows are constant. A piece that is
cut anywhere else gives the same levels, so that it does not matter how often somebody looks.

Inflows follow from the rates, from which buckets are full and from which classes are limited, and are kept
for each combination of the two that was met, until other rates are installed. The piece that goes on now is
found out for a prediction, and kept until it ends, an activity changes, or somebody takes, gives back or
installs: all that moves a level or a burst otherwise than by an even inflow forgets it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.policy.budget_part import BudgetPart
from gateway.policy.clock import NANOSECONDS_PER_SECOND, NEVER, to_nanoseconds
from gateway.policy.parameters import MILLITOKENS
from gateway.policy.request import PRIORITIES, Priority

UNITS_PER_MILLITOKEN = NANOSECONDS_PER_SECOND
UNITS_PER_TOKEN = MILLITOKENS * UNITS_PER_MILLITOKEN

_CLASSES = tuple(range(len(PRIORITIES)))  # plain integers index faster than members of an enum
_INFLOW_SPAN_NS = NANOSECONDS_PER_SECOND
_INFLOW_GRAIN_NS = NANOSECONDS_PER_SECOND // 20

Levels = Sequence[Sequence[int]]
"""Of each class the level, and of each the own level, in units."""
Inflows = tuple[int, int, int]
"""Of each class, in millitokens per second."""
Limits = tuple[bool, bool, bool]
"""For each class whether a higher one is active."""


@dataclass(frozen=True, slots=True)
class BucketRules:
    shares: tuple[float, ...]
    ceiling_shares: tuple[float, ...]
    burst_seconds: float
    min_burst_tokens: int
    max_debt_seconds: float


class _Piece(NamedTuple):
    """The present piece of the refill: nothing but levels changes before `until`."""

    until: int
    inflow: Inflows
    limited: Limits
    active_until: list[int]
    """What it was found with."""


def split_rates(capacity: int, shares: Sequence[float]) -> list[int]:
    """Rates in millitokens per second that add up to `capacity` exactly; P0 takes the rounding."""
    rates = [int(capacity * share) for share in shares]
    rates[0] += capacity - sum(rates)
    return rates


class TokenBuckets:
    """Levels, rates and bursts of the three classes. `now` never goes back.

    `active_until[i]` is the time up to which class i counts as active: NEVER while it has requests.
    """

    def __init__(self, rules: BucketRules, capacity: int, now: int) -> None:
        self._rules = rules
        self._now = now
        self.active_until = [now] * len(PRIORITIES)
        self.rates: list[int] = []
        self._own_rates: Sequence[int] = ()
        self._lasting: Sequence[int] = ()  # for bursts and debts
        self._part: BudgetPart | None = None
        self.bursts: list[int] = []
        self.capacity = 0
        self._ceilings: list[int] = []
        self.levels = [0] * len(PRIORITIES)
        self.own_levels = [0] * len(PRIORITIES)
        self._inflows: dict[int, Inflows] = {}
        self._piece: _Piece | None = None
        self._inflow = [0] * len(PRIORITIES)
        self._inflow_history: deque[tuple[int, tuple[int, ...]]] = deque([(now, (0,) * len(PRIORITIES))])
        self._install(split_rates(capacity, rules.shares))
        self.levels = list(self.bursts)
        self.own_levels = list(self.bursts)

    # ------------------------------------------------------------------ rates

    def set_rates(self, rates: Sequence[int], now: int) -> None:
        """New rates in millitokens per second. Levels stay, cut to the new bursts."""
        self.advance(now)
        self._install(rates)
        self.levels = [min(level, burst) for level, burst in zip(self.levels, self.bursts, strict=True)]
        self.own_levels = [min(own, level) for own, level in zip(self.own_levels, self.levels, strict=True)]

    def reconfigure(self, rules: BucketRules, rates: Sequence[int], now: int) -> None:
        """Other rules and rates from now on; levels stay, cut to the new bursts."""
        self.advance(now)
        self._rules = rules
        self.set_rates(rates, now)

    def take_part(self, part: BudgetPart, now: int) -> None:
        """From now on these are one gateway's buckets of several: its rates, its bursts, its prospects."""
        self._part = part
        self.set_rates(part.rates, now)

    def empty(self) -> None:
        self.levels = [0] * len(PRIORITIES)
        self.own_levels = [0] * len(PRIORITIES)
        self._piece = None

    def take_out(self, part: int, whole: int) -> Levels:
        """`part` / `whole` of the levels, debts too, to be `put_in` elsewhere. No unit is lost or made."""
        taken = tuple(
            tuple(level * part // whole for level in levels) for levels in (self.levels, self.own_levels)
        )
        self.put_in([[-units for units in levels] for levels in taken])
        return taken

    def put_in(self, taken: Levels) -> None:
        """To be given rates next: until then the buckets may hold more than their bursts."""
        self._piece = None
        levels, own_levels = taken
        for i in _CLASSES:
            self.levels[i] += levels[i]
            self.own_levels[i] += own_levels[i]

    def _install(self, rates: Sequence[int]) -> None:
        rules = self._rules
        self.rates = list(rates)
        self.capacity = sum(rates)
        self._ceilings = [
            max(int(self.capacity * ceiling), rate)
            for ceiling, rate in zip(rules.ceiling_shares, rates, strict=True)
        ]
        self._own_rates = self.rates
        least, capacity = rules.min_burst_tokens * UNITS_PER_TOKEN, self.capacity
        self._lasting = self.rates
        if (part := self._part) is not None:
            self._own_rates = part.own_rates
            self._lasting = [
                max(mine, rate // part.gateways) for mine, rate in zip(rates, part.budget, strict=True)
            ]
            whole = sum(part.budget)
            capacity = max(capacity, whole // part.gateways)
            least = least * capacity // whole if whole else least
        least = min(least, capacity * NANOSECONDS_PER_SECOND)
        burst_ns = to_nanoseconds(rules.burst_seconds)
        self.bursts = [max(rate * burst_ns, least) for rate in self._lasting]
        self._inflows = {}
        self._piece = None

    # ------------------------------------------------------------------ time

    def advance(self, now: int) -> None:
        """Refill up to `now`; a time already passed changes nothing."""
        if now <= self._now:
            return
        levels = self.levels
        if levels != self.bursts or levels != self.own_levels:  # else nothing can flow
            p0, p1, p2 = levels
            piece = self._piece
            if piece is not None and now < piece.until and piece.active_until == self.active_until:
                self._flow_evenly(piece, now - self._now)
            else:
                self._flow(levels, self.own_levels, self._now, now)
                self._piece = None
            inflow = self._inflow
            inflow[0] += levels[0] - p0
            inflow[1] += levels[1] - p1
            inflow[2] += levels[2] - p2
        self._now = now
        history = self._inflow_history
        if now - history[-1][0] >= _INFLOW_GRAIN_NS:
            history.append((now, tuple(self._inflow)))
            while len(history) > 1 and history[1][0] <= now - _INFLOW_SPAN_NS:
                history.popleft()

    def _present_piece(self) -> _Piece:
        piece = self._piece
        if piece is None or piece.until <= self._now or piece.active_until != self.active_until:
            limited = self.limits(self._now)
            inflow = self._inflow_rates(self.levels, limited)
            until = self._now + self._span(self.levels, inflow, self._now)
            piece = self._piece = _Piece(until, inflow, limited, list(self.active_until))
        return piece

    def _span(self, levels: list[int], inflow: Inflows, at: int) -> int:
        """How long it flows like this: until a class stops to be active, or a bucket is full."""
        span = NEVER
        for until in self.active_until:
            if 0 < until - at < span:
                span = until - at
        for i in _CLASSES:
            if inflow[i]:
                full_after = -((levels[i] - self.bursts[i]) // inflow[i])
                if full_after < span:
                    span = full_after
        return span

    def _flow_evenly(self, piece: _Piece, span: int) -> None:
        """As `_flow`, over a part of one piece."""
        levels, own, rates = self.levels, self.own_levels, self._own_rates
        _, inflow, limited, _ = piece
        for i in _CLASSES:
            level = levels[i]
            if inflow[i]:
                levels[i] = level = level + inflow[i] * span
            if limited[i]:
                own_level = own[i] + rates[i] * span
                own[i] = own_level if own_level < level else level
            else:
                own[i] = level

    def limits(self, at: int) -> Limits:
        """For each class whether a higher one is active at that time."""
        p0, p1, _ = self.active_until
        return False, p0 > at, p0 > at or p1 > at

    def limited(self, priority: Priority, at: int) -> bool:
        """Whether a class higher than this one is active at that time."""
        return self.limits(at)[priority]

    def next_activity_end(self, now: int) -> int:
        """The next instant at which a class stops to count as active, NEVER if there is none."""
        soonest = NEVER
        for until in self.active_until:
            if now < until < soonest:
                soonest = until
        return soonest

    def _flow(
        self,
        levels: list[int],
        own: list[int],
        start: int,
        end: int,
        watched: Priority | None = None,
        wanted: int = 0,
        watch_own: bool = False,
    ) -> int:
        """Let tokens flow into `levels` and `own` from `start` to `end`, piece by piece.

        With a `watched` bucket it stops as soon as that bucket holds `wanted` units, and answers when.
        """
        bursts, rates = self.bursts, self._own_rates
        at = start
        while at < end:
            if levels == bursts and own == levels:
                return end if watched is None else at  # nothing flows any more, and all is paid for
            limited = self.limits(at)
            inflow = self._inflow_rates(levels, limited)
            step = min(self._span(levels, inflow, at), end - at)
            if watched is not None:
                from_own = watch_own and limited[watched]
                missing = wanted - (own[watched] if from_own else levels[watched])
                if missing <= 0:
                    return at
                speed = rates[watched] if from_own else inflow[watched]
                if speed:
                    step = min(step, -(-missing // speed))
            overflow = 0
            for i in _CLASSES:
                level = levels[i]
                if inflow[i]:
                    level += inflow[i] * step
                    if level > bursts[i]:
                        overflow += level - bursts[i]
                        level = bursts[i]
                    levels[i] = level
                if limited[i]:
                    own_level = own[i] + rates[i] * step
                    own[i] = own_level if own_level < level else level
                else:
                    own[i] = level
            if overflow:
                # A bucket filled inside its last nanosecond. What is over goes to whoever has room.
                self._spill(levels, own, overflow, limited)
            at += step
        return at

    def _inflow_rates(self, levels: list[int], limited: Limits) -> Inflows:
        """Present inflow of each bucket, in millitokens per second."""
        bursts = self.bursts
        situation = (
            (levels[0] >= bursts[0])
            + 2 * (levels[1] >= bursts[1])
            + 4 * (levels[2] >= bursts[2])
            + 8 * limited[1]
            + 16 * limited[2]
        )
        known = self._inflows.get(situation)
        if known is None:
            known = self._inflows[situation] = self._shared_out(levels, limited)
        return known

    def _shared_out(self, levels: list[int], limited: Limits) -> Inflows:
        """The rates of those that are not full, and among them what the others have no room for."""
        bursts, rates = self.bursts, self.rates
        inflow = [0 if levels[i] >= bursts[i] else rates[i] for i in _CLASSES]
        spare = self.capacity - sum(inflow)
        if spare:
            for i in _CLASSES:
                if levels[i] < bursts[i]:
                    more = min(spare, self._ceilings[i] - rates[i]) if limited[i] else spare
                    inflow[i] += more
                    spare -= more
        p0, p1, p2 = inflow
        return p0, p1, p2

    def _spill(self, levels: list[int], own: list[int], units: int, limited: Limits) -> None:
        """Units that their own bucket has no room for, to the others: P0 first, and not to a class that
        a ceiling below C limits at this time."""
        for i in PRIORITIES:
            if limited[i] and self._ceilings[i] < self.capacity:
                continue
            more = min(self.bursts[i] - levels[i], units)
            if more > 0:
                levels[i] += more
                units -= more
                if not limited[i]:
                    own[i] = levels[i]

    # ------------------------------------------------------------------ charge and settle

    def affords(self, priority: Priority, cost: int, own_share: bool) -> bool:
        """Whether the bucket can pay `cost` millitokens now; `own_share`: from its own level alone."""
        level = self.own_levels[priority] if own_share else self.levels[priority]
        return level >= cost * UNITS_PER_MILLITOKEN or level >= self.bursts[priority]

    def take(self, priority: Priority, cost: int, own_share: bool) -> int:
        """Charge `cost` millitokens; answers the units that the own level gave, for the refund."""
        self._piece = None
        units = cost * UNITS_PER_MILLITOKEN
        before = self.own_levels[priority]
        self.levels[priority] = level = self.levels[priority] - units
        own = before - units if own_share else before if before < level else level
        self.own_levels[priority] = own
        return before - own

    def settle(self, priority: Priority, charged: int, actual: int, own_share: bool, own_units: int) -> int:
        """Replace a charge by what was really used (both millitokens); answers what stays charged.
        `own_units` is what `take` answered.

        A refund beyond the burst goes to the other classes; a debit stops at the debt limit, and what
        lies beyond it is forgiven (the answer is then smaller than `actual`).
        """
        if actual <= charged:
            self._refund(priority, charged - actual, own_units)
            return actual
        lowest = -round(self._rules.max_debt_seconds * self._lasting[priority]) * UNITS_PER_MILLITOKEN
        above = max(self.levels[priority] - lowest, 0) // UNITS_PER_MILLITOKEN
        debit = min(actual - charged, above)
        self.take(priority, debit, own_share)
        return charged + debit

    def _refund(self, priority: Priority, millitokens: int, own_units: int) -> None:
        self._piece = None
        units = millitokens * UNITS_PER_MILLITOKEN
        fits = min(units, self.bursts[priority] - self.levels[priority])
        self.levels[priority] += fits
        limited = self.limits(self._now)
        if not limited[priority]:
            self.own_levels[priority] = self.levels[priority]
        else:
            own = self.own_levels[priority] + min(units, own_units)
            self.own_levels[priority] = min(own, self.levels[priority])
        if units > fits:
            self._spill(self.levels, self.own_levels, units - fits, limited)

    # ------------------------------------------------------------------ prediction

    def time_until(self, priority: Priority, cost: int, own_share: bool, horizon_ns: int) -> int:
        """When the bucket will afford `cost` if nobody else takes from it; NEVER if not within the
        horizon. Rounded up to a whole nanosecond, so that asking again at that time finds it true."""
        if self.affords(priority, cost, own_share):
            return self._now
        wanted = min(cost * UNITS_PER_MILLITOKEN, self.bursts[priority])
        end = self._now + horizon_ns
        piece = self._present_piece()
        if own_share and piece.limited[priority]:
            missing, speed = wanted - self.own_levels[priority], self._own_rates[priority]
        else:
            missing, speed = wanted - self.levels[priority], piece.inflow[priority]
        if speed and (reached := self._now - (-missing // speed)) < piece.until:
            return reached if reached < end else NEVER
        if end <= piece.until:
            return NEVER
        reached = self._flow(
            list(self.levels), list(self.own_levels), self._now, end, priority, wanted, own_share
        )
        return reached if reached < end else NEVER

    def predicted_wait_ns(self, priority: Priority, cost: int, cost_ahead: int, own_share: bool) -> int:
        """(tokens missing + cost waiting ahead) / max(own rate, inflow of the last second), in
        nanoseconds. From the own level the rate is the class's own. A class that has no rate of its own
        lives on what flows in now."""
        level = self.own_levels[priority] if own_share else self.levels[priority]
        wanted = min(cost * UNITS_PER_MILLITOKEN, self.bursts[priority])
        missing = wanted + cost_ahead * UNITS_PER_MILLITOKEN - level
        if missing <= 0:
            return 0
        rate = self.prospect(priority, own_share)
        if not own_share:
            rate = max(rate, self.recent_inflow(priority))
            rate = rate or self._inflow_rates(self.levels, self.limits(self._now))[priority]
        return -(-missing // rate) if rate else NEVER

    def prospect(self, priority: Priority, own_share: bool) -> int:
        """The rate that the class has, or, of several gateways, will have here once more is asked of it."""
        part = self._part
        if own_share:
            own = self._own_rates[priority]
            return own if part is None else max(own, min(part.prospects[priority], part.budget[priority]))
        rate = self.rates[priority]
        return rate if part is None else max(rate, part.prospects[priority])

    def recent_inflow(self, priority: Priority) -> int:
        """Mean inflow over the last second, millitokens per second."""
        since, amounts = self._inflow_history[0]
        span = max(self._now - since, _INFLOW_SPAN_NS)
        return (self._inflow[priority] - amounts[priority]) // span

    def level_tokens(self, priority: Priority) -> float:
        return self.levels[priority] / UNITS_PER_TOKEN
