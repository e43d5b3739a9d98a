"""What a control law is told: how the engines do just now, who asks for how much, who was held back.

All of it is measured behind the gate: the gateway's own queues would turn the loop's sign around (a cut makes
them longer, which would read as slower engines). Fresh signals come from requests under way, so that those
which are slow count before they end:

* *gap*, nanoseconds per token: over all tokens of streams in the last 3 s, the time they took divided by
  their number, so that each token counts the same. A stream that was silent from one reading to the next
  counts as one token that took so long: a stalled engine must not look like one without work.
* *wait*: how much longer than predicted first tokens take: the larger one of the mean of those that were
  seen in the last 2 s, and the oldest stream still without its first token; None where no upstream of these
  has five samples of its predicted prefill. A stream can be the oldest from the second reading on that finds
  it without: a bunch of prompts that is over within a second is no overload, and each such cut would take
  half a minute to grow back.
  Neither has what a long prompt's stall explains (`known_stalls.py`): how often there is one, the policy has
  decided itself.
* *KV use*: the largest fraction of an engine's memory in use, as far as engines tell.

An answer that is not streamed has no first token and no gaps that anybody could see: it feeds none of these.
Nor does a stream while its client takes nothing; a slow reader must not pass for a slow engine.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.known_stalls import KnownStalls
from gateway.policy.parameters import SloTargets
from gateway.policy.prefill_model import SAMPLES_MIN
from gateway.policy.request import PRIORITIES, Priority, Ticket
from gateway.policy.upstream_slots import UpstreamSlots

RECENT_GAPS_NS = 3 * NANOSECONDS_PER_SECOND
RECENT_WAIT_NS = 2 * NANOSECONDS_PER_SECOND
DEMAND_NS = 15 * NANOSECONDS_PER_SECOND
VERDICT_AGE_NS = 300 * NANOSECONDS_PER_SECOND
VERDICTS_MAX = 1000
"""Of one class."""
PACE_TOKENS_MIN = 20
"""A stream's pace is judged from so many on."""


class Progress(Protocol):
    """How far a stream has come; the driver's own object, which it need not tell the policy of again."""

    @property
    def last_token_at(self) -> int | None: ...

    @property
    def output_tokens_seen(self) -> int: ...

    @property
    def held_up(self) -> bool:
        """Its client takes nothing at present, so that what the engine does cannot be seen."""
        ...


class Verdict(NamedTuple):
    """Whether the engine served a request as its class is promised."""

    dispatched_at: int
    ended_at: int
    kept: bool


class Readings(NamedTuple):
    """Times are nanoseconds, tuples are by class; None = there is no sample.

    `held_back`: some request could not be paid at once for want of its class's tokens since the last reading;
    long prompts that wait for their class's own share do not count. `demand`: millitokens per second that
    were asked for over the last 15 s, as far as is known what they cost. `verdicts` of the last five minutes,
    by the time of their ends. `overdue`: when streams were dispatched that are under way and have broken a
    promise already, by their first token or by their pace.
    """

    at: int
    gap_ns: float | None = None
    wait_ns: float | None = None
    kv_usage: float | None = None
    held_back: tuple[bool, ...] = (False, False, False)
    demand: tuple[int, ...] = (0, 0, 0)
    verdicts: Sequence[Sequence[Verdict]] = ((), (), ())
    overdue: Sequence[Sequence[int]] = ((), (), ())


