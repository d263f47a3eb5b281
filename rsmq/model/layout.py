"""The partitions of a topic: which numbers there are, and which of them a message may get.

Nothing else counts partitions. What walks those of a topic walks `topic.numbers`; what stores a message asks the block
that is open for it (`topic.open_block()`) for the number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from rsmq.model.partition import partition_for


@dataclass(frozen=True, slots=True)
class Block:
    """Partitions in a row: `count` numbers from `first` on. Each key has one of them."""

    first: int
    count: int

    @property
    def numbers(self) -> range:
        """Its partitions."""
        return range(self.first, self.first + self.count)

    def partition_for(self, key: str | bytes) -> int:
        """The partition of a key in this block."""
        return self.first + partition_for(key, self.count)


@dataclass(frozen=True, slots=True)
class Layout:
    """The blocks of a topic. `numbers`: all its partitions, rising; two in a row need not follow each other."""

    blocks: tuple[Block, ...]
    numbers: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = sorted(number for block in self.blocks for number in block.numbers)
        object.__setattr__(self, "numbers", tuple(numbers))

    @property
    def normal(self) -> Block:
        """The block that the topic was made with: who knows no other one publishes there."""
        return self.blocks[0]


NO_LAYOUT: Final = Layout(())
"""A topic that has never been changed stores no layout."""


def single(partitions: int) -> Layout:
    """The layout of a topic that stores none: one block from 0 on."""
    return Layout((Block(0, partitions),))
