"""Promises kept and missed, counted for ever: what an error budget is reckoned from.

`slo_attainment_ratio` looks at the last minute, and no sum over its values knows how many requests each of
them stood for. Two counters can be added up over any time and any number of gateways. The verdicts are
those of the policy's `slo_monitor`, of all that was offered, seen from arrival: what users were promised.

A verdict of that module takes as long as all else that is counted of a request, for it is kept in a window,
in two views and of two wholes. So what is plain is judged here: who was served to the end by what was
measured, who was let down as missed. Only clients that left go by the monitor's own rule.
"""

from collections.abc import Mapping
from typing import NamedTuple

from gateway.policy.events import RequestEnded
from gateway.policy.outcome import CALLERS_OWN, Outcome
from gateway.policy.parameters import ClassParameters, SloTargets, SloWindow
from gateway.policy.request import Priority
from gateway.policy.slo_monitor import SloMonitor
from gateway.telemetry.series import Count, CounterFamily

VERDICTS = ("missed", "kept")

_CLIENTS_THAT_LEFT = frozenset(
    {Outcome.CLIENT_GONE_QUEUED, Outcome.CLIENT_GONE_STREAMING, Outcome.CLIENT_STALLED}
)
_NO_WINDOW = SloWindow(window_requests=0)
"""Only its verdicts are wanted of the monitor."""


class Verdict(NamedTuple):
    """Whether each promise was kept; None = it does not apply."""

    ttft: bool | None
    tpot: bool | None
    all: bool | None


_DOES_NOT_COUNT = Verdict(None, None, None)


class PromiseCounts:
    def __init__(self, family: CounterFamily, classes: Mapping[Priority, ClassParameters]) -> None:
        self._family = family
        self._monitor = SloMonitor({}, _NO_WINDOW)
        self._targets: dict[Priority, SloTargets] = {}
        self._counts: dict[Priority, list[tuple[Count, Count]]] = {}
        self.reconfigure(classes)

    def reconfigure(self, classes: Mapping[Priority, ClassParameters]) -> None:
        """Other promises from now on; counts go on."""
        self._monitor.reconfigure(classes, _NO_WINDOW)
        self._targets = {p: c.slo for p, c in classes.items() if c.slo is not None}
        for p in self._targets:
            self._counts[p] = [self._pair(p, slo) for slo in Verdict._fields]

    def _pair(self, priority: Priority, slo: str) -> tuple[Count, Count]:
        missed, kept = (self._family.child(priority.name, slo, verdict) for verdict in VERDICTS)
        return missed, kept

    def count(self, event: RequestEnded) -> None:
        targets = self._targets.get(event.priority)
        if targets is None or not event.streaming:
            return
        for pair, kept in zip(self._counts[event.priority], self._verdict(event, targets), strict=True):
            if kept is not None:
                pair[kept].value += 1

    def _verdict(self, event: RequestEnded, targets: SloTargets) -> Verdict:
        outcome = event.outcome
        if outcome is Outcome.COMPLETED:
            return _served(event, targets)
        if outcome in CALLERS_OWN or event.by_tenant_limit:
            return _DOES_NOT_COUNT
        if outcome not in _CLIENTS_THAT_LEFT:
            return _let_down(targets)
        sample = self._monitor.record(event)
        if sample is None:
            return _DOES_NOT_COUNT
        return Verdict(*(sample.met["arrival", slo] for slo in Verdict._fields))


def _served(event: RequestEnded, targets: SloTargets) -> Verdict:
    ttft = _within(event.ttft_ns, targets.ttft_ns)
    tpot = _within(event.tpot_ns, targets.tpot_ns)
    gap = _within(event.max_gap_ns, targets.max_gap_ns)
    applies = not (ttft is None and tpot is None and gap is None)
    return Verdict(ttft, tpot, False not in (ttft, tpot, gap) if applies else None)


def _within(measured: int | None, target: int | None) -> bool | None:
    return None if measured is None or target is None else measured <= target


def _let_down(targets: SloTargets) -> Verdict:
    """Whatever was promised was missed."""
    ttft = None if targets.ttft_ns is None else False
    tpot = None if targets.tpot_ns is None else False
    gap = None if targets.max_gap_ns is None else False
    return Verdict(ttft, tpot, None if ttft is tpot is gap is None else False)
