"""A suggestion as YAML: settings that can be laid into a configuration, each with what it was measured by."""

from collections.abc import Iterator
from math import floor, log10

from .suggestion import GROWTH_MIN, USED_PART, Level, Stop, Suggestion

RESIDUAL_MAX = 0.2
SCATTER_MAX = 1.25
"""Beyond these the engine was not alone, or the line is no good description of it."""


def as_yaml(suggestion: Suggestion, url: str, model: str, *, seconds: float, tokens: int) -> str:
    """`seconds` and `tokens` are what the measurement took."""
    line, knee = suggestion.line, suggestion.knee
    level, weight = knee.level, _rounded(suggestion.output_weight)
    lines = [
        f"# Measured by `qos-gateway calibrate` at {url}, model {model},",
        f"# in {seconds:.0f} s with {tokens:,} tokens.",
        *(f"# Caution: {caution}." for caution in _cautions(suggestion)),
        "upstreams:",
        "  - name: engine0",
        f"    url: {url}",
        *_comments(
            "    ",
            f"Of the batches tried, {level.streams} is the largest that pays: {knee.stop.value}.",
            "streams: tokens/s, ms per output token with as many always in flight "
            f"(target {suggestion.tpot_target * 1000:.0f}), ms of a decode step",
            *(_told(each, suggestion) for each in suggestion.levels),
        ),
        f"    max_in_flight: {suggestion.max_in_flight}",
        *_comments(
            "    ",
            f"{USED_PART:.0%} of what it did with {level.streams} at once: {level.input_tokens:,} tokens in "
            f"and {level.output_tokens:,} out,",
            f"those times {weight:g}, in {level.wall_seconds:.2f} s. Prefill alone: "
            f"{line.tokens_per_second:,.0f} tokens/s.",
        ),
        f"    tokens_per_second: {_rounded(suggestion.tokens_per_second):.0f}",
        "capacity:",
        *_comments(
            "  ",
            f"An output token costs {level.decode_seconds_per_token(line) * 1000:.3f} ms of the engine with "
            f"{level.streams} streams, an input token",
            f"{line.seconds_per_token * 1000:.4f} ms: first token after {line.fixed_seconds * 1000:.1f} ms + "
            f"{line.seconds_per_token * 1000:.4f} ms · tokens, from",
            *(f"{sample.tokens:,} tokens: {sample.seconds * 1000:.1f} ms" for sample in line.samples),
        ),
        f"  output_weight: {weight:g}",
    ]
    return "\n".join(lines) + "\n"


def _told(level: Level, suggestion: Suggestion) -> str:
    step = "-" if level.step_seconds is None else f"{level.step_seconds * 1000:.1f}"
    tpot = level.tpot_seconds(suggestion.line) * 1000
    return f"{level.streams:>4}: {level.tokens_per_second:>8,.0f} {tpot:>8.1f} {step:>8}"


def _cautions(suggestion: Suggestion) -> Iterator[str]:
    line, knee = suggestion.line, suggestion.knee
    if line.scatter > SCATTER_MAX:
        yield f"equal prompts differed by a factor of {line.scatter:.1f}; was the engine busy with others"
    if line.largest_residual > RESIDUAL_MAX:
        yield f"first tokens are up to {line.largest_residual:.0%} off the line below"
    if knee.stop in (Stop.BOUNDS, Stop.TOO_SLOW, Stop.REFUSED):
        yield knee.stop.value
    if knee.stop is Stop.GROWTH and knee.level.streams == 1:
        yield f"two streams give less than {GROWTH_MIN:g} times one: this engine does not batch"


def _comments(indent: str, *texts: str) -> list[str]:
    return [f"{indent}# {text}" for text in texts]


def _rounded(value: float, digits: int = 3) -> float:
    """To so many significant digits: more would be no measurement."""
    if value <= 0:
        return 0.0
    return round(value, digits - 1 - floor(log10(value)))
