"""Streams of the responses and the messages API, in the forms that engines send: any cut tells the same."""

import pytest

from gateway.policy.request import Usage
from gateway.upstream.stream_observer import Dialect, StreamObserver
from tests.support.typed_streams import (
    llamacpp_response_events,
    message_closing,
    message_delta_event,
    message_event,
    message_events,
    message_opening,
    message_start,
    numbered,
    response_delta,
    response_events,
    response_object,
    response_usage,
    typed_event,
)

WORDS = [" di", "aresses", ' "quoted"\n', "é€🌍", " t"]


def feed(dialect: Dialect, *pieces: bytes) -> StreamObserver:
    """An observer after the pieces, one a nanosecond, beginning at 1."""
    observer = StreamObserver(dialect, False)
    for now, piece in enumerate(pieces, 1):
        assert observer.feed(piece, now) == piece
    return observer


def block_start(block: object) -> bytes:
    return message_event("content_block_start", index=0, content_block=block)


def block_delta(**delta: str) -> bytes:
    return message_event("content_block_delta", index=0, delta=delta)


def seen(observer: StreamObserver) -> tuple[object, ...]:
    return (
        observer.token_events,
        observer.output_tokens_seen,
        observer.usage,
        observer.done,
        observer.finished,
        observer.error,
        observer.next_number,
        observer.mid_event,
    )


@pytest.mark.parametrize(
    ("dialect", "events", "usage", "next_number"),
    [
        ("responses", response_events(WORDS, 17, 8), Usage(17, 8), 12),
        ("responses", llamacpp_response_events(WORDS, 17, 8), Usage(17, 8, 16), 0),
        ("messages", message_events(WORDS, 14, 8), Usage(14, 8), 0),
    ],
    ids=["vllm-responses", "llamacpp-responses", "vllm-messages"],
)
def test_cut_anywhere_it_is_the_same_stream(
    dialect: Dialect, events: list[bytes], usage: Usage, next_number: int
) -> None:
    """In two pieces, at each place, and byte by byte: the same bytes out, and the same facts."""
    stream = b"".join(events)
    expected = (len(WORDS), 8, usage, True, True, None, next_number, False)
    assert seen(feed(dialect, stream)) == expected
    for at in range(1, len(stream)):
        assert seen(feed(dialect, stream[:at], stream[at:])) == expected, stream[at - 20 : at]
    assert seen(feed(dialect, *[stream[n : n + 1] for n in range(len(stream))])) == expected


@pytest.mark.parametrize(
    ("dialect", "events", "before"),
    [
        ("responses", response_events(WORDS, 17, 8), 4),
        ("responses", llamacpp_response_events(WORDS, 17, 8), 1),
        ("messages", message_events(WORDS, 14, 8), 3),
    ],
    ids=["vllm-responses", "llamacpp-responses", "vllm-messages"],
)
def test_the_first_token_is_the_first_delta(dialect: Dialect, events: list[bytes], before: int) -> None:
    """Not what announces it, and the last is the last delta, not what repeats them all."""
    observer = feed(dialect, *events)
    assert observer.first_token_at == before + 1
    assert observer.last_token_at == before + len(WORDS)


@pytest.mark.parametrize(
    ("dialect", "event"),
    [
        ("responses", numbered("response.reasoning_text.delta", 3, delta="hm")),
        ("responses", numbered("response.reasoning_summary_text.delta", 3, delta="hm")),
        ("responses", numbered("response.refusal.delta", 3, delta="no")),
        ("responses", numbered("response.function_call_arguments.delta", 3, delta="{")),
        ("responses", numbered("response.mcp_call_arguments.delta", 3, delta="{")),
        ("responses", numbered("response.output_item.added", 2, item={"type": "function_call", "name": "f"})),
        ("messages", block_delta(type="thinking_delta", thinking="hm")),
        ("messages", block_delta(type="input_json_delta", partial_json="{")),
        ("messages", block_start({"type": "tool_use", "name": "f"})),
    ],
)
def test_reasoning_and_calls_are_tokens(dialect: Dialect, event: bytes) -> None:
    """Whatever was generated counts, and a call without arguments is at least its name."""
    observer = feed(dialect, event, event)
    assert (observer.first_token_at, observer.token_events, observer.output_tokens_seen) == (1, 2, 2)


