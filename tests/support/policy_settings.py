"""Settings for stories: numbers that can be checked in the head.

By default nothing but what a story asks for can bind: the rate is huge, there are no queue bounds and no
latency promises, a request costs its input tokens, and answers reserve nothing.
"""

from collections.abc import Mapping
from typing import Any

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.parameters import (
    CapacityParameters,
    ClassParameters,
    PolicyParameters,
    SchedulingParameters,
    SloTargets,
    TenantParameters,
    UpstreamParameters,
)
from gateway.policy.request import Ask, Priority

P0, P1, P2 = Priority.P0, Priority.P1, Priority.P2

ENDLESS = 3600
SHARES = {P0: 0.60, P1: 0.35, P2: 0.05}


def nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS_PER_SECOND)


def class_parameters(priority: Priority, **given: Any) -> ClassParameters:
    """`wait`, `throttle`, `ttft` and `tpot` are seconds; everything else has the name of its setting."""
    wait, throttle = given.pop("wait", ENDLESS), given.pop("throttle", ENDLESS)
    ttft, tpot, gap = given.pop("ttft", None), given.pop("tpot", None), given.pop("gap", None)
    slo = None
    if ttft is not None or tpot is not None or gap is not None:
        promised = [None if s is None else nanoseconds(s) for s in (ttft, tpot, gap)]
        slo = SloTargets(*promised)
    return ClassParameters(
        share=given.pop("share", SHARES[priority]),
        max_wait_ns=nanoseconds(wait),
        max_throttle_ns=nanoseconds(throttle),
        slo=slo,
        **given,
    )


def upstream(name: str = "gpu0", **given: Any) -> UpstreamParameters:
    return UpstreamParameters(name, **{"max_in_flight": 1, "tokens_per_second": 1e9, **given})


def policy(
    *upstreams: UpstreamParameters,
    classes: Mapping[Priority, Mapping[str, Any]] | None = None,
    capacity: Mapping[str, Any] | None = None,
    scheduling: Mapping[str, Any] | None = None,
    no_upstream_seconds: float = 10,
    tenants: Mapping[str, Mapping[str, int]] | None = None,
    keys: Mapping[str, int] | None = None,
    **every_class: Any,
) -> PolicyParameters:
    """`every_class` holds for each class that `classes` does not say otherwise of; `tenants` are limits by
    the names of their settings, `keys` are `max_in_flight` by key id."""
    own = classes or {}
    return PolicyParameters(
        classes={p: class_parameters(p, **{**every_class, **own.get(p, {})}) for p in Priority},
        upstreams=upstreams or (upstream(),),
        capacity=CapacityParameters(**{"output_weight": 0.0, "initial_output_tokens": 0, **(capacity or {})}),
        scheduling=SchedulingParameters(
            **{
                "long_prompt_tokens": 10**9,
                "max_pending_prefill_tokens": 10**9,
                "deadline_drop": False,
                **(scheduling or {}),
            }
        ),
        no_upstream_ns=nanoseconds(no_upstream_seconds),
        tenants={name: TenantParameters(**limits) for name, limits in (tenants or {}).items()},
        key_max_in_flight=dict(keys or {}),
    )


def ask(name: str, priority: Priority, tokens: int = 1, **given: Any) -> Ask:
    """`timeout` is the client's own, in seconds."""
    timeout = given.pop("timeout", None)
    given = {"tenant": "t", "model": "m", **given}
    return Ask(
        name,
        priority,
        input_tokens=tokens,
        client_timeout_ns=None if timeout is None else nanoseconds(timeout),
        **given,
    )
