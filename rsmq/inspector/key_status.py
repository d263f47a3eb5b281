"""Which keys the payloads of a topic still need, and where: what may not be deleted yet when keys are rotated.

It only reads, all of the topic, in pages. Where payloads go to is read last, so one that moves meanwhile is counted,
perhaps twice. Archives are not looked at. `letter_keys` counts those of devices, `result_keys` results and answers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pydantic_core import from_json

from rsmq.model.encoding import ENC, key_of
from rsmq.model.keys import Keys
from rsmq.model.packing import by_name, readable_fields
from rsmq.model.stream_id import parse_stream_id
from rsmq.redis.client.connector import Client
from rsmq.redis.streams import as_dict, ask_all, groups_of, hash_fields, newest_id, read_entries
from rsmq.redis.topics import Topic, stored_numbers

PAGE: Final = 1000
LONGEST_HEAD: Final = 1023
"""The last byte that is read of a result: its first line is shorter, unless it is none."""
KINDS: Final = ("backlog", "parked", "delayed", "outputs", "dead_letters", "steps", "schedules", "kept")
Kind = Literal["backlog", "parked", "delayed", "outputs", "dead_letters", "steps", "schedules", "kept"]


@dataclass(frozen=True, slots=True)
class KeyUse:
    """How many payloads need a key (`key` empty: none, they are not encrypted), by where they are.

    `backlog`: some group has yet to settle them; `parked`: they wait for a retry; `delayed`: for their time; `outputs`:
    on their way between nodes of a cluster; `steps`: results of steps, also those of dead letters; `schedules`: added
    at run time; `kept`: settled, kept for a replay.
    """

    key: str
    backlog: int = 0
    parked: int = 0
    delayed: int = 0
    outputs: int = 0
    dead_letters: int = 0
    steps: int = 0
    schedules: int = 0
    kept: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, kind) for kind in KINDS)


class KeyStatus:
    """Counts the keys of one topic."""

    def __init__(self, client: Client, keys: Keys, topic: Topic) -> None:
        self._client = client
        self._keys = keys
        self._topic = topic

    async def run(self) -> list[KeyUse]:
        """One for each key, and one for what is not encrypted, if there is any: the most used first."""
        found, ends, is_again = defaultdict[str, Counter[str]](Counter), dict[str, bytes](), False
        while True:
            numbers = await stored_numbers(self._client, self._keys, self._topic.name, self._topic.numbers)
            for partition in sorted(numbers):
                async for kind, fields in self._entries(partition, ends):
                    key = key_of(by_name(fields).get(ENC, b""))
                    if not is_again or key not in found:
                        found[key][kind] += 1
            if is_again or len(numbers) < 2:
                break
            is_again = True  # what has moved to another partition needs its key, wherever it was counted
        uses = [KeyUse(key, **counts) for key, counts in found.items()]
        return sorted(uses, key=lambda use: (-use.total, use.key))

    async def _entries(self, partition: int, ends: dict[str, bytes]) -> AsyncIterator[tuple[Kind, Sequence[bytes]]]:
        """All that is stored of a partition, with where it is, also what moves meanwhile. Of streams what comes after
        `ends`.

        What is replayed, or becomes due, is in the stream by then, so that is read after these. Both dead letters and
        stream are read on until no message has died since the last dead letters were read.
        """
        topic, stream = self._topic.name, self._keys.stream(self._topic.name, partition)
        rows = await groups_of(self._client, stream)
        groups = [row["name"].decode(errors="replace") for row in rows]
        for name, raw in await hash_fields(self._client, self._keys.every(topic, partition)):
            if name.startswith(b"added|"):
                yield "schedules", (ENC, enc_of_result(raw))
        for group in groups:
            async for _, fields in self._stream(self._keys.out(topic, partition, group), ends):
                yield "outputs", fields
            for name, raw in await hash_fields(self._client, self._keys.steps(topic, partition, group)):
                if b"|" in name:
                    yield "steps", (ENC, enc_of_result(raw))
        async for packed in self._scanned(self._keys.delayed(topic, partition)):
            yield "delayed", readable_fields(packed)
        dlqs = [self._keys.dlq(topic, partition, group) for group in groups]
        before: list[bytes] | None = None
        while (newest := await self._newest(dlqs)) != before:
            before = newest
            for dlq in dlqs:
                async for _, fields in self._stream(dlq, ends):
                    packed_fields = by_name(fields).get(b"dlq.packed")
                    yield "dead_letters", readable_fields(packed_fields) if packed_fields else fields
                    for raw in readable_fields(by_name(fields).get(b"dlq.steps", b""))[1::2]:
                        yield "steps", (ENC, enc_of_result(raw))
            parked, needed = await self._parked(partition, groups), await self._pending(stream, groups)
            last = min((parse_stream_id(row["last-delivered-id"]) for row in rows), default=(0, 0))
            async for entry_id, fields in self._stream(stream, ends):
                if entry_id in parked:
                    yield "parked", fields
                else:
                    yield "backlog" if parse_stream_id(entry_id) > last or entry_id in needed else "kept", fields

    async def _newest(self, streams: Iterable[str]) -> list[bytes]:
        """Of each stream the id of the newest entry that was ever added."""
        replies = await ask_all(self._client, [("XINFO", "STREAM", stream) for stream in streams])
        return [b"" if reply is None else newest_id(as_dict(reply)) for reply in replies]

    async def _stream(self, stream: str, ends: dict[str, bytes]) -> AsyncIterator[tuple[bytes, list[bytes]]]:
        while page := await read_entries(self._client, "XRANGE", stream, ends.get(stream, b"-"), "+", PAGE):
            for entry_id, fields in page:
                yield entry_id, fields
            ends[stream] = b"(" + page[-1][0]

    async def _scanned(self, key: str) -> AsyncIterator[bytes]:
        """The members of a sorted set: each that is there all the time, also while others leave, which moves ranks."""
        cursor: bytes | None = None
        while cursor != b"0":
            cursor, page = await self._client.execute_command("ZSCAN", key, cursor or b"0", "COUNT", PAGE)
            for member in page[::2]:
                yield member

    async def _parked(self, partition: int, groups: Iterable[str]) -> set[bytes]:
        found = set[bytes]()
        for group in groups:
            async for member in self._scanned(self._keys.retry(self._topic.name, partition, group)):
                found.add(member.partition(b"|")[0])
        return found

    async def _pending(self, stream: str, groups: Iterable[str]) -> set[bytes]:
        found = set[bytes]()
        for group in groups:
            start = b"-"
            while True:
                [rows] = await ask_all(self._client, [("XPENDING", stream, group, start, "+", PAGE)])
                if not rows:
                    break
                found.update(row[0] for row in rows)
                start = b"(" + rows[-1][0]
        return found

    def __repr__(self) -> str:
        return f"<KeyStatus of {self._topic.name}>"


async def result_keys(client: Client, keys: Keys) -> Counter[str]:
    """How many kept results, answers to requests and results of Django's tasks need a key, of all topics under this
    prefix; an empty id: none. Scans all keys of the server."""
    found, front = Counter[str](), f"{keys.prefix}:{{"
    await client.refresh()
    for node in client.nodes:
        cursor, options = b"", ("MATCH", f"{front}*", "COUNT", PAGE, "TYPE", "string")
        while cursor != b"0":
            cursor, names = await node.execute_command("SCAN", cursor or b"0", *options)
            wanted = [name for name in names if is_result(name[len(front) :])]
            for head in await ask_all(client, [("GETRANGE", name, 0, LONGEST_HEAD) for name in wanted]):
                if head:
                    found[key_of(enc_of_result(head))] += 1
    return found


def is_result(name: bytes) -> bool:
    """Whether a key, without its first part, is that of a result or an answer."""
    tag, _, rest = name.partition(b"}")
    return tag.startswith((b"%reply.", b"%task.")) or b":result:" in rest


def enc_of_result(raw: bytes) -> bytes:
    """How something is encoded whose first line is JSON that says so; empty if it is not, or if it cannot be read."""
    try:
        return str(from_json(raw.partition(b"\n")[0])["enc"]).encode()
    except (ValueError, LookupError, TypeError):
        return b""
