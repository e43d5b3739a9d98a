"""What a user of the proxy feels: gaps between chunks of paced streams, and the latency of plain requests.

Both are taken the same way through the proxy and straight from the engine; the difference is the proxy's.
"""

import asyncio
import gc
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from tests.benchmarks.proxy_cost.client import Connection, Exchange, WrongAnswer, chat_request

NANOSECONDS_PER_MILLISECOND = 1_000_000
CONNECTIONS_AT_FIRST = 16


def percentile(values: Sequence[float], part: float) -> float:
    """Of values in ascending order, by nearest rank."""
    return values[min(int(part * len(values)), len(values) - 1)]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A pause of the client would be read as one of the proxy."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ---------------------------------------------------------------------- streams


@dataclass(frozen=True)
class StreamTimes:
    """Of all streams of a run; milliseconds."""

    chunks: int
    gap_p50: float
    gap_p99: float
    gap_max: float
    first_chunk_p50: float
    chunks_per_read: float


async def paced_streams(
    url: str, headers: Mapping[str, str], *, streams: int, each: int, seconds_max: float
) -> StreamTimes:
    """So many streams at once, `each` after another on each connection, each checked.

    They begin spread over an interval of the pace and more, so that their chunks are spread as well. Raises
    WrongAnswer, ConnectionError, or TimeoutError after `seconds_max`.
    """
    request = chat_request(url, headers, stream=True)
    connections = [await Connection.open(url) for _ in range(streams)]

    async def read(connection: Connection, delay: float) -> list[Exchange]:
        await asyncio.sleep(delay)
        return [await connection.exchange(request) for _ in range(each)]

    try:
        with no_garbage_collection():
            async with asyncio.timeout(seconds_max):
                runs = await asyncio.gather(*(read(c, n * 0.0013) for n, c in enumerate(connections)))
    finally:
        for connection in connections:
            connection.close()
    exchanges = [exchange for run in runs for exchange in run]
    for exchange in exchanges:
        exchange.check_stream()
    return stream_times(exchanges)


def stream_times(exchanges: Sequence[Exchange]) -> StreamTimes:
    """A chunk that came in the same read as the one before it came 0 ms after it."""
    by_read = [exchange.chunks_by_read for exchange in exchanges]
    chunks = sum(map(sum, by_read))
    reads = sum(map(len, by_read))
    gaps = [gap for exchange in exchanges for gap in _gaps_ms(exchange.read_at)]
    gaps += [0.0] * (chunks - reads)
    gaps.sort()
    firsts = sorted((e.read_at[0] - e.sent_at) / NANOSECONDS_PER_MILLISECOND for e in exchanges)
    return StreamTimes(
        chunks=chunks,
        gap_p50=percentile(gaps, 0.5),
        gap_p99=percentile(gaps, 0.99),
        gap_max=gaps[-1],
        first_chunk_p50=percentile(firsts, 0.5),
        chunks_per_read=chunks / reads,
    )


def _gaps_ms(times: Sequence[int]) -> list[float]:
    return [(later - earlier) / NANOSECONDS_PER_MILLISECOND for earlier, later in pairwise(times)]


# ---------------------------------------------------------------------- plain requests


@dataclass(frozen=True)
class Latency:
    """Milliseconds, of plain requests at this rate."""

    requests_per_second: float
    p50: float
    p99: float


async def plain_latency(
    url: str, headers: Mapping[str, str], *, requests_per_second: float, seconds: float, seed: int
) -> Latency:
    """An open load: requests come when they come, at random (Poisson), whether or not earlier ones are
    answered; one that finds no idle connection opens one. Raises WrongAnswer, ConnectionError, TimeoutError.
    """
    async with asyncio.timeout(seconds + 20):
        return await _OpenLoad(url, headers).run(requests_per_second, seconds, random.Random(seed))


class _OpenLoad:
    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._request = chat_request(url, headers, stream=False)
        self._idle: list[Connection] = []

    async def run(self, rate: float, seconds: float, chance: random.Random) -> Latency:
        self._idle = [await Connection.open(self._url) for _ in range(CONNECTIONS_AT_FIRST)]
        for connection in self._idle:  # the proxy's own connections are opened before the clock runs
            (await connection.exchange(self._request)).check_plain()
        clock = asyncio.get_running_loop().time
        calls = []
        try:
            with no_garbage_collection():
                started = clock()
                for due in _arrivals(rate, seconds, chance):
                    if (ahead := started + due - clock()) > 0:
                        await asyncio.sleep(ahead)
                    calls.append(asyncio.create_task(self._call()))
                latencies = sorted(await asyncio.gather(*calls))
        finally:
            for connection in self._idle:
                connection.close()
        return Latency(len(latencies) / seconds, percentile(latencies, 0.5), percentile(latencies, 0.99))

    async def _call(self) -> float:
        """Milliseconds from the request's last byte out to the answer's last byte in."""
        connection = self._idle.pop() if self._idle else await Connection.open(self._url)
        exchange = await connection.exchange(self._request)
        self._idle.append(connection)
        if exchange.status != 200:
            raise WrongAnswer(f"status {exchange.status} at this rate")
        return (exchange.ended_at - exchange.sent_at) / NANOSECONDS_PER_MILLISECOND


def _arrivals(rate: float, seconds: float, chance: random.Random) -> Iterator[float]:
    at = chance.expovariate(rate)
    while at < seconds:
        yield at
        at += chance.expovariate(rate)
