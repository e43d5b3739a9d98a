"""`qos-gateway calibrate` against the mock GPU, whose speed is a formula, in real time.

A loaded test machine makes times longer and hardly shorter, hence the lopsided tolerances.
"""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from inspect import signature
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from gateway.__main__ import calibrate, cli
from gateway.calibration.engine import Engine
from gateway.calibration.probes import LEVEL_INPUT_TOKENS, LEVEL_OUTPUT_TOKENS, Bounds, Calibration
from gateway.calibration.suggestion import Level
from gateway.mock_backend.child import MockGpuProcess
from gateway.mock_backend.gpu_model import GpuPreset, find_preset
from gateway.settings import Settings, load_settings

pytestmark = pytest.mark.anyio

NOBODY = "http://127.0.0.1:1"


def formula_step_seconds(preset: GpuPreset, streams: int) -> float:
    """Of `streams` answers, half way through."""
    context = streams * (LEVEL_INPUT_TOKENS + LEVEL_OUTPUT_TOKENS // 2)
    return preset.iteration_ns(0, 0, streams, context) / 1e9


def is_measured(found: float, formula: float) -> bool:
    return 0.8 * formula <= found <= 1.5 * formula


@pytest.mark.parametrize("name", ["seed_32k", "h100_llama3_8b"])
async def test_the_preset_is_found_again(name: str) -> None:
    """Seconds per prefilled token and the decode step of one stream and of several are the formula's, the
    weight and the throughput what follows from them."""
    preset = find_preset(name)
    gpu = await MockGpuProcess.start(name)
    engine = Engine(gpu.url, None, None, seed=1)
    try:
        found = await Calibration(engine, Bounds(20, 16_000), tpot_target=0.06).run()
    finally:
        await engine.aclose()
        await gpu.stop()
    assert engine.tokens_used <= 16_000
    assert is_measured(found.line.seconds_per_token, preset.b / 1000)
    assert [level.streams for level in found.levels] == [1, 2, 4, 8]
    for level in found.levels:
        assert level.step_seconds is not None
        assert is_measured(level.step_seconds, formula_step_seconds(preset, level.streams))
    working: Level = found.knee.level
    assert found.output_weight == pytest.approx(
        formula_step_seconds(preset, working.streams) / working.streams / (preset.b / 1000), rel=0.4
    )
    assert found.weighted_throughput == pytest.approx(1000 / preset.b, rel=0.4)


async def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error, without a terminal."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *arguments), stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    async with asyncio.timeout(40):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_the_file_is_a_configuration(tmp_path: Path) -> None:
    """`check-config` takes what `--out` wrote; what is being measured is told meanwhile."""
    gpu = await MockGpuProcess.start("h100_llama3_8b")
    file = tmp_path / "engine.yaml"
    try:
        status, out, err = await run(
            *("calibrate", "--url", f"{gpu.url}/v1", "--yes", "--tokens", "4000", "--out", str(file))
        )
        checked = await run("check-config", str(file))
    finally:
        await gpu.stop()
    assert (status, out) == (0, "")
    assert "prefill: prompts of 512 tokens" in err
    assert checked[0] == 0, checked
    (upstream,) = load_settings(file, {}).upstreams
    assert upstream.url == gpu.url
    assert set(yaml.safe_load(file.read_text())) == {"upstreams", "capacity"}


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--url", NOBODY], 2, "for up to 60 s with up to 500,000 tokens"),
        (["--url", NOBODY, "--yes"], 4, f"{NOBODY}: no connection"),
        (["--url", "mock://seed_32k", "--yes"], 2, "http://… or https://…"),
        (["--url", NOBODY, "--yes", "--api-key-env", "NO_SUCH_VARIABLE"], 2, "has no NO_SUCH_VARIABLE"),
        (["--url", NOBODY, "--yes", "--out", "no/such/folder.yaml"], 2, "there is no such folder"),
    ],
    ids=["no terminal to ask on", "nobody there", "no engine's url", "no key", "no folder"],
)
def test_what_cannot_begin(arguments: list[str], status: int, says: str) -> None:
    """Nobody is asked without a terminal, and what is wrong is said before the engine is loaded."""
    result = CliRunner().invoke(cli, ["calibrate", *arguments])
    assert (result.exit_code, result.stdout) == (status, "")
    assert says in result.stderr


def test_the_default_target_is_the_default_promise() -> None:
    """`--tpot-seconds` is P0's target in the shipped configuration."""
    slo = Settings().classes.P0.slo
    assert slo is not None
    assert signature(calibrate).parameters["tpot_seconds"].default == slo.tpot_seconds
