"""A gateway's policy as a replica: what it tells, what it puts in force, and several over one ledger."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import pytest

from gateway.fleet.contract import AllowanceShare, PlacesShare, PoolShare, Share, State
from gateway.fleet.ledger import Ledger
from gateway.fleet.replica import FLOWS_MAX, OTHERS, Replica
from gateway.fleet.signals import by_pool
from gateway.fleet.standing import FleetRules, Standing
from gateway.policy.admission import Admission, Delivered
from gateway.policy.budget_part import Parts
from gateway.policy.clock import ManualClock
from gateway.policy.control_signals import Measured
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import PRIORITIES, Priority, Stage, Ticket, Usage
from tests.support.control import parameters
from tests.support.policy_settings import P0, P1, P2, ask, policy, upstream

SLICE = 0.1
GPU = upstream("gpu", tokens_per_second=1000, max_in_flight=30)
BUDGET = (600_000, 350_000, 50_000)
LIMIT = 6000


def settings(*upstreams: Any, **given: Any) -> PolicyParameters:
    """No wait is ever over; a tenant with a minute and a key with places."""
    tenants = {"acme": {"tokens_per_minute": LIMIT}, "tiny": {"requests_per_minute": 2}}
    return policy(*(upstreams or (GPU,)), tenants=tenants, keys={"k": 10}, **given)


class Gateway:
    """The policy, its driver and its standing with the store."""

    def __init__(self, name: str, made: PolicyParameters, clock: ManualClock, replicas: int = 1) -> None:
        self.name, self.clock = name, clock
        self.admission = Admission(made, clock)
        self.replica = Replica(name, self, clock)
        self.standing = Standing(FleetRules(replicas_assumed=replicas))
        self.serving: list[Ticket] = []
        self.refused: list[Ticket] = []
        self.parts: list[Parts] = []

    def take_parts(self, parts: Parts) -> None:
        self.parts.append(parts)
        self.admission.take_parts(parts)

    def pooled(self, measured: Mapping[str, Measured]) -> None:
        self.admission.pooled(measured)

    def submit(self, priority: Priority = P1, tokens: int = 1, **given: Any) -> Ticket:
        ticket = self.admission.submit(ask(f"{next(_numbers)}", priority, tokens, **given))
        self.decide()
        return ticket

    def decide(self) -> None:
        for ticket in self.admission.take_decisions():
            (self.refused if ticket.refusal else self.serving).append(ticket)

    def finish(self, ticket: Ticket, used: int | None = None) -> None:
        self.serving.remove(ticket)
        usage = Usage(ticket.input_tokens if used is None else used, 0)
        self.admission.finish(ticket, Outcome.COMPLETED, Delivered(usage))
        self.decide()

    def call(self, store: Ledger | None) -> None:
        """And have the answer at once; without a store it fails."""
        demand, seconds = self.replica.demand(), self.clock.now() / 1e9
        if store is None:
            share, _ = self.standing.failed(demand, "unreachable", seconds)
        else:
            renewal = self.standing.renewal(demand, seconds)
            granted = store.renew(round(seconds * 1e6), self.name, renewal)
            told = self.told_of(demand.signals) if granted.fence and renewal.wants_signals else ()
            share, _ = self.standing.answered(granted, told, seconds, seconds)
        self.replica.take(share)
        self.decide()

    def told_of(self, mine: str) -> tuple[str, ...]:
        return (mine,)

    @property
    def rates(self) -> list[int]:
        return self.admission.pools[0].buckets.rates


_numbers = count()


class Fleet:
    """All call once a slice, one after the other in an order that chance says."""

    def __init__(self, replicas: int, made: PolicyParameters | None = None) -> None:
        self.clock, self.store, self.chance = ManualClock(1000 * 10**9), Ledger(), Random(7)
        self.reached = True
        self.gateways = [Gateway(f"r{i}", made or settings(), self.clock, replicas) for i in range(replicas)]
        self.watch: Callable[[], None] = lambda: None

    def slice(self, act: Callable[[Gateway], object] | None = None) -> None:
        for gateway in self.chance.sample(self.gateways, len(self.gateways)):
            gateway.call(self.store if self.reached else None)
            self.watch()
        for gateway in self.gateways:
            gateway.admission.advance()
            gateway.decide()
            if act is not None:
                act(gateway)
        self.watch()

    def runs(
        self, seconds: float, act: Callable[[Gateway], object] | None = None, slice_seconds: float = SLICE
    ) -> None:
        for _ in range(round(seconds / slice_seconds)):
            self.slice(act)
            self.clock.advance(slice_seconds)

    @property
    def states(self) -> set[State]:
        return {gateway.standing.state for gateway in self.gateways}


def pool_share(name: str = "gpu", **given: Any) -> PoolShare:
    rates = tuple(rate // 2 for rate in BUDGET)
    return replace_share(PoolShare(name, rates, BUDGET, 1, (False, True, False), BUDGET, rates), **given)


def replace_share(share: PoolShare, **given: Any) -> PoolShare:
    return PoolShare(**{name: given.get(name, getattr(share, name)) for name in share.__struct_fields__})


def one(made: PolicyParameters | None = None) -> Gateway:
    return Gateway("r0", made or settings(), ManualClock())


# ---------------------------------------------------------------------- what it tells


def test_it_tells_the_fleets_budget_and_what_is_asked_of_it() -> None:
    """By class and tenant, with what waits, and where it is active."""
    gateway = one()
    gateway.replica.take(Share(State.SHARED, 2, (pool_share(),)))
    gateway.submit(P0, 100, tenant="a")
    gateway.submit(P0, 50, tenant="b")
    (told,) = gateway.replica.demand().pools
    assert (told.pool, told.budget, told.ceiling_shares) == ("gpu", BUDGET, (1.0, 1.0, 1.0))
    assert told.active == (True, False, False)
    assert [(flow.tenant, flow.rate) for flow in told.flows[P0]] == [("a", 50_000), ("b", 25_000)]
    assert told.flows[P1] == told.flows[P2] == ()


def test_all_but_the_largest_tenants_are_told_as_one() -> None:
    """Their sum, and how many they are."""
    gateway = one()
    gateway.replica.take(Share(State.SHARED, 2, (pool_share(),)))
    for i in range(FLOWS_MAX + 5):
        gateway.admission.pools[0]._recent_demand.asked(P0, f"t{i:02}", 20 * (i + 1), 0)  # type: ignore[union-attr]
    flows = gateway.replica.demand().pools[0].flows[P0]
    assert len(flows) == FLOWS_MAX + 1
    assert (flows[0].tenant, flows[0].rate) == (f"t{FLOWS_MAX + 4}", (FLOWS_MAX + 5) * 10)
    assert (flows[-1].tenant, flows[-1].rate, flows[-1].tenants) == (OTHERS, 150, 5)


def test_places_are_those_in_use_and_those_that_are_waited_for() -> None:
    """Of engines and of keys; engines without a limit are not told of."""
    gateway = one(settings(GPU, upstream("open", tokens_per_second=1000, max_in_flight=None, models=("o",))))
    gateway.replica.take(Share(State.SHARED, 2, (pool_share(),), (PlacesShare("places:gpu", 1),)))
    gateway.submit(P0, key="k")
    gateway.submit(P0, key="k")
    places = {told.name: (told.limit, told.in_use, told.wanted) for told in gateway.replica.demand().places}
    assert places == {"places:gpu": (30, 1, 2), "key:k": (10, 2, 2)}


def test_minutes_are_told_while_they_are_in_use() -> None:
    """In thousandths, by tenant and what is limited; names may hold anything."""
    made = replace(settings(), tenants={"a:b c": settings().tenants["acme"]})
    gateway = one(made)
    gateway.replica.take(Share(State.SHARED, 2))
    assert gateway.replica.demand().allowances == ()
    gateway.submit(P0, 100, tenant="a:b c")
    (told,) = gateway.replica.demand().allowances
    assert (told.name, told.per_minute, told.wanted) == ("minute:tokens:a:b c", LIMIT * 1000, 100_000)
    part = AllowanceShare(told.name, 150_000, 5_000_000)
    gateway.replica.take(Share(State.SHARED, 2, allowances=(part,)))
    assert gateway.submit(P0, 50, tenant="a:b c").refusal is None
    assert gateway.submit(P0, 1, tenant="a:b c").refusal is not None


def test_what_was_measured_is_told_unless_nobody_would_ask_for_it() -> None:
    """A static budget needs no signals."""
    for law, names in (("severity", ["gpu"]), ("static", [])):
        gateway = one(replace(parameters(law), upstreams=(GPU,)))
        gateway.replica.take(Share(State.SHARED, 2, (pool_share(),)))
        gateway.clock.advance(1)
        gateway.admission.advance()
        assert list(by_pool([gateway.replica.demand().signals])) == names


# ---------------------------------------------------------------------- what it puts in force


def test_a_share_is_put_in_force() -> None:
    """Rates, budget, prospects, activity and places; it decides where it leads, alone without a store."""
    gateway = one()
    shares = {"pools": (pool_share(),), "places": (PlacesShare("places:gpu", 12), PlacesShare("key:k", 4))}
    gateway.replica.take(Share(State.SHARED, 3, leads=True, **shares))
    (parts,) = gateway.parts
    part = parts.pools["gpu"]
    assert (part.rates, part.budget, part.prospects) == (tuple(r // 2 for r in BUDGET), BUDGET, BUDGET)
    assert (part.active_elsewhere, part.gateways) == ((False, True, False), 3)
    assert (part.decides, part.alone) == (True, False)
    assert (dict(parts.engines), dict(parts.keys)) == ({"gpu": (12, None)}, {"k": 4})
    for state, alone in ((State.JOINING, True), (State.HOLDING, False), (State.ALONE, True)):
        gateway.replica.take(Share(state, 3, **shares))
        assert gateway.parts[-1].pools["gpu"].alone is alone


def test_only_the_leader_listens_to_what_others_have_measured() -> None:
    """And each verdict counts once, however often it is told."""
    made = replace(parameters("severity"), upstreams=(GPU,))
    gateway, other = one(made), Gateway("r1", made, ManualClock())
    other.replica.take(Share(State.SHARED, 2, (pool_share(),)))
    other.clock.advance(1)
    other.admission.advance()
    heard: list[Mapping[str, Measured]] = []
    gateway.pooled = heard.append  # type: ignore[method-assign]
    for leads in (False, True):
        gateway.replica.take(
            Share(State.SHARED, 2, (pool_share(),), leads=leads, signals=(other.replica.demand().signals,))
        )
        assert len(heard) == leads
    assert list(heard[0]) == ["gpu"]


# ---------------------------------------------------------------------- several over one ledger


def test_the_rates_of_all_are_within_the_budget_through_every_state() -> None:
    """SHARED, HOLDING, ALONE, SHARED again, with an emptied store at last; and places of engine and key."""
    fleet = Fleet(3)

    def within() -> None:
        if State.JOINING in fleet.states:
            return
        for k in range(3):
            assert sum(g.rates[k] for g in fleet.gateways) <= sum(BUDGET)
        assert sum(sum(g.rates) for g in fleet.gateways) <= sum(BUDGET)
        assert sum(g.admission.upstream("gpu").max_in_flight or 0 for g in fleet.gateways) <= 30
        keys = [g.admission.tenants.key_places for g in fleet.gateways]
        assert sum(k._parts.get("k", 0) for k in keys) <= 10

    def load(gateway: Gateway) -> None:
        for _ in range(fleet.chance.choice([0, 0, 1, 4])):
            gateway.submit(fleet.chance.choice(PRIORITIES), 30, key="k", tenant=fleet.chance.choice("ab"))
        for ticket in list(gateway.serving):
            if fleet.chance.random() < 0.3:
                gateway.finish(ticket)

    fleet.runs(SLICE)
    fleet.watch = within
    for seconds, reached, state in (
        (5, True, State.SHARED),
        (6, False, State.HOLDING),
        (8, False, State.ALONE),
    ):
        fleet.reached = reached
        fleet.runs(seconds, load)
        assert fleet.states == {state}
    fleet.reached, fleet.watch = True, lambda: None
    fleet.slice(load)  # whoever comes back first is given what nobody has declared yet
    fleet.runs(SLICE, load)
    fleet.watch = within
    fleet.runs(3, load)
    assert fleet.states == {State.SHARED}
    fleet.store = Ledger()
    fleet.runs(3, load)
    assert sum(sum(g.rates) for g in fleet.gateways) > 0.9 * sum(BUDGET)
    _all_ends(fleet)


def _all_ends(fleet: Fleet) -> None:
    """Nothing is left taken when the last request has ended."""
    for _ in range(3000):
        for gateway in fleet.gateways:
            for ticket in list(gateway.serving):
                gateway.finish(ticket)
        fleet.runs(SLICE)
        if not any(
            g.serving or any(g.admission.pools[0].depth(p) for p in PRIORITIES) for g in fleet.gateways
        ):
            break
    for gateway in fleet.gateways:
        slots = gateway.admission.upstream("gpu")
        assert (slots.in_flight_total, slots.in_flight_tokens, slots.leases) == (0, 0, {})
        assert gateway.admission.tenants.key_places.in_flight("k") == 0
        assert gateway.admission.pools[0].queued_bytes == [0, 0, 0]


def test_places_of_a_key_follow_who_asks_for_them() -> None:
    """All of them go to the one gateway where it is used, and never more than all are in flight."""
    fleet = Fleet(3)
    fleet.runs(1)
    busy, others = fleet.gateways[0], fleet.gateways[1:]
    fleet.runs(2, lambda g: g.submit(P0, key="k") if g is busy else None)
    assert busy.admission.tenants.key_places.in_flight("k") == 10
    fleet.runs(2, lambda g: g.submit(P0, key="k"))
    assert sum(g.admission.tenants.key_places.in_flight("k") for g in fleet.gateways) == 10
    for ticket in list(busy.serving):
        busy.finish(ticket)
    fleet.runs(5, lambda g: g.submit(P0, key="k") if g in others else None)
    assert [g.admission.tenants.key_places.in_flight("k") for g in fleet.gateways] == [0, 5, 5]


def test_a_key_stays_within_its_limit_when_the_store_has_lost_everything() -> None:
    """Though the first to call believes for a moment that it is the only one."""
    fleet = Fleet(3)
    fleet.runs(2, lambda g: g.submit(P0, key="k"))
    assert sum(g.admission.tenants.key_places.in_flight("k") for g in fleet.gateways) == 10
    fleet.store = Ledger()
    for gateway in fleet.gateways:
        gateway.call(fleet.store)
        gateway.submit(P0, key="k")
        assert sum(g.admission.tenants.key_places.in_flight("k") for g in fleet.gateways) <= 10


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_minute_of_all_is_the_limit(replicas: int) -> None:
    """First use at every gateway at once, then a flood: never more than the limit, what flowed in, and one
    gateway's part; and never much less."""
    fleet = Fleet(replicas)
    fleet.runs(1)
    begin, used = fleet.clock.now(), 0

    def flood(gateway: Gateway) -> None:
        nonlocal used
        for _ in range(8):
            if gateway.submit(P0, 200, tenant="acme").refusal is None:
                used += 200
        for ticket in list(gateway.serving):
            gateway.finish(ticket)
        flowed = LIMIT * (fleet.clock.now() - begin) / 60e9
        assert used <= LIMIT + flowed + LIMIT / replicas

    fleet.runs(15, flood)
    assert used >= 1.15 * LIMIT


