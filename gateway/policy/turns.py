"""Whose turn it is, asked of the scheduler only when the answer may be another one than last time.

That nobody can go is remembered. It holds until

* another request is the head of its line, or somebody has left one;
* an upstream has room that it had not, or is another one, or has other limits or another load;
* a time comes at which an upstream or the activity of a class changes by itself.

Whoever does one of the first two says so with `may_have_changed`.
"""

from gateway.policy.clock import NEVER
from gateway.policy.drain_rate import DrainRate
from gateway.policy.request import PRIORITIES, Ticket
from gateway.policy.scheduler import Choice, Scheduler
from gateway.policy.token_bucket import TokenBuckets
from gateway.policy.upstream_slots import UpstreamSlots


class Turns:
    def __init__(self, scheduler: Scheduler, buckets: TokenBuckets, slots: list[UpstreamSlots]) -> None:
        self.scheduler = scheduler
        self.slots = slots
        self.places = [DrainRate() for _ in PRIORITIES]  # how fast those that are paid get places
        self._buckets = buckets
        self._nobody_can_go = False
        self._until = NEVER  # when time alone may change that

    def may_have_changed(self) -> None:
        self._nobody_can_go = False

    def may_change_at(self, at: int) -> None:
        if at < self._until:
            self._until = at

    def stand_ready(self, ticket: Ticket, now: int) -> None:
        """A request that has paid waits for its turn."""
        ready = self.scheduler.ready[ticket.priority]
        if not ready.length:
            self.places[ticket.priority].begins(now)
        if ready.push(ticket):
            self._nobody_can_go = False

    def next(self, now: int) -> Choice | None:
        """Who goes now, and where, taken out of its line; to be sent there before the next one is asked for.
        None when nobody can go."""
        if self._nobody_can_go and now < self._until:
            return None
        may_go = self.scheduler.anybody_ready and not self._all_full()
        if may_go:
            limited = self._buckets.limits(now)
            choice = self.scheduler.choose(limited, now)
            if choice is not None:
                self.scheduler.dispatched(choice, limited, now)
                self.places[choice.ticket.priority].count(now)
                self._nobody_can_go = False
                return choice
        self._nobody_can_go = True
        self._until = self.next_change(now) if may_go else NEVER
        return None

    def next_change(self, now: int) -> int:
        """When time alone may let somebody go, NEVER if it will not."""
        soonest = self._buckets.next_activity_end(now)
        for slots in self.slots:
            change = slots.next_change(now)
            if change < soonest:
                soonest = change
        return soonest

    def _all_full(self) -> bool:
        for slots in self.slots:  # noqa: SIM110 – a generator costs twice the time
            if not slots.full:
                return False
        return True
