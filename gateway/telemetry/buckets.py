"""Where the buckets of the latency histograms end.

The engine's own bounds (vLLM's, so that both can be drawn in one chart), and besides: every promised
latency, because the share that kept a promise can only be read off at a bound; at least three bounds
below the smallest promise; a finite bound that no time-out exceeds, because a quantile beyond the last
one is a guess; and milliseconds where vLLM begins too late.

Bounds are whole nanoseconds, as the values are: comparing them is exact.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.policy.clock import NEVER, to_nanoseconds
from gateway.policy.parameters import PolicyParameters

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TTFT_SECONDS = (*_TTFT, 160, 640, 2560)

_GAPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.0075, *_GAPS)

_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_WHOLE_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, *_WHOLE)

_OVERHEAD_SECONDS = (
    *(0.000025, 0.00005, 0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 1, 5),
)

_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

BELOW_SMALLEST_TARGET = 3


@dataclass(frozen=True, slots=True)
class LatencyBounds:
    """Upper bounds in nanoseconds, rising; +Inf is not among them."""

    ttft: tuple[int, ...]
    upstream_ttft: tuple[int, ...]
    tpot: tuple[int, ...]
    max_gap: tuple[int, ...]
    queue_wait: tuple[int, ...]
    duration: tuple[int, ...]
    overhead: tuple[int, ...]
    loop_lag: tuple[int, ...]


def latency_bounds(
    parameters: PolicyParameters, first_byte_seconds: float, idle_seconds: float
) -> LatencyBounds:
    classes = parameters.classes.values()
    promises = [c.slo for c in classes if c.slo is not None]
    ttft = [slo.ttft_ns for slo in promises if slo.ttft_ns is not None]
    tpot = [slo.tpot_ns for slo in promises if slo.tpot_ns is not None]
    gap = [slo.max_gap_ns for slo in promises if slo.max_gap_ns is not None]
    longest_wait = max((c.max_wait_ns for c in classes), default=0)
    first_byte, idle = to_nanoseconds(first_byte_seconds), to_nanoseconds(idle_seconds)
    from_arrival = longest_wait + first_byte
    return LatencyBounds(
        ttft=bounds(_TTFT_SECONDS, ttft, from_arrival),
        upstream_ttft=bounds(_TTFT_SECONDS, ttft, first_byte),
        tpot=bounds(_GAP_SECONDS, tpot, idle),
        max_gap=bounds(_GAP_SECONDS, tpot + gap, idle),
        queue_wait=bounds(_TTFT_SECONDS, (), max(longest_wait, parameters.no_upstream_ns)),
        duration=bounds(_WHOLE_SECONDS, (), from_arrival + idle),
        overhead=bounds(_OVERHEAD_SECONDS),
        loop_lag=bounds(_LAG_SECONDS),
    )


def bounds(usual_seconds: Iterable[float], targets: Iterable[int] = (), longest: int = 0) -> tuple[int, ...]:
    """The usual bounds, and what the targets and the longest time-out (nanoseconds) ask for besides."""
    found = {round(seconds * 1e9) for seconds in usual_seconds}
    targets = [target for target in targets if 0 < target < NEVER]
    found.update(targets)
    if max(found) < longest < NEVER:
        found.add(longest)
    smallest = min(targets, default=None)
    while smallest is not None and sum(b < smallest for b in found) < BELOW_SMALLEST_TARGET:
        lower = min(found) // 2
        if not lower:
            break  # a promise of some nanoseconds has no room below it
        found.add(lower)
    return tuple(sorted(found))
