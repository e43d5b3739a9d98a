"""Virtual time: an event heap whose order is fixed, and the policy driven by it."""

import pytest

from gateway.policy.admission import Admission
from gateway.policy.request import Stage, Ticket
from gateway.simulator.virtual_time import VirtualGate, VirtualTime
from tests.support.drivers import VirtualDriver
from tests.support.policy_settings import P0, P1, ask, nanoseconds, policy, upstream
from tests.support.workloads import arrivals, taking


def test_events_run_by_time_then_by_booking() -> None:
    """Actions run in the order of their times, those of one instant in the order of their booking."""
    time, told = VirtualTime(), []
    for name, at in (("c", 30), ("a", 10), ("b1", 20), ("b2", 20), ("b3", 20)):
        time.at(at, lambda name=name: told.append((name, time.now)))  # type: ignore[misc]
    time.run()
    assert told == [("a", 10), ("b1", 20), ("b2", 20), ("b3", 20), ("c", 30)]
    assert time.now == 30


def test_last_means_after_all_others_of_the_instant() -> None:
    """What is booked as last runs after everything else of its instant, even what is booked meanwhile."""
    time, told = VirtualTime(), []
    time.at(10, lambda: told.append("last"), last=True)
    time.at(10, lambda: time.at(10, lambda: told.append("booked meanwhile")))
    time.at(11, lambda: told.append("after"))
    time.run()
    assert told == ["booked meanwhile", "last", "after"]


def test_the_past_is_now() -> None:
    """An action booked for a time already passed runs now; the clock never goes back."""
    time, told = VirtualTime(start=100), []
    time.at(5, lambda: told.append(time.now))
    time.after(7, lambda: time.at(3, lambda: told.append(time.now)))
    time.run()
    assert told == [100, 107]


def test_run_until_includes_its_end_and_stands_there() -> None:
    """Events at the end are run, later ones kept, and the clock stands at the end in any case."""
    time, told = VirtualTime(), []
    for at in (10, 20, 21):
        time.at(at, lambda at=at: told.append(at))  # type: ignore[misc]
    time.run(20)
    assert (told, time.now) == ([10, 20], 20)
    time.run(50)
    assert (told, time.now) == ([10, 20, 21], 50)
    time.run(60)
    assert time.now == 60


def test_actions_may_book_actions() -> None:
    """A chain of actions runs to its end, each at its time."""
    time, told = VirtualTime(), []

    def tick() -> None:
        told.append(time.now)
        if len(told) < 5:
            time.after(100, tick)

    time.at(0, tick)
    time.run()
    assert told == [0, 100, 200, 300, 400]


def test_the_gate_wakes_the_policy_at_its_deadlines() -> None:
    """Requests that nobody touches end at their own time, though a later deadline was set first."""
    time = VirtualTime()
    told: list[tuple[int, str]] = []

    def decided(ticket: Ticket) -> None:
        told.append((time.now, ticket.ask.request_id))

    admission = Admission(policy(upstream(max_in_flight=0)), time.clock)
    gate = VirtualGate(admission, time, decided)
    for name, timeout in (("late", 9), ("early", 2), ("middle", 5)):
        admission.submit(ask(name, P1, timeout=timeout))
        gate.settle()
    time.run()
    prefill = 1  # ns; the client needs that of its time-out
    ends = ((2, "early"), (5, "middle"), (9, "late"))
    assert told == [(nanoseconds(at) - prefill, name) for at, name in ends]


def test_a_gate_without_a_listener_still_drives() -> None:
    """Nobody need listen for the policy to go on."""
    time = VirtualTime()
    admission = Admission(policy(wait=1), time.clock)
    gate = VirtualGate(admission, time)
    first, second = admission.submit(ask("a", P0)), admission.submit(ask("b", P0))
    gate.settle()
    time.run()
    assert (first.stage, second.stage) == (Stage.DISPATCHED, Stage.ENDED)
    assert time.now == nanoseconds(1)


def test_time_passes_tokens_that_are_a_hair_short() -> None:
    """Waiting for tokens at rates that divide badly never stands still: each wake-up finds them there."""
    parameters = policy(
        upstream(max_in_flight=None, tokens_per_second=7.777_777),
        capacity={"burst_seconds": 0.3, "min_burst_tokens": 0},
    )
    driver = VirtualDriver(parameters)
    for i in range(200):
        driver.submit(f"{i}", P1, 3)
    wakes = 0
    advance = driver.admission.advance

    def counted() -> None:
        nonlocal wakes
        wakes += 1
        advance()

    driver.admission.advance = counted  # type: ignore[method-assign]
    driver.run(3000)
    assert len(driver.log) == 200
    assert wakes <= 2 * 200 + 10


def test_the_same_scenario_gives_the_same_run() -> None:
    """Two runs of one busy scenario agree in every decision and every instant."""

    def run() -> list[tuple[int, str, str]]:
        driver = VirtualDriver(
            policy(
                upstream(max_in_flight=3, tokens_per_second=200),
                capacity={"burst_seconds": 0.5, "min_burst_tokens": 0},
                wait=1,
            )
        )
        driver.service = taking(0.25)
        arrivals(driver, P0, every=0.011, start=0, end=5, tokens=3)
        arrivals(driver, P1, every=0.013, start=0, end=5, tokens=2)
        driver.run(10)
        return driver.log

    first = run()
    assert first == run()
    assert len({what for _, _, what in first}) == pytest.approx(3, abs=1)
