"""Who gets in: budgets, queues, refusals."""

from collections.abc import Iterator

from grafana.model import PRIORITY, TENANT, Dashboard, Panel, Query, Row, heatmap, lines
from grafana.queries import BY_CLASS, increase_by_bucket, quantile, rate, ratio, series, total


def _budget() -> Iterator[Panel | Row]:
    yield Row("Budget")
    yield lines(
        "Bucket level",
        "Weighted tokens that a class may spend at once; below zero is debt, made by answers longer than "
        "was reserved for them.",
        "short",
        Query(total("priority", "bucket_tokens", BY_CLASS), "{{priority}}"),
        least=None,
    )
    yield lines(
        "Bucket rate and inflow",
        "What each class is guaranteed, and what flowed in during the last second before each scrape: "
        "nothing while its bucket is full, more than its rate while others lend.",
        "short",
        Query(total("priority", "bucket_rate_tokens_per_second", BY_CLASS), "{{priority}} guaranteed"),
        Query(total("priority", "bucket_inflow_tokens_per_second", BY_CLASS), "{{priority}} inflow"),
    )
    inflow, own = (series(f"bucket_{name}_tokens_per_second", BY_CLASS) for name in ("inflow", "rate"))
    yield lines(
        "Borrowed",
        "Inflow above the class's own rate, in weighted tokens a second, and the part of its bucket that was "
        "lent. Long prompts may not be paid with lent tokens while a higher class is active.",
        "short",
        Query(f"sum by (priority) (clamp_min({inflow} - {own}, 0))", "{{priority}} a second"),
        Query(total("priority", "bucket_lent_tokens", BY_CLASS), "{{priority}} in its bucket"),
    )


def _waiting() -> Iterator[Panel | Row]:
    yield Row("Waiting")
    yield lines(
        "Queue depth",
        "Requests that wait, for tokens of their class or for a place at an engine.",
        "short",
        Query(total("priority", "queue_depth", BY_CLASS), "{{priority}}"),
    )
    yield lines(
        "Wait",
        "From arrival to dispatch, or to the end of a wait that was in vain.",
        "s",
        *(
            Query(quantile(q, "priority", "queue_wait_seconds", BY_CLASS), f"{{{{priority}}}} P{q * 100:g}")
            for q in (0.5, 0.95, 0.99)
        ),
    )
    yield lines(
        "Bytes that wait",
        "Request bodies in memory; `max_queued_bytes` bounds them for each class.",
        "bytes",
        Query(total("instance", "queue_bytes"), "{{instance}}"),
    )
    yield heatmap(
        "Wait, all of them",
        "How many requests of the chosen classes waited how long.",
        "s",
        increase_by_bucket("queue_wait_seconds", BY_CLASS),
        width=24,
    )


def _refusals() -> Iterator[Panel | Row]:
    yield Row("Refusals")
    yield lines(
        "Refusals by reason",
        "class_budget: the class's bucket cannot pay in time. tenant_limit: the tenant's own limit. "
        "queue_full and queue_timeout: no place in time. no_upstream: no healthy engine. draining: it stops.",
        "reqps",
        Query(rate("priority, reason", "refusals_total", BY_CLASS), "{{priority}} {{reason}}"),
        stacked=True,
    )
    refused = rate("priority", "refusals_total", BY_CLASS)
    yield lines(
        "Refused part",
        "Of the requests that were offered.",
        "percentunit",
        Query(ratio(refused, rate("priority", "requests_total", BY_CLASS)), "{{priority}}"),
        most=1,
    )
    yield lines(
        "Would be refused",
        "Requests of classes in observe mode that went through and would have been refused in enforce mode.",
        "reqps",
        Query(rate("priority, outcome", "observed_refusals_total", BY_CLASS), "{{priority}} {{outcome}}"),
    )
    by_tenant = ('tenant=~"$tenant"', BY_CLASS)
    yield lines(
        "Tenants: requests",
        "The ten that ask most often. Tenants beyond `metrics.max_label_values` share `other`.",
        "reqps",
        Query(f"topk(10, {rate('tenant', 'requests_total', *by_tenant)})", "{{tenant}}"),
        width=12,
    )
    refused_outcomes = 'outcome=~"rejected_.+|queue_timeout"'
    yield lines(
        "Tenants: refused",
        "The ten that are refused most often, for whatever reason.",
        "reqps",
        Query(f"topk(10, {rate('tenant', 'requests_total', *by_tenant, refused_outcomes)})", "{{tenant}}"),
        width=12,
    )


def _classes() -> Iterator[Panel | Row]:
    yield Row("Classes and retries")
    yield lines(
        "Claims against grants",
        "The class that requests claimed, and the one they got: a claim above the key's ceiling is granted "
        "less.",
        "reqps",
        Query(rate("claimed, granted", "class_claims_total"), "{{claimed}} → {{granted}}"),
    )
    yield lines(
        "Promotions",
        "Requests that went first because their class had been passed over often enough. Many mean that "
        "higher classes fill the engines.",
        "reqps",
        Query(rate("priority", "promotions_total", BY_CLASS), "{{priority}}"),
    )
    retried = rate("job", "client_retries_total")
    yield lines(
        "Retries of clients",
        "Part of the requests whose client says that they are a retry: refusals that come again.",
        "percentunit",
        Query(ratio(retried, rate("job", "requests_total")), "retries"),
        most=1,
    )


DASHBOARD = Dashboard(
    name="admission",
    uid="qos-admission",
    title="QoS gateway: admission",
    description="Budgets and what is borrowed, who waits and how long, who is refused and why.",
    variables=(PRIORITY, TENANT),
    parts=(*_budget(), *_waiting(), *_refusals(), *_classes()),
)
