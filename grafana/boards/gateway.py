"""The gateway's own process."""

from collections.abc import Iterator

from grafana.model import Dashboard, Panel, Query, Row, heatmap, lines, numbers
from grafana.queries import increase_by_bucket, quantile, rate, series, total

OVERHEAD, LAG = "proxy_overhead_seconds", "event_loop_lag_seconds"


def _present() -> Iterator[Panel | Row]:
    yield Row("Present")
    yield numbers(
        "Answering",
        "1 while Prometheus can read the gateway's metrics.",
        "none",
        Query(series("up"), "{{instance}}"),
    )
    yield numbers(
        "Version",
        "Which version each gateway is.",
        "none",
        Query(total("version", "build_info"), "{{version}}"),
    )
    yield numbers(
        "Up since",
        "Time since the process was started.",
        "s",
        Query(f"time() - {series('process_start_time_seconds')}", "{{instance}}"),
    )
    yield numbers(
        "Reloads of the configuration",
        "In the chosen time; a failed one left the old configuration in force.",
        "none",
        Query(
            f"sum by (result) (increase({series('config_reloads_total')}[$__range]))",
            "{{result}}",
            instant=True,
        ),
        decimals=0,
    )


def _costs() -> Iterator[Panel | Row]:
    yield Row("What it costs")
    yield lines(
        "Overhead",
        "Time a request spent in the gateway that was neither waiting nor the engine's.",
        "s",
        *(Query(quantile(q, "", OVERHEAD), f"P{q * 100:g}") for q in (0.5, 0.95, 0.99)),
    )
    yield lines(
        "Event loop lag",
        "How late the process came back to a timer. All streams share one loop: what holds it up lengthens "
        "the gaps of every one of them.",
        "s",
        *(Query(quantile(q, "instance", LAG), f"{{{{instance}}}} P{q * 100:g}") for q in (0.5, 0.99)),
    )
    yield lines(
        "Processor",
        "Cores in use. A gateway uses one at the most; above 0.8 start another replica.",
        "none",
        Query(rate("instance", "process_cpu_seconds_total"), "{{instance}}"),
    )
    yield heatmap(
        "Overhead, all of them",
        "How many requests spent how long in the gateway.",
        "s",
        increase_by_bucket(OVERHEAD),
    )
    yield heatmap(
        "Event loop lag, all of it",
        "How many timers were how late.",
        "s",
        increase_by_bucket(LAG),
    )


def _resources() -> Iterator[Panel | Row]:
    yield Row("Resources")
    yield lines(
        "Memory",
        "Resident memory of the process, and the request bodies that wait in it.",
        "bytes",
        Query(series("process_resident_memory_bytes"), "{{instance}} resident"),
        Query(series("queue_bytes"), "{{instance}} waiting bodies"),
    )
    yield lines(
        "Open files",
        "Sockets included, and how many there may be.",
        "short",
        Query(series("process_open_fds"), "{{instance}}"),
        Query(series("process_max_fds"), "{{instance}} limit"),
    )
    yield lines(
        "Scrapes",
        "How long Prometheus waits for a page of metrics.",
        "s",
        Query(series("scrape_duration_seconds"), "{{instance}}"),
    )


DASHBOARD = Dashboard(
    name="gateway",
    uid="qos-gateway",
    title="QoS gateway: the process",
    description="What the gateway itself costs: time, processor, memory.",
    variables=(),
    parts=(*_present(), *_costs(), *_resources()),
)
