import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.labels import BoundedLabel, clean


def test_first_come_keep_their_own():
    """The first values keep their own label; later ones share `other`, which stays so."""
    label = BoundedLabel(2)
    assert [label.value(v) for v in ("a", "b", "c", "a", "c")] == ["a", "b", "other", "a", "other"]


def test_empty_is_unknown():
    assert BoundedLabel(0).value("") == "unknown"


def test_long_values_with_one_beginning_are_one():
    """A long name is cut, and does not use up a place for each of its endings."""
    label = BoundedLabel(2)
    assert label.value("x" * 5000) == label.value("x" * 6000) == "x" * 100
    assert label.value("b") == "b"


def test_unlearned_values_become_known_later():
    label = BoundedLabel(1)
    assert label.value("a", learn=False) == "other"
    assert label.value("a") == "a"
    assert label.value("a", learn=False) == "a"


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B-Instruct", "qwen:0.5b", "org@team+x", "équipe 7"])
def test_ordinary_names_stay(name):
    assert clean(name) == name


@given(st.text(st.characters(codec=None)))
def test_any_text_comes_out_harmless(text):
    """One short line of printable characters that can be encoded, whatever came in."""
    cleaned = clean(text)
    assert len(cleaned) <= 100
    assert cleaned.isprintable() or not cleaned
    assert not set(cleaned) & set('"\\\n\r')
    cleaned.encode()
