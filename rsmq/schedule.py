"""Schedules: when something is published again and again. Pure: the times follow from the clock that is passed in.

Every process that asks gets the same ticks, so it does not matter which of them publishes one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final, Literal, Protocol, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel

from rsmq.clock import epoch_ms, from_epoch_ms, to_ms
from rsmq.errors import ConfigError
from rsmq.keys import check_name

Missed = Literal["latest", "skip"]

SHORTEST: Final = timedelta(milliseconds=100)


class Times(Protocol):
    """A set of moments, in milliseconds since 1970."""

    def after(self, ms: int) -> int:
        """The first one after `ms`."""
        ...

    def until(self, ms: int) -> int:
        """The last one at or before `ms`."""
        ...


class Rule(BaseModel):
    """When a schedule ticks, as it stands in the server for those who look."""

    every_ms: int | None = None
    cron: str | None = None
    timezone: str | None = None

    @property
    def times(self) -> Times | None:
        """The times; None if they cannot be told here: no extra `cron`, or a time zone of the worker's own."""
        if self.every_ms:
            return Interval(self.every_ms)
        try:
            return None if self.cron is None else _times("", self.cron, _zone("", self.timezone))
        except ConfigError:
            return None


def rule_of(times: Times) -> str:
    """The rule behind some times, as JSON."""
    if isinstance(times, Interval):
        return Rule(every_ms=times.span_ms).model_dump_json(exclude_none=True)
    assert isinstance(times, Cron)
    return Rule(cron=times.expression, timezone=str(times.zone)).model_dump_json(exclude_none=True)


@dataclass(frozen=True, slots=True)
class Interval:
    """Multiples of a span since 1970: the same in every process, whenever it was started."""

    span_ms: int

    def after(self, ms: int) -> int:
        """The first one after `ms`."""
        return (ms // self.span_ms + 1) * self.span_ms

    def until(self, ms: int) -> int:
        """The last one at or before `ms`."""
        return ms // self.span_ms * self.span_ms


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression in a time zone, by the rules of Debian's cron, also when the clocks change.

    A time that a change of the clocks leaves out is ticked at the first moment after it, one that comes twice only
    once; expressions with `*` in the minute or hour simply follow the clock.
    """

    expression: str
    zone: tzinfo

    def after(self, ms: int) -> int:
        """The first one after `ms`."""
        return self._walk(ms - ms % 1000, is_reverse=False)

    def until(self, ms: int) -> int:
        """The last one at or before `ms`."""
        return self._walk(ms - ms % 1000 + 1000, is_reverse=True)

    def _walk(self, ms: int, *, is_reverse: bool) -> int:
        from cronsim import CronSim

        return epoch_ms(next(CronSim(self.expression, from_epoch_ms(ms).astimezone(self.zone), reverse=is_reverse)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Every:
    """One schedule: what is published to `topic` at each of its times. Make it with `build_every`."""

    name: str
    topic: str
    times: Times
    key: str | None
    headers: Mapping[str, str] | None
    missed: Missed
    zone: tzinfo
    function: Callable[..., Any]
    wants_time: bool

    def call(self, ms: int) -> Any:
        """What the function returns for one tick: the payload, or an awaitable of it."""
        return self.function(self.time(ms)) if self.wants_time else self.function()

    def time(self, ms: int) -> datetime:
        """A tick as the function gets it: in the schedule's own time zone."""
        return from_epoch_ms(ms).astimezone(self.zone)

    def message_id(self, ms: int) -> str:
        """The same for a tick, whoever publishes it."""
        return f"{self.name}@{from_epoch_ms(ms).isoformat()}"


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be published now, oldest first, and when to look again. `skipped`: some were too late."""

    ticks: tuple[int, ...]
    next_ms: int
    skipped: bool


def due(times: Times, missed: Missed, last_ms: int, now_ms: int, grace_ms: int) -> Due:
    """The ticks after `last_ms` up to now. A takeover takes less than `grace_ms`: it misses nothing.

    What is older was missed (no worker ran): nothing of it is published, or with `latest` the newest of it.
    """
    edge = now_ms - grace_ms
    newest = times.until(edge) if edge > last_ms else last_ms
    is_missed = newest > last_ms
    ticks = [newest] if is_missed and missed == "latest" else []
    tick = times.after(max(last_ms, edge))
    while tick <= now_ms:
        ticks.append(tick)
        tick = times.after(tick)
    return Due(tuple(ticks), tick, is_missed and (missed == "skip" or times.until(newest - 1) > last_ms))


def build_every(
    function: Callable[..., Any],
    schedule: str | timedelta,
    topic: str,
    *,
    name: str | None = None,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    timezone: str | tzinfo = UTC,
    missed: Missed = "latest",
) -> Every:
    """A checked schedule. Raises ConfigError that says what to write instead."""
    title = str(getattr(function, "__name__", type(function).__name__) if name is None else name)
    check_name("schedule", title)
    if missed not in get_args(Missed):
        raise ConfigError(f"schedule {title}: missed={missed!r} is unknown: use 'latest' or 'skip'")
    zone = _zone(title, timezone)
    return Every(
        name=title,
        topic=check_name("topic", topic),
        times=_times(title, schedule, zone),
        key=key,
        headers=headers,
        missed=missed,
        zone=zone,
        function=function,
        wants_time=_wants_time(title, function),
    )


def _zone(title: str, timezone: object) -> tzinfo:
    if isinstance(timezone, tzinfo):
        return timezone
    try:
        return ZoneInfo(str(timezone))
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigError(f"schedule {title}: there is no time zone {timezone!r}: write one as Europe/Berlin") from None


def _times(title: str, schedule: object, zone: tzinfo) -> Times:
    if isinstance(schedule, timedelta):
        if schedule < SHORTEST:
            raise ConfigError(f"schedule {title}: every {schedule} is too often: use {to_ms(SHORTEST)} ms or more")
        return Interval(to_ms(schedule))
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise ConfigError(
            "a cron expression needs the extra `cron`: pip install 'rsmq[cron]', or pass a timedelta"
        ) from None
    try:
        CronSim(str(schedule), datetime(2000, 1, 1, tzinfo=UTC))
        Cron(str(schedule), zone).after(0)
    except (CronSimError, StopIteration) as error:
        raise ConfigError(
            f"schedule {title}: {schedule!r} is no cron expression ({error or 'it never comes'}): write one such as "
            f"'0 * * * *', or a timedelta"
        ) from None
    return Cron(str(schedule), zone)


def _wants_time(title: str, function: Callable[..., Any]) -> bool:
    """Whether it takes the time of the tick."""
    required = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) > 1:
        raise ConfigError(
            f"schedule {title} takes {len(required)} parameters: it gets the time of the tick, or nothing"
        )
    return bool(required)