@pytest.mark.parametrize(
    ("dialect", "event"),
    [
        ("responses", numbered("response.output_item.added", 2, item={"type": "reasoning", "summary": []})),
        ("responses", numbered("response.output_item.added", 2, item="function_call")),
        ("responses", numbered("response.output_item.done", 2, item={"type": "function_call", "name": "f"})),
        ("responses", numbered("response.function_call_arguments.done", 2, arguments="{}")),
        ("responses", numbered("response.output_text.delta", 2, delta="")),
        ("messages", block_start({"type": "thinking", "thinking": ""})),
        ("messages", block_start(None)),
        ("messages", block_delta(type="signature_delta", signature="x")),
        ("messages", block_delta(type="input_json_delta", partial_json="")),
        ("messages", message_event("ping")),
    ],
)
def test_what_announces_or_repeats_is_no_token(dialect: Dialect, event: bytes) -> None:
    """Nothing was generated yet, or it was counted when it was."""
    assert feed(dialect, event, event).token_events == 0


def test_a_failed_response_says_what_it_has_used() -> None:
    """The error is noted, and so is the usage that comes with it; it is no end mark."""
    failed = response_object("failed", response_usage(17, 3), error={"code": "server_error", "message": "x"})
    observer = feed("responses", response_delta("a", 4), numbered("response.failed", 5, response=failed))
    assert observer.usage == Usage(17, 3)
    assert observer.error is not None
    assert not observer.done
    assert observer.next_number == 6


def test_a_failed_response_without_usage_costs_what_was_seen() -> None:
    """As where a stream breaks off."""
    failed = response_object("failed", None)
    observer = feed("responses", response_delta("a", 4), numbered("response.failed", 5, response=failed))
    assert (observer.usage, observer.output_tokens_seen) == (None, 1)


def test_an_error_of_a_message_is_an_error_even_with_an_end_mark_of_another_api() -> None:
    """vLLM ends such a stream with [DONE]."""
    error = typed_event("error", {"type": "error", "error": {"type": "internal_error", "message": "x"}})
    observer = feed("messages", message_start(input_tokens=14, output_tokens=0), error, b"data: [DONE]\n\n")
    assert observer.error is not None
    assert observer.done


def test_an_end_mark_of_another_api_does_no_harm() -> None:
    """Older vLLMs end every message with [DONE]."""
    observer = feed("messages", *message_events(WORDS, 14, 8), b"data: [DONE]\n\n")
    assert (observer.done, observer.error, observer.usage) == (True, None, Usage(14, 8))


def test_a_message_counts_its_cached_input() -> None:
    """Input that was read from the cache or put there is input; the last word on output adds to the first on
    input."""
    opening = message_opening(
        input_tokens=10, cache_read_input_tokens=4, cache_creation_input_tokens=2, output_tokens=1
    )
    observer = feed("messages", *opening, message_delta_event("a"))
    assert observer.usage == Usage(16, 1, 4)
    assert observer.output_tokens_seen == 2
    for event in message_closing(output_tokens=9):
        observer.feed(event, 99)
    assert (observer.usage, observer.output_tokens_seen) == (Usage(16, 9, 4), 9)


@pytest.mark.parametrize("number", [None, True, 1.5, "7", {}, 10**30])
def test_a_number_of_another_kind_is_none(number: object) -> None:
    """The event counts all the same."""
    event = typed_event(
        "response.output_text.delta",
        {"type": "response.output_text.delta", "delta": "x", "sequence_number": number},
    )
    observer = feed("responses", event)
    assert observer.token_events == 1
    assert observer.next_number in (0, 10**30 + 1)
