"""The `severity` law: C follows how near the engines are to breaking a promise.

    x = max( wait / (0.15 × TTFT promise),  gap / (target × TPOT promise),  KV use / 0.9 )

over the signals that have samples; the promises are P0's, or the tightest that any class has. Once a tick:

    x > 1                       C × max(1 − 0.1 (x − 1), 0.7), from P2 down to its floor, then P1, last P0
    x ≤ 1, a bucket held back   C + 0.008 C0 × min(1, 0.2 + 2 (1 − x)); 0.05 instead until the first x > 1
    x ≤ 0.8, C < C0             C + 0.02 C0, at most to C0, asked for or not
    x ≤ 0.8, else               0.02 C0 from classes above their share of C to those below, if P0 is not short

What C does shows in the gaps only when requests let in meanwhile have become many or few, which takes as
long as an answer, about ten seconds: twice these gains are still stable, but swing more (`make stability`).
Far beyond the limit a step down is large, and near it both are small, which leaves no saw-tooth. Growth needs
a class that was short of tokens. Above C0 it also needs a demand larger than C, for one that is smaller and
comes in bunches is helped by no greater C, and a sample of wait or gap, or nothing would tell where to stop.
The way back to C0 needs none of this: a cut for a load that is gone must heal.

What C grows by restores what was cut, P0 first. Above C0 a P0 that was held back comes first with up to 1.4
times its share: arrivals come in bunches, so a bucket filled no faster than it is used turns one in ten away,
and P0 is the class that cannot wait.

What a long prompt's stall explains is in none of the signals (`known_stalls.py`).

`target` begins at 0.85, which is also its most. Each 10 s in which the gaps were near their limit, it follows
what became of P0's promises: too many broken, down by 5 %; all kept, up by 2 %; otherwise it stays.
"""

from dataclasses import dataclass, replace

from gateway.policy.class_rates import RateLimits, Rates
from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.control_signals import Readings
from gateway.policy.parameters import PolicyParameters
from gateway.policy.rate_controller import Step
from gateway.policy.request import PRIORITIES, Priority

TRIM_EVERY_NS = 10 * NANOSECONDS_PER_SECOND
TRIM_SAMPLES_NS = 60 * NANOSECONDS_PER_SECOND
"""For so long it waits for enough samples."""


@dataclass(frozen=True, slots=True)
class Gains:
    cut: float = 0.1
    """Part of C for each 1 that x is above 1."""
    cut_most: float = 0.3
    growth: float = 0.008
    """Of C0, a tick."""
    first_growth: float = 0.05
    recovery: float = 0.02
    easy: float = 0.8
    """C comes back to C0 by itself while x is no greater."""
    wait_part: float = 0.15
    gap_part: float = 0.85
    gap_part_bounds: tuple[float, float] = (0.6, 0.85)
    kv_part: float = 0.9
    p0_part: float = 1.4
    trim_down: float = 0.95
    trim_up: float = 1.02

    def times(self, factor: float) -> "Gains":
        """The same law, so many times as hasty."""
        return replace(
            self,
            cut=self.cut * factor,
            cut_most=min(self.cut_most * factor, 0.9),
            growth=self.growth * factor,
            first_growth=self.first_growth * factor,
            recovery=self.recovery * factor,
        )


DEFAULT_GAINS = Gains()


