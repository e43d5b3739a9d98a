"""Spans of members, duplicates, limits and edits that touch nothing else."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.json_members import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MalformedJson,
    NestedTooDeeply,
    check_nesting,
    duplicate_key,
    edit_members,
    members,
)


def spans(body: bytes) -> list[tuple[str, bytes]]:
    return [(member.key, body[member.value_start : member.value_end]) for member in members(body)]


def repeated(body: bytes) -> str | None:
    return duplicate_key(body, msgspec.json.decode(body, type=dict[str, msgspec.Raw]))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", []),
        (b" \t{ \r\n} ", []),
        (b'{"a":1}', [("a", b"1")]),
        (b' { "a" : 1 , "b" : [ { } , "]}" ] } ', [("a", b"1"), ("b", b'[ { } , "]}" ]')]),
        (b'{"a":"x\\"},{","b":null}', [("a", b'"x\\"},{"'), ("b", b"null")]),
        (b'{"a":"\\\\","b":-1.5e+3}', [("a", b'"\\\\"'), ("b", b"-1.5e+3")]),
        (b'{"\\u0061":{"b":[[]]},"":true}', [("a", b'{"b":[[]]}'), ("", b"true")]),
        (b'{"a":1,"a":2}', [("a", b"1"), ("a", b"2")]),
        (b'{"a\xc3\xa9":1}', [("aé", b"1")]),
    ],
)
def test_members_are_found_where_they_stand(body: bytes, expected: list[tuple[str, bytes]]) -> None:
    """Brackets in strings are no brackets, escaped quotes no quotes."""
    assert spans(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"x",
        b"{",
        b'{"a"',
        b'{"a":',
        b'{"a":1',
        b'{"a":1,',
        b'{"a":1,}',
        b'{"a":[}',
        b'{"a":"x}',
        b'{"a":1}x',
        b'{"a":1 2}',
        b"{a:1}",
        b'{"\xff":1}',
        b"{}x",
    ],
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    """The scanner is given valid JSON, and does not run off when it is not."""
    with pytest.raises(MalformedJson):
        list(members(body))


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"a":1,"b":2}', None),
        (b'{"a": 1, "b": 2}', None),
        (b'{ "a":1 }', None),
        (b'{"a":{"x":1},"b":{"x":1}}', None),
        (b'{"a":1,"a":2}', "a"),
        (b'{"a": 1, "a": 2}', "a"),
        (b'{"a":1,"\\u0061":2}', "a"),
        (b'{"b":1,"a":[{"b":3}],"a":""}', "a"),
        (b'{"":1,"":2}', ""),
        (b'{"\xc3\xa9":1,"\\u00e9":2}', "é"),
        (b'{"a":"long value","a":1}', "a"),
        (b'{"ab":1,"b":2,"c":3,"d":4,"ab":5}', "ab"),  # as long as it would be without, but with spaces
        (b'{"a":1}   \n', None),
        (b'{"a":1,"a":"long value"}', "a"),
        (b"{}", None),
    ],
)
def test_a_repeated_key_is_named(body: bytes, key: str | None) -> None:
    """However it is spelt."""
    assert repeated(body) == key


keys = st.one_of(st.sampled_from(["a", "b", "model", "", "é", 'q"', "\\", "\n"]), st.text(max_size=4))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
spaces = st.sampled_from(["", " ", "\n\t", "\r "])


@st.composite
def objects(draw: st.DrawFn) -> tuple[list[tuple[str, object]], bytes]:
    """An object as a list of members, which may repeat, and one way to write it."""
    pairs = draw(st.lists(st.tuples(keys, values), max_size=5))
    regular = draw(st.sampled_from([None, (",", ":"), (", ", ": ")]))
    ascii_only = draw(st.booleans())

    def text(value: object) -> str:
        return json.dumps(value, ensure_ascii=ascii_only, separators=regular)

    if regular:
        body = "{" + regular[0].join(f"{text(key)}{regular[1]}{text(value)}" for key, value in pairs) + "}"
    else:
        gap = [draw(spaces) for _ in range(4)]
        inside = ",".join(
            f"{gap[0]}{text(key)}{gap[1]}:{gap[2]}{text(value)}{gap[3]}" for key, value in pairs
        )
        body = f"{gap[0]}{{{inside}}}{gap[3]}"
    return pairs, body.encode("utf-8", "replace")


@given(objects())
def test_members_are_those_that_were_written(written: tuple[list[tuple[str, object]], bytes]) -> None:
    """In order, repeated ones included."""
    pairs, body = written
    assert [(key, json.loads(value)) for key, value in spans(body)] == pairs


@given(objects())
def test_duplicates_are_found_exactly_when_there_are_some(
    written: tuple[list[tuple[str, object]], bytes],
) -> None:
    """The shortcut by length never hides one and never invents one."""
    pairs, body = written
    names = [key for key, _ in pairs]
    found = repeated(body)
    assert (found is not None) == (len(set(names)) < len(names))
    assert found is None or names.count(found) > 1


names = st.sampled_from(["a", "b", "model", "stream_options"])


@given(objects(), st.frozensets(names, max_size=3), st.dictionaries(names, values, max_size=3))
def test_an_edit_changes_only_what_it_names(
    written: tuple[list[tuple[str, object]], bytes], drop: frozenset[str], put: dict[str, object]
) -> None:
    """Read again, the object differs by these members; the bytes of the others stay."""
    pairs, body = written
    edited = edit_members(
        body, drop=drop, put={key: json.dumps(value).encode() for key, value in put.items()}
    )
    kept = {key: value for key, value in dict(pairs).items() if key not in drop}
    assert json.loads(edited) == kept | put
    untouched = [m for m in members(body) if m.key not in drop and m.key not in put]
    after = [m for m in members(edited) if m.key not in put]
    assert [body[m.key_start : m.value_end] for m in untouched] == [
        edited[m.key_start : m.value_end] for m in after
    ]
    if drop.isdisjoint(dict(pairs)) and not put:
        assert edited == body


@pytest.mark.parametrize(
    ("body", "drop", "put", "expected"),
    [
        (b'{"a":1}', "", {"x": b"2"}, b'{"x":2,"a":1}'),
        (b"{}", "", {"x": b"2"}, b'{"x":2}'),
        (b" { } ", "", {"x": b"2", "y": b"3"}, b' {"x":2,"y":3 } '),
        (b'{ "a" : 1 , "b":2}', "", {"a": b"[9]"}, b'{ "a" : [9] , "b":2}'),
        (b'{"a":1, "b":2, "c":3}', "a", {}, b'{"b":2, "c":3}'),
        (b'{"a":1, "b":2, "c":3}', "b", {}, b'{"a":1, "c":3}'),
        (b'{"a":1, "b":2, "c":3}', "c", {}, b'{"a":1, "b":2}'),
        (b'{"a":1, "b":2, "c":3}', "ab", {}, b'{"c":3}'),
        (b'{"a":1, "b":2, "c":3}', "bc", {}, b'{"a":1}'),
        (b'{"a":1, "b":2}', "ab", {}, b"{}"),
        (b'{"a":1}', "a", {"x": b"1"}, b'{"x":1}'),
        (b'{"a":1}', "a", {"a": b"2"}, b'{"a":2}'),
        (b'{"\\u0061":1,"b":1.0}', "a", {}, b'{"b":1.0}'),
        (b'{"z":"\\u00e9 \xc3\xa9","n":1E2}', "a", {"m": b"1"}, b'{"m":1,"z":"\\u00e9 \xc3\xa9","n":1E2}'),
    ],
)
def test_edits_byte_by_byte(body: bytes, drop: str, put: dict[str, bytes], expected: bytes) -> None:
    """What is dropped takes its comma along; what is new stands in front; the rest keeps its spelling."""
    assert edit_members(body, drop=frozenset(drop), put=put) == expected


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("levels", [MAX_DEPTH - 1, MAX_DEPTH, 2_000, 20_000])
def test_depth_is_limited_without_recursion(opening: bytes, closing: bytes, levels: int) -> None:
    """The limit counts the outermost object; strings full of brackets do not count."""
    text = b'"' + b"[{" * 500 + b'\\"[[[[\\\\"'
    body = b'{"t":' + text + b',"x":' + opening * levels + b"1" * (opening != b"[") + closing * levels + b"}"
    if levels < MAX_DEPTH:
        check_nesting(body)
        assert [key for key, _ in spans(body)] == ["t", "x"]
    else:
        with pytest.raises(NestedTooDeeply):
            check_nesting(body)
        with pytest.raises(NestedTooDeeply):
            list(members(body))


def test_the_number_of_objects_is_limited() -> None:
    """A wide document costs as much as a deep one."""
    check_nesting(b'{"a":[' + b",".join([b"[]"] * (MAX_CONTAINERS - 2)) + b"]}")
    with pytest.raises(MalformedJson, match="more than"):
        check_nesting(b'{"a":[' + b",".join([b"[]"] * (MAX_CONTAINERS - 1)) + b"]}")
