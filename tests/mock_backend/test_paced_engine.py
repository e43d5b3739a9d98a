"""The engine on real time: who gets which tokens, and what an abort leaves behind."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.mock_backend.gpu_model import GpuEngine, GpuPreset
from gateway.mock_backend.paced_engine import PacedEngine

pytestmark = pytest.mark.anyio

FAST = GpuPreset("fast", a=0.5, b=0, q=0, c=0, d=0, kv_tokens=1000)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def paced() -> AsyncIterator[PacedEngine]:
    paced = PacedEngine(GpuEngine(FAST))
    running = asyncio.create_task(paced.run())
    yield paced
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()


class Reader:
    """Notes the tokens it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.first = asyncio.Event()
        self.last = asyncio.Event()

    def deliver(self, token_index: int, finished: bool) -> None:
        self.tokens.append(token_index)
        self.first.set()
        if finished:
            self.last.set()


async def test_each_reader_gets_its_own_tokens_in_order(paced: PacedEngine) -> None:
    """Also those that come after the engine has been idle."""
    for lengths in ((3, 5), (2, 4)):
        readers = [Reader() for _ in lengths]
        for reader, length in zip(readers, lengths, strict=True):
            paced.submit(7, length, 0, "stop", reader.deliver)
        async with asyncio.timeout(10):
            await asyncio.gather(*(reader.last.wait() for reader in readers))
        assert [reader.tokens for reader in readers] == [list(range(length)) for length in lengths]
    counters = paced.counters
    assert (counters.prompt_tokens, counters.generation_tokens) == (4 * 7, 3 + 5 + 2 + 4)
    assert counters.finished == {"stop": 4}


async def test_nothing_is_delivered_after_an_abort_and_others_go_on(paced: PacedEngine) -> None:
    aborted, other = Reader(), Reader()
    id = paced.submit(7, 900, 0, "length", aborted.deliver)
    async with asyncio.timeout(10):
        await aborted.first.wait()
        paced.abort(id)
        received = len(aborted.tokens)
        paced.submit(7, 5, 0, "length", other.deliver)
        await other.last.wait()
    assert len(aborted.tokens) == received
    assert paced.counters.finished == {"abort": 1, "length": 1}
    assert not paced.engine.has_work()


async def test_a_prompt_alone_generates_nothing(paced: PacedEngine) -> None:
    """Its reader hears once, when it is done; only its prompt is counted."""
    reader = Reader()
    paced.submit(7, 0, 0, "stop", reader.deliver)
    async with asyncio.timeout(10):
        await reader.last.wait()
    assert reader.tokens == [0]
    counters = paced.counters
    assert (counters.prompt_tokens, counters.generation_tokens) == (7, 0)
    assert counters.finished == {"stop": 1}


def test_a_queue_limit_below_1_is_no_limit_that_vllm_knows() -> None:
    with pytest.raises(ValueError, match="max_num_queued_reqs must be at least 1, got 0"):
        PacedEngine(GpuEngine(FAST), max_num_queued_reqs=0)


async def test_to_abort_what_has_finished_changes_nothing(paced: PacedEngine) -> None:
    reader = Reader()
    id = paced.submit(7, 1, 0, "length", reader.deliver)
    async with asyncio.timeout(10):
        await reader.last.wait()
    paced.abort(id)
    assert paced.counters.finished == {"length": 1}


async def test_time_lost_is_not_caught_up_in_a_burst() -> None:
    """A clock that leaps 10 s at each look: the engine goes on, without waiting and without looking back."""
    time_ns = 0

    def leaping_clock() -> int:
        nonlocal time_ns
        time_ns += 10_000_000_000
        return time_ns

    paced = PacedEngine(GpuEngine(FAST), leaping_clock)
    running = asyncio.create_task(paced.run())
    reader = Reader()
    paced.submit(7, 20, 0, "length", reader.deliver)
    async with asyncio.timeout(10):
        await reader.last.wait()
    running.cancel()
    await asyncio.wait([running])
    assert reader.tokens == list(range(20))
