"""What the example files say of each setting: the comment beside it, with the lines that go on below it.

A YAML parser drops comments, so lines are read one by one. It suffices that the files are written as ours
are: block style, one setting a line, a comment behind it. A section whose default is null stands there
commented out (`#   endpoint: …   # comment`) below its own line.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

Place = tuple[str, ...]
"""Where a setting stands: its name behind those of the sections around it."""

_SETTING = re.compile(r"(?P<indent> *)(?P<item>- )?(?P<key>[\w/]+):(?P<value>[^#]*)(?:# (?P<says>.*))?")
_COMMENTED_OUT = re.compile(r"#   (?P<key>\w+): [^#]*(?:# (?P<says>.*))?")
_GOES_ON = re.compile(r" +# +(?P<says>.*)")


def comments(text: str) -> dict[Place, str]:
    """Place → comment, of all settings that have one."""
    found: dict[Place, list[str]] = {}
    around: list[tuple[int, str]] = []
    place: Place = ()
    for line in text.splitlines():
        if match := _SETTING.fullmatch(line):
            indent = len(match["indent"]) + len(match["item"] or "")
            while around and around[-1][0] >= indent:
                around.pop()
            around.append((indent, match["key"]))
            place = tuple(key for _, key in around)
        elif around and (match := _COMMENTED_OUT.fullmatch(line)):
            place = (around[0][1], match["key"])
        elif not around or not (match := _GOES_ON.fullmatch(line)):
            continue
        if match["says"]:
            found.setdefault(place, []).append(match["says"])
    return {place: " ".join(said) for place, said in found.items()}


def docstrings(source: str) -> dict[str, str]:
    """`Class.attribute` → what stands in a string below the attribute in a Python source, as a comment would
    have it: without capital and full stop."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {
        f"{node.name}.{above.target.id}": _as_comment(below.value.value)
        for node in classes
        for above, below in pairwise(node.body)
        if isinstance(above, ast.AnnAssign)
        and isinstance(above.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def _as_comment(sentence: str) -> str:
    words = " ".join(sentence.split()).removesuffix(".")
    return words[0].lower() + words[1:]


@dataclass(frozen=True, slots=True)
class Explanations:
    """The example's comments, and the models' docstrings for what it leaves without one."""

    comments: Mapping[Place, str]
    docstrings: Mapping[str, str]

    def find(self, place: Place, attribute: str) -> str | None:
        return self.comments.get(place) or self.docstrings.get(attribute)


def read_explanations(example: Path, source: Path) -> Explanations:
    return Explanations(
        comments(example.read_text(encoding="utf-8")), docstrings(source.read_text(encoding="utf-8"))
    )
