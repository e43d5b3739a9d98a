"""Rules for gateways that share budgets: is the store there, does one lead, do they know of each other.

All of these metrics are absent with `state: memory`, so none of the rules can fire there. Replicas without
the store do not count where those that have it are compared: they have an alert of their own.
"""

from collections.abc import Iterator

from gateway.alerting.model import Alert, Group


def fleet_groups(job: str) -> Iterator[Group]:
    yield Group("qos-gateway-fleet", (*_state(job), *_agreement(job)))


def _state(job: str) -> Iterator[Alert]:
    shared = f'qos_gateway_fleet_state{{job="{job}", state="shared"}}'
    yield Alert(
        name="QosGatewayStateLost",
        expr=f"max by (job, instance) ({shared}) == 0",
        hold="1m",
        severity="warning",
        summary="{{ $labels.instance }} does not reach the shared state",
        description="For a minute the store has not answered {{ $labels.instance }}: it goes on with its "
        "equal part of the last known budget, whatever the others need.",
    )
    yield Alert(
        name="QosGatewayStateLostByAll",
        expr=f"max by (job) ({shared}) == 0",
        hold="5m",
        severity="critical",
        summary="No gateway reaches the shared state",
        description="For 5 minutes the store has answered no gateway of job {{ $labels.job }}. Each "
        "has an equal part of the budget, so that a busy one refuses what idle ones could serve.",
    )


def _agreement(job: str) -> Iterator[Alert]:
    sharing = f'and on (job, instance) qos_gateway_fleet_state{{job="{job}", state="shared"}} == 1'
    leads = f'(qos_gateway_fleet_leader{{job="{job}"}} {sharing})'
    yield Alert(
        name="QosGatewayLeaders",
        expr=f"sum by (job) {leads} != 1",
        hold="3m",
        severity="warning",
        summary="The gateways' budget is not set by one of them",
        description="{{ $value | humanize }} of the gateways that share a budget set it by their control "
        "law; it has to be one.",
    )
    knows = f'(qos_gateway_fleet_replicas{{job="{job}"}} {sharing})'
    yield Alert(
        name="QosGatewayReplicasDisagree",
        expr=f"max by (job) (abs(\n  {knows}\n  - on (job) group_left\n  count by (job) {knows}\n)) > 0",
        hold="5m",
        severity="warning",
        summary="Gateways disagree on how many they are",
        description="What a gateway of job {{ $labels.job }} says of the number of replicas differs by "
        "{{ $value | humanize }} from the number that Prometheus sees share the state.",
    )
