"""What one tenant may use: tokens and requests per minute, and how many requests at once for a key.

Theory: two token buckets per tenant, each holding one full minute and refilled evenly; all keys of the tenant
share them. Checked before the class's buckets, and a request that they cannot pay is refused at once, never
made to wait. Tenant and class are charged both or neither, in the same weighted tokens, and settled together.

* `tokens_per_minute`: pays the estimated cost, settled like the class's bucket. A cost above a full minute
  passes when the bucket is full and leaves it in debt; one whose prompt alone costs more can never be paid.
* `requests_per_minute`: one unit, given back to a request of which no engine ran anything.
* `max_in_flight` of a key: see `key_places`.

Several gateways may share the limits of tenants: each then uses up to a mark (`minute_part`).
"""

from collections.abc import Iterator, Mapping

from gateway.policy.clock import NANOSECONDS_PER_SECOND, NEVER, to_seconds
from gateway.policy.key_places import KeyPlaces
from gateway.policy.minute_bucket import MinuteBucket
from gateway.policy.minute_part import AllowanceUse, MinutePart
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import MILLITOKENS, PolicyParameters, TenantParameters
from gateway.policy.request import Refusal, Ticket

ONE_REQUEST = MILLITOKENS
TOLD_MAX = 50
"""Tenants that are told of at a time, those used last: each costs the store some microseconds. The others
have limit / gateways."""
_LIMITED = "tokens", "requests"
BUSY_RETRY_NS = NANOSECONDS_PER_SECOND
"""When to come back over `max_in_flight`: nobody knows when one of those running will end."""


class _Tenant:
    __slots__ = ("gateways", "requests", "tokens")

    def __init__(self) -> None:
        self.gateways = 0
        self.tokens: MinuteBucket | None = None
        self.requests: MinuteBucket | None = None

    def configure(self, limits: TenantParameters, gateways: int, now: int) -> None:
        self.gateways = gateways
        self.tokens = _configured(self.tokens, limits.tokens_per_minute, gateways, now)
        self.requests = _configured(self.requests, limits.requests_per_minute, gateways, now)

    def advance(self, now: int) -> None:
        if self.tokens is not None:
            self.tokens.advance(now)
        if self.requests is not None:
            self.requests.advance(now)

    def share(self, gateways: int, now: int) -> None:
        self.gateways = gateways
        for bucket in (self.tokens, self.requests):
            if isinstance(bucket, MinutePart):
                bucket.share(gateways, now)


def _configured(
    bucket: MinuteBucket | None, per_minute: int | None, gateways: int, now: int
) -> MinuteBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return MinutePart(per_minute, gateways, now) if gateways else MinuteBucket(per_minute, now)
    bucket.reconfigure(per_minute, now)
    return bucket


