"""What may start now, and what must wait: order per key, retries that block their key, suspects one at a time.

Pure bookkeeping without I/O. The runner takes from `ready`; everything else is decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from rsmq.consumer.lane import Lane
from rsmq.message import Message

WHOLE: Final = b""
"""Routes every message of a partition alike: with order per partition it is one key."""


class Queue:
    """Messages between fetching and handling.

    `in_hand` counts what is ready, waiting behind a running message, or running: the prefetch bound applies to it.
    `shelved` counts what waits behind a key that waits for its retry: bounded apart, so that one stuck key
    does not stop the others.
    """

    def __init__(self, *, is_ordered: bool, is_serial: bool = False) -> None:
        self.is_ordered = is_ordered
        self._is_serial = is_serial
        self.ready: deque[Message] = deque()
        self.in_hand = 0
        self.shelved = 0
        self._suspects: deque[Message] = deque()
        self._suspect: Message | None = None

    def offer(self, lane: Lane, messages: Iterable[Message]) -> None:
        """Take fetched messages of one lane, in stream order."""
        ready, waiting, is_ordered = self.ready, lane.waiting, self.is_ordered
        for message in messages:
            self.in_hand += 1
            if self._is_serial:
                message.routing_key = WHOLE
            key = message.routing_key
            if is_ordered and key is not None:
                behind = waiting.get(key)
                if behind is not None:
                    behind.append(message)
                    if key in lane.parked:
                        self._shelve(1)
                    continue
                waiting[key] = deque()
            if message.is_suspect:
                self._admit(message)
            else:
                ready.append(message)

    def finish(self, message: Message, lane: Lane) -> None:
        """A message has left the handler for good (settled, dead-lettered, lost): the next of its key may start."""
        self.leave(message)
        key = message.routing_key
        if key is not None and self.is_ordered:
            self.release(lane, key)

    def leave(self, message: Message) -> None:
        """A message is not in hand any more; its key stays taken."""
        self.in_hand -= 1
        if message.is_suspect:
            self._next_suspect(message)

    def release(self, lane: Lane, key: bytes) -> None:
        """Let the next message of a key start."""
        behind = lane.waiting.get(key)
        if behind:
            self._admit(behind.popleft())
        elif behind is not None:
            del lane.waiting[key]

    def again(self, message: Message) -> None:
        """A message that is in hand and holds its key starts once more."""
        self._admit(message)

    def park(self, message: Message, lane: Lane) -> None:
        """Keep a failed message and its key out of the way until `resume`."""
        key = message.routing_key
        assert key is not None, "without a key there is nothing to wait behind"
        if message.is_suspect:
            self._next_suspect(message)
        behind = lane.waiting.setdefault(key, deque())
        lane.parked[key] = message
        self._shelve(1 + len(behind))

    def resume(self, message: Message, lane: Lane) -> None:
        """A parked message is due."""
        key = message.routing_key
        if key is None or lane.parked.get(key) is not message:
            return  # the lane was dropped meanwhile
        del lane.parked[key]
        self._shelve(-1 - len(lane.waiting[key]))
        self._admit(message)

    def wait_for_retry(self, message: Message, lane: Lane) -> bool:
        """Take over a pending message whose retry is not due yet. False: its key has earlier messages."""
        if self._is_serial:
            message.routing_key = WHOLE
        key = message.routing_key
        if key is None or key in lane.waiting:
            self.offer(lane, (message,))
            return False
        self.in_hand += 1
        self.park(message, lane)
        return True

    def withdraw(self, lane: Lane) -> list[Message]:
        """Remove and return what of a lane has not started; forget what is parked (the server knows when it is due).

        What runs stays, and finishes or is cancelled.
        """
        heads = [message for message in (*self.ready, *self._suspects) if message.origin is lane]
        self._keep(self.ready, lane)
        self._keep(self._suspects, lane)
        if self._suspect in heads:
            self._next_suspect(self._suspect)
        self.in_hand -= len(heads)
        out = list(heads)
        for key, behind in lane.waiting.items():
            if key in lane.parked:
                self.shelved -= 1 + len(behind)
            else:
                self.in_hand -= len(behind)
            out.extend(behind)
            behind.clear()
        for free in {head.routing_key for head in heads if head.routing_key is not None} | lane.parked.keys():
            lane.waiting.pop(free, None)  # what is left belongs to a running message
        lane.held.difference_update(message.entry_id for message in lane.parked.values())
        lane.parked.clear()
        return out

    def _keep(self, line: deque[Message], lane: Lane) -> None:
        kept = [message for message in line if message.origin is not lane]
        line.clear()
        line.extend(kept)

    def _admit(self, message: Message) -> None:
        """To `ready`, unless it is a suspect and another one is out."""
        if not message.is_suspect:
            self.ready.append(message)
        elif self._suspect is None or self._suspect is message:
            self._suspect = message
            self.ready.append(message)
        else:
            self._suspects.append(message)

    def _next_suspect(self, message: Message | None) -> None:
        if self._suspect is not message:
            return
        self._suspect = None
        if self._suspects:
            self._admit(self._suspects.popleft())

    def _shelve(self, count: int) -> None:
        self.shelved += count
        self.in_hand -= count

    def __repr__(self) -> str:
        return f"<Queue ready={len(self.ready)} in_hand={self.in_hand} shelved={self.shelved}>"
