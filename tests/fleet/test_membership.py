"""A replica's loop with the store, on virtual time."""

import asyncio
from collections.abc import Callable, Sequence
from random import Random

import pytest

from gateway.fleet.contract import Demand, Share, State
from gateway.fleet.ledger import Ledger
from gateway.fleet.membership import Membership
from gateway.fleet.messages import Granted, Renewal
from gateway.fleet.standing import Change, FleetRules
from gateway.fleet.store import StoreFailed
from tests.support.fleets import BUDGET, ScriptedGateway, demand
from tests.support.virtual_loop import VirtualLoop, virtual_loop


class LedgerStore:
    """The ledger as a store that takes a millisecond, and can be made to fail."""

    def __init__(self, ledger: Ledger, name: str, loop: VirtualLoop) -> None:
        self._ledger, self._name, self._loop = ledger, name, loop
        self.fails = False
        self.error: Exception | None = None
        self.heard: list[tuple[float, Renewal]] = []

    async def renew(self, renewal: Renewal) -> tuple[Granted, Sequence[str]]:
        self.heard.append((self._loop.time(), renewal))
        await asyncio.sleep(0.001)
        if self.fails:
            raise StoreFailed("unreachable", "nobody there")
        if self.error is not None:
            raise self.error
        return self._ledger.renew(round(self._loop.time() * 1e6), self._name, renewal), ()

    async def leave(self) -> None:
        self._ledger.leave(self._name)


class BreakableGateway(ScriptedGateway):
    """Raises where it is asked, or where it is to take what the store has granted."""

    asked_in_vain = taken_in_vain = False

    def demand(self) -> Demand:
        if self.asked_in_vain:
            raise KeyError("gpu0")
        return super().demand()

    def take(self, share: Share) -> None:
        if self.taken_in_vain and share.state is State.SHARED:
            raise TypeError("what is this?")
        super().take(share)


class Fleet:
    def __init__(self, loop: VirtualLoop, *asks: int) -> None:
        self.ledger = Ledger()
        self.changes: list[Change] = []
        self.calls: list[str] = []
        self.surprises: list[Exception] = []
        self.stores = [LedgerStore(self.ledger, f"r{i}", loop) for i in range(len(asks))]
        self.gateways = [BreakableGateway(demand(rate)) for rate in asks]
        self.members = [
            Membership(
                *(store, gateway, FleetRules(), self.changes.append, Random(i)),
                on_call=lambda result, seconds: self.calls.append(result),
                on_surprise=self.surprises.append,
            )
            for i, (store, gateway) in enumerate(zip(self.stores, self.gateways, strict=True))
        ]

    async def runs(self, seconds: float) -> None:
        tasks = [asyncio.create_task(member.run()) for member in self.members]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()


def test_ten_calls_a_second_while_nothing_changes() -> None:
    """Whatever is asked, and with different pauses at each replica."""
    with virtual_loop() as loop:
        fleet = Fleet(loop, 900_000, 100)
        loop.run_until_complete(fleet.runs(20))
        for store in fleet.stores:
            assert 190 <= len(store.heard) <= 215
        assert fleet.stores[0].heard[9][0] != fleet.stores[1].heard[9][0]


def test_who_has_to_give_says_at_once_that_it_has() -> None:
    """A second call follows the answer, and the other one has the rate within two slices."""
    with virtual_loop() as loop:
        fleet = Fleet(loop, 900_000, 0)
        loop.run_until_complete(fleet.runs(1))
        fleet.gateways[0].asks, fleet.gateways[1].asks = demand(0), demand(900_000)
        before = len(fleet.stores[0].heard)
        loop.run_until_complete(fleet.runs(0.25))
        pauses = [
            later[0] - sooner[0]
            for sooner, later in zip(fleet.stores[0].heard[before:], fleet.stores[0].heard[before + 1 :])  # noqa: B905
        ]
        assert min(pauses) < 0.002
        assert fleet.gateways[1].rates[0] > 800_000


