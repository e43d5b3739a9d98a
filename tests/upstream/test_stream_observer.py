"""The observer sees the same whatever the cut, takes out one chunk at most, and never fails."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.stream_observer import HELD_BYTES_MAX, StreamObserver
from gateway.upstream.usage import Usage
from tests.support.scripted_engine import token

DONE = b"data: [DONE]\n\n"


def event(payload: object, name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(payload, separators=(',', ':'), ensure_ascii=False)}\n\n".encode()


def chunk(*deltas: dict[str, Any], finish: str | None = None, **members: Any) -> bytes:
    """A chat chunk with one choice per delta."""
    choices = [
        {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        for index, delta in enumerate(deltas)
    ]
    return event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": choices, **members})


def content(text: str) -> bytes:
    return chunk({"content": text})


def usage_chunk(prompt: int, completion: int, **more: Any) -> bytes:
    return chunk(usage={"prompt_tokens": prompt, "completion_tokens": completion, **more})


ROLE = chunk({"role": "assistant", "content": ""})
FINISH = chunk({}, finish="stop")


def watch(*pieces: bytes, dialect: Any = "chat", strip_usage: bool = False) -> StreamObserver:
    """An observer after the pieces, one a millisecond, beginning at 1 ms."""
    observer = StreamObserver(dialect, strip_usage)
    for index, piece in enumerate(pieces):
        observer.feed(piece, (index + 1) * 1_000_000)
    return observer


def passed(observer: StreamObserver, pieces: list[bytes]) -> bytes:
    return b"".join([observer.feed(piece, 1) for piece in pieces]) + observer.end(1)


def seen(observer: StreamObserver) -> tuple[object, ...]:
    return (
        observer.token_events,
        observer.output_tokens_seen,
        observer.usage,
        observer.finished,
        observer.done,
        observer.error,
    )


def test_a_chat_stream_from_role_to_end_mark() -> None:
    """Role, comments and empty content are no token; gaps are between tokens."""
    observer = StreamObserver("chat", False)
    times = [
        (b": working\n\n", 1),
        (ROLE, 2),
        (content(""), 3),
        (b": glued\n" + content("He"), 10),
        (content("llo"), 14),
        (content("\n"), 30),
        (FINISH, 90),
        (usage_chunk(5, 3, prompt_tokens_details={"cached_tokens": 2}), 91),
    ]
    for data, now in times:
        assert observer.feed(data, now) is data
    assert (observer.first_token_at, observer.last_token_at, observer.max_gap_ns) == (10, 30, 16)
    assert observer.token_events == observer.output_tokens_seen == 3
    assert observer.usage == Usage(5, 3, 2)
    assert observer.finished
    assert not observer.done
    observer.feed(DONE, 92)
    assert observer.done
    assert observer.error is None
    assert not observer.mid_event


def test_a_stream_without_tokens_has_no_times() -> None:
    """Nothing is measured where nothing was generated."""
    observer = watch(ROLE, FINISH, usage_chunk(3, 0), DONE)
    assert (observer.first_token_at, observer.last_token_at, observer.max_gap_ns) == (None, None, 0)
    assert observer.output_tokens_seen == observer.token_events == 0


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"content": " "},
        {"reasoning": "x", "content": None},
        {"reasoning_content": "x", "content": ""},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
        {"function_call": {"name": "f"}},
        {"refusal": "no"},
        {"content": [{"type": "text", "text": "x"}]},
    ],
)
def test_all_that_is_generated_counts_as_a_token(delta: dict[str, Any]) -> None:
    """A reasoning model's first token is not its first word of answer."""
    observer = watch(ROLE, chunk(delta), chunk(delta))
    assert observer.first_token_at == 2_000_000
    assert observer.token_events == 2


@pytest.mark.parametrize(
    "delta",
    [{}, {"role": "assistant"}, {"content": None}, {"content": ""}, {"tool_calls": []}, {"tool_calls": None}],
)
def test_nothing_generated_is_no_token(delta: dict[str, Any]) -> None:
    """Empty members are how engines say "nothing"."""
    assert watch(chunk(delta)).token_events == 0


