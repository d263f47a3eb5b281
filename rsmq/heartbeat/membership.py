"""Membership: who serves a group now, as one member sees it. Wrong membership costs fairness, never correctness."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import anyio
import anyio.abc

from rsmq.clock import monotonic
from rsmq.connect import Client
from rsmq.errors import BrokerError
from rsmq.heartbeat.liveness import Liveness
from rsmq.heartbeat.presence import listeners
from rsmq.keys import Keys
from rsmq.script import LOOK_AT_MEMBERS, Script, Value
from rsmq.settings import Settings

log = logging.getLogger("rsmq.membership")

GRID: Final = 0.05
"""Seconds to which looks are rounded up, so that those of many groups leave in few writes."""

Ask = Callable[[Script, Sequence[str], Sequence[Value]], Awaitable[Any]]


async def _by_itself(client: Client, script: Script, keys: Sequence[str], args: Sequence[Value]) -> Any:
    return await script(client, keys, args)


def _until_together(seconds: float) -> float:
    """The span that ends at the next common time after it."""
    now = monotonic()
    return math.ceil((now + seconds) / GRID) * GRID - now


async def announce(client: Client, keys: Keys, topic: str, group: str) -> None:
    """Tell the members of a group that something has changed. Carries no data: they look for themselves."""
    await client.execute_command("PUBLISH", keys.changes(topic, group), "")


class Membership:
    """Watches a group: its members' heartbeats, their presence, and whether it is paused.

    `live` always contains this member; leases of members in `absent` may be taken before they run out. `changes` counts
    how often any of it has changed.
    """

    def __init__(
        self,
        client: Client,
        keys: Keys,
        settings: Settings,
        member: str,
        topic: str,
        group: str,
        ask: Ask | None = None,
    ) -> None:
        """`ask` carries the looks of many groups together; without it each goes by itself."""
        self._ask = partial(_by_itself, client) if ask is None else ask
        self._client, self._keys, self._member, self._topic, self._group = client, keys, member, topic, group
        self._interval = settings.heartbeat_interval.total_seconds()
        self._presence_interval = settings.presence_interval.total_seconds()
        grace = settings.presence_grace.total_seconds()
        self._watches_presence = grace > 0
        self._liveness = Liveness(member, ttl=settings.lease_ttl.total_seconds(), grace=grace)
        self._members: list[str] = []
        self._noticed = asyncio.Event()
        self._waiters: set[asyncio.Event] = set()
        self._look_at = 0.0
        self._was_out = False
        self.changes = 0
        self.live: tuple[str, ...] = (member,)
        self.absent: frozenset[str] = frozenset()
        self.paused = False

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Look around until cancelled."""
        await self._look()
        task_status.started()
        while True:
            is_urgent = self._watched or self._was_out  # what was announced may not have been seen yet
            with anyio.move_on_after(_until_together(self._presence_interval if is_urgent else self._interval)):
                await self._noticed.wait()
            if self._noticed.is_set():
                self._look_at = 0.0
            self._noticed.clear()
            await self._look()

    def notice(self) -> None:
        """Something was announced: look at everything now."""
        self._noticed.set()

    @property
    def _watched(self) -> list[str]:
        """Whose presence is watched."""
        return [member for member in self._members if member != self._member] if self._watches_presence else []

    def rouse(self) -> None:
        """End every `wait`: something of ours has changed."""
        self.changes += 1
        for event in self._waiters:
            event.set()

    async def wait(self, timeout: float, seen: int | None = None) -> None:
        """Until the view changes, at most `timeout` seconds. `seen`: the `changes` that the caller knows of."""
        if seen is not None and seen != self.changes:
            return
        event = asyncio.Event()
        self._waiters.add(event)
        try:
            with anyio.move_on_after(timeout):
                await event.wait()
        finally:
            self._waiters.discard(event)

    async def _look(self) -> None:
        was_noticed, was_paused = self._look_at == 0.0, self.paused
        try:
            if monotonic() >= self._look_at:
                await self._look_at_members()
                self._look_at = monotonic() + self._interval
            if self._watched:
                await self._look_at_presence(self._watched)
            self._was_out = False
        except BrokerError as error:
            (log.debug if self._was_out else log.warning)("the members of %s cannot be seen: %s", self._group, error)
            self._was_out = True
            self._liveness.failed()
        self._judge(was_noticed or self.paused != was_paused)

    def _judge(self, has_news: bool) -> None:
        now = monotonic()
        live, absent = self._liveness.live(now), self._liveness.absent(now)
        if has_news or (live, absent) != (self.live, self.absent):
            if live != self.live:
                log.info("%s/%s is served by %s", self._topic, self._group, ", ".join(live))
            self.live, self.absent = live, absent
            self.rouse()

    async def _look_at_members(self) -> None:
        place = self._keys.members(self._topic, self._group)
        names = (place, self._keys.group(self._topic, self._group), self._keys.alive(self._topic, self._group, ""))
        seconds, micros, paused, *found = await self._ask(LOOK_AT_MEMBERS, names, ())
        now = monotonic()
        self._members = sorted(member.decode() for member in found[::2])
        alive = [member.decode() for member, is_there in zip(found[::2], found[1::2], strict=True) if is_there]
        self._liveness.saw_clock(now, int(seconds) + int(micros) / 1e6)
        self._liveness.saw_members(now, self._members, alive)
        self.paused = paused == b"1"
        await self._prune()

    async def _prune(self) -> None:
        """Forget members that died without goodbye."""
        gone = self._liveness.dead(monotonic()) & set(self._members)
        if gone:
            await self._client.execute_command("SREM", self._keys.members(self._topic, self._group), *gone)

    async def _look_at_presence(self, others: list[str]) -> None:
        counts = await listeners(self._client, [self._keys.presence(member) for member in others])
        self._liveness.saw_listeners(monotonic(), dict(zip(others, counts, strict=True)))

    def __repr__(self) -> str:
        return f"<Membership {self._topic}/{self._group} live={len(self.live)} absent={len(self.absent)}>"
