"""docker-compose.yml: against its schema, and against what the gateway understands."""

import json
import re
import tomllib
from importlib.resources import files
from typing import Any

import pytest
from jsonschema.validators import validator_for

from tests.deployment.files import (
    ROOT,
    arguments,
    compose,
    image_environment,
    interpolated,
    read,
    seconds,
    settings,
)

DEFAULT = {"gateway", "mock-gpu", "prometheus", "grafana"}
CONFIGS = {"compose-mock.yaml": "mock-gpu", "compose-vllm.yaml": "vllm", "compose-redis.yaml": "mock-gpu"}
"""Configuration → the service that is its engine."""
GATEWAYS = ("gateway", "gateway-2")


def _gateway_environment(name: str = "gateway") -> dict[str, str]:
    return {**image_environment(), **compose()[name]["environment"]}


def _published(published: str) -> tuple[int, int]:
    """(port of this machine, port of the container); fails for what other machines can reach."""
    match = re.fullmatch(r"127\.0\.0\.1:(\d+):(\d+)", published)
    assert match, f"{published} is not on this machine's loopback"
    return int(match[1]), int(match[2])


def _listens_on(service: dict[str, Any]) -> int:
    words = [word for argument in service["command"] for word in str(argument).split("=")]
    return int(words[words.index("--port") + 1])


