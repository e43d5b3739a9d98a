"""One look into a request's body: what the policy must know, and what must not be let through.

The body stays bytes. It is decoded one level deep, then only those members whose meaning matters here;
unknown members and the engine's own rules about known ones are none of the gateway's business. What is
refused is what two readers could read differently (repeated keys, broken UTF-8), what could break or hold up
a reader (nesting, sheer number), and wrong values of what cost, class and relay depend on.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from gateway.api.body_text import Kind, TextCount
from gateway.api.json_members import (
    MAX_DEPTH,
    MAX_MEMBERS,
    MalformedJson,
    check_nesting,
    duplicate_key,
    edit_members,
    may_have_member,
    members,
)
from gateway.api.text_features import text_features
from gateway.policy.input_estimator import TextFeatures

BodyDialect = Literal[
    "chat", "completions", "embeddings", "responses", "messages", "rerank", "score", "other"
]

ENGINE_HINTS = frozenset({"priority", "request_id"})
"""Members by which a client would talk to the engine's scheduler past the gateway."""

SEQUENCES_MAX = 128
"""Largest `n` and `best_of`: each is one more answer to pay for."""

_EXACT_NUMBERS_END = 2**53  # beyond it a reader that uses floats sees another number
_DIGITS_MAX = 16
_REAL_BYTES_MAX = 64
_OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_ITS_OUTPUT_LIMIT = {"responses": ("max_output_tokens",), "messages": ("max_tokens",)}
"""Where there is one name only: what an engine does not read is no limit."""
_STREAM_OPTIONS = "stream_options"
_ONLY_INCLUDE_USAGE = b'{"include_usage":true}'

_Members = Mapping[str, msgspec.Raw]
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING = msgspec.json.Decoder(str)
_NULL = msgspec.Raw(b"null")
_TRUE = msgspec.Raw(b"true")
_FALSE = msgspec.Raw(b"false")

_PROMPTS = frozenset({"prompt", "input"})
_TEXTS = {
    "messages": Kind.NESTED,
    "system": Kind.NESTED,
    "instructions": Kind.NESTED,
    "tools": Kind.RAW,
    "functions": Kind.RAW,
    "documents": Kind.RAW,
    "suffix": Kind.TEXT,
    "chat_template": Kind.TEXT,
}
_RANKED_TEXTS = dict.fromkeys(
    ("query", "queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"), Kind.NESTED
)
_NO_TEXT = frozenset({"model", "service_tier", "stream_options", "user"})
"""Of an API that is not known here, every other text, list or object may be something to read."""
PROMPT_FIELDS = {"chat": "messages", "messages": "messages", "completions": "prompt"}
"""The member that a body of that dialect must have: what is to be read."""
INPUT_FIELDS = {
    **PROMPT_FIELDS,
    "embeddings": "input",
    "responses": "input",
    "rerank": "documents",
    "score": "text_2",
}
"""The member that is to blame for a body of that dialect that is too long to be read."""

_ANTHROPIC_TIERS = frozenset({"auto", "standard_only"})
"""Which of its own capacities Anthropic may use; how urgent a request is they do not say."""

_CONVERSATIONS = frozenset({"chat", "messages", "responses"})
_BESIDES_THE_TEXT = frozenset(
    {"previous_response_id", "conversation", "prompt_embeds", "truncate_prompt_tokens"}
)
"""Where one of these is given, the engine's count of tokens is not that of the text."""


class BodyFacts(msgspec.Struct, frozen=True):
    """What a body says, as far as cost, class and relay depend on it. (A frozen dataclass takes ten times as
    long to make, and there is one of these for every request.)

    include_usage       the client wants the usage chunk of its stream
    max_output_tokens   the larger of the limits given, for one sequence; None without any
    prompts             prompts in one request; inputs of an embedding; texts to rank
    sequences           answers to generate: prompts × n (or × best_of); inputs of an embedding; texts to rank
    text_bytes          UTF-8 bytes of all text that will be tokenised, schemas and tool calls as raw JSON
    text                the features of that text which its tokens are estimated from
    exact_tokens        number of token ids given in place of text
    images, audio_parts pictures (also films and files) and pieces of sound, of whatever size
    messages            entries of the conversation: each costs some tokens of template
    reads_more          the engine reads what is not in the body (earlier turns, embeddings), or not all of it
    has_engine_hints    one of `ENGINE_HINTS` is there
    """

    model: str
    stream: bool
    include_usage: bool
    max_output_tokens: int | None
    prompts: int
    sequences: int
    text_bytes: int
    text: TextFeatures
    exact_tokens: int
    images: int
    audio_parts: int
    messages: int
    reads_more: bool
    service_tier: str | None
    has_engine_hints: bool


