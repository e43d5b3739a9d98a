"""The gateway's metrics: a listener to the policy's events, and a collector of one registry.

Series of all three classes exist from the start, so that a rate over them is right from the first
request and a chart shows 0 rather than nothing. For `requests_total` this is done with the value that
model and tenant have while they are not known, for every outcome; their real names come with requests.

Latencies are those of streams: a plain answer has no first token that anybody saw.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from gateway.policy.admission import Admission
from gateway.policy.clock import NANOSECONDS_PER_SECOND, Clock
from gateway.policy.events import Observer, RatesChanged, RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import PRIORITIES, Priority
from gateway.telemetry import catalogue
from gateway.telemetry.buckets import latency_bounds
from gateway.telemetry.catalogue import METRIC_NAMES, SERIES_NAMES, Definition
from gateway.telemetry.endings import REFUSAL_REASONS, queue_wait_ns, refusal_reason
from gateway.telemetry.fleet_gauges import CALL_BOUNDS, CALL_RESULTS, Fleet, fleet_gauges
from gateway.telemetry.gauges import controller_inputs, gauge, load_ages, policy_gauges
from gateway.telemetry.labels import OTHER, UNKNOWN, BoundedLabel
from gateway.telemetry.promises import PromiseCounts
from gateway.telemetry.series import Count, CounterFamily, Histogram, HistogramFamily

__all__ = ["METRIC_NAMES", "SERIES_NAMES", "Metrics"]

PAIRS_PER_VALUE = 5
"""So many pairs of model and tenant for each allowed value of one. Two labels that are bounded alone
still make a series for every pair."""
_REASONS_MAX = 50
_CLASS_NAMES = tuple(p.name for p in PRIORITIES)


class Metrics(Observer, Collector):
    """`known_models` and `known_tenants` (the configured ones) always keep their own label value, as do
    the models named for the upstreams.

    The gauges need an `Admission`, and an `Admission` its observer: `watch` it where it comes later.
    """

    def __init__(
        self,
        admission: Admission | None,
        registry: CollectorRegistry,
        *,
        parameters: PolicyParameters,
        clock: Clock,
        version: str,
        first_byte_seconds: float = 300.0,
        idle_seconds: float = 60.0,
        max_label_values: int = 200,
        known_models: Iterable[str] = (),
        known_tenants: Iterable[str] = (),
    ) -> None:
        self._admission = admission
        self._clock = clock
        self._version = version
        self._fleet: Fleet | None = None
        self._load_read_at: dict[str, int] = {}
        self._last_changes: dict[tuple[str, ...], RatesChanged] = {}  # by the upstreams of their pool
        served = [model for u in parameters.upstreams for model in u.models if model != "*"]
        self._models = BoundedLabel(max_label_values, [*served, *known_models])
        self._tenants = BoundedLabel(max_label_values, known_tenants)
        self._reasons = BoundedLabel(_REASONS_MAX)
        self._pairs: set[tuple[str, str]] = set()
        self._pairs_max = PAIRS_PER_VALUE * max_label_values

        self._families: list[CounterFamily | HistogramFamily] = []
        self._build_counters(parameters)
        self._build_histograms(parameters, first_byte_seconds, idle_seconds)
        registry.register(self)

    def _build_counters(self, parameters: PolicyParameters) -> None:
        self._requests = self._counter(catalogue.REQUESTS)
        self._endings: list[dict[tuple[str, str, str], Count]] = [{} for _ in PRIORITIES]
        for priority in PRIORITIES:
            for outcome in Outcome:
                self._ending(priority, outcome, UNKNOWN, UNKNOWN)
        tokens = self._counter(catalogue.TOKENS)
        self._tokens = [
            (tokens.child(name, "input"), tokens.child(name, "cached"), tokens.child(name, "output"))
            for name in _CLASS_NAMES
        ]
        claims = self._counter(catalogue.CLASS_CLAIMS)
        self._claims = {
            (claimed, granted): claims.child(claimed.name, granted.name)
            for claimed in PRIORITIES
            for granted in PRIORITIES[claimed:]
        }
        self._promotions = self._counter(catalogue.PROMOTIONS).children(_CLASS_NAMES)
        self._observed = self._counter(catalogue.OBSERVED_REFUSALS)
        for name in _CLASS_NAMES:
            self._observed.child(name, Outcome.REJECTED_RATE.value)
        self._queue_full = self._counter(catalogue.UPSTREAM_QUEUE_FULL)
        for upstream in parameters.upstreams:
            self._queue_full.child(upstream.name)
        refusals = self._counter(catalogue.REFUSALS)
        self._refusals = [
            {reason: refusals.child(name, reason) for reason in REFUSAL_REASONS} for name in _CLASS_NAMES
        ]
        self._promises = PromiseCounts(self._counter(catalogue.SLO_REQUESTS), parameters.classes)
        self._retries = self._counter(catalogue.CLIENT_RETRIES).child()
        self._changes = self._counter(catalogue.CONTROLLER_CHANGES)
        self._reloads = self._counter(catalogue.CONFIG_RELOADS)
        for result in ("ok", "failed"):
            self._reloads.child(result)

    def _build_histograms(
        self, parameters: PolicyParameters, first_byte_seconds: float, idle_seconds: float
    ) -> None:
        bounds = latency_bounds(parameters, first_byte_seconds, idle_seconds)
        self._ttft = self._latency(catalogue.TIME_TO_FIRST_TOKEN, bounds.ttft)
        self._upstream_ttft = self._latency(catalogue.UPSTREAM_TIME_TO_FIRST_TOKEN, bounds.upstream_ttft)
        self._tpot = self._latency(catalogue.TIME_PER_OUTPUT_TOKEN, bounds.tpot)
        self._max_gap = self._latency(catalogue.MAX_TOKEN_GAP, bounds.max_gap)
        self._queue_wait = self._latency(catalogue.QUEUE_WAIT, bounds.queue_wait)
        self._duration = self._latency(catalogue.REQUEST_DURATION, bounds.duration)
        self._overhead = self._histogram(catalogue.PROXY_OVERHEAD, bounds.overhead).child()
        self._loop_lag = self._histogram(catalogue.EVENT_LOOP_LAG, bounds.loop_lag).child()

    def _counter(self, definition: Definition) -> CounterFamily:
        family = CounterFamily(definition)
        self._families.append(family)
        return family

    def _histogram(self, definition: Definition, bounds: tuple[int, ...]) -> HistogramFamily:
        family = HistogramFamily(definition, bounds)
        self._families.append(family)
        return family

    def _latency(self, definition: Definition, bounds: tuple[int, ...]) -> list[Histogram]:
        return self._histogram(definition, bounds).children(_CLASS_NAMES)

    # ------------------------------------------------------------------ events of the policy

    def ended(self, event: RequestEnded) -> None:
        priority = event.priority
        self._count_ending(event)
        self._promises.count(event)
        refused = refusal_reason(event)
        if refused is not None:
            self._refusals[priority][refused].value += 1
        if event.would_be is not None:
            self._observed.child(priority.name, event.would_be.value).value += 1
        if event.queue_wait_ns is not None:
            self._duration[priority].observe(event.ended_at - event.arrived_at)
        wait = queue_wait_ns(event)
        if wait is not None:
            self._queue_wait[priority].observe(wait)
        if event.streaming:
            self._observe_stream(event)
        usage = event.usage
        if usage is not None:
            into, cached, out = self._tokens[priority]
            into.value += usage.input_tokens
            cached.value += usage.cached_tokens
            out.value += usage.output_tokens

    def _observe_stream(self, event: RequestEnded) -> None:
        priority = event.priority
        if event.ttft_ns is not None:
            self._ttft[priority].observe(event.ttft_ns)
        if event.upstream_ttft_ns is not None:
            self._upstream_ttft[priority].observe(event.upstream_ttft_ns)
        if event.tpot_ns is not None:
            self._tpot[priority].observe(event.tpot_ns)
        if event.max_gap_ns is not None:
            self._max_gap[priority].observe(event.max_gap_ns)

    def _count_ending(self, event: RequestEnded) -> None:
        outcome = event.outcome
        # Only an answer shows that there is such a model; a client may have made the name up.
        model = self._models.value(event.model, learn=outcome is Outcome.COMPLETED)
        tenant = self._tenants.value(event.tenant)
        count = self._endings[event.priority].get((outcome, model, tenant))
        if count is None:
            count = self._ending(event.priority, outcome, self._paired(model, tenant), tenant)
        count.value += 1

    def _paired(self, model: str, tenant: str) -> str:
        """The model's label beside this tenant: its own while there is room for one more pair."""
        if (model, tenant) in self._pairs or model == OTHER:
            return model
        if len(self._pairs) >= self._pairs_max:
            return OTHER
        self._pairs.add((model, tenant))
        return model

    def _ending(self, priority: Priority, outcome: Outcome, model: str, tenant: str) -> Count:
        count = self._requests.child(priority.name, outcome.value, model, tenant)
        self._endings[priority][outcome, model, tenant] = count
        return count

    def promoted(self, priority: Priority) -> None:
        self._promotions[priority].value += 1

    def queue_full(self, upstream: str, at: int) -> None:
        self._queue_full.child(upstream).value += 1

    def reconfigured(self, parameters: PolicyParameters, at: int) -> None:
        for upstream in parameters.upstreams:
            self._queue_full.child(upstream.name)
            self._models.reserve(model for model in upstream.models if model != "*")
        self._promises.reconfigure(parameters.classes)
        self._last_changes.clear()
        names = {upstream.name for upstream in parameters.upstreams}
        self._load_read_at = {name: at for name, at in self._load_read_at.items() if name in names}

    def rates_changed(self, event: RatesChanged) -> None:
        self._last_changes[event.upstreams] = event
        if not event.applied:
            return
        reason = self._reasons.value(event.reason)
        self._changes.child(event.law, event.direction, reason).value += 1

    # ------------------------------------------------------------------ what the edge tells

    def class_claimed(self, claimed: Priority, granted: Priority) -> None:
        self._claims[claimed, granted].value += 1

    def client_retried(self) -> None:
        self._retries.value += 1

    def config_reloaded(self, result: str) -> None:
        """`ok` or `failed`."""
        self._reloads.child(result).value += 1

    def know_tenants(self, tenants: Iterable[str]) -> None:
        """They keep a label value of their own from now on."""
        self._tenants.reserve(tenants)

    def proxy_overhead(self, nanoseconds: int) -> None:
        self._overhead.observe(nanoseconds)

    def loop_lagged(self, nanoseconds: int) -> None:
        self._loop_lag.observe(nanoseconds)

    def load_page_read(self, upstream: str) -> None:
        """The upstream's load page was read just now."""
        self._load_read_at[upstream] = self._clock.now()

    def watch(self, admission: Admission) -> None:
        """Read the gauges from this policy from now on."""
        self._admission = admission

    # ------------------------------------------------------------------ the page

    def describe(self) -> Iterator[Metric]:
        for definition in catalogue.CATALOGUE:
            name = definition.name.removesuffix("_total") if definition.kind == "counter" else definition.name
            yield Metric(name, definition.help, definition.kind)

    def watch_fleet(self, fleet: Fleet) -> Callable[[str, float], None]:
        """Show how this gateway stands with the others. Answers what is to be told of each call to the shared
        state: its result, and how many seconds it took."""
        calls = self._counter(catalogue.FLEET_STORE_CALLS)
        by_result = {result: calls.child(result) for result in CALL_RESULTS}
        took = self._histogram(catalogue.FLEET_STORE_CALL, CALL_BOUNDS).child()
        self._fleet = fleet

        def called(result: str, seconds: float) -> None:
            by_result[result].value += 1
            took.observe(round(seconds * NANOSECONDS_PER_SECOND))

        return called

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            yield from family.collect()
        if self._admission is not None:
            yield from policy_gauges(self._admission, self._clock.now())
        yield controller_inputs(self._last_changes.values(), self._clock.now())
        yield load_ages(self._load_read_at, self._clock.now())
        if self._fleet is not None:
            yield from fleet_gauges(self._fleet)
        yield gauge(catalogue.BUILD_INFO, [((self._version,), 1.0)])
