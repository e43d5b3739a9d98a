"""What the controller does, and why."""

from collections.abc import Iterator

from grafana.model import PRIORITY, Dashboard, Panel, Query, Row, lines, numbers
from grafana.queries import BY_CLASS, greatest, quantile, rate, series, total, weighted


def _capacity() -> Iterator[Panel | Row]:
    yield Row("Capacity")
    yield lines(
        "Capacity C and its bounds",
        "What all classes together may use at the chosen gateways, in weighted tokens a second. The "
        "controller keeps it between its bounds; at one of them it can do no more.",
        "short",
        Query(f"sum({series('capacity_tokens_per_second')})", "C"),
        Query(total("bound", "capacity_bound_tokens_per_second"), "{{bound}} limit"),
        width=16,
        steps=True,
    )
    yield numbers(
        "Law",
        "Which law sets the rates, and of how many gateways. Of those that share a state one is at work.",
        "none",
        Query(total("law", "controller_law"), "{{law}}"),
        width=8,
        height=8,
    )
    yield lines(
        "Rates of the classes",
        "What each class is guaranteed. A cut takes from P2 down to its floor, then P1, last P0.",
        "short",
        Query(total("priority", "bucket_rate_tokens_per_second", BY_CLASS), "{{priority}}"),
        width=12,
        stacked=True,
        steps=True,
    )
    yield lines(
        "Changes",
        "Every change of the rates, a minute, by direction and reason. A steady saw of up and down means "
        "that the configured capacity is far from what the engines bear.",
        "cpm",
        Query(f"60 * {rate('direction, reason', 'controller_changes_total')}", "{{direction}} {{reason}}"),
        width=12,
        stacked=True,
    )


def _signals() -> Iterator[Panel | Row]:
    yield Row("What it goes by")
    yield lines(
        "Severity",
        "How near the engines are to breaking a promise: the greatest of the inputs. Above 1 the capacity is "
        "cut, below 0.8 a cut heals by itself. Of gateways that share a state the leader's counts.",
        "none",
        Query(series("controller_severity"), "{{instance}}"),
        Query("vector(1)", "limit"),
    )
    yield lines(
        "Inputs of the latest change",
        "x_wait: first tokens later than predicted. x_gap: time per token. x_kv: memory in use. Each as a "
        "part of its limit. A law tells its figures when it changes something; ten seconds later they go.",
        "none",
        Query(f"max by (input) ({series('controller_input')})", "{{input}}"),
    )
    attained = series("slo_attainment_ratio", BY_CLASS, 'slo="all"', 'view="dispatch"', 'of="admitted"')
    streams = rate("job, instance, priority", "upstream_time_to_first_token_seconds_count", BY_CLASS)
    yield lines(
        "Promise kept by the engines",
        "From dispatch, so without the gateway's own waiting: what the law `compliance` goes by. Each "
        "gateway counts by its streams.",
        "percentunit",
        Query(weighted("priority", attained, streams), "{{priority}}"),
        most=1,
    )
    yield lines(
        "First token of the engines",
        "From dispatch to the first token.",
        "s",
        *(
            Query(
                quantile(q, "priority", "upstream_time_to_first_token_seconds", BY_CLASS),
                f"{{{{priority}}}} P{q * 100:g}",
            )
            for q in (0.5, 0.95, 0.99)
        ),
    )
    yield lines(
        "Time per output token",
        "Mean time between the tokens of an answer.",
        "s",
        *(
            Query(
                quantile(q, "priority", "time_per_output_token_seconds", BY_CLASS),
                f"{{{{priority}}}} P{q * 100:g}",
            )
            for q in (0.5, 0.95, 0.99)
        ),
    )
    yield lines(
        "Memory of the engines",
        "Used part of their KV memory, as far as they tell.",
        "percentunit",
        Query(greatest("upstream", "upstream_kv_usage_ratio"), "{{upstream}}"),
        most=1,
    )


DASHBOARD = Dashboard(
    name="controller",
    uid="qos-controller",
    title="QoS gateway: controller",
    description="The capacity, what it follows, and every change of it.",
    variables=(PRIORITY,),
    parts=(*_capacity(), *_signals()),
)
