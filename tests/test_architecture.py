"""Imports point inwards; the policy neither waits nor reads clocks nor talks. The source is read, not run."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "gateway"

POLICY_STANDARD_LIBRARY = frozenset(
    {
        "abc",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "math",
        "operator",
        "re",
        "statistics",
        "types",
        "typing",
    }
)
"""What deciding needs. Time, chance, tasks, files and logs come in as arguments, or not at all."""

SETTINGS = frozenset(
    {"settings", "keys", "config_reading", "config_values", "config_environment", "policy_parameters"}
)
ENTRY = frozenset({"__main__", "cli", "server"})

MAY_IMPORT: dict[str, frozenset[str]] = {
    "policy": frozenset(),
    "settings": frozenset({"policy", *SETTINGS}),
    "runtime": frozenset({"policy"}),
    "upstream": frozenset({"policy"}),
    "telemetry": frozenset({"policy"}),
    "mock_backend": frozenset({"policy.clock"}),
    "simulator": frozenset({"policy", "fleet", "mock_backend.gpu_model", *SETTINGS}),
    "calibration": frozenset({"upstream"}),
    "fleet": frozenset({"policy"}),
    "alerting": frozenset(SETTINGS),
    "demo": frozenset({"policy", "upstream", "mock_backend", "simulator", *SETTINGS}),
    "api": frozenset({"policy", "runtime", "upstream", "telemetry", "mock_backend", "fleet", *SETTINGS}),
    "entry": frozenset(
        {
            *("policy", "runtime", "upstream", "telemetry", "mock_backend", "simulator", "api"),
            *("alerting", "calibration", "demo"),
            *SETTINGS,
            *ENTRY,
        }
    ),
}
"""Room → what of ours it may import besides itself: a room, or a single module of one."""

ROOMS = {**dict.fromkeys(SETTINGS, "settings"), **dict.fromkeys(ENTRY, "entry")}
"""Modules beside the rooms, by the rules that hold for them; a folder has the rules of its own name."""


def violations(files: Iterable[tuple[Path, str]]) -> list[str]:
    """Every import, in the sources given by path inside the repository, that points the wrong way."""
    return [
        f"{path}: imports {module}"
        for path, source in files
        for module in sorted(set(_imported(path, source)))
        if not _allowed(path, module)
    ]


def _imported(path: Path, source: str) -> Iterator[str]:
    """Full names of all imported modules: also in functions, for type checkers only, and relative ones."""
    here = path.with_suffix("").parts
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level]] if node.level else []
            base += node.module.split(".") if node.module else []
            ours = base[0] == PACKAGE
            yield from (".".join([*base, alias.name] if ours else base) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "__import__",
            "importlib.import_module",
        ):
            yield from (argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant))


def _allowed(path: Path, module: str) -> bool:
    name = path.with_suffix("").parts[1]
    room = ROOMS.get(name, name)
    first, _, inside = module.partition(".")
    if first != PACKAGE:
        return room != "policy" or first in POLICY_STANDARD_LIBRARY
    if inside.split(".")[0] in (name, "", "__version__"):
        return True
    return any(f"{inside}.".startswith(f"{allowed}.") for allowed in MAY_IMPORT.get(room, ()))


def _sources() -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def test_imports_point_inwards() -> None:
    """Each room imports only what it may, and the policy nothing but itself and a short list."""
    assert violations(_sources()) == []


def test_every_room_has_its_rules() -> None:
    """A new folder or module at the top must be placed before it can be imported from."""
    names = {path.with_suffix("").parts[1] for path, _ in _sources()} - {"__init__"}
    assert {ROOMS.get(name, name) for name in names} <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("gateway/policy/queue.py", "import asyncio"),
        ("gateway/policy/queue.py", "from time import monotonic"),
        ("gateway/policy/queue.py", "import os.path"),
        ("gateway/policy/queue.py", "import collections, random"),
        ("gateway/policy/queue.py", "import pydantic"),
        ("gateway/policy/queue.py", "def late():\n    import logging"),
        ("gateway/policy/queue.py", "from gateway.runtime import admission_gate"),
        ("gateway/policy/queue.py", "from gateway import settings"),
        ("gateway/policy/queue.py", "from ..runtime.system_clock import SystemClock"),
        ("gateway/policy/queue.py", "from .. import telemetry"),
        ("gateway/policy/__init__.py", "from ..upstream import client"),
        ("gateway/policy/queue.py", "import importlib"),
        ("gateway/runtime/gate.py", "if TYPE_CHECKING:\n    from gateway.upstream.client import Client"),
        ("gateway/runtime/gate.py", "import gateway.settings"),
        ("gateway/runtime/gate.py", "importlib.import_module('gateway.api.app')"),
        ("gateway/upstream/client.py", "from ..runtime import gate"),
        ("gateway/telemetry/metrics.py", "from gateway.api.app import create_app"),
        ("gateway/mock_backend/app.py", "from gateway.policy.outcome import Outcome"),
        ("gateway/mock_backend/app.py", "from gateway.policy import clock_like"),
        ("gateway/mock_backend/app.py", "from gateway.settings import Settings"),
        ("gateway/simulator/run.py", "from gateway.mock_backend.app import app"),
        ("gateway/simulator/run.py", "from gateway.runtime import gate"),
        ("gateway/settings.py", "def late():\n    from gateway.mock_backend.gpu_model import PRESETS"),
        ("gateway/api/app.py", "from gateway.simulator import run"),
        ("gateway/calibration/probes.py", "from gateway.settings import Settings"),
        ("gateway/demo/load.py", "from gateway.api import app"),
        ("gateway/api/app.py", "from gateway.__main__ import main"),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str) -> None:
    """The check sees every way to write an import."""
    assert len(violations([(Path(path), source)])) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "gateway/policy/queue.py",
            "import heapq\nfrom collections.abc import Iterator\nfrom .clock import Clock",
        ),
        ("gateway/policy/queue.py", "from gateway.policy import outcome\nfrom . import clock"),
        ("gateway/runtime/gate.py", "import asyncio\nfrom ..policy.clock import Clock"),
        ("gateway/mock_backend/app.py", "import fastapi\nfrom gateway.policy.clock import Clock"),
        (
            "gateway/simulator/run.py",
            "from gateway.mock_backend.gpu_model import Gpu\nfrom gateway import settings",
        ),
        ("gateway/keys.py", "from gateway.config_reading import ConfigError"),
        ("gateway/api/app.py", "from gateway import __version__\nfrom gateway.upstream import client"),
        ("gateway/__main__.py", "from gateway.api.app import create_app\nfrom gateway import simulator, cli"),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    """The check does not stand in the way."""
    assert violations([(Path(path), source)]) == []
