"""Topics: partitions and limits; the only module that creates, changes and deletes topics."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, Literal, NamedTuple

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay

from rsmq.errors import BrokerUnavailable, ConfigError, NotPermitted, RsmqError, SlotMoving
from rsmq.model.clock import LATEST_MS, awake, monotonic, now_ms, to_ms
from rsmq.model.duration import checked_duration
from rsmq.model.keys import NAME, Keys, check_name
from rsmq.model.layout import END_OF_NUMBERS, NO_LAYOUT, Block, Layout, made_with, read_layout, single
from rsmq.model.partition import MOST_PARTITIONS
from rsmq.model.record import exact_text, text, whole
from rsmq.model.settings import Settings
from rsmq.model.words import count, suggestion
from rsmq.redis.client.connector import Client, retrying
from rsmq.redis.layouts import (
    carry_batch_marks,
    change_layout,
    describe_unaware,
    make_streams,
    numbers_beside,
    prepare_groups,
    seal,
    seal_again,
    seal_by_slot,
    unaware_members,
    unfinished_groups,
)
from rsmq.redis.pubsub import announce
from rsmq.redis.scripts import MAKE_TOPIC, Value
from rsmq.redis.streams import as_dict, ask_all, ensure_groups, group_names

log = logging.getLogger("rsmq.topics")

FRESH_SECONDS: Final = 10.0
POLICIES: Final = ("reject", "trim")
MOST_UNREADABLE: Final = 1000
"""Records of topics that cannot be read and are remembered, so that each is named once."""
ARCHIVES: Final = ("off", "required")
FORMER_MS: Final = 7 * 24 * 3_600_000
"""How long the high numbers of a deleted topic are known to who makes it again."""
UNARCHIVED: Final = {"on_full": "trim", "archive": "required"}.items()
"""Two settings that exclude each other."""


class Addressed:
    """What a topic computes once: no field, so it is not part of its JSON."""

    __slots__ = ("normal",)

    normal: Block
    """Where messages go whose publisher names no band."""


@dataclass(frozen=True, slots=True)
class Topic(Addressed):
    """A topic as it was when read. `partitions`: how many messages are published to now. `max_length` 0 means no limit.

    `archive` required: retention keeps what the archive (`rsmq pipeline archive`) has not committed. `layout` left out:
    one block of `partitions`.
    """

    name: str
    partitions: int
    max_length: int
    on_full: Literal["reject", "trim"]
    retention_age: timedelta
    retention_length: int
    created_ms: int
    archive: Literal["off", "required"] = "off"
    layout: Layout = NO_LAYOUT

    def __post_init__(self) -> None:
        if not self.layout.blocks:
            object.__setattr__(self, "layout", single(self.partitions))
        object.__setattr__(self, "normal", self.layout.current)

    @property
    def numbers(self) -> tuple[int, ...]:
        """All its partitions, rising. A loop over the partitions of a topic goes over these."""
        return self.layout.numbers

    @property
    def trims(self) -> bool:
        """Whether it removes its oldest entries itself when it is full."""
        return self.max_length > 0 and self.on_full == "trim"

    def in_band(self, band: str) -> Topic:
        """The topic for one who publishes all in a band: there `normal` is the block of that band."""
        other = replace(self)
        object.__setattr__(other, "normal", self.open_block(band))
        return other

    def open_block(self, band: str | None = None) -> Block:
        """The partitions for a message of a band. Those of `normal` until all members know the band.

        Raises ConfigError for a band that the topic does not have.
        """
        if band is None:
            return self.normal
        block = self.layout.block_of(band)
        if block is None or band not in self.layout.bands:
            raise ConfigError(
                f"topic {self.name!r} has no band {band!r}: its bands are {', '.join(self.layout.bands)}. Declare it, "
                f"broker.topic({self.name!r}, ..., bands=(...)), or run `rsmq topic set {self.name} --bands ...`"
            )
        return block if block.state == "open" else self.normal


class Declaration(NamedTuple):
    """What the code of this process says about a topic: its partitions, if a handler does, and its bands."""

    partitions: int | None = None
    bands: tuple[str, ...] = ()


class LookupCaller(NamedTuple):
    """A caller of `lookup_topic`: until when it waits, and what ends its wait: a topic, why there is none, or None if
    it is the first now, and reads itself."""

    deadline: float
    turn: asyncio.Future[Topic | BrokerUnavailable | None]


class Topics:
    """The topics under one prefix. A topic exists when its hash has `partitions`.

    `declared`: what the code of this process says about a topic. `known`: a topic as a member knows it, which is made
    again as it was if the server has lost it.
    """

    def __init__(
        self,
        client: Client,
        keys: Keys,
        settings: Settings,
        declared: Callable[[str], Declaration] = lambda _: Declaration(),
        known: Topic | None = None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._settings = settings
        self._declared = declared
        self._known: dict[str, tuple[float, Topic]] = {} if known is None else {known.name: (monotonic(), known)}
        self._lookups: dict[str, deque[LookupCaller]] = {}
        self._unreadable: dict[str, str] = {}
        self._with_batches = set[str]()

    async def ensure(self, name: str, partitions: int | None = None) -> Topic:
        """Return the topic, created on first use, with the bands that this process declares.

        Raises ConfigError when it exists with another number of partitions than asked for.
        """
        name = check_name("topic", name)
        if partitions is not None and not 1 <= partitions <= MOST_PARTITIONS:
            raise ConfigError(f"topic {name!r} cannot have {partitions} partitions: use 1 to {MOST_PARTITIONS}")
        entry = self._known.get(name)
        topic = await self.find(name) if entry is None else await recall_topic(self, entry[1])
        if topic is None:
            topic = await self._create(name, self._layout(name, partitions))
        if not set(bands := self._declared(name).bands) <= set(topic.layout.bands):
            topic = await self.set_bands(name, topic.layout.with_more(bands).bands)
        if partitions is not None and partitions not in {each.count for each in topic.layout.blocks}:
            raise ConfigError(
                f"topic {name!r} has {count(topic.partitions, 'partition')}, not {partitions}, and a handler does not "
                f"change this (keys would move): leave `partitions` out, say {topic.partitions}, or let it grow while "
                f"everything runs with `rsmq topic resize {name} N`"
            )
        return topic

    def _layout(self, name: str, partitions: int | None) -> Layout:
        """Of a new topic: the number of partitions that is asked for or that its handler declares, else what it had
        before the server lost it (failover, FLUSHALL), else the default."""
        declared, entry = self._declared(name), self._known.get(name)
        number = declared.partitions if partitions is None else partitions
        if entry is not None and (number is None or number in {each.count for each in entry[1].layout.blocks}):
            return entry[1].layout
        return made_with(self._settings.partitions if number is None else number, declared.bands)

    async def find(self, name: str) -> Topic | None:
        """The topic, or None if it does not exist."""
        name = check_name("topic", name)
        reply = await self._client.execute_command("HGETALL", self._keys.topic(name))
        return self._noted(name, reply)

    async def find_all(self, names: Collection[str]) -> list[Topic]:
        """Those of these topics that exist, asked for together. One that cannot be read is left out, and named in the
        log."""
        replies = await ask_all(self._client, [("HGETALL", self._keys.topic(name)) for name in names])
        found = list[Topic]()
        for name, reply in zip(names, replies, strict=True):
            try:
                topic = self._noted(name, reply)
            except ConfigError as error:
                self._name(name, str(error))
                continue
            self._unreadable.pop(name, None)
            if topic is not None:
                found.append(topic)
        return found

    def _name(self, name: str, why: str) -> None:
        """Name a record that cannot be read, once."""
        if name not in self._unreadable:
            if len(self._unreadable) < MOST_UNREADABLE:
                self._unreadable[name] = why
            log.warning("%s; nothing lists it", why)

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Why topics are missing in `names` and `find_all`: what another client has written there."""
        return tuple(self._unreadable.values())

    def _noted(self, name: str, reply: Sequence[Any]) -> Topic | None:
        found = as_dict(reply)
        if "partitions" not in found:
            return None
        topic = self._read(name, found)
        if "batches" in found:
            self._with_batches.add(name)
        self._know(name, topic)
        return topic

    def _know(self, name: str, topic: Topic) -> None:
        """Note a topic that was just read. What this process knows of its layout, and the server has lost (a failover),
        is not forgotten: the next publish writes it again."""
        _, known = self._known.get(name, (0.0, topic))
        is_same = known.layout.has_more and known.created_ms == topic.created_ms
        if is_same and topic.layout.with_lost(known.layout) is not topic.layout:
            self._known[name] = (-math.inf, known)
        else:
            self._known[name] = (monotonic() + FRESH_SECONDS, topic)

    async def existing(self, name: str) -> Topic:
        """The topic. Raises ConfigError if it does not exist."""
        topic = await self.find(name)
        if topic is None:
            known = list[str]()
            with suppress(RsmqError):  # this user may not list them
                known = await self.names()
            raise ConfigError(
                f"there is no topic {name!r}: {suggestion(name, known, 'topics') or 'see `rsmq topic list`'}"
            )
        return topic

    def _fresh(self, name: str) -> Topic | None:
        entry = self._known.get(name)
        return entry[1] if entry is not None and entry[0] > monotonic() else None

    async def _read_for(self, queue: deque[LookupCaller], name: str, deadline: float) -> Topic:
        """Read a topic. An error is also that of those who would wait no longer."""
        try:
            async for attempt in retrying(self._settings).copy(stop=stop_after_delay(max(0.0, deadline - awake()))):
                with attempt:
                    return await self.ensure(name)
        except BrokerUnavailable as error:
            now = awake()
            for each in queue:
                if each.deadline <= now and not each.turn.done():
                    each.turn.set_result(error)
            raise
        raise AssertionError("retrying ends with a result or an error")

    def _call_next(self, queue: deque[LookupCaller], name: str) -> None:
        """A caller has gone: the next one reads. All others are served if the topic was read."""
        if not queue:
            del self._lookups[name]
        elif not queue[0].turn.done():
            topic = self._fresh(name)
            for each in queue if topic else (queue[0],):
                if not each.turn.done():
                    each.turn.set_result(topic)

    async def names(self) -> list[str]:
        """All topics, sorted. What is no name of a topic is left out, and named in the log."""
        found = list[str]()
        for raw in await self._client.execute_command("SMEMBERS", self._keys.topics):
            name = text(raw)
            if NAME.fullmatch(name):
                found.append(name)
            else:
                self._name(name, f"the set {self._keys.topics} has {name[:60]!r}, which is no name of a topic")
        return sorted(found)

    async def change(self, /, name: str, **limits: Any) -> Topic:
        """Set `max_length`, `on_full`, `retention_age`, `retention_length` or `archive`. Publishers follow within 10 s,
        workers within `retention_interval`.

        With `archive=off` the positions of all archives are deleted, so that a dead archive does not stop retention.
        """
        topic = await self.existing(name)
        name = topic.name
        fields = write_limits(limits)
        if {"on_full": topic.on_full, "archive": topic.archive, **fields}.items() >= UNARCHIVED:
            raise ConfigError(
                f"topic {name!r} cannot have on_full=trim and archive=required: a full topic would drop what no "
                f"archive has; use on_full=reject"
            )
        if fields:
            flat = [value for pair in fields.items() for value in pair]
            await self._client.execute_command("HSET", self._keys.topic(name), *flat)
        if fields.get("archive") == "off":
            await self._unlink([self._keys.archived(name, partition) for partition in topic.numbers])
        changed = await self.find(name)
        if changed is None:
            raise ConfigError(f"topic {name!r} was deleted meanwhile")
        return changed

    async def delete(self, name: str) -> None:
        """Remove the topic with its messages, dead letters and groups. Its workers must have stopped before.

        A publisher that has used it may go on for ten seconds with the partitions that it knows. If it does not make
        the topic again itself, a worker of a later topic of this name moves what it stores there.
        The topic's own entry goes last, so that an interrupted delete can be repeated.
        """
        topic = await self.existing(name)
        name = topic.name
        await self._note_former(topic)
        groups: set[str] = set()
        for partition in topic.numbers:
            groups.update(await group_names(self._client, self._keys, name, partition))
        for group in groups:
            await self._unlink([key async for key in self._group_keys(topic, group)])
        await self._unlink([key async for key in self._partition_keys(topic)])
        await self._unlink([self._keys.topic(name)])
        await self._client.execute_command("SREM", self._keys.topics, name)
        self._known.pop(name, None)

    async def _note_former(self, topic: Topic) -> None:
        """The stray mover looks at the numbers that a topic can begin with. After a resize, and with bands, it had
        others, on a cluster anywhere up to the last one."""
        high, key = [number for number in topic.numbers if number >= MOST_PARTITIONS], self._keys.former(topic.name)
        if high:
            await self._client.execute_command("SADD", key, *high)
            await self._client.execute_command("PEXPIRE", key, FORMER_MS)

    async def set_bands(self, name: str, bands: Sequence[str]) -> Topic:
        """Give a topic these bands, the highest first, while everything runs. A band that is not named is closed: what
        it has is handled, and nothing more is published to it.

        First every group is made in a new band, then members read it; publishers may use it when each live member has
        said that it knows it. Until then its messages go to `normal`.
        """
        while True:
            topic = await self.existing(name)
            name = topic.name
            wanted = topic.layout.with_bands(bands)
            used = set[int]()
            while found := await self._used(name, set(wanted.numbers) - set(topic.numbers) - used):
                used.update(found)
                wanted = topic.layout.with_bands(bands, used)
            if wanted is topic.layout:
                break
            if await self._change_layout(topic, wanted):
                break
        with suppress(SlotMoving):  # a worker opens them later
            await self.open_bands(name)
        return await self.existing(name)

    async def _change_layout(self, topic: Topic, wanted: Layout) -> bool:
        """Store another layout of a topic, if it is as it was read. Waits while a slot of a cluster is moving."""
        async for attempt in self._while_slots_move():
            with attempt:
                return await change_layout(self._client, self._keys, topic.name, topic.layout, wanted)
        raise AssertionError("retrying ends with a result or an error")

    def _while_slots_move(self) -> AsyncRetrying:
        """Tries again while a slot of a cluster is moving, as long as publishers wait."""
        return retrying(self._settings).copy(retry=retry_if_exception_type(SlotMoving))

    async def _used(self, name: str, numbers: Collection[int]) -> list[int]:
        """Those of these numbers that have a stream, though the topic has no such partitions: they were of a band that
        the layout has lost (a failover of one node), so they can be of no other one, and their messages are read."""
        found = await ask_all(self._client, [("EXISTS", self._keys.stream(name, number)) for number in numbers])
        return [number for number, is_there in zip(numbers, found, strict=True) if is_there]

    async def open_bands(self, name: str) -> list[str]:
        """Let publishers use the bands that were added. Returns the live members that do not know them yet: then
        nothing has changed but that their groups hear of it."""
        topic = await self.existing(name)
        name = topic.name
        if not topic.layout.waits or topic.layout.following is not None:
            return []
        groups = await prepare_groups(self._client, self._keys, topic)
        unaware = await unaware_members(self._client, self._keys, topic, groups)
        if unaware:
            for group in groups:
                await announce(self._client, self._keys, name, group)
            return unaware
        await prepare_groups(self._client, self._keys, topic)  # of a group that was made meanwhile
        await change_layout(self._client, self._keys, name, topic.layout, topic.layout.opened())
        await self.find(name)
        return []

    async def resize(self, name: str, partitions: int) -> Topic:
        """Let a topic grow to so many partitions while everything runs: a whole multiple of what it has.

        Messages of a key stay in order: what was published before is handled first. The new partitions are added, and
        used when every live member knows them; then `layout.following` is None. A worker goes on if this process ends.
        Each band gets so many. On a cluster a new partition is in the slot of the one that it follows. Raises
        ConfigError where it is not possible: for another number, while another resize or a new band waits.
        """
        while True:
            topic = await self.existing(name)
            name = topic.name
            added = topic.layout.following
            if added is None and partitions == topic.partitions:
                return topic
            if added is not None and added.count != partitions:
                raise ConfigError(
                    f"topic {name!r} is being resized to {added.count} partitions: wait for it, or give it up with "
                    f"`rsmq topic resize {name} --abort`"
                )
            if added is not None:
                break
            choose = numbers_beside(self._keys, name) if self._client.is_cluster else None
            wanted = topic.layout.with_partitions(partitions, choose)
            if await self._change_layout(topic, wanted):
                break
        await self.go_on_with_resize(name)
        return await self.existing(name)

    async def go_on_with_resize(self, name: str) -> str:
        """Finish a resize, if nothing is left that it waits for. Returns what it waits for; empty: it is done, or there
        is none. Any process may call this at any time."""
        topic = await self.existing(name)
        name = topic.name
        if topic.layout.following is None:
            return ""
        try:
            return await self._go_on(topic)
        except SlotMoving:
            return "a slot that is moving to another node"

    async def _go_on(self, topic: Topic) -> str:
        name, groups = topic.name, await prepare_groups(self._client, self._keys, topic)
        if not topic.layout.is_opening:
            if waits_for := await self._waits_for(topic, groups):
                return waits_for
            groups = await prepare_groups(self._client, self._keys, topic)  # of a group that was made meanwhile
        if name in self._with_batches:
            await carry_batch_marks(self._client, self._keys, topic, groups)
        if self._client.is_cluster:
            patience = self._while_slots_move()
            await make_streams(self._client, self._keys, topic, patience)
            waits_for = await seal_by_slot(self._client, self._keys, topic, patience)
        else:
            waits_for = await seal(self._client, self._keys, topic)
        changed = await self.find(name)
        if changed is not None and changed.layout.following is None:
            for group in groups:
                await announce(self._client, self._keys, name, group)
        return waits_for

    async def _waits_for(self, topic: Topic, groups: Sequence[str]) -> str:
        """What must happen before the first partition is sealed."""
        if unaware := await self.unaware_of_resize(topic, groups):
            for group in groups:
                await announce(self._client, self._keys, topic.name, group)
            return unaware
        if unfinished := await unfinished_groups(self._client, self._keys, topic, groups):
            return f"groups that have not handled what was published before the last resize: {', '.join(unfinished)}"
        return ""

    async def unaware_of_resize(self, topic: Topic, groups: Iterable[str]) -> str:
        """The live members that do not know the new partitions yet, as a sentence; empty: there are none."""
        unaware = await unaware_members(self._client, self._keys, topic, groups)
        return f"members that do not know the new partitions yet: {describe_unaware(unaware)}" if unaware else ""

    async def abort_resize(self, name: str) -> bool:
        """Give up a resize whose partitions are not used yet. False: there is none, or it is too late: on a cluster as
        soon as the first partition may be sealed."""
        while True:
            topic = await self.existing(name)
            name = topic.name
            if topic.layout.following is None or topic.layout.is_opening:
                return False
            wanted = topic.layout.without_following()
            if await self._change_layout(topic, wanted):
                await self.find(name)
                return True

    async def _restore(self, known: Topic) -> Topic | None:
        """The topic as it is, with what a member knows of its layout and the server has lost (a failover), or made
        again. None: it is not there, and had only one block."""
        while True:
            topic = await self.find(known.name)
            if topic is None and known.layout.has_more:
                return await self._create(known.name, known.layout)
            if topic is None or not is_same_topic(topic, known):
                return topic
            wanted = topic.layout.with_lost(known.layout)
            if wanted is topic.layout:
                return topic
            log.warning("topic %s has lost its layout of version %d: written again", topic.name, known.layout.version)
            is_stored = await self._change_layout(topic, wanted)
            if is_stored:
                await seal_again(self._client, self._keys, known)

    async def _create(self, name: str, layout: Layout) -> Topic:
        """Make it, if no other process has. Fields that are there, as limits that were set before, stay."""
        settings, key = self._settings, self._keys.topic(name)
        names = ("max_length", "on_full", "retention_age", "retention_length")
        limits = write_limits({limit: getattr(settings, limit) for limit in names})
        await self._client.execute_command("SADD", self._keys.topics, name)
        stored: dict[str, Value] = {"layout": layout.stored} if layout.stored else {}
        fields: dict[str, Value] = {"created_ms": now_ms(), **limits, **stored}
        about = [each for field in fields.items() for each in field]
        await MAKE_TOPIC(self._client, (key,), (*about, layout.partitions))
        topic = await self.find(name)
        if topic is None:
            raise ConfigError(f"topic {name!r} was deleted while it was being created")
        return topic

    def _read(self, name: str, found: Mapping[str, bytes]) -> Topic:
        settings = self._settings
        layout = read_layout(name, found["partitions"], found.get("layout"))

        def number(entry: str, other: int, least: int = 0, most: int = LATEST_MS) -> int:
            if entry not in found:
                return other
            value = whole(found[entry])
            if value is None or not least <= value <= most:
                raise ConfigError(
                    f"topic {name!r} is not as rsmq has written it ({entry} is {text(found[entry])[:40]!r}): look at "
                    f"HGETALL {self._keys.topic(name)}"
                )
            return value

        return Topic(
            name=name,
            partitions=layout.current.count,
            layout=layout,
            max_length=number("max_length", settings.max_length),
            on_full="trim" if found.get("on_full", settings.on_full) in ("trim", b"trim") else "reject",
            retention_age=timedelta(milliseconds=number("retention_age_ms", to_ms(settings.retention_age))),
            retention_length=number("retention_length", settings.retention_length),
            created_ms=number("created_ms", 0),
            archive="required" if found.get("archive") == b"required" else "off",
        )

    async def _group_keys(self, topic: Topic, group: str) -> AsyncIterator[str]:
        keys, members = self._keys, self._keys.members(topic.name, group)
        for member in await self._client.execute_command("SMEMBERS", members):
            if (known := exact_text(member)) is not None:
                yield keys.alive(topic.name, group, known)
        yield members
        yield keys.group(topic.name, group)
        for partition in topic.numbers:
            for name in keys.of_group(topic.name, partition, group):
                yield name

    async def _partition_keys(self, topic: Topic) -> AsyncIterator[str | bytes]:
        """The names of dedup keys and of results are not stored anywhere, so they are found by SCAN."""
        keys = self._keys
        prefixes = tuple(keys.dedup(topic.name, partition, "").encode() for partition in topic.numbers)
        streams = tuple(f"{keys.stream(topic.name, partition)}:".encode() for partition in topic.numbers)
        # a rough filter; names and prefixes contain no special character of a pattern
        pattern = f"{keys.stream(topic.name, 0)}:*".replace(".0}", ".*}")
        await self._client.refresh()
        for node in self._client.nodes:
            cursor = b""
            while cursor != b"0":
                cursor, found = await node.execute_command("SCAN", cursor or 0, "MATCH", pattern, "COUNT", 1000)
                for key in found:
                    is_result = key.startswith(streams) and key.partition(b"}:")[2].split(b":")[1:2] == [b"result"]
                    if is_result or key.startswith(prefixes):
                        yield key
        for partition in topic.numbers:
            for part in (
                keys.delayed, keys.marks, keys.removed, keys.archived, keys.jobs, keys.every, keys.relayed, keys.unique,
                keys.stream,
            ):  # fmt: skip
                yield part(topic.name, partition)

    async def _unlink(self, names: list[Any]) -> None:
        """One command per key: on a cluster they may be in different slots."""
        for reply in await self._client.pipelined([("UNLINK", name) for name in names]):
            if isinstance(reply, Exception):
                raise reply


