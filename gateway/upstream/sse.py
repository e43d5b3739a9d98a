"""Server-sent events: bytes in, complete events out. No I/O, and nothing is decoded as text.

An event is a run of lines closed by a blank one. Only LF, CR and CRLF end a line: U+2028, U+2029 and
U+0085 are ordinary text, and splitting on them would cut the JSON of an event in two. Reads, lines, events
and tokens do not coincide, so a splitter keeps the beginning of an event until its end arrives, and joining
the `raw` of all events with what is still held gives back exactly the bytes that went in.
"""

import re
from typing import NamedTuple

MAX_EVENT_BYTES = 1 << 20
"""Far above any chunk of an engine; an event beyond it is passed through unread instead of filling memory."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CARRIAGE_RETURN = 0x0D
# The possessive `?+` keeps a CRLF whole: giving its LF back would turn every CRLF into a blank line.
_LINE_END = re.compile(rb"\r\n?+|\n")
_END_OF_EVENT = re.compile(rb"(?:\r\n?+|\n)(?:\r\n?+|\n)")


class Event(NamedTuple):
    """One event, or a piece of a stream that is not to be read as one.

    `raw` has every byte, the closing blank line included. `data` is None where there is nothing to read: an
    event of comments only, a piece of an oversized event, or the LF of a CRLF whose CR has already closed an
    event.
    """

    raw: bytes
    name: bytes
    data: bytes | None


class EventSplitter:
    """Finds the events in a stream that arrives in arbitrary pieces.

    `idle` is True exactly when the next byte starts a new event that is not the stream's first. Then a read
    that is one whole event may be taken as it is, without asking the splitter.
    """

    __slots__ = ("_after_cr", "_at_start", "_buffer", "_last_byte", "_max_event_bytes", "_oversized", "idle")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._buffer = bytearray()
        self._last_byte = b""  # of an oversized event: its blank line may be split between two reads
        self._oversized = False
        self._after_cr = False
        self._at_start = True
        self.idle = False

    @property
    def held_bytes(self) -> int:
        """Length of the beginning of an event whose end has not been seen."""
        return len(self._buffer)

    @property
    def mid_event(self) -> bool:
        """True while the stream stands inside an event, or inside its blank line."""
        return self._oversized or bool(self._buffer)

    @property
    def in_oversized(self) -> bool:
        """True inside an event that is too long to be read."""
        return self._oversized

    def held_from(self, start: int) -> bytes:
        return bytes(self._buffer[start:])

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes, in order."""
        events: list[Event] = []
        if self._after_cr and data:
            self._after_cr = False
            if data.startswith(b"\n"):
                events.append(Event(b"\n", b"", None))
                data = data[1:]
        if self._oversized and data:
            data = self._skip_oversized(data, events)
        if data:
            self._split(data, events)
        self.idle = not (self._buffer or self._oversized or self._after_cr or self._at_start)
        return events

    def take_rest(self) -> Event | None:
        """The event that the end of the stream left without its blank line, read as far as it goes."""
        if not self._buffer:
            return None
        rest = self._finish(bytes(self._buffer))
        self._buffer.clear()
        return rest

    def _split(self, data: bytes, events: list[Event]) -> None:
        buffer: bytes | bytearray = data
        resume = 0
        if self._buffer:
            # A blank line can only be new if its second half is; the first half may be the last byte held.
            resume = len(self._buffer) - 1
            self._buffer += data
            buffer = self._buffer
        find_end = _end_after_lf if b"\r" not in data and not buffer.startswith(b"\r", resume) else _end
        start = 0
        lines_start = self._length_of_mark(buffer)
        while end := find_end(buffer, lines_start, resume):
            events.append(self._finish(bytes(buffer[start:end])))
            start = lines_start = resume = end
        if start == len(buffer):
            self._after_cr = buffer[-1] == _CARRIAGE_RETURN
            self._buffer.clear()
        elif buffer is data:
            self._buffer += data[start:]
        else:
            del self._buffer[:start]
        if len(self._buffer) > self._max_event_bytes:
            self._begin_oversized(events)

    def _length_of_mark(self, buffer: bytes | bytearray) -> int:
        return len(_BYTE_ORDER_MARK) if self._at_start and buffer.startswith(_BYTE_ORDER_MARK) else 0

    def _finish(self, raw: bytes) -> Event:
        at_start, self._at_start = self._at_start, False
        # An event is complete at the CR of its last line end: its size does not depend on the LF behind it.
        if len(raw) - raw.endswith(b"\r\n") > self._max_event_bytes:
            return Event(raw, b"", None)
        if raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw:
            return Event(raw, b"", raw[6:-2])
        return _read(raw, at_start)

    def _begin_oversized(self, events: list[Event]) -> None:
        raw = bytes(self._buffer)
        self._buffer.clear()
        self._at_start = False
        self._oversized = True
        self._last_byte = raw[-1:]
        events.append(Event(raw, b"", None))

    def _skip_oversized(self, data: bytes, events: list[Event]) -> bytes:
        """Pass on what still belongs to the oversized event; the answer is what follows it."""
        closed = _END_OF_EVENT.search(self._last_byte + data)
        if closed is None:
            self._last_byte = data[-1:]
            events.append(Event(data, b"", None))
            return b""
        end = closed.end() - 1
        self._oversized = False
        self._after_cr = end == len(data) and data[-1] == _CARRIAGE_RETURN
        events.append(Event(data[:end], b"", None))
        return data[end:]


def _end(buffer: bytes | bytearray, start: int, resume: int) -> int:
    """Index behind the blank line that closes the event beginning at `start`; 0 if there is none yet."""
    closed = _LINE_END.match(buffer, start) or _END_OF_EVENT.search(buffer, max(start, resume))
    return closed.end() if closed else 0


def _end_after_lf(buffer: bytes | bytearray, start: int, resume: int) -> int:
    """`_end` where no CR is left to be found: far cheaper, and what engines send."""
    if buffer.startswith(b"\n", start):
        return start + 1
    position = buffer.find(b"\n\n", max(start, resume))
    return position + 2 if position >= 0 else 0


def _read(raw: bytes, at_start: bool) -> Event:
    """The name and data of one whole event."""
    text = raw[len(_BYTE_ORDER_MARK) :] if at_start and raw.startswith(_BYTE_ORDER_MARK) else raw
    name = b""
    lines: list[bytes] = []
    for line in _LINE_END.split(text):
        field, _, value = line.partition(b":")
        if field == b"data":
            lines.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
    return Event(raw, name, b"\n".join(lines) if lines else None)
