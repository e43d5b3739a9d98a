"""What is measured, what it should be, and the arithmetic between: medians over rounds, ratios within one.

A machine's speed changes from minute to minute, with what else it does. Two contenders of one round have met
the same machine, more or less; so ratios are taken round by round, and then their median.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.benchmarks.proxy_cost.contenders import GATEWAY


@dataclass(frozen=True)
class RoundFigures:
    """One contender in one round. None: it has no such figure, or did not get so far."""

    plain_cpu_us: float | None = None
    """CPU per plain request; the engine itself has none."""
    plain_per_second: float | None = None
    turns_cpu_us: float | None = None
    """CPU per chunk of streams that go in an engine's turns."""
    clocks_cpu_us: float | None = None
    """CPU per chunk of streams each on a clock of its own."""
    chunks_per_read: float | None = None
    """As the client read them, of the latter streams."""
    gap_p50_ms: float | None = None
    gap_p99_ms: float | None = None
    added_gap_p99_ms: float | None = None
    """Over that of the direct run in the same round; so the next ones."""
    half_load_per_second: float | None = None
    latency_p50_ms: float | None = None
    latency_p99_ms: float | None = None
    added_p50_ms: float | None = None
    added_p99_ms: float | None = None
    others_cpu: float | None = None
    """Fraction of the machine's cores that somebody else kept busy meanwhile."""


Rounds = Sequence[Mapping[str, RoundFigures]]
"""One entry a round: contender → figures."""


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """None: there are no values."""
        known = list(values)
        return cls(statistics.median(known), min(known), max(known)) if known else None


def spread(rounds: Rounds, contender: str, figure: str) -> Spread | None:
    """Of the figure, over the rounds that have it."""
    values = (getattr(each[contender], figure) for each in rounds if contender in each)
    return Spread.of(value for value in values if value is not None)


def ratio(rounds: Rounds, figure: str, peer: str, contender: str = GATEWAY) -> Spread | None:
    """The contender's figure over the peer's, over the rounds that have both."""
    pairs = (
        (getattr(each[contender], figure), getattr(each[peer], figure))
        for each in rounds
        if contender in each and peer in each
    )
    return Spread.of(own / other for own, other in pairs if own is not None and other)


@dataclass(frozen=True)
class Goal:
    """At most `must`; better at most `stretch`. With a peer: of the ratio gateway / peer."""

    title: str
    figure: str
    must: float
    stretch: float | None = None
    peer: str | None = None

    def measured(self, rounds: Rounds) -> Spread | None:
        if self.peer is None:
            return spread(rounds, GATEWAY, self.figure)
        return ratio(rounds, self.figure, self.peer)

    def verdict(self, measured: Spread | None) -> str:
        if measured is None:
            return "not measured"
        if measured.median > self.must:
            return "not met"
        return "ok" if self.stretch is None or measured.median > self.stretch else "ok, stretch"


def _against(title: str, figure: str, peers: Mapping[str, tuple[float, float | None]]) -> list[Goal]:
    return [Goal(title, figure, must, stretch, peer) for peer, (must, stretch) in peers.items()]


_STREAM_GOALS: Mapping[str, tuple[float, float | None]] = {
    "nginx": (1.6, 1.35),
    "vllm-router": (1.25, 1.0),
    "sglang-router": (1.15, 1.0),
    "litellm": (1 / 5, None),
}
_PLAIN_GOALS: Mapping[str, tuple[float, float | None]] = {
    "vllm-router": (1.7, 1.3),
    "sglang-router": (1.15, 1.0),
    "litellm": (1 / 15, None),
}
GOALS = (
    *_against("CPU per chunk, an engine's turns", "turns_cpu_us", _STREAM_GOALS),
    *_against("CPU per chunk, own clocks", "clocks_cpu_us", _STREAM_GOALS),
    *_against("CPU per plain request", "plain_cpu_us", _PLAIN_GOALS),
    Goal("added latency P50, half load, ms", "added_p50_ms", 1.0),
    Goal("added latency P99, half load, ms", "added_p99_ms", 5.0),
    Goal("added gap P99, ms", "added_gap_p99_ms", 2.0),
    Goal("chunks per read at the client", "chunks_per_read", 1.02),
)
