"""Decodes what waits in the server with the handlers of this code: what would become malformed after a rollout.

It only reads. Of each kind it takes a sample: the oldest half, and the newest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from rsmq.dlq import DeadLetters
from rsmq.errors import BodyUnavailable, CannotDecode, Malformed
from rsmq.handler.handler import Handler
from rsmq.handler.reader import PayloadReader
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.keys import Keys
from rsmq.model.message import Message, MessageOrigin, refuse_oversized
from rsmq.model.packing import readable_fields
from rsmq.redis.client.client import Client
from rsmq.redis.streams import ask_all, groups_of
from rsmq.redis.topics import Topic, Topics

Kind = Literal["unread", "pending", "waiting_for_retry", "delayed", "dead"]
PAGE: Final = 1000
MOST_ERRORS: Final = 20
"""Different errors that are counted apart; the rest is counted as others."""
OTHERS: Final = "other errors"

Entry = tuple[bytes, list[bytes]]


@dataclass(slots=True)
class SchemaFinding:
    """What one handler made of one kind of message: how many were decoded, and the errors of those that were not."""

    topic: str
    group: str
    handler: str
    kind: Kind
    checked: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    example: str = ""
    """The partition and the id of the first message that failed, as `3/1718000000000-0`."""

    @property
    def failed(self) -> int:
        """How many could not be decoded."""
        return self.errors.total()

    async def add(self, handler: Handler, partition: int, entry: Entry, reader: PayloadReader) -> None:
        """Decode a message, with its body if that lies in the store. One that is for another group only is left out.
        Raises BodyUnavailable while the store is away: that says nothing of the schema, and each of them would wait."""
        origin = MessageOrigin(handler.topic, partition, handler.group)
        try:
            message = Message(origin, *entry)
            if message.addressee is not None and message.addressee != handler.group.encode():
                return
            self.checked += 1
            refuse_oversized(message)
            if message.is_outside:
                await reader.fetch(message)
            reader.read(message)
        except BodyUnavailable:
            raise
        except (Malformed, CannotDecode) as error:
            text = str(error)
            self.errors[text if text in self.errors or len(self.errors) < MOST_ERRORS else OTHERS] += 1
            self.example = self.example or f"{partition}/{entry[0].decode()}"


class SchemaCheck:
    """Reads samples of all that the handlers of one broker will get."""

    def __init__(self, client: Client, keys: Keys, topics: Topics, encoding: Encoding = NO_CODECS) -> None:
        """`encoding`: that of the broker, with its keys and its store."""
        self._encoding = encoding
        self._client = client
        self._keys = keys
        self._topics = topics

    async def run(self, handlers: Sequence[Handler], sample: int) -> list[SchemaFinding]:
        """One finding for each handler and kind, in the order of the handlers; none for a topic that does not exist.
        Raises BodyUnavailable."""
        found = {topic.name: topic for topic in await self._topics.find_all({each.topic for each in handlers})}
        return [
            finding
            for handler in handlers
            if handler.topic in found
            for finding in await self._check(handler, found[handler.topic], sample)
        ]

    async def _check(self, handler: Handler, topic: Topic, sample: int) -> list[SchemaFinding]:
        kinds: Mapping[Kind, Any] = {
            "unread": self._unread, "pending": self._pending, "waiting_for_retry": self._parked,
            "delayed": self._delayed,
        }  # fmt: skip
        share = -(-sample // len(topic.numbers))
        reader = PayloadReader(handler.decode, self._encoding, handler.formats)
        findings = []
        for kind, read in kinds.items():
            finding = SchemaFinding(handler.topic, handler.group, handler.name, kind)
            for partition in topic.numbers:
                async for entry in read(handler, partition, share):
                    await finding.add(handler, partition, entry, reader)
            findings.append(finding)
        return [*findings, await self._dead(handler, topic, sample)]

    async def _unread(self, handler: Handler, partition: int, count: int) -> AsyncIterator[Entry]:
        """What the group has not got yet; all of the stream for a group that is new and starts at the beginning."""
        stream = self._keys.stream(handler.topic, partition)
        after = None if handler.start == "latest" else "0-0"
        for group in await groups_of(self._client, stream):
            if group["name"] == handler.group.encode():
                after = group["last-delivered-id"].decode()
        if after is None:
            return
        seen: set[bytes] = set()
        commands = [("XRANGE", stream, f"({after}", "+", "COUNT", -(-count // 2))]
        commands.append(("XREVRANGE", stream, "+", f"({after}", "COUNT", count // 2 or 1))
        for entries in await ask_all(self._client, commands if count > 1 else commands[:1]):
            for entry_id, fields in entries or ():
                if entry_id not in seen:
                    seen.add(entry_id)
                    yield entry_id, fields

    async def _pending(self, handler: Handler, partition: int, count: int) -> AsyncIterator[Entry]:
        """What members have, and have not settled."""
        stream = self._keys.stream(handler.topic, partition)
        [rows] = await ask_all(self._client, [("XPENDING", stream, handler.group, "-", "+", count)])
        async for entry in self._entries(stream, [row[0] for row in rows or ()]):
            yield entry

    async def _parked(self, handler: Handler, partition: int, count: int) -> AsyncIterator[Entry]:
        """What waits for its next attempt."""
        key = self._keys.retry(handler.topic, partition, handler.group)
        members = await self._first(key, count)
        stream = self._keys.stream(handler.topic, partition)
        async for entry in self._entries(stream, [member.partition(b"|")[0] for member in members]):
            yield entry

    async def _delayed(self, handler: Handler, partition: int, count: int) -> AsyncIterator[Entry]:
        """What is not due yet."""
        for packed in await self._first(self._keys.delayed(handler.topic, partition), count):
            yield b"0-0", readable_fields(packed)

    async def _dead(self, handler: Handler, topic: Topic, sample: int) -> SchemaFinding:
        """The dead letters, as a replay would publish them."""
        finding = SchemaFinding(handler.topic, handler.group, handler.name, "dead")
        count, reader = 0, PayloadReader(handler.decode, self._encoding, handler.formats)
        async for letter in DeadLetters(self._client, self._keys).iterate(topic, handler.group):
            if (count := count + 1) > sample:
                break
            fields = [part for pair in letter.fields for part in pair if pair[0] != b"group"]
            await finding.add(handler, letter.partition, (letter.id.partition("/")[2].encode(), fields), reader)
        return finding

    async def _first(self, key: str, count: int) -> list[bytes]:
        [members] = await ask_all(self._client, [("ZRANGEBYSCORE", key, "-inf", "+inf", "LIMIT", 0, count)])
        return list(members or ())

    async def _entries(self, stream: str, ids: Iterable[bytes]) -> AsyncIterator[Entry]:
        """Entries by their ids; one that was deleted is left out."""
        wanted = list(ids)
        for at in range(0, len(wanted), PAGE):
            for entries in await ask_all(
                self._client, [("XRANGE", stream, each, each) for each in wanted[at : at + PAGE]]
            ):
                for entry_id, fields in entries or ():
                    yield entry_id, fields
