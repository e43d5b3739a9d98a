"""What a class or a tenant has left, for those who ask."""

from typing import NamedTuple

from gateway.policy.events import Seen, SeenUpstream
from gateway.policy.pool import Pool
from gateway.policy.request import PRIORITIES, Priority
from gateway.policy.tenant_limits import TenantLimits
from gateway.policy.token_bucket import UNITS_PER_TOKEN


class Standing(NamedTuple):
    """Tokens in the bucket that binds and requests left to make (None: not limited)."""

    limit_tokens: int
    remaining_tokens: int
    full_after_ns: int
    limit_requests: int | None
    remaining_requests: int | None
    requests_after_ns: int


def standing(pool: Pool, priority: Priority, limits: TenantLimits, tenant: str, now: int) -> Standing:
    """The tenant's own limits bind before those of its class, where it has any."""
    tokens, requests = limits.buckets(tenant, now)
    if tokens is None:
        of_tokens = _tokens_of_class(pool, priority)
    else:
        of_tokens = tokens.per_minute, max(tokens.left, 0), tokens.full_after_ns
    if requests is None:
        of_requests = _places_of_class(pool, priority)
    else:
        of_requests = requests.per_minute, max(requests.left, 0), requests.full_after_ns
    return Standing(*of_tokens, *of_requests)


def _tokens_of_class(pool: Pool, priority: Priority) -> tuple[int, int, int]:
    buckets = pool.buckets
    level, burst, rate = buckets.levels[priority], buckets.bursts[priority], buckets.prospect(priority, False)
    full_after = -(-(burst - level) // rate) if rate else 0
    return burst // UNITS_PER_TOKEN, max(level, 0) // UNITS_PER_TOKEN, full_after


def _places_of_class(pool: Pool, priority: Priority) -> tuple[int | None, int | None, int]:
    """For those that wait."""
    limit, depth = pool.queue_limit(priority), pool.depth(priority)
    left = None if limit is None else max(limit - depth, 0)
    return limit, left, (pool.drained_after_ns(priority) or 0) if depth else 0


def seen(pool: Pool, now: int) -> Seen:
    """The pool as a request that arrives now finds it."""
    buckets = pool.buckets
    return Seen(
        bucket_tokens=tuple(level / UNITS_PER_TOKEN for level in buckets.levels),
        rates_tokens_per_second=tuple(rate / 1000 for rate in buckets.rates),
        throttled=tuple(len(pool.throttled[p]) for p in PRIORITIES),
        ready=tuple(pool.scheduler.ready[p].length for p in PRIORITIES),
        upstreams=tuple(
            SeenUpstream(
                name=slots.name,
                healthy=slots.healthy,
                in_flight=tuple(slots.in_flight),
                in_flight_tokens=slots.in_flight_tokens,
                pending_prefill_tokens=slots.pending_prefill_tokens,
                waiting=slots.load.waiting(slots.prefills, now),
                kv_usage=slots.load.kv_usage(slots.in_flight_tokens, now),
            )
            for slots in pool.slots
        ),
    )
