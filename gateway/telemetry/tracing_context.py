"""A request's place in a distributed trace, by W3C Trace Context (level 1).

    traceparent: 00-<trace id, 32 hex digits>-<parent's span id, 16>-<flags, 2>

One that is malformed, given twice, of the version `ff` or with an id of zeros only is as good as none: a new
trace begins, and its `tracestate` is nobody's. A later version is read by the form of `00`, whatever follows.
Of the flags `sampled` (1) is understood and `random` (2, the trace id is) handed on.
"""

import re
from collections.abc import Callable, Iterable

Header = tuple[bytes, bytes]

TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"
TRACE_HEADERS = frozenset({TRACEPARENT, TRACESTATE})
"""What the door has to look at where tracing is on."""

SAMPLED = 0x01
RANDOM = 0x02

TRACE_ID_BITS = 128
SPAN_ID_BITS = 64
_LOW_HALF = (1 << 64) - 1

_ONLY_PARENT = frozenset({TRACEPARENT})
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")

TRACESTATE_BYTES_KEPT = 512
"""Of a longer one our spans say nothing; the engine gets it all the same."""

RandomBits = Callable[[int], int]


class EngineCall:
    """The request as it was sent to one engine: our CLIENT span, the parent of all that the engine reports.
    `status` is the engine's, None as long as it has told none; `sent_at` is the gateway's clock."""

    __slots__ = ("sent_at", "span_id", "status", "upstream", "url")

    def __init__(self, span_id: int, upstream: str, url: str, sent_at: int) -> None:
        self.span_id = span_id
        self.upstream = upstream
        self.url = url
        self.sent_at = sent_at
        self.status: int | None = None


class Trace:
    """What tracing knows of one request beside its record. `parent_id` is the client's span, None where the
    trace begins here; `replaces` are the client's headers that the engine is not to see; `status` is the
    answer's, None as long as there is none."""

    __slots__ = (
        "_new_id",
        "began_at",
        "calls",
        "flags",
        "method",
        "parent_id",
        "path",
        "replaces",
        "span_id",
        "status",
        "trace_id",
        "tracestate",
    )

    def __init__(
        self,
        parent: "Parent | None",
        *,
        is_sampled: Callable[[int], bool],
        bits: RandomBits,
        method: str,
        path: str,
        began_at: int,
    ) -> None:
        self._new_id = bits
        self.span_id = nonzero(bits, SPAN_ID_BITS)
        self.method = method
        self.path = path
        self.began_at = began_at
        self.calls: list[EngineCall] = []
        self.status: int | None = None
        if parent is None:
            self.trace_id = nonzero(bits, TRACE_ID_BITS)
            self.parent_id: int | None = None
            self.flags = SAMPLED if is_sampled(self.trace_id) else 0
            self.tracestate = b""
            self.replaces = TRACE_HEADERS
        else:
            self.trace_id, self.parent_id, self.flags, self.tracestate = parent
            self.replaces = _ONLY_PARENT

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def hex_id(self) -> str:
        return f"{self.trace_id:032x}"

    def call(self, upstream: str, url: str, sent_at: int) -> tuple[EngineCall, Header]:
        """The request goes to this engine now, with this header."""
        call = EngineCall(nonzero(self._new_id, SPAN_ID_BITS), upstream, url, sent_at)
        self.calls.append(call)
        value = b"00-%032x-%016x-%02x" % (self.trace_id, call.span_id, self.flags)
        return call, (TRACEPARENT, value)


class TracedId(str):
    """A request's id that has its trace with it: what listens to the policy finds the one by the other, also
    where two clients gave their requests the same id."""

    __slots__ = ("trace",)
    trace: Trace

    def __new__(cls, request_id: str, trace: Trace) -> "TracedId":
        self = super().__new__(cls, request_id)
        self.trace = trace
        return self


def trace_of(request_id: str) -> Trace | None:
    return request_id.trace if isinstance(request_id, TracedId) else None


Parent = tuple[int, int, int, bytes]
"""Trace id, span id, flags, tracestate."""


def read_parent(headers: Iterable[Header]) -> Parent | None:
    """The client's own span, of headers with lower-case names; None where it names none that can be."""
    given = [value for name, value in headers if name == TRACEPARENT]
    found = _TRACEPARENT.fullmatch(given[0].strip(b" \t")) if len(given) == 1 else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    ids = int(trace_id, 16), int(span_id, 16)
    if version == b"ff" or (version == b"00" and more is not None) or 0 in ids:
        return None
    tracestate = b",".join(value for name, value in headers if name == TRACESTATE)
    kept = tracestate if len(tracestate) <= TRACESTATE_BYTES_KEPT else b""
    return *ids, int(flags, 16) & (SAMPLED | RANDOM), kept


def nonzero(bits: RandomBits, count: int) -> int:
    while not (number := bits(count)):
        pass
    return number


def share_of_traces(ratio: float) -> Callable[[int], bool]:
    """Whether a trace id is among this fraction of all: by its low half, as OpenTelemetry's samplers have
    it, so that gateways beside each other choose alike."""
    bound = round(ratio * (_LOW_HALF + 1))
    return lambda trace_id: trace_id & _LOW_HALF < bound
