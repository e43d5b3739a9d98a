"""What a request costs, and how much is reserved for its answer."""

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.policy.parameters import CapacityParameters
from gateway.policy.request import Usage
from gateway.policy.token_cost import (
    OutputReserve,
    cost_millitokens,
    usage_millitokens,
)
from tests.support.policy_settings import P0, ask

SHIPPED = CapacityParameters()
INPUT_ALONE = CapacityParameters(output_weight=0)


@pytest.mark.parametrize(
    ("weight", "fresh", "cached", "output", "capacity", "tokens"),
    [
        (1, 100, 0, 0, SHIPPED, 100),
        (1, 100, 0, 50, SHIPPED, 300),
        (2, 100, 0, 50, SHIPPED, 600),
        (1, 1000, 800, 10, SHIPPED, 320),
        (0.5, 1000, 1000, 0, SHIPPED, 50),
        (1, 1000, 900, 999, INPUT_ALONE, 190),
        (3, 7, 0, 10**6, INPUT_ALONE, 21),
        (1, 0, 0, 0, SHIPPED, 1),
        (0.001, 1, 0, 0, SHIPPED, 1),
        (0, 1000, 0, 1000, SHIPPED, 0),
        (1, 100, 500, 0, SHIPPED, 10),
        (1, 128, 0, 1, CapacityParameters(output_weight=2.5), 130.5),
    ],
)
def test_cost_formula(
    weight: float, fresh: int, cached: int, output: int, capacity: CapacityParameters, tokens: float
) -> None:
    """weight × (input − cached × (1 − cache_weight) + output_weight × output), at least one token."""
    assert cost_millitokens(weight, fresh, cached, output, capacity) == round(tokens * 1000)
    assert usage_millitokens(weight, Usage(fresh, output, cached), capacity) == round(tokens * 1000)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**5), st.floats(0.01, 100))
def test_cost_is_whole_positive_and_grows(fresh: int, cached: int, output: int, weight: float) -> None:
    """A cost is a positive integer, more tokens never cost less, and cached ones never more than fresh."""
    cost = cost_millitokens(weight, fresh, cached, output, SHIPPED)
    assert isinstance(cost, int)
    assert cost >= 1000
    assert cost_millitokens(weight, fresh, cached, output + 1, SHIPPED) >= cost
    assert cost <= cost_millitokens(weight, fresh, 0, output, SHIPPED)


def test_initial_reserve_until_twenty_answers() -> None:
    """Before twenty answers the reserve is the configured one."""
    reserve = OutputReserve(CapacityParameters(initial_output_tokens=256))
    for _ in range(19):
        reserve.observe(10)
    assert reserve.tokens == 256
    reserve.observe(10)
    assert reserve.tokens == 10


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=20, max_size=700), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_reserve_is_the_upper_quantile_of_the_last_512(answers: list[int], quantile: float) -> None:
    """The reserve is the smallest answer that at least the given share of the last 512 did not exceed."""
    reserve = OutputReserve(CapacityParameters(output_quantile=quantile))
    for answer in answers:
        reserve.observe(answer)
    window = sorted(answers[-512:])
    assert reserve.tokens == window[ceil(quantile * len(window)) - 1]


def test_reserve_is_bounded_by_what_is_asked_and_counts_sequences() -> None:
    """min(max tokens asked, quantile) × sequences."""
    reserve = OutputReserve(CapacityParameters(initial_output_tokens=256))
    assert reserve.reserve(ask("a", P0)) == 256
    assert reserve.reserve(ask("a", P0, max_output_tokens=10)) == 10
    assert reserve.reserve(ask("a", P0, max_output_tokens=10**6)) == 256
    assert reserve.reserve(ask("a", P0, max_output_tokens=10, sequences=8)) == 80
    assert reserve.reserve(ask("a", P0, sequences=3)) == 768
    assert reserve.reserve(ask("a", P0, max_output_tokens=0)) == 0
