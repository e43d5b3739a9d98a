"""How this gateway stands with the others that share its budget, and how calls to their state are counted."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import Metric

from gateway.policy.clock import to_nanoseconds
from gateway.telemetry import catalogue
from gateway.telemetry.gauges import gauge

STATES = ("joining", "shared", "holding", "alone")
CALL_RESULTS = ("ok", "unreachable", "timed_out", "denied", "read_only", "loading", "error")
CALL_BOUNDS = tuple(
    to_nanoseconds(seconds)
    for seconds in (0.0005, 0.001, 0.0015, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
)


class Fleet(Protocol):
    @property
    def state(self) -> str:
        """One of STATES."""
        ...

    @property
    def replicas(self) -> int: ...

    @property
    def leads(self) -> bool: ...


def fleet_gauges(fleet: Fleet) -> Iterator[Metric]:
    state = fleet.state
    yield gauge(catalogue.FLEET_STATE, (((each,), float(each == state)) for each in STATES))
    yield gauge(catalogue.FLEET_REPLICAS, [((), fleet.replicas)])
    yield gauge(catalogue.FLEET_LEADER, [((), float(fleet.leads))])
