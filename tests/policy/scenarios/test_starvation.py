"""Nobody starves: places under full load, for ten virtual minutes."""

import pytest

from gateway.policy.request import Priority
from tests.support.drivers import Driver
from tests.support.policy_settings import P0, P1, P2, policy, upstream
from tests.support.workloads import arrivals, backlog, clients, dispatched, seconds, taking, under_both

WAITS = {P0: 2, P1: 15, P2: 120}
MINUTES_10 = 600.0


def shares(driver: Driver) -> dict[Priority, float]:
    gone = dispatched(driver)
    return {p: sum(t.priority is p for t in gone) / len(gone) for p in Priority}


@pytest.mark.parametrize(("slots", "length"), [(1, 600.0), (4, 180.0)])
def test_lower_classes_progress_under_full_load(slots: int, length: float) -> None:
    """With P0 and P1 saturated P1 gets 0.32 of the places and P2 0.049, and nobody waits past its limit.

    Who is told no has waited its limit out, or was told at once, as its place was hopelessly far."""
    parameters = policy(upstream(max_in_flight=slots), classes={p: {"wait": w} for p, w in WAITS.items()})

    def book(driver: Driver) -> None:
        driver.service = taking(1.0)
        clients(driver, {P0: 6 * slots, P1: 12 * slots, P2: 6 * slots}, pause=0.01)

    with under_both(parameters, book, length) as driver:
        got = shares(driver)
        assert got[P1] >= 0.32
        assert got[P2] >= 0.049
        assert got[P0] >= 0.60
        for ticket in dispatched(driver):
            assert seconds(ticket.queue_wait_ns) <= WAITS[ticket.priority]
        refused = [t for t in driver.tickets.values() if t.refusal is not None]
        assert {t.refusal.outcome for t in refused if t.refusal} <= {"queue_timeout"}
        ends = {e.request_id: e.ended_at for e in driver.endings.records}
        for ticket in refused:
            waited = seconds(ends[ticket.ask.request_id] - ticket.arrived_at)
            assert waited == 0 or waited == pytest.approx(WAITS[ticket.priority], abs=1e-6)
        promoted = [t for t in dispatched(driver) if t.promoted]
        assert len(driver.endings.promotions) == len(promoted) > 0


def test_one_batch_request_beside_a_full_realtime_class() -> None:
    """One place, a P0 each second for ten minutes: one P2 goes after nineteen, and P0 hardly waits."""

    def book(driver: Driver) -> None:
        driver.service = taking(1.0)
        driver.at(0, lambda: arrivals_then_batch(driver))

    def arrivals_then_batch(driver: Driver) -> None:
        arrivals(driver, P0, every=1.0, start=0, end=MINUTES_10, tokens=1)
        driver.at(0, lambda: driver.submit("batch", P2))

    with under_both(policy(wait=600), book, MINUTES_10 + 5) as driver:
        assert seconds(driver.tickets["batch"].dispatched_at) == pytest.approx(19, abs=1)
        waits = [seconds(t.queue_wait_ns) for t in dispatched(driver) if t.priority is P0]
        assert len(waits) == 600
        assert max(waits) <= 1.001


def test_shares_do_not_depend_on_who_asks_in_one_class() -> None:
    """Two tenants of one class get equal service though one asks ten times as much."""
    parameters = policy(upstream(max_in_flight=2), wait=3600)

    def book(driver: Driver) -> None:
        driver.service = taking(1.0)
        for i in range(500):
            tenant = "quiet" if i % 10 == 0 else "loud"
            driver.at(0, lambda i=i, tenant=tenant: driver.submit(f"{i}", P1, tenant=tenant))  # type: ignore[misc]

    with under_both(parameters, book, 50) as driver:
        gone = [t.tenant for t in dispatched(driver)]
        assert len(gone) == 102
        assert gone.count("quiet") == 50
        assert gone[:20].count("quiet") == pytest.approx(10, abs=1)


def test_permanent_backlog_of_all_classes() -> None:
    """A standing backlog in every class is served about 12 : 7 : 1."""
    parameters = policy(upstream(max_in_flight=3), wait=3600)

    def book(driver: Driver) -> None:
        driver.service = taking(0.1)
        for p in Priority:
            backlog(driver, p, 900, 1)

    with under_both(parameters, book, 39.99) as driver:
        got = shares(driver)
        assert len(dispatched(driver)) == 1200
        assert got[P0] == pytest.approx(0.625, abs=0.01)
        assert got[P1] == pytest.approx(0.325, abs=0.01)
        assert got[P2] == pytest.approx(0.05, abs=0.002)
