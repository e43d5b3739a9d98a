"""What a simulation is to serve: arrivals from a rate, a trace or a decision log, and clients that wait.

A traffic is a frozen description that can be sent to another process; `workload` makes the streams of one run
from it. The same seed makes the same arrivals for every configuration.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, pairwise
from math import floor
from random import Random
from typing import NamedTuple, Protocol

from gateway.policy.clock import NANOSECONDS_PER_SECOND, to_seconds
from gateway.policy.request import PRIORITIES, Ask, Priority
from gateway.simulator.decision_log import LoggedRun
from gateway.simulator.workload import (
    Arrival,
    Caller,
    ClosedStream,
    GammaStream,
    Lengths,
    LengthSource,
    ListedStream,
    MixedStream,
    OpenStream,
    TraceRow,
    Workload,
    generator,
)

COARSE_STEP_NS = NANOSECONDS_PER_SECOND // 10
"""Where stamps are at least so far apart and have two rows or more on average, they are not arrivals but
steps."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Which part of the requests each class has; the parts add up to 1."""

    parts: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Mix":
        """From `30/45/25`: P0, P1 and P2 in any unit. Raises ValueError."""
        expected = "expected three numbers for P0/P1/P2, as in 30/45/25"
        try:
            amounts = [float(each) for each in text.split("/")]
        except ValueError:
            raise ValueError(f"found {text!r}, {expected}") from None
        total = sum(amounts)
        if len(amounts) != len(PRIORITIES) or not all(0 <= a < float("inf") for a in amounts) or not total:
            raise ValueError(f"found {text!r}, {expected}")
        return cls(tuple(amount / total for amount in amounts))

    def draw(self, random: Random, among: Sequence[Priority] = PRIORITIES) -> Priority:
        weights = [self.parts[p] for p in among]
        return random.choices(among, weights if any(weights) else None)[0]

    def split(self, number: int) -> list[int]:
        """Whole parts of a number, the largest remainders rounded up."""
        exact = [part * number for part in self.parts]
        whole = [floor(each) for each in exact]
        remainders = sorted(PRIORITIES, key=lambda p: (whole[p] - exact[p], p))
        for priority in remainders[: number - sum(whole)]:
            whole[priority] += 1
        return whole


DEFAULT_MIX = Mix((0.30, 0.45, 0.25))


class OpenTraffic(Protocol):
    @property
    def seconds(self) -> float:
        """For how long requests arrive."""
        ...

    def stream(self, seed: int, model: str) -> OpenStream: ...


@dataclass(frozen=True, slots=True)
class Traffic:
    seconds: float
    open: OpenTraffic | None = None
    crowd: "Crowd | None" = None
    retries: int = 0
    """How often a refused request of the open traffic comes back, as with an OpenAI SDK."""

    def workload(self, seed: int, model: str) -> Workload:
        """`model` is what requests ask for that do not say so themselves."""
        return Workload(
            open=[] if self.open is None else [self.open.stream(seed, model)],
            closed=[] if self.crowd is None else self.crowd.streams(model),
            retries=self.retries,
        )

    @property
    def models(self) -> frozenset[str]:
        """Those that requests name themselves."""
        return self.open.models if isinstance(self.open, LogReplay) else frozenset()


# ---------------------------------------------------------------------- from a rate


@dataclass(frozen=True, slots=True)
class Synthetic:
    """`burstiness` 1 is a Poisson process."""

    per_second: float
    burstiness: float
    lengths: LengthSource
    mix: Mix
    seconds: float

    def stream(self, seed: int, model: str) -> OpenStream:
        callers = [Caller(p, model=model) for p in PRIORITIES]
        arrivals = GammaStream(callers[0], self.per_second, self.burstiness, self.lengths)
        return MixedStream(arrivals, callers, self.mix.parts)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Clients that ask, wait for the answer, think and ask again; refused they come back `retries` times."""

    clients: int
    think_seconds: float
    retries: int
    lengths: LengthSource
    mix: Mix

    def streams(self, model: str) -> list[ClosedStream]:
        return [
            ClosedStream(
                Caller(p, model=model), clients, self.lengths, self.think_seconds, retries=self.retries
            )
            for p, clients in zip(PRIORITIES, self.mix.split(self.clients), strict=True)
            if clients
        ]


# ---------------------------------------------------------------------- from a trace


class ClassesBy(StrEnum):
    """Where the classes of a trace's requests come from."""

    AUTO = "auto"
    """The column `class` where there is one, else the mix."""
    COLUMN = "column"
    TENANT = "tenant"
    """All requests of a tenant have one class, so that the classes' parts come close to the mix."""
    LENGTH = "length"
    """Long prompts are P2; the others P0 or P1, drawn from the mix."""
    MIX = "mix"


