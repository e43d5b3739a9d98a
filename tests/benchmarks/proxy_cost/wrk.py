"""Closed load by wrk: so many connections, each with its next request as soon as the last is answered."""

import asyncio
import json
import shutil
import signal
import tempfile
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.proxy_cost.client import WrongAnswer, chat_body

SCRIPT = Path(__file__).parent / "load.lua"
TIMEOUT_SECONDS = 90
ALL_ANSWERED = b"all answered\n"


class WrkMissing(Exception):
    pass


@dataclass(frozen=True)
class WrkResult:
    responses: int
    seconds: float
    status_errors: int
    connection_errors: int
    timeouts: int


def find_wrk() -> str:
    found = shutil.which("wrk")
    if found is None:
        raise WrkMissing("wrk is missing: `make bench-peers` or `apt-get install wrk`")
    return found


async def run_wrk(
    url: str,
    headers: Mapping[str, str],
    *,
    stream: bool,
    connections: int,
    seconds: int,
    requests: int = 0,
) -> WrkResult:
    """Until the time is over, or until so many requests were sent and all answered, none broken off.

    Raises WrongAnswer where one answer was an error or did not come.
    """
    with _input_files(headers, stream=stream) as files:
        process = await asyncio.create_subprocess_exec(
            *(find_wrk(), "--threads", "1", "--connections", str(connections), "--duration", f"{seconds}s"),
            *("--timeout", f"{TIMEOUT_SECONDS}s", "--script", str(SCRIPT)),
            *(url + "/v1/chat/completions", "--", *files, str(requests)),
            stdout=PIPE,
            stderr=STDOUT,
        )
        try:
            async with asyncio.timeout(seconds + TIMEOUT_SECONDS):
                output = await _read(process)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
    return read_output(output.decode(errors="replace"), requests)


@contextmanager
def _input_files(headers: Mapping[str, str], *, stream: bool) -> Iterator[tuple[str, str]]:
    """Paths of the body and of the headers."""
    with tempfile.TemporaryDirectory() as folder:
        body, head = Path(folder, "body"), Path(folder, "headers")
        body.write_bytes(chat_body(stream=stream))
        head.write_text("".join(f"{name}: {value}\n" for name, value in headers.items()), encoding="utf-8")
        yield str(body), str(head)


async def _read(process: Process) -> bytes:
    assert process.stdout is not None
    output = b""
    while line := await process.stdout.readline():
        if line == ALL_ANSWERED:
            process.send_signal(signal.SIGINT)  # wrk itself would wait until its time is over
        else:
            output += line
    return output


def read_output(output: str, requests: int = 0) -> WrkResult:
    """What the script wrote is the last line. Raises WrongAnswer, or RuntimeError if wrk did not run.

    With a number of requests it counts that all were answered. Connections that ended count then no more: a
    proxy may close those that have nothing to do, and a request that had to be sent again is one too few.
    """
    try:
        result = WrkResult(**json.loads(output.strip().rpartition("\n")[2]))
    except (ValueError, TypeError) as error:
        raise RuntimeError(f"wrk said: {output[-500:]}") from error
    broken = 0 if requests else result.connection_errors
    if result.status_errors or result.timeouts or broken or (requests and result.responses != requests):
        of = f" of {requests}" if requests else ""
        raise WrongAnswer(
            f"under load {result.responses} answers{of} in {result.seconds:.0f} s, "
            f"{result.status_errors} with an error status, {result.timeouts} late, "
            f"and {result.connection_errors} broken connections"
        )
    return result
