"""What several gateways share, in virtual time: real policies, the ledger, and what can happen to both."""

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from gateway.fleet.contract import State
from gateway.policy.parameters import PolicyParameters, SloTargets, TenantParameters
from gateway.policy.request import Priority
from gateway.simulator.fleet_simulation import OVERLOAD, Scenario, arrivals, parameters, uneven
from gateway.simulator.virtual_fleet import Arrival, Engine, VirtualFleet
from tests.support.policy_settings import nanoseconds

pytestmark = pytest.mark.skipif(not os.environ.get("FLEET_CHECK"), reason="make fleet-check tries it")

CAPACITY = 48_000
"""Tokens per second: about 40 requests."""
ENDLESS = 10_000_000
"""Tokens per second that no story here uses up."""
MEAN_TOKENS = 1200


def loaded(fleet: VirtualFleet, coming: list[Arrival]) -> VirtualFleet:
    fleet.book(coming)
    return fleet


def overloaded(shared_by: int = 3, seed: int = 1) -> VirtualFleet:
    """Twice C, by 80 to 15 to 5."""
    scenario = Scenario(shared_by, OVERLOAD, uneven(shared_by), capacity=CAPACITY, seconds=40)
    return loaded(VirtualFleet(parameters(CAPACITY), shared_by, seed=seed), arrivals(scenario))


def watched(fleet: VirtualFleet, figure: Callable[[], float], every_seconds: float = 0.02) -> list[float]:
    """The figure at all times from now on."""
    seen: list[float] = []

    def look() -> None:
        seen.append(figure())
        fleet.time.after(nanoseconds(every_seconds), look)

    look()
    return seen


def part_in_force(fleet: VirtualFleet) -> float:
    """Of C, at all gateways together."""
    return sum(fleet.rates) / CAPACITY / 1000


# ---------------------------------------------------------------------- places


def of_places(replicas: int, shared: bool) -> VirtualFleet:
    """Half as many requests again as 40 places can serve, nothing else binds."""
    scenario = Scenario(3, (0.2, 0.6, 0.2), (0.6, 0.3, 0.1), capacity=30 * MEAN_TOKENS, seconds=30)
    coming = [replace(a, replica=a.replica if shared else 0) for a in arrivals(scenario)]
    policy = parameters(ENDLESS, max_in_flight=40)
    return loaded(VirtualFleet(policy, replicas, shared=shared, engine=Engine(2.0)), coming)


def test_places_are_shared_and_all_used() -> None:
    """An engine's `max_in_flight` is never passed, and kept as full as by one gateway."""
    fleet, alone = of_places(3, shared=True), of_places(1, shared=False)
    parts = watched(fleet, lambda: fleet.places)
    fleet.run(30)
    alone.run(30)
    assert fleet.engine.most_in_flight == alone.engine.most_in_flight == 40
    assert max(parts) <= 40
    assert fleet.let_through(5, 30) > 0.97 * alone.let_through(5, 30)


def test_places_are_p0s_wherever_it_comes() -> None:
    """Batch without end at two replicas keeps P0 at a third one from hardly a place that it would get of one
    gateway."""
    fleet = VirtualFleet(parameters(ENDLESS, max_in_flight=40), 3, engine=Engine(2.0))
    realtime = Scenario(1, (1.0, 0.0, 0.0), (1.0,), capacity=16 * MEAN_TOKENS, seconds=20)
    batch = Scenario(2, (0.0, 0.0, 1.0), (0.5, 0.5), capacity=40 * MEAN_TOKENS, seconds=20)
    fleet.book(arrivals(realtime, seed=3))
    fleet.book([replace(a, replica=a.replica + 1) for a in arrivals(batch, seed=4)])
    fleet.run(20)
    assert fleet.refused_in(5, 20)[Priority.P0] <= 5  # of 240
    batch_too = [at for at, a in fleet.outcomes.paid if a.priority is Priority.P2 and at > nanoseconds(5)]
    assert len(batch_too) / 15 > 1


