"""Dashboards in Grafana's classic JSON (schema version 39), as plain dictionaries.

Only what differs from Grafana's own defaults is written. A panel gets its id and place when the dashboard
is put together: rows of 24 columns, filled from left to right.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

SCHEMA_VERSION = 39
COLUMNS = 24
TAG = "qos-gateway"
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}

CLASS_COLORS = {"P0": "red", "P1": "blue", "P2": "green"}


@dataclass(frozen=True, slots=True)
class Query:
    """`legend` is Grafana's template over the labels, as in `{{priority}}`."""

    expr: str
    legend: str
    instant: bool = False
    as_heatmap: bool = False

    def json(self, ref: str) -> Json:
        target: Json = {
            "refId": ref,
            "datasource": DATASOURCE,
            "expr": self.expr,
            "legendFormat": self.legend,
        }
        if self.instant:
            target |= {"instant": True, "range": False}
        if self.as_heatmap:
            target["format"] = "heatmap"
        return target


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    description: str
    kind: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 8
    height: int = 8
    defaults: Json = field(default_factory=dict)
    options: Json = field(default_factory=dict)
    overrides: tuple[Json, ...] = ()

    def json(self) -> Json:
        refs = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        return {
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "fieldConfig": {
                "defaults": {"unit": self.unit, **self.defaults},
                "overrides": list(self.overrides),
            },
            "options": self.options,
            "targets": [query.json(ref) for query, ref in zip(self.queries, refs, strict=False)],
        }


@dataclass(frozen=True, slots=True)
class Row:
    title: str


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    width: int = 8,
    least: float | None = 0,
    most: float | None = None,
    stacked: bool = False,
    steps: bool = False,
) -> Panel:
    """Curves over time. Legends ending in `promised`, `target`, `limit` or `guaranteed` are drawn dashed."""
    custom: Json = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if stacked else 5,
        "showPoints": "never",
        "spanNulls": False,
        "lineInterpolation": "stepAfter" if steps else "linear",
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }
    defaults: Json = {"custom": custom, "color": {"mode": "palette-classic"}}
    if least is not None:
        defaults["min"] = least
    if most is not None:
        defaults["max"] = most
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    return Panel(
        title,
        description,
        "timeseries",
        unit,
        queries,
        width,
        defaults=defaults,
        options=options,
        overrides=(*_class_colors(), _dashed()),
    )


def _class_colors() -> Iterable[Json]:
    """A class has the same colour in every chart that shows it alone."""
    for name, color in CLASS_COLORS.items():
        properties = [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}]
        yield {"matcher": {"id": "byName", "options": name}, "properties": properties}


def _dashed() -> Json:
    dash = {"fill": "dash", "dash": [8, 6]}
    properties = [{"id": "custom.lineStyle", "value": dash}, {"id": "custom.fillOpacity", "value": 0}]
    return {
        "matcher": {"id": "byRegexp", "options": "/.*(promised|target|limit|guaranteed)$/"},
        "properties": properties,
    }


def numbers(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    width: int = 6,
    height: int = 5,
    thresholds: Sequence[tuple[float, str]] = (),
    decimals: int | None = None,
) -> Panel:
    """Large figures of now; `thresholds` are (from here on, colour), below the first it is green."""
    steps: list[Json] = [{"color": "green", "value": None}]
    steps += [{"color": color, "value": value} for value, color in thresholds]
    defaults: Json = {"thresholds": {"mode": "absolute", "steps": steps}, "color": {"mode": "thresholds"}}
    if decimals is not None:
        defaults["decimals"] = decimals
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "graphMode": "none",
        "textMode": "value_and_name",
    }
    return Panel(title, description, "stat", unit, queries, width, height, defaults, options)


def heatmap(title: str, description: str, unit: str, expr: str, *, width: int = 12) -> Panel:
    """How many requests fell into each bucket of a histogram, over time."""
    options = {
        "calculate": False,
        "yAxis": {"unit": unit, "axisPlacement": "left"},
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5},
        "cellGap": 1,
        "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": True},
        "legend": {"show": True},
    }
    query = Query(expr, "{{le}}", as_heatmap=True)
    return Panel(title, description, "heatmap", unit, (query,), width, options=options)


# ---------------------------------------------------------------------- variables


def choice(name: str, label: str, query: str) -> Json:
    """A variable whose values Prometheus knows; several of them or all can be chosen."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "options": [],
        "regex": "",
    }


def _datasource_choice() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {"text": "Prometheus", "value": "prometheus"},
        "options": [],
        "regex": "",
    }


JOB = choice("job", "Job", "label_values(qos_gateway_build_info, job)")
INSTANCE = choice("instance", "Gateway", 'label_values(qos_gateway_build_info{job=~"$job"}, instance)')
PRIORITY = choice("priority", "Class", 'label_values(qos_gateway_queue_depth{job=~"$job"}, priority)')
UPSTREAM = choice("upstream", "Engine", 'label_values(qos_gateway_upstream_healthy{job=~"$job"}, upstream)')
TENANT = choice("tenant", "Tenant", 'label_values(qos_gateway_requests_total{job=~"$job"}, tenant)')


# ---------------------------------------------------------------------- a whole dashboard


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`name` is that of its file; the uid must stay, for links and bookmarks lead to it."""

    name: str
    uid: str
    title: str
    description: str
    variables: tuple[Json, ...]
    parts: tuple[Panel | Row, ...]

    def json(self) -> Json:
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": [TAG],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,
            "refresh": "10s",
            "timezone": "browser",
            "time": {"from": "now-30m", "to": "now"},
            "links": [_links_to_the_others()],
            "annotations": {"list": [_alerts()]},
            "templating": {"list": [_datasource_choice(), JOB, INSTANCE, *self.variables]},
            "panels": placed(self.parts),
        }


def placed(parts: Iterable[Panel | Row]) -> list[Json]:
    """With ids and places: left to right as far as the 24 columns go, then below."""
    panels: list[Json] = []
    x = y = depth = 0
    for number, part in enumerate(parts, start=1):
        width, height = (COLUMNS, 1) if isinstance(part, Row) else (part.width, part.height)
        if x + width > COLUMNS:
            x, y, depth = 0, y + depth, 0
        place = {"x": x, "y": y, "w": width, "h": height}
        if isinstance(part, Row):
            body: Json = {"type": "row", "title": part.title, "collapsed": False, "panels": []}
        else:
            body = part.json()
        panels.append({"id": number, "gridPos": place, **body})
        x, depth = x + width, max(depth, height)
    return panels


def _links_to_the_others() -> Json:
    return {
        "type": "dashboards",
        "title": "QoS gateway",
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _alerts() -> Json:
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"QosGateway.+", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}} {{priority}} {{upstream}}",
        "step": "30s",
    }
