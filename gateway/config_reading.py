"""Reading a configuration file, and saying what is wrong with it in an operator's words.

One line per problem: where it stands (the file, or the variable of the environment), the dotted key, what
was found and what was expected. Values of secret settings are never repeated, nor are whole lines of the
file, which may hold one.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Final, NamedTuple, NoReturn, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

Location = tuple[str | int, ...]

SECRET_KEYS: Final = frozenset({"api_key", "operations_token", "sha256", "headers", "state"})
"""Settings whose value, or a part of it, may be a secret: a key, a token, a key put in its digest's place."""

_MAY_PRECEDE_A_SECRET: Final = "@?"
"""An address may carry a password before the one, or a token after the other."""

_FOUND_LENGTH_MAX: Final = 80
_NOTHING: Final = object()


class ConfigError(Exception):
    """The configuration cannot be used. The text has one line per problem."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class Problem(NamedTuple):
    """A contradiction between settings that are each fine alone; `key` is relative to the section."""

    key: Location
    says: str


class Section(BaseModel):
    """A part of the configuration: cannot be changed, and knows all its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(self._problems())
        return self

    def _problems(self) -> Iterable[Problem]:
        """What values that are each allowed have wrong together; of a section's own."""
        return ()


def refuse(problems: Iterable[Problem]) -> None:
    """Report what a section's own checks found, if anything; for use in pydantic validators."""
    found = list(problems)
    if found:
        text = "; ".join(f"{dotted(problem.key)}: {problem.says}" for problem in found)
        raise PydanticCustomError("problems", "{text}", {"text": text, "problems": found})


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML, but a key given twice is an error: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise _DuplicateKeyError(key.value, key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _DuplicateKeyError(Exception):
    def __init__(self, key: str, mark: yaml.Mark) -> None:
        self.key, self.mark = key, mark


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; None if there is nothing in it."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        _fail(path, "there is no such file")
    except UnicodeDecodeError:
        _fail(path, "the file is not UTF-8 text")
    except OSError as error:
        _fail(path, f"the file cannot be read: {error.strerror or 'unknown reason'}")


def parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except _DuplicateKeyError as error:
        _fail(source, f"line {error.mark.line + 1}: the key {error.key} is given twice in the same place")
    except yaml.MarkedYAMLError as error:
        _fail(source, f"{_where(error)}not valid YAML: {_cause(error)}")
    except (yaml.YAMLError, ValueError):
        _fail(source, "not valid YAML: a character or value that YAML does not allow")
    except RecursionError:
        _fail(source, "not valid here: nested too deeply")


def _where(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""


def _cause(error: yaml.MarkedYAMLError) -> str:
    """What the parser says, where its words cannot repeat more than a character of the file."""
    syntax = isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError)
    return error.problem if syntax and error.problem else "a tag, alias or key that cannot be used here"


def _fail(source: object, says: str) -> NoReturn:
    raise ConfigError([f"{source}: {says}"]) from None


# ── wording ──────────────────────────────────────────────────────────────────────────────────────────────


def located_problems(error: ValidationError, shape: Any, tree: Any) -> Iterator[tuple[Location, str]]:
    """Each problem of `tree` that failed to be a `shape`: its place in the tree, and what to say of it."""
    for detail in error.errors(include_url=False):
        location = detail["loc"]
        for problem in detail.get("ctx", {}).get("problems", ()):
            yield location + tuple(problem.key), problem.says
        if detail["type"] not in (
            "problems",
            "default_factory_not_called",
        ):  # the latter follows from another
            yield location, _says(detail, shape, tree)


def _says(detail: ErrorDetails, shape: Any, tree: Any) -> str:
    location = detail["loc"]
    if detail["type"] == "extra_forbidden":
        return unknown_key(str(location[-1]), _known_keys(shape, location[:-1]))
    found = value_at(tree, location)
    secret = not SECRET_KEYS.isdisjoint(location)
    return f"found {shown(found, secret=secret)}, expected {_expected(detail)}"


def _expected(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    match detail["type"]:
        case "unexpected" | "literal_error" | "enum":
            return str(context["expected"])
        case "missing":
            return "a value: this setting has no default"
        case "bool_parsing" | "bool_type":
            return "true or false"
        case "string_type" | "path_type":
            return "text"
        case "model_type" | "model_attributes_type" | "dict_type" | "mapping_type":
            return "a mapping of settings"
        case "tuple_type" | "list_type":
            return "a list"
        case "too_long" | "too_short":
            return f"a list of {context.get('max_length', context.get('min_length'))}"
        case _:
            return f"something else ({detail['msg']})"


def unknown_key(key: str, known: Iterable[str]) -> str:
    """What to say of a key that nobody asked for."""
    names = sorted(known)
    close = difflib.get_close_matches(key.lower(), [name.lower() for name in names], n=1, cutoff=0.5)
    if close:
        meant = next(name for name in names if name.lower() == close[0])
        return f"unknown key, did you mean {meant}?"
    return f"unknown key, expected one of {', '.join(names)}"


def _known_keys(shape: Any, location: Location) -> list[str]:
    annotation = shape
    for part in location:
        section = section_of(annotation)
        if section is not None and part in section.model_fields:
            annotation = section.model_fields[str(part)].annotation
        elif section is None:
            annotation = next(iter(get_args(annotation)), None)
    section = section_of(annotation)
    return list(section.model_fields) if section else []


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation means, be it optional."""
    candidates = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)), None)


def value_at(tree: Any, location: Location) -> Any:
    for part in location:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            return _NOTHING
    return tree


def shown(value: Any, *, secret: bool = False) -> str:
    """A value in the words of the file it came from, short, and not at all if it is a secret."""
    if value is _NOTHING:
        return "nothing"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = str(value)
    if secret or any(mark in text for mark in _MAY_PRECEDE_A_SECRET):
        return "a value that is not shown"
    text = ascii(text)[1:-1]
    if len(text) > _FOUND_LENGTH_MAX:
        text = text[:_FOUND_LENGTH_MAX] + "…"
    return f'"{text}"' if isinstance(value, str) else text


def dotted(location: Location) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
