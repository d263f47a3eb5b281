"""The partitions of a topic: which numbers there are, and which of them a message may get.

Nothing else counts partitions. What walks those of a topic walks `topic.numbers`; what stores a message asks the block
that is open for it (`topic.open_block()`) for the number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from rsmq.errors import ConfigError
from rsmq.model.partition import MOST_PARTITIONS, partition_for
from rsmq.model.record import whole

NORMAL: Final = "normal"
"""The band of a message whose publisher names none, and of all messages of a topic without bands."""
FORMAT: Final = 2
"""Of the layouts that this version can read. A higher one is refused: what it says about partitions may be anything.
Only a layout with numbers that were chosen by their slot has 2: who knows 1 alone would take others for them."""
MOST_BANDS: Final = 8
END_OF_NUMBERS: Final = 10_000_000
"""The number of a partition has at most seven digits, also in `3/1718000000000-0`."""
WITH_BANDS: Final = ", bands: upgrade this worker"
"""What the distribution of a group ends with where its topic has bands. A worker that knows no bands would read only
one of them; it does not know this distribution either, refuses to start, and shows it in its error. A group that was
reset has nothing before it, and its next member decides."""
EVERY_VERSION: Final = 2**53 - 1
"""What a member says that reads the layout anew before each read: no band waits until it has seen it."""
BAND: Final = re.compile(r"[a-z0-9_-]{1,32}", re.ASCII)

Choose = Callable[[tuple[int, ...], int, int], tuple[int, ...]]
"""Takes partitions, how many are to follow them, and the least number of these."""
UNKNOWN: Final = "lost-"
"""What the name of a band begins with whose layout the server has lost, and no member knows; its first number follows.
Such a block is closed, and read."""
RESIZED: Final = "resized, see layout"
"""The field `partitions` of a topic after the first resize: a client that computes partitions from it stops."""

BlockState = Literal["added", "opening", "open", "closed", "sealed"]
"""`added`: members read it, publishers wait until all of them do. `opening`, on a cluster: the partitions that it is to
follow are being sealed, and it is opened when all of them are. `closed`: nothing more is published to it. `sealed`: the
server refuses what is published to it; the partitions that follow take it."""


class Numbered:
    """What a block computes once: no field, so it is not part of its JSON."""

    __slots__ = ("numbers",)

    numbers: Sequence[int]
    """Its partitions. That of a key is the one at the hash of the key mod `count`."""


@dataclass(frozen=True, slots=True)
class Block(Numbered):
    """Partitions: `count` numbers from `first` on, or those of `chosen`. Each key has one of them.

    A band is a block of its own, with as many partitions as the first block of the topic. A block with a `parent`, the
    first number of another one, takes its place in a resize: its count is a multiple, so each of its partitions follows
    one partition of the parent, which had all of its keys. On a cluster its numbers are `chosen` so that each is in the
    slot of the partition that it follows: then one script reaches both.
    """

    first: int
    count: int
    band: str = NORMAL
    state: BlockState = "open"
    parent: int | None = None
    chosen: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", self.chosen or range(self.first, self.first + self.count))

    @property
    def is_unknown(self) -> bool:
        """Whether nothing remembers which band it was of."""
        return is_unknown(self.band)

    def partition_for(self, key: str | bytes) -> int:
        """The partition of a key in this block."""
        return self.numbers[partition_for(key, self.count)]


class Counted:
    """What a layout computes once: no fields, so it is not part of its JSON."""

    __slots__ = ("_bands", "_blocks", "is_resized", "numbers", "stored")

    is_resized: bool
    """Whether a resize has sealed a block."""
    numbers: tuple[int, ...]
    stored: str
    _bands: Mapping[int, str]
    _blocks: Mapping[int, Block]


@dataclass(frozen=True, slots=True)
class Layout(Counted):
    """The blocks of a topic, in the order in which they were added. Numbers are never used twice.

    `bands`, the highest first, are those that messages may be published to. `version` counts the changes; 0 is a topic
    that was never changed. `numbers` are all partitions, rising; two in a row need not follow each other. `stored` is
    the text that was read, or would be written; empty for a topic that stores none.
    """

    blocks: tuple[Block, ...]
    bands: tuple[str, ...] = (NORMAL,)
    version: int = 0

    def __post_init__(self) -> None:
        bands = {number: block.band for block in self.blocks for number in block.numbers}
        object.__setattr__(self, "numbers", tuple(sorted(bands)))
        object.__setattr__(self, "is_resized", any(block.state == "sealed" for block in self.blocks))
        object.__setattr__(self, "stored", self.to_text() if self.version else "")
        object.__setattr__(self, "_bands", bands)
        object.__setattr__(self, "_blocks", {block.first: block for block in self.blocks})

    @property
    def normal(self) -> Block:
        """The block that the topic was made with: who knows no other one publishes there."""
        return self.blocks[0]

    @property
    def has_more(self) -> bool:
        """Whether there is more than the block that the topic was made with: bands, or a resize."""
        return len(self.blocks) > 1

    @property
    def has_bands(self) -> bool:
        """Whether there is more than one band, now or before."""
        return any(block.band != NORMAL for block in self.blocks)

    @property
    def added_numbers(self) -> list[int]:
        """The partitions of all blocks but the first."""
        return [number for block in self.blocks[1:] for number in block.numbers]

    @property
    def order(self) -> tuple[str, ...]:
        """All bands that have a block, the highest first; those that were taken away come last."""
        return (*self.bands, *[block.band for block in self.blocks if block.band not in self.bands])

    def block_of(self, band: str) -> Block | None:
        """The block of a band, in any state: the one that messages go to, else the one that they will go to, else the
        one that they went to last."""
        blocks = [block for block in self.blocks if block.band == band]
        for state in ("open", "added"):
            if found := [block for block in blocks if block.state == state]:
                return found[0]
        closed = [block for block in blocks if block.state == "closed"]
        last = [block for block in closed if block.parent is not None and self._blocks[block.parent].state == "sealed"]
        return last[-1] if last else next(iter(closed or blocks), None)

    @property
    def current(self) -> Block:
        """The block of messages whose publisher names no band."""
        return self.block_of(NORMAL) or self.normal

    def numbers_for(self, route: str | bytes) -> list[int]:
        """Where messages of a key may be, or of an id if they have none: one partition of each block."""
        return [block.partition_for(route) for block in self.blocks]

    def band_of(self, number: int) -> str:
        """The band of a partition; of one that the topic does not have, `normal`."""
        return self._bands.get(number, NORMAL)

    @property
    def before_current(self) -> list[Block]:
        """The sealed blocks that messages whose publisher names no band went to before, the oldest first."""
        found, block = list[Block](), self.current
        while block.parent is not None and self._blocks[block.parent].state == "sealed":
            block = self._blocks[block.parent]
            found.insert(0, block)
        return found

    # -- what follows what ----------------------------------------------------------------------------------------

    def ancestors_of(self, number: int) -> list[int]:
        """The partitions that this one follows, the latest first: they had the messages of its keys before."""
        found, block = list[int](), self._block_with(number)
        while block is not None and block.parent is not None:
            parent = self._blocks[block.parent]
            number = parent.numbers[block.numbers.index(number) % parent.count]
            found.append(number)
            block = parent
        return found

    def root_of(self, number: int) -> int:
        """The partition of the first block that its keys have. What is remembered under the id of a message is
        remembered there: it stays the same in each resize."""
        return (self.ancestors_of(number) or [number])[-1]

    def descendants_of(self, number: int) -> list[int]:
        """The partitions that follow this one, rising. Each partition of a topic is asked for while publishers wait: so
        this looks at those that follow it only."""
        found, block = list[int](), self._block_with(number)
        for other in self.blocks if block is not None else ():
            if block is not None and other.parent == block.first:
                for each in other.numbers[block.numbers.index(number) :: block.count]:
                    found += [each, *self.descendants_of(each)]
        return sorted(found)

    def partition_after(self, number: int, route: str | bytes) -> int:
        """Where a message goes that was in a sealed partition, or was meant for it: to one that follows it, in the same
        band. `route`: its key, or its id if it has none."""
        block = self._block_with(number) or self.current
        while block.state == "sealed":
            block = [each for each in self.blocks if each.parent == block.first][-1]
        found = block.partition_for(route)
        if found == number or number in self.ancestors_of(found):
            return found
        after = {*self.descendants_of(number)}
        family = [each for each in block.numbers if each in after]  # another client chose it
        return family[partition_for(route, len(family))] if family else found

    def keys_after(self, number: int, following: int) -> Callable[[bytes], bool]:
        """Tells keys of a sealed partition that may come in one of those that follow it. One that another client has
        put there may come in each of these."""
        block = self._block_with(following) or self.current
        others = {*self.descendants_of(number)} & {*block.numbers} - {following}
        return lambda key: block.partition_for(key) not in others

    @property
    def sealed_numbers(self) -> frozenset[int]:
        """The partitions that the server refuses messages for."""
        return frozenset(numbers_of(block for block in self.blocks if block.state == "sealed"))

    def is_sealed(self, number: int) -> bool:
        """Whether the server refuses what is published to a partition."""
        block = self._block_with(number)
        return block is not None and block.state == "sealed"

    def _block_with(self, number: int) -> Block | None:
        return next((block for block in self.blocks if number in block.numbers), None)

    @property
    def waits(self) -> bool:
        """Whether a block is to be opened."""
        return any(block.state in ("added", "opening") for block in self.blocks)

    @property
    def is_opening(self) -> bool:
        """Whether partitions are being sealed one after the other: a resize that has come so far is not given up."""
        return any(block.state == "opening" for block in self.blocks)

    def is_used(self, number: int) -> bool:
        """Whether messages have been published to a partition, as far as this layout knows."""
        block = self._block_with(number)
        return block is not None and block.state not in ("added", "opening")

    def is_being_sealed(self, number: int) -> bool:
        """Whether the server may refuse what is published to a partition though none that follows is open yet."""
        return self.is_opening and number in self.to_seal

    # -- changes --------------------------------------------------------------------------------------------------

    def with_bands(self, bands: Sequence[str], used: Collection[int] = ()) -> Layout:
        """The layout with these bands, the highest first: new ones are added, those that are not named are closed.

        `used`: further numbers that have messages, of a band that nothing remembers. They become a closed band, such as
        `lost-8`, which members read.
        """
        checked = checked_bands(bands)
        if checked == self.bands:
            return self
        if self.following is not None:
            raise ConfigError("the topic is being resized: change its bands when that has ended")
        blocks = [
            replace(block, state="closed") if block.band not in checked and block.state != "sealed" else block
            for block in self.blocks
        ]
        for at, block in enumerate(blocks):
            if block.state == "closed" and block.band in checked and block == self.block_of(block.band):
                blocks[at] = replace(block, state="added")
        known = {block.band for block in blocks}
        for band in checked:
            if band not in known:
                count, first = self.current.count, max(numbers_of(blocks)) + 1
                while not set(range(first, first + count)).isdisjoint(used):
                    blocks.append(Block(first, count, f"{UNKNOWN}{first}", "closed"))
                    first += count
                blocks.append(Block(first, count, band, "added"))
        return Layout(tuple(blocks), checked, self.version + 1)

    def with_more(self, bands: Sequence[str]) -> Layout:
        """The layout with these bands as well. A declaration takes none away: another one may have named it."""
        if not bands or set(bands) <= set(self.bands):
            return self
        return self.with_bands((*bands, *[each for each in self.bands if each not in bands]))

    def opened(self) -> Layout:
        """The layout with all blocks open that were added."""
        blocks = [replace(block, state="open") if block.state == "added" else block for block in self.blocks]
        return Layout(tuple(blocks), self.bands, self.version + 1)

    # -- what the server has lost ---------------------------------------------------------------------------------

    @property
    def known_as(self) -> dict[str, object]:
        """What a member says that knows this layout: its version, and the first number and the band of each block, such
        as `0:normal 8:urgent`. Versions alone may be equal where two layouts were made of one, after a loss."""
        return {"layout": self.version, **({"blocks": self._starts} if self.version else {})}

    def is_known_by(self, info: Mapping[str, object]) -> bool:
        """Whether a member that says this of itself reads each block as the one that it is here."""
        version = info.get("layout")
        is_new = isinstance(version, int) and version >= self.version
        return is_new and info.get("blocks", self._starts) == self._starts

    @property
    def _starts(self) -> str:
        return " ".join(f"{block.first}:{block.band}" for block in sorted(self.blocks, key=lambda each: each.first))

    def with_lost(self, known: Layout) -> Layout:
        """This layout, as it is stored, with what a member knows and the server has lost; itself if that is nothing.

        No number gets two bands. Another band may have got the numbers meanwhile: where that is not open yet, nothing
        was stored for it, and it moves to new numbers; else the lost one does. Of a topic that was
        resized the layout with the higher version counts whole: no later message is on a server that has lost it.
        """
        if any(block.parent is not None for block in (*self.blocks, *known.blocks)):
            return known if known.version > self.version else self
        own, end = {block.band for block in self.blocks}, max(*self.numbers, *known.numbers) + 1
        blocks = [block for block in self.blocks if block.state != "added" and not block.is_unknown]
        for block in known.blocks:
            is_used = block.state != "added"
            if (block.first, block.band) in starts_of(blocks if is_used else self.blocks):
                continue
            is_taken = block.first in numbers_of(blocks if is_used else self.blocks)
            if (is_taken or not is_used) and block.band in own:
                continue
            if is_taken:
                block, end = replace(block, first=end, state="added" if is_used else block.state), end + block.count
            elif is_used and has_current(blocks, block.band):
                block = replace(block, state="closed")
            blocks.append(block)
        for block in self.blocks:
            if block.is_unknown and block.first not in numbers_of(blocks):
                blocks.append(block)
            if block.state == "added" and not has_current(blocks, block.band):
                if block.first in numbers_of(blocks):
                    block, end = replace(block, first=end), end + block.count
                blocks.append(block)
        if starts_of(blocks) == starts_of(self.blocks) and self.version >= known.version:
            return self
        if starts_of(blocks) == starts_of(known.blocks) and self.version < known.version:
            return known
        missing = [band for band in known.bands if band not in self.bands and band not in own]
        at = 0 if missing and known.bands.index(missing[0]) < known.bands.index(NORMAL) else len(self.bands)
        bands = (*self.bands[:at], *missing, *self.bands[at:])
        return Layout(tuple(blocks), bands, max(self.version, known.version) + 1)

    def with_partitions(self, count: int, choose: Choose | None = None) -> Layout:
        """The layout with a block of `count` partitions for each band, to follow the one that messages go to now.

        A band that was closed keeps its partitions. `choose`, on a cluster: the numbers of new partitions, each in the
        slot of the one that it follows. Raises ConfigError for a number that is not possible, and while a band is not
        open yet.
        """
        now = self.current
        if self.waits:
            raise ConfigError("a band of the topic is not open yet: resize it when all members know the band")
        if count % now.count or count // now.count < 2 or count > MOST_PARTITIONS:
            doubled = [str(now.count * times) for times in (2, 3, 4) if now.count * times <= MOST_PARTITIONS]
            raise ConfigError(
                f"a topic with {now.count} partitions cannot have {count}: it grows by a whole factor, so that each "
                f"new partition follows one. " + (f"Use {', '.join(doubled)}" if doubled else "It has the most")
            )
        first, blocks = max(self.numbers) + 1, list(self.blocks)
        for block in [each for band in self.bands if (each := self.block_of(band)) is not None]:
            chosen = choose(tuple(block.numbers), count, first) if choose else ()
            added = Block(chosen[0] if chosen else first, count, block.band, "added", block.first, chosen)
            blocks.append(added)
            first = max(added.numbers) + 1
        if first > END_OF_NUMBERS:
            raise ConfigError(
                f"the numbers of its partitions would exceed {END_OF_NUMBERS - 1}: publish to a new topic"
            )
        return self._changed(tuple(blocks))

    def opening(self) -> Layout:
        """The layout while the partitions that others follow are sealed one after the other."""
        added = self.all_following
        return self._changed(tuple(replace(each, state="opening") if each in added else each for each in self.blocks))

    @property
    def all_following(self) -> list[Block]:
        """The blocks, one of each band, that are to follow others as soon as these are sealed."""
        return [
            block for block in self.blocks
            if block.state in ("added", "opening")
            and block.parent is not None and self._blocks[block.parent].state != "sealed"
        ]  # fmt: skip

    @property
    def following(self) -> Block | None:
        """The first of these; None: there is no resize that has not ended."""
        return next(iter(self.all_following), None)

    @property
    def to_seal(self) -> list[int]:
        """The partitions that those are to follow."""
        return [number for block in self.all_following for number in self._blocks[block.parent or 0].numbers]

    def sealed(self) -> Layout:
        """The layout after the seal: messages go to the blocks that were added."""
        added = self.all_following
        parents = {block.parent for block in added}
        blocks = [
            replace(block, state="open") if block in added
            else replace(block, state="sealed") if block.first in parents else block
            for block in self.blocks
        ]  # fmt: skip
        return self._changed(tuple(blocks))

    def without_following(self) -> Layout:
        """The layout after a resize was given up. The numbers of its blocks belong to nothing else."""
        added = self.all_following
        return self._changed(tuple(replace(each, state="closed") if each in added else each for each in self.blocks))

    def _changed(self, blocks: tuple[Block, ...]) -> Layout:
        return Layout(blocks, self.bands, self.version + 1)

    # -- as it is stored ------------------------------------------------------------------------------------------

    @property
    def partitions(self) -> str:
        """What the field `partitions` of a topic's hash has."""
        return RESIZED if self.is_resized else str(self.normal.count)

    def to_text(self) -> str:
        """What the field `layout` of a topic's hash has."""
        blocks = [
            {"first": each.first, "count": each.count, "band": each.band, "state": each.state, "parent": each.parent}
            | ({"numbers": each.chosen} if each.chosen else {})
            for each in self.blocks
        ]
        number = FORMAT if any(each.chosen for each in self.blocks) else 1
        return json.dumps({"format": number, "version": self.version, "bands": self.bands, "blocks": blocks})