class Measured(NamedTuple):
    """The same as sums and counts, so that what several gateways have measured can be put together. Gaps of
    the last 3 s, first tokens of the last 2 s; `verdict_numbers`: how many there have been in all."""

    at: int
    gap_ns: int
    gap_tokens: float
    late_ns: int
    first_tokens: int
    oldest_late_ns: int | None
    kv_usage: float | None
    held_back: tuple[bool, ...]
    demand: tuple[int, ...]
    verdicts: Sequence[Sequence[Verdict]]
    overdue: Sequence[Sequence[int]]
    verdict_numbers: tuple[int, ...] = (0, 0, 0)

    def readings(self) -> Readings:
        return Readings(
            at=self.at,
            gap_ns=self.gap_ns / self.gap_tokens if self.gap_tokens else None,
            wait_ns=self._wait_ns(),
            kv_usage=self.kv_usage,
            held_back=self.held_back,
            demand=self.demand,
            verdicts=self.verdicts,
            overdue=self.overdue,
        )

    def _wait_ns(self) -> float | None:
        """The larger one of the mean and the oldest that is still without."""
        waits = [] if self.oldest_late_ns is None else [float(self.oldest_late_ns)]
        if self.first_tokens:
            waits.append(self.late_ns / self.first_tokens)
        return max(max(waits), 0.0) if waits else None


