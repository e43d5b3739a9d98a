"""Whole workloads: who asks how often, run under both drivers and compared, then held against an oracle."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Priority, Ticket
from tests.support.drivers import DRIVERS, Driver, Service, assert_same_decisions
from tests.support.policy_settings import nanoseconds


def at_once(_: Ticket) -> tuple[float, float]:
    """An engine that answers within a millisecond."""
    return 0.001, 0.001


def taking(seconds: float) -> Service:
    return lambda _: (seconds, seconds)


def backlog(driver: Driver, priority: Priority, count: int, tokens: int, at: float = 0) -> None:
    """So many requests at one instant."""

    def submit_all() -> None:
        for i in range(count):
            driver.submit(f"{priority.name} {at} {i}", priority, tokens)

    driver.at(nanoseconds(at), submit_all)


def arrivals(
    driver: Driver, priority: Priority, every: float, start: float, end: float, tokens: int, **given: object
) -> None:
    """One request each `every` seconds."""
    count = round((end - start) / every)
    for i in range(count):
        name = f"{priority.name} {start} {i}"
        driver.at(
            nanoseconds(start + i * every),
            lambda name=name: driver.submit(name, priority, tokens, **given),  # type: ignore[misc]
        )


def clients(driver: Driver, counts: dict[Priority, int], tokens: int = 1, pause: float = 0) -> None:
    """Closed loop: each client asks again as soon as it was answered, or a second after it was refused."""
    asked = 0

    def submit(priority: Priority) -> None:
        nonlocal asked
        asked += 1
        driver.submit(f"{priority.name} {asked}", priority, tokens)

    def again(ticket: Ticket) -> None:
        driver.after(pause if ticket.refusal is None else 1.0, lambda: submit(ticket.priority))

    driver.on_end = again
    for priority, count in counts.items():
        for _ in range(count):
            driver.at(0, lambda priority=priority: submit(priority))  # type: ignore[misc]


@contextmanager
def under_both(
    parameters: PolicyParameters,
    book: Callable[[Driver], None],
    until: float,
) -> Iterator[Driver]:
    """Run a workload under both drivers, see that they decide the same, and give one of them to look at."""
    drivers = [kind(parameters) for kind in DRIVERS]
    try:
        for driver in drivers:
            book(driver)
            driver.run(until)
        assert_same_decisions(drivers[0].log, drivers[1].log)
        yield drivers[0]
    finally:
        for driver in drivers:
            driver.close()


def dispatched(driver: Driver, start: float = 0, end: float = 1e9) -> list[Ticket]:
    """Tickets dispatched in [start, end)."""
    span = range(nanoseconds(start), nanoseconds(end))
    return [
        driver.tickets[name]
        for at, name, what in driver.log
        if at in span and what.startswith(("dispatched", "promoted"))
    ]


def paid_tokens(driver: Driver, priority: Priority, start: float, end: float) -> int:
    """Tokens of the class dispatched in [start, end)."""
    return sum(t.cost for t in dispatched(driver, start, end) if t.priority is priority) // 1000


def seconds(nanoseconds_: int | None) -> float:
    assert nanoseconds_ is not None
    return nanoseconds_ / NANOSECONDS_PER_SECOND
