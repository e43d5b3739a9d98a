"""Rules that hold for any gateway: is it there, does it refuse, can its controller do its work."""

import re
from collections.abc import Iterable, Iterator

from gateway.alerting.model import Alert, Group, literal
from gateway.alerting.promises import promised_classes
from gateway.config_values import CLASS_NAMES
from gateway.settings import Settings

P0_REFUSED_RATIO = 0.01
RETRIED_RATIO = 0.2
LOAD_AGE_SECONDS = 60
LOOP_LAG_SECONDS = 0.05
"""Where no class is promised a time per token; else half of the tightest one."""


def health_groups(settings: Settings, job: str) -> Iterator[Group]:
    yield Group("qos-gateway-process", tuple(_process(settings, job)))
    yield Group("qos-gateway-refusals", tuple(_refusals(job)))
    yield Group("qos-gateway-controller", tuple(_controller(job)))
    yield Group("qos-gateway-upstreams", tuple(_upstreams(settings, job)))
    yield Group("qos-gateway-configuration", tuple(_configuration(settings, job)))


# ---------------------------------------------------------------------- the process


def _process(settings: Settings, job: str) -> Iterator[Alert]:
    of = f'{{job="{job}"}}'
    yield Alert(
        name="QosGatewayDown",
        expr=f"up{of} == 0",
        hold="1m",
        severity="critical",
        summary="{{ $labels.instance }} does not answer",
        description="Prometheus could not read the metrics of {{ $labels.instance }} for a minute.",
    )
    yield Alert(
        name="QosGatewayAbsent",
        expr=f"absent(up{of})",
        hold="5m",
        severity="critical",
        summary="There is no gateway",
        description=f"Prometheus has no target of job {job}: none was found, or none is configured.",
    )
    lag = _loop_lag_seconds(settings)
    yield Alert(
        name="QosGatewayEventLoopLag",
        expr="histogram_quantile(0.99,\n"
        f"  sum by (job, instance, le) (rate(qos_gateway_event_loop_lag_seconds_bucket{of}[5m]))\n"
        f") > {lag:g}",
        hold="10m",
        severity="warning",
        summary="{{ $labels.instance }} itself is slow",
        description="One in a hundred timers was late by {{ $value | humanizeDuration }}, which every stream "
        f"waits besides what its engine takes; {lag:g} s is as much as the promises bear.",
    )
    yield Alert(
        name="QosGatewayInternalErrors",
        # A series of some model begins with its first error, which an increase over it alone would not show.
        expr="increase(sum by (job, instance) "
        f'(qos_gateway_requests_total{{job="{job}", outcome="internal_error"}})[10m:30s]) > 0',
        hold="0m",
        severity="warning",
        summary="{{ $labels.instance }} answered with an error of its own",
        description="{{ $value | humanize }} requests of the last 10 minutes ended as internal_error. "
        "Each has a log line with its cause.",
    )


def _loop_lag_seconds(settings: Settings) -> float:
    slos = [settings.classes[name].slo for name in CLASS_NAMES]
    promised = [slo.tpot_seconds for slo in slos if slo is not None and slo.tpot_seconds is not None]
    return min(promised, default=2 * LOOP_LAG_SECONDS) / 2


# ---------------------------------------------------------------------- refusals and retries


def _refusals(job: str) -> Iterator[Alert]:
    yield Alert(
        name="QosGatewayP0Refused",
        expr="sum by (job, priority) (rate(qos_gateway_refusals_total"
        f'{{job="{job}", priority="P0", reason!~"tenant_limit|draining"}}[5m]))\n'
        "/\n(sum by (job, priority) (rate(qos_gateway_requests_total"
        f'{{job="{job}", priority="P0"}}[5m])) > 0.0167)\n> {P0_REFUSED_RATIO:g}',
        hold="5m",
        severity="warning",
        summary="The highest class is being refused",
        description="{{ $value | humanizePercentage }} of the P0 requests of the last 5 minutes were "
        "refused; limits of their own tenants do not count.",
    )
    yield Alert(
        name="QosGatewayRetryAmplification",
        expr=f'sum by (job) (rate(qos_gateway_client_retries_total{{job="{job}"}}[10m]))\n'
        f'/\n(sum by (job) (rate(qos_gateway_requests_total{{job="{job}"}}[10m])) > 0.0167)\n'
        f"> {RETRIED_RATIO:g}",
        hold="10m",
        severity="warning",
        summary="Many requests are retries of refused ones",
        description="{{ $value | humanizePercentage }} of the requests of the last 10 minutes said that they "
        "are a retry: clients offer again what was refused, which makes an overload larger.",
    )


