"""The GPU model on virtual time: its iterations as events."""

from collections.abc import Callable
from typing import Any

from gateway.mock_backend.gpu_model import GpuEngine, GpuPreset, Sequence
from gateway.simulator.virtual_time import VirtualTime
from gateway.simulator.workload import Lengths


class Generation:
    """An answer as it comes out of an engine. Times are nanoseconds."""

    __slots__ = ("first_token_at", "last_token_at", "max_gap_ns", "output_tokens")

    def __init__(self) -> None:
        self.first_token_at: int | None = None
        self.last_token_at: int | None = None
        self.max_gap_ns: int | None = None
        self.output_tokens = 0
        """Known at the end only."""


class VirtualEngine:
    """Tells `first_token` and `finished` of each generation, at the end of the iteration that yields it.

    As with a real engine the next iteration has begun by then: what is sent in answer to a token joins the
    one after. `watch`, where given, is told of every token.
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
        self._time = time
        self._gpu = GpuEngine(preset)
        self._first_token = first_token
        self._finished = finished
        self._watch = watch
        self._busy = False

    @property
    def unfinished(self) -> int:
        return self._gpu.running + self._gpu.waiting

    def submit(self, generation: Generation, lengths: Lengths) -> None:
        """ValueError for what never fits into the engine."""
        self._gpu.submit(Sequence(generation, lengths.input_tokens, lengths.output_tokens))
        if not self._busy:
            self._busy = True
            self._time.at(self._time.now, self._begin, last=True)  # together with all that come just now

    def _begin(self) -> None:
        self._time.after(self._gpu.begin(), self._end)

    def _end(self) -> None:
        now = self._time.now
        emitted = self._gpu.end()
        self.iterations += 1
        self._busy = self._gpu.has_work()
        if self._busy:
            self._begin()
        generation: Any
        for generation, index, finished in emitted:
            if index:
                gap = now - generation.last_token_at
                if generation.max_gap_ns is None or gap > generation.max_gap_ns:
                    generation.max_gap_ns = gap
            else:
                generation.first_token_at = now
            generation.last_token_at = now
            if self._watch is not None:
                self._watch(generation, now)
            if not index:
                self._first_token(generation)
            if finished:
                generation.output_tokens = index + 1
                self._finished(generation)
