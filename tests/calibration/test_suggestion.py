"""From measurements to settings, against an engine that is a formula."""

from dataclasses import dataclass

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.calibration.fit import PrefillLine, PrefillSample
from gateway.calibration.rendering import as_yaml
from gateway.calibration.suggestion import (
    GROWTH_MIN,
    STREAMS_MAX,
    Level,
    Stop,
    Suggestion,
    find_knee,
    next_streams,
    suggest,
)
from gateway.settings import Settings

PROMPT, ANSWER = 512, 96


@dataclass(frozen=True)
class FormulaEngine:
    """A step of k streams takes a + c·k, a prompt's token b; a batch has no more than `batch` streams."""

    a: float = 0.010
    b: float = 6e-5
    c: float = 1e-4
    batch: int = 10_000

    @property
    def line(self) -> PrefillLine:
        samples = (PrefillSample(1000, 1000, self.a + 1000 * self.b),)
        return PrefillLine(self.a, self.b, samples)

    def step(self, streams: int) -> float:
        return self.a + self.c * streams

    def level(self, streams: int) -> Level:
        rounds, rest = divmod(streams, self.batch)
        batches = [self.batch] * rounds + [rest] * bool(rest)
        wall = sum(self.a + self.b * PROMPT * k + (ANSWER - 1) * self.step(k) for k in batches)
        step = self.step(streams) if len(batches) == 1 else None
        return Level(streams, wall, streams * PROMPT, streams * ANSWER, step)

    def measured(self, tpot_target: float) -> list[Level]:
        levels: list[Level] = []
        while (streams := next_streams(levels, self.line, tpot_target)) is not None:
            levels.append(self.level(streams))
        return levels


ENGINES = st.builds(
    FormulaEngine,
    a=st.floats(min_value=1e-4, max_value=0.2),
    b=st.floats(min_value=1e-6, max_value=1e-2),
    c=st.floats(min_value=0, max_value=1e-2),
    batch=st.integers(min_value=1, max_value=600),
)
TARGETS = st.floats(min_value=1e-3, max_value=1)


@settings(deadline=None)
@given(ENGINES, TARGETS)
def test_the_search_ends_soon(engine: FormulaEngine, target: float) -> None:
    """Doublings and one middle, never more streams than the limit."""
    levels = engine.measured(target)
    tried = [level.streams for level in levels]
    assert len(tried) <= STREAMS_MAX.bit_length() + 1
    assert max(tried) <= STREAMS_MAX
    doublings = tried[:-1] if len(tried) > 1 and tried[-1] < tried[-2] else tried
    assert doublings == [2**n for n in range(len(doublings))]


@settings(deadline=None)
@given(ENGINES, TARGETS)
def test_the_knee_keeps_the_target_and_pays(engine: FormulaEngine, target: float) -> None:
    """Unless even one stream misses it; and the next doubling either did not pay or missed it."""
    levels = engine.measured(target)
    knee = find_knee(levels, engine.line, target)
    if knee.stop is Stop.TOO_SLOW:
        assert knee.level.streams == 1
        assert knee.level.tpot_seconds(engine.line) > target
        return
    assert knee.level.tpot_seconds(engine.line) <= target
    larger = [level for level in levels if level.streams > knee.level.streams]
    for level in larger:
        pays = level.tokens_per_second >= GROWTH_MIN * knee.level.tokens_per_second
        assert not pays or level.tpot_seconds(engine.line) > target
    assert all(
        level.tokens_per_second <= knee.level.tokens_per_second
        for level in levels
        if level.streams < knee.level.streams
    )


