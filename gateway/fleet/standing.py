"""How a replica stands with the store: from answers and failures to the share that holds now. Pure.

    JOINING ──answer──▶ SHARED ──1 s without an answer──▶ HOLDING ──its lease ends──▶ ALONE
                           ▲                                 │                          │
                           └──────────── answer ─────────────┴──────────────────────────┘

A lease is counted from when the call was *sent*, by the replica's own clock; the store counts from when it
heard, by its own. Whether it has ended is looked at when a call has failed, and the next one may take a
pause and its whole time to fail: by so much the replica lets it end early. So it has always stopped before
the store gives its part to others, whatever their clocks show. When all have lost the store, their leases end
within moments of each other: each goes down to its local share at once, and up to it when all have gone down,
so that the sum stays within the budget. What it then holds it declares when the store is back, as always.

    late         = longest pause after a failure + longest call
    own lease    = lease − late, from when the last answered call was sent
    raised after = late + longest slice + 2 longest calls, from the end of the own lease
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

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

PAUSE_SPREAD = (0.9, 1.1)
RETRY_SPREAD = (2 / 3, 4 / 3)
"""Pauses are more or less than their rule by chance: calls of different replicas are kept apart, and so are
their attempts to find the store again."""
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

    @property
    def late_seconds_max(self) -> float:
        """From the end of one failed call to that of the next: so late it may see that a lease is over."""
        return RETRY_SPREAD[1] * self.retry_seconds + self.call_seconds_max

    @property
    def own_lease_seconds(self) -> float:
        """From when the call was sent: seen late, it is still over before the store's."""
        return self.lease_seconds - self.late_seconds_max

    @property
    def raised_after_seconds(self) -> float:
        """After the end of its own lease. Another replica that lost the store at the same moment was heard at
        most an answer, a slice and a call that did not arrive later; when its lease ends at the store it has
        gone down."""
        return self.late_seconds_max + PAUSE_SPREAD[1] * self.slice_seconds + 2 * self.call_seconds_max


@dataclass(frozen=True, slots=True)
class Change:
    """One line for the log. `before` and `after` are the same where the store stays away for another reason,
    and where it has not been reached since the start."""

    before: State
    after: State
    reason: str
    """Of the failure; empty where the store has answered."""
    message: str
    """What the store said, or who could not reach it."""
    replicas: int


class Standing:
    """Times are seconds of any clock that does not go back."""

    def __init__(self, rules: FleetRules) -> None:
        self._rules = rules
        self._epoch = self._fence = 0
        self._good_from: float | None = None
        self._signals_at = float("-inf")
        self._counting_until = float("-inf")
        self._failing = self._lowered = self._at_once = False
        self._told: frozenset[str] = frozenset()
        self.share = Share(State.JOINING, rules.replicas_assumed)

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
        self._failing, self._lowered = False, _is_less(granted, self.share)
        self._told = frozenset()
        before = self.share.state
        self.share = Share(
            state=State.SHARED,
            replicas=replicas,
            pools=granted.pools,
            places=granted.places,
            allowances=granted.allowances,
            leads=bool(granted.fence),
        )
        change = None if before is State.SHARED else Change(before, State.SHARED, "", "", replicas)
        return replace(self.share, signals=tuple(signals)), change

    def failed(
        self, demand: Demand, reason: str, now: float, message: str = ""
    ) -> tuple[Share, Change | None]:
        """A call has failed: the share that holds until the next one. A change is told, and once each reason
        why the store is away."""
        self._failing = True
        before, self.share = self.share.state, self._without_store(demand, now)
        state = self.share.state
        if state is State.SHARED or (state is before and reason in self._told):
            return self.share, None
        self._told |= {reason}
        return self.share, Change(before, state, reason, message, self.share.replicas)

    def pause_seconds(self, chance: Random) -> float:
        """Until the next call, to be asked once after each. None after an answer that takes something away,
        since the others wait for this replica to say that it has heard; but never twice in a row."""
        if self._failing:
            self._at_once = False
            return self._rules.retry_seconds * chance.uniform(*RETRY_SPREAD)
        self._at_once = self._lowered and not self._at_once
        return 0.0 if self._at_once else self._rules.slice_seconds * chance.uniform(*PAUSE_SPREAD)

    # ------------------------------------------------------------------ without the store

    def _without_store(self, demand: Demand, now: float) -> Share:
        if self._good_from is None:
            return self._local(State.JOINING, demand, may_raise=True)
        silent, lease = now - self._good_from, self._rules.own_lease_seconds
        if silent >= lease:
            return self._local(State.ALONE, demand, silent >= lease + self._rules.raised_after_seconds)
        return self._held(demand) if silent >= self._rules.holding_after_seconds else self.share

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
