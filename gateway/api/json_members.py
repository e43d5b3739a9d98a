"""The top-level members of a JSON object as spans of its bytes, for finding duplicates and for exact edits.

Parsing and writing again would lose what a client may rely on: order (an engine's prefix cache), the digits
of numbers, escapes, spacing, fields nobody here knows. So an edit cuts and pastes bytes and leaves the rest
alone. Everything here walks without recursion, in time linear in the size of the body.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

MAX_DEPTH = 256
"""Levels of objects and arrays, the outermost included. Decoders recurse and must not meet their limits."""

MAX_CONTAINERS = 50_000
"""Objects and arrays in one body. A chat of 20,000 messages stays below; each costs about a microsecond to
walk, and nobody else is served meanwhile."""

MAX_MEMBERS = 1_000
"""Members of the outermost object, which knows a few dozen names."""

_SPACE = rb"[ \t\r\n]*+"
# Unrolled and possessive: one pass over a string of any length, and no way back into it.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_OPENING = re.compile(_SPACE + rb"\{" + _SPACE)
_EMPTY = re.compile(_SPACE + rb"\{" + _SPACE + rb"\}" + _SPACE)
_KEY = re.compile(rb"(" + _STRING + rb")" + _SPACE + rb":" + _SPACE, re.DOTALL)
_SCALAR = re.compile(_STRING + rb'|[^ \t\r\n"{}\[\],:]++', re.DOTALL)
_TO_BRACKET = re.compile(rb'(?:[^"{}\[\]]++|' + _STRING + rb")*+[{}\[\]]", re.DOTALL)
_SEPARATOR = re.compile(_SPACE + rb"([,}])" + _SPACE)
_BRACKET_RUN = re.compile(rb"\(+|\)+")
_TO_ROUND = bytes.maketrans(b"[]{}", b"()()")
_ALL_BUT_MARKS = bytes(set(range(256)) - set(b'[]{}"'))
_ESCAPED_LETTER = re.compile(rb"\\u00[3-7]")
_OPENERS = (b"{", b"[")


class MalformedJson(ValueError):
    """The bytes are no JSON object."""


class NestedTooDeeply(MalformedJson):
    """More levels than anybody needs."""

    def __init__(self) -> None:
        super().__init__(f"nested deeper than {MAX_DEPTH} levels")


class Member(NamedTuple):
    """`body[key_start:value_end]` is the member, `body[value_start:value_end]` its value."""

    key: str
    key_start: int
    value_start: int
    value_end: int


def members(body: bytes) -> Iterator[Member]:
    """The members of an object, in order, repeated keys included. Scalars are not checked further."""
    opening = _OPENING.match(body)
    if opening is None:
        raise MalformedJson("expected an object")
    position = opening.end()
    if _EMPTY.fullmatch(body):
        return
    while True:
        key = _KEY.match(body, position)
        if key is None:
            raise MalformedJson(f"expected a key (byte {position})")
        end = _end_of_value(body, key.end())
        yield Member(_unescape(key.group(1)), key.start(), key.end(), end)
        separator = _SEPARATOR.match(body, end)
        if separator is None:
            raise MalformedJson(f"expected a comma or the end of the object (byte {end})")
        position = separator.end()
        if separator.group(1) == b"}":
            if position < len(body):
                raise MalformedJson(f"something follows the object (byte {position})")
            return


def duplicate_key(body: bytes, decoded: Mapping[str, msgspec.Raw]) -> str | None:
    """The first key that the object in `body` has twice; `decoded` is the same object, decoded.

    Let the decoded object have n keys k and values v. The shortest way to write it has 2 + Σ(|k| + 3 + |v|)
    + (n − 1) bytes. White space, escapes in keys and repeated members only make it longer, each repeated one
    by five bytes or more (`"":1,`). So most bodies need no closer look.
    """
    shortest = 1 + 4 * len(decoded) + sum(map(len, decoded)) + sum(map(len, decoded.values()))
    if len(body) < shortest + 5 or not decoded:
        return None
    if len(body) == shortest + 2 * len(decoded) - 1 and body == _with_spaces(decoded):
        return None
    seen = set()
    for member in members(body):
        if member.key in seen:
            return member.key
        seen.add(member.key)
    return None


def check_nesting(body: bytes) -> None:
    """Raise unless a valid document is within `MAX_DEPTH` and `MAX_CONTAINERS`."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _ALL_BUT_MARKS)
    # Two quotes side by side change nothing; without them few strings are left to be cut out.
    outside_strings = b"".join(marks.replace(b'""', b"").split(b'"')[::2])
    brackets = outside_strings.translate(_TO_ROUND)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise MalformedJson(f"more than {MAX_CONTAINERS} objects and arrays")
    depth = 0
    for run in _BRACKET_RUN.findall(brackets):
        depth += len(run) if run.startswith(b"(") else -len(run)
        if depth > MAX_DEPTH:
            raise NestedTooDeeply


def edit_members(body: bytes, *, drop: frozenset[str], put: Mapping[str, bytes]) -> bytes:
    """The object without the members in `drop` and with those in `put`: replaced in place, or else in front.

    Names are plain identifiers. All other bytes stay as they are; a dropped member goes with its comma.
    """
    if not may_have_member(body, *drop, *put):
        return _insert_in_front(body, put) if put else body
    found = list(members(body))
    present = {member.key for member in found}
    pieces: list[bytes] = []
    for index, member in enumerate(found):
        if member.key in drop and member.key not in put:
            continue
        if pieces:
            pieces.append(body[found[index - 1].value_end : member.key_start])
        value = put.get(member.key, body[member.value_start : member.value_end])
        pieces.append(body[member.key_start : member.value_start] + value)
    if found:
        first, last = found[0].key_start, found[-1].value_end
        body = b"".join((body[:first], *pieces, body[last:]))
    new = {name: value for name, value in put.items() if name not in present}
    return _insert_in_front(body, new) if new else body


def _insert_in_front(body: bytes, new: Mapping[str, bytes]) -> bytes:
    inside = body.index(b"{") + 1
    text = b",".join(b'"%b":%b' % (name.encode(), value) for name, value in new.items())
    comma = b"" if _EMPTY.match(body) else b","
    return b"%b%b%b%b" % (body[:inside], text, comma, body[inside:])


def may_have_member(body: bytes, *names: str) -> bool:
    """False only if no member can have one of the names, all letters, digits and underscores."""
    if _ESCAPED_LETTER.search(body):
        return True
    return any(b'"%b"' % name.encode() in body for name in names)


def _with_spaces(decoded: Mapping[str, msgspec.Raw]) -> bytes:
    """The object as Python's `json` writes it."""
    return b"{%b}" % b", ".join(b'"%b": %b' % (key.encode(), value) for key, value in decoded.items())


def _end_of_value(body: bytes, start: int) -> int:
    if body[start : start + 1] not in _OPENERS:
        scalar = _SCALAR.match(body, start)
        if scalar is None:
            raise MalformedJson(f"expected a value (byte {start})")
        return scalar.end()
    depth = 0
    position = start
    while bracket := _TO_BRACKET.match(body, position):
        position = bracket.end()
        depth += 1 if body[position - 1 : position] in _OPENERS else -1
        if depth == 0:
            return position
        if depth >= MAX_DEPTH:
            raise NestedTooDeeply
    raise MalformedJson(f"an object or array has no end (byte {start})")


def _unescape(literal: bytes) -> str:
    try:
        if b"\\" not in literal:
            return literal[1:-1].decode()
        return msgspec.json.decode(literal, type=str)
    except ValueError as error:
        raise MalformedJson("a key is no text") from error
