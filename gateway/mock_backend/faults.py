"""What can be made to go wrong with the mock GPU: the kinds, how they are written, and how one is drawn.

One fault for one request, in its header:       x-mock-fault: reset_mid_stream; after=3
At random, on the command line:                 --fault "reset_mid_stream=0.02; after=3"
At random, as JSON, where `after` is optional:  {"kind": "reset_mid_stream", "probability": 0.02, "after": 3}
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

SECONDS_MAX = 86_400
COUNT_MAX = 1_000_000_000
"""Of bytes or tokens."""
_ROUNDING = 1e-9
"""Ten probabilities of 0.1 may come to a little more than 1."""


class FaultKind(StrEnum):
    REFUSE = "refuse"
    RESET_BEFORE_HEADERS = "reset_before_headers"
    RESET_AFTER_HEADERS = "reset_after_headers"
    RESET_MID_STREAM = "reset_mid_stream"
    SILENCE = "silence"
    SILENCE_BEFORE_HEADERS = "silence_before_headers"
    DRIP = "drip"
    SHORT_LENGTH = "short_length"
    LONG_LENGTH = "long_length"
    QUEUE_FULL = "queue_full"
    ERROR_500 = "error_500"
    GZIP = "gzip"
    HUGE_EVENT = "huge_event"
    ERROR_EVENT = "error_event"
    NO_DONE = "no_done"
    CRASH = "crash"
    SLOW_HEALTH = "slow_health"
    HEALTH_500 = "health_500"


PROBE_KINDS = frozenset({FaultKind.SLOW_HEALTH, FaultKind.HEALTH_500})
"""What goes wrong with `/health`; all others go wrong with requests."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    after: int | None = None
    """Tokens that the client still gets; None: not even the head of the answer."""
    seconds: float = 0.0
    bytes: int = 0

    def __str__(self) -> str:
        """As in the header."""
        return self.written(self.kind)

    def written(self, first: str) -> str:
        """`first` and the parameters."""
        return "; ".join([first, *(f"{name}={value}" for name, value in self.parameters().items())])

    def parameters(self) -> dict[str, float]:
        """Those that this kind has."""
        named = {name: getattr(self, name) for name in KINDS[self.kind].defaults}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True)
class KindFacts:
    says: str
    """One line for those who choose it."""
    defaults: Mapping[str, float | None]
    """By the parameters that it has."""


_NONE: Mapping[str, float | None] = {}
KINDS: Mapping[FaultKind, KindFacts] = {
    FaultKind.REFUSE: KindFacts("reset, and for SECONDS nobody listens there", {"seconds": 5}),
    FaultKind.RESET_BEFORE_HEADERS: KindFacts("reset in place of an answer", _NONE),
    FaultKind.RESET_AFTER_HEADERS: KindFacts("reset behind the head of the answer", _NONE),
    FaultKind.RESET_MID_STREAM: KindFacts("reset behind so many tokens", {"after": 1}),
    FaultKind.SILENCE: KindFacts("nothing more behind so many tokens", {"after": 1}),
    FaultKind.SILENCE_BEFORE_HEADERS: KindFacts("no answer at all", _NONE),
    FaultKind.DRIP: KindFacts("byte by byte, SECONDS apart", {"seconds": 0.001}),
    FaultKind.SHORT_LENGTH: KindFacts(
        "BYTES too many for content-length, or at a stream's end", {"bytes": 7}
    ),
    FaultKind.LONG_LENGTH: KindFacts("BYTES too few for content-length, or no last chunk", {"bytes": 7}),
    FaultKind.QUEUE_FULL: KindFacts("503, as from --max-num-queued-reqs", _NONE),
    FaultKind.ERROR_500: KindFacts("500, as when generating fails", _NONE),
    FaultKind.GZIP: KindFacts("compressed, though not asked for", _NONE),
    FaultKind.HUGE_EVENT: KindFacts("BYTES of blanks in one event", {"after": 0, "bytes": 16 << 20}),
    FaultKind.ERROR_EVENT: KindFacts("an error event behind so many tokens is the end", {"after": 1}),
    FaultKind.NO_DONE: KindFacts("a stream without [DONE], or its API's last event", _NONE),
    FaultKind.CRASH: KindFacts("the process ends; with after=N, behind so many tokens", {"after": None}),
    FaultKind.SLOW_HEALTH: KindFacts("/health answers after SECONDS", {"seconds": 10}),
    FaultKind.HEALTH_500: KindFacts("/health answers 500", _NONE),
}
PLAIN_ANSWERS = "A plain answer is struck in the middle, where a stream is behind so many tokens."


def kinds_help() -> Iterator[str]:
    """A line for each kind, with the defaults of its parameters, and one for all."""
    for kind, facts in KINDS.items():
        yield f"{make_fault(kind, {})}: {facts.says}"
    yield PLAIN_ANSWERS


