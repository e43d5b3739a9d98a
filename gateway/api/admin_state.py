"""The policy as it is at this moment, for `/admin/state`: budgets, queues, places, the controller."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gateway import __version__
from gateway.policy.capacity_loop import CapacityLoop
from gateway.policy.class_rates import Rates
from gateway.policy.clock import to_seconds
from gateway.policy.parameters import MILLITOKENS
from gateway.policy.pool import Pool
from gateway.policy.request import PRIORITIES
from gateway.policy.token_bucket import UNITS_PER_TOKEN
from gateway.policy.upstream_slots import UpstreamSlots
from gateway.policy_parameters import is_observed

if TYPE_CHECKING:
    from gateway.api.app import Gateway
    from gateway.api.fleet_member import FleetMember


def gateway_state(gateway: "Gateway") -> dict[str, Any]:
    edge, settings = gateway.edge, gateway.settings
    edge.gate.advance()
    now = edge.clock.now()
    return {
        "version": __version__,
        "uptime_seconds": to_seconds(now - gateway.started_at),
        "draining": edge.admission.draining,
        "ready": not edge.admission.draining and bool(edge.usable_upstreams()),
        "mode": settings.mode,
        "modes": {p.name: "observe" if is_observed(settings, p) else "enforce" for p in PRIORITIES},
        "open_to_all": gateway.keys is None,
        "set_at_run_time": list(gateway.set_at_run_time().changed),
        "fleet": _fleet(gateway.fleet),
        "pools": [_pool(pool, now) for pool in edge.admission.pools],
        "leaving_in_flight": _leaving(edge.admission.leaving),
    }


def _fleet(member: "FleetMember | None") -> dict[str, Any] | None:
    """None where this gateway shares nothing. Rates, limits and the configured capacity below are its part of
    what all have."""
    if member is None:
        return None
    return {
        "member": member.name,
        "state": member.state,
        "replicas": member.replicas,
        "leads": member.leads,
    }


def _leaving(upstreams: Iterable[UpstreamSlots]) -> dict[str, int]:
    """Requests in flight by name, which two of them share where one has moved twice."""
    counts: Counter[str] = Counter()
    for slots in upstreams:
        counts[slots.name] += slots.in_flight_total
    return dict(counts)


def _pool(pool: Pool, now: int) -> dict[str, Any]:
    buckets = pool.buckets
    return {
        "models": sorted({model for slots in pool.slots for model in slots.parameters.models}),
        "capacity_tokens_per_second": buckets.capacity / MILLITOKENS,
        "controller": _controller(pool.control, pool.part_of_budget, now),
        "classes": {
            p.name: {
                "share": pool.classes[p].share,
                "rate_tokens_per_second": buckets.rates[p] / MILLITOKENS,
                "bucket_tokens": buckets.level_tokens(p),
                "burst_tokens": buckets.bursts[p] / UNITS_PER_TOKEN,
                "throttled": len(pool.throttled[p]),
                "ready": pool.scheduler.ready[p].length,
                "queued_bytes": pool.queued_bytes[p],
                "max_queued_requests": pool.queue_limit(p),
                "in_flight": sum(slots.in_flight[p] for slots in pool.slots),
            }
            for p in PRIORITIES
        },
        "upstreams": {slots.name: _upstream(slots, now) for slots in pool.slots},
    }


def _upstream(slots: UpstreamSlots, now: int) -> dict[str, Any]:
    return {
        "healthy": slots.healthy,
        "on_trial": slots.on_trial,
        "in_flight": {p.name: slots.in_flight[p] for p in PRIORITIES},
        "max_in_flight": slots.max_in_flight,
        "engine_limit": slots.engine_limit.at(now),
        "in_flight_tokens": slots.in_flight_tokens,
        "max_in_flight_tokens": slots.max_in_flight_tokens,
        "pending_prefill_tokens": slots.pending_prefill_tokens,
        "engine_waiting": slots.load.waiting(slots.prefills, now),
        "engine_kv_usage": slots.load.kv_usage(slots.in_flight_tokens, now),
    }


def _controller(control: CapacityLoop, part: float, now: int) -> dict[str, Any]:
    """`part`: what this gateway has of a budget that is shared. Advice and changes are of the whole."""
    advice = control.advice
    return {
        "law": control.law.name,
        "severity": control.severity,
        "nominal_capacity_tokens_per_second": control.limits.nominal * part / MILLITOKENS,
        "floor_tokens_per_second": {
            p.name: control.limits.floors[p] * part / MILLITOKENS for p in PRIORITIES
        },
        "advises_only": control.advises_only,
        "advice": None
        if advice is None
        else {"reason": advice.reason, "rates_tokens_per_second": by_class(advice.rates)},
        "last_changes": [
            {
                "seconds_ago": to_seconds(now - change.at),
                "reason": change.reason,
                "direction": change.direction,
                "applied": change.applied,
                "rates_tokens_per_second": by_class(change.new_rates),
                "inputs": change.inputs,
            }
            for change in reversed(control.last_changes)
        ],
    }


def by_class(rates: Rates) -> dict[str, float]:
    """Millitokens by class → tokens by the class's name."""
    return {p.name: rates[p] / MILLITOKENS for p in PRIORITIES}
