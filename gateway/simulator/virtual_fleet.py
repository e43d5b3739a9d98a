"""A fleet on virtual time: real policies and what each has of the budget, one ledger, one engine, one heap.

Every gateway here is an `Admission` with its `Replica` and its `Standing`, driven as `runtime` and
`membership` drive them: woken at its deadlines, the next call when the standing says so. Calls and answers
take their time; nothing else does. The engine serves whoever is sent to it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from gateway.fleet.contract import Share, State
from gateway.fleet.ledger import Ledger
from gateway.fleet.messages import Granted, Renewal
from gateway.fleet.replica import Replica
from gateway.fleet.standing import Change, FleetRules, Standing
from gateway.policy.admission import Admission, Delivered
from gateway.policy.budget_part import Parts
from gateway.policy.clock import NANOSECONDS_PER_SECOND, to_nanoseconds, to_seconds
from gateway.policy.control_signals import Measured
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import MILLITOKENS, PolicyParameters
from gateway.policy.request import Ask, Priority, Refusal, Ticket, Usage
from gateway.simulator.virtual_time import VirtualGate, VirtualTime

MODEL = "m"
ANSWER_SECONDS = 0.001
"""From a call to its answer; the store acts at half of it."""
STORE_CLOCK_US = 10**15
"""What the store's own clock shows when that of the gateways begins."""
SIGNALS_FRESH_NS = 2 * NANOSECONDS_PER_SECOND
"""As `renew.lua` has it: older ones of a replica that says nothing are old news."""
REFUSED = "refused"
"""Why a call failed, with a store that is away."""
TIMED_OUT = "timed_out"
"""And at a gateway that is cut off."""


@dataclass(frozen=True, slots=True)
class Arrival:
    at: int
    replica: int
    """Or the next one that lives."""
    priority: Priority
    tokens: int
    """It costs so many, and uses them."""
    tenant: str
    key: str | None = None

    @property
    def cost(self) -> int:
        return self.tokens * MILLITOKENS


@dataclass(slots=True)
class Outcomes:
    """What became of the arrivals: `paid` when they were let through, with the instant."""

    paid: list[tuple[int, Arrival]] = field(default_factory=list)
    refused: list[tuple[Arrival, Refusal]] = field(default_factory=list)
    calls: int = 0
    changes: list[tuple[int, str, Change]] = field(default_factory=list)
    """Of each gateway's standing with the store."""


class Engine:
    """Runs a request for `service_seconds`. Its tokens come `gap_seconds` apart, and as much slower as more
    than `knee` requests run."""

    def __init__(
        self, service_seconds: float = 2.0, gap_seconds: float = 0.025, knee: int | None = None
    ) -> None:
        self.service_seconds = service_seconds
        self.in_flight = 0
        self.most_in_flight = 0
        self._gap_ns = to_nanoseconds(gap_seconds)
        self._knee = knee
        self._steps = 0.0
        self._since = 0

    def steps(self, now: int) -> float:
        """Tokens that each stream has got since the beginning of time."""
        slower = max(self.in_flight / self._knee, 1.0) if self._knee else 1.0
        return self._steps + (now - self._since) / (self._gap_ns * slower)

    def begins(self, now: int) -> None:
        self._change(1, now)

    def ends(self, now: int) -> None:
        self._change(-1, now)

    def _change(self, by: int, now: int) -> None:
        self._steps, self._since = self.steps(now), now
        self.in_flight += by
        self.most_in_flight = max(self.most_in_flight, self.in_flight)


class Stream:
    """How far one has come, for the policy (`control_signals.Progress`)."""

    held_up = False

    def __init__(self, engine: Engine, time: VirtualTime) -> None:
        self._engine, self._time = engine, time
        self._first = engine.steps(time.now)

    @property
    def last_token_at(self) -> int | None:
        return self._time.now

    @property
    def output_tokens_seen(self) -> int:
        return int(self._engine.steps(self._time.now) - self._first)


