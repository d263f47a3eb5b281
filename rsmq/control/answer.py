"""The answers of `broker.cancel` and `broker.reschedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Word = Literal["cancelled", "running", "settled", "unknown"]


@dataclass(frozen=True, slots=True)
class Answer:
    """`groups` has the answer for each group; it is empty for a delayed message, which no group has seen."""

    groups: Mapping[str, Word] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cancelled(Answer):
    """No handler has handled it, and none will, of the groups that had not settled it before."""


@dataclass(frozen=True, slots=True)
class Running(Answer):
    """A handler is at work. It goes on; if it fails, the message is not tried again but counts as cancelled."""


@dataclass(frozen=True, slots=True)
class Settled(Answer):
    """It comes too late: the message is handled, or a dead letter."""


@dataclass(frozen=True, slots=True)
class Unknown(Answer):
    """The message was not found, or its owner has not answered in time: then it is cancelled if it had not started."""


def combined(groups: Mapping[str, Word]) -> Answer:
    """One answer for all groups: `Running` or `Unknown` if that is so for one of them."""
    words = set(groups.values())
    if not words or "unknown" in words:
        return Unknown(groups)
    if "running" in words:
        return Running(groups)
    return Cancelled(groups) if "cancelled" in words else Settled(groups)