@pytest.mark.parametrize("moves", [None, 5.0])
def test_a_keys_places_are_shared(moves: float | None) -> None:
    """A key that may have 12 requests in flight has never more over three replicas, and mostly has them,
    wherever it sends them."""
    policy = replace(parameters(ENDLESS), key_max_in_flight={"k": 12})
    scenario = Scenario(
        3, (0.0, 1.0, 0.0), (0.6, 0.3, 0.1), capacity=12 * MEAN_TOKENS, seconds=30, moves=moves
    )
    fleet = VirtualFleet(policy, 3, engine=Engine(2.0))
    loaded(fleet, [replace(a, key="k") for a in arrivals(scenario)]).run(30)
    assert fleet.engine.most_in_flight <= 12
    served = [at for at, _ in fleet.outcomes.paid if at >= nanoseconds(5)]
    assert len(served) * 2.0 / 25 > 0.7 * 12


# ---------------------------------------------------------------------- minutes of a tenant


@pytest.mark.parametrize("moves", [None, 7.0])
def test_a_tenants_minute_is_shared(moves: float | None) -> None:
    """A tenant that asks for three times its limit gets its full minute and what flows in, over all replicas
    together: no more at any time, and hardly less, also when it moves from one to the next."""
    per_minute = 300_000
    policy = replace(parameters(ENDLESS), tenants={"t": TenantParameters(tokens_per_minute=per_minute)})
    scenario = Scenario(3, (0.0, 1.0, 0.0), uneven(3), capacity=15_000, seconds=60, moves=moves)
    fleet = loaded(VirtualFleet(policy, 3), [replace(a, tenant="t") for a in arrivals(scenario)])
    for second in (20, 30, 40, 50, 60):
        fleet.run(second)
        may = per_minute * (1 + second / 60)
        assert fleet.let_through(0, second) * second <= may
    assert fleet.let_through(0, 60) * 60 > 0.97 * may
    assert all(refusal.by_tenant_limit for _, refusal in fleet.outcomes.refused)


# ---------------------------------------------------------------------- the law


