"""What the measurements say of the engine: the line of its prefill, and its decode step.

**Prefill.** On an idle engine the first token of a prompt of n tokens comes after

    TTFT(n) = a + b·n

where `a` is all that does not grow with the prompt (an iteration's fixed cost, network, HTTP) and 1/b is the
prefill speed in tokens per second. Every disturbance makes a first token later and none makes it earlier, so
of several prompts of one length only the fastest counts; through those goes the line with the least sum of
squares of relative errors, (TTFT(n) − t)² / t². Attention makes the true curve bend upwards and chunked
prefill makes it a staircase; with relative errors the longest prompt, whose time is largest, does not decide
alone what the usual, shorter ones are said to cost.

**Decode step.** While k streams decode side by side, each gets one token per iteration. All of a level begin
at once, so the clean stretch is the one in which all k decode and nobody is being prefilled: from the last
stream's first token to the first stream's last one. The step is the median over the streams of the time per
token inside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

STEP_TOKENS_MIN = 8
"""A shorter stretch than so many tokens says more of its ends than of the step."""


class CannotFit(ValueError):
    """What was measured gives no line, and why."""


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """A prompt on the idle engine; `tokens` as the engine counts, without those its prefix cache had."""

    length: int
    """The length that was aimed at: samples of one length are compared with each other."""
    tokens: int
    seconds: float
    """From sending it to its first token."""


@dataclass(frozen=True, slots=True)
class PrefillLine:
    """TTFT = `fixed_seconds` + `seconds_per_token` · tokens, through `samples`."""

    fixed_seconds: float
    seconds_per_token: float
    samples: tuple[PrefillSample, ...]
    scatter: float = 1.0
    """How many times as long the second fastest of a length took, at worst: 1 on an engine that is idle."""

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.seconds_per_token

    @property
    def largest_residual(self) -> float:
        """How far the line passes by a sample at most, as a fraction of that sample's time."""
        return max(abs(self.seconds(s.tokens) - s.seconds) / s.seconds for s in self.samples)

    def seconds(self, tokens: float) -> float:
        return self.fixed_seconds + self.seconds_per_token * tokens


def fastest_of_each_length(samples: Sequence[PrefillSample]) -> tuple[PrefillSample, ...]:
    """In ascending order of length."""
    fastest: dict[int, PrefillSample] = {}
    for sample in samples:
        best = fastest.get(sample.length)
        if best is None or sample.seconds < best.seconds:
            fastest[sample.length] = sample
    return tuple(fastest[length] for length in sorted(fastest))


def fit_prefill(samples: Sequence[PrefillSample]) -> PrefillLine:
    """Weighted least squares (weights 1/t²) through the fastest sample of each length. Raises `CannotFit`."""
    points = fastest_of_each_length(samples)
    if len({point.tokens for point in points}) < 2:
        raise CannotFit("prompts of two lengths at least are needed to tell prefill from fixed cost")
    weights = [1 / point.seconds**2 for point in points]
    tokens_mean = fmean((point.tokens for point in points), weights)
    seconds_mean = fmean((point.seconds for point in points), weights)
    from_mean = [(w * (p.tokens - tokens_mean), p) for w, p in zip(weights, points, strict=True)]
    slope = sum(d * (p.seconds - seconds_mean) for d, p in from_mean) / sum(
        d * (p.tokens - tokens_mean) for d, p in from_mean
    )
    if slope <= 0:
        short, long = points[0], points[-1]
        raise CannotFit(
            f"longer prompts do not take longer ({short.tokens} tokens {short.seconds * 1000:.0f} ms, "
            f"{long.tokens} tokens {long.seconds * 1000:.0f} ms): is the engine busy with something else?"
        )
    return PrefillLine(seconds_mean - slope * tokens_mean, slope, points, _scatter(samples))


def _scatter(samples: Sequence[PrefillSample]) -> float:
    by_length: dict[int, list[float]] = {}
    for sample in samples:
        by_length.setdefault(sample.length, []).append(sample.seconds)
    repeated = [sorted(seconds)[:2] for seconds in by_length.values() if len(seconds) > 1]
    return max((second / first for first, second in repeated), default=1.0)


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """One answer as it came. Seconds on one clock; `events` are the times of its pieces of text."""

    sent: float
    ended: float
    events: tuple[float, ...]
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0

    @property
    def fresh_tokens(self) -> int:
        return self.input_tokens - self.cached_tokens

    @property
    def first_token_seconds(self) -> float:
        """The answer's end counts as its first token if no text came: a token may have none."""
        return (self.events[0] if self.events else self.ended) - self.sent

    @property
    def tokens_per_event(self) -> float:
        """Engines send two tokens in one piece now and then."""
        return self.output_tokens / len(self.events)


def decode_step(streams: Sequence[StreamTimes]) -> float | None:
    """Seconds per token of each of these streams while all of them decode; None if they hardly ever did."""
    if not streams or not all(stream.events for stream in streams):
        return None
    begin = max(stream.events[0] for stream in streams)
    end = min(stream.events[-1] for stream in streams)
    steps = []
    for stream in streams:
        inside = [at for at in stream.events if begin <= at <= end]
        if len(inside) < 2 or (len(inside) - 1) * stream.tokens_per_event < STEP_TOKENS_MIN:
            return None
        steps.append((inside[-1] - inside[0]) / ((len(inside) - 1) * stream.tokens_per_event))
    return median(steps)