def test_text_completions_count_by_their_text() -> None:
    """They have no delta."""
    texts = [
        event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
        for text in ("a", "b", "", "c")
    ]
    last = event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    observer = watch(*texts, last, usage_chunk(2, 3), DONE, dialect="completions")
    assert seen(observer) == (3, 3, Usage(2, 3), True, True, None)


def test_several_choices_in_a_chunk_count_each() -> None:
    """One event, two sequences, two tokens; repeated, too, when the event is known already."""
    observer = watch(*[chunk({"content": "a"}, {"content": text}) for text in ("b", "c", "d")])
    assert (observer.token_events, observer.output_tokens_seen) == (3, 6)


def test_a_usage_without_output_does_not_forget_what_came() -> None:
    """Tokens since the last total stay counted."""
    observer = watch(usage_chunk(7, 2), content("x"), chunk(usage={"prompt_tokens": 7}), chunk(usage={}))
    assert observer.output_tokens_seen == 3


def test_running_totals_replace_each_other() -> None:
    """A total in every chunk is not to be added up, and tokens after the last total are counted."""
    chunks = [
        chunk({"content": "x"}, usage={"prompt_tokens": 10, "completion_tokens": n}) for n in range(1, 51)
    ]
    observer = watch(*chunks)
    assert observer.output_tokens_seen == 50
    observer.feed(content("y"), 10**9)
    assert observer.output_tokens_seen == 51
    observer.feed(usage_chunk(10, 50), 10**9)
    assert observer.output_tokens_seen == 50
    assert observer.usage == Usage(10, 50)


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt_tokens": -1, "completion_tokens": 2},
        {"prompt_tokens": 1, "completion_tokens": 2.5},
        {"prompt_tokens": True, "completion_tokens": 2},
        {"prompt_tokens": "1", "completion_tokens": 2},
        {"completion_tokens": 2},
        {},
        [],
        "much",
        0,
    ],
)
def test_a_usage_that_is_none_is_ignored(bad: object) -> None:
    """A nonsensical count must not reach the bucket."""
    good = usage_chunk(7, 2)
    assert watch(chunk(usage=bad)).usage is None
    assert watch(good, chunk(usage=bad)).usage == Usage(7, 2)


@pytest.mark.parametrize("cached", [-1, 1.5, True, None, "3"])
def test_a_bad_cached_count_spoils_only_itself(cached: object) -> None:
    """The totals are still right."""
    assert watch(usage_chunk(7, 2, prompt_tokens_details={"cached_tokens": cached})).usage == Usage(7, 2, 0)


def test_cached_tokens_are_never_more_than_the_input() -> None:
    """A cost must not become negative."""
    assert watch(usage_chunk(7, 2, prompt_tokens_details={"cached_tokens": 9})).usage == Usage(7, 2, 7)


def test_finished_needs_every_choice_that_began() -> None:
    """One of two answers being complete is not a complete answer."""
    first = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    second = event({"choices": [{"index": 1, "delta": {"content": "x"}, "finish_reason": None}]})
    observer = watch(content("a"), second, first)
    assert not observer.finished
    observer.feed(event({"choices": [{"index": 1, "delta": {}, "finish_reason": "stop"}]}), 9)
    assert observer.finished


ERROR = {"error": {"message": "engine full", "type": "server_error", "code": 500}}


@pytest.mark.parametrize(
    ("dialect", "data"),
    [
        ("chat", event(ERROR)),
        ("completions", event(ERROR)),
        ("chat", event({**ERROR, "choices": "none"})),
        ("chat", b"event: error\ndata: out of memory\n\n"),
        ("responses", event(ERROR)),
        ("responses", event({"type": "response.failed", "response": {"error": {"code": "x"}}})),
        ("responses", event({"type": "error", "message": "x"}, "error")),
        ("messages", event({"type": "error", "error": {"type": "overloaded_error"}}, "error")),
    ],
)
def test_an_error_inside_the_stream_is_seen_and_passed_on(dialect: Any, data: bytes) -> None:
    """After the 200 this is the only way an engine can say so."""
    observer = StreamObserver(dialect, True)
    assert observer.feed(data + DONE, 5) == data + DONE
    assert observer.error == data.split(b"data: ")[1][:-2]
    assert observer.done
    assert observer.token_events == 0


