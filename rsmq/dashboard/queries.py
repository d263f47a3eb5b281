"""The questions of the pages, each with a bounded answer, and the poller."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import anyio
import anyio.abc

from rsmq.codecs.reading import Reading
from rsmq.control import Batches, Look, MessageStatus
from rsmq.control.finder import Finder
from rsmq.dlq import DeadLetter, DeadLetters, Selection
from rsmq.dlq.selection import FieldCondition, has_fields
from rsmq.errors import BrokerError, ConfigError, Malformed, RsmqError
from rsmq.inspector.observer import Observer
from rsmq.inspector.state import Snapshot, TopicState
from rsmq.inspector.trend import Board, compare
from rsmq.model.clock import from_epoch_ms, monotonic
from rsmq.model.encoding import ENC, NO_CODECS, Encoding
from rsmq.model.keys import Keys
from rsmq.model.message import JSON, Message, MessageOrigin
from rsmq.model.packing import by_name, unpack_fields
from rsmq.model.settings import Settings
from rsmq.model.stream_id import parse_stream_id
from rsmq.persistence import Device, Devices, Letter
from rsmq.persistence.mqtt_clients import MqttClient, MqttClients
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import ask_all, group_names, read_entries
from rsmq.redis.topics import Topic, Topics

log = logging.getLogger("rsmq.dashboard")

EVERY: Final = 1.0
"""Seconds between two snapshots."""
PATIENCE: Final = 10.0
"""Seconds without an open page after which it stops."""
KEPT: Final = 180
MOST_MESSAGES: Final = 25
MOST_LETTERS: Final = 200
MOST_SCANNED: Final = 20_000
SCANNED: Final = 500
MOST_DEVICES: Final = 100
MOST_WAITING: Final = 10
MOST_PENDING: Final = 20
MOST_NAMED: Final = 50
"""Messages of members that a page shows with their ids."""
PREVIEW: Final = 200
LONGEST: Final = 20_000
"""Characters of a payload that a page shows."""


class TimedBoard(NamedTuple):
    """A board and when it was taken."""

    at: datetime
    board: Board


class Poller:
    """The newest `KEPT` boards. However many pages are open, the server is asked once a second."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._before: Snapshot | None = None
        self._seen_at = 0.0
        self._wanted = anyio.Event()
        self._polling = anyio.Lock()
        self.history: deque[TimedBoard] = deque(maxlen=KEPT)
        self.trouble = ""

    @property
    def board(self) -> Board:
        """The newest."""
        return self.history[-1].board if self.history else Board(None, (), ())

    def topic_state(self, name: str) -> TopicState | None:
        """A topic as the newest snapshot has it."""
        topics = () if self._before is None else self._before.topics
        return next((each for each in topics if each.topic.name == name), None)

    def touch(self) -> None:
        """A page is open."""
        self._seen_at = monotonic()
        self._wanted.set()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Poll until cancelled. An outage is shown on the pages: no error leaves this loop."""
        task_status.started()
        while True:
            if monotonic() - self._seen_at > PATIENCE:
                self._wanted = anyio.Event()
                self._before = None
                await self._wanted.wait()
            try:
                await self.poll()
            except BrokerError as error:
                if not self.trouble:
                    log.warning("the server cannot be asked: %s", error)
                self.trouble = str(error)
            except Exception as error:
                log.exception("unexpected error in the poller")
                self.trouble = f"{type(error).__name__}: {error}"
            await anyio.sleep(EVERY)

    async def fresh(self) -> Board:
        """The newest board, or a new one if that is old: for a page that opens. Raises BrokerError."""
        self.touch()
        if self._before is None or monotonic() - self._before.at > 2 * EVERY:
            await self.poll()
        return self.board

    async def poll(self) -> None:
        """Take one snapshot and compare it with the one before."""
        async with self._polling:
            await self._poll()

    async def _poll(self) -> None:
        after = await self._observer.snapshot()
        self.history.append(TimedBoard(datetime.now(UTC), compare(self._before, after)))
        self._before = after
        self.trouble = ""

    def __repr__(self) -> str:
        return f"<Poller boards={len(self.history)}>"


class PageNotFound(RsmqError):
    """The thing that an address names does not exist, or not for this visitor."""


class PageRefused(RsmqError):
    """The visitor has no right to do it."""


@dataclass(frozen=True, slots=True)
class BrowsedMessage:
    """One message as the message browser shows it; `text` is its payload, or why it cannot be read."""

    partition: int
    id: str
    at: str
    key: str
    message_id: str
    headers: str = field(repr=False)
    text: str = field(repr=False)
    data: bytes | None = field(repr=False)
    kind: str = JSON
    """The content type."""
    header_pairs: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    encoding: str = ""
    """How its payload was stored, such as `zstd;a256gcm=k7`."""
    sealed: str = ""
    """Why it cannot be read; empty if it can."""


@dataclass(frozen=True, slots=True)
class MessageSearch:
    """Which messages are wanted. `id` is a message id or a stream id, `where` a field of a JSON payload."""

    partition: int | None = None
    before: str = "+"
    key: str = ""
    id: str = ""
    where: tuple[FieldCondition, ...] = ()

    @property
    def is_filter(self) -> bool:
        """Whether messages have to be looked through."""
        return bool(self.key or self.id or self.where)

    def suits(self, entry: BrowsedMessage) -> bool:
        """Whether those conditions hold that need no payload."""
        return self.key in ("", entry.key) and self.id in ("", entry.id, entry.message_id)

    def matches(self, entry: BrowsedMessage) -> bool:
        """Whether all conditions hold."""
        return self.suits(entry) and (not self.where or has_fields(entry.data, self.where))


class FoundMessages(NamedTuple):
    """Messages that match. `unread`: how many suit, but for the fields of their payload, which this process cannot
    read, by the reason."""

    entries: list[BrowsedMessage]
    is_more: bool
    unread: Counter[str]


class FoundLetters(NamedTuple):
    """Dead letters that match, and as above."""

    letters: list[DeadLetter]
    is_more: bool
    unread: Counter[str]


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """A message that was delivered to a member and is not settled: it runs, is ready, or waits."""

    member: str
    partition: int
    id: str
    since: timedelta
    attempt: int
    message_id: str = ""


class Queries:
    """Asks the server for all pages of a process. Each answer has an upper bound."""

    def __init__(self, client: Client, keys: Keys, settings: Settings) -> None:
        self.client = client
        self.keys = keys
        self.settings = settings
        self.topics = Topics(client, keys, settings)
        self.encoding = Reading(int(settings.decoded_limit))
        """Undoes what is compressed, or encrypted with a key of RSMQ_KEYS."""
        self.dlq = DeadLetters(client, keys, self.encoding)
        self.batches = Batches(client, keys, self.topics)
        self.all_devices = Devices(client, keys, self.encoding)
        self.mqtt = MqttClients(client, keys)
        self.poller = Poller(Observer(client, keys, settings))
        self._message_ids = dict[tuple[str, int, str], str]()

    async def topic(self, name: str) -> Topic:
        """Raises PageNotFound."""
        try:
            found = await self.topics.find(name)
        except ConfigError:  # no topic can have this name
            found = None
        if found is None:
            raise PageNotFound(f"there is no topic {name!r}")
        return found

    async def group(self, topic: str, group: str) -> Topic:
        """The topic of a group that exists. Raises PageNotFound."""
        found = await self.topic(topic)
        for partition in found.numbers:
            if group in await group_names(self.client, self.keys, topic, partition):
                return found
        raise PageNotFound(f"topic {topic!r} has no group {group!r}")

    async def messages(self, topic: str, wanted: MessageSearch, most_scanned: int = MOST_SCANNED) -> FoundMessages:
        """The newest that match, newest first, at most MOST_MESSAGES, and whether there are older ones.

        Consumes nothing. With conditions, those among the `most_scanned` newest of the partitions that may have them.
        """
        found = await self.topic(topic)
        partitions: Sequence[int] = found.numbers
        if wanted.partition is not None:
            partitions = (wanted.partition,)
        elif wanted.key:
            partitions = found.layout.numbers_for(wanted.key)
        most = most_scanned // len(partitions) if wanted.is_filter else MOST_MESSAGES + 1
        unread = Counter[str]()
        entries = [entry for each in partitions for entry in await self._newest(topic, each, wanted, most, unread)]
        entries.sort(key=lambda entry: parse_stream_id(entry.id.encode()), reverse=True)
        return FoundMessages(entries[:MOST_MESSAGES], len(entries) > MOST_MESSAGES, unread)

    async def _newest(
        self, topic: str, partition: int, wanted: MessageSearch, most: int, unread: Counter[str]
    ) -> list[BrowsedMessage]:
        stream, entries, before, scanned = self.keys.stream(topic, partition), list[BrowsedMessage](), wanted.before, 0
        while scanned < most and len(entries) <= MOST_MESSAGES:
            end, count = before if before == "+" else f"({before}", min(SCANNED, most - scanned)
            rows = await read_entries(self.client, "XREVRANGE", stream, end, "-", count)
            for row in rows:
                entry = read_entry(MessageOrigin(topic, partition, ""), row[0], row[1], self.encoding)
                if wanted.matches(entry):
                    entries.append(entry)
                elif entry.sealed and wanted.suits(entry):
                    unread[entry.sealed] += 1
            scanned += len(rows)
            if len(rows) < count:
                break
            before = rows[-1][0].decode()
        return entries

    async def status(self, topic: str, message_id: str, key: str | None = None) -> MessageStatus:
        """Where a message is, for each group. Raises PageNotFound, or ConfigError if the user may run no script."""
        found = await Look(self.client, self.keys).at(message_id, await self.topic(topic), key)
        if found.partition is None:
            raise PageNotFound(f"message {message_id!r} of {topic!r} is {found.text}")
        return found

    async def one(self, topic: str, message_id: str, key: str | None = None) -> BrowsedMessage | None:
        """A message with its payload; None if only its dead letters are left."""
        found = await Finder(self.client, self.keys).find(message_id, await self.topic(topic), key)
        if found is None or found.is_cancelled:
            return None
        origin, stream_id = MessageOrigin(topic, found.partition, ""), found.stream_id
        if found.packed is not None:
            return await read_with_body(origin, b"0-0", unpack_fields(found.packed), self.encoding)
        stream = self.keys.stream(topic, found.partition)
        rows = await self.client.execute_command("XRANGE", stream, stream_id, stream_id)
        return await read_with_body(origin, rows[0][0], rows[0][1], self.encoding) if rows else None

    async def pending(self, topic: str, group: str) -> list[PendingMessage]:
        """What was delivered to members of a group and is not settled, longest first: at most MOST_PENDING of each
        partition. Those that wait for a retry are left out: with key order they are pending, too."""
        found = await self.topic(topic)
        replies = await ask_all(
            self.client,
            [("XPENDING", self.keys.stream(topic, number), group, "-", "+", MOST_PENDING) for number in found.numbers],
        )
        rows = [
            PendingMessage(
                member.decode(errors="replace"), number, entry_id.decode(), timedelta(milliseconds=idle), count
            )
            for number, reply in zip(found.numbers, replies, strict=True)
            for entry_id, member, idle, count in reply or ()
        ]
        parked = [
            ("ZSCORE", self.keys.retry(topic, each.partition, group), f"{each.id}|{each.attempt}") for each in rows
        ]
        rows = [row for row, due in zip(rows, await ask_all(self.client, parked), strict=True) if due is None]
        rows.sort(key=lambda each: each.since, reverse=True)
        return await self._named(topic, rows[:MOST_NAMED]) + rows[MOST_NAMED:]

    async def _named(self, topic: str, rows: list[PendingMessage]) -> list[PendingMessage]:
        """Rows with their message ids. Those of the last call are remembered, for pages that are open."""
        entries = [(topic, each.partition, each.id) for each in rows]
        unknown = [entry for entry in entries if entry not in self._message_ids]
        commands = [("XRANGE", self.keys.stream(topic, number), entry_id, entry_id) for _, number, entry_id in unknown]
        found = {
            entry: read_entry(MessageOrigin(topic, entry[1], ""), *reply[0]).message_id if reply else ""
            for entry, reply in zip(unknown, await ask_all(self.client, commands), strict=True)
        }
        self._message_ids = {entry: found.get(entry) or self._message_ids.get(entry, "") for entry in entries}
        return [replace(each, message_id=self._message_ids[entry]) for each, entry in zip(rows, entries, strict=True)]

    async def dead_letters(self, topic: str, group: str, wanted: Selection) -> FoundLetters:
        """The oldest that match, at most MOST_LETTERS, and whether there may be more. It gets nothing from a store of
        payloads: a page must not wait for thousands of them."""
        letters, unread, scanned = list[DeadLetter](), Counter[str](), 0
        async for letter in self.dlq.iterate(await self.topic(topic), group):
            scanned += 1
            if wanted.matches(letter):
                letters.append(letter)
            elif letter.sealed and wanted.suits(letter):
                unread[letter.sealed] += 1
            if len(letters) == MOST_LETTERS or scanned == MOST_SCANNED:
                return FoundLetters(letters, True, unread)
        return FoundLetters(letters, False, unread)

    async def count_dead_letters(self, topic: str, group: str, wanted: Selection) -> int:
        """How many match, also those that are not shown: what a replay of all that match would replay."""
        found = await self.topic(topic)
        if wanted.is_all:
            return await self.dlq.count(found, group)
        return sum([1 async for _ in self.dlq.select(found, group, wanted)])

    async def dead_letter(self, topic: str, group: str, letter: str) -> DeadLetter:
        """One dead letter. Raises PageNotFound."""
        try:
            found = await self.dlq.get(await self.group(topic, group), group, letter)
        except ConfigError:
            found = None
        if found is None:
            raise PageNotFound(f"{group} of {topic} has no dead letter {letter!r}: it may have been replayed")
        return found

    async def devices(self, *, only_waiting: bool) -> tuple[list[Device], bool]:
        """Some devices, in no order, at most MOST_DEVICES, and whether there are more."""
        found: list[Device] = []
        async for device in self.all_devices.iterate():
            if device.backlog or not only_waiting:
                if len(found) == MOST_DEVICES:
                    return found, True
                found.append(device)
        return found, False

    async def device(self, client_id: str) -> Device | None:
        """One device, or None."""
        try:
            return await self.all_devices.find(client_id)
        except ConfigError:
            return None

    async def mqtt_clients(self) -> tuple[list[MqttClient], bool]:
        """Some connected MQTT clients, in no order, at most MOST_DEVICES, and whether there are more."""
        names = list[str]()
        async with aclosing(self.mqtt.connected()) as connected:
            async for name, _ in connected:
                names.append(name)
                if len(names) > MOST_DEVICES:
                    break
        found = await self.mqtt.find_all(names[:MOST_DEVICES])
        return [each for each in found if each is not None], len(names) > MOST_DEVICES

    async def letters(self, client_id: str) -> list[Letter]:
        """The oldest that wait in an inbox, at most MOST_WAITING."""
        return await self.all_devices.peek(client_id, count=MOST_WAITING)

    def __repr__(self) -> str:
        return f"<Queries of {self.keys.prefix}>"


def read_entry(
    origin: MessageOrigin, entry_id: bytes, fields: list[bytes], encoding: Encoding = NO_CODECS
) -> BrowsedMessage:
    """A stream entry for a list; one that cannot be read says why."""
    try:
        message = Message(origin, entry_id, fields)
        return browsed(message, fields, message.open(encoding))
    except Malformed as error:
        return unreadable(origin, entry_id, error)


async def read_with_body(
    origin: MessageOrigin, entry_id: bytes, fields: list[bytes], encoding: Encoding
) -> BrowsedMessage:
    """The same for the page of one message: also with a body that lies in a store."""
    try:
        message = Message(origin, entry_id, fields)
        return browsed(message, fields, await message.open_with_body(encoding))
    except Malformed as error:
        return unreadable(origin, entry_id, error)


def browsed(message: Message, fields: list[bytes], sealed: str) -> BrowsedMessage:
    """A message for a page. `sealed`: why its payload is as it is stored; empty where it is not. Raises Malformed."""
    headers = "\n".join(f"{name}: {value}" for name, value in message.headers.items())
    text = f"({sealed})" if sealed else as_text(message.data)
    data = None if sealed else message.data
    at = moment(int(message.entry_id.partition(b"-")[0]))
    return BrowsedMessage(
        message.partition, message.entry_id.decode(), at, message.key or "", message.id, headers, text, data,
        message.type, tuple(message.headers.items()), encoding_of(fields), sealed,
    )  # fmt: skip


def unreadable(origin: MessageOrigin, entry_id: bytes, error: Malformed) -> BrowsedMessage:
    """An entry that is no message, for a page."""
    at = moment(int(entry_id.partition(b"-")[0]))
    return BrowsedMessage(origin.partition, entry_id.decode(), at, "", "", "", f"(unreadable: {error})", None)


def encoding_of(fields: list[bytes]) -> str:
    """How the payload of an entry is stored; empty for one that is as it was published."""
    stored = by_name(fields).get(ENC, b"")
    return stored.decode(errors="backslashreplace")


def moment(ms: int) -> str:
    """A time in UTC."""
    return from_epoch_ms(ms).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def as_text(data: bytes | None) -> str:
    """A payload as text, cut after LONGEST characters."""
    if data is None:
        return "(none)"
    text = data[: LONGEST * 4].decode(errors="backslashreplace")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(data)} bytes)"
