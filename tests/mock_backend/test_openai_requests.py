"""Bodies in all their shapes → prompts, lengths and options, or vLLM's error."""

from typing import Any

import msgspec
import pytest

from gateway.mock_backend.openai_requests import Generation, parse_chat, parse_completion
from gateway.mock_backend.request_errors import RequestError


def chat(**fields: Any) -> Generation:
    body = {"model": "m", "messages": [{"role": "user", "content": "12345"}]} | fields
    return parse_chat(msgspec.json.encode(body), "m", max_model_len=1000)


def completion(**fields: Any) -> Generation:
    return parse_completion(msgspec.json.encode({"model": "m"} | fields), "m", max_model_len=1000)


@pytest.mark.parametrize(
    ("messages", "tokens"),
    [
        ([{"role": "user", "content": "12345678"}], 2),
        ([{"role": "user", "content": "123456789"}], 3),
        ([{"role": "system", "content": "12"}, {"role": "user", "content": "34"}], 1),
        ([{"role": "user", "content": "ééé"}], 2),
        ([{"role": "user", "content": [{"type": "text", "text": "1234"}, {"type": "text", "text": "5"}]}], 2),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], 1),
        ([{"role": "assistant", "content": None, "tool_calls": []}], 1),
        ([{"role": "user", "content": ""}], 1),
    ],
)
def test_a_chat_prompt_has_a_token_for_each_4_bytes_of_text(messages: list[Any], tokens: int) -> None:
    assert chat(messages=messages).prompts_tokens == (tokens,)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("12345", (2,)),
        (["1234", "12345", ""], (1, 2, 1)),
        ([5, 6, 7], (3,)),
        ([[5, 6, 7], [8]], (3, 1)),
    ],
)
def test_a_completion_takes_text_token_ids_and_lists_of_both(prompt: Any, tokens: tuple[int, ...]) -> None:
    assert completion(prompt=prompt).prompts_tokens == tokens


@pytest.mark.parametrize(
    ("fields", "tokens", "reason"),
    [
        ({}, 128, "stop"),
        ({"max_tokens": 7}, 7, "length"),
        ({"max_completion_tokens": 8}, 8, "length"),
        ({"max_tokens": 7, "max_completion_tokens": 8}, 8, "length"),
        ({"max_tokens": None}, 128, "stop"),
        ({"min_tokens": 5}, 5, "stop"),
        ({"min_tokens": 300}, 300, "stop"),
        ({"min_tokens": 0}, 128, "stop"),
        ({"min_tokens": 5, "max_tokens": 9}, 5, "stop"),
        ({"min_tokens": 9, "max_tokens": 9}, 9, "length"),
    ],
)
def test_an_answer_has_128_tokens_unless_asked_otherwise(
    fields: dict[str, Any], tokens: int, reason: str
) -> None:
    asked = chat(**fields)
    assert (asked.output_tokens, asked.finish_reason) == (tokens, reason)


def test_the_default_length_shrinks_to_what_the_context_leaves() -> None:
    assert completion(prompt=[1] * 950).output_tokens == 50


def test_n_answers_to_each_prompt_make_choices_prompt_by_prompt() -> None:
    assert completion(prompt=["1234", "12345"], n=2).choices_prompt_tokens() == [1, 1, 2, 2]


def test_usage_in_a_stream_is_by_request_and_on_each_chunk_only_with_it() -> None:
    def options(**options: bool) -> tuple[bool, bool]:
        asked = chat(stream=True, stream_options=options)
        return asked.include_usage, asked.continuous_usage

    assert options() == (False, False)
    assert options(include_usage=True) == (True, False)
    assert options(include_usage=True, continuous_usage_stats=True) == (True, True)
    assert options(continuous_usage_stats=True) == (False, False)


def test_unknown_fields_and_a_missing_model_are_no_obstacle() -> None:
    body = b'{"messages":[{"content":"x","name":"n"}],"temperature":0,"frobnicate":{"a":1},"priority":-3}'
    assert parse_chat(body, "m", 1000).priority == -3


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 1001}, 400, "max_tokens"),
        ({"max_tokens": 999}, 400, "input_tokens"),
        ({"max_tokens": "ten"}, 400, "body.max_tokens"),
        ({"min_tokens": -1}, 400, "min_tokens"),
        ({"min_tokens": 8, "max_tokens": 7}, 400, "min_tokens"),
        ({"n": 0}, 400, "n"),
        ({"n": 1_000_000_000}, 400, "n"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"content": 3}]}, 400, "body.messages[0].content"),
        ({"stream": "yes"}, 400, "body.stream"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], status: int, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param) == (status, param)


@pytest.mark.parametrize("prompt", [[], ["text", 1], [[1], 2], {"text": "x"}, None])
def test_a_prompt_of_another_shape_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError) as refused:
        completion(prompt=prompt)
    assert refused.value.status == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"messages":[{"content":"\\ud800"}]}'])
def test_what_is_no_json_object_is_refused_as_a_bad_request(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(RequestError) as refused:
            parse(body, "m", 1000)
        assert refused.value.status == 400
        assert msgspec.json.decode(refused.value.body())["error"]["type"] == "Bad Request"
