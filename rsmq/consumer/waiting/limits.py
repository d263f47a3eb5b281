"""Limits on how many messages of a handler may start: by rate, and by calls at once over the whole group."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, Protocol

from rsmq.consumer.waiting.key_windows import KeyWindows
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.loan import InUse
from rsmq.consumer.waiting.raw_entries import RawEntries, key_of
from rsmq.handler.rate_limit import Rate, Window, share_of
from rsmq.heartbeat.assignment import quotas
from rsmq.model.clock import ServerClock, monotonic
from rsmq.model.delivery_state import DeliveredState, DeliveryState
from rsmq.model.message import Message

SHORTEST_PAUSE: Final = 0.001
LONGEST_PAUSE: Final = 1.0
"""Seconds: when members leave, the share of the others grows before the window opens."""

MOST_CARRIED: Final = 10_000
"""Keys that a handover takes along."""
CLOCK_MARGIN: Final = 0.02
"""Seconds by which the clocks of two members may differ."""
SHORTEST_LAG: Final = 0.002


@lru_cache(maxsize=64)  # asked for each message, changed by a join or leave
def call_quotas(limit: int, members: Sequence[str], salt: str) -> dict[str, int]:
    """How many calls at once each member may make: their sum is the limit, and every member computes the same.

    Equal up to one. With more members than the limit some have none: they must own no partition either.
    """
    return quotas(limit, dict.fromkeys(members, 1.0), f"{salt}/calls")


def lag_of(rate: Rate) -> float:
    """Seconds by which a start may count too late. That takes at most a hundredth of the rate from a key that uses it
    up. The longer it is, the more raw entries start together, which costs less."""
    return max(SHORTEST_LAG, rate.per.total_seconds() / 100)


def state_among(
    state: DeliveredState, name: str, waiting: Iterable[tuple[Message, Lane]], message: Message, lane: Lane
) -> DeliveryState | None:
    """The state of a message that is one of those that wait for a name; before it are the earlier ones of its lane."""
    own = [each for each, its in list(waiting) if its is lane]
    at = next((at for at, each in enumerate(own) if each is message), None)
    return None if at is None else DeliveryState(state, at, name)


class MessageRate(Protocol):
    """A rate that tells messages apart: each has its own answer."""

    lag: float
    """Seconds within which raw entries start that are admitted together: by so much a start may count too late."""

    def starts(self, message: Message, lane: Lane) -> bool:
        """Whether a message may start now, which counts it. If not, the queue gets it back by `let_go`."""

    def admit(self, raw: RawEntries, most: int, now: float, end: float) -> tuple[list[Any], bool]:
        """The key or name of each raw entry, from the first, that may start now, and until `end`. And whether the one
        after them has to wait. `most` are asked for. `started` must follow."""

    def started(self, raw: RawEntries, admitted: list[Any], number: int) -> None:
        """So many of those have started: the others do not."""

    async def starts_late(self, message: Message, lane: Lane) -> None:
        """A message that was counted starts only now: it waited for the server."""

    def forget(self, message: Message) -> None:
        """A message that was counted does not start."""

    def waiting(self, lanes: Iterable[Lane]) -> Counter[str]:
        """How many messages of which key, or name, wait for it. May be called from any thread."""

    def state_of(self, message: Message, lane: Lane) -> DeliveryState | None:
        """What a message that the queue holds waits for, if that is this limit."""


class FirstLimit(MessageRate, Protocol):
    """One that can be asked before another one."""

    def take_back(self, message: Message, lane: Lane) -> None:
        """A message was counted, and does not start now: another limit has no room."""


class RateLimit:
    """This member's share of a handler's rate. Once it is used up, a timer calls `on_open` when there is room."""

    def __init__(self, rate: Rate, members: Callable[[], int], on_open: Callable[[], Any]) -> None:
        self._rate = rate
        self._members = members
        self._on_open = on_open
        self._window = Window()
        self._share = 1, share_of(rate, 1)
        self._timer: asyncio.TimerHandle | None = None

    def room(self) -> int:
        """How many messages may start now."""
        now, members = monotonic(), self._members()
        if self._share[0] != members:
            self._share = members, share_of(self._rate, members)
        share = self._share[1]
        room = self._window.room(now, *share)
        if room == 0 and self._timer is None:
            pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, self._window.wait(now, *share)))
            self._timer = asyncio.get_running_loop().call_later(pause, self._open)
        return room

    def _open(self) -> None:
        self._timer = None
        self._on_open()

    def advance(self, seconds: float) -> None:
        """A test has moved the clock."""
        self._window.advance(seconds)
        if self._timer is not None:
            self._timer.cancel()
            self._open()

    @property
    def is_closed(self) -> bool:
        """Whether messages wait for it. May be called from any thread."""
        return self._timer is not None

    def start(self, count: int = 1) -> None:
        """So many messages start now, or have started since `room` was asked for."""
        self._window.note(monotonic(), count)

    def __repr__(self) -> str:
        return f"<RateLimit {self._window!r}>"


class KeyRate:
    """The rate of each key: the last starts of the keys of a lane are in the lane, because it has their only owner."""

    def __init__(self, rate: Rate, clock: ServerClock, on_open: Callable[[Message, Lane], Any]) -> None:
        self._limit = rate.limit
        self._seconds = rate.per.total_seconds()
        self._clock = clock
        self._on_open = on_open
        self.lag = lag_of(rate)

    def _windows(self, lane: Lane) -> KeyWindows:
        return lane.windows_of(self._limit, self._seconds)

    def starts(self, message: Message, lane: Lane) -> bool:
        """Whether a message may start now, which counts it. If not, `on_open` is called when it may be tried again."""
        key = message.routing_key
        if key is None:
            return True
        now, windows = monotonic(), self._windows(lane)
        if windows.admit((key,), now, now):
            return True
        pause = max(SHORTEST_PAUSE, windows.wait(key, now))
        asyncio.get_running_loop().call_later(pause, self._on_open, message, lane)
        return False

    def admit(self, raw: RawEntries, most: int, now: float, end: float) -> tuple[list[Any], bool]:
        """The same for raw entries. They count as started at `end`."""
        if raw.made:
            keys = [message.routing_key for message in raw.each(most)]
        else:
            keys = [fields[5] if len(fields) == 6 else key_of(fields) for _, fields in raw.entries[:most]]
        number = self._windows(raw.origin).admit(keys, now, end)
        return keys[:number], number < len(keys)

    def started(self, raw: RawEntries, admitted: list[Any], number: int) -> None:
        """So many of those have started: the others do not."""
        if number < len(admitted):
            self._windows(raw.origin).give_back(admitted[number:])

    async def starts_late(self, message: Message, lane: Lane) -> None:
        """A message that was counted starts only now: it waited for the server. Its key has started no other since."""
        key = message.routing_key
        if key is not None:
            self._windows(lane).move_last(key, monotonic())

    def waiting(self, lanes: Iterable[Lane]) -> Counter[str]:
        """How many messages of which key wait for it. May be called from any thread."""
        held, now = Counter[str](), monotonic()
        for lane in lanes:
            for key in list(lane.flows.held):  # for another rate than this one, if its key is not full
                if type(key) is bytes and lane.windows is not None and lane.windows.is_full(key, now):
                    held[key.decode(errors="backslashreplace")] += 1 + lane.flows.behind(key)
        return held

    def state_of(self, message: Message, lane: Lane) -> DeliveryState | None:
        """Whether a message waits for the rate of its key."""
        key, windows = message.routing_key, lane.windows
        if key is None or windows is None or not windows.is_full(key, monotonic()):
            return None
        return DeliveryState("waiting_for_rate", 0, key.decode(errors="backslashreplace"))

    def take_back(self, message: Message, lane: Lane) -> None:
        """A message that was counted now does not start: another rate holds it."""
        self._windows(lane).give_back((message.routing_key,))

    def forget(self, message: Message) -> None:
        """It counts all the same: the times of a key are only starts that were possible."""

    def pack(self, lane: Lane) -> str:
        """The starts that still count, by the server's clock and not too early, for the next owner; empty for none."""
        now, ahead = monotonic(), self._clock.now_ms() + round(1000 * self._clock.behind)
        starts = {
            key.decode("latin-1"): [ahead + round(1000 * (at - now)) for at in times]
            for key, times in list(self._windows(lane).open_ones(now).items())[-MOST_CARRIED:]
        }
        return json.dumps(starts) if starts else ""

    def follow(self, lane: Lane, before: Lane, keys: Iterable[bytes] | None = None) -> None:
        """Take over the starts, or those of these keys, in a partition that a lane follows."""
        self._windows(lane).add(self._windows(before).open_ones(monotonic(), keys))

    def unpack(self, lane: Lane, text: bytes) -> None:
        """Take over what the last owner has packed."""
        now, ahead = monotonic(), self._clock.now_ms()
        self._windows(lane).add(
            {
                key.encode("latin-1"): [min(now, now + (at - ahead) / 1000 + CLOCK_MARGIN) for at in starts]
                for key, starts in json.loads(text).items()
            }
        )

    def __repr__(self) -> str:
        return f"<KeyRate {self._limit} in {self._seconds:g} s>"


