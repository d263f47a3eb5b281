"""Membership: which members serve a group, as one member sees it. A wrong view costs fairness, never correctness."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Iterable
from typing import Final

import anyio
import anyio.abc

from rsmq.errors import BrokerError, ConfigError
from rsmq.heartbeat.group_watch import GroupWatch
from rsmq.heartbeat.liveness import Liveness
from rsmq.heartbeat.registration import read_members
from rsmq.model.clock import ServerClock, monotonic
from rsmq.model.keys import Keys
from rsmq.model.member import CHANGED, JOINED, LEFT, MISSED, RELEASED, SILENT, news_of
from rsmq.model.record import exact_text, whole
from rsmq.model.settings import Settings, heartbeat_interval
from rsmq.redis.client.connector import Client
from rsmq.redis.pubsub import announce, listeners
from rsmq.redis.scripts import LOOK_AT_GROUP, LOOK_AT_MEMBERS, PROVE_WATCH, Ask

log = logging.getLogger("rsmq.membership")

GRID: Final = 0.05
"""Seconds to which checks are rounded up, so that the checks of many groups share few writes."""

SOON: Final = 0.01
"""Seconds between two checks whether the server has seen the end of a process."""
GONE_SECONDS: Final = 0.2
"""Between two looks whether a dead member's heartbeat key has ended."""

LOOKS_PROVED: Final = 4
"""Looks of a watcher for which one proof that it looks is enough."""
STAND_IN_PAUSE: Final = 0.5
"""At most so many seconds, by chance, until a member that finds no watcher asks once more: then few stand in."""
LOOKS_A_SECOND: Final = 500
"""How many members of a large group read all members at a time, when all have a reason to."""


UNREADABLE: Final = "unreadable"
"""What a member says about itself with its heartbeat: the partitions that it cannot read, such as `3,7`."""
LAYOUT: Final = "layout"
"""The same: which version of its topic's layout it knows. Members of a version without layouts do not say it. Who asks
for it also reads which sealed partitions the group has not finished."""


def read_numbers(found: bytes) -> frozenset[int]:
    """Partitions as a member has written them. Another client may have written anything there."""
    return frozenset(number for each in found.split(b",") if (number := whole(each)) is not None)


def write_numbers(partitions: Iterable[int]) -> str:
    """The same, to be written."""
    return ",".join(map(str, sorted(partitions)))


def _rounded_up(seconds: float) -> float:
    """A longer pause that ends at a multiple of GRID."""
    now = monotonic()
    return math.ceil((now + seconds) / GRID) * GRID - now


async def refuse_mixed_ordering(client: Client, keys: Keys, topic: str, group: str, member: str, ordering: str) -> None:
    """Raise ConfigError if another member of the group has another ordering: its keys would not be in order.

    A worker asks before it joins, and again when the others can see it: of two that start together, one sees the other.
    A member without a listener is dead, and its heartbeat key ends soon. One of an older version says no ordering.
    """
    while True:
        infos = await read_members(client, keys, topic, group)
        found = {name: info["ordering"] for name, info in infos.items() if name != member and "ordering" in info}
        others = sorted(name for name in found if found[name] != ordering)
        if not others:
            return
        counts = await listeners(client, [keys.presence(name) for name in others])
        alive = [name for name, count in zip(others, counts, strict=True) if count]
        if alive:
            raise ConfigError(
                f"group {group!r} of topic {topic!r} is served with ordering={found[alive[0]]!r} by {alive[0]}, not "
                f"with {ordering!r}: mixed members would break the order of keys. Stop all its members before you "
                f"start one with another ordering, or use another group name"
            )
        await asyncio.sleep(GONE_SECONDS)


OnMembers = Callable[[str, tuple[str, ...], tuple[str, ...]], None]
"""Gets `topic/group`, its members before and now."""


def log_members(name: str, _before: tuple[str, ...], live: tuple[str, ...]) -> None:
    """A line for a change of the members of one group."""
    log.info("%s is served by %s", name, ", ".join(live))


