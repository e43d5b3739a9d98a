"""What real engines have sent, through the connection and the observer: no cut changes what comes out.

tests/captures has the bytes, tests/support/captures.py what is to be read in them.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.engine_load import EngineLoad
from gateway.upstream.engine_metrics import read_load
from gateway.upstream.errors import UpstreamAborted, UpstreamClosed
from gateway.upstream.stream_observer import StreamObserver
from gateway.upstream.usage import inspect_answer
from tests.support.bare_connection import begin
from tests.support.captures import (
    ANSWERS,
    END_OF_HEAD,
    ERRORS,
    FOLDER,
    FULL,
    HELP,
    STREAMS,
    Capture,
    Stream,
    captures,
)

CAPTURES = captures()
PLAIN = [capture for capture in CAPTURES if capture not in {stream.capture for stream in STREAMS}]
Facts = tuple[object, ...]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def read_through(loop: asyncio.AbstractEventLoop, capture: Capture, cuts: Sequence[int]) -> list[bytes]:
    """The body, read by read, after a look at all the rest of the response."""
    seen = begin(loop)
    seen.feed(capture.raw, cuts)
    response = seen.response
    assert response.complete
    assert (response.status, response.headers) == (capture.status, capture.headers)
    pieces = seen.read_pieces()
    assert b"".join(pieces) == capture.body
    # Every capture says `connection: close`: such a connection is not kept, and let go of once.
    assert (seen.owner.kept, seen.owner.dropped_count, seen.transport.aborted) == ([], 1, True)
    return pieces


def observed(stream: Stream, pieces: Sequence[bytes], *, strip_usage: bool = False) -> tuple[bytes, Facts]:
    """What the client gets of these reads, and what is known at their end."""
    observer = StreamObserver(stream.dialect, strip_usage)
    out = b"".join([observer.feed(piece, 1) for piece in pieces]) + observer.end(1)
    return out, (
        observer.first_token_at is not None,
        observer.token_events,
        observer.output_tokens_seen,
        observer.usage,
        observer.finished,
        observer.done,
        observer.error,
        observer.next_number,
        observer.mid_event,
    )


def facts(stream: Stream) -> Facts:
    tokens, output = stream.token_events, stream.output_tokens
    return (True, tokens, output, stream.usage, True, True, None, stream.next_number, False)


def check_reads(stream: Stream, pieces: Sequence[bytes]) -> None:
    """For a client that asked what was used and, where that has to be asked for, for one that did not."""
    assert observed(stream, pieces) == (stream.capture.body, facts(stream))
    if stream.dialect in ("chat", "completions"):
        assert observed(stream, pieces, strip_usage=True) == (stream.without_usage, facts(stream))


def every_byte(capture: Capture) -> range:
    return range(1, len(capture.raw))


def test_the_captures_are_all_accounted_for() -> None:
    """None is without an expectation, and none that is expected is missing."""
    helped = [capture.name for capture in CAPTURES if capture.name.partition("/")[2] in HELP]
    named = [*map(str, STREAMS), *ANSWERS, *ERRORS, *FULL, *helped]
    assert len(named) == len(set(named))
    assert {capture.name for capture in CAPTURES} == set(named)


# ── every cut ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("capture", PLAIN, ids=str)
def test_a_plain_response_cut_in_two_anywhere(loop: asyncio.AbstractEventLoop, capture: Capture) -> None:
    """In two reads, cut at each place, and byte by byte, it is the same response with the same body."""
    for at in every_byte(capture):
        read_through(loop, capture, [at])
    pieces = read_through(loop, capture, every_byte(capture))
    assert [len(piece) for piece in pieces] == [1] * len(capture.body)


@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_a_stream_cut_in_two_anywhere(loop: asyncio.AbstractEventLoop, stream: Stream) -> None:
    """Cut at each place, inside chunk sizes and blank lines too, and byte by byte: the client gets the same
    bytes, less the usage event if it did not ask, and the same is known of it."""
    capture = stream.capture
    check_reads(stream, capture.chunks)
    check_reads(stream, read_through(loop, capture, every_byte(capture)))
    known = set()
    for at in every_byte(capture):
        pieces = read_through(loop, capture, [at])
        if (first := len(pieces[0])) not in known:  # a cut in the framing parts the body where another did
            known.add(first)
            check_reads(stream, pieces)
    assert len(known) == len(capture.body)


@given(st.sampled_from(STREAMS), st.lists(st.integers(0, 6000), max_size=60))
def test_a_stream_in_any_reads(loop: asyncio.AbstractEventLoop, stream: Stream, cuts: list[int]) -> None:
    """However many reads, wherever they end: the same bytes and the same facts."""
    check_reads(stream, read_through(loop, stream.capture, cuts))


@given(st.sampled_from(CAPTURES), st.lists(st.integers(0, 6000), max_size=60))
def test_any_response_in_any_reads(
    loop: asyncio.AbstractEventLoop, capture: Capture, cuts: list[int]
) -> None:
    """Status, headers and body are the same; where there is a body, it ends with its last byte."""
    assert all(read_through(loop, capture, cuts))


@pytest.mark.parametrize("capture", CAPTURES, ids=str)
def test_broken_off_anywhere(loop: asyncio.AbstractEventLoop, capture: Capture) -> None:
    """Whichever byte was the last, a response that lacks one is not taken for a whole one, and what did come
    of its body is the beginning of it."""
    head_bytes = capture.raw.index(END_OF_HEAD) + len(END_OF_HEAD)
    for length in every_byte(capture):
        seen = begin(loop)
        seen.feed(capture.raw[:length], [])
        seen.connection.eof_received()
        came = seen.response.read_nowait() if length > head_bytes and seen.response.unread_bytes else b""
        assert capture.body.startswith(came or b"")
        with pytest.raises(UpstreamAborted if length >= head_bytes else UpstreamClosed):
            seen.read_rest()


# ── what is known ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_tokens_are_timed_by_the_events_that_carry_them(stream: Stream) -> None:
    """The first token is not the role nor an announcement, the last neither a finish reason nor the usage."""
    observer = StreamObserver(stream.dialect, False)
    for now, event in enumerate(stream.capture.events, 1):
        assert observer.feed(event, now) == event
        assert observer.token_events == max(0, min(now - stream.before, stream.token_events))
    assert observer.first_token_at == stream.before + 1
    assert observer.last_token_at == stream.before + stream.token_events
    assert observer.max_gap_ns == 1


def test_tokens_are_counted_before_the_engine_says_how_many() -> None:
    """One for each piece of text; where vLLM puts several tokens into one, only its own count tells."""
    for stream in STREAMS:
        observer = StreamObserver(stream.dialect, False)
        for event in stream.capture.events[: stream.before + stream.token_events]:
            observer.feed(event, 1)
        assert observer.output_tokens_seen == stream.token_events
        assert stream.output_tokens - stream.token_events == (3 if "vllm/responses" in str(stream) else 0)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_plain_answer_says_what_was_used(name: str) -> None:
    """Each engine's word on it, in each API."""
    capture = Capture(name)
    assert capture.status == 200
    assert inspect_answer(capture.body)[:2] == (True, ANSWERS[name])


