"""Quiet hours: between two times of day of a message's recipient nothing starts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from rsmq.errors import ConfigError
from rsmq.model.message import Message

ZoneOf = Callable[[Message], str | None]
MINUTE: Final = timedelta(minutes=1)
MOST_ZONES: Final = 2000
"""Names of zones that are remembered, known and unknown ones: there are about six hundred."""


class QuietHours:
    """Between `start` and `end`, by the wall clock of a zone, nothing starts: `QuietHours("22:00", "08:00", ...)`.

    `zone` is a function that gives a message the name of its zone, such as `lambda message: message.headers["tz"]`; it
    sees headers, key and data, before the payload is decoded. `default` is the zone of messages for which it returns
    None or a name that is no zone; without a default such a message raises ConfigError. Times are "22:00" or a `time`;
    `end` may be before `start`, on the next morning.

    The end is the first minute at which the wall clock is not quiet, also when the clocks change meanwhile. Raises
    ConfigError for times that are none, for an unknown `default`, and where Python has no time zones.
    """

    def __init__(
        self, start: str | time, end: str | time, *, zone: ZoneOf | None = None, default: str | None = None
    ) -> None:
        self.start, self.end = time_of("start", start), time_of("end", end)
        if self.start == self.end:
            raise ConfigError(f"quiet hours from {start} to {end} would never end: give two different times")
        if zone is not None and not callable(zone):
            raise ConfigError(f"zone={zone!r} is no function: write zone=lambda message: ..., or default={zone!r}")
        if zone is None and default is None:
            raise ConfigError("quiet hours need a zone: give zone=, a function of the message, default='Asia/Seoul'")
        self.zone = zone
        self.default = default
        self._zones: dict[str, ZoneInfo | None] = {}
        self._ends: dict[str, tuple[datetime, datetime]] = {}
        if find_zone("UTC") is None:
            raise ConfigError("Python finds no time zones on this machine: `pip install tzdata`")
        if default is not None and find_zone(default) is None:
            raise ConfigError(f"default={default!r} is no time zone: write one as Europe/Berlin")

    def next(self, zone: str | None = None, *, now: datetime | None = None) -> datetime:
        """The first moment from now on that is not quiet in a zone, for `publish(..., at=quiet.next("Asia/Seoul"))`.

        `zone` None, or unknown, is the default. `now` is an aware datetime, by default this machine's clock. Returns an
        aware datetime in UTC. Raises ConfigError for an unknown zone without a default.
        """
        moment = datetime.now(UTC) if now is None else now
        if moment.tzinfo is None:
            raise ConfigError(f"now={moment.isoformat()} has no time zone: pass an aware datetime")
        return self._end(zone, moment) or moment.astimezone(UTC)

    def until(self, message: Message, now: datetime) -> datetime | None:
        """When a message may start; None: now. Raises what `zone` raises, and ConfigError for an unknown zone."""
        return self._end(None if self.zone is None else self.zone(message), now)

    def _end(self, name: str | None, now: datetime) -> datetime | None:
        """The end of the quiet hours in which a moment is; None: it is in none."""
        zone = self._zone(name)
        if not self._is_quiet(now, zone):
            return None
        since, until = self._ends.get(zone.key, (now, now))
        if since <= now < until:
            return until
        moment = now.astimezone(UTC).replace(second=0, microsecond=0)
        while self._is_quiet(moment, zone):  # all that is computed is wrong somewhere when clocks change
            moment += MINUTE
        self._ends[zone.key] = now, moment
        return moment

    def _is_quiet(self, moment: datetime, zone: ZoneInfo) -> bool:
        wall = moment.astimezone(zone).time()
        if self.start < self.end:
            return self.start <= wall < self.end
        return wall >= self.start or wall < self.end

    def _zone(self, name: str | None) -> ZoneInfo:
        found = None if name is None else self._known(name)
        if found is None and self.default is not None:
            found = self._known(self.default)
        if found is None:
            raise ConfigError(f"{name!r} is no time zone, and the quiet hours have no default: give default='UTC'")
        return found

    def _known(self, name: str) -> ZoneInfo | None:
        if name not in self._zones:
            if len(self._zones) >= MOST_ZONES:
                self._zones.clear()
            self._zones[name] = find_zone(name)
        return self._zones[name]

    def __repr__(self) -> str:
        default = "" if self.default is None else f", default={self.default!r}"
        return f"QuietHours({self.start:%H:%M}, {self.end:%H:%M}{default})"


When = QuietHours | Callable[[Message], datetime | None]
"""Quiet hours, or a function: from when on a message may start, as an aware datetime; None is now."""


OF_A_MACHINE: Final = ("localtime", "posixrules", "Factory")
"""Names in the database of time zones that mean what a machine is set to: another zone on each."""


def find_zone(name: object) -> ZoneInfo | None:
    """The zone of a name; None if there is none."""
    try:
        return ZoneInfo(name) if isinstance(name, str) and name not in OF_A_MACHINE else None
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None


def time_of(option: str, value: str | time) -> time:
    """A time of day, to the minute."""
    try:
        found = time.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, time) or found.tzinfo is not None or found.second or found.microsecond:
        raise ConfigError(f"{option}={value!r} is no time of day in whole minutes: write {option}='22:00'")
    return found
