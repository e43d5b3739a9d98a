"""Another configuration, made ready: what stays as it is, what is new, and what cannot be reckoned with."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.api.advice import advice_on
from gateway.api.configuration import Configuration
from gateway.api.preparation import Prepared, prepare
from gateway.config_reading import ConfigError
from gateway.keys import KeyEntry, KeyRing, hash_key
from gateway.policy.clock import ManualClock
from gateway.policy_parameters import policy_parameters
from gateway.settings import Settings


def ring(**entries: Any) -> KeyRing:
    return KeyRing(
        KeyEntry(id=name, sha256=hash_key(name), **{"tokens_per_minute": 10, **given})
        for name, given in entries.items()
    )


def configured(keys: KeyRing | None, **given: Any) -> Configuration:
    upstreams = [{"name": "gpu0", "url": "http://127.0.0.1:1"}]
    return Configuration(Settings.model_validate({"upstreams": upstreams, **given}), keys)


def prepared(old: Configuration, new: Configuration) -> Prepared:
    return prepare(old, new, policy_parameters(old.settings, old.keys or ()), ManualClock(0))


def test_the_same_keys_stay_the_same_objects() -> None:
    """Read again or not: who compares by identity sees that nothing is to be done."""
    old = configured(ring(acme={"max_in_flight": 3}))
    in_force = policy_parameters(old.settings, old.keys or ())
    for keys in (old.keys, ring(acme={"max_in_flight": 3})):
        ready = prepare(old, configured(keys, mode="observe"), in_force, ManualClock(0))
        assert ready.configuration.keys is old.keys
        assert (ready.access, ready.new_tenants) == (None, [])
        assert ready.parameters.tenants is in_force.tenants
        assert ready.parameters.key_max_in_flight is in_force.key_max_in_flight
        assert ready.found.changed == ("mode",)


def test_other_keys_bring_their_access_and_limits() -> None:
    """And the tenants that were not known."""
    new = ring(acme={"tokens_per_minute": 20}, globex={})
    ready = prepared(configured(ring(acme={})), configured(new))
    assert ready.configuration.keys is new
    assert ready.access is not None
    assert ready.access.caller([(b"x-api-key", b"globex")]).tenant == "globex"
    assert ready.new_tenants == ["globex"]
    assert ready.parameters.tenants["acme"].tokens_per_minute == 20
    opened = prepared(configured(ring(acme={})), configured(None))
    assert opened.access is not None
    assert opened.parameters.tenants == {}


def test_a_fleet_of_one_assumed_is_a_slip() -> None:
    """Each of several that start without the store would take all of the budget."""
    url = "redis://store:6379"
    slip, right = configured(None, state=url), configured(None, state=url, fleet={"replicas_assumed": 3})
    assert any("replicas_assumed" in says for says, _ in advice_on(slip))
    for each in (right, configured(None)):
        assert not any("replicas_assumed" in says for says, _ in advice_on(each))


def test_only_new_advice_is_given() -> None:
    """What was said at the start, or at the last change, is not said again; what comes back is."""
    zero, none = ring(acme={"max_in_flight": 0}), ring(acme={"max_in_flight": 1})
    first = configured(zero, mode="observe")
    assert [says for says, _ in advice_on(first)] == [
        "observe mode: decisions are recorded, nothing is enforced",
        "this limit is 0: nothing passes",
    ]
    assert prepared(first, configured(zero, mode="observe", capacity={"burst_seconds": 1})).advice == []
    assert prepared(first, configured(none, mode="observe")).advice == []
    news = prepared(configured(none, mode="observe"), first).advice
    assert [dict(about) for _, about in news] == [{"setting": "keys.acme.max_in_flight"}]
    fewer = configured(zero, classes={"P2": {"mode": "observe"}})
    assert [dict(about) for _, about in prepared(first, fewer).advice] == [{"classes": ("P2",)}]


def test_figures_too_large_together_are_refused() -> None:
    """A rate that is a number may be none in millitokens."""
    old = configured(None)
    huge = configured(None, capacity={"tokens_per_second": 1e308})
    with pytest.raises(ConfigError, match="cannot be reckoned with"):
        prepared(old, huge)


def test_what_only_a_restart_changes_stays() -> None:
    """It is told, and not in what is ready."""
    old = configured(None)
    server = old.settings.server.model_copy(update={"port": 9})
    new = replace(old, settings=old.settings.model_copy(update={"server": server}))
    ready = prepared(old, new)
    assert ready.found.needs_restart == ("server.port",)
    assert ready.configuration.settings == old.settings
