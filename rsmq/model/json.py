"""JSON of a payload."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from rsmq.errors import Malformed


def decode_json(data: bytes) -> Any:
    """Any JSON value."""
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise Malformed(f"the payload is not JSON: {error}") from None
