"""Who is asking: the key a client presents, and what it entitles to."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.api.errors import Problem
from gateway.keys import KeyEntry, KeyRing
from gateway.policy.classification import Entitlement
from gateway.policy.outcome import Outcome
from gateway.policy.request import Priority

Header = tuple[bytes, bytes]

KEY_HEADERS = (b"authorization", b"x-api-key")
CHALLENGE: Header = (b"www-authenticate", b"Bearer")


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant behind a request, and what its key may do. `key` is the key's id."""

    tenant: str
    entitlement: Entitlement = field(default_factory=Entitlement)
    models: tuple[str, ...] = ("*",)
    key: str | None = None
    trusts_subtenant: bool = False

    def may_use(self, model: str) -> bool:
        return "*" in self.models or model in self.models


ANYBODY = Caller("open")
"""Every caller of a gateway without keys."""


class Access:
    """The keys of the gateway; None means that it is open to all."""

    def __init__(self, keys: KeyRing | None) -> None:
        self._keys = keys
        self._callers = {entry.id: _caller_of(entry) for entry in keys or ()}

    def caller(self, headers: Sequence[Header]) -> Caller:
        """Raises Problem (401) for a key that is missing, malformed or not known."""
        if self._keys is None:
            return ANYBODY
        entry = self._keys.find(_presented_key(headers))
        if entry is None:
            raise _unauthorized("this API key is not known here")
        return self._callers[entry.id]


def _caller_of(entry: KeyEntry) -> Caller:
    entitlement = Entitlement(Priority[entry.default], Priority[entry.ceiling])
    return Caller(entry.tenant, entitlement, tuple(entry.models), entry.id, entry.trusts_subtenant)


def _presented_key(headers: Sequence[Header]) -> bytes:
    presented = [(name, value) for name, value in headers if name in KEY_HEADERS]
    if not presented:
        raise _unauthorized("no API key: send it as 'Authorization: Bearer KEY'")
    if len(presented) > 1:
        keys = {_key_in(name, value) for name, value in presented}
        if len(keys) > 1 or len({name for name, _ in presented}) < len(presented):
            raise _unauthorized("more than one API key was sent")
    return _key_in(*presented[0])


def _key_in(name: bytes, value: bytes) -> bytes:
    if name == b"x-api-key":
        return value.strip()
    scheme, _, key = value.strip().partition(b" ")
    key = key.strip()
    if scheme.lower() != b"bearer" or not key or b" " in key:
        raise _unauthorized("the Authorization header is not of the form 'Bearer KEY'")
    return key


def _unauthorized(message: str) -> Problem:
    return Problem(Outcome.UNAUTHORIZED, message, headers=(CHALLENGE,), close=True)
