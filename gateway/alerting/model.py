"""What a file of rules holds, before it is YAML."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.alerting.burn_rate import Severity


@dataclass(frozen=True, slots=True)
class Recording:
    """`record` is named level:metric:operations, as is usual."""

    record: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """`hold` is how long the expression must be true. Summary, description and the values of `labels` may use
    Prometheus' templates over the value and the labels of the expression; `labels` are not among these. A
    name from the configuration stands in them as `literal(name)`."""

    name: str
    expr: str
    hold: str
    severity: Severity
    summary: str
    description: str
    labels: Mapping[str, str] = field(default_factory=dict)


Rule = Recording | Alert


def literal(text: str) -> str:
    """As it stands in a template, so that it is shown as it is."""
    return text.replace("{{", '{{ "{{" }}')


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated one after another, so that a later one sees what an earlier one recorded."""

    name: str
    rules: tuple[Rule, ...]