class AllLimits:
    """Several limits that tell messages apart: a message starts, and counts, when all of them have room.

    What a message has taken from the first ones goes back when a later one has no room. A rate by name comes last: the
    server hears of its uses.
    """

    def __init__(self, first: Sequence[FirstLimit], last: MessageRate) -> None:
        self._first = first
        self.limits: Sequence[MessageRate] = (*first, last)
        self.lag = min(limit.lag for limit in self.limits)

    def starts(self, message: Message, lane: Lane) -> bool:
        """Whether a message may start now. If not, the one that has no room lets it be tried again."""
        for at, limit in enumerate(self.limits):
            if not limit.starts(message, lane):
                for taken in reversed(self._first[:at]):
                    taken.take_back(message, lane)
                return False
        return True

    def admit(self, raw: RawEntries, most: int, now: float, end: float) -> tuple[list[Any], bool]:
        """The same for raw entries."""
        found, is_held = list[list[Any]](), False
        for limit in self.limits:
            admitted, is_short = limit.admit(raw, most, now, end)
            for before, given in zip(self.limits, found, strict=False):
                before.started(raw, given, len(admitted))
            found = [given[: len(admitted)] for given in found] + [admitted]
            most, is_held = len(admitted), is_held or is_short
        return list(zip(*found, strict=True)), is_held

    def started(self, raw: RawEntries, admitted: list[Any], number: int) -> None:
        """So many of those have started."""
        for at, limit in enumerate(self.limits):
            limit.started(raw, [each[at] for each in admitted], number)

    async def starts_late(self, message: Message, lane: Lane) -> None:
        """A message that was counted starts only now."""
        for limit in reversed(self.limits):
            await limit.starts_late(message, lane)

    def forget(self, message: Message) -> None:
        """A message that was counted does not start."""
        for limit in self.limits:
            limit.forget(message)

    def waiting(self, lanes: Iterable[Lane]) -> Counter[str]:
        """How many messages of which key, or name, wait. May be called from any thread."""
        return sum((limit.waiting(lanes) for limit in self.limits), Counter[str]())

    def state_of(self, message: Message, lane: Lane) -> DeliveryState | None:
        """What a held message waits for."""
        return next((state for each in self.limits if (state := each.state_of(message, lane)) is not None), None)

    def __repr__(self) -> str:
        return f"<AllLimits {self.limits!r}>"


