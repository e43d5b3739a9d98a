"""The connection by itself, without a socket: no split and no cut of the bytes may matter."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.errors import UpstreamAborted, UpstreamClosed, UpstreamError
from gateway.upstream.http1 import TransportTimeouts
from tests.support.bare_connection import Exchange, begin


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@dataclass(frozen=True)
class Response:
    """A response as it should be read, and its bytes."""

    status: int
    reason: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    head_bytes: bytes
    body_bytes: bytes
    ends_with_connection: bool

    @property
    def raw(self) -> bytes:
        return self.head_bytes + self.body_bytes


tokens = st.text("abcXYZ019-_!#", min_size=1, max_size=12).map(lambda name: b"x-" + name.encode())
values = st.text("ab :;,=/\té0", max_size=20).map(lambda value: value.strip().encode("latin-1"))
interims = st.sampled_from(
    [b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"]
)


@st.composite
def responses(draw: st.DrawFn) -> Response:
    status = draw(st.sampled_from([200, 201, 400, 404, 429, 500, 503]))
    reason = draw(st.sampled_from([b"OK", b"Too Many Requests", b"", b"x  y"]))
    headers = draw(st.lists(st.tuples(tokens, values), max_size=5))
    pieces = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=6))
    framing = draw(st.sampled_from(["length", "chunked", "connection"]))
    body = b"".join(pieces)
    body_bytes = body
    if framing == "length":
        headers.append((b"Content-Length", b"%d" % len(body)))
    elif framing == "chunked":
        headers.append((b"Transfer-Encoding", b"chunked"))
        extension = draw(st.sampled_from([b"", b";a=1"]))
        trailers = draw(st.sampled_from([b"", b"x-trailer: 1\r\n"]))
        body_bytes = b"".join(b"%X%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
        body_bytes += b"0\r\n" + trailers + b"\r\n"
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    head_bytes = draw(interims) + b"HTTP/1.1 %d %b\r\n" % (status, reason) + lines + b"\r\n"
    return Response(status, reason, headers, body, head_bytes, body_bytes, framing == "connection")


cut_lists = st.lists(st.integers(0, 10_000), max_size=30)


@given(responses(), cut_lists)
def test_every_split_reads_the_same(
    loop: asyncio.AbstractEventLoop, response: Response, cuts: list[int]
) -> None:
    """Status, headers and body do not depend on where the bytes were cut on their way."""
    seen = begin(loop)
    seen.feed(response.raw, cuts)
    if response.ends_with_connection:
        assert not seen.response.complete
        seen.connection.eof_received()
    assert seen.response.complete
    assert (seen.response.status, seen.response.reason) == (response.status, response.reason)
    assert seen.response.headers == response.headers
    assert seen.read_rest() == response.body
    assert len(seen.owner.kept) == (0 if response.ends_with_connection else 1)
    assert seen.transport.aborted == response.ends_with_connection
    seen.connection.close()
    assert seen.owner.dropped_count == 1


@given(responses().filter(lambda response: not response.ends_with_connection), cut_lists)
def test_byte_by_byte_three_responses_in_a_row(
    loop: asyncio.AbstractEventLoop, response: Response, cuts: list[int]
) -> None:
    """The parser of a kept connection starts each response afresh."""
    seen = begin(loop)
    for number in range(3):
        if number:
            again = seen.connection.start(
                b"GET / HTTP/1.1\r\n\r\n", b"", no_body=False, reused=True, timeouts=TransportTimeouts()
            )
            seen = Exchange(seen.owner, seen.transport, seen.connection, again)
        seen.feed(response.raw, cuts if number else list(range(len(response.raw))))
        assert seen.response.headers == response.headers
        assert seen.read_rest() == response.body
        assert len(seen.owner.kept) == number + 1
    seen.connection.close()


@given(responses(), cut_lists, st.integers(0, 10_000), st.booleans())
def test_every_early_end_is_noticed(
    loop: asyncio.AbstractEventLoop, response: Response, cuts: list[int], length: int, reset: bool
) -> None:
    """A response cut short is never complete: closed before its head is whole, aborted after that."""
    cut = response.raw[: length % len(response.raw)]
    seen = begin(loop)
    seen.feed(cut, cuts)
    seen.connection.connection_lost(ConnectionResetError("reset") if reset else None)
    head_is_whole = len(cut) >= len(response.head_bytes)
    if head_is_whole and response.ends_with_connection and not reset:
        assert seen.read_rest() == cut[len(response.head_bytes) :]
        return
    assert not seen.response.complete
    expected: type[UpstreamError] = UpstreamAborted if head_is_whole else UpstreamClosed
    with pytest.raises(expected):
        seen.read_rest()
    assert seen.owner.kept == []
    assert seen.owner.dropped_count == 1


@given(
    responses().filter(lambda response: not response.ends_with_connection),
    st.binary(min_size=1, max_size=60).filter(lambda tail: tail.strip(b"\r\n") != b""),
    cut_lists,
)
def test_surplus_bytes_never_reach_a_reader(
    loop: asyncio.AbstractEventLoop, response: Response, tail: bytes, cuts: list[int]
) -> None:
    """What follows a complete response changes nothing in it, and ends the connection."""
    seen = begin(loop)
    seen.feed(response.raw + tail, cuts)
    assert seen.read_rest() == response.body
    assert seen.response.headers == response.headers
    assert seen.transport.aborted
    assert seen.connection.closed


@given(st.binary(max_size=200), cut_lists)
def test_garbage_only_ever_fails(loop: asyncio.AbstractEventLoop, data: bytes, cuts: list[int]) -> None:
    """Whatever comes, the exchange ends in a response or an error of ours, and the connection is let go."""
    seen = begin(loop)
    seen.feed(data, cuts)
    seen.connection.connection_lost(None)
    if not seen.response.complete:
        with pytest.raises(UpstreamError):
            seen.read_rest()
    assert seen.owner.dropped_count == 1