class ControlSignals:
    """Collects between two readings. It costs a few additions for each request, and a look at every stream
    under way for each reading."""

    def __init__(self, now: int) -> None:
        self._gap_ns = 0
        self._gap_tokens = 0.0
        self._gaps: deque[tuple[int, int, float]] = deque()
        self._waits: deque[tuple[int, int]] = deque()
        self._held_back = [False] * len(PRIORITIES)
        self._asked = [0] * len(PRIORITIES)
        self._asked_before: deque[tuple[int, list[int]]] = deque([(now, [0] * len(PRIORITIES))])
        self._verdicts: list[deque[Verdict]] = [deque(maxlen=VERDICTS_MAX) for _ in PRIORITIES]
        self._judged = [0] * len(PRIORITIES)
        self._stalls = KnownStalls()

    # ------------------------------------------------------------------ what happens

    def asked(self, priority: Priority, millitokens: int) -> None:
        """A request came that costs so much, or turned out to cost more, or (negative) less."""
        self._asked[priority] += millitokens

    def held_back(self, priority: Priority) -> None:
        self._held_back[priority] = True

    def first_token(self, ticket: Ticket, now: int) -> None:
        """To be told before the upstream learns from it."""
        ticket.measured_at = now
        ticket.measured_tokens = 0 if ticket.progress is None else ticket.progress.output_tokens_seen
        self._stalls.prefilled(ticket, now)
        late = self._late(ticket, now)
        if late is not None:
            self._waits.append((now, late))

    def stream_ends(self, ticket: Ticket, now: int) -> None:
        """To be told before the upstream learns from it."""
        if ticket.prefilling:
            self._stalls.prefilled(ticket, now)
        self._measure(ticket, now)

    def judged(self, priority: Priority, verdict: Verdict) -> None:
        self._verdicts[priority].append(verdict)
        self._judged[priority] += 1

    # ------------------------------------------------------------------ a reading

    def measure(
        self, upstreams: Iterable[UpstreamSlots], promises: Sequence[SloTargets], now: int
    ) -> Measured:
        """`promises` by class."""
        last = self._asked_before[-1][0]
        oldest: int | None = None
        overdue: list[list[int]] = [[] for _ in PRIORITIES]
        kv_usage: float | None = None
        for upstream in upstreams:
            used = upstream.load.kv_usage(upstream.in_flight_tokens, now)
            if used is not None:
                kv_usage = used if kv_usage is None else max(used, kv_usage)
            for ticket in upstream.leases.values():
                if not ticket.ask.streaming:
                    continue
                dispatched_at = ticket.dispatched_at
                assert dispatched_at is not None, "it holds a lease"
                if _has_broken(promises[ticket.priority], ticket, now):
                    overdue[ticket.priority].append(dispatched_at)
                if ticket.first_token_at is None:
                    late = self._late(ticket, now) if dispatched_at <= last else None
                    if late is not None:
                        oldest = late if oldest is None else max(late, oldest)
                elif not self._measure(ticket, now) and ticket.progress and ticket.measured_at <= last:
                    self._count(ticket, now, 1.0)
        gap_ns, gap_tokens = self._gaps_of_late(now)
        late_ns, first_tokens = self._waits_of_late(now)
        measured = Measured(
            at=now,
            gap_ns=gap_ns,
            gap_tokens=gap_tokens,
            late_ns=late_ns,
            first_tokens=first_tokens,
            oldest_late_ns=oldest,
            kv_usage=kv_usage,
            held_back=tuple(self._held_back),
            demand=self._demand(now),
            verdicts=[tuple(verdicts) for verdicts in self._fresh_verdicts(now)],
            overdue=overdue,
            verdict_numbers=tuple(self._judged),
        )
        self._held_back = [False] * len(PRIORITIES)
        return measured

    def _late(self, ticket: Ticket, now: int) -> int | None:
        """How much longer than predicted a first token takes that is there just now, or not yet; None where
        nobody can tell, or a stall explains it."""
        prefill = ticket.upstream.prefill
        sent_at = ticket.dispatched_at
        if prefill.samples < SAMPLES_MIN or sent_at is None or self._stalls.explain_wait(ticket, now):
            return None
        age: int = now - sent_at
        return age - int(prefill.predict_ns(ticket.input_tokens))

    def _count(self, ticket: Ticket, until: int, tokens: float) -> None:
        """A stream took the time since it was last measured for so many tokens."""
        if not self._stalls.explain_gap(ticket, ticket.measured_at, until):
            self._gap_ns += until - ticket.measured_at
            self._gap_tokens += tokens

    def _measure(self, ticket: Ticket, now: int) -> bool:
        """Take in a stream's tokens since it was last looked at; False if there were none."""
        progress = ticket.progress
        if progress is None or ticket.first_token_at is None or progress.last_token_at is None:
            return False
        if progress.held_up:
            ticket.measured_at, ticket.measured_tokens = now, progress.output_tokens_seen
            return True
        tokens = progress.output_tokens_seen - ticket.measured_tokens
        took = progress.last_token_at - ticket.measured_at
        if tokens <= 0 or took <= 0:
            return False
        self._count(ticket, progress.last_token_at, tokens / ticket.ask.sequences)
        ticket.measured_at = progress.last_token_at
        ticket.measured_tokens += tokens
        return True

    def _gaps_of_late(self, now: int) -> tuple[int, float]:
        gaps = self._gaps
        gaps.append((now, self._gap_ns, self._gap_tokens))
        self._gap_ns, self._gap_tokens = 0, 0.0
        while gaps[0][0] <= now - RECENT_GAPS_NS:
            gaps.popleft()
        return sum(took for _, took, _ in gaps), sum(tokens for _, _, tokens in gaps)

    def _waits_of_late(self, now: int) -> tuple[int, int]:
        waits = self._waits
        while waits and waits[0][0] <= now - RECENT_WAIT_NS:
            waits.popleft()
        return sum(late for _, late in waits), len(waits)

    def _demand(self, now: int) -> tuple[int, ...]:
        before = self._asked_before
        before.append((now, list(self._asked)))
        while len(before) > 2 and before[1][0] <= now - DEMAND_NS:
            before.popleft()
        since, amounts = before[0]
        span = max(now - since, 1)
        return tuple(
            max(total - amount, 0) * NANOSECONDS_PER_SECOND // span
            for total, amount in zip(self._asked, amounts, strict=True)
        )

    def _fresh_verdicts(self, now: int) -> Sequence[Sequence[Verdict]]:
        for verdicts in self._verdicts:
            while verdicts and verdicts[0].ended_at < now - VERDICT_AGE_NS:
                verdicts.popleft()
        return self._verdicts


def _has_broken(promise: SloTargets, ticket: Ticket, now: int) -> bool:
    """Whether a stream under way is slower than promised already."""
    if ticket.first_token_at is None:
        assert ticket.dispatched_at is not None
        return promise.ttft_ns is not None and now - ticket.dispatched_at > promise.ttft_ns
    progress: Progress | None = ticket.progress
    if promise.tpot_ns is None or progress is None or progress.last_token_at is None or progress.held_up:
        return False
    steps = progress.output_tokens_seen / ticket.ask.sequences - 1
    took = progress.last_token_at - ticket.first_token_at
    return steps >= PACE_TOKENS_MIN and took > steps * promise.tpot_ns
