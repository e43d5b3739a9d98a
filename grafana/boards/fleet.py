"""Several gateways with one budget: who shares it, who has which part, how the store does."""

from collections.abc import Iterator

from grafana.model import PRIORITY, Dashboard, Panel, Query, Row, heatmap, lines, numbers
from grafana.queries import BY_CLASS, increase_by_bucket, quantile, rate, ratio, series, total

CALLS, DURATION = "fleet_store_calls_total", "fleet_store_call_seconds"


def _sharing() -> Iterator[Panel | Row]:
    yield Row("Who shares")
    yield numbers(
        "Stands with the store",
        "shared: it has its part from the store. joining: it has not reached it yet, and takes the "
        "configured budget / `fleet.replicas_assumed`. holding: no answer, its last part is still good. "
        "alone: no answer for longer, so it has an equal part.",
        "none",
        Query(f"{series('fleet_state')} == 1", "{{instance}} {{state}}"),
        width=8,
        height=8,
    )
    yield lines(
        "Replicas by state",
        "How many gateways stand how with the store. All should be shared.",
        "short",
        Query(total("state", "fleet_state"), "{{state}}"),
        stacked=True,
        steps=True,
    )
    yield lines(
        "Leads",
        "Whose control law sets the budget: one gateway of those that share. One that is alone sets its own.",
        "short",
        Query(total("instance", "fleet_leader"), "{{instance}}"),
        stacked=True,
        steps=True,
    )
    sharing = series("fleet_state", 'state="shared"')
    yield lines(
        "Replicas, as each knows them",
        "Live gateways as far as each one knows, itself included. Dashed is how many Prometheus sees share "
        "the state; all lines should be one.",
        "short",
        Query(series("fleet_replicas"), "{{instance}}"),
        Query(f"sum({sharing})", "seen to share, the target"),
        width=12,
        steps=True,
    )
    refused = rate("instance", "refusals_total", BY_CLASS)
    yield lines(
        "Refused part, by replica",
        "Of the requests that came to each. While budgets are shared these are close to each other whatever "
        "the load of each one is.",
        "percentunit",
        Query(ratio(refused, rate("instance", "requests_total", BY_CLASS)), "{{instance}}"),
        width=12,
        most=1,
    )


def _parts() -> Iterator[Panel | Row]:
    yield Row("Who has what")
    yield lines(
        "Rates of the classes, by replica",
        "Each gateway's part of what each class is guaranteed, in weighted tokens a second. All of them "
        "together are the capacity C, however they are spread.",
        "short",
        Query(
            total("priority, instance", "bucket_rate_tokens_per_second", BY_CLASS),
            "{{priority}} {{instance}}",
        ),
        width=12,
        stacked=True,
        steps=True,
    )
    yield lines(
        "Capacity, by replica",
        "The part of C that each gateway has. A part moves within three slices of the load that moved.",
        "short",
        Query(total("instance", "capacity_tokens_per_second"), "{{instance}}"),
        width=12,
        stacked=True,
        steps=True,
    )
    yield lines(
        "Admitted tokens, by replica",
        "Input and output of the requests that ended, a second. Cached input is part of the input.",
        "short",
        Query(rate("instance", "tokens_total", BY_CLASS, 'direction!="cached"'), "{{instance}}"),
        stacked=True,
    )
    yield lines(
        "Places, by replica",
        "How many requests each gateway may have at the engines: its part of their limits. All of them "
        "together are at most `max_in_flight`, or fewer where an engine sent some back.",
        "short",
        Query(total("instance", "upstream_in_flight_limit"), "{{instance}}"),
        stacked=True,
        steps=True,
    )
    yield lines(
        "Taken places, by replica",
        "Requests of each gateway that hold a place.",
        "short",
        Query(total("instance", "in_flight", BY_CLASS), "{{instance}}"),
        stacked=True,
    )


def _store() -> Iterator[Panel | Row]:
    yield Row("The store")
    yield lines(
        "Calls to the store, by result",
        "A second, all gateways: about ten each. unreachable: no connection. timed_out: no answer in time. "
        "denied: password or rights. read_only: it is a copy. loading: it starts. error: its own, as when "
        "its memory is full.",
        "reqps",
        Query(rate("result", CALLS), "{{result}}"),
        stacked=True,
    )
    yield lines(
        "Duration of a call",
        "No request waits for it. More than the slice makes parts move later; more than "
        "`fleet.call_seconds_max` is a failed call.",
        "s",
        *(Query(quantile(q, "instance", DURATION), f"{{{{instance}}}} P{q * 100:g}") for q in (0.5, 0.99)),
    )
    yield heatmap(
        "Duration of all calls", "How many calls took how long.", "s", increase_by_bucket(DURATION), width=8
    )


DASHBOARD = Dashboard(
    name="fleet",
    uid="qos-fleet",
    title="QoS gateway: fleet",
    description="Several gateways with one budget. Empty with `state: memory`, but for the parts of each.",
    variables=(PRIORITY,),
    parts=(*_sharing(), *_parts(), *_store()),
)
