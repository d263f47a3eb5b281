"""JSON of a payload."""

from __future__ import annotations

from typing import Any, Final

from pydantic_core import from_json

from rsmq.errors import Malformed

MOST_DIGITS: Final = 4300
"""Digits of a whole number that readers take, by Python's limit."""


def decode_json(data: bytes) -> Any:
    """Any JSON value."""
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise Malformed(f"the payload is not JSON: {error}") from None


def has_endless_number(data: bytes) -> bool:
    """Whether JSON has a number that no reader takes. It looks at one place in 4300 bytes."""
    half = MOST_DIGITS // 2
    if not any(
        data[at : at + half].isdigit() or data[at - half : at].isdigit()
        for at in range(MOST_DIGITS, len(data), MOST_DIGITS)
    ):
        return False
    try:
        decode_json(data)
    except Malformed:
        return True
    return False  # they are digits of a text
