"""The measurement itself: which probes, in which order, and no further than the bounds allow.

1. Two small requests, to warm the engine up and to learn how it counts tokens.
2. Prefill: prompts of growing length, one at a time, three of each, answered by one token.
3. Levels: 1, 2, 4, … equal requests at once, until the knee is known (`suggestion.py`).

Every prompt is new, so that no prefix cache shortens it, and counts as many tokens as the engine says.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from .engine import Engine, EngineFull, EngineProblem, PromptTooLong
from .fit import CannotFit, PrefillLine, PrefillSample, fit_prefill
from .suggestion import Level, Stop, Suggestion, level_of, next_streams, suggest

PREFILL_LENGTHS = (256, 512, 1024, 2048, 4096)
PREFILL_REPEATS = 3
PREFILL_PART = 0.4
"""Of all time and tokens; only prompts of the two shortest lengths are sent whatever they take."""
LEVEL_INPUT_TOKENS = 512
LEVEL_OUTPUT_TOKENS = 96
"""About the mixture of conversations, five tokens in for one out, and short enough for many levels."""
CONTEXT_PART = 0.5
"""A prompt takes no more of the engine's context: estimates of its length may be off."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a calibration may take: seconds in all, and tokens of prompts and answers together."""

    seconds: float = 60.0
    tokens: int = 500_000


Progress = Callable[[str], None]
"""What is being measured now, in a few words."""


class Calibration:
    """One measurement of one engine. `run` is called once."""

    def __init__(
        self, engine: Engine, bounds: Bounds, tpot_target: float, progress: Progress = lambda doing: None
    ) -> None:
        self._engine = engine
        self._bounds = bounds
        self._tpot_target = tpot_target
        self._progress = progress
        self._started = 0.0
        self._samples: list[PrefillSample] = []
        self._levels: list[Level] = []
        self._cut_by = Stop.BOUNDS

    async def run(self) -> Suggestion:
        """Raises `EngineProblem`; within the bounds, whatever the engine does."""
        self._started = time.monotonic()
        line: PrefillLine | None = None
        try:
            async with asyncio.timeout(self._bounds.seconds):
                self._progress("warming up")
                await self._engine.open()
                await self._measure_prefill()
                line = fit_prefill(self._samples)
                await self._measure_levels(line)
        except TimeoutError:
            pass  # what there is by now may do
        except CannotFit as error:
            raise EngineProblem(f"{self._engine.url}: {error}") from error
        if line is None or not self._levels:
            raise EngineProblem(
                f"{self._engine.url}: {self._bounds.seconds:g} s and {self._bounds.tokens:,} tokens were not "
                "enough to measure it; allow more with --seconds and --tokens"
            )
        return suggest(line, self._levels, self._tpot_target, self._cut_by)

    async def _measure_prefill(self) -> None:
        lengths = [length for length in PREFILL_LENGTHS if self._fits(length)]
        for index, length in enumerate(lengths):
            self._progress(f"prefill: prompts of {length:,} tokens")
            for _ in range(PREFILL_REPEATS):
                if index > 1 and not self._prefill_is_affordable(length):
                    return
                try:
                    times = await self._engine.ask(length, 1)
                except PromptTooLong:
                    if index > 1:
                        return
                    raise
                sample = PrefillSample(length, max(times.fresh_tokens, 1), times.first_token_seconds)
                self._samples.append(sample)

    def _fits(self, length: int) -> bool:
        context = self._engine.context_tokens
        return context is None or length <= CONTEXT_PART * context

    def _prefill_is_affordable(self, length: int) -> bool:
        """By the last prompt's seconds per token."""
        last = self._samples[-1]
        seconds = last.seconds * length / last.length
        tokens = self._engine.tokens_used + length
        return (
            self._elapsed + seconds <= PREFILL_PART * self._bounds.seconds
            and tokens <= PREFILL_PART * self._bounds.tokens
        )

    async def _measure_levels(self, line: PrefillLine) -> None:
        input_tokens, output_tokens = self._level_lengths()
        while True:
            streams = next_streams(self._levels, line, self._tpot_target)
            if streams is None:
                return
            tokens = self._engine.tokens_used + streams * (input_tokens + output_tokens)
            at_least = self._levels[-1].wall_seconds if self._levels else 0.0
            if tokens > self._bounds.tokens or self._elapsed + at_least > self._bounds.seconds:
                return
            self._progress(f"throughput: {streams} at once")
            try:
                self._levels.append(await self._level(streams, input_tokens, output_tokens))
            except EngineFull:
                if not self._levels:
                    raise
                self._cut_by = Stop.REFUSED
                return

    def _level_lengths(self) -> tuple[int, int]:
        context = self._engine.context_tokens
        if context is None:
            return LEVEL_INPUT_TOKENS, LEVEL_OUTPUT_TOKENS
        return min(LEVEL_INPUT_TOKENS, context // 4), min(LEVEL_OUTPUT_TOKENS, context // 8)

    async def _level(self, streams: int, input_tokens: int, output_tokens: int) -> Level:
        try:
            async with asyncio.TaskGroup() as group:
                asked = [
                    group.create_task(self._engine.ask(input_tokens, output_tokens)) for _ in range(streams)
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return level_of([task.result() for task in asked])

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._started
