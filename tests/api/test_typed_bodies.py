"""What the bodies of `/v1/responses` and `/v1/messages` say in words of their own."""

import json
from typing import Any

import pytest

from gateway.api.body import BadBody, BodyDialect, BodyFacts, peek


def facts(dialect: BodyDialect, **members: Any) -> BodyFacts:
    content: dict[str, Any] = {"input": "hello"} if dialect == "responses" else {"messages": []}
    return peek(json.dumps({"model": "m"} | content | members).encode(), dialect)


@pytest.mark.parametrize(
    ("dialect", "members", "limit"),
    [
        ("responses", {"max_output_tokens": 50}, 50),
        ("responses", {"max_output_tokens": 50, "max_tokens": 1000}, 50),
        ("responses", {"max_tokens": 1}, None),
        ("responses", {"max_tokens": "many"}, None),
        ("messages", {"max_tokens": 50}, 50),
        ("messages", {"max_tokens": 50, "max_completion_tokens": 1000}, 50),
        ("messages", {"max_output_tokens": 1}, None),
    ],
)
def test_the_limit_has_one_name(dialect: BodyDialect, members: dict[str, Any], limit: int | None) -> None:
    """What the engine does not read limits nothing."""
    assert facts(dialect, **members).max_output_tokens == limit


@pytest.mark.parametrize(
    ("dialect", "field"), [("responses", "max_output_tokens"), ("messages", "max_tokens")]
)
def test_a_limit_that_is_none(dialect: BodyDialect, field: str) -> None:
    """It is named."""
    with pytest.raises(BadBody) as bad:
        facts(dialect, **{field: -1})
    assert (bad.value.param, bad.value.code) == (field, "invalid_value")


@pytest.mark.parametrize(
    ("dialect", "tier", "claim"),
    [
        ("responses", "auto", "auto"),
        ("responses", "flex", "flex"),
        ("messages", "auto", None),
        ("messages", "standard_only", None),
        ("messages", "flex", "flex"),
        ("messages", None, None),
    ],
)
def test_which_tiers_may_be_claims(dialect: BodyDialect, tier: str | None, claim: str | None) -> None:
    """Anthropic's own say nothing of urgency."""
    assert facts(dialect, service_tier=tier).service_tier == claim


def test_a_response_in_the_background() -> None:
    """It would run on when its place is free again, and nobody could fetch it."""
    with pytest.raises(BadBody) as bad:
        facts("responses", background=True)
    assert (bad.value.param, bad.value.code) == ("background", "unsupported_value")
    assert facts("responses", background=False).stream is False
    assert facts("messages", background=True).stream is False
