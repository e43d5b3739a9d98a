"""How late the event loop is: the time by which it comes back to a timer after that was due.

All streams of a gateway share one loop. What holds it up (a page being rendered, a large prompt being
parsed, a processor that others use) lengthens the gap between two tokens of every one of them, and no
other metric tells it from a slow engine.
"""

import asyncio
from collections.abc import Callable

from gateway.policy.clock import Clock, to_nanoseconds

SAMPLE_SECONDS = 0.1


async def watch_loop_lag(tell: Callable[[int], None], clock: Clock) -> None:
    """Tell the lag in nanoseconds, ten times a second, until cancelled."""
    period_ns = to_nanoseconds(SAMPLE_SECONDS)
    while True:
        due = clock.now() + period_ns
        await asyncio.sleep(SAMPLE_SECONDS)
        tell(max(clock.now() - due, 0))
