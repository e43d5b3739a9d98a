"""What a body says is read exactly, what is wrong is named, and an edit changes nothing else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.body import SEQUENCES_MAX, BadBody, BodyFacts, edit, peek, peek_model
from gateway.api.body_text import TextCount, text_of
from gateway.policy.input_estimator import TextFeatures

NOBODY: frozenset[str] = frozenset()


def chat(**members: Any) -> bytes:
    base: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    return json.dumps(base | members).encode()


def completion(prompt: object, **members: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt} | members).encode()


def raw_chat(members: bytes) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":"hello"}],' + members + b"}"


def refused(body: bytes, dialect: Any = "chat") -> tuple[str | None, str]:
    with pytest.raises(BadBody) as caught:
        peek(body, dialect)
    if caught.value.param:
        assert caught.value.param in caught.value.message
    return caught.value.param, caught.value.code


def test_the_facts_of_an_ordinary_request() -> None:
    """Everything at once."""
    body = chat(
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=12,
        n=2,
        service_tier="flex",
        priority=3,
        temperature=0.5,
    )
    assert peek(body, "chat") == BodyFacts(
        model="m",
        stream=True,
        include_usage=True,
        max_output_tokens=12,
        prompts=1,
        sequences=2,
        text_bytes=5,
        text=TextFeatures(letters=5, conversations=1, items=1),
        exact_tokens=0,
        images=0,
        audio_parts=0,
        messages=1,
        reads_more=False,
        service_tier="flex",
        has_engine_hints=True,
    )


# ------------------------------------------------------------------ what is no body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b'"text"',
        b"7",
        b'{"model":"m","messages":[]} {}',
        raw_chat(b'"temperature":NaN'),
        raw_chat(b'"temperature":Infinity'),
        raw_chat(b'"temperature":-Infinity'),
        raw_chat(b'"temperature":-'),
        raw_chat(b'"temperature":01'),
        raw_chat(b'"user":"\xff"'),
        raw_chat(b'"user":"\xed\xa0\x80"'),
        raw_chat(b'"user":"\xc0\xaf"'),
        raw_chat(b'"user":"a\nb"'),
        raw_chat(b"'user':1"),
        raw_chat(b'"user":1,'),
        b"\xef\xbb\xbf" + chat(),
        chat().decode().encode("utf-16"),
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    """No reader may see more in it than another."""
    assert refused(body) == (None, "invalid_json")


@pytest.mark.parametrize("levels", [300, 2_000, 5_000, 20_000])
@pytest.mark.parametrize(("opening", "inner", "closing"), [("[", "", "]"), ('{"a":', "1", "}")])
def test_deep_nesting_is_refused_wherever_it_is(levels: int, opening: str, inner: str, closing: str) -> None:
    """Quickly, and never by running out of stack."""
    deep = (opening * levels + inner + closing * levels).encode()
    assert refused(raw_chat(b'"x":' + deep)) == (None, "invalid_json")
    assert refused(deep) == (None, "invalid_json")
    assert refused(deep[:-1]) == (None, "invalid_json")
    tools = b'"tools":[{"type":"function","function":{"parameters":' + deep + b"}}]"
    assert refused(raw_chat(tools)) == (None, "invalid_json")
    assert refused(b'{"model":"m","messages":[{"content":' + deep + b"}]}") == (None, "invalid_json")


def test_legal_depth_passes() -> None:
    """A schema may well have a hundred levels."""
    deep = b'{"a":[' * 100 + b"]}" * 100
    assert peek(raw_chat(b'"x":' + deep), "chat").text_bytes == 5
    assert peek(b'{"model":"m","messages":[{"content":' + deep + b"}]}", "chat").text_bytes == 0


@pytest.mark.parametrize("key", ["model", "messages", "max_tokens", "stream", "n", "unknown"])
@pytest.mark.parametrize("gap", [b"", b" "])
def test_a_repeated_key_is_refused(key: str, gap: bytes) -> None:
    """There is no way to reserve one token and generate a hundred thousand."""
    twice = b'"%b":%b1,"%b":%b100000' % (key.encode(), gap, key.encode(), gap)
    assert refused(raw_chat(twice)) == (key, "duplicate_key")
    escaped = '"\\u%04x%s":1,"%s":2' % (ord(key[0]), key[1:], key)  # noqa: UP031
    assert refused(raw_chat(escaped.encode())) == (key, "duplicate_key")


def test_a_repeated_stream_option_is_refused() -> None:
    """It decides whether a chunk is taken out."""
    options = b'"stream_options":{"include_usage":true,"include_usage":false}'
    assert refused(raw_chat(options)) == ("stream_options.include_usage", "duplicate_key")


def test_too_many_members_or_objects_are_refused() -> None:
    """Looking at them all would hold everybody up."""
    assert refused(json.dumps({f"k{n}": n for n in range(2_000)}).encode()) == (None, "invalid_json")
    assert refused(b'{"model":"m","messages":[' + b"{}," * 100_000 + b"{}]}") == (None, "invalid_json")


# ------------------------------------------------------------------ single members


@pytest.mark.parametrize(
    ("member", "param"),
    [
        (b'"stream":"true"', "stream"),
        (b'"stream":1', "stream"),
        (b'"stream":[]', "stream"),
        (b'"stream_options":[]', "stream_options"),
        (b'"stream_options":true', "stream_options"),
        (b'"stream_options":{"include_usage":"yes"}', "stream_options.include_usage"),
        (b'"stream_options":{"include_usage":1}', "stream_options.include_usage"),
        (b'"service_tier":1', "service_tier"),
        (b'"service_tier":["flex"]', "service_tier"),
        (b'"n":0', "n"),
        (b'"n":-1', "n"),
        (b'"n":129', "n"),
        (b'"n":1.5', "n"),
        (b'"n":"2"', "n"),
        (b'"n":true', "n"),
        (b'"best_of":1000', "best_of"),
    ],
)
def test_a_member_of_the_wrong_type_is_named(member: bytes, param: str) -> None:
    """The client is told which one."""
    assert refused(raw_chat(member)) == (param, "invalid_value")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("null", None),
        ("0", 0),
        ("1", 1),
        ("100000", 100_000),
        ("1.0", 1),
        ("1E2", 100),
        ("2e3", 2_000),
        ("-0", 0),
        ("9007199254740991", 2**53 - 1),
        ("9007199254740992", "refused"),
        ("9007199254740992.0", "refused"),
        ("-1", "refused"),
        ("-1000000", "refused"),
        ("1.5", "refused"),
        ("1e308", "refused"),
        ("1e999", "refused"),
        ("1" + "0" * 30, "refused"),
        ("1" + "0" * 5_000, "refused"),
        ("1." + "0" * 5_000, "refused"),
        ('"100"', "refused"),
        ("true", "refused"),
        ("[]", "refused"),
        ("{}", "refused"),
    ],
)
def test_output_limits(field: str, value: str, expected: int | str | None) -> None:
    """null is absent, whole numbers are what they are, and nothing else is guessed at."""
    body = raw_chat(f'"{field}":{value}'.encode())
    if expected == "refused":
        assert refused(body) == (field, "invalid_value")
    else:
        assert peek(body, "chat").max_output_tokens == expected


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"max_tokens": 1, "max_completion_tokens": 10_000}, 10_000),
        ({"max_completion_tokens": 1, "max_tokens": 10_000}, 10_000),
        ({"max_tokens": None, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": None, "max_output_tokens": 0}, 7),
        ({"max_tokens": None}, None),
        ({}, None),
    ],
)
def test_the_larger_limit_is_the_one_to_reserve(members: dict[str, Any], expected: int | None) -> None:
    """The engine may take either."""
    assert peek(chat(**members), "chat").max_output_tokens == expected


@pytest.mark.parametrize(
    "dialect", ["chat", "completions", "embeddings", "responses", "messages", "rerank", "other"]
)
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{}", "missing_required_parameter"),
        (b'{"model":null}', "missing_required_parameter"),
        (b'{"model":""}', "invalid_value"),
        (b'{"model":7}', "invalid_value"),
        (b'{"model":["m"]}', "invalid_value"),
    ],
)
def test_a_model_is_needed(dialect: Any, body: bytes, code: str) -> None:
    """Everywhere."""
    assert refused(body, dialect) == ("model", code)


@pytest.mark.parametrize(
    ("dialect", "members", "param", "code"),
    [
        ("chat", {}, "messages", "missing_required_parameter"),
        ("chat", {"messages": None}, "messages", "missing_required_parameter"),
        ("chat", {"messages": "hi"}, "messages", "invalid_value"),
        ("chat", {"messages": {"role": "user"}}, "messages", "invalid_value"),
        ("messages", {"messages": 1}, "messages", "invalid_value"),
        ("completions", {}, "prompt", "missing_required_parameter"),
        ("completions", {"prompt": None}, "prompt", "missing_required_parameter"),
        ("completions", {"prompt": 7}, "prompt", "invalid_value"),
        ("completions", {"prompt": {"text": "x"}}, "prompt", "invalid_value"),
        ("completions", {"prompt": ["a", 1]}, "prompt", "invalid_value"),
        ("completions", {"prompt": [1, "a"]}, "prompt", "invalid_value"),
        ("completions", {"prompt": [1, [2]]}, "prompt", "invalid_value"),
        ("completions", {"prompt": [[1], 2]}, "prompt", "invalid_value"),
        ("completions", {"prompt": [[[1]]]}, "prompt", "invalid_value"),
        ("completions", {"prompt": [1.5]}, "prompt", "invalid_value"),
        ("completions", {"prompt": [True]}, "prompt", "invalid_value"),
        ("completions", {"prompt": [None]}, "prompt", "invalid_value"),
        ("completions", {"prompt": [{}]}, "prompt", "invalid_value"),
    ],
)
def test_what_is_to_be_read_is_needed(dialect: Any, members: dict[str, Any], param: str, code: str) -> None:
    """By its own name in each API."""
    assert refused(json.dumps({"model": "m"} | members).encode(), dialect) == (param, code)


@pytest.mark.parametrize(
    "member",
    [
        b'"seed":9007199254740993',
        b'"seed":' + b"1" * 5_000,
        b'"temperature":1e999',
        b'"stream":null,"stream_options":null,"service_tier":null,"n":null,"best_of":null,"tools":null',
        b'"unknown":{"deep":[{"er":1}]}',
        b'"stream_options":{"include_usage":null,"unknown":1}',
        b'"tools":[{"type":"function","function":null},{"type":"array"}]',
        b'"tools":7',
    ],
)
def test_what_is_unknown_or_null_passes(member: bytes) -> None:
    """The engine has the last word on its own members."""
    facts = peek(raw_chat(member), "chat")
    assert not facts.stream
    assert not facts.include_usage
    assert facts.sequences == 1


@pytest.mark.parametrize(
    ("members", "hints"), [({"priority": 0}, True), ({"request_id": "x"}, True), ({}, False)]
)
def test_engine_hints_are_noticed(members: dict[str, Any], hints: bool) -> None:
    """They are taken out before the engine sees them."""
    assert peek(chat(**members), "chat").has_engine_hints is hints


# ------------------------------------------------------------------ how much there is to read


@pytest.mark.parametrize(
    ("prompt", "text_bytes", "exact_tokens", "sequences"),
    [
        ("hello", 5, 0, 1),
        ("", 0, 0, 1),
        ("héllo 🌍", 11, 0, 1),
        (["hello", "wörld"], 11, 0, 2),
        ([1, 2, 3], 0, 3, 1),
        ([7], 0, 1, 1),
        ([[1, 2, 3], [4, 5]], 0, 5, 2),
        ([[1], [], [2]], 0, 2, 3),
        ([[]], 0, 0, 1),
        ([], 0, 0, 1),
        ([-1, 2], 0, 2, 1),
    ],
)
def test_the_four_forms_of_a_prompt(
    prompt: object, text_bytes: int, exact_tokens: int, sequences: int
) -> None:
    """Ids are counted exactly and never as text."""
    for body, dialect in (
        (completion(prompt), "completions"),
        (json.dumps({"model": "m", "prompt": prompt}, indent=1, ensure_ascii=False).encode(), "completions"),
        (json.dumps({"model": "m", "input": prompt}).encode(), "embeddings"),
    ):
        facts = peek(body, dialect)  # type: ignore[arg-type]
        assert (facts.text_bytes, facts.exact_tokens, facts.sequences) == (
            text_bytes,
            exact_tokens,
            sequences,
        )


@pytest.mark.parametrize(
    ("members", "sequences"),
    [
        ({"n": 3}, 6),
        ({"best_of": 4}, 8),
        ({"n": 3, "best_of": 2}, 6),
        ({"n": 2.0}, 4),
        ({"n": SEQUENCES_MAX}, 256),
    ],
)
def test_sequences_are_prompts_times_answers(members: dict[str, Any], sequences: int) -> None:
    """Whichever of `n` and `best_of` is larger is generated."""
    assert peek(completion(["a", "b"], **members), "completions").sequences == sequences


LOOSE_MESSAGES: list[Any] = [
    {"role": "assistant", "content": None, "tool_calls": None},
    {"role": "user", "content": []},
    {"role": "user", "content": ""},
    {"role": "user", "content": [{"type": "text"}]},
    {"role": "user", "content": [{"type": "unheard_of", "payload": "x" * 1000}]},
    {"role": "user", "content": [{"type": "text", "text": None}]},
    {"role": "user", "content": [{"type": ["text"]}]},
    {"role": "user", "content": [None]},
    {"role": "user"},
    {},
    None,
]


@pytest.mark.parametrize("message", LOOSE_MESSAGES)
def test_loose_messages_are_no_trouble(message: Any) -> None:
    """They go to the engine as they are, and its verdict comes back."""
    facts = peek(chat(messages=[message, {"role": "user", "content": "hello"}]), "chat")
    assert facts.text_bytes == 5
    assert facts.messages == 2


def test_what_has_no_known_shape_counts_with_its_raw_length() -> None:
    """A strange body is not a cheap one."""
    assert peek(chat(messages=["hello", 12345]), "chat").text_bytes == 10
    assert peek(chat(messages=[{"content": 12345}, {"content": "hello"}]), "chat").text_bytes == 10
    nested: Any = {"content": "deep down"}
    for _ in range(50):
        nested = {"content": [nested]}
    assert peek(chat(messages=[nested]), "chat").text_bytes >= len("deep down")


@pytest.mark.parametrize(
    ("part", "images", "audio_parts"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, 1, 0),
        ({"type": "image_url", "image_url": "data:image/png;base64,"}, 1, 0),
        ({"image_url": {"url": "data:image/png;base64,"}}, 1, 0),
        ({"type": "input_image", "image_url": "data:image/png;base64,"}, 1, 0),
        ({"type": "image", "source": {"type": "base64", "data": ""}}, 1, 0),
        ({"type": "video_url", "video_url": {"url": ""}}, 1, 0),
        ({"type": "input_file", "file_data": ""}, 1, 0),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, 0, 1),
        ({"type": "audio_url", "audio_url": {"url": ""}}, 0, 1),
        ({"type": "audio", "data": ""}, 0, 1),
        ({"type": "text", "image_url": None, "input_audio": None}, 0, 0),
    ],
)
def test_pictures_and_sound_count_as_parts(part: dict[str, Any], images: int, audio_parts: int) -> None:
    """Three megabytes of base64 are not three megabytes of text."""
    big = (
        json.dumps(part).replace('""', f'"{"A" * 3_000_000}"').replace("base64,", "base64," + "A" * 3_000_000)
    )
    body = chat(messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}, "@"]}])
    facts = peek(body.replace(b'"@"', big.encode()), "chat")
    assert (facts.text_bytes, facts.images, facts.audio_parts) == (2, images, audio_parts)
    as_input = json.dumps({"model": "m", "input": [{"role": "user", "content": [part]}]}).encode()
    facts = peek(as_input, "responses")
    assert (facts.images, facts.audio_parts, facts.sequences) == (images, audio_parts, 1)


def test_tools_and_calls_count_as_the_json_they_are() -> None:
    """They are rendered into the prompt."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    facts = peek(chat(messages=messages, tools=tools), "chat")
    assert facts.text_bytes == len(json.dumps(tools)) + len(json.dumps(calls))