@settings(deadline=None)
@given(ENGINES, TARGETS)
def test_weighted_throughput_is_the_prefill_speed(engine: FormulaEngine, target: float) -> None:
    """What the weight is for: whatever is asked, a budget of 1/b weighted tokens a second carries it; one
    iteration's fixed cost and the answers' first tokens, which come with the prompt, are all that differs."""
    suggestion = suggest(engine.line, engine.measured(target), target)
    level = suggestion.knee.level
    if level.step_seconds is None:
        return
    assert suggestion.output_weight == pytest.approx(engine.step(level.streams) / level.streams / engine.b)
    assert suggestion.weighted_throughput * engine.b == pytest.approx(1, rel=1.5 / ANSWER)
    assert suggestion.tokens_per_second == pytest.approx(0.9 * suggestion.weighted_throughput)
    assert suggestion.max_in_flight == level.streams


def test_time_per_token_by_hand() -> None:
    """100 tokens come in 3 s, of which the own prompt takes 1.02 s: 99 gaps of 20 ms."""
    line = PrefillLine(0.02, 0.001, ())
    level = Level(4, 3.0, 4 * 1000, 4 * 100, None)
    assert level.tpot_seconds(line) == pytest.approx((3.0 - 1.02) / 99)


def test_a_step_that_was_not_seen() -> None:
    """The time that the prefills leave is the decodes'."""
    level = Level(4, 3.0, 1000, 400, None)
    assert level.decode_seconds_per_token(PrefillLine(0.02, 0.001, ())) == pytest.approx(2.0 / 400)


@pytest.mark.parametrize(
    ("engine", "target", "streams", "stop"),
    [
        (FormulaEngine(), 1.0, 128, Stop.GROWTH),
        (FormulaEngine(batch=2), 10.0, 2, Stop.GROWTH),
        (FormulaEngine(), 0.03, 48, Stop.TPOT),
        (FormulaEngine(), 0.005, 1, Stop.TOO_SLOW),
        (FormulaEngine(b=1e-7, c=0), 1.0, 256, Stop.LIMIT),
    ],
    ids=["growth", "small batch", "target", "too slow", "limit"],
)
def test_why_the_search_ends(engine: FormulaEngine, target: float, streams: int, stop: Stop) -> None:
    """Each reason, with the batch that is suggested then."""
    knee = find_knee(engine.measured(target), engine.line, target)
    assert (knee.level.streams, knee.stop) == (streams, stop)


@pytest.mark.parametrize("cut_by", [Stop.BOUNDS, Stop.REFUSED])
def test_a_search_that_was_cut_off(cut_by: Stop) -> None:
    """What was measured counts, and the suggestion says that it may be too low."""
    engine = FormulaEngine()
    suggestion = suggest(engine.line, engine.measured(0.06)[:3], 0.06, cut_by)
    assert (suggestion.max_in_flight, suggestion.knee.stop) == (4, cut_by)
    assert f"# Caution: {cut_by.value}" in rendered(suggestion)


def rendered(suggestion: Suggestion) -> str:
    return as_yaml(suggestion, "http://engine:8000", "a-model", seconds=12.0, tokens=34_000)


@settings(deadline=None)
@given(ENGINES, TARGETS)
def test_the_settings_take_what_is_suggested(engine: FormulaEngine, target: float) -> None:
    """The YAML is a configuration, with the suggestion's numbers to three digits."""
    suggestion = suggest(engine.line, engine.measured(target), target)
    settings = Settings(**yaml.safe_load(rendered(suggestion)))
    (upstream,) = settings.upstreams
    assert upstream.url == "http://engine:8000"
    assert upstream.max_in_flight == suggestion.max_in_flight
    assert upstream.tokens_per_second == pytest.approx(suggestion.tokens_per_second, rel=0.006, abs=0.5)
    assert settings.capacity.output_weight == pytest.approx(suggestion.output_weight, rel=0.006)


def test_what_was_not_right_is_said() -> None:
    """Equal prompts with different times, a line that does not fit, an engine without a batch."""
    line = PrefillLine(0.01, 6e-5, (PrefillSample(1000, 1000, 0.2),), scatter=1.9)
    alone = FormulaEngine(batch=1)
    text = rendered(suggest(line, alone.measured(1.0), 1.0))
    assert "factor of 1.9" in text
    assert "off the line" in text
    assert "does not batch" in text
