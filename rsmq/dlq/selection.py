"""Selects dead letters by their own fields and by fields of their payload. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from rsmq.dlq.dead_letter import DeadLetter
from rsmq.errors import ConfigError
from rsmq.model.words import count

MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class FieldCondition:
    """`path=value` or `path!=value` for a field of a JSON payload, `a.b.0` for a nested one.

    A missing field equals no value.
    """

    path: str
    value: str = field(repr=False)
    is_equal: bool = True

    def matches(self, payload: Any) -> bool:
        """Whether the payload meets the condition."""
        found = value_at(payload, self.path)
        return (found is not MISSING and equals_text(found, self.value)) is self.is_equal


@dataclass(frozen=True, slots=True)
class Selection:
    """Conditions that must all hold; without any it selects all dead letters.

    `reasons`: has one of them. `error`: its error contains this text, in any case. `since` and `until`: it became a
    dead letter in this time, the end excluded. `key`: its ordering key. `where`: fields of its JSON payload.
    """

    reasons: tuple[str, ...] = ()
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    key: str | None = None
    where: tuple[FieldCondition, ...] = ()

    @property
    def is_all(self) -> bool:
        """Whether it has no conditions."""
        return self == Selection()

    def matches(self, letter: DeadLetter) -> bool:
        """Whether all conditions hold for a dead letter."""
        return self.suits(letter) and (not self.where or has_fields(letter.data, self.where))

    def suits(self, letter: DeadLetter) -> bool:
        """Whether those hold that need no payload."""
        return (
            (not self.reasons or letter.reason in self.reasons)
            and (self.error is None or self.error.casefold() in letter.error.casefold())
            and (self.since is None or letter.at >= self.since)
            and (self.until is None or letter.at < self.until)
            and (self.key is None or letter.key == self.key)
        )


def has_fields(data: bytes | None, where: Iterable[FieldCondition]) -> bool:
    """Whether a payload is JSON in which all conditions hold."""
    try:
        payload = json.loads(data or b"")
    except (ValueError, RecursionError):
        return False
    return all(each.matches(payload) for each in where)


def not_looked_into(unread: Mapping[str, int], one: str) -> str:
    """What a search by fields of the payload could not read, by the reason; empty if it has read all. `one`: what it
    looks for, such as `dead letter`."""
    if not unread:
        return ""
    reasons = ", ".join(f"{reason}: {number}" for reason, number in unread.items())
    return f"the payload of {count(sum(unread.values()), one)} could not be read, so its fields are unknown ({reasons})"


def read_fields(texts: Sequence[str]) -> tuple[FieldCondition, ...]:
    """Conditions such as `customer.tier=gold` or `customer.tier!=gold`. Raises ConfigError for anything else."""
    conditions = []
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or not path.strip("!"):
            raise ConfigError(
                f"{text!r} is not a condition: write field=value, a.b=value for a nested field, or field!=value"
            )
        conditions.append(FieldCondition(path.removesuffix("!"), value, is_equal=not path.endswith("!")))
    return tuple(conditions)


def value_at(payload: Any, path: str) -> Any:
    """The value at `a.b.0`, or MISSING. A field whose own name has a dot is found by its full name."""
    if isinstance(payload, dict) and path in payload:
        return payload[path]
    head, dot, rest = path.partition(".")
    if isinstance(payload, dict):
        inner = payload.get(head, MISSING)
    elif isinstance(payload, list) and head.isdecimal() and int(head) < len(payload):
        inner = payload[int(head)]
    else:
        return MISSING
    return value_at(inner, rest) if dot else inner


def equals_text(found: Any, value: str) -> bool:
    """Whether a JSON value equals a text: strings as they are, other values as JSON writes them (`5`, `true`)."""
    if isinstance(found, str):
        return found == value
    try:
        wanted = json.loads(value)
    except (ValueError, RecursionError):
        return False
    return type(wanted) is type(found) and bool(wanted == found)
