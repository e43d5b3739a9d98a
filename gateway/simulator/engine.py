"""The GPU model on virtual time: its iterations as events."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from gateway.mock_backend.gpu_model import GpuEngine, GpuPreset, Sequence
from gateway.simulator.virtual_time import VirtualTime
from gateway.simulator.workload import Lengths


class Generation:
    """An answer as it comes out of an engine. Times are nanoseconds; all but the first token's are written
    down when the answer ends or has to pause, not with each token."""

    __slots__ = ("decoding_since", "first_token_at", "last_token_at", "max_gap_ns", "output_tokens")

    def __init__(self) -> None:
        self.first_token_at: int | None = None
        self.last_token_at: int | None = None
        self.max_gap_ns: int | None = None
        self.output_tokens = 0
        """Up to the last pause, or the end."""
        self.decoding_since: int | None = None
        """The iteration that gave its first token, or the first one after a pause; None while none come."""

    def note_gap(self, nanoseconds: int) -> None:
        if self.max_gap_ns is None or nanoseconds > self.max_gap_ns:
            self.max_gap_ns = nanoseconds


class LargestSince:
    """Values come one after the other; what was the largest from a place on? Kept are only those that no
    later one has reached, in falling order, so that adding one costs O(1) on average and asking O(log n)."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._values: list[int] = []

    def add(self, place: int, value: int) -> None:
        while self._values and self._values[-1] <= value:
            self._values.pop()
            self._places.pop()
        self._places.append(place)
        self._values.append(value)

    def ask(self, place: int) -> int | None:
        """None if nothing has come since."""
        index = bisect_left(self._places, place)
        return self._values[index] if index < len(self._values) else None


class StreamProgress:
    """How far a generation has come, for whoever asks while it is under way."""

    __slots__ = ("_engine", "_generation")

    def __init__(self, engine: "VirtualEngine", generation: Generation) -> None:
        self._engine = engine
        self._generation = generation

    @property
    def last_token_at(self) -> int | None:
        paused = self._generation.decoding_since is None
        return self._generation.last_token_at if paused else self._engine.ended_at

    @property
    def held_up(self) -> bool:
        return False

    @property
    def output_tokens_seen(self) -> int:
        generation = self._generation
        if generation.decoding_since is None:
            return generation.output_tokens
        return generation.output_tokens + self._engine.iterations - generation.decoding_since + 1


class VirtualEngine:
    """Tells `first_token` and `finished` of each generation, at the end of the iteration that yields it.

    As with a real engine the next iteration has begun by then: what is sent in answer to a token joins the
    one after. `watch`, where given, is told of every token; without it, a token that is neither the first nor
    the last costs nothing: whoever decodes gets one in every iteration, and its gaps are their durations.
    """

    def __init__(
        self,
        time: VirtualTime,
        preset: GpuPreset,
        first_token: Callable[[Any], None],
        finished: Callable[[Any], None],
        watch: Callable[[Any, int], None] | None = None,
    ) -> None:
        self.iterations = 0
        self.ended_at = 0  # the last of them
        self._time = time
        self._gpu = GpuEngine(preset)
        self._first_token = first_token
        self._finished = finished
        self._watch = watch
        self._busy = False
        self._duration = 0  # of the iteration under way
        self._gaps = LargestSince()

    @property
    def unfinished(self) -> int:
        return self._gpu.running + self._gpu.waiting

    def submit(self, generation: Generation, lengths: Lengths) -> None:
        """ValueError for what never fits into the engine."""
        self._gpu.submit(Sequence(generation, lengths.input_tokens, lengths.output_tokens))
        if not self._busy:
            self._busy = True
            self._time.at(self._time.now, self._begin, last=True)  # together with all that come just now

    def progress(self, generation: Generation) -> "StreamProgress":
        return StreamProgress(self, generation)

    def _begin(self) -> None:
        self._duration = self._gpu.begin()
        generation: Any
        for generation in self._gpu.preempted:
            self._pause(generation, self._time.now)
        self._time.after(self._duration, self._end)

    def _end(self) -> None:
        now = self._time.now
        emitted = self._gpu.end() if self._watch is not None else self._gpu.end_briefly()
        self.iterations += 1
        self.ended_at = now
        self._gaps.add(self.iterations, self._duration)
        generation: Any
        for generation, _, finished in emitted:
            if generation.decoding_since is None:
                self._resume(generation, now)
            if finished:
                self._pause(generation, now)
        self._busy = self._gpu.has_work()
        if self._busy:
            self._begin()
        else:
            self._gaps = LargestSince()
        for generation, index, finished in emitted:
            if self._watch is not None:
                self._watch(generation, now)
            if not index:
                self._first_token(generation)
            if finished:
                self._finished(generation)

    def _resume(self, generation: Generation, now: int) -> None:
        """It has got its first token, or the first one after a pause."""
        generation.decoding_since = self.iterations
        if generation.first_token_at is None:
            generation.first_token_at = now
        elif generation.last_token_at is not None:
            generation.note_gap(now - generation.last_token_at)

    def _pause(self, generation: Generation, now: int) -> None:
        """It has ended, or lost its memory: a token came in each iteration since the one it began with."""
        if generation.decoding_since is None:
            return  # not begun yet
        largest = self._gaps.ask(generation.decoding_since + 1)
        if largest is not None:
            generation.note_gap(largest)
        generation.output_tokens += self.iterations - generation.decoding_since + 1
        generation.last_token_at = now
        generation.decoding_since = None