@pytest.mark.parametrize(
    "tools",
    [
        None,
        [],
        {},
        "none",
        7,
        [None],
        [{"type": "function", "function": None}],
        [{"type": "function"}],
        [{"function": {"parameters": [[["deep"]]] * 3}}],
        [{"type": "web_search", "filters": {"é": "网"}}],
    ],
)
def test_tools_of_any_shape_are_some_text(tools: Any) -> None:
    """Whatever stands there counts with the bytes it has, and nothing else is disturbed."""
    facts = peek(
        json.dumps({"model": "m", "messages": [], "tools": tools}, ensure_ascii=False).encode(), "chat"
    )
    written = "" if tools is None else json.dumps(tools, ensure_ascii=False)
    assert facts.text_bytes == facts.text.text_bytes == len(written.encode())


def test_escapes_make_no_other_text() -> None:
    """A body in ASCII alone has the features of the text that it stands for."""
    messages = [{"role": "user", "content": '网关 und Größe\n\t"42"'}]
    written = [
        json.dumps({"model": "m", "messages": messages}, ensure_ascii=a).encode() for a in (True, False)
    ]
    assert written[0] != written[1]
    assert peek(written[0], "chat").text == peek(written[1], "chat").text
    assert peek(written[0], "chat").text == TextFeatures(
        letters=5, capitals=1, digits=2, spaces=2, punctuation=4, narrow=4, wide=6, conversations=1, items=1
    )


