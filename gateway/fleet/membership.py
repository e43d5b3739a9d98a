"""A replica's part in the fleet, for as long as it runs: ask, take, wait for the next slice.

No request waits for any of it. Calls of different replicas are kept apart by chance, and so are their
attempts to find the store again. Where an answer takes something away, a second call follows at once: only
when a replica has said that it uses less may another one use more.
"""

import asyncio
from collections.abc import Callable, Sequence
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
    """`on_change` is called for each change of state, `on_call` after each call with its result ("ok", or why
    it failed) and how many seconds it took."""

    def __init__(
        self,
        store: Store,
        gateway: Gateway,
        rules: FleetRules,
        on_change: Callable[[Change], None],
        chance: Random | None = None,
        on_call: Callable[[str, float], None] = lambda result, seconds: None,
    ) -> None:
        self._store = store
        self._gateway = gateway
        self._rules = rules
        self._on_change = on_change
        self._on_call = on_call
        self._chance = chance or Random()
        self._standing = Standing(rules)
        self._leaving = False

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
            answered = await self.renew()
            if answered and self._standing.lowered:
                answered = await self.renew()
            await asyncio.sleep(self._pause(answered))

    async def renew(self) -> bool:
        """One call; whether the store has answered. To be awaited once before the gateway listens, so that it
        begins with its own share."""
        loop = asyncio.get_running_loop()
        demand = self._gateway.demand()
        if self._leaving:
            demand = _without_traffic(demand)
        sent_at = loop.time()
        renewal = self._standing.renewal(demand, sent_at, may_lead=not self._leaving)
        try:
            granted, signals = await self._store.renew(renewal)
        except StoreFailed as failure:
            answered, result = False, str(failure.reason)
            share, change = self._standing.failed(demand, failure.reason, loop.time())
        else:
            answered, result = True, "ok"
            share, change = self._standing.answered(granted, signals, sent_at, loop.time())
        self._on_call(result, loop.time() - sent_at)
        self._gateway.take(share)
        if change is not None:
            self._on_change(change)
        return answered

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

    def _pause(self, answered: bool) -> float:
        if answered:
            return self._rules.slice_seconds * self._chance.uniform(0.9, 1.1)
        return self._rules.retry_seconds * self._chance.uniform(2 / 3, 4 / 3)


def _without_traffic(demand: Demand) -> Demand:
    pools = tuple(
        PoolDemand(p.pool, p.budget, p.ceiling_shares, p.active, ((),) * len(p.budget)) for p in demand.pools
    )
    return Demand(pools, demand.places, demand.allowances)
