"""What can be learned from a stream of tokens while its bytes pass by.

The observer sees every byte and takes at most one thing out: the usage chunk that the gateway asked for and
the client did not. It never refuses and never raises: an event it cannot read is passed on and counts as
nothing.

Most of a stream is one event repeated with another bit of text in it, so an event that carried text is kept
as a *template*: the bytes before the text and those behind it. A later event with the same beginning and end,
and between them nothing but plain string characters (no quote, no backslash, no control character), differs
from the known one inside one non-empty JSON string and so means the same: as many tokens, no finish reason,
no usage, no error. Inside a JSON string a quote is always escaped, hence text that spells out
`"finish_reason"` or `"usage"` cannot pass for structure. Every other event is decoded.
"""

import re
from collections.abc import Callable
from typing import Literal

import msgspec

from gateway.policy.request import Usage
from gateway.upstream.sse import MAX_EVENT_BYTES, Event, EventSplitter
from gateway.upstream.stream_chunks import CHUNK, TYPED_EVENT, Chunk, TypedEvent, decode_leniently
from gateway.upstream.usage import parse_usage

Dialect = Literal["chat", "completions", "responses", "messages", "transcription"]
"""Transcriptions come as chunks with choices (vLLM) or as typed events (OpenAI): each event shows which."""

HELD_BYTES_MAX = 16 * 1024
"""A usage chunk is a few hundred bytes; the beginning of an event longer than this is not kept back."""

TEMPLATES_IN_VAIN_MAX = 4
"""Some engines number their events, so no two are alike; after so many useless templates no more are made."""

_PLAIN_TEXT = re.compile(rb'[^"\\\x00-\x1f]+')
_is_plain = _PLAIN_TEXT.fullmatch
_TEXT_KEYS: dict[str, tuple[bytes, ...]] = {
    "chat": (b'"content":"', b'"reasoning":"', b'"reasoning_content":"'),
    "completions": (b'"text":"',),
    "responses": (b'"delta":"',),
    "messages": (b'"text":"', b'"thinking":"'),
    "transcription": (b'"content":"', b'"delta":"'),
}
_FINISHED_TYPES = frozenset(
    {"response.completed", "response.incomplete", "message_stop", "transcript.text.done"}
)
_ERROR_TYPES = frozenset({"error", "response.failed"})


