"""Stories as data: rows of (second, what happens, what is decided then), run under both drivers.

All decisions of a run must be told by its rows: an unexpected one fails the story as a missing one does.
A decision that nobody's action causes (a time-out, tokens that have come) has a row with `nothing`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.policy.engine_load import EngineLoad
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Priority
from tests.support.drivers import Driver, assert_quiet
from tests.support.policy_settings import nanoseconds

Action = Callable[[Driver], None]
Row = tuple[float, Action | None, dict[str, str]]

nothing = None


def submit(name: str, priority: Priority, tokens: int = 1, **given: Any) -> Action:
    return lambda driver: void(driver.submit(name, priority, tokens, **given))


def finish(name: str, used: int | None = None, **given: Any) -> Action:
    return lambda driver: driver.finish(name, used, **given)


def first_token(name: str) -> Action:
    return lambda driver: driver.first_token(name)


def cancel(name: str) -> Action:
    return lambda driver: driver.cancel(name)


def health(name: str, healthy: bool) -> Action:
    return lambda driver: driver.health(name, healthy)


def trial(name: str) -> Action:
    """The upstream may get one request, to show whether it serves again."""
    return lambda driver: driver.trial(name)


def requeue(name: str, reached: bool = True) -> Action:
    return lambda driver: driver.requeue(name, reached)


def engine_load(name: str = "gpu0", **told: Any) -> Action:
    """The upstream's metrics page is read; `told` has the names of EngineLoad."""
    return lambda driver: driver.engine_load(name, EngineLoad(**told))


def reconfigure(parameters: PolicyParameters) -> Action:
    return lambda driver: driver.reconfigure(parameters)


def drain() -> Action:
    return lambda driver: driver.drain()


def both(*actions: Action) -> Action:
    """Several actions at one instant, in this order."""

    def act(driver: Driver) -> None:
        for action in actions:
            action(driver)

    return act


def see(check: Callable[[Driver], None]) -> Action:
    """Look, without touching: the check asserts."""
    return check


def void(_: object) -> None:
    return None


@dataclass(frozen=True)
class Story:
    title: str
    parameters: PolicyParameters
    rows: Sequence[Row]
    quiet: bool = True
    """At the end nothing waits and nothing is in flight."""
    after: Callable[[Driver], None] | None = field(default=None)


def tell(story: Story, kind: Callable[[PolicyParameters], Driver]) -> Driver:
    """Run a story under one driver and compare its decisions with the rows (instants rounded to 1 ns)."""
    driver = kind(story.parameters)
    try:
        for at, action, _ in story.rows:
            if action is not None:
                driver.at(nanoseconds(at), lambda action=action: action(driver))  # type: ignore[misc]
        driver.run(max(row[0] for row in story.rows) + 1)
        expected = [
            (nanoseconds(at), name, what) for at, _, told in story.rows for name, what in told.items()
        ]
        told = "\n".join(f"  {at / 1e9:.6f} {name} {what}" for at, name, what in driver.log)
        assert len(driver.log) == len(expected), f"decided:\n{told}"
        for seen, wanted in zip(driver.log, expected, strict=True):
            what = seen[2] if "@" in wanted[2] else seen[2].split("@")[0]
            assert (seen[1], what) == wanted[1:], f"wanted {wanted}, decided:\n{told}"
            assert abs(seen[0] - wanted[0]) <= 1, f"wanted {wanted}, decided:\n{told}"
        if story.quiet:
            assert_quiet(driver)
        if story.after is not None:
            story.after(driver)
    finally:
        driver.close()
    return driver