def write_limits(limits: Mapping[str, Any]) -> dict[str, Value]:
    """Limits as hash fields. Raises ConfigError for a name or value that no topic has."""
    fields: dict[str, Value] = {}
    for name, value in limits.items():
        is_count = name in ("max_length", "retention_length") and isinstance(value, int) and value >= 0
        if is_count or (name == "on_full" and value in POLICIES) or (name == "archive" and value in ARCHIVES):
            fields[name] = value
        elif name == "retention_age" and (span := checked_duration(name, value)) >= timedelta(0):
            fields["retention_age_ms"] = to_ms(span)
        else:
            raise ConfigError(
                f"a topic cannot have {name}={value!r}: give max_length or retention_length as a number from 0, "
                f"on_full as one of {', '.join(POLICIES)}, archive as one of {', '.join(ARCHIVES)}, "
                f"retention_age as a duration from 0"
            )
    return fields


def topics_with_batches(topics: Topics) -> set[str]:
    """Topics with members or callbacks of batches, of those that were read."""
    return topics._with_batches


async def note_batches(topics: Topics, name: str) -> None:
    """Let workers of a topic know that there are batches: only then they look for those that expire."""
    if name not in topics._with_batches:
        await topics._client.execute_command("HSET", topics._keys.topic(name), "batches", 1)
        topics._with_batches.add(name)


