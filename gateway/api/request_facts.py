"""HTTP request → the facts the policy decides on."""

from collections.abc import Sequence
from math import isfinite

from msgspec import structs

from gateway.api.access import KEY_HEADERS, Caller
from gateway.api.body import BadBody, BodyFacts, peek, peek_model
from gateway.api.body_text import TextCount
from gateway.api.endpoints import Endpoint, Use
from gateway.api.errors import Problem
from gateway.api.request_body import BODY_HEADERS
from gateway.policy.admission import Admission
from gateway.policy.classification import (
    ClaimAboveCeiling,
    ClaimError,
    ClassificationRules,
    Classified,
    Entitlement,
    classify,
)
from gateway.policy.clock import to_nanoseconds
from gateway.policy.outcome import Outcome
from gateway.policy.request import Ask, Priority

Header = tuple[bytes, bytes]

CLIENT_TIMEOUT_HEADERS = (b"x-stainless-read-timeout", b"x-stainless-timeout")
RETRY_COUNT_HEADER = b"x-stainless-retry-count"
SUBTENANT_HEADERS = (b"x-llm-d-inference-fairness-id", b"openai-project")
REQUEST_ID_HEADER = b"x-request-id"
SUBTENANT_BYTES_MAX = 128
REQUEST_ID_BYTES_MAX = 128


def door_headers(priority_headers: frozenset[bytes]) -> frozenset[bytes]:
    """All that anybody here looks at in a request's head; the rest is the engine's."""
    own = {*KEY_HEADERS, *CLIENT_TIMEOUT_HEADERS, RETRY_COUNT_HEADER, *SUBTENANT_HEADERS, REQUEST_ID_HEADER}
    return priority_headers | BODY_HEADERS | own


def read_body(body: bytes, endpoint: Endpoint, count: TextCount) -> BodyFacts:
    """The facts, and in `count` the texts. Raises Problem (400) naming the field that is wrong."""
    assert endpoint.dialect is not None
    try:
        facts = peek(body, endpoint.dialect, count)
    except BadBody as bad:
        raise _problem(bad) from None
    if endpoint.use is Use.READ:  # whatever the body says, nothing is generated and nothing streamed
        return structs.replace(facts, stream=False, max_output_tokens=0, sequences=facts.prompts)
    return facts


def read_model(body: bytes) -> str | None:
    """The model that the body of a request for help names, if it names one. Raises Problem (400)."""
    try:
        return peek_model(body) if body else None
    except BadBody as bad:
        raise _problem(bad) from None


def _problem(bad: BadBody) -> Problem:
    return Problem(Outcome.BAD_REQUEST, bad.message, param=bad.param, code=bad.code)


def classify_request(
    headers: Sequence[Header],
    priority_headers: frozenset[bytes],
    facts: BodyFacts,
    endpoint: Endpoint,
    caller: Caller,
    rules: ClassificationRules,
) -> Classified:
    """Raises Problem: 400 naming the header, or 403 where the rules refuse a claim above the ceiling."""
    claims = [(name, value.decode("latin-1")) for name, value in headers if name in priority_headers]
    try:
        return classify(
            [value for _, value in claims], facts.service_tier, endpoint.path, caller.entitlement, rules
        )
    except ClaimError as error:
        name = _faulty(claims).decode("ascii")
        message = f"header {name}: {error}"
        raise Problem(Outcome.BAD_REQUEST, message, param=name, code="invalid_priority") from None
    except ClaimAboveCeiling as error:
        raise Problem(Outcome.FORBIDDEN, str(error), code="priority_not_allowed") from None


def _faulty(claims: Sequence[tuple[bytes, str]]) -> bytes:
    """The header that makes no sense by itself; the last one where only together they make none."""
    for name, value in claims:
        try:
            classify([value], None, "", Entitlement(), ClassificationRules())
        except ClaimError:
            return name
    return claims[-1][0]


def default_class(caller: Caller, rules: ClassificationRules) -> Priority:
    """The class of the caller's requests that do not say one."""
    return classify([], None, "", caller.entitlement, rules).granted


def build_ask(
    request_id: str,
    facts: BodyFacts,
    classified: Classified,
    caller: Caller,
    body_bytes: int,
    headers: Sequence[Header],
    admission: Admission,
) -> Ask:
    return Ask(
        request_id=request_id,
        priority=classified.granted,
        tenant=caller.tenant,
        model=facts.model,
        input_tokens=admission.input_estimator.estimate(
            facts.model, facts.text, facts.exact_tokens, facts.images, facts.audio_parts
        ),
        max_output_tokens=facts.max_output_tokens,
        sequences=facts.sequences,
        prompts=facts.prompts,
        body_bytes=body_bytes,
        streaming=facts.stream,
        client_timeout_ns=client_timeout_ns(headers),
        key=caller.key,
        fairness_id=fairness_id(headers, caller),
        claimed=classified.claimed if classified.claimed is not classified.granted else None,
    )


def fairness_id(headers: Sequence[Header], caller: Caller) -> str | None:
    """The sub-tenant named by a request whose key is trusted to name one, under its tenant's name."""
    if not caller.trusts_subtenant:
        return None
    for wanted in SUBTENANT_HEADERS:
        for name, value in headers:
            if name == wanted and value:
                return f"{caller.tenant}/{value[:SUBTENANT_BYTES_MAX].decode('latin-1')}"
    return None


def client_timeout_ns(headers: Sequence[Header]) -> int | None:
    """How long the client says it will wait, by what the SDKs send; a word that makes no sense is ignored."""
    shortest: int | None = None
    for name, value in headers:
        if name in CLIENT_TIMEOUT_HEADERS:
            try:
                seconds = float(value)
            except ValueError:
                continue
            if isfinite(seconds) and seconds > 0:
                told = to_nanoseconds(min(seconds, 1e6))
                shortest = told if shortest is None else min(shortest, told)
    return shortest


def retry_count(headers: Sequence[Header]) -> int:
    """How often the client's SDK has sent this request before."""
    for name, value in headers:
        if name == RETRY_COUNT_HEADER and value.isdigit() and len(value) < 4:
            return int(value)
    return 0


def client_request_id(headers: Sequence[Header]) -> str | None:
    """The id the client gave, if it is one that may stand in a header and a log line."""
    for name, value in headers:
        if name == REQUEST_ID_HEADER and 0 < len(value) <= REQUEST_ID_BYTES_MAX:
            text = value.decode("latin-1")
            if text.isascii() and text.isprintable() and " " not in text:
                return text
    return None
