"""What the law is told where several gateways drive the same engines: each one's signals, put together.

A replica tells sums and counts, not means, and how long ago something was, not when: the clocks of two
machines have nothing in common. Verdicts carry the running number of the last one, so that whoever leads
takes each once, however often it is told. The result is what one gateway would have measured on its own
streams (`policy/control_signals.py`), but for verdicts: those from before it led, a new leader does not know.
"""

from collections import deque
from collections.abc import Sequence

from msgspec import Struct
from msgspec.json import Decoder, Encoder

from gateway.policy.control_signals import VERDICT_AGE_NS, VERDICTS_MAX, Measured, Verdict
from gateway.policy.request import PRIORITIES

VERDICTS_TOLD_MAX = 100
"""Of one class, the newest: a message goes out ten times a second."""
OVERDUE_TOLD_MAX = 100


class ToldVerdict(Struct, frozen=True, array_like=True):
    dispatched_ns_ago: int
    ended_ns_ago: int
    kept: bool


class Signals(Struct, frozen=True, array_like=True):
    """Of one replica and one pool, tuples by class; see `Measured`."""

    pool: str
    gap_ns: int
    gap_tokens: float
    late_ns: int
    first_tokens: int
    oldest_late_ns: int | None
    kv_usage: float | None
    held_back: tuple[bool, ...]
    demand: tuple[int, ...]
    verdict_numbers: tuple[int, ...]
    verdicts: tuple[tuple[ToldVerdict, ...], ...]
    """The last ones, oldest first."""
    overdue_ns_ago: tuple[tuple[int, ...], ...]


class Report(Struct, frozen=True, array_like=True):
    replica: str
    signals: tuple[Signals, ...]


_encoder = Encoder()
_decoder = Decoder(Report)


def told(report: Report) -> str:
    return _encoder.encode(report).decode()


def signals(pool: str, measured: Measured) -> Signals:
    now = measured.at
    return Signals(
        pool=pool,
        gap_ns=measured.gap_ns,
        gap_tokens=measured.gap_tokens,
        late_ns=measured.late_ns,
        first_tokens=measured.first_tokens,
        oldest_late_ns=measured.oldest_late_ns,
        kv_usage=measured.kv_usage,
        held_back=measured.held_back,
        demand=measured.demand,
        verdict_numbers=measured.verdict_numbers,
        verdicts=tuple(
            tuple(ToldVerdict(now - v.dispatched_at, now - v.ended_at, v.kept) for v in _last(verdicts))
            for verdicts in measured.verdicts
        ),
        overdue_ns_ago=tuple(
            tuple(now - dispatched_at for dispatched_at in times[:OVERDUE_TOLD_MAX])
            for times in measured.overdue
        ),
    )


def _last(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return list(verdicts)[-VERDICTS_TOLD_MAX:]


class PooledSignals:
    """The leader's memory of one pool. `measured` once for each round of reports; all verdicts are told on
    the leader's own clock."""

    def __init__(self) -> None:
        self._seen: dict[str, list[int]] = {}
        self._verdicts: list[deque[Verdict]] = [deque(maxlen=VERDICTS_MAX) for _ in PRIORITIES]

    def measured(self, told_by: Sequence[tuple[str, Signals]], now: int) -> Measured:
        """`told_by`: each replica's name, and what it told of this pool."""
        unseen = [0] * len(PRIORITIES)
        self._seen = {replica: self._seen.get(replica, list(unseen)) for replica, _ in told_by}
        for replica, one in told_by:
            self._collect(self._seen[replica], one, now)
        for verdicts in self._verdicts:
            while verdicts and verdicts[0].ended_at < now - VERDICT_AGE_NS:
                verdicts.popleft()
        each = [one for _, one in told_by]
        classes = range(len(PRIORITIES))
        oldest = [one.oldest_late_ns for one in each if one.oldest_late_ns is not None]
        used = [one.kv_usage for one in each if one.kv_usage is not None]
        return Measured(
            at=now,
            gap_ns=sum(one.gap_ns for one in each),
            gap_tokens=sum(one.gap_tokens for one in each),
            late_ns=sum(one.late_ns for one in each),
            first_tokens=sum(one.first_tokens for one in each),
            oldest_late_ns=max(oldest, default=None),
            kv_usage=max(used, default=None),
            held_back=tuple(any(one.held_back[k] for one in each) for k in classes),
            demand=tuple(sum(one.demand[k] for one in each) for k in classes),
            verdicts=self._verdicts,
            overdue=[[now - ago for one in each for ago in one.overdue_ns_ago[k]] for k in classes],
        )

    def _collect(self, seen: list[int], one: Signals, now: int) -> None:
        for k, verdicts in enumerate(one.verdicts):
            new = one.verdict_numbers[k] - seen[k]
            seen[k] = one.verdict_numbers[k]
            for verdict in verdicts[-new:] if new > 0 else ():
                ended_at = now - verdict.ended_ns_ago
                self._verdicts[k].append(Verdict(now - verdict.dispatched_ns_ago, ended_at, verdict.kept))


def by_pool(messages: Sequence[str]) -> dict[str, list[tuple[str, Signals]]]:
    """Of each pool the replicas' names and what they told. Raises msgspec.DecodeError for a message of
    another version."""
    found: dict[str, list[tuple[str, Signals]]] = {}
    for message in messages:
        report = _decoder.decode(message)
        for one in report.signals:
            found.setdefault(one.pool, []).append((report.replica, one))
    return found