@pytest.mark.parametrize(
    "text",
    [
        '"finish_reason":"stop"',
        '"usage":{"prompt_tokens":1,"completion_tokens":1}',
        '{"error":{"message":"x"}}',
        '"},"finish_reason":"stop","usage":{"prompt_tokens":1,"completion_tokens":99},"error":"',
        "\\",
        '\\"',
        "data: [DONE]",
        "[DONE]",
        "a\n\ndata: [DONE]\n\n",
        "\u2028\u2029\u0085",
        "{}[]",
    ],
)
def test_text_that_spells_out_structure_is_only_text(text: str) -> None:
    """What a model writes cannot end its stream, nor charge for it."""
    observer = watch(content("a"), content("b"), content(text), content("c"), content(text))
    assert seen(observer) == (5, 5, None, False, False, None)


def test_a_finish_reason_is_noticed_in_an_event_like_those_before() -> None:
    """A known beginning does not hide another end."""
    for last in (
        chunk({"content": "c"}, finish="length"),
        chunk({"content": "c"}, usage={"prompt_tokens": 1, "completion_tokens": 3}),
    ):
        observer = watch(content("a"), content("b"), last)
        assert observer.token_events == 3
        assert observer.finished or observer.usage == Usage(1, 3)


def test_structure_between_a_known_beginning_and_end_is_noticed() -> None:
    """Two choices in a chunk begin like one and end like one."""
    observer = watch(
        content("a"), content("b"), chunk({"content": "c"}, {"content": "d"}).replace(b":1,", b":0,")
    )
    assert (observer.token_events, observer.output_tokens_seen) == (3, 4)
    observer.feed(content("e").replace(b'e"}', b'e\\"}'), 9)  # the string has no end: no JSON
    assert observer.token_events == 3


def test_empty_text_between_known_events_is_no_token() -> None:
    """The same event with nothing in it generates nothing."""
    assert watch(content("a"), content("b"), content(""), content("c")).token_events == 3


def test_numbered_events_are_read_one_by_one() -> None:
    """Learning from events that are never alike stops, counting does not."""
    deltas = [
        event(
            {"delta": f"w{n}", "sequence_number": n, "type": "response.output_text.delta"},
            "response.output_text.delta",
        )
        for n in range(40)
    ]
    assert watch(*deltas, dialect="responses").token_events == 40


@pytest.mark.parametrize("name", [None, "response.output_text.delta"])
def test_a_responses_stream(name: str | None) -> None:
    """Typed events, other names for usage, no end mark of its own."""

    def typed(kind: str, **members: Any) -> bytes:
        return event({"type": kind, **members}, kind)

    pieces = [
        typed("response.created", response={"id": "r", "usage": None, "error": None}),
        typed("response.output_item.added", item={"type": "message"}),
        typed("response.output_text.delta", delta=""),
        *[
            event({"delta": f"w{n}"} | ({} if name else {"type": "response.output_text.delta"}), name)
            for n in range(4)
        ],
        typed("response.function_call_arguments.delta", delta="{"),
        typed("response.output_text.done", text="w0w1w2w3"),
    ]
    observer = watch(*pieces, dialect="responses")
    assert observer.first_token_at == 4_000_000
    assert seen(observer) == (5, 5, None, False, False, None)
    usage = {"input_tokens": 10, "output_tokens": 6, "input_tokens_details": {"cached_tokens": 4}}
    observer.feed(typed("response.completed", response={"usage": usage, "error": None}), 10**9)
    assert seen(observer) == (5, 6, Usage(10, 6, 4), True, True, None)