def starts_of(blocks: Iterable[Block]) -> set[tuple[int, str]]:
    """The first number and the band of each block."""
    return {(block.first, block.band) for block in blocks}


def numbers_of(blocks: Iterable[Block]) -> set[int]:
    """The partitions of all these."""
    return {number for block in blocks for number in block.numbers}


def has_current(blocks: Iterable[Block], band: str) -> bool:
    """Whether one of these is the block of a band to which messages are, or will be, published."""
    return any(block.band == band and block.state != "closed" for block in blocks)


def made_with(partitions: int, bands: Sequence[str]) -> Layout:
    """The layout of a new topic: no member has to know its bands before they are open."""
    return single(partitions).with_more(bands).opened() if bands else single(partitions)


NO_LAYOUT: Final = Layout(())
"""A topic that has never been changed stores no layout."""


def single(partitions: int) -> Layout:
    """The layout of a topic that stores none: one block from 0 on."""
    return Layout((Block(0, partitions),))


def read_layout(name: str, partitions: bytes, layout: bytes | None) -> Layout:
    """From the fields of a topic's hash. Raises ConfigError for what this version of rsmq cannot read.

    `partitions` may become a text in a later version: then a process that does not know what replaces it stops.
    """
    is_resized = partitions == RESIZED.encode() and layout is not None
    if not partitions.isdigit() and not is_resized:
        raise ConfigError(
            f"topic {name!r} has {shown(partitions)} instead of a number of partitions: a newer version of rsmq has "
            f"changed it. Nothing was read or published: upgrade this process"
        )
    number = 1 if is_resized else whole(partitions)
    if number is None or not 1 <= number <= MOST_PARTITIONS:
        raise ConfigError(f"topic {name!r} has {shown(partitions)} partitions: it can have 1 to {MOST_PARTITIONS}")
    if layout is None:
        return single(number)
    try:
        found = json.loads(layout)
        if found["format"] not in (1, FORMAT):
            raise ConfigError(
                f"topic {name!r} has a layout of format {found['format']}, and this version of rsmq knows {FORMAT}: "
                f"upgrade this process"
            )
        read = Layout(tuple(map(read_block, found["blocks"])), tuple(map(str, found["bands"])), int(found["version"]))
        for at, block in enumerate(read.blocks):
            before = [each for each in read.blocks[:at] if each.first == block.parent]
            if block.parent is not None and (not before or block.count % before[0].count):
                raise ValueError(f"{block} follows no block")
        object.__setattr__(read, "stored", layout.decode())
        return read
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"the layout of topic {name!r} is not as rsmq has written it ({type(error).__name__}: {error}): "
            f"{shown(layout)}"
        ) from None


