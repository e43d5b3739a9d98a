"""Every PromQL expression that the repository ships, and what each asks of the gateway's metrics."""

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser as promql

from gateway.alerting.command import rule_groups
from gateway.alerting.model import Alert, Recording
from gateway.settings import Settings
from gateway.telemetry.catalogue import CATALOGUE, PREFIX
from grafana.generate import DASHBOARDS
from grafana.model import Query

FLEET = PREFIX + "fleet_"
"""What only a gateway with a shared state shows."""

ROOT = Path(__file__).parents[2]
RULES_FOLDER = ROOT / "config" / "prometheus" / "rules"

JOB = "qos-gateway"
TARGET_LABELS = frozenset({"job", "instance"})
"""What Prometheus adds to every series of a target."""
MADE_BY_PROMETHEUS = ("up", "scrape_duration_seconds")
"""About each target, not read from its page."""

_SPANS = {"$__rate_interval": "1m", "$__range": "5m"}
VARIABLE = r"\$([a-z_]\w*)"
"""Grafana's; `$1` is what `label_replace` has found."""
_KEEPS_LABELS = {"topk", "bottomk"}


@dataclass(frozen=True, slots=True)
class Expression:
    """`shown` are the labels that a legend or an annotation shows; `where` is for people."""

    where: str
    text: str
    shown: frozenset[str]

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def panel_queries() -> Iterator[tuple[str, Query]]:
    for dashboard in DASHBOARDS:
        for part in dashboard.parts:
            for query in getattr(part, "queries", ()):
                yield f"{dashboard.name}: {part.title}", query


def panel_expressions() -> Iterator[Expression]:
    for where, query in panel_queries():
        shown = frozenset(re.findall(r"{{\s*(\w+)\s*}}", query.legend))
        yield Expression(where, without_variables(query.expr), shown)


def without_variables(expr: str) -> str:
    """As Grafana would send it with everything chosen."""
    for variable, span in _SPANS.items():
        expr = expr.replace(variable, span)
    return re.sub(VARIABLE, ".*", expr)


def rule_expressions(settings: Settings) -> Iterator[Expression]:
    for group in rule_groups(settings, JOB):
        for rule in group.rules:
            if isinstance(rule, Alert):
                shown = frozenset(re.findall(r"\$labels\.(\w+)", rule.summary + rule.description))
                yield Expression(rule.name, rule.expr, shown)
            else:
                yield Expression(rule.record, rule.expr, frozenset())


# ---------------------------------------------------------------------- what an expression asks for

Known = Mapping[str, Set[str]]
"""Name of a series → its labels, with those of its target."""


def fleet_as_defined() -> Known:
    """The series of a fleet as the catalogue has them, for where no store can be had to see them."""
    return {
        series: TARGET_LABELS.union(definition.labels, ("le",) if series.endswith("_bucket") else ())
        for definition in CATALOGUE
        if definition.name.startswith(FLEET)
        for series in definition.series_names
    }


def known_with_recorded(known: Known, settings: Settings) -> Known:
    """And the series that the rules record."""
    recorded = {
        rule.record: output_labels(promql.parse(rule.expr), known)
        for group in rule_groups(settings, JOB)
        for rule in group.rules
        if isinstance(rule, Recording)
    }
    return {**known, **recorded}


def problems(expression: Expression, known: Known) -> list[str]:
    """What it names that is not there."""
    tree = promql.parse(expression.text)
    wrong = []
    for node in nodes(tree):
        if isinstance(node, promql.VectorSelector):
            if node.name not in known:
                wrong.append(f"no series {node.name}")
                continue
            asked = {matcher.name for matcher in node.matchers.matchers}
            wrong += [f"{node.name} has no label {name}" for name in asked - known[node.name]]
        elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            lacking = set(node.modifier.labels) - output_labels(node.expr, known)
            wrong += [f"nothing to aggregate by: {name}" for name in lacking]
        elif isinstance(node, promql.BinaryExpr) and node.modifier is not None and node.modifier.matching:
            for side in (node.lhs, node.rhs):
                if node.modifier.matching.type == promql.LabelModifierType.Include:  # `on`
                    lacking = set(node.modifier.matching.labels) - output_labels(side, known)
                    wrong += [f"nothing to match on: {name}" for name in lacking]
    lacking = expression.shown - output_labels(tree, known)
    return wrong + [f"shows {name}, which the result does not have" for name in lacking]


def nodes(tree: Any) -> Iterator[Any]:
    yield tree
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        inner = getattr(tree, name, None)
        if inner is not None:
            yield from nodes(inner)
    for argument in getattr(tree, "args", None) or ():
        yield from nodes(argument)


def output_labels(tree: Any, known: Known) -> Set[str]:
    """The labels that the result can have."""
    match tree:
        case promql.VectorSelector():
            return known.get(tree.name, frozenset())
        case promql.MatrixSelector():
            return output_labels(tree.vector_selector, known)
        case promql.AggregateExpr():
            inner = output_labels(tree.expr, known)
            if str(tree.op) == "count_values":
                return {*tree.modifier.labels, tree.param.val}
            if tree.modifier is None:
                return inner if str(tree.op) in _KEEPS_LABELS else frozenset()
            by = set(tree.modifier.labels)
            return by if tree.modifier.type == promql.AggModifierType.By else inner - by
        case promql.BinaryExpr():
            return _binary_labels(tree, known)
        case promql.Call():
            labels: Set[str] = set().union(*(output_labels(argument, known) for argument in tree.args))
            return labels - {"le"} if tree.func.name == "histogram_quantile" else labels
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return output_labels(tree.expr, known)
    return frozenset()


def _binary_labels(tree: Any, known: Known) -> Set[str]:
    left, right = output_labels(tree.lhs, known), output_labels(tree.rhs, known)
    if str(tree.op) in ("and", "unless"):
        return left
    if str(tree.op) == "or" or not left or not right:
        return left | right
    matching = tree.modifier.matching if tree.modifier is not None else None
    if matching is None:
        return left
    if tree.modifier.card == promql.VectorMatchCardinality.ManyToOne:  # group_left
        return left | set(tree.modifier.group_labels or ())
    named = set(matching.labels)
    return named if matching.type == promql.LabelModifierType.Include else left - named
