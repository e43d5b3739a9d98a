"""Which upstreams share a budget, and what becomes of budgets and lines when there are other upstreams.

Upstreams that serve the same models, directly or through others, form a group with one budget (a pool). When
upstreams come or go while requests wait and run,

* a group goes on with the pool that most of its upstreams were in; that pool's other upstreams take along
  their part of its levels, by tokens per second, and pools that are joined add theirs up. So nothing is
  refilled: only a group of new upstreams alone starts with full buckets;
* who waits, waits on in the group that now serves its model, in the same order, with what it has paid;
* who is at an engine stays there. A lease moves with its engine and is settled where that is, of an engine
  that has left where its model is served now. An engine that comes back still has the leases it had.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from gateway.policy.outcome import Outcome
from gateway.policy.parameters import MILLITOKENS, PolicyParameters, UpstreamParameters
from gateway.policy.pool import Pool
from gateway.policy.request import Refusal, Ticket
from gateway.policy.routes import Route, serves
from gateway.policy.upstream_slots import UpstreamSlots

Decide = Callable[[Ticket, int], None]
Homes = dict[UpstreamSlots, Pool]

NOT_SERVED_ANY_LONGER = Refusal(Outcome.REJECTED_NO_UPSTREAM, "no engine serves this model any longer")
NOWHERE = Route((), long=False)
"""Of a request at an engine whose model nobody serves any longer: it cannot be sent again."""


def first_pools(parameters: PolicyParameters, now: int, decide: Decide) -> list[Pool]:
    groups = connected(parameters.upstreams)
    return [
        Pool(parameters, [UpstreamSlots(u, parameters.scheduling) for u in group], now, decide)
        for group in groups
    ]


def regrouped(
    old: Sequence[Pool],
    leaving: Sequence[UpstreamSlots],
    parameters: PolicyParameters,
    now: int,
    decide: Decide,
) -> tuple[list[Pool], list[UpstreamSlots]]:
    """The pools for these upstreams, made of the old ones, and the upstreams that are left out. `leaving`
    were left out before and are not yet empty. All is caught up to `now`; the new pools are to be
    reconfigured next."""
    _refuse_unserved(old, parameters, now)
    were = _homes(old)
    engines = [*leaving, *were]
    wanted = connected(parameters.upstreams)
    groups = [_slots_for(group, engines, parameters) for group in wanted]
    new = _heirs(groups, were, parameters, now, decide)
    _share_levels(old, new, groups, were)
    for pool, group in zip(new, wanted, strict=True):
        for former in old:
            if former is not pool and _share_any_model([s.parameters for s in former.slots], group):
                pool.carry_on(former)
    for pool, group_slots, group in zip(new, groups, wanted, strict=True):
        pool.slots = group_slots
        for slots, upstream in zip(group_slots, group, strict=True):  # whose models may be others now
            slots.reconfigure(upstream, parameters.scheduling)
    are = _homes(new)
    for slots in are:
        if slots in leaving:
            slots.set_health(True)
    waiting = _waiting(old)
    for pool in old:
        pool.room.routes.forget()
    _move_leases(engines, are, new, now)
    _move_waiting(waiting, were, new, now)
    for pool in dict.fromkeys([*old, *new]):
        pool.routes_changed()
    return new, [slots for slots in engines if slots not in are]


def _homes(pools: Iterable[Pool]) -> Homes:
    return {slots: pool for pool in pools for slots in pool.slots}


def _refuse_unserved(old: Iterable[Pool], parameters: PolicyParameters, now: int) -> None:
    """First of all, so that what they had paid is there when the levels are shared."""
    for ticket in _waiting(old):
        if not any(serves(upstream, ticket.ask.model) for upstream in parameters.upstreams):
            ticket.pool.end_waiting(ticket, NOT_SERVED_ANY_LONGER, now)


def _waiting(pools: Iterable[Pool]) -> list[Ticket]:
    """All that wait, by arrival."""
    return sorted((t for pool in pools for t in pool.room.tickets()), key=lambda ticket: ticket.seq)


# ---------------------------------------------------------------------- budgets


def _slots_for(
    group: Iterable[UpstreamParameters], engines: Iterable[UpstreamSlots], parameters: PolicyParameters
) -> list[UpstreamSlots]:
    """Those that are there, and new ones for the rest."""
    there = {(slots.name, slots.parameters.address): slots for slots in engines}
    return [there.get((u.name, u.address)) or UpstreamSlots(u, parameters.scheduling) for u in group]


def _heirs(
    groups: Sequence[list[UpstreamSlots]],
    were: Homes,
    parameters: PolicyParameters,
    now: int,
    decide: Decide,
) -> list[Pool]:
    """For each group the pool that goes on as its own. Groups that keep more of a pool choose first."""
    shared = [Counter(were[slots] for slots in group if slots in were) for group in groups]
    taken: dict[int, Pool] = {}
    for index in sorted(range(len(groups)), key=lambda i: -max(shared[i].values(), default=0)):
        free = [pool for pool, _ in shared[index].most_common() if pool not in taken.values()]
        if free:
            taken[index] = free[0]
        else:
            taken[index] = Pool(parameters, groups[index], now, decide)
            if shared[index]:
                taken[index].buckets.empty()
    return [taken[index] for index in range(len(groups))]


def _share_levels(
    old: Sequence[Pool], new: Sequence[Pool], groups: Sequence[list[UpstreamSlots]], were: Homes
) -> None:
    """Levels follow the upstreams that stay. All is taken out before any is put in: what comes to a pool is
    not shared once more."""
    moved = []
    for pool in old:
        rates = [sum(_rate(slots) for slots in group if were.get(slots) is pool) for group in groups]
        whole = sum(rates)
        for heir, rate in zip(new, rates, strict=True):
            if rate and heir is not pool:
                moved.append((heir, pool.buckets.take_out(rate, whole)))
                whole -= rate
    for heir, levels in moved:
        heir.buckets.put_in(levels)


def _rate(slots: UpstreamSlots) -> int:
    return round(slots.tokens_per_second * MILLITOKENS)


# ---------------------------------------------------------------------- requests


def _move_leases(engines: Iterable[UpstreamSlots], are: Homes, new: Sequence[Pool], now: int) -> None:
    for slots in engines:
        for ticket in slots.leases.values():
            pool, route = _place_of(ticket, new) or (ticket.pool, NOWHERE)
            _move(ticket, are.get(slots, pool), route, now)


def _move_waiting(waiting: Iterable[Ticket], were: Homes, new: Sequence[Pool], now: int) -> None:
    down_since: dict[Route, int] = {}
    for ticket in waiting:
        former: Route = ticket.route
        not_reached = [s for s in were if s.name == ticket.not_reached and s not in former.upstreams]
        place = _place_of(ticket, new, not_reached)
        assert place is not None, "who waits for nobody has been refused"
        pool, route = place
        since = now if former.down_since is None else former.down_since
        down_since[route] = max(since, down_since.get(route, since))
        _move(ticket, pool, route, now)
    for route, since in down_since.items():
        if route.down_since is not None:  # as before: nobody waits from the beginning, nor is cut short
            route.down_since = since


def _move(ticket: Ticket, heir: Pool, route: Route, now: int) -> None:
    if heir is ticket.pool:
        heir.reroute(ticket, route)
    else:
        ticket.pool.hand_over(ticket, heir, route, now)


def _place_of(
    ticket: Ticket, pools: Iterable[Pool], avoided: Sequence[UpstreamSlots] = ()
) -> tuple[Pool, Route] | None:
    for pool in pools:
        route = pool.route(ticket.ask.model, ticket.is_long, avoided)
        if route is not None:
            return pool, route
    return None


# ---------------------------------------------------------------------- groups


def connected(upstreams: Sequence[UpstreamParameters]) -> list[list[UpstreamParameters]]:
    """Upstreams grouped so that any two that share a model are in one group."""
    groups: list[list[UpstreamParameters]] = []
    for upstream in upstreams:
        sharing = [g for g in groups if _share_any_model(g, [upstream])]
        merged = [other for group in sharing for other in group]
        groups = [g for g in groups if g not in sharing]
        groups.append([*merged, upstream])
    return groups


def _share_any_model(some: Iterable[UpstreamParameters], others: Sequence[UpstreamParameters]) -> bool:
    return any(_share_a_model(one, other) for one in some for other in others)


def _share_a_model(one: UpstreamParameters, other: UpstreamParameters) -> bool:
    return "*" in one.models or "*" in other.models or bool(set(one.models) & set(other.models))
