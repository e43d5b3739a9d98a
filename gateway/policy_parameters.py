"""Checked settings → the policy's own parameters, in its own units."""

from collections.abc import Iterable, Mapping

from gateway.keys import KeyEntry
from gateway.policy.classification import ClassificationRules
from gateway.policy.clock import to_nanoseconds
from gateway.policy.parameters import (
    CapacityParameters,
    ClassParameters,
    ControlParameters,
    PolicyParameters,
    SchedulingParameters,
    SloTargets,
    SloWindow,
    TenantParameters,
    UpstreamParameters,
)
from gateway.policy.request import PRIORITIES, Priority
from gateway.settings import ClassSettings, LatencyTargets, Settings, UpstreamSettings


def policy_parameters(settings: Settings, keys: Iterable[KeyEntry] = ()) -> PolicyParameters:
    capacity, scheduling = settings.capacity, settings.scheduling
    keys = tuple(keys)
    return PolicyParameters(
        classes={
            p: _class(
                settings.classes[p.name],
                settings.controller.class_floor[p.name],
                observe=is_observed(settings, p),
            )
            for p in PRIORITIES
        },
        upstreams=tuple(_upstream(u, capacity.tokens_per_second) for u in settings.upstreams),
        capacity=CapacityParameters(
            burst_seconds=capacity.burst_seconds,
            min_burst_tokens=round(capacity.min_burst_tokens),
            output_quantile=capacity.output_quantile,
            initial_output_tokens=capacity.initial_output_tokens,
            output_weight=capacity.output_weight,
            cache_weight=capacity.cache_weight,
            max_request_tokens=capacity.max_request_tokens,
            max_debt_seconds=capacity.max_debt_seconds,
        ),
        scheduling=SchedulingParameters(
            skip_limit={p: scheduling.skip_limit[p.name] for p in (Priority.P1, Priority.P2)},
            long_prompt_tokens=scheduling.long_prompt_tokens,
            long_prompt_lane=scheduling.long_prompt_lane,
            long_prompt_duty=scheduling.long_prompt_duty,
            max_pending_prefill_tokens=scheduling.max_pending_prefill_tokens,
            deadline_drop=scheduling.deadline_drop,
        ),
        slo=SloWindow(settings.slo.window_requests, to_nanoseconds(settings.slo.window_seconds)),
        law=settings.controller.law,
        control=ControlParameters(
            cooldown_ns=to_nanoseconds(settings.controller.cooldown_seconds),
            min_samples=settings.controller.min_samples,
            capacity_bounds=settings.controller.capacity_bounds,
            target=settings.slo.target,
            tighten_below=settings.slo.tighten_below,
        ),
        no_upstream_ns=to_nanoseconds(settings.upstream_timeouts.no_upstream_seconds),
        tenants=_tenants(keys),
        key_max_in_flight={key.id: key.max_in_flight for key in keys if key.max_in_flight is not None},
    )


def is_observed(settings: Settings, priority: Priority) -> bool:
    """Whether the class only records what would be refused: its own mode stands above the general one."""
    return (settings.classes[priority.name].mode or settings.mode) == "observe"


def _tenants(keys: Iterable[KeyEntry]) -> Mapping[str, TenantParameters]:
    """The limits of each tenant: of its keys' entries the strictest holds."""
    limits: dict[str, TenantParameters] = {}
    for key in keys:
        so_far = limits.get(key.tenant, TenantParameters())
        limits[key.tenant] = TenantParameters(
            tokens_per_minute=_stricter(so_far.tokens_per_minute, key.tokens_per_minute),
            requests_per_minute=_stricter(so_far.requests_per_minute, key.requests_per_minute),
        )
    return {tenant: limit for tenant, limit in limits.items() if limit != TenantParameters()}


def _stricter(one: int | None, other: int | None) -> int | None:
    given = [limit for limit in (one, other) if limit is not None]
    return min(given, default=None)


def classification_rules(settings: Settings) -> ClassificationRules:
    rules = settings.classification
    return ClassificationRules(
        service_tier=rules.service_tier,
        routes={path: Priority[name] for path, name in rules.routes.items()},
        default=Priority[rules.default],
        reject_above_ceiling=rules.on_exceed == "reject" and settings.mode == "enforce",
    )


def _class(settings: ClassSettings, floor: float, observe: bool) -> ClassParameters:
    return ClassParameters(
        share=settings.share,
        ceiling_share=settings.ceiling_share,
        floor=floor,
        weight=settings.weight,
        max_throttle_ns=to_nanoseconds(settings.max_throttle_seconds),
        max_wait_ns=to_nanoseconds(settings.max_wait_seconds),
        max_queued_requests=settings.max_queued_requests,
        max_queued_bytes=settings.max_queued_bytes,
        holdback=settings.holdback,
        slo=None if settings.slo is None else _targets(settings.slo),
        observe=observe,
    )


def _targets(slo: LatencyTargets) -> SloTargets:
    def ns(seconds: float | None) -> int | None:
        return None if seconds is None else to_nanoseconds(seconds)

    return SloTargets(ns(slo.ttft_seconds), ns(slo.tpot_seconds), ns(slo.max_gap_seconds))


def _upstream(settings: UpstreamSettings, tokens_per_second: float) -> UpstreamParameters:
    own = settings.tokens_per_second
    return UpstreamParameters(
        name=settings.name,
        address=settings.url,
        models=tuple(settings.models),
        max_in_flight=settings.max_in_flight,
        max_in_flight_tokens=settings.max_in_flight_tokens,
        accepts=settings.accepts,
        tokens_per_second=tokens_per_second if own is None else own,
        waiting_high=settings.load.waiting_high,
        kv_high=settings.load.kv_high,
        load_stale_ns=to_nanoseconds(settings.load.stale_after_seconds),
    )
