"""One event, several listeners."""

from collections.abc import Callable, Sequence

import structlog

from gateway.policy.engine_load import EngineLoad
from gateway.policy.events import Observer, RatesChanged, RequestEnded
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Priority

_log = structlog.get_logger(__name__)


class Observers(Observer):
    """Hands every event to all, in order. One that fails harms neither the others nor the policy; its
    first failure is logged. Details are wanted where one of them wants them."""

    def __init__(self, *observers: Observer) -> None:
        self.wants_details = any(o.wants_details for o in observers)
        self._ended = [o.ended for o in observers]
        self._promoted = [o.promoted for o in observers]
        self._rates_changed = [o.rates_changed for o in observers]
        self._health_changed = [o.health_changed for o in observers]
        self._trial_allowed = [o.trial_allowed for o in observers]
        self._load_told = [o.load_told for o in observers]
        self._reconfigured = [o.reconfigured for o in observers]
        self._queue_full = [o.queue_full for o in observers]
        self._reported: set[str] = set()

    def ended(self, event: RequestEnded) -> None:
        self._tell(self._ended, event)

    def promoted(self, priority: Priority) -> None:
        self._tell(self._promoted, priority)

    def rates_changed(self, event: RatesChanged) -> None:
        self._tell(self._rates_changed, event)

    def reconfigured(self, parameters: PolicyParameters, at: int) -> None:
        self._tell(self._reconfigured, parameters, at)

    def health_changed(self, upstream: str, healthy: bool, at: int) -> None:
        self._tell(self._health_changed, upstream, healthy, at)

    def trial_allowed(self, upstream: str, at: int) -> None:
        self._tell(self._trial_allowed, upstream, at)

    def load_told(self, upstream: str, load: EngineLoad, at: int) -> None:
        self._tell(self._load_told, upstream, load, at)

    def queue_full(self, upstream: str, at: int) -> None:
        self._tell(self._queue_full, upstream, at)

    def _tell(self, listeners: Sequence[Callable[..., None]], *facts: object) -> None:
        for listener in listeners:
            try:
                listener(*facts)
            except Exception:
                self._report(listener)

    def _report(self, listener: Callable[..., None]) -> None:
        name = getattr(listener, "__qualname__", repr(listener))
        if name in self._reported:
            return
        self._reported.add(name)
        try:
            _log.exception("a listener failed; later failures of it are not logged", listener=name)
        except Exception:
            pass  # the log itself may be what fails