def test_what_was_not_used_after_all_is_there_for_another() -> None:
    """A refund at one gateway may be used at the other one."""
    fleet = Fleet(2)
    fleet.runs(1)
    one, other = fleet.gateways
    first = one.submit(P0, 3000, tenant="acme")
    fleet.runs(1)
    second = one.submit(P0, 2900, tenant="acme")
    assert {first.refusal, second.refusal} == {None}
    assert other.submit(P0, 3000, tenant="acme").refusal is None, "its part, in the first moment"
    fleet.runs(1)
    assert other.submit(P0, 2000, tenant="acme").refusal is not None
    one.finish(first, used=0)
    one.finish(second, used=0)
    fleet.runs(1, None)
    tried = other.submit(P0, 2000, tenant="acme")
    fleet.runs(1)
    assert None in (tried.refusal, other.submit(P0, 2000, tenant="acme").refusal)


def test_two_requests_a_minute_are_two_for_three_gateways() -> None:
    """Whoever is asked tries in vain once or twice; then both go through, wherever they come; no third."""
    fleet = Fleet(3)
    fleet.runs(1)
    let_in: list[str] = []

    def asks(gateway: Gateway) -> None:
        turn = int(fleet.clock.now() / 1e9 - 1001) // 3
        may = gateway.name == f"r{turn}" and gateway.name not in let_in
        if may and gateway.submit(P0, tenant="tiny").refusal is None:
            let_in.append(gateway.name)

    fleet.runs(9, asks)
    assert let_in == ["r0", "r1"]


