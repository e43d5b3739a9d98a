"""Which waits and gaps a long prompt explains, so that no control law need.

Where an engine reads prompts whole, one of 32,768 tokens stops everybody's tokens for two seconds, and who
is sent meanwhile waits as long. That is no overload: C has no part in how long it lasts, and how often there
is one the long prompts' own rules limit. A cut for it takes half a minute to grow back, and meanwhile refuses
those whom the stall has hurt already.

A *stall* lasts from the dispatch of a long prompt that was held to its class's own share (one below P0 while
a higher class was active) to its first token, and on until those sent in between have theirs. It is known for
no longer than 1.5 times what the prompt was predicted to take: an engine that takes longer has another
trouble, which is to be seen. Other long prompts, P0's or those that nothing paces because no higher class is
active, explain nothing: there may be no end of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.request import Ticket
from gateway.policy.upstream_slots import UpstreamSlots

SLACK = 1.5
REMEMBERED_NS = 5 * NANOSECONDS_PER_SECOND
"""After its end: what is measured later does not reach back so far."""


@dataclass(slots=True)
class Stall:
    since: int
    read_at: int
    """When the prompt was read, as far as this is known; who was sent by then waits for it."""
    until: int
    """When those who waited for it had their first tokens, as far as this is known."""
    known_until: int

    def reaches(self, ticket: Ticket, now: int) -> bool:
        sent_at = ticket.dispatched_at
        return sent_at is not None and self.since <= sent_at <= self.read_at and now <= self.known_until


class KnownStalls:
    """Of each upstream the one under way, and the last one that is over. Where several long prompts
    are let in at once, the latest of them counts."""

    def __init__(self) -> None:
        self._last: dict[str, Stall] = {}  # by upstream

    def prefilled(self, ticket: Ticket, now: int) -> None:
        """A request has its first token, or ends without. To be told before the upstream learns from it."""
        name = ticket.upstream.name
        if _is_paced(ticket):
            self._last[name] = _stall(ticket, now)
        elif (last := self._last.get(name)) is not None and last.reaches(ticket, now):
            last.until = max(last.until, now)

    def explain_wait(self, ticket: Ticket, now: int) -> bool:
        """Whether a stall is why a request has no first token at `now`, or has it only then."""
        return any(stall.reaches(ticket, now) for stall in self._of(ticket.upstream, now))

    def explain_gap(self, ticket: Ticket, since: int, now: int) -> bool:
        """Whether a stall fell into the time from `since` to `now`, in which a stream is measured."""
        return any(s.since < now and since < s.until for s in self._of(ticket.upstream, now))

    def _of(self, upstream: UpstreamSlots, now: int) -> Iterator[Stall]:
        last = self._last.get(upstream.name)
        if last is not None and last.known_until >= now - REMEMBERED_NS:
            yield last
        long = upstream.last_long
        if long is not None and long.prefilling and _is_paced(long):
            yield _stall(long, now)


def _is_paced(ticket: Ticket) -> bool:
    return ticket.is_long and ticket.on_own_share


def _stall(ticket: Ticket, now: int) -> Stall:
    since = ticket.dispatched_at
    assert since is not None, "it holds a lease"
    known_until = since + round(SLACK * ticket.upstream.prefill.predict_ns(ticket.input_tokens))
    so_far = min(now, known_until)
    return Stall(since, so_far, so_far, known_until)
