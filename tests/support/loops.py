"""The two event loops a test of real sockets runs on: `anyio_backend = both_loops()` in the module."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

UVLOOP = ("asyncio", {"use_uvloop": True})
PLAIN = ("asyncio", {"use_uvloop": False})


def both_loops() -> Any:
    @pytest.fixture(
        scope="module", params=[pytest.param(PLAIN, id="asyncio"), pytest.param(UVLOOP, id="uvloop")]
    )
    def anyio_backend(request: pytest.FixtureRequest) -> Any:
        return request.param

    return anyio_backend


async def until(condition: Callable[[], bool], *, seconds: float = 10.0) -> None:
    """Let the loop run until the condition holds; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 – any condition, not one that tells
            await asyncio.sleep(0.001)


async def eventually(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], *, seconds: float = 10.0
) -> None:
    """Ask again and again, of another process perhaps, until the condition holds; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while True:
            answer = condition()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.01)
