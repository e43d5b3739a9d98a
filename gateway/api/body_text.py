"""How much an engine will have to read of a request: text, token ids, pictures, sound.

Works on the raw JSON of single members, in which a string without escapes is text as it stands. Shapes are
taken as they come, since judging them is the engine's business; what has an unknown shape counts with its raw
length, so that a strange body is never a cheap one.
"""

import re
from collections.abc import Mapping
from enum import Enum, auto

import msgspec

_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_ITEM = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_STRING = msgspec.json.Decoder(str)
_STRINGS = msgspec.json.Decoder(list[str])

_DIGITS_AND_SPACE = b"0123456789- \t\r\n"
_SPACE = b" \t\r\n"
_DIGIT = re.compile(rb"\d")
_LIST_OF_IDS = re.compile(rb"\[,*+\]")
_LISTS_OF_IDS = re.compile(rb"\[\[,*+\](?:,\[,*+\])*+\]")
_OF_STRINGS = re.compile(rb'\[[ \t\r\n]*"')

ENTRIES_MAX = 10_000
"""A list or an object with more entries is not taken apart but counts with its raw length: a body made of
millions of tiny values would keep the gateway busy for seconds."""

MAX_LEVELS = 8
"""Content within content (a tool's result holds parts) that is looked into; what lies deeper counts raw."""


class Kind(Enum):
    """What a member means for the reading of a request."""

    TEXT = auto()  # a string of text
    NESTED = auto()  # a string, an item with members of its own, or a list of either
    RAW = auto()  # rendered into the prompt as it is, more or less: schemas, calls
    IMAGE = auto()  # one picture, film or document, whatever its size: data URLs are not text
    AUDIO = auto()
    TYPE = auto()  # of an item: tells pictures and sound whose other members have unknown names


_TEXT, _NESTED, _RAW, _IMAGE, _AUDIO, _TYPE = Kind  # an attribute of an Enum takes longer to read than a name


_ITEM_MEMBERS = {
    "type": Kind.TYPE,
    "content": Kind.NESTED,
    "output": Kind.NESTED,
    "summary": Kind.NESTED,
    "text": Kind.TEXT,
    "refusal": Kind.TEXT,
    "thinking": Kind.TEXT,
    "reasoning": Kind.TEXT,
    "reasoning_content": Kind.TEXT,
    "arguments": Kind.TEXT,
    "tool_calls": Kind.RAW,
    "function_call": Kind.RAW,
    "input": Kind.RAW,
    "image_url": Kind.IMAGE,
    "image": Kind.IMAGE,
    "image_pil": Kind.IMAGE,
    "image_embeds": Kind.IMAGE,
    "video_url": Kind.IMAGE,
    "video": Kind.IMAGE,
    "file": Kind.IMAGE,
    "input_audio": Kind.AUDIO,
    "audio_url": Kind.AUDIO,
    "audio": Kind.AUDIO,
}
_MEDIA_TYPES = {
    b'"%b"' % name.encode(): kind
    for kind, names in {
        Kind.IMAGE: (
            "image_url input_image image image_pil image_embeds video_url input_video video "
            "file input_file document computer_screenshot"
        ),
        Kind.AUDIO: "input_audio audio_url audio",
    }.items()
    for name in names.split()
}


