"""Label values from outside, made harmless and kept few.

Each new value of a label is a new time series that stays for the life of the process, and model names
are chosen by clients. So a label knows a bounded number of values; the others share `other`.
"""

import re
from collections.abc import Iterable

OTHER = "other"
UNKNOWN = "unknown"
"""Stands for an empty value: the request ended before it was known."""

LENGTH_MAX = 100
REQUEST_ID_LENGTH_MAX = 128

_ODD = re.compile(r"[^\w./:@+=, -]")


def clean(text: str, length_max: int = LENGTH_MAX) -> str:
    """Letters, digits and the punctuation of model names; `_` for anything else."""
    text = text[:length_max]
    return _ODD.sub("_", text) if _ODD.search(text) else text


class BoundedLabel:
    """Maps raw values to at most `max_values` of their own, first come first served, and `other`.

    Reserved values, such as names from the configuration, always keep their own and are not counted.
    """

    def __init__(self, max_values: int, reserved: Iterable[str] = ()) -> None:
        self._known = {"": UNKNOWN, UNKNOWN: UNKNOWN, OTHER: OTHER}
        self.reserve(reserved)
        self._room = max_values

    def reserve(self, values: Iterable[str]) -> None:
        for value in values:
            self._known[value] = clean(value) or UNKNOWN

    def value(self, raw: str, learn: bool = True) -> str:
        """The label for a raw value; one not seen before becomes known only if `learn`."""
        known = self._known.get(raw)
        if known is not None:
            return known
        if len(raw) > LENGTH_MAX:
            return self.value(raw[:LENGTH_MAX], learn)
        if not learn or not self._room:
            return OTHER
        self._room -= 1
        label = self._known[raw] = clean(raw)
        return label