@dataclass(frozen=True, slots=True)
class TraceReplay:
    """A trace, `scale` times as fast as it was recorded."""

    rows: Sequence[TraceRow]
    scale: float
    mix: Mix
    classes_by: ClassesBy = ClassesBy.AUTO
    long_prompt_tokens: int = 8192

    def __post_init__(self) -> None:
        """ValueError where the trace does not tell what the classes should come from."""
        lacking = {
            ClassesBy.COLUMN: any(row.priority is None for row in self.rows),
            ClassesBy.TENANT: any(row.tenant is None for row in self.rows),
        }
        if lacking.get(self.classes_by):
            name = "class" if self.classes_by is ClassesBy.COLUMN else "tenant"
            raise ValueError(f"not every row has a {name}, so classes cannot come from it")

    @property
    def seconds(self) -> float:
        return to_seconds(self.rows[-1].at) / self.scale + 1e-6

    def stream(self, seed: int, model: str) -> OpenStream:
        rows = spread(self.rows, generator(seed, "spread"))
        classes = self._classes(rows, generator(seed, "classes"))
        callers = _Callers(model)
        arrivals = [
            Arrival(round(row.at / self.scale), row.lengths, callers.of(p, row.tenant))
            for row, p in zip(rows, classes, strict=True)
        ]
        return ListedStream(callers.of(Priority.P1, None), arrivals)

    def _classes(self, rows: Sequence[TraceRow], random: Random) -> Iterable[Priority]:
        match self.classes_by:
            case ClassesBy.TENANT:
                of = class_of_tenant(rows, self.mix)
                return [of[row.tenant] for row in rows]
            case ClassesBy.LENGTH:
                return [self._by_length(row, random) for row in rows]
            case ClassesBy.MIX:
                return [self.mix.draw(random) for _ in rows]
            case _:
                drawn = [self.mix.draw(random) for _ in rows]
                pairs = zip(rows, drawn, strict=True)
                return [drawn if row.priority is None else row.priority for row, drawn in pairs]

    def _by_length(self, row: TraceRow, random: Random) -> Priority:
        short = self.mix.draw(random, (Priority.P0, Priority.P1))
        return Priority.P2 if row.lengths.input_tokens > self.long_prompt_tokens else short


