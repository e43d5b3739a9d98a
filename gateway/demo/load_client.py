"""A light load generator: a workload against a URL, in real time, with the records the simulator makes.

It runs on the gateway's own HTTP transport and stream observer. Latencies count from the instant a request
was planned for, so that a late generator makes the figures worse and not better; how late it was is kept too.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from gateway.policy.admission import NOTHING_DELIVERED, Delivered
from gateway.policy.clock import NANOSECONDS_PER_SECOND, to_nanoseconds
from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Priority, Usage
from gateway.simulator.doors import record_of
from gateway.simulator.workload import (
    Caller,
    ClosedStream,
    Lengths,
    OpenStream,
    Workload,
    generator,
    retry_wait_ns,
)
from gateway.upstream.errors import UpstreamError
from gateway.upstream.response import UpstreamResponse
from gateway.upstream.stream_observer import StreamObserver
from gateway.upstream.transport import TransportTimeouts, UpstreamTransport

OnTokens = Callable[[Caller, int, int], None]
"""Whose request, its number, and when tokens of it came (nanoseconds from the beginning)."""

CHAT = b"/v1/chat/completions"
ANSWER_BYTES_MAX = 1 << 20
STRAGGLERS_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    record: RequestEnded
    retry_after_ns: int | None = None


class LoadClient:
    """`run` lets requests arrive for so many seconds, then waits for the open streams' last ones and drops
    what clients of closed streams still wait for."""

    def __init__(
        self, url: str, parameters: PolicyParameters, *, seed: int, on_tokens: OnTokens | None = None
    ) -> None:
        self.records: list[RequestEnded] = []
        self.lateness_ns: list[int] = []
        self.open: Counter[Priority] = Counter()
        """Requests under way."""
        self.taken: Counter[Priority] = Counter()
        """Requests that an engine has begun or queued."""
        self.dropped: Counter[str] = Counter()
        """Requests given up unanswered at the end, by class."""
        self.cpu_share = 0.0
        """Of a core, that this process used while it ran."""
        self._transport = UpstreamTransport(url, timeouts=TransportTimeouts(idle_seconds=300.0))
        self._parameters = parameters
        self._seed = seed
        self._on_tokens = on_tokens
        self._numbers = 0
        self._start = 0

    @property
    def in_flight(self) -> int:
        return self.open.total()

    @property
    def ended(self) -> int:
        return len(self.records)

    async def run(self, workload: Workload, seconds: float, *, wait_for_last: bool = True) -> None:
        """Without `wait_for_last` everything that is unanswered at the end is dropped."""
        self._start = time.monotonic_ns()
        cpu_start = time.process_time_ns()
        end = to_nanoseconds(seconds)
        open_streams = [
            asyncio.create_task(self._run_open(stream, generator(self._seed, "open", index), end))
            for index, stream in enumerate(workload.open)
        ]
        clients = [
            asyncio.create_task(self._run_client(closed, generator(self._seed, "closed", index, number), end))
            for index, closed in enumerate(workload.closed)
            for number in range(closed.clients)
        ]
        try:
            await self._sleep_until(end)
            await _cancel(clients)
            if wait_for_last:
                await asyncio.wait(open_streams, timeout=STRAGGLERS_SECONDS_MAX)
            await _cancel(open_streams)
        finally:
            await _cancel([*clients, *open_streams])
            self.cpu_share = (time.process_time_ns() - cpu_start) / max(self._now(), 1)
            await self._transport.aclose()

    # ------------------------------------------------------------------ streams

    async def _run_open(self, stream: OpenStream, random: Random, end: int) -> None:
        async with asyncio.TaskGroup() as requests:
            for arrival in stream.arrivals(random):
                if arrival.at >= end:
                    break
                await self._sleep_until(arrival.at)
                requests.create_task(self._ask(stream.caller, arrival.lengths, arrival.at))

    async def _run_client(self, closed: ClosedStream, random: Random, end: int) -> None:
        at = to_nanoseconds(closed.from_seconds)
        while at < end:
            await self._sleep_until(at)
            ended = await self._ask(closed.caller, closed.lengths.draw(random), at)
            if ended.record.outcome is Outcome.COMPLETED:
                at = self._now() + to_nanoseconds(closed.think_seconds)
            else:
                at = self._now() + (ended.retry_after_ns or retry_wait_ns(None, random))

    # ------------------------------------------------------------------ one request

    async def _ask(self, caller: Caller, lengths: Lengths, planned: int) -> Ended:
        self._numbers += 1
        number = self._numbers
        body = _body(caller, lengths)
        headers = [
            (b"content-type", b"application/json"),
            (b"x-request-priority", caller.priority.name.encode()),
        ]
        sent = self._now()
        self.lateness_ns.append(sent - planned)
        self.open[caller.priority] += 1
        try:
            response = await self._transport.send(b"POST", CHAT, headers, body)
            if response.status != 200:
                await response.read_all(ANSWER_BYTES_MAX)
                return self._refused(caller, number, planned, response)
            self.taken[caller.priority] += 1
            return await self._follow(caller, number, planned, sent, response)
        except UpstreamError:
            return self._record(caller, number, Outcome.UPSTREAM_REFUSED, planned)
        except asyncio.CancelledError:
            self.dropped[caller.priority.name] += 1
            raise
        finally:
            self.open[caller.priority] -= 1

    async def _follow(
        self, caller: Caller, number: int, planned: int, sent: int, response: UpstreamResponse
    ) -> Ended:
        observer = StreamObserver("chat", strip_usage=False)
        seen = 0
        while piece := await response.read():
            now = self._now()
            observer.feed(piece, now)
            if self._on_tokens is not None and observer.token_events > seen:
                seen = observer.token_events
                self._on_tokens(caller, number, now)
        queued_ms = int(response.header(b"x-qos-queue-ms") or 0)
        outcome = Outcome.COMPLETED if observer.done else Outcome.UPSTREAM_ABORTED
        usage = observer.usage or Usage(0, observer.output_tokens_seen)
        return self._record(
            caller,
            number,
            outcome,
            planned,
            dispatched_at=sent + queued_ms * 1_000_000,
            first_token_at=observer.first_token_at,
            delivered=Delivered(usage, observer.last_token_at, observer.max_gap_ns or None),
        )

    def _refused(self, caller: Caller, number: int, planned: int, response: UpstreamResponse) -> Ended:
        told = response.header(b"x-qos-outcome")
        outcome = Outcome.UPSTREAM_ERROR if told is None else Outcome(told.decode())
        wait = response.header(b"retry-after-ms")
        return self._record(
            caller, number, outcome, planned, retry_after_ns=None if wait is None else int(wait) * 1_000_000
        )

    def _record(
        self,
        caller: Caller,
        number: int,
        outcome: Outcome,
        planned: int,
        *,
        dispatched_at: int | None = None,
        first_token_at: int | None = None,
        delivered: Delivered = NOTHING_DELIVERED,
        retry_after_ns: int | None = None,
    ) -> Ended:
        record = record_of(
            self._parameters,
            str(number),
            caller,
            outcome,
            arrived_at=planned,
            dispatched_at=dispatched_at,
            first_token_at=first_token_at,
            ended_at=self._now(),
            delivered=delivered,
        )
        self.records.append(record)
        return Ended(record, retry_after_ns)

    def _now(self) -> int:
        return time.monotonic_ns() - self._start

    async def _sleep_until(self, at: int) -> None:
        """Never early; timers tick in milliseconds and may be, hence the loop."""
        while (left := at - self._now()) > 0:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(left / NANOSECONDS_PER_SECOND)


def _body(caller: Caller, lengths: Lengths) -> bytes:
    """A prompt of so many of the mock's tokens. Its `min_tokens` makes the answer as long as it is to be,
    which a gateway cannot read out of it; `max_tokens` is what the caller allows, if anything."""
    limit = b"" if caller.max_output_tokens is None else b',"max_tokens":%d' % caller.max_output_tokens
    return (
        b'{"model":"%b","stream":true,"stream_options":{"include_usage":true},"min_tokens":%d%b,'
        b'"messages":[{"role":"user","content":"%b"}]}'
        % (caller.model.encode(), lengths.output_tokens, limit, b"word" * lengths.input_tokens)
    )


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
