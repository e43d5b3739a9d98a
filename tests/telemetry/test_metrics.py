from dataclasses import replace
from math import isfinite
from types import SimpleNamespace

import pytest

from gateway.policy.engine_load import EngineLoad
from gateway.policy.events import RatesChanged
from gateway.policy.outcome import Outcome
from gateway.policy.request import PRIORITIES, Priority, Usage
from gateway.policy.severity_law import SeverityLaw
from gateway.telemetry.catalogue import CATALOGUE, PREFIX
from gateway.telemetry.endings import ended_at_the_door
from gateway.telemetry.fleet_gauges import CALL_RESULTS
from gateway.telemetry.metrics import METRIC_NAMES, SERIES_NAMES, Metrics

LABELS = {
    "requests_total": {"priority", "outcome", "model", "tenant"},
    "time_to_first_token_seconds": {"priority"},
    "upstream_time_to_first_token_seconds": {"priority"},
    "time_per_output_token_seconds": {"priority"},
    "max_token_gap_seconds": {"priority"},
    "queue_wait_seconds": {"priority"},
    "request_duration_seconds": {"priority"},
    "proxy_overhead_seconds": set(),
    "event_loop_lag_seconds": set(),
    "tokens_total": {"priority", "direction"},
    "class_claims_total": {"claimed", "granted"},
    "promotions_total": {"priority"},
    "observed_refusals_total": {"priority", "outcome"},
    "refusals_total": {"priority", "reason"},
    "slo_requests_total": {"priority", "slo", "verdict"},
    "client_retries_total": set(),
    "controller_changes_total": {"law", "direction", "reason"},
    "queue_depth": {"priority"},
    "queue_bytes": set(),
    "in_flight": {"priority", "upstream"},
    "bucket_tokens": {"priority"},
    "bucket_rate_tokens_per_second": {"priority"},
    "bucket_inflow_tokens_per_second": {"priority"},
    "bucket_lent_tokens": {"priority"},
    "capacity_tokens_per_second": set(),
    "capacity_bound_tokens_per_second": {"bound"},
    "slo_target_ratio": {"priority"},
    "slo_target_seconds": {"priority", "slo"},
    "slo_attainment_ratio": {"priority", "slo", "view", "of"},
    "controller_severity": set(),
    "controller_law": {"law"},
    "controller_input": {"input"},
    "upstream_in_flight_limit": {"upstream"},
    "upstream_in_flight_tokens": {"upstream"},
    "upstream_pending_prefill_tokens": {"upstream"},
    "upstream_waiting_requests": {"upstream"},
    "upstream_kv_usage_ratio": {"upstream"},
    "upstream_healthy": {"upstream"},
    "upstream_queue_full_total": {"upstream"},
    "config_reloads_total": {"result"},
    "upstream_load_age_seconds": {"upstream"},
    "fleet_state": {"state"},
    "fleet_replicas": set(),
    "fleet_leader": set(),
    "fleet_store_calls_total": {"result"},
    "fleet_store_call_seconds": set(),
    "build_info": {"version"},
}

LATENCIES = (
    "time_to_first_token_seconds",
    "upstream_time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "max_token_gap_seconds",
    "queue_wait_seconds",
    "request_duration_seconds",
)


def test_catalogue_names_every_metric_with_its_labels():
    """The list that dashboards are checked against is complete and has the promised labels."""
    assert {d.name: set(d.labels) for d in CATALOGUE} == {PREFIX + n: labels for n, labels in LABELS.items()}
    assert {PREFIX + name for name in LABELS} == METRIC_NAMES
    assert PREFIX + "queue_wait_seconds_bucket" in SERIES_NAMES


def test_page_holds_what_the_catalogue_says(metrics, admission, fleet, scrape, ended):
    """Every sample on the page has a name and labels of the catalogue, and every metric can appear."""
    metrics.ended(ended())
    admission.slo_monitor.record(ended(ended_at=1))
    admission.pools[0].control.law = law = SeverityLaw(admission.parameters)
    law.severity, admission.pools[0].control.due = 0.7, 1
    metrics.load_page_read("gpu0")
    admission.engine_load_told("gpu0", EngineLoad(waiting=1, kv_usage=0.5))
    metrics.rates_changed(
        RatesChanged(1, "severity", "p0 late", "down", (3, 2, 1), (3, 2, 0), {"x_gap": 1.5})
    )
    page = scrape()
    assert {name for name, _ in page.samples} == SERIES_NAMES
    by_series = {series: set(d.labels) for d in CATALOGUE for series in d.series_names}
    for name, labels in page.samples:
        assert {label for label, _ in labels} - {"le"} == by_series[name]
    assert "_created" not in page.text