def test_attempts_to_find_the_store_are_spread() -> None:
    """Of ten that lose it together no two call at the same time afterwards; all are back within half a second
    of its return."""
    with virtual_loop() as loop:
        fleet = Fleet(loop, *[100_000] * 10)
        loop.run_until_complete(fleet.runs(1))
        for store in fleet.stores:
            store.fails = True
        loop.run_until_complete(fleet.runs(3))
        assert {member.state for member in fleet.members} == {State.HOLDING}
        last = [store.heard[-1][0] for store in fleet.stores]
        assert len(set(last)) == 10
        for store in fleet.stores:
            store.fails = False
        loop.run_until_complete(fleet.runs(0.5))
        assert {member.state for member in fleet.members} == {State.SHARED}
        assert len(fleet.changes) == 10 * 3


def test_who_drains_asks_for_nothing_and_does_not_lead() -> None:
    """Its rate and the lead go to the other one while it still serves what it has begun."""
    with virtual_loop() as loop:
        fleet = Fleet(loop, 900_000, 900_000)
        loop.run_until_complete(fleet.runs(1))
        leaving, staying = fleet.members
        assert leaving.share.leads
        leaving.begin_leaving()
        loop.run_until_complete(fleet.runs(0.5))
        assert not leaving.share.leads
        assert staying.share.leads
        assert fleet.gateways[1].rates[0] > 0.9 * BUDGET[0]
        loop.run_until_complete(leaving.leave())
        loop.run_until_complete(staying.renew())
        assert staying.share.replicas == 1


def test_a_cancellation_that_the_store_swallows_ends_it_all_the_same() -> None:
    """At the end of the call during which it came."""

    class Swallowing(LedgerStore):
        async def renew(self, renewal: Renewal) -> tuple[Granted, Sequence[str]]:
            try:
                return await super().renew(renewal)
            except asyncio.CancelledError:
                raise StoreFailed("unreachable", "cancelled") from None

    with virtual_loop() as loop:
        store = Swallowing(Ledger(), "r0", loop)
        member = Membership(store, ScriptedGateway(demand(1)), FleetRules(), lambda change: None)

        async def cancelled() -> None:
            task = asyncio.create_task(member.run())
            await asyncio.sleep(0.0005)
            task.cancel()
            await asyncio.wait([task], timeout=5)
            assert task.done()

        loop.run_until_complete(cancelled())


def store_breaks(fleet: Fleet, broken: bool) -> None:
    fleet.stores[0].error = ValueError("what is this?") if broken else None


def asking_breaks(fleet: Fleet, broken: bool) -> None:
    fleet.gateways[0].asked_in_vain = broken


def taking_breaks(fleet: Fleet, broken: bool) -> None:
    fleet.gateways[0].taken_in_vain = broken


@pytest.mark.parametrize("breaks", [store_breaks, asking_breaks, taking_breaks])
def test_what_nobody_has_thought_of_is_a_call_that_has_failed(
    breaks: Callable[[Fleet, bool], None],
) -> None:
    """At the store, in the gateway's demand, or where it takes its share: the replica goes down to its part
    before its lease ends at the store, the other one leads, and they share again when all is well. The first
    of the row is told."""
    with virtual_loop() as loop:
        fleet = Fleet(loop, 900_000, 100_000)
        loop.run_until_complete(fleet.runs(1))
        assert sum(fleet.gateways[0].rates) > 0.6 * sum(BUDGET)
        breaks(fleet, True)
        loop.run_until_complete(fleet.runs(10.5))
        assert fleet.members[0].state is State.ALONE
        assert fleet.members[1].share.leads
        assert sum(fleet.gateways[0].rates) <= sum(BUDGET) // 2
        assert len(fleet.surprises) == 1
        assert set(fleet.calls) == {"ok", "error"}
        assert {change.reason for change in fleet.changes[2:]} == {"error"}
        assert type(fleet.surprises[0]).__name__ in fleet.changes[-1].message
        breaks(fleet, False)
        loop.run_until_complete(fleet.runs(2))
        assert fleet.members[0].state is State.SHARED
        assert sum(sum(gateway.rates) for gateway in fleet.gateways) == pytest.approx(sum(BUDGET), abs=20)