class TextCount:
    """Sums up the members of one body.

    texts          what will be tokenised, in UTF-8
    text_bytes     its length, what is read several times included
    exact_tokens   token ids given as such
    images, audio_parts
    items          messages, or other entries of the list that was counted last
    """

    __slots__ = ("audio_parts", "exact_tokens", "images", "items", "text_bytes", "texts")

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.text_bytes = 0
        self.exact_tokens = 0
        self.images = 0
        self.audio_parts = 0
        self.items = 0

    def add(self, kind: Kind, value: bytes) -> None:
        """Count one top-level member."""
        if kind is Kind.NESTED:
            self.items = self._add_nested(value, 0)
        elif kind is Kind.TEXT and value.startswith(b'"'):
            self._take(text_of(value))
        elif value != b"null":
            self._take(value)

    def _take(self, text: bytes) -> None:
        self.texts.append(text)
        self.text_bytes += len(text)

    def add_prompt(self, value: bytes) -> bool:
        """Count a prompt: text, token ids, or a list of either. False if it is something else.

        `items` is then the number of prompts.
        """
        self.items = 1
        if value.startswith(b'"'):
            self._take(text_of(value))
            return True
        if not value.startswith(b"["):
            return False
        if _OF_STRINGS.match(value):
            return self._add_strings(value)
        # Valid JSON that leaves nothing but these brackets and commas is a list, or lists, of integers.
        bare = value.translate(None, _DIGITS_AND_SPACE)
        if _LIST_OF_IDS.fullmatch(bare):
            self.exact_tokens += bare.count(b",") + 1 if _DIGIT.search(value) else 0
            return True
        if not _LISTS_OF_IDS.fullmatch(bare):
            return False
        self.items = bare.count(b"[") - 1
        empty = value.translate(None, _SPACE).count(b"[]")
        self.exact_tokens += bare.count(b",") + 1 - empty
        return True

    def _add_strings(self, value: bytes) -> bool:
        if value.count(b",") > ENTRIES_MAX and value.count(b'"') > 2 * ENTRIES_MAX:
            self.items = value.count(b'"') // 2
            self._take(value)
            return True
        try:
            strings = _STRINGS.decode(value)
        except msgspec.ValidationError:
            return False
        self.items = len(strings)
        for text in strings:
            self._take(text.encode())
        return True

    def _add_nested(self, value: bytes, level: int) -> int:
        """Count a string, an item or a list of them; the answer is how many there were."""
        first = value[:1]
        if first == b'"':
            self._take(text_of(value))
        elif value == b"null":
            return 0
        elif first not in (b"[", b"{") or level == MAX_LEVELS or _has_too_many_entries(value):
            self._take(value)
        elif first == b"{":
            self._add_item(_ITEM.decode(value), level)
        else:
            return self._add_list(value, level)
        return 1

    def _add_list(self, value: bytes, level: int) -> int:
        try:
            items = _ITEMS.decode(value)
        except msgspec.ValidationError:
            raws = _RAWS.decode(value)
            for raw in raws:
                self._add_nested(bytes(raw), level + 1)
            return len(raws)
        for item in items:
            self._add_item(item, level)
        return len(items)

    def _add_item(self, item: Mapping[str, msgspec.Raw], level: int) -> None:
        """A message, a part of one, an item of the responses API: all are objects with some known members."""
        has_image = has_audio = False
        for key, raw in item.items():
            kind = _ITEM_MEMBERS.get(key)
            if kind is None:
                continue
            value = bytes(raw)
            if kind is _TYPE:
                kind = _MEDIA_TYPES.get(value)
            elif value == b"null":
                continue
            if kind is _NESTED or kind is _TEXT:
                if value.startswith(b'"'):
                    text = text_of(value) if b"\\" in value else value[1:-1]
                    self.texts.append(text)
                    self.text_bytes += len(text)
                elif kind is _NESTED:
                    self._add_nested(value, level + 1)
                else:
                    self._take(value)
            elif kind is _RAW:
                self._take(value)
            elif kind is _IMAGE:  # by its type and again by its member, and one picture all the same
                has_image = True
            elif kind is _AUDIO:
                has_audio = True
        self.images += has_image
        self.audio_parts += has_audio


def _has_too_many_entries(value: bytes) -> bool:
    """Whether a list or an object might have. A message has about ten quotes and as many bytes outside its
    strings; commas and quotes may also be those of a long text, so a closer look skips the strings."""
    if value.count(b",") <= ENTRIES_MAX:
        return False
    if value.count(b'"') - value.count(b'\\"') > 20 * ENTRIES_MAX:
        return True
    # Several short operations: one regular expression would hold Python's lock for a tenth of a second.
    pieces = value.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    return sum(map(len, pieces[::2])) > 10 * ENTRIES_MAX


def text_of(literal: bytes) -> bytes:
    """The UTF-8 text that a valid JSON string stands for."""
    return _STRING.decode(literal).encode() if b"\\" in literal else literal[1:-1]
