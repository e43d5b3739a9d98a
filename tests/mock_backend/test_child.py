"""The mock GPU as a child process: it starts, says why it does not, and never outlives its parent."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from gateway.mock_backend.child import MockGpuError, MockGpuProcess, parse_mock_url

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def is_listening(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


async def wait_until_gone(url: str) -> None:
    deadline = time.monotonic() + 10
    while is_listening(url):
        assert time.monotonic() < deadline, f"{url} still answers"
        await asyncio.sleep(0.01)


async def test_it_listens_when_started_and_not_when_stopped() -> None:
    gpu = await MockGpuProcess.start("h100_llama3_8b")
    assert is_listening(gpu.url)
    assert gpu.returncode is None
    await gpu.stop()
    assert not is_listening(gpu.url)
    assert gpu.returncode == 0
    await gpu.stop()


async def test_it_stops_promptly_while_it_streams() -> None:
    """Far sooner than the 50,000 tokens would take, and in good order."""
    gpu = await MockGpuProcess.start("seed_32k")
    host, _, port = gpu.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"prompt":"x","max_tokens":50000,"stream":true}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await reader.readuntil(b"data: ")
    await gpu.stop(grace_seconds=10)
    assert gpu.returncode == 0
    assert b"[DONE]" not in await reader.read()
    writer.close()
    await writer.wait_closed()


async def test_stop_uses_force_after_the_grace() -> None:
    """A child that is suspended cannot follow a polite request."""
    gpu = await MockGpuProcess.start("seed_32k")
    os.kill(gpu.pid, signal.SIGSTOP)
    await gpu.stop(grace_seconds=0.05)
    assert gpu.returncode == -signal.SIGKILL


async def test_a_child_that_fails_to_start_says_why() -> None:
    with pytest.raises(MockGpuError, match="max_num_seqs must be at least 1"):
        await MockGpuProcess.start("seed_32k", max_num_seqs=0)


async def test_a_child_that_is_not_ready_in_time_is_ended() -> None:
    with pytest.raises(MockGpuError, match="not ready in 0"):
        await MockGpuProcess.start("seed_32k", ready_seconds_max=0)


async def test_an_unknown_preset_is_refused_before_anything_is_started() -> None:
    with pytest.raises(ValueError, match="known presets: seed_32k"):
        await MockGpuProcess.start("tpu")


PARENT = """
import asyncio
from gateway.mock_backend.child import MockGpuProcess

async def main():
    gpu = await MockGpuProcess.start("seed_32k")
    print(gpu.url, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_it_dies_with_a_parent_that_is_killed() -> None:
    """SIGKILL leaves the parent no chance to clean up."""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    url = (await parent.stdout.readline()).decode().strip()
    assert is_listening(url)
    parent.kill()
    await parent.wait()
    await wait_until_gone(url)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gateway.mock_backend", "--port", "0", *arguments]


def test_one_ready_line_is_all_it_prints_and_a_closed_stdin_ends_it() -> None:
    with subprocess.Popen(
        command("--exit-with-parent"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        ready = process.stdout.readline().decode().split()
        out, errors = process.communicate(timeout=10)
    assert ready[0] == "ready"
    assert ready[1].startswith("http://127.0.0.1:")
    assert ready[2:] == ["preset=seed_32k"]
    assert (out, errors, process.returncode) == (b"", b"", 0)


def test_the_command_line_names_the_presets_there_are() -> None:
    failed = subprocess.run(command("--preset", "tpu"), capture_output=True, text=True, timeout=10)
    assert failed.returncode == 2
    assert "known presets: seed_32k, a100_llama3_8b, h100_llama3_8b, h100_llama_70b_tp4" in failed.stderr


def test_a_port_that_is_taken_is_a_plain_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        failed = subprocess.run(command("--port", port), capture_output=True, text=True, timeout=10)
    assert failed.returncode == 1
    assert failed.stderr.startswith(f"cannot listen on 127.0.0.1:{port}")


def test_a_mock_url_names_a_preset() -> None:
    assert parse_mock_url("mock://seed_32k") == "seed_32k"
    assert parse_mock_url("mock://h100_llama_70b_tp4/") == "h100_llama_70b_tp4"


@pytest.mark.parametrize("url", ["mock://tpu", "mock://", "mock://SEED_32K"])
def test_a_mock_url_of_no_preset_is_told_the_presets(url: str) -> None:
    with pytest.raises(ValueError, match="known presets: seed_32k, a100_llama3_8b"):
        parse_mock_url(url)


@pytest.mark.parametrize("url", ["http://seed_32k", "seed_32k", "mock://seed_32k/v1", "mock://seed_32k?n=2"])
def test_what_is_no_mock_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="mock://PRESET"):
        parse_mock_url(url)
