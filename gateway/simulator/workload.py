"""Who asks for what, and when: from a seed, so that the same seed asks the same, always.

A workload is a list of streams. The requests of an *open* stream come whatever becomes of them; a *closed*
stream is a few clients, each of which asks again when it has been answered. Every stream, and every client
of a closed one, draws from a random generator of its own: what one asks does not depend on the others.
"""

import csv
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.outcome import Outcome
from gateway.policy.request import Ask, Priority

# ---------------------------------------------------------------------- how long


class Lengths(NamedTuple):
    """Tokens of a prompt, and of the answer it will get: the latter is known to the engine alone."""

    input_tokens: int
    output_tokens: int


class LengthSource(Protocol):
    def draw(self, random: Random) -> Lengths: ...


@dataclass(frozen=True, slots=True)
class FixedLengths:
    lengths: Lengths

    def draw(self, random: Random) -> Lengths:
        return self.lengths


@dataclass(frozen=True, slots=True)
class QuantileLengths:
    """Prompt and answer drawn apart from each other, each along (quantile, tokens) with straight lines in
    between. The first quantile is 0, the last 1."""

    input_tokens: Sequence[tuple[float, int]]
    output_tokens: Sequence[tuple[float, int]]

    def draw(self, random: Random) -> Lengths:
        prompt, answer = random.random(), random.random()
        return Lengths(_along(self.input_tokens, prompt), _along(self.output_tokens, answer))


@dataclass(frozen=True, slots=True)
class RecordedLengths:
    """Pairs as they were recorded, each as likely as any other."""

    rows: Sequence[Lengths]

    def draw(self, random: Random) -> Lengths:
        return self.rows[int(random.random() * len(self.rows))]


CHAT_LENGTHS = QuantileLengths(
    input_tokens=(
        (0.0, 2),
        (0.05, 180),
        (0.25, 400),
        (0.5, 1020),
        (0.8, 1320),
        (0.9, 2735),
        (0.95, 4080),
        (0.99, 4142),
        (0.999, 6200),
        (1.0, 14_050),
    ),
    output_tokens=(
        (0.0, 7),
        (0.05, 40),
        (0.25, 85),
        (0.5, 129),
        (0.6, 177),
        (0.75, 395),
        (0.9, 424),
        (0.99, 601),
        (1.0, 1000),
    ),
)
"""Conversations: close to the conversation slice of the Azure LLM inference trace 2023 (mean 1,155 tokens in,
211 out)."""


def _along(quantiles: Sequence[tuple[float, int]], at: float) -> int:
    upper = min(bisect_right(quantiles, at, key=itemgetter(0)), len(quantiles) - 1)
    (q0, low), (q1, high) = quantiles[upper - 1], quantiles[upper]
    return max(1, round(low + (high - low) * (at - q0) / (q1 - q0)))


# ---------------------------------------------------------------------- recorded traffic


class TraceRow(NamedTuple):
    at: int
    """Nanoseconds from the beginning."""
    lengths: Lengths
    tenant: str | None = None
    priority: Priority | None = None
    """Where the trace tells them."""


TRACE_COLUMNS = ("arrival_s", "input_tokens", "output_tokens")


def read_trace(path: Path) -> list[TraceRow]:
    """A CSV file with the columns `arrival_s`, `input_tokens`, `output_tokens`, and perhaps `tenant` and
    `class` (P0, P1 or P2); others are not looked at.

    ValueError naming the line for one that makes no sense. Rows without tokens (failures, in some traces)
    are left out.
    """
    rows: list[TraceRow] = []
    latest = 0
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = set(TRACE_COLUMNS) - set(reader.fieldnames or ())
        if missing:
            found = f"; found {', '.join(reader.fieldnames)}" if reader.fieldnames else ""
            raise ValueError(f"{path}: no column {', '.join(sorted(missing))}{found}")
        for row in reader:
            try:
                parsed = _trace_row(row)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
            if parsed.at < latest:
                before = latest / NANOSECONDS_PER_SECOND
                says = f"arrival_s goes back from {before:g} to {row['arrival_s']}"
                raise ValueError(f"{path}, line {reader.line_num}: {says}")
            latest = parsed.at
            if min(parsed.lengths) > 0:
                rows.append(parsed)
    if not rows:
        raise ValueError(f"{path}: no requests")
    return rows


def _trace_row(row: dict[str, str]) -> TraceRow:
    """Raises ValueError, TypeError (a cell is missing) or OverflowError."""
    lacking = [column for column in TRACE_COLUMNS if row[column] in (None, "")]
    if lacking:
        raise ValueError(f"no {', '.join(lacking)}")
    at = round(float(row["arrival_s"]) * NANOSECONDS_PER_SECOND)
    lengths = Lengths(int(row["input_tokens"]), int(row["output_tokens"]))
    if at < 0:
        raise ValueError(f"arrival_s is negative: {row['arrival_s']}")
    if min(lengths) < 0:
        raise ValueError(f"negative tokens: {min(lengths)}")
    name = row.get("class")
    if name and name.upper() not in Priority.__members__:
        raise ValueError(f"class is {name!r}, expected P0, P1 or P2")
    return TraceRow(at, lengths, row.get("tenant") or None, Priority[name.upper()] if name else None)


def recorded_lengths(rows: Sequence[TraceRow]) -> RecordedLengths:
    return RecordedLengths([row.lengths for row in rows])