def test_who_asks_gets_the_texts() -> None:
    """As they will be tokenised: each string by itself, without what JSON puts around it."""
    count = TextCount()
    messages = [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": [{"type": "text", "text": "é"}, {"type": "image_url", "image_url": "x"}]},
    ]
    facts = peek(chat(messages=messages), "chat", count)
    assert count.texts == [b"be\nbrief", "é".encode()]
    assert facts.text_bytes == 10


@pytest.mark.parametrize(
    ("dialect", "members", "conversations", "items"),
    [
        ("chat", {"messages": [{"content": "a"}] * 3}, 1, 3),
        ("chat", {"messages": []}, 1, 0),
        ("messages", {"messages": [{"content": "a"}] * 2}, 1, 2),
        ("responses", {"input": "a"}, 1, 1),
        ("completions", {"prompt": ["a", "b"]}, 0, 2),
        ("embeddings", {"input": ["a", "b"]}, 0, 2),
        ("rerank", {"query": "a", "documents": ["b"] * 4}, 0, 4),
    ],
)
def test_what_a_template_adds_to(dialect: Any, members: Any, conversations: int, items: int) -> None:
    """A conversation and its messages, or else single prompts."""
    text = peek(json.dumps({"model": "m"} | members).encode(), dialect).text
    assert (text.conversations, text.items) == (conversations, items)


