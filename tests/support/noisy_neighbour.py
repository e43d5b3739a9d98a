"""Nine tenants of P1 below their fair share, and one that asks for ten times as much: as workloads on virtual
time, and what each got.

Used by `make noisy-neighbour`, which tells what is measured, and by the tests of the simulator.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import nan
from statistics import fmean
from typing import NamedTuple

from gateway.mock_backend.gpu_model import PRESETS
from gateway.policy.clock import to_nanoseconds, to_seconds
from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import MILLITOKENS, PolicyParameters
from gateway.policy.request import Priority
from gateway.policy_parameters import policy_parameters
from gateway.settings import Settings
from gateway.simulator.experiment import Experiment
from gateway.simulator.report import NANOSECONDS_PER_MILLISECOND, jain_index
from gateway.simulator.workload import (
    CHAT_LENGTHS,
    Caller,
    ClosedStream,
    FixedLengths,
    OpenStream,
    PoissonStream,
    QuantileLengths,
    Workload,
    generator,
)

P0, P1, P2 = Priority

PRESET = "seed_32k"
NINE = tuple(f"tenant {i}" for i in range(1, 10))
NOISY = "noisy"
TEN = (*NINE, NOISY)
QUIET_LOAD = 0.8
"""Of the fair share."""
NOISY_TIMES = 10.0
BACKLOG_LOAD = 3.0
"""Of all there is, by the ten together."""
WARM_UP_SECONDS = 20.0
TOKENS_ENOUGH = 40_000.0
"""Tokens a second that the preset cannot serve."""
SMALL, LARGE = 0.1, 4.0

# ---------------------------------------------------------------------- scenarios


def scaled(factor: float) -> QuantileLengths:
    """Conversations of so many times the length."""

    def times(knots: Sequence[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
        return tuple((at, max(round(tokens * factor), 1)) for at, tokens in knots)

    return QuantileLengths(times(CHAT_LENGTHS.input_tokens), times(CHAT_LENGTHS.output_tokens))


MIXED: Mapping[str, QuantileLengths] = {NINE[0]: scaled(SMALL), NINE[1]: scaled(LARGE)}


def parameters_with(
    tokens_per_second: float | None = None, max_in_flight: int | None = None, engines: int = 1
) -> PolicyParameters:
    """The gateway's defaults, but for what is given, and with rates that stay, to show fairness alone."""
    defaults = replace(policy_parameters(Settings()), law="static")
    upstream = defaults.upstreams[0]
    if tokens_per_second is not None:
        upstream = replace(upstream, tokens_per_second=tokens_per_second)
    if max_in_flight is not None:
        upstream = replace(upstream, max_in_flight=max_in_flight)
    return replace(defaults, upstreams=tuple(replace(upstream, name=f"gpu{i}") for i in range(engines)))


@dataclass(frozen=True)
class Scenario:
    title: str
    parameters: PolicyParameters
    about_tokens_per_second: float
    """What P1 gets done when all want more, roughly."""
    lengths: Mapping[str, QuantileLengths] = field(default_factory=dict)
    """Of those tenants that have no conversations."""
    p0_tokens_per_second: float = 0.0
    retried: bool = False

    def lengths_of(self, tenant: str) -> QuantileLengths:
        return self.lengths.get(tenant, CHAT_LENGTHS)


DEFAULT = parameters_with()
SLOTS = parameters_with(TOKENS_ENOUGH)
C = DEFAULT.upstreams[0].tokens_per_second

SCENARIOS: Mapping[str, Scenario] = {
    "c": Scenario("C", DEFAULT, C),
    "c-mixed": Scenario("C, mixed sizes", DEFAULT, C, MIXED),
    "c-retried": Scenario("C, retried", DEFAULT, C, retried=True),
    "slots": Scenario("slots", SLOTS, 14_600),
    "slots-mixed": Scenario("slots, mixed sizes", SLOTS, 14_600, MIXED),
    "slots-retried": Scenario("slots, retried", SLOTS, 14_600, retried=True),
    "own-share": Scenario("own share, P0 busy", DEFAULT, 0.39 * C, p0_tokens_per_second=C),
    "own-share-x4": Scenario(
        "own share, 4 engines", parameters_with(engines=4), 4 * 0.39 * C, p0_tokens_per_second=4 * C
    ),
    "few-slots": Scenario("16 slots", parameters_with(TOKENS_ENOUGH, 16), 7_700),
}

