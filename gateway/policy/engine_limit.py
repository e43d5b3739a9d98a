"""How many requests an engine takes at once, learned from those that it sends back.

Engines have admission limits of their own, answered with 503, which nobody tells the gateway. Without this a
place that becomes free would let the whole queue go at once, and most of it would come back a second time.

    sent back:                proven = tried = min(tried, requests sent there before it that have not ended)
    `proven` have completed:  proven = the most that were there at once, tried = proven × 5/4, at least + 1
    nobody sent back for 30 s: no limit

Those sent after it do not count, for they may be on their way back too. Where none was sent before it, what
fills the engine is not ours, and says nothing about a limit. One that was sent back once goes where it is
`proven` that there is room, the others try one or two more: so while an engine stays full they find out
whether it still is, and nobody is sent back twice for it.
"""

from gateway.policy.clock import NANOSECONDS_PER_SECOND

FORGOTTEN_AFTER_NS = 30 * NANOSECONDS_PER_SECOND
_GROWTH_DIVISOR = 4


class EngineLimit:
    def __init__(self) -> None:
        self._proven = self._tried = 0
        self._most = 0  # requests at once since the limit was last changed
        self._completed = 0  # since then
        self.expires_at = 0

    def at(self, now: int, *, sent_back_before: bool = True) -> int | None:
        """Requests at once; None while nothing is known."""
        if now >= self.expires_at:
            return None
        return self._proven if sent_back_before else self._tried

    def sent(self, in_flight: int) -> None:
        """One more was sent there: now they are so many."""
        self._most = max(self._most, in_flight)

    def sent_back(self, sent_before: int, now: int) -> None:
        """The engine had no room for one more than these."""
        if not sent_before:
            return
        known = now < self.expires_at
        self._proven = self._tried = min(self._tried, sent_before) if known else sent_before
        self._most = self._completed = 0
        self.expires_at = now + FORGOTTEN_AFTER_NS

    def completed(self) -> None:
        """A request there was answered."""
        self._completed += 1
        if self._completed >= self._proven:
            self._proven = max(self._proven, min(self._most, self._tried))
            self._tried = self._proven + max(self._proven // _GROWTH_DIVISOR, 1)
            self._most = self._completed = 0

    def forget(self) -> None:
        self.expires_at = 0