def cached_topic(topics: Topics, name: str) -> Topic | None:
    """The topic as read within the last 10 s, or None. None, too, while earlier callers wait in `lookup_topic`: another
    task may have read it meanwhile, and a message that is published now must not overtake theirs."""
    return None if name in topics._lookups else topics._fresh(name)


async def lookup_topic(topics: Topics, name: str) -> Topic:
    """The topic for publishing: created if needed, read again after 10 s; waits for an unavailable server.

    Returns in the order of the calls. The first caller reads, and what it has read is for all that wait: one after
    the other, a thousand publishers would never be done with waiting for each other.
    """
    patience = topics._settings.unavailable_timeout.total_seconds()
    queue = topics._lookups.setdefault(name, deque())
    own = LookupCaller(awake() + patience, asyncio.get_running_loop().create_future())
    queue.append(own)
    try:
        if queue[0] is own:
            own.turn.set_result(None)
        found = await own.turn
        if isinstance(found, BrokerUnavailable):
            raise BrokerUnavailable(str(found))
        return found or topics._fresh(name) or await topics._read_for(queue, name, own.deadline)
    finally:
        queue.remove(own)
        topics._call_next(queue, name)


async def topic_after(topics: Topics, known: Topic, partition: int) -> Topic | None:
    """The topic whose server refuses messages for a partition. A layout that was read meanwhile says why for all
    partitions: so a topic that was resized is read once, not for each of them. None: it does not exist."""
    found = topics._fresh(known.name)
    if found is not None and found.created_ms == known.created_ms and found.layout.is_sealed(partition):
        return found
    return await topics.find(known.name)


