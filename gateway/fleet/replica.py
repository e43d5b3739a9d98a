"""A gateway's policy as one replica of a fleet: tells what is asked of it, puts in force what it gets.

Names of what is shared: a pool by the first of its upstreams, places and tokens of an upstream, places of a
key, minutes of a tenant. Replicas that use the same name share.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from gateway.fleet.contract import (
    AllowanceDemand,
    Demand,
    Flow,
    PlacesDemand,
    PoolDemand,
    PoolShare,
    Share,
    State,
)
from gateway.fleet.signals import PooledSignals, Report, by_pool, signals, told
from gateway.policy.admission import Admission
from gateway.policy.budget_part import BudgetPart, Parts
from gateway.policy.clock import Clock
from gateway.policy.control_signals import Measured
from gateway.policy.pool import Pool
from gateway.policy.request import PRIORITIES

FLOWS_MAX = 30
"""Tenants of a class that are told by name; what all smaller ones ask is told as one."""
OTHERS = ""
PLACES, TOKENS, KEY, MINUTE = "places", "tokens", "key", "minute"


class Gate(Protocol):
    """Who drives the policy: `runtime.AdmissionGate`, or a simulation."""

    @property
    def admission(self) -> Admission: ...

    def take_parts(self, parts: Parts) -> None: ...

    def pooled(self, measured: Mapping[str, Measured]) -> None: ...


class Replica:
    """`name` is told to the leader with what was measured: the same that the store knows it by."""

    def __init__(self, name: str, gate: Gate, clock: Clock) -> None:
        self._name = name
        self._gate = gate
        self._clock = clock
        self._pooled: dict[str, PooledSignals] = {}
        self._as_of: list[tuple[str, int]] = []  # of what was told last
        self._told = told(Report(name, ()))

    # ------------------------------------------------------------------ what is asked of it

    def demand(self) -> Demand:
        admission, now = self._gate.admission, self._clock.now()
        return Demand(
            pools=tuple(_pool_demand(pool, now) for pool in admission.pools),
            places=tuple(self._places(now)),
            allowances=tuple(
                AllowanceDemand(_joined(MINUTE, what, tenant), *use)
                for (tenant, what), use in admission.tenants.use(now)
            ),
            signals=self._signals(),
        )

    def _places(self, now: int) -> Iterator[PlacesDemand]:
        for pool in self._gate.admission.pools:
            waiting, tokens_waiting = zip(*map(pool.waiting_for_places, PRIORITIES), strict=True)
            for slots in pool.slots:
                places, tokens = slots.whole_limits
                if places is not None:
                    yield _by_class(_joined(PLACES, slots.name), places, slots.in_flight, waiting)
                if tokens is not None:
                    in_use = slots.tokens_by_class()
                    yield _by_class(_joined(TOKENS, slots.name), tokens, in_use, tokens_waiting)
        for use in self._gate.admission.tenants.key_places.use(now):
            yield PlacesDemand(_joined(KEY, use.key), use.limit, use.in_use, use.wanted)

    def _signals(self) -> str:
        """Measured once a second, told ten times."""
        loops = [(pool.name, pool.control) for pool in self._gate.admission.pools]
        measured = [(name, loop.measured) for name, loop in loops if loop.measured and not loop.is_static]
        as_of = [(name, each.at) for name, each in measured]
        if as_of != self._as_of:
            self._as_of = as_of
            self._told = told(Report(self._name, tuple(signals(name, each) for name, each in measured)))
        return self._told

    # ------------------------------------------------------------------ what it gets

    def take(self, share: Share) -> None:
        places = {of_all.name: of_all.limit for of_all in share.places}
        self._gate.take_parts(
            Parts(
                gateways=share.replicas,
                pools={pool.pool: _part(pool, share) for pool in share.pools},
                engines={
                    slots.name: (
                        places.get(_joined(PLACES, slots.name)),
                        places.get(_joined(TOKENS, slots.name)),
                    )
                    for pool in self._gate.admission.pools
                    for slots in pool.slots
                },
                keys=_only(KEY, places),
                minutes={
                    (tenant, what): (told_of.until, told_of.level, told_of.per_minute)
                    for told_of in share.allowances
                    for _, what, tenant in [told_of.name.split(":", 2)]
                },
            )
        )
        if share.signals and share.leads:
            self._decide(share.signals)

    def _decide(self, messages: Sequence[str]) -> None:
        """Tell what all have measured to the law of this one."""
        now = self._clock.now()
        found = by_pool(messages)
        self._pooled = {name: self._pooled.get(name) or PooledSignals() for name in found}
        self._gate.pooled({name: self._pooled[name].measured(each, now) for name, each in found.items()})


def _pool_demand(pool: Pool, now: int) -> PoolDemand:
    return PoolDemand(
        pool=pool.name,
        budget=tuple(pool.control.rates),
        ceiling_shares=pool.control.limits.ceiling_shares,
        active=tuple(pool.activity.here(p, now) for p in PRIORITIES),
        flows=tuple(_flows(pool.demand(p, now)) for p in PRIORITIES),
        nominal=pool.control.limits.nominal,
    )


def _by_class(name: str, limit: int, in_use: Sequence[int], waiting: Sequence[int]) -> PlacesDemand:
    wanted = tuple(have + more for have, more in zip(in_use, waiting, strict=True))
    return PlacesDemand(name, limit, sum(in_use), sum(wanted), wanted)


def _flows(asked: Mapping[str, int]) -> tuple[Flow, ...]:
    """The largest by name, the rest as one."""
    largest = sorted(asked.items(), key=lambda each: (-each[1], each[0]))
    flows = [Flow(tenant, rate) for tenant, rate in largest[:FLOWS_MAX]]
    if rest := largest[FLOWS_MAX:]:
        flows.append(Flow(OTHERS, sum(rate for _, rate in rest), len(rest)))
    return tuple(flows)


def _part(pool: PoolShare, share: Share) -> BudgetPart:
    return BudgetPart(
        rates=pool.rates,
        own_rates=pool.own,
        prospects=pool.prospects,
        budget=pool.budget,
        nominal=pool.nominal,
        gateways=share.replicas,
        active_elsewhere=pool.active,
        decides=share.leads,
        alone=share.state in (State.JOINING, State.ALONE),
    )


def _joined(*words: str) -> str:
    """Only the last one may hold a colon."""
    return ":".join(words)


def _only(kind: str, places: Mapping[str, int]) -> dict[str, int]:
    start = kind + ":"
    return {name.removeprefix(start): limit for name, limit in places.items() if name.startswith(start)}
