"""What a real Prometheus makes of a running gateway: no empty panel, no rule with an error."""

from pathlib import Path

import pytest

from gateway.alerting.command import rules_text
from gateway.settings import load_settings
from tests.observability.expressions import FLEET, JOB, panel_expressions
from tests.observability.real_prometheus import Prometheus, demanded, running_prometheus
from tests.observability.watched_gateway import watched_gateway

pytestmark = pytest.mark.anyio


async def test_every_panel_shows_something_and_every_rule_can_be_evaluated(tmp_path: Path) -> None:
    """Scraped each second, between traffic and after it: each query of each panel gives a number, no rule has
    an error, each recorded series is there, and a gateway that is well alarms nobody."""
    demanded("prometheus")
    async with watched_gateway() as watched:
        rules = rules_text(load_settings(watched.gateway.folder / "gateway.yaml"), JOB, "runbook")
        async with running_prometheus(watched.gateway.operations_port, rules, tmp_path) as prometheus:
            await watched.traffic()
            await prometheus.has_scraped(
                1
            )  # a series that begins with a request has a rate from its second on
            await watched.traffic()
            await prometheus.has_scraped(2)
            assert await empty_panels(prometheus, of_a_fleet=watched.shares) == []
            found = await prometheus.rules()
            assert [rule for rule in found if rule["health"] != "ok"] == []
            assert await empty_recordings(prometheus, found) == []
            assert [rule["name"] for rule in found if rule.get("state") == "firing"] == []


async def empty_panels(prometheus: Prometheus, *, of_a_fleet: bool) -> list[str]:
    asked = [each for each in panel_expressions() if of_a_fleet or FLEET not in each.text]
    return [str(each) for each in asked if not await prometheus.ask(each.text)]


async def empty_recordings(prometheus: Prometheus, rules: list[dict[str, str]]) -> list[str]:
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    assert recorded
    return [name for name in recorded if not await prometheus.ask(name)]
