"""Numbers, counts and durations as people write them: in commands, logs, errors, the doctor, dashboard and report."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

UNITS: Final = ((86400, "day", "days"), (3600, "h", "h"), (60, "min", "min"))


def number(value: int | None) -> str:
    """With spaces between thousands; unknown is a question mark."""
    return "?" if value is None else f"{value:,}".replace(",", " ")


def count(value: int | None, one: str, many: str | None = None) -> str:
    """`1 message`, `2 messages`; give `many` where it is not `one` with an s: `1 entry waits`, `2 entries wait`."""
    return f"{number(value)} {one if value == 1 else many or f'{one}s'}"


def duration(value: timedelta) -> str:
    """In one unit: `300 ms`, `1 s`, `90 s`, `1 min`, `36 h`, `1 day`, `3.5 days`."""
    seconds = value.total_seconds()
    for size, one, many in UNITS:
        if abs(seconds) == size:
            return f"{seconds / size:g} {one}"
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:.3g} {many}"
    return f"{seconds:.3g} s" if abs(seconds) >= 1 or seconds == 0 else f"{seconds * 1000:.3g} ms"


def pause(value: timedelta) -> str:
    """A time to wait, with one decimal where it is short: `0.6 s`, `12.0 s`, `5 min`."""
    seconds = value.total_seconds()
    return f"{seconds:.1f} s" if seconds < 60 else duration(value)


def size(value: int) -> str:
    """Bytes in one unit: `300 B`, `1.5 KiB`, `12 MiB`."""
    amount, units = float(value), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while amount >= 1000 and unit != "GiB":
        amount, unit = amount / 1024, next(units)
    return f"{amount:.3g} {unit}"