@pytest.mark.parametrize("idle", [65, 80])
def test_a_tenant_that_comes_back_has_its_minute_again(idle: int) -> None:
    """After one in which nobody used it, wherever it comes."""
    fleet = Fleet(2)
    fleet.runs(1)
    one, other = fleet.gateways
    fleet.runs(2, lambda g: g.submit(P0, 500, tenant="acme") if g is one else None)
    for ticket in list(one.serving):
        one.finish(ticket)
    fleet.runs(idle, slice_seconds=1)
    for gateway in (other, one):
        first = gateway.submit(P0, 500, tenant="acme")
        assert first.refusal is None
        gateway.finish(first)
    fleet.runs(1)
    assert other.submit(P0, 2000, tenant="acme").refusal is None


@pytest.mark.parametrize("cost", [150, 2500])
def test_no_tenant_starves_that_asks_everywhere(cost: int) -> None:
    """One that wants more than its limit at all gateways gets its limit, also where a part of it would pay
    for none of its requests."""
    fleet = Fleet(3)
    fleet.runs(1)
    used = dict.fromkeys([g.name for g in fleet.gateways], 0)

    def asks(gateway: Gateway) -> None:
        gateway.submit(P0, cost, tenant="acme")
        for ticket in list(gateway.serving):
            used[gateway.name] += cost
            gateway.finish(ticket)

    fleet.runs(120, asks)
    flowed = LIMIT + LIMIT * 2
    assert 0.85 * flowed <= sum(used.values()) <= flowed
    assert min(used.values()) >= 0.1 * flowed