@pytest.mark.parametrize(
    ("members", "more"),
    [
        ({"previous_response_id": "resp_1"}, True),
        ({"conversation": {"id": "c"}}, True),
        ({"truncate_prompt_tokens": 10}, True),
        ({"previous_response_id": None, "conversation": None}, False),
        ({}, False),
    ],
)
def test_what_the_engine_reads_besides_is_noticed(members: dict[str, Any], more: bool) -> None:
    """Its count of tokens says nothing of the text in the body then."""
    assert peek(json.dumps({"model": "m", "input": "a"} | members).encode(), "responses").reads_more is more


@pytest.mark.parametrize(
    ("dialect", "members", "text_bytes"),
    [
        ("responses", {"input": "hello", "instructions": "be brief"}, 13),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]}, 5),
        ("responses", {"input": [{"type": "function_call_output", "output": "hello"}]}, 5),
        ("responses", {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, 2),
        ("messages", {"messages": [{"content": "hello"}], "system": "be brief"}, 13),
        (
            "messages",
            {"messages": [{"content": "hello"}], "system": [{"type": "text", "text": "be brief"}]},
            13,
        ),
        (
            "messages",
            {"messages": [{"content": [{"type": "tool_result", "content": [{"text": "hello"}]}]}]},
            5,
        ),
        ("messages", {"messages": [{"content": [{"type": "tool_use", "input": {"a": 1}}]}]}, 8),
        ("rerank", {"query": "hello", "documents": ["one", {"text": "two"}]}, 16),
        ("rerank", {"query": "hello", "documents": ["one"]}, 8),
        ("score", {"text_1": "hello", "text_2": ["one", "two"]}, 16),
        ("score", {"data_1": ["hello"], "data_2": ["one", "two", "six"]}, 24),
        ("score", {"queries": ["hello", "again"], "items": ["one", "two"]}, 16),
        ("embeddings", {"messages": [{"content": "hello"}]}, 5),
        ("completions", {"prompt": "hello", "suffix": "end"}, 8),
        ("other", {}, 0),
        ("other", {"input": "hello", "temperature": 0.5, "user": "me"}, 5),
        ("other", {"input_ids": [1, 2, 3], "texts": ["one"], "seed": 7}, len("[1, 2, 3]") + len('["one"]')),
    ],
)
def test_the_text_of_other_apis(dialect: Any, members: dict[str, Any], text_bytes: int) -> None:
    """Each has its own names for it; a query is read once with each text that it stands against; of an API
    that is not known every text, list and object counts."""
    assert peek(json.dumps({"model": "m"} | members).encode(), dialect).text_bytes == text_bytes


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b"{}", None),
        (b'{"model": null, "stream": "perhaps"}', None),
        (b'{"model": ""}', None),
        (b'{"n": -1, "mode\\u006c": "m"}', "m"),
    ],
)
def test_the_model_may_be_all_that_is_looked_for(body: bytes, model: str | None) -> None:
    """Other members are not judged, and it may be missing."""
    assert peek_model(body) == model


