"""Random streams of all four dialects, in every spelling the standard allows, cut anywhere: the same bytes
out, the same facts, and nothing missing but the usage chunk that nobody asked for."""

import json
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.stream_observer import HELD_BYTES_MAX, Dialect, StreamObserver

MARK = b"\xef\xbb\xbf"


class Said(NamedTuple):
    """One event of a stream before it is written down."""

    name: str
    payload: Any  # text stands for itself
    is_usage: bool = False


# ── what engines say ─────────────────────────────────────────────────────────────────────────────────────

texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "x", '"usage":{', "[DONE]", "你好🌍", "a\u2028b\u2029c\x85d", "\\", "\n\n"]),
)
counts = st.integers(0, 99)
usages = st.builds(lambda p, c: {"prompt_tokens": p, "completion_tokens": c}, counts, counts)
typed_usages = st.builds(lambda i, o: {"input_tokens": i, "output_tokens": o}, counts, counts)
errors = st.builds(lambda text: Said("", {"error": {"message": text, "code": 500}}), texts)
odd = st.sampled_from([Said("", "{broken"), Said("", "7"), Said("ping", ""), Said("", "[DONE]")])


def _choice(**members: Any) -> Said:
    return Said("", {"id": "c", "choices": [{"index": 0, **members}], "usage": None})


usage_chunks = st.builds(lambda usage: Said("", {"choices": [], "usage": usage}, True), usages)
chat_events = st.one_of(
    st.builds(lambda text: _choice(delta={"content": text}, finish_reason=None), texts),
    st.builds(lambda text: _choice(delta={"reasoning": text}), texts),
    st.builds(lambda reason: _choice(delta={}, finish_reason=reason), st.sampled_from(["stop", "length"])),
    usage_chunks,
    errors,
    odd,
)
completions_events = st.one_of(
    st.builds(lambda text: _choice(text=text, finish_reason=None), texts),
    st.builds(lambda text: _choice(text=text, finish_reason="stop"), texts),
    usage_chunks,
    errors,
    odd,
)


def _typed(kind: str, **members: Any) -> Said:
    return Said(kind, {"type": kind, **members})


responses_events = st.one_of(
    st.builds(
        lambda text, n: _typed("response.output_text.delta", delta=text, sequence_number=n), texts, counts
    ),
    st.builds(lambda text: Said("response.output_text.delta", {"delta": text}), texts),
    st.builds(lambda usage: _typed("response.completed", response={"usage": usage}), typed_usages),
    st.builds(lambda text: _typed("response.failed", response={"error": {"message": text}}), texts),
    errors,
    odd,
)
messages_events = st.one_of(
    st.builds(lambda usage: _typed("message_start", message={"usage": usage}), typed_usages),
    st.builds(lambda text: _typed("content_block_delta", delta={"text": text}), texts),
    st.builds(
        lambda n: _typed("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": n}),
        counts,
    ),
    st.just(_typed("message_stop")),
    st.just(_typed("ping")),
    errors,
    odd,
)
DIALECTS: dict[Dialect, st.SearchStrategy[Said]] = {
    "chat": chat_events,
    "completions": completions_events,
    "responses": responses_events,
    "messages": messages_events,
}


# ── how it may be written ────────────────────────────────────────────────────────────────────────────────


@st.composite
def spelled(draw: st.DrawFn, events: st.SearchStrategy[Said]) -> tuple[bytes, bool]:
    """One event in bytes: with comments and other fields around its data, the data in one line or in several,
    each line with an end of its own. And whether it is a usage chunk."""
    said = draw(events)
    text = (
        said.payload
        if isinstance(said.payload, str)
        else json.dumps(
            said.payload, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 0]))
        )
    )
    colon = draw(st.sampled_from([b"data: ", b"data:"]))
    lines = [colon + line.encode("utf-8", "surrogatepass") for line in text.split("\n")]
    if said.name:
        lines.insert(0, b"event: " + said.name.encode())
    for extra in draw(
        st.lists(st.sampled_from([b": working", b":", b"id: 7", b"retry: 10", "ü: é".encode()]), max_size=2)
    ):
        lines.insert(draw(st.integers(0, len(lines))), extra)
    raw = b""
    for line in lines:
        raw += line + draw(line_ends)
    # After a CR a lone LF would be the second half of that line's end, and no blank line.
    raw += draw(line_ends.filter(lambda end: end != b"\n")) if raw.endswith(b"\r") else draw(line_ends)
    return raw, said.is_usage


line_ends = st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"])
between = st.sampled_from([b"", b"", b"", b": keep-alive\n\n", b": x\r\n\r\n", b"\n", b"\r\n"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[Dialect, list[tuple[bytes, bool]]]:
    """A dialect, and pieces that are one event each or something between events."""
    dialect = draw(st.sampled_from(sorted(DIALECTS)))
    pieces: list[tuple[bytes, bool]] = []
    for event in draw(st.lists(spelled(DIALECTS[dialect]), max_size=10)):
        gap = draw(between)
        if gap and not (gap.startswith(b"\n") and pieces and pieces[-1][0].endswith(b"\r")):
            pieces.append((gap, False))
        pieces.append(event)
    if pieces and draw(st.booleans()):
        pieces[0] = (MARK + pieces[0][0], pieces[0][1])
    return dialect, pieces


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    at = sorted({place % (len(stream) + 1) for place in places})
    return [stream[a:b] for a, b in zip([0, *at], [*at, len(stream)], strict=True)]


def watched(dialect: Dialect, strip: bool, pieces: list[bytes]) -> tuple[object, ...]:
    """What came out, and all that is known of the stream in the end."""
    observer = StreamObserver(dialect, strip)
    out = b"".join([observer.feed(piece, 5) for piece in pieces]) + observer.end(5)
    return (
        out,
        observer.token_events,
        observer.output_tokens_seen,
        observer.usage,
        observer.done,
        observer.finished,
        observer.error,
        observer.next_number,
        observer.first_token_at,
        observer.mid_event,
    )


@given(
    stream=streams(),
    places=st.lists(st.integers(0, 100_000), max_size=12),
    tail=st.integers(0, 60),
    asked=st.booleans(),
)
def test_any_cut_of_any_dialect_tells_the_same(
    stream: tuple[Dialect, list[tuple[bytes, bool]]], places: list[int], tail: int, asked: bool
) -> None:
    """Whole, cut anywhere, or byte by byte, broken off or not; and untouched where nothing is taken out."""
    dialect, pieces = stream
    strip = dialect in ("chat", "completions") and not asked
    whole = b"".join(piece for piece, _ in pieces)
    if tail < 30:
        whole = whole[: max(0, len(whole) - tail)]
    expected = watched(dialect, strip, [whole])
    assert watched(dialect, strip, cut(whole, places)) == expected
    assert watched(dialect, strip, [whole[n : n + 1] for n in range(len(whole))]) == expected
    assert len(whole) < HELD_BYTES_MAX
    if not strip:
        assert expected[0] == whole


@given(stream=streams(), places=st.lists(st.integers(0, 100_000), max_size=12))
def test_the_usage_chunk_goes_wherever_it_stands_and_nothing_else(
    stream: tuple[Dialect, list[tuple[bytes, bool]]], places: list[int]
) -> None:
    """Each event but for the usage chunks, in order, byte for byte."""
    dialect, pieces = stream
    strip = dialect in ("chat", "completions")
    whole = b"".join(piece for piece, _ in pieces)
    kept = b"".join(piece for piece, is_usage in pieces if not (strip and is_usage))
    assert watched(dialect, strip, cut(whole, places))[0] == kept