def test_an_incomplete_response_has_ended_as_well() -> None:
    """The limit of tokens was reached; nothing else will come."""
    observer = watch(event({"type": "response.incomplete", "response": {}}), dialect="responses")
    assert observer.finished
    assert observer.done


def test_a_messages_stream() -> None:
    """Usage is spread over two events, and the first has no output yet."""

    def typed(kind: str, **members: Any) -> bytes:
        return event({"type": kind, **members}, kind)

    def delta(**members: Any) -> bytes:
        return typed("content_block_delta", index=0, delta=members)

    start = {
        "input_tokens": 10,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 2,
        "output_tokens": 0,
    }
    observer = watch(
        typed("message_start", message={"usage": start}),
        typed("content_block_start", content_block={"type": "text", "text": ""}),
        typed("ping"),
        delta(type="thinking_delta", thinking="hm"),
        delta(type="text_delta", text="a"),
        delta(type="text_delta", text="b"),
        delta(type="input_json_delta", partial_json=""),
        delta(type="input_json_delta", partial_json="{"),
        delta(type="signature_delta", signature="xyz"),
        dialect="messages",
    )
    assert observer.first_token_at == 4_000_000
    assert seen(observer) == (4, 4, Usage(16, 0, 4), False, False, None)
    observer.feed(
        typed("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 7}), 10**9
    )
    assert seen(observer) == (4, 7, Usage(16, 7, 4), True, False, None)
    observer.feed(typed("message_stop"), 10**9)
    assert observer.done


# ------------------------------------------------------------------ taking the usage chunk out


@pytest.mark.parametrize(
    "kept",
    [
        content("x"),
        ROLE,
        FINISH,
        DONE,
        chunk(usage=None),
        chunk(),
        chunk({"content": "x"}, usage={"prompt_tokens": 1, "completion_tokens": 1}),
        event({"usage": {"prompt_tokens": 1, "completion_tokens": 1}}),
        event({"choices": None, "usage": {"prompt_tokens": 1, "completion_tokens": 1}}),
        event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}, **ERROR}),
        b": comment\n\n",
        b"\n",
        b"data: {broken\n\n",
        b"data: 1\n\n",
        b"data\n\n",
    ],
)
def test_only_the_usage_chunk_is_taken_out(kept: bytes) -> None:
    """Everything else passes byte for byte, and alone in its read as the very object."""
    observer = StreamObserver("chat", True)
    observer.feed(content("first"), 1)
    assert observer.feed(kept, 1) == kept
    assert passed(StreamObserver("chat", True), [kept + usage_chunk(1, 2) + kept]) == kept + kept


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_the_usage_chunk_goes_in_any_spelling_and_any_cut(end: bytes) -> None:
    """Comments, names and line ends belong to the event and leave with it."""
    line_end = end[: len(end) // 2]
    usage = b": note" + line_end + b"id: 5" + line_end + usage_chunk(1, 2)[:-2] + end
    before, after = content("x")[:-2] + end, DONE[:-2] + end
    stream = before + usage + after
    for at in range(len(stream) + 1):
        observer = StreamObserver("chat", True)
        assert passed(observer, [stream[:at], stream[at:]]) == before + after
        assert observer.usage == Usage(1, 2)
    assert (
        passed(StreamObserver("chat", True), [stream[i : i + 1] for i in range(len(stream))])
        == before + after
    )


def test_a_blank_line_of_its_own_stays_behind_a_removed_chunk() -> None:
    """Only the LF that belongs to the last CR of the removed event goes with it."""
    usage = usage_chunk(1, 2)
    assert passed(StreamObserver("chat", True), [usage, b"\n", DONE]) == b"\n" + DONE
    assert passed(StreamObserver("chat", True), [usage[:-2] + b"\r\n\r", b"\n\n", DONE]) == b"\n" + DONE


def test_a_complete_event_never_waits_and_an_incomplete_one_does() -> None:
    """The client gets each event with the read that completed it."""
    observer = StreamObserver("chat", True)
    first, second = content("a"), content("b")
    assert observer.feed(first + second[:20], 1) == first
    assert not observer.mid_event
    assert observer.feed(second[20:], 2) == second
    assert observer.end(3) == b""


def test_too_long_an_event_to_be_a_usage_chunk_is_let_through() -> None:
    """Holding it would only cost memory and time."""
    long = content("x" * HELD_BYTES_MAX)
    observer = StreamObserver("chat", True)
    assert observer.feed(long[:1000], 1) == b""
    assert not observer.mid_event
    assert observer.feed(long[1000:-1], 2) == long[:-1]
    assert observer.mid_event
    assert observer.feed(long[-1:] + DONE, 3) == long[-1:] + DONE
    assert not observer.mid_event
    assert observer.token_events == 1


def test_an_event_that_was_passed_on_in_part_is_open_at_the_end() -> None:
    """Bytes out are bytes in, and who writes on knows that a blank line must come first."""
    for strip, cut_off in ((False, content("abc")[:30]), (True, content("x" * HELD_BYTES_MAX)[:-20])):
        observer = StreamObserver("chat", strip)
        assert observer.feed(cut_off, 1) + observer.end(2) == cut_off
        assert observer.mid_event


@pytest.mark.parametrize(
    "cut", [b"dat", b"data", b"data: [DO", content("abc")[:30], usage_chunk(1, 2)[:-3], b"event: x"]
)
def test_half_an_event_of_which_nothing_was_passed_on_is_dropped(cut: bytes) -> None:
    """Closed by somebody's blank line it would be an event that no client can read."""
    observer = StreamObserver("chat", True)
    assert passed(observer, [content("a"), cut]) == content("a")
    assert not observer.mid_event
    assert observer.token_events == 1


@pytest.mark.parametrize(
    "rest", [content("b")[:-2], content("b")[:-1], DONE[:-1], FINISH[:-2], b": bye\n", b"id: 1\n"]
)
def test_what_lacks_only_its_blank_line_is_given_out_at_the_end(rest: bytes) -> None:
    """Some clients read it."""
    observer = StreamObserver("chat", True)
    assert passed(observer, [content("a"), rest]) == content("a") + rest
    assert observer.mid_event


def test_an_end_mark_without_its_blank_line_counts() -> None:
    """Some engines close the connection instead of the line."""
    observer = StreamObserver("chat", True)
    assert passed(observer, [content("a"), usage_chunk(1, 1)[:-2]]) == content("a")
    assert observer.usage == Usage(1, 1)
    observer = StreamObserver("chat", False)
    observer.feed(b"data: [DONE]", 1)
    assert observer.end(2) == b""
    assert observer.done


@pytest.mark.parametrize(
    "payload",
    [
        b"{broken",
        b"[" * 50_000,
        b'{"choices":' + b"[" * 5_000,
        b'{"choices":{}}',
        b'{"choices":[1,null]}',
        b'{"choices":[{"delta":[]}]}',
        b'{"choices":[{"index":"x","delta":{"content":"a"}}]}',
        b'{"usage":' + b"9" * 5_000 + b"}",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"type":7}',
        b'{"type":"response.output_text.delta","delta":' + b'{"a":' * 5_000,
        b"",
    ],
)
@pytest.mark.parametrize("dialect", ["chat", "completions", "responses", "messages"])
def test_what_cannot_be_read_passes_and_counts_as_nothing(payload: bytes, dialect: Any) -> None:
    """An observer is no judge."""
    data = b"data: " + payload + b"\n\n"
    observer = StreamObserver(dialect, True)
    assert observer.feed(data, 1) == data
    assert (observer.token_events, observer.usage, observer.done, observer.error) == (0, None, False, None)


