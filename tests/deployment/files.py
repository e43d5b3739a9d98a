"""The files a deployment is made of, as the tests read them: Dockerfile, compose file, manifests."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import typer
import yaml

from gateway.__main__ import cli
from gateway.settings import Settings, load_settings

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "config" / "kubernetes"

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def interpolated(value: Any, **variables: str) -> Any:
    """A part of the compose file as Compose sees it where only these variables are set."""
    if isinstance(value, dict):
        return {key: interpolated(inner, **variables) for key, inner in value.items()}
    if isinstance(value, list):
        return [interpolated(inner, **variables) for inner in value]
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: variables.get(match[1], match[2] or ""), value)
    return value


def compose(**variables: str) -> dict[str, Any]:
    """The services by name."""
    services: dict[str, Any] = interpolated(read("docker-compose.yml")["services"], **variables)
    return services


def seconds(duration: str) -> int:
    """Of a duration in one unit, as in `40s`."""
    return int(duration[:-1]) * _SECONDS[duration[-1]]


def arguments(command: list[str]) -> dict[str, Any]:
    """The parameters that `qos-gateway` understands by these words; raises when it does not."""
    group: Any = typer.main.get_command(cli)
    context = group.commands[command[0]].make_context(command[0], list(command[1:]))
    return dict(context.params)


def settings(config: Path | None, environment: dict[str, str]) -> Settings:
    """As `check-config` reads them; raises ConfigError."""
    return load_settings(config, environment)


@cache
def dockerfile() -> dict[str, list[str]]:
    """Instruction → what follows it, in order, of the stage that becomes the image."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    last_stage = text[text.rindex("\nFROM ") :]
    instructions: dict[str, list[str]] = {}
    for line in filter(None, map(str.strip, last_stage.splitlines())):
        name, _, rest = line.partition(" ")
        instructions.setdefault(name, []).append(rest.strip())
    return instructions


def image_environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for line in dockerfile()["ENV"] for pair in line.split())
