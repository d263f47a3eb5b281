"""Which partitions of a topic that was resized have one owner until their group has finished what was before: decisions
without I/O.

A *family* is a sealed partition that the group has not finished, with all partitions that follow it. Its owner may read
them behind each other; members that had one each would wait until the sealed one is finished.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from rsmq.heartbeat.assignment import Unreadable, assign
from rsmq.model.layout import Block, Layout

NOTE: Final = re.compile(rb"(\d{1,5}):((?:\d{1,8}(?:,\d{1,8})*)?)((?: \d{1,8}=[!-~]+)*)")
NAME: Final = re.compile(r"[!-~]+", re.ASCII)
"""A member that can be named in a note."""
Unit = tuple[int, int]
"""What has one owner: the number of partitions that the topic had, and which of them, from 0."""
NOTHING_KEPT: Final[Mapping[Unit, str]] = MappingProxyType({})


class Families:
    """The families of a group, as the group has noted them: every member that reads the same note, and sees the same
    members, gets the same owners.

    The note is a field of the group's hash, such as `16:3,5 5=vm-1`: of the partitions before there were 16, 3 and 5
    are not finished, each with the same one of all bands. The family of 5 stays with its owner `vm-1`, where a handler
    runs for longer than a handover waits. Of what was sealed later, or without a note, nothing counts as finished. A
    wrong note costs fairness: the server itself is asked before a partition that follows is read.
    """

    def __init__(self, layout: Layout, note: bytes = b"") -> None:
        self._before = {block.count: block for block in layout.before_current}  # the oldest first
        self._now = layout.current.count
        self._at = {number: (block, at) for block in layout.blocks for at, number in enumerate(block.numbers)}
        self._sealed = {block.first: block for block in layout.blocks if block.state == "sealed"}
        self.unfinished: frozenset[Unit] = frozenset()
        self.kept: dict[Unit, str] = {}
        """Families that stay with their owner, though they would have another one."""
        self._read(note)

    def _read(self, note: bytes) -> None:
        found = NOTE.fullmatch(note)
        since, named = (int(found[1]), {*map(int, filter(None, found[2].split(b",")))}) if found else (0, set[int]())
        self.unfinished = frozenset(
            (count, at)
            for count, block in self._before.items()
            for at, number in enumerate(block.numbers)
            if count >= since or number in named
        )
        for number, _, name in (each.partition(b"=") for each in found[3].split()) if found else ():
            unit = self.unit_with(int(number))
            if unit is not None:
                self.kept[unit] = name.decode()

    def note(self, unfinished: Iterable[Unit], kept: Mapping[Unit, str] = NOTHING_KEPT) -> bytes:
        """What the group's hash is to have when these are not finished, and some of them are kept by their owner."""
        numbers = {unit: self._before[unit[0]].numbers[unit[1]] for unit in unfinished}
        names = sorted((numbers[unit], name.encode()) for unit, name in kept.items() if unit in numbers)
        text = b"%d:%b" % (self._now, b",".join(b"%d" % number for number in sorted(numbers.values())))
        return text + b"".join(b" %d=%b" % each for each in names)

    def unit_with(self, number: int) -> Unit | None:
        """The family of a partition. None: it is not, or no longer, in one that is not finished."""
        unit = self.unit_of(self._at[number][1]) if number in self._at else None
        return unit if unit in self.unfinished else None

    def kept_with(self, member: str, partitions: Iterable[int]) -> dict[Unit, str]:
        """The families that are kept when a member keeps those of these partitions, and no other."""
        kept = {unit: name for unit, name in self.kept.items() if name != member}
        if NAME.fullmatch(member):
            kept |= {unit: member for number in partitions if (unit := self.unit_with(number)) is not None}
        return kept

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
            owners |= {
                unit[1]: name for unit, name in self.kept.items()
                if unit[0] == count and name in live and unit[1] not in barred.get(name, ())
            }  # fmt: skip
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
