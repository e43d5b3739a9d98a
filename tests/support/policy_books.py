"""Books of all that changes a pool's buckets and the tenants' limits, which must balance."""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Priority, Ticket
from gateway.policy.token_bucket import UNITS_PER_MILLITOKEN
from tests.support.minute_oracle import MINUTE, ExactMinute

P0 = Priority.P0


class BucketBooks:
    """Enters every change of a pool's levels: what flows in is at most C, and no less while P0, to whom all
    that overflows goes first, has room; what is charged and given back is exact; nothing else counts."""

    def __init__(self, pool: Any) -> None:
        self.buckets = buckets = pool.buckets
        self.net = 0  # millitokens charged and not given back
        self.levels = list(buckets.levels)
        self.at = buckets._now
        self._settling = False
        self._advance, self._take = buckets.advance, buckets.take
        self._settle, self._set_rates = buckets.settle, buckets.set_rates
        buckets.advance, buckets.take = self.advance, self.take
        buckets.settle, buckets.set_rates = self.settle, self.set_rates

    def _change(self) -> list[int]:
        """Of each level since the last entry."""
        before, self.levels = self.levels, list(self.buckets.levels)
        return [now - then for now, then in zip(self.levels, before, strict=True)]

    def _has_room(self) -> bool:
        return bool(self.buckets.levels[P0] < self.buckets.bursts[P0])

    def _unchanged(self) -> None:
        assert self._change() == [0, 0, 0]

    def advance(self, now: int) -> None:
        self._unchanged()
        self._advance(now)
        inflow = self.buckets.capacity * max(now - self.at, 0)
        self.at = max(self.at, now)
        came = self._change()
        assert min(came) >= 0
        assert sum(came) == inflow if self._has_room() else sum(came) <= inflow

    def take(self, priority: Priority, cost: int, own_share: bool) -> int:
        if self._settling:
            return int(self._take(priority, cost, own_share))
        self._unchanged()
        answer = int(self._take(priority, cost, own_share))
        change = self._change()
        assert change.pop(priority) == -cost * UNITS_PER_MILLITOKEN
        assert change == [0, 0]
        self.net += cost
        return answer

    def settle(self, priority: Priority, charged: int, actual: int, own_share: bool, own_units: int) -> int:
        self._unchanged()
        debt = round(self.buckets._rules.max_debt_seconds * self.buckets.rates[priority])  # millitokens
        deepest = min(self.buckets.levels[priority], -debt * UNITS_PER_MILLITOKEN)
        self._settling = True
        stays = int(self._settle(priority, charged, actual, own_share, own_units))
        self._settling = False
        change = self._change()
        self.net += stays - charged
        if actual <= charged:
            given = (charged - actual) * UNITS_PER_MILLITOKEN
            assert stays == actual
            assert min(change) >= 0
            assert sum(change) == given if self._has_room() else sum(change) <= given
        else:
            assert charged <= stays <= actual
            assert change.pop(priority) == (charged - stays) * UNITS_PER_MILLITOKEN
            assert change == [0, 0]
            assert self.levels[priority] >= deepest
            stopped = self.levels[priority] < (1 - debt) * UNITS_PER_MILLITOKEN
            assert stays == actual or stopped, "forgiven without need"
        return stays

    def set_rates(self, rates: list[int], now: int) -> None:
        self.buckets.advance(now)
        before = list(self.levels)
        self._set_rates(rates, now)
        self._change()
        bursts = self.buckets.bursts
        assert self.levels == [min(level, burst) for level, burst in zip(before, bursts, strict=True)]


@dataclass
class _Reserved:
    tokens: int | None  # thousandths; None where the tenant had no such limit
    requests: int | None


