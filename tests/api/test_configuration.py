"""What is other in another configuration."""

from typing import Any

import pytest

from gateway.api.configuration import Configuration, difference
from gateway.keys import KeyEntry, KeyRing, hash_key
from gateway.settings import Settings

UPSTREAMS = [{"name": "gpu0", "url": "http://127.0.0.1:1"}]


def configured(**given: Any) -> Configuration:
    return Configuration(Settings.model_validate({"upstreams": UPSTREAMS, **given}))


def promising(slo: Any) -> Configuration:
    return configured(classes={"P2": {"slo": slo}})


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (None, {}, {"classes.P2.slo": (None, {})}),
        ({}, None, {"classes.P2.slo": ({}, None)}),
        ({}, {}, {}),
        (None, {"tpot_seconds": 1}, {"classes.P2.slo.tpot_seconds": (None, 1)}),
        ({"tpot_seconds": 1}, None, {"classes.P2.slo.tpot_seconds": (1, None)}),
        ({}, {"tpot_seconds": 1}, {"classes.P2.slo.tpot_seconds": (None, 1)}),
    ],
)
def test_null_is_not_an_empty_section(before: Any, after: Any, told: Any) -> None:
    """A section that comes or goes with nothing in it is told as a whole, else the values in it are."""
    found = difference(promising(before), promising(after))
    assert (set(found.changed), found.values) == (set(told), told)


def test_other_keys_are_told_by_the_name_of_their_file() -> None:
    """Though that is the same; the same keys, read again, are not told."""
    settings = configured().settings

    def ring(tenant: str) -> KeyRing:
        return KeyRing([KeyEntry(id="a", sha256=hash_key("key"), tenant=tenant)])

    old = Configuration(settings, ring("acme"))
    assert difference(old, Configuration(settings, ring("globex"))).changed == ("keys_file",)
    assert difference(old, Configuration(settings, None)).changed == ("keys_file",)
    assert difference(old, Configuration(settings, ring("acme"))).changed == ()
