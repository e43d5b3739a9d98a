"""Request facts and rules → traffic class.

A claim is looked for in this order, and the first one found counts: the priority header, the body's
`service_tier`, the route's default, the key's default, the gateway's default. A claim above the key's
ceiling is lowered to the ceiling, or refused where the operator asks for that; a default, which the
client did not say, is only ever lowered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.policy.request import Priority

NAMES: Mapping[str, Priority] = {
    "p0": Priority.P0,
    "realtime": Priority.P0,
    "p1": Priority.P1,
    "normal": Priority.P1,
    "p2": Priority.P2,
    "batch": Priority.P2,
}

SERVICE_TIERS: Mapping[str, Priority | None] = {
    "priority": Priority.P0,
    "fast": Priority.P0,
    "ultrafast": Priority.P0,
    "scale": Priority.P0,
    "default": None,
    "auto": None,
    "flex": Priority.P2,
}
"""None stands for the key's default."""


@dataclass(frozen=True, slots=True)
class Entitlement:
    """What a key may claim; the open gateway has the default one."""

    default: Priority | None = None
    ceiling: Priority = Priority.P0


@dataclass(frozen=True, slots=True)
class ClassificationRules:
    service_tier: bool = True
    routes: Mapping[str, Priority] = field(default_factory=dict)
    default: Priority = Priority.P1
    reject_above_ceiling: bool = False


class Classified(NamedTuple):
    claimed: Priority
    granted: Priority


class ClaimError(ValueError):
    """The client named its class in a way that cannot be understood."""


class ClaimAboveCeiling(Exception):
    """The key may not claim this class, and the rules say to refuse rather than to lower it."""

    def __init__(self, claimed: Priority, ceiling: Priority) -> None:
        super().__init__(f"this key may claim {ceiling.name} at most, not {claimed.name}")
        self.claimed = claimed
        self.ceiling = ceiling


def classify(
    header_values: Sequence[str],
    service_tier: str | None,
    route: str,
    entitlement: Entitlement,
    rules: ClassificationRules,
) -> Classified:
    """The class a request claims and the class it gets.

    Raises ClaimError for header values that are unknown or contradict each other, ClaimAboveCeiling
    where the rules refuse.
    """
    own_default = entitlement.default if entitlement.default is not None else rules.default
    said = _from_header(header_values)
    if said is None and rules.service_tier and service_tier is not None:
        tier = service_tier.strip().lower()
        if tier in SERVICE_TIERS:
            named = SERVICE_TIERS[tier]
            said = own_default if named is None else named
    claimed = rules.routes.get(route, own_default) if said is None else said
    if claimed >= entitlement.ceiling:
        return Classified(claimed, claimed)
    if rules.reject_above_ceiling and said is not None:
        raise ClaimAboveCeiling(claimed, entitlement.ceiling)
    return Classified(claimed, entitlement.ceiling)


def _from_header(values: Sequence[str]) -> Priority | None:
    """The one class that all header values name, None if none names any."""
    found: Priority | None = None
    for value in values:
        for part in value.split(","):
            word = part.strip().lower()
            if not word:
                continue
            named = NAMES.get(word)
            if named is None:
                shown = part.strip()[:40].encode("ascii", "backslashreplace").decode()
                raise ClaimError(
                    f"unknown priority '{shown}': expected P0, P1, P2, realtime, normal or batch"
                )
            if found is not None and named is not found:
                raise ClaimError(f"contradicting priorities {found.name} and {named.name}: name one")
            found = named
    return found
