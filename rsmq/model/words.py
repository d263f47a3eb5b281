"""Numbers, counts, durations, ids and versions as people read them: in commands, logs, errors, doctor and dashboard."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Collection
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Final

LONGEST_SHOWN: Final = 80
"""Characters of an id or a key in a log line: another client may store a megabyte."""
MOST_NAMES: Final = 5
"""Names in an error: there may be thousands."""
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
    unit, _, _ = _unit(seconds)
    rounded = float(_short(seconds / unit)) * unit  # 23 h 59 min 50 s is not 24 h, but 1 day
    unit, one, many = _unit(rounded)
    text = _short(rounded / unit)
    return f"{text} {one if text in ('1', '-1') else many}"


def _unit(seconds: float) -> tuple[float, str, str]:
    """The unit for a number of seconds, and its names. Exactly one of a unit, or two and more."""
    for unit in UNITS:
        if abs(seconds) == unit[0] or abs(seconds) >= 2 * unit[0]:
            return unit
    return (1, "s", "s") if abs(seconds) >= 1 or seconds == 0 else (0.001, "ms", "ms")


def _short(value: float) -> str:
    """Three digits, or a whole number."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def pause(value: timedelta) -> str:
    """A time to wait, with one decimal where it is short: `0.6 s`, `12.0 s`, `5 min`."""
    seconds = value.total_seconds()
    return f"{seconds:.1f} s" if seconds < 60 else duration(value)


def describe_exit(code: int) -> str:
    """How a process has ended, from its exit code as Python has it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def size(value: int) -> str:
    """Bytes in one unit: `300 B`, `1.5 KiB`, `12 MiB`."""
    amount, units = float(value), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while amount >= 1000 and unit != "GiB":
        amount, unit = amount / 1024, next(units)
    return f"{amount:.3g} {unit}"


def shown(text: str) -> str:
    """An id for a log line: one of another client may be very long, or contain a line end that forges a second line."""
    text = text[:LONGEST_SHOWN]
    return text if text.isprintable() else repr(text)


def installed(package: str) -> str:
    """The version of a package, or `not installed`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def printable(text: str) -> str:
    """Text without control characters: payloads and keys may come from anywhere, and must not control the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def suggestion(wanted: str, known: Collection[str], several: str) -> str:
    """What to say after "there is no such topic": names that look like the one that was `wanted`, or the first ones,
    at most five. `several`: what they are, such as `topics`. Empty if there are none."""
    near = difflib.get_close_matches(wanted, known, MOST_NAMES)
    if near:
        return f"did you mean {' or '.join((', '.join(near[:-1]), near[-1])) if near[1:] else near[0]}?"
    some, more = sorted(known)[:MOST_NAMES], len(known) - MOST_NAMES
    rest = f" and {number(more)} more" if more > 0 else ""
    return f"the {several} are {', '.join(some)}{rest}" if some else ""
