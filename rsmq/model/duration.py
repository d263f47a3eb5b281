"""Durations as users give them: a timedelta, or text with a unit. Settings, options and commands share this parser."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any, Final

from pydantic_core import SchemaValidator, ValidationError, core_schema

from rsmq.errors import ConfigError

Duration = timedelta | str
"""A timedelta, or text such as `500ms`, `5s`, `2h`, `1d`, `1h30m`, or ISO 8601 (`PT5S`)."""

NUMBER = r"(\d{1,12}(?:\.\d{1,9})?) ?"
WITH_UNITS: Final = re.compile(
    rf"(?:{NUMBER}d(?:ays?)?)? ?(?:{NUMBER}h)? ?(?:{NUMBER}m(?:in)?)? ?(?:{NUMBER}s)? ?(?:{NUMBER}ms)?", re.ASCII
)
"""Each unit at most once, the largest first."""
UNITS: Final = ("days", "hours", "minutes", "seconds", "milliseconds")
ISO: Final = SchemaValidator(core_schema.timedelta_schema())
FORMS: Final = "5s, 2h, 1d, 500ms or PT5S (ISO 8601)"


def parse_duration(text: str) -> timedelta:
    """Text as a duration. Raises ValueError for anything else, also for a bare number: its unit would be a guess.

    `m` and `min` are minutes. What rsmq prints, such as `300 ms` or `3.5 days`, can be read again.
    """
    found = WITH_UNITS.fullmatch(text)
    try:
        if text and text == text.strip() and found is not None:
            numbers = zip(UNITS, found.groups(), strict=True)
            return timedelta(**{unit: float(number) for unit, number in numbers if number is not None})
        if text.upper().lstrip("+-").startswith("P"):
            span: timedelta = ISO.validate_python(text.upper())
            return span
    except (ValidationError, OverflowError):
        pass
    raise ValueError(f"a duration is text with a unit, such as {FORMS}")


def as_duration(value: Any) -> timedelta:
    """A timedelta as it is, text as a duration. Raises ValueError for everything else."""
    if isinstance(value, timedelta):
        return value
    if isinstance(value, str):
        return parse_duration(value)
    raise ValueError(f"a duration is a timedelta, or text with a unit, such as {FORMS}")


def checked_duration(name: str, value: Any) -> timedelta:
    """The value of an option as a duration. Raises ConfigError that says what to write."""
    try:
        return as_duration(value)
    except ValueError:
        raise ConfigError(f"{name}={value!r} is not a duration: {instead(name, value)}") from None


def instead(name: str, value: Any) -> str:
    """Advice what to write. A bare number gets the form with its unit."""
    digits = str(value).strip()
    if not isinstance(value, bool) and re.fullmatch(r"\d{1,12}(\.\d{1,9})?", digits, re.ASCII):
        return f"it has no unit, so write {name}='{digits}s' for seconds, or a timedelta"
    return f"write {name}='5s' (or ms, m, h, d), ISO 8601 such as 'PT5S', or a timedelta"


LONGEST_DELAY: Final = timedelta(days=365)
