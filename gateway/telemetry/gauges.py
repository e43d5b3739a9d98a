"""Gauges read from the policy when a page is asked for; between pages they cost nothing."""

from collections import Counter
from collections.abc import Iterable, Iterator
from math import isfinite

from prometheus_client import Metric
from prometheus_client.metrics_core import GaugeMetricFamily

from gateway.policy.admission import Admission
from gateway.policy.clock import to_seconds
from gateway.policy.parameters import MILLITOKENS
from gateway.policy.request import PRIORITIES
from gateway.policy.slo_monitor import SLOS, VIEWS, WHOLES
from gateway.policy.upstream_slots import UpstreamSlots
from gateway.telemetry import catalogue
from gateway.telemetry.catalogue import Definition

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
    yield gauge(catalogue.IN_FLIGHT, _in_flight([*upstreams, *admission.leaving]))
    yield gauge(
        catalogue.BUCKET_TOKENS,
        (((p.name,), sum(pool.buckets.level_tokens(p) for pool in pools)) for p in PRIORITIES),
    )
    yield gauge(
        catalogue.BUCKET_RATE,
        (((p.name,), sum(pool.buckets.rates[p] for pool in pools) / MILLITOKENS) for p in PRIORITIES),
    )
    yield gauge(catalogue.CAPACITY, [((), sum(pool.buckets.capacity for pool in pools) / MILLITOKENS)])
    yield gauge(catalogue.CONTROLLER_SEVERITY, [((), _severity(admission))])
    yield gauge(catalogue.SLO_ATTAINMENT, _attainment(admission, now))
    yield gauge(catalogue.UPSTREAM_HEALTHY, (((s.name,), float(s.healthy)) for s in upstreams))


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
