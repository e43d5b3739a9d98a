"""The Dockerfile without building it; `make image-check` builds and runs it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deployment.files import ROOT, arguments, dockerfile, image_environment, settings


def test_hadolint_has_nothing_to_say() -> None:
    """It knows the traps of Dockerfiles."""
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint has no build for this platform")
    ran = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_exposed_ports_are_those_of_the_gateway() -> None:
    """The image's own variables are settings, and leave the ports where EXPOSE has them."""
    server = settings(None, image_environment()).server
    assert dockerfile()["EXPOSE"] == [f"{server.port} {server.operations_port}"]
    assert server.host == "0.0.0.0"
    assert server.operations_host == "127.0.0.1"


def test_the_image_does_not_run_as_root() -> None:
    """By number, since Kubernetes cannot tell from a name that it is not root."""
    user, group = dockerfile()["USER"][-1].split(":")
    assert int(user) > 0
    assert int(group) > 0


def test_what_the_image_runs_is_a_command_of_the_gateway() -> None:
    """Start and health check are spelled as the command line wants them."""
    (entrypoint,) = dockerfile()["ENTRYPOINT"]
    assert json.loads(entrypoint) == ["qos-gateway"]
    assert arguments(json.loads(dockerfile()["CMD"][-1])) == {"config": None}
    _, _, health = dockerfile()["HEALTHCHECK"][-1].partition("CMD ")
    name, *command = json.loads(health)
    assert name == "qos-gateway"
    assert arguments(command)["ready"] is False


def test_all_that_is_copied_reaches_the_builder() -> None:
    """.dockerignore leaves everything out that it does not name."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copies = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    local = {source for sources in copies if not sources[0].startswith("--from") for source in sources}
    assert {source.removeprefix("./") for source in local} == sent
    assert all((ROOT / source).exists() for source in sent)


def test_packages_come_from_the_lock_file_alone() -> None:
    """With their hashes, as built packages; the gateway itself asks no index for anything."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    installs = [line for line in text.splitlines() if "pip install" in line and not line.startswith("#")]
    locked, own = installs
    assert "--require-hashes --only-binary :all: -r requirements-image.lock" in locked
    assert "--no-index --no-deps" in own
