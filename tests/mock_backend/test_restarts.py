"""A mock GPU that ends by itself is started again, on the same port: embedded, or under `--restart-after`."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE

import httpx
import pytest

from gateway.mock_backend.child import MockGpuProcess, MockGpus, RestartedMockGpu
from tests.mock_backend.test_child import is_listening, wait_until_gone
from tests.support.loops import eventually, until
from tests.support.raw_client import ask, chat, get, post

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def start(port: int) -> MockGpuProcess:
    return await MockGpuProcess.start("seed_32k", port=port)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


async def test_another_one_takes_its_place() -> None:
    """As often as it ends; until it is told to stop, and then it stays away."""
    gpu = await RestartedMockGpu.start(start, after_seconds=0)
    pids = {gpu.pid}
    for _ in range(2):
        os.kill(gpu.pid, signal.SIGKILL)
        await until(lambda: gpu.pid not in pids, seconds=30)
        pids.add(gpu.pid)
        assert (await ask(port_of(gpu.url), get("/health"), "GET")).status == 200
    await gpu.stop()
    assert not is_listening(gpu.url)


async def test_one_that_cannot_come_up_is_tried_again() -> None:
    """The port is taken for a while, say."""
    tries = 0

    async def at_the_third_try(port: int) -> MockGpuProcess:
        nonlocal tries
        tries += 1
        return await MockGpuProcess.start("seed_32k", port=port, ready_seconds_max=0 if tries == 2 else 20)

    gpu = await RestartedMockGpu.start(at_the_third_try, after_seconds=0)
    first = gpu.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: gpu.pid != first, seconds=30)
    assert tries == 3
    await gpu.stop()


async def test_it_can_be_stopped_while_it_waits() -> None:
    gpu = await RestartedMockGpu.start(start, after_seconds=60)
    os.kill(gpu.pid, signal.SIGKILL)
    await wait_until_gone(gpu.url)
    async with asyncio.timeout(5):
        await gpu.stop()


async def test_embedded_ones_come_back() -> None:
    """The gateway finds its engine where it was."""
    gpus = MockGpus({"gpu0": "mock://seed_32k", "gpu1": "http://elsewhere"})
    url = await gpus.url("gpu0", "mock://seed_32k")
    assert url is not None
    assert await gpus.url("gpu1", "http://elsewhere") is None
    (gpu,) = [await starting for starting in gpus._starting.values()]
    os.kill(gpu.pid, signal.SIGKILL)
    await wait_until_gone(url)
    await eventually(lambda: is_listening(url), seconds=30)
    assert await gpus.url("gpu0", "mock://seed_32k") == url
    await gpus.stop()
    assert not is_listening(url)


async def test_under_a_supervisor() -> None:
    """A crash is told, one ready line is all on stdout, and SIGTERM ends both processes in good order."""
    options = ["--port", "0", "--allow-faults", "--restart-after", "0.05"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "mock-gpu", *options), stdout=PIPE, stderr=PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    ready, url, preset = (await process.stdout.readline()).decode().split()
    assert (ready, preset) == ("ready", "preset=seed_32k")
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        with pytest.raises(httpx.TransportError):
            await client.post("/v1/chat/completions", json=chat(), headers={"x-mock-fault": "crash"})
    told = await process.stderr.readline()
    assert told == b"the mock GPU has ended with status 70; another one in 0.05 s\n"
    await eventually(lambda: is_listening(url), seconds=30)
    response = await ask(port_of(url), post("/v1/chat/completions", chat(max_tokens=1)))
    assert response.status == 200
    process.terminate()
    async with asyncio.timeout(10):
        out, errors = await process.communicate()
    assert (out, errors, process.returncode) == (b"", b"", 0)
    assert not is_listening(url)


async def test_a_supervisor_says_why_it_cannot_begin() -> None:
    gpu = await start(0)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.mock_backend", "--restart-after", "1"),
        *("--port", str(port_of(gpu.url))),
        stderr=PIPE,
    )
    async with asyncio.timeout(20):
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert b"cannot listen on 127.0.0.1" in errors
    await gpu.stop()
