"""Names of which nothing starts for a time: their provider has said "not now", or a breaker has opened."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from math import inf
from typing import Any, Final

import anyio

from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.limits import FirstLimit, MessageRate, all_of, state_among
from rsmq.consumer.waiting.naming import Naming
from rsmq.consumer.waiting.queue import Queue
from rsmq.consumer.waiting.raw_entries import RawEntries
from rsmq.errors import BrokerError, ConfigError
from rsmq.handler.breaker import Breaker
from rsmq.handler.retry import Park
from rsmq.model.clock import monotonic, to_ms
from rsmq.model.delivery_state import DeliveryState
from rsmq.model.held_name import EVERYTHING, HeldName, HoldKind, bounded_name, name_of_one, read_holds
from rsmq.model.log_names import name_in_log
from rsmq.model.log_throttle import ThrottledLog
from rsmq.model.message import Message
from rsmq.model.words import duration
from rsmq.redis.holds import Change, hold_name

log = logging.getLogger("rsmq.hold")

AGAIN: Final = 0.5
"""Seconds until a call that has failed is repeated."""
LONGEST_SLEEP: Final = 60.0
"""Seconds: the server's clock may be set meanwhile."""
STALE: Final = object()


class Holds:
    """What is held in the group, as this member knows it, and its messages that wait for the end.

    A hold of a handler begins here at once, and in the other members as soon as the server has told them. A message
    that waits has not started. The end of a breaker's hold lets one message start: who may, the server decides.
    """

    lag = inf

    def __init__(
        self,
        context: ConsumerContext,
        queue: Queue,
        naming: Naming | None,
        breaker: Breaker | None,
        wake: Callable[[], Any],
    ) -> None:
        """`naming` gives a message its name; None: all messages of the handler have one. `limit_by` must follow."""
        self._context = context
        self._queue = queue
        self._naming = naming
        self._breaker, self._wake = breaker, wake
        self._stats = context.stats
        self._held: dict[str, HeldName] = {}
        self._unconfirmed: dict[str, HeldName] = {}
        self._known_at: dict[str, float] = {}  # when the server, or this member, has begun or ended a hold
        self._asked = 0.0  # when the server was asked for what was seen last
        self._waiting: dict[str, deque[tuple[Message, Lane]]] = {}
        self._failures = Counter[str]()
        self._running: dict[Message, str] = {}
        self._probes: dict[str, Message] = {}
        self._succeeded_probes: set[str] = set()
        self._limits: tuple[MessageRate | None, MessageRate] = (None, self)
        self._on_change: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()
        self._throttled = ThrottledLog(log)

    def limit_by(self, first: Sequence[FirstLimit], last: MessageRate | None) -> None:
        """The other limits of the queue. While nothing is held, no message is asked for: unless there is a breaker."""
        self._limits = all_of(first, last), all_of((self, *first), last) or self
        self._attach()

    def _attach(self) -> None:
        self._on_change()
        self._queue.limit_messages(self._limits[bool(self._held) or self._breaker is not None])

    # -- for the queue --------------------------------------------------------------------------------------------

    def starts(self, message: Message, lane: Lane) -> bool:
        """Whether a message may start now. If not, it waits here."""
        if self._held and message not in self._probes.values():
            name = self._holding(self._name(message))
            if name is not None:
                self._waiting.setdefault(name, deque()).append((message, lane))
                self._changed.set()
                return False
        if self._breaker is not None and (name := self._name(message)) is not None:
            self._running[message] = name
        return True

    def _name(self, message: Message) -> str | None:
        if self._naming is None:
            return EVERYTHING
        name = self._naming.name(message)
        return None if name is None else name_of_one(name)

    def _holding(self, name: str | None) -> str | None:
        """The hold for which messages of a name wait; None: they may start."""
        now = self._now_ms()
        for each in (EVERYTHING, name):
            held = None if each is None else self._held.get(each)
            if held is not None and (held.until_ms > now or self._is_to_be_tried(held)):
                return each
        return None

    def _is_to_be_tried(self, held: HeldName) -> bool:
        """Whether one message must succeed before others follow."""
        return held.kind == "breaker" and self._breaker is not None

    def _now_ms(self) -> int:
        return self._context.clock.now_ms() - round(1000 * self._context.clock.moved)

    def take_back(self, message: Message, _lane: Lane) -> None:
        """It does not start now: another limit has no room."""
        self._running.pop(message, None)

    def admit(self, raw: RawEntries, most: int, _now: float, _end: float) -> tuple[list[Any], bool]:
        """The same for raw entries: the ones before the first that has to wait."""
        number = min(most, len(raw.entries))
        if not self._held:
            return [None] * number, False
        if self._naming is None:
            return ([], number > 0) if self._holding(EVERYTHING) is not None else ([None] * number, False)
        names = [None if name is None else name_of_one(name) for name in self._naming.names(raw, number)]
        waits = {name: self._holding(name) is not None for name in set(names)}
        count = next((at for at, name in enumerate(names) if waits[name]), number)
        return [None] * count, count < number

    def started(self, raw: RawEntries, admitted: list[Any], number: int) -> None:
        """Raw entries are not counted."""

    async def starts_late(self, message: Message, lane: Lane) -> None:
        """It starts now."""

    def forget(self, message: Message) -> None:
        """A message does not start after all."""
        self._running.pop(message, None)

    def waiting(self, _lanes: Iterable[Lane]) -> Counter[str]:
        """How many messages wait for which hold, with those behind their keys. May be called from any thread."""
        held, queue = Counter[str](), self._queue
        for name, pairs in list(self._waiting.items()):
            held[name] = sum(1 + queue.waits_behind(*pair) for pair in list(pairs) if queue.holds(*pair))
        return +held

    def hold_of(self, message: Message) -> HeldName | None:
        """What a message that has not started is held by."""
        name = self._holding(self._name(message)) if self._held else None
        return None if name is None else self._held[name]

    def state_of(self, message: Message, lane: Lane) -> DeliveryState | None:
        """Whether a message waits here."""
        for name, pairs in self._waiting.items():
            state = state_among("held", name, pairs, message, lane)
            if state is not None:
                held = self._held.get(name)
                return state if held is None else replace(state, until_ms=held.until_ms)
        return None

    @property
    def names(self) -> Sequence[HeldName]:
        """What is held now. May be called from any thread."""
        return tuple(self._held.values())

    # -- for the runner -------------------------------------------------------------------------------------------

    def raised(self, message: Message, decision: Park) -> Park:
        """A handler has raised `Hold`. Returns what becomes of its message: it need not wait for a time of its own if
        its name is held."""
        self._running.pop(message, None)
        hold, own = decision.hold, self._name(message)
        assert hold is not None
        name = own if hold.name is None else bounded_name(hold.name)
        if name is None:
            return decision
        self._begin(name, hold.duration, "handler")
        return replace(decision, delay=timedelta(0)) if name in (EVERYTHING, own) else decision

    def failed(self, message: Message, error: BaseException) -> None:
        """A call has ended with an error."""
        name = self._running.pop(message, None)
        if name is None or self._breaker is None:
            return
        if not self._breaker.counts(error):
            self._succeeded(name, message)
            return
        self._failures[name] += 1
        is_probe = self._probes.get(name) is message
        if is_probe or self._failures[name] == self._breaker.failures:
            self._probes.pop(name, None)
            self._stats["opened"] += not is_probe
            self._begin(name, self._breaker.hold, "breaker")

    def left(self, message: Message) -> None:
        """A message has left its handler. If nothing else was said of it, its call was a success."""
        name = self._running.pop(message, None)
        if name is not None:
            self._succeeded(name, message)

    def _succeeded(self, name: str, message: Message) -> None:
        self._failures.pop(name, None)
        if self._probes.get(name) is message:
            self._succeeded_probes.add(name)
            self._changed.set()

    # -- holds ----------------------------------------------------------------------------------------------------

    def _begin(self, name: str, span: timedelta, kind: HoldKind) -> None:
        """Hold a name here, now; `run` tells the server."""
        now = self._now_ms()
        held, known = HeldName(name, now + to_ms(span), now, kind), self._held.get(name)
        if kind == "handler" and known is not None and known.until_ms >= held.until_ms:
            return
        if known is None or known.until_ms <= now:
            log.warning("%s: %s is held for %s by a %s", self._context.name, in_log(held), duration(span), kind)
        self._held[name] = self._unconfirmed[name] = held
        self._known_at[name] = monotonic()
        self._attach()
        self._changed.set()

    def saw(self, text: bytes, asked: float) -> None:
        """What the server says is held; it was asked then. What has begun since is not in it, and what has ended is."""
        if asked < self._asked:
            return
        self._asked = asked
        self._known_at = {name: at for name, at in self._known_at.items() if at >= asked}
        found = {held.name: held for held in read_holds(text) if held.name not in self._known_at}
        later = {name: held for name, held in self._held.items() if name in self._known_at}
        found = {**found, **later, **self._unconfirmed}
        if found != self._held:
            self._held = found
            self._attach()
            self._changed.set()

    def on_change(self, call: Callable[[], None]) -> None:
        """Call this when what is held may have changed."""
        self._on_change = call

    def time_left(self, name: str) -> timedelta:
        """How long a name is still held; nothing if it is not."""
        held = self._held.get(bounded_name(name))
        return (
            timedelta(0) if held is None else max(timedelta(0), timedelta(milliseconds=held.until_ms - self._now_ms()))
        )

    @property
    def is_undecided(self) -> bool:
        """Whether messages wait although nothing holds them any more, or the server does not know of a hold yet."""
        now = self._now_ms()
        over = [name for name in self._waiting if name not in self._held or self._held[name].until_ms <= now]
        return bool(self._unconfirmed or self._succeeded_probes or over)

    async def run(self) -> None:
        """Tell the server of holds, let messages go when one is over, and try the names of breakers; until
        cancelled."""
        while True:
            self._changed.clear()
            for held in list(self._unconfirmed.values()):
                await self._tell(held)
            for name in list(self._succeeded_probes):
                await self._end(name)
            for name in list(self._waiting):
                await self._look_at(name)
            self._attach()
            with anyio.move_on_after(self._pause()):
                await self._changed.wait()

    def _pause(self) -> float:
        now = self._now_ms()
        ends = [held.until_ms for name, held in self._held.items() if self._waiting.get(name)]
        if self._unconfirmed or self._succeeded_probes or any(end <= now for end in ends):
            return AGAIN
        return min([LONGEST_SLEEP, *((end - now) / 1000 for end in ends)])

    async def _tell(self, held: HeldName) -> None:
        ms = held.until_ms - self._now_ms()
        if (
            ms > 0
            and await self._change(held.name, ms, held.kind, "longer" if held.kind == "handler" else "set") is STALE
        ):
            return
        if self._unconfirmed.get(held.name) is held:
            del self._unconfirmed[held.name]

    async def _change(
        self, name: str, ms: int, kind: HoldKind, change: Change, known: int | None = None
    ) -> tuple[bool, int] | object:
        """Ask the server, and note its answer. STALE: it did not answer."""
        context = self._context
        about = (context.client, context.keys, context.topic.name, context.handler.group)
        before, begun = self._held.get(name), self._unconfirmed.get(name)
        try:
            done, until = await hold_name(*about, name, ms, kind, change, known)
        except (BrokerError, ConfigError) as error:
            self._throttled.warn("a hold cannot be told to the other members yet", error)
            return STALE if isinstance(error, BrokerError) else (False, 0)
        if self._unconfirmed.get(name) is not begun:  # a hold has begun here meanwhile: the server is told next
            return done, until
        held = self._held.get(name, before)  # a look at the group may have replaced it
        if not until:
            self._held.pop(name, None)
            self._known_at[name] = monotonic()
        elif held is not None:
            self._held[name] = replace(held, until_ms=until)
            self._known_at[name] = monotonic()
        return done, until

    # -- the end of a hold ----------------------------------------------------------------------------------------

    async def _look_at(self, name: str) -> None:
        """Messages wait for a name: let them go if its hold is over, or one of them if that was a breaker's."""
        waiting, held = self._waiting[name], self._held.get(name)
        while waiting and not self._queue.holds(*waiting[0]):
            waiting.popleft()
        if not waiting:
            del self._waiting[name]
        elif held is None or (held.until_ms <= self._now_ms() and not self._is_to_be_tried(held)):
            self._held.pop(name, None)
            self._release(name)
        elif held.until_ms <= self._now_ms():
            await self._probe(name, held)
            if name not in self._held:  # another member has ended it, or the server never heard of it
                self._release(name)

    async def _probe(self, name: str, held: HeldName) -> None:
        """Let one message of a name start, if no other member does. If it never ends, another one is tried later."""
        assert self._breaker is not None
        answer = await self._change(name, to_ms(self._breaker.hold), "breaker", "probe", held.until_ms)
        waiting = self._waiting.get(name)
        if isinstance(answer, tuple) and answer[0] and waiting:
            message, lane = waiting.popleft()
            self._probes[name] = message
            log.info("%s: %s is tried by one message", self._context.name, in_log(held))
            self._queue.let_go(message, lane)
            self._wake()

    async def _end(self, name: str) -> None:
        """The message that has tried a name has succeeded: the hold is over."""
        held = self._held.get(name)
        if held is not None:
            if await self._change(name, 0, "breaker", "end", held.until_ms) is STALE:
                return
            log.info("%s: %s is held no longer", self._context.name, in_log(held))
        self._succeeded_probes.discard(name)
        self._probes.pop(name, None)

    def _release(self, name: str) -> None:
        """All that wait for it may be tried again, in their order."""
        for pair in reversed(self._waiting.pop(name, ())):
            if self._queue.holds(*pair):
                self._queue.let_go(*pair)
        self._wake()

    def __repr__(self) -> str:
        return f"<Holds {len(self._held)} names>"


def in_log(held: HeldName) -> str:
    """What is held, for a log line."""
    return name_in_log(held.name) if held.name else "everything"
