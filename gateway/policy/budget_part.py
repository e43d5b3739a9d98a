"""Where several gateways share one budget: the part that this one has of it, and what is asked of it.

Who gets which part is decided elsewhere, about ten times a second (`gateway/fleet`). In here a part is a set
of class rates like any other, with three differences. *Bursts* are those of an equal part at least, or a
gateway of which little is asked could let nothing through at once: the bursts of all together are at most
twice those of one. Waits are predicted by the *prospects*, what the gateway would get if it asked for more.
And its *own* rates, from which long prompts are paid, leave out what other classes lend.

Rates are millitokens per second, tuples are by class.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.request import PRIORITIES, Priority

DEMAND_NS = 2 * NANOSECONDS_PER_SECOND
_GRAIN_NS = NANOSECONDS_PER_SECOND // 4


class BudgetPart(NamedTuple):
    rates: tuple[int, ...]
    own_rates: tuple[int, ...]
    prospects: tuple[int, ...]
    budget: tuple[int, ...]
    """Of all gateways together."""
    gateways: int
    nominal: int = 0
    """C as it was configured where the budget was set; 0: nobody knows."""
    active_elsewhere: tuple[bool, ...] = (False, False, False)
    decides: bool = False
    """This gateway's law sets the budget: on what all gateways see, or, `alone`, on what it sees itself."""
    alone: bool = False


def equal_part(budget: tuple[int, ...], gateways: int) -> BudgetPart:
    """Of a budget that nobody has divided yet."""
    rates = tuple(rate // gateways for rate in budget)
    return BudgetPart(rates, own_rates=rates, prospects=rates, budget=budget, gateways=gateways)


class Parts(NamedTuple):
    """Of everything that is shared, by name. An engine's are places and tokens (None: not limited), a
    minute's the mark up to which it may be used, what all have left of it and what flows in per minute, in
    thousandths."""

    gateways: int
    pools: Mapping[str, BudgetPart]
    engines: Mapping[str, tuple[int | None, int | None]]
    keys: Mapping[str, int]
    minutes: Mapping[tuple[str, str], tuple[int, int, int]]


class RecentDemand:
    """What was asked over the last two seconds, in quarters of one."""

    def __init__(self) -> None:
        self._grains: deque[tuple[int, list[dict[str, int]]]] = deque()

    def asked(self, priority: Priority, tenant: str, cost: int, now: int) -> None:
        grains = self._grains
        if not grains or now - grains[-1][0] >= _GRAIN_NS:
            self._forget(now)
            grains.append((now, [{} for _ in PRIORITIES]))
        of_class = grains[-1][1][priority]
        of_class[tenant] = of_class.get(tenant, 0) + cost

    def per_second(self, priority: Priority, now: int) -> dict[str, int]:
        """By tenant, in millitokens, as far as is known what requests of late have cost."""
        self._forget(now)
        total: dict[str, int] = {}
        for _, by_class in self._grains:
            for tenant, cost in by_class[priority].items():
                total[tenant] = total.get(tenant, 0) + cost
        return {t: max(cost, 0) * NANOSECONDS_PER_SECOND // DEMAND_NS for t, cost in total.items()}

    def _forget(self, now: int) -> None:
        grains = self._grains
        while grains and grains[0][0] <= now - DEMAND_NS:
            grains.popleft()


def with_waiting(asked: dict[str, int], waiting: Mapping[str, int], throttle_ns: int) -> dict[str, int]:
    """And besides what waits for tokens, to be paid within `DEMAND_NS`, or within the time for which the
    class may be throttled where that is longer. Changes `asked`."""
    within = max(throttle_ns, DEMAND_NS)
    for tenant, cost in waiting.items():
        asked[tenant] = asked.get(tenant, 0) + cost * NANOSECONDS_PER_SECOND // within
    return asked
