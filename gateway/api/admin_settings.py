"""Settings changed while the gateway runs: a part of a configuration, laid over the one in force.

What may be changed so is what decides about traffic. Addresses, keys, files and ports are changed in the
configuration file: whoever has the operators' token must not be able to send tenants' prompts elsewhere by
it. The whole is then checked as a file is, by the same code.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final, NoReturn, get_args

from pydantic import ValidationError

from gateway.config_environment import Overrides, overlay
from gateway.config_reading import ConfigError, Location, dotted, located_problems
from gateway.settings import Mode, Settings

CHANGEABLE: Final[tuple[Location, ...]] = (
    ("mode",),
    ("capacity",),
    ("classes",),
    ("scheduling",),
    ("slo",),
    ("controller",),
    ("upstream_retry_budget",),
    ("logging", "level"),
)
CHANGEABLE_OF_UPSTREAMS: Final = ("tokens_per_second", "max_in_flight", "max_in_flight_tokens")
"""By the upstream's name: `upstreams.gpu0.tokens_per_second`."""

NUMBER_MAX: Final = 10**15
"""More tokens or seconds than anybody means; sums of such numbers are still exact."""
_NAME_LENGTH_MAX: Final = 200
_PROBLEMS_TOLD_MAX: Final = 20
"""Of thousands of unknown names nobody reads more, and to look for what each may have meant takes long."""


class ChangeRefused(ConfigError):
    """`param` is the dotted name of the (first) setting that is at fault, None if the whole is."""

    def __init__(self, problems: list[str], param: str | None) -> None:
        super().__init__(problems)
        self.param = param


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────


def read_change(body: bytes) -> Mapping[str, Any]:
    """The settings in a JSON text. Raises ChangeRefused, also for a name given twice, as in a file."""
    try:
        tree = json.loads(
            body,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_float,
        )
    except (ValueError, RecursionError) as error:
        says = str(error) if isinstance(error, _Odd) else "the body is not valid JSON"
        raise ChangeRefused([says], None) from None
    if not isinstance(tree, dict):
        raise ChangeRefused(["the body is no JSON object: expected a mapping of settings"], None)
    return tree


class _Odd(ValueError):
    """JSON that is refused all the same."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        raise _Odd("a name is given twice in the same object")
    if any(len(name) > _NAME_LENGTH_MAX or not name.isprintable() for name in tree):
        raise _Odd("an object has a name that no setting has")
    return tree


def _no_constant(name: str) -> NoReturn:
    raise _Odd(f"{name} is not valid JSON")


def _integer(text: str) -> int:
    return int(_bounded(int(text) if len(text) < 20 else NUMBER_MAX + 1))


def _float(text: str) -> float:
    return float(_bounded(float(text)))


def _bounded(number: Any) -> Any:
    if abs(number) > NUMBER_MAX:
        raise _Odd(f"a number is beyond {NUMBER_MAX:.0e}")
    return number


# ── checking ─────────────────────────────────────────────────────────────────────────────────────────────


def changed_settings(settings: Settings, change: Mapping[str, Any]) -> Settings:
    """`settings` with the change laid over them. Raises ChangeRefused."""
    tree = settings.model_dump()
    tree["upstreams"] = list(tree["upstreams"])
    places = {upstream.name: index for index, upstream in enumerate(settings.upstreams)}
    laid_over = Overrides()
    for name, value in _leaves((), change, tree):
        _check_changeable(name, places)
        location = ("upstreams", places[str(name[1])], *name[2:]) if name[0] == "upstreams" else name
        laid_over.values[location] = value
    tree = overlay(tree, laid_over, {})
    try:
        return Settings(**tree)
    except ValidationError as error:
        found = islice(located_problems(error, Settings, tree), _PROBLEMS_TOLD_MAX + 1)
        problems = [(_named(location, settings), says) for location, says in found]
        lines = [f"{name}: {says}" if name else says for name, says in problems]
        lines[_PROBLEMS_TOLD_MAX:] = ["and more is wrong"] * (len(lines) > _PROBLEMS_TOLD_MAX)
        raise ChangeRefused(lines, problems[0][0] or None) from None


def _leaves(path: Location, change: Any, tree: Any) -> Iterator[tuple[Location, Any]]:
    """What is given, by place. An empty mapping gives nothing, unless no mapping belongs there."""
    if isinstance(change, Mapping) and (change or isinstance(tree, Mapping)):
        for key, value in change.items():
            inner = tree.get(key) if isinstance(tree, Mapping) else None
            yield from _leaves((*path, key), value, inner)
    else:
        yield path, change


def _check_changeable(name: Location, places: Mapping[str, int]) -> None:
    """A name that no setting has passes: the check of the whole has better words for it."""
    if name[0] == "upstreams":
        if len(name) > 1 and name[1] not in places:
            says = f"there is no such upstream; expected one of {', '.join(places)}"
            raise ChangeRefused([f"{dotted(name[:2])}: {says}"], dotted(name[:2]))
        if len(name) < 3:
            says = "expected upstreams by name, with the settings of each"
            raise ChangeRefused([f"{dotted(name)}: {says}"], dotted(name))
        if name[2] not in CHANGEABLE_OF_UPSTREAMS:
            _refuse_fixed(name)
    elif name[0] in Settings.model_fields and not any(
        name[: len(open_)] == open_ or open_[: len(name)] == name for open_ in CHANGEABLE
    ):
        _refuse_fixed(name)


def _refuse_fixed(name: Location) -> NoReturn:
    if name[0] == "upstreams":
        says = f"not to be changed at run time, only {', '.join(CHANGEABLE_OF_UPSTREAMS)}"
    else:
        says = "not to be changed at run time"
    text = dotted(name)
    raise ChangeRefused([f"{text}: {says}; put it into the configuration file and reload"], text)


def _named(location: Location, settings: Settings) -> str:
    """The dotted name, with the upstream's name for its place in the list."""
    if location[:1] == ("upstreams",) and len(location) > 1 and isinstance(location[1], int):
        location = ("upstreams", settings.upstreams[location[1]].name, *location[2:])
    return dotted(location)


# ── showing ──────────────────────────────────────────────────────────────────────────────────────────────


def shown_settings(settings: Settings) -> dict[str, Any]:
    """The settings that may be changed, in the form in which a change names them."""
    tree = settings.model_dump(mode="json")
    shown: dict[str, Any] = {}
    for section, *inner in CHANGEABLE:
        value = tree[str(section)]
        shown[str(section)] = {key: value[key] for key in inner} if inner else value
    shown["upstreams"] = {
        upstream["name"]: {name: upstream[name] for name in CHANGEABLE_OF_UPSTREAMS}
        for upstream in tree["upstreams"]
    }
    return shown


def change_schema() -> dict[str, Any]:
    """For the OpenAPI document: the sections; `config/gateway.yaml` explains what is in them."""
    sections: dict[str, Any] = {str(section): {"type": "object"} for section, *_ in CHANGEABLE}
    sections["mode"] = {"type": "string", "enum": list(get_args(Mode))}
    sections["upstream_retry_budget"] = {"type": "number", "minimum": 0, "maximum": 1}
    sections["upstreams"] = {"type": "object", "additionalProperties": {"type": "object"}}
    return {"type": "object", "properties": sections, "additionalProperties": False}
