"""The dashboards as files: generated, complete, and each panel in a place of its own."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grafana.generate import FOLDER, differences, files, main
from grafana.model import Panel, Query, Row, placed
from grafana.queries import series
from tests.observability.expressions import ROOT, VARIABLE

DASHBOARDS = {name: json.loads(content) for name, content in files().items()}
Json = dict[str, Any]

_BUILT_IN = {"__rate_interval", "__range"}


def panels(dashboard: Json) -> Iterator[Json]:
    yield from (panel for panel in dashboard["panels"] if panel["type"] != "row")


@pytest.fixture(params=DASHBOARDS.values(), ids=DASHBOARDS)
def dashboard(request: pytest.FixtureRequest) -> Json:
    found: Json = request.param
    return found


def test_the_files_are_as_generated() -> None:
    """`python -m grafana.generate --check` finds nothing to say."""
    assert differences(FOLDER) == []


def test_a_file_that_was_changed_is_found(tmp_path: Path) -> None:
    """So are one that is missing and one that nobody generates."""
    for name, content in files().items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert differences(tmp_path) == []
    (tmp_path / "engines.json").unlink()
    (tmp_path / "controller.json").write_text("{}", encoding="utf-8")
    (tmp_path / "old.json").write_text("{}", encoding="utf-8")
    found = [line.removeprefix(f"{tmp_path}/").split(":")[0] for line in differences(tmp_path)]
    assert found == ["engines.json", "old.json", "controller.json"]


def test_a_wrong_option_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 and a word on how it is used; nothing is written."""
    assert main(["--chek"]) == 2
    assert "--check" in capsys.readouterr().err


def test_every_panel_explains_itself(dashboard: Json) -> None:
    """It has a title, a description in sentences, a unit, the chosen data source and something to ask."""
    for panel in panels(dashboard):
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        for asked in (panel, *panel["targets"]):
            assert asked["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]


def test_panels_have_places_of_their_own(dashboard: Json) -> None:
    """Ids are unique, nothing lies upon anything else or beyond the 24 columns."""
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in dashboard["panels"]]
    assert all(x + w <= 24 for x, _, w, _ in places)
    assert not any(overlap(one, other) for n, one in enumerate(places) for other in places[:n])


def overlap(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    (x, y, w, h), (u, v, a, b) = one, other
    return x < u + a and u < x + w and y < v + b and v < y + h


def test_every_variable_is_there_and_used(dashboard: Json) -> None:
    """A query names only variables of its dashboard, and no dashboard has one that nothing asks for."""
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    queries = [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]
    asked = set(re.findall(VARIABLE, " ".join(queries))) - _BUILT_IN
    assert asked == variables - {"datasource"}
    assert all('job=~"$job"' in query for query in queries if query != "vector(1)")


def test_dashboards_lead_to_each_other() -> None:
    """All have a stable uid and links to all that share their tag; time and choices go along."""
    assert sorted(d["uid"] for d in DASHBOARDS.values()) == [
        *("qos-admission", "qos-controller", "qos-engines", "qos-fleet", "qos-gateway", "qos-slo-overview"),
    ]
    for dashboard in DASHBOARDS.values():
        (link,) = dashboard["links"]
        assert set(link["tags"]) <= set(dashboard["tags"])
        assert link["includeVars"]
        assert link["keepTime"]
        assert dashboard["schemaVersion"] == 39


def test_provisioning_knows_data_source_and_folder() -> None:
    """The dashboards' first choice is the data source that is set up, which knows how often it scrapes."""
    sources = yaml.safe_load((ROOT / "grafana/provisioning/datasources/prometheus.yaml").read_text("utf-8"))
    (source,) = sources["datasources"]
    scraping = yaml.safe_load((ROOT / "config/prometheus/prometheus.yml").read_text("utf-8"))
    assert source["jsonData"]["timeInterval"] == scraping["global"]["scrape_interval"]
    for dashboard in DASHBOARDS.values():
        chosen = dashboard["templating"]["list"][0]
        assert (chosen["type"], chosen["current"]["value"]) == ("datasource", source["uid"])


def test_a_series_that_does_not_exist_cannot_be_drawn() -> None:
    """A renamed metric fails when dashboards are generated, and leaves no empty panel."""
    with pytest.raises(ValueError, match="qos_gateway_queue_depths"):
        series("queue_depths")


def test_panels_fill_rows_from_the_left() -> None:
    """A panel that does not fit goes below the deepest one of its row; a heading takes a whole line."""
    query = Query("up", "")
    wide = Panel("w", "d.", "stat", "none", (query,), width=16, height=4)
    deep = Panel("d", "d.", "stat", "none", (query,), width=8, height=8)
    places = [tuple(p["gridPos"][side] for side in "xywh") for p in placed([Row("r"), wide, deep, wide])]
    assert places == [(0, 0, 24, 1), (0, 1, 16, 4), (16, 1, 8, 8), (0, 9, 16, 4)]
