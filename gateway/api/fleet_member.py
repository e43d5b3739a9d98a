"""This gateway's part in a fleet, where `state` is shared: joins before it listens, leaves when it ends."""

import asyncio
import os
import secrets
import socket
from collections.abc import Callable

import structlog

from gateway.fleet.contract import State
from gateway.fleet.membership import Membership
from gateway.fleet.replica import Replica
from gateway.fleet.standing import Change, FleetRules
from gateway.fleet.store import SharedBudget
from gateway.policy.clock import Clock
from gateway.runtime.admission_gate import AdmissionGate
from gateway.settings import FleetSettings

_log = structlog.get_logger("gateway")


def fleet_rules(settings: FleetSettings) -> FleetRules:
    return FleetRules(
        slice_seconds=settings.slice_seconds,
        lease_seconds=settings.lease_seconds,
        call_seconds_max=settings.call_seconds_max,
        replicas_assumed=settings.replicas_assumed,
    )


class FleetMember:
    """`await join()`, then `leave_off()` when the gateway drains, `await leave()` when it ends.

    `on_call` is told of each call to the store: its result, and how many seconds it took.
    """

    on_call: Callable[[str, float], None]

    def __init__(self, url: str, settings: FleetSettings, gate: AdmissionGate, clock: Clock) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._slice_seconds = settings.slice_seconds
        self._store = SharedBudget(url, self.name, settings.name, settings.call_seconds_max)
        self._membership = Membership(
            self._store,
            Replica(self.name, gate, clock),
            fleet_rules(settings),
            _tell,
            on_call=self._called,
            on_surprise=_tell_with_trace,
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        return self._membership.state.value

    @property
    def replicas(self) -> int:
        return self._membership.share.replicas

    @property
    def leads(self) -> bool:
        return self._membership.share.leads

    def _called(self, result: str, seconds: float) -> None:
        self.on_call(result, seconds)

    async def join(self) -> None:
        """With its own share from the first request on; without the store, with a part of the budget."""
        await self._membership.renew()
        self._task = asyncio.create_task(self._take_part())

    async def _take_part(self) -> None:
        while True:
            try:
                await self._membership.run()
                return  # cancelled, and somebody has swallowed it
            except Exception as error:  # whatever it was, the next call may go well
                _tell_with_trace(error)
                await asyncio.sleep(self._slice_seconds)

    def leave_off(self) -> None:
        """Ask for nothing more; what is still served keeps its places."""
        self._membership.begin_leaving()

    async def leave(self) -> None:
        """Raises nothing: who leaves has more to close."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for last in (self._membership.leave, self._store.close):
            try:
                await last()
            except Exception as error:
                _tell_with_trace(error)


def _tell(change: Change) -> None:
    why = {"reason": change.reason, "message": change.message}
    if change.after is State.JOINING:
        _log.warning(
            "the shared state cannot be reached; until it is the gateway has its part of the budget",
            replicas_assumed=change.replicas,
            **why,
        )
        return
    if change.after is change.before:
        _log.warning("the shared state is still away, for another reason", state=change.after.value, **why)
        return
    said = {"before": change.before.value, "replicas": change.replicas}
    if change.after is State.SHARED:
        _log.info("the budget is shared", **said)
    elif change.after is State.HOLDING:
        _log.warning("the shared state does not answer; the last share holds", **why, **said)
    else:
        _log.error(
            "the shared state has been silent for too long; this gateway goes on with its part of the budget",
            **why,
            **said,
        )


def _tell_with_trace(error: Exception) -> None:
    _log.error("a call to the shared state has failed in a way that was not expected", exc_info=error)