def test_how_it_stands_in_a_fleet(metrics, scrape):
    """The state is one of four, calls are counted by result from the first scrape on; nothing without a
    fleet."""
    assert not [name for name, _ in scrape().samples if "fleet" in name]
    called = metrics.watch_fleet(SimpleNamespace(state="holding", replicas=5, leads=True))
    called("ok", 0.003)
    called("timed_out", 0.5)
    page = scrape()
    states = ("joining", "shared", "holding", "alone")
    assert [page.value("fleet_state", state=state) for state in states] == [0, 0, 1, 0]
    assert (page.value("fleet_replicas"), page.value("fleet_leader")) == (5, 1)
    calls = {result: page.value("fleet_store_calls_total", result=result) for result in CALL_RESULTS}
    assert calls == {**dict.fromkeys(CALL_RESULTS, 0), "ok": 1, "timed_out": 1}
    assert page.value("fleet_store_call_seconds_bucket", le="0.005") == 1
    assert page.value("fleet_store_call_seconds_sum") == pytest.approx(0.503)


def test_all_classes_exist_before_the_first_request(metrics, scrape):
    """Series of each class are there at 0, for every outcome, direction and possible claim."""
    page = scrape()
    for priority in PRIORITIES:
        for outcome in Outcome:
            labels = {"priority": priority.name, "model": "unknown", "tenant": "unknown"}
            assert page.value("requests_total", outcome=outcome.value, **labels) == 0
        for direction in ("input", "cached", "output"):
            assert page.value("tokens_total", priority=priority.name, direction=direction) == 0
        for name in LATENCIES:
            assert page.value(f"{name}_count", priority=priority.name) == 0
        assert page.value("promotions_total", priority=priority.name) == 0
    assert page.value("class_claims_total", claimed="P0", granted="P2") == 0
    assert page.value("class_claims_total", claimed="P2", granted="P0") is None
    assert page.value("proxy_overhead_seconds_count") == 0
    assert page.value("client_retries_total") == 0
    assert page.value("build_info", version="1.2.3") == 1


def test_waiting_engine_and_user_times_are_told_apart(metrics, scrape, ended):
    """3 s in the queue and 0.5 s at the engine are three samples: 3.0, 0.5 and 3.5."""
    metrics.ended(ended())
    page = scrape()
    sums = [page.value(f"{name}_sum", priority="P0") for name in LATENCIES]
    assert sums == [3.5, 0.5, 0.025, 0.07, 3.0, 6.5]
    assert all(page.value(f"{name}_count", priority="P0") == 1 for name in LATENCIES)
    assert all(page.value(f"{name}_count", priority="P1") == 0 for name in LATENCIES)


def test_plain_answers_have_no_token_latencies(metrics, scrape, ended):
    """A request that was not streamed counts in requests and durations alone."""
    metrics.ended(ended(streaming=False))
    page = scrape()
    assert [page.value(f"{name}_count", priority="P0") for name in LATENCIES] == [0, 0, 0, 0, 1, 1]


def test_one_token_has_no_time_per_token(metrics, scrape, ended):
    """What does not apply leaves no sample."""
    metrics.ended(ended(tpot_ns=None, max_gap_ns=None, usage=Usage(10, 1)))
    page = scrape()
    assert page.value("time_per_output_token_seconds_count", priority="P0") == 0
    assert page.value("time_to_first_token_seconds_count", priority="P0") == 1


def test_value_at_a_bound_is_within_it(metrics, scrape, ended):
    """A first token exactly at the promised time has kept the promise, as the SLO monitor says too."""
    metrics.ended(ended(ttft_ns=10**9))
    metrics.ended(ended(ttft_ns=10**9 + 1))
    assert scrape().value("time_to_first_token_seconds_bucket", priority="P0", le="1.0") == 1


@pytest.mark.parametrize(
    ("outcome", "waits", "durations"),
    [
        (Outcome.QUEUE_TIMEOUT, 1, 0),
        (Outcome.REJECTED_NO_UPSTREAM, 1, 0),
        (Outcome.REJECTED_RATE, 0, 0),
        (Outcome.CLIENT_GONE_QUEUED, 0, 0),
    ],
)
def test_waits_in_vain_count_and_refusals_are_no_short_requests(
    metrics, scrape, ended, outcome, waits, durations
):
    """Whoever waited until told no is in the waits; nobody who was refused is in the durations."""
    nothing = {"queue_wait_ns": None, "ttft_ns": None, "upstream_ttft_ns": None, "tpot_ns": None}
    metrics.ended(ended(outcome=outcome, upstream=None, usage=None, max_gap_ns=None, **nothing))
    page = scrape()
    assert page.value("queue_wait_seconds_count", priority="P0") == waits
    assert page.value("request_duration_seconds_count", priority="P0") == durations
    assert page.total("requests_total", outcome=outcome.value) == 1


def test_tokens_are_those_that_were_settled(metrics, scrape, ended):
    """Tokens add up by class and direction; a request without usage adds none."""
    metrics.ended(ended())
    metrics.ended(ended(usage=Usage(200, 30)))
    metrics.ended(ended(usage=None))
    page = scrape()
    found = [page.value("tokens_total", priority="P0", direction=d) for d in ("input", "cached", "output")]
    assert found == [1000, 300, 150]


def test_endings_at_the_door_have_unknown_tenant_and_model(metrics, scrape):
    """A request refused before anything is known of it is counted with the default class."""
    metrics.ended(ended_at_the_door("r", Outcome.UNAUTHORIZED, 5, 9))
    labels = {"priority": "P1", "outcome": "unauthorized", "model": "unknown", "tenant": "unknown"}
    assert scrape().value("requests_total", **labels) == 1


