"""What may start now, and what must wait: order per key, retries that block their key, suspects one at a time.

Pure bookkeeping without I/O. The runner takes from `ready`; everything else is decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from rsmq.consumer.lane import Lane
from rsmq.consumer.stretch import Part, Row, Stretch
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
        self.ready: deque[Any] = deque()  # messages; stretches too, where a runner takes them
        self.takes_stretches = False  # whether the runner can do with entries that nobody has looked at
        self.in_hand = 0
        self.shelved = 0
        self._suspects: deque[Message] = deque()
        self._suspect: Message | None = None

    def offer(self, lane: Lane, messages: Iterable[Message]) -> None:
        """Take fetched messages of one lane, in stream order."""
        if lane.stretches:
            self.unfold(lane)
        self._line_up(lane, messages)

    def _line_up(self, lane: Lane, messages: Iterable[Message]) -> None:
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

    def offer_stretch(self, lane: Lane, rows: list[Row]) -> bool:
        """Take fetched entries without a look at each. False: a key of the lane is taken, so each must be looked at."""
        if lane.waiting:
            return False
        self.ready.append(Stretch(lane, rows))
        self.in_hand += len(rows)
        lane.stretches += 1
        return True

    def take_stretches(self, limit: int) -> list[Part]:
        """Up to `limit` entries from the front of what is ready, as far as nobody had to look at them."""
        parts, ready = list[Part](), self.ready
        while limit > 0 and ready and type(ready[0]) is Stretch:
            lane, rows = ready[0].origin, ready[0].rows
            if len(rows) > limit:
                ready[0].rows, rows = rows[limit:], rows[:limit]
            else:
                ready.popleft()
                lane.stretches -= 1
            limit -= len(rows)
            parts.append((lane, rows))
        return parts

    def hold(self, lane: Lane, messages: Iterable[Message]) -> list[Message]:
        """These, taken as a stretch, run on: take their keys. Returns the first of each key, and those without."""
        heads = []
        for message in messages:
            if self._is_serial:
                message.routing_key = WHOLE
            key = message.routing_key
            if self.is_ordered and key is not None:
                if key in lane.waiting:
                    continue
                lane.waiting[key] = deque()
            heads.append(message)
        return heads

    def unfold(self, lane: Lane) -> None:
        """Look at each entry of a lane's stretches after all, in their place."""
        line = list(self.ready)
        self.ready.clear()
        for each in line:
            if type(each) is Stretch and each.origin is lane:
                self.in_hand -= len(each.rows)
                self._line_up(lane, each.messages())
            else:
                self.ready.append(each)
        lane.stretches = 0

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

    def has_place(self, message: Message) -> bool:
        """Whether it keeps its place while it waits for a retry: pending, and what has its key waits behind it."""
        return self.is_ordered and (self._is_serial or message.routing_key is not None)

    def again(self, message: Message) -> None:
        """A message that is in hand and holds its key starts once more."""
        self._admit(message)

    def put_behind(self, lane: Lane, later: Sequence[Message]) -> None:
        """Messages of one key, which had left its line together with the one that holds it, go back to its front."""
        if later:
            key = later[0].routing_key
            assert key is not None, "without a key there is no line"
            lane.waiting.setdefault(key, deque()).extendleft(reversed(later))

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
        if lane.stretches:
            self.unfold(lane)
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
        if lane.stretches:
            self.unfold(lane)
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
