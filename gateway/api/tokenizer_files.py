"""Exact counts of tokens by a model's own `tokenizer.json`, for those who have the optional package.

A text is cut into pieces, so that nothing here takes longer than some tens of milliseconds: a cut is made
before a space or at the end of a line, where most tokenizers start a new word anyhow, so that it costs at
most a token. `encode_batch_fast` is the one call of the package that does not hold Python's global lock
while it works, hence the batches.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from gateway.config_reading import ConfigError, shown

BATCH_BYTES = 32 * 1024
"""About 15 ms of work, and 150 ms at the worst."""

_CUT_WITHIN_BYTES = BATCH_BYTES // 4
_INSTALL = "pip install 'qos-gateway[tokenizers]'"
_CONTINUES = 0x80
_CONTINUES_MASK = 0xC0


class TokenizerFile:
    """One model's tokenizer. Safe to use from several threads at once: nothing of it changes."""

    def __init__(self, path: Path) -> None:
        """Raises ImportError without the package, and whatever it finds wrong with the file."""
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()  # files of embedding models come with it: all would be 512 tokens
        self._tokenizer.no_padding()

    def count(self, batch: list[str]) -> int:
        """Tokens of these texts, without those that a template would put around them."""
        return sum(map(len, self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)))


def load_tokenizers(files: Mapping[str, Path], source: Path | None = None) -> dict[str, TokenizerFile]:
    """The tokenizer of each model that has a file, by the settings of `source`. Raises ConfigError."""
    if not files:
        return {}
    setting = f"{source or 'settings'}: tokenizers"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # our own threads are all it may take
    loaded, problems = {}, []
    for model, path in files.items():
        try:
            loaded[model] = TokenizerFile(path)
            loaded[model].count(["probe"])
        except ImportError:
            says = f"found {shown(files)}, but the package that reads such files is missing: {_INSTALL}"
            raise ConfigError([f"{setting}: {says}"]) from None
        except Exception as error:  # the package raises this very class
            problems.append(f"{setting}.{model}: found {shown(str(path))}, {_what_is_wrong(path, error)}")
    if problems:
        raise ConfigError(problems)
    return loaded


def _what_is_wrong(path: Path, error: Exception) -> str:
    if path.is_dir():
        return "which is a folder; expected its tokenizer.json"
    if not path.exists():
        return "but there is no such file"
    return f"which cannot be used as a tokenizer.json: {error}"


def batches(texts: Iterable[bytes]) -> Iterator[tuple[list[str], int]]:
    """The texts, cut where they are long, in batches for `count`, each with its length in bytes."""
    batch: list[str] = []
    size = 0
    for text in texts:
        for piece in _pieces(text):
            if batch and size + len(piece) > BATCH_BYTES:
                yield batch, size
                batch, size = [], 0
            batch.append(piece.decode())
            size += len(piece)
    if batch:
        yield batch, size


def _pieces(text: bytes) -> Iterator[bytes]:
    start = 0
    while len(text) - start > BATCH_BYTES:
        end = _cut(text, start + BATCH_BYTES)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:] if start else text


def _cut(text: bytes, end: int) -> int:
    """Where to cut at or before `end`: before a space, after a line, else between two characters."""
    earliest = end - _CUT_WITHIN_BYTES
    word = max(text.rfind(b" ", earliest, end), text.rfind(b"\n", earliest, end) + 1)
    if word > earliest:
        return word
    while text[end] & _CONTINUES_MASK == _CONTINUES:
        end -= 1
    return end
