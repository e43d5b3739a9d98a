"""Which rates the classes' buckets get: the contract of a law, and the law that changes nothing.

A law is pure. Once a tick it is told what was measured (`control_signals.Readings`) and which rates are in
force, and answers with a step to other ones or with None. What it answers adds up to C, lies within the
bounds and leaves every class its floor (`class_rates.RateLimits`); what a law cannot do is act by itself:
`capacity_loop` asks it, puts its step in force and tells of it.

* `static`: shares × C0, always.
* `compliance`: classes that keep their promises give, classes that break them take. See `compliance_law`.
* `severity`: how near the engines are to breaking a promise sets C. See `severity_law`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gateway.policy.class_rates import RateLimits, Rates
from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.control_signals import Readings

TICK_NS = NANOSECONDS_PER_SECOND


@dataclass(frozen=True, slots=True)
class Step:
    """Other rates, why, and the figures that the law went by."""

    rates: Rates
    reason: str
    inputs: Mapping[str, float] = field(default_factory=dict)


class ControlLaw(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def severity(self) -> float | None:
        """How near the engines were to breaking a promise at the last tick, 1 is the limit; None where the
        law has no such figure, or had nothing to compute it from."""
        ...

    def decide(self, readings: Readings, rates: Rates, limits: RateLimits) -> Step | None:
        """The step to take now; None for none."""
        ...


class StaticLaw:
    """shares × C0."""

    name = "static"
    severity = None

    def decide(self, readings: Readings, rates: Rates, limits: RateLimits) -> Step | None:
        return None