def all_of(first: Sequence[FirstLimit], last: MessageRate | None) -> MessageRate | None:
    """One limit in the place of several; None for none."""
    if last is None:
        if not first:
            return None
        *first, last = first
    return AllLimits(first, last) if first else last


def key_rate_of(rate: MessageRate | None) -> KeyRate | None:
    """The part of a rate that is by key: a handover takes its times along."""
    found = rate.limits if isinstance(rate, AllLimits) else (rate,)
    return next((each for each in found if isinstance(each, KeyRate)), None)


class ConcurrencyLimit:
    """The calls that the group may run at once, as far as this member may run them: its `quota`.

    A task of the pool counts from its first message until it calls `leave`. In between it may start further messages,
    so the pool need not wake another task. When the quota grows, the pool must be woken. `on_short` is called when a
    message waits for the quota, `on_leave` when a task leaves.
    """

    def __init__(
        self,
        quota: Callable[[], int],
        in_use: InUse | None = None,
        on_short: Callable[[], None] = lambda: None,
        on_leave: Callable[[], None] = lambda: None,
    ) -> None:
        self._quota = quota
        self._in_use = in_use or InUse()
        self._on_short, self._on_leave = on_short, on_leave
        self._tasks: set[asyncio.Task[Any] | None] = set()

    def room(self) -> int:
        """How many further tasks may start a message now."""
        room = self._quota() - len(self._tasks)
        if room <= 0:
            self._on_short()
        return max(0, room)

    @property
    def is_full(self) -> bool:
        """Whether as many calls run as may."""
        return len(self._tasks) >= self._quota()

    def admits(self) -> bool:
        """Whether the calling task may start a message now. One that counts already may not after the quota shrank."""
        is_admitted = len(self._tasks) - (asyncio.current_task() in self._tasks) < self._quota()
        if not is_admitted:
            self._on_short()
        return is_admitted

    def enter(self) -> None:
        """The calling task starts a message."""
        task = asyncio.current_task()
        if task not in self._tasks:
            self._tasks.add(task)
            self._in_use.enter()

    def leave(self, following: asyncio.Task[Any] | None = None) -> None:
        """The calling task starts nothing more for now. If it counts, `following` does in its place."""
        if (task := asyncio.current_task()) in self._tasks:
            self._tasks.remove(task)
            if following is not None:
                self._tasks.add(following)
            else:
                self._in_use.leave()
                self._on_leave()

    def __repr__(self) -> str:
        return f"<ConcurrencyLimit {len(self._tasks)} of {self._quota()} calls>"
