"""Real engines, each started once for all tests of this folder. `make test-engines` sets TEST_ENGINES; where
it is not set no test here is collected."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import vllm_environment
from tests.engines.engine_process import MODEL, EngineProcess, llama_command, llama_server, vllm_command

FOLDER = os.environ.get("TEST_ENGINES", "")
"""Where the model and the engines' logs are kept."""

collect_ignore_glob = [] if FOLDER else ["test_*.py"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The tiny model, made anew by the engine's own Python: it is a matter of seconds."""
    folder = Path(FOLDER).resolve() / MODEL
    command = [str(vllm_environment.python()), "-m", "tests.engines.tiny_model", str(folder), "--gguf"]
    subprocess.run(command, check=True, cwd=vllm_environment.ROOT)
    return folder


def _running(engine: EngineProcess, config: pytest.Config, name: str) -> Iterator[EngineProcess]:
    try:
        engine.start()
        _say(config, f"{name} started in {engine.start_seconds:.0f} s")
        yield engine
    finally:
        engine.stop()


def _say(config: pytest.Config, line: str) -> None:
    """Past pytest's capture: a start is long enough to wonder."""
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{line}", flush=True)


@pytest.fixture(scope="session")
def vllm(model_folder: Path, pytestconfig: pytest.Config) -> Iterator[EngineProcess]:
    engine = EngineProcess(vllm_command(model_folder), model_folder.parent / "vllm.log")
    yield from _running(engine, pytestconfig, "vLLM")


@pytest.fixture(scope="session")
def llama(model_folder: Path, pytestconfig: pytest.Config) -> Iterator[EngineProcess]:
    command = llama_command(str(llama_server()), model_folder / "tiny.gguf")
    yield from _running(EngineProcess(command, model_folder.parent / "llama.log"), pytestconfig, "llama.cpp")
