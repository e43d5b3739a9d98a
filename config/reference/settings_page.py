"""config/REFERENCE.md: every setting with its default, what it may be, what it does, and how it is changed.

Names, values and defaults come from the models; "may be" is what the gateway itself says of a wrong value.
What a setting does is said beside it in config/gateway.yaml and config/keys.example.yaml, or, where they say
nothing, in a docstring below it in the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from config.reference.accepted_values import may_be
from config.reference.explanations import Explanations, Place, read_explanations
from gateway.api.admin_settings import CHANGEABLE, CHANGEABLE_OF_UPSTREAMS
from gateway.api.configuration import ONLY_AT_START
from gateway.config_environment import LEVEL, PREFIX
from gateway.config_reading import section_of
from gateway.config_values import CLASS_NAMES
from gateway.keys import KeyEntry
from gateway.settings import Classes, ClassSettings, Settings

HEAD = """\
# Every setting

Made by `python -m config.reference` from the code; do not edit. `config/gateway.yaml` has the same as a file
to start from.

* A file needs only what differs; what it leaves out, at any level, keeps its default. Lists and free mappings
  (`routes`, `tokenizers`, `headers`) are replaced whole.
* The environment wins over the file, under the names below. A list or mapping is given as YAML
  (`QOS_PATHS='[/v2/rerank]'`), `null` as `null`. In names `0` is the first entry of a list, `1` the next;
  what is said of P0 holds for P1 and P2. A `QOS_…` variable that means no setting is an error.
* Units stand in the names; all durations are seconds and take fractions. `null` is no limit, `0` lets nothing
  pass.
* "Changes": **now** – while it runs, by `PATCH /admin/settings` or a reload; **reload** – by SIGHUP or
  `POST /admin/reload`; **restart** – only so.

`qos-gateway check-config FILE` says what is wrong with a file, each problem with its key.
"""

KEYS_HEAD = """\
## Entries of `keys_file`

A list of these; `config/keys.example.yaml` is one. `id` and `sha256` must be given. They cannot be set from
the environment, and a reload takes them over.
"""

DOCUMENT_END = "...\n"
"""What YAML writes behind a single value."""

CLASSES_HEAD = "each has all of these. Where the defaults differ they are those of P0 / P1 / P2"


@dataclass(frozen=True, slots=True)
class Row:
    """`defaults` has one, or one for each class."""

    place: Place
    field: FieldInfo
    defaults: tuple[Any, ...]
    says: str


def settings_page(root: Path) -> str:
    """`root` is the repository. Raises LookupError for a setting that nobody explains."""
    explanations = read_explanations(root / "config" / "gateway.yaml", root / "gateway" / "settings.py")
    defaults, single, sections = Settings(), [], []
    for name, field in Settings.model_fields.items():
        value = getattr(defaults, name)
        if _section_in(field) is None:
            single += rows((), Settings, {name: (value,)}, explanations)
        else:
            sections.append(_section_text(name, field, value, explanations))
    return "\n".join(
        [HEAD, "## At the top\n", _settings_table(single), *sections, KEYS_HEAD, _keys_table(_key_rows(root))]
    )


def _section_text(name: str, field: FieldInfo, value: Any, explanations: Explanations) -> str:
    section = _section_in(field)
    assert section is not None
    place: Place = (name,)
    examples: tuple[Any, ...] = (section() if value is None else value,)
    says = explanations.comments.get(place)
    if isinstance(value, Classes):
        place, section = (name, "P0"), ClassSettings
        examples = tuple(value[each] for each in CLASS_NAMES)
        says = f"`{'`, `'.join(CLASS_NAMES)}`; {CLASSES_HEAD}"
    elif isinstance(value, tuple):
        examples = value[:1]
        says = f"{says}; in an entry of your own {_required(section)} must be given"
    introduction = [f"{_sentence(says)}\n"] if says else []
    found = rows(place, section, _members(section, examples), explanations)
    return "\n".join([f"## `{name}`\n", *introduction, _settings_table(found, len(place))])


def _required(section: type[BaseModel]) -> str:
    return " and ".join(f"`{name}`" for name, field in section.model_fields.items() if field.is_required())


def _key_rows(root: Path) -> list[Row]:
    explanations = read_explanations(root / "config" / "keys.example.yaml", root / "gateway" / "keys.py")
    defaults = {
        name: (field.default if field.default_factory is None else PydanticUndefined,)
        for name, field in KeyEntry.model_fields.items()
    }
    return rows((), KeyEntry, defaults, explanations)


def rows(
    place: Place,
    section: type[BaseModel],
    defaults: Mapping[str, tuple[Any, ...]],
    explanations: Explanations,
) -> list[Row]:
    """One for each of the section's settings that `defaults` names, with those of sections inside it."""
    found = []
    for name, values in defaults.items():
        field, here = section.model_fields[name], (*place, name)
        says = explanations.find(here, f"{section.__name__}.{name}")
        inner = _section_in(field)
        if inner is not None:
            if says:
                found.append(Row(here, field, values, says))
            found += rows(here, inner, _members(inner, values), explanations)
            continue
        if says is None and place not in explanations.comments:
            raise LookupError(f"{'.'.join(here)}: neither a comment nor a docstring says what it does")
        found.append(Row(here, field, values, says or ""))
    return found


