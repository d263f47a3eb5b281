"""JSON of a payload."""

from __future__ import annotations

from typing import Any, Final

from pydantic_core import from_json

from rsmq.errors import Malformed

MOST_DIGITS: Final = 4300
"""Digits of a whole number that readers take, by Python's limit."""
MOST_LEVELS: Final = 200
"""Arrays and objects within each other that readers take, by the limit of their parser. The encoder writes 254."""
SHORTEST_DEEP: Final = 2 * (MOST_LEVELS + 1)
"""Bytes of the shortest JSON that has more levels."""
BRACKETS: Final = b"[]{}"
NO_BRACKETS: Final = bytes(set(range(256)) - set(BRACKETS))
ROUNDS: Final = 8
"""Levels that are taken off before all is parsed: nearly all JSON has fewer."""


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


def is_too_deep(data: bytes) -> bool:
    """Whether JSON, which is valid otherwise, has more levels than a reader takes.

    Counting by `replace` costs a quarter of `count`. JSON with many brackets, such as a long list of objects, has few
    levels: they are taken off from the inside, which costs a tenth of a parser.
    """
    without = data.replace(b"[", b"", MOST_LEVELS + 1).replace(b"{", b"", MOST_LEVELS + 1)
    if len(data) - len(without) <= MOST_LEVELS:
        return False
    brackets = data.translate(None, NO_BRACKETS)
    for _ in range(ROUNDS):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if not brackets:
            return False
    try:
        decode_json(data)
    except Malformed:
        return True
    return False
