"""Who has requests here, and what is left to them, for `/admin/tenants`."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from gateway.keys import KeyEntry
from gateway.policy.admission import Admission
from gateway.policy.request import PRIORITIES, Priority, Ticket
from gateway.telemetry.labels import clean

TENANTS_AT_ONCE = 50
"""A tenant takes about 20 µs to look at, so a turn about 1 ms."""


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


async def tenants(admission: Admission, keys: Mapping[str, Sequence[KeyEntry]], limit: int) -> Tenants:
    """The configured ones, and those with a request here. `keys` are by tenant, in the order in which those
    with nothing here are shown: what this costs goes by how many are shown or busy, not by how many there
    are. Others run meanwhile: the requests are those of the beginning, and what is left to a tenant is what
    it has when its turn comes."""
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
    first = sorted(busy, key=lambda name: (-busy[name], name))
    idle = (name for name in keys if name not in busy)
    shown: list[Tenant] = []
    for name in islice(chain(first, idle), limit):
        if shown and len(shown) % TENANTS_AT_ONCE == 0:
            await asyncio.sleep(0)
        shown.append(
            Tenant(
                clean(name),
                {p.name: waiting[name, p] for p in PRIORITIES},
                {p.name: in_flight[name, p] for p in PRIORITIES},
                *_minute_limits(admission, name),
                _places(keys.get(name, ()), by_key),
            )
        )
    return Tenants(shown, total=len(keys) + sum(name not in keys for name in busy))


def _places(entries: Sequence[KeyEntry], by_key: Counter[str]) -> list[PlacesOfKey]:
    return [
        PlacesOfKey(clean(entry.id), by_key[entry.id], entry.max_in_flight)
        for entry in entries
        if entry.max_in_flight is not None
    ]


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
