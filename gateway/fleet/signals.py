"""What the law is told where several gateways drive the same engines: each one's signals, put together.

A replica tells sums and counts, not means, and how long ago something was, not when: the clocks of two
machines have nothing in common. Verdicts carry the running number of the last one, so that whoever leads
takes each once, however often it is told. The result is what one gateway would have read off its own streams
(`policy/control_signals.py`), but for verdicts: those from before it led, a new leader does not know.
"""

from collections import deque
from collections.abc import Sequence

from msgspec import Struct
from msgspec.json import Decoder, Encoder

from gateway.policy.control_signals import VERDICT_AGE_NS, VERDICTS_MAX, Readings, Verdict
from gateway.policy.request import PRIORITIES

VERDICTS_TOLD_MAX = 100
"""Of one class, the newest: a message goes out ten times a second."""


class ToldVerdict(Struct, frozen=True, array_like=True):
    dispatched_ns_ago: int
    ended_ns_ago: int
    kept: bool


class Signals(Struct, frozen=True, array_like=True):
    """Of one replica, tuples by class. `held_back` within the last second, or a little more."""

    replica: str
    gap_ns: int
    gap_tokens: float
    """Of the last 3 s: time the tokens took, and how many there were."""
    late_ns: int
    first_tokens: int
    """Of the last 2 s: how much later than predicted first tokens came, in all, and how many there were."""
    oldest_late_ns: int | None
    kv_usage: float | None
    held_back: tuple[bool, ...]
    demand: tuple[int, ...]
    verdict_numbers: tuple[int, ...]
    """How many there have been since the start."""
    verdicts: tuple[tuple[ToldVerdict, ...], ...]
    """The last ones, oldest first."""
    overdue_ns_ago: tuple[tuple[int, ...], ...]


_encoder = Encoder()
_decoder = Decoder(Signals)


def told(signals: Signals) -> str:
    return _encoder.encode(signals).decode()


class PooledSignals:
    """The leader's memory. `read` once a tick; all verdicts are told on the leader's own clock."""

    def __init__(self) -> None:
        self._seen: dict[str, list[int]] = {}
        self._verdicts: list[deque[Verdict]] = [deque(maxlen=VERDICTS_MAX) for _ in PRIORITIES]

    def read(self, messages: Sequence[str], now: int) -> Readings:
        """Raises msgspec.DecodeError for a message of another version."""
        replicas = [_decoder.decode(message) for message in messages]
        self._seen = {r.replica: self._seen.get(r.replica, [0] * len(PRIORITIES)) for r in replicas}
        for replica in replicas:
            self._collect(replica, now)
        for verdicts in self._verdicts:
            while verdicts and verdicts[0].ended_at < now - VERDICT_AGE_NS:
                verdicts.popleft()
        tokens = sum(r.gap_tokens for r in replicas)
        used = [r.kv_usage for r in replicas if r.kv_usage is not None]
        classes = range(len(PRIORITIES))
        return Readings(
            at=now,
            gap_ns=sum(r.gap_ns for r in replicas) / tokens if tokens else None,
            wait_ns=_wait(replicas),
            kv_usage=max(used, default=None),
            held_back=tuple(any(r.held_back[k] for r in replicas) for k in classes),
            demand=tuple(sum(r.demand[k] for r in replicas) for k in classes),
            verdicts=self._verdicts,
            overdue=[[now - ago for r in replicas for ago in r.overdue_ns_ago[k]] for k in classes],
        )

    def _collect(self, replica: Signals, now: int) -> None:
        seen = self._seen[replica.replica]
        for k, verdicts in enumerate(replica.verdicts):
            new = replica.verdict_numbers[k] - seen[k]
            seen[k] = replica.verdict_numbers[k]
            for verdict in verdicts[-new:] if new > 0 else ():
                ended_at = now - verdict.ended_ns_ago
                self._verdicts[k].append(Verdict(now - verdict.dispatched_ns_ago, ended_at, verdict.kept))


def _wait(replicas: Sequence[Signals]) -> float | None:
    """As `ControlSignals` has it: the larger one of the mean and the oldest that is still without."""
    waits = [float(r.oldest_late_ns) for r in replicas if r.oldest_late_ns is not None]
    if count := sum(r.first_tokens for r in replicas):
        waits.append(sum(r.late_ns for r in replicas) / count)
    return max(max(waits), 0.0) if waits else None
