from dataclasses import replace
from itertools import product

import pytest

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.events import RequestEnded
from gateway.policy.outcome import CALLERS_OWN, Outcome
from gateway.policy.parameters import SloTargets
from gateway.policy.request import Priority
from gateway.policy.slo_monitor import SLOS
from gateway.telemetry.catalogue import SLO_REQUESTS
from gateway.telemetry.promises import VERDICTS, PromiseCounts
from gateway.telemetry.series import CounterFamily

MS = NANOSECONDS_PER_SECOND // 1000

IN_TIME = {"ttft_ns": 500 * MS, "tpot_ns": 25 * MS}
NOTHING_MEASURED = ("queue_wait_ns", "ttft_ns", "upstream_ttft_ns", "tpot_ns", "max_gap_ns")
LEFT = (Outcome.CLIENT_GONE_QUEUED, Outcome.CLIENT_GONE_STREAMING, Outcome.CLIENT_STALLED)
REFUSED = dict.fromkeys((*NOTHING_MEASURED, "upstream", "usage"))


def verdicts(page, slo="all", priority="P0"):
    return [
        page.value("slo_requests_total", priority=priority, slo=slo, verdict=verdict)
        for verdict in ("kept", "missed")
    ]


def test_both_verdicts_exist_before_the_first_request(metrics, scrape):
    """A rate over them is right from the first request on; a class without a promise has none."""
    page = scrape()
    assert [verdicts(page, slo) for slo in ("ttft", "tpot", "all")] == [[0, 0]] * 3
    assert page.label_values("slo_requests_total", "priority") == {"P0", "P1"}


@pytest.mark.parametrize(
    ("changes", "ttft", "tpot", "whole"),
    [
        (IN_TIME, [1, 0], [1, 0], [1, 0]),
        (IN_TIME | {"ttft_ns": 2000 * MS}, [0, 1], [1, 0], [0, 1]),
        (IN_TIME | {"tpot_ns": 61 * MS}, [1, 0], [0, 1], [0, 1]),
        (REFUSED | {"outcome": Outcome.REJECTED_RATE}, [0, 1], [0, 1], [0, 1]),
        (REFUSED | {"outcome": Outcome.REJECTED_RATE, "by_tenant_limit": True}, [0, 0], [0, 0], [0, 0]),
        (REFUSED | {"outcome": Outcome.BAD_REQUEST}, [0, 0], [0, 0], [0, 0]),
        (IN_TIME | {"streaming": False}, [0, 0], [0, 0], [0, 0]),
        (IN_TIME | {"priority": Priority.P2}, [0, 0], [0, 0], [0, 0]),
    ],
)
def test_what_users_were_promised_is_counted_kept_or_missed(
    metrics, scrape, ended, changes, ttft, tpot, whole
):
    """By each promise, of all that was offered; what is nobody's or the caller's own fault is left out."""
    metrics.ended(ended(**changes))
    page = scrape()
    assert [verdicts(page, "ttft"), verdicts(page, "tpot"), verdicts(page)] == [ttft, tpot, whole]


def test_other_promises_go_on_from_the_same_counts(metrics, parameters, scrape, ended):
    """A reload changes what the next request is judged by, not what was counted."""
    metrics.ended(ended(**IN_TIME))
    stricter = replace(parameters.classes[Priority.P0], slo=SloTargets(100 * MS, 60 * MS))
    batch = replace(parameters.classes[Priority.P2], slo=SloTargets(ttft_ns=100 * MS))
    classes = {**parameters.classes, Priority.P0: stricter, Priority.P2: batch}
    metrics.reconfigured(replace(parameters, classes=classes), 1)
    metrics.ended(ended(**IN_TIME))
    metrics.ended(ended(**IN_TIME, priority=Priority.P2))
    page = scrape()
    assert verdicts(page, "ttft") == [1, 1]
    assert verdicts(page, "ttft", "P2") == [0, 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"outcome": Outcome.REJECTED_RATE}, "class_budget"),
        ({"outcome": Outcome.REJECTED_RATE, "by_tenant_limit": True}, "tenant_limit"),
        ({"outcome": Outcome.REJECTED_QUEUE_FULL}, "queue_full"),
        ({"outcome": Outcome.QUEUE_TIMEOUT}, "queue_timeout"),
        ({"outcome": Outcome.REJECTED_NO_UPSTREAM}, "no_upstream"),
        ({"outcome": Outcome.REJECTED_DRAINING}, "draining"),
        ({"outcome": Outcome.COMPLETED}, None),
        ({"outcome": Outcome.UNAUTHORIZED}, None),
        ({"outcome": Outcome.UPSTREAM_ERROR}, None),
    ],
)
def test_a_refusal_says_for_want_of_what(metrics, scrape, ended, changes, reason):
    """Only the gateway's own refusals count; a tenant's own limit is told apart from its class's budget."""
    metrics.ended(ended(**REFUSED | changes))
    page = scrape()
    assert page.total("refusals_total") == (reason is not None)
    if reason is not None:
        assert page.value("refusals_total", priority="P0", reason=reason) == 1


def expected(event: RequestEnded, targets: SloTargets) -> dict[str, bool]:
    """What is to be counted, by the words of the contract: promise by promise that applies, kept or not."""
    measured = {
        "ttft": (event.ttft_ns, targets.ttft_ns),
        "tpot": (event.tpot_ns, targets.tpot_ns),
        "gap": (event.max_gap_ns, targets.max_gap_ns),
    }
    promised = {name: pair for name, pair in measured.items() if pair[1] is not None}
    if not event.streaming or event.by_tenant_limit or event.outcome in CALLERS_OWN:
        return {}
    left = event.outcome in LEFT
    if left and event.ttft_ns is None and not ("ttft" in promised and waited(event) > targets.ttft_ns):
        return {}  # before anything was late
    if event.outcome is Outcome.COMPLETED or (left and event.ttft_ns is not None):
        kept = {name: value <= most for name, (value, most) in promised.items() if value is not None}
    else:
        kept = dict.fromkeys(promised, False)
    told = {name: kept[name] for name in ("ttft", "tpot") if name in kept}
    return told | ({"all": all(kept.values())} if kept else {})


def waited(event: RequestEnded) -> int:
    return event.ended_at - event.arrived_at


@pytest.mark.parametrize(
    "targets", [SloTargets(1000, 60), SloTargets(1000), SloTargets(max_gap_ns=70), SloTargets()]
)
def test_every_ending_counts_as_it_was_promised(parameters, ended, targets):
    """For every outcome, with and without each measurement, streamed or not."""
    classes = {p: replace(each, slo=targets) for p, each in parameters.classes.items()}
    for outcome, streaming, limited in product(Outcome, (True, False), (True, False)):
        for ttft, tpot, gap, took in product((None, 900, 1100), (None, 50, 70), (None, 60, 80), (500, 1500)):
            event = ended(
                outcome=outcome,
                streaming=streaming,
                by_tenant_limit=limited and outcome is Outcome.REJECTED_RATE,
                ttft_ns=ttft,
                tpot_ns=tpot,
                max_gap_ns=gap,
                arrived_at=0,
                ended_at=took,
            )
            family = CounterFamily(SLO_REQUESTS)
            PromiseCounts(family, classes).count(event)
            counted = {
                (slo, verdict): family.child("P0", slo, verdict).value for slo in SLOS for verdict in VERDICTS
            }
            kept = expected(event, targets)
            assert counted == {
                (slo, verdict): int(kept.get(slo) is (verdict == "kept"))
                for slo in SLOS
                for verdict in VERDICTS
            }
