"""Which dead letters are meant: by what the letter says, and by what its payload says. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rsmq.dlq.letter import DeadLetter
from rsmq.errors import ConfigError

MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Field:
    """`path=value` or `path!=value`: a field of a JSON payload, `a.b.0` for one inside. A missing field is no value."""

    path: str
    value: str
    is_equal: bool = True

    def matches(self, payload: Any) -> bool:
        """Whether the payload has it so."""
        found = pick(payload, self.path)
        return (found is not MISSING and is_same(found, self.value)) is self.is_equal


@dataclass(frozen=True, slots=True)
class Selection:
    """All that is given must hold; nothing given means all.

    `reasons`: one of them. `error`: a part of the error's text, in any case. `since` and `until`: when it died, the
    end excluded. `key`: its ordering key. `where`: fields of its payload; a payload that is no JSON has none.
    """

    reasons: tuple[str, ...] = ()
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    key: str | None = None
    where: tuple[Field, ...] = ()

    @property
    def is_all(self) -> bool:
        """Whether nothing was given."""
        return self == Selection()

    def matches(self, letter: DeadLetter) -> bool:
        """Whether a letter is meant."""
        return (
            (not self.reasons or letter.reason in self.reasons)
            and (self.error is None or self.error.casefold() in letter.error.casefold())
            and (self.since is None or letter.at >= self.since)
            and (self.until is None or letter.at < self.until)
            and (self.key is None or letter.key == self.key)
            and (not self.where or self._has_fields(letter.data))
        )

    def _has_fields(self, data: bytes | None) -> bool:
        try:
            payload = json.loads(data or b"")
        except (ValueError, RecursionError):
            return False
        return all(field.matches(payload) for field in self.where)


def read_field(text: str) -> Field:
    """`customer.tier=gold` or `customer.tier!=gold`. Raises ConfigError for anything else."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip("!"):
        raise ConfigError(f"{text!r} is no condition: write field=value, a.b=value for a field inside, or field!=value")
    return Field(path.removesuffix("!"), value, is_equal=not path.endswith("!"))


def read_fields(texts: Sequence[str]) -> tuple[Field, ...]:
    """Several."""
    return tuple(map(read_field, texts))


def pick(payload: Any, path: str) -> Any:
    """The value at `a.b.0`, or MISSING. A field whose own name has a dot is found by its whole name."""
    if isinstance(payload, dict) and path in payload:
        return payload[path]
    head, dot, rest = path.partition(".")
    if isinstance(payload, dict):
        inner = payload.get(head, MISSING)
    elif isinstance(payload, list) and head.isdecimal() and int(head) < len(payload):
        inner = payload[int(head)]
    else:
        return MISSING
    return pick(inner, rest) if dot else inner


def is_same(found: Any, value: str) -> bool:
    """Text as it is; anything else as JSON writes it: `5`, `true`, `null`."""
    if isinstance(found, str):
        return found == value
    try:
        wanted = json.loads(value)
    except (ValueError, RecursionError):
        return False
    return type(wanted) is type(found) and bool(wanted == found)
