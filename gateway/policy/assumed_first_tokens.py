"""When answers that are not streamed count as begun.

Nobody sees their first token. An engine is taken to have read such a prompt after the time that this was
predicted to take; until then it counts as pending prefill.
"""

from heapq import heapify, heappop, heappush

from gateway.policy.clock import NEVER
from gateway.policy.request import Stage, Ticket


class AssumedFirstTokens:
    def __init__(self) -> None:
        self._soonest: list[tuple[int, int, Ticket]] = []  # some of requests that are over
        self.next = NEVER
        """When the next one may come."""

    def expect(self, ticket: Ticket) -> None:
        """At `ticket.assumed_at`."""
        heappush(self._soonest, (ticket.assumed_at, ticket.seq, ticket))
        self._look()

    def come(self, now: int) -> bool:
        """Let those count whose time has come; whether there was one."""
        soonest, any_has = self._soonest, False
        while soonest and soonest[0][0] <= now:
            at, _, ticket = heappop(soonest)
            if ticket.stage is Stage.DISPATCHED and ticket.assumed_at == at:
                ticket.upstream.prefilled(ticket)
                any_has = True
        self._look()
        return any_has

    def keep(self, pool: object) -> None:
        """Only those of requests that are this pool's."""
        self._soonest = [entry for entry in self._soonest if entry[2].pool is pool]
        heapify(self._soonest)
        self._look()

    def _look(self) -> None:
        self.next = self._soonest[0][0] if self._soonest else NEVER

    def __len__(self) -> int:
        return len(self._soonest)
