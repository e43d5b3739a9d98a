"""What a budget shared by slices does on virtual time, against one gateway with the same load.

Requests come at random, to real policies (`virtual_fleet.py`) that nothing but the budget holds back: what is
counted is the cost that the fleet lets through. `python -m gateway.simulator.fleet_simulation` prints the
tables of `gateway/fleet/README.md`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp
from random import Random

from gateway.policy.clock import to_nanoseconds
from gateway.policy.parameters import (
    CapacityParameters,
    ClassParameters,
    PolicyParameters,
    SchedulingParameters,
    UpstreamParameters,
)
from gateway.policy.request import PRIORITIES, Priority
from gateway.simulator.virtual_fleet import Arrival, Engine, Outcomes, VirtualFleet

SHARES = (0.6, 0.35, 0.05)
THROTTLE_SECONDS = (0.5, 2.0, 20.0)
WAIT_SECONDS = (2.0, 15.0, 120.0)
MEAN_TOKENS = 1200
SERVICE_SECONDS = 2.0
PLACES_PART = 4
"""`max_in_flight` is so many times what runs at once when all of C is used: it binds nowhere."""
SETTLED_SECONDS = 10.0
"""What is let through before that is not counted."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """`load` in parts of C by class; `weights` say how much of it comes to each replica, after each `moves`
    seconds to the next one."""

    replicas: int
    load: tuple[float, float, float]
    weights: tuple[float, ...]
    capacity: int = 120_000
    """Tokens per second."""
    slice_seconds: float = 0.1
    seconds: int = 40
    moves: float | None = None
    flood: float = 0.0
    """In parts of C, what one more tenant asks in P1 at the first replica."""
    divided: bool = False
    """Without a store: each replica has its n-th part, whatever is asked."""


def parameters(capacity: int, max_in_flight: int | None = None) -> PolicyParameters:
    """Of a policy in which a request costs its tokens, and waits for those of its class at most."""
    places = max_in_flight or round(PLACES_PART * capacity / MEAN_TOKENS * SERVICE_SECONDS)
    no_limit = 10**9
    return PolicyParameters(
        classes={
            p: ClassParameters(
                share=SHARES[p],
                max_throttle_ns=to_nanoseconds(THROTTLE_SECONDS[p]),
                max_wait_ns=to_nanoseconds(WAIT_SECONDS[p]),
            )
            for p in PRIORITIES
        },
        upstreams=(UpstreamParameters("gpu", max_in_flight=places, tokens_per_second=capacity),),
        capacity=CapacityParameters(output_weight=0.0, initial_output_tokens=0),
        scheduling=SchedulingParameters(long_prompt_tokens=no_limit, max_pending_prefill_tokens=no_limit),
    )


def arrivals(scenario: Scenario, seed: int = 1) -> list[Arrival]:
    """The same for every way to share them out."""
    chance = Random(seed)
    found: list[Arrival] = []
    for priority, load in zip(PRIORITIES, scenario.load, strict=True):
        found.extend(_poisson(chance, scenario, priority, load * scenario.capacity, None))
    if scenario.flood:
        found.extend(_poisson(chance, scenario, Priority.P1, scenario.flood * scenario.capacity, "flood"))
    return sorted(found, key=lambda arrival: arrival.at)


def _poisson(
    chance: Random, scenario: Scenario, priority: Priority, rate: float, tenant: str | None
) -> Iterator[Arrival]:
    """`rate` in tokens per second."""
    at = 0.0
    while rate > 0:
        at += chance.expovariate(rate / MEAN_TOKENS)
        if at >= scenario.seconds:
            return
        replica = 0 if tenant else chance.choices(range(scenario.replicas), scenario.weights)[0]
        if scenario.moves and not tenant:
            replica = (replica + int(at / scenario.moves)) % scenario.replicas
        tokens = max(round(MEAN_TOKENS * chance.lognormvariate(-0.32, 0.8)), 1)
        name = tenant or f"t{chance.randrange(20)}"
        yield Arrival(to_nanoseconds(at), replica, priority, tokens, name)


class Result:
    """Parts of C, of what was let through once the fleet had settled."""

    def __init__(self, scenario: Scenario, coming: Sequence[Arrival], outcomes: Outcomes) -> None:
        self._scenario = scenario
        self._coming = coming
        self.outcomes = outcomes

    def overshoot(self, window_seconds: float) -> float:
        """Of the fullest window, by which part it holds more than C."""
        window, begin = to_nanoseconds(window_seconds), to_nanoseconds(SETTLED_SECONDS)
        inside: deque[tuple[int, int]] = deque()
        total = most = 0
        for at, arrival in self.outcomes.paid:
            if at < begin:
                continue
            inside.append((at, arrival.tokens))
            total += arrival.tokens
            while inside[0][0] <= at - window:
                total -= inside.popleft()[1]
            most = max(most, total)
        return most / (self._scenario.capacity * window_seconds) - 1

    def used(self) -> float:
        return sum(self.by_class())

    def by_class(self) -> list[float]:
        begin = to_nanoseconds(SETTLED_SECONDS)
        whole = self._scenario.capacity * (self._scenario.seconds - SETTLED_SECONDS)
        return [
            sum(a.tokens for at, a in self.outcomes.paid if a.priority is priority and at >= begin) / whole
            for priority in PRIORITIES
        ]

    def served(self, chosen: Callable[[Arrival], bool]) -> float:
        """Of the cost that was asked, the part that was let through."""
        asked = sum(a.tokens for a in self._coming if chosen(a))
        return sum(a.tokens for _, a in self.outcomes.paid if chosen(a)) / asked if asked else 1.0


def simulate(scenario: Scenario, seed: int = 1) -> Result:
    coming = arrivals(scenario, seed)
    fleet = VirtualFleet(
        parameters(scenario.capacity),
        scenario.replicas,
        scenario.slice_seconds,
        shared=not scenario.divided,
        engine=Engine(SERVICE_SECONDS),
        seed=seed + 1,
    )
    fleet.book(coming)
    return Result(scenario, coming, fleet.run(scenario.seconds))


def uneven(replicas: int) -> tuple[float, ...]:
    """80, 15 and 5 % for three; for more, each has a little less than the one before."""
    if replicas == 3:
        return 0.8, 0.15, 0.05
    return tuple(exp(-4 * i / replicas) for i in range(replicas))


OVERLOAD = (0.8, 0.8, 0.4)
"""Twice C; with shares of 60, 35 and 5 % all three classes are short."""
HALF = (0.3, 0.15, 0.05)
NEARLY_FULL = (0.54, 0.31, 0.05)


@cache
def one_gateway(load: tuple[float, float, float], capacity: int, seconds: int, seed: int) -> Result:
    """With the same requests."""
    return simulate(Scenario(1, load, (1.0,), capacity, seconds=seconds, divided=True), seed)


def row(title: str, scenario: Scenario, seed: int = 1) -> str:
    result = simulate(scenario, seed)
    alone = one_gateway(scenario.load, scenario.capacity, scenario.seconds, seed)
    classes = result.by_class()
    off = max(abs(a - b) for a, b in zip(classes, alone.by_class(), strict=True))
    by_replica = [
        result.served(lambda a, i=i: a.replica == i and a.priority is Priority.P1)  # type: ignore[misc]
        for i in range(scenario.replicas)
    ]
    busy = sorted(range(scenario.replicas), key=lambda i: -scenario.weights[i])
    calls = result.outcomes.calls / scenario.replicas / scenario.seconds
    return (
        f"| {title} | {scenario.replicas} | {scenario.slice_seconds * 1000:g} | {result.overshoot(10):+.1%} "
        f"| {result.overshoot(1):+.0%} ({alone.overshoot(1):+.0%}) "
        f"| {result.used():.1%} ({alone.used():.1%}) "
        f"| {' / '.join(f'{part:.1%}' for part in classes)} | {off * 100:.1f} "
        f"| {by_replica[busy[0]]:.0%} / {by_replica[busy[-1]]:.0%} | {calls:.1f} |"
    )


HEADER = (
    "| load | replicas | slice ms | most over C in 10 s | in 1 s (one gateway) | C used (one gateway) "
    "| P0 / P1 / P2 of C | points off | P1 served, fullest / emptiest replica | calls/s each |\n"
    + "|---" * 10
    + "|"
)


def tables() -> Iterator[str]:
    yield HEADER
    for replicas in (2, 3, 10):
        yield row("2× C, uneven", Scenario(replicas, OVERLOAD, uneven(replicas)))
    large = Scenario(100, OVERLOAD, uneven(100), capacity=1_200_000, seconds=22)
    yield row("2× C, uneven, C = 1,200,000", large)
    yield row("2× C, uneven, one request/s each", Scenario(100, OVERLOAD, uneven(100), seconds=30))
    yield row("2× C, uneven, C/n each", Scenario(3, OVERLOAD, uneven(3), divided=True))
    yield row("C/2, uneven", Scenario(3, HALF, uneven(3)))
    yield row("C/2, uneven, C/n each", Scenario(3, HALF, uneven(3), divided=True))
    for replicas in (3, 10):
        yield row("0.9 C, uneven", Scenario(replicas, NEARLY_FULL, uneven(replicas)))
    yield "\n" + HEADER
    for replicas, slices in ((3, (0.05, 0.1, 0.2, 0.5, 1.0)), (10, (0.05, 0.1, 0.5, 1.0))):
        for slice_seconds in slices:
            scenario = Scenario(replicas, OVERLOAD, uneven(replicas), slice_seconds=slice_seconds, moves=5.0)
            yield row("2× C, moves each 5 s", scenario)


if __name__ == "__main__":
    for line in tables():
        print(line, flush=True)
