"""Unique names of messages: until when one is held, and what a second publish does. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Literal

from rsmq.errors import ConfigError
from rsmq.model.clock import to_ms
from rsmq.model.duration import Duration, checked_duration
from rsmq.model.expiry import expiry_of_packed
from rsmq.model.keys import plain_text
from rsmq.model.stream_id import parse_stream_id

Until = Literal["settled", "started"]
OnConflict = Literal["keep", "replace", "extend"]

LONGEST_NAME: Final = 256
LONGEST_HOLD: Final = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Unique:
    """A name, until when it is held (`settled`, `started`, or ms), and what is done if another message holds it."""

    name: str
    till: str
    on_conflict: OnConflict

    @classmethod
    def checked(cls, name: Any, until: Any, on_conflict: Any, *, is_delayed: bool) -> Unique:
        """The options of a publish, or ConfigError. None: not given."""
        if name is None:
            raise ConfigError("until and on_conflict need unique, such as unique='user-7'")
        until = "settled" if until is None else until
        on_conflict = "keep" if on_conflict is None else on_conflict
        if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
            raise ConfigError(
                f"unique={name!r} is not possible: use a text of 1 to {LONGEST_NAME} printable characters"
            )
        if on_conflict not in ("keep", "replace", "extend"):
            raise ConfigError(f"on_conflict={on_conflict!r} is unknown: use 'keep', 'replace' or 'extend'")
        if on_conflict == "extend" and not is_delayed:
            raise ConfigError("on_conflict='extend' moves the due time of a delayed message: give delay or at, too")
        return cls(plain_text(name), hold(until), on_conflict)


def hold(until: Until | Duration) -> str:
    """`until` as the script takes it."""
    if until in ("settled", "started"):
        return str(until)
    try:
        span = checked_duration("until", until)
    except ConfigError:
        if not isinstance(until, str):
            raise
        span = timedelta(0)
    if not timedelta(0) < span <= LONGEST_HOLD:
        raise ConfigError(
            f"until={until!r} is not possible: use 'settled', 'started', or a duration such as '5m', up to "
            f"{LONGEST_HOLD.days} days"
        )
    return str(to_ms(span))


@dataclass(frozen=True, slots=True)
class Holder:
    """The message that holds a name, or held it: the answer HELD of `publish_unique.lua`."""

    now_ms: int
    record: bytes
    till: bytes
    message_id: bytes
    stream_id: bytes
    is_there: bool
    packed: bytes = field(repr=False)
    groups: tuple[bytes, ...]

    @classmethod
    def read(cls, reply: list[Any]) -> Holder:
        """From the reply of the script, without its first word."""
        now, record, till, message_id, stream_id, is_there, packed, *groups = reply
        return cls(int(now), record, till, message_id, stream_id, bool(is_there), packed, tuple(groups))


@dataclass(frozen=True, slots=True)
class HolderState:
    """Where the holder is for one group: the answer of `look_at_message.lua`."""

    is_undelivered: bool
    is_unsettled: bool
    """Pending or parked."""
    is_cancelled: bool
    """It does not start any more."""

    @classmethod
    def read(cls, stream_id: bytes, reply: list[Any]) -> HolderState:
        """From the reply of the script."""
        delivered, member, parked, mark = reply[1], reply[2], reply[5], reply[10]
        if not delivered:  # the group was deleted meanwhile
            return cls(False, False, False)
        if parse_stream_id(stream_id) > parse_stream_id(delivered):
            return cls(True, False, bool(mark))
        is_parked = parked >= 0
        return cls(False, bool(member) or is_parked, mark in (b"done", b"cancelled") or (is_parked and bool(mark)))


def is_held(holder: Holder, states: list[HolderState]) -> bool:
    """Whether a message still holds its name. Once it does not, it never does again, unless its group is reset."""
    if holder.till.isdigit():
        return holder.now_ms < int(holder.till)
    if not holder.stream_id:
        return holder.is_there
    alive = [each for each in states if not each.is_cancelled]
    is_waiting = holder.is_there and (not states or any(each.is_undelivered for each in alive))
    if holder.till == b"started":
        return is_waiting and all(each.is_undelivered for each in states)
    return is_waiting or any(each.is_unsettled for each in alive)


def can_be_replaced(holder: Holder, states: list[HolderState]) -> bool:
    """Whether no group has it yet. Without a group there is no place for the mark that cancels it."""
    if not holder.stream_id:
        return holder.is_there
    return holder.is_there and bool(states) and all(each.is_undelivered for each in states)


def can_be_extended(holder: Holder, due: str) -> bool:
    """Whether a message is delayed, and has not expired at its new due time, where it would end without an attempt."""
    if holder.stream_id or not holder.is_there:
        return False
    due_ms = int(due) + (holder.now_ms if due.startswith("+") else 0)
    expires_ms = expiry_of_packed(holder.packed, due_ms)
    return expires_ms is None or due_ms < expires_ms
