"""The loop that sets a pool's class rates: readings → law → step, once a tick.

It ticks while the pool has requests or C is below C0, and rests otherwise: an idle gateway need not wake up.
Ticks are a second apart, counted from the arrival that ended the rest; those that a busy process was too late
for are not made up. What a law decides is put in force by the pool and told as `RatesChanged`.

Where C0 changes, because an engine went or came or is said to be good for more, C and all rates change in
proportion. Other settings keep C relative to C0 as well; another law begins at the shares. Where a class is
only observed the law's cuts would do nothing for it, and a loop whose cuts do nothing runs away: C stays at
C0, and what the law would do from there is told as advice.

Where several gateways share a budget, the rates in here are those of all together, and one of them decides
(`budget_part.py`). It does so on what all have measured, as soon as it is told that; the others measure once
a tick, and follow. One that is cut off from the others decides by itself.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from gateway.policy.budget_part import BudgetPart
from gateway.policy.class_rates import RateLimits, Rates, rate_limits, scaled
from gateway.policy.clock import NEVER
from gateway.policy.compliance_law import ComplianceLaw
from gateway.policy.control_signals import ControlSignals, Measured, Readings
from gateway.policy.events import RatesChanged
from gateway.policy.parameters import PolicyParameters, SloTargets
from gateway.policy.rate_controller import TICK_NS, ControlLaw, StaticLaw, Step
from gateway.policy.request import PRIORITIES
from gateway.policy.severity_law import SeverityLaw
from gateway.policy.upstream_slots import UpstreamSlots

CHANGES_KEPT = 20


def control_law(parameters: PolicyParameters, now: int) -> ControlLaw:
    """Raises ValueError for a name that no law has."""
    match parameters.law:
        case "static":
            return StaticLaw()
        case "compliance":
            return ComplianceLaw(parameters, now)
        case "severity":
            return SeverityLaw(parameters)
    raise ValueError(f"no control law is called {parameters.law!r}")


class CapacityLoop:
    """`rates` are in force, `due` is the time of the next tick, NEVER while it rests."""

    def __init__(self, parameters: PolicyParameters, nominal: int, now: int) -> None:
        self.signals = ControlSignals(now)
        self.law = control_law(parameters, now)
        self.limits: RateLimits = rate_limits(parameters, nominal)
        self.rates: Rates = self.limits.at_shares(nominal)
        self.due = NEVER
        self._next = 0  # when the tick after the last one is due
        self.follows = False
        """No law acts at a tick; changes come from outside, as they were logged, or as another gateway that
        shares the budget has decided."""
        self.shared = False
        self.measured: Measured | None = None
        """At the last tick, where the budget is shared."""
        self.advice: Step | None = None
        self.last_changes: deque[RatesChanged] = deque(maxlen=CHANGES_KEPT)
        self._untold: list[RatesChanged] = []
        self._decides = False  # about a budget that is shared
        self._alone = False  # and then only on what is seen here
        self._take(parameters)

    @property
    def is_static(self) -> bool:
        return isinstance(self.law, StaticLaw)

    @property
    def advises_only(self) -> bool:
        return self._observes and not self.is_static

    @property
    def severity(self) -> float | None:
        """None while it rests, or another gateway decides: what the last tick found is old news then."""
        rests = self.due == NEVER or (self.shared and not self._decides)
        return None if rests else self.law.severity

    # ------------------------------------------------------------------ C0 and settings

    def reconfigure(self, parameters: PolicyParameters, nominal: int, now: int) -> Rates:
        """The rates under other settings."""
        former, was = self.limits, self._parameters
        self._take(parameters)
        self.limits = rate_limits(parameters, nominal)
        if parameters.law != was.law or self.is_static or self.advises_only:
            if parameters.law != was.law:
                self.law = control_law(parameters, now)
            return self._moved(self.limits.at_shares(nominal), "settings", now)
        if (parameters.control, parameters.classes) != (was.control, was.classes):
            self.law = control_law(parameters, now)
        if self.limits.shares != former.shares:
            capacity = sum(self.rates) * nominal // former.nominal
            return self._moved(self.limits.at_shares(self.limits.within(capacity)), "settings", now)
        return self._moved(self._in_proportion(former), "settings", now)

    def nominal_changed(self, nominal: int, now: int) -> Rates:
        """The rates when the healthy upstreams together are good for so much."""
        former = self.limits
        self.limits = rate_limits(self._parameters, nominal)
        static = self.is_static or self.advises_only
        new = self.limits.at_shares(nominal) if static else self._in_proportion(former)
        return self._moved(new, "capacity", now)

    def _take(self, parameters: PolicyParameters) -> None:
        self._parameters = parameters
        classes = [parameters.classes[p] for p in PRIORITIES]
        self._observes = any(c.observe for c in classes)
        self._promises = [c.slo or SloTargets() for c in classes]

    def _in_proportion(self, former: RateLimits) -> Rates:
        return self.limits.repaired(scaled(self.rates, self.limits.nominal, former.nominal))

    # ------------------------------------------------------------------ ticks

    def wake(self, now: int) -> None:
        """The pool has a request."""
        if self.due == NEVER and not self.is_static:
            self.due = now + TICK_NS

    def tick(self, upstreams: Sequence[UpstreamSlots], idle: bool, now: int) -> Rates | None:
        """Ask the law; the rates to be put in force, None where they stay. Time is `due` or later."""
        self._next = self.due + TICK_NS * ((now - self.due) // TICK_NS + 1)
        new = self._decide(upstreams, now)
        self._rest(idle)
        return new

    def _rest(self, idle: bool) -> None:
        """Of a shared budget nobody here knows whether all rest."""
        idle = idle and not self.shared
        self.due = NEVER if idle and sum(self.rates) >= self.limits.nominal else self._next

    def _decide(self, upstreams: Sequence[UpstreamSlots], now: int) -> Rates | None:
        if self.follows and not self.shared:
            return None
        measured = self.signals.measure(upstreams, self._promises, now)
        if self.shared:
            self.measured = measured
        return None if self.follows else self._asked(measured.readings(), now)

    def _asked(self, readings: Readings, now: int) -> Rates | None:
        step = self.law.decide(readings, self.rates, self.limits)
        if step is not None and step.rates == self.rates:
            step = None
        if self.advises_only:
            self._advise(step, now)
            return None
        if step is None:
            return None
        return self._moved(step.rates, step.reason, now, step.inputs)

    def _advise(self, step: Step | None, now: int) -> None:
        was, self.advice = self.advice, step
        if step is not None and (was is None or was.reason != step.reason):
            self._untold.append(self._change(step.rates, step.reason, now, step.inputs, applied=False))

    def followed(self, change: RatesChanged, idle: bool) -> Rates:
        """The rates after a law's step, which it took at this tick elsewhere."""
        self.rates = change.new_rates
        self._rest(idle)
        return self.rates

    # ------------------------------------------------------------------ one budget for several gateways

    def take_part(self, part: BudgetPart, now: int) -> None:
        """Know the budget of all, and whether it is decided here. Who decides from now on begins anew, also
        one that did for itself alone: what its law remembered is not what all together did."""
        self.shared = True
        decides = self._decides and part.alone == self._alone
        if not (part.decides and decides):
            self.rates = part.budget
            self.advice = None
        self._decides, self._alone = part.decides, part.alone
        if part.decides and not decides:
            self._begin(part, now)
        self.follows = not (part.decides and part.alone)
        self.wake(now)

    def _begin(self, part: BudgetPart, now: int) -> None:
        """Decide, from a budget that another one has left: under the settings that are in force here, and in
        proportion to the C0 that is seen here."""
        self.law = control_law(self._parameters, now)
        static = self.is_static or self.advises_only
        nominal = self.limits.nominal
        left = scaled(part.budget, nominal, part.nominal) if part.nominal else part.budget
        new = self.limits.at_shares(nominal) if static else self.limits.repaired(left)
        self._moved(new, "settings", now)

    def pooled(self, readings: Readings, now: int) -> Rates | None:
        """What all gateways have measured, told to the one that decides; as `tick`."""
        return self._asked(readings, now) if self._decides and not self.is_static else None

    # ------------------------------------------------------------------ telling

    def take_changes(self) -> Sequence[RatesChanged]:
        """Those not yet told of."""
        told, self._untold = self._untold, []
        self.last_changes.extend(told)
        return told

    def _moved(self, new: Rates, reason: str, now: int, inputs: Mapping[str, float] | None = None) -> Rates:
        if self.shared and not self._decides:
            return self.rates  # another gateway does
        if new != self.rates and not self.is_static:
            self._untold.append(self._change(new, reason, now, inputs or {}))
        self.rates = new
        return new

    def _change(
        self, new: Rates, reason: str, now: int, inputs: Mapping[str, float], applied: bool = True
    ) -> RatesChanged:
        before, after = sum(self.rates), sum(new)
        direction = "up" if after > before else "down" if after < before else "shift"
        return RatesChanged(
            at=now,
            law=self.law.name,
            reason=reason,
            direction=direction,
            old_rates=self.rates,
            new_rates=new,
            inputs=dict(inputs),
            applied=applied,
        )
