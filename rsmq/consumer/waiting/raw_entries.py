"""Entries of which no messages were made, for handlers that want payloads only."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import starmap

from rsmq.consumer.waiting.lane import Lane
from rsmq.errors import Malformed
from rsmq.model.message import LARGEST_PAYLOAD, Message, RawEntry


class RawEntries:
    """Entries of one lane as they were read, for a handler that wants payloads only: no message was made of them.

    First deliveries, in order; the payload comes first. Nearly all are plain: `made` has the messages of the others,
    such as those with headers, by their place and in this order. Invariant: no key of the lane is taken while they
    wait in the queue, so any of them may start. `done` are the ids of those that were handled one by one. To other
    threads they look like what runs: the message of the entry after those.
    """

    __slots__ = ("done", "entries", "made", "origin")

    def __init__(self, origin: Lane, entries: list[RawEntry], made: dict[int, Message]) -> None:
        self.origin = origin
        self.entries = entries
        self.made = made
        self.done = list[bytes]()

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Message]:
        yield self.message(min(len(self.done), len(self.entries) - 1))

    def message(self, position: int) -> Message:
        """The message of the entry at this place."""
        return self.made.get(position) or Message(self.origin, *self.entries[position])

    def each(self, most: int | None = None) -> Iterator[Message]:
        """A message for each, or for each of the first, made when it is asked for."""
        entries = self.entries[:most]
        if self.made:
            return map(self.message, range(len(entries)))
        return starmap(partial(Message, self.origin), entries)

    def messages(self) -> list[Message]:
        """A message for each."""
        return list(self.each())

    def part(self, start: int, end: int | None = None) -> RawEntries:
        """Some of them."""
        entries = self.entries[start:end]
        made = {position - start: each for position, each in self.made.items() if 0 <= position - start < len(entries)}
        return RawEntries(self.origin, entries, made)

    def __repr__(self) -> str:
        return f"<RawEntries {self.origin.topic}.{self.origin.partition} entries={len(self.entries)}>"


def make_messages(lane: Lane, entries: list[RawEntry], positions: list[int]) -> dict[int, Message] | None:
    """The messages of the entries at these places. None: one of them is unreadable, or may not start as it is."""
    made = dict[int, Message]()
    for position in positions:
        entry_id, fields = entries[position]
        try:
            made[position] = message = Message(lane, entry_id, fields)
        except Malformed:
            return None
        is_special = message.addressee is not None or message.expires_ms is not None or fields[0] != b"data"
        if is_special or message.result_ms is not None or len(message.data) > LARGEST_PAYLOAD:
            return None
    return made


def key_of(fields: list[bytes]) -> bytes | None:
    """The ordering key of a plain entry."""
    if len(fields) == 6:
        return fields[5]
    return fields[3] if len(fields) == 4 and fields[2] == b"key" else None
