"""What becomes of the messages that a member has, in the words of an operator: running, ready, or waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any, Final

READ_AHEAD_USED: Final = "read_ahead_used"
"""In the vitals of a member: percent of the ids that a partition may keep waiting."""


@dataclass(frozen=True, slots=True)
class Work:
    """Numbers of messages. What waits behind a message that waits for its retry waits for its key; what waits behind
    one that waits for its rate waits for that rate, too."""

    running: int = 0
    """In a handler."""
    ready: int = 0
    """May start as soon as a handler is free."""
    waiting_for_key: int = 0
    """An earlier message of the key is not done."""
    waiting_for_rate: int = 0
    waiting_for_retry: int = 0
    """Failed, and not due yet."""
    waiting_for_time: int = 0
    """The handler's rule `when` lets it start later; with what is behind its key."""

    @classmethod
    def read(cls, vitals: Mapping[str, Any]) -> Work:
        """From the vitals of a member. Another client may have written anything there."""
        found = [vitals.get(field.name) for field in fields(cls)]
        return cls(*(each if isinstance(each, int) and each > 0 else 0 for each in found))

    @property
    def known(self) -> dict[str, int]:
        """What is not zero, by name."""
        return {field.name: number for field in fields(self) if (number := getattr(self, field.name))}

    @property
    def waiting(self) -> int:
        """What waits, for whatever reason."""
        return self.waiting_for_key + self.waiting_for_rate + self.waiting_for_retry + self.waiting_for_time

    @property
    def reasons(self) -> dict[str, int]:
        """What waits, by what it waits for."""
        return {
            "key": self.waiting_for_key, "rate": self.waiting_for_rate, "retry": self.waiting_for_retry,
            "time": self.waiting_for_time,
        }  # fmt: skip

    @property
    def backlog(self) -> int:
        """All but what waits for a time: more workers would not do it sooner."""
        return self.total - self.waiting_for_time

    @property
    def total(self) -> int:
        """All of them."""
        return sum(astuple(self))

    def __add__(self, other: Work) -> Work:
        return Work(*map(int.__add__, astuple(self), astuple(other)))
