"""4 bytes are a token, and tokens are 4 bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.mock_backend.tokens import IDS_END, count_tokens, text_bytes, text_of, token_ids

TEXTS = st.text(st.characters(exclude_characters="\0", codec="utf-8"))


@given(TEXTS)
def test_ids_turn_back_into_their_text(text: str) -> None:
    assert text_of(token_ids(text)) == text


@given(st.text(st.characters(codec="utf-8")))
def test_a_text_is_counted_as_it_is_split(text: str) -> None:
    ids = token_ids(text)
    assert len(ids) == count_tokens(text_bytes(text))
    assert all(0 <= id < IDS_END for id in ids)


@pytest.mark.parametrize(
    ("ids", "text"), [([72], "H"), ([0x48656C6C, 0x6F], "Hello"), ([], ""), ([0], ""), ([255], "�")]
)
def test_ids_are_bytes_read_as_a_number(ids: list[int], text: str) -> None:
    assert text_of(ids) == text
