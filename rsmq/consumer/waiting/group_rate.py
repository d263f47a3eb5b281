"""A rate over the group for each value of a function of the message, such as its provider."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Final

import anyio

from rsmq.consumer.waiting.allowance import AHEAD, HOLD_MS, Allowance, EvenAllowance, ages
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.limits import lag_of, state_among
from rsmq.consumer.waiting.naming import Naming
from rsmq.consumer.waiting.queue import Queue
from rsmq.consumer.waiting.raw_entries import RawEntries
from rsmq.errors import BrokerError
from rsmq.handler.failure import describe
from rsmq.handler.rate_limit import Rate
from rsmq.model.clock import monotonic
from rsmq.model.delivery_state import DeliveryState
from rsmq.model.interrupt import is_from_signal
from rsmq.model.log_names import name_in_log
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.message import Message
from rsmq.redis.scripts import TAKE_STARTS, Ask, Value

log = logging.getLogger("rsmq.rate")

SHORTEST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 0.25
"""Seconds between two calls for a name that is in use: an eighth of the time of the rate."""


SOON: Final = 0.002
"""Seconds in which the server answers, or a start may be near."""
MOST_KNOWN: Final = 1000
"""Names of which a member remembers that they were in use."""
LONG: Final = 5
"""Calls for which what is held does not suffice for the next message."""


class Share:
    """What this member has of the rate of one name, and the messages that wait for more.

    `late` counts those that have a charged attempt, and wait again, because the server has lost what was granted.
    """

    __slots__ = ("allowance", "late", "name", "next_call", "opening", "waiting", "waits_long")

    def __init__(self, name: str, allowance: Allowance) -> None:
        self.name, self.allowance = name, allowance
        self.waiting: deque[tuple[Message, Lane]] = deque()
        self.late = 0
        self.waits_long = 0
        self.next_call = 0.0
        self.opening: asyncio.TimerHandle | None = None


class GroupRate:
    """The names whose messages this member starts. While a name is in use, one call every few milliseconds takes a
    block of starts from the server, and says which were used and which are left: these others may have.

    So there is no command for each message, and no member keeps what it does not need. `wake` is called when messages
    are ready again.
    """

    def __init__(
        self,
        rate: Rate,
        context: ConsumerContext,
        ask: Ask,
        queue: Queue,
        wake: Callable[[], Any],
        name_of: Callable[[Message], str | None] | None = None,
        prefix: str = "",
    ) -> None:
        """`name_of` gives a message its name, if the rate does not; `prefix` is before the names in their keys."""
        name_of = name_of or rate.name_of
        assert name_of is not None
        self._cost = rate.cost
        self._prefix = prefix
        self._burst = rate.burst or 0
        self._limit = rate.limit
        self._seconds = rate.per.total_seconds()
        self._naming = Naming(name_of, log)
        self._context = context
        self._ask = ask
        self._queue = queue
        self._wake = wake
        self.lag = lag_of(rate)
        self._pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, self._seconds / 8))
        self._shares: dict[str, Share] = {}
        self._pending: dict[Message, tuple[Share, int, int]] = {}
        self._known: dict[str, None] = {}  # the last names, for a test that moves the clock
        self._spending: dict[Message, tuple[Share, float, int]] = {}  # with a cost: when, and for how much, it counts
        self._taken: Mapping[str | None, int] = {}  # of each name, at the last question for raw entries
        self._changed = asyncio.Event()
        self._throttled = ThrottledLog(log)

    # -- for the queue and the runner -----------------------------------------------------------------------------

    def starts(self, message: Message, lane: Lane) -> bool:
        """Whether a message may start now, which counts it. If not, it waits here until it may be tried again.

        A redelivered message counts when the attempt is charged, and one whose body lies in a store when that is there:
        `starts_late` must follow, or `forget`.
        """
        name = self._naming.name(message)
        if name is None:
            return True
        now, share = monotonic(), self._shares.get(name) or self._new_share(name)
        allowance, cost = share.allowance, 1 if self._cost is None else self._cost_of(message)
        if not (allowance.take(now) if cost == 1 else allowance.take_whole(now, cost)):
            share.waiting.append((message, lane))
            if share.opening is None:
                self._plan(share, now)
            return False
        if share.waiting and not allowance.held:
            self._call_soon(share)
        if message.is_redelivered or message.is_outside:
            self._pending[message] = share, allowance.hold_pending(cost), cost
        else:
            self._note(message, share, now, cost)
        return True

    def _new_share(self, name: str) -> Share:
        share = self._shares[name] = Share(name, self._new_allowance())
        self._known[name] = None
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return share

    def _new_allowance(self) -> Allowance:
        return EvenAllowance(self._seconds / self._limit, self._burst) if self._burst else Allowance()

    def _cost_of(self, message: Message) -> int:
        """How many a message counts for. A function that fails, or says what cannot be, costs 1, or the limit."""
        assert self._cost is not None
        try:
            return min(self._limit, max(1, int(self._cost(message))))
        except BaseException as error:
            if is_from_signal(error):
                raise
            self._throttled.warn("the cost of a rate has failed", f"{describe(error)} with {message}")
            return 1

    def _note(self, message: Message, share: Share, now: float, cost: int) -> None:
        share.allowance.note(now, cost)
        if self._cost is not None:
            self._spending[message] = share, now, cost

    @property
    def has_cost(self) -> bool:
        """Whether messages count for more than one."""
        return self._cost is not None

    def spent(self, message: Message, number: int) -> bool:
        """A message that runs has cost so many. False: it is not counted here."""
        share, at, cost = self._spending.get(message, (None, 0.0, 0))
        if share is None:
            return False
        self._shares.setdefault(share.name, share).allowance.note(at, number - cost)
        self._spending[message] = share, at, number
        return True

    def left(self, message: Message) -> None:
        """A message has left its handler: what it has cost is known."""
        self._spending.pop(message, None)

    def admit(self, raw: RawEntries, most: int, now: float, end: float) -> tuple[list[Any], bool]:
        """The same for raw entries. One that waits is not noted."""
        names, taken, is_held = self._naming.names(raw, most), dict[str | None, int](), False
        for name, number in Counter(names).items():
            share = None if name is None else self._shares.get(name)
            if share is not None:  # a call starts until `end`
                taken[name] = share.allowance.take(now, number) if end < share.allowance.end else 0
            else:
                taken[name] = number if name is None else 0
            is_held = is_held or taken[name] < number
        if is_held:  # the names before the first one that has to wait
            left, count = dict(taken), 0
            while left[names[count]]:
                left[names[count]] -= 1
                count += 1
            self._give_back(left, now)
            names = names[:count]
            taken = Counter(names)
        self._taken = taken
        return names, is_held

    def started(self, raw: RawEntries, admitted: list[Any], number: int) -> None:
        """So many of those have started: the others do not."""
        now = monotonic()
        if number < len(admitted):
            self._give_back(Counter(admitted[number:]), now)
        for name, count in (self._taken if number == len(admitted) else Counter(admitted[:number])).items():
            if name is not None:
                share = self._shares[name]
                share.allowance.note(now, count)
                if share.waiting and not share.allowance.held:
                    self._call_soon(share)

    def _give_back(self, unused: Mapping[str | None, int], now: float) -> None:
        """So many of each name that were taken now do not start."""
        for name, count in unused.items():
            if name is not None and count:
                self._shares[name].allowance.put_back(now, count)

    async def starts_late(self, message: Message, _lane: Lane) -> None:
        """A message that was counted starts only now: it waited for the server."""
        share, losses, cost = self._pending.pop(message, (None, 0, 0))
        if share is None:
            return
        allowance, now = share.allowance, monotonic()
        if allowance.end_pending(losses, cost) and now < allowance.end:
            self._note(message, share, now, cost)
            return
        share = self._shares.setdefault(share.name, share)  # it may have been idle, and removed
        share.late += 1
        try:
            while not share.allowance.take_whole(now := monotonic(), cost):
                self._call_soon(share)
                await asyncio.sleep(self._pause)
            self._note(message, share, now, cost)
        finally:
            share.late -= 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are in use, or were lately, as their keys have them."""
        return tuple(self._prefix + name for name in self._known)

    @property
    def waiting_callers(self) -> int:
        """How many handlers wait in `acquire`."""
        return sum(share.late for share in self._shares.values())

    @property
    def is_undecided(self) -> bool:
        """Whether messages, or handlers, wait for an answer of the server, and not for a time."""
        now, holds = monotonic(), self._queue.holds
        waiting = [each for each in self._shares.values() if each.late or any(holds(*pair) for pair in each.waiting)]
        usable = [(each, each.allowance.usable(now)) for each in waiting]
        return any(
            (each.late and number > 0)  # it has not woken up yet
            or (not each.allowance.is_short and (number > 0 or each.allowance.next_begin(now) is None))
            for each, number in usable
        )

    @property
    def coarseness(self) -> float:
        """Seconds by which a start may count too long: the server rounds."""
        return self._seconds / 100 + 0.01

    def advance(self, seconds: float) -> None:
        """A test has moved the clock."""
        for share in self._shares.values():
            share.allowance.advance(seconds)
            share.next_call = 0.0
        self._changed.set()

    async def acquire(self, name: str, check: Callable[[], None]) -> None:
        """Wait for a start of a name, without a message, and use it. `check` raises what ends the waiting."""
        share = self._shares.get(name) or self._new_share(name)
        share.late += 1
        try:
            while not share.allowance.take(now := monotonic()):
                self._call_soon(share)
                begin = share.allowance.next_begin(now)
                pause = self._pause if share.allowance.is_short else SOON
                await asyncio.sleep(pause if begin is None else min(max(begin - now, SOON), self._pause))
                check()
            share.allowance.note(now)
        finally:
            share.late -= 1

    def forget(self, message: Message) -> None:
        """A message that was counted does not start."""
        share, losses, cost = self._pending.pop(message, (None, 0, 0))
        if share is not None:
            share.allowance.end_pending(losses, cost)

    def waiting(self, _lanes: Iterable[Lane]) -> Counter[str]:
        """How many messages wait for which name, with those behind their keys. May be called from any thread."""
        held, queue = Counter[str](), self._queue
        for share in list(self._shares.values()):
            held[share.name] = sum(1 + queue.waits_behind(*pair) for pair in list(share.waiting) if queue.holds(*pair))
        return +held

    def state_of(self, message: Message, lane: Lane) -> DeliveryState | None:
        """Whether a held message waits for the rate of its name."""
        name = self._naming.name(message)
        share = None if name is None else self._shares.get(name)
        return None if share is None else state_among("waiting_for_rate", share.name, share.waiting, message, lane)

    def name_of(self, message: Message) -> str | None:
        """What the rate counts a message by; None: it is not limited."""
        return self._naming.name(message)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _call_soon(self, share: Share) -> None:
        """A message has found nothing: call now, unless the server had too little at the last call."""
        if share.next_call and not share.allowance.is_short:
            share.next_call = 0.0
        self._changed.set()

    async def run(self) -> None:
        """Call for each name in use, until cancelled."""
        while True:
            now = monotonic()
            due = [share for share in self._shares.values() if share.next_call <= now]
            if due:
                await asyncio.gather(*map(self._exchange, due))
                continue
            later = min((share.next_call for share in self._shares.values()), default=None)
            self._changed.clear()
            with anyio.move_on_after(None if later is None else later - now):
                await self._changed.wait()

    async def _exchange(self, share: Share) -> None:
        """Say what was used, and get as much as is needed until the next call."""
        now, allowance = monotonic(), share.allowance
        share.next_call = now + self._pause
        if allowance.is_idle and not share.waiting and not share.late:
            del self._shares[share.name]
            return
        ahead, step = AHEAD * self._pause, max(0.001, self._seconds / 200)
        wanting, calls = self._wanting(share)
        question = allowance.ask(now, wanting, calls, self._limit)
        context = self._context
        key = context.keys.rate(context.topic.name, context.handler.group, self._prefix + share.name)
        spans = [int(1000 * seconds) for seconds in (self._seconds, ahead)]
        args: tuple[Value, ...] = (
            context.member, self._limit, *spans, HOLD_MS, question.kept, question.wanted, self._burst,
            *ages(question.used, now, step),
        )  # fmt: skip
        try:
            reply = await self._ask(TAKE_STARTS, (key,), args)
        except BrokerError as error:
            self._throttled.warn("a rate waits for the server", error)
            allowance.failed(question)
            return
        if reply[-1] == b"FOREIGN":
            about = context.name, name_in_log(share.name)
            log.warning("%s: the record of the rate of %s cannot be read: it begins anew", *about)
            del reply[-1]
        allowance.answered(question, reply, monotonic(), ahead)
        self._open(share)

    def _wanting(self, share: Share) -> tuple[int, int]:
        """How many starts its messages wait for, and how many could be used at once. If what is held does not suffice
        for the next message for some time, it goes back: another member may wait for just that."""
        calls = self._context.handler.concurrency
        if self._cost is None:
            return len(share.waiting) + share.late, calls
        costs = [self._cost_of(message) for message, _ in islice(share.waiting, calls)]
        share.waits_long = share.waits_long + 1 if costs and share.allowance.is_short else 0
        if share.waits_long > LONG + random.randrange(LONG):
            share.waits_long = 0
            share.allowance.yield_all()
            return 0, calls
        return sum(costs) + share.late, max(calls, sum(costs))

    def _open(self, share: Share) -> None:
        """Let as many messages be tried again as may start now, and plan when the next ones may."""
        if share.opening is not None:
            share.opening.cancel()
            share.opening = None
        now, ready = monotonic(), list[tuple[Message, Lane]]()
        room = share.allowance.usable(now)
        while share.waiting and room > 0:
            cost = 1 if self._cost is None else self._cost_of(share.waiting[0][0])
            if cost > room:
                break
            pair = share.waiting.popleft()
            if self._queue.holds(*pair):
                ready.append(pair)
                room -= cost
        for pair in reversed(ready):  # each goes to the front
            self._queue.let_go(*pair)
        if ready:
            self._wake()
        if share.waiting:
            self._plan(share, now)

    def _plan(self, share: Share, now: float) -> None:
        """Messages wait: until more may start, or for a call."""
        begin = share.allowance.next_begin(now)
        if begin is not None:
            share.opening = asyncio.get_running_loop().call_later(begin - now, self._open, share)
        elif not share.allowance.held:
            self._call_soon(share)

    def __repr__(self) -> str:
        return f"<GroupRate {self._limit} in {self._seconds:g} s, {len(self._shares)} names>"
