"""What a setting may be, in the words in which the gateway refuses anything else."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from gateway.config_reading import located_problems


def may_be(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """For a cell of a table. Raises LookupError for a type that takes anything."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return may_be(inner[0], inner[1:])
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in inner)
    if type(None) in inner and not any(isinstance(each, BeforeValidator) for each in metadata):
        return may_be(next(each for each in inner if each is not type(None))) + ", or null"
    if annotation is Path:
        return "a file"
    if origin is tuple and inner[-1] is Ellipsis:
        return f"a list; each {may_be(inner[0])}"
    if origin is tuple:
        return f"a list of {len(inner)}; each {may_be(inner[0])}"
    if origin is Mapping:
        return f"a mapping from {may_be(inner[0])} to {may_be(inner[1])}"
    adapter = TypeAdapter[Any](Annotated[annotation, *metadata] if metadata else annotation)
    try:
        adapter.validate_python(object())
    except ValidationError as error:
        ((_, says),) = located_problems(error, annotation, None)
        return says.partition("expected ")[2]
    raise LookupError(f"{annotation}: anything is accepted")
