"""Values of records in the server, read without trust: another client may have written anything. Nothing here fails."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from rsmq.model.clock import LATEST_MS, from_epoch_ms
from rsmq.model.keys import LONGEST_DEVICE

LONGEST_NUMBER: Final = 16
"""Digits: what Lua counts exactly has no more."""


def text(raw: bytes | None) -> str:
    """Bytes as readable text; what is not UTF-8 is escaped."""
    return "" if raw is None else raw.decode(errors="backslashreplace")


def exact_text(raw: bytes) -> str | None:
    """Bytes as the text that they are; None if that is none, or empty."""
    try:
        return raw.decode() or None
    except UnicodeDecodeError:
        return None


def device_id(raw: bytes) -> str | None:
    """Bytes as the id of a device or MQTT client; None if they can be none."""
    return exact_text(raw) if len(raw) <= LONGEST_DEVICE else None


def whole(raw: bytes | str | None) -> int | None:
    """A whole number from 0 on; None for anything else."""
    if not raw or not raw.isascii() or not raw.isdigit() or len(raw) > LONGEST_NUMBER:
        return None
    return int(raw)


def moment(raw: bytes | str | None) -> datetime | None:
    """Milliseconds since 1970 as a time, at most the year 9999; None for anything else."""
    ms = whole(raw)
    return None if ms is None else from_epoch_ms(min(ms, LATEST_MS))
