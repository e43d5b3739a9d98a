"""The policy's driver on virtual time: an event heap ordered by (time, sequence), and its clock.

Everything happens in one thread and in a fixed order, so the same scenario gives the same run, always.
"""

from collections.abc import Callable
from heapq import heappop, heappush

from gateway.policy.admission import Admission
from gateway.policy.clock import NEVER, ManualClock
from gateway.policy.request import Ticket


class VirtualTime:
    """A heap of (time, sequence, action). Actions due at one instant run in the order of their booking,
    those booked as `last` after all others."""

    def __init__(self, start: int = 0) -> None:
        self.clock = ManualClock(start)
        self._events: list[tuple[int, bool, int, Callable[[], None]]] = []
        self._seq = 0

    @property
    def now(self) -> int:
        return self.clock.now()

    def at(self, time: int, action: Callable[[], None], last: bool = False) -> None:
        """Book an action; a time already passed means now."""
        self._seq += 1
        now = self.clock.now()
        heappush(self._events, (time if time > now else now, last, self._seq, action))

    def after(self, nanoseconds: int, action: Callable[[], None]) -> None:
        self.at(self.now + nanoseconds, action)

    def run(self, until: int = NEVER) -> None:
        """Run all events up to and including `until`; the clock then stands there (or at the last event)."""
        events, advance_to = self._events, self.clock.advance_to
        while events and events[0][0] <= until:
            time, _, _, action = heappop(events)
            advance_to(time)
            action()
        if until < NEVER:
            self.clock.advance_to(until)


class VirtualGate:
    """Drives an Admission on virtual time: wakes it at its deadlines and hands out its decisions.

    `decided` is called with each ticket that was dispatched or refused. When to wake the policy is asked once
    an instant, after all that happens in it: the answer costs more than most of what changes it.
    """

    def __init__(
        self, admission: Admission, time: VirtualTime, decided: Callable[[Ticket], None] | None = None
    ) -> None:
        self.admission = admission
        self._time = time
        self._decided = decided
        self._armed_for = NEVER
        self._about_to_ask = False

    def settle(self) -> None:
        """Hand out what was decided and see to the next wake-up. Call after every call of the façade."""
        while decisions := self.admission.take_decisions():
            for ticket in decisions:
                if self._decided is not None:
                    self._decided(ticket)
        if not self._about_to_ask:
            self._about_to_ask = True
            self._time.at(self._time.now, self._ask, last=True)

    def _ask(self) -> None:
        self._about_to_ask = False
        deadline = self.admission.next_deadline()
        if deadline < self._armed_for:
            self._armed_for = deadline
            self._time.at(deadline, self._wake, last=True)

    def _wake(self) -> None:
        if self._time.now >= self._armed_for:
            self._armed_for = NEVER
        self.admission.advance()
        self.settle()
