from random import Random

import pytest

from gateway.policy.admission import Delivered
from gateway.policy.engine_load import EngineLoad
from gateway.policy.events import RatesChanged
from gateway.policy.outcome import Outcome
from gateway.policy.request import PRIORITIES, Ask, Priority, Stage, Usage
from gateway.policy.severity_law import SeverityLaw

DISPATCHED_ENDINGS = [
    Outcome.COMPLETED,
    Outcome.UPSTREAM_ABORTED,
    Outcome.UPSTREAM_ERROR,
    Outcome.CLIENT_GONE_STREAMING,
    Outcome.INTERNAL_ERROR,
]


def ask(i=0, priority=Priority.P0, **changes):
    facts = {"input_tokens": 100, "max_output_tokens": 50, "body_bytes": 1000, "tenant": f"t{i % 3}"}
    return Ask(request_id=f"r{i}", priority=priority, model="m", **(facts | changes))


def test_nothing_is_read_without_a_policy(metrics, scrape):
    page = scrape()
    assert page.value("queue_bytes") is None
    assert page.value("upstream_healthy", upstream="gpu0") is None


def test_full_buckets_at_rest(admission, scrape):
    """An idle gateway: full buckets, rates by share of both upstreams' capacity, nobody waits."""
    page = scrape()
    assert page.value("capacity_tokens_per_second") == 24000
    rates = [page.value("bucket_rate_tokens_per_second", priority=p.name) for p in PRIORITIES]
    assert rates == [14400, 8400, 1200]
    assert all(page.value("bucket_tokens", priority=p.name) == 8192 for p in PRIORITIES)
    assert all(page.value("queue_depth", priority=p.name) == 0 for p in PRIORITIES)
    in_flight = {(p.name, u) for p in PRIORITIES for u in ("gpu0", "gpu1")}
    assert all(page.value("in_flight", priority=p, upstream=u) == 0 for p, u in in_flight)
    assert page.value("queue_bytes") == 0
    assert page.value("controller_severity") is None


def test_waiting_and_in_flight_are_seen(admission, scrape):
    """Eight places are taken; two requests wait with their bytes."""
    for i in range(10):
        admission.submit(ask(i))
    page = scrape()
    assert page.total("in_flight", priority="P0") == 8
    assert page.value("in_flight", priority="P0", upstream="gpu1") == 4
    assert page.value("queue_depth", priority="P0") == 2
    assert page.value("queue_bytes") == 2000


def test_bucket_level_is_that_of_the_scrape(admission, clock, scrape):
    """Buckets refill when looked at, even if nothing else happened."""
    admission.submit(ask(input_tokens=2000, max_output_tokens=200))
    taken = 2000 + 4 * 200
    assert scrape().value("bucket_tokens", priority="P0") == 8192 - taken
    clock.advance(0.1)
    # The two full buckets lend: all of C flows here.
    assert scrape().value("bucket_tokens", priority="P0") == 8192 - taken + 2400


def test_attainment_is_absent_without_a_sample(admission, clock, metrics, scrape):
    """A class without a promise or a sample has no ratio, rather than 0 or NaN; old samples go."""
    assert scrape().label_values("slo_attainment_ratio", "priority") == set()
    ticket = admission.submit(ask())
    clock.advance(0.5)
    admission.first_token(ticket)
    clock.advance(1.0)
    admission.finish(ticket, Outcome.COMPLETED, Delivered(Usage(100, 11), clock.now(), 200_000_000))
    page = scrape()
    whole = {"view": "arrival", "of": "admitted"}
    assert page.value("slo_attainment_ratio", priority="P0", slo="ttft", **whole) == 1
    assert page.value("slo_attainment_ratio", priority="P0", slo="tpot", **whole) == 0
    assert page.value("slo_attainment_ratio", priority="P0", slo="all", view="dispatch", of="offered") == 0
    assert page.label_values("slo_attainment_ratio", "priority") == {"P0"}
    clock.advance(61)
    assert scrape().label_values("slo_attainment_ratio", "priority") == set()


def test_upstream_health_and_load_age(admission, metrics, clock, scrape):
    """0 while an upstream is out; the age of its load page from the first reading on."""
    admission.set_upstream_health("gpu1", False)
    page = scrape()
    assert page.value("upstream_healthy", upstream="gpu0") == 1
    assert page.value("upstream_healthy", upstream="gpu1") == 0
    assert page.value("upstream_load_age_seconds", upstream="gpu0") is None
    metrics.load_page_read("gpu0")
    clock.advance(1.5)
    assert scrape().value("upstream_load_age_seconds", upstream="gpu0") == 1.5


def test_what_other_classes_lend_is_told_apart(admission, clock, scrape):
    """P1's bucket is nearly empty and the others are full but for 210 tokens: in 0.2 s all else of C flows
    into P1's, and what its own rate has not paid is lent, for a higher class is active."""
    admission.submit(ask(0, Priority.P0, input_tokens=10))
    admission.submit(ask(1, Priority.P1, input_tokens=7000, max_output_tokens=200))
    clock.advance(0.2)
    page = scrape()
    assert page.value("bucket_inflow_tokens_per_second", priority="P1") == 24000 * 0.2 - 210
    assert page.value("bucket_lent_tokens", priority="P1") == 24000 * 0.2 - 210 - 8400 * 0.2
    assert page.value("bucket_lent_tokens", priority="P0") == 0


