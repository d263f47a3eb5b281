"""Schedules: at which times something is published. Pure: the times follow from the clock that is passed in.

Every process computes the same ticks, so any of them can publish one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final, Literal, NamedTuple, Unpack, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import anyio
from pydantic_core import from_json, to_json

from rsmq.errors import ConfigError
from rsmq.handler.apart import apart
from rsmq.handler.quiet_hours import OF_A_MACHINE
from rsmq.handler.returned import completed
from rsmq.handler.surroundings import call_surrounded
from rsmq.model.clock import EPOCH, epoch_ms, from_epoch_ms, to_ms
from rsmq.model.duration import Duration, as_duration, checked_duration
from rsmq.model.expiry import OnExpiry, expiry_fields
from rsmq.model.headers import require_text, write_headers
from rsmq.model.keys import check_name
from rsmq.model.publish_options import MessageOptions, refuse_unknown
from rsmq.model.words import duration

Missed = Literal["latest", "skip"]

MOST_COUNTED: Final = 1000
SHORTEST: Final = timedelta(milliseconds=100)
FORM: Final = "write an interval such as '5m', a timedelta, or a cron expression such as '0 * * * *'"


class TickOptions(MessageOptions, total=False):
    """The options of any schedule. `Router.every` describes them."""

    timezone: str | tzinfo
    missed: Missed
    expires: Duration | None
    on_expiry: OnExpiry | None


class ScheduleOptions(TickOptions, total=False):
    """The options of `every`."""

    name: str | None


DEFAULTS: Final[Mapping[str, Any]] = dict.fromkeys(ScheduleOptions.__annotations__) | {
    "timezone": UTC, "missed": "latest"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """The trigger of a schedule as it is stored on the server, for the inspector."""

    every_ms: int | None = None
    cron: str | None = None
    timezone: str | None = None

    @property
    def trigger(self) -> Trigger | None:
        """None if this process cannot compute it: the extra `cron` or the worker's time zone is missing here."""
        if self.every_ms:
            return Interval(self.every_ms)
        try:
            return None if self.cron is None else _trigger("", self.cron, _zone("", self.timezone))
        except ConfigError:
            return None


def rule_json(trigger: Trigger) -> str:
    """The rule of a trigger, as it is stored."""
    if isinstance(trigger, Interval):
        rule = ScheduleRule(every_ms=trigger.span_ms)
    else:
        rule = ScheduleRule(cron=trigger.expression, timezone=str(trigger.zone))
    return to_json(rule, exclude_none=True).decode()


def read_rule(text: str) -> ScheduleRule:
    """A stored rule; an empty one if it cannot be read: a newer version has written it, or none of ours."""
    try:
        found = from_json(text)
        every, cron, zone = (found.get(each) for each in ("every_ms", "cron", "timezone"))
    except (ValueError, AttributeError):
        return ScheduleRule()
    return ScheduleRule(
        every if type(every) is int and every > 0 else None,
        cron if isinstance(cron, str) else None,
        zone if isinstance(zone, str) else None,
    )


