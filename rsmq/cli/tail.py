"""`rsmq tail`: a look into a topic that moves nothing: no group, no acknowledgement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Annotated, Any

import anyio
import typer

from rsmq.cli.option import Json, TopicName, Url
from rsmq.cli.printer import as_data, dump, printable, say
from rsmq.cli.session import Session, connected
from rsmq.clock import from_epoch_ms, to_ms
from rsmq.entry import place
from rsmq.errors import Malformed
from rsmq.message import Message, Place
from rsmq.stream import pipelined

LONGEST = 1000
"""Characters of a payload shown to people; --json shows all."""
PAGE = 500
LOOK_SECONDS = 0.2
"""Between two looks at a cluster."""

Entry = tuple[int, bytes, list[bytes]]
"""Partition, stream id, fields."""


def tail(
    topic: TopicName,
    group: Annotated[str | None, typer.Option(help="Start at what this group has not been given yet.")] = None,
    most: Annotated[int, typer.Option("-n", min=0, help="How many.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Print the last messages of a topic (with --group: its next), oldest first. Consumes nothing."""

    async def act() -> None:
        async with connected(url) as session:
            found = await session.topic(topic)
            view = View(session, topic, found.partitions)
            entries = await view.newest(most) if group is None else await view.next_of(group, most)
            show(topic, entries, as_json)
            while follow:
                show(topic, await view.wait(), as_json)

    with contextlib.suppress(KeyboardInterrupt):
        anyio.run(act)


class View:
    """Reads a topic's partitions as one. `places` are the ids up to which each partition was seen."""

    def __init__(self, session: Session, topic: str, partitions: int) -> None:
        self._client, self._session, self._topic = session.client, session, topic
        self._streams = [session.keys.stream(topic, partition) for partition in range(partitions)]
        self.places = [b"0-0"] * partitions
        self._block_ms = min(1000, to_ms(session.settings.command_timeout) // 2)

    async def newest(self, most: int) -> list[Entry]:
        """The last entries, oldest first."""
        entries = await self._read([("XREVRANGE", name, "+", "-", "COUNT", max(1, most)) for name in self._streams])
        for partition, entry_id, _ in reversed(entries):
            self.places[partition] = max(self.places[partition], entry_id, key=place)
        return entries[len(entries) - most :] if most < len(entries) else entries

    async def next_of(self, group: str, most: int) -> list[Entry]:
        """The first entries that a group has not been given."""
        for share in (await self._session.group(self._topic, group)).shares:
            self.places[share.partition] = share.last_delivered_id.encode()
        count, pairs = max(1, most), zip(self._streams, self.places, strict=True)
        entries = await self._read([("XRANGE", name, b"(" + place, "+", "COUNT", count) for name, place in pairs])
        return self._seen(entries[:most])

    async def wait(self) -> list[Entry]:
        """What comes after the places, as soon as there is some; perhaps nothing."""
        if self._client.is_cluster:  # one read cannot name streams of different slots
            await anyio.sleep(LOOK_SECONDS)
            pairs = zip(self._streams, self.places, strict=True)
            found = await self._read([("XRANGE", name, b"(" + place, "+", "COUNT", PAGE) for name, place in pairs])
            return self._seen(found)
        command = ("XREAD", "COUNT", PAGE, "BLOCK", self._block_ms, "STREAMS", *self._streams, *self.places)
        reply = await self._client.execute_command(*command)
        partitions = {name.encode(): number for number, name in enumerate(self._streams)}
        found = [(partitions[name], entry_id, fields) for name, rows in reply or () for entry_id, fields in rows]
        return self._seen(sorted(found, key=lambda entry: place(entry[1])))

    async def _read(self, commands: list[tuple[Any, ...]]) -> list[Entry]:
        entries: list[Entry] = []
        for partition, reply in enumerate(await pipelined(self._client, commands)):
            if isinstance(reply, Exception):
                raise reply
            entries += [(partition, entry_id, fields) for entry_id, fields in reply]
        return sorted(entries, key=lambda entry: place(entry[1]))

    def _seen(self, entries: list[Entry]) -> list[Entry]:
        for partition, entry_id, _ in entries:
            self.places[partition] = entry_id
        return entries


def show(topic: str, entries: Iterable[Entry], as_json: bool) -> None:
    """Print entries, a line each."""
    for partition, entry_id, fields in entries:
        try:
            message: Message | Malformed = Message(Place(topic, partition, ""), entry_id, fields)
        except Malformed as error:
            message = error
        if as_json:
            dump(as_object(partition, entry_id, message), is_line=True)
        else:
            say(as_line(topic, partition, entry_id, message))


def as_line(topic: str, partition: int, entry_id: bytes, message: Message | Malformed) -> str:
    """For people, like a log. The time is when the server stored it."""
    stored = from_epoch_ms(place(entry_id)[0]).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    head = f"{stored}Z {topic}.{partition} {entry_id.decode()}"
    if isinstance(message, Malformed):
        return f"{head} unreadable: {message}"
    data = printable(message.data.decode(errors="backslashreplace"))
    if len(data) > LONGEST:
        data = f"{data[:LONGEST]}… ({len(message.data)} bytes)"
    return f"{head} {f'key={printable(message.key)} ' if message.key is not None else ''}{data}"


def as_object(partition: int, entry_id: bytes, message: Message | Malformed) -> dict[str, Any]:
    """For programs."""
    place: dict[str, Any] = {"partition": partition, "stream_id": entry_id.decode()}
    if isinstance(message, Malformed):
        return place | {"malformed": str(message)}
    about = {"id": message.id, "key": message.key, "type": message.type, "headers": message.headers}
    return place | about | {"timestamp": message.timestamp} | as_data(message.data)
