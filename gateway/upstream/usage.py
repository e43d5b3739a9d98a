"""What an engine says a request has used.

The three families of names mean the same with one exception: `input_tokens` of an Anthropic-style answer
leaves out what came from the prefix cache or went into it, everybody else's counts it. A `Usage` always
counts it.
"""

import json
from typing import Any, NamedTuple

import msgspec

from gateway.policy.request import Usage


class PlainAnswer(NamedTuple):
    """What a body shows of an answer that is not streamed."""

    is_valid: bool
    """It is what a 200 must carry: a JSON object. Anything else is a fault of the engine."""
    usage: Usage | None = None
    reports_failure: bool = False
    """A 200 whose body says that it is none: an `error`, or a response whose `status` is `failed`."""


class _Answer(msgspec.Struct):
    usage: Any = None
    error: Any = None
    status: Any = None


_ANSWER = msgspec.json.Decoder(_Answer)
_BAD = -1


def parse_usage(reported: object, before: Usage | None = None) -> Usage | None:
    """The reading in a decoded `usage` object; `before` is what an earlier chunk of the same stream said.

    Counts in a stream are running totals, so a reading replaces the one before, taking over its input where
    it names only the output. A reading without output adds nothing, and a count that is negative or no
    integer spoils it: then the answer is `before`.
    """
    if not isinstance(reported, dict):
        return before
    inputs = _count(reported, "prompt_tokens", "input_tokens")
    outputs = _count(reported, "completion_tokens", "output_tokens")
    read = _count(reported, "cache_read_input_tokens")
    cached = _cached(reported) if read is None else read
    if inputs is not None and inputs >= 0:
        written = _count(reported, "cache_creation_input_tokens")
        inputs += max(read or 0, 0) + max(written or 0, 0)
    elif inputs is None and before:
        inputs = before.input_tokens
        cached = before.cached_tokens if cached is None else cached
    elif inputs is None:
        inputs = _count(reported, "total_tokens")
    if outputs is None:
        if before:
            return before
        outputs = 0
    if inputs is None or inputs < 0 or outputs < 0:
        return before
    return Usage(inputs, outputs, min(max(cached or 0, 0), inputs))


def inspect_answer(body: bytes) -> PlainAnswer:
    """A plain JSON answer: chat, completions, responses, messages, embeddings, rerank."""
    try:
        answer = _ANSWER.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return _inspect_leniently(body)
    return _summary(answer.usage, answer.error, answer.status)


def _inspect_leniently(body: bytes) -> PlainAnswer:
    # NaN and half a surrogate pair are no JSON, but engines written in Python emit them and most clients read
    # them, so they do not turn a 200 into a fault.
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return PlainAnswer(is_valid=False)
    if not isinstance(answer, dict):
        return PlainAnswer(is_valid=False)
    return _summary(answer.get("usage"), answer.get("error"), answer.get("status"))


def _summary(usage: object, error: object, status: object) -> PlainAnswer:
    return PlainAnswer(True, parse_usage(usage), reports_failure=error is not None or status == "failed")


def _cached(reported: dict[str, Any]) -> int | None:
    for key in ("prompt_tokens_details", "input_tokens_details"):
        details = reported.get(key)
        if isinstance(details, dict):
            return _count(details, "cached_tokens")
    return None


def _count(reported: dict[str, Any], *names: str) -> int | None:
    """The count under the first of its names that is there; None without any, `_BAD` if it is no count."""
    for name in names:
        value = reported.get(name)
        if value is not None:
            return value if type(value) is int and value >= 0 else _BAD
    return None
