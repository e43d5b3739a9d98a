"""The environment as configuration: `QOS_CLASSES__P0__MAX_WAIT_SECONDS=3` is `classes.P0.max_wait_seconds`.

Two underscores go one level down, numbers count list entries (`QOS_UPSTREAMS__0__URL`), and the case of names
does not matter. A single value is read as its text, a list or mapping as YAML (JSON is YAML); `null` is
null. A variable that means no setting is an error, since a misspelt one would otherwise have no effect in
silence, except `QOS_GATEWAY_…`: Kubernetes sets such variables for a service called qos-gateway.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel

from gateway.config_reading import ConfigError, Location, parse_yaml, section_of, unknown_key

PREFIX: Final = "QOS_"
LEVEL: Final = "__"
_NOT_OURS: Final = "QOS_GATEWAY_"


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the environment sets: by place in the tree, with the variable that said so."""

    values: dict[Location, Any] = field(default_factory=dict)
    variables: dict[Location, str] = field(default_factory=dict)

    def setting(self, location: Location) -> list[str]:
        """The variables that set the value at `location`, or a section around it."""
        return [name for place, name in self.variables.items() if location[: len(place)] == place]

    def inside(self, location: Location) -> list[str]:
        """The variables that set a part of what is at `location`."""
        return [
            name
            for place, name in self.variables.items()
            if place[: len(location)] == location and place != location
        ]


def read_environment(environ: Mapping[str, str], model: type[BaseModel]) -> Overrides:
    overrides = Overrides()
    problems: list[str] = []
    for name in sorted(environ):  # a whole section comes before its parts
        if not name.startswith(PREFIX) or name.startswith(_NOT_OURS):
            continue
        try:
            location, annotation = _place(name, model)
            overrides.values[location] = _value(name, environ[name], annotation)
            overrides.variables[location] = name
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return overrides


def _place(name: str, model: type[BaseModel]) -> tuple[Location, Any]:
    location: list[str | int] = []
    annotation: Any = model
    for part in name.removeprefix(PREFIX).split(LEVEL):
        section = section_of(annotation)
        if section is not None:
            key = _key(name, part, section)
            location.append(key)
            annotation = section.model_fields[key].annotation
        elif _is_list(annotation) and part.isascii() and part.isdigit():
            location.append(int(part))
            annotation = get_args(annotation)[0]
        else:
            raise ConfigError([f"{name}: there is no such setting; set the whole of {_join(location)}"])
    return tuple(location), annotation


def _key(name: str, part: str, section: type[BaseModel]) -> str:
    for key in section.model_fields:
        if key.lower() == part.lower():
            return key
    raise ConfigError([f"{name}: {unknown_key(part, (key.upper() for key in section.model_fields))}"])


def _value(name: str, text: str, annotation: Any) -> Any:
    if text.strip().lower() == "null":
        return None
    if section_of(annotation) or not _is_single(annotation):
        return parse_yaml(text, name)
    return text


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) in (list, tuple)


def _is_single(annotation: Any) -> bool:
    """Whether a value of this type is written as one word: not a list, not a mapping, not either or null."""
    kinds = {get_origin(candidate) for candidate in (annotation, *get_args(annotation))}
    return kinds.isdisjoint({list, tuple, dict, Mapping})


def _join(location: list[str | int]) -> str:
    return PREFIX + LEVEL.join(str(part).upper() for part in location)


def overlay(tree: Any, overrides: Overrides, defaults: Mapping[str, Any]) -> Any:
    """The file's settings with the environment's on top; the tree given is left as it was."""
    for location, value in overrides.values.items():
        try:
            tree = _with(tree, location, value, defaults)
        except IndexError:
            name = overrides.variables[location]
            raise ConfigError([f"{name}: list entries are counted from 0, without gaps"]) from None
    return tree


def _with(tree: Any, location: Location, value: Any, defaults: Any) -> Any:
    """`tree` with `value` at `location`. A missing list begins as its default, a missing section empty."""
    if not location:
        return value
    part, rest = location[0], location[1:]
    inner = defaults.get(part) if isinstance(defaults, Mapping) else None
    if isinstance(part, int):
        items = list(tree) if isinstance(tree, list) else list(defaults or [])
        if part > len(items):
            raise IndexError(part)
        items[part : part + 1] = [_with(items[part] if part < len(items) else {}, rest, value, inner)]
        return items
    branch = dict(tree) if isinstance(tree, Mapping) else {}
    branch[part] = _with(branch.get(part), rest, value, inner)
    return branch
