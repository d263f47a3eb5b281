"""One member of one group: the roles that serve one handler, and the order in which they start and stop."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Final

import anyio

from rsmq.clock import monotonic
from rsmq.connect import Client
from rsmq.consumer.execution import build_runner
from rsmq.consumer.fetcher import Fetcher
from rsmq.consumer.gate import Gate
from rsmq.consumer.intake import Intake
from rsmq.consumer.lane import Lane
from rsmq.consumer.pool import Slot
from rsmq.consumer.queue import Queue
from rsmq.consumer.rebalancer import Rebalancer
from rsmq.consumer.reclaimer import Reclaimer
from rsmq.consumer.settler import Settler
from rsmq.consumer.sharer import Sharer
from rsmq.consumer.turnstile import GatedTurnstile, Turnstile, shares
from rsmq.consumer.unparker import Unparker
from rsmq.consumer.warden import Warden
from rsmq.errors import BrokerError
from rsmq.handler import Handler
from rsmq.heartbeat.beat import Beat
from rsmq.heartbeat.lease import Leases
from rsmq.heartbeat.membership import Ask, Membership, announce
from rsmq.keys import Keys
from rsmq.middleware import Call
from rsmq.settings import Settings
from rsmq.stream import ensure_groups
from rsmq.topic import Topic, Topics

log = logging.getLogger("rsmq.consumer")

PAUSE_LOOK: Final = 5.0
"""Seconds between two looks whether the group is paused, if nobody tells."""


class Consumer:
    """Serves one handler. Nesting is the shutdown order: leases and settling outlive fetching and running.

    `stats` counts what happened: settled, retried, buried, redelivered, handed_back, refused, not_pending, lost_body,
    restored, deleted, reads; and of leases: taken, released, lost.
    """

    def __init__(
        self,
        client: Client,
        keys: Keys,
        settings: Settings,
        member: str,
        topic: Topic,
        handler: Handler,
        call: Call,
        beat: Beat,
        ask: Ask | None = None,
    ) -> None:
        self.topic, self.handler, self.member = topic, handler, member
        self.stats: Counter[str] = Counter()
        self.lanes: dict[int, Lane] = {}
        self._client, self._keys, self._settings, self._beat = client, keys, settings, beat
        self._leases = Leases(client, keys, settings, member)
        self.membership = Membership(client, keys, settings, member, topic.name, handler.group, ask)
        self.queue = Queue(is_ordered=handler.ordering != "none", is_serial=handler.ordering == "partition")
        self._settler = Settler(client, settings, member, handler.group, self._drop, self.stats)
        self._runner = build_runner(handler, call, self.queue, self._settler, self.stats)
        self._limit()
        self._reclaimer = Reclaimer(client, settings, member, self.queue, self._runner, self._settler, self.stats)
        self._intake = Intake(client, self.lanes, self._runner, self._reader_of)
        self.warden = Warden(
            client, member, self.lanes, self.queue, self._runner, self._settler, self._intake, self._leases, beat,
            self.stats,
        )  # fmt: skip
        self._stopping = asyncio.Event()
        self._deadline = float("inf")
        self.started = asyncio.Event()

    def _limit(self) -> None:
        """A rate or a limit over the group: what may start is decided where it waits."""
        handler, runner, members = self.handler, self._runner, lambda: len(self.membership.live)
        if handler.group_concurrency is not None:
            gate = () if handler.rate is None else (handler.rate, members, runner.kick_soon)
            kind = GatedTurnstile if gate else Turnstile
            self.queue.ready = runner.turnstile = kind(lambda: self.most_calls, *gate)
        elif handler.rate is not None:
            self.queue.ready = Gate(handler.rate, members, runner.kick_soon)

    def _reader_of(self, lanes: Mapping[int, Lane], partition: int | None, intake: Intake) -> Fetcher:
        place = "" if partition is None else self._keys.stream(self.topic.name, partition)
        return Fetcher(
            self._client, self._settings, self.member, self.handler.group, lanes, self.queue, self._runner,
            self._settler, self._reclaimer, self._ensure_groups, self.stats, place, lambda: intake.shares,
        )  # fmt: skip

    async def _ensure_groups(self) -> None:
        """After FLUSHALL or DEL: from the start, which may repeat but cannot lose."""
        await Topics(self._client, self._keys, self._settings).ensure(self.topic.name, self.topic.partitions)
        await ensure_groups(self._client, self._keys, self.topic, self.handler.group, "0")

    def _owner(self) -> Rebalancer | Sharer:
        """Who decides which lanes are ours."""
        if self.handler.distribution == "shared":
            return Sharer(
                self.topic, self.handler, self._keys, self._settings, self.member, self._beat, self.membership,
                self.lanes, self.queue, self._reclaimer, self._intake, self._drop,
            )  # fmt: skip
        return Rebalancer(
            self.topic, self.handler, self._keys, self._settings, self.member, self._leases, self._beat,
            self.membership, self.lanes, self.warden,
            partial(announce, self._client, self._keys, self.topic.name, self.handler.group),
        )  # fmt: skip

    def _drop(self, lane: Lane) -> None:
        self.warden.drop_lane(lane)

    # -- life -----------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`, then drain, release, leave."""
        try:
            if not await self._join():
                self.started.set()
                return
            async with anyio.create_task_group() as outer:
                unparker = Unparker(self._settings, self.lanes, self.queue, self._reclaimer, self._runner)
                await outer.start(self.membership.run)
                await outer.start(self._settler.run)
                await outer.start(self._runner.run)
                outer.start_soon(self._watch_group)
                async with anyio.create_task_group() as inner:
                    await inner.start(self._intake.run)
                    await inner.start(self._owner().run)
                    await inner.start(unparker.run)
                    self.started.set()
                    task_status.started()
                    await self._stopping.wait()
                    await self._end_fetching()
                    inner.cancel_scope.cancel()
                await self._drain()
                outer.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                with anyio.move_on_after(2):
                    await self._let_go()
                with anyio.move_on_after(2):
                    await self._beat.leave(self.topic.name, self.handler.group)

    async def _join(self) -> bool:
        """Become a member, however long the server is away. False: told to stop before, so there is nothing to end."""
        is_member = False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._end_when_stopping, tasks.cancel_scope)
            info = {"handler": self.handler.name, "concurrency": self.handler.concurrency}
            await self._beat.join(self.topic.name, self.handler.group, info, self.membership.notice)
            is_member = True
            tasks.cancel_scope.cancel()
        return is_member

    async def _end_when_stopping(self, scope: anyio.CancelScope) -> None:
        await self._stopping.wait()
        scope.cancel()

    async def _watch_group(self) -> None:
        """What the group's membership tells: whether it is paused, and how many share its calls."""
        seen = 0
        while True:
            await self.membership.wait(PAUSE_LOOK, seen)
            seen = self.membership.changes
            if self._runner.turnstile is not None:
                self._runner.kick_soon()  # its share may have grown
            if self.membership.paused != self._intake.is_paused:
                self._intake.is_paused = self.membership.paused
                state = "paused" if self._intake.is_paused else "running"
                log.info("group %s of %s is %s", self.handler.group, self.topic.name, state)
                await self.warden.interrupt()

    # -- for those who watch, from any thread ---------------------------------------------------------------------

    @property
    def most_calls(self) -> int:
        """How many calls of the handler may run here at once."""
        handler = self.handler
        if handler.group_concurrency is None:
            return handler.concurrency
        share = shares(handler.group_concurrency, self.membership.live, f"{self.topic.name}/{handler.group}")
        return min(handler.concurrency, share.get(self.member, 0))

    @property
    def readers(self) -> tuple[Fetcher, ...]:
        """What reads now; each knows when it last did."""
        return self._intake.readers

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The pool that runs the handler; each knows what it runs and since when."""
        return self._runner.slots

    # -- stopping -------------------------------------------------------------------------------------------------

    def stop(self, grace: float) -> None:
        """Take nothing new; give what runs `grace` seconds. Called again it shortens the grace. Infinite: quiet."""
        self._deadline = min(self._deadline, monotonic() + grace)
        self._stopping.set()

    async def _end_fetching(self) -> None:
        for lane in self.lanes.values():
            lane.is_quiet = True
        with anyio.move_on_after(self._settings.longest_read.total_seconds() + 1):
            try:
                await self._intake.exclude()
            except BrokerError as error:
                log.warning("stopping without the server: %s", error)

    async def _drain(self) -> None:
        """Hand back what has not started, wait for what runs, settle, release."""
        lanes = list(self.lanes.values())
        await self.warden.hand_back_unstarted(lanes)
        while any(lane.running for lane in lanes):
            if monotonic() >= self._deadline:
                for lane in lanes:
                    self._runner.cancel_lane(lane, "stop")
            await asyncio.sleep(0.02)
            if monotonic() >= self._deadline + self._settings.lease_ttl.total_seconds():
                log.error("%r does not stop: its messages are redelivered elsewhere", self._runner)
                break
        await self.warden.hand_back_unstarted(lanes)
        with anyio.move_on_after(self._settings.command_timeout.total_seconds()):
            await self._settler.drained(lanes)
            try:
                await self.warden.release(lanes)
            except BrokerError as error:
                log.warning("leases are not given back, they run out: %s", error)

    async def _let_go(self) -> None:
        """Cancelled instead of stopped: settle what is done and give the leases back, so that nobody waits for them."""
        lanes = [lane for lane in self.lanes.values() if lane.lease.is_held()]
        if lanes:
            with suppress(BrokerError):
                await self._settler.flush()
            await self.warden.hand_back_unstarted(lanes)
            for lane in lanes:
                lane.running = 0
            with suppress(BrokerError):
                await self.warden.release(lanes)

    def __repr__(self) -> str:
        return f"<Consumer {self.handler.name} {self.topic.name}/{self.handler.group} lanes={sorted(self.lanes)}>"
