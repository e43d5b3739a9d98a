"""Who has requests here, and what is left to them, for `/admin/tenants`."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gateway.keys import KeyEntry
from gateway.policy.admission import Admission
from gateway.policy.request import PRIORITIES, Priority, Ticket
from gateway.telemetry.labels import clean


@dataclass(frozen=True, slots=True)
class MinuteLimit:
    """What the tenant may use in a minute, and what is left of it now; below zero is debt."""

    per_minute: int
    left: int


@dataclass(frozen=True, slots=True)
class PlacesOfKey:
    """Requests of one key inside the gateway, and how many there may be."""

    key: str
    in_flight: int
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class Tenant:
    """`waiting` and `in_flight` are requests by class; a limit is null where there is none."""

    tenant: str
    waiting: dict[str, int]
    in_flight: dict[str, int]
    tokens: MinuteLimit | None
    requests: MinuteLimit | None
    keys: list[PlacesOfKey]


@dataclass(frozen=True, slots=True)
class Tenants:
    """The busiest first; `total` is how many there are, those that are left out included."""

    tenants: list[Tenant]
    total: int


def tenants(admission: Admission, keys: Iterable[KeyEntry], limit: int, now: int) -> Tenants:
    """The configured ones, and those with a request here."""
    waiting: Counter[tuple[str, Priority]] = Counter()
    in_flight: Counter[tuple[str, Priority]] = Counter()
    busy: Counter[str] = Counter()
    by_key: Counter[str] = Counter()
    for counts, tickets in ((waiting, _waiting(admission)), (in_flight, _in_flight(admission))):
        for ticket in tickets:
            counts[ticket.ask.tenant, ticket.priority] += 1
            busy[ticket.ask.tenant] += 1
            if ticket.ask.key is not None:
                by_key[ticket.ask.key] += 1
    known: dict[str, list[PlacesOfKey]] = {name: [] for name in busy}
    for entry in keys:
        places = known.setdefault(entry.tenant, [])
        if entry.max_in_flight is not None:
            places.append(PlacesOfKey(clean(entry.id), by_key[entry.id], entry.max_in_flight))
    shown = sorted(known, key=lambda name: (-busy[name], name))[:limit]
    return Tenants(
        [
            Tenant(
                clean(name),
                {p.name: waiting[name, p] for p in PRIORITIES},
                {p.name: in_flight[name, p] for p in PRIORITIES},
                *_minute_limits(admission, name),
                known[name],
            )
            for name in shown
        ],
        total=len(known),
    )


def _waiting(admission: Admission) -> Iterator[Ticket]:
    for pool in admission.pools:
        for route in pool.room.routes:
            yield from route.waiting.values()


def _in_flight(admission: Admission) -> Iterator[Ticket]:
    for slots in admission.at_work:
        yield from slots.leases.values()


def _minute_limits(admission: Admission, tenant: str) -> tuple[MinuteLimit | None, MinuteLimit | None]:
    """Of tokens and of requests. Where the tenant has a limit, that is what its standing tells."""
    limits = admission.parameters.tenants.get(tenant)
    if limits is None:
        return None, None
    standing = admission.standing(Priority.P0, "", tenant)
    tokens, requests = limits.tokens_per_minute, limits.requests_per_minute
    return (
        None if tokens is None else MinuteLimit(tokens, standing.remaining_tokens),
        None if requests is None else MinuteLimit(requests, standing.remaining_requests or 0),
    )
