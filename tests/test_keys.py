import hashlib
from pathlib import Path
from typing import Any

import pytest

from gateway.config_reading import ConfigError
from gateway.keys import KeyRing, hash_key, load_keys

A, B = hash_key("key-a"), hash_key("key-b")
EXAMPLE = Path(__file__).parents[1] / "config" / "keys.example.yaml"


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def load(text: str) -> KeyRing:
        path = tmp_path / "keys.yaml"
        path.write_text(text, encoding="utf-8")
        return load_keys(path)

    return load


def test_a_digest_is_the_plain_sha256_of_the_key() -> None:
    """Any other tool can make one."""
    assert hash_key("clé") == hashlib.sha256("clé".encode()).hexdigest()


def test_a_presented_key_finds_its_entry(load: Any) -> None:
    """The key itself, not its digest, not a part of it."""
    keys = load(f"[{{id: a, sha256: {A}}}, {{id: b, sha256: {B.upper()}}}]")
    assert keys.find(b"key-a").id == "a"
    assert keys.find(b"key-b").id == "b"
    for wrong in (b"", b"key-", b"key-a ", b"KEY-A", A.encode(), bytes.fromhex(A), b"\xff"):
        assert keys.find(wrong) is None


def test_the_same_keys_are_equal(load: Any) -> None:
    """Read twice, in any order, they are the same; another digest or limit makes others of them."""
    a, b = f"{{id: a, sha256: {A}}}", f"{{id: b, sha256: {B}}}"
    assert load(f"[{a}, {b}]") == load(f"[{b}, {a}]")
    assert load(f"[{a}]") != load(f"[{a}, {b}]")
    assert load(f"[{a}]") != load(f"[{{id: a, sha256: {B}}}]")
    assert load(f"[{a}]") != load(f"[{{id: a, sha256: {A}, max_in_flight: 1}}]")
    assert load("[]") != ()


def test_tenants_are_in_the_order_of_their_names(load: Any) -> None:
    keys = load(f"[{{id: a, sha256: {A}, tenant: z}}, {{id: b, sha256: {B}, tenant: c}}]")
    assert [(name, [entry.id for entry in of]) for name, of in keys.by_tenant.items()] == [
        ("c", ["b"]),
        ("z", ["a"]),
    ]


def test_what_is_left_out_of_an_entry(load: Any) -> None:
    """The tenant is the id, the default class normal, the ceiling realtime, all models allowed, no limits."""
    (entry,) = load(f"- {{id: a, sha256: {A}}}")
    assert (entry.tenant, entry.default, entry.ceiling, entry.models) == ("a", "P1", "P0", ("*",))
    assert (entry.tokens_per_minute, entry.requests_per_minute, entry.max_in_flight) == (None, None, None)


def test_the_default_class_follows_a_lower_ceiling(load: Any) -> None:
    """A key that may only do batch does batch unless told otherwise."""
    (entry,) = load(f"- {{id: a, sha256: {A}, ceiling: P2}}")
    assert entry.default == "P2"


def test_the_example_is_valid() -> None:
    """config/keys.example.yaml can be copied and used."""
    keys = load_keys(EXAMPLE)
    assert len(keys) == 2
    entry = keys.find(b"example-key-nightly")
    assert entry is not None
    assert (entry.id, entry.tenant, entry.ceiling) == ("nightly-reports", "team-a", "P2")


def test_an_empty_list_lets_nobody_in(load: Any) -> None:
    """It is a valid file, unlike one that has no list."""
    assert load("[]").find(b"") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "found null, expected a list of keys"),
        ("a: 1", "found a mapping, expected a list of keys"),
        (f"- {{sha256: {A}}}", "keys[0].id: found nothing, expected a value"),
        ("- {id: a}", "keys[0].sha256: found nothing, expected a value"),
        (
            f"- {{id: a, sha256: {A[:-1]}}}",
            "keys[0].sha256: found a value that is not shown, expected 64 hexadecimal",
        ),
        (f"- {{id: a, sha256: {A}, defualt: P1}}", "keys[0].defualt: unknown key, did you mean default?"),
        (
            f"- {{id: a, sha256: {A}, default: P0, ceiling: P1}}",
            "keys[0].default: found P0, expected a class not above",
        ),
        (
            f"- {{id: a, sha256: {A}, ceiling: P5}}",
            "keys[0].ceiling: found \"P5\", expected 'P0', 'P1' or 'P2'",
        ),
        (
            f"- {{id: a, sha256: {A}, models: []}}",
            "keys[0].models: found a list of 0, expected at least one entry",
        ),
        (f"- {{id: '', sha256: {A}, tenant: t}}", 'keys[0].id: found "", expected a name'),
        (
            f"[{{id: a, sha256: {A}}}, {{id: a, sha256: {B}}}]",
            'keys[1].id: found "a", which keys[0] has already',
        ),
        (
            f"[{{id: a, sha256: {A}}}, {{id: b, sha256: {A.upper()}}}]",
            "keys[1].sha256: found the digest that keys[0]",
        ),
        ("- a", 'keys[0]: found "a", expected a mapping of settings'),
        ("- {id: a, id: b}", "line 1: the key id is given twice"),
        (
            f"- {{id: a, sha256: {A}, max_in_flight: -1}}",
            "keys[0].max_in_flight: found -1, expected a whole number",
        ),
    ],
)
def test_a_wrong_entry_is_refused_in_words(load: Any, tmp_path: Path, text: str, says: str) -> None:
    """The file, the entry, what was found, what was expected: on one line."""
    with pytest.raises(ConfigError) as refusal:
        load(text)
    (line,) = str(refusal.value).splitlines()
    assert line.startswith(f"{tmp_path / 'keys.yaml'}: {says}")


def test_a_key_put_where_its_digest_belongs_is_not_repeated(load: Any) -> None:
    """The mistake must not end in a log."""
    with pytest.raises(ConfigError) as refusal:
        load("- {id: a, sha256: sk-secret-key}")
    assert "sk-secret" not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The path that was looked at is in the message."""
    with pytest.raises(ConfigError, match=r"keys\.yaml: there is no such file"):
        load_keys(tmp_path / "keys.yaml")
