"""How a replica stands with the store: from answers and failures to the share that holds now. Pure.

    JOINING ──answer──▶ SHARED ──1 s without an answer──▶ HOLDING ──its lease ends──▶ ALONE
                           ▲                                 │                          │
                           └──────────── answer ─────────────┴──────────────────────────┘

A lease is counted from when the call was *sent*, by the replica's own clock; the store counts from when it
heard, by its own. So the replica has always stopped before the store gives its part to others, whatever their
clocks show. When all have lost the store, their leases end within moments of each other: each goes down to
its local share at once, and up to it a second later, so that the sum stays within the budget. What it then
holds it declares when the store is back, as always.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from gateway.fleet.contract import (
    AllowanceShare,
    Demand,
    PlacesShare,
    PoolShare,
    Share,
    State,
)
from gateway.fleet.messages import Granted, Renewal

RAISED_AFTER_SECONDS = 1.0
"""After the lease has ended: by then everybody who had more has gone down."""
SIGNALS_EVERY_SECONDS = 0.95
COUNTED_WITHIN_SECONDS = 1.0
"""A store that was emptied counts the replicas anew, as they come: so long there are no fewer than before."""


@dataclass(frozen=True, slots=True)
class FleetRules:
    slice_seconds: float = 0.1
    lease_seconds: float = 10.0
    call_seconds_max: float = 0.5
    retry_seconds: float = 0.3
    """Between calls while they fail, a third more or less by chance."""
    holding_after_seconds: float = 1.0
    replicas_assumed: int = 1
    """By a replica that has not reached the store since its start."""


@dataclass(frozen=True, slots=True)
class Change:
    """One line for the log."""

    before: State
    after: State
    reason: str
    """Of the failure; empty where the store has answered."""
    replicas: int


class Standing:
    """Times are seconds of any clock that does not go back."""

    def __init__(self, rules: FleetRules) -> None:
        self._rules = rules
        self._epoch = self._fence = 0
        self._good_from: float | None = None
        self._signals_at = float("-inf")
        self._counting_until = float("-inf")
        self.share = Share(State.JOINING, rules.replicas_assumed)
        self.lowered = False
        """By its last answer: the others wait for this replica to say that it has heard."""

    @property
    def state(self) -> State:
        return self.share.state

    def renewal(self, demand: Demand, now: float, may_lead: bool = True) -> Renewal:
        pools, places, allowances = _by_name(self.share)
        return Renewal(
            epoch=self._epoch,
            lease_ms=round(self._rules.lease_seconds * 1000),
            wants_lead=may_lead,
            fence=self._fence,
            wants_signals=now >= self._signals_at + SIGNALS_EVERY_SECONDS,
            demand=demand,
            held=tuple(
                pools[told.pool].rates if told.pool in pools else (0,) * len(told.budget)
                for told in demand.pools
            ),
            limits=tuple(
                places[told.name].limit if told.name in places else told.in_use for told in demand.places
            ),
            untils=tuple(
                allowances[told.name].until if told.name in allowances else told.used
                for told in demand.allowances
            ),
            levels=tuple(
                allowances[told.name].level if told.name in allowances else told.per_minute
                for told in demand.allowances
            ),
        )

    def answered(
        self, granted: Granted, signals: Sequence[str], sent_at: float, now: float
    ) -> tuple[Share, Change | None]:
        replicas = granted.replicas
        if self._epoch not in (0, granted.epoch):
            self._counting_until = now + COUNTED_WITHIN_SECONDS
        if now < self._counting_until:
            replicas = max(replicas, self.share.replicas)
        self._epoch = granted.epoch
        self._fence = granted.fence or self._fence
        self._good_from = sent_at
        if signals:
            self._signals_at = now
        self.lowered = _is_less(granted, self.share)
        share, change = self._now(
            Share(
                state=State.SHARED,
                replicas=replicas,
                pools=granted.pools,
                places=granted.places,
                allowances=granted.allowances,
                leads=bool(granted.fence),
            ),
            "",
        )
        return replace(share, signals=tuple(signals)), change

    def failed(self, demand: Demand, reason: str, now: float) -> tuple[Share, Change | None]:
        """A call has failed: the share that holds until the next one."""
        if self._good_from is None:
            return self._now(self._local(State.JOINING, demand, may_raise=True), reason)
        silent = now - self._good_from
        if silent >= self._rules.lease_seconds:
            may_raise = silent >= self._rules.lease_seconds + RAISED_AFTER_SECONDS
            return self._now(self._local(State.ALONE, demand, may_raise), reason)
        if silent >= self._rules.holding_after_seconds:
            return self._now(self._held(demand), reason)
        return self.share, None

    def _now(self, share: Share, reason: str) -> tuple[Share, Change | None]:
        before, self.share = self.share.state, share
        if before is share.state:
            return share, None
        return share, Change(before, share.state, reason, share.replicas)

    # ------------------------------------------------------------------ without the store

    def _held(self, demand: Demand) -> Share:
        """The last share; only that allowances, which would run out, get their part of what flows in."""
        flows_in = {told.name: told.per_minute // self.share.replicas for told in demand.allowances}
        return Share(
            state=State.HOLDING,
            replicas=self.share.replicas,
            pools=self.share.pools,
            places=self.share.places,
            allowances=tuple(
                replace(had, per_minute=flows_in.get(had.name, 0)) for had in self.share.allowances
            ),
        )

    def _local(self, state: State, demand: Demand, may_raise: bool) -> Share:
        """The n-th part of all that the fleet may use; of places at least one."""
        replicas = self.share.replicas
        pools, places, allowances = _by_name(self.share)
        new_pools = []
        for pool in demand.pools:
            had = pools.get(pool.pool)
            rates = tuple(rate // replicas for rate in pool.budget)
            if had is not None and not may_raise:
                rates = tuple(min(rate, held) for rate, held in zip(rates, had.rates, strict=True))
            fence = 0 if had is None else had.fence
            new_pools.append(
                PoolShare(
                    pool.pool, rates, pool.budget, fence, (False,) * len(rates), rates, rates, pool.nominal
                )
            )
        new_places = []
        for told in demand.places:
            limit = max(told.limit // replicas, 1) if told.limit else 0
            if told.name in places and not may_raise:
                limit = min(limit, places[told.name].limit)
            new_places.append(PlacesShare(told.name, limit))
        new_allowances = []
        for bucket in demand.allowances:
            part = bucket.per_minute // replicas
            known = allowances.get(bucket.name)
            until = bucket.used + part if known is None else known.until
            new_allowances.append(AllowanceShare(bucket.name, until, max(until - bucket.used, 0), part))
        return Share(
            state=state,
            replicas=replicas,
            pools=tuple(new_pools),
            places=tuple(new_places),
            allowances=tuple(new_allowances),
            leads=True,
        )


def _is_less(granted: Granted, share: Share) -> bool:
    pools, places, _ = _by_name(share)
    return any(
        sum(pool.rates) < sum(pools[pool.pool].rates) - sum(pool.budget) // 1000
        for pool in granted.pools
        if pool.pool in pools
    ) or any(told.limit < places[told.name].limit for told in granted.places if told.name in places)


def _by_name(
    share: Share,
) -> tuple[Mapping[str, PoolShare], Mapping[str, PlacesShare], Mapping[str, AllowanceShare]]:
    return (
        {pool.pool: pool for pool in share.pools},
        {told.name: told for told in share.places},
        {bucket.name: bucket for bucket in share.allowances},
    )
