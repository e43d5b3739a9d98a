"""What text is made of, and what an estimate that learns from it is worth on real text."""

import json
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.body import peek
from gateway.api.text_features import text_features
from gateway.policy.input_estimator import InputEstimator, TextFeatures
from tests.support.sample_texts import KINDS, Prompts


def features(text: str) -> TextFeatures:
    raw = text.encode()
    return text_features(raw, len(raw), 0, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", TextFeatures()),
        ("Hello 42!", TextFeatures(letters=4, capitals=1, digits=2, spaces=1, punctuation=1)),
        ("a\n\tb\x00", TextFeatures(letters=2, punctuation=3)),
        ("héé", TextFeatures(letters=1, narrow=4)),
        ("Привет", TextFeatures(narrow=12)),
        ("网关 x", TextFeatures(letters=1, spaces=1, wide=6)),
        ("🌍é", TextFeatures(narrow=2, wide=4)),
    ],
)
def test_kinds_of_bytes(text: str, expected: TextFeatures) -> None:
    """Short text is counted whole."""
    assert features(text) == expected._replace(items=1)


@given(st.text(), st.integers(0, 300))
def test_features_add_up_to_the_text(text: str, times: int) -> None:
    """However long it is, no byte is counted twice or left out."""
    repeated = text * times
    counted = features(repeated)
    assert counted.text_bytes == len(repeated.encode())
    assert min(counted) >= 0


@pytest.mark.parametrize(
    "line",
    [
        "The quick brown fox, 1984. ",
        "    if x == 1:\n        return f(x)\n",
        "网关回答",
        "Привет мир ",
        "é a",
    ],
)
@pytest.mark.parametrize("size", [2_000, 5_000, 70_000, 1_000_000])
def test_a_sample_of_a_long_text_is_like_the_whole(line: str, size: int) -> None:
    """Also where the text has a period, as indentation and the bytes of one script do."""
    times = size // len(line.encode())
    whole, counted = features(line), features(line * times)
    for exact, estimated in zip(whole[:7], counted[:7], strict=True):
        assert estimated == pytest.approx(exact * times, abs=0.06 * size)


def test_what_is_read_several_times_counts_several_times() -> None:
    """A query that stands against five documents is five queries long."""
    raw = b"query text"
    assert text_features(raw, 50, 0, 5) == TextFeatures(letters=45, spaces=5, items=5)


# ------------------------------------------------------------------ on real text


def relative_errors(prompts: Prompts, answers: int, afterwards: int) -> list[float]:
    """Of the forecasts after so many answers, as the gateway makes them: body → facts → estimate."""
    estimator = InputEstimator()
    errors = []
    for number in range(answers + afterwards):
        body, tokens = prompts.next()
        facts = peek(json.dumps(body, ensure_ascii=number % 2 == 0).encode(), "chat")
        errors.append(abs(estimator.estimate("m", facts.text) / tokens - 1))
        if number < answers:
            estimator.learn("m", facts.text, tokens)
    return errors[answers:]


@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), KINDS], ids="+".join)
def test_two_hundred_answers_make_good_estimates(kinds: tuple[str, ...]) -> None:
    """Of prose, of code, of Chinese, and of all three for one model, on texts new to the tokenizer."""
    assert median(relative_errors(Prompts(*kinds), answers=200, afterwards=100)) < 0.08
