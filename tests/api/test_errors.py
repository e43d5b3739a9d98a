"""Outcome → what a client is told: the table is complete, and the advice is usable."""

import json

import pytest

from gateway.api.error_forms import ANTHROPIC, OPENAI, RESPONSES, anthropic_type
from gateway.api.errors import SHAPES, STATUS_WITHOUT_BODY, Problem, status_of
from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.outcome import Outcome
from gateway.policy.request import Priority, Refusal

STATUSES = {
    Outcome.COMPLETED: 200,
    Outcome.REJECTED_RATE: 429,
    Outcome.REJECTED_QUEUE_FULL: 429,
    Outcome.QUEUE_TIMEOUT: 429,
    Outcome.REJECTED_NO_UPSTREAM: 503,
    Outcome.REJECTED_DRAINING: 503,
    Outcome.UNAUTHORIZED: 401,
    Outcome.FORBIDDEN: 403,
    Outcome.NOT_FOUND: 404,
    Outcome.BAD_REQUEST: 400,
    Outcome.TOO_LARGE: 413,
    Outcome.UPSTREAM_REFUSED: 502,
    Outcome.UPSTREAM_TIMEOUT: 504,
    Outcome.UPSTREAM_ERROR: 502,
    Outcome.UPSTREAM_ABORTED: 502,
    Outcome.CLIENT_GONE_QUEUED: 499,
    Outcome.CLIENT_GONE_STREAMING: 499,
    Outcome.CLIENT_STALLED: 499,
    Outcome.INTERNAL_ERROR: 500,
}


@pytest.mark.parametrize("outcome", Outcome)
def test_every_ending_has_one_status(outcome: Outcome) -> None:
    """Each is in one of the two tables, and in no more than one."""
    assert (outcome in SHAPES) != (outcome in STATUS_WITHOUT_BODY)
    assert status_of(outcome) == STATUSES[outcome]


@pytest.mark.parametrize("outcome", SHAPES)
def test_every_problem_is_of_openais_shape(outcome: Outcome) -> None:
    """Message, type, param and code, all of them there; a class to retry has advice, the caller's own not."""
    problem = Problem(outcome, "why", param="field")
    error = json.loads(problem.body())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["message"], error["param"]) == ("why", "field")
    assert error["type"]
    assert error["code"]
    assert bool(problem.retry_headers(lambda: 0.0)) == (problem.status in (429, 502, 503, 504))


@pytest.mark.parametrize("outcome", SHAPES)
def test_every_problem_has_a_form_in_every_api(outcome: Outcome) -> None:
    """The same message everywhere; the responses API refuses as OpenAI's others do."""
    problem = Problem(outcome, 'why "so"?\n')
    assert OPENAI.body(problem) == RESPONSES.body(problem) == problem.body()
    assert json.loads(ANTHROPIC.body(problem)) == {
        "type": "error",
        "error": {"type": anthropic_type(problem.status), "message": problem.message},
    }


@pytest.mark.parametrize(
    ("status", "type"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_anthropics_word_for_a_status(status: int, type: str) -> None:
    """Its clients tell errors apart by it."""
    assert anthropic_type(status) == type


def test_the_last_event_of_a_broken_stream() -> None:
    """One event in the form of the stream's others: a chunk, or a named one, numbered where all are."""
    problem = Problem(Outcome.UPSTREAM_ABORTED, "why")
    assert OPENAI.event(problem, 7) == b"data: " + problem.body() + b"\n\n"
    assert ANTHROPIC.event(problem, 7) == b"event: error\ndata: " + ANTHROPIC.body(problem) + b"\n\n"
    name, data, *rest = RESPONSES.event(problem, 7).split(b"\n")
    assert (name, rest) == (b"event: error", [b"", b""])
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "code": "upstream_aborted",
        "message": "why",
        "param": None,
        "sequence_number": 7,
    }


def advice(refusal: Refusal, random: float, priority: Priority = Priority.P1) -> dict[bytes, bytes]:
    problem = Problem.of_refusal(refusal, priority, probe_seconds=7.0)
    return dict(problem.retry_headers(lambda: random))


@pytest.mark.parametrize(
    ("wait", "random", "seconds", "milliseconds"),
    [
        (2.0, 0.0, b"2", b"2000"),
        (2.0, 1.0, b"3", b"2800"),
        (0.0, 0.5, b"1", b"1"),
        (50.0, 1.0, b"60", b"60000"),
    ],
)
def test_advice_is_the_wait_and_some_jitter(
    wait: float, random: float, seconds: bytes, milliseconds: bytes
) -> None:
    """Whole seconds of at least one, exact milliseconds, up to 40 % more, and never above a minute."""
    told = advice(Refusal(Outcome.REJECTED_RATE, "", round(wait * NANOSECONDS_PER_SECOND)), random)
    assert told == {b"retry-after": seconds, b"retry-after-ms": milliseconds}


@pytest.mark.parametrize("wait_ns", [61 * NANOSECONDS_PER_SECOND, None])
def test_a_wait_that_is_too_long_is_no_reason_to_retry(wait_ns: int | None) -> None:
    """Over a minute, or for ever: an SDK shall not come back by itself."""
    told = advice(Refusal(Outcome.REJECTED_RATE, "", wait_ns), 0.0)
    assert told[b"x-should-retry"] == b"false"
    assert told[b"retry-after"] == b"60"


def test_an_engine_that_is_down_is_asked_for_again_after_its_next_probe() -> None:
    """Nobody can know sooner that it is back."""
    assert advice(Refusal(Outcome.REJECTED_NO_UPSTREAM, ""), 0.0)[b"retry-after"] == b"7"


def test_a_batch_request_that_waited_in_vain_is_told_in_its_own_words() -> None:
    """P2 gets the code that SDKs know from the batch tier."""
    late = Refusal(Outcome.QUEUE_TIMEOUT, "", None)
    assert Problem.of_refusal(late, Priority.P2, 2.0).code == "resource_unavailable"
    assert Problem.of_refusal(late, Priority.P1, 2.0).code == "slow_down"
