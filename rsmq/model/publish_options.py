"""The options of a message that is published: each is declared here once, with its type, its meaning and its check.

Every way to publish takes some of these: `broker.publish`, `publish_many`, `message.publish`, a transactional outbox, a
schedule, a request. A type checker and an editor show them at each (`**options: Unpack[...]`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Final, Generic, TypedDict, TypeVar

from rsmq.errors import ConfigError, TooLarge
from rsmq.model.clock import LATEST_MS, epoch_ms, to_ms
from rsmq.model.duration import LONGEST_DELAY, Duration, checked_duration
from rsmq.model.expiry import OnExpiry
from rsmq.model.headers import require_text
from rsmq.model.in_loop import is_in_loop
from rsmq.model.keys import plain_text
from rsmq.model.settings import did_you_mean
from rsmq.model.unique import OnConflict, Until
from rsmq.model.words import duration

T = TypeVar("T")

LONGEST_ID: Final = 256
MOST_MESSAGES: Final = 500
"""Messages of one partition in one write."""
ONLY_PUBLISH: Final = ("unique", "until", "on_conflict")
"""Options of `broker.publish` that no other way to publish has."""


# -- the options -------------------------------------------------------------------------------------------------------


class OptionGroup(TypedDict, total=False):
    """The root of all options. (The reader of the reference forgets the fields of direct subclasses of TypedDict.)"""


class HeaderOptions(OptionGroup, total=False):
    """For any message."""

    headers: Mapping[str, str] | None
    """Names and values, both text."""
    band: str | None
    """A band of the topic, such as `urgent`: it does not wait behind the others. Default: `normal`."""


class MessageOptions(HeaderOptions, total=False):
    """For a single message."""

    key: str | None
    """Messages with the same key are handled in order. Without one: a random partition."""


class DueOptions(OptionGroup, total=False):
    """When a message is delivered: at once without these, and one of them at most."""

    delay: Duration | None
    """A timedelta or text such as `5m`: that much later."""
    at: datetime | None
    """An aware datetime: then."""


class ExpiryOptions(OptionGroup, total=False):
    """When a message is too old."""

    expires: Duration | datetime | None
    """No attempt of a handler starts after that, also of a message that waits for its retry: a duration from the moment
    when the server stores it, or an aware datetime."""
    on_expiry: OnExpiry | None
    """`drop` (as without it), or `dead` for a dead letter with the reason `expired`."""


class ResultOptions(OptionGroup, total=False):
    """What handlers return."""

    keep_result: Duration | None
    """For how long `broker.result` can ask what the handler of each group has returned: a duration from its end."""


class AddedOptions(ExpiryOptions, DueOptions, MessageOptions, ResultOptions, total=False):
    """The options of `message.batch.publish`."""


class OutputOptions(AddedOptions, total=False):
    """The options of `message.publish`."""

    message_id: str | None
    """The message is stored once, however often this id is published within RSMQ_DEDUP_WINDOW."""


class PublishOptions(OutputOptions, total=False):
    """The options of `broker.publish`."""

    wait_replicas: int
    """Return when so many replicas have the message, too. Default: 0."""
    unique: str | None
    """A name that one message of the topic has at a time. A name belongs to one key; without a key it is the key."""
    until: Until | Duration
    """When the name is free again: `settled` (the default), `started`, or after a duration."""
    on_conflict: OnConflict
    """If another message has the name: `keep` that (the default), `replace` it, or `extend` its delay."""


class ManyOptions(ExpiryOptions, ResultOptions, Generic[T], total=False):
    """The options of `broker.publish_many`. A function gives each item its own."""

    key: Callable[[T], str | None] | None
    """Gives the key of an item."""
    headers: Mapping[str, str] | Callable[[T], Mapping[str, str] | None] | None
    """Names and values, both text: the same for all items, or those of an item."""
    band: str | None
    """A band of the topic, such as `bulk`. Default: `normal`."""
    delay: Duration | None
    """A timedelta or text such as `5m`: that much later."""
    at: datetime | Callable[[T], datetime] | None
    """An aware datetime: then; or a function that gives each item its own. A time that is over is now."""
    message_id: Callable[[T], str] | None
    """Gives the message id of an item: then all can be published again after an error, and each is stored once."""
    batch: int
    """Most messages of one partition in one write: 1 to 500, the default."""


class OutboxManyOptions(ExpiryOptions, DueOptions, HeaderOptions, total=False):
    """The options of `outbox.publish_many`, the same for all items. Durations count from the insert."""

    wait_replicas: int
    """Their rows are deleted when so many replicas have the messages, too. Default: that of the outbox."""


class OutboxOptions(PublishOptions, total=False):
    """The options of `outbox.publish`: all of `broker.publish`. Durations count from the insert."""


# -- their checks ------------------------------------------------------------------------------------------------------


def refuse_unknown(owner: str, given: Mapping[str, object], known: Mapping[str, object]) -> None:
    """Raise ConfigError for an option that does not exist; `owner` starts the message."""
    for name in given:
        if name not in known and name in ONLY_PUBLISH:
            raise ConfigError(
                f"{owner} takes no {name}: whether a unique name is free is decided when its message is stored, so "
                f"each of them needs a call of broker.publish, which returns the message that has the name"
            )
        if name not in known:
            raise ConfigError(f"{owner}: unknown option {name!r}.{did_you_mean(name, list(known))}")


def check_message_id(message_id: str) -> str:
    """A given message id, or ConfigError: it becomes part of a key."""
    if not isinstance(message_id, str) or not 1 <= len(message_id) <= LONGEST_ID or not message_id.isprintable():
        raise ConfigError(f"message_id={message_id!r} is not possible: use 1 to {LONGEST_ID} printable characters")
    return plain_text(message_id)


def check_replicas(number: int) -> int:
    """A number of replicas, or ConfigError."""
    if type(number) is not int or number < 0:
        raise ConfigError(f"wait_replicas={number!r} is not possible: use 0 or more")
    return number


def check_size(data: bytes, key: str | None, headers: Mapping[str, str] | None, limit: int) -> int:
    """The bytes of a message. Raises ConfigError for a key or headers that are not text, and TooLarge."""
    size = len(data)
    if key is not None:
        if type(key) is not str:
            raise ConfigError(f"key={key!r} is not text: pass a str")
        size += len(key)
    if headers:
        require_text(headers)
        size += sum(len(name) + len(value) for name, value in headers.items())
    if size > limit:
        raise TooLarge(size, limit)
    return size


def due_time(delay: Duration | None, at: datetime | None) -> str:
    """`+ms` for a delay, to be counted from the server's now; milliseconds since 1970 for a moment; empty for neither.

    Raises ConfigError.
    """
    if at is None:
        if delay is None:
            return ""
        span = checked_duration("delay", delay)
        if not timedelta(0) <= span <= LONGEST_DELAY:
            raise ConfigError(f"delay of {duration(span)} is not possible: use 0 s to {duration(LONGEST_DELAY)}")
        return f"+{to_ms(span)}"
    if delay is not None:
        raise ConfigError("give delay or at, not both")
    if not isinstance(at, datetime):
        raise ConfigError(f"at={at!r} is not a time: pass an aware datetime, or write delay='5m' instead")
    return str(min(max(0, epoch_ms(at)), LATEST_MS))


def refuse_single(items: object) -> None:
    """Raise ConfigError for one payload in the place of many: its characters, or names, would be the payloads."""
    if isinstance(items, str | bytes | bytearray | memoryview | Mapping):
        raise ConfigError(
            f"publish_many stores many payloads, and {type(items).__name__} is one: pass a list, or use publish"
        )


def refuse_thread(is_async: bool, name: str = "message.publish") -> None:
    """Raise ConfigError unless this code runs in an event loop, or for `is_async` False unless it does not. `name`: of
    the method for async handlers."""
    if not is_in_loop():
        if is_async:
            raise ConfigError(f"{name} is for async handlers: a plain function writes {name}_sync(...)")
    elif not is_async:
        raise ConfigError(f"{name}_sync is for plain functions: here write `await {name}(...)`")
