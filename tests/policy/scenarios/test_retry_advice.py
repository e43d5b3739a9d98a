"""When to come back to a queue: what is advised is near what will be true."""

from tests.support.drivers import VirtualDriver
from tests.support.policy_settings import P0, P2, policy, upstream
from tests.support.workloads import taking

SECOND = 1_000_000_000


def advised(driver: VirtualDriver, name: str) -> float | None:
    """Seconds; None where nothing is known, which becomes a second."""
    refusal = driver.tickets[name].refusal
    assert refusal is not None
    return None if refusal.retry_after_ns is None else refusal.retry_after_ns / SECOND


def test_a_queue_that_fills_in_an_instant() -> None:
    """A burst into a silent class fills a queue that empties in ten seconds: whoever finds it full is not
    told that coming back is of no use (more than a minute)."""
    driver = VirtualDriver(policy(upstream(max_in_flight=1), max_queued_requests=100))
    driver.service = taking(0.1)

    def burst() -> None:
        for n in range(102):
            driver.submit(f"{n}", P2)

    driver.at(100 * SECOND, burst)
    driver.run(150)
    assert max(at for at, _, what in driver.log if what.startswith("dispatched")) <= 111 * SECOND
    told = advised(driver, "101")
    assert told is None or told <= 20


def test_a_class_that_is_seldom_asked() -> None:
    """One that waits in vain in a class with a request now and then is not told to wait as long as those are
    apart: how seldom they come says nothing of how fast places come free."""
    driver = VirtualDriver(policy(upstream(max_in_flight=1), wait=1))
    for n in range(3):
        driver.at((10 + 9 * n) * SECOND, lambda n=n: driver.submit(f"seldom{n}", P2))  # type: ignore[misc]
        driver.at((10 + 9 * n) * SECOND + 1, lambda n=n: driver.finish(f"seldom{n}"))  # type: ignore[misc]
    driver.at(36 * SECOND, lambda: driver.submit("runs", P0))  # type: ignore[arg-type, return-value]
    driver.at(36 * SECOND + 1, lambda: driver.submit("late", P2))  # type: ignore[arg-type, return-value]
    driver.at(38 * SECOND, lambda: driver.finish("runs"))
    driver.run(60)
    told = advised(driver, "late")
    assert told is None or told <= 3