def _members(section: type[BaseModel], values: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """Of each setting in a section its defaults; where the section is off they are off as well."""
    return {
        name: tuple(None if value is None else getattr(value, name) for value in values)
        for name in section.model_fields
    }


def _section_in(field: FieldInfo) -> type[BaseModel] | None:
    inner = field.annotation
    return section_of(get_args(inner)[0] if get_origin(inner) is tuple else inner)


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────


def _settings_table(found: Sequence[Row], inside: int = 0) -> str:
    """`inside`: so many names of each place are said by the title above."""
    cells = [
        (f"`{'.'.join(row.place[inside:])}`<br>`{_variable(row.place)}`", *_cells(row), _changes(row.place))
        for row in found
    ]
    return _table(("setting", "default", "may be", "what it does", "changes"), cells)


def _keys_table(found: Sequence[Row]) -> str:
    cells = [(f"`{row.place[0]}`", *_cells(row)) for row in found]
    return _table(("setting", "default", "may be", "what it does"), cells)


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, ["---"] * len(titles), *lines)) + "\n"


def _cells(row: Row) -> tuple[str, str, str]:
    annotation = row.field.annotation
    if _section_in(row.field) is not None:
        or_null = ", or null" if type(None) in get_args(annotation) else ""
        return "", f"the settings below{or_null}", _cell(row.says)
    shown = [_shown(value) for value in row.defaults]
    default = shown[0] if len(set(shown)) == 1 else " / ".join(shown)
    return default, may_be(annotation, row.field.metadata), _cell(row.says)


def _shown(value: Any) -> str:
    """As it stands in a file; nothing for a value that must be given, or that depends on others."""
    if value is PydanticUndefined:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    plain = list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=1000, sort_keys=False)
    return f"`{text.removesuffix(DOCUMENT_END).strip()}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].rstrip(".:") + "."


def _variable(place: Place) -> str:
    """The environment's name of it; of lists the first entry's."""
    if place[0] == "upstreams":
        place = ("upstreams", "0", *place[1:])
    return PREFIX + LEVEL.join(place).upper()


def _changes(place: Place) -> str:
    if ".".join(place) in ONLY_AT_START or place[0] in ONLY_AT_START:
        return "restart"
    of_upstream = place[0] == "upstreams" and place[1:2] and place[1] in CHANGEABLE_OF_UPSTREAMS
    now = of_upstream or any(place[: len(open_)] == open_ for open_ in CHANGEABLE)
    return "now" if now else "reload"