class TenantTwin:
    """Every limit of a tenant once more in fractions, and who holds what of it."""

    def __init__(self, limits: Any, parameters: PolicyParameters) -> None:
        self.limits, self.parameters = limits, parameters
        self.tokens: dict[str, ExactMinute] = {}
        self.requests: dict[str, ExactMinute] = {}
        self.inside: Counter[str] = Counter()
        self.reserved: dict[int, _Reserved] = {}
        self._reconfigured(parameters, 0)
        self._reserve, self._settle = limits.reserve, limits.settle
        self._forgive, self._reconfigure = limits.forgive, limits.reconfigure
        limits.reserve, limits.settle = self.reserve, self.settle
        limits.forgive, limits.reconfigure = self.forgive, self.reconfigure

    def reconfigure(self, parameters: PolicyParameters, now: int) -> None:
        self._reconfigure(parameters, now)
        self._reconfigured(parameters, now)

    def _reconfigured(self, parameters: PolicyParameters, now: int) -> None:
        self.parameters = parameters
        for buckets, limit in ((self.tokens, "tokens_per_minute"), (self.requests, "requests_per_minute")):
            told = {name: getattr(limits, limit) for name, limits in parameters.tenants.items()}
            for name in buckets.keys() - {n for n, per_minute in told.items() if per_minute is not None}:
                del buckets[name]
            for name, per_minute in told.items():
                if per_minute is not None and name in buckets:
                    buckets[name].run(now)
                    buckets[name].change(per_minute)
                elif per_minute is not None:
                    buckets[name] = ExactMinute(per_minute, now)

    def _of(self, ticket: Ticket, now: int) -> tuple[ExactMinute | None, ExactMinute | None]:
        found = self.tokens.get(ticket.ask.tenant), self.requests.get(ticket.ask.tenant)
        for bucket in found:
            if bucket is not None:
                bucket.run(now)
        return found

    def reserve(self, ticket: Ticket, now: int, charge: bool = True) -> None:
        assert ticket.seq not in self.reserved
        if ticket.ask.key is not None:
            self.inside[ticket.ask.key] += 1
        tokens, requests = self._of(ticket, now) if charge else (None, None)
        if charge and ticket.would_be is None:
            assert tokens is None or tokens.affords(ticket.cost)
            assert requests is None or requests.affords(1000)
        self.reserved[ticket.seq] = _Reserved(
            None if tokens is None else ticket.cost, None if requests is None else 1000
        )
        if tokens is not None:
            tokens.take(ticket.cost)
        if requests is not None:
            requests.take(1000)
        self._reserve(ticket, now, charge)

    def forgive(self, ticket: Ticket, now: int) -> None:
        self._forgive(ticket, now)
        held = self.reserved.get(ticket.seq)
        if held is None:
            return
        tokens, requests = self._of(ticket, now)
        if tokens is not None:
            tokens.give(held.tokens or 0)
        if requests is not None:
            requests.give(held.requests or 0)
        held.tokens = held.requests = None

    def settle(self, ticket: Ticket, actual: int | None, now: int) -> None:
        self._settle(ticket, actual, now)
        held = self.reserved.pop(ticket.seq, None)
        if held is None:
            return
        if ticket.ask.key is not None:
            self.inside[ticket.ask.key] -= 1
        tokens, _ = self._of(ticket, now)
        if actual is not None and tokens is not None and held.tokens is not None:
            if actual <= held.tokens:
                tokens.give(held.tokens - actual)
            else:
                debt = Fraction(self.parameters.capacity.max_debt_seconds)
                tokens.debit(actual - held.tokens, debt)

    def look(self, inside: Any, now: int) -> None:
        """Tenant and class are charged both or neither; keys hold as many as are inside; levels are exact."""
        assert self.reserved.keys() == {t.seq for t in inside}
        keys = Counter(t.ask.key for t in inside if t.ask.key is not None)
        assert keys == self.limits.key_places._in_flight == +self.inside
        for ticket in inside:
            held = self.reserved[ticket.seq]
            if ticket.exempt:
                assert held.tokens is held.requests is None
                assert (ticket.tenant_charged, ticket.tenant_requests_charged) == (0, 0)
            else:
                assert ticket.tenant_charged == (held.tokens or 0)
                assert ticket.tenant_requests_charged == (held.requests or 0)
        for tenant in self.parameters.tenants:
            tokens, requests = self.limits.buckets(tenant, now)
            for bucket, exact in ((tokens, self.tokens.get(tenant)), (requests, self.requests.get(tenant))):
                if exact is None:
                    assert bucket is None
                else:
                    exact.run(now)
                    assert Fraction(bucket._level, MINUTE) == exact.level <= exact.per_minute

    def nothing_is_left(self) -> bool:
        return bool(self.reserved or self.limits.key_places._in_flight or +self.inside)
