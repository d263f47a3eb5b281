"""Time: `timedelta` and aware `datetime` outside, whole milliseconds on the wire, the monotonic clock for deadlines."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Final

from rsmq.errors import ConfigError

monotonic: Final = time.monotonic

EPOCH: Final = datetime.fromtimestamp(0, UTC)


LATEST_MS: Final = 253_402_300_799_999
"""The end of the year 9999, as far as a datetime goes."""


def to_ms(span: timedelta) -> int:
    """A span as whole milliseconds."""
    return round(span / timedelta(milliseconds=1))


def epoch_ms(moment: datetime) -> int:
    """A moment as milliseconds since 1970, rounded down: stream ids are cut off the same way, so that what is stored
    after a moment never seems older. A naive datetime is refused: it names no moment."""
    if moment.tzinfo is None:
        raise ConfigError(f"{moment.isoformat()} has no time zone: pass an aware datetime, such as datetime.now(UTC)")
    return (moment - EPOCH) // timedelta(milliseconds=1)


def from_epoch_ms(ms: int) -> datetime:
    """Milliseconds since 1970 as an aware datetime in UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC)


def now_ms() -> int:
    """This machine's wall clock. Only for what a person reads: the server's TIME decides everything else."""
    return time.time_ns() // 1_000_000
