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
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.request import Priority

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
    upper = min(bisect_right(quantiles, at, key=lambda knot: knot[0]), len(quantiles) - 1)
    (q0, low), (q1, high) = quantiles[upper - 1], quantiles[upper]
    return max(1, round(low + (high - low) * (at - q0) / (q1 - q0)))


# ---------------------------------------------------------------------- recorded traffic


class TraceRow(NamedTuple):
    at: int
    """Nanoseconds from the beginning."""
    lengths: Lengths


def read_trace(path: Path) -> list[TraceRow]:
    """A CSV file with the columns `arrival_s`, `input_tokens`, `output_tokens`; others are not looked at.

    ValueError naming the line for one that makes no sense. Rows without tokens (failures, in some traces)
    are left out.
    """
    rows: list[TraceRow] = []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = {"arrival_s", "input_tokens", "output_tokens"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{path}: no column {', '.join(sorted(missing))}")
        for row in reader:
            try:
                at = round(float(row["arrival_s"]) * NANOSECONDS_PER_SECOND)
                lengths = Lengths(int(row["input_tokens"]), int(row["output_tokens"]))
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
            if at < (rows[-1].at if rows else 0):
                raise ValueError(f"{path}, line {reader.line_num}: arrival_s goes back")
            if min(lengths) > 0:
                rows.append(TraceRow(at, lengths))
    if not rows:
        raise ValueError(f"{path}: no requests")
    return rows


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


class Arrival(NamedTuple):
    at: int
    """Nanoseconds from the beginning."""
    lengths: Lengths


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
        for at, lengths in self.rows:
            yield Arrival(round(at / self.speed), lengths)


@dataclass(frozen=True, slots=True)
class ClosedStream:
    """`clients` that each ask, wait for the answer, think, and ask again, from `from_seconds` on; told to
    come back later, they do so at the time they were told."""

    caller: Caller
    clients: int
    lengths: LengthSource
    think_seconds: float = 0.0
    from_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    open: Sequence[OpenStream] = ()
    closed: Sequence[ClosedStream] = ()


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
