"""A fleet on virtual time: what a budget shared by slices does, against one gateway with the same load.

Each replica has the policy's own buckets, a line for each class, and calls the ledger as a gateway calls the
store. Requests come at random; who cannot be paid waits if the predicted wait is within its class's throttle
time, else it is refused. Engines are left out: what is counted is the cost that the fleet lets through.
`python -m gateway.fleet.simulation` prints the tables of README.md.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import exp
from random import Random

from gateway.fleet.contract import ByClass, Demand, Flow, PoolDemand
from gateway.fleet.ledger import Ledger
from gateway.fleet.standing import FleetRules, Standing
from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.parameters import MILLITOKENS
from gateway.policy.request import PRIORITIES, Priority
from gateway.policy.token_bucket import (
    UNITS_PER_MILLITOKEN,
    UNITS_PER_TOKEN,
    BucketRules,
    TokenBuckets,
    split_rates,
)

SHARES = (0.6, 0.35, 0.05)
CEILING_SHARES = (1.0, 1.0, 1.0)
THROTTLE_SECONDS = (0.5, 2.0, 20.0)
MIN_BURST_TOKENS = 8192
ACTIVITY_TAIL = 5 * NANOSECONDS_PER_SECOND
STEP = NANOSECONDS_PER_SECOND // 100
"""So often those who wait are looked at."""
DEMAND_SECONDS = 2.0
ANSWER_SECONDS = 0.001
"""From a call to its answer."""


@dataclass(frozen=True, slots=True)
class Arrival:
    at: int
    replica: int
    priority: Priority
    cost: int
    """Millitokens."""
    tenant: str


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
    """By nobody: each replica has its n-th part, whatever is asked."""


@dataclass(slots=True)
class Outcome:
    capacity: int
    paid: list[tuple[int, Arrival]] = field(default_factory=list)
    refused: list[Arrival] = field(default_factory=list)
    calls: int = 0
    seconds: int = 0

    def overshoot(self, window_seconds: float, after_seconds: float = 10.0) -> float:
        """Of the fullest window, by which part it holds more than C."""
        window = round(window_seconds * NANOSECONDS_PER_SECOND)
        begin = round(after_seconds * NANOSECONDS_PER_SECOND)
        inside: deque[tuple[int, int]] = deque()
        total = most = 0
        for at, arrival in self.paid:
            if at < begin:
                continue
            inside.append((at, arrival.cost))
            total += arrival.cost
            while inside[0][0] <= at - window:
                total -= inside.popleft()[1]
            most = max(most, total)
        return most / (self.capacity * MILLITOKENS * window_seconds) - 1

    def used(self, after_seconds: float = 10.0) -> float:
        """Part of C that was let through."""
        return sum(self.by_class(after_seconds))

    def by_class(self, after_seconds: float = 10.0) -> list[float]:
        begin = round(after_seconds * NANOSECONDS_PER_SECOND)
        whole = self.capacity * MILLITOKENS * (self.seconds - after_seconds)
        return [
            sum(a.cost for at, a in self.paid if a.priority is priority and at >= begin) / whole
            for priority in PRIORITIES
        ]

    def served(self, arrivals: Sequence[Arrival], chosen: Callable[[Arrival], bool]) -> float:
        """Of the cost that was asked, the part that was paid."""
        asked = sum(a.cost for a in arrivals if chosen(a))
        return sum(a.cost for _, a in self.paid if chosen(a)) / asked if asked else 1.0


class SharedBuckets(TokenBuckets):
    """Its bursts are those of an equal part at least, so that a replica of which little is asked can let a
    few requests through at once. All bursts of a fleet are at most twice those of one gateway."""

    equal: Sequence[int] = (0, 0, 0)

    def _install(self, rates: Sequence[int]) -> None:
        super()._install(rates)
        larger = [max(rate, equal) for rate, equal in zip(rates, self.equal, strict=True)]
        burst_ns = round(self._rules.burst_seconds * NANOSECONDS_PER_SECOND)
        one_second = max(sum(rates), sum(self.equal)) * NANOSECONDS_PER_SECOND
        least = min(self._rules.min_burst_tokens * UNITS_PER_TOKEN, one_second)
        self.bursts = [max(rate * burst_ns, least) for rate in larger]


class Replica:
    def __init__(self, index: int, scenario: Scenario, outcome: Outcome) -> None:
        self.index = index
        self._outcome = outcome
        self._capacity = scenario.capacity * MILLITOKENS
        self._replicas = scenario.replicas
        self._standing = Standing(FleetRules(slice_seconds=scenario.slice_seconds))
        self._buckets = SharedBuckets(self._rules(0), 0, 0)
        self._buckets.equal = split_rates(self._capacity // scenario.replicas, SHARES)
        self.lines: list[deque[Arrival]] = [deque() for _ in PRIORITIES]
        self._waiting = [0, 0, 0]
        self._came: deque[Arrival] = deque()
        self._prospects: ByClass = (0, 0, 0)
        self._own_active = [0, 0, 0]
        self.rates: ByClass = (0, 0, 0)

    def _rules(self, capacity: int) -> BucketRules:
        """The smallest burst is the fleet's, of which a replica has the part that it has of C."""
        capacity = max(capacity, self._capacity // self._replicas)
        least = MIN_BURST_TOKENS * capacity // self._capacity
        return BucketRules(SHARES, CEILING_SHARES, 0.5, least, 10.0)

    # ------------------------------------------------------------------ requests

    def arrive(self, arrival: Arrival, now: int) -> None:
        self._came.append(arrival)
        k = arrival.priority
        self._own_active[k] = now + ACTIVITY_TAIL
        self._buckets.active_until[k] = max(self._buckets.active_until[k], now + ACTIVITY_TAIL)
        self.pay(now)
        line = self.lines[k]
        if not line and self._buckets.affords(k, arrival.cost, False):
            self._take(arrival, now)
        elif self._wait(arrival) <= THROTTLE_SECONDS[k]:
            line.append(arrival)
            self._waiting[k] += arrival.cost
        else:
            self._outcome.refused.append(arrival)

    def _wait(self, arrival: Arrival) -> float:
        """Seconds until it could be paid, by its own rate or by what the replica would get if it asked."""
        k, ahead = arrival.priority, self._waiting[arrival.priority]
        wait = self._buckets.predicted_wait_ns(k, arrival.cost, ahead, False)
        missing = arrival.cost + ahead - self._buckets.levels[k] // UNITS_PER_MILLITOKEN
        prospect = self._prospects[k]
        own = wait / NANOSECONDS_PER_SECOND
        return min(own, missing / prospect) if prospect else own

    def pay(self, now: int) -> None:
        self._buckets.advance(now)
        for k, line in enumerate(self.lines):
            while line and self._buckets.affords(PRIORITIES[k], line[0].cost, False):
                arrival = line.popleft()
                self._waiting[k] -= arrival.cost
                self._take(arrival, now)

    def _take(self, arrival: Arrival, now: int) -> None:
        self._buckets.take(arrival.priority, arrival.cost, False)
        self._outcome.paid.append((now, arrival))

    # ------------------------------------------------------------------ slices

    def call(self, ledger: Ledger, budget: ByClass, now: int) -> Callable[[], bool]:
        """Tell the ledger; what is answered comes in force when the result is called, which says whether
        something was taken away."""
        self._buckets.advance(now)
        seconds = now / NANOSECONDS_PER_SECOND
        renewal = self._standing.renewal(self._demand(budget, now), seconds)
        granted = ledger.renew(now // 1000, f"r{self.index:03d}", renewal)
        self._outcome.calls += 1

        def answer() -> bool:
            share, _ = self._standing.answered(granted, (), seconds, seconds)
            pool = share.pools[0]
            later = now + round(ANSWER_SECONDS * NANOSECONDS_PER_SECOND)
            self.take(pool.rates, later)
            self._prospects = pool.prospects
            for k, elsewhere in enumerate(pool.active):
                own = self._own_active[k]
                self._buckets.active_until[k] = max(own, later + NANOSECONDS_PER_SECOND) if elsewhere else own
            return self._standing.lowered

        return answer

    def take(self, rates: ByClass, now: int) -> None:
        self.rates = rates
        self._buckets.reconfigure(self._rules(sum(rates)), rates, now)

    def _demand(self, budget: ByClass, now: int) -> Demand:
        while self._came and self._came[0].at <= now - DEMAND_SECONDS * NANOSECONDS_PER_SECOND:
            self._came.popleft()
        asked: list[dict[str, int]] = [{}, {}, {}]
        for arrival in self._came:
            of_class = asked[arrival.priority]
            rate = round(arrival.cost / DEMAND_SECONDS)
            of_class[arrival.tenant] = of_class.get(arrival.tenant, 0) + rate
        for k, line in enumerate(self.lines):
            for arrival in line:
                more = round(arrival.cost / max(THROTTLE_SECONDS[k], DEMAND_SECONDS))
                asked[k][arrival.tenant] = asked[k].get(arrival.tenant, 0) + more
        flows = tuple(tuple(Flow(t, rate) for t, rate in sorted(each.items())) for each in asked)
        active = tuple(until > now for until in self._own_active)
        return Demand((PoolDemand("gpu", budget, CEILING_SHARES, active, flows),))


def arrivals(scenario: Scenario, seed: int) -> list[Arrival]:
    """The same for every way to share them out."""
    chance = Random(seed)
    found: list[Arrival] = []
    capacity = scenario.capacity * MILLITOKENS
    for priority, load in zip(PRIORITIES, scenario.load, strict=True):
        found.extend(_poisson(chance, scenario, priority, load * capacity, None))
    if scenario.flood:
        found.extend(_poisson(chance, scenario, Priority.P1, scenario.flood * capacity, "flood"))
    return sorted(found, key=lambda arrival: arrival.at)


def _poisson(
    chance: Random, scenario: Scenario, priority: Priority, rate: float, tenant: str | None
) -> Iterator[Arrival]:
    mean = 1200 * MILLITOKENS
    at = 0.0
    while rate > 0:
        at += chance.expovariate(rate / mean)
        if at >= scenario.seconds:
            return
        replica = 0 if tenant else chance.choices(range(scenario.replicas), scenario.weights)[0]
        if scenario.moves and not tenant:
            replica = (replica + int(at / scenario.moves)) % scenario.replicas
        cost = round(mean * chance.lognormvariate(-0.32, 0.8))
        name = tenant or f"t{chance.randrange(20)}"
        yield Arrival(round(at * NANOSECONDS_PER_SECOND), replica, priority, cost, name)


def simulate(scenario: Scenario, seed: int = 1) -> tuple[Outcome, list[Arrival]]:
    chance = Random(seed + 1)
    outcome = Outcome(scenario.capacity, seconds=scenario.seconds)
    ledger = Ledger()
    budget = tuple(split_rates(scenario.capacity * MILLITOKENS, SHARES))
    fleet = [Replica(i, scenario, outcome) for i in range(scenario.replicas)]
    coming = arrivals(scenario, seed)
    due: list[tuple[int, int, Callable[[int], None]]] = []
    order = 0

    def book(at: int, do: Callable[[int], None]) -> None:
        nonlocal order
        order += 1
        heappush(due, (at, order, do))

    def calls(replica: Replica) -> Callable[[int], None]:
        """A call, at once another one where something was taken away, a pause."""
        answered_after = round(ANSWER_SECONDS * NANOSECONDS_PER_SECOND)

        def ask(now: int, again: bool = False) -> None:
            answer = replica.call(ledger, budget, now)

            def hear(then: int) -> None:
                if answer() and not again:
                    ask(then, again=True)

            book(now + answered_after, hear)

        def call(now: int) -> None:
            ask(now)
            pause = scenario.slice_seconds * chance.uniform(0.9, 1.1)
            book(now + round(pause * NANOSECONDS_PER_SECOND), call)

        return call

    for replica in fleet:
        if scenario.replicas == 1 or scenario.divided:
            replica.take(tuple(rate // scenario.replicas for rate in budget), 0)
        else:
            book(round(chance.uniform(0, scenario.slice_seconds) * NANOSECONDS_PER_SECOND), calls(replica))

    def look(now: int) -> None:
        for replica in fleet:
            if any(replica.lines):
                replica.pay(now)
        book(now + STEP, look)

    book(STEP, look)
    end = scenario.seconds * NANOSECONDS_PER_SECOND
    index = 0
    while due:
        at = coming[index].at if index < len(coming) else end
        if due[0][0] <= at:
            now, _, do = heappop(due)
            if now >= end:
                break
            do(now)
        elif index < len(coming):
            fleet[coming[index].replica].arrive(coming[index], at)
            index += 1
        else:
            break
    return outcome, coming


def uneven(replicas: int) -> tuple[float, ...]:
    """80, 15 and 5 % for three; for more, each has a little less than the one before."""
    if replicas == 3:
        return 0.8, 0.15, 0.05
    return tuple(exp(-4 * i / replicas) for i in range(replicas))


OVERLOAD = (0.8, 0.8, 0.4)
"""Twice C; with shares of 60, 35 and 5 % all three classes are short."""
HALF = (0.3, 0.15, 0.05)
NEARLY_FULL = (0.54, 0.31, 0.05)


def row(title: str, scenario: Scenario, seed: int = 1) -> str:
    outcome, coming = simulate(scenario, seed)
    alone, _ = simulate(Scenario(1, scenario.load, (1.0,), scenario.capacity, seconds=scenario.seconds), seed)
    classes = outcome.by_class()
    off = max(abs(a - b) for a, b in zip(classes, alone.by_class(), strict=True))
    by_replica = [
        outcome.served(coming, lambda a, i=i: a.replica == i and a.priority is Priority.P1)  # type: ignore[misc]
        for i in range(scenario.replicas)
    ]
    busy = sorted(range(scenario.replicas), key=lambda i: -scenario.weights[i])
    calls = outcome.calls / scenario.replicas / scenario.seconds
    return (
        f"| {title} | {scenario.replicas} | {scenario.slice_seconds * 1000:g} | {outcome.overshoot(10):+.1%} "
        f"| {outcome.overshoot(1):+.0%} | {outcome.used():.1%} ({alone.used():.1%}) "
        f"| {' / '.join(f'{part:.1%}' for part in classes)} | {off * 100:.1f} "
        f"| {by_replica[busy[0]]:.0%} / {by_replica[busy[-1]]:.0%} | {calls:.1f} |"
    )


HEADER = (
    "| load | replicas | slice ms | most over C in 10 s | in 1 s | C used (one gateway) | P0 / P1 / P2 of C "
    "| points off | P1 served, fullest / emptiest replica | calls/s each |\n" + "|---" * 10 + "|"
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
