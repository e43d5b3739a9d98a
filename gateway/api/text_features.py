"""Bytes of text by kind, for the estimate of its tokens: what C-speed operations can tell of it.

From about 1,500 bytes on it is a sample that is counted: short pieces from all over the text. Their share of
letters is right to two or three per cent, which is less than two texts of the same composition differ by, and
a prompt of megabytes takes hardly longer than one of kilobytes. Pieces rather than every so many-th byte: a
text that repeats itself would be met at the same place each time.
"""

import string

from gateway.policy.input_estimator import TextFeatures

_PIECE_BYTES = 128
_PIECES_MIN = 4
_PIECE_EVERY_BYTES = 1024
_PIECES_MAX = 32
_COUNT_ALL_BYTES = 1536

_LETTERS = string.ascii_lowercase.encode()
_CAPITALS = string.ascii_uppercase.encode()
_DIGITS = string.digits.encode()
_NOT_ASCII = bytes(range(0x80, 0x100))
_FIRST_OF_TWO = bytes(range(0xC0, 0xE0))


def text_features(text: bytes, text_bytes: int, conversations: int, items: int) -> TextFeatures:
    """What UTF-8 text is made of. `text_bytes` is what the features add up to: more than there is of the
    text where an engine reads some of it several times."""
    size = len(text)
    sample = text
    if size >= _COUNT_ALL_BYTES:
        pieces = min(max(size // _PIECE_EVERY_BYTES, _PIECES_MIN), _PIECES_MAX)
        starts = range(0, size, size // pieces)
        sample = b"".join([text[start : start + _PIECE_BYTES] for start in starts])
    taken = len(sample)
    no_letters = sample.translate(None, _LETTERS)
    no_capitals = no_letters.translate(None, _CAPITALS)
    no_digits = no_capitals.translate(None, _DIGITS)
    letters = taken - len(no_letters)
    capitals = len(no_letters) - len(no_capitals)
    digits = len(no_capitals) - len(no_digits)
    spaces = no_digits.count(b" ")
    narrow = wide = 0
    if not sample.isascii():
        others = len(no_digits) - len(no_digits.translate(None, _NOT_ASCII))
        narrow = min(2 * (taken - len(sample.translate(None, _FIRST_OF_TWO))), others)
        wide = others - narrow
    if taken and taken != text_bytes:
        letters = letters * text_bytes // taken
        capitals = capitals * text_bytes // taken
        digits = digits * text_bytes // taken
        spaces = spaces * text_bytes // taken
        narrow = narrow * text_bytes // taken
        wide = wide * text_bytes // taken
    punctuation = text_bytes - letters - capitals - digits - spaces - narrow - wide
    return TextFeatures(letters, capitals, digits, spaces, punctuation, narrow, wide, conversations, items)
