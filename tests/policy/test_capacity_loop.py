"""When the loop ticks, what other engines and other settings do to its rates, and what it tells."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.policy.admission import Delivered
from gateway.policy.class_rates import RateLimits, Rates
from gateway.policy.clock import NEVER
from gateway.policy.control_signals import Readings
from gateway.policy.events import RatesChanged
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.rate_controller import Step
from gateway.policy.request import PRIORITIES, Usage
from tests.support.control import parameters
from tests.support.drivers import DRIVERS, Driver, VirtualDriver, assert_quiet
from tests.support.policy_settings import P0, P1, P2, nanoseconds, upstream

ENGINE = upstream(tokens_per_second=1000, max_in_flight=None)


class Scripted:
    """A law that goes where it is told, once a tick."""

    name = "severity"
    severity = None

    def __init__(self, *capacities: int | None) -> None:
        self.capacities = list(capacities)
        self.told: list[Readings] = []

    def decide(self, readings: Readings, rates: Rates, limits: RateLimits) -> Step | None:
        self.told.append(readings)
        capacity = self.capacities.pop(0) if self.capacities else None
        return None if capacity is None else Step(limits.moved_to(rates, capacity * 1000), "script")


def made(law: str = "severity", *upstreams: Any, **given: Any) -> PolicyParameters:
    return replace(parameters(law, **given), upstreams=upstreams or (ENGINE,))


def driven(
    kind: type[Driver], settings: PolicyParameters, *capacities: int | None
) -> tuple[Driver, Scripted]:
    driver, law = kind(settings), Scripted(*capacities)
    driver.changes = []  # type: ignore[attr-defined]
    driver.admission._observer.rates_changed = driver.changes.append  # type: ignore[attr-defined, method-assign]
    driver.pool.control.law = law
    return driver, law


def told_at(law: Scripted) -> list[float]:
    return [readings.at / 1e9 for readings in law.told]


# ── ticks ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", DRIVERS)
def test_it_ticks_each_second_while_there_are_requests(kind: type[Driver]) -> None:
    """From a second after the first one's arrival; once more after the last one, and then it rests."""
    driver, law = driven(kind, made())
    for name, at, end in (("a", 10.25, 12.5), ("b", 100, 100.5)):
        driver.at(nanoseconds(at), lambda name=name: driver.submit(name, P0))  # type: ignore[misc]
        driver.at(nanoseconds(end), lambda name=name: driver.finish(name))  # type: ignore[misc]
    driver.run(200)
    assert told_at(law) == [11.25, 12.25, 13.25, 101]
    assert driver.admission.next_deadline() == NEVER
    assert_quiet(driver)
    driver.close()


@pytest.mark.parametrize("kind", DRIVERS)
def test_it_goes_on_while_c_is_below_c0(kind: type[Driver]) -> None:
    """A cut for a load that is gone heals without anybody asking."""
    driver, law = driven(kind, made(), 500, None, None, None, 800, None, 1000, None)
    driver.at(0, lambda: driver.submit("a", P0))
    driver.at(nanoseconds(0.5), lambda: driver.finish("a"))
    driver.run(60)
    assert told_at(law) == [1, 2, 3, 4, 5, 6, 7]
    assert [round(sum(c.new_rates) / 1000) for c in driver.changes] == [500, 800, 1000]  # type: ignore[attr-defined]
    driver.close()


def test_it_does_not_wake_anybody_under_static() -> None:
    """Nor while nothing happens."""
    for law in ("static", "severity", "compliance"):
        driver = VirtualDriver(made(law))
        assert driver.admission.next_deadline() == NEVER
        driver.submit("a", P0)
        assert (driver.admission.next_deadline() == NEVER) is (law == "static")


