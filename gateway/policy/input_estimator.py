"""How many tokens a prompt will be, learned from what each model's answers say.

    tokens ≈ Σ coefficient × feature

Features are bytes of text by kind, the conversation and its messages (a chat template adds tokens to both).
One ratio of bytes to tokens cannot hold for traffic that is prose, code and Chinese at once; a coefficient
per kind of byte can, and still is counted without tokenising anything.

The coefficients are followed by a Kalman filter with a random-walk state (Haykin, "Adaptive Filter Theory",
the filter of which recursive least squares is a special case), all of it relative to the prompt's length:
with z = features / tokens, noise R, gain numerator g = P z and s = zᵀ g + R,

    θ ← θ + g e / s        P ← P − g gᵀ / s + Q        (no variance above its first value)

where e is the relative error of the forecast. It learns as fast as least squares, forgets by Q, and what the
traffic does not show (no digits for an hour) becomes no less certain than it was at the start. Three things
keep a false or hostile sample harmless: the tokens it tells are first cut to what such text can be at all;
e is cut to a few times the usual error; each coefficient stays within its plausible range.
"""

from collections import OrderedDict
from math import ceil
from operator import mul
from typing import NamedTuple


class TextFeatures(NamedTuple):
    """What is counted of a prompt. The first seven are bytes of UTF-8 and add up to all its text.

    letters, capitals, digits, spaces   of ASCII; `letters` are the small ones
    punctuation      the rest of ASCII, with line ends and control characters
    narrow, wide     characters of two bytes (accents, Cyrillic, Arabic); of three or four (Chinese, emoji)
    conversations    1 where a chat template goes around the text, else 0
    items            messages of the conversation, or prompts where there is none
    """

    letters: int = 0
    capitals: int = 0
    digits: int = 0
    spaces: int = 0
    punctuation: int = 0
    narrow: int = 0
    wide: int = 0
    conversations: int = 0
    items: int = 0

    @property
    def text_bytes(self) -> int:
        return sum(self[:_KINDS_OF_BYTES])

    @property
    def plausible_tokens(self) -> tuple[float, float]:
        """The fewest and the most tokens that this can be."""
        size = self.text_bytes
        template = _CONVERSATION_TOKENS_MAX * self.conversations + _ITEM_TOKENS_MAX * self.items
        return size / _BYTES_PER_TOKEN_MAX, size / _BYTES_PER_TOKEN_MIN + template


IMAGE_TOKENS = 1024
"""One image: between the 576 of a small vision tower and the 2,880 of a tiled one; settled afterwards."""
AUDIO_TOKENS = 512
"""One audio part: about twenty seconds at 25 tokens a second; settled afterwards."""

INITIAL_BYTES_PER_TOKEN = 4.0
_MODELS_REMEMBERED = 256

_KINDS_OF_BYTES = 7
_INITIAL = (1 / INITIAL_BYTES_PER_TOKEN,) * _KINDS_OF_BYTES + (0.0, 0.0)
_BYTES_PER_TOKEN_MIN, _BYTES_PER_TOKEN_MAX = 0.5, 16.0
"""Two tokens to a byte are more than any tokenizer makes of one; sixteen bytes to a token are no language."""
_CONVERSATION_TOKENS_MAX, _ITEM_TOKENS_MAX = 1024.0, 64.0
"""A chat template may bring a whole system prompt of its own, and wraps each message in some markers."""
_LOWEST = (1 / _BYTES_PER_TOKEN_MAX,) * _KINDS_OF_BYTES + (0.0, 0.0)
_HIGHEST = (1 / _BYTES_PER_TOKEN_MIN,) * _KINDS_OF_BYTES + (_CONVERSATION_TOKENS_MAX, _ITEM_TOKENS_MAX)
_PROSE = (0.75, 0.03, 0.01, 0.16, 0.05, 0.0, 0.0, 0.0, 0.0)
"""What a byte of English prose is."""

