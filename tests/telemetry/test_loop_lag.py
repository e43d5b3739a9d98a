import asyncio

import pytest

from gateway.policy.clock import NANOSECONDS_PER_SECOND, ManualClock
from gateway.telemetry.loop_lag import SAMPLE_SECONDS, watch_loop_lag


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.anyio
async def test_lag_is_the_time_by_which_a_timer_was_late():
    """The clock went on by the period and 30 ms until the loop came back; a clock that stands is no lag."""
    clock = ManualClock(NANOSECONDS_PER_SECOND)
    told = asyncio.Queue()
    watching = asyncio.create_task(watch_loop_lag(told.put_nowait, clock))
    await asyncio.sleep(0)
    clock.advance(SAMPLE_SECONDS + 0.03)
    assert await asyncio.wait_for(told.get(), 10) == 30_000_000
    assert await asyncio.wait_for(told.get(), 10) == 0
    watching.cancel()


def test_lag_is_seen_in_its_histogram(metrics, scrape):
    """One sample of 30 ms lies between the bounds of 25 and 50 ms."""
    metrics.loop_lagged(30_000_000)
    page = scrape()
    counts = [page.value("event_loop_lag_seconds_bucket", le=bound) for bound in ("0.025", "0.05")]
    assert counts == [0, 1]
