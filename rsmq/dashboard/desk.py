"""What the pages may ask, with an upper bound for each answer, and the few things that they may do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from rsmq.clock import from_epoch_ms
from rsmq.connect import Client
from rsmq.dashboard.watcher import Watcher
from rsmq.dlq import DeadLetter, DeadLetters, Selection
from rsmq.errors import Malformed, RsmqError
from rsmq.keys import Keys
from rsmq.message import Message, Place
from rsmq.observer import Observer
from rsmq.partition import partition_for
from rsmq.persistence import Device, Devices, Letter
from rsmq.settings import Settings
from rsmq.topic import Topic, Topics

MOST_MESSAGES: Final = 25
MOST_LETTERS: Final = 200
MOST_SCANNED: Final = 20_000
SCANNED: Final = 500
MOST_DEVICES: Final = 100
MOST_WAITING: Final = 10
PREVIEW: Final = 200
LONGEST: Final = 20_000
"""Characters of a payload that a page shows."""


class Refused(RsmqError):
    """This dashboard changes nothing, or what is to be changed is not there."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One message as the browser shows it; `text` is its payload, or why it cannot be read."""

    id: str
    at: str
    key: str
    headers: str
    text: str


class Desk:
    """One for all pages of a process."""

    def __init__(self, client: Client, keys: Keys, settings: Settings, *, allow_changes: bool) -> None:
        self._client, self._keys = client, keys
        self._topics = Topics(client, keys, settings)
        self._letters = DeadLetters(client, keys)
        self._devices = Devices(client, keys)
        self.allow_changes = allow_changes
        self.prefix = keys.prefix
        self.watcher = Watcher(Observer(client, keys, settings))

    async def topic(self, name: str) -> Topic:
        """Raises Refused."""
        found = await self._topics.find(name)
        if found is None:
            raise Refused(f"there is no topic {name!r}")
        return found

    async def messages(self, topic: str, partition: int, before: str = "+", key: str = "") -> list[Entry]:
        """The newest of a partition before an id, newest first, at most MOST_MESSAGES; of a key, if one is given, as
        far as it is among the MOST_SCANNED newest. Consumes nothing."""
        stream = self._keys.stream((await self.topic(topic)).name, partition)
        place, entries = Place(topic, partition, ""), list[Entry]()
        for _ in range(MOST_SCANNED // SCANNED if key else 1):
            end = before if before == "+" else f"({before}"
            count = SCANNED if key else MOST_MESSAGES
            found = await self._client.execute_command("XREVRANGE", stream, end, "-", "COUNT", count)
            entries += [each for row in found if (each := read_entry(place, *row)) and key in ("", each.key)]
            if len(found) < count or len(entries) >= MOST_MESSAGES:
                break
            before = found[-1][0].decode()
        return entries[:MOST_MESSAGES]

    async def partition_of(self, topic: str, key: str) -> int:
        """Where the messages of a key are."""
        return partition_for(key, (await self.topic(topic)).partitions)

    async def dead_letters(self, topic: str, group: str, wanted: Selection) -> tuple[list[DeadLetter], bool]:
        """The oldest that are meant, at most MOST_LETTERS, and whether there may be more."""
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
        """One of them."""
        return await self._letters.get(await self.topic(topic), group, letter)

    async def devices(self, *, only_waiting: bool) -> tuple[list[Device], bool]:
        """Some of them, in no order, at most MOST_DEVICES, and whether there are more."""
        found: list[Device] = []
        async for device in self._devices.iterate():
            if device.backlog or not only_waiting:
                if len(found) == MOST_DEVICES:
                    return found, True
                found.append(device)
        return found, False

    async def device(self, client_id: str) -> Device | None:
        """One of them."""
        return await self._devices.find(client_id)

    async def letters(self, client_id: str) -> list[Letter]:
        """The oldest that wait in an inbox, at most MOST_WAITING."""
        return await self._devices.peek(client_id, count=MOST_WAITING)

    # -- changes --------------------------------------------------------------------------------------------------

    async def replay(self, topic: str, group: str, ids: Sequence[str]) -> int:
        """Give these dead letters another life, in their group."""
        self._check_changes()
        return await self._letters.replay(await self.topic(topic), group, ids)

    async def replay_selected(self, topic: str, group: str, wanted: Selection, every: timedelta) -> int:
        """All that are meant, also those that are not shown, at most one in `every`."""
        self._check_changes()
        return await self._letters.replay_selected(await self.topic(topic), group, wanted, every=every)

    async def purge(self, topic: str, group: str) -> int:
        """Delete all dead letters of a group for good."""
        self._check_changes()
        return await self._letters.purge(await self.topic(topic), group)

    async def purge_device(self, client_id: str) -> int:
        """Delete all that waits in an inbox for good."""
        self._check_changes()
        return await self._devices.purge(client_id)

    def _check_changes(self) -> None:
        """Whatever a page shows or does not show: here it is decided."""
        if not self.allow_changes:
            raise Refused("this dashboard only shows: start it with --allow-changes to replay and purge")

    def __repr__(self) -> str:
        return f"<Desk of {self.prefix}{' with changes' if self.allow_changes else ''}>"


def read_entry(place: Place, entry_id: bytes, fields: list[bytes]) -> Entry:
    """For a page; one that cannot be read says why."""
    at = from_epoch_ms(int(entry_id.partition(b"-")[0])).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    try:
        message = Message(place, entry_id, fields)
        headers = "\n".join(f"{name}: {value}" for name, value in message.headers.items())
        return Entry(entry_id.decode(), at, message.key or "", headers, as_text(message.data))
    except Malformed as error:
        return Entry(entry_id.decode(), at, "", "", f"(unreadable: {error})")


def as_text(data: bytes | None) -> str:
    """A payload for a person, cut where it gets too long."""
    if data is None:
        return "(none)"
    text = data[: LONGEST * 4].decode(errors="backslashreplace")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(data)} bytes)"
