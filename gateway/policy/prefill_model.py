"""How long an upstream takes to the first token of a prompt of n tokens.

    seconds(n) = a + b × n

fitted by exponentially weighted least squares over the first tokens seen there (weight 0.98 per sample
back). The intercept matters: without it the fixed cost of short prompts is taken for a slow prefill, and
a long prompt would be expected far too late. Only samples that had the engine to themselves are taken
in, so that a prompt stuck behind a long one teaches nothing wrong.
"""

from gateway.policy.clock import NANOSECONDS_PER_SECOND, to_nanoseconds

SAMPLES_MIN = 5
_MEMORY = 0.98


class PrefillModel:
    def __init__(self, tokens_per_second: float) -> None:
        """`tokens_per_second` stands in until there are samples."""
        self.reconfigure(tokens_per_second)
        self.samples = 0
        self._weight = self._n = self._t = self._nn = self._nt = 0.0

    def reconfigure(self, tokens_per_second: float) -> None:
        """Another stand-in; what was learned stays."""
        self._fallback = 1.0 / tokens_per_second

    def learn(self, tokens: int, waited_ns: int) -> None:
        seconds = waited_ns / NANOSECONDS_PER_SECOND
        self.samples += 1
        self._weight = self._weight * _MEMORY + 1.0
        self._n = self._n * _MEMORY + tokens
        self._t = self._t * _MEMORY + seconds
        self._nn = self._nn * _MEMORY + tokens * tokens
        self._nt = self._nt * _MEMORY + tokens * seconds

    def predict_ns(self, tokens: int) -> int:
        """Nanoseconds from dispatch to the first token of a prompt of that many tokens."""
        if self.samples < SAMPLES_MIN:
            return to_nanoseconds(tokens * self._fallback)
        intercept, slope = self._line()
        return to_nanoseconds(intercept + slope * tokens)

    def _line(self) -> tuple[float, float]:
        mean_n, mean_t = self._n / self._weight, self._t / self._weight
        variance = self._nn / self._weight - mean_n * mean_n
        if variance > 1e-6 * mean_n * mean_n:
            slope = (self._nt / self._weight - mean_n * mean_t) / variance
            intercept = mean_t - slope * mean_n
            if slope >= 0 and intercept >= 0:
                return intercept, slope
        return 0.0, mean_t / mean_n  # all of one length, or noise: through the origin
