"""What starting costs is what it imports: `serve` as users run it, with Python's own list of its imports."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

IMPORTED = re.compile(r"import time: .* \| +(\S+)$", re.MULTILINE)
"""A line of `-X importtime`, which Python writes when the module has been imported, or was not found."""
READY_SECONDS_MAX = 60


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """All modules, in the order in which they were finished, of a gateway that has settled and ended."""
    config = tmp_path_factory.mktemp("start") / "gateway.yaml"
    upstreams = [{"name": "a", "url": "http://127.0.0.1:9"}]
    config.write_text(yaml.safe_dump({"server": {"port": 0, "operations_port": 0}, "upstreams": upstreams}))
    return _imports_of_serving(config)


def _imports_of_serving(config: Path) -> list[str]:
    command = [sys.executable, "-X", "importtime", "-m", "gateway", "serve", "--config", str(config)]
    environ = {name: value for name, value in os.environ.items() if name != "PYDANTIC_DISABLE_PLUGINS"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if b'"event":"ready"' in line)
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(timeout=READY_SECONDS_MAX)
        finally:
            process.kill()
    assert process.returncode == 0, line + output
    return IMPORTED.findall(errors.decode())


@pytest.mark.parametrize(
    "module",
    [
        "matplotlib",
        "rich.text",  # of a package that structlog and httpx import where they find it
        "gateway.calibration",
        "gateway.demo",
        "gateway.mock_backend.app",
        "gateway.simulator.command",
        "tokenizers",
    ],
)
def test_serving_does_not_import_what_it_does_not_need(imported: list[str], module: str) -> None:
    """Other commands, pictures, colours and engines cost nothing that only serves."""
    assert "gateway.server" in imported
    assert module not in imported


def test_the_gateway_is_ready_before_fastapi_is_imported(imported: list[str]) -> None:
    """Its own pages are built beside the work, when everything that serves is there."""
    assert imported.index("gateway.server") < imported.index("fastapi")