@pytest.mark.parametrize("body", [b"", b"[]", b'{"a":1,"a":1}', b'{"model":1}', b'{"a":"\xff"}', b"[" * 9999])
def test_a_look_for_the_model_refuses_what_is_ambiguous(body: bytes) -> None:
    """As a look at everything does."""
    with pytest.raises(BadBody):
        peek_model(body)


@pytest.mark.parametrize(
    ("dialect", "members", "sequences", "messages"),
    [
        ("responses", {"input": [{"role": "user", "content": "a"}] * 3}, 1, 3),
        ("messages", {"messages": [{"content": "a"}] * 2, "system": [{"text": "b"}] * 5}, 1, 2),
        ("embeddings", {"input": [{"content": "a"}] * 3}, 3, 1),
        ("rerank", {"query": "q", "documents": ["a", "b", "c"]}, 3, 1),
        ("completions", {"prompt": ["a", "b"]}, 2, 1),
    ],
)
def test_a_conversation_is_one_sequence_and_a_batch_is_many(
    dialect: Any, members: dict[str, Any], sequences: int, messages: int
) -> None:
    """A list means either, depending on the API."""
    facts = peek(json.dumps({"model": "m"} | members).encode(), dialect)
    assert (facts.sequences, facts.messages) == (sequences, messages)


