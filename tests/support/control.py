"""Readings for control laws, in numbers that can be checked in the head: C0 is 1000 tokens per second."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gateway.policy.class_rates import RateLimits, Rates, rate_limits
from gateway.policy.control_signals import Readings, Verdict
from gateway.policy.parameters import ControlParameters, PolicyParameters
from gateway.policy.rate_controller import ControlLaw, Step
from gateway.policy.request import PRIORITIES, Priority
from tests.support.policy_settings import P0, P1, P2, nanoseconds, policy

NOMINAL = 1_000_000
CLASSES: Mapping[Priority, Mapping[str, Any]] = {
    P0: {"floor": 0.30, "ttft": 1.0, "tpot": 0.06},
    P1: {"floor": 0.10, "ttft": 3.0, "tpot": 0.1},
    P2: {"floor": 0.01, "ceiling_share": 0.5},
}


def parameters(law: str = "severity", **given: Any) -> PolicyParameters:
    control = ControlParameters(**given.pop("control", {}))
    made = policy(classes={**CLASSES, **given.pop("classes", {})}, **given)
    return replace(made, law=law, control=control)


def readings(
    seconds: float,
    *,
    gap_ms: float | None = None,
    wait_ms: float | None = None,
    kv: float | None = None,
    held_back: str = "",
    demand: Sequence[float] = (0, 0, 0),
    verdicts: Mapping[Priority, Sequence[Verdict]] | None = None,
    overdue: Mapping[Priority, Sequence[float]] | None = None,
) -> Readings:
    """`held_back` as in "P0 P2"; demand in tokens per second; `overdue` are seconds."""
    told, late = verdicts or {}, overdue or {}
    return Readings(
        at=nanoseconds(seconds),
        gap_ns=None if gap_ms is None else gap_ms * 1e6,
        wait_ns=None if wait_ms is None else wait_ms * 1e6,
        kv_usage=kv,
        held_back=tuple(p.name in held_back for p in PRIORITIES),
        demand=tuple(round(tokens * 1000) for tokens in demand),
        verdicts=tuple(told.get(p, ()) for p in PRIORITIES),
        overdue=tuple([nanoseconds(at) for at in late.get(p, ())] for p in PRIORITIES),
    )


def judged(kept: int, broken: int, at: float) -> list[Verdict]:
    """So many requests that were dispatched and judged at that second."""
    when = nanoseconds(at)
    return [Verdict(when, when, True)] * kept + [Verdict(when, when, False)] * broken


class Bench:
    """A law with the rates it sets, in tokens per second."""

    def __init__(self, law: ControlLaw, made: PolicyParameters) -> None:
        self.law = law
        self.limits: RateLimits = rate_limits(made, NOMINAL)
        self.rates: Rates = self.limits.at_shares(NOMINAL)
        self.steps: list[tuple[float, Step]] = []

    def tell(self, seconds: float, **told: Any) -> Step | None:
        step = self.law.decide(readings(seconds, **told), self.rates, self.limits)
        if step is not None and step.rates != self.rates:
            self.rates = step.rates
            self.steps.append((seconds, step))
            return step
        return None

    @property
    def capacity(self) -> float:
        return sum(self.rates) / 1000

    @property
    def tokens(self) -> list[float]:
        return [rate / 1000 for rate in self.rates]