async def recall_topic(topics: Topics, known: Topic) -> Topic | None:
    """The topic as it is now. A layout that this process knows and the server has lost (a failover) is written again.
    None: the topic does not exist."""
    topic = await topics.find(known.name)
    if topic is None or not known.layout.has_more or topic.created_ms != known.created_ms:
        return topic
    if topic.layout.with_lost(known.layout) is topic.layout:
        return topic
    try:
        return await topics._restore(known)
    except NotPermitted as error:
        log.warning("topic %s has lost a part of its layout, and this user may not write it: %s", known.name, error)
        topics._known[known.name] = (monotonic() + FRESH_SECONDS, topic)
        return topic


async def make_topic_again(topics: Topics, known: Topic) -> None:
    """A member has found its group gone (FLUSHALL, DEL): the topic is there again, as the member knows it.

    Another process may have made it again sooner, knowing only with how many partitions it began: its layout is written
    again. Raises ConfigError when it was made with other partitions.
    """
    with suppress(NotPermitted):  # whether that matters is found out by the next line
        await topics._restore(known)
    await topics.ensure(known.name, known.partitions)


async def make_known_topics(topics: Topics) -> None:
    """The server has lost everything (FLUSHALL): make the topics again that this process uses, as it knows them.

    Else a process that knows less about one may be first, and make it with fewer partitions: what is published under
    the description of before then comes into partitions that it does not have.
    """
    for name in [each for each in topics._known if topics._fresh(each) is not None]:
        with suppress(ConfigError):  # the next publish reports it
            await topics.ensure(name)


