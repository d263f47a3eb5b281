"""Whether a type reads back what it writes: compares, once, what pydantic writes of a type with what it reads. Pure.

It is loaded for the first payload with a type of pydantic. A typed topic refuses to publish what does not, a handler
says so in its log. What only a value can show, such as infinity or a secret in a field of type Any, `encode_payload`
refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import TypeAdapter

SKIPPED: Final = ("metadata", "serialization", "config", "ref", "default", "computed_fields")
CUSTOM: Final = ("function-plain", "function-wrap")
MOST_NAMED: Final = 3


def explain_one_way(annotation: Any) -> str:
    """Why values of a type do not come back as they were published, with what to do; empty if they do."""
    found = list(dict.fromkeys(one_way(annotation)))
    if not found:
        return ""
    more = f" (and {len(found) - MOST_NAMED} more)" if len(found) > MOST_NAMED else ""
    return f"{shown(annotation)} does not read what it writes: {'; '.join(found[:MOST_NAMED])}{more}"


def one_way(annotation: Any) -> Iterator[str]:
    """What a value of this type loses on its way, each with its field and what to do."""
    yield from in_schema(TypeAdapter(annotation).core_schema, "")


def in_schema(schema: Any, path: str) -> Iterator[str]:
    """The same of a part of it. What a serializer of the user writes is left to the user."""
    if isinstance(schema, list | tuple):
        for each in schema:
            yield from in_schema(each, path)
    if not isinstance(schema, Mapping):
        return
    written = schema.get("serialization", {})
    if written.get("type") in CUSTOM:
        if is_hidden(written.get("function")):
            yield f"the secret {path or 'itself'} would arrive as asterisks: give its model a field_serializer for it"
        return
    kind = schema.get("type")
    if kind == "json":
        yield f"{path or 'it'} is Json: it is written as the value and read as text; annotate it with the inner type"
        return
    if kind in ("model-fields", "dataclass-args", "typed-dict"):
        yield from in_fields(schema, path)
        return
    config = schema.get("config", {})
    for name, part in schema.items():
        if name not in SKIPPED:
            part = {**part, "config": config} if name == "schema" and kind in ("model", "dataclass") else part
            yield from in_schema(part, path)


def in_fields(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """The fields of a model, a dataclass or a TypedDict."""
    config, fields = schema.get("config", {}), schema["fields"]
    pairs = fields.items() if isinstance(fields, Mapping) else ((each["name"], each) for each in fields)
    known = set[str]()
    for name, field in pairs:
        where = f"{path}.{name}" if path else name
        written, read = field.get("serialization_alias", name), names_of(name, field, config)
        known |= read
        if field.get("serialization_exclude") is True:
            yield f"{where} is excluded, and no handler gets it: publish a type without it"
        elif field.get("init_only"):
            yield f"{where} is an InitVar, which is read and not written: make it a field"
        elif written not in read:
            given = (
                f"is written as {written!r} and read as {' or '.join(map(repr, sorted(read))) or 'a part of a field'}"
            )
            yield f"{where} {given}: give it one alias for both, or populate_by_name"
        else:
            yield from in_schema(field["schema"], where)
    if config.get("extra_fields_behavior", schema.get("extras_behavior")) == "forbid":
        for each in schema.get("computed_fields", ()):
            if each.get("alias", each["property_name"]) not in known:
                name = each["property_name"]
                yield f"{f'{path}.{name}' if path else name} is computed, and refused as extra: allow or ignore extras"


def names_of(name: str, field: Mapping[str, Any], config: Mapping[str, Any]) -> set[str]:
    """The names under which a field is read."""
    alias = field.get("validation_alias")
    if alias is None or config.get("validate_by_alias") is False:
        return {name}
    paths = [alias] if isinstance(alias, str) else alias
    paths = [paths] if paths and not isinstance(alias, str) and not isinstance(paths[0], list | tuple) else paths
    found = {each if isinstance(each, str) else each[0] for each in paths if isinstance(each, str) or len(each) == 1}
    return found | ({name} if config.get("validate_by_name") or config.get("populate_by_name") else set())


def is_hidden(function: Any) -> bool:
    """Whether pydantic writes asterisks with it."""
    name = getattr(function, "__name__", "")
    return getattr(function, "__module__", "") == "pydantic.types" and name.startswith("_serialize_secret")


def shown(annotation: Any) -> str:
    """A type, for an error."""
    return getattr(annotation, "__name__", None) or str(annotation)
