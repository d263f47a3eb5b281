"""One member of one group: the roles that serve one handler, and the order in which they start and stop."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Final

import anyio

from rsmq.clock import monotonic
from rsmq.connect import Client
from rsmq.consumer.execution import build_runner
from rsmq.consumer.fetcher import Fetcher
from rsmq.consumer.gate import Gate
from rsmq.consumer.intake import Intake
from rsmq.consumer.lane import START, Lane
from rsmq.consumer.pool import Slot
from rsmq.consumer.queue import Queue
from rsmq.consumer.rebalancer import Rebalancer
from rsmq.consumer.reclaimer import Reclaimer
from rsmq.consumer.settler import Settler
from rsmq.consumer.sharer import Sharer
from rsmq.consumer.turnstile import GatedTurnstile, Turnstile, shares
from rsmq.consumer.unparker import Unparker
from rsmq.errors import BrokerError
from rsmq.handler import Call, Handler
from rsmq.heartbeat.beat import Beat
from rsmq.heartbeat.lease import Leases
from rsmq.heartbeat.membership import Ask, Membership, announce
from rsmq.keys import Keys
from rsmq.script import REMOVE_CONSUMER
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
        self.membership = Membership(client, keys, settings, member, topic.name, handler.group, ask)
        self._leases = Leases(client, keys, settings, member)
        self.queue = Queue(is_ordered=handler.ordering != "none", is_serial=handler.ordering == "partition")
        self._settler = Settler(client, settings, member, handler.group, self.drop_lane, self.stats)
        self._runner = build_runner(handler, call, self.queue, self._settler, self.stats)
        self._limit()
        self._reclaimer = Reclaimer(client, settings, member, self.queue, self._runner, self._settler, self.stats)
        self._intake = Intake(client, self.lanes, self._runner, self._reader_of)
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

    @property
    def most_calls(self) -> int:
        """How many calls of the handler may run here at once."""
        handler = self.handler
        if handler.group_concurrency is None:
            return handler.concurrency
        share = shares(handler.group_concurrency, self.membership.live, f"{self.topic.name}/{handler.group}")
        return min(handler.concurrency, share.get(self.member, 0))

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

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`, then drain, release, leave."""
        try:
            if not await self._join():
                self.started.set()
                return
            async with anyio.create_task_group() as outer:
                await outer.start(self.membership.run)
                await outer.start(self._settler.run)
                await outer.start(self._runner.run)
                outer.start_soon(self._watch_pause)
                async with anyio.create_task_group() as inner:
                    await inner.start(self._intake.run)
                    await inner.start(self._owner().run)
                    await inner.start(self._unparker().run)
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
            await self._beat.join(self.topic.name, self.handler.group, self._info(), self.membership.notice)
            is_member = True
            tasks.cancel_scope.cancel()
        return is_member

    async def _end_when_stopping(self, scope: anyio.CancelScope) -> None:
        await self._stopping.wait()
        scope.cancel()

    async def _let_go(self) -> None:
        """Cancelled instead of stopped: settle what is done and give the leases back, so that nobody waits for them."""
        lanes = [lane for lane in self.lanes.values() if lane.lease.is_held()]
        if lanes:
            with suppress(BrokerError):
                await self._settler.flush()
            await self._hand_back_unstarted(lanes)
            for lane in lanes:
                lane.running = 0
            with suppress(BrokerError):
                await self._release(lanes)

    def _info(self) -> dict[str, object]:
        return {"handler": self.handler.name, "concurrency": self.handler.concurrency}

    def _owner(self) -> Rebalancer | Sharer:
        if self.handler.distribution == "shared":
            return Sharer(
                self.topic, self.handler, self._keys, self._settings, self.member, self._beat, self.membership,
                self.lanes, self.queue, self._reclaimer, self._intake, self.drop_lane,
            )  # fmt: skip
        return Rebalancer(
            self.topic, self.handler, self._keys, self._settings, self.member, self._leases, self._beat,
            self.membership, self.lanes, self, self._announce,
        )  # fmt: skip

    def _unparker(self) -> Unparker:
        return Unparker(self._settings, self.lanes, self.queue, self._reclaimer, self._runner)

    async def _announce(self) -> None:
        await announce(self._client, self._keys, self.topic.name, self.handler.group)

    async def _watch_pause(self) -> None:
        seen = 0
        while True:
            await self.membership.wait(PAUSE_LOOK, seen)
            seen = self.membership.changes
            if self._runner.turnstile is not None:
                self._runner.kick_soon()  # its share may have grown
            if self.membership.paused != self._intake.is_paused:
                self._intake.is_paused = self.membership.paused
                log.info(
                    "group %s of %s is %s",
                    self.handler.group,
                    self.topic.name,
                    "paused" if self._intake.is_paused else "running",
                )
                await self._interrupt()

    async def _interrupt(self) -> None:
        try:
            await self._intake.interrupt()
        except BrokerError as error:
            log.debug("the reader could not be woken: %s", error)

    # -- for those who watch, from any thread ----------------------------------------------------------------------

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
        await self._hand_back_unstarted(lanes)
        while any(lane.running for lane in lanes):
            if monotonic() >= self._deadline:
                for lane in lanes:
                    self._runner.cancel_lane(lane, "stop")
            await asyncio.sleep(0.02)
            if monotonic() >= self._deadline + self._settings.lease_ttl.total_seconds():
                log.error("%r does not stop: its messages are redelivered elsewhere", self._runner)
                break
        await self._hand_back_unstarted(lanes)
        with anyio.move_on_after(self._settings.command_timeout.total_seconds()):
            await self._settler.drained(lanes)
            try:
                await self._release(lanes)
            except BrokerError as error:
                log.warning("leases are not given back, they run out: %s", error)

    async def _hand_back_unstarted(self, lanes: list[Lane]) -> None:
        for lane in lanes:
            unstarted = self.queue.withdraw(lane)
            if unstarted and lane.lease.is_held():
                try:
                    await self._settler.hand_back(lane, unstarted)
                except BrokerError as error:
                    log.warning("%d messages are redelivered after the lease: %s", len(unstarted), error)

    async def _release(self, lanes: list[Lane]) -> None:
        for lane in lanes:
            if not lane.running:
                self.drop_lane(lane)
                self._beat.forget(lane.lease)
                if lane.epoch:
                    await self._leases.release(lane.lease)
                else:
                    await REMOVE_CONSUMER(self._client, (lane.stream,), (lane.group, self.member))

    # -- lanes (what the rebalancer asks of us) -------------------------------------------------------------------

    def reader(self, partition: int) -> str:
        """Which connection reads a partition; empty while there is none."""
        return self._intake.reader(partition)

    async def wait_for_reader(self, partition: int) -> None:
        """Until there is a reading connection: a lease must name it."""
        await self._intake.wait_for_reader(partition)

    async def open_lane(self, lane: Lane) -> None:
        """A lease was granted: take over what is pending there, then read."""
        self.lanes[lane.partition] = lane
        self.stats["taken"] += 1
        log.info("%s takes %s.%d/%s, epoch %s", self.member, lane.topic, lane.partition, lane.group, lane.epoch)
        await self._interrupt()

    def drop_lane(self, lane: Lane) -> None:
        """The lease is lost or given back: forget everything of it, and cancel what runs, without asking anybody."""
        was_held = lane.lease.is_held()
        lane.lease.lose()
        if self.lanes.get(lane.partition) is lane:
            del self.lanes[lane.partition]
            self.stats["released" if was_held else "lost"] += 1
        lane.done.clear()
        self.queue.withdraw(lane)
        if lane.running:
            log.warning("lost %r while %d handlers ran: they are cancelled", lane, lane.running)
            self._runner.cancel_lane(lane, "lost")
        self._runner.space.set()

    async def quiesce(self, lane: Lane, seconds: float) -> bool:
        """Stop reading a lane, hand back what has not started, wait for the rest. False: something still runs."""
        lane.is_quiet = True
        await self._intake.exclude(lane.partition)
        await self._settler.hand_back(lane, self.queue.withdraw(lane))
        deadline = monotonic() + seconds
        while lane.running and monotonic() < deadline:
            await asyncio.sleep(0.01)
        if lane.running:
            return False
        await self._settler.drained([lane])
        return True

    def settle_again(self, lane: Lane, ids: Collection[bytes]) -> None:
        """Acknowledge what was settled before, which is harmless: the auditor has made it pending meanwhile."""
        if ids and not lane.done:
            self._settler.note(lane)
        lane.done.extend(ids)

    async def resume_lane(self, lane: Lane) -> None:
        """Keep a lane after all: what was handed back is taken over again."""
        lane.cursor = START
        lane.is_quiet = False
        await self._interrupt()

    def __repr__(self) -> str:
        return f"<Consumer {self.handler.name} {self.topic.name}/{self.handler.group} lanes={sorted(self.lanes)}>"