def doubt_layouts(topics: Topics) -> None:
    """A connection was lost, so the server may be another one: topics with more than one block are read again before
    anything more is published there."""
    for name, (_, topic) in topics._known.items():
        if topic.layout.has_more:
            topics._known[name] = (-math.inf, topic)


async def newer_topic(topics: Topics, known: Topic, group: str, found: Topic | None = None) -> Topic | None:
    """The topic as it is now, if that differs from what a member knows; then its group is in each partition. None:
    there is nothing to take over. `found`: the topic, if it was just read.

    A layout that the server has lost is written again.
    """
    if found is None or found.layout.with_lost(known.layout) is not found.layout:
        found = await topics._restore(known)
    if found is None or not is_same_topic(found, known) or found.layout.stored == known.layout.stored:
        return None
    await ensure_groups(topics._client, topics._keys, found, group, "0")
    return found


async def set_lost_seals(topics: Topics, topic: Topic) -> None:
    """Seal partitions of a cluster whose seal a failover has lost. One server loses the layout with it."""
    if topics._client.is_cluster and topic.layout.is_resized:
        await seal_again(topics._client, topics._keys, topic)


def is_same_topic(one: Topic, other: Topic) -> bool:
    """Whether both were made with the same number of partitions: else one was deleted and made again."""
    return one.layout.normal.count == other.layout.normal.count


