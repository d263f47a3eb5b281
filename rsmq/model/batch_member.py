"""The field `batch` of a message: of which batch it is a member, of which group, and which member it is. Pure."""

from __future__ import annotations

import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, groupby, repeat
from operator import itemgetter
from typing import Final, Literal, NamedTuple, cast

from rsmq.errors import ConfigError
from rsmq.model.keys import plain_text
from rsmq.model.partition import partition_for

FIELD: Final = b"batch"
SHARDS: Final = 8
"""Batches are spread over so many slots."""
BLOCK: Final = 1000
"""Numbers of members that share a random name. A block belongs to one process."""
NUMBERS: Final = {str(number).encode(): number for number in range(BLOCK)}
"""Each number of a block by how a field writes it."""
LONGEST_NAME: Final = 200
ANY_GROUP: Final = "*"
"""The group of a fallback's message: the first one that ends it counts."""
FRONT: Final = re.compile(rb"([do])(\d+\.\w{1,40}) ([A-Za-z0-9._*-]{1,128}) (\w{1,40})", re.ASCII)
"""The field up to the number of the member."""
HOME: Final = re.compile(r"\d+\.\w{1,40}", re.ASCII)
"""Shard and id of a batch."""

Outcome = Literal["done", "failed", "cancelled", "expired"]


def check_batch_name(name: str) -> str:
    """The name of a batch, or ConfigError."""
    if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
        raise ConfigError(f"batch name {name!r} is not possible: use 1 to {LONGEST_NAME} printable characters")
    return plain_text(name)


def shard_of(name: str) -> int:
    """Where a batch of this name is."""
    return partition_for(name, SHARDS)


def new_home(name: str) -> str:
    """Shard and id of a new batch. The id is random: a name may be used again."""
    return f"{shard_of(name)}.{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class MemberBlock:
    """What members of one block share. `is_direct`: their batch is on the server of their topic; otherwise, on a
    cluster, in another slot."""

    is_direct: bool
    home: str
    group: str
    name: str
    front: str
    """The field `batch` of its members, up to their number."""
    packed: bytes
    """The same with the blank before the number."""

    @classmethod
    def of(cls, is_direct: bool, home: str, group: str, name: str) -> MemberBlock:
        """By its parts."""
        front = f"{'d' if is_direct else 'o'}{home} {group} {name}"
        return cls(is_direct, home, group, name, front, f"{front} ".encode())


@lru_cache(1024)
def read_block(front: bytes) -> MemberBlock | None:
    """A block by what its members' fields begin with. None: it is no such field."""
    found = FRONT.fullmatch(front)
    if found is None:
        return None
    how, home, group, name = (part.decode() for part in found.groups())
    return MemberBlock.of(how == "d", home, group, name)


class BatchMember(NamedTuple):
    """One member: its block, and its number there."""

    block: MemberBlock
    number: int

    @classmethod
    def read(cls, value: bytes) -> BatchMember | None:
        """By the field; None for a field that another client has written for itself."""
        front, _, digits = value.rpartition(b" ")
        block, number = read_block(front), NUMBERS.get(digits)
        return None if block is None or number is None else new_member((block, number))

    def in_group(self, group: str) -> BatchMember:
        """The same member, whose end in another group counts."""
        block = self.block
        return BatchMember(MemberBlock.of(block.is_direct, block.home, group, block.name), self.number)

    @property
    def field(self) -> str:
        """The value of the field."""
        return f"{self.block.front} {self.number}"

    @property
    def home(self) -> str:
        """Shard and id of its batch."""
        return self.block.home

    @property
    def address(self) -> str:
        """Which member of its batch it is."""
        return f"{self.block.name}.{self.number}"

    def of_group(self, group: str) -> bool:
        """Whether the end of the message in this group counts."""
        return self.block.group in (group, ANY_GROUP)


def batch_mark(home: str) -> str:
    """The field in `cancels` that cancels all members of a batch."""
    return f"batch|{home}"


new_member: Final = cast("Callable[[tuple[MemberBlock, int]], BatchMember]", partial(tuple.__new__, BatchMember))
"""A member of a block and its number. It runs for each member, and costs a third of calling the class."""


class Numbers:
    """Hands out members of one batch. No two processes give the same: each has blocks of its own."""

    def __init__(self, home: str, group: str, *, is_direct: bool) -> None:
        self._about = (is_direct, home, group)
        self.next: Callable[[], BatchMember] = chain.from_iterable(self._blocks()).__next__
        """A member that there was not before."""

    def _blocks(self) -> Iterator[Iterable[BatchMember]]:
        while True:
            block = MemberBlock.of(*self._about, secrets.token_hex(6))
            yield map(new_member, zip(repeat(block), range(BLOCK), strict=False))


def by_block(members: Iterable[BatchMember]) -> dict[str, list[int]]:
    """The numbers of members, by the name of their block."""
    found = defaultdict[str, list[int]](list)
    for block, run in groupby(members, itemgetter(0)):
        found[block.name] += map(itemgetter(1), run)
    return found


def changes(numbers: Mapping[str, Iterable[int]]) -> Iterator[str | int]:
    """Members that were added, for `count_members.lua`: block, first and last number, outcome; runs are one change."""
    for name, of_block in numbers.items():
        added = sorted(set(of_block))
        first = last = added[0]
        if added[-1] - first < len(added):
            last = added[-1]
        else:
            for number in added[1:]:
                if number > last + 1:
                    yield from (name, first, last, "counted")
                    first = number
                last = number
        yield from (name, first, last, "counted")