class _Callers:
    """One for each class and tenant."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._known: dict[tuple[Priority, str | None], Caller] = {}

    def of(self, priority: Priority, tenant: str | None) -> Caller:
        caller = self._known.get((priority, tenant))
        if caller is None:
            caller = Caller(priority, tenant or "anonymous", self._model)
            self._known[priority, tenant] = caller
        return caller


def is_coarse(rows: Sequence[TraceRow]) -> bool:
    shared = len(rows) >= 2 * len({row.at for row in rows})
    return shared and _step(rows) >= COARSE_STEP_NS


def spread(rows: Sequence[TraceRow], random: Random) -> Sequence[TraceRow]:
    """Of a trace that was written in steps: each row somewhere in the step that its stamp begins."""
    if not is_coarse(rows):
        return rows
    step = _step(rows)
    moved = [row._replace(at=row.at + int(step * random.random())) for row in rows]
    return sorted(moved, key=lambda row: row.at)


def _step(rows: Sequence[TraceRow]) -> int:
    """The shortest distance between two time stamps, nanoseconds."""
    stamps = [at for at, _ in groupby(rows, key=lambda row: row.at)]
    return min((later - earlier for earlier, later in pairwise(stamps)), default=0)


def class_of_tenant(rows: Sequence[TraceRow], mix: Mix) -> dict[str | None, Priority]:
    """Each tenant, the busiest first, gets the class that lacks most of its part so far."""
    requests = Counter(row.tenant for row in rows)
    lacking = [part * len(rows) for part in mix.parts]
    classes: dict[str | None, Priority] = {}
    for tenant, number in sorted(requests.items(), key=lambda item: (-item[1], str(item[0]))):
        chosen = max(PRIORITIES, key=lambda p: (lacking[p], -p))
        lacking[chosen] -= number
        classes[tenant] = chosen
    return classes


# ---------------------------------------------------------------------- from a decision log


class LoggedRequest(NamedTuple):
    at: int
    """Nanoseconds since the first one."""
    ask: Ask
    input_tokens: int
    output_tokens: int | None
    """None if it did not run; then an answer of the same class is drawn."""


@dataclass(frozen=True, slots=True)
class LogReplay:
    """The requests that a gateway logged, `scale` times as fast. What the gateway decided plays no part."""

    requests: Sequence[LoggedRequest]
    scale: float = 1.0

    @property
    def seconds(self) -> float:
        return to_seconds(self.requests[-1].at) / self.scale + 1e-6

    @property
    def models(self) -> frozenset[str]:
        return frozenset(request.ask.model for request in self.requests)

    @property
    def without_answer(self) -> int:
        return sum(request.output_tokens is None for request in self.requests)

    def stream(self, seed: int, model: str) -> OpenStream:
        answers = _Answers(self.requests, generator(seed, "answers"))
        arrivals = []
        for request in self.requests:
            ask = request.ask
            lengths = Lengths(max(request.input_tokens, 1), answers.length_of(request))
            caller = Caller(
                ask.priority, ask.tenant, ask.model, ask.max_output_tokens, ask.streaming, ask=ask
            )
            arrivals.append(Arrival(round(request.at / self.scale), lengths, caller))
        return ListedStream(Caller(Priority.P1, model=model), arrivals)


class _Answers:
    """Lengths of answers; one that is not known is drawn from those of its class, or of all."""

    def __init__(self, requests: Sequence[LoggedRequest], random: Random) -> None:
        self._random = random
        self._known: dict[Priority | None, list[int]] = {None: []}
        for request in requests:
            if request.output_tokens is not None and request.ask.max_output_tokens != 0:
                self._known.setdefault(request.ask.priority, []).append(request.output_tokens)
                self._known[None].append(request.output_tokens)

    def length_of(self, request: LoggedRequest) -> int:
        limit = request.ask.max_output_tokens
        if limit == 0:
            return 0
        if request.output_tokens is not None:
            return max(request.output_tokens, 1)
        known = self._known.get(request.ask.priority) or self._known[None] or [limit or 1]
        drawn = known[int(self._random.random() * len(known))]
        return max(min(drawn, limit or drawn), 1)


def logged_requests(runs: Sequence[LoggedRun]) -> list[LoggedRequest]:
    """Those of all runs that came as far as the policy, in the order of their arrival. ValueError if there
    are none.

    Several sequences of one request become one of all their tokens: it costs the same.
    """
    found: list[LoggedRequest] = []
    for run in runs:
        for logged in run.requests:
            if logged.ask is None:
                continue
            at = run.wall_time_ns + logged.arrived_at - run.began_at
            ask = _as_one_sequence(logged.ask)
            usage = logged.usage
            input_tokens = ask.input_tokens if usage is None else usage.input_tokens
            output_tokens = None if usage is None else usage.output_tokens
            if not output_tokens and ask.max_output_tokens != 0:
                output_tokens = None  # it was let down, or left, before its first token
            found.append(LoggedRequest(at, ask, input_tokens, output_tokens))
    if not found:
        raise ValueError("no request in it came as far as the policy")
    first = min(request.at for request in found)
    return sorted((r._replace(at=r.at - first) for r in found), key=lambda request: request.at)


def _as_one_sequence(ask: Ask) -> Ask:
    limit = ask.max_output_tokens
    if ask.sequences == 1:
        return ask
    return ask._replace(
        sequences=1, prompts=1, max_output_tokens=None if limit is None else limit * ask.sequences
    )