_UNCERTAINTY = (0.1,) * _KINDS_OF_BYTES + (16.0, 4.0)
"""Standard deviation of each coefficient before anything is known of a model, in tokens."""
_NOISE = 0.05**2
"""Variance of the relative error that is left when all is learned: two texts of the same bytes differ so."""
_NOISE_OF_ONE_TOKEN = 1.0
"""A short prompt tells less: its length in tokens has this variance besides."""
_DRIFT = 1e-4
"""What of its first variance a coefficient regains with each step: the filter remembers some hundreds."""
_DRIFT_STEPS = 8
"""It is given back for so many steps together."""
_ACCURATE, _THEN_ONE_OF = 0.1, 3
"""Where the forecasts are usually this good, one sample of three is taken: the rest of the time is saved."""
_OUTLIER = 4.0
"""Times the usual error that one sample may count for."""
_USUAL_ERROR_RATE = 0.05
_USUAL_ERROR_MIN = 0.05

_FIRST_VARIANCES = tuple(u * u for u in _UNCERTAINTY)
_FORGOTTEN = tuple(variance * _DRIFT * _DRIFT_STEPS for variance in _FIRST_VARIANCES)


class _Coefficients:
    """What is known of one model."""

    __slots__ = ("_covariance", "_samples", "_usual_error", "theta")

    def __init__(self) -> None:
        self.theta = _INITIAL
        size = range(len(_INITIAL))
        self._covariance = [[_FIRST_VARIANCES[i] if i == j else 0.0 for j in size] for i in size]
        self._usual_error = 1.0
        self._samples = 0

    def learn(self, features: TextFeatures, tokens: float) -> None:
        """Take in that these features were so many tokens."""
        lowest, highest = features.plausible_tokens
        tokens = min(max(tokens, lowest), highest)
        expected = sum(map(mul, self.theta, features))
        longest = max(expected, tokens)
        if longest <= 0:
            return
        error = (tokens - expected) / longest
        usual = self._usual_error
        self._usual_error = usual + _USUAL_ERROR_RATE * (max(abs(error), _USUAL_ERROR_MIN) - usual)
        self._samples += 1
        if usual > _ACCURATE or self._samples % _THEN_ONE_OF == 0:
            self._step(
                [feature / longest for feature in features],
                min(max(error, -_OUTLIER * usual), _OUTLIER * usual),
                _NOISE + _NOISE_OF_ONE_TOKEN / longest,
            )

    def _step(self, z: list[float], error: float, noise: float) -> None:
        """One step of the filter."""
        gains = [sum(map(mul, row, z)) for row in self._covariance]
        s = sum(map(mul, z, gains)) + noise
        step = error / s
        moved = [t + step * gain for t, gain in zip(self.theta, gains, strict=True)]
        self.theta = tuple(
            low if t < low else high if t > high else t
            for t, low, high in zip(moved, _LOWEST, _HIGHEST, strict=True)
        )
        shares = [gain / s for gain in gains]
        self._covariance = [
            [p - share * gain for p, gain in zip(row, gains)]  # noqa: B905 – the check costs a microsecond
            for row, share in zip(self._covariance, shares, strict=True)
        ]
        if self._samples % _DRIFT_STEPS == 0:
            for i, row in enumerate(self._covariance):
                row[i] = min(row[i] + _FORGOTTEN[i], _FIRST_VARIANCES[i])


class InputEstimator:
    """Prompt length from its text, by what each model's answers have taught.

    Before the first answer a token is four bytes. Nothing that a client says of its own length is believed,
    and only models that have answered are remembered, the last 256 of them.
    """

    def __init__(self) -> None:
        self._models: OrderedDict[str, _Coefficients] = OrderedDict()

    def estimate(
        self, model: str, text: TextFeatures, exact_tokens: int = 0, images: int = 0, audio: int = 0
    ) -> int:
        """Tokens, at least 1."""
        known = self._models.get(model)
        counted: float = sum(map(mul, _INITIAL if known is None else known.theta, text))
        return max(1, ceil(counted) + exact_tokens + images * IMAGE_TOKENS + audio * AUDIO_TOKENS)

    def learn(self, model: str, text: TextFeatures, tokens: int) -> None:
        """Take in that this text, with the template around it, was so many tokens."""
        if tokens < 0 or (tokens == 0 and text.text_bytes):
            return  # no engine reads text and finds nothing in it: this one does not count
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = _Coefficients()
            if len(self._models) > _MODELS_REMEMBERED:
                self._models.popitem(last=False)
        else:
            self._models.move_to_end(model)
        known.learn(text, tokens)

    def bytes_per_token(self, model: str) -> float:
        """Of English prose, as this model reads it."""
        known = self._models.get(model)
        return INITIAL_BYTES_PER_TOKEN if known is None else 1 / sum(map(mul, known.theta, _PROSE))