def test_ticks_that_were_missed_are_not_made_up() -> None:
    """A process that was busy for some seconds ticks once, and then at the times it would have."""
    driver, law = driven(VirtualDriver, made())
    driver.submit("a", P0)
    driver.clock.advance(4.3)
    driver.admission.advance()
    assert told_at(law) == [4.3]
    assert driver.admission.next_deadline() == nanoseconds(5)


def test_changed_rates_are_in_force_at_once() -> None:
    """Who waits for tokens is paid when the new rate has them, and a tenant's credit follows."""
    settings = made(capacity={"min_burst_tokens": 0, "burst_seconds": 1.0})
    slow, _ = driven(VirtualDriver, settings)
    fast, _ = driven(VirtualDriver, settings, 2000)
    for driver in (slow, fast):
        for i in range(3):
            driver.at(0, lambda i=i, driver=driver: driver.submit(f"r{i}", P0, 1000))  # type: ignore[misc]
        driver.run(1.0)
    assert fast.pool.buckets.rates == [1_200_000, 700_000, 100_000]
    assert fast.pool.throttled[P0].counters.credit == 2 * slow.pool.throttled[P0].counters.credit
    slow.run(10)
    fast.run(10)
    assert fast.log[-1][0] < slow.log[-1][0]


# ── engines and settings ─────────────────────────────────────────────────────────────────────────────────


def two_engines(*capacities: int | None) -> Driver:
    engines = (upstream("a", tokens_per_second=600), upstream("b", tokens_per_second=400))
    driver, _ = driven(VirtualDriver, made("severity", *engines), *capacities)
    return driver


def test_an_engine_that_goes_takes_its_part_along() -> None:
    """C and all rates fall in proportion and come back with it; each time that is told."""
    driver = two_engines(800)
    driver.at(0, lambda: driver.submit("r", P0))
    driver.at(nanoseconds(2), lambda: driver.health("b", False))
    driver.run(3)
    assert driver.pool.buckets.rates == [360_000, 114_000, 6_000]
    assert driver.pool.control.limits.nominal == 600_000
    driver.health("b", True)
    assert driver.pool.buckets.rates == [600_000, 190_000, 10_000]
    told = [(c.reason, c.direction, c.upstreams) for c in driver.changes]  # type: ignore[attr-defined]
    assert told == [
        ("script", "down", ("a", "b")),
        ("capacity", "down", ("a", "b")),
        ("capacity", "up", ("a", "b")),
    ]


def test_without_any_engine_c_keeps_its_last_value() -> None:
    """There is nothing to be in proportion to."""
    driver = two_engines(800)
    driver.at(0, lambda: driver.submit("r", P0))
    for name in "ab":
        driver.at(nanoseconds(2), lambda name=name: driver.health(name, False))  # type: ignore[misc]
    driver.run(3)
    assert sum(driver.pool.buckets.rates) == 320_000
    driver.health("a", True)
    assert sum(driver.pool.buckets.rates) == 480_000


def reloaded(settings: PolicyParameters, *capacities: int | None) -> Driver:
    """C at 800, then these settings."""
    driver, _ = driven(VirtualDriver, made(), 800)
    driver.at(0, lambda: driver.submit("r", P0))
    driver.at(nanoseconds(2), lambda: driver.reconfigure(settings))
    driver.run(2)
    return driver


def test_other_settings_keep_c_where_it_was() -> None:
    """Relative to C0; the law goes on with what it knows."""
    driver = reloaded(made(capacity={"burst_seconds": 2.0}))
    assert driver.pool.buckets.rates == [600_000, 190_000, 10_000]
    assert isinstance(driver.pool.control.law, Scripted)
    driver = reloaded(made("severity", replace(ENGINE, tokens_per_second=2000)))
    assert driver.pool.buckets.rates == [1_200_000, 380_000, 20_000]