class BadBody(Exception):
    """The client's fault: a 400 with this message, naming the field."""

    def __init__(self, message: str, param: str | None, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def peek(body: bytes, dialect: BodyDialect, count: TextCount | None = None) -> BodyFacts:
    """Read what matters; raises BadBody and nothing else. Who hands in a fresh `count` has the texts in it
    afterwards."""
    found = _decode(body)
    model = _text(found, "model")
    if not model:
        raise _missing("model") if model is None else _invalid("model", "a non-empty string")
    if dialect == "responses" and _boolean(found, "background"):
        raise BadBody("background responses are not offered here", "background", "unsupported_value")
    count = TextCount() if count is None else count
    prompts, messages = _count_texts(found, dialect, count)
    conversations = int(dialect in _CONVERSATIONS)
    return BodyFacts(
        model=model,
        stream=_boolean(found, "stream"),
        include_usage=_STREAM_OPTIONS in found and _include_usage(found),
        max_output_tokens=_output_limit(found, _ITS_OUTPUT_LIMIT.get(dialect, _OUTPUT_LIMITS)),
        prompts=prompts,
        sequences=prompts * max(_multiplier(found, "n", 1), _multiplier(found, "best_of", 0)),
        text_bytes=count.text_bytes,
        text=text_features(
            b"".join(count.texts), count.text_bytes, conversations, messages if conversations else prompts
        ),
        exact_tokens=count.exact_tokens,
        images=count.images,
        audio_parts=count.audio_parts,
        messages=messages,
        reads_more=not _BESIDES_THE_TEXT.isdisjoint(found)
        and any(found.get(name, _NULL) != _NULL for name in _BESIDES_THE_TEXT),
        service_tier=_service_tier(found, dialect),
        has_engine_hints=not ENGINE_HINTS.isdisjoint(found),
    )


def peek_model(body: bytes) -> str | None:
    """The model that a body names, if any; what else is in it is the engine's business. Raises BadBody for
    what two readers could read differently."""
    return _text(_decode(body), "model") or None


def edit(
    body: bytes, *, set_include_usage: bool, drop: frozenset[str], set_members: Mapping[str, bytes]
) -> bytes:
    """A body that `peek` has accepted, with only the named members changed.

    `set_members` has raw JSON values. Asking for usage keeps the other stream options.
    """
    put = dict(set_members)
    if set_include_usage:
        put[_STREAM_OPTIONS] = _with_include_usage(body)
    return edit_members(body, drop=drop, put=put)


def _with_include_usage(body: bytes) -> bytes:
    for member in members(body) if may_have_member(body, _STREAM_OPTIONS) else ():
        if member.key == _STREAM_OPTIONS and body.startswith(b"{", member.value_start):
            options = body[member.value_start : member.value_end]
            return edit_members(options, drop=frozenset(), put={"include_usage": b"true"})
    return _ONLY_INCLUDE_USAGE


def _decode(body: bytes) -> _Members:
    """The top level of the body. Strings inside the values are only scanned, hence the check of UTF-8."""
    try:
        if not body.isascii():
            body.decode()
        found = _OBJECT.decode(body)
        if len(found) > MAX_MEMBERS:
            raise MalformedJson(f"more than {MAX_MEMBERS} members")
        check_nesting(body)
        repeated = duplicate_key(body, found)
    except RecursionError:
        raise _invalid_json(f"nested deeper than {MAX_DEPTH} levels") from None
    except msgspec.ValidationError:
        raise _invalid_json("it must be an object") from None
    except (UnicodeDecodeError, msgspec.DecodeError, MalformedJson) as error:
        raise _invalid_json(str(error)) from error
    if repeated is not None:
        raise _repeated(repeated)
    return found


def _count_texts(found: _Members, dialect: BodyDialect, count: TextCount) -> tuple[int, int]:
    """Count all that is to be read; the answer is the number of prompts and that of messages.

    A query that stands against many texts is read once with each of them.
    """
    texts = _RANKED_TEXTS if dialect in ("rerank", "score") else _TEXTS
    required = PROMPT_FIELDS.get(dialect)
    prompts = messages = 1
    bytes_of_single = 0
    for name, raw in found.items():
        if name in _PROMPTS:
            value = bytes(raw)
            understood = count.add_prompt(value)
            if name == required and not understood and value != b"null":
                raise _invalid(name, "a string, a list of strings, or one or more lists of token ids")
            if not understood:
                count.add(Kind.NESTED, value)
            if dialect == "responses":  # a list is one conversation there
                messages = count.items
            else:
                prompts = max(prompts, count.items)
        elif kind := texts.get(name):
            value = bytes(raw)
            if name == required and not value.startswith(b"[") and value != b"null":
                raise _invalid(name, "an array")
            before = count.text_bytes
            count.add(kind, value)
            if texts is _RANKED_TEXTS:
                prompts = max(prompts, count.items)
                if count.items == 1:
                    bytes_of_single += count.text_bytes - before
            elif name == "messages":
                messages = count.items
        elif dialect == "other" and name not in _NO_TEXT and raw != _NULL:
            value = bytes(raw)
            if value.startswith((b'"', b"[", b"{")):
                count.add(Kind.RAW, value)
    if (
        required
        and found.get(required, _NULL) == _NULL
        and not (required == "prompt" and "prompt_embeds" in found)
    ):
        raise _missing(required)
    count.text_bytes += bytes_of_single * (prompts - 1)
    return prompts, messages


def _include_usage(found: _Members) -> bool:
    value = bytes(found[_STREAM_OPTIONS])
    if value == _ONLY_INCLUDE_USAGE:
        return True
    if value == b"null":
        return False
    if not value.startswith(b"{"):
        raise _invalid(_STREAM_OPTIONS, "an object")
    options = _OBJECT.decode(value)
    repeated = duplicate_key(value, options)
    if repeated is not None:
        raise _repeated(f"{_STREAM_OPTIONS}.{repeated}")
    return _boolean(options, "include_usage", f"{_STREAM_OPTIONS}.")


def _boolean(found: _Members, name: str, path: str = "") -> bool:
    raw = found.get(name, _NULL)
    if raw == _TRUE:
        return True
    if raw in (_FALSE, _NULL):
        return False
    raise _invalid(path + name, "a boolean")


def _text(found: _Members, name: str) -> str | None:
    raw = found.get(name, _NULL)
    if raw == _NULL:
        return None
    try:
        return _STRING.decode(raw)
    except msgspec.DecodeError:
        raise _invalid(name, "a string") from None


def _service_tier(found: _Members, dialect: BodyDialect) -> str | None:
    """The tier by which a class may be claimed."""
    tier = _text(found, "service_tier")
    return None if dialect == "messages" and tier in _ANTHROPIC_TIERS else tier


def _output_limit(found: _Members, names: tuple[str, ...]) -> int | None:
    largest = None
    for name in names:
        if name in found:
            limit = _number(found, name)
            if limit is not None and (largest is None or limit > largest):
                largest = limit
    return largest


def _multiplier(found: _Members, name: str, absent: int) -> int:
    number = _number(found, name) if name in found else None
    if number is None:
        return absent
    if not 1 <= number <= SEQUENCES_MAX:
        raise _invalid(name, f"an integer from 1 to {SEQUENCES_MAX}")
    return number


def _number(found: _Members, name: str) -> int | None:
    """A count of tokens or sequences. `2.0` and `2e0` are integers to some engines, so they are to us."""
    value = bytes(found[name])
    if value == b"null":
        return None
    if value.isdigit():
        if len(value) <= _DIGITS_MAX and (number := int(value)) < _EXACT_NUMBERS_END:
            return number
    elif value[0] in b"-0123456789" and len(value) <= _REAL_BYTES_MAX:
        real = float(value)
        if 0 <= real < _EXACT_NUMBERS_END and real.is_integer():
            return int(real)
    raise _invalid(name, "an integer, not negative and below 2^53")


def _invalid(name: str, expected: str) -> BadBody:
    return BadBody(f"{name} must be {expected}", name, "invalid_value")


def _missing(name: str) -> BadBody:
    return BadBody(f"{name} is required", name, "missing_required_parameter")


def _repeated(name: str) -> BadBody:
    return BadBody(f"{name} is given more than once", name, "duplicate_key")


def _invalid_json(reason: str) -> BadBody:
    return BadBody(f"the body cannot be read as JSON: {reason}", None, "invalid_json")
