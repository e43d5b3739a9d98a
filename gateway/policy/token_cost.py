"""What a request costs: estimated before it runs, settled after.

    cost = weight × (input − cached × (1 − cache_weight) + output_weight × output)

in weighted tokens, kept as whole millitokens so that charge, settlement and refund add up exactly. One
decoded token costs an engine 4 to 10 prefill tokens, hence `output_weight`.
"""

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from math import ceil

from gateway.policy.parameters import MILLITOKENS, CapacityParameters
from gateway.policy.request import Ask, Usage

IMAGE_TOKENS = 1024
"""One image: between the 576 of a small vision tower and the 2,880 of a tiled one; settled afterwards."""
AUDIO_TOKENS = 512
"""One audio part: about twenty seconds at 25 tokens a second; settled afterwards."""

INITIAL_BYTES_PER_TOKEN = 4.0
_LEARNING_RATE = 0.1
_PLAUSIBLE_BYTES_PER_TOKEN = (0.5, 16.0)
_LEARN_FROM_TEXT_BYTES = 32  # shorter texts are mostly chat template
_MODELS_REMEMBERED = 256

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


class InputEstimator:
    """Prompt length from its bytes, by the bytes-per-token ratio that each model has shown.

    The ratio is an exponentially weighted mean over the answers' `usage`, started at 4. Nothing that a
    client says of its own length is believed.
    """

    def __init__(self) -> None:
        self._bytes_per_token: OrderedDict[str, float] = OrderedDict()

    def estimate(
        self, model: str, text_bytes: int, exact_tokens: int = 0, images: int = 0, audio: int = 0
    ) -> int:
        """Tokens, at least 1."""
        text = ceil(text_bytes / self._bytes_per_token.get(model, INITIAL_BYTES_PER_TOKEN))
        return max(1, text + exact_tokens + images * IMAGE_TOKENS + audio * AUDIO_TOKENS)

    def learn(self, model: str, text_bytes: int, input_tokens: int) -> None:
        """Take in that `text_bytes` of text alone were `input_tokens` tokens."""
        if text_bytes < _LEARN_FROM_TEXT_BYTES or input_tokens <= 0:
            return
        low, high = _PLAUSIBLE_BYTES_PER_TOKEN
        seen = min(max(text_bytes / input_tokens, low), high)
        known = self._bytes_per_token.pop(model, INITIAL_BYTES_PER_TOKEN)
        self._bytes_per_token[model] = known + _LEARNING_RATE * (seen - known)
        if len(self._bytes_per_token) > _MODELS_REMEMBERED:
            self._bytes_per_token.popitem(last=False)

    def bytes_per_token(self, model: str) -> float:
        return self._bytes_per_token.get(model, INITIAL_BYTES_PER_TOKEN)


class OutputReserve:
    """How many output tokens to set aside for an answer whose length is not known yet.

    The upper quantile of the class's last 512 answers, per sequence; `initial_output_tokens` until 20
    have been seen.
    """

    def __init__(self, capacity: CapacityParameters) -> None:
        self._quantile = capacity.output_quantile
        self._initial = capacity.initial_output_tokens
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

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