def with_a_law(replicas: int, shared: bool) -> VirtualFleet:
    """An engine that is slow with more than 20 requests; the law is to find how many it bears."""
    policy = parameters(CAPACITY // 2)
    promised = SloTargets(ttft_ns=nanoseconds(2), tpot_ns=nanoseconds(0.05))
    classes = dict(policy.classes)
    classes[Priority.P0] = replace(classes[Priority.P0], slo=promised)
    scenario = Scenario(3, (0.6, 0.6, 0.3), (0.5, 0.3, 0.2), capacity=CAPACITY // 2, seconds=66)
    coming = [replace(a, replica=a.replica if shared else 0) for a in arrivals(scenario)]
    engine = Engine(2.0, gap_seconds=0.025, knee=20)
    severity: PolicyParameters = replace(policy, law="severity", classes=classes)
    return loaded(VirtualFleet(severity, replicas, shared=shared, engine=engine), coming)


def test_one_law_for_all_and_another_leader_after_it() -> None:
    """One replica's law sets C from what all have measured, to what one gateway's would; all know the same
    C. When the leader dies, C stays until its lease has ended, and then another law goes on from there."""
    alone, fleet = with_a_law(1, shared=False), with_a_law(3, shared=True)
    alone.run(36)
    fleet.run(36)
    (by_one,) = known_budgets(alone)
    (by_all,) = known_budgets(fleet)
    assert by_one < 0.85
    assert by_all == pytest.approx(by_one, rel=0.1)
    (leader,) = (gateway for gateway in fleet.gateways if gateway.standing.share.leads)
    leader.die()
    fleet.run(45)
    assert known_budgets(fleet) == {by_all}
    assert not any(gateway.standing.share.leads for gateway in fleet.gateways if gateway.lives)
    fleet.run(66)
    (afterwards,) = known_budgets(fleet)
    assert [gateway.standing.share.leads for gateway in fleet.gateways if gateway.lives].count(True) == 1
    assert by_all != afterwards < 0.95


def known_budgets(fleet: VirtualFleet) -> set[float]:
    """In parts of C0, those that are told to the gateways that live."""
    pools = [gateway.admission.pools[0] for gateway in fleet.gateways if gateway.lives]
    return {round(sum(pool.control.rates) / pool.control.limits.nominal, 3) for pool in pools}


# ---------------------------------------------------------------------- what can happen


def test_what_a_dead_replica_had_is_the_others_within_its_lease() -> None:
    """The fullest of three dies, and its requests go to another one: for ten seconds its part lies idle,
    then all of C is used again, and nothing above it meanwhile."""
    fleet = overloaded()
    in_force = watched(fleet, lambda: part_in_force(fleet))
    fleet.at(12, fleet.gateways[0].die)
    fleet.run(28)
    assert max(in_force) <= 1
    assert fleet.let_through(8, 12) > 0.95 * CAPACITY
    assert 0.1 * CAPACITY < fleet.let_through(13, 21) < 0.4 * CAPACITY
    assert fleet.let_through(24, 28) > 0.95 * CAPACITY
    assert all(gateway.standing.share.replicas == 2 for gateway in fleet.gateways[1:])


@pytest.mark.parametrize("seed", [1, 2])
def test_one_that_alone_is_cut_off_costs_no_more_than_its_part(seed: int) -> None:
    """The fullest of three, whose calls time out slowly: for as long as its lease could be running all
    together have no more than C, and from then on C and the third that it keeps."""
    fleet = overloaded(seed=seed)
    cut_off = fleet.gateways[0]
    fleet.at(8, lambda: setattr(cut_off, "is_cut_off", True))
    fleet.run(8)
    assert sum(cut_off.admission.pools[0].buckets.rates) > 0.6 * CAPACITY * 1000
    in_force = watched(fleet, lambda: part_in_force(fleet))
    fleet.run(8 + fleet.rules.lease_seconds - fleet.rules.slice_seconds * 1.2)
    assert cut_off.state is State.ALONE
    assert max(in_force) <= 1
    fleet.run(24)
    assert max(in_force) <= 1 + 1 / 3 + 1e-6
    assert in_force[-1] == pytest.approx(1 + 1 / 3, abs=0.02)


@pytest.mark.parametrize("emptied", [False, True])
def test_a_store_that_is_away_for_twenty_seconds(emptied: bool) -> None:
    """While it is away, all let through what they did, and after their leases a third each: together never
    more than 1.1 × C. Two seconds after it is back, with what it knew or with nothing, C is shared again."""
    fleet = overloaded()
    in_force = watched(fleet, lambda: part_in_force(fleet))
    fleet.at(8, lambda: setattr(fleet.store, "can_be_reached", False))
    if emptied:
        fleet.at(27, fleet.store.restart)
    fleet.at(28, lambda: setattr(fleet.store, "can_be_reached", True))
    fleet.run(10)
    assert {gateway.state for gateway in fleet.gateways} == {State.HOLDING}
    fleet.run(20)
    assert {gateway.state for gateway in fleet.gateways} == {State.ALONE}
    fleet.run(27.9)
    assert fleet.let_through(8, 17) > 0.95 * CAPACITY
    thirds = [sum(gateway.admission.pools[0].buckets.rates) for gateway in fleet.gateways]
    assert thirds == pytest.approx([CAPACITY * 1000 / 3] * 3, abs=3)
    fleet.run(30)
    assert {gateway.state for gateway in fleet.gateways} == {State.SHARED}
    assert 0.9 < part_in_force(fleet) <= 1  # some is on its way from one to another
    assert fleet.gateways[0].admission.pools[0].buckets.rates[0] > 0.7 * 0.6 * CAPACITY * 1000
    fleet.run(36)
    assert max(in_force) <= 1
    for second in range(8, 34):
        assert fleet.let_through(second, second + 2) < 1.25 * CAPACITY  # in so short a time bursts count
    assert fleet.let_through(8, 28) < 1.1 * CAPACITY
    assert 0.95 * CAPACITY < fleet.let_through(30, 36) < 1.1 * CAPACITY


def test_an_idle_share_is_taken_back_within_a_slice_or_two() -> None:
    """Batch at one replica uses all of C; when P0 comes at another one, hardly any of its requests is
    refused, and what both let through stays C."""
    batch = Scenario(1, (0.0, 0.0, 1.5), (1.0,), capacity=CAPACITY, seconds=20)
    realtime = Scenario(1, (0.55, 0.0, 0.0), (1.0,), capacity=CAPACITY, seconds=10)
    coming = [replace(a, replica=2) for a in arrivals(batch, seed=4)]
    coming += [replace(a, at=a.at + nanoseconds(10)) for a in arrivals(realtime, seed=3)]
    fleet = loaded(VirtualFleet(parameters(CAPACITY), 3), coming)
    fleet.run(20)
    assert fleet.let_through(5, 10) > 0.95 * CAPACITY
    assert fleet.refused_in(10, 20)[Priority.P0] < 0.06 * sum(a.priority is Priority.P0 for a in coming)
    assert fleet.refused_in(10, 11)[Priority.P0] <= 4
    assert 0.9 * CAPACITY < fleet.let_through(10, 20) < 1.05 * CAPACITY
