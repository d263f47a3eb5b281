"""Finding messages by what they hold: key, payload, headers, time. Bounded reads; nothing is consumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal

from rsmq.control.finder import read_entry
from rsmq.dlq.dead_letter import read_dead_letter
from rsmq.dlq.selection import FieldCondition, has_fields
from rsmq.errors import ConfigError
from rsmq.model.clock import LATEST_MS, epoch_ms, from_epoch_ms
from rsmq.model.encoding import NO_CODECS, Encoding
from rsmq.model.keys import Keys, plain_text
from rsmq.model.message import JSON, Message
from rsmq.model.packing import readable_fields
from rsmq.model.stream_id import is_stream_id
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import ask_all, groups_of, read_entries
from rsmq.redis.topics import Topic

FindState = Literal["stored", "delayed", "unread", "running", "waiting_for_retry", "dead"]
STATES: Final = ("stored", "delayed", "unread", "running", "waiting_for_retry", "dead")
PAGE: Final = 500
Row = tuple[bytes, list[bytes], int]
"""Entry id, fields, and the time by which it is chosen, in ms."""


@dataclass(frozen=True, slots=True)
class Criteria:
    """Conditions that must all hold. `since` and `until`: when it was stored; of a message that is delayed or
    waits for a retry when it is due, of a dead letter when it died. The end is excluded."""

    key: str | None = None
    where: tuple[FieldCondition, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    since: datetime | None = None
    until: datetime | None = None

    @property
    def first_ms(self) -> int:
        """The first moment that counts."""
        return 0 if self.since is None else max(0, epoch_ms(self.since))

    @property
    def end_ms(self) -> int:
        """The first moment that does not count any more."""
        return LATEST_MS + 1 if self.until is None else max(0, epoch_ms(self.until))

    def suits(self, message: Message) -> bool:
        """Whether key and headers are those that are wanted: what can be said without the payload."""
        if self.key is not None and message.key != self.key:
            return False
        if self.headers:
            headers = message.headers
            if any(headers.get(name) != value for name, value in self.headers.items()):
                return False
        return True

    def matches(self, message: Message) -> bool:
        """Whether all conditions but the time hold."""
        return self.suits(message) and (not self.where or has_fields(message.data, self.where))


@dataclass(frozen=True, slots=True)
class Hit:
    """A message that was found. `at`: the time by which it was chosen. `letter`: of a dead letter, for `rsmq dlq`.
    `sealed`: why `data` is still as it is stored, such as `encrypted (k7)`; empty where it is what was published.
    """

    topic: str
    partition: int
    id: str
    stream_id: str | None
    key: str | None
    state: FindState
    at: datetime
    data: bytes = field(repr=False)
    letter: str | None = None
    type: str = JSON
    sealed: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """`is_all`: everything was looked at. Otherwise there were enough hits, or `looked_at` has reached its limit.

    `unread`: payloads that this process cannot read, such as those without their key, are no hits where a field of the
    payload is wanted. They are counted here, by the reason, such as `encrypted (k7)`.
    """

    hits: tuple[Hit, ...]
    looked_at: int
    is_all: bool
    unread: Mapping[str, int] = field(default_factory=dict)


class Search:
    """Looks through one topic, partition by partition, in pages of 500."""

    def __init__(
        self,
        client: Client,
        keys: Keys,
        topic: Topic,
        state: FindState,
        group: str | None,
        encoding: Encoding = NO_CODECS,
        bodies: bool = False,
    ) -> None:
        """`bodies`: also get payloads from the store of the encoding, of what suits the other conditions."""
        if state not in STATES:
            raise ConfigError(f"state={state!r} is unknown: use {', '.join(STATES)}")
        if state in ("unread", "running", "waiting_for_retry", "dead") and group is None:
            raise ConfigError(f"what is {state} differs from group to group: pass group, too")
        self._client = client
        self._keys = keys
        self._topic = topic
        self._state = state
        self._group = plain_text(group or "")
        self._encoding = encoding
        self._bodies = bodies

    async def run(
        self, wanted: Criteria, *, most: int, scan: int, progress: Callable[[int], None] | None = None
    ) -> Findings:
        """At most `most` hits among at most `scan` messages; `progress` is called with how many were looked at."""
        await self._check_group()
        hits, looked_at, unread = list[Hit](), 0, Counter[str]()
        of_key = [] if wanted.key is None else self._topic.layout.numbers_for(wanted.key)
        for partition in of_key or self._topic.numbers:
            async for page in self._pages(partition, wanted):
                for row in page:
                    if len(hits) == most or looked_at == scan:
                        return Findings(tuple(hits), looked_at, is_all=False, unread=unread)
                    looked_at += 1
                    if wanted.first_ms <= row[2] < wanted.end_ms:
                        hits += await self._hit(partition, row, wanted, unread)
                if progress is not None and page:
                    progress(looked_at)
        return Findings(tuple(hits), looked_at, is_all=True, unread=unread)

    async def _check_group(self) -> None:
        """Raise ConfigError for a group that is nowhere."""
        if not self._group:
            return
        streams = [self._keys.stream(self._topic.name, partition) for partition in self._topic.numbers]
        for stream in streams:
            if any(row["name"] == self._group.encode() for row in await groups_of(self._client, stream)):
                return
        raise ConfigError(f"topic {self._topic.name!r} has no group {self._group!r}: see `rsmq group list`")

    async def _hit(self, partition: int, row: Row, wanted: Criteria, unread: Counter[str]) -> list[Hit]:
        entry_id, fields, ms = row
        letter = None
        if self._state == "dead":
            dead = read_dead_letter(self._topic.name, partition, self._group, entry_id, fields)
            letter, entry_id = dead.id, dead.origin.encode() or entry_id
            fields = [part for pair in dead.fields for part in pair]
        message = read_entry(self._topic, partition, entry_id, fields)
        if not wanted.suits(message):
            return []
        sealed = await message.open_with_body(self._encoding) if self._bodies else message.open(self._encoding)
        if not wanted.matches(message):
            unread.update([sealed] if sealed else [])
            return []
        stream_id = None if self._state == "delayed" else message.stream_id
        at = from_epoch_ms(min(ms, LATEST_MS))
        about = (self._topic.name, partition, message.id, stream_id, message.key)
        return [Hit(*about, self._state, at, message.data, letter, message.type, sealed)]

    async def _pages(self, partition: int, wanted: Criteria) -> AsyncIterator[list[Row]]:
        """All messages of a partition in this state, page by page."""
        at = (self._topic.name, partition)
        stream, keys = self._keys.stream(*at), self._keys
        if self._state == "delayed":
            async for pairs in self._sorted_set(keys.delayed(*at), wanted):
                yield [(b"0-0", readable_fields(packed), ms) for packed, ms in pairs]
        elif self._state == "waiting_for_retry":
            async for pairs in self._sorted_set(keys.retry(*at, self._group), wanted):
                parked = [(member.partition(b"|")[0], ms) for member, ms in pairs]
                named = [each for each in parked if is_stream_id(each[0])]  # another client may write anything
                bodies = await ask_all(self._client, [("XRANGE", stream, each, each) for each, _ in named])
                yield [(each[0][0], each[0][1], ms) for each, (_, ms) in zip(bodies, named, strict=True) if each]
        elif self._state == "running":
            async for pending in self._pending(stream):
                bodies = await ask_all(self._client, [("XRANGE", stream, each, each) for each in pending])
                yield [row_of(*each[0]) for each in bodies if each]
        else:
            start = str(wanted.first_ms)
            if self._state == "unread":
                start = max(start, f"({await self._delivered(stream)}", key=sort_key)
            name = keys.dlq(*at, self._group) if self._state == "dead" else stream
            async for rows in self._entries(name, start, wanted.end_ms):
                yield rows

    async def _entries(self, stream: str, start: str, end_ms: int) -> AsyncIterator[list[Row]]:
        while True:
            rows = await read_entries(self._client, "XRANGE", stream, start, f"({end_ms}-0", PAGE)
            yield [row_of(*row) for row in rows]
            if len(rows) < PAGE:
                return
            start = f"({rows[-1][0].decode()}"

    async def _sorted_set(self, key: str, wanted: Criteria) -> AsyncIterator[list[tuple[bytes, int]]]:
        offset, span = 0, (str(wanted.first_ms), f"({wanted.end_ms}")
        while True:
            command = ("ZRANGEBYSCORE", key, *span, "WITHSCORES", "LIMIT", offset, PAGE)
            flat = await self._client.execute_command(*command)
            pairs = [(member, int(float(score))) for member, score in zip(flat[::2], flat[1::2], strict=True)]
            yield pairs
            if len(pairs) < PAGE:
                return
            offset += PAGE

    async def _pending(self, stream: str) -> AsyncIterator[list[bytes]]:
        start = "-"
        while True:
            rows = await self._client.execute_command("XPENDING", stream, self._group, start, "+", PAGE)
            yield [row[0] for row in rows]
            if len(rows) < PAGE:
                return
            start = f"({rows[-1][0].decode()}"

    async def _delivered(self, stream: str) -> str:
        """The last id that the group was given."""
        for row in await groups_of(self._client, stream):
            if row["name"] == self._group.encode():
                return str(row["last-delivered-id"].decode())
        raise ConfigError(f"topic {self._topic.name!r} has no group {self._group!r}")

    def __repr__(self) -> str:
        return f"<Search {self._topic.name} {self._state} {self._group}>"


def row_of(entry_id: bytes, fields: list[bytes]) -> Row:
    """An entry with the time in its id."""
    return entry_id, fields, int(entry_id.partition(b"-")[0])


def sort_key(bound: str) -> tuple[int, int]:
    """A lower bound of XRANGE in order: `5` is before `(5-0`."""
    ms, _, seq = bound.removeprefix("(").partition("-")
    return int(ms), int(seq) + 1 if seq else 0