class SeverityLaw:
    name = "severity"

    def __init__(self, parameters: PolicyParameters, gains: Gains = DEFAULT_GAINS) -> None:
        self._gains = gains
        self.severity: float | None = None
        self._gap_part = gains.gap_part
        self._was_beyond = False  # some x was above 1
        self._trimmed_at: int | None = None
        self._gaps_were_near = False  # since then
        control = parameters.control
        self._target, self._tighten_below = control.target, control.tighten_below
        self._samples_min = control.min_samples
        self._ttft_ns = _promised(parameters, "ttft_ns")
        self._tpot_ns = _promised(parameters, "tpot_ns")

    def decide(self, readings: Readings, rates: Rates, limits: RateLimits) -> Step | None:
        parts = self._parts(readings)
        x = self.severity = max(parts.values(), default=None)
        self._trim(readings, parts.get("gap"))
        inputs = {f"x_{name}": part for name, part in parts.items()}
        inputs["gap_target"] = self._gap_part
        capacity, nominal, gains = sum(rates), limits.nominal, self._gains
        if x is not None and x > 1:
            self._was_beyond = True
            factor = max(1 - gains.cut * (x - 1), 1 - gains.cut_most)
            reason = max(parts, key=lambda name: parts[name])
            return Step(limits.moved_to(rates, limits.within(capacity * factor)), reason, inputs)
        is_blind = not ("wait" in parts or "gap" in parts)
        grown, reason = self._grown(1 - (x or 0.0), readings, capacity, nominal, is_blind)
        grown = limits.within(grown)
        if grown <= capacity:
            return self._mended(x, readings, rates, limits, inputs)
        p0_part = gains.p0_part if readings.held_back[Priority.P0] else 1.0
        return Step(limits.moved_to(rates, grown, p0_part), reason, inputs)

    def _mended(
        self, x: float | None, readings: Readings, rates: Rates, limits: RateLimits, inputs: dict[str, float]
    ) -> Step | None:
        """What one class got before the others comes back when it is easy: C stays."""
        if (x or 0.0) > self._gains.easy or readings.held_back[Priority.P0]:
            return None
        by = int(limits.nominal * self._gains.recovery)
        return Step(limits.nearer_to_shares(rates, by), "recovery", inputs)

    def _grown(
        self, slack: float, readings: Readings, capacity: int, nominal: int, is_blind: bool
    ) -> tuple[float, str]:
        """What C may be next, and why."""
        gains = self._gains
        asked: float = capacity
        if any(readings.held_back):
            most = gains.growth if self._was_beyond else gains.first_growth
            enough = nominal if is_blind else max(nominal, sum(readings.demand))
            asked += nominal * most * min(1.0, 0.2 + 2 * slack)
            asked = min(asked, max(enough, capacity))
        if slack >= 1 - gains.easy and capacity < nominal:
            back = min(capacity + nominal * gains.recovery, nominal)
            if back >= asked:
                return back, "recovery"
        return asked, "demand"

    def _parts(self, readings: Readings) -> dict[str, float]:
        """Of each signal that has a sample, its part of its limit."""
        gains, parts = self._gains, {}
        if readings.wait_ns is not None and self._ttft_ns is not None:
            parts["wait"] = readings.wait_ns / (gains.wait_part * self._ttft_ns)
        if readings.gap_ns is not None and self._tpot_ns is not None:
            parts["gap"] = readings.gap_ns / (self._gap_part * self._tpot_ns)
        if readings.kv_usage is not None:
            parts["kv"] = readings.kv_usage / gains.kv_part
        return parts

    def _trim(self, readings: Readings, gap: float | None) -> None:
        """Let the target for gaps follow what came of it. While gaps are far from it, they say nothing."""
        now, gains = readings.at, self._gains
        self._gaps_were_near |= gap is not None and gap > gains.easy
        if self._trimmed_at is None:
            self._trimmed_at = now
        if now - self._trimmed_at < TRIM_EVERY_NS:
            return
        ended = [v.kept for v in readings.verdicts[Priority.P0] if v.ended_at > self._trimmed_at]
        if len(ended) < self._samples_min and now - self._trimmed_at < TRIM_SAMPLES_NS:
            return
        lowest, highest = gains.gap_part_bounds
        if self._gaps_were_near and len(ended) >= self._samples_min:
            kept = sum(ended) / len(ended)
            if kept < self._tighten_below:
                self._gap_part = max(self._gap_part * gains.trim_down, lowest)
            elif kept >= self._target:
                self._gap_part = min(self._gap_part * gains.trim_up, highest)
        self._trimmed_at = now
        self._gaps_were_near = False


def _promised(parameters: PolicyParameters, name: str) -> int | None:
    """P0's promise, or the tightest of any class; None where nobody has one. Nanoseconds."""
    slos = [parameters.classes[p].slo for p in PRIORITIES]
    told: list[int | None] = [None if slo is None else getattr(slo, name) for slo in slos]
    if told[Priority.P0] is not None:
        return told[Priority.P0]
    return min((ns for ns in told if ns is not None), default=None)