# ---------------------------------------------------------------------- the controller


def _controller(job: str) -> Iterator[Alert]:
    of = f'{{job="{job}"}}'
    capacity = f"qos_gateway_capacity_tokens_per_second{of}"
    least, most = (
        f'qos_gateway_capacity_bound_tokens_per_second{{job="{job}", bound="{bound}"}}'
        for bound in ("least", "most")
    )
    adapts = (
        f'and on (job, instance) qos_gateway_controller_law{{job="{job}", law!="static"}}\n'
        f"and on (job, instance) ({most} > ignoring (bound) {least})"
    )
    yield Alert(
        name="QosGatewayCapacityAtLeast",
        expr=f"{capacity} <= ignoring (bound) (1.001 * {least})\n{adapts}",
        hold="10m",
        severity="warning",
        summary="{{ $labels.instance }} cannot give its engines less to do",
        description="The capacity has been at its lower bound, {{ $value | humanize }} tokens/s, for 10 "
        "minutes: the engines are still too slow for the promises, and the controller may cut no more.",
    )
    yield Alert(
        name="QosGatewayCapacityAtMost",
        expr=f"{capacity} >= ignoring (bound) (0.999 * {most})\n{adapts}\n"
        "and on (job, instance) (sum by (job, instance) (rate(qos_gateway_refusals_total"
        f'{{job="{job}", reason="class_budget"}}[10m])) > 0)',
        hold="30m",
        severity="warning",
        summary="{{ $labels.instance }} refuses what its engines could serve",
        description="The capacity has been at its upper bound, {{ $value | humanize }} tokens/s, for half an "
        "hour, and requests are refused for want of it. The engines can do more than is configured.",
    )
    yield Alert(
        name="QosGatewayControllerBlind",
        expr=f'qos_gateway_controller_law{{job="{job}", law="severity"}}\n'
        f"unless on (job, instance) qos_gateway_fleet_leader{of} == 0\n"
        f"unless on (job, instance) last_over_time(qos_gateway_controller_severity{of}[10m])\n"
        f"and on (job, instance) (\n{_serves(job)}\n)",
        hold="10m",
        severity="warning",
        summary="The controller of {{ $labels.instance }} sees nothing",
        description="Requests are served, but for 10 minutes there was no stream whose first token or gaps "
        "could be measured, and no engine told its memory use: the capacity stays as it is whatever happens.",
    )


def _serves(job: str) -> str:
    """Where gateways share a budget the law of one is at work, and hears of what all of them serve."""
    leads = f'qos_gateway_fleet_leader{{job="{job}"}} == 1'
    shares = f'qos_gateway_fleet_state{{job="{job}", state="shared"}} == 1'
    completed = f'rate(qos_gateway_requests_total{{job="{job}", outcome="completed"}}[10m])'
    return (
        f"  sum by (job, instance) ({completed}) > 0.1\n"
        "  or on (job, instance) (\n"
        f"    {leads}\n"
        f"    and on (job, instance) {shares}\n"
        f"    and on (job) sum by (job) ({completed}) > 0.1\n"
        "  )"
    )


# ---------------------------------------------------------------------- engines


def _upstreams(settings: Settings, job: str) -> Iterator[Alert]:
    of = f'{{job="{job}"}}'
    yield Alert(
        name="QosGatewayUpstreamDown",
        expr=f"qos_gateway_upstream_healthy{of} == 0",
        hold="1m",
        severity="warning",
        summary="Engine {{ $labels.upstream }} is down",
        description="{{ $labels.instance }} has sent nothing to {{ $labels.upstream }} for a minute: its "
        "probes fail or its circuit breaker is open.",
    )
    yield Alert(
        name="QosGatewayNoUpstream",
        expr=f"max by (job, instance) (qos_gateway_upstream_healthy{of}) == 0",
        hold="30s",
        severity="critical",
        summary="{{ $labels.instance }} has no engine left",
        description="All engines of {{ $labels.instance }} are down; requests wait, then get 503.",
    )
    yield from _models(settings, job)
    yield Alert(
        name="QosGatewayUpstreamLoadUnknown",
        expr=f"qos_gateway_upstream_load_age_seconds{of} > {LOAD_AGE_SECONDS}",
        hold="5m",
        severity="warning",
        summary="The load of engine {{ $labels.upstream }} is not known",
        description="Its metrics page was last read {{ $value | humanizeDuration }} ago. Until it can be "
        "read again the gateway goes by its own counts, and does not see other users of the engine.",
    )


