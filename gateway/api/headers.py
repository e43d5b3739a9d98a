"""Headers across the gateway: what passes, what does not, and what it adds.

Hop-by-hop headers and the content coding are the gateway's own business in both directions. Of the
client's headers its credentials, its cookies and its hints to the engine stay here; of the engine's those
that the gateway says itself.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from urllib.parse import unquote_to_bytes

from gateway.policy.clock import NANOSECONDS_PER_SECOND

Header = tuple[bytes, bytes]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

_NOT_SENT_UP = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"content-type",
    b"expect",
    b"accept-encoding",
    b"authorization",
    b"x-api-key",
    b"api-key",
    b"x-goog-api-key",
    b"cookie",
    b"x-request-id",
    b"x-vllm-priority",
    b"x-data-parallel-rank",
    b"x-llm-d-inference-fairness-id",
    b"openai-project",
}
_NOT_SENT_DOWN = HOP_BY_HOP | {
    b"content-length",
    b"date",
    b"server",
    b"via",
    b"alt-svc",
    b"set-cookie",
    b"x-request-id",
}
_NOTHING: frozenset[bytes] = frozenset()
_OWN_PREFIXES = (b"x-qos-", b"x-ratelimit-")

STREAM_HEADERS: tuple[Header, ...] = (
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)

_CREDENTIAL_PARAMETERS = frozenset({b"key", b"apikey", b"token", b"accesstoken", b"authorization"})
"""In lower case, without hyphens and underscores."""


def without_credentials(query: bytes) -> bytes:
    """The query string without the parameters in which some clients send a key."""
    if b"=" not in query:
        return query
    return b"&".join(part for part in query.split(b"&") if not _is_credential(part))


def _is_credential(parameter: bytes) -> bool:
    name = unquote_to_bytes(parameter.partition(b"=")[0]).lower()
    return name.translate(None, b"-_") in _CREDENTIAL_PARAMETERS


def named_by_connection(headers: Iterable[Header]) -> frozenset[bytes]:
    """Headers that the sender's `Connection` makes hop-by-hop."""
    named = [value for name, value in headers if name == b"connection"]
    if not named:
        return _NOTHING
    return frozenset(part.strip().lower() for value in named for part in value.split(b","))


@cache
def _dropped_besides(more: frozenset[bytes]) -> frozenset[bytes]:
    return _NOT_SENT_UP | more


def for_upstream(
    headers: Sequence[Header], *, also_dropped: frozenset[bytes], request_id: bytes, credential: bytes | None
) -> list[Header]:
    """The client's headers (lower-case names) as the engine gets them, for a JSON body."""
    dropped = _dropped_besides(also_dropped)
    hop = named_by_connection(headers)
    kept = [
        header
        for header in headers
        if header[0] not in dropped and header[0] not in hop and not header[0].startswith(b"x-qos-")
    ]
    kept.append((b"accept-encoding", b"identity"))
    kept.append((b"x-request-id", request_id))
    if credential is not None:
        kept.append((b"authorization", credential))
    return kept


def for_client(headers: Iterable[Header]) -> list[Header]:
    """The engine's headers (lower-case names) as the client gets them; the framing is up to the caller."""
    headers = list(headers)
    hop = named_by_connection(headers)
    return [
        header
        for header in headers
        if header[0] not in _NOT_SENT_DOWN
        and header[0] not in hop
        and not header[0].startswith(_OWN_PREFIXES)
    ]


def duration(nanoseconds: int) -> bytes:
    """A reset time as OpenAI writes it: `12ms`, `1s`, `6m0s`."""
    if nanoseconds < NANOSECONDS_PER_SECOND:
        return b"%dms" % -(-nanoseconds // 1_000_000)
    seconds = -(-nanoseconds // NANOSECONDS_PER_SECOND)
    return b"%dm%ds" % divmod(seconds, 60) if seconds >= 60 else b"%ds" % seconds
