"""What the image does when it runs. `tests.containers` starts this in namespaces of its own:

    unshare --mount --net --pid --fork --kill-child python -m tests.containers.inside ROOT IMAGE_CONFIG LOGS

Ends with the number of checks that failed.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.containers.image import ImageConfig
from tests.containers.pod import Pod, Service, bring_loopback_up
from tests.containers.report import Report
from tests.deployment.files import ROOT, compose
from tests.support.store_servers import binary_of as store_binary

READY_SECONDS_MAX = 60.0
HEALTH_SECONDS_MAX = 10.0
"""The time-out of the health checks."""
ENDED_BY_SIGTERM = {0, 143, -15}
QUESTION: dict[str, Any] = {
    "model": "mock-gpu",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "hi"}],
}
TOKEN = "of-this-check"


def main() -> int:
    root, image, logs = Path(sys.argv[1]), ImageConfig(**json.loads(sys.argv[2])), Path(sys.argv[3])
    bring_loopback_up()
    report = Report()
    pod = Pod(root, image, ROOT / "config", tuple(compose()))
    check_by_itself(pod, image, logs, report)
    check_as_composed(pod, logs, report)
    check_as_fleet(pod, logs, report)
    return report.failed


def check_by_itself(pod: Pod, image: ImageConfig, logs: Path, report: Report) -> None:
    """As `docker run --read-only --cap-drop ALL IMAGE`: the embedded mock GPU, no configuration."""
    service = pod.start(logs / "by-itself.log")
    try:
        if not _becomes_healthy(pod, service, image.health, report):
            return
        _check_rights(pod, service, image, report)
        _check_answers("http://127.0.0.1:8000", report)
        _check_end(service, {0}, report)
    finally:
        service.kill()
    again = pod.run(*image.health[1:])
    report.check(again.returncode == 1, "the health check says no once it has ended", again.stderr.strip())


def check_as_composed(pod: Pod, logs: Path, report: Report) -> None:
    """The mock GPU and the gateway with the commands, variables and health checks of docker-compose.yml."""
    services = compose(OPERATIONS_TOKEN=TOKEN)
    running: list[Service] = []
    try:
        for name in ("mock-gpu", "gateway"):
            service, variables = services[name], services[name].get("environment", {})
            running.append(pod.start(logs / f"{name}.log", *service["command"], environment=variables))
            if not _becomes_healthy(pod, running[-1], service["healthcheck"]["test"], report):
                return
        _check_answers("http://127.0.0.1:8000", report)
        metrics = "http://127.0.0.1:8001/metrics"
        refused = httpx.get(metrics, trust_env=False).status_code
        report.check(refused == 401, "metrics without the token", refused)
        page = httpx.get(metrics, headers={"authorization": f"Bearer {TOKEN}"}, trust_env=False)
        healthy = 'qos_gateway_upstream_healthy{upstream="gpu0"} 1.0' in page.text
        report.check(page.status_code == 200 and healthy, "metrics with it, and the engine is up there")
        for each in reversed(running):
            _check_end(each, ENDED_BY_SIGTERM, report)
    finally:
        for each in running:
            each.kill()


def check_as_fleet(pod: Pod, logs: Path, report: Report) -> None:
    """The two gateways of the profile `redis`. A Valkey of this machine, with the store's options, stands in
    for its image; and since all is one network here, the second gateway gets ports of its own."""
    binary = store_binary("valkey")
    if binary is None:
        report.skip("two gateways with one state", "no valkey-server here")
        return
    services = compose(GATEWAY_CONFIG="compose-redis.yaml", OPERATIONS_TOKEN=TOKEN)
    ports = {"gateway": 8001, "gateway-2": 8011}
    others = {"QOS_SERVER__PORT": "8010", "QOS_SERVER__OPERATIONS_PORT": "8011"}
    store = subprocess.Popen([binary, *services["store"]["command"][1:]], stdout=subprocess.DEVNULL)
    running: list[Service] = []
    try:
        for name in ("mock-gpu", *ports):
            service = services[name]
            variables = service.get("environment", {}) | (others if name == "gateway-2" else {})
            log = logs / f"fleet-{name}.log"
            running.append(pod.start(log, *service["command"], environment=variables))
        for name, port in ports.items():
            share = _eventually(partial(_shares, port), lambda: any(each.ended for each in running))
            said = (logs / f"fleet-{name}.log").read_text(encoding="utf-8")
            report.check(share, f"{name} shares its state with one other", "" if share else said[-2000:])
        for each in reversed(running):
            _check_end(each, ENDED_BY_SIGTERM, report)
    finally:
        for each in running:
            each.kill()
        store.kill()
        store.wait()


def _shares(port: int) -> bool:
    try:
        answer = httpx.get(
            f"http://127.0.0.1:{port}/metrics", headers={"authorization": f"Bearer {TOKEN}"}, trust_env=False
        )
    except httpx.TransportError:
        return False
    shown = ('qos_gateway_fleet_state{state="shared"} 1.0', "qos_gateway_fleet_replicas 2.0")
    return all(line in answer.text for line in shown)


def _becomes_healthy(pod: Pod, service: Service, health: list[str], report: Report) -> bool:
    """By its own health check, which takes its time but not too much."""
    _, *command = health
    began = time.monotonic()
    if not _eventually(lambda: pod.run(*command).returncode == 0, lambda: service.ended):
        report.check(
            False, f"{service.command} becomes healthy", service.log.read_text(encoding="utf-8")[-2000:]
        )
        return False
    report.check(True, f"{service.command} is healthy", f"after {time.monotonic() - began:.1f} s")
    began = time.monotonic()
    status = pod.run(*command).returncode
    took_seconds = time.monotonic() - began
    what = "and says so again within the time-out"
    report.check(status == 0 and took_seconds < HEALTH_SECONDS_MAX, what, f"{took_seconds:.2f} s")
    return True


def _eventually(holds: Callable[[], bool], hopeless: Callable[[], bool]) -> bool:
    until = time.monotonic() + READY_SECONDS_MAX
    while time.monotonic() < until and not hopeless():
        if holds():
            return True
        time.sleep(0.2)
    return False


def _check_rights(pod: Pod, service: Service, image: ImageConfig, report: Report) -> None:
    """Who the process is, from the kernel; and whether it could leave anything behind."""
    status = service.status()
    user, group = image.user.split(":")
    report.check(set(status["Uid"].split()) == {user}, "its user", status["Uid"].split()[0])
    report.check(
        set(status["Gid"].split()) == {group}, "its group, and no other", status["Groups"].strip() or group
    )
    report.check(int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0, "no capabilities")
    report.check(status["NoNewPrivs"].strip() == "1", "no way to gain any")
    report.check(status["NSpid"].split()[-1] == "1", "it is process 1 of its container")
    for folder in ("/tmp", "/config", image.environment.get("HOME", "/opt")):
        report.check(pod.run("touch", f"{folder}/x").returncode != 0, f"{folder} cannot be written")


def _check_answers(url: str, report: Report) -> None:
    curl = ["curl", "-sS", "--max-time", "10", f"{url}/v1/chat/completions", "-d", json.dumps(QUESTION)]
    plain = json.loads(subprocess.run(curl, capture_output=True, text=True, check=True).stdout)
    tokens = plain.get("usage", {}).get("completion_tokens")
    report.check(tokens == QUESTION["max_tokens"], "curl gets an answer", f"{tokens} tokens")
    stream = httpx.post(f"{url}/v1/chat/completions", json={**QUESTION, "stream": True}, trust_env=False)
    report.check(stream.text.endswith("data: [DONE]\n\n"), "and a stream, to its end")
    for path in ("/healthz", "/readyz"):
        status = httpx.get(url + path, trust_env=False).status_code
        report.check(status == 200, path, status)


def _check_end(service: Service, expected: set[int], report: Report) -> None:
    began = time.monotonic()
    status = service.stop()
    took = f"status {status} after {time.monotonic() - began:.1f} s"
    report.check(status in expected, f"SIGTERM ends {service.command}", took)
    said = service.log.read_text(encoding="utf-8")
    report.check(
        "Traceback" not in said,
        "and it had nothing to complain about",
        said[-1000:] if "Traceback" in said else "",
    )


if __name__ == "__main__":
    sys.exit(main())