def test_a_silent_store_starves_no_tenant() -> None:
    """Each gateway has limit / gateways per minute for it, from the tenth second on also for larger requests,
    and together no more than the limit and a minute's part each."""
    fleet = Fleet(3)
    fleet.runs(1)
    fleet.reached = False
    fleet.runs(12, slice_seconds=0.5)
    begin = fleet.clock.now()
    used = dict.fromkeys([g.name for g in fleet.gateways], 0)

    def asks(gateway: Gateway) -> None:
        ticket = gateway.submit(P0, 2500, tenant="acme")
        if ticket.refusal is None:
            used[gateway.name] += 2500
            gateway.finish(ticket)

    fleet.runs(240, asks, slice_seconds=1)
    minutes = (fleet.clock.now() - begin) / 60e9
    for each in used.values():
        assert 0.8 * minutes * LIMIT / 3 <= each <= minutes * LIMIT / 3 + LIMIT / 3 + 2500


def test_one_who_begins_to_lead_goes_on_with_the_budget() -> None:
    """The law's place changes with its leader; what it had found out does not."""
    made = replace(parameters("severity"), upstreams=(GPU,))
    fleet = Fleet(2, made)
    fleet.runs(1)
    leader = next(g for g in fleet.gateways if g.standing.share.leads)
    (other,) = (g for g in fleet.gateways if g is not leader)
    cut = (400_000, 200_000, 20_000)
    leader.admission.pools[0].control.rates = cut
    fleet.runs(1)
    assert other.admission.pools[0].control.rates == cut
    fleet.gateways.remove(leader)
    fleet.store.leave(leader.name)
    fleet.runs(1)
    assert other.standing.share.leads
    rates = other.admission.pools[0].control.rates
    assert sum(cut) <= sum(rates) <= 1.1 * sum(cut), "its own law may have made a first step"
    assert other.rates == list(rates)