@given(st.text(), st.booleans())
def test_the_text_of_a_string(text: str, ascii_only: bool) -> None:
    """Escapes are what they stand for."""
    assert text_of(json.dumps(text, ensure_ascii=ascii_only).encode()) == text.encode()


pieces = st.one_of(st.text(max_size=12), st.sampled_from(["\\", '"', "\\u0041", "é", "🌍", "\n\t", "{}[],:"]))
messages_and_bytes = st.lists(
    st.one_of(
        pieces.map(lambda text: ({"role": "user", "content": text}, len(text.encode()))),
        st.lists(pieces, max_size=3).map(
            lambda texts: (
                {"role": "user", "content": [{"type": "text", "text": text} for text in texts]},
                sum(len(text.encode()) for text in texts),
            )
        ),
        pieces.map(lambda text: ({"content": None, "reasoning_content": text}, len(text.encode()))),
        st.just(({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}, 0)),
    ),
    max_size=5,
)


@given(messages_and_bytes, st.booleans(), st.sampled_from([None, 1, (",", ":")]))
def test_the_text_of_random_messages(written: list[tuple[Any, int]], ascii_only: bool, spelling: Any) -> None:
    """However they are written down."""
    how = {"separators": spelling} if isinstance(spelling, tuple) else {"indent": spelling}
    body = {"model": "m", "messages": [message for message, _ in written]}
    facts = peek(json.dumps(body, ensure_ascii=ascii_only, **how).encode(), "chat")  # type: ignore[arg-type]
    assert facts.text_bytes == sum(size for _, size in written)
    assert facts.messages == len(written)


