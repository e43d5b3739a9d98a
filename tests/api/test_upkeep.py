"""Work that goes on whatever goes wrong with it."""

import asyncio

import pytest
import structlog

from gateway.api.upkeep import now_and_then

pytestmark = pytest.mark.anyio


async def test_a_failure_is_logged_once_and_the_work_goes_on() -> None:
    """Failures in a row are one line; after a success the next failure is another."""
    done: list[bool] = []
    fails = iter([False, True, True, True, False, True, False])

    def do() -> None:
        done.append(next(fails, False))
        if done[-1]:
            raise ValueError("the disk is gone")

    with structlog.testing.capture_logs() as lines:
        work = asyncio.create_task(now_and_then("a test", do, lambda: 0.0))
        async with asyncio.timeout(10):
            while len(done) < 8:  # noqa: ASYNC110 – it runs whenever others do
                await asyncio.sleep(0)
        assert not work.done()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert [(line["what"], line["log_level"]) for line in lines] == [("a test", "error")] * 2