# ---------------------------------------------------------------------- workloads


@cache
def mean_cost(lengths: QuantileLengths, output_weight: float, draws: int = 20_000) -> float:
    """Weighted tokens of a request, on average."""
    random = generator(0, "mean cost")
    drawn = (lengths.draw(random) for _ in range(draws))
    return sum(one.input_tokens + output_weight * one.output_tokens for one in drawn) / draws


def workload(job: "Job") -> Workload:
    """Each tenant asks for so many weighted tokens a second. What one asks does not depend on those behind it
    in TEN."""
    scenario = SCENARIOS[job.scenario]
    weight = scenario.parameters.capacity.output_weight
    streams: list[OpenStream] = []
    if scenario.p0_tokens_per_second:
        per_second = scenario.p0_tokens_per_second / mean_cost(CHAT_LENGTHS, weight)
        streams.append(PoissonStream(Caller(P0, "realtime"), per_second, CHAT_LENGTHS))
    clients: list[ClosedStream] = []
    for tenant, tokens in job.tokens_per_second.items():
        lengths = scenario.lengths_of(tenant)
        stream = PoissonStream(Caller(P1, tenant), tokens / mean_cost(lengths, weight), lengths)
        if scenario.retried:
            clients += coming_back(stream, job.seed, job.seconds)
        else:
            streams.append(stream)
    return Workload(open=streams, closed=clients)


def coming_back(stream: PoissonStream, seed: int, seconds: float) -> list[ClosedStream]:
    """Each request of the stream as a client that asks until it is answered, and never again."""
    clients = []
    for arrival in stream.arrivals(generator(seed, "coming back", stream.caller.tenant)):
        at = to_seconds(arrival.at)
        if at >= seconds:
            break
        clients.append(ClosedStream(stream.caller, 1, FixedLengths(arrival.lengths), seconds, at))
    return clients


# ---------------------------------------------------------------------- one run


@dataclass
class Service:
    """What a tenant got of the requests that arrived after the warm-up."""

    offered: int = 0
    completed: int = 0
    tokens: float = 0.0
    """Weighted, of the completed ones."""
    refused: int = 0
    """At arrival, or later by another one's arrival."""
    timed_out: int = 0
    ttft_ms: list[float] = field(default_factory=list)

    def add(self, record: RequestEnded) -> None:
        self.offered += 1
        if record.outcome is Outcome.COMPLETED:
            self.completed += 1
            self.tokens += record.charged / MILLITOKENS
        elif record.outcome is Outcome.QUEUE_TIMEOUT:
            self.timed_out += 1
        else:
            self.refused += 1
        if record.ttft_ns is not None:
            self.ttft_ms.append(record.ttft_ns / NANOSECONDS_PER_MILLISECOND)

    def __add__(self, other: "Service") -> "Service":
        return Service(
            self.offered + other.offered,
            self.completed + other.completed,
            self.tokens + other.tokens,
            self.refused + other.refused,
            self.timed_out + other.timed_out,
            self.ttft_ms + other.ttft_ms,
        )


def total(services: Sequence[Service]) -> Service:
    return sum(services, Service())


class Job(NamedTuple):
    scenario: str
    tokens_per_second: Mapping[str, float]
    """Who asks, and for how much."""
    seed: int
    seconds: float