# ------------------------------------------------------------------ nothing but BadBody

dialects: Any = st.sampled_from(
    ["chat", "completions", "embeddings", "responses", "messages", "rerank", "other"]
)
members = st.one_of(
    st.sampled_from(["model", "messages", "prompt", "input", "stream", "stream_options", "max_tokens", "n"]),
    st.sampled_from(["tools", "content", "type", "text", "image_url", "service_tier", "include_usage", "x"]),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("text"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(members, inner, max_size=4),
    max_leaves=15,
)


def judge(body: bytes, dialect: Any) -> None:
    try:
        facts = peek(body, dialect)
    except BadBody:
        return
    assert facts.model
    assert facts.sequences >= 1
    assert facts.text.text_bytes == facts.text_bytes
    assert min(facts.exact_tokens, facts.images, facts.audio_parts, facts.messages) >= 0
    assert 0 <= facts.text_bytes <= len(body)


@given(st.binary(max_size=100), dialects)
def test_any_bytes_are_read_or_refused(body: bytes, dialect: Any) -> None:
    """There is no third way."""
    judge(body, dialect)
    judge(b'{"model":"m","messages":[' + body + b'],"prompt":"x"}', dialect)


@given(st.dictionaries(members, json_values), dialects)
def test_any_json_is_read_or_refused(body: dict[str, Any], dialect: Any) -> None:
    """Whatever the types."""
    judge(json.dumps(body).encode(), dialect)
    judge(json.dumps({"model": "m", "messages": [], "prompt": ""} | body).encode(), dialect)


# ------------------------------------------------------------------ edits


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"model":"m","n":1}', b'{"stream_options":{"include_usage":true},"model":"m","n":1}'),
        (b'{ "model": "m" }', b'{"stream_options":{"include_usage":true}, "model": "m" }'),
        (b'{"a":1,"stream_options":null}', b'{"a":1,"stream_options":{"include_usage":true}}'),
        (b'{"stream_options":{},"a":1}', b'{"stream_options":{"include_usage":true},"a":1}'),
        (
            b'{"stream_options" : { "include_usage" : false , "x":1.0} }',
            b'{"stream_options" : { "include_usage" : true , "x":1.0} }',
        ),
        (
            b'{"stream_options":{"continuous_usage_stats":true}}',
            b'{"stream_options":{"include_usage":true,"continuous_usage_stats":true}}',
        ),
        (b'{"stream_options":{"include_usage":true}}', b'{"stream_options":{"include_usage":true}}'),
        (b'{"stream\\u005foptions":null}', b'{"stream\\u005foptions":{"include_usage":true}}'),
        (
            b'{"messages":"\\"stream_options\\":1"}',
            b'{"stream_options":{"include_usage":true},"messages":"\\"stream_options\\":1"}',
        ),
    ],
)
def test_usage_is_asked_for_without_touching_anything_else(before: bytes, after: bytes) -> None:
    """Order, spelling and the other options stay."""
    assert edit(before, set_include_usage=True, drop=NOBODY, set_members={}) == after


