"""How long a prompt takes to its first token, learned per upstream."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.policy.clock import to_seconds
from gateway.policy.prefill_model import SAMPLES_MIN, PrefillModel
from tests.support.policy_settings import nanoseconds


def seconds(model: PrefillModel, tokens: int) -> float:
    return to_seconds(model.predict_ns(tokens))


def test_configured_speed_stands_in_until_there_are_samples() -> None:
    """Before five samples a prompt takes its tokens over the configured rate."""
    model = PrefillModel(1000)
    assert seconds(model, 500) == 0.5
    for _ in range(SAMPLES_MIN - 1):
        model.learn(100, nanoseconds(9))
    assert seconds(model, 500) == 0.5
    model.learn(100, nanoseconds(9))
    assert seconds(model, 500) == pytest.approx(45)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0, 1),
    st.floats(1e-6, 1e-2),
    st.lists(st.integers(1, 30000), min_size=SAMPLES_MIN, max_size=60).filter(
        lambda n: max(n) > 1.5 * min(n)
    ),
)
def test_a_straight_line_is_found(intercept: float, slope: float, lengths: list[int]) -> None:
    """From samples on a line the line itself is learned, fixed cost included."""
    model = PrefillModel(1)
    for n in lengths:
        model.learn(n, nanoseconds(intercept + slope * n))
    for n in (1, 1000, 32768):
        assert seconds(model, n) == pytest.approx(intercept + slope * n, rel=1e-3, abs=1e-4)


def test_prompts_of_one_length_scale_through_the_origin() -> None:
    """With a single length nothing is known of the fixed cost: time is proportional."""
    model = PrefillModel(1)
    for _ in range(10):
        model.learn(100, nanoseconds(0.2))
    assert seconds(model, 100) == pytest.approx(0.2)
    assert seconds(model, 1000) == pytest.approx(2.0)


def test_noise_never_predicts_less_for_more() -> None:
    """Samples in which long prompts were faster do not make a longer prompt take less time."""
    model = PrefillModel(1)
    for _ in range(5):
        model.learn(1000, nanoseconds(0.1))
        model.learn(100, nanoseconds(0.5))
    assert 0 < seconds(model, 10) < seconds(model, 1000) < seconds(model, 100000)


def test_old_samples_fade() -> None:
    """An engine that has become slower is believed after some dozens of samples."""
    model = PrefillModel(1)
    for n in range(100, 1100, 100):
        model.learn(n, nanoseconds(0.001 * n))
    for _ in range(40):
        for n in range(100, 1100, 100):
            model.learn(n, nanoseconds(0.003 * n))
    assert seconds(model, 1000) == pytest.approx(3.0, rel=0.01)