def _models(settings: Settings, job: str) -> Iterator[Alert]:
    """Metrics of engines do not name models. Where the configuration says that some models have engines of
    their own, the health of these tells; of any other model what becomes of its requests, once there are any.
    """
    of = f'{{job="{job}"}}'
    one_is_up = f"and on (job, instance) max by (job, instance) (qos_gateway_upstream_healthy{of}) == 1"
    routes = own_engines(settings)
    for engines, models in routes.items():
        of_these = literal(", ".join(models))
        yield Alert(
            name="QosGatewayModelDown",
            expr="max by (job, instance) (qos_gateway_upstream_healthy"
            f'{{job="{job}", upstream=~"{_any_of(engines)}"}}) == 0\n{one_is_up}',
            hold="30s",
            severity="critical",
            labels={"model": of_these},
            summary=f"{{{{ $labels.instance }}}} has no engine left for {of_these}",
            description=f"Down at {{{{ $labels.instance }}}}: {literal(', '.join(engines))}. "
            f"Other models are served; requests for {of_these} wait, then get 503.",
        )
    watched = [model for models in routes.values() for model in models]
    others = f', model!~"{_any_of(watched)}"' if watched else ""
    yield Alert(
        name="QosGatewayModelDown",
        expr="sum by (job, instance, model) (rate(qos_gateway_requests_total"
        f'{{job="{job}", outcome="rejected_no_upstream"{others}}}[2m])) > 0\n{one_is_up}',
        hold="3m",
        severity="critical",
        summary="{{ $labels.instance }} has no engine left for {{ $labels.model }}",
        description="For 3 minutes requests for {{ $labels.model }} have got 503 because its engines are "
        "down, while others of {{ $labels.instance }} are up.",
    )


def _any_of(names: Iterable[str]) -> str:
    """A regular expression, as it stands between double quotes in an expression."""
    return "|".join(map(re.escape, names)).replace("\\", "\\\\").replace('"', '\\"')


def own_engines(settings: Settings) -> dict[tuple[str, ...], list[str]]:
    """Engines that alone serve some models → these models. Without those that all engines serve."""
    upstreams = settings.upstreams
    routes: dict[tuple[str, ...], list[str]] = {}
    for model in sorted({model for each in upstreams for model in each.models} - {"*"}):
        engines = tuple(each.name for each in upstreams if {"*", model} & set(each.models))
        if len(engines) < len(upstreams):
            routes.setdefault(engines, []).append(model)
    return routes


# ---------------------------------------------------------------------- configuration


def _configuration(settings: Settings, job: str) -> Iterator[Alert]:
    yield Alert(
        name="QosGatewayReloadFailed",
        expr="sum by (job, instance) "
        f'(increase(qos_gateway_config_reloads_total{{job="{job}", result="failed"}}[10m])) > 0',
        hold="0m",
        severity="warning",
        summary="{{ $labels.instance }} did not take its new configuration",
        description="A reload failed within the last 10 minutes; the old configuration stays in force.",
    )
    yield Alert(
        name="QosGatewayRulesOutdated",
        expr="\nor ".join(_other_targets(settings, job)),
        hold="10m",
        severity="warning",
        summary="These rules are not those of the gateway's promises",
        description="{{ $labels.instance }} has a target of {{ $value | humanizePercentage }} for "
        "{{ $labels.priority }}, which is not the one that the error budget rules were made for.",
    )


def _other_targets(settings: Settings, job: str) -> Iterator[str]:
    promised = promised_classes(settings)
    for name in CLASS_NAMES:
        differs = f"!= {settings.slo.target!r}" if name in promised else "> 0"
        yield f'qos_gateway_slo_target_ratio{{job="{job}", priority="{name}"}} {differs}'
