"""The loop that sets a pool's class rates: readings → law → step, once a tick.

It ticks while the pool has requests or C is below C0, and rests otherwise: an idle gateway need not wake up.
Ticks are a second apart, counted from the arrival that ended the rest; those that a busy process was too late
for are not made up. What a law decides is put in force by the pool and told as `RatesChanged`.

Where C0 changes, because an engine went or came or is said to be good for more, C and all rates change in
proportion. Other settings keep C relative to C0 as well; another law begins at the shares. Where a class is
only observed the law's cuts would do nothing for it, and a loop whose cuts do nothing runs away: C stays at
C0, and what the law would do from there is told as advice.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from gateway.policy.class_rates import RateLimits, Rates, rate_limits, scaled
from gateway.policy.clock import NEVER
from gateway.policy.compliance_law import ComplianceLaw
from gateway.policy.control_signals import ControlSignals
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
        """No law acts; changes are told from outside, as they were logged."""
        self.advice: Step | None = None
        self.last_changes: deque[RatesChanged] = deque(maxlen=CHANGES_KEPT)
        self._untold: list[RatesChanged] = []
        self._take(parameters)

    @property
    def is_static(self) -> bool:
        return isinstance(self.law, StaticLaw)

    @property
    def advises_only(self) -> bool:
        return self._observes and not self.is_static

    @property
    def severity(self) -> float | None:
        """None while it rests: what the last tick found is old news then."""
        return None if self.due == NEVER else self.law.severity

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
        self.due = NEVER if idle and sum(self.rates) >= self.limits.nominal else self._next

    def _decide(self, upstreams: Sequence[UpstreamSlots], now: int) -> Rates | None:
        if self.follows:
            return None
        readings = self.signals.read(upstreams, self._promises, now)
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

    # ------------------------------------------------------------------ telling

    def take_changes(self) -> Sequence[RatesChanged]:
        """Those not yet told of."""
        told, self._untold = self._untold, []
        self.last_changes.extend(told)
        return told

    def _moved(self, new: Rates, reason: str, now: int, inputs: Mapping[str, float] | None = None) -> Rates:
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
