"""Which partitions of a topic that was resized have one owner until their group has finished what was before: decisions
without I/O.

A *family* is a sealed partition that the group has not finished, with all partitions that follow it. Its owner may read
them behind each other; members that had one each would wait until the sealed one is finished.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from rsmq.heartbeat.assignment import Unreadable, assign
from rsmq.model.layout import Block, Layout

NOTE: Final = re.compile(rb"(\d{1,5}):((?:\d{1,8}(?:,\d{1,8})*)?)")
Unit = tuple[int, int]
"""What has one owner: the number of partitions that the topic had, and which of them, from 0."""


class Families:
    """The families of a group, as the group has noted them: every member that reads the same note, and sees the same
    members, gets the same owners.

    The note is a field of the group's hash, such as `16:3,5`: of the partitions before there were 16, 3 and 5 are not
    finished, each with the same one of all bands. Of what was sealed later, or without a note, nothing counts as
    finished. A wrong note costs fairness: the server itself is asked before a partition that follows is read.
    """

    def __init__(self, layout: Layout, note: bytes = b"") -> None:
        self._before = {block.count: block for block in layout.before_current}  # the oldest first
        self._now = layout.current.count
        self._at = {number: (block, at) for block in layout.blocks for at, number in enumerate(block.numbers)}
        self._sealed = {block.first: block for block in layout.blocks if block.state == "sealed"}
        self.unfinished: frozenset[Unit] = self._read(note)

    def _read(self, note: bytes) -> frozenset[Unit]:
        found = NOTE.fullmatch(note)
        since, named = (int(found[1]), {*map(int, filter(None, found[2].split(b",")))}) if found else (0, set[int]())
        return frozenset(
            (count, at)
            for count, block in self._before.items()
            for at, number in enumerate(block.numbers)
            if count >= since or number in named
        )

    def note(self, unfinished: Iterable[Unit]) -> bytes:
        """What the group's hash is to have when these are not finished."""
        numbers = sorted(self._before[count].numbers[at] for count, at in unfinished)
        return b"%d:%b" % (self._now, b",".join(b"%d" % number for number in numbers))

    def unit_of(self, at: int) -> Unit:
        """Of the partition at this index of its block: the oldest one that is not finished and that its keys had, else
        that of the newest block."""
        for count in self._before:
            if (count, at % count) in self.unfinished:
                return count, at % count
        return self._now, at % self._now

    def owned_by(self, member: str, members: Iterable[str], salt: str, unreadable: Unreadable) -> frozenset[int]:
        """The partitions of a member, of all bands. `unreadable`: the partitions that members cannot read."""
        live, own = tuple(members), dict[int, frozenset[int]]()
        for count in {count for count, _ in self.unfinished} | {self._now}:
            barred = {each: frozenset(self._indexes(numbers, count)) for each, numbers in unreadable.items()}
            owners = assign(count, live, salt, barred)
            own[count] = frozenset(at for at, owner in owners.items() if owner == member)
        return frozenset(
            number for number, (_, at) in self._at.items() if (unit := self.unit_of(at))[1] in own[unit[0]]
        )

    def _indexes(self, numbers: Iterable[int], count: int) -> Iterable[int]:
        return [self._at[number][1] % count for number in numbers if number in self._at]

    # -- what a member finds ------------------------------------------------------------------------------------------

    def found(self, finished: Mapping[int, bool]) -> frozenset[Unit]:
        """What is not finished, by what a member knows of partitions whose lease it holds: whether all that they follow
        are finished.

        A sealed partition is finished when one that follows it is known to follow nothing that is not, in each band;
        and it is not when one asks for it in vain, also if it was: the group was reset, or the server has lost
        settlements.
        """
        answers = dict[tuple[Block, int], set[bool]]()
        for number, answer in finished.items():
            block, at = self._at.get(number, (None, 0))
            before = None if block is None else self._sealed.get(-1 if block.parent is None else block.parent)
            if before is not None and before.count in self._before:
                answers.setdefault((before, at % before.count), set()).add(answer)
        bands = {count: [each for each in self._sealed.values() if each.count == count] for count in self._before}
        waiting = {(block.count, at) for (block, at), given in answers.items() if False in given}
        over = {
            (block.count, at) for block, at in answers
            if all(answers.get((each, at)) == {True} for each in bands[block.count])
        }  # fmt: skip
        return self.unfinished - over | waiting

    def __repr__(self) -> str:
        return f"<Families unfinished={len(self.unfinished)}>"