def test_other_floors_and_shares_are_kept_at_once() -> None:
    """A class that is below a new floor is lifted; other shares are cut as before, at the same C."""
    driver = reloaded(made(classes={P2: {"floor": 0.04}}))
    assert driver.pool.buckets.rates == [600_000, 160_000, 40_000]
    driver = reloaded(made(classes={P0: {"share": 0.5, "floor": 0.3}, P1: {"share": 0.45, "floor": 0.1}}))
    assert driver.pool.buckets.rates == [500_000, 290_000, 10_000]


def test_another_law_begins_at_the_shares() -> None:
    """And `static` stays there."""
    driver = reloaded(made("static"))
    assert driver.pool.buckets.rates == [600_000, 350_000, 50_000]
    driver = reloaded(made("compliance"))
    assert driver.pool.buckets.rates == [600_000, 350_000, 50_000]
    assert driver.pool.control.law.name == "compliance"


# ── observe ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("observed", [(P0, P1, P2), (P1,)])
def test_where_a_class_is_only_observed_c_stays(observed: tuple) -> None:
    """The law's advice is told, once as long as it is the same, and not taken."""
    classes = {p: {"observe": True} for p in observed}
    driver, _ = driven(VirtualDriver, made(classes=classes), *[500] * 10)
    driver.at(0, lambda: driver.submit("a", P0))
    driver.run(8)
    assert driver.pool.buckets.rates == [600_000, 350_000, 50_000]
    (change,) = driver.changes  # type: ignore[attr-defined]
    assert (change.applied, change.direction, sum(change.new_rates)) == (False, "down", 500_000)
    assert driver.pool.control.advises_only
    assert driver.pool.control.advice.reason == "script"


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_change_is_told_with_its_reasons() -> None:
    """Time, law, inputs, old and new rates, reason; the last ones can be read."""
    settings = made("severity", upstream("gpu0", tokens_per_second=1000))
    driver = VirtualDriver(settings)
    changes: list[RatesChanged] = []
    driver.admission._observer.rates_changed = changes.append  # type: ignore[method-assign]
    pool = driver.pool
    for _ in range(5):
        pool.slots[0].prefill.learn(1, 0)
    driver.submit("a", P0)
    driver.at(nanoseconds(0.7), lambda: driver.first_token("a"))
    driver.run(1)
    (change,) = changes
    assert (change.at, change.law, change.reason, change.direction) == (
        nanoseconds(1), "severity", "wait", "down",
    )  # fmt: skip
    assert change.inputs["x_wait"] == pytest.approx(700 / 150, abs=0.01)
    assert change.old_rates == (600_000, 350_000, 50_000)
    assert tuple(pool.buckets.rates) == change.new_rates == (590_000, 100_000, 10_000)
    assert [c.reason for c in pool.control.last_changes] == ["wait"]
    assert pool.control.severity == pytest.approx(700 / 150, abs=0.01)


def test_verdicts_are_those_of_the_engine() -> None:
    """From dispatch, of what an engine served; a wait for a place is not its fault, and an error no load."""
    driver, law = driven(VirtualDriver, made("severity", upstream(tokens_per_second=1000, max_in_flight=1)))

    def played(ticket: Any) -> tuple[float, float] | None:
        return (0.5, 0.9) if ticket.ask.request_id != "e" else None

    driver.service = played
    for name in "abc":
        driver.at(0, lambda name=name: driver.submit(name, P0))  # type: ignore[misc]
    driver.run(4)
    slo = driver.admission.slo_monitor
    assert slo.attainment(P0, "ttft", "arrival", "admitted", driver.clock.now()) == pytest.approx(1 / 3)
    assert [v.kept for v in law.told[-1].verdicts[P0]] == [True, True, True]
    driver.submit("e", P0)
    driver.finish("e", outcome=Outcome.UPSTREAM_ERROR, delivered=Delivered(Usage(1, 0)))
    driver.submit("f", P0)
    driver.run(6)
    assert len(law.told[-1].verdicts[P0]) == 4
    assert [len(v) for v in law.told[-1].verdicts[1:]] == [0] * (len(PRIORITIES) - 1)
