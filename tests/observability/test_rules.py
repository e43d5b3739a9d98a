"""The rules as they are made: complete, current, each with a section of the runbook and a test."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gateway.__main__ import cli
from gateway.alerting.burn_rate import BURN_WINDOWS, missed_ratio_threshold
from gateway.alerting.command import FILE_NAME, rule_groups, rules_text
from gateway.alerting.model import Alert
from gateway.settings import Settings
from tests.observability.expressions import JOB, ROOT, RULES_FOLDER
from tests.observability.real_prometheus import demanded

RUNBOOK = ROOT / "config" / "prometheus" / "RUNBOOK.md"
UNIT_TESTS = sorted((ROOT / "tests" / "observability").glob("alerts*_test.yml"))


def settings(**changes: Any) -> Settings:
    return Settings.model_validate(changes)


def alerts(of: Settings) -> list[Alert]:
    rules = [rule for group in rule_groups(of, JOB) for rule in group.rules]
    return [rule for rule in rules if isinstance(rule, Alert)]


def alert_names() -> list[str]:
    return sorted({alert.name for alert in alerts(Settings())})


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["rules", *arguments])


# ---------------------------------------------------------------------- the command


def test_the_shipped_rules_are_those_of_the_shipped_configuration() -> None:
    """`qos-gateway rules --check` finds nothing to say."""
    config = str(ROOT / "config" / "gateway.yaml")
    assert run("--config", config, "--out", str(RULES_FOLDER), "--check").exit_code == 0
    assert run("--out", str(RULES_FOLDER), "--check").exit_code == 0


def test_rules_are_written_printed_and_compared(tmp_path: Path) -> None:
    """What is printed is what is written; afterwards the folder is current until the promises change."""
    folder = tmp_path / "rules"
    assert run("--out", str(folder), "--check").exit_code == 1
    assert run("--out", str(folder)).exit_code == 0
    assert (folder / FILE_NAME).read_text(encoding="utf-8") == run().stdout
    config = tmp_path / "gateway.yaml"
    config.write_text("slo: {target: 0.97}", encoding="utf-8")
    assert run("--out", str(folder), "--check").exit_code == 0
    assert run("--config", str(config), "--out", str(folder), "--check").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--job", 'a"} or up{b="'), "--job"),
        (("--check",), "--out"),
        (("--config", "nowhere.yaml"), "nowhere.yaml"),
        (("--out", "/dev/null/rules"), "/dev/null"),
    ],
)
def test_a_wrong_option_says_what_is_wrong(arguments: tuple[str, ...], says: str) -> None:
    """Exit status 2 and one line."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.output
    assert "Traceback" not in result.output


def test_job_and_runbook_are_those_that_are_asked_for() -> None:
    """Every expression looks at this job alone, and every alert links to this page."""
    text = rules_text(Settings(), "llm/edge", "https://wiki.example/qos")
    for group in yaml.safe_load(text)["groups"]:
        for rule in group["rules"]:
            assert 'job="llm/edge"' in rule["expr"]
            assert JOB not in rule["expr"]
            if "alert" in rule:
                link = f"https://wiki.example/qos#{rule['alert'].lower()}"
                assert rule["annotations"]["runbook_url"] == link


# ---------------------------------------------------------------------- what follows from the promises


def test_each_promised_class_has_its_alerts() -> None:
    """One for each pair of windows; a class without a promise has none, and no alert can be taken for
    another one."""
    burning = [alert for alert in alerts(Settings()) if alert.name == "QosGatewayErrorBudgetBurn"]
    assert {alert.labels["priority"] for alert in burning} == {"P0", "P1"}
    assert len(burning) == 2 * len(BURN_WINDOWS)
    keys = [(alert.name, *sorted(alert.labels.items())) for alert in alerts(Settings())]
    assert len(set(keys)) == len(keys)


def test_without_promises_the_rest_is_watched_all_the_same() -> None:
    """No group is empty, and there is nothing to record."""
    classes = {name: {"slo": None} for name in ("P0", "P1", "P2")}
    groups = rule_groups(settings(classes=classes), JOB)
    assert all(group.rules for group in groups)
    assert "qos-gateway-slo" not in {group.name for group in groups}
    assert "QosGatewayDown" in {rule.name for g in groups for rule in g.rules if isinstance(rule, Alert)}


