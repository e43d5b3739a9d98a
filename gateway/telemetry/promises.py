"""Promises kept and missed, counted for ever: what an error budget is reckoned from.

`slo_attainment_ratio` looks at the last minute, and no sum over its values knows how many requests each of
them stood for. Two counters can be added up over any time and any number of gateways. The verdicts are
those of the policy's `slo_monitor`, of all that was offered, seen from arrival: what users were promised.
"""

from collections.abc import Mapping

from gateway.policy.events import RequestEnded
from gateway.policy.parameters import ClassParameters, SloTargets
from gateway.policy.request import Priority
from gateway.policy.slo_monitor import SLOS, judge
from gateway.telemetry.series import Count, CounterFamily

VERDICTS = ("missed", "kept")


class PromiseCounts:
    def __init__(self, family: CounterFamily, classes: Mapping[Priority, ClassParameters]) -> None:
        self._family = family
        self._targets: dict[Priority, SloTargets] = {}
        self._counts: dict[Priority, list[tuple[Count, Count]]] = {}
        self.reconfigure(classes)

    def reconfigure(self, classes: Mapping[Priority, ClassParameters]) -> None:
        """Other promises from now on; counts go on."""
        self._targets = {p: c.slo for p, c in classes.items() if c.slo is not None}
        for p in self._targets:
            self._counts[p] = [self._pair(p, slo) for slo in SLOS]

    def _pair(self, priority: Priority, slo: str) -> tuple[Count, Count]:
        missed, kept = (self._family.child(priority.name, slo, verdict) for verdict in VERDICTS)
        return missed, kept

    def count(self, event: RequestEnded) -> None:
        targets = self._targets.get(event.priority)
        met = None if targets is None else judge(event, targets)
        if met is None:
            return
        ttft, tpot, both = self._counts[event.priority]
        for pair, kept in (ttft, met.arrival_ttft), (tpot, met.arrival_tpot), (both, met.arrival_all):
            if kept is not None:
                pair[kept].value += 1
