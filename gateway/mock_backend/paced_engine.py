"""The GPU model on real time: waits out each iteration, then hands its tokens to those who wait for them."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from .gpu_model import Emitted, GpuEngine, Sequence, SequenceId

LAG_FORGIVEN_NS = 250_000_000
"""A process held up for longer than this goes on from now instead of catching up in a burst."""


@dataclass
class EngineCounters:
    """What the engine has done since it started."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Sequences by finish reason: `stop`, `length`, `abort`."""
    queue_full: int = 0
    """Calls refused because of `max_num_queued_reqs`."""


@dataclass(frozen=True)
class _Client:
    sequence: Sequence
    finish_reason: str
    deliver: Callable[[int, bool], None]


class PacedEngine:
    """One task drives the engine along a running schedule of iteration ends.

    The end of an iteration is the end of the one before plus its duration, not the moment the task woke up:
    late wake-ups do not add up, and the cadence keeps its mean even where timers tick in milliseconds.
    """

    def __init__(
        self,
        engine: GpuEngine,
        now: Callable[[], int] = time.monotonic_ns,
        max_num_queued_reqs: int | None = None,
    ) -> None:
        if max_num_queued_reqs is not None and max_num_queued_reqs < 1:
            raise ValueError(f"max_num_queued_reqs must be at least 1, got {max_num_queued_reqs}")
        self.engine = engine
        self._max_num_queued_reqs = max_num_queued_reqs
        self.counters = EngineCounters()
        self._now = now
        self._clients: dict[SequenceId, _Client] = {}
        self._numbers = 0
        self._work = asyncio.Event()

    def takes(self, sequences: int) -> bool:
        """Whether so many more may wait or run; a no is counted."""
        limit = self._max_num_queued_reqs
        has_room = limit is None or self.engine.running + self.engine.waiting + sequences <= limit
        self.counters.queue_full += not has_room
        return has_room

    def submit(
        self,
        prompt_tokens: int,
        output_tokens: int,
        priority: int,
        finish_reason: str,
        deliver: Callable[[int, bool], None],
    ) -> int:
        """Queue a sequence; `deliver(index, finished)` is called for each of its tokens, or without any at
        the end of its prefill. Returns its id."""
        self._numbers += 1
        sequence = Sequence(self._numbers, prompt_tokens, output_tokens, priority)
        self.engine.submit(sequence)
        self._clients[self._numbers] = _Client(sequence, finish_reason, deliver)
        self._work.set()
        return self._numbers

    def abort(self, id: int) -> None:
        """Drop a sequence and its memory; nothing happens when it has finished."""
        if self.engine.abort(id):
            del self._clients[id]
            self.counters.finished["abort"] += 1

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            self._work.clear()
            if not self.engine.has_work():
                await self._work.wait()
            ends_at = self._now()
            while self.engine.has_work():
                ends_at = max(ends_at + self.engine.begin(), self._now() - LAG_FORGIVEN_NS)
                await self._sleep_until(ends_at)
                for token in self.engine.end():
                    self._hand_out(token)

    async def _sleep_until(self, instant: int) -> None:
        """Within about a millisecond after the instant, never before it.

        First the tokens just handed out are sent: libuv reckons how long to wait from the time at which a
        timer was started, so that work done after that would make the wake-up late by as much. Its timers
        tick in milliseconds and may be early, hence the loop.
        """
        await asyncio.sleep(0)
        while (left := instant - self._now()) > 0:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(left / 1e9)

    def _hand_out(self, token: Emitted) -> None:
        client = self._clients[token.id]
        if client.sequence.output_tokens:
            self.counters.generation_tokens += 1
        if token.token_index == 0:
            self.counters.prompt_tokens += client.sequence.prompt_tokens
        if token.finished:
            del self._clients[token.id]
            self.counters.finished[client.finish_reason] += 1
        client.deliver(token.token_index, token.finished)