def read_block(found: Any) -> Block:
    """One block as it is stored. Raises ValueError for what cannot be."""
    parent, chosen = found.get("parent"), tuple(map(int, found.get("numbers", ())))
    block = Block(
        int(found["first"]), int(found["count"]), str(found["band"]), found["state"],
        None if parent is None else int(parent), chosen,
    )  # fmt: skip
    is_possible = 1 <= block.count <= MOST_PARTITIONS and all(0 <= each < END_OF_NUMBERS for each in block.numbers)
    if chosen:
        is_possible = is_possible and len({*chosen}) == block.count and chosen[0] == block.first
    if not is_possible or block.state not in ("added", "opening", "open", "closed", "sealed"):
        raise ValueError(f"a block cannot be {found}")
    return block


def stored_distribution(distribution: str, layout: Layout) -> str:
    """The distribution of a group, as its hash has it."""
    return plain_distribution(distribution) + (WITH_BANDS if layout.has_bands else "")


def plain_distribution(stored: str) -> str:
    """`hash` or `shared`, of what a group's hash has."""
    return stored.removesuffix(WITH_BANDS)


def is_unknown(band: str) -> bool:
    """Whether this stands for a band that nothing remembers."""
    return band.startswith(UNKNOWN)


def shown(text: bytes) -> str:
    """The start of a field, for an error."""
    return repr(text[:80].decode(errors="replace"))


def checked_band(band: str) -> str:
    """The name of a band whose topic is not at hand. Raises ConfigError."""
    if not isinstance(band, str) or not BAND.fullmatch(band):
        raise ConfigError(f"band={band!r} is no name of a band: use small letters, digits, - and _, such as 'urgent'")
    return band


def checked_bands(bands: Sequence[str]) -> tuple[str, ...]:
    """The names of bands, the highest first. Raises ConfigError."""
    names = () if isinstance(bands, str) else tuple(bands)
    wrong = [each for each in names if not isinstance(each, str) or not BAND.fullmatch(each)]
    if wrong or not names or len(set(names)) < len(names) or len(names) > MOST_BANDS:
        raise ConfigError(
            f"bands={bands!r} is not possible: give 1 to {MOST_BANDS} different names of small letters, digits, - and "
            f"_, the most urgent first, such as ('urgent', 'normal', 'bulk')"
        )
    if NORMAL not in names:
        raise ConfigError(
            f"bands={bands!r} lacks {NORMAL!r}: messages whose publisher names no band, and those of older clients, "
            f"go there. Put it where they belong, such as ('urgent', 'normal', 'bulk')"
        )
    return names
