"""Another configuration, made ready to be taken over: all of it that only reads and reckons.

With ten thousand keys that takes some tenths of a second, so it is for a thread beside the event loop; it
looks at nothing that changes meanwhile. What is left to the loop is to put what is ready in its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.api.access import Access
from gateway.api.advice import Advice, advice_on
from gateway.api.configuration import Configuration, Difference, as_far_as_running, difference
from gateway.config_reading import ConfigError
from gateway.policy.admission import Admission
from gateway.policy.clock import Clock
from gateway.policy.parameters import PolicyParameters
from gateway.policy_parameters import policy_parameters


@dataclass(frozen=True, slots=True)
class Prepared:
    """`configuration` is as far as a running gateway can take it. `access` is None where the keys stay as
    they are; `new_tenants` have a key now and had none; `advice` is what is new of it."""

    configuration: Configuration
    found: Difference
    parameters: PolicyParameters
    access: Access | None
    new_tenants: Sequence[str]
    advice: Sequence[Advice]


def prepare(old: Configuration, new: Configuration, in_force: PolicyParameters, clock: Clock) -> Prepared:
    """`in_force` are the policy's parameters as they follow from `old`. Raises ConfigError: figures that are
    each allowed may still be too large together."""
    keys = old.keys if old.keys == new.keys else new.keys
    new = replace(new, keys=keys)
    found = difference(old, new)
    new = replace(new, settings=as_far_as_running(old.settings, new.settings))
    parameters = policy_parameters(new.settings, keys or ())
    if keys is old.keys:  # the same objects: the policy sees at once that no limit of theirs is another
        limits = in_force.tenants, in_force.key_max_in_flight
        parameters = replace(parameters, tenants=limits[0], key_max_in_flight=limits[1])
    try:
        Admission(parameters, clock)
    except ArithmeticError as error:
        raise ConfigError([f"these figures cannot be reckoned with: {error}"]) from error
    known = {} if old.keys is None else old.keys.by_tenant
    return Prepared(
        configuration=new,
        found=found,
        parameters=parameters,
        access=None if keys is old.keys else Access(keys),
        new_tenants=[] if keys is None else [name for name in keys.by_tenant if name not in known],
        advice=advice_on(new, old),
    )
