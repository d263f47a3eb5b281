"""Time: `timedelta` and aware `datetime` in the API, milliseconds in Redis, monotonic clocks for deadlines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from rsmq.errors import ConfigError


def clock_through_sleep() -> Callable[[], float]:
    """A monotonic clock that goes on while the machine is suspended, where the system has one.

    `time.monotonic` stands still then, on Linux and on macOS, but the server's leases run out.
    """
    which: int | None = getattr(time, "CLOCK_BOOTTIME", None)
    if which is None and sys.platform == "darwin":
        which = time.CLOCK_MONOTONIC  # not the clock of time.monotonic there
    if which is None:
        return time.monotonic
    try:
        time.clock_gettime(which)
    except OSError:  # a kernel or a sandbox that does not know it
        return time.monotonic
    return partial(time.clock_gettime, which)


monotonic: Final = clock_through_sleep()
"""Seconds, for everything that the server or other members measure, too: leases, heartbeats, who is alive."""
awake: Final = time.monotonic
"""Seconds while the machine is not suspended: for patience and lateness, which a suspended machine must not use up."""

EPOCH: Final = datetime.fromtimestamp(0, UTC)


LATEST_MS: Final = 253_402_300_799_999
"""The end of the year 9999, the last moment that a datetime can hold."""


def to_ms(span: timedelta) -> int:
    """A duration as whole milliseconds."""
    return round(span / timedelta(milliseconds=1))


def epoch_ms(moment: datetime) -> int:
    """A datetime as milliseconds since 1970, rounded down like stream ids, so that an entry never seems older than an
    earlier datetime. Raises ConfigError for a naive datetime."""
    if moment.tzinfo is None:
        raise ConfigError(f"{moment.isoformat()} has no time zone: pass an aware datetime, such as datetime.now(UTC)")
    return (moment - EPOCH) // timedelta(milliseconds=1)


def server_ms(reply: Sequence[bytes]) -> int:
    """The reply of TIME as milliseconds since 1970."""
    return int(reply[0]) * 1000 + int(reply[1]) // 1000


def from_epoch_ms(ms: int) -> datetime:
    """Milliseconds since 1970 as an aware datetime in UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC)


class ServerClock:
    """The server's clock, as a process knows it that asks for it now and then: behind by the time of a reply.

    Until the first answer it is this machine's.
    """

    __slots__ = ("_ahead", "behind", "moved")

    def __init__(self) -> None:
        self._ahead: float | None = None
        self.behind = 0.0
        """Seconds by which it is behind at most."""
        self.moved = 0.0
        """Seconds by which a test has moved it."""

    def saw(self, asked: float, seconds: float) -> None:
        """The server has said `seconds` since 1970; it was asked when `monotonic` was `asked`."""
        now = monotonic()
        self._ahead = seconds - now
        self.behind = now - asked

    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        seconds = time.time() if self._ahead is None else monotonic() + self._ahead
        return int(1000 * (seconds + self.moved))


def now_ms() -> int:
    """This machine's wall clock, only for what people read. The server's TIME decides everything else."""
    return time.time_ns() // 1_000_000
