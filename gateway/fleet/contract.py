"""What a gateway tells the fleet, and what it gets: the whole contract between the two.

    class Gateway(Protocol):
        def demand(self) -> Demand     what is asked of me
        def take(self, share: Share)   what I may use from now on

Both are called about ten times a second on the event loop, neither waits. Names of pools, places and
allowances are the gateway's own; replicas that use the same name share. Rates are millitokens per second,
costs millitokens, tuples are by class. Everything here is also the message to the store, an array of its
fields.
"""

from enum import Enum
from typing import Protocol

from msgspec import Struct

ByClass = tuple[int, ...]


class Flow(Struct, frozen=True, array_like=True):
    """One tenant's demand, or what all the smaller ones demand, which stand for `tenants` of them. Some
    thirty of a class are enough: the cost of a call grows with them."""

    tenant: str
    rate: int
    tenants: int = 1


class PoolDemand(Struct, frozen=True, array_like=True):
    pool: str
    budget: ByClass
    """The fleet's class rates as this gateway knows them. They count where it leads or nobody knows any."""
    ceiling_shares: tuple[float, ...]
    active: tuple[bool, ...]
    """Which classes have requests here, or had some a moment ago."""
    flows: tuple[tuple[Flow, ...], ...]
    """By class: what was asked over the last two seconds, and besides what waits for tokens, to be paid in
    two seconds, or in as long as the class may be throttled where that is longer."""
    nominal: int = 0
    """C as configured, to which the budget is relative."""


class PlacesDemand(Struct, frozen=True, array_like=True):
    """Something of which there is a fixed number, such as an upstream's `max_in_flight`."""

    name: str
    limit: int
    in_use: int
    wanted: int
    """Those in use, and as many more as could be used now or were refused a moment ago."""
    by_class: ByClass = ()
    """The same, where it matters which class they are for."""


class AllowanceDemand(Struct, frozen=True, array_like=True):
    """A limit per minute, in thousandths of a token or request. Only those in use need be told."""

    name: str
    per_minute: int
    used: int
    """Since the gateway started; refunds make it less."""
    wanted: int
    """For the next second."""
    largest: int = 0
    """What the largest of its requests wants of it."""


class Demand(Struct, frozen=True, array_like=True):
    pools: tuple[PoolDemand, ...] = ()
    places: tuple[PlacesDemand, ...] = ()
    allowances: tuple[AllowanceDemand, ...] = ()
    signals: str = ""
    """For whoever leads; nobody else looks into it."""


class PoolShare(Struct, frozen=True, array_like=True):
    pool: str
    rates: ByClass
    """For this gateway's buckets."""
    budget: ByClass
    """The fleet's."""
    fence: int
    """Of the leader that set the budget: greater is later. 0: nobody has led yet."""
    active: tuple[bool, ...]
    """Which classes have requests at others."""
    prospects: ByClass
    """What this gateway would get if it asked for more: to predict waits by, where it has little of a class
    because it asks for little."""
    own: ByClass
    """The part of its rates that is not lent by other classes."""
    nominal: int = 0
    """C as it was configured where the budget was set."""


class PlacesShare(Struct, frozen=True, array_like=True):
    name: str
    limit: int


class AllowanceShare(Struct, frozen=True, array_like=True):
    name: str
    until: int
    """`used` may come to so much."""
    level: int
    """What the fleet has left, for headers; below zero is debt."""
    per_minute: int = 0
    """Beyond `until`, so much may flow in here: without the store only."""


class State(Enum):
    JOINING = "joining"
    """It has not yet reached the store, and has its part by the number of replicas it was told of."""
    SHARED = "shared"
    HOLDING = "holding"
    """The store does not answer; the last share is good until its lease ends."""
    ALONE = "alone"
    """The lease has ended without an answer: last known budget / live replicas."""


class Share(Struct, frozen=True):
    state: State
    replicas: int
    """As far as known, this one included."""
    pools: tuple[PoolShare, ...] = ()
    places: tuple[PlacesShare, ...] = ()
    allowances: tuple[AllowanceShare, ...] = ()
    leads: bool = False
    """This gateway's law sets the budget: in the store's name, or because it is alone."""
    signals: tuple[str, ...] = ()
    """Of all replicas, about once a second and only where this one leads."""


class Gateway(Protocol):
    def demand(self) -> Demand: ...

    def take(self, share: Share) -> None: ...
