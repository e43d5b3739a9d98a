"""What is seen of a form while its bytes pass, and what its sound costs."""

import itertools
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.audio_form import (
    AUDIO_BYTES_PER_TOKEN,
    AUDIO_TOKENS_PER_SECOND,
    PARTS_MAX,
    VALUE_BYTES_MAX,
    AudioForm,
    audio_facts,
    duration_usage,
)
from gateway.api.body import BadBody
from gateway.policy.input_estimator import AUDIO_TOKENS
from gateway.policy.request import Usage
from tests.support.forms import BOUNDARY, CONTENT_TYPE, field, file, form


def seen(body: bytes, cuts: list[int] | None = None) -> AudioForm:
    reader = AudioForm(CONTENT_TYPE)
    borders = [0, *sorted(cut % (len(body) + 1) for cut in cuts or []), len(body)]
    for start, end in itertools.pairwise(borders):
        reader.feed(body[start:end])
    return reader


def refusal(body: bytes) -> BadBody:
    with pytest.raises(BadBody) as caught:
        seen(body)
    return caught.value


# Sound holds anything, near misses of the boundary as well.
sounds = st.one_of(
    st.binary(max_size=300),
    st.lists(
        st.sampled_from([b"\r\n", b"\r\n--", BOUNDARY, BOUNDARY[:-1], b"x", b'name="model"', b"--"]),
        max_size=12,
    ).map(b"|".join),
)


@given(
    sounds,
    st.permutations(["model", "stream", "file", "language"]),
    st.booleans(),
    st.lists(st.integers(0, 10_000), max_size=20),
)
def test_any_split_of_a_form_gives_the_same_facts(
    sound: bytes, order: list[str], stream: bool, cuts: list[int]
) -> None:
    """Wherever the fields stand and wherever the bytes are cut."""
    parts = {
        "model": field("model", "whisper-1"),
        "stream": field("stream", "true" if stream else "False"),
        "file": file("file", sound),
        "language": field("language", "model"),
    }
    body = form(*(parts[name] for name in order))
    for reader in (seen(body, cuts), seen(body), seen(body, list(range(len(body))))):
        assert (reader.model, reader.stream) == ("whisper-1", stream)


def test_the_model_is_known_as_soon_as_its_field_has_ended() -> None:
    """The rest of the form need not be there."""
    reader = AudioForm(CONTENT_TYPE)
    head, _, rest = form(field("model", "whisper-1"), file("file", b"x" * 1000)).partition(b"whisper-1")
    reader.feed(head + b"whisper-1")
    assert reader.model is None  # it may go on
    reader.feed(rest[: rest.index(BOUNDARY) + len(BOUNDARY) + 2])
    assert reader.model == "whisper-1"


def test_what_looks_like_a_field_inside_the_sound_is_sound() -> None:
    """Only the boundary makes a field."""
    trap = b"\r\n--other\r\n" + field("model", "trap").removeprefix(b"--" + BOUNDARY + b"\r\n")
    assert seen(form(field("model", "whisper-1"), file("file", trap))).model == "whisper-1"


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("on", True), ("0", False), ("", False)])
def test_booleans_as_forms_write_them(value: str, expected: bool) -> None:
    """In the words that engines take."""
    assert seen(form(field("model", "m"), field("stream", value))).stream is expected


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([field("model", "a"), field("model", "b")], "model"),
        ([field("stream", "true"), file("file", b"x"), field("stream", "true")], "stream"),
        ([file("model", b"a")], "model"),
        ([field("model", "")], "model"),
        ([field("model", "m" * (VALUE_BYTES_MAX + 1))], "model"),
        ([field("model", "m"), field("stream", "perhaps")], "stream"),
        ([field("priority", "-1")], "priority"),
        ([field("request_id", "another's")], "request_id"),
        ([b"--" + BOUNDARY + b'\r\ncontent-disposition: form-data; name="model"\r\n\r\n\xff\r\n'], "model"),
    ],
)
def test_fields_that_mean_nothing_or_two_things(parts: list[bytes], param: str) -> None:
    """Refused by name, wherever they stand."""
    assert refusal(form(*parts)).param == param


