"""The books of the store, on a clock of the test's own: nothing is used twice, and nothing lies idle."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.contract import AllowanceDemand, Demand, PlacesDemand, Share, State
from gateway.fleet.ledger import SETTLE_MS, Ledger
from gateway.fleet.messages import Granted
from gateway.fleet.standing import FleetRules, Standing
from tests.support.fleets import BUDGET, demand

SLICE = 0.1
TENANT_PER_MINUTE = 60_000


@dataclass
class Replica:
    """Calls the ledger with what it holds, and hears the answers that are not lost."""

    name: str
    ledger: Ledger
    asks: Demand
    standing: Standing = field(default_factory=lambda: Standing(FleetRules()))

    def call(self, now: float, lost: bool = False) -> Granted:
        granted = self.ledger.renew(round(now * 1e6), self.name, self.standing.renewal(self.asks, now))
        if not lost:
            self.standing.answered(granted, (), now, now)
        return granted

    @property
    def share(self) -> Share:
        return self.standing.share

    @property
    def rates(self) -> tuple[int, ...]:
        return self.share.pools[0].rates if self.share.pools else (0, 0, 0)


class Fleet:
    def __init__(self, *asks: Demand) -> None:
        self.ledger = Ledger()
        self.now = 1000.0
        self.replicas = [Replica(f"r{i}", self.ledger, a) for i, a in enumerate(asks)]

    def slices(self, count: int, only: list[Replica] | None = None) -> None:
        """Each replica calls once in each slice, one after the other."""
        for _ in range(count):
            for i, replica in enumerate(only or self.replicas):
                replica.call(self.now + i * 0.001)
            self.now += SLICE

    def of_class(self, k: int) -> list[int]:
        return [replica.rates[k] for replica in self.replicas]


def test_shares_add_up_and_follow_the_demand() -> None:
    """After a few slices the fleet has all of C, by demand."""
    fleet = Fleet(*(demand(a, b) for a, b in ((1_600_000, 800_000), (300_000, 150_000), (100_000, 50_000))))
    fleet.slices(4)
    assert sum(sum(r.rates) for r in fleet.replicas) == pytest.approx(sum(BUDGET), abs=10)
    assert fleet.of_class(0) == pytest.approx([514_000, 100_000, 36_000], rel=0.01)


def test_a_share_moves_within_three_slices() -> None:
    """Load that moves to another replica finds its rate there."""
    fleet = Fleet(demand(900_000), demand())
    fleet.slices(5)
    before = fleet.of_class(0)
    fleet.replicas[0].asks, fleet.replicas[1].asks = demand(), demand(900_000)
    fleet.slices(3)
    assert fleet.of_class(0)[1] == pytest.approx(before[0], rel=0.02)


def test_a_dead_replica_frees_its_share_when_its_lease_ends_and_not_before() -> None:
    """Ten seconds after its last call, and nobody has it earlier."""
    fleet = Fleet(demand(900_000, 900_000), demand(900_000, 900_000))
    fleet.slices(5)
    dead, alive = fleet.replicas
    died_at, held = fleet.now, sum(dead.rates)
    while fleet.now < died_at + 9.8:
        fleet.slices(1, only=[alive])
        assert sum(alive.rates) <= sum(BUDGET) - held
    fleet.slices(4, only=[alive])
    assert sum(alive.rates) == pytest.approx(sum(BUDGET), abs=10)
    assert alive.share.replicas == 1


def test_a_leaving_replica_gives_back_at_once() -> None:
    """The next call of another one gets it."""
    fleet = Fleet(demand(900_000), demand(900_000))
    fleet.slices(5)
    fleet.ledger.leave("r0")
    fleet.slices(1, only=[fleet.replicas[1]])
    assert sum(fleet.replicas[1].rates) == pytest.approx(sum(BUDGET), abs=10)


def test_what_a_lost_answer_lowered_still_counts() -> None:
    """A replica that did not hear that it has less uses the former share, and the others wait for it."""
    fleet = Fleet(demand(900_000), demand())
    fleet.slices(5)
    deaf, other = fleet.replicas
    deaf.asks, other.asks = demand(), demand(900_000)
    for _ in range(5):
        deaf.call(fleet.now, lost=True)
        other.call(fleet.now)
        fleet.now += SLICE
        assert sum(deaf.rates) + sum(other.rates) <= sum(BUDGET)
    fleet.slices(3)
    assert other.rates[0] > 500_000


def test_an_emptied_store_grants_nothing_twice() -> None:
    """Who calls first gets no more than it had until all have said what they hold; then all is shared."""
    fleet = Fleet(demand(900_000), demand(900_000), demand(900_000))
    fleet.slices(5)
    empty = Ledger()
    for replica in fleet.replicas:
        replica.ledger = empty
    until = fleet.now + SETTLE_MS / 1000
    while fleet.now < until + 0.4:
        for replica in fleet.replicas:
            replica.call(fleet.now)
            assert sum(sum(r.rates) for r in fleet.replicas) <= sum(BUDGET)
            fleet.now += 0.04
    assert sum(sum(r.rates) for r in fleet.replicas) == pytest.approx(sum(BUDGET), abs=10)


def test_a_store_that_nobody_reached_grants_nothing_twice() -> None:
    """All leases have ended at a store that has kept what it knew: who calls first gets no more than it had
    until all have said what they hold, which is a third of C each; then all is shared."""
    fleet = Fleet(demand(900_000), demand(900_000), demand(900_000))
    fleet.slices(5)
    fleet.now += 20
    for replica in fleet.replicas:
        for later in (0.0, 2.0):
            replica.standing.failed(replica.asks, "timeout", fleet.now + later)
    fleet.now += 2
    until = fleet.now + SETTLE_MS / 1000
    while fleet.now < until + 0.4:
        for replica in fleet.replicas:
            replica.call(fleet.now)
            assert sum(sum(r.rates) for r in fleet.replicas) <= sum(BUDGET)
            fleet.now += 0.04
    assert sum(sum(r.rates) for r in fleet.replicas) == pytest.approx(sum(BUDGET), abs=10)


def test_an_emptied_store_learns_the_budget_from_who_comes_first() -> None:
    """What the law has made of C is not forgotten with the store."""
    fleet = Fleet(demand(900_000))
    leader = fleet.replicas[0]
    fleet.slices(2)
    cut = (500_000, 200_000, 20_000)
    leader.asks = Demand(
        (leader.asks.pools[0].__class__("gpu", cut, (1.0, 0.7, 0.3), (True,) * 3, ((),) * 3),)
    )
    fleet.slices(2)
    assert leader.share.pools[0].budget == cut
    leader.ledger = Ledger()
    fleet.slices(1)
    assert leader.share.pools[0].budget == cut


def test_one_leads_at_a_time_and_a_late_word_of_the_former_is_not_heard() -> None:
    """The budget follows the leader; after its lease another leads with a greater fence."""
    fleet = Fleet(demand(900_000), demand(900_000))
    fleet.slices(3)
    first, second = fleet.replicas
    assert first.share.leads
    assert not second.share.leads
    fence = first.standing._fence
    fleet.slices(103, only=[second])
    assert second.share.leads
    assert second.standing._fence > fence
    stale = demand(900_000).pools[0]
    first.asks = Demand((stale.__class__("gpu", (1, 1, 1), stale.ceiling_shares, stale.active, stale.flows),))
    first.call(fleet.now)
    assert first.share.pools[0].budget == BUDGET
    assert not first.share.leads


def test_activity_elsewhere_is_told() -> None:
    """A replica with batch traffic alone knows that another one has realtime traffic."""
    fleet = Fleet(demand(900_000), demand(0, 0, 900_000))
    fleet.slices(3)
    assert fleet.replicas[1].share.pools[0].active == (True, False, False)
    assert fleet.replicas[0].share.pools[0].active == (False, False, True)


def test_an_idle_replica_is_told_what_it_would_get() -> None:
    """The prospect of one that asks for nothing is an equal part beside those that ask."""
    fleet = Fleet(demand(2_000_000, 2_000_000, 2_000_000), demand())
    fleet.slices(4)
    idle = fleet.replicas[1].share.pools[0]
    assert idle.rates[0] < 10_000
    assert idle.prospects[0] == pytest.approx(300_000, rel=0.01)


def test_places_are_taken_over_as_they_become_free() -> None:
    """What runs keeps its place; what ends goes to who has fewer."""
    fleet = Fleet(*(demand(places=PlacesDemand("gpu0", 10, n, 20)) for n in (10, 0)))
    hog, late = fleet.replicas
    fleet.slices(3, only=[hog])
    fleet.slices(2)
    assert (hog.share.places[0].limit, late.share.places[0].limit) == (5, 0)
    hog.asks = demand(places=PlacesDemand("gpu0", 10, 7, 20))
    fleet.slices(2)
    assert (hog.share.places[0].limit, late.share.places[0].limit) == (5, 3)


def test_a_tenants_minute_is_one_for_the_fleet() -> None:
    """Two replicas may use what the bucket holds, not each of them, and what one uses the other sees."""

    def asks(used: int) -> Demand:
        return demand(bucket=AllowanceDemand("acme", TENANT_PER_MINUTE, used, 1000))

    fleet = Fleet(asks(0), asks(0))
    fleet.slices(4)
    untils = [replica.share.allowances[0].until for replica in fleet.replicas]
    assert sum(untils) <= TENANT_PER_MINUTE
    assert min(untils) >= 0.4 * TENANT_PER_MINUTE
    fleet.replicas[0].asks = asks(untils[0])
    fleet.slices(3)
    assert fleet.replicas[1].share.allowances[0].level == pytest.approx(
        TENANT_PER_MINUTE - untils[0], rel=0.03
    )


def test_an_hour_without_the_store_is_not_charged_afterwards() -> None:
    """What a tenant used by its local part meanwhile was paid by what flowed in meanwhile."""
    fleet = Fleet(demand(bucket=AllowanceDemand("acme", TENANT_PER_MINUTE, 0, 1000)))
    fleet.slices(2)
    fleet.now += 3600
    fleet.replicas[0].asks = demand(bucket=AllowanceDemand("acme", TENANT_PER_MINUTE, 3_600_000, 1000))
    fleet.slices(2)
    assert fleet.replicas[0].share.allowances[0].level == TENANT_PER_MINUTE


RATES = st.integers(0, 2_000_000)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),  # who calls
        st.tuples(RATES, RATES, RATES),
        st.tuples(st.integers(0, 12), st.integers(0, 40)),  # places: in use at most, more wanted
        st.integers(0, 20_000),  # of the tenant's allowance, wanted
        st.floats(0, 1),  # the part of its allowance that it uses before it calls
        st.integers(0, 400),  # milliseconds since the last call
        st.booleans(),  # the answer is lost
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=60)
def test_whatever_is_asked_and_lost_nothing_is_held_twice(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    """At every moment the rates that all use add up to C at most, the places to the limit, and what a tenant
    has used to its full minute and what flowed in."""
    fleet = Fleet(*(demand() for _ in range(4)))
    used = [0] * 4
    began = fleet.now
    for who, rates, (in_use, more), wanted, part, later_ms, lost in steps:
        fleet.now += later_ms / 1000
        replica = fleet.replicas[who]
        limits = {told.name: told.limit for told in replica.share.places}
        holds = min(in_use, limits.get("gpu0", 0))
        if replica.share.allowances:
            used[who] += round(max(replica.share.allowances[0].until - used[who], 0) * part)
        replica.asks = demand(
            *rates,
            tenant="ab"[who % 2],
            places=PlacesDemand("gpu0", 10, holds, holds + more),
            bucket=AllowanceDemand("acme", TENANT_PER_MINUTE, used[who], wanted),
        )
        replica.call(fleet.now, lost=lost)
        alive = [r for r in fleet.replicas if r.share.state is State.SHARED]
        assert sum(sum(r.rates) for r in alive) <= sum(BUDGET)
        assert sum(r.share.places[0].limit for r in alive) <= 10
        flowed = TENANT_PER_MINUTE * (fleet.now - began) / 60
        assert sum(used) <= TENANT_PER_MINUTE + flowed + 1
