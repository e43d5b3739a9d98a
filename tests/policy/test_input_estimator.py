"""How long a prompt is thought to be, and how that is learned."""

from dataclasses import dataclass
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.policy.input_estimator import AUDIO_TOKENS, IMAGE_TOKENS, InputEstimator, TextFeatures

counts = st.integers(0, 10**7)
texts = st.builds(TextFeatures, *[counts] * 7, st.integers(0, 1), st.integers(0, 10_000))
samples = st.lists(st.tuples(texts, st.integers(-(10**9), 10**12)), max_size=60)


def taught(samples: list[tuple[TextFeatures, int]]) -> InputEstimator:
    estimator = InputEstimator()
    for text, tokens in samples:
        estimator.learn("m", text, tokens)
    return estimator


# ------------------------------------------------------------------ before anything is learned


def test_the_first_estimate_is_four_bytes_a_token() -> None:
    """An unknown model has four bytes to a token of whatever kind, rounded up."""
    estimator = InputEstimator()
    assert estimator.estimate("m", TextFeatures(letters=400)) == 100
    assert estimator.estimate("m", TextFeatures(letters=400, wide=1)) == 101
    assert estimator.estimate("m", TextFeatures(1, 2, 3, 4, 5, 5, 0, conversations=1, items=9)) == 5
    assert estimator.bytes_per_token("m") == pytest.approx(4)


def test_nothing_to_estimate_is_one_token() -> None:
    """A request of no text still reserves a token."""
    assert InputEstimator().estimate("m", TextFeatures()) == 1


def test_parts_have_their_own_terms() -> None:
    """Token ids count exactly; images and audio by a bounded constant each, not by their bytes."""
    estimator = InputEstimator()
    assert estimator.estimate("m", TextFeatures(), exact_tokens=777) == 777
    text = TextFeatures(letters=40)
    assert estimator.estimate("m", text, exact_tokens=5, images=2, audio=1) == (
        10 + 5 + 2 * IMAGE_TOKENS + AUDIO_TOKENS
    )


# ------------------------------------------------------------------ what is learned


@dataclass
class Model:
    """A model whose prompts are exactly what these coefficients say, but for some noise."""

    coefficients: tuple[float, ...]
    noise: float = 0.05
    seed: int = 1

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def sample(self, *shares: float) -> tuple[TextFeatures, int]:
        chance = self._random
        size = chance.randrange(200, 5000)
        by_kind = [round(size * share * chance.uniform(0.8, 1.2)) for share in shares]
        text = TextFeatures(*by_kind, 1, chance.randrange(1, 8))
        exactly = sum(c * f for c, f in zip(self.coefficients, text, strict=True))
        return text, max(1, round(exactly * chance.gauss(1, self.noise)))


PROSE = (0.74, 0.04, 0.01, 0.16, 0.05, 0.0, 0.0)
CODE = (0.51, 0.04, 0.04, 0.25, 0.16, 0.0, 0.0)
CHINESE = (0.02, 0.0, 0.01, 0.01, 0.01, 0.0, 0.95)
REAL = Model((0.22, 0.3, 0.4, 0.06, 0.5, 0.4, 0.42, 20.0, 5.0))


def errors(estimator: InputEstimator, model: Model, *shares: float) -> float:
    """The median relative error of a hundred forecasts."""
    told = [model.sample(*shares) for _ in range(100)]
    return median(abs(estimator.estimate("m", text) / tokens - 1) for text, tokens in told)


@pytest.mark.parametrize("kinds", [(PROSE,), (CODE,), (CHINESE,), (PROSE, CODE, CHINESE)])
def test_two_hundred_answers_are_enough(kinds: tuple[tuple[float, ...], ...]) -> None:
    """Each kind of traffic, and their mix, is forecast about as well as its noise allows."""
    model = Model(REAL.coefficients)
    estimator = taught([model.sample(*kinds[i % len(kinds)]) for i in range(200)])
    for shares in kinds:
        assert errors(estimator, model, *shares) < 0.06


def test_models_are_learned_apart() -> None:
    """What one answers says nothing of another."""
    estimator = InputEstimator()
    for _ in range(50):
        estimator.learn("m", TextFeatures(letters=1000), 500)
    assert estimator.estimate("m", TextFeatures(letters=1000)) == pytest.approx(500, abs=25)
    assert estimator.estimate("other", TextFeatures(letters=1000)) == 250
    assert estimator.bytes_per_token("m") < 3 < estimator.bytes_per_token("other")


def test_a_template_is_learned_apart_from_the_text() -> None:
    """Also where all text is counted exactly and only the template is left to learn."""
    estimator = taught(
        [(TextFeatures(conversations=1, items=n), 12 + 5 * n) for _ in range(30) for n in range(1, 6)]
    )
    assert estimator.estimate("m", TextFeatures(conversations=1, items=3), exact_tokens=1000) == (
        pytest.approx(1027, abs=3)
    )


