"""Who of the fleet gets how much: pure arithmetic, the same here and in `renew.lua`.

A pool has one budget, the rates C_k of its classes, and n replicas that each say what is asked of them. It
is divided in two steps.

*Between classes*, as the buckets of one gateway do it: each class has min(demand, C_k); what is left of C
goes to those that want more, P0 first, and not beyond `ceiling_share_k × C` while a higher class is active
anywhere. What nobody wants stays with the classes that it is guaranteed to. Without this step two replicas
of which one has P0 alone and the other P2 alone would lend to themselves what the other needs.

*Between replicas* by max-min fairness over tenants, not over replicas nor by demand: a class's rate is
filled into the tenants' demands to one level (water-filling: Bertsekas & Gallager, Data Networks, 6.5.2),
and each replica gets of a tenant's part what it has of that tenant's demand. So it does not matter by which
replica a request comes, and a tenant that floods one of them draws no rate away from the others'. What all
demands leave is given half evenly and half by demand: where more is asked, chance asks for more as well. A
small part of each class is spread evenly before, so that nobody's bucket stands still.

*Safety* is another thing than fairness: whatever the division says, a replica's rates are raised only by
what the others hold less (`raised`), and what one holds counts until it has itself said that it holds less.
The sum of what is held then never exceeds C, however late or lost an answer is.

Numbers are doubles rounded down to whole millitokens per second at the end: the same operations in the same
order give the same bits in Lua. Amounts stay below 2⁵³.
"""

from collections.abc import Iterable, Sequence
from math import floor

FLOOR_PART = 0.02
"""Of each class's rate, spread evenly over the replicas whatever is asked of them."""

CLASS_PARTS = (0.62, 0.33, 0.05)
"""Of the places where each class could use all: as often as one gateway's scheduler lets it go first."""

Flow = tuple[str, float, float]
"""A tenant's name, its demand, and for how many tenants it stands."""


def between_classes(
    rates: Sequence[float], demands: Sequence[float], ceiling_shares: Sequence[float], active: Sequence[bool]
) -> list[float]:
    """What each class may use of the sum of the rates; adds up to it."""
    capacity = _sum(rates)
    given = [min(float(rate), demand) for rate, demand in zip(rates, demands, strict=True)]
    spare = capacity - _sum(given)
    idle = spare
    higher_active = False
    for k, demand in enumerate(demands):
        ceiling = max(capacity * ceiling_shares[k], float(rates[k])) if higher_active else capacity
        more = max(min(spare, demand - given[k], ceiling - given[k]), 0.0)
        given[k] += more
        spare -= more
        higher_active = higher_active or active[k]
    if spare > 0 and idle > 0:
        unused = [max(rate - demand, 0.0) for rate, demand in zip(rates, demands, strict=True)]
        given = [g + spare * u / idle for g, u in zip(given, unused, strict=True)]
    return given


def water_filled(total: float, flows: Sequence[Flow]) -> dict[str, float]:
    """Max-min fair parts of a total: none above its demand, and those below it the same per weight."""
    parts: dict[str, float] = {}
    left = total
    weight_left = 0.0
    ordered = sorted(flows, key=lambda flow: (flow[1] / flow[2], flow[0]))
    for _, _, weight in ordered:
        weight_left += weight
    for name, demand, weight in ordered:
        part = min(demand, max(left, 0.0) * weight / weight_left)
        parts[name] = part
        left -= part
        weight_left -= weight
    return parts