def test_every_ending_is_counted_once(metrics, scrape, ended):
    """The sum over outcomes is the number of requests, whatever their labels were folded to."""
    for i in range(300):
        outcome = list(Outcome)[i % len(Outcome)]
        priority = PRIORITIES[i % 3]
        metrics.ended(ended(outcome=outcome, priority=priority, model=f"m{i}", tenant=f"t{i % 50}"))
    assert scrape().total("requests_total") == 300


def test_random_models_share_one_value(metrics, scrape, ended):
    """Five thousand model names make no more series than the label may have values."""
    before = len(scrape().samples)
    for i in range(5000):
        metrics.ended(ended(model=f"model-{i}"))
    page = scrape()
    assert len(page.samples) - before <= 21
    assert len(page.label_values("requests_total", "model")) == 20 + 2
    assert page.total("requests_total", model="other") == 4980
    assert page.total("requests_total", model="model-0") == 1


def test_made_up_models_learn_nothing(metrics, scrape, ended):
    """Names that were only ever refused share `other` and leave the room to those that exist."""
    for i in range(100):
        metrics.ended(ended(model=f"guess-{i}", outcome=Outcome.NOT_FOUND))
        metrics.ended(ended(model=f"guess-{i}", outcome=Outcome.UPSTREAM_ERROR))
    metrics.ended(ended(model="llama"))
    assert scrape().label_values("requests_total", "model") == {"unknown", "other", "llama"}


def test_pairs_of_model_and_tenant_are_bounded_too(metrics, scrape, ended):
    """Two bounded labels do not make a series for each of their pairs."""
    for model in range(20):
        for tenant in range(20):
            metrics.ended(ended(model=f"m{model}", tenant=f"t{tenant}"))
    page = scrape()
    series = [labels for name, labels in page.samples if name == PREFIX + "requests_total"]
    assert len(series) <= 3 * len(Outcome) + 5 * 20 + 20
    assert page.total("requests_total", tenant="t19") == 20
    assert page.total("requests_total") == 400


def test_configured_names_keep_their_own_value(registry, parameters, clock, scrape, ended):
    """A flood of made-up names cannot push a configured model or tenant into `other`."""
    metrics = Metrics(
        None,
        registry,
        parameters=parameters,
        clock=clock,
        version="1",
        max_label_values=1,
        known_models=["llama"],
        known_tenants=["team-a"],
    )
    for i in range(10):
        metrics.ended(ended(model=f"m{i}", tenant=f"t{i}"))
    metrics.ended(ended())
    assert scrape().total("requests_total", model="llama", tenant="team-a") == 1


def test_hostile_names_give_a_page_that_parses(metrics, scrape, ended):
    """Quotes, line feeds, NULs, half surrogates and long names in labels do no harm."""
    for model in ('a"b', "a\nb 1", "\\", "\x00", "\ud800", "x" * 100_000, "名前"):
        metrics.ended(ended(model=model, tenant=model))
    page = scrape()
    assert page.total("requests_total") == 7
    assert page.total("requests_total", model="名前") == 1
    assert max(len(line) for line in page.text.splitlines()) < 500


def test_events_of_edge_and_controller(metrics, scrape):
    """Claims, retries, promotions, overhead and changes of rates are counted under their labels."""
    metrics.class_claimed(Priority.P0, Priority.P1)
    metrics.client_retried()
    metrics.promoted(Priority.P2)
    metrics.proxy_overhead(120_000)
    change = RatesChanged(1, "severity", "p0_slow", "down", (3, 2, 1), (3, 2, 0), {"x": 1.2})
    metrics.rates_changed(change)
    metrics.rates_changed(change)
    page = scrape()
    assert page.value("class_claims_total", claimed="P0", granted="P1") == 1
    assert page.value("client_retries_total") == 1
    assert page.value("promotions_total", priority="P2") == 1
    assert page.value("proxy_overhead_seconds_sum") == 0.00012
    metrics.rates_changed(replace(change, applied=False))
    changes = {"law": "severity", "direction": "down", "reason": "p0_slow"}
    assert page.value("controller_changes_total", **changes) == 2


def test_reasons_are_bounded(metrics, scrape):
    """A law that writes numbers into its reasons does not make series without end."""
    for i in range(1000):
        metrics.rates_changed(RatesChanged(i, "severity", f"x = {i}", "down", (), (), {}))
    assert len(scrape().label_values("controller_changes_total", "reason")) <= 51


def test_no_number_on_the_page_is_odd(metrics, admission, scrape, ended):
    """Neither NaN nor an infinity, before the first request and after."""
    assert all(isfinite(value) for value in scrape().samples.values())
    admission.pools[0].control.law = law = SeverityLaw(admission.parameters)
    law.severity = float("nan")
    metrics.ended(ended(tpot_ns=0, ttft_ns=0, max_gap_ns=10**18))
    page = scrape()
    assert all(isfinite(value) for value in page.samples.values())
    assert not any(line.endswith(("NaN", "Inf")) for line in page.text.splitlines())
    assert page.value("controller_severity") is None
