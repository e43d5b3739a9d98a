"""The splitter finds the same events however a stream is cut, and gives back every byte."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.upstream.sse import Event, EventSplitter

MARK = b"\xef\xbb\xbf"


def split(pieces: list[bytes], max_event_bytes: int = 1 << 20) -> tuple[list[Event], bytes]:
    splitter = EventSplitter(max_event_bytes)
    events = [event for piece in pieces for event in splitter.feed(piece)]
    return events, splitter.held_from(0)


def readable(events: list[Event]) -> list[tuple[bytes, bytes]]:
    return [(event.name, event.data) for event in events if event.data is not None]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b'data: {"a":1}\n\n', [(b"", b'{"a":1}')]),
        (b'data:{"a":1}\n\n', [(b"", b'{"a":1}')]),
        (b"data:  two spaces\n\n", [(b"", b" two spaces")]),
        (b"data: a\r\n\r\n", [(b"", b"a")]),
        (b"data: a\r\rdata: b\r\r", [(b"", b"a"), (b"", b"b")]),
        (b"data: a\n\r\ndata: b\r\n\n", [(b"", b"a"), (b"", b"b")]),
        (b"data: a\ndata: b\ndata\n\n", [(b"", b"a\nb\n")]),
        (b"event: error\ndata: x\n\n", [(b"error", b"x")]),
        (b"data: x\nevent:late\nid: 7\nretry: 5\n\n", [(b"late", b"x")]),
        (b": working\n\n", []),
        (b": glued\ndata: x\n\n", [(b"", b"x")]),
        (b"\n\n\ndata: x\n\n", [(b"", b"x")]),
        (b"\n\n\n\n", []),
        (MARK + b"data: x\n\n", [(b"", b"x")]),
        (MARK + b"\ndata: x\n\n", [(b"", b"x")]),
        (b"data: x\n\n" + MARK + b"data: y\n\n", [(b"", b"x")]),
        (
            "data: a\u2028b\u2029c\u0085d\x0b\x0c\x1ce\n\n".encode(),
            [(b"", "a\u2028b\u2029c\u0085d\x0b\x0c\x1ce".encode())],
        ),
        (b"datax: y\n\ndat: y\n\n", []),
        (b"data: unfinished\n", []),
        (b"", []),
    ],
)
def test_events_of_a_stream_whole_and_byte_by_byte(
    stream: bytes, expected: list[tuple[bytes, bytes]]
) -> None:
    """Line ends, fields, comments and marks read as the standard has them."""
    for pieces in ([stream], [stream[i : i + 1] for i in range(len(stream))]):
        events, held = split(pieces)
        assert readable(events) == expected
        assert b"".join(event.raw for event in events) + held == stream


def test_an_event_is_complete_at_its_cr_and_the_lf_comes_by_itself() -> None:
    """Waiting for the byte after a CR would delay an event until the next one."""
    splitter = EventSplitter()
    assert splitter.feed(b"data: x\r\n\r") == [Event(b"data: x\r\n\r", b"", b"x")]
    assert not splitter.idle
    assert splitter.feed(b"\ndata: y\n\n") == [Event(b"\n", b"", None), Event(b"data: y\n\n", b"", b"y")]
    assert splitter.idle


@pytest.mark.parametrize("step", [1, 7, 64, 1000])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_an_oversized_event_passes_unread_and_is_not_kept(step: int, end: bytes) -> None:
    """Memory stays bounded, and the event after it is read again."""
    stream = b"data: " + b"x" * 500 + end + b"data: y" + end
    splitter = EventSplitter(max_event_bytes=100)
    events = []
    for at in range(0, len(stream), step):
        events += splitter.feed(stream[at : at + step])
        assert splitter.held_bytes <= 100
    assert readable(events) == [(b"", b"y")]
    assert b"".join(event.raw for event in events) == stream


def test_what_the_end_of_a_stream_leaves_can_still_be_read() -> None:
    """An end mark without its blank line is an end mark."""
    splitter = EventSplitter()
    splitter.feed(b"data: a\n\ndata: [DONE]")
    assert splitter.mid_event
    assert splitter.take_rest() == Event(b"data: [DONE]", b"", b"[DONE]")
    assert splitter.take_rest() is None
    assert not splitter.mid_event


line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
lines = st.one_of(
    st.sampled_from(
        [b"data: {}", b"data:x", b"data", b": comment", b"event: e", b"", MARK, b"id: 1", b"\xc2\x85"]
    ),
    st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12).map(
        lambda text: b"data: " + text.encode()
    ),
)
streams = st.lists(st.tuples(lines, line_ends), max_size=25).map(
    lambda pairs: b"".join(line + end for line, end in pairs)
)


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({place % (len(stream) + 1) for place in cuts})
    return [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]


@example(stream=b"id: 1\ndata: 12345\r\n\r\n", cuts=[], limit=20)
@given(
    stream=streams, cuts=st.lists(st.integers(0, 10_000), max_size=12), limit=st.sampled_from([20, 1 << 20])
)
def test_any_cut_gives_the_same_events(stream: bytes, cuts: list[int], limit: int) -> None:
    """Reads and events do not coincide, and nothing depends on how they fall."""
    whole, held = split([stream], limit)
    for pieces in (cut(stream, cuts), [stream[i : i + 1] for i in range(len(stream))]):
        events, left = split(pieces, limit)
        assert readable(events) == readable(whole)
        assert b"".join(event.raw for event in events) + left == stream
    assert b"".join(event.raw for event in whole) + held == stream


@given(stream=streams)
def test_events_are_those_of_a_reader_of_the_whole_text(stream: bytes) -> None:
    """A line-by-line reading of the standard's grammar is the oracle."""
    text = stream.removeprefix(MARK).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    expected: list[tuple[bytes, bytes]] = []
    name, data = b"", []
    for line in text.split(b"\n")[:-1]:
        if not line:
            if data:
                expected.append((name, b"\n".join(data)))
            name, data = b"", []
        elif line.startswith(b"data:") or line == b"data":
            data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            name = line[6:].removeprefix(b" ")
    assert readable(split([stream])[0]) == expected