def between_replicas(total: float, asked: Sequence[Sequence[Flow]]) -> list[int]:
    """`asked` of each replica, in their order: its tenants' demands. The answers add up to the total, less
    what rounding takes."""
    count = len(asked)
    evenly = total * FLOOR_PART / count
    rest = total - evenly * count
    demands: dict[str, float] = {}
    weights: dict[str, float] = {}
    own = []
    for flows in asked:
        demand = 0.0
        for name, wanted, weight in flows:
            demands[name] = demands.get(name, 0.0) + wanted
            weights[name] = max(weights.get(name, 0.0), weight)
            demand += wanted
        own.append(demand)
    parts = water_filled(
        rest, [(name, demands[name], weights[name]) for name in demands if demands[name] > 0]
    )
    got = []
    for flows in asked:
        part = 0.0
        for name, wanted, _ in flows:
            if wanted > 0:
                part += parts[name] * (wanted / demands[name])
        got.append(part)
    left = max(rest - _sum(got), 0.0)
    everything = _sum(own)
    shares = []
    for demand, part in zip(own, got, strict=True):
        by_demand = demand / everything if everything > 0 else 1.0 / count
        shares.append(floor(evenly + part + left * (0.5 * by_demand + 0.5 / count)))
    return shares


def places(limit: int, wanted: Sequence[int], turn: int, by_class: Sequence[Sequence[int]] = ()) -> list[int]:
    """Whole places by max-min fairness, within each class if what is wanted is told by class: each class has
    `CLASS_PARTS`, and what it does not want of it is lent, P0 first. Those that nobody wants are spread
    evenly; of the last few that cannot be divided, the replica that is first changes with `turn`."""
    count = len(wanted)
    fair = _by_class(float(limit), by_class) if by_class and all(by_class) else _filled(float(limit), wanted)
    got = [floor(part) for part in fair]
    spare = max(limit - sum(min(w, limit) for w in wanted), 0) // count
    got = [g + spare for g in got]
    left = limit - sum(got)
    for wanting_only in (True, False):
        for step in range(count):
            i = (turn + step) % count
            if left > 0 and (not wanting_only or got[i] < wanted[i]):
                got[i] += 1
                left -= 1
    return got


def _by_class(limit: float, by_class: Sequence[Sequence[int]]) -> list[float]:
    guaranteed = [limit * part for part in CLASS_PARTS]
    classes = range(len(guaranteed))
    demands = [float(sum(wanted[k] for wanted in by_class)) for k in classes]
    fair = [0.0] * len(by_class)
    for k, total in enumerate(between_classes(guaranteed, demands, [1.0] * 3, [False] * 3)):
        for i, part in enumerate(_filled(total, [wanted[k] for wanted in by_class])):
            fair[i] += part
    return fair


def _filled(total: float, wanted: Sequence[int]) -> list[float]:
    parts = water_filled(total, [(f"{i:06d}", float(w), 1.0) for i, w in enumerate(wanted)])
    return [parts[f"{i:06d}"] for i in range(len(wanted))]


def raised(wanted: Sequence[int], held: Sequence[int], free: float) -> list[int]:
    """What a replica that holds so much may hold next: less at once, more only while all of it together is
    within what the others leave free; P0 first."""
    next_ones = [min(w, h) for w, h in zip(wanted, held, strict=True)]
    room = free - sum(next_ones)
    for k, want in enumerate(wanted):
        more = max(min(want - next_ones[k], room), 0)
        next_ones[k] += floor(more)
        room -= floor(more)
    return next_ones


def allowance(
    level: float,
    wanted: float,
    wanted_by_all: float,
    replicas: int,
    first: tuple[float, float],
    is_first: bool,
) -> int:
    """Of a tenant's bucket, for one of the replicas at which it asks: what it wants and a part of what
    nobody does; where there is too little, by what each wants. Only that the `first`, whose turn it is, has
    enough for its largest request, where the bucket has: by parts alone that might never be paid.
    `first`: what it wants, and its largest request."""
    if level <= 0:
        return 0
    if wanted_by_all <= level:
        return floor(wanted + (level - wanted_by_all) / replicas)
    claim = min(max(level * (first[0] / wanted_by_all), first[1]), level)
    if is_first:
        return floor(claim)
    others = wanted_by_all - first[0]
    return floor((level - claim) * (wanted / others)) if others > 0 else 0


def _sum(numbers: Iterable[float]) -> float:
    """One after the other. Python's own sum carries the rounding along from 3.12 on, which Lua does not."""
    total = 0.0
    for number in numbers:
        total += number
    return total
