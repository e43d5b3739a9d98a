"""One `Usage`, whatever an engine calls its counts."""

import json

import pytest

from gateway.upstream.usage import PlainAnswer, Usage, inspect_answer


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 42, "total_tokens": 46, "completion_tokens": 4}, Usage(42, 4)),
        ({"prompt_tokens": 42, "completion_tokens": 4, "prompt_tokens_details": None}, Usage(42, 4)),
        (
            {"prompt_tokens": 42, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 41}},
            Usage(42, 4, 41),
        ),
        (
            {"input_tokens": 17, "output_tokens": 8, "input_tokens_details": {"cached_tokens": 16}},
            Usage(17, 8, 16),
        ),
        ({"input_tokens": 14, "output_tokens": 8}, Usage(14, 8)),
        ({"input_tokens": 10, "output_tokens": 8, "cache_read_input_tokens": 4}, Usage(14, 8, 4)),
        (
            {
                "input_tokens": 10,
                "output_tokens": 8,
                "cache_read_input_tokens": 0,
                "cache_creation_input_tokens": 5,
            },
            Usage(15, 8, 0),
        ),
        ({"prompt_tokens": 9, "total_tokens": 9}, Usage(9, 0)),
        ({"total_tokens": 9}, Usage(9, 0)),
        ({"prompt_tokens": -9, "total_tokens": 9}, None),
        ({"type": "duration", "seconds": 3}, None),
        ({}, None),
        (None, None),
        ([1], None),
    ],
)
def test_the_usage_of_a_plain_answer(usage: object, expected: Usage | None) -> None:
    """Chat, completions, responses, messages, embeddings, rerank."""
    body = json.dumps({"id": "x", "choices": [], "usage": usage}).encode()
    assert inspect_answer(body) == PlainAnswer(True, expected)


@pytest.mark.parametrize(
    "body", [b"{}", b' {"a": 1}\n', b'{"logprob": NaN}', b'{"text": "\\ud83d"}', b'{"usage": 1e999}']
)
def test_an_object_is_a_valid_answer(body: bytes) -> None:
    """So is one that only strict readers refuse."""
    assert inspect_answer(body).is_valid


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"a":1', b"[]", b"null", b"7", b"<html>", b"\xff\xfe", b"[" * 50_000, b'{"a":' * 50_000],
)
def test_anything_else_is_a_fault_of_the_engine(body: bytes) -> None:
    """A 200 with half a body is none."""
    assert inspect_answer(body) == PlainAnswer(False)


def test_the_usage_behind_a_nan_is_still_read() -> None:
    """The charge does not depend on a log probability."""
    body = b'{"logprob": NaN, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'
    assert inspect_answer(body).usage == Usage(3, 2)


@pytest.mark.parametrize(
    ("body", "failed"),
    [
        (b'{"status":"failed","error":{"code":"server_error","message":"x"}}', True),
        (b'{"error":{"message":"x","code":500}}', True),
        (b'{"status":"completed","error":null}', False),
        (b'{"status":"incomplete"}', False),
        (b'{"a":NaN,"error":{"message":"x"}}', True),
    ],
)
def test_an_answer_that_reports_a_failure(body: bytes, failed: bool) -> None:
    """A 200 may carry word of a failure, in the API of responses as its status, elsewhere as an error."""
    assert inspect_answer(body).reports_failure is failed