def test_a_template_that_is_gone_is_unlearned() -> None:
    """Answers that are exactly as long as their counted text bring its coefficients back to nothing."""
    template = TextFeatures(conversations=1, items=3)
    estimator = taught([(template, 40)] * 20 + [(template, 0)] * 300)
    assert estimator.estimate("m", template, exact_tokens=1000) < 1004


def test_a_model_that_changes_is_followed() -> None:
    """Another tokenizer under the same name is learned as well, after hundreds of answers of the old one."""
    old, new = Model(REAL.coefficients), Model((0.4, 0.6, 0.9, 0.3, 0.9, 0.9, 0.9, 0.0, 9.0))
    estimator = taught([old.sample(*PROSE) for _ in range(500)] + [new.sample(*PROSE) for _ in range(300)])
    assert errors(estimator, new, *PROSE) < 0.06


# ------------------------------------------------------------------ what must not be learned


@pytest.mark.parametrize(("text_bytes", "tokens"), [(1000, 0), (1000, -5), (0, -1)])
def test_answers_that_tell_nothing_teach_nothing(text_bytes: int, tokens: int) -> None:
    """An engine that counts nothing has not read the text for nothing."""
    estimator = taught([(TextFeatures(letters=text_bytes), tokens)] * 50)
    assert estimator.estimate("m", TextFeatures(letters=1000)) == 250


@pytest.mark.parametrize(("text_bytes", "tokens"), [(10**9, 1), (100, 10**9), (64, 64000), (1, 10**12)])
def test_absurd_answers_teach_within_reason(text_bytes: int, tokens: int) -> None:
    """No answer, however odd, drives the ratio out of what text can be."""
    estimator = taught([(TextFeatures(letters=text_bytes), tokens)] * 1000)
    assert 0.5 <= estimator.bytes_per_token("m") <= 16


@pytest.mark.parametrize("lie", [lambda tokens: 1, lambda tokens: 8 * tokens, lambda tokens: 10**12])
def test_one_lie_in_ten_does_little(lie: object) -> None:
    """Once a model is known, samples far from it count for little."""
    model = Model(REAL.coefficients)
    honest = [model.sample(*PROSE) for _ in range(200)]
    assert callable(lie)
    told = [(text, lie(tokens) if i % 10 == 9 else tokens) for i, (text, tokens) in enumerate(honest * 2)]
    assert errors(taught(honest + told), model, *PROSE) < 0.1


@settings(max_examples=60, deadline=None)
@given(samples, texts, st.integers(0, 10**6))
def test_no_samples_break_the_arithmetic(
    told: list[tuple[TextFeatures, int]], text: TextFeatures, exact: int
) -> None:
    """Estimates are whole, from 1 on, within what such text can be; exact tokens come on top unchanged."""
    estimator = taught(told)
    estimate = estimator.estimate("m", text)
    lowest, highest = text.plausible_tokens
    assert isinstance(estimate, int)
    assert max(1, lowest) <= estimate <= max(1, highest) * (1 + 1e-9) + 1
    if text.text_bytes:
        assert estimator.estimate("m", text, exact) == estimate + exact
    assert 0.5 <= estimator.bytes_per_token("m") <= 16


@settings(max_examples=60, deadline=None)
@given(samples, texts, st.integers(0, 8), st.integers(1, 10**6))
def test_more_text_is_never_fewer_tokens(
    told: list[tuple[TextFeatures, int]], text: TextFeatures, kind: int, more: int
) -> None:
    """Whatever was learned, a longer prompt of the same kind is not estimated to be shorter."""
    estimator = taught(told)
    longer = text._replace(**{TextFeatures._fields[kind]: text[kind] + more})
    assert estimator.estimate("m", longer) >= estimator.estimate("m", text)


def test_a_long_life_keeps_the_filter_sound() -> None:
    """After tens of thousands of answers of one kind, another kind is still learned at once."""
    prose, chinese = Model(REAL.coefficients), Model(REAL.coefficients, seed=2)
    some = [prose.sample(*PROSE) for _ in range(1000)]
    estimator = taught(some * 30 + [chinese.sample(*CHINESE) for _ in range(200)])
    assert errors(estimator, chinese, *CHINESE) < 0.06
    assert errors(estimator, prose, *PROSE) < 0.06


def test_names_of_models_do_not_pile_up() -> None:
    """However many models answer, the memory for them is bounded, and the recent ones are kept."""
    estimator = InputEstimator()
    for i in range(5000):
        estimator.learn(f"m{i}", TextFeatures(letters=1000), 500)
        estimator.estimate(f"asked{i}", TextFeatures(letters=1000))
    assert len(estimator._models) <= 256
    assert estimator.bytes_per_token("m4999") < 4.0
    assert estimator.bytes_per_token("m1") == 4.0
