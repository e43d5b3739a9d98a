"""Rules that follow from what each class is promised: how fast its error budget burns."""

from collections.abc import Iterator

from gateway.alerting.burn_rate import ALL_WINDOWS, BURN_WINDOWS, BurnWindow, missed_ratio_threshold
from gateway.alerting.model import Alert, Group, Recording
from gateway.config_values import CLASS_NAMES
from gateway.settings import Settings

REQUESTS_PER_SECOND_MIN = 1 / 60
"""The traffic guard: under one judged request a minute, over the long window, a single slow one would be a
large part of all."""


def missed_ratio(window: str) -> str:
    return f"job_priority:qos_gateway_slo_missed:ratio_rate{window}"


def judged_rate(window: str) -> str:
    return f"job_priority:qos_gateway_slo_requests:rate{window}"


def promised_classes(settings: Settings) -> list[str]:
    return [name for name in CLASS_NAMES if settings.classes[name].slo is not None]


def promise_groups(settings: Settings, job: str) -> Iterator[Group]:
    """None where no class is promised anything."""
    classes = promised_classes(settings)
    if classes:
        yield Group("qos-gateway-slo", tuple(_recordings(job)))
        alerts = (_burn(name, w, settings.slo.target, job) for name in classes for w in BURN_WINDOWS)
        yield Group("qos-gateway-error-budget", tuple(alerts))


def _recordings(job: str) -> Iterator[Recording]:
    judged = f'qos_gateway_slo_requests_total{{job="{job}", slo="all"}}'
    missed = f'qos_gateway_slo_requests_total{{job="{job}", slo="all", verdict="missed"}}'
    for window in ALL_WINDOWS:
        yield Recording(judged_rate(window), f"sum by (job, priority) (rate({judged}[{window}]))")
        yield Recording(
            missed_ratio(window),
            f"sum by (job, priority) (rate({missed}[{window}]))\n"
            f"/\n(sum by (job, priority) (rate({judged}[{window}])) > 0)",
        )


def _burn(name: str, window: BurnWindow, target: float, job: str) -> Alert:
    threshold = missed_ratio_threshold(target, window.factor)
    of = f'{{job="{job}", priority="{name}"}}'
    return Alert(
        name="QosGatewayErrorBudgetBurn",
        expr=f"{missed_ratio(window.long)}{of} > {threshold:g}\n"
        f"and {missed_ratio(window.short)}{of} > {threshold:g}\n"
        f"and {judged_rate(window.long)}{of} >= {REQUESTS_PER_SECOND_MIN:.4f}",
        hold=window.hold,
        severity=window.severity,
        labels={"priority": name, "window": window.long},
        summary=f"{name} misses its latency promise too often",
        description=f"{{{{ $value | humanizePercentage }}}} of the {name} requests of the last {window.long} "
        f"missed their promise, and more than {threshold:.2%} of those of the last {window.short}. "
        f"{target:.2%} should keep it.",
    )
