"""What the repository ships beside its code: lock files, container files, dashboards."""

import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LOCKS = ("requirements.lock", "requirements-dev.lock")
DASHBOARDS = sorted((ROOT / "grafana").rglob("*.json"))
METRIC_SUFFIXES = ("_bucket", "_sum", "_count")

_PINNED = re.compile(r"([a-z0-9.-]+)==(\S+)( ; .+)? \\")
_HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return {match[1]: match[2] for match in map(_PINNED.fullmatch, lines) if match}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_is_pins_and_hashes(name: str) -> None:
    """No index, no address, no path: pip takes the packages from wherever its user has them from."""
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        assert line in ("", "#") or line.startswith("# ") or _PINNED.fullmatch(line) or _HASH.fullmatch(line)
        assert "://" not in line


def test_developers_have_what_users_have() -> None:
    """The development lock is the other one and more, so that what is tested is what runs."""
    assert _pins("requirements.lock").items() < _pins("requirements-dev.lock").items()


def test_the_locks_cover_what_the_project_asks_for() -> None:
    """A dependency that is added without renewing the locks would be missing in an image."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {"requirements.lock": project["dependencies"]}
    wanted["requirements-dev.lock"] = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for lock, requirements in wanted.items():
        names = {re.split(r"[\[<>=;! ]", each)[0].lower().replace("_", "-") for each in requirements}
        assert names <= _pins(lock).keys()


@pytest.mark.parametrize("path", ["docker-compose.yml", "config/prometheus/prometheus.yml"])
def test_a_container_file_is_yaml(path: str) -> None:
    """It can at least be read."""
    assert yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_containers_are_pinned_and_reachable_from_this_machine_only() -> None:
    """The example of docker-compose.yml opens nothing to the network."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    for service in services.values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


# ── dashboards ───────────────────────────────────────────────────────────────────────────────────────────


def _panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in dashboard["panels"]:
        yield from (panel, *panel.get("panels", ()))


def _queries() -> Iterator[str]:
    for path in DASHBOARDS:
        for panel in _panels(json.loads(path.read_text(encoding="utf-8"))):
            yield from (target["expr"] for target in panel.get("targets", ()))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_explains_itself(path: Path) -> None:
    """Every panel has a description, a unit, a known data source and a place of its own."""
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    panels = list(_panels(dashboard))
    assert dashboard["schemaVersion"] == 39
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"]["uid"] == "prometheus"
            assert panel["targets"]
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in panels]
    assert not any(_overlap(one, other) for n, one in enumerate(places) for other in places[:n])


def _overlap(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    (x, y, w, h), (u, v, a, b) = one, other
    return x < u + a and u < x + w and y < v + b and v < y + h


def test_dashboards_ask_only_for_metrics_that_exist() -> None:
    """A renamed metric does not leave an empty panel behind."""
    if importlib.util.find_spec("gateway.telemetry.metrics") is None:
        pytest.skip("there are no metrics yet")
    known = importlib.import_module("gateway.telemetry.metrics").METRIC_NAMES
    asked = {name for query in _queries() for name in re.findall(r"\bqos_gateway_\w+", query)}
    assert asked
    assert {name for name in asked if name not in known and _base(name) not in known} == set()


def _base(name: str) -> str:
    for suffix in METRIC_SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name
