"""A queue whose calls have messages of one key: all that waits is kept as ids until the window of its key is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.open_calls import CallPlan
from rsmq.consumer.waiting.queue import Queue
from rsmq.model.clock import to_ms
from rsmq.model.message import Message
from rsmq.model.stream_id import parse_stream_id

AT_ONCE: Final = 2
"""A due time that is over, in ms since 1970. What has 1 was cancelled."""
HALF: Final = 2
"""The part of memory that calls may fill: the rest is for what is read meanwhile."""


class GatheringQueue(Queue):
    """The window of a key begins with its oldest message and ends after `linger`, or with `batch` messages.

    The oldest one waits for the end of the window as what waits for a time, in the server's set of due times; those
    behind it are ids. A call begins with all of them, up to `batch`. While it is not settled it is open: its messages
    are handled together again, and later ones wait. Only messages of calls that have begun are in memory. A message
    without a key is a call of its own, at once.
    """

    def __init__(self, *, batch: int, linger: timedelta, prefetch: int) -> None:
        super().__init__(is_ordered=True, prefetch=prefetch)
        self._batch = batch
        self._linger_ms = to_ms(linger)

    def wait_by(self, on_rest: Callable[[], None]) -> None:
        """`on_rest` is called when the server is to be told until when a message waits."""
        self._on_rest = on_rest

    def load_times(self, lane: Lane, recovery: int, dues: Mapping[bytes, float]) -> None:
        """Until when messages of a lane wait, as the server knows it at the begin of a recovery."""
        lane.flows.resting.load(recovery, dues, self._linger_ms)
        self._on_rest()

    # -- from the fetcher -----------------------------------------------------------------------------------------

    def _add(self, lane: Lane, messages: Sequence[Message], ready: deque[Any], *, is_ahead: bool = False) -> None:
        for message in messages:
            key = message.routing_key
            if key is None:
                self.in_flight += 1
                self._admit(message)
            else:
                self._keep(lane, key, message)
        if messages:
            lane.flows.calls.receive(messages[-1].entry_id)
        self._on_thin()

    def _keep(self, lane: Lane, key: bytes, message: Message) -> None:
        flows, entry_id = lane.flows, message.entry_id
        lane.in_flight.discard(entry_id)
        if key in flows.waiting:
            flows.wait_as_id(key, message)
            self._end_full_window(lane, key)
        elif flows.calls.has(key, entry_id):  # taken over: its call is repeated
            flows.wait_as_id(key, message)
            flows.make_due(key)
        else:
            flows.rest(key, message)
            self._begin_window(lane, key, entry_id)

    def _begin_window(self, lane: Lane, key: bytes, entry_id: bytes) -> None:
        resting = lane.flows.resting
        was_rescheduled = resting.known.pop(entry_id, None) == -1
        if was_rescheduled:
            resting.note(entry_id, AT_ONCE)
            lane.flows.calls.unchecked.add(key)
        else:
            resting.note_window(entry_id, self._linger_ms)
        self._end_full_window(lane, key)
        self._on_rest()

    def _end_full_window(self, lane: Lane, key: bytes) -> None:
        """A call has enough messages before its time."""
        flows = lane.flows
        head = flows.resting.first_of(key)
        if head is not None and flows.size(key) >= self._batch:
            flows.resting.notes.pop(head, None)
            flows.resting.forget(head)
            flows.wake(head, is_rescheduled=False)
            self._on_rest()

    def wake(self, lane: Lane, entry_id: bytes, *, is_rescheduled: bool, is_cancelled: bool = False) -> None:
        """The window that begins with a message is over, or the message is cancelled."""
        key = lane.flows.resting.key_of(entry_id)
        if key is not None:
            if is_rescheduled:
                lane.flows.calls.unchecked.add(key)
            if is_cancelled:
                lane.flows.calls.headless.add(key)
            lane.flows.wake(entry_id, is_rescheduled=False)
            self._on_thin()

    # -- calls ----------------------------------------------------------------------------------------------------

    def next_call(self, lane: Lane, lanes: Collection[Lane], *, is_behind: bool = False) -> CallPlan | None:
        """A call that may begin now. `is_behind`: only one that needs nothing more to be received."""
        flows, calls = lane.flows, lane.flows.calls
        is_cut = not self.has_room(lane, lanes)  # nothing more is read, so a call has what there is
        if not lane.recovery.is_over and not is_cut:
            return None
        for key in flows.due_keys():
            call, ids = calls.of(key), flows.ids_of_call(key, self._batch)
            if not ids or not calls.is_complete(key, lane.recovery.cursor):
                continue
            if calls.awaits_settlement(key, lane.in_flight):
                continue
            if self.in_flight and self.in_flight + len(ids) > self._memory // HALF:
                return None
            starts = call is not None or key not in calls.headless
            is_whole = not starts or is_cut or call is not None or len(ids) >= self._batch or key in calls.unchecked
            if is_behind and not is_whole:
                continue
            window_end = 0 if is_whole else parse_stream_id(ids[0])[0] + self._linger_ms
            return CallPlan(key, ids, 0 if call is None else call.attempts, window_end, starts, flows.filling)
        return None

    def awaits_settlement(self, lane: Lane) -> bool:
        """Whether a call that is due waits for the settlement of the one before it."""
        return any(lane.flows.calls.awaits_settlement(key, lane.in_flight) for key in lane.flows.due_keys())

    def begin_call(self, lane: Lane, plan: CallPlan, found: Sequence[bytes], messages: Sequence[Message]) -> bool:
        """A call begins with these messages; the first ids of its key, as `found`, are not needed any more. False: all
        was forgotten meanwhile."""
        flows, key = lane.flows, plan.key
        if not flows.filled(plan, key, found):
            return False
        flows.calls.headless.discard(key)
        flows.began(key)
        if not messages:
            self._go_on(lane, key)
            return True
        flows.calls.begin(key, [message.entry_id for message in messages], plan.attempts + 1)
        flows.waiting[key].extend(messages)
        lane.in_flight.update([message.entry_id for message in messages])
        self.in_flight += len(messages)
        self.behind += len(messages)
        super().release(lane, key)
        return True

    def wait_for_call(self, lane: Lane, plan: CallPlan) -> Message | None:
        """A call has a retry that is not due, behind a message whose settlement was lost: all of it waits. Returns what
        is parked, or None if all was forgotten meanwhile."""
        flows, key, first = lane.flows, plan.key, plan.ids[0]
        if not flows.filled(plan, key, [first]):
            return None
        flows.began(key)
        lane.in_flight.add(first)
        self.in_flight += 1
        message = Message(lane, first, [b"data", b"", b"key", key], plan.attempts + 1)
        message.is_redelivered = True
        return self.park(message, lane)

    def ask_again(self, lane: Lane, ids: Collection[bytes]) -> None:
        """Some retries have another due time: the calls that wait for them ask whether they may begin."""
        for key, message in list(lane.flows.parked.items()):
            if any(each in ids for each in lane.flows.ids_of_call(key, self._batch)):
                self.resume(message, lane, message)

    def _go_on(self, lane: Lane, key: bytes) -> None:
        """No message of a key is in memory: the rest of its call comes next, or else a window begins."""
        flows = lane.flows
        first = flows.first_id(key)
        if first is not None and flows.calls.has(key, first):
            flows.make_due(key)
            return
        flows.calls.end(key)
        if first is None:
            flows.waiting.pop(key, None)
        else:
            self._begin_window(lane, key, flows.rest_first(key))

    # -- after a handler ------------------------------------------------------------------------------------------

    def finish(self, message: Message, lane: Lane) -> None:
        """A message has left the handler for good, or was cancelled."""
        self.leave(message)
        if message.routing_key is not None:
            self.release(lane, message.routing_key)

    def release(self, lane: Lane, key: bytes) -> None:
        """The next message of the call of a key is its first, or the call has ended."""
        if lane.flows.waiting.get(key):
            super().release(lane, key)
        else:
            self._go_on(lane, key)
        self._on_thin()

    def put_back(self, lane: Lane, later: Sequence[Message]) -> None:
        """Messages of a call wait behind its first one, which is parked or starts again."""
        if later and later[0].routing_key is not None:
            self._wait_again(lane, later[0].routing_key, later)

    def _wait_again(self, lane: Lane, key: bytes, messages: Sequence[Message]) -> None:
        ids = [message.entry_id for message in messages]
        lane.forget(ids)
        self.in_flight -= len(ids)
        lane.flows.wait_again(key, ids)

    def restart(self, message: Message, following: Message) -> None:
        """A call starts once more with the messages that are left, without another attempt."""
        key, lane = message.routing_key, message.origin
        if key is None:
            super().restart(message, following)
            return
        assert isinstance(lane, Lane)
        self._next_suspect(message)
        self._repeat(lane, key, message, message.attempt - 1)

    def _repeat(self, lane: Lane, key: bytes, first: Message, attempts: int) -> None:
        self._wait_again(lane, key, [first])
        lane.flows.calls.try_again(key, attempts)
        lane.flows.make_due(key)
        self._on_thin()

    def park(self, message: Message, lane: Lane) -> Message:
        """Keep a call out of the way until its retry is due: only the first message stays, without its body."""
        key = message.routing_key
        assert key is not None, "a message without a key blocks nothing"
        self._next_suspect(message)
        self._block(lane.flows.park(key, message))
        self.blocked -= 1
        return lane.flows.empty(key, message)

    def resume(self, message: Message, lane: Lane, following: Message) -> None:
        """The retry of a call is due, for the attempt of its `following` first message."""
        key, flows = message.routing_key, lane.flows
        if key is None or flows.parked.get(key) is not message:  # the lane was dropped meanwhile
            return
        self._end_emptied(lane, message.entry_id)
        self._block(-flows.unpark(key, message))
        self._repeat(lane, key, message, following.attempt - 1)
