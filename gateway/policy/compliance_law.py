"""The `compliance` law: classes that keep their promises give, those that break them take.

Attainment is the engine's side of it: of requests dispatched since the last change, those that the engine
served as promised. A stream that is too slow already, to its first token or in its pace, counts as a broken
promise before it ends: slow ones report late. Nothing changes within the cool-down. A class is judged by no
fewer than `min_samples` (20), after five minutes without a change by 5 of those minutes. One change at a
time, the first that applies:

1. P0 below 0.95: C × 0.90, from P2 down to its floor, then P1, last P0.
2. P0 well, and its own bucket held it back below its share: it takes 5 % of its rate back, from P2, then P1.
3. P1 below 0.95 while P0 is well: 10 % of P2's rate to P1.
4. P0 and P1 at 0.99 or above: what P0 does not use, 5 % of its rate at the most and not below 1.2 × its
   demand, goes to P1 and P2 by their shares; and if some bucket held a request back, C × 1.05.
5. C below C0, nobody unwell and nobody held back, or nothing heard for five minutes: back by 5 % of C0.

A class of which there is no sample is neither well nor unwell: it does not keep the others from growing. What
C grows by first restores what was cut, P0 before P1 before P2; a P0 that does not use its rate gets none.
"""

from gateway.policy.class_rates import RateLimits, Rates, cut
from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.control_signals import Readings
from gateway.policy.parameters import PolicyParameters
from gateway.policy.rate_controller import Step
from gateway.policy.request import Priority

P0, P1, P2 = Priority

TIGHTEN = 0.90
GROW = 0.05
GIVE = 0.05
TAKE_BACK = 0.05
SHIFT = 0.10
DEMAND_MARGIN = 1.2
QUIET_NS = 300 * NANOSECONDS_PER_SECOND
QUIET_SAMPLES = 5


class ComplianceLaw:
    name = "compliance"
    severity = None

    def __init__(self, parameters: PolicyParameters, now: int) -> None:
        control = parameters.control
        self._cooldown_ns = control.cooldown_ns
        self._samples_min = control.min_samples
        self._target, self._tighten_below = control.target, control.tighten_below
        self._changed_at = now
        self._held_back = [False] * len(Priority)  # since the last change

    def decide(self, readings: Readings, rates: Rates, limits: RateLimits) -> Step | None:
        for p in Priority:
            self._held_back[p] |= readings.held_back[p]
        if readings.at - self._changed_at < self._cooldown_ns:
            return None
        attained = [self._attained(readings, p) for p in Priority]
        step = self._step(attained, readings, rates, limits)
        if step is None or step.rates == rates:
            return None
        self._changed_at = readings.at
        self._held_back = [False] * len(Priority)
        return step

    def _step(
        self, attained: list[float | None], readings: Readings, rates: Rates, limits: RateLimits
    ) -> Step | None:
        p0, p1 = attained[P0], attained[P1]
        inputs = {f"attained_{p.name}": kept for p in Priority if (kept := attained[p]) is not None}
        inputs |= {f"held_back_{p.name}": 1.0 for p in Priority if self._held_back[p]}
        capacity = sum(rates)
        if p0 is not None and p0 < self._tighten_below:
            return Step(limits.moved_to(rates, int(capacity * TIGHTEN)), "p0_below_promise", inputs)
        p0_is_well = p0 is not None and p0 >= self._target
        lacking = limits.at_shares(capacity)[P0] - rates[P0]
        if p0_is_well and self._held_back[P0] and lacking > 0:
            wanted = min(int(rates[P0] * TAKE_BACK), lacking)
            return Step(_taken_back(rates, wanted, limits), "p0_held_back", inputs)
        if p1 is not None and p1 < self._tighten_below:
            if not p0_is_well and p0 is not None:
                return None
            return Step(_shifted(rates, limits), "p1_below_promise", inputs)
        if any(kept is not None and kept < self._target for kept in (p0, p1)):
            return None  # the dead band
        spare = self._spare(readings, rates, limits) if p0_is_well else 0
        new = _given(rates, spare, limits)
        is_heard = p0 is not None or p1 is not None
        grown, reason = capacity, "p0_does_not_use_its_rate"
        if any(self._held_back) and is_heard:
            grown, reason = limits.within(capacity * (1 + GROW)), "demand"
        elif capacity < limits.nominal and self._may_recover(readings):
            grown, reason = min(capacity + int(limits.nominal * GROW), limits.nominal), "recovery"
        return Step(_grown(new, grown - capacity, limits, p0_has_enough=spare > 0), reason, inputs)

    def _may_recover(self, readings: Readings) -> bool:
        if any(readings.overdue):
            return False
        return not any(self._held_back) or self._is_quiet(readings.at)

    def _is_quiet(self, now: int) -> bool:
        return now - self._changed_at >= QUIET_NS

    def _spare(self, readings: Readings, rates: Rates, limits: RateLimits) -> int:
        """What P0 can give away."""
        if self._held_back[P0]:
            return 0
        least = max(limits.floors[P0], int(DEMAND_MARGIN * readings.demand[P0]))
        return max(min(int(rates[P0] * GIVE), rates[P0] - least), 0)

    def _attained(self, readings: Readings, priority: Priority) -> float | None:
        """None where there are too few samples."""
        since = self._changed_at
        kept = [v.kept for v in readings.verdicts[priority] if v.dispatched_at >= since]
        late = sum(at >= since for at in readings.overdue[priority])
        samples = len(kept) + late
        needed = QUIET_SAMPLES if self._is_quiet(readings.at) else self._samples_min
        return sum(kept) / samples if samples >= needed else None


def _taken_back(rates: Rates, wanted: int, limits: RateLimits) -> Rates:
    """From P2, then P1, as far as their floors let them."""
    low = cut((0, *rates[P1:]), wanted, (0, *limits.floors[P1:]))
    return sum(rates) - sum(low), low[P1], low[P2]


def _shifted(rates: Rates, limits: RateLimits) -> Rates:
    most = int(limits.ceiling_shares[P1] * sum(rates)) - rates[P1]
    given = max(min(int(rates[P2] * SHIFT), rates[P2] - limits.floors[P2], most), 0)
    return rates[P0], rates[P1] + given, rates[P2] - given


def _given(rates: Rates, spare: int, limits: RateLimits) -> Rates:
    """To P1 and P2 by their shares, up to their ceilings."""
    capacity, shares = sum(rates), limits.shares
    room = [max(int(limits.ceiling_shares[p] * capacity) - rates[p], 0) for p in Priority]
    both = shares[P1] + shares[P2]
    to_p2 = min(int(spare * shares[P2] / both) if both else 0, room[P2])
    to_p1 = min(spare - to_p2, room[P1]) if shares[P1] else 0
    return rates[P0] - to_p1 - to_p2, rates[P1] + to_p1, rates[P2] + to_p2


def _grown(rates: Rates, by: int, limits: RateLimits, *, p0_has_enough: bool) -> Rates:
    if by <= 0 or not p0_has_enough:
        return limits.moved_to(rates, sum(rates) + by)
    restored = limits.grown(rates, by)
    given = _given((restored[P0], *rates[P1:]), restored[P0] - rates[P0], limits)
    return given[P0], given[P1] + restored[P1] - rates[P1], given[P2] + restored[P2] - rates[P2]