@pytest.mark.parametrize(
    ("target", "factor", "threshold"),
    [
        (0.99, 14.4, 0.144),
        (0.99, 1.0, 0.01),
        (0.999, 6.0, 0.006),
        (0.9, 14.4, 0.55),  # 1.44 of all requests can never be missed
        (0.5, 1.0, 0.5),
        (1.0, 1.0, 0.001),  # not a single one
    ],
)
def test_thresholds_are_multiples_of_the_budget_that_can_be_reached(
    target: float, factor: float, threshold: float
) -> None:
    """The burn rate times the budget, less than everything and more than nothing."""
    assert missed_ratio_threshold(target, factor) == pytest.approx(threshold)


def test_a_process_is_slow_by_what_the_promises_bear() -> None:
    """Half of the tightest time per token; without one, 50 ms."""

    def lag(of: Settings) -> str:
        (alert,) = (a for a in alerts(of) if a.name == "QosGatewayEventLoopLag")
        return alert.expr.rpartition("> ")[2]

    assert lag(Settings()) == "0.03"
    assert lag(settings(classes={"P1": {"slo": {"tpot_seconds": 0.02}}})) == "0.01"
    assert lag(settings(classes={name: {"slo": None} for name in ("P0", "P1")})) == "0.05"


def test_models_with_engines_of_their_own_are_watched_by_the_health_of_these() -> None:
    """One alert for each set of engines that not all models share; models of the same engines have one
    together. An engine that serves everything is among the engines of each."""
    engines = {"a.1": ["chat", "write"], "b-2": ["code"], "c": ["code", "chat", "write"]}
    upstreams = [
        {"name": name, "url": f"http://{name}:1", "models": models} for name, models in engines.items()
    ]
    watched = {a.labels["model"]: a.expr.splitlines()[0] for a in own_models(settings(upstreams=upstreams))}
    healthy = 'max by (job, instance) (qos_gateway_upstream_healthy{job="qos-gateway", upstream=~"%s"}) == 0'
    assert watched == {"chat, write": healthy % r"a\\.1|c", "code": healthy % r"b\\-2|c"}
    upstreams[2]["models"] = ["*"]
    assert {a.labels["model"] for a in own_models(settings(upstreams=upstreams))} == watched.keys()


@pytest.mark.parametrize("models", [["*"], ["chat", "code"]])
def test_where_all_engines_serve_the_same_the_endings_tell(models: list[str]) -> None:
    """There is one alert, whose model is that of the requests."""
    upstreams = [{"name": name, "url": f"http://{name}:1", "models": models} for name in "ab"]
    (alert,) = down_models(settings(upstreams=upstreams))
    assert "rejected_no_upstream" in alert.expr
    assert not alert.labels


def test_models_that_no_engine_names_are_watched_by_their_endings() -> None:
    """Also where others have engines of their own: these are left out, since they have their alert."""
    engines = {"a": ["chat"], "b": ["co.de"], "c": ["*"]}
    upstreams = [
        {"name": name, "url": f"http://{name}:1", "models": served} for name, served in engines.items()
    ]
    (alert,) = (a for a in down_models(settings(upstreams=upstreams)) if not a.labels)
    assert r'outcome="rejected_no_upstream", model!~"chat|co\\.de"' in alert.expr


def down_models(of: Settings) -> list[Alert]:
    return [alert for alert in alerts(of) if alert.name == "QosGatewayModelDown"]


def own_models(of: Settings) -> list[Alert]:
    return [alert for alert in down_models(of) if alert.labels]


# ---------------------------------------------------------------------- alerts are documented and tested


@pytest.mark.parametrize("name", alert_names())
def test_the_runbook_has_a_section_for_it(name: str) -> None:
    """What it means, what to look at, what to do: under a heading that the alert's link leads to."""
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOK.read_text("utf-8"), re.M | re.S))
    for part in ("**Means.**", "**Look at.**", "**Do.**"):
        assert part in sections[name]


