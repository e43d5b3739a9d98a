"""Prose, code and Chinese that every clone has, a tokenizer trained on one half of them, and prompts made of
the other half.

Prose are the docstrings of the standard library, code is its source. The page of Chinese is too short to
train on alone, so the tokenizer also sees each common character once by itself: then most of them are one
token, as with the vocabularies of real models.
"""

import ast
import gc
import random
from collections.abc import Iterator
from functools import cache
from itertools import chain
from math import exp, log
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

KINDS = ("prose", "code", "chinese")
CHINESE = Path(__file__).parent / "chinese.txt"
VOCABULARY = 16_000

_SOURCE_BYTES = range(10_000, 80_000)
"""Sizes of files that are neither stubs nor tables."""
_PARAGRAPHS = 40
_FIRST_CHARACTER, _LAST_CHARACTER = 0xB0A1, 0xD7F9  # the common ones of GB 2312
_TEMPLATE_TOKENS = 9
_MESSAGE_TOKENS = 4


def _parsed(source: str) -> ast.Module:
    """CPython 3.11 miscounts where garbage is collected in the middle of it, and says SystemError."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collects:
            gc.enable()


@cache
def _texts(kind: str) -> tuple[str, ...]:
    if kind == "chinese":
        return tuple(CHINESE.read_text(encoding="utf-8").split("\n\n"))
    sources = [path.read_text(encoding="utf-8") for path in _library_files()]
    if kind == "code":
        return tuple(sources)
    nodes = chain.from_iterable(ast.walk(_parsed(source)) for source in sources)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    long = [text for text in found if len(text) > 150 and ">>>" not in text]
    return tuple("\n\n".join(long[i : i + _PARAGRAPHS]) for i in range(0, len(long), _PARAGRAPHS))


def _library_files() -> list[Path]:
    files = sorted(Path(ast.__file__).parent.glob("*.py"))
    return [path for path in files if path.stat().st_size in _SOURCE_BYTES]


def seen_half(kind: str) -> list[str]:
    """What the tokenizer is trained on."""
    return list(_texts(kind)[0::2])


@cache
def unseen_half(kind: str) -> str:
    """What prompts are made of."""
    return "\n\n".join(_texts(kind)[1::2])


@cache
def trained_tokenizer() -> Tokenizer:
    """A byte-level BPE; takes a second or two."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False, initial_alphabet=ByteLevel.alphabet(), min_frequency=1
    )
    alone = ["\n".join(_common_characters())] * 50
    tokenizer.train_from_iterator(chain(*map(seen_half, KINDS), alone), trainer)
    return tokenizer


def _common_characters() -> Iterator[str]:
    for code in range(_FIRST_CHARACTER, _LAST_CHARACTER + 1):
        if 0xA1 <= code & 0xFF <= 0xFE:
            yield code.to_bytes(2, "big").decode("gb2312")


def write_tokenizer(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    trained_tokenizer().save(str(path))
    return path


class Prompts:
    """An endless supply of chat requests of one or several kinds, of a hundred bytes to some kilobytes."""

    def __init__(self, *kinds: str, seed: int = 1, tokenizer: Tokenizer | None = None) -> None:
        self._kinds = kinds
        self._random = random.Random(seed)
        self._tokenizer = tokenizer or trained_tokenizer()

    def next(self, model: str = "m") -> tuple[dict[str, Any], int]:
        """The body of a request, and the tokens that its engine would count."""
        contents = self._contents()
        messages = [{"role": "user", "content": text} for text in contents]
        counted = sum(map(len, self._tokenizer.encode_batch_fast(contents, add_special_tokens=False)))
        tokens = counted + _TEMPLATE_TOKENS + _MESSAGE_TOKENS * len(messages)
        return {"model": model, "messages": messages}, tokens

    def _contents(self) -> list[str]:
        chance = self._random
        text = unseen_half(chance.choice(self._kinds))
        messages = chance.choice((1, 1, 2, 3, 5))
        size = min(round(exp(chance.uniform(log(100), log(4000)))), len(text) // 2)
        each = max(1, size // messages)
        starts = [chance.randrange(len(text) - each) for _ in range(messages)]
        return [text[start : start + each] for start in starts]
