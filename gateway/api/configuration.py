"""A whole configuration: the settings with the files they name, read and checked before anything is done."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from gateway.api.tokenizer_files import TokenizerFile, load_tokenizers
from gateway.config_reading import ConfigError
from gateway.keys import KeyRing, load_keys
from gateway.settings import Settings, load_settings
from gateway.telemetry.tracing import why_no_export

ONLY_AT_START: Final = (
    "server.host",
    "server.port",
    "server.operations_host",
    "server.operations_port",
    "server.operations_token",
    "state",
    "fleet",
    "decision_log",
    "decision_log_max_bytes",
    "decision_log_files",
    "metrics.max_label_values",
    "tracing",
)
"""Settings that a running gateway cannot change: its ports and who may use them, what is open or counted. A
section that stands here stays as a whole."""


@dataclass(frozen=True, slots=True)
class Configuration:
    settings: Settings
    keys: KeyRing | None = None
    """None: the gateway is open to all."""
    tokenizers: Mapping[str, TokenizerFile] = field(default_factory=dict)
    """By model."""


def read_configuration(path: Path | None) -> Configuration:
    """What the file at `path` (none: the defaults) and the environment say. Raises ConfigError."""
    settings = load_settings(path)
    missing = None if settings.tracing is None else why_no_export()
    if missing is not None:
        raise ConfigError([f"{path or 'settings'}: tracing: found a mapping, but {missing}"])
    if settings.store_url and find_spec("redis") is None:
        says = (
            "found the address of a store, but the package redis is missing: pip install 'qos-gateway[redis]'"
        )
        raise ConfigError([f"{path or 'settings'}: state: {says}"])
    keys = None if settings.keys_file is None else load_keys(settings.keys_file)
    return Configuration(settings, keys, load_tokenizers(settings.tokenizers, path))


@dataclass(frozen=True, slots=True)
class Difference:
    """Names of settings: those that are others now, and those that stay until a restart. `values` has what
    the changed ones were and are, `overrides` those of them that had been set at run time."""

    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]
    values: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()


def difference(old: Configuration, new: Configuration) -> Difference:
    before, after = _flat(old.settings), _flat(new.settings)
    _mark_empty_sections(before, beside=after)
    _mark_empty_sections(after, beside=before)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    one_sided = {u.name for u in old.settings.upstreams} ^ {u.name for u in new.settings.upstreams}
    for upstream in sorted(one_sided):
        whole = f"upstreams.{upstream}"
        names = [name for name in names if not name.startswith(whole + ".")] + [whole]
    if old.keys != new.keys and "keys_file" not in names:
        names.append("keys_file")
    stay = tuple(name for name in names if not {name, name.partition(".")[0]}.isdisjoint(ONLY_AT_START))
    changed = tuple(name for name in names if name not in stay)
    return Difference(changed, stay, {name: (before.get(name), after.get(name)) for name in changed})


def as_far_as_running(old: Settings, new: Settings) -> Settings:
    """The new settings with what stays until a restart as it was."""
    stay: dict[str, dict[str, Any]] = {"server": {}, "metrics": {}}
    top: dict[str, Any] = {}
    for name in ONLY_AT_START:
        section, _, key = name.rpartition(".")
        (stay[section] if section else top)[key] = getattr(getattr(old, section) if section else old, key)
    sections = {name: getattr(new, name).model_copy(update=values) for name, values in stay.items()}
    return new.model_copy(update={**top, **sections})


def _flat(settings: Settings) -> dict[str, Any]:
    return dict(_leaves((), settings.model_dump()))


def _mark_empty_sections(leaves: dict[str, Any], beside: Mapping[str, Any]) -> None:
    """A section with nothing but nulls in it is not the same as null: beside null it is {} here."""
    for name in [name for name, value in beside.items() if value is None and name not in leaves]:
        inside = [value for each, value in leaves.items() if each.startswith(name + ".")]
        if inside and all(value is None for value in inside):
            leaves[name] = {}


def _leaves(path: tuple[str, ...], tree: Any) -> Iterator[tuple[str, Any]]:
    """Values by dotted name; of upstreams the name stands in for the place in the list."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves((*path, str(key)), value)
    elif path == ("upstreams",):
        for upstream in tree:
            yield from _leaves((*path, upstream["name"]), upstream)
    else:
        yield ".".join(path), tree
