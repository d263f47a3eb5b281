"""Reading: one blocking read for all lanes, the settles of what is done in the same write, the next read written before
the batch in hand is handled."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import anyio

from rsmq.clock import monotonic, to_ms
from rsmq.connect import Client
from rsmq.consumer.lane import Lane
from rsmq.consumer.queue import Queue
from rsmq.consumer.reclaimer import Reclaimer
from rsmq.consumer.runner import Runner
from rsmq.consumer.settler import Batch, Settler
from rsmq.consumer.stretch import Row, size_of_plain
from rsmq.errors import BrokerError, GroupMissing, Malformed, Oversized, SlotMoving
from rsmq.message import LARGEST_PAYLOAD, Message
from rsmq.retry import Bury, Reason
from rsmq.settings import Settings
from rsmq.wire import Wire, pack

log = logging.getLogger("rsmq.fetch")

MARGIN: Final = 3.0
"""Seconds beyond BLOCK that a reply may take before the connection counts as dead."""
SOON: Final = 0.02
"""Seconds before a slot that is moving is looked for again."""
FEW: Final = 16
"""Messages in hand up to which they are handled before the next read is written: they wait less, and leave with it."""
FIRST_SIZE: Final = 4096
"""Bytes a message is taken to have until some were seen."""


class Fetcher:
    """A reader: owns the blocking connection, and is the only one who moves the read position of its lanes.

    `place` is a key of theirs (on a cluster all are in its slot), `shares` among how many readers the room is shared.

    After a broken connection every lane takes over its own pending messages again: the reply may have been lost on the
    way, with entries that the server believes to be in our hands.
    """

    def __init__(
        self,
        client: Client,
        settings: Settings,
        member: str,
        group: str,
        lanes: Mapping[int, Lane],
        queue: Queue,
        runner: Runner,
        settler: Settler,
        reclaimer: Reclaimer,
        ensure_groups: Callable[[], Awaitable[None]],
        stats: Counter[str],
        place: str = "",
        shares: Callable[[], int] = lambda: 1,
    ) -> None:
        self._client, self._settings, self._member, self._group = client, settings, member, group
        self._lanes, self._queue, self._runner = lanes, queue, runner
        self._settler, self._reclaimer, self._ensure_groups, self._stats = settler, reclaimer, ensure_groups, stats
        self._place, self._shares = place, shares
        self._wire = Wire(client.node_for(place))
        self._size = float(FIRST_SIZE)
        self._changed = asyncio.Event()
        self._last_reader = ""
        self._blocked = False
        self._cycle_done = asyncio.Event()
        self.is_paused = False
        self.turned = self.succeeded = monotonic()  # the last turn of the loop in `run`, and the last without an error
        self.ready = asyncio.Event()

    @property
    def reader(self) -> str:
        """What the lease records of our reading connection, for the next owner to cut off."""
        return f"{self._wire.client_id} {self._wire.address}" if self._wire.is_open else ""

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Read until cancelled; survive whatever the server does."""
        task_status.started()
        failures = 0
        try:
            while True:
                self.turned = monotonic()
                try:
                    await self._connect()
                    await self._cycle()
                    failures, self.succeeded = 0, monotonic()
                except GroupMissing as error:
                    log.error("a stream or group of %s is gone, making it again from the start: %s", self._group, error)
                    await self._lost_connection(close=False)
                    for lane in self._lanes.values():
                        lane.lease.lose()  # what is in hand comes again from the start: beside it, it would overtake
                    await self._retry(self._ensure_groups)
                except SlotMoving as error:
                    log.info("%s is read elsewhere: %s", self._place, error)
                    await self._lost_connection(close=True)
                    await asyncio.sleep(SOON)
                except BrokerError as error:
                    failures += 1
                    (log.warning if failures == 1 else log.debug)("reading %s waits: %s", self._group, error)
                    await self._lost_connection(close=True)
                    await asyncio.sleep(min(1.0, 0.05 * 2**failures))
        finally:
            self._finish_cycle()
            await self._wire.close()

    async def _retry(self, action: Callable[[], Awaitable[None]]) -> None:
        try:
            await action()
        except BrokerError as error:
            log.warning("waiting for the server: %s", error)
            await asyncio.sleep(0.2)

    async def _connect(self) -> None:
        if not self._wire.is_open:
            await self._client.refresh()
            self._wire = Wire(self._client.node_for(self._place))
            await self._wire.open()
            await self._end_ghost()
            self.ready.set()

    async def _end_ghost(self) -> None:
        """A read that is still on its way on our last connection must not be answered: nobody would get the answer."""
        client_id, _, address = self._last_reader.partition(" ")
        self._last_reader = self.reader
        if client_id:
            await self._wire.exchange([pack(("CLIENT", "KILL", "ID", client_id, "ADDR", address))])

    async def _lost_connection(self, *, close: bool) -> None:
        self._blocked = False
        if close:
            self.ready.clear()
            await self._wire.close()
        for lane in self._lanes.values():
            lane.begin_anew(is_ours=True)
            lane.retry_at = 0.0  # a lost master may have confirmed what its replica has never heard of
        self._runner.retries.set()
        self._finish_cycle()

    # -- one cycle ------------------------------------------------------------------------------------------------

    async def _cycle(self) -> None:
        """Take over, or read; handle what came while the next read is on its way."""
        self._changed.clear()
        room = self._settings.prefetch - self._queue.in_hand
        if self.is_paused or not self._lanes:
            await self._rest(0.25)
        elif room <= self._settings.prefetch // 4 and self._queue.in_hand > 0:
            await self._runner.kick()
            with anyio.move_on_after(0.25):
                await self._runner.wait_for_space(self._settings.prefetch // 2)
            self._finish_cycle()
        else:
            await self._recover(room)
            lanes = [lane for lane in self._lanes.values() if lane.is_readable and lane.lease.is_held()]
            if lanes and self._queue.shelved < 10 * self._settings.prefetch:
                await self._read(lanes, room)
            else:
                await self._runner.kick()
                await self._rest(0.05 if self._is_recovering() else 0.25)

    def _is_recovering(self) -> bool:
        return any(lane.cursor is not None and not lane.is_quiet for lane in self._lanes.values())

    async def _rest(self, seconds: float) -> None:
        self._finish_cycle()
        with anyio.move_on_after(seconds):
            await self._changed.wait()

    async def _recover(self, room: int) -> None:
        is_early = self._queue.in_hand <= FEW
        for lane in list(self._lanes.values()):
            if lane.cursor is not None and not lane.is_quiet and lane.lease.is_held() and room > 0:
                await self._reclaimer.step(lane, self.reader, room)
                room = self._settings.prefetch - self._queue.in_hand
                is_early = True
        if is_early:  # else what was read is handled while the next read is on its way
            await self._runner.kick()

    async def _read(self, lanes: list[Lane], room: int) -> None:
        batches = self._settler.take(self._lanes.values() if self._client.is_cluster else None)
        commands = [self._settler.command(batch) for batch in batches]
        commands.append(self._read_command(lanes, room))
        self._blocked = True
        try:
            await self._wire.send(commands)
            await self._runner.kick()  # handle the batch in hand while the server prepares the next
            await self._confirm(batches)
            (reply,) = await self._wire.receive(1, self._settings.longest_read.total_seconds() + MARGIN)
        except BaseException:
            self._settler.put_back(batches)
            raise
        finally:
            self._blocked = False
        if isinstance(reply, Exception):
            raise reply
        if reply:
            await self._offer(reply, lanes)
        self._finish_cycle()

    async def _confirm(self, batches: list[Batch]) -> None:
        """Before the read is waited for, which may block: a lane is handed over when its settles are confirmed."""
        for reply in await self._wire.receive(len(batches)) if batches else ():
            await self._settler.confirm(batches[0], reply)
            del batches[0]

    def _read_command(self, lanes: list[Lane], room: int) -> bytes:
        """COUNT is per stream: half the room at most, so that one half is handled while the other is fetched."""
        aim = min(
            room, max(1, self._settings.prefetch // 2), max(1, int(self._settings.prefetch_bytes / 2 / self._size))
        )
        count = max(1, aim // (len(lanes) * self._shares()))
        # something is ready: look without waiting, so that what is handled meanwhile is settled by the next read
        block = 0 if self._is_recovering() or self._changed.is_set() else to_ms(self._settings.longest_read)
        wait = ("BLOCK", block) if block else ()
        streams = [lane.stream for lane in lanes]
        return pack(
            ("XREADGROUP", "GROUP", self._group, self._member, "COUNT", count, *wait, "STREAMS", *streams)
            + (">",) * len(lanes)
        )

    async def _offer(self, reply: list[Any], lanes: list[Lane]) -> None:
        """What was read for `lanes`. One that is gone, or a new one of the same partition, takes nothing from it: it
        would overtake what is pending, which the owner takes over first."""
        by_stream = {lane.stream.encode(): lane for lane in lanes if self._lanes.get(lane.partition) is lane}
        unreadable: list[tuple[Lane, bytes, Malformed]] = []
        group = self._group.encode()
        for stream, rows in reply:
            lane = by_stream.get(stream)
            if lane is None:
                continue  # lost while the read was on its way: the new owner takes these over
            lane.held.update([entry_id for entry_id, _ in rows])
            if lane.newest is not None:  # else what others had may be ours, in an answer that was lost
                lane.newest = rows[-1][0]
            if self._queue.takes_stretches and self._offer_stretch(lane, rows):
                continue
            messages, size = [], 0
            for entry_id, fields in rows:
                try:
                    message = Message(lane, entry_id, fields)
                except Malformed as error:
                    unreadable.append((lane, entry_id, error))
                    continue
                size += len(message.data)
                if message.addressee is not None and message.addressee != group:
                    if not lane.done:
                        self._settler.note(lane)
                    lane.done.append(entry_id)
                    continue
                messages.append(message)
            if size > LARGEST_PAYLOAD:  # only then can one of them be too large
                messages = [message for message in messages if not self._is_oversized(lane, message, unreadable)]
            self._note_size(size, len(rows))
            self._queue.offer(lane, messages)
        self._stats["reads"] += 1
        for lane, entry_id, why in unreadable:
            await self._bury(lane, entry_id, why)

    def _offer_stretch(self, lane: Lane, rows: list[Row]) -> bool:
        size = size_of_plain(rows)
        if size is None or (size > LARGEST_PAYLOAD and max([len(entry[1]) for _, entry in rows]) > LARGEST_PAYLOAD):
            return False  # or one of them is too large to be handled
        if not self._queue.offer_stretch(lane, rows):
            return False
        self._note_size(size, len(rows))
        return True

    def _note_size(self, size: int, count: int) -> None:
        self._size += 0.2 * (size / max(1, count) + 64 - self._size)

    def _is_oversized(self, lane: Lane, message: Message, unreadable: list[tuple[Lane, bytes, Malformed]]) -> bool:
        try:
            message.check_size()
        except Oversized as error:
            unreadable.append((lane, message.entry_id, error))
            return True
        return False

    async def _bury(self, lane: Lane, entry_id: bytes, error: Malformed) -> None:
        log.warning("entry %s of %s is no message: %s", entry_id.decode(), lane.stream, error)
        decision = Bury(Reason.MALFORMED, str(error), is_copied=not isinstance(error, Oversized))
        await self._settler.bury(lane, entry_id, 1, decision)
        self._stats["buried"] += 1

    # -- for those who change the lanes ---------------------------------------------------------------------------

    def _finish_cycle(self) -> None:
        done, self._cycle_done = self._cycle_done, asyncio.Event()
        done.set()

    async def interrupt(self) -> None:
        """The lanes have changed: end a blocking read now. The server answers it as if its time were over."""
        self._changed.set()
        self._runner.space.set()
        cycle = self._cycle_done
        while self._blocked and cycle is self._cycle_done and self._wire.is_open:
            if await self._wire.node.execute_command("CLIENT", "UNBLOCK", self._wire.client_id):
                return
            await asyncio.sleep(0.01)  # the read was written but had not arrived

    async def kick(self) -> None:
        """Let the pool work on what others than the reader have queued."""
        await self._runner.kick()

    async def exclude(self) -> None:
        """Wait until no read written before this call is on its way: quiet lanes are then not read any more."""
        done = self._cycle_done
        await self.interrupt()
        await done.wait()

    def __repr__(self) -> str:
        return f"<Fetcher {self._group} lanes={sorted(self._lanes)} {'blocked' if self._blocked else 'free'}>"
