"""A name that is held in a group: nothing of it starts until a time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, cast, get_args

from rsmq.model.clock import LATEST_MS, from_epoch_ms
from rsmq.model.keys import LONGEST_NAME
from rsmq.model.member import read_info

HoldKind = Literal["handler", "command", "breaker"]
EVERYTHING: Final = ""
"""The name of all messages of a group."""
EMPTY: Final = "(empty)"
"""The name of messages whose function gives an empty text, such as a header that is missing."""
MOST_HELD: Final = 1000
"""Names that a group can hold at once."""
UNTRIED_MS: Final = 24 * 60 * 60 * 1000
"""How long what a breaker holds waits for the message that tries it; `hold_name.lua` has the same."""


@dataclass(frozen=True, slots=True)
class HeldName:
    """A name, or all messages of the group (`name=""`), and until when it is held by the server's clock.

    `kind`: who holds it: a "handler" that raised `Hold`, a "command", or a "breaker" after failures.
    """

    name: str
    until_ms: int
    since_ms: int
    kind: HoldKind

    @property
    def until(self) -> datetime:
        """When it ends. What a breaker holds is then tried by one message."""
        return from_epoch_ms(min(self.until_ms, LATEST_MS))

    @property
    def words(self) -> str:
        """The name for people."""
        return repr(self.name) if self.name else "everything"


def bounded_name(name: str) -> str:
    """The name under which a hold is stored: a long one is hashed, and what is not Unicode is escaped."""
    if len(name) > LONGEST_NAME:
        return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return name if name.isascii() else name.encode(errors="backslashreplace").decode()


def name_of_one(name: str) -> str:
    """The same of a name that a function of the handler gives: an empty one is not everything."""
    return bounded_name(name) or EMPTY


def read_holds(text: bytes | None) -> tuple[HeldName, ...]:
    """The holds of a group, from the field of its hash. What cannot be read is left out: nothing is held by it."""
    found = []
    for name, each in read_info(text or b"{}").items():
        if isinstance(each, Sequence) and len(each) == 3 and all(_is_time(value) for value in each[:2]):
            kind = each[2] if each[2] in get_args(HoldKind) else "command"
            found.append(HeldName(name, int(each[0]), int(each[1]), cast("HoldKind", kind)))
    return tuple(sorted(found, key=lambda held: held.name))


def still_held(holds: Sequence[HeldName], now_ms: int) -> tuple[HeldName, ...]:
    """Those that hold something now: the server keeps one that is over until the next call. What a breaker holds, it
    holds until a call has succeeded, at most for a day."""
    return tuple(each for each in holds if each.until_ms + (UNTRIED_MS if each.kind == "breaker" else 0) > now_ms)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15