def test_idle_replicas_fall_silent_about_each_other() -> None:
    """Seconds after the last request no class is active anywhere, as far as anybody knows."""
    fleet = Fleet(2)
    fleet.runs(1)
    for gateway in fleet.gateways:
        gateway.finish(gateway.submit(P0))
    fleet.runs(8)
    now = fleet.clock.now()
    for gateway in fleet.gateways:
        pool = gateway.admission.pools[0]
        assert [pool.activity.here(p, now) for p in PRIORITIES] == [False] * 3
        assert not any(pool.buckets.limits(now))


def test_an_engine_more_at_one_after_the_other() -> None:
    """A reload at each in turn: the budget grows with the one that leads, and what is in force with it."""
    fleet = Fleet(2)
    fleet.runs(1)
    wider = settings(GPU, upstream("gpu2", tokens_per_second=1000, max_in_flight=30))
    budgets = 1
    for gateway in fleet.gateways:
        gateway.admission.reconfigure(wider)
        assert sum(sum(g.rates) for g in fleet.gateways) <= budgets * sum(BUDGET)
        budgets = 2 if budgets == 2 or gateway.standing.share.leads else 1
        fleet.runs(1)
        assert sum(sum(g.rates) for g in fleet.gateways) <= budgets * sum(BUDGET)
    assert sum(sum(g.rates) for g in fleet.gateways) == pytest.approx(2 * sum(BUDGET), rel=0.01)
    for name in ("gpu", "gpu2"):
        assert sum(g.admission.upstream(name).max_in_flight or 0 for g in fleet.gateways) == 30


def test_a_replica_that_drains_lets_the_others_have_its_part() -> None:
    """What it serves keeps its place."""
    fleet = Fleet(2)
    fleet.runs(1, lambda g: g.submit(P0, key="k") if len(g.serving) < 5 else None)
    leaves, stays = fleet.gateways
    leaves.admission.drain()
    fleet.runs(4, lambda g: g.submit(P0, 100) if g is stays else None)
    assert len(leaves.serving) == 5
    assert stays.rates[0] > 0.9 * BUDGET[0]
    assert all(ticket.stage is Stage.DISPATCHED for ticket in leaves.serving)
