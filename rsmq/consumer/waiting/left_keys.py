"""The keys of what a sealed partition has left, where its owner does not know them: decisions without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from rsmq.consumer.waiting.lane import Lane
from rsmq.errors import Malformed
from rsmq.model.message import Message, RawEntry
from rsmq.model.stream_id import parse_stream_id


class LeftKeys:
    """The keys of messages that are not read yet, and of those that wait as ids for a turn or a rate.

    Nothing is added to a sealed partition, so all of them are among the entries from one id on. They are looked for
    once, page by page, and count while no connection of the lane was lost. `unread` are the keys of what the group had
    not been given by then, beyond `given`; `waiting` those of the ids.
    """

    __slots__ = ("_ids", "_most", "_number", "cursor", "given", "lane", "seen", "unread", "waiting")

    def __init__(self, lane: Lane, given: bytes, most: int) -> None:
        """`given`: the last id that the group was given. `most`: more keys than this are not kept."""
        self.lane = lane
        self._number = lane.recovery.number
        self._most = most
        self._ids = frozenset(lane.flows.named.ids())
        self.given = parse_stream_id(given)
        self.seen = 0
        self.unread: set[bytes] = set()
        self.waiting: set[bytes] = set()
        first = min((parse_stream_id(each) for each in self._ids), default=self.given)
        self.cursor: bytes | None = b"%d-%d" % min(first, self.given)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to look through."""
        return self.cursor is None

    @property
    def counts(self) -> bool:
        """Whether no connection of the lane was lost since it began."""
        return self._number == self.lane.recovery.number

    @property
    def is_known(self) -> bool:
        """Whether all keys are known."""
        return self.is_over and self.counts and not self.is_too_much

    @property
    def is_too_much(self) -> bool:
        """Whether there are more keys, or entries, than are kept or looked through."""
        return len(self.unread) + len(self.waiting) > self._most or self.seen > 10 * self._most

    def add(self, entries: Sequence[RawEntry]) -> None:
        """The next entries, as the server has them. None: these were all."""
        if not entries or self.is_too_much:
            self.cursor = None
            return
        self.seen += len(entries)
        for entry_id, fields in entries:
            is_unread = parse_stream_id(entry_id) > self.given
            if is_unread or entry_id in self._ids:
                key = self._key_of(entry_id, fields)
                if key is not None:
                    (self.unread if is_unread else self.waiting).add(key)
        self.cursor = b"(" + entries[-1][0]

    def _key_of(self, entry_id: bytes, fields: list[bytes]) -> bytes | None:
        with suppress(Malformed):  # a dead letter as soon as it is read
            return Message(self.lane, entry_id, fields).routing_key
        return None

    def __repr__(self) -> str:
        return f"<LeftKeys unread={len(self.unread)} waiting={len(self.waiting)} seen={self.seen}>"
