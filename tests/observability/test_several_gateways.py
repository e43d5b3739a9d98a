"""What dashboards show of two gateways of different size: the two together, not their mean. By promtool."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.observability.expressions import JOB, panel_queries, without_variables
from tests.observability.real_prometheus import demanded

EVALUATED_AT = "10m"
SERIES: dict[str, str] = {
    # the large gateway has three times the part, the traffic and the places of the small one
    'capacity_tokens_per_second{instance="a"}': "9000x60",
    'capacity_tokens_per_second{instance="b"}': "3000x60",
    'capacity_bound_tokens_per_second{instance="a", bound="most"}': "27000x60",
    'capacity_bound_tokens_per_second{instance="b", bound="most"}': "9000x60",
    'bucket_rate_tokens_per_second{instance="a", priority="P0"}': "6000x60",
    'bucket_rate_tokens_per_second{instance="b", priority="P0"}': "1200x60",
    'bucket_rate_tokens_per_second{instance="a", priority="P1"}': "3000x60",
    'bucket_rate_tokens_per_second{instance="b", priority="P1"}': "1800x60",
    'upstream_in_flight_limit{instance="a", upstream="gpu0"}': "96x60",
    'upstream_in_flight_limit{instance="b", upstream="gpu0"}': "32x60",
    # both read the same page of the same engine
    'upstream_kv_usage_ratio{instance="a", upstream="gpu0"}': "0.5x60",
    'upstream_kv_usage_ratio{instance="b", upstream="gpu0"}': "0.5x60",
    # of 30 requests in 10 s the large one keeps its promise to all, of 10 the small one to none
    'slo_attainment_ratio{instance="a", priority="P0", slo="all", view="arrival", of="offered"}': "1x60",
    'slo_attainment_ratio{instance="b", priority="P0", slo="all", view="arrival", of="offered"}': "0x60",
    'slo_requests_total{instance="a", priority="P0", slo="all", verdict="kept"}': "0+30x60",
    'slo_requests_total{instance="b", priority="P0", slo="all", verdict="missed"}': "0+10x60",
    # a gap of a second at the most is promised; the large one keeps it for half, the small one for all
    'slo_target_seconds{instance="a", priority="P0", slo="max_gap"}': "1x60",
    'slo_target_seconds{instance="b", priority="P0", slo="max_gap"}': "1x60",
    'max_token_gap_seconds_bucket{instance="a", priority="P0", le="1.0"}': "0+15x60",
    'max_token_gap_seconds_bucket{instance="a", priority="P0", le="+Inf"}': "0+30x60",
    'max_token_gap_seconds_bucket{instance="b", priority="P0", le="1.0"}': "0+10x60",
    'max_token_gap_seconds_bucket{instance="b", priority="P0", le="+Inf"}': "0+10x60",
    'max_token_gap_seconds_count{instance="a", priority="P0"}': "0+30x60",
    'max_token_gap_seconds_count{instance="b", priority="P0"}': "0+10x60",
    # a class without requests has no share, and takes nothing from that of the others
    'slo_attainment_ratio{instance="b", priority="P1", slo="all", view="arrival", of="offered"}': "0.5x60",
    'slo_requests_total{instance="b", priority="P1", slo="all", verdict="kept"}': "7x60",
}

SHOWN: dict[tuple[str, str], dict[str, float]] = {
    ("controller: Capacity C and its bounds", "C"): {"{}": 12000},
    ("controller: Capacity C and its bounds", "{{bound}} limit"): {'{bound="most"}': 36000},
    ("controller: Rates of the classes", "{{priority}}"): {'{priority="P0"}': 7200, '{priority="P1"}': 4800},
    ("controller: Memory of the engines", "{{upstream}}"): {'{upstream="gpu0"}': 0.5},
    ("engines: In flight, by engine", "{{upstream}} limit"): {'{upstream="gpu0"}': 128},
    ("fleet: Capacity, by replica", "{{instance}}"): {'{instance="a"}': 9000, '{instance="b"}': 3000},
    ("fleet: Rates of the classes, by replica", "{{priority}} {{instance}}"): {
        '{instance="a", priority="P0"}': 6000,
        '{instance="a", priority="P1"}': 3000,
        '{instance="b", priority="P0"}': 1200,
        '{instance="b", priority="P1"}': 1800,
    },
    ("fleet: Places, by replica", "{{instance}}"): {'{instance="a"}': 96, '{instance="b"}': 32},
    ("slo-overview: Kept: of the offered and of the admitted", "{{priority}} of {{of}}"): {
        '{priority="P0", of="offered"}': 0.75
    },
    ("slo-overview: Largest gap: promise kept", "{{priority}}"): {'{priority="P0"}': 0.625},
}
"""Panel and legend → what is seen there with all gateways chosen."""


def expression(panel: str, legend: str) -> str:
    """The first of the panel with this legend."""
    found = (q.expr for where, q in panel_queries() if (where, q.legend) == (panel, legend))
    return without_variables(next(found))


def test_gateways_add_up_where_all_are_chosen(tmp_path: Path) -> None:
    """Amounts are sums, what both read of one engine is there once, and a share counts by its requests."""
    samples = [
        {
            "expr": expression(panel, legend),
            "eval_time": EVALUATED_AT,
            "exp_samples": [{"labels": labels, "value": value} for labels, value in shown.items()],
        }
        for (panel, legend), shown in SHOWN.items()
    ]
    told = promtool(tmp_path, samples)
    assert told == "", told


def test_a_mean_would_be_found_out(tmp_path: Path) -> None:
    """The gateways differ so that a wrong way to add them up gives another figure."""
    mean = 'avg by (priority, of) (qos_gateway_slo_attainment_ratio{priority="P0"})'
    expected = [{"labels": '{priority="P0", of="offered"}', "value": 0.75}]
    told = promtool(tmp_path, [{"expr": mean, "eval_time": EVALUATED_AT, "exp_samples": expected}])
    assert "FAILED" in told
    assert "5E-01" in told


def promtool(folder: Path, samples: list[dict[str, Any]]) -> str:
    """What it has to complain about."""
    series = [
        {"series": "qos_gateway_" + name.replace("{", f'{{job="{JOB}", '), "values": values}
        for name, values in SERIES.items()
    ]
    story = {"interval": "10s", "input_series": series, "promql_expr_test": samples}
    path = folder / "tests.yml"
    path.write_text(yaml.safe_dump({"rule_files": [], "tests": [story]}), encoding="utf-8")
    command = [demanded("promtool"), "test", "rules", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return "" if ran.returncode == 0 else ran.stdout + ran.stderr


@pytest.mark.parametrize("asked", SHOWN, ids=" ".join)
def test_what_is_checked_is_there(asked: tuple[str, str]) -> None:
    """Each panel above is drawn, with that legend."""
    assert expression(*asked)