def test_big_numbers_and_escapes_survive_an_edit() -> None:
    """A client gets the seed it asked for, and an engine's prefix cache the same bytes each time."""
    body = raw_chat(
        b'"seed":9007199254740993,"t":1.0,"u":1E2,"e":"\\u00e9 \xc3\xa9", "x" : {"y" : 1},"priority":5'
    )
    edited = edit(
        body, set_include_usage=True, drop=frozenset({"priority"}), set_members={"model": b'"other"'}
    )
    assert edited == b'{"stream_options":{"include_usage":true},' + body[1:].replace(
        b'"m"', b'"other"'
    ).replace(b',"priority":5', b"")
    again = edit(
        body, set_include_usage=True, drop=frozenset({"priority"}), set_members={"model": b'"other"'}
    )
    assert again == edited


def test_no_edit_is_no_change() -> None:
    """The very same object."""
    body = chat()
    assert edit(body, set_include_usage=False, drop=frozenset({"priority"}), set_members={}) is body


@given(
    body=st.dictionaries(members, json_values, max_size=5),
    options=st.sampled_from(["absent", None, {}, {"include_usage": False, "x": [1]}]),
    drop=st.frozensets(st.sampled_from(["priority", "x", "n"])),
    rank=st.none() | st.integers(-9, 9),
)
def test_an_edited_body_reads_as_the_changed_object(
    body: dict[str, Any], options: Any, drop: frozenset[str], rank: int | None
) -> None:
    """Python's reader is the oracle."""
    body.pop("stream_options", None)
    if options != "absent":
        body["stream_options"] = options
    expected = {key: value for key, value in body.items() if key not in drop}
    expected["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    put = {} if rank is None else {"priority": b"%d" % rank}
    if rank is not None:
        expected["priority"] = rank
    for spelled in (json.dumps(body), json.dumps(body, indent=2, ensure_ascii=False)):
        edited = edit(spelled.encode(), set_include_usage=True, drop=drop, set_members=put)
        assert json.dumps(json.loads(edited), sort_keys=True) == json.dumps(expected, sort_keys=True)


@pytest.mark.parametrize(
    "messages",
    [
        b"[" + b",".join([b'"a"'] * 250_000) + b"]",
        b"[" + b",".join([b"1"] * 500_000) + b"]",
        b'[{"role":"user"},' + b",".join([b"1"] * 500_000) + b"]",
        b"[{" + b",".join(b'"k%d":1' % i for i in range(110_000)) + b"}]",
    ],
    ids=["strings", "numbers", "numbers behind a message", "members"],
)
def test_a_million_tiny_values_count_raw(messages: bytes) -> None:
    """What would take seconds to take apart is not taken apart, and is not cheap either."""
    facts = peek(b'{"model":"m","messages":' + messages + b"}", "chat")
    assert facts.text_bytes >= len(messages) - 2


def test_commas_and_quotes_of_a_long_text_do_not_count_as_entries() -> None:
    """Only values outside strings make a list long."""
    text = 'she said "no", he said "yes", ' * 20_000
    assert peek(chat(messages=[{"role": "user", "content": text}]), "chat").text_bytes == len(text)
