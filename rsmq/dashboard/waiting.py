"""Messages that wait for a time: delayed ones of a topic, parked ones of a group. They can be moved and cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from typing import Final

from rsmq.control import Cancel, Cancelled, Reschedule
from rsmq.dashboard.queries import BrowsedMessage, read_entry
from rsmq.model.clock import LATEST_MS, from_epoch_ms, to_ms
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.keys import Keys
from rsmq.model.message import MessageOrigin
from rsmq.model.packing import readable_fields
from rsmq.model.record import whole
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import CANCEL_DELAYED, CANCELLED, OK, RESCHEDULE_DELAYED
from rsmq.redis.streams import ask_all
from rsmq.redis.topics import Topic

MOST: Final = 100
"""Messages of a topic, or of a group, that a page shows: those that are due next."""


@dataclass(frozen=True, slots=True)
class WaitingMessage:
    """One message and when it is due."""

    ref: str
    due: datetime
    entry: BrowsedMessage
    attempts: int = 0


class WaitingMessages:
    """Reads and moves them. A change names each by its partition, its due time and a hash of its content."""

    def __init__(self, client: Client, keys: Keys, settings: Settings, encoding: Encoding = NO_CODECS) -> None:
        self._client = client
        self._keys = keys
        self._settings = settings
        self._encoding = encoding

    async def delayed(self, topic: Topic) -> list[WaitingMessage]:
        """Those of a topic that are due next."""
        found = []
        for number, member, due in await self._next({n: self._keys.delayed(topic.name, n) for n in topic.numbers}):
            entry = read_entry(MessageOrigin(topic.name, number, ""), b"0-0", readable_fields(member), self._encoding)
            found.append(WaitingMessage(ref_of(number, due, member), from_epoch_ms(due), entry))
        return found

    async def parked(self, topic: Topic, group: str) -> list[WaitingMessage]:
        """Those of a group that are due next."""
        rows = await self._next({n: self._keys.retry(topic.name, n, group) for n in topic.numbers})
        ids = [(number, *member.partition(b"|")[::2]) for number, member, _ in rows]
        questions = [("XRANGE", self._keys.stream(topic.name, number), each, each) for number, each, _ in ids]
        found = []
        for (number, member, due), (_, entry_id, attempts), bodies in zip(
            rows, ids, await ask_all(self._client, questions), strict=True
        ):
            fields = bodies[0][1] if bodies else []
            entry = read_entry(MessageOrigin(topic.name, number, ""), entry_id, fields, self._encoding)
            count = whole(attempts) or 0
            found.append(WaitingMessage(ref_of(number, due, member), from_epoch_ms(due), entry, count))
        return found

    async def move_delayed(self, topic: Topic, refs: Sequence[str], due_ms: int | None) -> int:
        """Make delayed messages due at a time, or now; returns how many still waited."""
        due, moved, window_ms = due_text(due_ms), 0, to_ms(self._settings.dedup_window)
        for ref in refs:
            async for names, member in self._delayed(topic, ref):
                moved += (await RESCHEDULE_DELAYED(self._client, names, (member, due, window_ms)))[0] == OK
        return moved

    async def cancel_delayed(self, topic: Topic, refs: Sequence[str]) -> int:
        """Cancel delayed messages for all groups; returns how many still waited."""
        cancelled, window_ms = 0, to_ms(self._settings.dedup_window)
        for ref in refs:
            async for names, member in self._delayed(topic, ref):
                cancelled += await CANCEL_DELAYED(self._client, names, (member, window_ms)) == CANCELLED
        return cancelled

    async def _delayed(self, topic: Topic, ref: str) -> AsyncIterator[tuple[tuple[str, str], bytes]]:
        """The keys of a delayed message, and its content."""
        keys = {number: self._keys.delayed(topic.name, number) for number in topic.numbers}
        async for number, member in self._members(keys, ref):
            origin = MessageOrigin(topic.name, number, "")
            message_id = read_entry(origin, b"0-0", readable_fields(member), NO_CODECS).message_id
            dedup = self._keys.dedup(topic.name, topic.layout.root_of(number), message_id)
            yield (self._keys.delayed(topic.name, number), dedup), member

    async def move_parked(self, topic: Topic, group: str, refs: Sequence[str], due_ms: int | None) -> int:
        """Give parked messages another due time. The member that has the timer of one that keeps its key moves it."""
        command, due = Reschedule(self._client, self._keys, self._settings), due_text(due_ms)
        entries = await self._parked(topic, group, refs)
        answers = [command.parked((topic.name, number, group), entry_id, due) for number, entry_id in entries]
        return sum(isinstance(each, datetime) for each in await asyncio.gather(*answers))

    async def cancel_parked(self, topic: Topic, group: str, refs: Sequence[str]) -> int:
        """Cancel parked messages for a group; returns how many still waited."""
        command = Cancel(self._client, self._keys, self._settings)
        entries = [f"{number}/{entry_id.decode()}" for number, entry_id in await self._parked(topic, group, refs)]
        answers = await asyncio.gather(*[command(entry, topic, group=group) for entry in entries])
        return sum(isinstance(each, Cancelled) for each in answers)

    async def _parked(self, topic: Topic, group: str, refs: Sequence[str]) -> list[tuple[int, bytes]]:
        """Partition and stream id of those that are still parked."""
        keys = {number: self._keys.retry(topic.name, number, group) for number in topic.numbers}
        members = [each for ref in refs async for each in self._members(keys, ref)]
        return [(number, member.partition(b"|")[0]) for number, member in members]

    async def _next(self, keys: Mapping[int, str]) -> list[tuple[int, bytes, int]]:
        """Partition, member and due time of those that are due next, over all partitions."""
        replies = await ask_all(
            self._client,
            [("ZRANGEBYSCORE", key, "-inf", "+inf", "WITHSCORES", "LIMIT", 0, MOST) for key in keys.values()],
        )
        rows = []
        for number, reply in zip(keys, replies, strict=True):
            flat = [part for pair in reply for part in pair] if reply and isinstance(reply[0], list) else reply or []
            rows += [(number, member, as_ms(due)) for member, due in zip(flat[::2], flat[1::2], strict=True)]
        return sorted(rows, key=lambda row: row[2])[:MOST]

    async def _members(self, keys: Mapping[int, str], ref: str) -> AsyncIterator[tuple[int, bytes]]:
        """Partition and content of what a form names, if it still waits."""
        number, due, _ = split_ref(ref)
        if number in keys:
            # a score has a fraction: messages of one millisecond are in the order of their publishing
            for member in await self._client.execute_command("ZRANGEBYSCORE", keys[number], due, f"({due + 1}"):
                if ref_of(number, due, member) == ref:
                    yield number, member


def due_text(due_ms: int | None) -> str:
    """A due time as scripts take it; None is now."""
    return "+0" if due_ms is None else str(due_ms)


def as_ms(score: bytes | float) -> int:
    """A due time, at most the year 9999."""
    return max(0, min(int(float(score)), LATEST_MS))


def ref_of(partition: int, due: int, member: bytes) -> str:
    """The value that a form sends back for a message."""
    return f"{partition}-{due}-{blake2b(member, digest_size=8).hexdigest()}"


def split_ref(ref: str) -> tuple[int, int, str]:
    """Partition, due time and hash. A browser may send anything: then nothing is found."""
    partition, _, rest = ref.partition("-")
    due, _, digest = rest.partition("-")
    if not (partition.isdecimal() and due.isdecimal() and len(partition) < 6 and len(due) < 16):
        return 1 << 20, 0, ""
    return int(partition), int(due), digest
