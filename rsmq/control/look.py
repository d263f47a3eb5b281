"""Looking at one message: where it is, for every group."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from rsmq.control.asking import MOST_ATTEMPTS, ask_member
from rsmq.control.finder import Finder, Found, candidates
from rsmq.control.status import (
    ASKED,
    MOST_BEFORE,
    GroupStatus,
    MessageStatus,
    Report,
    as_member_says,
    dead_status,
    expired,
    group_status,
    handed_on_status,
    removed_or_unknown,
)
from rsmq.dlq import DeadLetter
from rsmq.dlq.dead_letter import read_dead_letter
from rsmq.model.keys import Keys
from rsmq.model.message import Message
from rsmq.model.record import text
from rsmq.model.stream_id import LOCATED_ID, sent_ms
from rsmq.redis.client.connector import Client
from rsmq.redis.holds import holds_of
from rsmq.redis.scripts import FIND_ENTRY, LOOK_AT_MESSAGE, SEEK_ENTRY
from rsmq.redis.streams import group_names
from rsmq.redis.topics import Topic

MOST_ROWS = 1000
"""Pending messages before one that are looked at, for the one that holds its key."""
PAGE = 5000


class Look:
    """Answers where a message is. It reads only, and changes nothing."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._finder = Finder(client, keys)

    async def at(self, message_id: str, topic: Topic, key: str | None = None) -> MessageStatus:
        """The status of one message of a topic."""
        found = await self._finder.find(message_id, topic, key, is_thorough=True)
        if found is None:
            return await self._not_found(message_id, topic, key)
        status = await self._of(found, topic, key)
        return replace(status, batch=await self._batch_of(found.message))

    async def _batch_of(self, message: Message) -> str | None:
        """The name of the batch of which a message is a member. It costs others nothing."""
        if message.is_plain or message.member is None:
            return None
        found = await self._client.execute_command("HGET", self._keys.batch_state(message.member.home), "name")
        return text(found) if found else None

    async def _of(self, found: Found, topic: Topic, key: str | None) -> MessageStatus:
        about = (found.message.id, topic.name)
        if found.is_cancelled:
            return MessageStatus(*about, "cancelled", found.partition, key)
        if found.packed is not None:
            return MessageStatus(*about, "delayed", found.partition, found.message.key, due=found.due)
        names = await group_names(self._client, self._keys, topic.name, found.partition)
        groups = [await self._of_group(found, group) for group in sorted(names)]
        stream_id = found.message.stream_id
        return MessageStatus(*about, "stored", found.partition, found.message.key, stream_id, groups=tuple(groups))

    async def _of_group(self, found: Found, group: str) -> GroupStatus:
        at, message = (found.topic.name, found.partition, group), found.message
        if message.addressee is not None and message.addressee != group.encode():
            return GroupStatus(group, "not_addressed")
        keys = self._keys
        own = (keys.lease, keys.retry, keys.errors, keys.cancels, keys.cancelled, keys.waits)
        names = (keys.stream(*at[:2]), *[part(*at) for part in own])
        args = (group, message.entry_id, message.key or "", MOST_ATTEMPTS, MOST_ROWS)
        report = Report(*await LOOK_AT_MESSAGE(self._client, names, args))
        if not report.delivered:
            return GroupStatus(group, "settled")  # the group was deleted meanwhile
        behind = (
            await self._finder.entry(found.topic, found.partition, report.behind.decode()) if report.behind else None
        )
        status = group_status(group, message.entry_id, report, behind=behind.message.id if behind else "")
        if status.state in ASKED:
            status = as_member_says(status, await ask_member(self._client, keys, at, message.entry_id))
        status = replace(status, expired=expired(message, status, int(report.now)))
        if status.state == "unread":
            seek = (report.delivered, message.entry_id, MOST_BEFORE + 1)
            before, _ = await SEEK_ENTRY(self._client, names[:1], seek)
            return replace(status, before=max(0, before - 1), until=await self._held_until(*at, int(report.now)))
        if status.state == "settled":
            after = message.stream_id.partition("-")[0]  # its dead letter may be the first one of that millisecond
            letter = await self._letter(*at, "dlq.origin", message.stream_id, after)
            if letter is not None:
                return dead_status(group, letter, status.failed)
            record = await self._record(*at, message.stream_id, after)
            return status if record is None else handed_on_status(group, record, status.failed)
        return status

    async def _held_until(self, topic: str, _partition: int, group: str, now_ms: int) -> datetime | None:
        """Until when all messages of a group are held; None: they are not."""
        holds = await holds_of(self._client, self._keys, topic, group)
        return next((each.until for each in holds if not each.name and each.until_ms > now_ms), None)

    async def _letter(
        self, topic: str, partition: int, group: str, field: str, value: str, after: str
    ) -> DeadLetter | None:
        """The dead letter of a message: it is newer than the message."""
        found = await self._entry(self._keys.dlq(topic, partition, group), field, value, after)
        return None if found is None else read_dead_letter(topic, partition, group, *found)

    async def _record(
        self, topic: str, partition: int, group: str, stream_id: str, after: str
    ) -> dict[bytes, bytes] | None:
        """Where a message went that was handed on to a fallback topic."""
        found = await self._entry(self._keys.handed_on(topic, partition, group), "origin", stream_id, after)
        return None if found is None else dict(zip(found[1][::2], found[1][1::2], strict=True))

    async def _entry(self, stream: str, field: str, value: str, after: str) -> tuple[bytes, list[bytes]] | None:
        """The first entry of a stream from `after` on with this value."""
        start = after
        while start:
            entry_id, start = map(
                bytes.decode, await FIND_ENTRY(self._client, (stream,), (field, value, start, "+", PAGE))
            )
            for found, fields in (
                await self._client.execute_command("XRANGE", stream, entry_id, entry_id) if entry_id else ()
            ):
                return found, fields
        return None

    async def _not_found(self, message_id: str, topic: Topic, key: str | None) -> MessageStatus:
        """Not in the stream any more; it may be a dead letter."""
        numbers = [number for some in candidates(message_id, topic, key) for number in some if number in topic.numbers]
        firsts, time, identity = list[bytes](), sent_ms(message_id), ""
        match = LOCATED_ID.fullmatch(message_id)
        field, value = ("id", message_id) if match is None else ("dlq.origin", match[2])
        for number in numbers:
            firsts.append(await self._finder.kept_from(topic.name, number))
            dead = list[GroupStatus]()
            for group in await group_names(self._client, self._keys, topic.name, number):
                start = str(max(0, (time or 0) - 60_000))
                letter = await self._letter(topic.name, number, group, field, value, start)
                if letter is not None:
                    dead.append(dead_status(group, letter))
                    identity, key = letter.message_id, letter.key
            if dead:
                return MessageStatus(identity or message_id, topic.name, "removed", number, key, groups=tuple(dead))
        return MessageStatus(str(message_id), topic.name, removed_or_unknown(time, firsts), key=key)

    def __repr__(self) -> str:
        return f"<Look under {self._keys.prefix}>"
