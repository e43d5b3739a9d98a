"""What the readers beside the data path cost: one look at a body, one look at each chunk of a stream."""

import json
from typing import Any

import pytest

from gateway.api.body import peek
from gateway.upstream.sse import EventSplitter
from gateway.upstream.stream_observer import StreamObserver
from tests.support.scripted_engine import DONE, FINISH, ROLE, token, usage_event

TOKENS = 64
WORDS = [f" word{number}" for number in range(TOKENS)]
PIECES = [ROLE, *map(token, WORDS), FINISH, usage_event(200, TOKENS), DONE]
"""A stream, one event to a read."""


def _body(prompt_bytes: int) -> bytes:
    words = "Tell me something that I do not know about a city. "
    prompt = (words * (prompt_bytes // len(words) + 1))[:prompt_bytes]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
    members = {"model": "mock-gpu", "stream": True, "max_tokens": 200, "temperature": 0.7}
    return json.dumps({**members, "messages": messages}).encode()


@pytest.mark.parametrize("body_bytes", [500, 2_000, 130_000])
def bench_body(benchmark: Any, body_bytes: int) -> None:
    """one look at a request's body"""
    facts = benchmark(peek, _body(body_bytes), "chat")
    assert facts.text_bytes >= body_bytes


def bench_events(benchmark: Any) -> None:
    """a chunk of a stream cut into events"""

    def read() -> int:
        splitter = EventSplitter()
        return sum(len(splitter.feed(piece)) for piece in PIECES)

    benchmark.extra_info["calls"] = len(PIECES)
    assert benchmark(read) == len(PIECES)


@pytest.mark.parametrize("together", [1, 8])
def bench_observer(benchmark: Any, together: int) -> None:
    """a chunk of a stream observed, `together` events in a read"""
    reads = [b"".join(PIECES[at : at + together]) for at in range(0, len(PIECES), together)]

    def watch() -> StreamObserver:
        observer = StreamObserver("chat", strip_usage=True)
        for now, piece in enumerate(reads):
            observer.feed(piece, now)
        observer.end(len(reads))
        return observer

    benchmark.extra_info["calls"] = len(reads)
    observer = benchmark(watch)
    assert (observer.token_events, observer.done, observer.finished) == (TOKENS, True, True)
