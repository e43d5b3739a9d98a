"""Which class is kept, and which promise breaks if one does."""

from collections.abc import Iterator

from grafana.model import PRIORITY, Dashboard, Panel, Query, Row, heatmap, lines, numbers
from grafana.queries import (
    BY_CLASS,
    greatest,
    increase_by_bucket,
    kept_at_bound,
    quantile,
    rate,
    ratio,
    series,
    weighted,
)

KEPT, MISSED, WHOLE = 'verdict="kept"', 'verdict="missed"', 'slo="all"'
GAP = "max_token_gap_seconds"
QUANTILES = (0.5, 0.95, 0.99)


def kept_ratio(window: str) -> str:
    kept = rate("priority", "slo_requests_total", BY_CLASS, WHOLE, KEPT, window=window)
    return ratio(kept, rate("priority", "slo_requests_total", BY_CLASS, WHOLE, window=window))


def missed_ratio(by: str, *matchers: str, window: str) -> str:
    missed = rate(by, "slo_requests_total", BY_CLASS, *matchers, MISSED, window=window)
    return ratio(missed, rate(by, "slo_requests_total", BY_CLASS, *matchers, window=window))


def promised(slo: str) -> str:
    """Seconds."""
    return greatest("priority", "slo_target_seconds", BY_CLASS, f'slo="{slo}"')


def burn_rate(window: str) -> str:
    """1 uses up the error budget of a period just within it."""
    budget = f"clamp_min(1 - {greatest('priority', 'slo_target_ratio', BY_CLASS)}, 0.001)"
    return f"{missed_ratio('priority', WHOLE, window=window)} / on (priority) {budget}"


def _promise() -> Iterator[Panel | Row]:
    yield Row("Is the promise kept?")
    yield numbers(
        "Promise kept",
        "Part of the offered requests of the chosen time that met all promises of their class, seen from "
        "arrival. Refusals count as missed, limits of a tenant's own do not count. Only streams can be "
        "judged.",
        "percentunit",
        Query(kept_ratio("$__range"), "{{priority}}", instant=True),
        decimals=2,
    )
    yield numbers(
        "Error budget burn over the chosen time",
        "Missed requests as a multiple of those that the target allows. 1 uses the budget up just in time; "
        "above it the target will not be reached.",
        "none",
        Query(burn_rate("$__range"), "{{priority}}", instant=True),
        thresholds=((1, "orange"), (6, "red")),
        decimals=2,
    )
    yield numbers(
        "Requests offered",
        "Requests a second that came, whatever became of them.",
        "reqps",
        Query(rate("priority", "requests_total", BY_CLASS), "{{priority}}"),
        decimals=1,
    )
    yield numbers(
        "Severity",
        "How near the engines are to breaking a promise; from 1 on the controller gives them less to do. "
        "Only the law `severity` has such a figure.",
        "none",
        Query(f"max({series('controller_severity')})", "severity"),
        thresholds=((0.8, "orange"), (1, "red")),
        decimals=2,
    )
    yield lines(
        "Promise kept against its target",
        "As above over 5 minutes, with the target that is configured.",
        "percentunit",
        Query(kept_ratio("5m"), "{{priority}}"),
        Query(greatest("priority", "slo_target_ratio", BY_CLASS), "{{priority}} target"),
        width=12,
        least=None,
        most=1,
    )
    yield lines(
        "Error budget burn rate",
        "Over 5 minutes, an hour and six hours. The alerts ask for 14.4 over an hour and 6 over six, and the "
        "same over a shorter time.",
        "none",
        *(Query(burn_rate(window), f"{{{{priority}}}} {window}") for window in ("5m", "1h", "6h")),
        width=12,
    )
    yield lines(
        "Which promise is missed",
        "Part of the requests of each class that missed their time to first token, or per output token.",
        "percentunit",
        Query(missed_ratio("priority, slo", 'slo!="all"', window="5m"), "{{priority}} {{slo}}"),
        most=1,
    )
    yield lines(
        "Largest gap: promise kept",
        "Part of the served streams of 5 minutes whose longest pause was within `max_gap_seconds`, with the "
        "target. Nothing where no class is promised one.",
        "percentunit",
        Query(kept_at_bound("priority", GAP, promised("max_gap"), BY_CLASS, window="5m"), "{{priority}}"),
        Query(
            f"{greatest('priority', 'slo_target_ratio', BY_CLASS)} and on (priority) {promised('max_gap')}",
            "{{priority}} target",
        ),
        least=None,
        most=1,
    )
    yield lines(
        "Kept: of the offered and of the admitted",
        "The gateways' own windows (about a minute), each counted by its requests. What is lost between the "
        "two lines was refused or let down; what the lower class loses there buys the promise of the higher.",
        "percentunit",
        Query(_attained("offered", "slo_requests_total", WHOLE), "{{priority}} of {{of}}"),
        Query(_attained("admitted", "time_to_first_token_seconds_count"), "{{priority}} of {{of}}"),
        most=1,
    )


