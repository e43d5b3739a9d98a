"""What one tenant may use: tokens and requests per minute, and how many requests at once for a key.

Theory: two token buckets per tenant, each holding one full minute and refilled evenly; all keys of the tenant
share them. Checked before the class's buckets, and a request that they cannot pay is refused at once, never
made to wait. Tenant and class are charged both or neither, in the same weighted tokens, and settled together.

* `tokens_per_minute`: pays the estimated cost, settled like the class's bucket. A cost above a full minute
  passes when the bucket is full and leaves it in debt; one whose prompt alone costs more can never be paid.
* `requests_per_minute`: one unit, given back to a request of which no engine ran anything.
* `max_in_flight` of a key: requests inside the gateway, waiting ones included.

Exactness: one token (or request) is 60 × 10⁹ units, so that a limit of n per minute flows in at n units per
nanosecond, and every level is a whole number.
"""

from collections import Counter
from collections.abc import Mapping

from gateway.policy.clock import NANOSECONDS_PER_SECOND, NEVER, to_seconds
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import MILLITOKENS, PolicyParameters, TenantParameters
from gateway.policy.request import Refusal, Ticket

MINUTE_NS = 60 * NANOSECONDS_PER_SECOND
UNITS_PER_MILLI = MINUTE_NS // MILLITOKENS
"""Of a token, or of a request: both are counted in thousandths."""
ONE_REQUEST = MILLITOKENS
BUSY_RETRY_NS = NANOSECONDS_PER_SECOND
"""When to come back over `max_in_flight`: nobody knows when one of those running will end."""


