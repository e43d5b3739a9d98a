"""The keys that tenants present: a YAML list of SHA-256 digests, never of the keys themselves."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, RootModel, ValidationError, model_validator

from gateway.config_reading import (
    ConfigError,
    Problem,
    Section,
    dotted,
    located_problems,
    read_yaml,
    refuse,
    shown,
)
from gateway.config_values import CLASS_NAMES, ClassName, CountOrNull, Digest, Name, NameList


class KeyEntry(Section):
    """What one key may do. `id` and `tenant` appear in logs and metrics."""

    id: Name
    sha256: Annotated[Digest, AfterValidator(str.lower)]
    """The key's digest, never the key itself."""
    tenant: Name = Field(default_factory=lambda entry: entry.get("id", ""))
    ceiling: ClassName = "P0"
    default: ClassName = Field(default_factory=lambda entry: "P2" if entry.get("ceiling") == "P2" else "P1")
    """P1, or the ceiling if that is lower."""
    models: NameList = ("*",)
    tokens_per_minute: CountOrNull = None
    requests_per_minute: CountOrNull = None
    max_in_flight: CountOrNull = None
    trusts_subtenant: bool = False

    def _problems(self) -> Iterator[Problem]:
        if CLASS_NAMES.index(self.default) < CLASS_NAMES.index(self.ceiling):
            yield Problem(
                ("default",), f"found {self.default}, expected a class not above the ceiling {self.ceiling}"
            )


class _KeyFile(RootModel[tuple[KeyEntry, ...]]):
    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(self._problems())
        return self

    def _problems(self) -> Iterator[Problem]:
        ids: dict[str, int] = {}
        digests: dict[str, int] = {}
        for index, entry in enumerate(self.root):
            if ids.setdefault(entry.id, index) != index:
                yield Problem((index, "id"), f'found "{entry.id}", which keys[{ids[entry.id]}] has already')
            if digests.setdefault(entry.sha256, index) != index:
                says = f"found the digest that keys[{digests[entry.sha256]}] has already"
                yield Problem((index, "sha256"), says)


class KeyRing:
    """All keys that are let in.

    A presented key is hashed and its digest looked up in a dictionary. This tells a caller who measures time
    nothing of use. How long hashing takes depends only on the length of what he sent. How long the look-up
    takes depends on the digest of what he sent: through Python's hash of it, which is seeded afresh in every
    process, and through a comparison with a stored digest, which needs that hash to agree first. To learn
    stored digests byte by byte he would have to choose digests, and SHA-256 lets him choose only its input.
    And a digest, even a whole one, is not accepted as a key, nor does it lead back to one.
    """

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self._entries = {bytes.fromhex(entry.sha256): entry for entry in entries}
        self.by_tenant = _by_tenant(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[KeyEntry]:
        return iter(self._entries.values())

    def __eq__(self, other: object) -> bool:
        """Whether the same keys may do the same."""
        return self is other or (isinstance(other, KeyRing) and self._entries == other._entries)

    def find(self, presented: bytes) -> KeyEntry | None:
        return self._entries.get(hashlib.sha256(presented).digest())


def _by_tenant(entries: Iterable[KeyEntry]) -> Mapping[str, Sequence[KeyEntry]]:
    """In the order of their names."""
    found = defaultdict(list)
    for entry in entries:
        found[entry.tenant].append(entry)
    return {name: tuple(found[name]) for name in sorted(found)}


def hash_key(key: str) -> str:
    """What stands in the keys file for this key."""
    return hashlib.sha256(key.encode()).hexdigest()


def load_keys(path: Path) -> KeyRing:
    """The keys of a file; an empty list lets nobody in. Raises `ConfigError`."""
    tree = read_yaml(path)
    if not isinstance(tree, list):
        raise ConfigError([f"{path}: found {shown(tree)}, expected a list of keys"])
    try:
        return KeyRing(_KeyFile.model_validate(tree).root)
    except ValidationError as error:
        problems = located_problems(error, tuple[KeyEntry, ...], tree)
        raise ConfigError(f"{path}: keys{dotted(location)}: {says}" for location, says in problems) from None
