"""Entries of which no message was made, for handlers that want payloads only."""

from __future__ import annotations

from collections.abc import Iterator

from rsmq.consumer.lane import Lane
from rsmq.model.message import Message, RawEntry


class RawEntries:
    """Entries of one lane as they were read, for a handler that wants payloads only: no message was made of them.

    First deliveries of plain entries, in order. Invariant: no key of the lane is taken while they wait in the queue, so
    any of them may start. `done` are the ids of those that were handled one by one. To other threads they look like
    what runs: the message of the entry after those.
    """

    __slots__ = ("done", "entries", "origin")

    def __init__(self, origin: Lane, entries: list[RawEntry]) -> None:
        self.origin, self.entries, self.done = origin, entries, list[bytes]()

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Message]:
        yield Message(self.origin, *self.entries[min(len(self.done), len(self.entries) - 1)])

    def messages(self) -> list[Message]:
        """A message for each."""
        return [Message(self.origin, entry_id, fields) for entry_id, fields in self.entries]

    def __repr__(self) -> str:
        return f"<RawEntries {self.origin.topic}.{self.origin.partition} entries={len(self.entries)}>"
