"""Compares JSON schemas: whether each value that one allows is accepted by the other. Pure.

It knows what pydantic writes for payloads. What it does not know it takes as equal if it is the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

Schema = Mapping[str, Any]

LOWER: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
UPPER: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
SAME: Final = ("pattern", "format", "contentEncoding", "multipleOf", "uniqueItems")


class Comparison:
    """Finds values of a `given` schema that an `accepting` one refuses. Each has the definitions that it refers to."""

    def __init__(self, given: Mapping[str, Schema], accepting: Mapping[str, Schema]) -> None:
        self._given, self._accepting = given, accepting
        self._open: set[tuple[str, str]] = set()

    def problems(self, given: Any, accepting: Any, path: str = "") -> Iterator[str]:
        """Payloads that may be refused, each as a line that begins with the path of the field."""
        pair = (str(given), str(accepting))
        if pair in self._open or accepting in (True, {}):  # a model that contains itself
            return
        self._open.add(pair)
        try:
            yield from self._compare(resolved(given, self._given), resolved(accepting, self._accepting), path)
        finally:
            self._open.discard(pair)

    def _compare(self, given: Schema, accepting: Schema, path: str) -> Iterator[str]:
        if variants := given.get("anyOf") or given.get("oneOf"):
            for variant in variants:
                yield from self.problems(variant, accepting, path)
            return
        if variants := accepting.get("anyOf") or accepting.get("oneOf"):
            found = [list(self.problems(given, variant, path)) for variant in variants]
            if all(found):
                yield from min(found, key=len)
            return
        if (values := values_of(accepting)) is not None:
            yield from self._compare_values(values_of(given), values, path)
            return
        if not accepting.get("type"):
            return
        if not is_type(given.get("type"), accepting["type"]):
            yield f"{path or 'the payload'} may be {given.get('type', 'anything')}, and must be {accepting['type']}"
            return
        yield from compare_limits(given, accepting, path)
        if accepting["type"] == "object":
            yield from self._compare_fields(given, accepting, path)
        if accepting["type"] == "array":
            yield from self.problems(given.get("items", {}), accepting.get("items", {}), f"{path}[]")

    def _compare_values(self, given: list[Any] | None, accepted: list[Any], path: str) -> Iterator[str]:
        subject = path or "the payload"
        if given is None:
            yield f"{subject} may be anything, and must be one of {accepted}"
        elif missing := [value for value in given if value not in accepted]:
            yield f"{subject} may be {', '.join(map(repr, missing))}, and must be one of {accepted}"

    def _compare_fields(self, given: Schema, accepting: Schema, path: str) -> Iterator[str]:
        mine, theirs = given.get("properties", {}), accepting.get("properties", {})
        for name in accepting.get("required", ()):
            if name not in given.get("required", ()):
                yield f"{joined(path, name)} may be missing, and is required"
        for name, field in mine.items():
            if name in theirs:
                yield from self.problems(field, theirs[name], joined(path, name))
            elif accepting.get("additionalProperties") is False:
                yield f"{joined(path, name)} may be there, and is refused"
            elif isinstance(more := accepting.get("additionalProperties"), Mapping):
                yield from self.problems(field, more, joined(path, name))
        if isinstance(more := accepting.get("additionalProperties"), Mapping) and not mine:
            yield from self.problems(given.get("additionalProperties", {}), more, f"{path}.*")


def compare_limits(given: Schema, accepting: Schema, path: str) -> Iterator[str]:
    """Bounds and formats."""
    subject = path or "the payload"
    for names, sign in ((LOWER, 1), (UPPER, -1)):
        for name in names:
            limit = accepting.get(name)
            if limit is not None and (given.get(name) is None or sign * limit > sign * given[name]):
                yield f"{subject} has {name} {given.get(name, 'none')}, and must have {limit}"
    for name in SAME:
        if accepting.get(name) not in (None, given.get(name)):
            yield f"{subject} has {name} {given.get(name, 'none')}, and must have {accepting[name]}"


def resolved(schema: Any, definitions: Mapping[str, Schema]) -> Schema:
    """The schema behind a reference."""
    while isinstance(schema, Mapping) and "$ref" in schema:
        schema = definitions.get(schema["$ref"].rpartition("/")[2], {})
    return schema if isinstance(schema, Mapping) else {}


def values_of(schema: Schema) -> list[Any] | None:
    """The values of an enum or a literal."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def is_type(given: Any, accepting: Any) -> bool:
    """An integer is a number."""
    return given == accepting or (given, accepting) == ("integer", "number")


def joined(path: str, name: str) -> str:
    """The path of a field."""
    return f"{path}.{name}" if path else name
