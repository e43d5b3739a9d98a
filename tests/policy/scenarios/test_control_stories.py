"""A law, the policy around it and an engine that plays along, under both drivers."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gateway.policy.parameters import PolicyParameters
from tests.support.control import parameters
from tests.support.drivers import DRIVERS, Driver, assert_quiet, assert_same_decisions
from tests.support.policy_settings import P0, P1, P2, nanoseconds, upstream


def settings(law: str, **engine: Any) -> PolicyParameters:
    given = {"tokens_per_second": 1000, "max_in_flight": None, **engine}
    return replace(parameters(law), upstreams=(upstream(**given),))


def told(kind: type[Driver], law: str, **engine: Any) -> tuple[Driver, list[Any]]:
    driver, changes = kind(settings(law, **engine)), []
    driver.admission._observer.rates_changed = changes.append  # type: ignore[method-assign]
    return driver, changes


def asks(driver: Driver, priority: Any, every: float, until: float, tokens: int = 1) -> None:
    at, number = 0.0, 0
    while at < until:
        name = f"{priority.name}-{number}"
        driver.at(
            nanoseconds(at),
            lambda name=name: driver.submit(name, priority, tokens),  # type: ignore[misc]
        )
        at, number = at + every, number + 1


@pytest.mark.parametrize("kind", DRIVERS)
def test_the_classic_rule(kind: type[Driver]) -> None:
    """P0 is served as promised and uses a tenth of its rate: after five seconds one change, P0 − 5 %, P1 and
    P2 up by it. Then first tokens take two seconds: C × 0.90, P2 falls first, and five seconds later at the
    soonest."""
    driver, changes = told(kind, "compliance")
    slow_from = nanoseconds(8)
    driver.service = lambda ticket: (2.0, 2.5) if ticket.dispatched_at >= slow_from else (0.1, 0.5)
    asks(driver, P0, 0.1, 30, tokens=6)
    driver.run(16)
    first, second = changes[:2]
    assert (first.at, first.reason, first.direction) == (
        nanoseconds(5), "p0_does_not_use_its_rate", "shift",
    )  # fmt: skip
    assert first.new_rates == (570_000, 376_250, 53_750)
    assert (second.reason, second.direction) == ("p0_below_promise", "down")
    assert sum(second.new_rates) == 900_000
    assert second.new_rates[P0] == 570_000
    assert second.new_rates[P2] == 10_000
    assert second.at >= nanoseconds(10)
    assert all(later.at - earlier.at >= nanoseconds(5) for earlier, later in pairwise(changes))
    driver.close()


@pytest.mark.parametrize("law", ["severity", "compliance"])
@pytest.mark.parametrize("kind", DRIVERS)
def test_the_gateways_own_queue_is_no_slow_engine(kind: type[Driver], law: str) -> None:
    """Requests wait for seconds for the one place there is, and each is then served at once: C stays."""
    driver, changes = told(kind, law, max_in_flight=1)
    driver.service = lambda _: (0.05, 0.5)
    asks(driver, P0, 0.4, 30)
    driver.run(60)
    waits = [r.queue_wait_ns for r in driver.endings.records]
    assert max(waits) > nanoseconds(5)
    assert [c for c in changes if c.direction != "shift"] == []
    driver.close()


def test_both_drivers_change_the_same_rates_at_the_same_time() -> None:
    """Under load that the laws act on: the same decisions and the same changes."""
    for law in ("severity", "compliance"):
        seen = []
        for kind in DRIVERS:
            driver, changes = told(kind, law)
            slots = driver.pool.slots[0]
            driver.service = lambda ticket, slots=slots: (  # type: ignore[misc]
                0.02 * slots.in_flight_total,
                0.05 * slots.in_flight_total + 0.2,
            )
            asks(driver, P0, 0.11, 40, tokens=80)
            asks(driver, P1, 0.07, 40, tokens=60)
            asks(driver, P2, 0.5, 40, tokens=300)
            driver.run(4000)
            assert_quiet(driver)
            driver.close()
            seen.append((driver.log, changes))
        (one, its), (other, others) = seen
        assert_same_decisions(one, other)
        assert its == others
        assert len(its) > 3