def test_the_file_is_what_the_compose_specification_allows() -> None:
    """The schema comes with check-jsonschema, which keeps it up to date."""
    text = (files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text(
        encoding="utf-8"
    )
    schema = json.loads(text)
    validator = validator_for(schema)(schema)
    found = [
        f"{list(error.path)}: {error.message}" for error in validator.iter_errors(read("docker-compose.yml"))
    ]
    assert found == []
    assert list(validator.iter_errors({"services": {"gateway": {"imagee": "x"}}})), (
        "the schema refuses nothing"
    )


def test_without_a_profile_nothing_needs_a_gpu() -> None:
    """The rest waits for its profile."""
    services = compose()
    assert {name for name, service in services.items() if not service.get("profiles")} == DEFAULT
    assert not any("deploy" in services[name] for name in DEFAULT)


@pytest.mark.parametrize("name", compose())
def test_a_service_is_pinned_watched_and_closed(name: str) -> None:
    """A version with three parts, a health check, and no port that other machines can reach."""
    service = compose()[name]
    assert re.search(r":v?\d+\.\d+\.\d+(-alpine)?$", service["image"])
    assert {"test", "interval", "timeout", "start_period", "retries"} == service["healthcheck"].keys()
    ports = [_published(each) for each in service.get("ports", ())]
    assert len(set(ports)) == len(ports)


def test_no_two_services_want_the_same_port() -> None:
    """Whatever profiles are on."""
    taken = [_published(port)[0] for each in compose().values() for port in each.get("ports", ())]
    assert len(set(taken)) == len(taken)


def test_a_service_starts_once_those_it_needs_are_healthy() -> None:
    """Started does not mean that it answers; and nothing needs what a profile alone would start."""
    services = compose()
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            assert how["condition"] == "service_healthy"
            profiles = services[needed].get("profiles")
            if profiles and (name in GATEWAYS or profiles != service.get("profiles")):
                assert how["required"] is False, f"{name} would not start without the profile of {needed}"
    for name in GATEWAYS:
        assert set(services[name]["depends_on"]) == {"mock-gpu", "vllm", "store"}
    assert set(services["prometheus"]["depends_on"]) == {"gateway"}
    assert set(services["grafana"]["depends_on"]) == {"prometheus"}


@pytest.mark.parametrize("service", [*GATEWAYS, "mock-gpu"])
def test_the_gateways_own_image_runs_with_the_least_it_can(service: str) -> None:
    """No root file system to write to, no capabilities, none to gain; built here."""
    found = compose()[service]
    assert found["read_only"] is True
    assert found["cap_drop"] == ["ALL"]
    assert found["security_opt"] == ["no-new-privileges:true"]
    assert found["build"] == "."
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert found["image"] == f"qos-gateway:{version}"


@pytest.mark.parametrize(("config", "engine"), CONFIGS.items())
def test_a_configuration_is_accepted_and_finds_its_engine(config: str, engine: str) -> None:
    """File and variables together are valid, and the engine is a service that listens there."""
    for name in GATEWAYS:
        service = compose(GATEWAY_CONFIG=config)[name]
        path = arguments(service["command"])["config"]
        assert path.parts[:2] == ("/", "config")
        assert path.name == config
        assert "./config:/config:ro" in service["volumes"]
        found = settings(ROOT / "config" / config, _gateway_environment(name))
        (upstream,) = found.upstreams
        assert upstream.url == f"http://{engine}:{_listens_on(compose()[engine])}"


def test_the_mock_gpu_is_what_the_gateway_gets_when_nothing_is_said() -> None:
    """And it understands its command."""
    assert arguments(compose()["gateway"]["command"])["config"].name == "compose-mock.yaml"
    mock = arguments(compose()["mock-gpu"]["command"])
    assert mock["host"] == "0.0.0.0"
    assert mock["preset"] == "seed_32k"


@pytest.mark.parametrize("name", GATEWAYS)
@pytest.mark.parametrize("config", CONFIGS)
def test_ports_and_times_of_the_gateway_agree(config: str, name: str) -> None:
    """It listens on the published ports, its health check asks there, and SIGKILL comes after the drain."""
    service = compose()[name]
    server = settings(ROOT / "config" / config, _gateway_environment(name)).server
    assert [_published(port)[1] for port in service["ports"]] == [server.port, server.operations_port]
    assert server.host == server.operations_host == "0.0.0.0"
    assert seconds(service["stop_grace_period"]) > server.drain_seconds
    command, program, *words = service["healthcheck"]["test"]
    assert (command, program) == ("CMD", "qos-gateway")
    assert arguments(words)["config"] is None
    assert settings(None, image_environment()).server.port == server.port


def test_both_gateways_run_with_the_same_configuration() -> None:
    """Whatever the variable says, and when it says nothing: two that share a budget have to agree on it."""
    for services in (read("docker-compose.yml")["services"], compose(), compose(GATEWAY_CONFIG="own.yaml")):
        first, second = (services[name]["command"] for name in GATEWAYS)
        assert first == second
    assert arguments(second)["config"].name == "own.yaml"


def test_both_gateways_share_the_state_that_the_store_keeps() -> None:
    """They find the store at the port it listens on; it keeps nothing on disk and evicts nothing."""
    services = compose(GATEWAY_CONFIG="compose-redis.yaml")
    found = settings(ROOT / "config/compose-redis.yaml", _gateway_environment())
    assert read("config/compose-redis.yaml")["state"] == "redis://store:6379/0"
    assert found.fleet.replicas_assumed == len(GATEWAYS)
    store = services["store"]
    program, *options = store["command"]
    assert program == "valkey-server"
    said = dict(zip(options[::2], options[1::2], strict=True))
    assert said["--save"] == ""
    assert said["--maxmemory-policy"] == "noeviction"
    assert "--port" not in said  # so it is 6379
    assert store["profiles"] == services["gateway-2"]["profiles"] == ["redis"]
    assert not store["ports"]


def test_the_store_runs_with_the_least_it_can() -> None:
    """Not root, no root file system to write to, no capabilities, none to gain."""
    store = compose()["store"]
    assert int(store["user"].split(":")[0]) > 0
    assert store["read_only"] is True
    assert store["cap_drop"] == ["ALL"]
    assert store["security_opt"] == ["no-new-privileges:true"]


def test_the_engine_takes_what_the_gateway_sends() -> None:
    """As many sequences as places, and it goes by the priorities it is told."""
    (upstream,) = settings(ROOT / "config/compose-vllm.yaml", {}).upstreams
    flags = compose()["vllm"]["command"]
    assert f"--max-num-seqs={upstream.max_in_flight}" in flags
    assert upstream.engine_priority == "vllm"
    assert "--scheduling-policy=priority" in flags


def test_prometheus_may_read_what_it_scrapes() -> None:
    """The targets are the gateways' operators' ports, and the token is theirs. One that comes with a profile
    is looked up by name: as a static target it would count as down while nobody has started it."""
    whole = read("docker-compose.yml")
    prometheus = compose()["prometheus"]
    folder = next(v.split(":") for v in prometheus["volumes"] if v.startswith("./config/prometheus"))
    (flag,) = (word for word in prometheus["command"] if word.startswith("--config.file="))
    assert flag == f"--config.file={folder[1]}/prometheus.yml"
    scraped = read("config/prometheus/prometheus.yml")
    (job,) = (job for job in scraped["scrape_configs"] if job["job_name"] == "qos-gateway")
    (token,) = prometheus["configs"]
    assert job["authorization"]["credentials_file"] == token["target"]
    assert not token["target"].startswith(folder[1] + "/"), (
        "nothing can be put into a folder mounted read-only"
    )
    told = interpolated(whole["configs"][token["source"]]["content"], OPERATIONS_TOKEN="a")
    for name in GATEWAYS:
        assert compose(OPERATIONS_TOKEN="a")[name]["environment"]["QOS_SERVER__OPERATIONS_TOKEN"] == told
    port = settings(None, _gateway_environment()).server.operations_port
    assert [target for each in job["static_configs"] for target in each["targets"]] == [f"gateway:{port}"]
    (looked_up,) = job["dns_sd_configs"]
    assert looked_up["names"] == ["gateway-2"]
    assert (looked_up["type"], looked_up["port"]) == ("A", port)
    (relabelled,) = job["relabel_configs"]
    assert relabelled["replacement"] == f"$1:{port}"


def test_grafana_asks_the_prometheus_beside_it() -> None:
    """Its data source is that service, and the dashboard it opens with is one of those it gets."""
    (source,) = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    (_, port) = _published(compose()["prometheus"]["ports"][0])
    assert source["url"] == f"http://prometheus:{port}"
    grafana = compose()["grafana"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    folder, _, name = home.rpartition("/")
    assert f"./grafana/dashboards:{folder}:ro" in grafana["volumes"]
    assert (ROOT / "grafana/dashboards" / name).is_file()
    (provider,) = read("grafana/provisioning/dashboards/gateway.yaml")["providers"]
    assert provider["options"]["path"] == folder


def test_all_that_is_mounted_from_the_repository_is_there() -> None:
    """Docker would make an empty folder of a name it does not find."""
    for service in compose().values():
        for volume in service.get("volumes", ()):
            source, _, how = volume.split(":") if volume.startswith("./") else (".", "", "ro")
            assert (ROOT / source).exists()
            assert how == "ro"
