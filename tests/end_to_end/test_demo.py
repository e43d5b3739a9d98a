"""`qos-gateway demo`, with real processes: what it prints, and that nothing stays behind."""

import asyncio
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from pathlib import Path

import pytest

from tests.support.loops import eventually
from tests.support.processes import children, is_running

pytestmark = pytest.mark.anyio

BRIEF = ("--seconds", "1", "--seed", "237")
"""Two conversations of each class in that second, none of whose answers takes long."""


async def demo(*arguments: str, folder: Path) -> Process:
    """In another folder than the repository's: an installed package has no tests beside it."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "demo", *arguments),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        cwd=folder,
    )


async def test_a_short_run(tmp_path: Path) -> None:
    """Both halves are measured with the same load, and stand side by side for each class."""
    process = await demo(*BRIEF, folder=tmp_path)
    async with asyncio.timeout(90):
        out, _ = await process.communicate()
    text = out.decode()
    assert process.returncode == 0, text
    rows = {line[:20].strip(): line[20:].replace(" %", "").split() for line in text.splitlines()}
    for name in ("requests ended", "refused or failed", "TTFT P50, ms", "TTFT P99, ms", "TPOT P50, ms"):
        assert len(rows[name]) == 6
    ended = rows["requests ended"]
    assert ended[0] == ended[1] != "0"
    assert ended[2] == ended[3] != "0"
    kept = rows["SLO kept"]
    assert all(0 <= float(part) <= 100 for part in kept[:4])
    assert kept[4:] == ["-", "-"]
    assert "P0 (first token within 1 s, 60 ms per token): kept for" in text
    assert "without control: " in text
    assert "\x1b" not in text


async def test_an_interrupted_run(tmp_path: Path) -> None:
    """Ctrl-C ends the engine and the gateway too."""
    process = await demo(*BRIEF, folder=tmp_path)
    started: list[int] = []

    def both_run() -> bool:
        started[:] = children(process.pid)
        return len(started) == 2

    try:
        await eventually(both_run, seconds=60)
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 130, out.decode()
    assert not any(map(is_running, started))
    assert "Traceback" not in out.decode()
