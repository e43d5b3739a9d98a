"""One line for each change of the rates."""

import io
import json

import pytest

from gateway.policy.events import RatesChanged
from gateway.telemetry.change_log import ChangeLog
from gateway.telemetry.log_setup import configure_logging

pytestmark = pytest.mark.usefixtures("own_logging")


def lines(*changes: RatesChanged) -> list[dict]:
    stream = io.StringIO()
    output = configure_logging("info", "json", stream)
    log = ChangeLog()
    for change in changes:
        log.rates_changed(change)
    output.close()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_tells_what_changed_and_why() -> None:
    """Rates in tokens per second, and the figures that the law went by; advice is called so."""
    facts = (5, "severity", "gap", "down", (600_000, 350_000, 50_000), (600_000, 300_000, 10_000))
    taken = RatesChanged(*facts, {"x_gap": 1.23456}, ("a", "b"))
    advice = RatesChanged(*facts, {}, ("a",), applied=False)
    one, other = lines(taken, advice)
    assert one.pop("ts")
    assert one == {
        "level": "info",
        "event": "rates changed",
        "law": "severity",
        "reason": "gap",
        "direction": "down",
        "upstreams": ["a", "b"],
        "old_capacity": 1000.0,
        "capacity": 910.0,
        "rates": {"P0": 600.0, "P1": 300.0, "P2": 10.0},
        "x_gap": 1.2346,
    }
    assert other["event"] == "rates would change"
