"""config/kubernetes: against the schemas of Kubernetes, and against what the gateway understands."""

import copy
import shutil
import subprocess
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from gateway.keys import load_keys
from tests.deployment.files import KUBERNETES, ROOT, arguments, dockerfile, read, seconds, settings

OLDEST, NEWEST = "1.30", kubernetes_validate.latest_version().removesuffix(".0")
NOT_MANIFESTS = {"kustomization.yaml", "gateway.yaml"}
MIB = 2**20
SHARED_STATE = "config/kubernetes/examples/shared-state"
AUTOSCALED = "config/kubernetes/examples/autoscaled"
OWN_MEMORY = 256 * MIB
"""Of a gateway under load, without the bodies of waiting requests."""

_TEXT = {"type": "string", "minLength": 1}
POD_MONITOR: dict[str, Any] = {
    # Written from the reference of the Prometheus Operator's API, as far as it is used here, and closed: a
    # field that is not listed may well exist, but has to be looked up before it is listed.
    "type": "object",
    "required": ["podMetricsEndpoints", "selector"],
    "additionalProperties": False,
    "properties": {
        "jobLabel": _TEXT,
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "additionalProperties": False,
            "properties": {"matchLabels": {"type": "object", "additionalProperties": _TEXT}},
        },
        "podMetricsEndpoints": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["port"],
                "additionalProperties": False,
                "properties": {
                    "port": _TEXT,
                    "path": {"type": "string", "pattern": "^/"},
                    "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
                    "scrapeTimeout": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
                    "authorization": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "type": _TEXT,
                            "credentials": {
                                "type": "object",
                                "required": ["name", "key"],
                                "additionalProperties": False,
                                "properties": {"name": _TEXT, "key": _TEXT},
                            },
                        },
                    },
                },
            },
        },
    },
}


def _documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        if path.name not in NOT_MANIFESTS:
            for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
                yield f"{path.name}:{document['metadata']['name']}", document


DOCUMENTS = dict(_documents())


def _one(kind: str) -> dict[str, Any]:
    (found,) = (document for document in DOCUMENTS.values() if document["kind"] == kind)
    return found


def _pod() -> dict[str, Any]:
    pod: dict[str, Any] = _one("Deployment")["spec"]["template"]
    return pod


def _container() -> dict[str, Any]:
    (container,) = _pod()["spec"]["containers"]
    return dict(container)


def _environment() -> dict[str, str]:
    """What comes from the Secret is any text here."""
    return {entry["name"]: entry.get("value", "from-the-secret") for entry in _container()["env"]}


def _ports() -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in _container()["ports"]}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", [name for name, each in DOCUMENTS.items() if each["kind"] != "PodMonitor"])
def test_a_manifest_is_what_kubernetes_allows(name: str, version: str) -> None:
    """Strictly: with no field that this version does not know."""
    assert kubernetes_validate.validate(DOCUMENTS[name], version, strict=True) == version


def test_the_schemas_refuse_a_misspelt_field() -> None:
    """Else the test above would say nothing."""
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"selektor": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, NEWEST, strict=True)


