"""Measurements → settings. Pure arithmetic; `probes.py` asks `next_streams` what to measure next.

The engine is loaded with k = 1, 2, 4, … requests at once, all of the same prompt and answer (a *level*).
With `wall` the time from the first request to the end of the last answer, a level serves k requests in
`wall`.

**The knee.** Doubling k goes on while it pays: a level must serve at least 10 % more tokens a second than
the one before, and its time per output token must keep the target. By Little's law, k requests always in
flight at this throughput are in the engine for `wall` each, of which the own prefill takes TTFT(p) on
average, so

    TPOT(k) = (wall − TTFT(p)) / (m − 1)        for prompts of p and answers of m tokens

which contains the stalls that the others' prefills cause. Where the target ends the doubling, the middle of
the last two levels is tried once. The last good k is `max_in_flight`: more requests in the batch add delay
and no throughput, so they had better wait in the gateway, in order.

**output_weight.** k streams decode k tokens in one step, so a token costs the engine step(k) / k seconds,
and a prompt's token b. What they cost relative to each other is

    output_weight = step(k) / (k · b)           at the knee

With this weight an iteration that prefills P tokens and decodes k takes step(k) + b·P = b · (P + weight·k)
seconds: it carries 1/b weighted tokens a second whatever the mixture, which is what lets one number be a
budget.

**tokens_per_second** is nine tenths of the throughput of the level at the knee, so weighted:

    tokens_per_second = 0.9 · Σ (input + output_weight · output) / wall

which without the tenth should come close to 1/b; what is missing is the engine's fixed cost and that of its
door. The tenth is room for chance: at the knee the *mean* answer keeps the target, so with all of it given
out every second answer would miss. (In the simulator, at twice the load that `seed_32k` carries, P0 answers
that keep their promise rise from 61 to 99 % of the admitted with it, goodput by a third; a second tenth
costs goodput again.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .fit import PrefillLine, StreamTimes, decode_step

GROWTH_MIN = 1.10
USED_PART = 0.9
"""Of the throughput at the knee, that may be given out."""
STREAMS_MAX = 256
"""Where engines' own default limit of a batch is (`--max-num-seqs`)."""


@dataclass(frozen=True, slots=True)
class Level:
    """`streams` equal requests, begun at once."""

    streams: int
    wall_seconds: float
    input_tokens: int
    """Of all together, without what came from a prefix cache."""
    output_tokens: int
    step_seconds: float | None
    """None where they hardly ever decoded all at once: the engine does not batch so many."""

    @property
    def tokens_per_second(self) -> float:
        """Every token counted once."""
        return (self.input_tokens + self.output_tokens) / self.wall_seconds

    def tpot_seconds(self, line: PrefillLine) -> float:
        """Time per output token with so many requests always in flight; see above."""
        steps = max(self.output_tokens / self.streams - 1, 1)
        return max(self.wall_seconds - line.seconds(self.input_tokens / self.streams), 0) / steps

    def decode_seconds_per_token(self, line: PrefillLine) -> float:
        """The engine's time for one token of one answer, at this batch. Where no step could be seen, it is
        what the prefills leave of the time."""
        if self.step_seconds is not None:
            return self.step_seconds / self.streams
        left = self.wall_seconds - line.seconds_per_token * self.input_tokens
        return max(left, 0) / self.output_tokens


def level_of(streams: Sequence[StreamTimes]) -> Level:
    return Level(
        streams=len(streams),
        wall_seconds=max(s.ended for s in streams) - min(s.sent for s in streams),
        input_tokens=sum(s.fresh_tokens for s in streams),
        output_tokens=sum(s.output_tokens for s in streams),
        step_seconds=decode_step(streams),
    )


class Stop(Enum):
    """Why no larger batch was tried, or taken."""

    GROWTH = "twice as many streams gave less than 10 % more"
    TPOT = "more streams miss the target of time per output token"
    LIMIT = f"no more than {STREAMS_MAX} streams are tried"
    BOUNDS = "the time or the tokens allowed were used up; the engine may carry more"
    REFUSED = "the engine refuses more requests at once"
    TOO_SLOW = "even one stream misses the target of time per output token"


@dataclass(frozen=True, slots=True)
class Knee:
    level: Level
    stop: Stop


def next_streams(levels: Sequence[Level], line: PrefillLine, tpot_target: float) -> int | None:
    """How many streams to try after these levels, in the order they were measured; None: the knee is
    known."""
    if not levels:
        return 1
    last = levels[-1]
    if len(levels) == 1:
        return None if last.tpot_seconds(line) > tpot_target else 2
    before = levels[-2]
    if last.streams < before.streams:
        return None  # that was the middle
    if last.tpot_seconds(line) > tpot_target:
        middle = (last.streams + before.streams) // 2
        return middle if middle > before.streams else None
    if last.tokens_per_second < GROWTH_MIN * before.tokens_per_second:
        return None
    return 2 * last.streams if 2 * last.streams <= STREAMS_MAX else None


def find_knee(
    levels: Sequence[Level], line: PrefillLine, tpot_target: float, cut_by: Stop = Stop.BOUNDS
) -> Knee:
    """The level to work at. `levels` is not empty, in the order they were measured; `cut_by` is why there are
    no more of them, if they do not tell it themselves."""
    good = levels[0]
    if good.tpot_seconds(line) > tpot_target:
        return Knee(good, Stop.TOO_SLOW)
    for level in levels[1:]:
        if level.tpot_seconds(line) > tpot_target:
            return Knee(_better(good, levels[-1], line, tpot_target), Stop.TPOT)
        if level.tokens_per_second < GROWTH_MIN * good.tokens_per_second:
            return Knee(good, Stop.GROWTH)
        good = level
    return Knee(good, Stop.LIMIT if 2 * good.streams > STREAMS_MAX else cut_by)


def _better(good: Level, middle: Level, line: PrefillLine, tpot_target: float) -> Level:
    """`middle`, where that is a larger batch that keeps the target and serves more."""
    larger = middle.streams > good.streams and middle.tokens_per_second > good.tokens_per_second
    return middle if larger and middle.tpot_seconds(line) <= tpot_target else good


@dataclass(frozen=True, slots=True)
class Suggestion:
    line: PrefillLine
    levels: tuple[Level, ...]
    knee: Knee
    tpot_target: float
    output_weight: float
    weighted_throughput: float
    """Weighted tokens per second of the level at the knee."""

    @property
    def tokens_per_second(self) -> float:
        return USED_PART * self.weighted_throughput

    @property
    def max_in_flight(self) -> int:
        return self.knee.level.streams


def suggest(
    line: PrefillLine, levels: Sequence[Level], tpot_target: float, cut_by: Stop = Stop.BOUNDS
) -> Suggestion:
    """`levels` and `cut_by` as in `find_knee`."""
    knee = find_knee(levels, line, tpot_target, cut_by)
    level = knee.level
    weight = level.decode_seconds_per_token(line) / line.seconds_per_token
    weighted = (level.input_tokens + weight * level.output_tokens) / level.wall_seconds
    return Suggestion(line, tuple(levels), knee, tpot_target, weight, weighted)
