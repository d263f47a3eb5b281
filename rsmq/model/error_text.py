"""What an error says of a payload: fields and types, and nothing that is in the payload.

Errors go into logs and dead letters. So they show no value, no name of a dict, which is data as well, and no text of
code of the user, which may have quoted a value: of a validator or a serializer they show the type of its error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_args

from pydantic_core import PydanticSerializationError, ValidationError, core_schema

HIDDEN: Final = "[name]"
"""In the place of the name of a dict, in an error of a reader."""
MOST_ERRORS: Final = 3
LONGEST_PART: Final = 60
OWN_KINDS: Final = frozenset(get_args(core_schema.ErrorType))
"""The kinds of errors that pydantic makes; others are named by a validator of the user."""
WITH_TEXT: Final = frozenset(
    {"value_error", "assertion_error", "get_attribute_error", "iteration_error", "mapping_type"}
)
"""Kinds whose text is that of an exception in code of the user."""
WITHOUT_VALUE: Final[Mapping[str, str]] = {
    "union_tag_invalid": "Input should have one of the tags {expected_tags} at {discriminator}",
    "uuid_parsing": "Input should be a valid UUID",
    "bytes_invalid_encoding": "Data should be valid {encoding}",
}
"""Texts for kinds whose own text has a part of the value."""
IN_SERIALIZER: Final = re.compile(r"Error calling function `([^`]*)`: (\w+)")


def explain(error: ValidationError, schema: Callable[[], Any]) -> str:
    """A validation error as one line: fields and what they must be. `schema` gives the core schema of the type."""
    details = error.errors(include_url=False, include_input=False)
    known = names_in(schema())
    shown = []
    for detail in details[:MOST_ERRORS]:
        where = ".".join(str(part)[:LONGEST_PART] if is_shown(part, known) else HIDDEN for part in detail["loc"])
        text = " ".join(text_of(detail).split())[: 2 * LONGEST_PART]
        shown.append(f"{where}: {text}" if where else text)
    more = f" (and {len(details) - MOST_ERRORS} more)" if len(details) > MOST_ERRORS else ""
    return f"the payload does not fit {error.title}: {'; '.join(shown)}{more}"


def text_of(detail: Mapping[str, Any]) -> str:
    """What is wrong, without the value."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in WITH_TEXT:
        problem = context.get("error")
        return f"{type(problem).__name__ if isinstance(problem, Exception) else 'an error'} in a validator"
    if kind not in OWN_KINDS:
        return f"a validator refuses it ({kind})"
    if kind in WITHOUT_VALUE:
        return WITHOUT_VALUE[kind].format(**context)
    return str(detail["msg"])


def is_shown(part: Any, known: frozenset[str]) -> bool:
    """Whether a part of the way to a field is a position, or a word of the type."""
    return isinstance(part, int) or part in known or part == "[key]"


def names_in(schema: Any) -> frozenset[str]:
    """All words in a core schema, among them the names of fields. They are those of the type, not of a payload."""
    found, seen, left = set[str](), set[int](), [schema]
    while left:
        part = left.pop()
        if isinstance(part, str):
            found.add(part)
        elif isinstance(part, Mapping | list | tuple) and id(part) not in seen:
            seen.add(id(part))
            left += part
            if isinstance(part, Mapping):
                left += part.values()
    return frozenset(found)


def serializer_problem(error: ValueError) -> str:
    """The error of an encoder, without the text of a serializer of the user."""
    if not isinstance(error, PydanticSerializationError | UnicodeError):
        return f"{type(error).__name__} in its own code"
    found = IN_SERIALIZER.search(str(error))
    return str(error) if found is None else f"{found[2]} in its serializer {found[1]}"


def shown_path(payload: Any, path: Sequence[Any]) -> str:
    """The way to a part of a payload, such as `lines.0.price`. A name of a dict is shown by its position, from 1 on:
    `prices.[name 3]`."""
    shown, value = list[str](), payload
    for step in path:
        if isinstance(value, Mapping):
            at = next((number for number, name in enumerate(value, 1) if name == step), 0)
            shown.append(f"[name {at}]" if at else HIDDEN)
            value = value.get(step)
            continue
        if isinstance(step, int):
            shown.append(str(step))
            value = value[step] if isinstance(value, list | tuple) else None
            continue
        shown.append(str(step) if is_declared(value, step) else HIDDEN)
        value = getattr(value, attribute_of(value, str(step)), None)
    return ".".join(shown) or "its top"


def attribute_of(value: Any, name: str) -> str:
    """The attribute behind a name: structs of msgspec may be written with other names than they have in Python."""
    written: tuple[str, ...] = getattr(type(value), "__struct_encode_fields__", ())
    return type(value).__struct_fields__[written.index(name)] if name in written else name


def is_declared(value: Any, name: str) -> bool:
    """Whether a name is one of the class of a value: not one that a model has taken along."""
    extra = getattr(value, "__pydantic_extra__", None)
    return value is not None and not (isinstance(extra, Mapping) and name in extra)
