"""An asyncio event loop whose time is a ManualClock: instead of waiting it jumps to the next timer."""

import asyncio
import selectors
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.policy.clock import NANOSECONDS_PER_SECOND, ManualClock


class NothingDue(RuntimeError):
    """The loop would wait for ever: everybody waits and no timer is set."""


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingDue("no callback is ready and no timer is set")
        if timeout > 0:
            jump = max(round(timeout * NANOSECONDS_PER_SECOND), 1)
            self._clock.advance_to(self._clock.now() + jump)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        super().__init__(_JumpingSelector(clock))
        self._clock_resolution = 1e-10  # timers a nanosecond apart are not run together

    def time(self) -> float:
        return self.clock.now() / NANOSECONDS_PER_SECOND


@contextmanager
def virtual_loop(loop: VirtualLoop | None = None) -> Iterator[VirtualLoop]:
    """A loop that is closed at the end, whatever happens."""
    loop = loop or VirtualLoop(ManualClock())
    try:
        yield loop
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
