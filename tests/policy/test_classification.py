"""Request facts and rules → class."""

import pytest

from gateway.policy.classification import (
    ClaimAboveCeiling,
    ClaimError,
    ClassificationRules,
    Classified,
    Entitlement,
    classify,
)
from gateway.policy.request import Priority
from tests.support.policy_settings import P0, P1, P2

OPEN = Entitlement()
RULES = ClassificationRules()


def claimed(*header: str, tier: str | None = None, route: str = "/v1/chat/completions") -> Priority:
    return classify(header, tier, route, OPEN, RULES).claimed


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("P0", P0),
        ("p0", P0),
        ("P1", P1),
        ("p2", P2),
        ("realtime", P0),
        ("ReAlTiMe", P0),
        ("normal", P1),
        ("NORMAL", P1),
        ("batch", P2),
        ("Batch", P2),
        ("  p0\t", P0),
        ("P2,P2", P2),
        ("P2, batch", P2),
        ("realtime,p0", P0),
    ],
)
def test_header_names_the_class_in_any_case(value: str, expected: Priority) -> None:
    """A known name counts whatever its case, its surrounding space or its repetition."""
    assert claimed(value) is expected


@pytest.mark.parametrize("value", ["", "   ", ",", " , ,"])
def test_empty_header_is_no_claim(value: str) -> None:
    """An empty value names nothing: the next rule decides."""
    assert claimed(value) is P1
    assert claimed(value, tier="flex") is P2


@pytest.mark.parametrize(
    "values",
    [
        ("P9",),
        ("0",),
        ("-1",),
        ("1",),
        ("urgent",),
        ("P0 P2",),
        ("P0;q=1",),
        ("x" * 8192,),
        ("\xe9",),
        ("P0\xe9",),
        ("\x00",),
        ("P0,", "nonsense"),
        ("P0,P2",),
        ("P0", "P2"),
        ("realtime", "batch"),
        ("P1", "P1, P2"),
    ],
)
def test_header_that_cannot_be_understood_is_refused(values: tuple[str, ...]) -> None:
    """An unknown value, or two different ones, is the client's mistake and never a class by accident."""
    with pytest.raises(ClaimError) as error:
        classify(values, None, "/", OPEN, RULES)
    message = str(error.value)
    assert message.isascii()
    assert len(message) < 300


def test_two_headers_of_one_class_agree() -> None:
    """The same class said twice, under either name, is one claim."""
    assert claimed("P2", "batch") is P2
    assert claimed("", "P0") is P0


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        ("priority", P0),
        ("fast", P0),
        ("ultrafast", P0),
        ("scale", P0),
        ("flex", P2),
        ("FLEX", P2),
        ("default", P1),
        ("auto", P1),
        ("surprise", P1),
        (None, P1),
    ],
)
def test_service_tier(tier: str | None, expected: Priority) -> None:
    """The body's service_tier counts where no header claims; an unknown tier is no claim."""
    assert claimed(tier=tier) is expected
    assert claimed("P0", tier=tier) is P0


def test_default_tier_means_the_keys_default() -> None:
    """`default` and `auto` ask for the key's default, not the route's."""
    rules = ClassificationRules(routes={"/v1/embeddings": P2})
    key = Entitlement(default=P0)
    for tier in ("default", "auto"):
        assert classify((), tier, "/v1/embeddings", key, rules) == Classified(P0, P0)


def test_service_tier_can_be_switched_off() -> None:
    """With service_tier off the field says nothing."""
    rules = ClassificationRules(service_tier=False)
    assert classify((), "priority", "/", OPEN, rules).claimed is P1


@pytest.mark.parametrize(
    ("header", "tier", "route", "key_default", "expected"),
    [
        (("P2",), "priority", "/e", P0, P2),
        ((), "priority", "/e", P1, P0),
        ((), None, "/e", P0, P2),
        ((), None, "/c", P0, P0),
        ((), None, "/c", None, P1),
        ((), "unknown", "/e", P0, P2),
    ],
)
def test_first_claim_found_wins(
    header: tuple[str, ...], tier: str | None, route: str, key_default: Priority | None, expected: Priority
) -> None:
    """Header, then service tier, then the route's default, then the key's, then the gateway's."""
    rules = ClassificationRules(routes={"/e": P2})
    assert classify(header, tier, route, Entitlement(default=key_default), rules).claimed is expected


@pytest.mark.parametrize("ceiling", list(Priority))
@pytest.mark.parametrize("claim", list(Priority))
def test_nobody_gets_more_than_the_ceiling(ceiling: Priority, claim: Priority) -> None:
    """A claim above the key's ceiling is lowered to it, one below it is kept."""
    result = classify((claim.name,), None, "/", Entitlement(ceiling=ceiling), RULES)
    assert result == Classified(claim, max(claim, ceiling))


@pytest.mark.parametrize(
    ("tier", "rules", "default"),
    [
        ("priority", ClassificationRules(), None),
        (None, ClassificationRules(routes={"/": P0}), None),
        (None, ClassificationRules(), P0),
        (None, ClassificationRules(default=P0), None),
    ],
)
def test_the_ceiling_holds_for_every_way_to_claim(
    tier: str | None, rules: ClassificationRules, default: Priority | None
) -> None:
    """Tier, route and defaults are lowered like a header."""
    granted = classify((), tier, "/", Entitlement(default=default, ceiling=P2), rules)
    assert granted == Classified(P0, P2)


def test_above_the_ceiling_can_be_refused() -> None:
    """Where the operator says reject, a claim above the ceiling is an error that tells both classes."""
    rules = ClassificationRules(reject_above_ceiling=True)
    key = Entitlement(ceiling=P1)
    with pytest.raises(ClaimAboveCeiling, match="P1 at most, not P0") as error:
        classify(("P0",), None, "/", key, rules)
    assert (error.value.claimed, error.value.ceiling) == (P0, P1)
    assert classify(("P1",), None, "/", key, rules) == Classified(P1, P1)
    assert classify(("P2",), None, "/", key, rules) == Classified(P2, P2)


def test_a_default_above_the_ceiling_is_lowered_even_where_claims_are_refused() -> None:
    """A client that claimed nothing cannot have claimed too much."""
    strict = ClassificationRules(reject_above_ceiling=True)
    assert classify([], None, "/v1/x", Entitlement(ceiling=P2), strict) == Classified(P1, P2)
    with pytest.raises(ClaimAboveCeiling):
        classify(["P1"], None, "/v1/x", Entitlement(ceiling=P2), strict)
