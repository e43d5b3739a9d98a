"""The gateway's own errors as each API writes them: a refusal's body, and the last event of a broken stream.

OpenAI's paths have `{"error": {message, type, param, code}}`; its responses API gives a stream's error the
form of its other events. Anthropic's have `{"type": "error", "error": {type, message}}`, types by the status.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from gateway.api.errors import Problem, error_body

_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic itself has 529 in the place of 503, a status that few other clients know."""


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """`event` gets the number that the next event of a numbered stream would have."""

    body: Callable[[Problem], bytes]
    event: Callable[[Problem, int], bytes]


def _chunk(problem: Problem, number: int) -> bytes:
    return b"data: " + error_body(problem.message, problem.type, None, problem.code) + b"\n\n"


def _typed_event(problem: Problem, number: int) -> bytes:
    error = {"type": "error", "code": problem.code, "message": problem.message, "param": None}
    return b"event: error\ndata: " + msgspec.json.encode(error | {"sequence_number": number}) + b"\n\n"


def anthropic_type(status: int) -> str:
    """The word for a status; of a 4xx or 5xx without one of its own, that for all of them."""
    return _ANTHROPIC_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")


def _anthropic_body(problem: Problem) -> bytes:
    error = {"type": anthropic_type(problem.status), "message": problem.message}
    return msgspec.json.encode({"type": "error", "error": error})


def _anthropic_event(problem: Problem, number: int) -> bytes:
    return b"event: error\ndata: " + _anthropic_body(problem) + b"\n\n"


OPENAI = ErrorForm(Problem.body, _chunk)
RESPONSES = ErrorForm(Problem.body, _typed_event)
ANTHROPIC = ErrorForm(_anthropic_body, _anthropic_event)
