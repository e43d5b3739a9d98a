"""A model's own tokenizer counts its prompts, in pieces, and a file that cannot do so is refused by name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.tokenizer_files import BATCH_BYTES, TokenizerFile, batches, load_tokenizers
from gateway.config_reading import ConfigError
from tests.support.sample_texts import KINDS, trained_tokenizer, unseen_half, write_tokenizer


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def problems(files: dict[str, Path]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_tokenizers(files, Path("gateway.yaml"))
    return list(caught.value.problems)


# ------------------------------------------------------------------ counting


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_in_pieces_has_the_tokens_of_the_whole(kind: str, path: Path) -> None:
    """But for one at most where it is cut."""
    text = unseen_half(kind)[:300_000]
    cut = list(batches([text.encode()]))
    counted = sum(TokenizerFile(path).count(batch) for batch, _ in cut)
    assert counted == pytest.approx(len(trained_tokenizer().encode(text)), abs=len(cut))


@given(
    st.lists(st.tuples(st.text(max_size=8), st.integers(1, 30_000)), max_size=6),
)
def test_batches_hold_all_text_in_order(texts: list[tuple[str, int]]) -> None:
    """No character is lost or cut in two, and no batch is larger than it may be."""
    given = [(text * times)[:100_000] for text, times in texts]
    found = list(batches([text.encode() for text in given]))
    assert "".join(piece for batch, _ in found for piece in batch) == "".join(given)
    assert [size for _, size in found] == [sum(len(p.encode()) for p in batch) for batch, _ in found]
    assert all(0 < size <= BATCH_BYTES for _, size in found)


def test_many_small_texts_share_a_batch() -> None:
    """A conversation of a thousand messages is not a thousand jobs."""
    assert len(list(batches([b"hello"] * 1000))) == 1


def test_limits_of_the_file_do_not_cut_prompts(path: Path, tmp_path: Path) -> None:
    """An embedding model's file says to cut at 8 tokens and to fill up to them; an engine may well not."""
    tree = json.loads(path.read_text(encoding="utf-8"))
    tree["truncation"] = {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    tree["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    limited = tmp_path / "limited.json"
    limited.write_text(json.dumps(tree), encoding="utf-8")
    assert TokenizerFile(limited).count(["one"]) == TokenizerFile(path).count(["one"])
    assert TokenizerFile(limited).count(["one two " * 50]) > 50


# ------------------------------------------------------------------ files that cannot be used


def test_nothing_configured_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is only for those who ask for it."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load_tokenizers({}) == {}


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """With the command that installs it."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (line,) = problems({"m": path})
    assert line.startswith("gateway.yaml: tokenizers: ")
    assert "pip install 'qos-gateway[tokenizers]'" in line


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no such file"),
        ("folder", "is a folder"),
        ("", "cannot be used as a tokenizer.json"),
        ("not json", "cannot be used as a tokenizer.json"),
        ('{"model": {}}', "cannot be used as a tokenizer.json"),
    ],
)
def test_a_file_that_is_none_is_refused(content: str | None, says: str, tmp_path: Path) -> None:
    """The message has the setting, the path and the reason."""
    path = tmp_path / "t.json"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content, encoding="utf-8")
    (line,) = problems({"org/m": path})
    assert line.startswith("gateway.yaml: tokenizers.org/m: found ")
    assert "t.json" in line
    assert says in line


def test_every_bad_file_has_its_line(path: Path, tmp_path: Path) -> None:
    """A good one between them does not help."""
    lines = problems({"a": tmp_path / "a", "b": path, "c": tmp_path / "c"})
    assert [line.split(":")[1].strip() for line in lines] == ["tokenizers.a", "tokenizers.c"]


@pytest.mark.parametrize("command", [["check-config"], ["serve", "--config"]])
def test_the_command_line_refuses_a_bad_file(command: list[str], tmp_path: Path) -> None:
    """Before anything starts, and relative to the configuration."""
    config = tmp_path / "gateway.yaml"
    config.write_text("tokenizers: {m: absent.json}\n", encoding="utf-8")
    done: Any = subprocess.run(
        [sys.executable, "-m", "gateway", *command, str(config)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert f"{config}: tokenizers.m: found " in done.stderr
    assert "Traceback" not in done.stderr