def test_the_runbook_tells_of_no_other_alerts() -> None:
    """One that was renamed leaves no section behind."""
    named = set(re.findall(r"\bQosGateway\w+", RUNBOOK.read_text("utf-8")))
    assert named == set(alert_names())


@pytest.mark.parametrize("name", alert_names())
def test_it_is_shown_to_fire_and_to_keep_quiet(name: str) -> None:
    """The rules' unit tests have a case of either kind for each alert."""
    fires, quiet = set(), set()
    for path in UNIT_TESTS:
        for story in yaml.safe_load(path.read_text("utf-8"))["tests"]:
            for case in story.get("alert_rule_test", ()):
                (fires if case["exp_alerts"] else quiet).add(case["alertname"])
            for case in story.get("promql_expr_test", ()):
                named = re.findall(r'alertname="(\w+)"', case["expr"])
                (fires if case["exp_samples"] else quiet).update(named)
    assert name in fires
    assert name in quiet


# ---------------------------------------------------------------------- what promtool says


def test_promtool_accepts_rules_and_configuration() -> None:
    """The files that Prometheus would read."""
    promtool = demanded("promtool")
    for arguments in (
        ["check", "rules", str(RULES_FOLDER / FILE_NAME)],
        ["check", "config", "--syntax-only", str(ROOT / "config" / "prometheus" / "prometheus.yml")],
    ):
        checked = subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=60)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_models_with_engines_of_their_own_are_told_of_by_name(tmp_path: Path) -> None:
    """Whatever signs are in the names: those of engines stand in a regular expression in a string, so they
    are escaped twice, and those of models in templates. Another model, which the engine for all the rest
    served, is told of when its requests have failed; its own alert does not repeat the others."""
    engine, model = 'a.1|"é', 'org/chat {{ "v1" }}'
    served = {engine: [model], "b": ["code"], "c": ["*"]}
    upstreams = [{"name": name, "url": "http://x:1", "models": models} for name, models in served.items()]
    (tmp_path / "rules.yml").write_text(rules_text(settings(upstreams=upstreams), JOB, "r"), "utf-8")
    at = {"job": JOB, "instance": "i"}
    healthy = {engine: "0x9", "b": "1x9", "c": "0x9"}
    refused = {"outcome": "rejected_no_upstream", "priority": "P1", "tenant": "t"}
    story = {
        "interval": "1m",
        "input_series": [
            {"series": series("qos_gateway_upstream_healthy", **at, upstream=name), "values": values}
            for name, values in healthy.items()
        ]
        + [
            {"series": series("qos_gateway_requests_total", **at, **refused, model=name), "values": "0+6x9"}
            for name in ("code", "new")
        ],
        "alert_rule_test": [
            {
                "eval_time": "8m",
                "alertname": "QosGatewayModelDown",
                "exp_alerts": [
                    {
                        "exp_labels": {**at, "model": model, "severity": "critical"},
                        "exp_annotations": {
                            "summary": f"i has no engine left for {model}",
                            "description": f"Down at i: {engine}, c. Other models are served; requests for "
                            f"{model} wait, then get 503.",
                            "runbook_url": "r#qosgatewaymodeldown",
                        },
                    },
                    {
                        "exp_labels": {**at, "model": "new", "severity": "critical"},
                        "exp_annotations": {
                            "summary": "i has no engine left for new",
                            "description": "For 3 minutes requests for new have got 503 because its engines "
                            "are down, while others of i are up.",
                            "runbook_url": "r#qosgatewaymodeldown",
                        },
                    },
                ],
            }
        ],
    }
    (tmp_path / "tests.yml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yml"], "tests": [story]}), "utf-8"
    )
    command = [demanded("promtool"), "test", "rules", str(tmp_path / "tests.yml")]
    tested = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def series(name: str, **labels: str) -> str:
    return name + "{" + ", ".join(f"{label}={json.dumps(value)}" for label, value in labels.items()) + "}"


@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should(path: Path) -> None:
    """The rules' own unit tests, with the rules that are shipped."""
    tested = subprocess.run(
        [demanded("promtool"), "test", "rules", str(path)], capture_output=True, text=True, timeout=300
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
