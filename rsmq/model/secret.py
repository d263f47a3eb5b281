"""Finds secrets in a payload that its JSON hides behind asterisks. Called only if there are asterisks in the JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pydantic import Secret, SecretBytes, SecretStr
from pydantic_core import from_json

from rsmq.model.error_text import shown_path
from rsmq.model.nonfinite import Path, at_path, parts_of

ASTERISKS: Final = "**********"


def secret_in(payload: Any, data: bytes) -> str | None:
    """Where a payload has a secret whose JSON is asterisks, such as `login.token`; None if it has none."""
    encoded = from_json(data)
    path = next((each for each in secrets(payload) if at_path(encoded, each) == ASTERISKS), None)
    return None if path is None else shown_path(payload, path)


def secrets(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of all secrets that no serializer of a model has replaced."""
    if isinstance(value, SecretStr | SecretBytes | Secret):
        yield path
    elif hasattr(type(value), "__pydantic_serializer__"):
        yield from secrets(type(value).__pydantic_serializer__.to_python(value, by_alias=True, warnings=False), path)
    else:
        for name, each in parts_of(value):
            yield from secrets(each, (*path, name))