def test_half_a_surrogate_pair_is_still_a_token() -> None:
    """An emoji cut in two is no strict JSON, but clients read it."""
    halves = [
        b'data: {"choices":[{"index":0,"delta":{"content":"\\u%b"}}]}\n\n' % half
        for half in (b"d83d", b"de00")
    ]
    assert watch(*halves).token_events == 2


# ------------------------------------------------------------------ properties

texts = st.one_of(
    st.text(max_size=8), st.sampled_from(["", "x", '"usage"', "\u2028\u2029\u0085", "你好🌍", "\\", "\n"])
)
events = st.one_of(
    st.builds(content, texts),
    st.builds(lambda a, b: chunk({"content": a}, {"content": b}), texts, texts),
    st.builds(lambda text: chunk({"reasoning": text, "content": None}), texts),
    st.builds(
        lambda n: chunk({"content": "x"}, usage={"prompt_tokens": 3, "completion_tokens": n}),
        st.integers(-1, 9),
    ),
    st.builds(usage_chunk, st.integers(0, 99), st.integers(0, 99)),
    st.sampled_from(
        [
            ROLE, FINISH, DONE, event(ERROR), chunk(usage=None), b": working\n\n", b"\n",
            b'data: {"choices": [\ndata: {"delta": {"content": "two lines"}}]}\n\n', b"data: {broken\n\n",
        ]
    ),
)  # fmt: skip
streams = st.tuples(st.lists(events, max_size=14), st.sampled_from([b"\n", b"\r\n", b"\r"]))