@dataclass(frozen=True, slots=True)
class FaultTable:
    """Faults and how probable each is; at most one strikes a request."""

    entries: tuple[tuple[Fault, float], ...] = ()

    def __post_init__(self) -> None:
        for fault, probability in self.entries:
            if not 0 <= probability <= 1:
                raise ValueError(f"the probability of {fault.kind} must be from 0 to 1, not {probability:g}")
        for what, total in (("requests", self._total(False)), ("probes", self._total(True))):
            if total > 1 + _ROUNDING:
                raise ValueError(f"the probabilities of faults of {what} come to {total:g}, more than 1")

    def draw(self, roll: float, *, probe: bool) -> Fault | None:
        """The fault of a request, or of a probe of `/health`; `roll` is evenly spread over [0, 1)."""
        for fault, probability in self._of(probe):
            if roll < probability:
                return fault
            roll -= probability
        return None

    def members(self) -> list[dict[str, object]]:
        """As JSON has them."""
        return [{"kind": f.kind.value, "probability": p, **f.parameters()} for f, p in self.entries]

    def _of(self, probe: bool) -> Iterator[tuple[Fault, float]]:
        return (entry for entry in self.entries if (entry[0].kind in PROBE_KINDS) is probe)

    def _total(self, probe: bool) -> float:
        return math.fsum(probability for _, probability in self._of(probe))


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """What a mock GPU is started with."""

    table: FaultTable = FaultTable()
    seed: int | None = None
    """The same seed and order of requests, the same faults; None: other ones each time."""
    allowed: bool = False
    """Whether requests may name their own fault and `/faults` answers."""

    def arguments(self) -> list[str]:
        """The same as options of the command line."""
        written = [fault.written(f"{fault.kind}={probability}") for fault, probability in self.table.entries]
        given = [argument for each in written for argument in ("--fault", each)]
        if self.seed is not None:
            given += ["--fault-seed", str(self.seed)]
        return [*given, "--allow-faults"] if self.allowed else given


def make_fault(kind: str, given: Mapping[str, object]) -> Fault:
    """Raises ValueError, saying what is wrong and what would be right."""
    if kind not in FaultKind.__members__.values():
        raise ValueError(f"unknown fault {kind!r}; known faults: {', '.join(FaultKind)}")
    found = FaultKind(kind)
    defaults = KINDS[found].defaults
    for name in given:
        if name not in defaults:
            known = f"its parameters are: {', '.join(defaults)}" if defaults else "it has none"
            raise ValueError(f"{kind} has no parameter {name!r}; {known}")
    values: dict[str, Any] = {**defaults, **{name: _value(kind, name, v) for name, v in given.items()}}
    return Fault(found, **values)


def parse_fault(text: str) -> Fault:
    """`KIND; NAME=VALUE; …`. Raises ValueError."""
    kind, *parameters = [part.strip() for part in text.split(";")]
    return make_fault(kind, dict(_pair(part) for part in parameters if part))


def parse_table(texts: Iterable[str]) -> FaultTable:
    """Of `KIND=PROBABILITY; NAME=VALUE; …`. Raises ValueError."""
    entries = []
    for text in texts:
        first, *parameters = text.split(";")
        kind, probability = _pair(first)
        entries.append((parse_fault(";".join([kind, *parameters])), _probability(kind, probability)))
    return FaultTable(tuple(entries))


def decode_table(body: bytes) -> FaultTable:
    """From JSON. Raises ValueError."""
    try:
        listed = msgspec.json.decode(body, type=list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"faults are a JSON list of objects with kind and probability: {error}") from error
    entries = []
    for given in listed:
        kind = str(given.pop("kind", ""))
        probability = _probability(kind, given.pop("probability", None))
        entries.append((make_fault(kind, given), probability))
    return FaultTable(tuple(entries))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text.strip()!r} is not of the form NAME=VALUE")
    return name.strip(), value.strip()


def _probability(kind: str, given: object) -> float:
    value = _number(given)
    if value is None:
        raise ValueError(f"the probability of {kind} must be from 0 to 1, not {given!r}")
    return value


def _value(kind: str, name: str, given: object) -> float:
    value = _number(given)
    if name == "seconds":
        least, most, unit = 0, SECONDS_MAX, "a number"
    else:
        least, most, unit = int(name == "bytes"), COUNT_MAX, "a whole number"
    if value is None or not least <= value <= most or (name != "seconds" and value % 1):
        raise ValueError(f"{name} of {kind} must be {unit} from {least} to {most}, not {given!r}")
    return int(value) if value % 1 == 0 else value


def _number(given: object) -> float | None:
    """Of a number, or the text of one; None for all else, infinity and the like."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    try:
        value = float(given)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None
