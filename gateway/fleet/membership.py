"""A replica's part in the fleet, for as long as it runs: ask, take, wait for the next slice.

No request waits for any of it. What goes wrong in a way that nobody has thought of, at the store, in its
answer or at the gateway, is a call that has failed: a share that cannot be put in force does not renew the
lease, and who cannot be told anything does not lead.
"""

import asyncio
from collections.abc import Callable, Sequence
from copy import copy
from random import Random
from typing import Protocol

from gateway.fleet.contract import Demand, Gateway, PoolDemand, Share, State
from gateway.fleet.messages import Granted, Renewal
from gateway.fleet.standing import Change, FleetRules, Standing
from gateway.fleet.store import StoreFailed


class Store(Protocol):
    """`SharedBudget`, or a test's."""

    async def renew(self, renewal: Renewal) -> tuple[Granted, Sequence[str]]: ...

    async def leave(self) -> None: ...


class Membership:
    """`on_change` is called for each change of state and each new reason why the store is away, `on_call`
    after each call with its result ("ok", or why it failed) and how many seconds it took, `on_surprise` with
    the first of a row of errors that are no `StoreFailed`."""

    def __init__(
        self,
        store: Store,
        gateway: Gateway,
        rules: FleetRules,
        on_change: Callable[[Change], None],
        chance: Random | None = None,
        on_call: Callable[[str, float], None] = lambda result, seconds: None,
        on_surprise: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._store = store
        self._gateway = gateway
        self._on_change = on_change
        self._on_call = on_call
        self._on_surprise = on_surprise
        self._chance = chance or Random()
        self._standing = Standing(rules)
        self._demand = Demand()
        self._leaving = self._surprised = False

    @property
    def share(self) -> Share:
        return self._standing.share

    @property
    def state(self) -> State:
        return self._standing.state

    async def run(self) -> None:
        """Until it is cancelled."""
        task = asyncio.current_task()
        assert task is not None
        # before Python 3.12 `wait_for`, with which redis-py writes, may swallow a cancellation
        while not task.cancelling():
            await self.renew()
            await asyncio.sleep(self._standing.pause_seconds(self._chance))

    async def renew(self) -> bool:
        """One call; whether the store has answered. To be awaited once before the gateway listens, so that it
        begins with its own share."""
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        try:
            result, change = "ok", await self._shared(sent_at)
            self._surprised = False
        except Exception as error:
            failure = error if isinstance(error, StoreFailed) else self._surprised_by(error)
            result, change = failure.reason, self._without_answer(failure)
        self._on_call(result, loop.time() - sent_at)
        if change is not None:
            self._on_change(change)
        return result == "ok"

    async def _shared(self, sent_at: float) -> Change | None:
        """Raises StoreFailed, or anything else; the standing is then what it was."""
        demand = self._gateway.demand()
        self._demand = demand = _without_traffic(demand) if self._leaving else demand
        may_lead = not (self._leaving or self._surprised)
        renewal = self._standing.renewal(demand, sent_at, may_lead)
        granted, signals = await self._store.renew(renewal)
        standing = copy(self._standing)
        share, change = standing.answered(granted, signals, sent_at, asyncio.get_running_loop().time())
        self._gateway.take(share)
        self._standing = standing
        return change

    def _without_answer(self, failure: StoreFailed) -> Change | None:
        now = asyncio.get_running_loop().time()
        share, change = self._standing.failed(self._demand, failure.reason, now, failure.message)
        try:
            self._gateway.take(share)
        except Exception as error:
            self._surprised_by(error)
        return change

    def _surprised_by(self, error: Exception) -> StoreFailed:
        if not self._surprised:
            self._surprised = True
            self._on_surprise(error)
        return StoreFailed("error", f"{type(error).__name__}: {error}")

    def begin_leaving(self) -> None:
        """The gateway drains: from the next call on it asks for no tokens and does not lead; the places of
        what it still serves stay its own."""
        self._leaving = True

    async def leave(self) -> None:
        """All is given back. `run` must have ended."""
        try:
            await self._store.leave()
        except StoreFailed:
            pass  # it comes back by itself when the lease ends


def _without_traffic(demand: Demand) -> Demand:
    pools = tuple(
        PoolDemand(p.pool, p.budget, p.ceiling_shares, p.active, ((),) * len(p.budget)) for p in demand.pools
    )
    return Demand(pools, demand.places, demand.allowances)