@given(
    stream=streams,
    cuts=st.lists(st.integers(0, 100_000), max_size=10),
    strip=st.booleans(),
    tail=st.integers(0, 40),
)
def test_any_cut_gives_the_same_bytes_and_the_same_facts(
    stream: tuple[list[bytes], bytes], cuts: list[int], strip: bool, tail: int
) -> None:
    """Whole, cut anywhere, or byte by byte, broken off or not."""
    whole = b"".join(stream[0]).replace(b"\n", stream[1])
    whole = whole[: max(0, len(whole) - tail)] if tail < 20 else whole
    places = sorted({place % (len(whole) + 1) for place in cuts})
    pieces = [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]
    results = []
    for way in ([whole], pieces, [whole[i : i + 1] for i in range(len(whole))]):
        observer = StreamObserver("chat", strip)
        out = passed(observer, way)
        results.append((out, *seen(observer)))
    assert results[0] == results[1] == results[2]
    if not strip:
        assert results[0][0] == whole


@given(stream=streams)
def test_exactly_the_usage_chunks_are_missing(stream: tuple[list[bytes], bytes]) -> None:
    """The rest is there, in order, byte for byte."""
    pieces = [piece.replace(b"\n", stream[1]) for piece in stream[0]]
    kept = [piece for piece in pieces if not (b'"choices":[],' in piece and b'"usage":{' in piece)]
    assert passed(StreamObserver("chat", True), pieces) == b"".join(kept)


@given(
    data=st.binary(max_size=200), dialect=st.sampled_from(["chat", "completions", "responses", "messages"])
)
def test_no_bytes_make_it_fail(data: bytes, dialect: Any) -> None:
    """Whatever comes passes."""
    assert passed(StreamObserver(dialect, False), [b"data: ", data, b"\n\n"]) == b"data: " + data + b"\n\n"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "delta", "content", "index", "usage", "error", "type", "response", "text"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(value=json_values, dialect=st.sampled_from(["chat", "completions", "responses", "messages"]))
def test_no_value_makes_it_fail(value: object, dialect: Any) -> None:
    """Nor does JSON of any shape."""
    data = f"data: {json.dumps(value)}\n\n".encode()
    observer = StreamObserver(dialect, False)
    assert passed(observer, [data, data]) == data + data
    assert observer.output_tokens_seen >= 0


def test_a_read_that_ends_inside_the_next_line_is_no_whole_event() -> None:
    """However much it looks like one: the client gets every byte, and an error behind it can be read."""
    observer = StreamObserver("chat", False)
    observer.feed(ROLE, 1)
    read = token("one")[:-1] + b"i"
    assert observer.feed(read, 2) == read
    assert observer.mid_event
    observer.feed(b"d: 4\n\n", 3)
    assert (observer.mid_event, observer.token_events) == (False, 1)