class MinuteBucket:
    """Holds one minute of `per_minute`; amounts are thousandths. Starts full."""

    def __init__(self, per_minute: int, now: int) -> None:
        self.per_minute = per_minute
        self._level = self._full = per_minute * MINUTE_NS
        self._now = now

    def advance(self, now: int) -> None:
        if now > self._now:
            self._level = min(self._level + self.per_minute * (now - self._now), self._full)
            self._now = now

    def reconfigure(self, per_minute: int, now: int) -> None:
        """Another limit from now on. What is left is kept, up to the new full minute."""
        self.advance(now)
        self.per_minute = per_minute
        self._full = per_minute * MINUTE_NS
        self._level = min(self._level, self._full)

    def affords(self, amount: int) -> bool:
        return self._level >= min(amount * UNITS_PER_MILLI, self._full) and self._full > 0

    def wait_ns(self, amount: int) -> int:
        """Until it affords the amount if nothing else is taken; NEVER for a limit of 0."""
        missing = min(amount * UNITS_PER_MILLI, self._full) - self._level
        if self.per_minute == 0:
            return NEVER
        return max(-(-missing // self.per_minute), 0)

    def take(self, amount: int) -> None:
        self._level -= amount * UNITS_PER_MILLI

    def give(self, amount: int) -> None:
        self._level = min(self._level + amount * UNITS_PER_MILLI, self._full)

    def debit(self, amount: int, max_debt_seconds: float) -> None:
        """Take more at settlement, but not further than the debt limit."""
        lowest = -round(max_debt_seconds * NANOSECONDS_PER_SECOND) * self.per_minute
        room = max(self._level - lowest, 0) // UNITS_PER_MILLI
        self.take(min(amount, room))

    @property
    def left(self) -> int:
        """Whole tokens or requests; below zero is debt."""
        return self._level // MINUTE_NS

    @property
    def full_after_ns(self) -> int:
        return -(-(self._full - self._level) // self.per_minute) if self.per_minute else 0


class _Tenant:
    __slots__ = ("requests", "tokens")

    def __init__(self) -> None:
        self.tokens: MinuteBucket | None = None
        self.requests: MinuteBucket | None = None

    def configure(self, limits: TenantParameters, now: int) -> None:
        self.tokens = _configured(self.tokens, limits.tokens_per_minute, now)
        self.requests = _configured(self.requests, limits.requests_per_minute, now)

    def advance(self, now: int) -> None:
        for bucket in (self.tokens, self.requests):
            if bucket is not None:
                bucket.advance(now)


def _configured(bucket: MinuteBucket | None, per_minute: int | None, now: int) -> MinuteBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return MinuteBucket(per_minute, now)
    bucket.reconfigure(per_minute, now)
    return bucket


class TenantLimits:
    """`refusal` decides and changes nothing, `reserve` charges, `settle` must follow it exactly once."""

    def __init__(self, parameters: PolicyParameters, now: int) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._in_flight: Counter[str] = Counter()
        self.reconfigure(parameters, now)

    def reconfigure(self, parameters: PolicyParameters, now: int) -> None:
        """New limits. Levels stay, cut to the new minute; what runs is settled as it was reserved."""
        self._max_debt_seconds = parameters.capacity.max_debt_seconds
        self._key_limits: Mapping[str, int] = parameters.key_max_in_flight
        for name in self._tenants.keys() - parameters.tenants.keys():
            del self._tenants[name]
        for name, limits in parameters.tenants.items():
            self._tenants.setdefault(name, _Tenant()).configure(limits, now)

    def refusal(self, ticket: Ticket, now: int) -> Refusal | None:
        """The no of a limit, of several the one that lasts longest; None if none says no."""
        ask = ticket.ask
        allowed = self._key_limits.get(ask.key) if ask.key is not None else None
        if allowed is not None and self._in_flight[ask.key or ""] >= allowed:
            detail = f"the key '{ask.key}' may have {allowed} requests in flight at once, and has"
            return _no(detail, BUSY_RETRY_NS if allowed else NEVER)
        tenant = self._tenants.get(ask.tenant)
        if tenant is None:
            return None
        tenant.advance(now)
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

    def tokens_per_minute(self, tenant: str) -> int | None:
        """The tenant's limit in tokens, None without one."""
        bucket = self._tenants[tenant].tokens if tenant in self._tenants else None
        return None if bucket is None else bucket.per_minute

    def reserve(self, ticket: Ticket, now: int, charge: bool = True) -> None:
        """Take a place of its key and, where it is to be charged, its cost and one request."""
        ticket.tenant_reserved = True
        key = ticket.ask.key
        if key is not None:
            self._in_flight[key] += 1
        tenant = self._tenants.get(ticket.ask.tenant)
        if tenant is None or not charge:
            return
        tenant.advance(now)
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
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]
        if actual is None:
            self.forgive(ticket, now)
            return
        tenant = self._tenants.get(ticket.ask.tenant)
        if tenant is not None and tenant.tokens is not None and ticket.tenant_charged:
            tenant.advance(now)
            more = actual - ticket.tenant_charged
            if more > 0:
                tenant.tokens.debit(more, self._max_debt_seconds)
            else:
                tenant.tokens.give(-more)

    def forgive(self, ticket: Ticket, now: int) -> None:
        """Give back all that was charged; the place of its key stays taken."""
        tenant = self._tenants.get(ticket.ask.tenant)
        if tenant is not None:
            tenant.advance(now)
            if tenant.requests is not None:
                tenant.requests.give(ticket.tenant_requests_charged)
            if tenant.tokens is not None:
                tenant.tokens.give(ticket.tenant_charged)
        ticket.tenant_requests_charged = ticket.tenant_charged = 0

    def buckets(self, tenant: str, now: int) -> tuple[MinuteBucket | None, MinuteBucket | None]:
        """The tenant's buckets of tokens and of requests, brought up to now."""
        found = self._tenants.get(tenant)
        if found is None:
            return None, None
        found.advance(now)
        return found.tokens, found.requests

    def in_flight(self, key: str) -> int:
        return self._in_flight[key]


def _no(detail: str, wait_ns: int) -> Refusal:
    advice = None if wait_ns >= NEVER else wait_ns
    return Refusal(Outcome.REJECTED_RATE, detail, advice, by_tenant_limit=True)
