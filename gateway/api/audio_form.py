"""A look into a `multipart/form-data` upload of sound while it passes.

Two fields matter: `model`, without which no engine can be chosen, and `stream`. Everything else, the sound
above all, is only passed over. What two readers could read differently is refused, also where it comes late:
whoever feeds this stops the upload when it raises, so that no engine has a whole form that was not read here.

Sound is priced by its size, since nobody has heard it yet: compressed speech at 128 kbit/s is 16,000 bytes a
second, and encoders like Whisper's make 50 tokens of a second (320 samples of 16,000 each), so

    input tokens = bytes / 320

Opus at a quarter of that rate is priced at a quarter, plain 16-bit samples at twice of what they are. Where
the engine tells seconds or tokens afterwards, those are paid.
"""

import logging
import re
from math import ceil

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.api.body import ENGINE_HINTS, BadBody, BodyFacts
from gateway.policy.input_estimator import AUDIO_TOKENS, TextFeatures
from gateway.policy.request import Usage

AUDIO_TOKENS_PER_SECOND = 50
AUDIO_BYTES_PER_TOKEN = 320
TEXT_BYTES_PER_TOKEN = 4
"""Of an answer, where the engine tells only how long the sound was."""
VALUE_BYTES_MAX = 1024
PARTS_MAX = 64

_READ = frozenset({"model", "stream"})
_TRUE = frozenset({"true", "1", "on", "yes", "t", "y"})
_FALSE = frozenset({"false", "0", "off", "no", "f", "n", ""})
_NAME_PARAMETER = re.compile(rb";\s*name\s*(\*[^=]*)?=", re.IGNORECASE)

# It reports each malformed byte of a client's; what is wrong is said to that client.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


class AudioForm:
    """Feed it every byte in order. `model` is known as soon as that field has ended, None before."""

    def __init__(self, content_type: bytes) -> None:
        """Raises BadBody where this is no form or has no usable boundary."""
        kind, parameters = parse_options_header(content_type)
        boundary = parameters.get(b"boundary", b"")
        if kind.strip() != b"multipart/form-data" or not boundary:
            raise _bad(
                "the body must be multipart/form-data with a boundary", "content-type", "invalid_value"
            )
        self.model: str | None = None
        self.stream = False
        self._seen: set[str] = set()
        self._parts = 0
        self._header = bytearray()
        self._value = bytearray()
        self._disposition: bytes | None = None
        self._reading: str | None = None  # the field whose value is kept
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begins,
                    "on_header_begin": self._header_begins,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_ends,
                    "on_headers_finished": self._data_begins,
                    "on_part_data": self._data,
                    "on_part_end": self._part_ends,
                },
            )
        except FormParserError as error:
            raise _bad(f"the boundary cannot be used: {error}", "content-type", "invalid_value") from None

    def feed(self, piece: bytes) -> None:
        """Raises BadBody."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _bad(f"the body cannot be read as a form: {error}", None, "invalid_form") from None

    # What the parser calls.

    def _part_begins(self) -> None:
        self._parts += 1
        self._disposition = self._reading = None
        if self._parts > PARTS_MAX:
            raise _bad(f"the form has more than {PARTS_MAX} fields", None, "invalid_form")

    def _header_begins(self) -> None:
        self._header.clear()
        self._value.clear()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_ends(self) -> None:
        if self._header.lower() == b"content-disposition":
            if self._disposition is not None:
                raise _bad("a field of the form has two names", None, "invalid_form")
            self._disposition = bytes(self._value)

    def _data_begins(self) -> None:
        name, is_file = _named(self._disposition or b"")
        self._value.clear()
        if name in ENGINE_HINTS:
            raise _bad(f"{name} is not taken from clients", name, "unsupported_value")
        if name not in _READ:
            return
        if name in self._seen:
            raise _bad(f"{name} is given more than once", name, "duplicate_key")
        if is_file:
            raise _bad(f"{name} must be a text, not a file", name, "invalid_value")
        self._seen.add(name)
        self._reading = name

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._reading is not None:
            if len(self._value) + end - start > VALUE_BYTES_MAX:
                raise _bad(f"{self._reading} is too long", self._reading, "invalid_value")
            self._value += data[start:end]

    def _part_ends(self) -> None:
        if self._reading is None:
            return
        try:
            text = self._value.decode()
        except UnicodeDecodeError:
            raise _bad(f"{self._reading} must be UTF-8", self._reading, "invalid_value") from None
        if self._reading == "model":
            if not text:
                raise _bad("model must be a non-empty string", "model", "invalid_value")
            self.model = text
        elif text.lower() not in _TRUE | _FALSE:
            raise _bad("stream must be a boolean", "stream", "invalid_value")
        else:
            self.stream = text.lower() in _TRUE


def audio_facts(model: str, *, stream: bool, body_bytes: int | None) -> BodyFacts:
    """What a form asks for. `body_bytes` None: nobody knows yet how long it will be."""
    tokens = AUDIO_TOKENS if body_bytes is None else ceil(body_bytes / AUDIO_BYTES_PER_TOKEN)
    return BodyFacts(
        model=model,
        stream=stream,
        include_usage=False,
        max_output_tokens=None,
        prompts=1,
        sequences=1,
        text_bytes=0,
        text=TextFeatures(),
        exact_tokens=tokens,
        images=0,
        audio_parts=0,
        messages=1,
        reads_more=True,  # sound: its count says nothing of a text's
        service_tier=None,
        has_engine_hints=False,
    )


class _DurationUsage(msgspec.Struct):
    seconds: float
    type: str = ""


class _Transcript(msgspec.Struct):
    usage: _DurationUsage
    text: str | None = None


_TRANSCRIPT = msgspec.json.Decoder(_Transcript)
_SECONDS_MAX = 1e6


def duration_usage(answer: bytes, output_reserve: int) -> Usage | None:
    """The tokens of a transcript whose `usage` tells the seconds of its sound; None where it does not. Its
    text is counted by its bytes, and is what was reserved where it is not there."""
    try:
        found = _TRANSCRIPT.decode(answer)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not 0 <= found.usage.seconds <= _SECONDS_MAX:
        return None
    output = output_reserve
    if found.text is not None:
        output = ceil(len(found.text.encode(errors="replace")) / TEXT_BYTES_PER_TOKEN)
    return Usage(ceil(found.usage.seconds * AUDIO_TOKENS_PER_SECOND), output)


def _named(disposition: bytes) -> tuple[str, bool]:
    """The name of a field, and whether it is a file. A name in two ways, or in the extended way that some
    readers know and others do not, is refused."""
    given = _NAME_PARAMETER.findall(b";" + disposition.partition(b";")[2])
    if given != [b""]:
        raise _bad("a field of the form has no name, or more than one", None, "invalid_form")
    _, parameters = parse_options_header(disposition)
    name = parameters.get(b"name", b"").decode("utf-8", "replace")
    return name, any(key.startswith(b"filename") for key in parameters) or b"filename" in disposition.lower()


def _bad(message: str, param: str | None, code: str) -> BadBody:
    return BadBody(message, param, code)
