"""What waits in one lane, and for what: behind a message of its key, for a retry, for a rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from rsmq.model.message import Message

NONE: Final = deque[Message](maxlen=0)
"""What waits behind most keys: a deque for each of them would cost more than all else here."""


class Flows:
    """The keys of one lane that are taken. `Queue` decides what may start; this is its memory for one partition.

    `waiting` has an entry for each key that is taken, with the messages behind it; a key in `parked` waits for its
    retry, one in `held` for its rate (a message without a key by its id). `raw_entries` counts the lane's `RawEntries`
    in the queue; there are some only while no key is taken. `untimed` are parked messages whose timers wait for the
    server.
    """

    __slots__ = ("held", "parked", "raw_entries", "untimed", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[bytes, deque[Message]] = {}
        self.parked: dict[bytes, Message] = {}
        self.held: dict[bytes | str, Message] = {}
        self.untimed: set[bytes] = set()
        self.raw_entries = 0

    # -- keys -----------------------------------------------------------------------------------------------------

    def take(self, key: bytes) -> bool:
        """Take a key for a message that starts. False: it is taken."""
        if key in self.waiting:
            return False
        self.waiting[key] = NONE
        return True

    def append(self, key: bytes, message: Message) -> None:
        """One more message behind a key."""
        behind = self.waiting[key]
        if behind is NONE:
            behind = self.waiting[key] = deque()
        behind.append(message)

    def put_first(self, key: bytes, messages: Sequence[Message]) -> None:
        """Messages that were taken together with the one that holds their key wait behind it again, first."""
        self.waiting[key] = deque((*messages, *self.waiting.get(key, ())))

    def next(self, key: bytes) -> Message | None:
        """A key is done with a message: the next one of it, or None, and the key is free."""
        behind = self.waiting.get(key)
        if behind:
            return behind.popleft()
        if behind is not None:
            del self.waiting[key]
        return None

    def behind(self, key: bytes | None) -> int:
        """How many messages wait behind a key."""
        return 0 if key is None else len(self.waiting.get(key, NONE))

    def remove_behind(self, key: bytes, ids: Collection[bytes]) -> set[bytes]:
        """Remove messages behind a key. Returns their ids."""
        behind = self.waiting[key]
        gone = {message.entry_id for message in behind if message.entry_id in ids}
        if gone:
            kept = [message for message in behind if message.entry_id not in gone]
            behind.clear()
            behind.extend(kept)
        return gone

    # -- a retry, a rate ------------------------------------------------------------------------------------------

    def park(self, key: bytes, message: Message) -> int:
        """A key waits for the retry of its message. Returns how many wait now."""
        self.parked[key] = message
        return 1 + len(self.waiting.setdefault(key, NONE))

    def unpark(self, key: bytes | None, message: Message) -> int:
        """The retry is due. Returns how many waited; 0: this message is not parked any more."""
        if key is None or self.parked.get(key) is not message:
            return 0
        del self.parked[key]
        return 1 + len(self.waiting[key])

    def hold(self, name: bytes | str, message: Message) -> None:
        """A message waits for its rate."""
        self.held[name] = message

    def let_go(self, name: bytes | str) -> None:
        """It does not wait any more."""
        del self.held[name]

    def stop_timers(self, ids: Collection[bytes]) -> list[Message]:
        """Parked messages that get another due time: copies take their place, so their timers do nothing any more.

        Returns the copies, with those that were stopped before and have no timer yet.
        """
        self.untimed.update(ids)
        stopped = list[Message]()
        for key, message in self.parked.items():
            if message.entry_id in self.untimed:
                stopped.append(message.again())
                self.parked[key] = stopped[-1]
        self.untimed = {message.entry_id for message in stopped}
        return stopped

    def timed(self, entry_id: bytes) -> None:
        """A parked message has a timer again."""
        self.untimed.discard(entry_id)

    # -- raw entries ----------------------------------------------------------------------------------------------

    def count_raw(self, change: int) -> None:
        """So many more `RawEntries` of the lane are in the queue."""
        self.raw_entries += change

    def unpacked(self) -> None:
        """None of them is in the queue."""
        self.raw_entries = 0

    # -- all ------------------------------------------------------------------------------------------------------

    def clear(self, heads: Iterable[Message]) -> None:
        """Forget all that waits. `heads` were ready; the keys that are left belong to running messages."""
        free = {each.routing_key for each in (*heads, *self.held.values()) if each.routing_key is not None}
        for behind in self.waiting.values():
            behind.clear()
        for key in free | self.parked.keys():
            self.waiting.pop(key, None)
        self.parked.clear()
        self.held.clear()

    def __repr__(self) -> str:
        return f"<Flows keys={len(self.waiting)} parked={len(self.parked)} held={len(self.held)}>"
