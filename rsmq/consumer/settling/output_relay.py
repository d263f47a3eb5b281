"""The relay of outputs on a cluster: from the out-stream of a partition to their targets, which are in other slots."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import anyio.abc

from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.lane import Lane
from rsmq.errors import BrokerError, ConfigError, PartitionSealed, RsmqError
from rsmq.model.backoff import Backoff
from rsmq.model.batch_member import HOME
from rsmq.model.keys import NAME
from rsmq.model.layout import END_OF_NUMBERS
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.packing import pack_fields
from rsmq.model.partition import route_of
from rsmq.model.record import text, whole
from rsmq.model.stream_id import parse_stream_id
from rsmq.producer.output import OUT_FIELDS
from rsmq.redis.scripts import COUNT_MEMBERS, RELAY_OUTPUTS, Value
from rsmq.redis.streams import read_entries, trim
from rsmq.redis.topics import Topic, Topics, cached_topic, lookup_topic

log = logging.getLogger("rsmq.relay")

PAGE: Final = 200
MOST_CHANGES: Final = 2000
"""Arguments of one call that counts members of a batch, four for each."""
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0
"""Seconds between two attempts, while a target is full or a server is away."""


@dataclass(frozen=True, slots=True)
class WaitingOutput:
    """One entry of an out-stream."""

    entry_id: bytes
    about: Mapping[str, str]
    fields: list[bytes] = field(repr=False)

    @classmethod
    def read(cls, entry_id: bytes, flat: list[bytes]) -> WaitingOutput:
        """Split where it goes from what goes there. Raises ValueError for what no settlement has written."""
        about, fields = dict[str, str](), list[bytes]()
        for name, value in zip(flat[::2], flat[1::2], strict=True):
            if name in OUT_FIELDS:
                about[name.decode()] = value.decode()
            else:
                fields += (name, value)
        if "out.batch" in about:
            if len(fields) != 2 or fields[0] != b"changes" or HOME.fullmatch(about["out.batch"]) is None:
                raise ValueError("it names no members of a batch")
            return cls(entry_id, about, fields)
        topic, number = about.get("out.topic", ""), about.get("out.partition", "")
        if not NAME.fullmatch(topic) or not (whole(number) or 0) < END_OF_NUMBERS or whole(number) is None:
            raise ValueError(f"it names no partition: out.topic={topic[:60]!r}, out.partition={number[:60]!r}")
        if whole(about.get("out.due", "0").removeprefix("+")) is None or whole(about.get("out.window", "0")) is None:
            raise ValueError("out.due or out.window is no number")
        if ("out.window" in about and b"id" not in fields[::2]) or b"data" not in fields[::2]:
            raise ValueError("it has no data, or no id")
        return cls(entry_id, about, fields)

    @property
    def target(self) -> tuple[str, int]:
        """Topic and partition. Of what members of a batch have done: the batch, and -1."""
        if "out.batch" in self.about:
            return self.about["out.batch"], -1
        return self.about["out.topic"], int(self.about["out.partition"])

    @property
    def due(self) -> str:
        """Milliseconds since 1970, or empty. A delay counts from the settlement."""
        due = self.about.get("out.due", "")
        return str(parse_stream_id(self.entry_id)[0] + int(due)) if due.startswith("+") else due

    @property
    def position(self) -> str:
        """The id as text that compares like it."""
        ms, seq = parse_stream_id(self.entry_id)
        return f"{ms:020d}-{seq:020d}"


class OutputRelay:
    """Moves what waits in the out-streams of the lanes of this member, in order and each entry once.

    A mark in the target's slot says how far it got (`relay_outputs.lua`). So nothing is coordinated: the next owner
    starts with what is left, and the last one may still be at it.
    """

    def __init__(self, context: ConsumerContext) -> None:
        self._context = context
        self._client = context.client
        self._keys = context.keys
        self._topics = Topics(context.client, context.keys, context.settings)
        self._throttled = ThrottledLog(log)
        self._busy: dict[Lane, asyncio.Event] = {}  # set when there may be more
        self._tasks: anyio.abc.TaskGroup | None = None

    def use(self, tasks: anyio.abc.TaskGroup | None) -> None:
        """The tasks of the settler, while it runs."""
        self._tasks = tasks

    def wake(self, lane: Lane) -> None:
        """There may be something in the out-stream of a lane: it was opened, or has settled messages with outputs."""
        if not self._client.is_cluster or self._tasks is None:
            return
        more = self._busy.get(lane)
        if more is not None:
            more.set()
            return
        self._busy[lane] = more = asyncio.Event()
        self._tasks.start_soon(self._serve, lane, more)

    async def _serve(self, lane: Lane, more: asyncio.Event) -> None:
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        try:
            while lane.lease.is_held():
                more.clear()
                try:
                    moved = await self.relay(lane)
                except RsmqError as error:
                    self._throttled.warn(f"outputs of {lane.stream} wait in {self._out(lane)}", error)
                    moved = False
                if moved:
                    backoff.reset()
                elif moved is None and not more.is_set():
                    return
                else:
                    await asyncio.sleep(FIRST_PAUSE if lane.outgoing.is_in_circle else backoff.next())
        finally:
            self._busy.pop(lane, None)

    def _out(self, lane: Lane) -> str:
        return self._keys.out(lane.topic, lane.partition, lane.group)

    async def relay(self, lane: Lane) -> bool | None:
        """Move one page. None: nothing waits; False: nothing could be moved."""
        out = self._out(lane)
        page = await self._readable(lane, await read_entries(self._client, "XRANGE", out, "-", "+", PAGE))
        if not page:
            return None if page is None else True
        await self._read_topics(page)
        by_target: dict[tuple[str, int], list[WaitingOutput]] = {}
        for each in page:
            by_target.setdefault(await self._target(each), []).append(each)
        moved, full, trouble = list[bytes](), "", None
        for target, entries in by_target.items():
            try:
                if target[1] < 0:
                    done = await self._count(target[0], entries)
                else:
                    done = await self._append(lane, target, entries)
            except (BrokerError, ConfigError) as error:
                if isinstance(error, PartitionSealed):  # the next page goes to the partitions that follow
                    await self._topics.find(target[0])
                trouble = error
                continue
            full = full or ("" if done else target[0])
            moved += [each.entry_id for each in entries[:done]]
        lane.outgoing.note_relay("" if moved else full)
        if moved:
            await self._client.execute_command("XDEL", out, *moved)
        elif trouble is not None:
            raise trouble
        return bool(moved)

    async def _read_topics(self, page: Sequence[WaitingOutput]) -> None:
        """All entries of a page go by layouts in which each of their partitions is used: else one for a sealed
        partition would wait, and one behind it, for the partition that follows, would take the mark past it."""
        for name, partition in {each.target for each in page if each.target[1] >= 0}:
            if not (await self._topic(name)).layout.is_used(partition):
                await self._topics.find(name)

    async def _topic(self, name: str) -> Topic:
        return cached_topic(self._topics, name) or await lookup_topic(self._topics, name)

    async def _target(self, entry: WaitingOutput) -> tuple[str, int]:
        """Where an entry goes: if its topic was resized, to the partition that follows."""
        name, partition = entry.target
        if partition < 0:
            return name, partition
        layout = (await self._topic(name)).layout
        if not layout.is_sealed(partition):
            return name, partition
        return name, layout.partition_after(partition, route_of(entry.fields, entry.entry_id))

    async def _readable(self, lane: Lane, entries: list[Any]) -> list[WaitingOutput] | None:
        """A page of entries; None if there are none. What another client has written becomes a dead letter, once more
        if the reply gets lost: nothing could relay it, and nothing behind it would be relayed."""
        page = list[WaitingOutput]()
        for entry_id, flat in entries:
            try:
                page.append(WaitingOutput.read(entry_id, flat))
            except ValueError as error:
                log.warning("%s of %s is no output, and is a dead letter now: %s", entry_id, self._out(lane), error)
                about = ("dlq.reason", "malformed", "dlq.error", f"in the out-stream: {error}", "dlq.group", lane.group)
                dead, keep = self._keys.dlq(lane.topic, lane.partition, lane.group), self._context.settings.dlq_length
                await self._client.execute_command("XADD", dead, "MAXLEN", "~", keep, "*", *flat, *about)
                await self._client.execute_command("XDEL", self._out(lane), entry_id)
        return page if entries else None

    async def _count(self, home: str, entries: list[WaitingOutput]) -> int:
        """Note in a batch what its members have done. It may be noted twice."""
        for each in entries:
            changes = each.fields[1].split()
            for at in range(0, len(changes), MOST_CHANGES):
                args: list[Value] = [home, "left", "", *changes[at : at + MOST_CHANGES]]
                await COUNT_MEMBERS(self._client, self._keys.batch_counts(home), args)
        return len(entries)

    async def _append(self, lane: Lane, target: tuple[str, int], entries: list[WaitingOutput]) -> int:
        """Append entries to one target. Returns how many of them are there now. A full one gets one more, up to twice
        its limit, where topics wait for each other in a circle: then each makes room for the one before it."""
        name, partition = target
        topic = await self._topic(name)
        done, stream = await self._call(lane, target, entries, topic, topic.max_length)
        if done == len(entries):
            return done
        _, removed, *_ = await trim(self._client, self._keys, name, partition, keep_age_ms=0, keep_length=0, exact=True)
        if not removed and not done and lane.outgoing.is_in_circle:
            done, _ = await self._call(lane, target, entries[:1], topic, 2 * topic.max_length)
        if not removed and not done:
            await self._topics.find(name)  # its limit may have been raised
            self._throttled.warn(f"outputs of {lane.stream} wait", f"{stream} is full")
        return done

    async def _call(
        self, lane: Lane, target: tuple[str, int], entries: list[WaitingOutput], topic: Topic, limit: int
    ) -> tuple[int, str]:
        """One call for entries of one target. Returns how many of them are there now, and the stream."""
        keys, (name, partition) = self._keys, target
        names = [keys.stream(*target), keys.jobs(*target), keys.delayed(*target)]
        args: list[Value] = [f"out|{lane.topic}.{lane.partition}|{lane.group}", limit, topic.on_full]
        remembered, passed = partition, dict[int, str]()
        if topic.layout.is_resized:
            remembered, passed = topic.layout.root_of(partition), await self._passed(topic, partition, str(args[0]))
        left = [each for each in entries if each.position > passed.get(each.target[1], "")]
        if not left:
            return len(entries), names[0]
        for each in left:
            dedup = 0
            if "out.window" in each.about:
                fields = dict(zip(each.fields[::2], each.fields[1::2], strict=True))
                names.append(keys.dedup(name, remembered, text(fields[b"id"])))
                dedup = len(names)
            stored: list[bytes] = [pack_fields(each.fields)] if each.due else each.fields
            args += (each.position, dedup, each.about.get("out.window", 0), each.due, len(stored), *stored)
        _, done, *foreign = await RELAY_OUTPUTS(self._client, names, args)
        if foreign:
            log.warning("another client has written into the mark %s of %s: outputs may come twice", args[0], names[1])
        return len(entries) if done == len(left) else entries.index(left[int(done)]), names[0]

    async def _passed(self, topic: Topic, partition: int, mark: str) -> dict[int, str]:
        """Up to where this out-stream was relayed into the partitions before this one, and into those that follow them:
        these are sealed, so their marks stay as they are."""
        before, newest, found = topic.layout.ancestors_of(partition), "", dict[int, str]()
        for number in before:
            position = await self._client.execute_command("HGET", self._keys.jobs(topic.name, number), mark)
            newest = found[number] = max(newest, text(position or b""))
        return found
