"""One call of an engine: the body it gets, and its faults in the client's terms."""

from collections.abc import Iterable

import msgspec

from gateway.api.body import ENGINE_HINTS, BodyFacts, edit
from gateway.api.errors import Problem
from gateway.api.headers import Header
from gateway.policy.outcome import Outcome
from gateway.policy.request import Priority
from gateway.upstream.client import Response, Upstream
from gateway.upstream.errors import ConnectFailed, FirstByteTimeout, IdleTimeout, UpstreamError
from gateway.upstream.upload import StreamedBody

ENGINE_IS_FULL = 503
"""An engine's own admission limit (vLLM, SGLang), or one that is loading its model: nothing was begun."""
NOT_IMPLEMENTED = 501
"""What some engines say to a kind of request that their model is not made for."""


def body_for(
    upstream: Upstream, body: bytes, facts: BodyFacts, priority: Priority, asks_for_usage: bool
) -> bytes:
    """The body as the engine gets it: as received, unless a field must change."""
    rank = engine_rank(upstream.address.engine_priority, priority)
    if not (asks_for_usage or facts.has_engine_hints or rank is not None):
        return body
    members = {} if rank is None else {"priority": b"%d" % rank}
    return edit(
        body, set_include_usage=asks_for_usage, drop=ENGINE_HINTS - members.keys(), set_members=members
    )


def engine_rank(engine: str, priority: Priority) -> int | None:
    """The class in the engine's own polarity: vLLM runs the lower number first, SGLang the higher."""
    if engine == "vllm":
        return int(priority)
    if engine == "sglang":
        return int(Priority.P2) - int(priority)
    return None


class NotReached(Problem):
    """No connection to the engine: it has nothing of the request."""


async def ask(
    upstream: Upstream, method: bytes, target: bytes, headers: list[Header], body: bytes | StreamedBody = b""
) -> Response:
    """Send a request and wait for the answer's head. Raises Problem (502, 504)."""
    try:
        return await upstream.send(method, target, headers, body)
    except UpstreamError as error:
        raise _problem(error) from error


async def read_all(response: Response, limit: int) -> bytes:
    """The whole body of an answer, while the client can still be told that there is none."""
    try:
        return await response.read_all(limit)
    except UpstreamError as error:
        raise _problem(error) from error


def is_broken_json(body: bytes, headers: Iterable[Header]) -> bool:
    """Whether a body is said to be JSON (lower-case names) and is none, of whatever type."""
    if not any(name == b"content-type" and b"json" in value.lower() for name, value in headers):
        return False
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except msgspec.DecodeError:
        return True
    return False


def shows_service(outcome: Outcome, status: int | None) -> bool | None:
    """Whether a request that ended so shows that its engine serves or that it does not; None where it shows
    neither. `status` is the engine's, None where it told none."""
    if outcome in (Outcome.UPSTREAM_REFUSED, Outcome.UPSTREAM_TIMEOUT, Outcome.UPSTREAM_ABORTED):
        return False
    if outcome is Outcome.COMPLETED:
        return True
    if outcome is not Outcome.UPSTREAM_ERROR or status is None:
        return None
    if status < 300 or status in (ENGINE_IS_FULL, NOT_IMPLEMENTED):
        return None  # under 300 it is an event inside a stream, which may be about that request only
    return status < 500


def _problem(error: UpstreamError) -> Problem:
    kind = NotReached if isinstance(error, ConnectFailed) else Problem
    timed_out = isinstance(error, FirstByteTimeout | IdleTimeout)
    if timed_out or (isinstance(error, ConnectFailed) and error.timed_out):
        return kind(Outcome.UPSTREAM_TIMEOUT, f"the engine did not answer in time: {error.message}")
    return kind(Outcome.UPSTREAM_REFUSED, f"the engine could not be used: {error.message}")
