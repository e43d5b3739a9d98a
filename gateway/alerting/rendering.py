"""Rules as the YAML that Prometheus reads."""

from collections.abc import Iterable
from typing import Any

import yaml

from gateway.alerting.model import Alert, Group, Recording, Rule

_HEAD = """\
# Made by `qos-gateway rules` from the configured promises. Make it again when they change:
#   qos-gateway rules --config gateway.yaml --out FOLDER

"""


class _Dumper(yaml.SafeDumper):
    """Text of several lines stays so; lists stand inside their key; nothing is folded or an alias."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def rendered(groups: Iterable[Group], runbook: str) -> str:
    """A whole file. `runbook` is the page with a section for each alert, as a link."""
    tree = {"groups": [{"name": g.name, "rules": [_rule(rule, runbook) for rule in g.rules]} for g in groups]}
    body: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
    return _HEAD + body


def _rule(rule: Rule, runbook: str) -> dict[str, Any]:
    if isinstance(rule, Recording):
        return {"record": rule.record, "expr": rule.expr}
    return _alert(rule, runbook)


def _alert(alert: Alert, runbook: str) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.hold,
        "labels": {"severity": alert.severity, **alert.labels},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": f"{runbook}#{alert.name.lower()}",
        },
    }