class StreamObserver:
    """Watches one stream; everything public may be read at any time.

    first_token_at, last_token_at   ns on the caller's clock, None before the first token
    token_events                    events that carried text, reasoning, a tool call or a refusal
    max_gap_ns                      longest time between two such events
    usage                           the engine's last word on it
    done                            the stream's own end mark was seen
    error                           data of the first error event
    next_number                     what comes after the last `sequence_number`, 0 where events have none
    """

    __slots__ = (
        "_answer_finished",
        "_cut_off",
        "_finished_choices",
        "_handed_on",
        "_is_chunked",
        "_last_choice",
        "_on_first_token",
        "_pieces",
        "_pieces_before_usage",
        "_prefix",
        "_prefix_pieces",
        "_seen_choices",
        "_splitter",
        "_strip_usage",
        "_stripped_cr",
        "_suffix",
        "_tells_itself",
        "_templates_in_vain",
        "_text_keys",
        "done",
        "error",
        "first_token_at",
        "last_token_at",
        "max_gap_ns",
        "next_number",
        "token_events",
        "usage",
    )

    def __init__(
        self, dialect: Dialect, strip_usage: bool, on_first_token: Callable[[], None] | None = None
    ) -> None:
        """`on_first_token` is called once, before the event with it is passed on."""
        self.first_token_at: int | None = None
        self.last_token_at: int | None = None
        self.token_events = 0
        self.max_gap_ns = 0
        self.usage: Usage | None = None
        self.done = False
        self.error: bytes | None = None
        self.next_number = 0
        self._on_first_token = on_first_token or _nothing  # let go when told: it may hold us
        self._splitter = EventSplitter()
        self._is_chunked = dialect in ("chat", "completions")
        self._tells_itself = dialect == "transcription"
        self._pieces = 0
        self._pieces_before_usage = 0
        self._answer_finished = False
        self._last_choice: int | None = None
        self._seen_choices: set[int | None] = set()
        self._finished_choices: set[int | None] = set()
        self._strip_usage = strip_usage
        self._stripped_cr = False
        self._handed_on = 0  # bytes of the splitter's held event that the client has already
        self._cut_off = False
        self._text_keys = _TEXT_KEYS[dialect]
        self._prefix = b""
        self._suffix = b""
        self._prefix_pieces = 0
        self._templates_in_vain = 0

    @property
    def finished(self) -> bool:
        """Every choice that has begun has a finish reason, or the whole answer was declared complete."""
        return self._answer_finished or (
            bool(self._finished_choices) and self._seen_choices <= self._finished_choices
        )

    @property
    def output_tokens_seen(self) -> int:
        """What the engine last counted, plus one for each piece of text that has come since."""
        counted = self.usage.output_tokens if self.usage else 0
        return counted + self._pieces - self._pieces_before_usage

    @property
    def mid_event(self) -> bool:
        """Whether the bytes passed on stop inside an event: another one must be preceded by a blank line."""
        if self._cut_off:
            return True
        if self._strip_usage:
            return self._handed_on > 0 or self._splitter.in_oversized
        return self._splitter.mid_event

    def feed(self, data: bytes, now_ns: int) -> bytes:
        """Look at what has arrived; the answer is what the client may have now."""
        if self._splitter.idle and len(data) <= MAX_EVENT_BYTES:
            prefix, suffix = self._prefix, self._suffix
            if prefix and data.startswith(prefix):
                if data.endswith(suffix) and _is_plain(data, len(prefix), len(data) - len(suffix)):
                    # The usual read, of which there are very many: one event, and counted as below.
                    gap = now_ns - self.last_token_at  # type: ignore[operator]  # templates come from tokens
                    if gap > self.max_gap_ns:
                        self.max_gap_ns = gap
                    self.last_token_at = now_ns
                    self.token_events += 1
                    self._pieces += self._prefix_pieces
                    self._templates_in_vain = 0
                    return data
                if repeated := self._repeats_template(data):
                    self._count_tokens(repeated, self._prefix_pieces, now_ns)
                    return data
            if (
                data.startswith(b"data: ")
                and data.find(b"\n") == len(data) - 2
                and data.endswith(b"\n\n")
                and b"\r" not in data
            ):
                return b"" if self._observe(data, b"", data[6:-2], now_ns) else data
        events = self._splitter.feed(data)
        if self._strip_usage:
            return self._pass_on(events, now_ns)
        for event in events:
            self._observe_event(event, now_ns)
        return data

    def end(self, now_ns: int) -> bytes:
        """The stream is over; the answer is what was still held. An event without its blank line counts.

        One that was cut off before its data was whole is dropped, unless the client has its beginning: nobody
        could read it, and an error event behind it could not be read either.
        """
        self._cut_off = self.mid_event
        rest = self._splitter.take_rest()
        if rest is None:
            return b""
        strip = self._observe_event(rest, now_ns) or not (self._handed_on or _says_something(rest))
        held = b"" if strip or not self._strip_usage else rest.raw[self._handed_on :]
        self._cut_off |= bool(held)
        self._handed_on = 0
        return held

    def _pass_on(self, events: list[Event], now_ns: int) -> bytes:
        """Everything complete but for the usage chunk, and the beginning of what is too long to be one."""
        pieces = []
        for event in events:
            is_rest_of_stripped = self._stripped_cr and event.raw == b"\n"
            self._stripped_cr = False
            if is_rest_of_stripped:
                continue
            if self._observe_event(event, now_ns):
                self._stripped_cr = event.raw.endswith(b"\r")
            else:
                pieces.append(event.raw[self._handed_on :])
            self._handed_on = 0
        if self._splitter.held_bytes > HELD_BYTES_MAX:
            pieces.append(self._splitter.held_from(self._handed_on))
            self._handed_on = self._splitter.held_bytes
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _observe_event(self, event: Event, now_ns: int) -> bool:
        raw, name, data = event
        if data is None:
            return False
        if self._prefix and self._repeats_template(raw):
            self._count_tokens(1, self._prefix_pieces, now_ns)
            return False
        return self._observe(raw, name, data, now_ns)

    def _observe(self, raw: bytes, name: bytes, data: bytes, now_ns: int) -> bool:
        """Read one event; True if it is the usage chunk that the client is not to see."""
        if data.startswith(b"[DONE]"):
            self.done = True
            return False
        if self._is_chunked or (self._tells_itself and b'"choices"' in data):
            return self._observe_chunk(raw, name, data, now_ns)
        self._observe_typed(raw, name, data, now_ns)
        return False

    def _observe_chunk(self, raw: bytes, name: bytes, data: bytes, now_ns: int) -> bool:
        chunk: Chunk | None
        try:
            chunk = CHUNK.decode(data)
        except (msgspec.DecodeError, RecursionError):
            chunk = decode_leniently(data, Chunk)
        is_error = name == b"error" or (chunk is not None and chunk.error is not None)
        if is_error:
            self._note_error(data)
        if chunk is None:
            return False
        pieces = 0
        is_plain = not is_error
        for choice in chunk.choices or ():
            if choice.index != self._last_choice:
                self._last_choice = choice.index
                self._seen_choices.add(choice.index)
            if choice.has_token():
                pieces += 1
            if choice.finish_reason:
                self._finished_choices.add(choice.index)
                is_plain = False
        if pieces:
            self._count_tokens(1, pieces, now_ns)
        if chunk.usage is not None:
            self._note_usage(chunk.usage)
            return self._strip_usage and chunk.choices == [] and not is_error and len(raw) <= HELD_BYTES_MAX
        if pieces and is_plain:
            self._learn_template(raw, pieces)
        return False

    def _observe_typed(self, raw: bytes, name: bytes, data: bytes, now_ns: int) -> None:
        event: TypedEvent | None
        try:
            event = TYPED_EVENT.decode(data)
        except (msgspec.DecodeError, RecursionError):
            event = decode_leniently(data, TypedEvent)
        kind = (event.type if event else None) or name.decode("ascii", "replace")
        is_error = kind in _ERROR_TYPES or name == b"error" or (event is not None and event.error is not None)
        if is_error:
            self._note_error(data)
        if event is None:
            return
        if type(event.sequence_number) is int:
            self.next_number = event.sequence_number + 1
        usage = event.reported_usage()
        if not is_error and event.has_token(kind):
            self._count_tokens(1, 1, now_ns)
            if usage is None:
                self._learn_template(raw, 1)
        if usage is not None:
            self._note_usage(usage)
        if kind in _FINISHED_TYPES:
            self._answer_finished = self.done = True
        elif kind == "message_delta" and isinstance(event.delta, dict) and event.delta.get("stop_reason"):
            self._answer_finished = True

    def _count_tokens(self, events: int, pieces: int, now_ns: int) -> None:
        """So many events at this moment, each with so many pieces of text."""
        last = self.last_token_at
        if last is not None and now_ns - last > self.max_gap_ns:
            self.max_gap_ns = now_ns - last
        self.last_token_at = now_ns
        self.token_events += events
        self._pieces += events * pieces
        if last is None:
            self.first_token_at = now_ns
            tell, self._on_first_token = self._on_first_token, _nothing
            tell()

    def _note_usage(self, reported: object) -> None:
        usage = parse_usage(reported, self.usage)
        if usage is not self.usage:
            self.usage = usage
            self._pieces_before_usage = self._pieces

    def _note_error(self, data: bytes) -> None:
        if self.error is None:
            self.error = data

    def _repeats_template(self, data: bytes) -> int:
        """How many events like the template this is; 0 where anything in it is none."""
        prefix, suffix = self._prefix, self._suffix
        events = start = 0
        while data.startswith(prefix, start):
            text = _PLAIN_TEXT.match(data, start + len(prefix))
            if text is None or not data.startswith(suffix, text.end()):
                return 0
            events += 1
            start = text.end() + len(suffix)
        if start != len(data):
            return 0
        self._templates_in_vain = 0
        return events

    def _learn_template(self, raw: bytes, pieces: int) -> None:
        """Keep what surrounds the text of an event that is nothing but text.

        Only events ending in LF LF: a known event must also be a whole one, and after a CR the next read may
        begin with the LF that belongs to it.
        """
        if self._templates_in_vain > TEMPLATES_IN_VAIN_MAX or (self._prefix and raw.startswith(self._prefix)):
            return
        if not raw.endswith(b"\n\n") or not raw.startswith((b"data: ", b"event: ")):
            return
        for key in self._text_keys:
            start = raw.find(key) + len(key)
            text = _PLAIN_TEXT.match(raw, start) if start >= len(key) else None
            if text and raw.startswith(b'"', text.end()):
                self._templates_in_vain += 1
                is_vain = self._templates_in_vain > TEMPLATES_IN_VAIN_MAX
                self._prefix = b"" if is_vain else raw[:start]
                self._suffix = raw[text.end() :]
                self._prefix_pieces = pieces
                return


def _nothing() -> None:
    pass


def _says_something(rest: Event) -> bool:
    """Whether an event without its blank line can be read: an end mark, a JSON object, or a whole comment."""
    if rest.data is None:
        return not rest.name and rest.raw.endswith((b"\n", b"\r"))
    return rest.data.startswith(b"[DONE]") or decode_leniently(rest.data, Chunk) is not None
