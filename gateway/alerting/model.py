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
    """`hold` is how long the expression must be true. Summary and description may use Prometheus' templates
    over the expression's labels and value."""

    name: str
    expr: str
    hold: str
    severity: Severity
    summary: str
    description: str
    labels: Mapping[str, str] = field(default_factory=dict)


Rule = Recording | Alert


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated one after another, so that a later one sees what an earlier one recorded."""

    name: str
    rules: tuple[Rule, ...]