async def complete_groups(client: Client, keys: Keys, topic: Topic) -> None:
    """Make each group in all partitions of a topic with bands. A worker of a version that knows no bands makes its own
    only in the others, and what is published to a band must wait for it, too."""
    first, *others = topic.layout.blocks
    if others:
        numbers = first.numbers[0], others[-1].numbers[-1]
        made_first, made_last = [await group_names(client, keys, topic.name, number) for number in numbers]
        if not set(made_first) <= set(made_last):
            await prepare_groups(client, keys, topic)


async def former_numbers(client: Client, keys: Keys, topic: str) -> set[int]:
    """The partitions that deleted topics of this name may have had: those that a topic can begin with, and those of
    which it is known."""
    noted = [whole(each) for each in await client.execute_command("SMEMBERS", keys.former(topic))]
    high = {number for number in noted if number is not None and 0 <= number < END_OF_NUMBERS}
    return {*Block(0, MOST_PARTITIONS).numbers, *high}


async def stored_numbers(client: Client, keys: Keys, topic: str, own: Iterable[int]) -> set[int]:
    """The partitions of a topic, `own`, and others with something in them, from a time when it had other ones."""
    found = {*own}
    every = sorted(await former_numbers(client, keys, topic) - found)
    names = [(keys.stream(topic, number), keys.delayed(topic, number)) for number in every]
    if not client.is_cluster:
        others = [name for pair in names for name in pair]
        if not others or not await client.execute_command("EXISTS", *others):
            return found
    there = await ask_all(client, [("EXISTS", *pair) for pair in names])
    return found | {number for number, is_there in zip(every, there, strict=True) if is_there}