class Membership:
    """Watches a group: the heartbeats and the presence of its members, and whether it is paused.

    `live` always contains this member; leases of members in `absent` may be taken before they run out. `changes` counts
    the changes of this view, and `news` those of them that members have told, without a look at the server.

    In a group of more than eight, eight watch all others (`GroupWatch`): they look at the presence of all, and at all
    heartbeat keys, and tell who is silent. The others ask at each heartbeat for the number of members and whether
    a watcher is there. They hear who joins and leaves, and look at those that are said to be silent.
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
        clock: ServerClock | None = None,
        on_members: OnMembers | None = None,
    ) -> None:
        """`ask` sends the script calls of many groups in one write; by default each group makes its own call. What is
        seen of the server's time is noted in `clock`. `on_members` hears of each change of the members."""
        self._on_members = on_members or log_members
        self._ask = ask or (lambda script, keys, args: script(client, keys, args))
        self._client = client
        self._keys = keys
        self._member = member
        self._topic = topic
        self._group = group
        self._interval = heartbeat_interval(settings).total_seconds()
        self._presence_interval = settings.presence_interval.total_seconds()
        grace = settings.presence_grace.total_seconds()
        self._watches_presence = grace > 0
        self._asks_for = (UNREADABLE,) if client.is_cluster else ()
        ttl = settings.lease_ttl.total_seconds()
        self._liveness = Liveness(member, ttl=ttl, grace=grace)
        self._watch = GroupWatch(member, f"{topic}/{group}", heartbeat=self._interval, ttl=ttl)
        self._look_at = math.inf  # when all members are read for a reason of its own
        self._heard: list[tuple[str, tuple[str, ...]]] | None = None  # while all members are read
        self._proved_at = -math.inf
        self._noted_at = -math.inf
        self._is_presence_due = False  # of all members, once
        self._announced = frozenset[str]()  # as silent, by this member or another one
        self._hinted = set[str]()  # said to be silent during a look at the presence, which may be older
        self._members: list[str] = []
        self._stirred = asyncio.Event()
        self._refresh_wanted = False
        self._waiters: dict[asyncio.Event, None] = {}  # woken in their order
        self._members_due = 0.0
        self._was_out = False
        self._unreadable = frozenset[int]()  # by this member
        self.changes = self.news = 0
        self.live: tuple[str, ...] = (member,)
        self.absent: frozenset[str] = frozenset()
        self.paused = False
        self.holds = b""
        """What the group holds, as its record says."""
        self.asked = 0.0
        """When the server was asked for it."""
        self.unreadable: dict[str, frozenset[int]] = {}
        """On a cluster: the partitions that members, also this one, cannot read."""
        self.outdated = frozenset[str]()
        """Members of a version without layouts, in a topic that has one: they would read only some of its partitions.
        Empty before `ask_for_layouts`."""
        self.unfinished = b""
        """Which sealed partitions of its topic the group has not finished, as it has noted it. Empty before
        `ask_for_layouts`."""
        self.is_member = True
        """Whether this member takes part. If not, `live` has it all the same, but it owns nothing."""
        self.clock = clock or ServerClock()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Check the group until cancelled."""
        await self._check()
        task_status.started()
        while True:
            with anyio.move_on_after(self._pause()):
                await self._stirred.wait()
            self._stirred.clear()
            if self._refresh_wanted:
                self._members_due = 0.0
            self._refresh_wanted = False
            await self._check()

    def _pause(self) -> float:
        """Seconds until the next check."""
        if self._liveness.awaits_silence and not self._was_out:
            return SOON
        is_urgent = self._watched or self._was_out  # after an outage an announcement may have been missed
        now = monotonic()
        usual = _rounded_up(self._presence_interval if is_urgent else self._interval)
        if self._watch.is_large:
            usual = min(usual, self._members_due - now, self._look_at - now)
        return max(0.0, min(usual, self._liveness.next_absence(now) - now))

    def ended(self, member: str) -> None:
        """The process of another member has ended: check now whether the server has seen that."""
        self._liveness.ended(member)
        self._watch.suspect([member])
        self.refresh()

    def refresh(self) -> None:
        """Check everything now, because a change was announced."""
        self._refresh_wanted = True
        self._stirred.set()

    def hear(self, word: str, members: tuple[str, ...]) -> None:
        """News of the group: see `model.member`. A small group looks itself."""
        if not self._watch.is_large or (self._member in members and word != RELEASED):
            self._look_at = 0.0
            self.refresh()
        elif word == RELEASED:
            if LAYOUT in self._asks_for:  # perhaps because something else was noted as unfinished
                self._members_due = min(self._members_due, self._soon())
                self._stirred.set()
            self._wake_by_news()
        elif word in (JOINED, LEFT):
            if self._heard is not None:
                self._heard.append((word, members))
            self._apply(word, members)
            self._update_view(has_news=False)
        elif word == SILENT:
            self._hinted.update(members)
            self._announced = self._announced.union(members)
            self._watch.suspect(frozenset(members).intersection(self._members))
            self._stirred.set()
        elif word == MISSED or (word == CHANGED and UNREADABLE in self._asks_for):
            self._look_at = min(self._look_at, self._soon())
            self._stirred.set()

    def _soon(self) -> float:
        """When to look, though all members have the same reason to."""
        return monotonic() + random.uniform(0, len(self._members) / LOOKS_A_SECOND)

    def _apply(self, word: str, members: tuple[str, ...]) -> None:
        """Take over who has joined or left."""
        if word == JOINED:
            self._members = sorted({*self._members, *members})
            self._liveness.joined(members)
            self.unreadable = {member: each for member, each in self.unreadable.items() if member not in members}
        else:
            self._members = sorted(set(self._members).difference(members))
            self._liveness.left(members)

    @property
    def _watched(self) -> list[str]:
        """The members whose presence is checked."""
        if not self._watches_presence:
            return []
        if self._watch.is_large and not self._is_presence_due and not self._watch.watches(monotonic()):
            return sorted(self._watch.suspects)
        return [member for member in self._members if member != self._member]

    def take_part(self, *, is_member: bool) -> None:
        """This member has joined the group again, or leaves it."""
        self.is_member = is_member
        self.wake()

    def can_own(self, partition: int) -> bool:
        """Whether this member takes part, and can read a partition."""
        return self.is_member and partition not in self._unreadable

    def exclude(self, partitions: frozenset[int]) -> None:
        """This member cannot read these partitions, and can read all others. What it tells the others of that comes
        later: until then two may be meant to own one, and its lease decides."""
        if self._unreadable != partitions:
            self._unreadable = partitions
            self.unreadable = {**self.unreadable, self._member: partitions}
            self.wake()

    def ask_for_layouts(self) -> None:
        """The topic has more than one block of partitions: see from now on who knows none (`outdated`)."""
        if LAYOUT not in self._asks_for:
            self._asks_for = (*self._asks_for, LAYOUT)
            self._look_at = 0.0
            self.refresh()

    def noted(self, unfinished: bytes) -> None:
        """What the group has noted now as unfinished."""
        self._noted_at = monotonic()
        if self.unfinished != unfinished:
            self.unfinished = unfinished
            self.wake()

    def _saw_note(self, asked: float, unfinished: bytes) -> None:
        """A look that was on its way when this member noted something may be older."""
        if asked > self._noted_at:
            self.unfinished = unfinished

    def _wake_by_news(self) -> None:
        self.news += 1
        self.wake()

    def wake(self) -> None:
        """Count a change and end every `wait`."""
        self.changes += 1
        for event in self._waiters:
            event.set()

    async def wait(self, timeout: float, seen: int | None = None) -> None:
        """Until the view changes, at most `timeout` seconds. `seen`: the value of `changes` that the caller knows."""
        if seen is not None and seen != self.changes:
            return
        event = asyncio.Event()
        self._waiters[event] = None
        try:
            with anyio.move_on_after(timeout):
                await event.wait()
        finally:
            del self._waiters[event]

    async def _check(self) -> None:
        is_refresh, was = self._members_due == 0.0, self._said
        try:
            if monotonic() >= min(self._members_due, self._look_at):
                await self._check_group()
            if watched := self._watched:
                await self._check_presence(watched)
            self._is_presence_due = False
            self._was_out = False
        except BrokerError as error:
            (log.debug if self._was_out else log.warning)("the members of %s cannot be read: %s", self._group, error)
            self._was_out = True
            self._liveness.failed()
        before = self.absent
        self._update_view(is_refresh or self._said != was)
        if any(map(self._liveness.has_ended, self.absent - before)):
            await self._announce_end()

    @property
    def _said(self) -> tuple[object, ...]:
        """What the group and its members say."""
        return self.paused, self.holds, self.unreadable, self.outdated, self.unfinished

    async def _announce_end(self) -> None:
        """Let members on other hosts check now: their grace then begins at the end, not at their next regular check."""
        try:
            if self._watch.is_large:
                await self._tell(SILENT, self.absent)
            else:
                await announce(self._client, self._keys, self._topic, self._group)
        except BrokerError as error:
            log.debug("the end of a member cannot be announced: %s", error)

    async def _tell(self, word: str, members: Iterable[str]) -> None:
        await announce(self._client, self._keys, self._topic, self._group, news_of(word, sorted(members)))

    def _update_view(self, has_news: bool) -> None:
        """`has_news`: something else has changed than who lives."""
        now = monotonic()
        live, absent = self._liveness.live(now), self._liveness.absent(now)
        if has_news or (live, absent) != (self.live, self.absent):
            if live != self.live:
                self._on_members(f"{self._topic}/{self._group}", self.live, live)
            self.live, self.absent = live, absent
            if self._watch.is_large and not has_news:
                self._wake_by_news()
            else:
                self.wake()
        self._watch.saw(self._members, live)

    async def _check_group(self) -> None:
        """Read all members, or in a large group only how many there are."""
        now = monotonic()
        if not self._watch.is_large or now >= self._look_at or self._liveness.misses_some or self._watch.reads_all(now):
            self._heard, wanted_at, self._look_at = [], self._look_at, math.inf
            try:
                await self._check_members(self._heard)
            except BrokerError:
                self._look_at = min(self._look_at, wanted_at)
                raise
            finally:
                self._heard = None
            self._watch.looked(now, len(self._members))
            self._is_presence_due = True
            if self._watch.is_large and not self._watches_presence and self._watch.watches(now):
                await self._prove()
            pause = self._interval
        else:
            pause = await self._check_number()
        self._members_due = monotonic() + pause

    async def _check_number(self) -> float:
        """Read how many members the group has, and whether it is watched. Returns seconds until the next check."""
        about, asked = (self._topic, self._group), monotonic()
        names = (self._keys.members(*about), self._keys.group(*about), self._keys.watched(*about))
        wanted = (LAYOUT,) if LAYOUT in self._asks_for else ()
        seconds, micros, paused, self.holds, members, watched, *noted = await self._ask(LOOK_AT_GROUP, names, wanted)
        now, self.asked, self.paused = monotonic(), asked, paused == b"1"
        if noted:
            self._saw_note(asked, noted[0])
        self.clock.saw(asked, int(seconds) + int(micros) / 1e6)
        self._liveness.saw_clock(now, int(seconds) + int(micros) / 1e6)
        self._liveness.saw_server(now)
        is_again = self._watch.glanced(now, is_counted=members == len(self._members), is_watched=watched == 1)
        return random.uniform(0, STAND_IN_PAUSE) if is_again else self._interval

    async def _prove(self) -> None:
        """Let the other members of a large group know that this one looks at all of them."""
        interval = self._presence_interval if self._watches_presence else self._interval
        if monotonic() - self._proved_at >= interval * LOOKS_PROVED / 2:
            self._proved_at = monotonic()
            lasts, watched = round(interval * LOOKS_PROVED * 1000), self._keys.watched(self._topic, self._group)
            await PROVE_WATCH(self._client, [watched], [self._member, lasts])

    async def _check_members(self, heard: list[tuple[str, tuple[str, ...]]]) -> None:
        """Read all members. `heard` gets what is announced meanwhile: it may be newer than what is read."""
        about = self._topic, self._group
        names = (self._keys.members(*about), self._keys.group(*about), self._keys.alive(*about, ""))
        asked, asks_for = monotonic(), self._asks_for
        seconds, micros, paused, self.holds, *found = await self._ask(LOOK_AT_MEMBERS, names, asks_for)
        self.asked = asked
        if LAYOUT in asks_for:
            note, *found = found
            self._saw_note(asked, note)
        now, step = monotonic(), 3 if LAYOUT in asks_for else 2
        raws = found[::step]
        named = [(exact_text(raw), is_there) for raw, is_there in zip(raws, found[1::step], strict=True)]
        if UNREADABLE in asks_for:
            said = {member: read_numbers(word) for member, word in named if member is not None and word not in (0, 1)}
            self.unreadable = {**said, self._member: self._unreadable}
        if LAYOUT in asks_for:
            known = {name: says if lives else name not in self.outdated for (name, lives), says in
                     zip(named, found[2::step], strict=True)}  # fmt: skip
            self.outdated = frozenset(name for name, knows in known.items() if name is not None and not knows)
        self._members = sorted(member for member, _ in named if member is not None)
        alive = [member for member, is_there in named if member is not None and is_there != 0]
        self.clock.saw(asked, int(seconds) + int(micros) / 1e6)
        self._liveness.saw_clock(now, int(seconds) + int(micros) / 1e6)
        self._liveness.saw_members(now, self._members, alive)
        self.paused = paused == b"1"
        for news in heard:
            self._apply(*news)
        await self._prune()
        await self._remove_foreign([raw for raw, (member, _) in zip(raws, named, strict=True) if member is None])

    async def _remove_foreign(self, found: list[bytes]) -> None:
        """Another client has written what is no member."""
        if found:
            members = self._keys.members(self._topic, self._group)
            shown = ", ".join(repr(each[:60]) for each in found)
            log.warning("removed from %s what names no member: %s", members, shown)
            await self._client.execute_command("SREM", members, *found)

    async def _prune(self) -> None:
        """Remove members that died without withdrawing."""
        gone = self._liveness.dead(monotonic()) & set(self._members)
        if gone:
            removed = await self._client.execute_command("SREM", self._keys.members(self._topic, self._group), *gone)
            if removed and self._watch.is_large:
                await self._tell(LEFT, gone)

    async def _check_presence(self, others: list[str]) -> None:
        self._hinted.clear()
        counts = await listeners(self._client, [self._keys.presence(member) for member in others])
        self._liveness.saw_listeners(monotonic(), dict(zip(others, counts, strict=True)))
        silent = frozenset(member for member, count in zip(others, counts, strict=True) if not count)
        present = [each for each in others if each not in silent and each not in self._hinted]
        self._watch.clear(each for each in present if not self._liveness.has_ended(each))
        self._announced = self._announced.difference(present).intersection(self._members)
        self._watch.suspect(silent)
        if self._watch.is_large and self._watch.watches(monotonic()):
            if unheard := silent - self._announced:
                await self._tell(SILENT, unheard)
                self._announced |= unheard
            await self._prove()

    def __repr__(self) -> str:
        return f"<Membership {self._topic}/{self._group} live={len(self.live)} absent={len(self.absent)}>"
