"""Every metric by name, with what it means. Dashboards and alerts are checked against this list."""

from dataclasses import dataclass
from typing import Literal

PREFIX = "qos_gateway_"

Kind = Literal["counter", "gauge", "histogram"]

_SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}


@dataclass(frozen=True, slots=True)
class Definition:
    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def series_names(self) -> tuple[str, ...]:
        """The names under which its samples appear."""
        return tuple(self.name + suffix for suffix in _SUFFIXES[self.kind])


def _define(kind: Kind, name: str, labels: str, explanation: str) -> Definition:
    return Definition(kind, PREFIX + name, explanation, tuple(labels.split()))


REQUESTS = _define(
    "counter",
    "requests_total",
    "priority outcome model tenant",
    "Requests that ended, each with exactly one outcome.",
)
TIME_TO_FIRST_TOKEN = _define(
    "histogram",
    "time_to_first_token_seconds",
    "priority",
    "From arrival to the first token of a stream: what the user saw, waiting included.",
)
UPSTREAM_TIME_TO_FIRST_TOKEN = _define(
    "histogram",
    "upstream_time_to_first_token_seconds",
    "priority",
    "From dispatch to the first token of a stream: what the engine did.",
)
TIME_PER_OUTPUT_TOKEN = _define(
    "histogram",
    "time_per_output_token_seconds",
    "priority",
    "Mean time between the tokens of a stream, after its first.",
)
MAX_TOKEN_GAP = _define(
    "histogram",
    "max_token_gap_seconds",
    "priority",
    "The longest pause between two chunks of a stream.",
)
QUEUE_WAIT = _define(
    "histogram",
    "queue_wait_seconds",
    "priority",
    "From arrival to dispatch, or to the end of a wait that was in vain.",
)
REQUEST_DURATION = _define(
    "histogram",
    "request_duration_seconds",
    "priority",
    "From arrival to the end, of requests that were dispatched.",
)
PROXY_OVERHEAD = _define(
    "histogram",
    "proxy_overhead_seconds",
    "",
    "Time a request spent in the gateway that was neither waiting nor the engine's.",
)
EVENT_LOOP_LAG = _define(
    "histogram",
    "event_loop_lag_seconds",
    "",
    "How late the process came back to a timer that was due: what every stream in it waits besides.",
)
TOKENS = _define(
    "counter",
    "tokens_total",
    "priority direction",
    "Tokens of requests that ended; cached ones are part of the input.",
)
CLASS_CLAIMS = _define(
    "counter",
    "class_claims_total",
    "claimed granted",
    "Classes that requests claimed, and what they got.",
)
PROMOTIONS = _define(
    "counter",
    "promotions_total",
    "priority",
    "Requests that went first because their class had been passed over often enough.",
)
OBSERVED_REFUSALS = _define(
    "counter",
    "observed_refusals_total",
    "priority outcome",
    "Requests of classes in observe mode that would have been refused, and with what outcome.",
)
REFUSALS = _define(
    "counter",
    "refusals_total",
    "priority reason",
    "Requests that the gateway refused, and for want of what.",
)
SLO_REQUESTS = _define(
    "counter",
    "slo_requests_total",
    "priority slo verdict",
    "Offered requests whose promise was kept or missed, seen from arrival; refused ones are missed.",
)
CLIENT_RETRIES = _define(
    "counter", "client_retries_total", "", "Requests whose client said that they are a retry."
)
CONTROLLER_CHANGES = _define(
    "counter",
    "controller_changes_total",
    "law direction reason",
    "Changes of the class rates by the controller.",
)
QUEUE_DEPTH = _define(
    "gauge", "queue_depth", "priority", "Requests that wait, for tokens of their class or for a place."
)
QUEUE_BYTES = _define("gauge", "queue_bytes", "", "Body bytes of the requests that wait.")
IN_FLIGHT = _define("gauge", "in_flight", "priority upstream", "Requests that hold a place at an engine.")
BUCKET_TOKENS = _define(
    "gauge", "bucket_tokens", "priority", "Weighted tokens in the class's buckets; below zero is debt."
)
BUCKET_RATE = _define(
    "gauge",
    "bucket_rate_tokens_per_second",
    "priority",
    "Guaranteed inflow of the class's buckets, in weighted tokens.",
)
BUCKET_INFLOW = _define(
    "gauge",
    "bucket_inflow_tokens_per_second",
    "priority",
    "What flowed into the class's buckets in the last second; above their rate it was lent by other classes.",
)
BUCKET_LENT = _define(
    "gauge",
    "bucket_lent_tokens",
    "priority",
    "The part of the class's bucket level that other classes have lent it.",
)
CAPACITY = _define("gauge", "capacity_tokens_per_second", "", "What all classes may use, in weighted tokens.")
CAPACITY_BOUND = _define(
    "gauge",
    "capacity_bound_tokens_per_second",
    "bound",
    "The least and most that the controller may set the capacity to, and what is configured.",
)
SLO_TARGET = _define(
    "gauge", "slo_target_ratio", "priority", "Share of requests that should keep the class's promise."
)
SLO_TARGET_SECONDS = _define(
    "gauge", "slo_target_seconds", "priority slo", "The promised latencies of the class."
)
SLO_ATTAINMENT = _define(
    "gauge",
    "slo_attainment_ratio",
    "priority slo view of",
    "Share of requests in the window that kept the promise; absent without a sample.",
)
CONTROLLER_SEVERITY = _define(
    "gauge", "controller_severity", "", "How near the engines are to breaking a promise; 1 is the limit."
)
CONTROLLER_LAW = _define("gauge", "controller_law", "law", "1; which law sets the rates.")
CONTROLLER_INPUT = _define(
    "gauge",
    "controller_input",
    "input",
    "The figures that the latest change of rates went by; absent once that is some seconds ago.",
)
UPSTREAM_IN_FLIGHT_LIMIT = _define(
    "gauge",
    "upstream_in_flight_limit",
    "upstream",
    "Requests that the upstream may have at once: as configured, or fewer where it sent some back.",
)
UPSTREAM_IN_FLIGHT_TOKENS = _define(
    "gauge", "upstream_in_flight_tokens", "upstream", "Tokens of the requests that hold a place there."
)
UPSTREAM_PENDING_PREFILL = _define(
    "gauge",
    "upstream_pending_prefill_tokens",
    "upstream",
    "Prompt tokens sent there that no first token has come of yet.",
)
UPSTREAM_WAITING = _define(
    "gauge",
    "upstream_waiting_requests",
    "upstream",
    "Requests that wait inside the engine, as it told, corrected by what was sent since; absent if stale.",
)
UPSTREAM_KV_USAGE = _define(
    "gauge",
    "upstream_kv_usage_ratio",
    "upstream",
    "Used part of the engine's KV memory, as it told, corrected by what was sent since; absent if stale.",
)
UPSTREAM_HEALTHY = _define(
    "gauge",
    "upstream_healthy",
    "upstream",
    "1 while the upstream may get requests; 0 also while it is on trial.",
)
UPSTREAM_QUEUE_FULL = _define(
    "counter",
    "upstream_queue_full_total",
    "upstream",
    "Requests that the upstream sent back because it had no room, and that waited for a place again.",
)
CONFIG_RELOADS = _define(
    "counter",
    "config_reloads_total",
    "result",
    "Times the configuration was read again: taken over (ok), or wrong and left aside (failed).",
)
UPSTREAM_LOAD_AGE = _define(
    "gauge",
    "upstream_load_age_seconds",
    "upstream",
    "Since the upstream's load page was read; absent until it was.",
)
FLEET_STATE = _define(
    "gauge",
    "fleet_state",
    "state",
    "1 for how this replica stands with the shared state, 0 for the other ways; absent without one, as are "
    "all of the fleet.",
)
FLEET_REPLICAS = _define(
    "gauge", "fleet_replicas", "", "Live replicas as far as this one knows, itself included."
)
FLEET_LEADER = _define(
    "gauge", "fleet_leader", "", "1 while this replica's control law sets the budget, else 0."
)
FLEET_STORE_CALLS = _define(
    "counter",
    "fleet_store_calls_total",
    "result",
    "Calls to the shared state: ok, unreachable, timed_out, denied, read_only, loading or error.",
)
FLEET_STORE_CALL = _define(
    "histogram", "fleet_store_call_seconds", "", "How long a call to the shared state took, answered or not."
)
BUILD_INFO = _define("gauge", "build_info", "version", "1; which version this is.")

CATALOGUE: tuple[Definition, ...] = tuple(d for d in globals().values() if isinstance(d, Definition))

METRIC_NAMES = frozenset(d.name for d in CATALOGUE)
"""The names of the metrics; of histograms the base name."""

SERIES_NAMES = frozenset(name for d in CATALOGUE for name in d.series_names)
"""The names a query may use: histograms as `_bucket`, `_sum` and `_count`."""
