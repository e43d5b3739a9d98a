"""Finished settings of the policy: checked at the edge, in the policy's own units.

Times are nanoseconds, rates millitokens per second, amounts millitokens; the names are those of the
configuration file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.request import Priority

MILLITOKENS = 1000


@dataclass(frozen=True, slots=True)
class SloTargets:
    """Promised latencies of a class; None = not promised."""

    ttft_ns: int | None = None
    tpot_ns: int | None = None
    max_gap_ns: int | None = None


@dataclass(frozen=True, slots=True)
class ClassParameters:
    share: float
    ceiling_share: float = 1.0
    floor: float = 0.0
    weight: float = 1.0
    max_throttle_ns: int = NANOSECONDS_PER_SECOND
    max_wait_ns: int = 10 * NANOSECONDS_PER_SECOND
    max_queued_requests: int | None = None
    max_queued_bytes: int | None = None
    holdback: float = 1.0
    slo: SloTargets | None = None
    observe: bool = False
    """All is decided and recorded, and nothing enforced."""


@dataclass(frozen=True, slots=True)
class CapacityParameters:
    """`tokens_per_second` (of one upstream) is kept with the upstream."""

    burst_seconds: float = 0.5
    min_burst_tokens: int = 8192
    output_quantile: float = 0.9
    initial_output_tokens: int = 256
    output_weight: float = 4.0
    cache_weight: float = 0.1
    max_request_tokens: int | None = 131072
    max_debt_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class SchedulingParameters:
    skip_limit: Mapping[Priority, int] = field(default_factory=lambda: {Priority.P1: 2, Priority.P2: 19})
    long_prompt_tokens: int = 8192
    long_prompt_lane: int = 1
    long_prompt_duty: float = 0.04
    max_pending_prefill_tokens: int = 4096
    deadline_drop: bool = True


@dataclass(frozen=True, slots=True)
class UpstreamParameters:
    """`address` says where it is: the same name at another address is another engine."""

    name: str
    address: str = ""
    models: tuple[str, ...] = ("*",)
    max_in_flight: int | None = 128
    max_in_flight_tokens: int | None = None
    accepts: str = "any"  # any | long | short
    tokens_per_second: float = 12000.0
    waiting_high: float = 4.0
    kv_high: float = 0.9
    load_stale_ns: int = 5 * NANOSECONDS_PER_SECOND


@dataclass(frozen=True, slots=True)
class TenantParameters:
    """Limits that all keys of a tenant share; None = no limit, 0 = nothing passes."""

    tokens_per_minute: int | None = None
    requests_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class SloWindow:
    window_requests: int = 1000
    window_ns: int = 60 * NANOSECONDS_PER_SECOND


@dataclass(frozen=True, slots=True)
class ControlParameters:
    """Of the laws that change rates; `capacity_bounds` are factors of C0. Attainment from `target` on is
    well, below `tighten_below` it is not."""

    cooldown_ns: int = 5 * NANOSECONDS_PER_SECOND
    min_samples: int = 20
    capacity_bounds: tuple[float, float] = (0.2, 3.0)
    target: float = 0.99
    tighten_below: float = 0.95


@dataclass(frozen=True, slots=True)
class PolicyParameters:
    classes: Mapping[Priority, ClassParameters]
    upstreams: tuple[UpstreamParameters, ...]
    capacity: CapacityParameters = CapacityParameters()
    scheduling: SchedulingParameters = field(default_factory=SchedulingParameters)
    slo: SloWindow = SloWindow()
    law: str = "static"
    control: ControlParameters = ControlParameters()
    no_upstream_ns: int = 10 * NANOSECONDS_PER_SECOND
    tenants: Mapping[str, TenantParameters] = field(default_factory=dict)
    key_max_in_flight: Mapping[str, int] = field(default_factory=dict)
    """By key id; a key that is not there has no limit."""
