"""What `renew.lua` and `leave.lua` do, in Python: for the simulation, and to hold the scripts against.

It keeps the same books and computes the same numbers; only that what all hold together is added up anew for
each call, where the script keeps running totals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor

from gateway.fleet.contract import (
    AllowanceDemand,
    AllowanceShare,
    ByClass,
    Demand,
    PlacesDemand,
    PlacesShare,
    PoolDemand,
    PoolShare,
)
from gateway.fleet.messages import Granted, Renewal
from gateway.fleet.shares import allowance, between_classes, between_replicas, places, raised

SETTLE_MS = 500
"""After the store was emptied, or nobody has reached it for the length of a lease: until everybody will have
said what it holds, nobody gets more."""
TURN_MS = 1000
"""For so long a replica comes first where a tenant's bucket holds too little for all."""
PLAN_MS = 1
"""A plan is good for so long for each replica: it costs as much, so all plans together cost the same."""


@dataclass(slots=True)
class _Record:
    expires_ms: int
    demand: Demand
    counted: dict[str, int]
    used: dict[str, int]


@dataclass(slots=True)
class _Plan:
    made_ms: int
    replicas: int
    pools: dict[str, tuple[list[float], list[int], list[int]]] = field(default_factory=dict)
    """Of each class what all may use, how many ask for it, and where it is active."""
    allowances: dict[str, tuple[int, int, str, tuple[int, int]]] = field(default_factory=dict)
    """Of each what all want, how many ask, whose turn it is, what that one wants and its largest request."""
    rates: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    places: dict[tuple[str, str], int] = field(default_factory=dict)


