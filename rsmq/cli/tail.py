"""`rsmq tail`: prints messages of a topic. It uses no group and acknowledges nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import anyio
import typer

from rsmq.cli.connection import CommandConnection, asked, connected
from rsmq.cli.failure import print_error
from rsmq.cli.output import as_data, print_json, print_line
from rsmq.cli.parameters import Json, TopicName, Url, example
from rsmq.errors import BrokerUnavailable, Malformed
from rsmq.model.clock import from_epoch_ms, to_ms
from rsmq.model.encoding import Encoding
from rsmq.model.message import Message, MessageOrigin
from rsmq.model.stream_id import parse_stream_id
from rsmq.model.words import count, printable, shown
from rsmq.redis.streams import read_entries
from rsmq.redis.topics import Topic

LONGEST = 1000
"""Characters of a payload shown to people; --json shows all."""
PAGE = 500
POLL_SECONDS = 0.2
"""Between two reads of a cluster."""

Entry = tuple[int, bytes, list[bytes]]
"""Partition, stream id, fields."""


@example("rsmq tail orders -n 20 --follow")
def tail(
    topic: TopicName,
    group: Annotated[
        str | None, typer.Option(help="Start at the first message that this group has not got yet.")
    ] = None,
    most: Annotated[int, typer.Option("-n", min=0, help="How many at most.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Also print new messages, until Ctrl-C.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Print the last messages of a topic (with --group: its next), oldest first. Consumes nothing."""

    async def act() -> None:
        async with connected(url) as connection:
            found = await connection.topic(topic)
            view = TailReader(connection, found)
            entries = await view.newest(most) if group is None else await view.next_of(group, most)
            show(topic, entries, connection.encoding, as_json)
            if not entries and most and not as_json:
                print_error(asked(empty(topic, group, follow), connection.settings))
            while follow:
                show(topic, await view.wait(), connection.encoding, as_json)

    with contextlib.suppress(KeyboardInterrupt):
        anyio.run(act)


def empty(topic: str, group: str | None, follow: bool) -> str:
    """Why nothing is printed, or not yet."""
    what = f"{topic} has no messages" if group is None else f"{topic} has no messages that {group} has not got"
    return f"{what}{' yet; waiting for new ones' if follow else ''}"


class TailReader:
    """Reads a topic's partitions as one stream. `seen` has the last id that was read of each partition."""

    def __init__(self, connection: CommandConnection, topic: Topic) -> None:
        self._client = connection.client
        self._connection = connection
        self._topic = topic.name
        self._streams = {number: connection.keys.stream(topic.name, number) for number in topic.numbers}
        self.seen = dict.fromkeys(topic.numbers, b"0-0")
        self._block_ms = min(1000, to_ms(connection.settings.command_timeout) // 2)

    async def newest(self, most: int) -> list[Entry]:
        """The last entries, oldest first."""
        entries = await self._read("XREVRANGE", dict.fromkeys(self._streams, ("+", "-")), max(1, most))
        for partition, entry_id, _ in reversed(entries):
            self.seen[partition] = max(self.seen[partition], entry_id, key=parse_stream_id)
        return entries[len(entries) - most :] if most < len(entries) else entries

    async def next_of(self, group: str, most: int) -> list[Entry]:
        """The first entries that were not delivered to a group."""
        for each in (await self._connection.group(self._topic, group)).shares:
            self.seen[each.partition] = each.last_delivered_id.encode()
        entries = await self._read("XRANGE", self._following(), max(1, most))
        return self._advance(entries[:most])

    async def wait(self) -> list[Entry]:
        """New entries as soon as there are some; may be empty."""
        if self._client.is_cluster:  # one read cannot name streams of different slots
            await anyio.sleep(POLL_SECONDS)
            return self._advance(await self._read("XRANGE", self._following(), PAGE))
        limit = self._client.page_limit
        names, after = self._streams.values(), self.seen.values()
        command = ("XREAD", "COUNT", limit.of(PAGE), "BLOCK", self._block_ms, "STREAMS", *names, *after)
        try:
            with limit.asking():
                reply = await self._client.execute_command(*command)
        except BrokerUnavailable as error:
            if not error.is_broken:
                raise
            return []
        partitions = {name.encode(): number for number, name in self._streams.items()}
        found = [(partitions[name], entry_id, fields) for name, rows in reply or () for entry_id, fields in rows]
        return self._advance(sorted(found, key=lambda entry: parse_stream_id(entry[1])))

    def _following(self) -> dict[int, tuple[bytes, str]]:
        """The range of what comes after `seen`, for each partition."""
        return {number: (b"(" + last, "+") for number, last in self.seen.items()}

    async def _read(self, command: str, ranges: Mapping[int, tuple[str | bytes, str]], count: int) -> list[Entry]:
        entries: list[Entry] = []
        for partition, each in ranges.items():
            found = await read_entries(self._client, command, self._streams[partition], *each, count)
            entries += [(partition, entry_id, fields) for entry_id, fields in found]
        return sorted(entries, key=lambda entry: parse_stream_id(entry[1]))

    def _advance(self, entries: list[Entry]) -> list[Entry]:
        for partition, entry_id, _ in entries:
            self.seen[partition] = entry_id
        return entries


def show(topic: str, entries: Iterable[Entry], encoding: Encoding, as_json: bool) -> None:
    """Print entries, one line each."""
    for partition, entry_id, fields in entries:
        sealed = ""
        try:
            found = Message(MessageOrigin(topic, partition, ""), entry_id, fields)
            sealed = found.open(encoding)
            message: Message | Malformed = found
        except Malformed as error:
            message = error
        if as_json:
            print_json(as_object(partition, entry_id, message, sealed), is_line=True)
        else:
            print_line(as_line(topic, partition, entry_id, message, sealed))


def as_line(topic: str, partition: int, entry_id: bytes, message: Message | Malformed, sealed: str) -> str:
    """An entry as a line for people. The time is when the server stored it."""
    stored = from_epoch_ms(parse_stream_id(entry_id)[0]).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    head = f"{stored}Z {topic}.{partition} {entry_id.decode()}"
    if isinstance(message, Malformed):
        return f"{head} unreadable: {message}"
    data = f"({printable(sealed)})" if sealed else printable(message.data.decode(errors="backslashreplace"))
    if len(data) > LONGEST:
        data = f"{data[:LONGEST]}… ({count(len(message.data), 'byte')})"
    head += "" if message.id == message.stream_id else f" {printable(shown(message.id))}"
    return f"{head} {f'key={printable(message.key)} ' if message.key is not None else ''}{data}"


def as_object(partition: int, entry_id: bytes, message: Message | Malformed, sealed: str) -> dict[str, Any]:
    """An entry as JSON."""
    origin: dict[str, Any] = {"partition": partition, "stream_id": entry_id.decode()}
    if isinstance(message, Malformed):
        return origin | {"malformed": str(message)}
    about = {"id": message.id, "key": message.key, "type": message.type, "headers": message.headers}
    return origin | about | {"timestamp": message.timestamp} | as_data(message.data, message.type, sealed)
