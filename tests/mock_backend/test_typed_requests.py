"""Bodies of `/v1/responses` and `/v1/messages` → what to generate, or vLLM's error."""

from typing import Any

import msgspec
import pytest

from gateway.mock_backend.openai_requests import Generation
from gateway.mock_backend.request_errors import RequestError, queue_full
from gateway.mock_backend.typed_requests import parse_message, parse_response


def response(**fields: Any) -> Generation:
    return parse_response(msgspec.json.encode({"model": "m", "input": "12345"} | fields), "m", 1000)


def message(**fields: Any) -> Generation:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "12345"}]} | fields
    return parse_message(msgspec.json.encode(body), "m", 1000)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 2),
        ({"instructions": "123"}, 2),
        ({"instructions": "1234"}, 3),
        ({"input": [{"role": "user", "content": "12345678"}]}, 2),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "12345678"}]}]}, 2),
        ({"input": [{"type": "function_call_output", "output": "12345678"}]}, 1),
        ({"input": ""}, 1),
    ],
)
def test_the_prompt_of_a_response(fields: dict[str, Any], tokens: int) -> None:
    assert response(**fields).prompts_tokens == (tokens,)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 2),
        ({"system": "1234"}, 3),
        ({"system": [{"type": "text", "text": "1234"}]}, 3),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "12345678"}]}]}, 2),
    ],
)
def test_the_prompt_of_a_message(fields: dict[str, Any], tokens: int) -> None:
    assert message(**fields).prompts_tokens == (tokens,)


@pytest.mark.parametrize(
    ("fields", "tokens", "reason"),
    [
        ({}, 128, "stop"),
        ({"max_output_tokens": 7}, 7, "length"),
        ({"max_output_tokens": 7, "min_tokens": 5}, 5, "stop"),
        ({"max_tokens": 7}, 128, "stop"),
    ],
)
def test_the_length_of_a_response(fields: dict[str, Any], tokens: int, reason: str) -> None:
    asked = response(**fields)
    assert (asked.output_tokens, asked.finish_reason) == (tokens, reason)


def test_the_rest_of_a_call() -> None:
    for parse in (response, message):
        asked = parse(stream=True, priority=-3, temperature=0, frobnicate={"a": 1})
        assert (asked.stream, asked.priority, asked.n, asked.include_usage) == (True, -3, 1, False)


@pytest.mark.parametrize(
    ("parse", "fields", "status", "param"),
    [
        (response, {"model": "other"}, 404, "model"),
        (response, {"input": 5}, 400, "body.input"),
        (response, {"max_output_tokens": 0}, 400, "max_output_tokens"),
        (response, {"max_output_tokens": 1001}, 400, "max_output_tokens"),
        (response, {"max_output_tokens": 7, "min_tokens": 8}, 400, "min_tokens"),
        (response, {"input": "x" * 4004}, 400, "input_tokens"),
        (message, {"model": "other"}, 404, "model"),
        (message, {"messages": []}, 400, "messages"),
        (message, {"max_tokens": None}, 400, "body.max_tokens"),
        (message, {"max_tokens": 999}, 400, "input_tokens"),
    ],
)
def test_what_is_wrong_is_named(parse: Any, fields: dict[str, Any], status: int, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(**fields)
    assert (refused.value.status, refused.value.param) == (status, param)


def test_anthropics_paths_have_its_form_of_error() -> None:
    """But for what was no valid call at all, which vLLM refuses before it knows the path's form."""
    error = msgspec.json.decode(queue_full().body("/v1/messages"))
    assert list(error) == ["type", "error"]
    assert error["error"].keys() == {"type", "message"}
    assert msgspec.json.decode(queue_full().body("/v1/responses"))["error"]["code"] == 503
    with pytest.raises(RequestError) as refused:
        parse_message(b"{", "m", 1000)
    assert msgspec.json.decode(refused.value.body("/v1/messages"))["error"]["code"] == 400
