"""The field `batch` of a message: of which batch it is a member, of which group, and which member it is. Pure."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from rsmq.errors import ConfigError
from rsmq.model.partition import partition_for

FIELD: Final = b"batch"
SHARDS: Final = 8
"""Batches are spread over so many slots."""
BLOCK: Final = 1000
"""Numbers of members that share a random name. A block belongs to one process."""
LONGEST_NAME: Final = 200
ANY_GROUP: Final = "*"
"""The group of a fallback's message: the first one that ends it counts."""
SHAPE: Final = re.compile(rb"([do])(\d+\.\w{1,40}) ([A-Za-z0-9._*-]{1,128}) (\w{1,40}) (\d{1,3})", re.ASCII)

HOME: Final = re.compile(r"\d+\.\w{1,40}", re.ASCII)
"""Shard and id of a batch."""

Outcome = Literal["done", "failed", "cancelled", "expired"]


def check_batch_name(name: str) -> str:
    """The name of a batch, or ConfigError."""
    if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
        raise ConfigError(f"batch name {name!r} is not possible: use 1 to {LONGEST_NAME} printable characters")
    return name


def shard_of(name: str) -> int:
    """Where a batch of this name is."""
    return partition_for(name, SHARDS)


def new_home(name: str) -> str:
    """Shard and id of a new batch. The id is random: a name may be used again."""
    return f"{shard_of(name)}.{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class BatchMember:
    """One member. `is_direct`: its batch is on the server of its topic; otherwise, on a cluster, in another slot."""

    is_direct: bool
    home: str
    group: str
    block: str
    number: int
    field: str
    """The value of the field."""

    @classmethod
    def of(cls, is_direct: bool, home: str, group: str, block: str, number: int) -> BatchMember:
        """By its parts."""
        field = f"{'d' if is_direct else 'o'}{home} {group} {block} {number}"
        return cls(is_direct, home, group, block, number, field)

    def in_group(self, group: str) -> BatchMember:
        """The same member, whose end in another group counts."""
        return BatchMember.of(self.is_direct, self.home, group, self.block, self.number)

    @classmethod
    def read(cls, value: bytes) -> BatchMember | None:
        """By the field; None for a field that another client has written for itself."""
        found = SHAPE.fullmatch(value)
        if found is None:
            return None
        how, home, group, block, number = (part.decode() for part in found.groups())
        return cls(how == "d", home, group, block, int(number), value.decode())

    @property
    def address(self) -> str:
        """Which member of its batch it is."""
        return f"{self.block}.{self.number}"

    def of_group(self, group: str) -> bool:
        """Whether the end of the message in this group counts."""
        return self.group in (group, ANY_GROUP)


def batch_mark(home: str) -> str:
    """The field in `cancels` that cancels all members of a batch."""
    return f"batch|{home}"


def is_batch_mark(field: bytes) -> bool:
    """Whether a field of that hash marks a batch."""
    return field.startswith(b"batch|")


class Numbers:
    """Hands out members of one batch. No two processes give the same: each has blocks of its own."""

    def __init__(self, home: str, group: str, *, is_direct: bool) -> None:
        self._home = home
        self._group = group
        self._is_direct = is_direct
        self._block = ""
        self._next = BLOCK

    def next(self) -> BatchMember:
        """A member that there was not before."""
        if self._next >= BLOCK:
            self._block = secrets.token_hex(6)
            self._next = 0
        member = BatchMember.of(self._is_direct, self._home, self._group, self._block, self._next)
        self._next += 1
        return member


def changes(members: Iterable[BatchMember]) -> Iterator[str | int]:
    """Members that were added, for `count_members.lua`: block, first and last number, outcome; runs are one change."""
    block, first, last = "", 0, -1
    for member in sorted(members, key=lambda each: (each.block, each.number)):
        if member.block == block and member.number == last + 1:
            last += 1
            continue
        if block:
            yield from (block, first, last, "counted")
        block, first, last = member.block, member.number, member.number
    if block:
        yield from (block, first, last, "counted")
