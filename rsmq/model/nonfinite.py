"""Finds NaN and infinity in a payload. Called only if its JSON has a null: a look at each number costs more than that.

The encoder writes both as null. So does pydantic for its models, unless their `model_config` says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from decimal import Decimal
from math import isfinite
from typing import Any, Final

from pydantic_core import from_json

from rsmq.model.error_text import shown_path

HARMLESS: Final = frozenset({str, int, bool, bytes, type(None)})

Path = tuple[Any, ...]
"""Keys and positions, from the outside in."""


def nonfinite_in(payload: Any, shown: Any = None) -> str | None:
    """Where a payload has a number that was encoded as null, such as `order.prices.3`; None if it has none. `shown`:
    what the payload is a plain form of."""
    if is_plain(payload):
        return None
    path = next(hidden(payload), None)
    return None if path is None else shown_path(payload if shown is None else shown, path)


def nonfinite_decimal_in(payload: Any) -> str | None:
    """Where a payload has a Decimal that is no number: it is written as text, which no Decimal is read from."""
    path = next(decimals(payload), None)
    return None if path is None else shown_path(payload, path)


def decimals(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of all Decimals that are not finite."""
    if isinstance(value, Decimal):
        if not value.is_finite():
            yield path
    elif hasattr(type(value), "__pydantic_serializer__"):
        yield from decimals(type(value).__pydantic_serializer__.to_python(value, warnings=False), path)
    else:
        for name, each in parts_of(value):
            yield from decimals(each, (*path, name))


def is_plain(payload: Any) -> bool:
    """Whether there are only finite numbers and no objects in it, as in most payloads that have a null."""
    kind = type(payload)
    if kind is float:
        return isfinite(payload)
    if kind is not dict and kind is not list:
        return kind in HARMLESS
    for each in payload.values() if kind is dict else payload:
        if type(each) not in HARMLESS and not is_plain(each):
            return False
    return True


def hidden(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of all numbers that were encoded as null."""
    if isinstance(value, float):
        if not isfinite(value):
            yield path
    elif hasattr(type(value), "__pydantic_serializer__"):
        yield from (path + inner for inner in hidden_in_model(value))
    else:
        for name, each in parts_of(value):
            yield from hidden(each, (*path, name))


def hidden_in_model(model: Any) -> Iterator[Path]:
    """Those of a model: numbers of its plain form whose JSON is null, though its config does not ask for that."""
    config = getattr(model, "model_config", None) or getattr(model, "__pydantic_config__", None) or {}
    if "ser_json_inf_nan" in config:
        return
    serializer = type(model).__pydantic_serializer__
    plain = serializer.to_python(model, warnings=False)
    if type(plain) is type(model):  # a SecretStr stays one, and has no number
        return
    paths = list(hidden(plain))
    if paths:
        encoded = from_json(serializer.to_json(model, warnings=False))
        yield from (path for path in paths if at_path(encoded, path) is None)


def parts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of a container, with their names or positions."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in fields(value))


def at_path(value: Any, path: Sequence[Any]) -> Any:
    """The value that a path leads to; the path itself if it leads nowhere."""
    for step in path:
        try:
            value = value[key_of(step, value) if isinstance(value, dict) else step]
        except (KeyError, IndexError, TypeError):
            return path
    return value


def key_of(step: Any, value: dict[Any, Any]) -> Any:
    """A key as JSON has it: text."""
    forms = (step, str(step), str(getattr(step, "value", step)), str(step).lower())
    return next((each for each in forms if each in value), step)
