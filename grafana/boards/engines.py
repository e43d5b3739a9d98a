"""The engines: are they there, what do they hold, what do they say."""

from collections.abc import Iterator

from grafana.model import UPSTREAM, Dashboard, Panel, Query, Row, lines, numbers
from grafana.queries import BY_UPSTREAM, greatest, quantile, rate, series, total


def _health() -> Iterator[Panel | Row]:
    yield Row("Health")
    yield numbers(
        "Healthy gateways' view",
        "Part of the gateways that send requests to each engine: 1 is all of them.",
        "percentunit",
        Query(f"avg by (upstream) ({series('upstream_healthy', BY_UPSTREAM)})", "{{upstream}}"),
        width=8,
        height=8,
    )
    yield lines(
        "Healthy",
        "1 while an engine may get requests; 0 also while it is on trial.",
        "none",
        Query(series("upstream_healthy", BY_UPSTREAM), "{{instance}} {{upstream}}"),
        most=1,
        steps=True,
    )
    failed = 'outcome=~"upstream_.+"'
    yield lines(
        "Requests that engines let down",
        "upstream_refused: no usable answer. upstream_timeout: none in time. upstream_error: its own error "
        "status. upstream_aborted: the stream broke off.",
        "reqps",
        Query(rate("outcome", "requests_total", failed), "{{outcome}}"),
        stacked=True,
    )


def _held() -> Iterator[Panel | Row]:
    yield Row("What they hold")
    yield lines(
        "In flight, by engine",
        "Requests that hold a place, and how many may: as configured, or fewer where an engine sent some "
        "back.",
        "short",
        Query(total("upstream", "in_flight", BY_UPSTREAM), "{{upstream}}"),
        Query(total("upstream", "upstream_in_flight_limit", BY_UPSTREAM), "{{upstream}} limit"),
    )
    yield lines(
        "In flight, by class",
        "The same by class.",
        "short",
        Query(total("priority", "in_flight", BY_UPSTREAM), "{{priority}}"),
        stacked=True,
    )
    yield lines(
        "Tokens in flight",
        "Prompts and reserved answers of the requests that hold a place.",
        "short",
        Query(total("upstream", "upstream_in_flight_tokens", BY_UPSTREAM), "{{upstream}}"),
    )
    yield lines(
        "Prompts not yet read",
        "Prompt tokens sent without a first token seen: what the next request would wait behind.",
        "short",
        Query(total("upstream", "upstream_pending_prefill_tokens", BY_UPSTREAM), "{{upstream}}"),
    )
    yield lines(
        "Sent back as full",
        "Requests an engine had no room for, which waited for a place again. Its own limit is lower than "
        "`max_in_flight`.",
        "reqps",
        Query(rate("upstream", "upstream_queue_full_total", BY_UPSTREAM), "{{upstream}}"),
    )
    yield lines(
        "First token of the engines",
        "From dispatch to the first token, all engines.",
        "s",
        *(
            Query(quantile(q, "", "upstream_time_to_first_token_seconds"), f"P{q * 100:g}")
            for q in (0.5, 0.95, 0.99)
        ),
    )


def _told() -> Iterator[Panel | Row]:
    yield Row("What they say")
    yield lines(
        "Waiting inside",
        "Requests in the engine's own queue. More than `load.waiting_high` hold P2 back, twice as many P1.",
        "short",
        Query(greatest("upstream", "upstream_waiting_requests", BY_UPSTREAM), "{{upstream}}"),
    )
    yield lines(
        "KV memory",
        "Used part of the engine's memory. More than `load.kv_high` holds P2 back.",
        "percentunit",
        Query(greatest("upstream", "upstream_kv_usage_ratio", BY_UPSTREAM), "{{upstream}}"),
        most=1,
    )
    yield lines(
        "Age of the load page",
        "Since an engine's metrics page was read. An old page says nothing: own counts are used then.",
        "s",
        Query(greatest("upstream", "upstream_load_age_seconds", BY_UPSTREAM), "{{upstream}}"),
    )


DASHBOARD = Dashboard(
    name="engines",
    uid="qos-engines",
    title="QoS gateway: engines",
    description="Health, requests in flight and load of each engine.",
    variables=(UPSTREAM,),
    parts=(*_health(), *_held(), *_told()),
)
