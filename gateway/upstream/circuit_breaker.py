"""May an upstream get requests? Signs of service (how its requests ended) beside signs of life (its probes).

             `failures` failed requests in a row, or failed probes
        ALL ─────────────────────────────────────────────────────▶ NONE ◀─┐
         ▲                                                          │     │ one fails
         │ one succeeds                `open_ns` are over, and the  │     │
         └──────────────── TRIAL ◀──── probes pass ─────────────────┘     │
                          │ ▲ │                                           │
         one request more └─┘ └───────────────────────────────────────────┘
         at a passed probe

The usual names of the three are closed, open and half-open. An engine may pass its probes and serve nobody,
so a passed probe alone never leads back to ALL; one that failed its probes must show that it serves again.

A request that shows nothing (its client left) is not told of, and the next one is the trial. What was sent
before a trial began is old news: the upstream was no better then, or it would not have been left. A trial
that streams has shown enough with its first token, but one more failure takes that back until a request
succeeds.

A trial that does not stream may run for a minute, and says nothing until its end. That is not held against
everybody else: each probe that passes meanwhile lets one more request in beside it, `failures` of them, and
from then on one in `open_ns`. So an engine that is alive and answers nobody gets few requests while it hangs,
in the long run as many as one that fails each of them at once. Passed probes never open it: the first of the
requests to succeed does, and the first to fail shuts it.

No clock and no waiting in here: times are nanoseconds. Unless they say otherwise the methods answer whether
`admits` has changed.
"""

from dataclasses import dataclass
from enum import Enum

from gateway.policy.clock import NEVER


class Admittance(Enum):
    """Which requests an upstream may get."""

    ALL = "all"
    TRIAL = "a few"
    """One; then one more at a time."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class BreakerRules:
    failures: int = 5
    open_ns: int = 10_000_000_000


class CircuitBreaker:
    def __init__(self, rules: BreakerRules) -> None:
        self._rules = rules
        self.admits = Admittance.ALL
        self._alive = True
        self._failed = 0  # in a row
        self._shut_until = 0
        self._trial_began_at = 0
        self._added = 0  # requests beside the first one of the trial
        self._added_at = 0  # the last of them

    def reconfigure(self, rules: BreakerRules) -> None:
        """Other rules for the failures to come."""
        self._rules = rules

    # ------------------------------------------------------------------ signs of service

    def succeeded(self, sent_at: int) -> bool:
        """A request that was sent then has been answered, be it with word of the client's own mistake."""
        if not self._tells(sent_at):
            return False
        self._failed = 0
        return self._turn(Admittance.ALL)

    def began(self, sent_at: int) -> bool:
        """The first token of a stream has come."""
        if self.admits is not Admittance.TRIAL or not self._tells(sent_at):
            return False
        self._failed = self._rules.failures - 1
        return self._turn(Admittance.ALL)

    def failed(self, sent_at: int, now: int) -> bool:
        """A request that was sent then has failed, and the upstream is to blame."""
        if not self._tells(sent_at):
            return False
        self._failed += 1
        if self.admits is Admittance.ALL and self._failed < self._rules.failures:
            return False
        self._shut_until = now + self._rules.open_ns
        return self._turn(Admittance.NONE)

    # ------------------------------------------------------------------ signs of life, and time

    def probed(self, alive: bool, now: int) -> bool:
        """What the probes, taken together, say now."""
        self._alive = alive
        return self.advance(now) if alive else self._turn(Admittance.NONE)

    def advance(self, now: int) -> bool:
        """Called early it does nothing."""
        if self.admits is not Admittance.NONE or now < self.next_deadline():
            return False
        self._trial_began_at = now
        self._added = 0
        return self._turn(Admittance.TRIAL)

    def add(self, now: int) -> bool:
        """A probe has passed while a request is the trial: answers whether one more may go beside it."""
        enough = self._added >= self._rules.failures and now < self._added_at + self._rules.open_ns
        if self.admits is not Admittance.TRIAL or enough:
            return False
        self._added += 1
        self._added_at = now
        return True

    def next_deadline(self) -> int:
        """When `advance` has something to do; NEVER if it is not time that is waited for."""
        return self._shut_until if self.admits is Admittance.NONE and self._alive else NEVER

    # ------------------------------------------------------------------ inside

    def _tells(self, sent_at: int) -> bool:
        return self.admits is not Admittance.NONE and sent_at >= self._trial_began_at

    def _turn(self, admits: Admittance) -> bool:
        changed = self.admits is not admits
        self.admits = admits
        return changed
