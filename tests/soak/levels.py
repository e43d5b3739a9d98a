"""The arithmetic of the buckets, followed from outside to a thousandth of a token."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.simulator.decision_log import with_older
from tests.soak.processes import ENGINE_NAMES, WatchedGateway
from tests.soak.report import Check

SHARES = {"P0": 0.60, "P1": 0.35, "P2": 0.05}
ROUNDING_TOKENS = 0.001
"""Of levels that are told as floats."""


@dataclass(frozen=True, slots=True)
class Levels:
    """What the buckets held (tokens, by class), at an instant between `since` and `until` (monotonic ns)."""

    tokens: dict[str, float]
    since: int
    until: int

    @classmethod
    async def read(cls, gateway: WatchedGateway) -> "Levels":
        since = time.monotonic_ns()
        classes = (await gateway.state())["classes"]
        levels = {name: each["bucket_tokens"] for name, each in classes.items()}
        return cls(levels, since, time.monotonic_ns())


def inflow_checks(before: Levels, after: Levels, spent: dict[str, int], log: Path) -> list[Check]:
    """Of each class: it has now what it had, less what was spent, and what has flowed in since: its share of
    the capacity of the engines that were up. No bucket was full meanwhile, so nothing was lent."""
    changes = sorted(_health_changes(log))
    checks = []
    for name, share in SHARES.items():
        rates = [(at, share * capacity) for at, capacity in capacities(changes)]
        inflow = _integral(rates, before.until, after.until)
        uncertain = (
            share * len(ENGINE_NAMES) * (before.until - before.since + after.until - after.since) / 1e9
        )
        missing = before.tokens[name] - spent[name] / 1000 + inflow - after.tokens[name]
        allowed = uncertain + ROUNDING_TOKENS
        figure = f"{missing:+.4f} of {spent[name] / 1000:,.0f} spent"
        checks.append(
            Check(f"tokens missing in bucket {name}", figure, f"0 ± {allowed:.4f}", abs(missing) <= allowed)
        )
    return checks


def capacities(changes: Sequence[tuple[int, str, bool]]) -> list[tuple[int, float]]:
    """From when on (ns) which capacity held: a token a second for each engine that was up. With none up it
    stays as it was."""
    up = set(ENGINE_NAMES)
    found = [(0, float(len(up)))]
    for at, engine, healthy in changes:
        (up.add if healthy else up.discard)(engine)
        if up:
            found.append((at, float(len(up))))
    return found


def _integral(rates: Sequence[tuple[int, float]], start: int, end: int) -> float:
    """Of a rate per second that holds from each instant (ns) on to the next."""
    total = 0.0
    for (at, rate), (until, _) in zip(rates, [*rates[1:], (end, 0.0)], strict=True):
        total += rate * max(min(until, end) - max(at, start), 0) / 1e9
    return total


def _health_changes(log: Path) -> list[tuple[int, str, bool]]:
    lines = map(json.loads, _lines_with(b'"event":"health"', log))
    return [(line["at_ns"], line["upstream"], line["healthy"]) for line in lines]


def logged_requests(log: Path) -> int:
    return sum(1 for _ in _lines_with(b'"event":"request"', log))


def _lines_with(mark: bytes, log: Path) -> Iterator[bytes]:
    """Of all files of a decision log."""
    for path in with_older(log):
        with path.open("rb") as file:
            yield from (line for line in file if mark in line)