class Ledger:
    """`now` is in microseconds and the store's own; a new ledger is an empty store."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._settling_until_ms = 0
        self._leases_end_ms = 0
        self._members: dict[str, _Record] = {}
        self._budgets: dict[str, tuple[int, PoolDemand]] = {}
        """The fence of whoever set it, and what that one told."""
        self._levels: dict[str, tuple[float, int]] = {}
        self._lead: tuple[str, int, int] | None = None  # id, fence, expires_ms
        self._plan: _Plan | None = None
        self.plans = 0

    # ------------------------------------------------------------------ the two calls

    def renew(self, now: int, member: str, renewal: Renewal) -> Granted:
        now_ms = now // 1000
        demand = renewal.demand
        epoch = self._begin(now, renewal)
        fence = self._elect(now, member, renewal)
        for pool in demand.pools:
            if pool.pool not in self._budgets or (fence and renewal.fence == fence):
                self._budgets[pool.pool] = (fence if renewal.fence == fence else 0, pool)
        levels = [
            self._level(now_ms, self._members.get(member), told, last)
            for told, last in zip(demand.allowances, renewal.levels, strict=True)
        ]
        record = _Record(now_ms + renewal.lease_ms, demand, _declared(renewal), {})
        record.used = {told.name: told.used for told in demand.allowances}
        self._members[member] = record
        plan = self._planned(now_ms, member, demand)
        settling = now_ms < self._settling_until_ms
        granted = Granted(
            epoch=epoch,
            replicas=plan.replicas,
            fence=fence,
            pools=tuple(
                self._pool_share(member, plan, pool, held, settling)
                for pool, held in zip(demand.pools, renewal.held, strict=True)
            ),
            places=tuple(
                self._places_share(member, plan, told, limit, settling)
                for told, limit in zip(demand.places, renewal.limits, strict=True)
            ),
            allowances=tuple(
                self._allowance_share(member, plan, told, until, level, settling)
                for told, until, level in zip(demand.allowances, renewal.untils, levels, strict=True)
            ),
        )
        record.counted = _accounted(renewal, granted)
        return granted

    def leave(self, member: str) -> None:
        if self._members.pop(member, None) is not None:
            self._plan = None
            if self._lead is not None and self._lead[0] == member:
                self._lead = None

    def held(self, name: str) -> int:
        """What all hold together: "p:" pool, "l:" places, "a:" allowance."""
        return sum(record.counted.get(name, 0) for record in self._members.values())

    # ------------------------------------------------------------------ epoch, lead, levels

    def _begin(self, now: int, renewal: Renewal) -> int:
        if self._epoch is None:
            self._epoch = now
        settled_ms = self._epoch // 1000 + SETTLE_MS
        if renewal.epoch not in (0, self._epoch) and now // 1000 < settled_ms:
            self._settling_until_ms = settled_ms
        if renewal.epoch == self._epoch and now // 1000 >= self._leases_end_ms:
            self._settling_until_ms = now // 1000 + SETTLE_MS
        self._leases_end_ms = max(self._leases_end_ms, now // 1000 + renewal.lease_ms)
        return self._epoch

    def _elect(self, now: int, member: str, renewal: Renewal) -> int:
        """The fence with which the member leads, 0 if it does not."""
        now_ms = now // 1000
        if self._lead is not None and self._lead[2] <= now_ms:
            self._lead = None
        if self._lead is not None and self._lead[0] == member and not renewal.wants_lead:
            self._lead = None
        elif self._lead is None and renewal.wants_lead:
            self._lead = member, max(now, renewal.fence + 1), 0
        if self._lead is None or self._lead[0] != member:
            return 0
        self._lead = member, self._lead[1], now_ms + renewal.lease_ms
        return self._lead[1]

    def _level(self, now_ms: int, former: _Record | None, told: AllowanceDemand, last: int) -> float:
        full = told.per_minute
        known = self._levels.get(told.name)
        if known is None:
            level: float = min(last, full)
        else:
            level = min(known[0] + full * max(now_ms - known[1], 0) / 60000, full)
        if former is not None and former.expires_ms > now_ms and told.name in former.used:
            level = min(max(level - (told.used - former.used[told.name]), -full), full)
        self._levels[told.name] = level, now_ms
        return level

    # ------------------------------------------------------------------ what is fair

    def _planned(self, now_ms: int, member: str, demand: Demand) -> _Plan:
        plan = self._plan
        if plan is not None and now_ms < plan.made_ms + PLAN_MS * plan.replicas:
            planned_for = all((member, pool.pool) in plan.rates for pool in demand.pools)
            if planned_for and all((member, told.name) in plan.places for told in demand.places):
                return plan
        self._members = {m: r for m, r in sorted(self._members.items()) if r.expires_ms > now_ms}
        plan = self._plan = self._new_plan(now_ms)
        self.plans += 1
        return plan

    def _new_plan(self, now_ms: int) -> _Plan:
        plan = _Plan(now_ms, len(self._members))
        pools: dict[str, list[tuple[str, PoolDemand]]] = {}
        wanted: dict[str, list[tuple[str, PlacesDemand]]] = {}
        asks: dict[str, list[tuple[str, AllowanceDemand]]] = {}
        for member, record in self._members.items():
            for pool in record.demand.pools:
                pools.setdefault(pool.pool, []).append((member, pool))
            for told in record.demand.places:
                wanted.setdefault(told.name, []).append((member, told))
            for bucket in record.demand.allowances:
                asks.setdefault(bucket.name, []).append((member, bucket))
        for name, told_by_each in asks.items():
            of_all = sum(bucket.wanted for _, bucket in told_by_each)
            wanting = [(m, (b.wanted, b.largest)) for m, b in told_by_each if b.wanted > 0]
            first = wanting[now_ms // TURN_MS % len(wanting)] if wanting else ("", (0, 0))
            plan.allowances[name] = of_all, len(told_by_each), *first
        for name, asking in pools.items():
            self._plan_pool(plan, name, asking)
        self._budgets = {name: told for name, told in self._budgets.items() if name in pools}
        for name, told_by in wanted.items():
            limit = min(told.limit for _, told in told_by)
            by_class = [told.by_class for _, told in told_by]
            shares = places(limit, [told.wanted for _, told in told_by], now_ms // 100, by_class)
            for (member, _), share in zip(told_by, shares, strict=True):
                plan.places[member, name] = share
        return plan

    def _plan_pool(self, plan: _Plan, name: str, asking: Sequence[tuple[str, PoolDemand]]) -> None:
        first = asking[0][1]
        leads = self._budgets[name][1] if name in self._budgets else first
        rates = leads.budget
        classes = range(len(rates))
        by_class = [[_wanted(pool, k) for _, pool in asking] for k in classes]
        totals = between_classes(
            rates,
            [float(sum(wanted)) for wanted in by_class],
            leads.ceiling_shares,
            [any(pool.active[k] for _, pool in asking) for k in classes],
        )
        shares = [between_replicas(totals[k], [_flows(pool, k) for _, pool in asking]) for k in classes]
        for i, (member, _) in enumerate(asking):
            plan.rates[member, name] = [shares[k][i] for k in classes]
        askers = [sum(wanted > 0 for wanted in by_class[k]) for k in classes]
        plan.pools[name] = totals, askers, [sum(pool.active[k] for _, pool in asking) for k in classes]

    # ------------------------------------------------------------------ what it gets

    def _held_by_others(self, member: str, name: str) -> int:
        return self.held(name) - self._members[member].counted.get(name, 0)

    def _pool_share(
        self, member: str, plan: _Plan, pool: PoolDemand, held: ByClass, settling: bool
    ) -> PoolShare:
        fence, told_by_leader = self._budgets[pool.pool]
        budget = told_by_leader.budget
        totals, askers, actives = plan.pools[pool.pool]
        free = sum(budget) - self._held_by_others(member, f"p:{pool.pool}")
        rates = raised(plan.rates[member, pool.pool], held, sum(held) if settling else free)
        return PoolShare(
            pool=pool.pool,
            rates=tuple(rates),
            budget=budget,
            fence=fence,
            active=tuple(
                there > (1 if here else 0) for there, here in zip(actives, pool.active, strict=True)
            ),
            prospects=tuple(
                _prospect(_wanted(pool, k), fair, totals[k], askers[k])
                for k, fair in enumerate(plan.rates[member, pool.pool])
            ),
            own=tuple(
                rate if total <= guaranteed else floor(rate * (guaranteed / total))
                for rate, total, guaranteed in zip(rates, totals, budget, strict=True)
            ),
            nominal=told_by_leader.nominal,
        )

    def _places_share(
        self, member: str, plan: _Plan, told: PlacesDemand, limit: int, settling: bool
    ) -> PlacesShare:
        others = self._held_by_others(member, f"l:{told.name}")
        may = min(plan.places[member, told.name], max(told.limit - others, 0))
        return PlacesShare(told.name, min(may, limit) if settling else may)

    def _allowance_share(
        self, member: str, plan: _Plan, told: AllowanceDemand, until: int, level: float, settling: bool
    ) -> AllowanceShare:
        of_all, askers, first, wants = plan.allowances.get(told.name, (0, 0, "", (0, 0)))
        of_all = max(of_all, told.wanted)
        fair = allowance(level, told.wanted, of_all, max(askers, 1), wants, first == member)
        may = max(min(fair, floor(level - self._held_by_others(member, f"a:{told.name}"))), 0)
        if settling:
            may = min(may, max(until - told.used, 0))
        return AllowanceShare(told.name, told.used + may, floor(level))


def _prospect(asks: int, fair: int, total: float, askers: int) -> int:
    """Who asks for more than its part would get no more; who does not, an equal part at least."""
    if asks > fair:
        return fair
    return max(fair, floor(total / max(askers + (0 if asks else 1), 1)))


def _flows(pool: PoolDemand, k: int) -> list[tuple[str, float, float]]:
    return [(flow.tenant, float(flow.rate), float(flow.tenants)) for flow in pool.flows[k]]


def _wanted(pool: PoolDemand, k: int) -> int:
    return sum(flow.rate for flow in pool.flows[k])


def _declared(renewal: Renewal) -> dict[str, int]:
    demand = renewal.demand
    declared: dict[str, int] = {}
    for pool, held in zip(demand.pools, renewal.held, strict=True):
        declared[f"p:{pool.pool}"] = sum(held)
    for told, limit in zip(demand.places, renewal.limits, strict=True):
        declared[f"l:{told.name}"] = max(limit, told.in_use)
    for bucket, until in zip(demand.allowances, renewal.untils, strict=True):
        declared[f"a:{bucket.name}"] = max(until - bucket.used, 0)
    return declared


def _accounted(renewal: Renewal, granted: Granted) -> dict[str, int]:
    """What the replica uses still, or will: the answer may come late, or never."""
    got: dict[str, int] = {}
    for pool in granted.pools:
        got[f"p:{pool.pool}"] = sum(pool.rates)
    for told in granted.places:
        got[f"l:{told.name}"] = told.limit
    for bucket, asked in zip(granted.allowances, renewal.demand.allowances, strict=True):
        got[f"a:{bucket.name}"] = bucket.until - asked.used
    return _larger(_declared(renewal), got)


def _larger(some: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    return {name: max(amount, others[name]) for name, amount in some.items()}