def run(job: Job) -> dict[str, Service]:
    """What each tenant of P1 that asked got."""
    scenario = SCENARIOS[job.scenario]
    presets = {upstream.name: PRESETS[PRESET] for upstream in scenario.parameters.upstreams}
    outcome = Experiment(
        workload(job), scenario.parameters, presets, seed=job.seed, seconds=job.seconds
    ).run()
    services = {tenant: Service() for tenant in job.tokens_per_second}
    for record in outcome.records:
        if record.priority is P1 and record.arrived_at >= to_nanoseconds(WARM_UP_SECONDS):
            services[record.tenant].add(record)
    return services


def backlogged(name: str, seed: int, seconds: float) -> Job:
    """All ten ask for more than there is."""
    each = BACKLOG_LOAD * SCENARIOS[name].about_tokens_per_second / len(TEN)
    return Job(name, dict.fromkeys(TEN, each), seed, seconds)


def with_noisy(name: str, fair_share: float, seed: int, seconds: float) -> Job:
    """The nine as ever, and the tenth for ten times as much as one of them."""
    quiet = QUIET_LOAD * fair_share
    return Job(name, {**dict.fromkeys(NINE, quiet), NOISY: NOISY_TIMES * quiet}, seed, seconds)


def without_noisy(name: str, fair_share: float, seed: int, seconds: float) -> Job:
    return Job(name, dict.fromkeys(NINE, QUIET_LOAD * fair_share), seed, seconds)


def really_alone(name: str, fair_share: float, seed: int, seconds: float) -> Job:
    """The first of the nine with the engine to itself."""
    return Job(name, {NINE[0]: QUIET_LOAD * fair_share}, seed, seconds)


# ---------------------------------------------------------------------- all runs of a scenario


@dataclass(frozen=True)
class Comparison:
    """One item a seed."""

    fair_share: float
    """Weighted tokens a second."""
    jain: tuple[float, ...]
    noisy: tuple[Mapping[str, Service], ...]
    quiet: tuple[Mapping[str, Service], ...]
    alone: tuple[Service, ...]
    measured_seconds: float
    """Of one run."""

    def kept(self, what: Callable[[Service], float]) -> list[float]:
        """Of the nine together, seed by seed: their service in parts of that without the noisy one."""
        return [
            _part(sum(what(noisy[t]) for t in NINE), sum(what(quiet[t]) for t in NINE))
            for noisy, quiet in zip(self.noisy, self.quiet, strict=True)
        ]

    def kept_by(self, tenant: str, what: Callable[[Service], float]) -> float:
        """All seeds together."""
        return _part(sum(what(r[tenant]) for r in self.noisy), sum(what(r[tenant]) for r in self.quiet))

    def worst(self, what: Callable[[Service], float]) -> float:
        """Of the one of the nine that lost most."""
        return min(self.kept_by(tenant, what) for tenant in NINE)


def _part(amount: float, of: float) -> float:
    return amount / of if of else nan


Map = Callable[[Callable[[Job], dict[str, Service]], list[Job]], "list[dict[str, Service]]"]


def compare(names: Sequence[str], seeds: Sequence[int], seconds: float, do: Map) -> dict[str, Comparison]:
    """All runs of these scenarios; `do` runs the jobs."""
    measured = seconds - WARM_UP_SECONDS
    wanted = [(name, seed) for name in names for seed in seeds]
    full = dict(zip(wanted, do(run, [backlogged(*which, seconds) for which in wanted]), strict=True))
    fair = {
        name: fmean(total(list(full[name, seed].values())).tokens for seed in seeds) / measured / len(TEN)
        for name in names
    }
    kinds = (with_noisy, without_noisy, really_alone)
    jobs = {
        (kind, name, seed): kind(name, fair[name], seed, seconds) for kind in kinds for name, seed in wanted
    }
    got = dict(zip(jobs, do(run, list(jobs.values())), strict=True))
    return {
        name: Comparison(
            fair[name],
            tuple(jain_index([full[name, s][t].tokens for t in TEN]) for s in seeds),
            tuple(got[with_noisy, name, s] for s in seeds),
            tuple(got[without_noisy, name, s] for s in seeds),
            tuple(got[really_alone, name, s][NINE[0]] for s in seeds),
            measured,
        )
        for name in names
    }
