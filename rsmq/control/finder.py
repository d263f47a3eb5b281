"""Finding a message by its id: there is no index, but an id that rsmq makes carries its time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice, zip_longest
from typing import Final

from rsmq.errors import ConfigError, Malformed
from rsmq.model.clock import LATEST_MS, from_epoch_ms
from rsmq.model.keys import Keys
from rsmq.model.message import Message, MessageOrigin
from rsmq.model.message_ref import MessageRef
from rsmq.model.packing import by_name, unpack_fields
from rsmq.model.record import whole
from rsmq.model.stream_id import LOCATED_ID, is_stream_id, parse_stream_id, sent_ms
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import FIND_DELAYED, FIND_ENTRY
from rsmq.redis.topics import Topic

PAGE: Final = 5000
"""Entries that one call looks at."""
WINDOWS: Final = ((250, 1_000), (2_000, 5_000), (60_000, 120_000), (900_000, 900_000))
"""Ms before and after the time of an id where its entry is looked for, in turn: clocks differ, and a publisher waits
for a server that is away."""
OTHER_ZONE: Final = (15 * 3_600_000, 15 * 3_600_000)
"""As far as the clock of a publisher may be off whose machine has the wrong time zone."""


@dataclass(frozen=True, slots=True)
class Found:
    """A message that was found: in the stream of a partition, or among its delayed ones (`packed`, due at `due_ms`).

    `is_cancelled`: it was delayed, and is there no more: only its id is known."""

    topic: Topic
    partition: int
    message: Message
    packed: bytes | None = field(default=None, repr=False)
    due_ms: int = 0
    is_cancelled: bool = False

    @property
    def root(self) -> int:
        """The partition that remembers its id."""
        return self.topic.layout.root_of(self.partition)

    @property
    def due(self) -> datetime | None:
        """When it is due; None if it is not delayed."""
        return None if not self.packed else from_epoch_ms(min(self.due_ms, LATEST_MS))

    @property
    def stream_id(self) -> bytes | None:
        """The id of its entry; None while it is delayed."""
        return None if self.packed is not None else self.message.entry_id


def candidates(message_id: str, topic: Topic, key: str | None) -> Iterator[Sequence[int]]:
    """The partitions where a message may be, the likeliest first. A message without a key is where its id belongs."""
    match = LOCATED_ID.fullmatch(message_id)
    layout = topic.layout
    if isinstance(message_id, MessageRef):
        number = message_id.partition_number
        yield (number,)
        if layout.is_resized:  # a delayed one moves to a partition that follows, a repeated one was there before
            yield layout.ancestors_of(number)
            yield layout.descendants_of(number)
    elif match is not None and match[1] is not None:
        yield (int(match[1]),)
    elif key is not None:
        yield layout.numbers_for(key)
    else:
        first = layout.numbers_for(message_id)
        yield first
        yield [number for number in topic.numbers if number not in first]


def ranges(times: Sequence[int], windows: Sequence[tuple[int, int]] = WINDOWS) -> Iterator[tuple[str, str]]:
    """Ranges of stream ids to look at, in turn; none twice."""
    for time in dict.fromkeys(times):
        done: tuple[int, int] | None = None
        for before, after in windows:
            start, end = max(0, time - before), time + after
            if done is None:
                yield str(start), f"{end}"
            else:
                yield str(done[1] + 1), str(end)
                yield str(start), str(done[0] - 1)
            done = start, end


def read_entry(topic: Topic, partition: int, entry_id: bytes, fields: list[bytes]) -> Message:
    """An entry as a message; of one that no consumer can read, only the id."""
    origin = MessageOrigin(topic.name, partition, "")
    try:
        return Message(origin, entry_id, fields)
    except Malformed:
        named = by_name(fields)
        return Message(origin, entry_id, [b"data", b"", b"id", named.get(b"id", entry_id)])


@dataclass(frozen=True, slots=True)
class Clue:
    """The times at which the entry of a message may have been stored, and when it was due if it was delayed."""

    times: list[int]
    due: int | None


class Finder:
    """Finds messages. It reads, and sends no payload but that of the message."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client, self._keys = client, keys

    async def find(
        self, message_id: str, topic: Topic, key: str | None = None, *, is_thorough: bool = False
    ) -> Found | None:
        """The message, or None. An id that is no UUIDv7 is found as long as the server remembers it (dedup window).

        `is_thorough`: look also where a publisher in another language may have stored it, whose clock shows the hour of
        another time zone. If the message is not there, that reads a day of messages.
        """
        if isinstance(message_id, MessageRef) and message_id.topic != topic.name:
            raise ConfigError(f"{message_id} was published to {message_id.topic!r}, not to {topic.name!r}")
        partitions = [
            number for group in candidates(message_id, topic, key) for number in group if number in topic.numbers
        ]
        clues = dict[int, Clue]()
        for partition in partitions:
            found, clue = await self._at_once(message_id, topic, partition)
            if found is not None:
                return found
            if clue is not None:
                clues[partition] = clue
        for partition, clue in clues.items():  # nearly every message is there, and delayed ones are searched one by one
            for span in islice(ranges(clue.times), 1 if clue.due is None else 0):
                found = await self._search(message_id, topic, partition, *span)
                if found is not None:
                    return found
        for partition, clue in sorted(clues.items(), key=lambda each: each[1].due is None):
            found = await self._find_delayed(message_id, topic, partition, clue.due)
            if found is not None:
                return found
        # from the first range on: what was delayed may be there by now
        windows = (*WINDOWS, OTHER_ZONE) if is_thorough else WINDOWS
        for spans in zip_longest(*[ranges(clue.times, windows) for clue in clues.values()]):
            for partition, span in zip(clues, spans, strict=True):
                found = None if span is None else await self._search(message_id, topic, partition, *span)
                if found is not None:
                    return found
        return None

    async def _at_once(self, message_id: str, topic: Topic, partition: int) -> tuple[Found | None, Clue | None]:
        """The message of a partition, if no search is needed, or where it may be."""
        if match := LOCATED_ID.fullmatch(message_id):
            found = await self.entry(topic, partition, match[2])
            if found is not None:
                return found, None
            message_id = match[2]  # of a client that gives no ids
        dedup = self._keys.dedup(topic.name, topic.layout.root_of(partition), message_id)
        known = await self._client.execute_command("GET", dedup)
        times = [] if (time := sent_ms(message_id)) is None else [time]
        if known and is_stream_id(known):
            found = await self.entry(topic, partition, known.decode())
            if found is not None:
                return found, None
        if known == b"cancelled":
            message = read_entry(topic, partition, b"0-0", [b"data", b"", b"id", message_id.encode()])
            return Found(topic, partition, message, packed=b"", is_cancelled=True), None
        if match:
            return None, None
        due = whole(known)
        return None, Clue(times if due is None else [*times, due], due)

    async def _search(self, message_id: str, topic: Topic, partition: int, start: str, end: str) -> Found | None:
        """The message, if its entry is in this range of stream ids."""
        stream = self._keys.stream(topic.name, partition)
        while start:
            args = ("id", message_id, start, end, PAGE)
            entry_id, start = map(bytes.decode, await FIND_ENTRY(self._client, (stream,), args))
            if entry_id:
                return await self.entry(topic, partition, entry_id)
        return None

    async def entry(self, topic: Topic, partition: int, stream_id: str) -> Found | None:
        """An entry of the stream by its own id."""
        stream = self._keys.stream(topic.name, partition)
        for entry_id, fields in await self._client.execute_command("XRANGE", stream, stream_id, stream_id):
            return Found(topic, partition, read_entry(topic, partition, entry_id, fields))
        return None

    async def _find_delayed(self, message_id: str, topic: Topic, partition: int, due: int | None) -> Found | None:
        """Outputs of handlers are not remembered under their ids, so then every delayed message is looked at."""
        delayed, offset = self._keys.delayed(topic.name, partition), 0
        least, most = ("-inf", "+inf") if due is None else (str(due), f"({due + 1}")
        while True:
            args = (message_id, least, most, offset, PAGE)
            packed, due_ms, seen = await FIND_DELAYED(self._client, (delayed,), args)
            if packed:
                message = read_entry(topic, partition, b"0-0", unpack_fields(packed))
                return Found(topic, partition, message, packed, int(float(due_ms)))
            if seen < PAGE:
                return None
            offset += PAGE

    async def kept_from(self, topic: str, partition: int) -> bytes:
        """The oldest entry of a partition of which retention has removed none behind it; empty for an empty one."""
        stream, removed = self._keys.stream(topic, partition), self._keys.removed(topic, partition)
        entries = await self._client.execute_command("XRANGE", stream, "-", "+", "COUNT", 1)
        if not entries:
            return b""
        cut = await self._client.execute_command("HGET", removed, "cut")  # it removes between those that wait, up to it
        oldest = bytes(entries[0][0])
        return max(oldest, cut, key=parse_stream_id) if cut and is_stream_id(cut) else oldest

    def __repr__(self) -> str:
        return f"<Finder under {self._keys.prefix}>"