def _attained(of: str, counted: str, *matchers: str) -> str:
    """Of all gateways together; `counted` are the requests that the share of each stands for."""
    shares = series("slo_attainment_ratio", BY_CLASS, WHOLE, 'view="arrival"', f'of="{of}"')
    weights = rate("job, instance, priority", counted, BY_CLASS, *matchers)
    return weighted("priority, of", shares, weights)


def _latency() -> Iterator[Panel | Row]:
    yield Row("Latency of streams")
    ttft, tpot = "time_to_first_token_seconds", "time_per_output_token_seconds"
    yield lines(
        "Time to first token",
        "From arrival: what users saw, waiting included. Dashed is what is promised.",
        "s",
        *_quantiles(ttft),
        Query(promised("ttft"), "{{priority}} promised"),
    )
    yield lines(
        "Time per output token",
        "Mean time between the tokens of an answer after its first one. Dashed is what is promised.",
        "s",
        *_quantiles(tpot),
        Query(promised("tpot"), "{{priority}} promised"),
    )
    yield lines(
        "Largest gap",
        "The longest pause between two chunks of an answer: what a long prompt of somebody else does to it. "
        "Dashed is what is promised, if it is.",
        "s",
        *_quantiles(GAP),
        Query(promised("max_gap"), "{{priority}} promised"),
    )
    for title, name in (("Time to first token", ttft), ("Time per output token", tpot), ("Largest gap", GAP)):
        yield heatmap(
            f"{title}, all of them",
            "How many requests of the chosen classes fell into each bucket.",
            "s",
            increase_by_bucket(name, BY_CLASS),
            width=8,
        )


def _quantiles(histogram: str) -> Iterator[Query]:
    for q in QUANTILES:
        yield Query(quantile(q, "priority", histogram, BY_CLASS), f"{{{{priority}}}} P{q * 100:g}")


def _traffic() -> Iterator[Panel | Row]:
    yield Row("Traffic")
    yield lines(
        "Offered against admitted",
        "Requests that came and those that were sent to an engine. In between are refusals, bad requests and "
        "clients that left.",
        "reqps",
        Query(rate("priority", "requests_total", BY_CLASS), "{{priority}} offered"),
        Query(rate("priority", "request_duration_seconds_count", BY_CLASS), "{{priority}} admitted"),
    )
    yield lines(
        "Endings",
        "How requests ended, a second.",
        "reqps",
        Query(rate("outcome", "requests_total", BY_CLASS), "{{outcome}}"),
        stacked=True,
    )
    yield lines(
        "Tokens",
        "Of requests that ended, a second. Cached input is part of the input.",
        "short",
        Query(rate("direction", "tokens_total", BY_CLASS), "{{direction}}"),
    )


DASHBOARD = Dashboard(
    name="slo-overview",
    uid="qos-slo-overview",
    title="QoS gateway: SLO overview",
    description="Which class keeps its promise, and which promise breaks.",
    variables=(PRIORITY,),
    parts=(*_promise(), *_latency(), *_traffic()),
)