class Store:
    """The ledger, while it can be reached."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.can_be_reached = True
        self._told: dict[str, tuple[int, str]] = {}

    def restart(self) -> None:
        """It comes back with nothing."""
        self.ledger = Ledger()
        self._told = {}

    def renew(self, member: str, renewal: Renewal, now: int) -> tuple[Granted, Sequence[str]]:
        granted = self.ledger.renew(now // 1000 + STORE_CLOCK_US, member, renewal)
        self._told[member] = now + SIGNALS_FRESH_NS, renewal.demand.signals
        if not (granted.fence and renewal.wants_signals):
            return granted, ()
        return granted, [told for until, told in self._told.values() if told and until > now]


class VirtualGateway:
    """Drives one policy, and its part in the fleet."""

    def __init__(self, name: str, parameters: PolicyParameters, fleet: "VirtualFleet") -> None:
        self.name = name
        self.lives = True
        self.is_cut_off = False
        """From the store, alone: its calls get lost, and fail when their time is over."""
        self._fleet = fleet
        self._time, self._engine = fleet.time, fleet.engine
        self._outcomes = fleet.outcomes
        self.admission = Admission(parameters, fleet.time.clock)
        self.standing = Standing(fleet.rules)
        self._replica = Replica(name, self, fleet.time.clock)
        self._serving: set[Ticket] = set()
        self._gate = VirtualGate(self.admission, fleet.time, self._decided)

    # ------------------------------------------------------------------ requests

    def submit(self, arrival: Arrival) -> None:
        ask = Ask(
            request_id=f"{arrival.tenant}@{arrival.at}",
            priority=arrival.priority,
            tenant=arrival.tenant,
            model=MODEL,
            input_tokens=arrival.tokens,
            max_output_tokens=0,
            key=arrival.key,
        )
        ticket = self.admission.submit(ask)
        ticket.waiter = arrival
        self._gate.settle()

    def _decided(self, ticket: Ticket) -> None:
        if not self.lives:
            return
        if ticket.refusal is not None:
            self._outcomes.refused.append((ticket.waiter, ticket.refusal))
            return
        self._outcomes.paid.append((self._time.now, ticket.waiter))
        self._serving.add(ticket)
        self._engine.begins(self._time.now)
        self._after(self._engine.service_seconds * 0.05, partial(self._first_token, ticket))
        self._after(self._engine.service_seconds, partial(self._finish, ticket))

    def _first_token(self, ticket: Ticket) -> None:
        if self.lives:
            ticket.progress = Stream(self._engine, self._time)
            self.admission.first_token(ticket)
            self._gate.settle()

    def _finish(self, ticket: Ticket) -> None:
        if self.lives:
            self._serving.discard(ticket)
            self.admission.finish(
                ticket, Outcome.COMPLETED, Delivered(Usage(ticket.input_tokens, 0), self._time.now)
            )
            self._engine.ends(self._time.now)
            self._gate.settle()

    def die(self) -> None:
        """At once: nothing is given back, and the engine has nobody left to answer to."""
        self.lives = False
        for _ in self._serving:
            self._engine.ends(self._time.now)

    # ------------------------------------------------------------------ time

    @property
    def _seconds(self) -> float:
        return to_seconds(self._time.now)

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        self._time.after(to_nanoseconds(seconds), do)

    # ------------------------------------------------------------------ as the replica's gate

    def take_parts(self, parts: Parts) -> None:
        self.admission.take_parts(parts)
        self._gate.settle()

    def pooled(self, measured: Mapping[str, Measured]) -> None:
        self.admission.pooled(measured)
        self._gate.settle()

    # ------------------------------------------------------------------ the store's caller

    def divide(self) -> None:
        """Without a store, for ever: its n-th part."""
        share, _ = self.standing.failed(self._replica.demand(), REFUSED, self._seconds)
        self._replica.take(share)

    def join(self) -> None:
        """Before the first request: one call that takes no time."""
        renewal = self.standing.renewal(self._replica.demand(), self._seconds)
        granted, signals = self._fleet.store.renew(self.name, renewal, self._time.now)
        self._answered(granted, signals, self._seconds)

    def call(self) -> None:
        """And all that follows from it, the next call included."""
        if not self.lives:
            return
        demand, sent_at = self._replica.demand(), self._seconds
        renewal = self.standing.renewal(demand, sent_at)
        self._outcomes.calls += 1

        def heard() -> None:
            if not self._fleet.store.can_be_reached:
                self._after(ANSWER_SECONDS / 2, lambda: failed(REFUSED))
                return
            granted, signals = self._fleet.store.renew(self.name, renewal, self._time.now)
            self._after(ANSWER_SECONDS / 2, lambda: answered(granted, signals))

        def failed(reason: str) -> None:
            if self.lives:
                self._take(*self.standing.failed(demand, reason, self._seconds))
                self._call_later()

        def answered(granted: Granted, signals: Sequence[str]) -> None:
            if self.lives:
                self._answered(granted, signals, sent_at)
                self._call_later()

        if self.is_cut_off:
            self._after(self._fleet.rules.call_seconds_max, lambda: failed(TIMED_OUT))
        else:
            self._after(ANSWER_SECONDS / 2, heard)

    def _call_later(self) -> None:
        self._after(self.standing.pause_seconds(self._fleet.chance), self.call)

    def _answered(self, granted: Granted, signals: Sequence[str], sent_at: float) -> None:
        self._take(*self.standing.answered(granted, signals, sent_at, self._seconds))

    def _take(self, share: Share, change: Change | None) -> None:
        self._replica.take(share)
        if change is not None:
            self._outcomes.changes.append((self._time.now, self.name, change))

    @property
    def state(self) -> State:
        return self.standing.state


class VirtualFleet:
    """`shared`: by a store; otherwise one gateway has all of the budget, and several an n-th part each."""

    def __init__(
        self,
        parameters: PolicyParameters,
        replicas: int,
        slice_seconds: float = 0.1,
        shared: bool = True,
        engine: Engine | None = None,
        seed: int = 1,
    ) -> None:
        self.time = VirtualTime()
        self.engine = engine or Engine()
        self.store = Store()
        self.outcomes = Outcomes()
        self.rules = FleetRules(slice_seconds=slice_seconds, replicas_assumed=replicas)
        self.chance = Random(seed)
        self.gateways = [VirtualGateway(f"r{i:03d}", parameters, self) for i in range(replicas)]
        for gateway in self.gateways:
            if shared:
                gateway.join()
                self.time.after(to_nanoseconds(self.chance.uniform(0, slice_seconds)), gateway.call)
            elif replicas > 1:
                gateway.divide()

    def book(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            self.time.at(arrival.at, partial(self._arrive, arrival))

    def _arrive(self, arrival: Arrival) -> None:
        following = self.gateways[arrival.replica :] + self.gateways[: arrival.replica]
        next(gateway for gateway in following if gateway.lives).submit(arrival)

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        self.time.at(to_nanoseconds(seconds), do)

    def run(self, until_seconds: float) -> Outcomes:
        self.time.run(to_nanoseconds(until_seconds))
        return self.outcomes

    @property
    def rates(self) -> tuple[int, ...]:
        """In force at all that live, together, by class; millitokens per second."""
        each = [gateway.admission.pools[0].buckets.rates for gateway in self.gateways if gateway.lives]
        return tuple(sum(rates) for rates in zip(*each, strict=True))

    @property
    def places(self) -> int:
        """The engine's, of all that live together."""
        slots = [g.admission.pools[0].slots[0] for g in self.gateways if g.lives]
        return sum(each.max_in_flight or 0 for each in slots)

    def let_through(self, begin_seconds: float, end_seconds: float) -> float:
        """Tokens per second."""
        begin, end = to_nanoseconds(begin_seconds), to_nanoseconds(end_seconds)
        tokens = sum(arrival.tokens for at, arrival in self.outcomes.paid if begin <= at < end)
        return tokens / (end_seconds - begin_seconds)

    def refused_in(self, begin_seconds: float, end_seconds: float) -> Counter[Priority]:
        begin, end = to_nanoseconds(begin_seconds), to_nanoseconds(end_seconds)
        return Counter(a.priority for a, _ in self.outcomes.refused if begin <= a.at < end)