@pytest.mark.parametrize(
    "disposition",
    [
        b"form-data; name*=utf-8''model",
        b"form-data; name=\"x\"; name*=utf-8''model",
        b'form-data; name="x"; name="model"',
        b'form-data; name="x"; NAME="model"',
        b"form-data",
        b'form-data; name="x"\r\ncontent-disposition: form-data; name="model"',
    ],
)
def test_names_that_two_readers_could_read_differently(disposition: bytes) -> None:
    """One plain name for each field, or none of the form is taken."""
    head = b"--" + BOUNDARY + b"\r\nContent-Disposition: " + disposition
    assert refusal(form(head + b"\r\n\r\nvalue\r\n")).code == "invalid_form"


@pytest.mark.parametrize(
    "body",
    [
        b"no form at all",
        b"--" + BOUNDARY + b"x\r\n",
        b"--" + BOUNDARY + b"\r\nbad header\r\n\r\n",
        b"--" + BOUNDARY + b"\r\nx: " + b"y" * 10_000,
        form(*[field("a", "b")] * (PARTS_MAX + 1)),
    ],
    ids=["other", "boundary", "header", "long header", "many fields"],
)
def test_what_is_no_form_is_refused(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """With a word for its sender, and not one in the log."""
    caplog.set_level(logging.DEBUG)
    assert refusal(body).code == "invalid_form"
    assert caplog.records == []


@given(st.binary(max_size=200), st.lists(st.integers(0, 1000), max_size=5))
def test_garbage_is_refused_or_passed(body: bytes, cuts: list[int]) -> None:
    """Nothing else is raised."""
    try:
        seen(body, cuts)
    except BadBody:
        pass


@pytest.mark.parametrize(
    "content_type",
    [
        b"",
        b"application/json",
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b"text/plain; boundary=x",
        b"multipart/form-data; boundary=" + b"x" * 300,
    ],
)
def test_bodies_that_say_they_are_no_form(content_type: bytes) -> None:
    """Known before a byte of the body."""
    with pytest.raises(BadBody) as caught:
        AudioForm(content_type)
    assert caught.value.param == "content-type"


# ---------------------------------------------------------------------- cost


def test_sound_costs_by_its_size() -> None:
    """A minute of 128 kbit/s is 60 × 50 tokens; of what nobody knows the length the usual part is taken."""
    assert audio_facts("m", stream=False, body_bytes=60 * 16_000).exact_tokens == 60 * AUDIO_TOKENS_PER_SECOND
    assert audio_facts("m", stream=False, body_bytes=1).exact_tokens == 1
    assert audio_facts("m", stream=True, body_bytes=None).exact_tokens == AUDIO_TOKENS
    assert 16_000 / AUDIO_BYTES_PER_TOKEN == AUDIO_TOKENS_PER_SECOND


def told(usage: object, **members: object) -> Usage | None:
    return duration_usage(json.dumps({"usage": usage, **members}).encode(), 256)


def test_seconds_that_an_engine_tells_are_paid() -> None:
    """And the text by its bytes, where there is one."""
    assert told({"type": "duration", "seconds": 12}, text="hello, you") == Usage(600, 3)
    assert told({"type": "duration", "seconds": 0.5}, text="") == Usage(25, 0)
    assert told({"seconds": 2}) == Usage(100, 256)
    assert told({"seconds": 1}, text="😀") == Usage(50, 1)


@pytest.mark.parametrize("usage", [None, {}, {"seconds": -1}, {"seconds": 1e9}, {"seconds": "x"}, 3, []])
def test_what_tells_no_seconds(usage: object) -> None:
    """Then the estimate stands."""
    assert told(usage, text="hello") is None


@pytest.mark.parametrize("answer", [b"", b"hello", b"[]", b"1\n00:00 --> 00:01\nhello", b'{"text": "a"}'])
def test_answers_that_are_only_text(answer: bytes) -> None:
    """Subtitles and plain text tell nothing."""
    assert duration_usage(answer, 256) is None
