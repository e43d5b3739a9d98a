"""Gauges read from the policy when a page is asked for; between pages they cost nothing."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite

from prometheus_client import Metric
from prometheus_client.metrics_core import GaugeMetricFamily

from gateway.policy.admission import Admission
from gateway.policy.clock import NANOSECONDS_PER_SECOND, to_seconds
from gateway.policy.events import RatesChanged
from gateway.policy.parameters import MILLITOKENS, PolicyParameters, SloTargets
from gateway.policy.pool import Pool
from gateway.policy.request import PRIORITIES, Priority
from gateway.policy.slo_monitor import SLOS, VIEWS, WHOLES
from gateway.policy.token_bucket import UNITS_PER_TOKEN, TokenBuckets
from gateway.policy.upstream_slots import UpstreamSlots
from gateway.telemetry import catalogue
from gateway.telemetry.catalogue import Definition

INPUTS_FRESH_NS = 10 * NANOSECONDS_PER_SECOND
"""Two scrapes, as Prometheus is usually set."""

Values = Iterable[tuple[tuple[str, ...], float | None]]


def gauge(definition: Definition, values: Values) -> GaugeMetricFamily:
    """What is not known, or no number, is left out: a page holds neither −1 nor NaN."""
    page = GaugeMetricFamily(definition.name, definition.help, labels=definition.labels)
    for labels, value in values:
        if value is not None and isfinite(value):
            page.add_metric(labels, value)
    return page


def policy_gauges(admission: Admission, now: int) -> Iterator[Metric]:
    """The present state of the policy. Buckets are refilled up to `now` first; nothing else changes."""
    pools = admission.pools
    for pool in pools:
        pool.buckets.advance(now)
    upstreams = [slots for pool in pools for slots in pool.slots]
    yield gauge(
        catalogue.QUEUE_DEPTH, (((p.name,), sum(pool.depth(p) for pool in pools)) for p in PRIORITIES)
    )
    yield gauge(catalogue.QUEUE_BYTES, [((), sum(sum(pool.queued_bytes) for pool in pools))])
    yield gauge(catalogue.IN_FLIGHT, _in_flight(admission.at_work))
    yield gauge(
        catalogue.BUCKET_TOKENS,
        (((p.name,), sum(pool.buckets.level_tokens(p) for pool in pools)) for p in PRIORITIES),
    )
    yield gauge(
        catalogue.BUCKET_RATE,
        (((p.name,), sum(pool.buckets.rates[p] for pool in pools) / MILLITOKENS) for p in PRIORITIES),
    )
    yield gauge(
        catalogue.BUCKET_INFLOW,
        (((p.name,), sum(pool.buckets.recent_inflow(p) for pool in pools) / MILLITOKENS) for p in PRIORITIES),
    )
    yield gauge(
        catalogue.BUCKET_LENT,
        (
            ((p.name,), sum(_lent_units(pool.buckets, p) for pool in pools) / UNITS_PER_TOKEN)
            for p in PRIORITIES
        ),
    )
    yield gauge(catalogue.CAPACITY, [((), sum(pool.buckets.capacity for pool in pools) / MILLITOKENS)])
    yield gauge(catalogue.CAPACITY_BOUND, _capacity_bounds(pools))
    yield gauge(catalogue.CONTROLLER_LAW, {(pool.control.law.name,): 1.0 for pool in pools}.items())
    yield gauge(catalogue.CONTROLLER_SEVERITY, [((), _severity(admission))])
    yield gauge(catalogue.SLO_ATTAINMENT, _attainment(admission, now))
    yield gauge(catalogue.SLO_TARGET, _target_ratios(admission.parameters))
    yield gauge(catalogue.SLO_TARGET_SECONDS, _target_seconds(admission.parameters))
    yield gauge(catalogue.UPSTREAM_HEALTHY, (((s.name,), float(s.healthy)) for s in upstreams))
    yield from _upstream_loads(upstreams, now)


def _upstream_loads(upstreams: Sequence[UpstreamSlots], now: int) -> Iterator[Metric]:
    yield gauge(
        catalogue.UPSTREAM_IN_FLIGHT_LIMIT, (((s.name,), _in_flight_limit(s, now)) for s in upstreams)
    )
    yield gauge(catalogue.UPSTREAM_IN_FLIGHT_TOKENS, (((s.name,), s.in_flight_tokens) for s in upstreams))
    yield gauge(
        catalogue.UPSTREAM_PENDING_PREFILL, (((s.name,), s.pending_prefill_tokens) for s in upstreams)
    )
    yield gauge(catalogue.UPSTREAM_WAITING, (((s.name,), s.load.waiting(s.prefills, now)) for s in upstreams))
    yield gauge(
        catalogue.UPSTREAM_KV_USAGE,
        (((s.name,), s.load.kv_usage(s.in_flight_tokens, now)) for s in upstreams),
    )


def _in_flight_limit(slots: UpstreamSlots, now: int) -> int | None:
    """None where there is no limit."""
    limits = (slots.max_in_flight, slots.engine_limit.at(now, sent_back_before=False))
    return min((limit for limit in limits if limit is not None), default=None)


def _lent_units(buckets: TokenBuckets, priority: Priority) -> int:
    """A bucket in debt holds nothing that could be lent."""
    return max(buckets.levels[priority] - max(buckets.own_levels[priority], 0), 0)


def _capacity_bounds(pools: Sequence[Pool]) -> Values:
    """Where gateways share a budget, of the part that this one has of it: so that parts add up."""
    limits = [(pool.control.limits, pool.part_of_budget) for pool in pools]
    yield ("least",), sum(each.lowest * part for each, part in limits) / MILLITOKENS
    yield ("configured",), sum(each.nominal * part for each, part in limits) / MILLITOKENS
    yield ("most",), sum(each.highest * part for each, part in limits) / MILLITOKENS


def _target_ratios(parameters: PolicyParameters) -> Values:
    for p in PRIORITIES:
        yield (p.name,), None if parameters.classes[p].slo is None else parameters.control.target


def _target_seconds(parameters: PolicyParameters) -> Values:
    for p in PRIORITIES:
        slo = parameters.classes[p].slo or SloTargets()
        for name, target in (("ttft", slo.ttft_ns), ("tpot", slo.tpot_ns), ("max_gap", slo.max_gap_ns)):
            yield (p.name, name), None if target is None else to_seconds(target)


def controller_inputs(changes: Iterable[RatesChanged], now: int) -> Metric:
    """Of the latest change in each pool; where pools differ, the greatest. A law tells its figures when it
    changes something, and old ones would look as if they were of now."""
    told: dict[str, float] = {}
    for change in changes:
        if now - change.at <= INPUTS_FRESH_NS:
            for name, value in change.inputs.items():
                told[name] = max(value, told.get(name, value))
    return gauge(catalogue.CONTROLLER_INPUT, (((name,), value) for name, value in told.items()))


def _severity(admission: Admission) -> float | None:
    """Of the pool that is nearest to breaking a promise."""
    told = [pool.control.severity for pool in admission.pools]
    return max((severity for severity in told if severity is not None), default=None)


def _in_flight(upstreams: Iterable[UpstreamSlots]) -> Values:
    """By class and name, which one that leaves may share with the one that has come in its place."""
    counts: Counter[tuple[str, str]] = Counter()
    for slots in upstreams:
        for p in PRIORITIES:
            counts[p.name, slots.name] += slots.in_flight[p]
    return counts.items()


def _attainment(admission: Admission, now: int) -> Values:
    monitor = admission.slo_monitor
    for p in PRIORITIES:
        for slo in SLOS:
            for view in VIEWS:
                for of in WHOLES:
                    yield (p.name, slo, view, of), monitor.attainment(p, slo, view, of, now)


def load_ages(read_at: dict[str, int], now: int) -> Metric:
    return gauge(
        catalogue.UPSTREAM_LOAD_AGE, (((name,), to_seconds(now - at)) for name, at in read_at.items())
    )
