"""What `publish` takes besides topic and payload, and the checks of it that need no server."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final, TypedDict

from rsmq.errors import ConfigError
from rsmq.model.clock import epoch_ms, to_ms
from rsmq.model.duration import LONGEST_DELAY, Duration, checked_duration
from rsmq.model.expiry import OnExpiry
from rsmq.model.unique import OnConflict, Until
from rsmq.model.words import duration

LONGEST_ID: Final = 256


class ExpiryOptions(TypedDict, total=False):
    """What any publish takes about the expiry of its messages."""

    expires: Duration | datetime | None
    on_expiry: OnExpiry | None


class RareOptions(ExpiryOptions, total=False):
    """What `publish` takes and few messages have. `Broker.publish` describes it."""

    unique: str | None
    until: Until | Duration
    on_conflict: OnConflict


class PublishOptions(RareOptions, total=False):
    """What `publish` takes besides topic and payload. `Broker.publish` describes them; `Producer.publish` has the
    defaults, written out there because it runs for each message."""

    key: str | None
    headers: Mapping[str, str] | None
    delay: Duration | None
    at: datetime | None
    message_id: str | None
    wait_replicas: int


def check_message_id(message_id: str) -> str:
    """A given message id, or ConfigError: it becomes part of a key."""
    if not isinstance(message_id, str) or not 1 <= len(message_id) <= LONGEST_ID or not message_id.isprintable():
        raise ConfigError(f"message_id={message_id!r} is not possible: use 1 to {LONGEST_ID} printable characters")
    return message_id


def due_time(delay: Duration | None, at: datetime | None) -> str:
    """`+ms` for a delay, to be counted from the server's now; milliseconds since 1970 for a moment."""
    if at is None:
        assert delay is not None
        span = checked_duration("delay", delay)
        if not timedelta(0) <= span <= LONGEST_DELAY:
            raise ConfigError(f"delay of {duration(span)} is not possible: use 0 s to {duration(LONGEST_DELAY)}")
        return f"+{to_ms(span)}"
    if delay is not None:
        raise ConfigError("give delay or at, not both")
    if not isinstance(at, datetime):
        raise ConfigError(f"at={at!r} is not a time: pass an aware datetime, or write delay='5m' instead")
    return str(max(0, epoch_ms(at)))
