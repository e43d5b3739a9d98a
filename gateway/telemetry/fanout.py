"""One event, several listeners."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import structlog

from gateway.policy.events import Observer, RatesChanged, RequestEnded
from gateway.policy.request import Priority

Event = TypeVar("Event")

_log = structlog.get_logger(__name__)


class Observers(Observer):
    """Hands every event to all, in order. One that fails harms neither the others nor the policy; its
    first failure is logged."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers
        self._ended = [o.ended for o in observers]
        self._promoted = [o.promoted for o in observers]
        self._rates_changed = [o.rates_changed for o in observers]
        self._reported: set[str] = set()

    def ended(self, event: RequestEnded) -> None:
        self._tell(self._ended, event)

    def promoted(self, priority: Priority) -> None:
        self._tell(self._promoted, priority)

    def rates_changed(self, event: RatesChanged) -> None:
        self._tell(self._rates_changed, event)

    def _tell(self, listeners: Sequence[Callable[[Event], None]], event: Event) -> None:
        for listener in listeners:
            try:
                listener(event)
            except Exception:
                self._report(listener)

    def _report(self, listener: Callable[[Event], None]) -> None:
        name = getattr(listener, "__qualname__", repr(listener))
        if name in self._reported:
            return
        self._reported.add(name)
        try:
            _log.exception("a listener failed; later failures of it are not logged", listener=name)
        except Exception:
            pass  # the log itself may be what fails
