"""What a request costs, and how much is set aside for an answer whose length is not known yet.

    cost = weight × (input − cached × (1 − cache_weight) + output_weight × output)

in weighted tokens, kept as whole millitokens so that charge, settlement and refund add up exactly. One
decoded token costs an engine 4 to 10 prefill tokens, hence `output_weight`.
"""

from bisect import bisect_left, insort
from collections import deque
from math import ceil

from gateway.policy.parameters import MILLITOKENS, CapacityParameters
from gateway.policy.request import Ask, Usage

_QUANTILE_WINDOW = 512
_QUANTILE_SAMPLES_MIN = 20


def cost_millitokens(
    weight: float, input_tokens: int, cached_tokens: int, output_tokens: int, capacity: CapacityParameters
) -> int:
    """Weighted cost in whole millitokens, never below one token."""
    fresh = input_tokens - min(cached_tokens, input_tokens) * (1.0 - capacity.cache_weight)
    tokens = weight * (fresh + capacity.output_weight * output_tokens)
    return max(round(tokens * MILLITOKENS), MILLITOKENS if weight else 0)


def usage_millitokens(weight: float, usage: Usage, capacity: CapacityParameters) -> int:
    return cost_millitokens(weight, usage.input_tokens, usage.cached_tokens, usage.output_tokens, capacity)


class OutputReserve:
    """How many output tokens to set aside for an answer whose length is not known yet.

    The upper quantile of the class's last 512 answers, per sequence; `initial_output_tokens` until 20
    have been seen.
    """

    def __init__(self, capacity: CapacityParameters) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self.reconfigure(capacity)

    def reconfigure(self, capacity: CapacityParameters) -> None:
        """Other settings; what was seen stays."""
        self._quantile = capacity.output_quantile
        self._initial = capacity.initial_output_tokens

    def observe(self, output_tokens: int) -> None:
        if len(self._recent) == _QUANTILE_WINDOW:
            oldest = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._recent.append(output_tokens)
        insort(self._sorted, output_tokens)

    @property
    def tokens(self) -> int:
        if len(self._sorted) < _QUANTILE_SAMPLES_MIN:
            return self._initial
        return self._sorted[min(len(self._sorted) - 1, ceil(self._quantile * len(self._sorted)) - 1)]

    def reserve(self, ask: Ask) -> int:
        """Tokens over all sequences of the request."""
        per_sequence = self.tokens
        if ask.max_output_tokens is not None:
            per_sequence = min(per_sequence, ask.max_output_tokens)
        return per_sequence * ask.sequences
