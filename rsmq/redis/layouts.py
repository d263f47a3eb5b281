"""The layout of a topic on the server: changed by compare-and-set, and what must be there before it counts."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Protocol

from tenacity import AsyncRetrying

from rsmq.errors import SlotMoving
from rsmq.model.batch_member import batch_mark
from rsmq.model.keys import Keys
from rsmq.model.layout import RESIZED, Choose, Layout, stored_distribution
from rsmq.model.member import read_info
from rsmq.model.record import text
from rsmq.redis.client.connector import Client
from rsmq.redis.pubsub import listeners
from rsmq.redis.scripts import (
    ARE_FINISHED,
    CHANGE_LAYOUT,
    MEASURE_MEMBERS,
    NOTE_UNFINISHED,
    OK,
    RESIZE_TOPIC,
    SEAL_PARTITION,
)
from rsmq.redis.streams import ask_all, group_names_of, hash_fields, make_groups
from rsmq.redis.wire.slots import SLOTS

GONE: Final = -2
"""What PTTL says of a key that does not exist: the heartbeat of a dead member has expired."""


class LaidOut(Protocol):
    """A topic, as far as this module needs it."""

    @property
    def name(self) -> str: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def numbers(self) -> tuple[int, ...]: ...


async def change_layout(client: Client, keys: Keys, name: str, read: Layout, wanted: Layout) -> bool:
    """Store a layout if the one that was read is still there. False: read it again."""
    args = (read.stored, wanted.stored, *((wanted.partitions,) if wanted.is_resized else ()))
    return bool(await CHANGE_LAYOUT(client, (keys.topic(name),), args) == OK)


def numbers_beside(keys: Keys, topic: str) -> Choose:
    """Chooses numbers for new partitions of a topic on a cluster: each in the slot of the one that it follows."""
    stem = keys.stream(topic, 0).removesuffix("0}").partition("{")[2]
    return partial(numbers_in_slots, stem.encode())


@lru_cache(maxsize=16)
def numbers_in_slots(stem: bytes, parents: tuple[int, ...], count: int, first: int) -> tuple[int, ...]:
    """Numbers from `first` on, each in the slot of the one that it is to follow. `stem`: what is before the number in
    the text that decides the slot. About one number in 16 384 is in a given slot: a thousand take a second."""
    begun, wanted = crc_hqx(stem, 0), dict[int, list[int]]()
    for index in reversed(range(count)):
        wanted.setdefault(crc_hqx(b"%d" % parents[index % len(parents)], begun) % SLOTS, []).append(index)
    found, left, number = [0] * count, count, first
    while left:
        if indexes := wanted.get(crc_hqx(b"%d" % number, begun) % SLOTS):
            found[indexes.pop()] = number
            left -= 1
        number += 1
    return tuple(found)


async def prepare_groups(client: Client, keys: Keys, topic: LaidOut) -> list[str]:
    """Make each group in the partitions of all bands, from their start: retention must know it before anything is
    stored there.

    Returns the groups. Those of the first block are all: a group is made in every partition that its maker knows. One
    that was deleted meanwhile is taken away again, or it would keep all messages of the band for good.
    """
    groups, made = await _first_groups(client, keys, topic), dict[str, list[int]]()
    for group in groups:
        made[group] = await make_groups(client, keys, topic.name, topic.layout.added_numbers, group, "0")
    if any(made.values()):
        left = await _first_groups(client, keys, topic)
        gone = [(group, number) for group, numbers in made.items() if group not in left for number in numbers]
        for group, number in gone:
            await client.execute_command("XGROUP", "DESTROY", keys.stream(topic.name, number), group)
        groups = [group for group in groups if group in left]
    hashes = [keys.group(topic.name, group) for group in groups]
    known = await ask_all(client, [("HGET", name, "distribution") for name in hashes])
    marked = [
        (name, stored_distribution(each.decode(), topic.layout))
        for name, each in zip(hashes, known, strict=True)
        if each
    ]
    await ask_all(client, [("HSET", name, "distribution", each) for name, each in marked])
    return groups


async def _first_groups(client: Client, keys: Keys, topic: LaidOut) -> list[str]:
    """The groups that are in any partition of the first block."""
    return sorted(await group_names_of(client, keys, topic.name, topic.layout.normal.numbers))


async def seal(client: Client, keys: Keys, topic: LaidOut) -> str:
    """Seal the blocks that others are to follow, and let messages go to these. Returns what this waits for; empty: it
    is done, by this call or by another one. No group may be made meanwhile."""
    layout = topic.layout
    if layout.following is None:
        return ""
    names = [keys.topic(topic.name)]
    for number in layout.to_seal:
        names += [keys.stream(topic.name, number), keys.removed(topic.name, number)]
    names += [keys.stream(topic.name, number) for block in layout.all_following for number in block.numbers]
    wanted = layout.sealed()
    args = (layout.stored, wanted.stored, wanted.partitions, len(layout.to_seal))
    word, *rest = await RESIZE_TOPIC(client, names, args)
    return f"group {text(rest[0])} was made meanwhile" if word == b"GROUPS" else ""


async def make_streams(client: Client, keys: Keys, topic: LaidOut, patience: AsyncRetrying) -> None:
    """Make the streams of the partitions that are to follow others. Those without a group have none yet."""
    await each_slot(topic.layout.to_seal, partial(call_each, client, keys, topic.name, topic.layout, "make"), patience)


async def call_each(
    client: Client, keys: Keys, topic: str, layout: Layout, step: str, numbers: Sequence[int]
) -> list[Any]:
    """The replies to a step of each partition, asked together: publishers may wait for the last one."""
    return await SEAL_PARTITION.for_each(
        client, [seal_keys(keys, topic, layout, number) for number in numbers], (step,)
    )


async def each_slot(
    numbers: Iterable[int], call: Callable[[Sequence[int]], Awaitable[list[Any]]], patience: AsyncRetrying
) -> str:
    """Call it for these partitions of a cluster; those whose slot is moving keep up no other, and are called again
    until it has moved. Returns what has to be made first, if anything. Raises SlotMoving at the end of the patience."""
    left = list(numbers)
    async for attempt in patience:
        with attempt:
            replies = await call(left)
            left = [number for number, reply in zip(left, replies, strict=True) if isinstance(reply, SlotMoving)]
            moving = [reply for reply in replies if isinstance(reply, SlotMoving)]
            for reply in replies:
                if isinstance(reply, Exception):
                    if not isinstance(reply, SlotMoving):
                        raise reply
                elif reply[0] != OK:
                    return f"{'group' if reply[0] == b'GROUPS' else 'stream'} {text(reply[1])} is made again"
            if moving:
                raise moving[0]
    return ""


def seal_keys(keys: Keys, topic: str, layout: Layout, number: int) -> list[str]:
    """The keys of a call that seals one partition."""
    added = {each for block in layout.all_following for each in block.numbers}
    after = [keys.stream(topic, each) for each in layout.descendants_of(number) if each in added]
    return [keys.stream(topic, number), keys.removed(topic, number), *after]


async def seal_by_slot(client: Client, keys: Keys, topic: LaidOut, patience: AsyncRetrying) -> str:
    """The same on a cluster, where each partition is in a slot of its own: the layout says that they are being sealed,
    then each is sealed, then messages go to those that follow. A call that ends on the way is repeated by anybody.
    `patience`: how long one waits for a slot that is moving.
    """
    layout = topic.layout
    if not layout.is_opening:
        if not await change_layout(client, keys, topic.name, layout, layout.opening()):
            return "another process, which has changed the layout"
        layout = layout.opening()

    call = partial(call_each, client, keys, topic.name, layout, "seal")
    if waits_for := await each_slot(layout.to_seal, call, patience):
        return waits_for
    async for attempt in patience:
        with attempt:
            if not await change_layout(client, keys, topic.name, layout, layout.sealed()):
                return "another process, which has changed the layout"
    return ""


async def carry_batch_marks(client: Client, keys: Keys, topic: LaidOut, groups: Iterable[str]) -> None:
    """A batch that is cancelled has its mark in each partition. One that is added gets those of the ones it follows:
    delayed members go there. The hash may have a million marks of single messages, which stay."""
    for group in groups:
        for number in topic.layout.to_seal:
            marks = await hash_fields(client, keys.cancels(topic.name, number, group), batch_mark("*"))
            after = [each for each in topic.layout.descendants_of(number) for _ in marks[:1]]
            names = [keys.cancels(topic.name, each, group) for each in after]
            await ask_all(client, [("HSET", name, *[part for pair in marks for part in pair]) for name in names])


async def unfinished_groups(client: Client, keys: Keys, topic: LaidOut, groups: Iterable[str]) -> list[str]:
    """Those of the groups that have not settled all messages of the sealed partitions."""
    sealed = [number for number in topic.numbers if topic.layout.is_sealed(number)]
    return [group for group in groups if sealed and not await are_finished(client, keys, topic.name, sealed, group)]


async def seal_again(client: Client, keys: Keys, topic: LaidOut) -> None:
    """Set the seals that the server has lost with the layout."""
    sealed = [number for number in topic.numbers if topic.layout.is_sealed(number)]
    if sealed:
        await are_finished(client, keys, topic.name, sealed, "")


async def are_finished(
    client: Client, keys: Keys, topic: str, sealed: Sequence[int], group: str, *, is_read: bool = False
) -> bool:
    """Whether a group has settled all messages of sealed partitions, and can get no more of them. A seal that the
    server has lost is set again. `is_read`: what was delivered need not be settled."""
    names, wanted = [keys.stream(topic, number) for number in sealed], ("read",) if is_read else ()
    if client.is_cluster:
        replies = await ARE_FINISHED.for_each(client, [(name,) for name in names], (group, "", *wanted))
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return not any(replies)
    return not await ARE_FINISHED(client, (*names, keys.topic(topic)), (group, RESIZED, *wanted))


async def note_unfinished(client: Client, keys: Keys, topic: str, group: str, known: bytes, wanted: bytes) -> bytes:
    """Note which sealed partitions a group has not finished, if what is `known` is still noted. Returns what is."""
    found: bytes = await NOTE_UNFINISHED(client, (keys.group(topic, group),), (known, wanted))
    return found


async def unaware_members(client: Client, keys: Keys, topic: LaidOut, groups: Iterable[str]) -> list[str]:
    """The live members, as `group: member`, that have not said that they know this layout.

    Not those that know layouts and have no subscription: they have ended, or are cut off. If one comes back, its reads
    and settlements are those of a member that joins, and what it publishes to a sealed partition is refused.
    """
    unaware, silent = list[tuple[str, str]](), list[tuple[str, str]]()
    for group in groups:
        for member, (info, is_alive) in (await members_of(client, keys, topic.name, group)).items():
            said = read_info(info)
            if is_alive and not topic.layout.is_known_by(said):
                unaware.append((group, member))
                if "layout" in said:
                    silent.append((group, member))
    counts = await listeners(client, [keys.presence(member) for _, member in silent])
    gone = {each for each, count in zip(silent, counts, strict=True) if not count}
    return [f"{group}: {member}" for group, member in unaware if (group, member) not in gone]


async def members_of(client: Client, keys: Keys, topic: str, group: str) -> dict[str, tuple[bytes, bool]]:
    """What each member says of itself, and whether its heartbeat has not expired."""
    names = (keys.group(topic, group), keys.members(topic, group), keys.alive(topic, group, ""))
    reply = await MEASURE_MEMBERS(client, (*names, keys.vitals(topic, group, "")))
    return {text(reply[at]): (reply[at + 1], reply[at + 2] != GONE) for at in range(4, len(reply), 4)}


def describe_unaware(names: Collection[str]) -> str:
    """Who is waited for."""
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
