"""The questions of the pages, each with a bounded answer, the few changes that they can make, and the poller."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import anyio
import anyio.abc

from rsmq.dlq import DeadLetter, DeadLetters, Selection
from rsmq.errors import BrokerError, Malformed, RsmqError
from rsmq.inspector.observer import Observer
from rsmq.inspector.state import Snapshot
from rsmq.inspector.trend import Board, compare
from rsmq.model.clock import from_epoch_ms, monotonic
from rsmq.model.keys import Keys
from rsmq.model.message import Message, MessageOrigin
from rsmq.model.partition import partition_for
from rsmq.model.settings import Settings
from rsmq.persistence import Device, Devices, Letter
from rsmq.redis.connector import Client
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
        self.history: deque[TimedBoard] = deque(maxlen=KEPT)
        self.trouble = ""

    @property
    def board(self) -> Board:
        """The newest."""
        return self.history[-1].board if self.history else Board(None, (), ())

    def touch(self) -> None:
        """A page is open."""
        self._seen_at = monotonic()
        self._wanted.set()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Poll until cancelled. An outage is shown on the pages: no error leaves this loop."""
        task_status.started()
        while True:
            if monotonic() - self._seen_at > PATIENCE:
                self._wanted, self._before = anyio.Event(), None
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

    async def poll(self) -> None:
        """Take one snapshot and compare it with the one before."""
        after = await self._observer.snapshot()
        self.history.append(TimedBoard(datetime.now(UTC), compare(self._before, after)))
        self._before, self.trouble = after, ""

    def __repr__(self) -> str:
        return f"<Poller boards={len(self.history)}>"


class Refused(RsmqError):
    """The dashboard is read-only, or the topic does not exist."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One message as the message browser shows it; `text` is its payload, or why it cannot be read."""

    id: str
    at: str
    key: str
    headers: str
    text: str


class Queries:
    """Asks the server for all pages of a process. Each answer has an upper bound."""

    def __init__(self, client: Client, keys: Keys, settings: Settings, *, allow_changes: bool) -> None:
        self._client, self._keys = client, keys
        self._topics = Topics(client, keys, settings)
        self._letters = DeadLetters(client, keys)
        self._devices = Devices(client, keys)
        self.allow_changes = allow_changes
        self.prefix = keys.prefix
        self.poller = Poller(Observer(client, keys, settings))

    async def topic(self, name: str) -> Topic:
        """Raises Refused."""
        found = await self._topics.find(name)
        if found is None:
            raise Refused(f"there is no topic {name!r}")
        return found

    async def messages(self, topic: str, partition: int, before: str = "+", key: str = "") -> list[Entry]:
        """The newest of a partition before an id, newest first, at most MOST_MESSAGES. Consumes nothing.

        With a key only its messages, among the MOST_SCANNED newest.
        """
        stream = self._keys.stream((await self.topic(topic)).name, partition)
        origin, entries = MessageOrigin(topic, partition, ""), list[Entry]()
        for _ in range(MOST_SCANNED // SCANNED if key else 1):
            end = before if before == "+" else f"({before}"
            count = SCANNED if key else MOST_MESSAGES
            found = await self._client.execute_command("XREVRANGE", stream, end, "-", "COUNT", count)
            entries += [each for row in found if (each := read_entry(origin, *row)) and key in ("", each.key)]
            if len(found) < count or len(entries) >= MOST_MESSAGES:
                break
            before = found[-1][0].decode()
        return entries[:MOST_MESSAGES]

    async def partition_of(self, topic: str, key: str) -> int:
        """The partition of a key."""
        return partition_for(key, (await self.topic(topic)).partitions)

    async def dead_letters(self, topic: str, group: str, wanted: Selection) -> tuple[list[DeadLetter], bool]:
        """The oldest that match, at most MOST_LETTERS, and whether there may be more."""
        letters: list[DeadLetter] = []
        scanned = 0
        async for letter in self._letters.iterate(await self.topic(topic), group):
            scanned += 1
            if wanted.matches(letter):
                letters.append(letter)
            if len(letters) == MOST_LETTERS or scanned == MOST_SCANNED:
                return letters, True
        return letters, False

    async def dead_letter(self, topic: str, group: str, letter: str) -> DeadLetter | None:
        """One dead letter, or None."""
        return await self._letters.get(await self.topic(topic), group, letter)

    async def devices(self, *, only_waiting: bool) -> tuple[list[Device], bool]:
        """Some devices, in no order, at most MOST_DEVICES, and whether there are more."""
        found: list[Device] = []
        async for device in self._devices.iterate():
            if device.backlog or not only_waiting:
                if len(found) == MOST_DEVICES:
                    return found, True
                found.append(device)
        return found, False

    async def device(self, client_id: str) -> Device | None:
        """One device, or None."""
        return await self._devices.find(client_id)

    async def letters(self, client_id: str) -> list[Letter]:
        """The oldest that wait in an inbox, at most MOST_WAITING."""
        return await self._devices.peek(client_id, count=MOST_WAITING)

    # -- changes --------------------------------------------------------------------------------------------------

    async def replay(self, topic: str, group: str, ids: Sequence[str]) -> int:
        """Replay these dead letters, to their group only."""
        self._check_changes()
        return await self._letters.replay(await self.topic(topic), group, ids)

    async def replay_selected(self, topic: str, group: str, wanted: Selection, every: timedelta) -> int:
        """Replay all that match, also those that are not shown, at most one in `every`."""
        self._check_changes()
        return await self._letters.replay_selected(await self.topic(topic), group, wanted, every=every)

    async def purge(self, topic: str, group: str) -> int:
        """Delete all dead letters of a group for good."""
        self._check_changes()
        return await self._letters.purge(await self.topic(topic), group)

    async def purge_device(self, client_id: str) -> int:
        """Delete all letters of an inbox for good."""
        self._check_changes()
        return await self._devices.purge(client_id)

    def _check_changes(self) -> None:
        """Raises Refused if the dashboard is read-only."""
        if not self.allow_changes:
            raise Refused("this dashboard is read-only: start it with --allow-changes to replay and purge")

    def __repr__(self) -> str:
        return f"<Queries of {self.prefix}{' with changes' if self.allow_changes else ''}>"


def read_entry(origin: MessageOrigin, entry_id: bytes, fields: list[bytes]) -> Entry:
    """A stream entry for a page; one that cannot be read says why."""
    at = from_epoch_ms(int(entry_id.partition(b"-")[0])).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    try:
        message = Message(origin, entry_id, fields)
        headers = "\n".join(f"{name}: {value}" for name, value in message.headers.items())
        return Entry(entry_id.decode(), at, message.key or "", headers, as_text(message.data))
    except Malformed as error:
        return Entry(entry_id.decode(), at, "", "", f"(unreadable: {error})")


def as_text(data: bytes | None) -> str:
    """A payload as text, cut after LONGEST characters."""
    if data is None:
        return "(none)"
    text = data[: LONGEST * 4].decode(errors="backslashreplace")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(data)} bytes)"
