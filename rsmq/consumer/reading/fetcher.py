"""Reading: one blocking read for all lanes. The same write settles what is done, and the next read is written before
the batch in flight is handled."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from math import inf
from typing import Any, Final

import anyio

from rsmq.consumer.reading.reclaimer import Reclaimer
from rsmq.consumer.running.runner import Runner
from rsmq.consumer.settling.settler import AckBatch, Settler
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.raw_entries import make_messages
from rsmq.errors import BrokerError, BrokerUnavailable, GroupMissing, Malformed, NotPermitted, SlotMoving
from rsmq.model.backoff import Backoff
from rsmq.model.clock import awake, monotonic, to_ms
from rsmq.model.layout import NORMAL
from rsmq.model.message import LARGEST_PAYLOAD, Message, RawEntry, plain_size, refuse_oversized
from rsmq.model.settings import longest_read
from rsmq.model.stream_id import parse_stream_id
from rsmq.model.words import count
from rsmq.redis.client.raw_connection import RawConnection, kill_command, pack
from rsmq.redis.streams import as_dict, ensure_groups
from rsmq.redis.topics import Topics, make_topic_again

log = logging.getLogger("rsmq.fetch")

MARGIN: Final = 3.0
"""Seconds beyond BLOCK that a reply may take before the connection counts as dead."""
SHORT_READ: Final = timedelta(milliseconds=20)
"""How long a read waits that names a part of the lanes: the others' messages wait for it."""
SOON: Final = 0.02
"""Seconds before the next attempt to read a slot that is being moved."""
FEW: Final = 16
"""Up to so many messages in flight are handled before the next read is written: they wait less, and leave with it."""
PORTION: Final = 64
"""Entries of one lane that are worth its place in a read and in a settlement, while there is a backlog."""
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 1.0
"""Seconds before the next attempt while the server is away."""
FIRST_SIZE: Final = 4096
"""Assumed bytes of a message until the first ones are read."""


