"""A limit on calls at once over the group, for each value of a function of the message, such as its tenant."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from rsmq.consumer.waiting.borrower import Borrower
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.limits import state_among
from rsmq.consumer.waiting.loan import InUse, Loan
from rsmq.consumer.waiting.naming import Naming
from rsmq.consumer.waiting.queue import Queue
from rsmq.consumer.waiting.raw_entries import RawEntries
from rsmq.handler.concurrency import Concurrency
from rsmq.model.delivery_state import DeliveryState
from rsmq.model.message import Message

log = logging.getLogger("rsmq.concurrency")


class NameCalls:
    """The calls of one name in this member, and the messages that wait for a permit."""

    __slots__ = ("in_use", "loan", "name", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.in_use = InUse()
        self.waiting: deque[tuple[Message, Lane]] = deque()
        self.loan: Loan | None = None


class NamePermits:
    """Starts a message when its name has a permit, and gives the permit back when the message has left its handler.

    What waits is held by the queue, as behind a rate. `wake` is called when messages are ready again.
    """

    lag = 0.01

    def __init__(self, limit: Concurrency, borrower: Borrower, queue: Queue, wake: Callable[[], Any]) -> None:
        assert limit.by is not None
        self._limit, self._naming = limit.limit, Naming(limit.by, log)
        self._borrower = borrower
        self._queue = queue
        self._wake = wake
        self._names: dict[str, NameCalls] = {}
        self._running: dict[Message, NameCalls] = {}

    def starts(self, message: Message, lane: Lane) -> bool:
        """Whether a message may start now, with a permit. If not, it waits here until it may be tried again."""
        name = self._naming.name(message)
        if name is None:
            return True
        calls = self._names.get(name)
        if calls is None:
            calls = self._names[name] = NameCalls(name)
        loan = self._loan_of(calls)
        if not self._borrower.room(loan):
            calls.waiting.append((message, lane))
            self._borrower.is_short(loan)
            return False
        calls.in_use.enter()
        self._running[message] = calls
        return True

    def name_of(self, message: Message) -> str | None:
        """What a message is counted by; None: it is not limited."""
        return self._naming.name(message)

    def _loan_of(self, calls: NameCalls) -> Loan:
        """Its permits. The borrower forgets those of a name that is not in use."""
        loan = self._borrower.loan(calls.name)
        if loan is None or calls.loan is not loan:
            loan = calls.loan = self._borrower.lend(
                calls.name, self._limit, calls.in_use, lambda: len(calls.waiting), lambda: self._open(calls)
            )
        return loan

    def take_back(self, message: Message, _lane: Lane) -> None:
        """A message has a permit, and does not start now."""
        self.finish(message)

    def finish(self, message: Message) -> None:
        """A message has left its handler: its permit is for the next one, or is given back."""
        calls = self._running.pop(message, None)
        if calls is None:
            return
        calls.in_use.leave()
        if calls.waiting:
            self._open(calls)
        if calls.loan is not None:
            self._borrower.is_free(calls.loan)
        if not calls.waiting and not calls.in_use.count and len(self._names) > 1000:
            self._names.pop(calls.name, None)

    def _open(self, calls: NameCalls) -> None:
        """Let as many messages be tried again as there are permits."""
        ready, room = list[tuple[Message, Lane]](), self._borrower.room(self._loan_of(calls))
        while calls.waiting and len(ready) < room:
            pair = calls.waiting.popleft()
            if self._queue.holds(*pair):
                ready.append(pair)
        for pair in reversed(ready):  # each goes to the front
            self._queue.let_go(*pair)
        if ready:
            self._wake()

    def admit(self, _raw: RawEntries, _most: int, _now: float, _end: float) -> tuple[list[Any], bool]:
        """Raw entries are not taken under this limit."""
        raise AssertionError("a handler with a limit by name gets messages")

    def started(self, raw: RawEntries, admitted: list[Any], number: int) -> None:
        """Raw entries are not taken under this limit."""

    async def starts_late(self, message: Message, lane: Lane) -> None:
        """It has its permit since it was counted."""

    def forget(self, message: Message) -> None:
        """A message that was counted does not start: `finish` follows."""

    def waiting(self, _lanes: Iterable[Lane]) -> Counter[str]:
        """How many messages wait for which name, with those behind their keys. May be called from any thread."""
        held, queue = Counter[str](), self._queue
        for calls in list(self._names.values()):
            held[calls.name] = sum(1 + queue.waits_behind(*pair) for pair in list(calls.waiting) if queue.holds(*pair))
        return +held

    def state_of(self, message: Message, lane: Lane) -> DeliveryState | None:
        """Whether a held message waits for a permit of its name."""
        name = self._naming.name(message)
        calls = None if name is None else self._names.get(name)
        return None if calls is None else state_among("waiting_for_permit", calls.name, calls.waiting, message, lane)

    def __repr__(self) -> str:
        return f"<NamePermits {self._limit}, {len(self._names)} names>"


class CountedQueue(Queue):
    """A queue that says which messages have left their handlers: only handlers with a limit by name pay for that."""

    def __init__(self, *, is_ordered: bool, is_serial: bool = False, prefetch: int = 2000) -> None:
        super().__init__(is_ordered=is_ordered, is_serial=is_serial, prefetch=prefetch)
        self._on_left: list[Callable[[Message], None]] = []

    def count(self, on_left: Callable[[Message], None]) -> None:
        """Call this for each message that has left."""
        self._on_left.append(on_left)

    def finish(self, message: Message, lane: Lane) -> None:
        """A message has left the handler for good."""
        super().finish(message, lane)
        for on_left in self._on_left:
            on_left(message)

    def leave(self, message: Message) -> None:
        """A message has left the handler, and its key stays taken."""
        super().leave(message)
        for on_left in self._on_left:
            on_left(message)

    def park(self, message: Message, lane: Lane) -> Message:
        """A message has left the handler until its retry."""
        parked = super().park(message, lane)
        for on_left in self._on_left:
            on_left(message)
        return parked