def test_the_pod_monitor_is_what_the_operator_allows() -> None:
    """As far as the operator's reference was copied into POD_MONITOR."""
    monitor = _one("PodMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    jsonschema.Draft202012Validator(POD_MONITOR).validate(monitor["spec"])
    endpoint = monitor["spec"]["podMetricsEndpoints"][0]
    assert seconds(endpoint["scrapeTimeout"]) <= seconds(endpoint["interval"])
    assert endpoint["interval"] == read("config/prometheus/prometheus.yml")["global"]["scrape_interval"]


def test_alert_rules_find_the_gateway_under_its_job() -> None:
    """The operator names a job after namespace and monitor, unless it is told which label has the name."""
    jobs = {job["job_name"] for job in read("config/prometheus/prometheus.yml")["scrape_configs"]}
    assert _pod()["metadata"]["labels"][_one("PodMonitor")["spec"]["jobLabel"]] in jobs


def test_one_command_applies_all_of_it() -> None:
    """The kustomization names every manifest beside it, and makes the ConfigMap that is mounted."""
    kustomization = read("config/kubernetes/kustomization.yaml")
    there = {path.name for path in KUBERNETES.glob("*.yaml")}
    assert set(kustomization["resources"]) == there - NOT_MANIFESTS
    (generated,) = kustomization["configMapGenerator"]
    assert generated["files"] == ["gateway.yaml"]
    volumes = {volume["name"]: volume for volume in _pod()["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] == generated["name"]


def test_the_configuration_is_accepted_where_it_is_mounted(tmp_path: Path) -> None:
    """Config and keys lie where the command and the configuration look for them."""
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in _container()["volumeMounts"]}
    assert arguments(_container()["args"])["config"] == mounts["config"] / "gateway.yaml"
    found = settings(KUBERNETES / "gateway.yaml", _environment())
    volumes = {volume["name"]: volume for volume in _pod()["spec"]["volumes"]}
    (item,) = volumes["keys"]["secret"]["items"]
    assert found.keys_file == mounts["keys"] / item["path"]
    assert len(load_keys(ROOT / "config/keys.example.yaml")) > 0
    assert {upstream.engine_priority for upstream in found.upstreams} == {"vllm"}


def test_ports_are_those_the_gateway_listens_on() -> None:
    """For probes, Services and the monitor by name."""
    server = settings(KUBERNETES / "gateway.yaml", _environment()).server
    assert _ports() == {"api": server.port, "operations": server.operations_port}
    assert server.host == server.operations_host == "0.0.0.0"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert _container()[probe]["httpGet"]["port"] == "api"
    for document in (each for each in DOCUMENTS.values() if each["kind"] == "Service"):
        for port in document["spec"]["ports"]:
            assert _ports()[port["targetPort"]] == port["port"]
    for endpoint in _one("PodMonitor")["spec"]["podMetricsEndpoints"]:
        assert endpoint["port"] == "operations"


def test_everything_selects_the_pods_that_the_deployment_makes() -> None:
    """A label that differs would leave a Service without endpoints, silently."""
    labels = _pod()["metadata"]["labels"].items()
    selectors = [each["spec"]["selector"] for each in DOCUMENTS.values() if "selector" in each["spec"]]
    assert len(selectors) == 5
    for selector in selectors:
        assert selector.get("matchLabels", selector).items() <= labels


def test_one_secret_holds_what_all_ask_for() -> None:
    """Keys and token, under the names that the README's command gives them."""
    token = next(entry["valueFrom"]["secretKeyRef"] for entry in _container()["env"] if "valueFrom" in entry)
    assert _one("PodMonitor")["spec"]["podMetricsEndpoints"][0]["authorization"]["credentials"] == token
    keys = next(volume["secret"] for volume in _pod()["spec"]["volumes"] if "secret" in volume)
    assert keys["secretName"] == token["name"]
    readme = (KUBERNETES / "README.md").read_text(encoding="utf-8")
    assert f"create secret generic {token['name']} " in readme
    assert f"--from-file={keys['items'][0]['key']} " in readme
    assert f"--from-literal={token['key']}=" in readme


def test_streams_may_end_before_the_pod_is_killed() -> None:
    """The grace period covers the wait before SIGTERM and the drain after it."""
    drain_seconds = settings(KUBERNETES / "gateway.yaml", _environment()).server.drain_seconds
    command, wait_seconds = _container()["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert _pod()["spec"]["terminationGracePeriodSeconds"] >= int(wait_seconds) + drain_seconds + 5


def test_the_pod_runs_as_the_images_user_and_with_the_least_it_can() -> None:
    """What a restricted namespace asks for."""
    pod, container = _pod()["spec"]["securityContext"], _container()["securityContext"]
    assert f"{pod['runAsUser']}:{pod['runAsGroup']}" == dockerfile()["USER"][-1]
    assert pod["runAsNonRoot"] is True
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert _pod()["spec"]["automountServiceAccountToken"] is False


def test_full_queues_fit_into_the_memory() -> None:
    """Or a burst of large bodies would end the pod instead of being refused."""
    found = settings(KUBERNETES / "gateway.yaml", _environment())
    limit = _container()["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    queued = sum(found.classes[name].max_queued_bytes or 0 for name in ("P0", "P1", "P2"))
    assert queued + OWN_MEMORY <= int(limit.removesuffix("Gi")) * 1024 * MIB
    assert f"{queued // MIB} MiB" in (KUBERNETES / "README.md").read_text(encoding="utf-8")


def test_there_is_one_gateway() -> None:
    """Unless several share a budget; and it can still be moved to another node."""
    assert _one("Deployment")["spec"]["replicas"] == 1
    assert _one("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


# ---------------------------------------------------------------------- several gateways


def _of_a_fleet() -> dict[str, Any]:
    """The Deployment with the component's patches, all of which add something."""
    component = read(f"{SHARED_STATE}/kustomization.yaml")
    deployment = copy.deepcopy(_one("Deployment"))
    (replicas,) = component["replicas"]
    (patch,) = component["patches"]
    for target in (replicas["name"], patch["target"]["name"]):
        assert target == deployment["metadata"]["name"]
    deployment["spec"]["replicas"] = replicas["count"]
    for operation in yaml.safe_load(patch["patch"]):
        assert operation["op"] == "add"
        *way, last = operation["path"].strip("/").split("/")
        place: Any = deployment
        for step in way:
            place = place[int(step) if step.isdigit() else step]
        if last == "-":
            place.append(operation["value"])
        else:
            place[last] = operation["value"]
    return deployment


def _autoscaled() -> dict[str, Any]:
    """The same with the next component's patch, which has to be for this Deployment and its container."""
    (patch,) = read(f"{AUTOSCALED}/kustomization.yaml")["patches"]
    changes = yaml.safe_load(patch["patch"])
    before = _of_a_fleet()
    assert (before["kind"], before["metadata"]["name"]) == (patch["target"]["kind"], patch["target"]["name"])
    assert changes["metadata"] == {"name": before["metadata"]["name"]}
    found: dict[str, Any] = _merged(before, changes)
    return found


def _merged(old: Any, new: Any) -> Any:
    """By the rules of a strategic merge, as far as the patch needs them: null takes a field away, and entries
    of a list are the same if they have the same name."""
    if isinstance(old, dict) and isinstance(new, dict):
        both = {key: _merged(old.get(key), value) for key, value in new.items()}
        return {key: value for key, value in {**old, **both}.items() if value is not None}
    if isinstance(old, list) and isinstance(new, list):
        named = {entry["name"]: entry for entry in old}
        return list(
            {**named, **{each["name"]: _merged(named.get(each["name"]), each) for each in new}}.values()
        )
    return new


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("patched", [_of_a_fleet, _autoscaled])
def test_a_gateway_of_several_is_what_kubernetes_allows(
    version: str, patched: Callable[[], dict[str, Any]]
) -> None:
    """With all that the components add."""
    assert kubernetes_validate.validate(patched(), version, strict=True) == version


def test_several_gateways_share_a_state_whose_address_is_secret() -> None:
    """The Secret is the one that the README's command makes, and what they are told is a valid configuration
    in which as many are assumed as there are."""
    deployment = _of_a_fleet()
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry for entry in container["env"]}
    secret = environment["QOS_STATE"]["valueFrom"]["secretKeyRef"]
    readme = (KUBERNETES / "README.md").read_text(encoding="utf-8")
    assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in readme
    told = {name: entry.get("value", "from-the-secret") for name, entry in environment.items()}
    found = settings(KUBERNETES / "gateway.yaml", told | {"QOS_STATE": "rediss://user:password@store:6379/0"})
    assert found.fleet.replicas_assumed == deployment["spec"]["replicas"] > 1


def test_several_gateways_are_spread_over_nodes() -> None:
    """By the label that the pods have."""
    pod = _of_a_fleet()["spec"]["template"]
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_the_autoscaler_of_gateways_goes_by_their_cpu() -> None:
    """Of this Deployment, never below two, and the pods say how much CPU is all of it."""
    scaler = DOCUMENTS["gateway-autoscaler.yaml:qos-gateway"]["spec"]
    deployment = _one("Deployment")
    assert scaler["scaleTargetRef"]["kind"] == deployment["kind"]
    assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert 1 < scaler["minReplicas"] < scaler["maxReplicas"]
    (metric,) = scaler["metrics"]
    assert metric["resource"]["name"] in _container()["resources"]["requests"]


def test_the_number_of_autoscaled_gateways_is_the_autoscalers() -> None:
    """The Deployment says none, and those that have not reached the store divide by the most there may be.
    Else it has what a fleet of a fixed number has, and each variable once."""
    before, after = _of_a_fleet()["spec"], _autoscaled()["spec"]
    del before["replicas"]
    (variable,) = (
        entry
        for entry in before["template"]["spec"]["containers"][0]["env"]
        if entry["name"] == "QOS_FLEET__REPLICAS_ASSUMED"
    )
    most = DOCUMENTS["gateway-autoscaler.yaml:qos-gateway"]["spec"]["maxReplicas"]
    assert variable["value"] != str(most)  # or the component would change nothing
    variable["value"] = str(most)
    assert after == before


@pytest.mark.parametrize(
    ("line", "patched"),
    [
        ("components: [examples/shared-state]", _of_a_fleet),
        ("components: [examples/shared-state, examples/autoscaled]", _autoscaled),
    ],
)
def test_kustomize_puts_it_together(tmp_path: Path, line: str, patched: Callable[[], dict[str, Any]]) -> None:
    """As kubectl would apply it once a line in kustomization.yaml is no comment any longer."""
    text = (KUBERNETES / "kustomization.yaml").read_text(encoding="utf-8")
    assert f"# {line}\n" in text
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here")
    folder = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, folder)
    path = folder / "kustomization.yaml"
    path.write_text(text.replace(f"# {line}\n", f"{line}\n"), encoding="utf-8")
    ran = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    (built,) = (each for each in yaml.safe_load_all(ran.stdout) if each["kind"] == "Deployment")
    wanted = patched()["spec"]
    assert built["spec"].get("replicas") == wanted.get("replicas")
    for part in ("containers", "topologySpreadConstraints"):
        assert _in_order(built, part) == _in_order({"spec": wanted}, part)


def _in_order(deployment: dict[str, Any], part: str) -> Any:
    """A part of its pods; a merge may put variables in another order, which does not matter."""
    entries = copy.deepcopy(deployment["spec"]["template"]["spec"][part])
    for entry in entries:
        entry.get("env", []).sort(key=itemgetter("name"))
    return entries
