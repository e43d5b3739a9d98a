"""The line of the prefill and the decode step, by arithmetic."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.calibration.fit import (
    CannotFit,
    PrefillSample,
    StreamTimes,
    decode_step,
    fastest_of_each_length,
    fit_prefill,
)

LENGTHS = (256, 1024, 4096, 8192)
FIXED_SECONDS = st.floats(min_value=0, max_value=1)
PER_TOKEN = st.floats(min_value=1e-6, max_value=1e-2)
DELAYS = st.lists(st.floats(min_value=0, max_value=2), min_size=len(LENGTHS), max_size=len(LENGTHS))


def sample(tokens: int, seconds: float) -> PrefillSample:
    return PrefillSample(tokens, tokens, seconds)


def stream(*events: float, output_tokens: int | None = None) -> StreamTimes:
    return StreamTimes(0.0, events[-1], events, 100, len(events) if output_tokens is None else output_tokens)


@settings(deadline=None)
@given(FIXED_SECONDS, PER_TOKEN)
def test_a_line_is_found_again(fixed: float, per_token: float) -> None:
    """From points on it, both its numbers come back, and nothing is off it."""
    line = fit_prefill([sample(n, fixed + per_token * n) for n in LENGTHS])
    assert line.fixed_seconds == pytest.approx(fixed, rel=1e-6, abs=1e-9)
    assert line.seconds_per_token == pytest.approx(per_token, rel=1e-6)
    assert line.tokens_per_second == pytest.approx(1 / per_token, rel=1e-6)
    assert line.largest_residual < 1e-6
    assert line.scatter == 1


@settings(deadline=None)
@given(FIXED_SECONDS, PER_TOKEN, DELAYS, st.randoms())
def test_delays_do_not_move_the_line(fixed: float, per_token: float, delays: list[float], random) -> None:
    """As long as one prompt of each length had the engine to itself, whichever came first."""
    undisturbed = [sample(n, fixed + per_token * n) for n in LENGTHS]
    disturbed = [sample(n, fixed + per_token * n + d) for n, d in zip(LENGTHS, delays, strict=True)]
    samples = undisturbed + disturbed
    random.shuffle(samples)
    line = fit_prefill(samples)
    assert line.seconds_per_token == pytest.approx(per_token, rel=1e-6)
    assert line.samples == tuple(undisturbed)
    assert line.scatter >= 1


@settings(deadline=None)
@given(FIXED_SECONDS, PER_TOKEN, DELAYS)
def test_no_other_line_fits_better(fixed: float, per_token: float, delays: list[float]) -> None:
    """Least squares of relative errors: a step to either side in either number makes the sum no smaller."""
    samples = [sample(n, fixed + 1e-3 * n + d) for n, d in zip(LENGTHS, delays, strict=True)]
    try:
        line = fit_prefill(samples)
    except CannotFit:
        return

    def squares(a: float, b: float) -> float:
        return sum(((a + b * s.tokens) / s.seconds - 1) ** 2 for s in samples)

    best = squares(line.fixed_seconds, line.seconds_per_token)
    for a in (-1e-3, 0, 1e-3):
        for b in (-1e-6, 0, 1e-6):
            assert best <= squares(line.fixed_seconds + a, line.seconds_per_token + b) * (1 + 1e-9) + 1e-12


def test_scatter_is_the_second_fastest_over_the_fastest() -> None:
    """Of the worst length; the slowest of three may be a cold start."""
    line = fit_prefill([sample(100, t) for t in (9.0, 1.0, 1.5)] + [sample(200, t) for t in (2.0, 2.0)])
    assert line.scatter == 1.5
    assert fastest_of_each_length([sample(5, 2.0), sample(5, 1.0)]) == (sample(5, 1.0),)


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([], "two lengths"),
        ([sample(100, 1.0), sample(100, 1.1)], "two lengths"),
        ([sample(100, 1.0), sample(200, 1.0)], "do not take longer"),
        ([sample(100, 1.0), sample(200, 0.5)], "do not take longer"),
    ],
)
def test_what_gives_no_line(samples: list[PrefillSample], says: str) -> None:
    """It is said what is missing."""
    with pytest.raises(CannotFit, match=says):
        fit_prefill(samples)


@settings(deadline=None)
@given(
    step=st.floats(min_value=1e-3, max_value=1),
    starts=st.lists(st.integers(min_value=0, max_value=20), min_size=1, max_size=6),
    slow=st.floats(min_value=1, max_value=10),
)
def test_the_step_is_that_of_all_together(step: float, starts: list[int], slow: float) -> None:
    """What came while some were still being prefilled took longer per token, and does not count."""
    last = max(starts)
    times = [-(last - n) * step * slow for n in range(last)] + [n * step for n in range(40)]
    streams = [stream(*times[start:]) for start in starts]
    assert decode_step(streams) == pytest.approx(step)


def test_tokens_that_come_two_in_a_piece() -> None:
    """The engine's count says so, and the step is of a token."""
    assert decode_step([stream(*range(21), output_tokens=42)]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "streams",
    [
        [],
        [StreamTimes(0, 1, (), 10, 5)],
        [stream(*range(5))],
        [stream(*range(20)), stream(*range(15, 40))],
        [stream(*range(20)), stream(*range(30, 60))],
    ],
    ids=["none", "no text", "too short", "hardly together", "one after the other"],
)
def test_no_step_without_a_stretch_together(streams: list[StreamTimes]) -> None:
    """Rather no number than one of two tokens."""
    assert decode_step(streams) is None


def test_a_first_token_without_text() -> None:
    """Then the end of the answer is the first that is known of it."""
    assert StreamTimes(1.0, 3.0, (), 10, 1).first_token_seconds == 2.0
    assert StreamTimes(1.0, 3.0, (1.5, 3.0), 10, 2, cached_tokens=4).first_token_seconds == 0.5
    assert StreamTimes(1.0, 3.0, (), 10, 1, cached_tokens=4).fresh_tokens == 6
