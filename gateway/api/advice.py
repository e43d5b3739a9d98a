"""What an operator should hear about a configuration that is legal: it may be a slip."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import structlog

from gateway.api.configuration import Configuration
from gateway.keys import KeyEntry, KeyRing
from gateway.policy.request import PRIORITIES
from gateway.policy_parameters import is_observed
from gateway.settings import Settings

_log = structlog.get_logger("gateway")

_LIMITS_OF_CLASSES = ("max_queued_requests", "max_queued_bytes")
_LIMITS_OF_KEYS = ("tokens_per_minute", "requests_per_minute", "max_in_flight")
_LIMITS_OF_UPSTREAMS = ("max_in_flight", "max_in_flight_tokens")


class Advice(NamedTuple):
    """A line of the log, and the names and values that stand beside it."""

    says: str
    about: tuple[tuple[str, Any], ...] = ()


def warn(advice: Iterable[Advice]) -> None:
    for says, about in advice:
        _log.warning(says, **dict(about))


def advice_on(configuration: Configuration, before: Configuration | None = None) -> Sequence[Advice]:
    """What the configuration `before` it did not call for already: who changes one setting need not hear all
    of it again."""
    heard = set() if before is None else set(_all_advice(before.settings, before.keys))
    return [each for each in _all_advice(configuration.settings, configuration.keys) if each not in heard]


def _all_advice(settings: Settings, keys: KeyRing | None) -> Iterator[Advice]:
    observed = tuple(p.name for p in PRIORITIES if is_observed(settings, p))
    if observed:
        yield Advice("observe mode: decisions are recorded, nothing is enforced", (("classes", observed),))
    for name in limits_of_zero(settings, keys or ()):
        yield Advice("this limit is 0: nothing passes", (("setting", name),))
    for upstream in settings.upstreams:
        if upstream.url.startswith("https://") and not upstream.tls_verify:
            yield Advice("tls_verify is off: whoever answers is taken for it", (("upstream", upstream.name),))
    if settings.store_url is not None and settings.fleet.replicas_assumed == 1:
        yield Advice(
            "fleet.replicas_assumed is 1: gateways that start while the shared state is away take all of the "
            "budget each"
        )
    if keys is None:
        yield Advice("open gateway: no keys_file, so anybody may claim any class")


def limits_of_zero(settings: Settings, keys: Iterable[KeyEntry]) -> list[str]:
    """The limits that are set to 0, by name: null is no limit, 0 lets nothing pass."""
    found = []
    for upstream in settings.upstreams:
        found += [f"upstreams.{upstream.name}.{n}" for n in _LIMITS_OF_UPSTREAMS if getattr(upstream, n) == 0]
    for p in PRIORITIES:
        limits = settings.classes[p.name]
        found += [f"classes.{p.name}.{n}" for n in _LIMITS_OF_CLASSES if getattr(limits, n) == 0]
    for key in keys:
        found += [f"keys.{key.id}.{n}" for n in _LIMITS_OF_KEYS if getattr(key, n) == 0]
    return found + ["capacity.max_request_tokens"] * (settings.capacity.max_request_tokens == 0)