class Fetcher:
    """Owns a blocking connection, and alone moves the read position of its lanes: those of a band, or one `partition`.

    After a broken connection every lane takes over its own pending messages again: a reply may have been lost, with
    entries that the server believes to have delivered. The fetchers of a band share its prefetch bound.
    """

    def __init__(
        self,
        context: ConsumerContext,
        runner: Runner,
        settler: Settler,
        reclaimer: Reclaimer,
        partition: int | None = None,
        band: str = NORMAL,
    ) -> None:
        self.band = band
        self._context = context
        self._client = context.client
        self._settings = context.settings
        self._group = context.handler.group
        self._member = context.member
        self._stats = context.stats
        self._runner = runner
        self._queue = runner.queue
        self._settler = settler
        self._reclaimer = reclaimer
        self._lanes, self._partition = context.lanes, partition
        self._key = "" if partition is None else context.keys.stream(context.topic.name, partition)
        self._connection = RawConnection(self._client.node_for(self._key))
        self._full = set[int]()  # partitions of which more was there than the last read took, while handlers wait
        self._turn = 0
        """How often some of the lanes were read because more was there than a read takes."""
        self._last_of_few = -1
        """The last partition of the last read that had to leave out some, because its page was small."""
        self._mean_size = float(FIRST_SIZE)
        self._changed = asyncio.Event()
        self._read_by, self._read_of = "", list[Lane]()  # the read that is not answered yet: connection and lanes
        self._blocked = False
        self._is_cycling, self._cycle_done = False, asyncio.Event()  # no read begins while it is connecting
        self._reader_count = 1
        self.is_paused = False
        lease, self._block, self._latest = self._settings.lease_ttl, longest_read(self._settings), inf
        if context.handler.distribution == "shared":  # what was read long ago may be another member's by now
            self._block, self._latest = min(self._block, lease / 3), lease.total_seconds() / 2
        self.last_turn = self.last_success = awake()  # when `run` last began a cycle, and last ended one well
        self.failing_since: float | None = None
        """`awake` at the first failure since the last success."""
        self.trouble = ""
        """What has failed last."""
        self._rests_until = 0.0
        self.connected = asyncio.Event()

    def _own_lanes(self) -> list[Lane]:
        if self._partition is None:
            return self._band_lanes()
        return [self._lanes[self._partition]] if self._partition in self._lanes else []

    def _band_lanes(self) -> list[Lane]:
        """All lanes of the band: they share its prefetch bound."""
        lanes = list(self._lanes.values())
        return [lane for lane in lanes if lane.band == self.band] if self._has_bands else lanes

    @property
    def _has_bands(self) -> bool:
        return self._context.topic.layout.has_bands

    @property
    def reader(self) -> str:
        """What the lease records of this connection, so that the next owner can end it. Empty while it may not read."""
        return self._connection.name if self.connected.is_set() else ""

    @property
    def is_read_late(self) -> bool:
        """Whether a read may be on its way: no answer to it has come, and no later connection has ended it."""
        return bool(self._read_of)

    def late_reader(self, partition: int) -> str:
        """The connection on which a read of this partition may be on its way, or empty."""
        return self._read_by if any(lane.partition == partition for lane in self._read_of) else ""

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Read until cancelled; failures of the server only delay it."""
        task_status.started()
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        try:
            while True:
                self.last_turn = awake()
                if self.last_turn < self._rests_until:
                    await self._lost_connection(close=True)
                    await asyncio.sleep(self._rests_until - self.last_turn)
                try:
                    await self._connect()
                    self._is_cycling = True
                    await self._cycle()
                    backoff.reset()
                    self.last_success = awake()
                    self.failing_since = None
                except GroupMissing as error:
                    log.error("a stream or group of %s is gone, making it again from the start: %s", self._group, error)
                    await self._lost_connection(close=False)
                    for lane in self._own_lanes():
                        lane.lease.lose()  # messages in flight come again, and must not overtake those before them
                    await self._ensure_groups()
                except SlotMoving as error:
                    log.info("%s has moved to another node: %s", self._key, error)
                    await self._lost_connection(close=True)
                    await asyncio.sleep(SOON)
                except BrokerError as error:
                    (log.debug if backoff.failures else log.warning)(
                        "reading %s waits for the server: %s", self._group, error
                    )
                    self._note_failure(error)
                    await self._lost_connection(close=True)
                    await asyncio.sleep(backoff.next())
        finally:
            self._is_cycling = False
            self._finish_cycle()
            await self._connection.close()

    def _note_failure(self, error: BrokerError) -> None:
        self.trouble = str(error)
        if self.failing_since is None:
            self.failing_since = awake()

    def rest(self, seconds: float) -> None:
        """Close the connection for so long, from the next cycle on: another process may need it more."""
        self._rests_until = awake() + seconds

    async def _ensure_groups(self) -> None:
        """After FLUSHALL or DEL, make topic and groups again. From the start: that may repeat but cannot lose."""
        context, topic = self._context, self._context.topic
        try:
            topics = Topics(self._client, context.keys, self._settings, known=topic)
            await make_topic_again(topics, topic)
            if context.producer is not None:  # its handlers publish outputs
                await context.producer.make_topics_again()
            await ensure_groups(self._client, context.keys, topic, self._group, "0")
        except BrokerError as error:
            log.warning("cannot make the group %s again: %s", self._group, error)
            await asyncio.sleep(0.2)

    async def _connect(self) -> None:
        if not self._connection.is_open:
            await self._client.refresh()
            self._connection = RawConnection(self._client.node_for(self._key))
            await self._connection.open()
            if self.is_read_late:  # its answer would be lost
                (reply,) = await self._connection.exchange([pack(kill_command(self._read_by))])
                if isinstance(reply, BrokerUnavailable):
                    raise reply
                self._read_of = []
            await self._refuse_without_rights()
            await self._find_undelivered()
            self.connected.set()

    async def _refuse_without_rights(self) -> None:
        """Raise if this connection may not read: then its member must own nothing. The server compares the rights
        before the time-out, for which it refuses this read, so it delivers nothing."""
        stream = self._key or self._context.keys.stream(self._context.topic.name, 0)
        read = ("XREADGROUP", "GROUP", self._group, self._member, "BLOCK", -1, "STREAMS", stream, ">")
        (reply,) = await self._connection.exchange([pack(read)])
        if isinstance(reply, NotPermitted | BrokerUnavailable) or "nknown command" in str(reply):
            raise reply

    async def _find_undelivered(self) -> None:
        """Find messages in flight that this server has not delivered, because it has lost writes (failover, crash).

        It may give their ids to other messages. So nothing is read there while a settlement under such an id may come:
        until they are handled, or the time of a lease is over and they are cancelled.
        """
        lanes = [lane for lane in self._own_lanes() if lane.in_flight or lane.flows.far]
        if not lanes:
            return
        replies = await self._connection.exchange([pack(("XINFO", "GROUPS", lane.stream)) for lane in lanes])
        for lane, reply in zip(lanes, replies, strict=True):
            if isinstance(reply, BrokerUnavailable):
                raise reply
            if not isinstance(reply, Exception):
                self._drop_undelivered(lane, last_delivered(lane, reply))
            if lane.is_ahead:
                log.warning(
                    "the server has lost writes: it does not know as delivered what is in flight, %s of %s",
                    count(len(lane.recovery.undelivered), "message"), lane.stream,
                )  # fmt: skip
                patience = self._settings.lease_ttl.total_seconds()
                asyncio.get_running_loop().call_later(patience, self._give_up_undelivered, lane)

    def _drop_undelivered(self, lane: Lane, last: tuple[int, int] | None) -> None:
        """Note what the server has not delivered. If ids without messages are among them, the lane is given up: a later
        message of their key may be in memory, and would start first."""
        if last is None:
            return  # the group is made again from the start
        lane.recovery.lose_writes({each for each in lane.in_flight if parse_stream_id(each) > last})
        if lane.flows.far and lane.flows.newest > last:
            lane.lease.lose()

    def _give_up_undelivered(self, lane: Lane) -> None:
        if lane.is_ahead:
            lane.lease.lose()

    async def end_late_read(self) -> None:
        """After `run`: end the connection whose read was not answered, so that the read takes no messages."""
        if self.is_read_late:
            await self._client.node_for(self._key).execute_command(*kill_command(self._read_by))
            self._read_of = []

    async def _lost_connection(self, *, close: bool) -> None:
        self._blocked = self._is_cycling = False
        if close:
            self.connected.clear()
            await self._connection.close()
        for lane in self._own_lanes():
            lane.recovery.restart(is_ours=True)
            lane.recovery.look_for_retries(0)  # a lost master may have confirmed what its replica never received
        self._runner.retries.set()
        self._finish_cycle()

    # -- one cycle ------------------------------------------------------------------------------------------------

    async def _cycle(self) -> None:
        """Take over, or read; handle what came while the next read is on its way."""
        self._changed.clear()
        in_flight, blocked = self._queue.load(self._lanes.values(), self.band)
        room, is_ahead = self._room(in_flight, blocked)
        own = self._own_lanes()
        if self.is_paused or not own:
            await self._wait_for_change(0.25)
        elif room <= 0 or (room <= self._window // 4 and in_flight > 0 and not is_ahead):
            # a read costs the same for few and for many: with little room it waits until half of memory is free
            self._full.clear()
            await self._runner.wake()
            with anyio.move_on_after(0.25):
                await self._runner.wait_for_space(self._window // 2 + self._queue.in_flight - in_flight)
            self._finish_cycle()
        else:
            has_claimed = await self._recover(own)
            lanes = [lane for lane in self._own_lanes() if lane.is_readable and lane.lease.is_held()]
            lanes = [lane for lane in lanes if self._queue.has_room(lane, self._lanes.values())]
            # what waits for a retry or a rate has a bound of its own, so that one stuck key does not stop all others
            if lanes and self._queue.may_block_more(blocked, int(self._mean_size), int(self._settings.prefetch_bytes)):
                await self._read(lanes, self._aim(room), is_ahead=is_ahead)
            elif has_claimed:  # the next page, without a pause
                await self._runner.wake()
                self._finish_cycle()
            else:
                await self._runner.wake()
                await self._wait_for_change(0.05 if self._is_recovering() else 0.25)

    def _room(self, in_flight: int, blocked: int) -> tuple[int, bool]:
        """How many messages to read, and whether only the ids are kept of those that wait behind their keys."""
        window, ahead = self._window, self._queue.room_ahead
        if self._queue.always_reads_ahead:
            return max(ahead, window - in_flight), True
        if ahead and window - in_flight <= window // 4:
            return ahead, True
        return window - in_flight, blocked >= window

    @property
    def _window(self) -> int:
        """How many messages memory has room for, by their number and by their bytes."""
        settings = self._settings
        return max(1, min(settings.prefetch, int(settings.prefetch_bytes / self._mean_size)))

    def _is_recovering(self) -> bool:
        return any(lane.is_recovering for lane in self._own_lanes())

    async def _wait_for_change(self, seconds: float) -> None:
        self._finish_cycle()
        with anyio.move_on_after(seconds):
            await self._changed.wait()

    async def _recover(self, lanes: list[Lane]) -> bool:
        """Take over a page of each lane where that is to be done. Returns whether there was one."""
        is_early, has_claimed = self._queue.in_flight <= FEW, False
        for lane in lanes:
            if not (lane.is_recovering and lane.lease.is_held()):
                continue
            if not self._queue.has_room(lane, self._lanes.values(), is_taking_over=True):
                continue
            room, is_ahead = self._room(*self._queue.load(self._lanes.values(), self.band))
            if room > 0:
                await self._reclaimer.claim_page(lane, self.reader, room, is_ahead=is_ahead)
                is_early = has_claimed = True
        if is_early:  # otherwise these messages are handled while the next read is on its way
            await self._runner.wake()
        return has_claimed

    def _aim(self, room: int) -> int:
        """How many messages to read: half the room at most, so that one half is handled while the other is fetched."""
        most = min(room, max(1, self._window // 2))
        return self._client.page_limit.of(most)

    def _in_turn(self, lanes: list[Lane], aim: int) -> list[Lane]:
        """All of them. While some are full: in turn these, so many that their portions fill a read, and the others."""
        full, most = [lane for lane in lanes if lane.partition in self._full], max(1, aim // PORTION)
        self._full = {lane.partition for lane in full}
        if not full or len(lanes) <= most:
            return self._few(lanes, aim)
        turns = [full[at : at + most] for at in range(0, len(full), most)]
        if len(full) < len(lanes):
            turns.append([lane for lane in lanes if lane.partition not in self._full])
        self._turn += 1
        return self._few(turns[self._turn % len(turns)], aim)

    def _few(self, lanes: list[Lane], aim: int) -> list[Lane]:
        """All of them, or in turn as many as a page may have entries, where large pages break."""
        if len(lanes) <= aim or self._client.page_limit.part == 1:
            return lanes
        last = self._last_of_few
        few = sorted(lanes, key=lambda lane: (lane.partition <= last, lane.partition))[:aim]
        self._last_of_few = few[-1].partition
        return few

    async def _read(self, lanes: list[Lane], aim: int, *, is_ahead: bool = False) -> None:
        lanes = self._in_turn(lanes, aim)
        share = max(1, aim // (len(lanes) * self._reader_count))
        batches = self._settler.take(self._own_lanes() if self._client.is_cluster or self._has_bands else None)
        commands = [self._settler.packed(batch) for batch in batches]
        commands += (self._read_command(lanes, share), self._reclaimer.cancellations.question(lanes))
        # noted before it is sent: if its reply is lost, the server may have given these lanes messages
        self._read_by = self._connection.name
        self._read_of = lanes
        self._blocked = True
        began = monotonic()
        try:
            with self._client.page_limit.asking():
                await self._connection.send(commands)
                await self._runner.wake()  # handle the batch in flight while the server prepares the next
                await self._confirm(batches)
                patience = self._block.total_seconds() + MARGIN
                reply, marks = await self._connection.receive(2, patience)
            self._read_of = []
        except BaseException:
            self._settler.put_back(batches)
            raise
        finally:
            self._blocked = False
        for each in (reply, marks):  # without the marks it is as if the reply were lost
            if isinstance(each, Exception):
                raise each
        if reply and monotonic() - began > self._latest:
            raise BrokerUnavailable("an answer came so late that others may have its messages")
        self._full.difference_update([lane.partition for lane in lanes])
        if marks:
            reply = await self._reclaimer.cancellations.without_cancelled(reply or [], lanes)
        if reply:
            await self._offer(reply, lanes, share, is_ahead=is_ahead)
        self._finish_cycle()

    async def _confirm(self, batches: list[AckBatch]) -> None:
        """Before the read, which may block: a handover waits until what is done in its lane is confirmed."""
        for reply in await self._connection.receive(len(batches)) if batches else ():
            await self._settler.confirm(batches[0], reply)
            del batches[0]  # what is still in the list when the connection breaks is put back

    def _read_command(self, lanes: list[Lane], share: int) -> bytes:
        # something is ready: read without waiting, so that the next read settles what is handled meanwhile
        is_ready = self._full or self._is_recovering() or self._changed.is_set()
        is_part = self._client.page_limit.part < 1 and len(lanes) < len(self._own_lanes())
        block = 0 if is_ready else to_ms(SHORT_READ if is_part else self._block)
        wait = ("BLOCK", block) if block else ()
        streams = [lane.stream for lane in lanes]
        return pack(
            ("XREADGROUP", "GROUP", self._group, self._member, "COUNT", share, *wait, "STREAMS", *streams)
            + (">",) * len(lanes)
        )

    async def _offer(self, reply: list[Any], lanes: list[Lane], share: int, *, is_ahead: bool = False) -> None:
        """Queue what was read for `lanes`, except for a lane that is gone.

        A new lane of the same partition does not get it either: its owner takes over what is pending first, and these
        would overtake that.
        """
        by_stream = {lane.stream.encode(): lane for lane in lanes if self._lanes.get(lane.partition) is lane}
        unreadable: list[tuple[Lane, bytes, Malformed]] = []
        group = self._group.encode()
        for stream, entries in reply:
            lane = by_stream.get(stream)
            if lane is None:
                continue  # lost while the read was on its way: the new owner takes these over
            if len(entries) >= share:
                self._full.add(lane.partition)
            if not lane.receive([entry_id for entry_id, _ in entries]):
                log.warning("messages of %s came that were read before: its group was reset", lane.stream)
                continue
            if self._queue.takes_raw and not lane.flows.waiting and self._offer_raw(lane, entries):
                continue
            messages, size = [], 0
            for entry_id, fields in entries:
                try:
                    message = Message(lane, entry_id, fields)
                    size += len(message.data)
                    if message.addressee is not None and message.addressee != group:
                        self._settler.add_done(lane, [entry_id])
                        continue
                    if size > LARGEST_PAYLOAD:  # only then can it be too large
                        refuse_oversized(message)
                    messages.append(message)
                except Malformed as error:
                    unreadable.append((lane, entry_id, error))
            self._note_size(size, len(entries))
            self._queue.offer(lane, messages, is_ahead=is_ahead)
        self._queue.fit(self._window)  # by the sizes of this read: what it has brought is in memory already
        self._stats["reads"] += 1
        for lane, entry_id, reason in unreadable:
            at = (lane.partition, entry_id.decode(), lane.topic)
            log.warning("entry %d/%s of topic %s moved to dead letters: %s", *at, reason)
            await self._settler.bury_unreadable(lane, entry_id, 1, reason)

    def _offer_raw(self, lane: Lane, entries: list[RawEntry]) -> bool:
        size, others = plain_size(entries)
        if size > LARGEST_PAYLOAD and max([len(part) for _, each in entries for part in each]) > LARGEST_PAYLOAD:
            return False  # one of them is too large to be handled
        made = make_messages(lane, entries, others)
        if made is None or not self._queue.offer_raw(lane, entries, made):
            return False
        self._note_size(size + sum([len(each.data) for each in made.values()]), len(entries))
        return True

    def _note_size(self, size: int, count: int) -> None:
        self._mean_size += 0.2 * (size / max(1, count) + 64 - self._mean_size)

    def share(self, reader_count: int) -> None:
        """So many fetchers share the prefetch bound."""
        self._reader_count = reader_count

    def pause(self, is_paused: bool) -> None:
        """Read nothing new, or read again, from the next cycle on."""
        self.is_paused = is_paused

    # -- for roles that change the lanes --------------------------------------------------------------------------

    def _finish_cycle(self) -> None:
        done, self._cycle_done = self._cycle_done, asyncio.Event()
        done.set()

    async def interrupt(self) -> None:
        """The lanes have changed: end a blocking read now. The server answers it as if its time were over."""
        self._changed.set()
        self._runner.space.set()
        cycle = self._cycle_done
        while self._blocked and cycle is self._cycle_done and self._connection.is_open:
            if await self._connection.node.execute_command("CLIENT", "UNBLOCK", self._connection.client_id):
                return
            await asyncio.sleep(0.01)  # the read was written but had not arrived

    async def exclude(self) -> None:
        """Wait until no read that was written before this call can be answered. Quiet lanes are not read after that.

        While it connects, this waits only if messages are in flight: the server may have lost that it delivered them.
        A read whose connection was lost may still arrive at the server: `late_reader` names that connection.
        """
        done = self._cycle_done
        await self.interrupt()
        if self._is_cycling or any(lane.in_flight or lane.flows.far for lane in self._own_lanes()):
            await done.wait()

    def __repr__(self) -> str:
        numbers = sorted(lane.partition for lane in self._own_lanes())
        return f"<Fetcher {self._group} lanes={numbers} {'blocked' if self._blocked else 'free'}>"


def last_delivered(lane: Lane, groups: list[Any]) -> tuple[int, int] | None:
    """The last id that a lane's group was given, by the reply to XINFO GROUPS. None: there is no such group."""
    rows = {row["name"]: row for row in map(as_dict, groups)}
    row = rows.get(lane.group.encode())
    return None if row is None else parse_stream_id(row["last-delivered-id"])