@dataclass(frozen=True, slots=True)
class Interval:
    """Multiples of a span since 1970: the same in every process, independent of its start."""

    span_ms: int

    def after(self, ms: int) -> int:
        """The first tick after `ms`."""
        return (ms // self.span_ms + 1) * self.span_ms

    def until(self, ms: int) -> int:
        """The last tick at or before `ms`."""
        return ms // self.span_ms * self.span_ms


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression in a time zone, by the rules of Debian's cron, also when the clocks change.

    A time that a clock change skips ticks at the first moment after it; a time that occurs twice ticks only at its
    first occurrence. Expressions with `*` in the minute or hour follow the clock.
    """

    expression: str
    zone: tzinfo

    def after(self, ms: int) -> int:
        """The first tick after `ms`."""
        start = from_epoch_ms(ms - ms % 1000).astimezone(self.zone)
        return next(tick for tick in self._walk(start, is_reverse=False) if tick > ms)

    def until(self, ms: int) -> int:
        """The last tick at or before `ms`."""
        start = from_epoch_ms(ms - ms % 1000 + 1000).astimezone(self.zone)
        if start.fold:  # local times up to the change of the clocks have been, for the first time
            again = (start.replace(fold=0) - EPOCH) - (start - EPOCH)
            start = (start.astimezone(UTC) - again).astimezone(self.zone)
        return next(tick for tick in self._walk(start, is_reverse=True) if tick <= ms)

    def _walk(self, start: datetime, *, is_reverse: bool) -> Iterator[int]:
        """The ticks from a time on. CronSim does not know which occurrence of a time that comes twice `start` is, and
        takes the first one: there may be ticks on the wrong side before the right ones."""
        from cronsim import CronSim

        return map(epoch_ms, CronSim(self.expression, start, reverse=is_reverse))


Trigger = Interval | Cron
"""The times of a schedule, called ticks, in milliseconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """A message to `topic` at each tick of the trigger. Make it with `build_schedule`."""

    name: str
    topic: str
    trigger: Trigger
    key: str | None
    headers: Mapping[str, str] | None = field(repr=False)
    band: str | None
    missed: Missed
    zone: tzinfo
    function: Callable[..., Any]
    wants_time: bool
    expires: timedelta | None = None
    on_expiry: OnExpiry | None = None
    is_added: bool = False
    """Whether no code has it."""

    @property
    def full_name(self) -> tuple[str, str]:
        """Topic and name: a name belongs to its topic."""
        return self.topic, self.name

    def call(self, ms: int) -> Any:
        """The function's result for one tick: the payload, or an awaitable of it."""
        return self.function(self.time(ms)) if self.wants_time else self.function()

    def time(self, ms: int) -> datetime:
        """A tick as the function gets it: in the time zone of the schedule."""
        return from_epoch_ms(ms).astimezone(self.zone)

    def expiry(self, ms: int) -> tuple[str, ...]:
        """The fields of an entry that say when the message of a tick expires."""
        return () if self.expires is None else expiry_fields(from_epoch_ms(ms) + self.expires, self.on_expiry)

    def message_id(self, ms: int) -> str:
        """The id of a tick's message: the same in every process."""
        return f"{self.name}@{from_epoch_ms(ms).isoformat()}"


@dataclass(frozen=True, slots=True)
class DueTicks:
    """The ticks to publish now, oldest first, and the next one after them.

    `skipped`: how many were missed and are not published, at most `MOST_COUNTED`; `missed`: the newest of these.
    """

    ticks: tuple[int, ...]
    next_ms: int
    skipped: int = 0
    missed: int | None = None


def due_ticks(trigger: Trigger, missed: Missed, last_ms: int, now_ms: int, grace_ms: int) -> DueTicks:
    """The ticks after `last_ms` up to now. A takeover by another worker takes less than `grace_ms`, and skips none.

    Older ticks were missed, because no worker ran: none of them is published, or with `latest` the newest.
    """
    edge = now_ms - grace_ms
    newest = trigger.until(edge) if edge > last_ms else last_ms
    is_missed = newest > last_ms
    ticks = [newest] if is_missed and missed == "latest" else []
    tick = trigger.after(max(last_ms, edge))
    while tick <= now_ms:
        ticks.append(tick)
        tick = trigger.after(tick)
    left_out = newest - 1 if is_missed and missed == "latest" else newest
    skipped = _count(trigger, last_ms, left_out) if is_missed else 0
    return DueTicks(tuple(ticks), tick, skipped, trigger.until(left_out) if skipped else None)


def _count(trigger: Trigger, after: int, until: int) -> int:
    """The ticks after one time up to another; a few thousand of them look like all."""
    found = 0
    tick = trigger.after(after)
    while tick <= until and found < MOST_COUNTED:
        found += 1
        tick = trigger.after(tick)
    return found


def build_schedule(
    function: Callable[..., Any], schedule: Duration, topic: str, **options: Unpack[ScheduleOptions]
) -> Schedule:
    """A checked schedule, with defaults filled in. Raises ConfigError that says what to write instead."""
    given: dict[str, Any] = {**DEFAULTS, **options}
    title = getattr(function, "__name__", type(function).__name__) if given["name"] is None else given["name"]
    title = check_name("schedule", title)
    refuse_unknown(f"schedule {title}", options, DEFAULTS)
    if given["missed"] not in get_args(Missed):
        raise ConfigError(f"schedule {title}: missed={given['missed']!r} is unknown: use 'latest' or 'skip'")
    if not callable(function):
        raise ConfigError(f"schedule {title}: {function!r} is not a function that returns the payload")
    if given["key"] is not None and not isinstance(given["key"], str):
        raise ConfigError(f"schedule {title}: key={given['key']!r} is not text: write key={str(given['key'])!r}")
    if given["headers"] is not None:
        try:
            require_text(given["headers"])
            write_headers(given["headers"])
        except ConfigError as error:
            raise ConfigError(f"schedule {title}: {error}") from None
    zone = _zone(title, given["timezone"])
    if given["expires"] is not None or given["on_expiry"] is not None:
        try:
            given["expires"] = None if given["expires"] is None else checked_duration("expires", given["expires"])
            expiry_fields(given["expires"], given["on_expiry"])
        except ConfigError as error:
            raise ConfigError(f"schedule {title}: {error}") from None
    return Schedule(
        name=title,
        topic=check_name("topic", topic),
        trigger=_trigger(title, schedule, zone),
        key=given["key"],
        headers=given["headers"],
        band=given["band"],
        missed=given["missed"],
        zone=zone,
        function=function,
        wants_time=_wants_time(title, function),
        expires=given["expires"],
        on_expiry=given["on_expiry"],
    )


def trigger_of(title: str, schedule: object, timezone: object = "UTC") -> Trigger:
    """The rule of a schedule with this name. Raises ConfigError."""
    return _trigger(title, schedule, _zone(title, timezone))


def schedule_binding(topic: str, name: str) -> str:
    """What the encrypted payload of an added schedule is bound to, in the place of a message id."""
    return f"schedule:{topic}:{name}"


class EncodedPayload(NamedTuple):
    """What a function returns whose payload is bytes already. `is_plain`: it is stored as it is, without the codecs of
    the worker."""

    data: bytes
    kind: str
    is_plain: bool = False

    def __repr__(self) -> str:
        return f"<EncodedPayload {self.kind} bytes={len(self.data)}>"


def _zone(title: str, timezone: object) -> tzinfo:
    if str(timezone) in OF_A_MACHINE:
        raise ConfigError(
            f"schedule {title}: {timezone!r} is another zone on each machine, and workers would not agree: write one "
            f"as Europe/Berlin"
        )
    if isinstance(timezone, tzinfo):
        return timezone
    try:
        return ZoneInfo(str(timezone))
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigError(f"schedule {title}: there is no time zone {timezone!r}: write one as Europe/Berlin") from None


def _trigger(title: str, schedule: object, zone: tzinfo) -> Trigger:
    with suppress(ValueError):
        span = as_duration(schedule)
        if span < SHORTEST:
            raise ConfigError(
                f"schedule {title}: every {duration(span)} is too often, use {duration(SHORTEST)} at least"
            )
        return Interval(to_ms(span))
    if not isinstance(schedule, str):
        raise ConfigError(f"schedule {title}: {schedule!r} is neither an interval nor a cron expression: {FORM}")
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise ConfigError(
            "a cron expression needs the extra `cron`: pip install 'rsmq[cron]', or write an interval such as '5m'"
        ) from None
    if len(schedule.split()) == 6:  # CronSim reads the first one as seconds, other programs the last one as years
        raise ConfigError(
            f"schedule {title}: {schedule!r} has six fields: use five (minute hour day month weekday), or an interval "
            f"such as '10s' for what happens more often than each minute"
        )
    try:
        CronSim(str(schedule), datetime(2000, 1, 1, tzinfo=UTC))
        Cron(str(schedule), zone).after(0)
    except (CronSimError, StopIteration) as error:
        raise ConfigError(
            f"schedule {title}: {schedule!r} is not a valid cron expression ({error or 'it has no time'}): {FORM}"
        ) from None
    return Cron(str(schedule), zone)


def _wants_time(title: str, function: Callable[..., Any]) -> bool:
    """Whether the function takes the time of the tick."""
    required = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) > 1:
        raise ConfigError(f"schedule {title} has {len(required)} parameters: use one (the time of the tick), or none")
    return bool(required)


async def payload_of(schedule: Schedule, tick: int) -> Any:
    """The payload that the schedule's function returns for a tick."""
    return await apart(_call, schedule, tick)


async def _call(schedule: Schedule, tick: int) -> Any:
    """A plain function runs in a thread because it may block."""
    if inspect.iscoroutinefunction(schedule.function):
        return await completed(await schedule.call(tick))
    return await completed(await anyio.to_thread.run_sync(call_surrounded, schedule.call, tick))
