"""Bodies of calls that generate nothing → prompts, or vLLM's error."""

from typing import Any

import msgspec
import pytest

from gateway.mock_backend.pooling_requests import (
    InputsCall,
    PairsCall,
    parse_inputs,
    parse_rerank,
    parse_score,
)
from gateway.mock_backend.request_errors import RequestError


def inputs(**fields: Any) -> InputsCall:
    return parse_inputs(msgspec.json.encode({"model": "m"} | fields), "m", max_model_len=1000)


def score(**fields: Any) -> PairsCall:
    return parse_score(msgspec.json.encode({"model": "m"} | fields), "m", max_model_len=1000)


def rerank(**fields: Any) -> PairsCall:
    body = {"model": "m", "query": "q", "documents": ["d"]} | fields
    return parse_rerank(msgspec.json.encode(body), "m", max_model_len=1000)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("12345", (2,)),
        (["1234", "12345", ""], (1, 2, 1)),
        ([5, 6, 7], (3,)),
        ([[5, 6, 7], [8, 9]], (3, 2)),
    ],
)
def test_an_input_is_text_or_token_ids_or_a_list_of_either(given: Any, tokens: tuple[int, ...]) -> None:
    assert inputs(input=given).prompts_tokens == tokens


def test_messages_are_one_input() -> None:
    messages = [{"role": "user", "content": "1234"}, {"content": [{"type": "text", "text": "56789"}]}]
    assert inputs(messages=messages).prompts_tokens == (3,)


@pytest.mark.parametrize(("first", "second"), [("text_1", "text_2"), ("data_1", "data_2")])
def test_one_text_is_scored_against_each_of_several(first: str, second: str) -> None:
    call = score(**{first: "1234", second: ["5678", "56789"]})
    assert call.pairs == (("1234", "5678"), ("1234", "56789"))
    assert call.prompts_tokens == (2, 3)


@pytest.mark.parametrize("second", ["items", "documents"])
def test_queries_are_scored_against_as_many_texts(second: str) -> None:
    assert score(**{"queries": ["a", "b"], second: ["c", "d"]}).pairs == (("a", "c"), ("b", "d"))


def test_a_ranking_takes_a_query_with_each_document() -> None:
    """Documents are texts or objects with a text; a `top_n` of 0 is none."""
    call = rerank(query="1234", documents=["5678", {"text": "56789"}], top_n=1)
    assert call.pairs == (("1234", "5678"), ("1234", "56789"))
    assert (call.prompts_tokens, call.top_n) == ((2, 3), 1)
    assert rerank(top_n=0).top_n is None


@pytest.mark.parametrize(
    ("call", "fields", "param"),
    [
        (inputs, {}, "input"),
        (inputs, {"input": []}, "input"),
        (inputs, {"input": ["a", 5]}, "input"),
        (inputs, {"input": {"a": 1}}, "body.input"),
        (inputs, {"input": "a", "dimensions": 0}, "dimensions"),
        (inputs, {"input": "a", "encoding_format": "roman"}, "encoding_format"),
        (inputs, {"input": "x" * 4001}, "input_tokens"),
        (score, {"text_1": "a"}, "text_1"),
        (score, {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        (score, {"text_1": [], "text_2": "c"}, "text_1"),
        (rerank, {"documents": []}, "documents"),
        (rerank, {"query": None}, "body.query"),
        (rerank, {"query": "x" * 4000}, "input_tokens"),
    ],
)
def test_what_cannot_be_worked_on_is_a_400_naming_the_field(call: Any, fields: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        call(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("call", [inputs, score, rerank])
def test_another_model_is_a_404(call: Any) -> None:
    with pytest.raises(RequestError) as caught:
        call(model="other")
    assert (caught.value.status, caught.value.type) == (404, "NotFoundError")
