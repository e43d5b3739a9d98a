"""Every panel and every rule asks for what a running gateway shows: names and labels."""

from collections.abc import Set

import promql_parser as promql
import pytest

from gateway.settings import Settings
from gateway.telemetry.catalogue import SERIES_NAMES
from tests.observability.expressions import (
    Expression,
    known_with_recorded,
    panel_expressions,
    problems,
    rule_expressions,
)

pytestmark = pytest.mark.anyio

Scraped = dict[str, Set[str]]
OWN_ENGINES = Settings.model_validate(
    {"upstreams": [{"name": name, "url": f"http://{name}:1", "models": [name]} for name in ("chat", "code")]}
)


@pytest.mark.parametrize("expression", [*panel_expressions(), *rule_expressions(Settings())], ids=str)
def test_it_is_promql(expression: Expression) -> None:
    """Whatever is chosen in a dashboard's variables, Prometheus can read it."""
    promql.parse(expression.text)


async def test_every_metric_can_be_seen(scraped: Scraped) -> None:
    """The traffic leaves nothing of the catalogue unseen, so that no query is checked against nothing."""
    assert SERIES_NAMES - scraped.keys() == set()


async def test_panels_ask_for_what_there_is(scraped: Scraped) -> None:
    """Every series and label that a dashboard matches, groups by or shows in a legend is on the page."""
    wrong = [(str(e), found) for e in panel_expressions() if (found := problems(e, scraped))]
    assert wrong == []


@pytest.mark.parametrize("settings", [Settings(), OWN_ENGINES], ids=["default", "own engines"])
async def test_rules_ask_for_what_there_is(scraped: Scraped, settings: Settings) -> None:
    """The same for rules, which may use what others record, and for the labels that annotations show."""
    known = known_with_recorded(scraped, settings)
    wrong = [(str(e), found) for e in rule_expressions(settings) if (found := problems(e, known))]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "shown", "found"),
    [
        ("qos_gateway_queue_depths", "", "no series qos_gateway_queue_depths"),
        ('qos_gateway_queue_depth{prio="P0"}', "", "qos_gateway_queue_depth has no label prio"),
        ("sum by (tenant) (qos_gateway_queue_depth)", "", "nothing to aggregate by: tenant"),
        ("up / on (priority) up", "", "nothing to match on: priority"),
        ("sum by (job) (qos_gateway_queue_depth)", "priority", "shows priority, which the result"),
        ("rate(qos_gateway_queue_depth[5m])", "upstream", "shows upstream, which the result"),
    ],
)
async def test_a_planted_fault_is_found(scraped: Scraped, text: str, shown: str, found: str) -> None:
    """The check sees a wrong name or label wherever one can be written."""
    wrong = problems(Expression("planted", text, frozenset(shown.split())), scraped)
    assert any(each.startswith(found) for each in wrong), wrong
