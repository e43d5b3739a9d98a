"""Which rates the classes' buckets get: the controller's law.

`static`: the configured shares of C, and C is the sum over the healthy upstreams. A law is pure: it is
told what happened and answers with rates in millitokens per second, which always add up to C.
"""

from collections.abc import Sequence
from typing import Protocol

from gateway.policy.token_bucket import split_rates


class ControlLaw(Protocol):
    name: str

    def rates(self, nominal_capacity: int) -> list[int]:
        """Class rates when the healthy upstreams together are good for `nominal_capacity`."""
        ...


class StaticLaw:
    """shares × C."""

    name = "static"

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = tuple(shares)

    def rates(self, nominal_capacity: int) -> list[int]:
        return split_rates(nominal_capacity, self._shares)


def control_law(name: str, shares: Sequence[float]) -> ControlLaw:
    if name == StaticLaw.name:
        return StaticLaw(shares)
    raise ValueError(f"no control law is called {name!r}")