# ---------------------------------------------------------------------- streams


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request comes, and what it tells of itself."""

    priority: Priority
    tenant: str = "anonymous"
    model: str = "mock-gpu"
    max_output_tokens: int | None = None
    """What the client allows; None when it does not say."""
    streaming: bool = True
    ask: Ask | None = None
    """All that the policy is told, of a request that once came to a gateway."""


class Arrival(NamedTuple):
    at: int
    """Nanoseconds from the beginning."""
    lengths: Lengths
    caller: Caller | None = None
    """None: the stream's."""


class OpenStream(Protocol):
    @property
    def caller(self) -> Caller: ...

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        """In the order of time; may go on for ever."""
        ...


@dataclass(frozen=True, slots=True)
class PoissonStream:
    """Independent requests: exponential gaps between them."""

    caller: Caller
    per_second: float
    lengths: LengthSource

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        at = 0.0
        while True:
            at += random.expovariate(self.per_second)
            yield Arrival(round(at * NANOSECONDS_PER_SECOND), self.lengths.draw(random))


@dataclass(frozen=True, slots=True)
class GammaStream:
    """Gamma-distributed gaps; `burstiness` is their coefficient of variation. 1 is a Poisson stream, 0 comes
    at equal distances."""

    caller: Caller
    per_second: float
    burstiness: float
    lengths: LengthSource

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        # Shape k and scale θ have the mean kθ and the coefficient of variation 1/√k.
        shape = self.burstiness**-2 if self.burstiness else 0.0
        at = 0.0
        while True:
            gap = random.gammavariate(shape, 1 / shape) if shape else 1.0
            at += gap / self.per_second
            yield Arrival(round(at * NANOSECONDS_PER_SECOND), self.lengths.draw(random))


@dataclass(frozen=True, slots=True)
class MixedStream:
    """The requests of another stream, for each of which it is drawn who asks."""

    stream: "OpenStream"
    callers: Sequence[Caller]
    weights: Sequence[float]

    @property
    def caller(self) -> Caller:
        return self.stream.caller

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        for arrival in self.stream.arrivals(random):
            (caller,) = random.choices(self.callers, self.weights)
            yield arrival._replace(caller=caller)


@dataclass(frozen=True, slots=True)
class ListedStream:
    """Requests that are known beforehand, each with its own caller or that of the stream."""

    caller: Caller
    requests: Sequence[Arrival]

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        return iter(self.requests)


@dataclass(frozen=True, slots=True)
class EvenStream:
    """`requests` requests (None: without end) at equal distances, the first at `from_seconds`."""

    caller: Caller
    every_seconds: float
    lengths: LengthSource
    from_seconds: float = 0.0
    requests: int | None = None

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        for number in count() if self.requests is None else range(self.requests):
            at = self.from_seconds + number * self.every_seconds
            yield Arrival(round(at * NANOSECONDS_PER_SECOND), self.lengths.draw(random))


@dataclass(frozen=True, slots=True)
class ReplayStream:
    """A trace as it was recorded, `speed` times as fast."""

    caller: Caller
    rows: Sequence[TraceRow]
    speed: float = 1.0

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        for row in self.rows:
            yield Arrival(round(row.at / self.speed), row.lengths)


@dataclass(frozen=True, slots=True)
class ClosedStream:
    """`clients` that each ask, wait for the answer, think, and ask again, from `from_seconds` on.

    Told to come back later, they do so at the time they were told, and ask something new; with `retries` they
    ask the same again, so many times at most, as the OpenAI SDKs do, and then give it up."""

    caller: Caller
    clients: int
    lengths: LengthSource
    think_seconds: float = 0.0
    from_seconds: float = 0.0
    retries: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    open: Sequence[OpenStream] = ()
    closed: Sequence[ClosedStream] = ()
    retries: int = 0
    """How often a refused request of an open stream comes back, as those of the OpenAI SDKs do."""


def generator(seed: int, *place: object) -> Random:
    """The random generator of one place in a run: a stream, a client."""
    return Random("/".join(map(str, (seed, *place))))


# ---------------------------------------------------------------------- coming back

RETRY_SECONDS_MAX = 60.0
RETRY_JITTER = 0.4
RETRY_SECONDS_WITHOUT_ADVICE = 1.0


def retry_wait_ns(advice_ns: int | None, random: Random) -> int:
    """How long a refused client stays away: as the gateway's HTTP face puts the policy's advice, with up to
    40 % more and never over a minute."""
    seconds = RETRY_SECONDS_WITHOUT_ADVICE if advice_ns is None else advice_ns / NANOSECONDS_PER_SECOND
    jittered = max(seconds, 0.001) * (1.0 + RETRY_JITTER * random.random())
    return round(min(jittered, RETRY_SECONDS_MAX) * NANOSECONDS_PER_SECOND)


_REFUSED = frozenset(
    {
        Outcome.REJECTED_RATE,
        Outcome.REJECTED_QUEUE_FULL,
        Outcome.QUEUE_TIMEOUT,
        Outcome.REJECTED_NO_UPSTREAM,
        Outcome.REJECTED_DRAINING,
    }
)


def sdk_retry_ns(outcome: Outcome, advice_ns: int | None, random: Random) -> int | None:
    """When an OpenAI SDK asks again by itself after this ending; None if it does not.

    They retry 429 and 503 after the time the answer advises, unless it says that this is of no use: a bucket
    that will never pay, or a wait of over a minute.
    """
    if outcome not in _REFUSED or (advice_ns is None and outcome is Outcome.REJECTED_RATE):
        return None
    if advice_ns is not None and advice_ns > RETRY_SECONDS_MAX * NANOSECONDS_PER_SECOND:
        return None
    return retry_wait_ns(advice_ns, random)
