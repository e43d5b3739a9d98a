"""An engine on trial, with the policy that sends it requests: on virtual time, probed every two seconds."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from gateway.policy.outcome import Outcome
from gateway.upstream.circuit_breaker import Admittance, BreakerRules
from gateway.upstream.health import UpstreamHealth
from tests.support.drivers import AsyncioDriver, assert_quiet
from tests.support.policy_settings import P1, nanoseconds, policy, upstream

FAILURES, OPEN_SECONDS, NO_UPSTREAM_SECONDS = 3, 10, 10


class Engine:
    """Down from the beginning, alive again from second 2 on."""

    def __init__(self) -> None:
        self.driver = AsyncioDriver(
            policy(upstream(max_in_flight=None), no_upstream_seconds=NO_UPSTREAM_SECONDS)
        )
        self.slots = self.driver.admission.upstream("gpu0")
        self.health = UpstreamHealth(
            "gpu0",
            BreakerRules(FAILURES, nanoseconds(OPEN_SECONDS)),
            self.driver.clock,
            self._on_change,
            lambda: not self.slots.usable,
            self.driver.loop,
        )
        self.at(0, lambda: self.health.probed(False, "refused"))
        self.at(2, lambda: self.health.probed(True, "probe passed"))
        for second in range(4, 100, 2):
            self.at(second, self.health.probe_passed)

    def _on_change(self, name: str, admits: Admittance, why: str) -> None:
        if admits is Admittance.TRIAL:
            self.driver.trial(name)
        else:
            self.driver.health(name, admits is Admittance.ALL)

    def at(self, second: float, action: Callable[[], None]) -> None:
        self.driver.at(nanoseconds(second), action)

    def submit(self, second: float, *names: str) -> None:
        for name in names:
            self.at(second, partial(self._submit, name))

    def _submit(self, name: str) -> None:
        self.driver.submit(name, P1)

    def ends(self, second: float, name: str, *, well: bool = True) -> None:
        """As at the edge: what it shows is told before its place is free."""

        def end() -> None:
            sent_at = self.driver.tickets[name].dispatched_at
            assert sent_at is not None
            if well:
                self.health.request_succeeded(sent_at)
                self.driver.finish(name)
            else:
                self.health.request_failed(sent_at, "upstream_timeout")
                self.driver.finish(name, outcome=Outcome.UPSTREAM_TIMEOUT)

        self.at(second, end)

    def decided(self, until: float) -> dict[str, tuple[float, str]]:
        """When and how of each request."""
        self.driver.run(until)
        return {name: (round(at / 1e9, 3), what.split("@")[0]) for at, name, what in self.driver.log}


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.health.close()
    engine.driver.close()


def test_a_long_plain_trial_keeps_nobody_out(engine: Engine) -> None:
    """The next passed probe sends a second request, whose answer lets all the others in; the first one
    goes on meanwhile."""
    engine.submit(1, "long", "second", "third", "fourth")
    engine.ends(4.5, "second")
    for name in ("third", "fourth"):
        engine.ends(6, name)
    engine.ends(62, "long")
    assert engine.decided(63) == {
        "long": (2, "dispatched"),
        "second": (4, "dispatched"),
        "third": (4.5, "dispatched"),
        "fourth": (4.5, "dispatched"),
    }
    assert engine.health.admits is Admittance.ALL
    assert_quiet(engine.driver)


def test_passed_probes_alone_open_nothing(engine: Engine) -> None:
    """While nothing is answered each probe sends one, then each time that a broken engine is left alone for;
    who waits too long is told. One failure ends it all."""
    for second in range(40):
        engine.submit(second, f"r{second}")
    decided = engine.decided(41)
    sent = [at for at, what in decided.values() if what == "dispatched"]
    assert sent == [2, 4, 6, 8, 18, 28, 38]
    assert {what for _, what in decided.values()} == {"dispatched", "rejected_no_upstream"}
    assert engine.health.admits is Admittance.TRIAL
    engine.ends(42, "r0", well=False)
    engine.driver.run(43)
    assert engine.health.admits is Admittance.NONE
    assert not engine.slots.on_trial


def test_a_failed_one_beside_the_trial(engine: Engine) -> None:
    """Nobody goes until the time is over; then the trial begins anew, with as many beside it."""
    engine.submit(1, "long", "second")
    engine.ends(5, "second", well=False)
    engine.submit(8, *(f"r{n}" for n in range(5)))
    engine.ends(14.5, "long")  # begun before this trial: says nothing
    decided = engine.decided(18)
    assert [decided[f"r{n}"][0] for n in range(2)] == [15.001, 16]
    assert engine.slots.in_flight_total == 3