def test_capacity_stands_between_its_bounds(admission, scrape):
    """The bounds are those that the law is kept within: 0.2 and 3 × C0, as no class has a floor here."""
    page = scrape()
    bounds = [
        page.value("capacity_bound_tokens_per_second", bound=name) for name in ("least", "configured", "most")
    ]
    assert bounds == [4800, 24000, 72000]
    assert page.value("controller_law", law="static") == 1


def test_promises_are_told_as_they_are_configured(admission, parameters, scrape):
    """A class without a promise has neither target nor seconds, and what is not promised is absent."""
    page = scrape()
    assert page.label_values("slo_target_ratio", "priority") == {"P0", "P1"}
    assert page.value("slo_target_ratio", priority="P0") == parameters.control.target
    assert page.value("slo_target_seconds", priority="P0", slo="tpot") == 0.06
    assert page.value("slo_target_seconds", priority="P1", slo="max_gap") == 0.7
    assert page.value("slo_target_seconds", priority="P0", slo="max_gap") is None


def test_an_engine_shows_what_it_holds_and_what_it_told(admission, clock, scrape):
    """Its places and tokens are known at once, its own queue and memory only from its fresh page."""
    admission.submit(ask(input_tokens=300))
    page = scrape()
    held = next(u for u in ("gpu0", "gpu1") if page.value("upstream_in_flight_tokens", upstream=u))
    assert page.value("upstream_pending_prefill_tokens", upstream=held) == 300
    assert page.value("upstream_in_flight_limit", upstream=held) == 4
    assert page.value("upstream_waiting_requests", upstream=held) is None
    admission.engine_load_told(held, EngineLoad(waiting=3, kv_usage=0.25))
    page = scrape()
    assert page.value("upstream_waiting_requests", upstream=held) == 3
    assert page.value("upstream_kv_usage_ratio", upstream=held) == 0.25
    clock.advance(6)
    assert scrape().value("upstream_kv_usage_ratio", upstream=held) is None


def test_figures_of_a_change_go_when_they_are_old(admission, metrics, clock, scrape):
    """The greatest of the pools' latest changes is shown, for ten seconds."""
    rates = (3, 2, 1)
    for upstream, gap in (("gpu0", 0.5), ("gpu1", 1.5), ("gpu0", 0.7)):
        change = RatesChanged(
            clock.now(), "severity", "gap", "down", rates, rates, {"x_gap": gap}, (upstream,)
        )
        metrics.rates_changed(change)
    assert scrape().value("controller_input", input="x_gap") == 1.5
    clock.advance(11)
    assert scrape().value("controller_input", input="x_gap") is None


def test_severity_appears_once_there_is_one(admission, scrape):
    """Where the law has such a figure and a signal to compute it from, and while the loop ticks."""
    law = SeverityLaw(admission.parameters)
    admission.pools[0].control.law = law
    assert scrape().value("controller_severity") is None
    law.severity = 1.25
    assert scrape().value("controller_severity") is None, "the loop rests: an old figure"
    admission.pools[0].control.due = 1
    assert scrape().value("controller_severity") == 1.25


@pytest.mark.parametrize("seed", range(5))
def test_all_gauges_read_zero_after_any_mix_of_endings(admission, clock, scrape, seed):
    """Whatever happened to 400 requests, nothing stays taken, and each is counted once."""
    random = Random(seed)
    offered = []

    def now(*stages):
        return [ticket for ticket in offered if ticket.stage in stages]

    for i in range(400):
        facts = {"input_tokens": random.choice([10, 500, 9000]), "streaming": random.random() < 0.7}
        offered.append(admission.submit(ask(i, random.choice(PRIORITIES), **facts)))
        clock.advance(random.expovariate(20))
        admission.advance()
        waiting, running = now(Stage.THROTTLED, Stage.READY), now(Stage.DISPATCHED)
        if waiting and random.random() < 0.2:
            admission.cancel(random.choice(waiting))
        if running and random.random() < 0.5:
            end_one(admission, clock, random, random.choice(running))
        if i % 40 == 0:
            page = scrape()
            assert page.total("in_flight") == len(now(Stage.DISPATCHED))
            assert page.total("queue_depth") == len(now(Stage.THROTTLED, Stage.READY))
            assert page.total("queue_bytes") == 1000 * page.total("queue_depth")
            admission.set_upstream_health("gpu1", random.random() < 0.5)
    admission.drain()
    for ticket in now(Stage.DISPATCHED):
        end_one(admission, clock, random, ticket)
    page = scrape()
    assert page.total("in_flight") == 0
    assert page.total("queue_depth") == 0
    assert page.total("queue_bytes") == 0
    assert page.total("requests_total") == len(offered) == 400


def end_one(admission, clock, random, ticket):
    if random.random() < 0.8:
        admission.first_token(ticket)
    clock.advance(random.random())
    delivered = Delivered(Usage(100, random.randrange(60)), clock.now(), 10_000_000)
    admission.finish(
        ticket, random.choice(DISPATCHED_ENDINGS), delivered if random.random() < 0.7 else Delivered()
    )