class TenantLimits:
    """`refusal` decides and changes nothing, `reserve` charges, `settle` must follow it exactly once."""

    def __init__(self, parameters: PolicyParameters, now: int) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._limits: Mapping[str, TenantParameters] = {}
        self.key_places = KeyPlaces(parameters.key_max_in_flight)
        self._gateways = 0
        """That share the limits; 0: nobody does."""
        self._in_use: dict[str, None] = {}  # tenants of late, the last one at the end
        self._told: set[str] = set()  # those that were told of last
        self.reconfigure(parameters, now)

    def reconfigure(self, parameters: PolicyParameters, now: int) -> None:
        """New limits. Levels stay, cut to the new minute; what runs is settled as it was reserved."""
        self._max_debt_seconds = parameters.capacity.max_debt_seconds
        self.key_places.reconfigure(parameters.key_max_in_flight)
        before, self._limits = self._limits, parameters.tenants
        if self._limits is before:  # thousands of tenants, perhaps
            return
        for name in before.keys() - self._limits.keys():
            del self._tenants[name]
        for name, limits in self._limits.items():
            if limits != before.get(name):
                self._tenants.setdefault(name, _Tenant()).configure(limits, self._gateways, now)

    def refusal(self, ticket: Ticket, now: int, again: bool = False) -> Refusal | None:
        """The no of a limit, of several the one that lasts longest; None if none says no. `again`: it was
        asked for this ticket before."""
        ask = ticket.ask
        if ask.key is not None and self.key_places.full(ask.key):
            if not again:
                self.key_places.wanted(ask.key, now)
            allowed = self.key_places.limit(ask.key)
            here = " (at all gateways together)" if self._gateways > 1 else ""
            detail = f"the key '{ask.key}' may have {allowed} requests in flight at once{here}, and has"
            return _no(detail, BUSY_RETRY_NS if allowed else NEVER)
        tenant = self._tenant(ask.tenant, now)
        if tenant is None:
            return None
        if self._gateways and not again:
            self._note(ask.tenant, tenant, ticket.cost, now)
        short = [
            (bucket.wait_ns(amount), f"the limit of {bucket.per_minute} {what} per minute")
            for bucket, amount, what in (
                (tenant.requests, ONE_REQUEST, "requests"),
                (tenant.tokens, ticket.cost, "tokens"),
            )
            if bucket is not None and not bucket.affords(amount)
        ]
        if not short:
            return None
        wait, limit = max(short)
        if wait >= NEVER:
            return _no(f"{limit} of tenant '{ask.tenant}' lets nothing pass", NEVER)
        seconds = f"{to_seconds(wait):.3g} s"
        return _no(f"{limit} of tenant '{ask.tenant}' could pay this request in about {seconds}", wait)

    def _note(self, name: str, tenant: _Tenant, cost: int, now: int) -> None:
        self._in_use.pop(name, None)
        self._in_use[name] = None
        for bucket, amount in ((tenant.requests, ONE_REQUEST), (tenant.tokens, cost)):
            if isinstance(bucket, MinutePart):
                bucket.asked(amount, now)

    def tokens_per_minute(self, tenant: str) -> int | None:
        """The tenant's limit in tokens, None without one."""
        bucket = self._tenants[tenant].tokens if tenant in self._tenants else None
        return None if bucket is None else bucket.per_minute

    def reserve(self, ticket: Ticket, now: int, charge: bool = True) -> None:
        """Take a place of its key and, where it is to be charged, its cost and one request."""
        ticket.tenant_reserved = True
        key = ticket.ask.key
        if key is not None:
            self.key_places.take(key)
        tenant = self._tenant(ticket.ask.tenant, now)
        if tenant is None or not charge:
            return
        if tenant.requests is not None:
            tenant.requests.take(ONE_REQUEST)
            ticket.tenant_requests_charged = ONE_REQUEST
        if tenant.tokens is not None:
            tenant.tokens.take(ticket.cost)
            ticket.tenant_charged = ticket.cost

    def settle(self, ticket: Ticket, actual: int | None, now: int) -> None:
        """Replace the charge by what was used (millitokens; None: no engine ran anything) and free the
        place. A ticket that was not reserved, or is settled already, changes nothing."""
        if not ticket.tenant_reserved:
            return
        ticket.tenant_reserved = False
        key = ticket.ask.key
        if key is not None:
            self.key_places.free(key)
        if actual is None:
            self.forgive(ticket, now)
            return
        tenant = self._tenant(ticket.ask.tenant, now)
        if tenant is not None and tenant.tokens is not None and ticket.tenant_charged:
            more = actual - ticket.tenant_charged
            if more > 0:
                tenant.tokens.debit(more, self._max_debt_seconds)
            else:
                tenant.tokens.give(-more)

    def forgive(self, ticket: Ticket, now: int) -> None:
        """Give back all that was charged; the place of its key stays taken."""
        tenant = self._tenant(ticket.ask.tenant, now)
        if tenant is not None:
            if tenant.requests is not None:
                tenant.requests.give(ticket.tenant_requests_charged)
            if tenant.tokens is not None:
                tenant.tokens.give(ticket.tenant_charged)
        ticket.tenant_requests_charged = ticket.tenant_charged = 0

    def buckets(self, tenant: str, now: int) -> tuple[MinuteBucket | None, MinuteBucket | None]:
        """The tenant's buckets of tokens and of requests, brought up to now."""
        found = self._tenant(tenant, now)
        return (None, None) if found is None else (found.tokens, found.requests)

    def _tenant(self, name: str, now: int) -> _Tenant | None:
        """One that has limits, brought up to now, and to the number of gateways."""
        tenant = self._tenants.get(name)
        if tenant is not None:
            tenant.advance(now)
            if tenant.gateways != self._gateways:
                tenant.share(self._gateways, now)
        return tenant

    # ------------------------------------------------------------------ several gateways

    def share(self, gateways: int, now: int) -> None:
        """With so many, this one included. What is left of the minutes is no longer this one's to say."""
        if gateways == self._gateways:
            return
        first, self._gateways = not self._gateways, gateways
        if first:
            self._tenants = {name: _Tenant() for name in self._limits}
            for name, tenant in self._tenants.items():
                tenant.configure(self._limits[name], gateways, now)

    def use(self, now: int) -> Iterator[tuple[tuple[str, str], AllowanceUse]]:
        """Of the tenants in use, by name and what is limited."""
        names = list(self._in_use)[-TOLD_MAX:]
        for name in sorted(self._told.difference(names)):
            parts = [part for what in _LIMITED if (part := self.part_of(name, what, now)) is not None]
            if any(part.owes for part in parts):  # once more: the store charges from one telling to the next
                names.append(name)
            else:
                for part in parts:
                    part.tell_no_more(now)
        self._told = set(names)
        for name in names:
            told = [
                ((name, what), use)
                for what in _LIMITED
                if (part := self.part_of(name, what, now)) is not None and (use := part.use(now)) is not None
            ]
            if not told:
                self._in_use.pop(name, None)
            yield from told

    def part_of(self, name: str, what: str, now: int) -> MinutePart | None:
        bucket = getattr(self._tenant(name, now), what, None)
        return bucket if isinstance(bucket, MinutePart) else None


def _no(detail: str, wait_ns: int) -> Refusal:
    advice = None if wait_ns >= NEVER else wait_ns
    return Refusal(Outcome.REJECTED_RATE, detail, advice, by_tenant_limit=True)
