"""How many requests at once each key has inside the gateway, waiting ones included, and may have.

Where several gateways share the keys each has a part of a key's places, which it is told (`gateway/fleet`);
of a key that was not told of yet, limit / gateways, and one at least.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from gateway.policy.clock import NANOSECONDS_PER_SECOND

REFUSED_NS = 2 * NANOSECONDS_PER_SECOND
"""Who was refused less than so long ago would still like a place."""
ALL_TOLD_MAX = 50
"""With no more limited keys than this all are told of, so that their parts are known before they come."""
TOLD_MAX = 100
"""Of more, those in use: the cost of a call grows with them. Others have limit / gateways."""


class PlacesUse(NamedTuple):
    key: str
    limit: int
    in_use: int
    wanted: int


class KeyPlaces:
    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = limits
        self._in_flight: Counter[str] = Counter()
        self._gateways = 0
        """That share the keys; 0: nobody does."""
        self._parts: dict[str, int] = {}
        self._refused: dict[str, tuple[int, int]] = {}  # how many, and when the last one

    def reconfigure(self, limits: Mapping[str, int]) -> None:
        self._limits = limits
        self._parts = {key: part for key, part in self._parts.items() if key in limits}

    def limit(self, key: str) -> int | None:
        """Of all its requests, wherever; None where it has none."""
        return self._limits.get(key)

    def full(self, key: str) -> bool:
        """Whether one more is too many."""
        limit = self._limits.get(key)
        return limit is not None and self._in_flight[key] >= self._allowed(key, limit)

    def wanted(self, key: str, now: int) -> None:
        """One more than it may have, and in vain."""
        if self._gateways:
            count, at = self._refused.get(key, (0, 0))
            self._refused[key] = (count + 1 if now - at < REFUSED_NS else 1, now)

    def take(self, key: str) -> None:
        self._in_flight[key] += 1

    def free(self, key: str) -> None:
        self._in_flight[key] -= 1
        if not self._in_flight[key]:
            del self._in_flight[key]

    def in_flight(self, key: str) -> int:
        return self._in_flight[key]

    # ------------------------------------------------------------------ several gateways

    def take_parts(self, parts: Mapping[str, int], gateways: int) -> None:
        self._parts = dict(parts)
        self._gateways = gateways

    def use(self, now: int) -> Iterator[PlacesUse]:
        """What is to be told."""
        self._refused = {key: (n, at) for key, (n, at) in self._refused.items() if now - at < REFUSED_NS}
        keys = self._limits if len(self._limits) <= ALL_TOLD_MAX else {**self._refused, **self._in_flight}
        for key in islice((key for key in keys if key in self._limits), TOLD_MAX):
            if limit := self._limits.get(key):
                in_use = self._in_flight[key]
                yield PlacesUse(key, limit, in_use, in_use + self._refused.get(key, (0, 0))[0])

    def _allowed(self, key: str, limit: int) -> int:
        if not self._gateways or not limit:
            return limit
        return min(self._parts.get(key, max(limit // self._gateways, 1)), limit)
