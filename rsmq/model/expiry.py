"""The expiry of a message: two fields of its entry, which old readers take for headers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final, Literal

from rsmq.errors import ConfigError, Malformed
from rsmq.model.clock import epoch_ms, to_ms
from rsmq.model.duration import Duration, checked_duration
from rsmq.model.packing import unpack_fields
from rsmq.model.words import duration

OnExpiry = Literal["drop", "dead"]

EXPIRES: Final = b"expires"
ON_EXPIRY: Final = b"on_expiry"
FIELDS: Final = frozenset({EXPIRES, ON_EXPIRY})
LONGEST: Final = timedelta(days=3650)


def expiry_fields(
    expires: Duration | datetime | None, on_expiry: OnExpiry | None, due: str = "", server_ms: int = 0
) -> tuple[str, ...]:
    """The fields of an entry for `expires` and `on_expiry` of a publish, or ConfigError. `due`: see `due_time`.

    A duration counts from the moment when the server stores the message, by its clock. A delayed message is stored when
    it is due, so its duration becomes a moment here: `server_ms` is what the server's clock shows now.
    """
    if expires is None:
        raise ConfigError(f"on_expiry={on_expiry!r} needs expires, such as expires='1h'")
    if on_expiry not in (None, "drop", "dead"):
        raise ConfigError(f"on_expiry={on_expiry!r} is unknown: use 'drop' or 'dead'")
    if isinstance(expires, datetime):
        at, left = max(0, epoch_ms(expires)), None  # with a sign the field would be a header of the publisher
    else:
        left = checked_duration("expires", expires)
        if not timedelta(0) < left <= LONGEST:
            raise ConfigError(
                f"expires={duration(left)} is not possible: use a duration above 0 and up to {LONGEST.days} days"
            )
        at = server_ms + to_ms(left)
    if due and at <= (server_ms + int(due) if due.startswith("+") else int(due)):
        raise ConfigError(
            f"expires={expires!r} is not after the moment when the message is due: it would never be handled"
        )
    moment = str(at) if left is None or due else f"+{to_ms(left)}"
    return ("expires", moment, "on_expiry", "dead") if on_expiry == "dead" else ("expires", moment)


def expiry_of(fields: Mapping[bytes, bytes], stored_ms: int) -> int | None:
    """When the message of these fields expires, in ms since 1970. None: never. A field that has another form
    is a header of its publisher."""
    raw = fields.get(EXPIRES, b"")
    digits = raw.removeprefix(b"+")
    if not digits.isdigit() or len(digits) > 15:
        return None
    return max(1, int(digits)) + (stored_ms if raw.startswith(b"+") else 0)


def expiry_of_packed(packed: bytes, due_ms: int) -> int | None:
    """When a delayed message expires that is stored at `due_ms`, in ms since 1970. None: never, or it is unreadable."""
    try:
        fields = unpack_fields(packed)
    except Malformed:
        return None
    return expiry_of(dict(zip(fields[::2], fields[1::2], strict=False)), due_ms)