@pytest.mark.parametrize("name", [*ERRORS, *FULL])
def test_an_error_uses_nothing(name: str) -> None:
    """It is JSON without a usage, and no stream, even where one was asked for."""
    capture = Capture(name)
    assert capture.status == ERRORS.get(name, 503)
    assert (capture.header(b"content-type") or b"").startswith(b"application/json")
    assert inspect_answer(capture.body)[:2] == (True, None)
    assert capture.header(b"retry-after") is None


@pytest.mark.parametrize(
    ("engine", "load"),
    [
        ("vllm", EngineLoad(running=4, waiting=8, kv_usage=0.0009766817238432424, kv_tokens=1_048_576)),
        ("llamacpp", EngineLoad(running=2, waiting=4)),
    ],
)
def test_the_load_on_a_whole_metrics_page(engine: str, load: EngineLoad) -> None:
    """Among hundreds of series, some with names that begin alike, the few that say it."""
    page = (FOLDER / engine / "metrics-under-load.txt").read_bytes()
    assert read_load(page) == load


# ── what a client gets that did not ask for usage ────────────────────────────────────────────────────────


def shapes(events: Sequence[bytes]) -> list[Any]:
    """The events decoded, without what differs between any two answers to one question."""
    decoded = [event.removeprefix(b"data: ").strip() for event in events]
    return [
        data
        if data == b"[DONE]"
        else {k: v for k, v in json.loads(data).items() if k not in ("id", "created")}
        for data in decoded
    ]


@pytest.mark.parametrize(("engine", "moved"), [("vllm", "system_fingerprint"), ("llamacpp", "timings")])
def test_usage_asked_for_and_taken_out_again(engine: str, moved: str) -> None:
    """What is left is the answer to a client that did not ask, event for event; only what the engine adds
    to the last event of a stream has moved to the one with the usage, and goes with it."""
    asked, unasked = (Capture(f"{engine}/chat-stream-{which}") for which in ("usage", "no-usage"))
    (stream,) = (stream for stream in STREAMS if stream.capture == asked)
    left, _ = observed(stream, asked.chunks, strip_usage=True)
    got = shapes([event + b"\n\n" for event in left.split(b"\n\n")[:-1]])
    expected = shapes(unasked.events)
    # The one answer has twelve tokens, the other six, so the same up to the fifth, and the same end.
    same = stream.before + 5
    assert got[:same] == expected[:same]
    assert got[-1] == expected[-1] == b"[DONE]"
    assert moved in expected[-2]
    assert len(got) - len(expected) == 6
    lost = expected[-2].keys() - got[-2].keys()
    assert lost == {moved} - got[-2].keys()
    assert got[-2]["choices"][0]["finish_reason"] == expected[-2]["choices"][0]["finish_reason"] == "length"
