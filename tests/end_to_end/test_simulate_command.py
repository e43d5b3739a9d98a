"""`python -m gateway simulate`: what is typed, and what comes out."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from tests.end_to_end.test_command_line import ROOT, run

pytestmark = pytest.mark.anyio

TRACE = "arrival_s,input_tokens,output_tokens\n" + "".join(f"{n / 5},{300 + n},{20}\n" for n in range(150))


async def test_it_explains_itself() -> None:
    """With commands that can be copied, each of which names only options that there are."""
    status, told, _ = await run("simulate", "--help")
    assert status == 0
    examples = re.findall(r"\$ qos-gateway simulate ((?:[^\n]|\n (?=-))*)", re.sub(r" +\n", "\n", told))
    assert len(examples) >= 4
    options = set(re.findall(r"--[a-z-]+", " ".join(examples)))
    assert options <= set(re.findall(r"│ (--[a-z-]+)", told))


async def test_two_configurations_on_a_trace(tmp_path: Path) -> None:
    """The table on standard output, all else on standard error and in files; again, it is the same bytes."""
    trace, one, other = tmp_path / "trace.csv", tmp_path / "one.yaml", tmp_path / "other.yaml"
    trace.write_text(TRACE)
    one.write_text("capacity: {tokens_per_second: 6000}\n")
    other.write_text("capacity: {tokens_per_second: 1000}\n")
    command = (
        "simulate",
        "--config",
        str(one),
        "--config",
        str(other),
        "--trace",
        str(trace),
        "--scale",
        "2",
    )
    command += ("--preset", "a100_llama3_8b", "--seeds", "2", "--no-plots")
    first, second = await asyncio.gather(
        run(*command, "--out", str(tmp_path / "1")),
        run(*command, "--out", str(tmp_path / "2"), "--processes", "2"),
    )
    assert first[0] == second[0] == 0
    assert first[1] == second[1]
    assert first[1].split("\n")[0].split() == ["one", "other"]
    assert "P0, realtime: first token in 1 s, 60 ms per token" in first[1]
    assert re.search(r"SLO met of offered +[01]\.\d{4} ± \d\.\d{4} +[01]\.\d{4} ± ", first[1])
    assert "4 runs, 60 s of traffic in" in first[2]
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert {"report.csv", "report.json", "report.txt", "history.csv", "latencies.csv"} <= set(names)
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    asked = json.loads((tmp_path / "1" / "report.json").read_text())["asked"]
    assert (asked["trace"], asked["scale"], asked["configs"]) == (
        "trace.csv",
        2.0,
        ["one.yaml", "other.yaml"],
    )


async def test_mistakes_are_named(tmp_path: Path) -> None:
    """Exit status 2, one line that names file and row or key, and no traceback."""
    trace, config = tmp_path / "trace.csv", tmp_path / "a.yaml"
    trace.write_text("arrival_s,input_tokens,output_tokens\n5,1,1\n4,1,1\n")
    config.write_text("classes: {P0: {slo: {ttft_seconds: 0}}}\n")
    results = await asyncio.gather(
        run("simulate", "--trace", str(trace)),
        run("simulate", "--config", str(config)),
        run("simulate", "--mix", "1/2"),
    )
    expected = (
        f"{trace}, line 3: arrival_s goes back from 5 to 4",
        f"{config}: classes.P0.slo.ttft_seconds: found 0",
        "--mix: found '1/2'",
    )
    for (status, told, error), says in zip(results, expected, strict=True):
        assert (status, told) == (2, "")
        assert error.startswith(says)
        assert error.count("\n") == 1


async def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    """Before anything runs."""
    (tmp_path / "out").write_text("a file")
    status, told, error = await run("simulate", "--seconds", "100000", "--out", str(tmp_path / "out"))
    assert (status, told) == (2, "")
    assert error == f"--out: {tmp_path / 'out'}: File exists\n"


async def test_it_can_be_stopped(tmp_path: Path) -> None:
    """Ctrl-C ends it and the processes it began."""
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    command = ("-m", "gateway", "simulate", "--seconds", "100000", "--seeds", "2", "--processes", "2")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=PIPE, stderr=PIPE, cwd=ROOT, start_new_session=True
    )
    try:
        async with asyncio.timeout(30):
            while len(_of_session(process.pid)) < 3:  # noqa: ASYNC110  # there is no event to wait for
                await asyncio.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            told, error = await process.communicate()
            while _of_session(process.pid):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, told) == (130, b"")
    assert error == b"stopped\n"


def _of_session(leader: int) -> list[int]:
    """Processes that run in a session, zombies not counted."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found
