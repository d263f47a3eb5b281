"""Taking over what others (or our own lost replies) left unsettled, oldest first, before anything new is read."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from rsmq.clock import monotonic, now_ms, to_ms
from rsmq.connect import Client
from rsmq.consumer.lane import START, Lane
from rsmq.consumer.queue import Queue
from rsmq.consumer.runner import Runner
from rsmq.consumer.settler import Settler
from rsmq.errors import BrokerError, Malformed, Oversized
from rsmq.message import Message
from rsmq.retry import Bury, Reason, RetryPolicy, decide_redelivery, is_suspect
from rsmq.script import CLAIM_PENDING, STALE_EPOCH, UNPARK_MESSAGES
from rsmq.settings import Settings

log = logging.getLogger("rsmq.reclaim")

Row = tuple[bytes, int, int, list[bytes], int]
"""Id, attempts charged, wait_ms before its retry, fields, and whether the server had it down as ours."""


class Reclaimer:
    """Claims pending pages of a lane, keeps the cursor, and tells apart what each message needs.

    A claim charges nothing: an attempt is charged when the handler starts. What is already held is skipped. What a lost
    reply had delivered to us has not started here, so it is a first delivery still.
    """

    def __init__(
        self,
        client: Client,
        settings: Settings,
        member: str,
        queue: Queue,
        runner: Runner,
        settler: Settler,
        stats: Counter[str],
    ) -> None:
        self._client, self._settings, self._member = client, settings, member
        self._queue, self._runner, self._settler, self._stats = queue, runner, settler, stats
        self._policy: RetryPolicy = runner.handler.retry

    async def step(self, lane: Lane, reader: str, room: int) -> None:
        """Take over one page: of everything pending in a leased lane, of our own under shared distribution.

        `lane.cursor` is None when all was seen.
        """
        assert lane.cursor is not None
        source = "" if lane.epoch else self._member
        begun = lane.begun
        cursor = await self._claim(lane, lane.cursor, room, idle_ms=0, source=source, reader=reader)
        if lane.begun == begun:
            lane.cursor = cursor
        if lane.cursor is None and lane.newest is None:
            lane.newest = START

    async def adopt(self, lane: Lane, room: int, *, source: str = "") -> bool:
        """Shared distribution: take a page of what nobody has touched for a lease, or of what a dead member left.

        True when it was the last page.
        """
        start = START if source else lane.idle_cursor
        idle_ms = to_ms(self._settings.lease_ttl)
        try:
            cursor = await self._claim(lane, start, room, idle_ms=idle_ms, source=source, reader="")
        except BrokerError:
            lane.begin_anew()  # ours now, perhaps, though others have started it
            raise
        if not source:
            lane.idle_cursor = cursor or START
        return cursor is None

    async def _claim(
        self, lane: Lane, cursor: bytes, room: int, *, idle_ms: int, source: str, reader: str
    ) -> bytes | None:
        """One page; returns the next cursor, None after the last page."""
        count = min(self._settings.recovery_batch, room)
        budget = int(self._settings.prefetch_bytes) // 4
        in_hand = frozenset(lane.held)  # now: what is settled before the reply is here must not start again
        reply = await CLAIM_PENDING(
            self._client,
            (lane.stream, lane.lease_key, lane.retry_key),
            (self._member, lane.epoch, lane.group, cursor, count, idle_ms, source, budget, reader),
        )
        if reply[0] == STALE_EPOCH:
            lane.lease.lose()
            return cursor
        await self._bury_lost(lane, reply[2])
        await self._take(lane, [row for row in reply[3:] if row[0] not in in_hand])
        return None if reply[1] == START else bytes(reply[1])

    async def unpark(self, lane: Lane, room: int) -> None:
        """Without key order: deliver parked messages that are due, and note when the next one is."""
        limit = min(self._settings.recovery_batch, room)
        keys = (lane.stream, lane.lease_key, lane.retry_key)
        lane.retry_at = float("inf")  # whoever parks while we ask may say an earlier time
        try:
            reply = await UNPARK_MESSAGES(self._client, keys, (self._member, lane.epoch, lane.group, limit))
        except BrokerError:
            lane.retry_at = 0.0
            lane.begin_anew()  # delivered to us, perhaps, in a reply that was lost: out of order, and after an attempt
            raise
        if reply[0] == STALE_EPOCH:
            lane.lease.lose()
            return
        if reply[1] >= 0:
            lane.retry_at = min(lane.retry_at, monotonic() + reply[1] / 1000)
        while lane.lease.is_held() and any(entry_id in lane.parking for entry_id, *_ in reply[2:]):
            await asyncio.sleep(0.002)  # it came back before the reply to its parking
        await self._bury_lost(lane, [id_ for id_, _, fields, _ in reply[2:] if not fields and id_ not in lane.held])
        rows = [(entry_id, attempts, 0, fields, is_ours) for entry_id, attempts, fields, is_ours in reply[2:] if fields]
        await self._take(lane, rows, retried=True)

    async def _take(self, lane: Lane, rows: list[Row], *, retried: bool = False) -> None:
        """Hand claimed rows to the queue, in order."""
        for entry_id, attempts, wait_ms, fields, is_ours in rows:
            if entry_id in lane.held or (retried and is_ours and self._has_timer(lane, entry_id, fields)):
                continue
            lane.held.add(entry_id)
            is_first = not retried and attempts == 1 and bool(is_ours) and lane.is_unseen(entry_id)
            if is_first:
                lane.newest, attempts = entry_id, 0
            message = await self._read(lane, entry_id, attempts, fields, retried=retried)
            if message is None:
                continue
            message.is_redelivered = not is_first
            self._stats["redelivered"] += 1
            if wait_ms > 0 and self._queue.is_ordered:
                if self._queue.wait_for_retry(message, lane):
                    message.attempt -= 1  # `resume_later` counts it when it is due
                    self._runner.resume_later(message, lane, wait_ms / 1000)
            else:
                self._queue.offer(lane, (message,))

    def _has_timer(self, lane: Lane, entry_id: bytes, fields: list[bytes]) -> bool:
        """Whether what was pending while it waited for its retry does so in its place. If not, the audit has made it
        pending: the two have crossed, and nobody else brings it."""
        try:
            return self._queue.has_place(Message(lane, entry_id, fields))
        except Malformed:
            return False

    async def _read(
        self, lane: Lane, entry_id: bytes, attempts: int, fields: list[bytes], *, retried: bool
    ) -> Message | None:
        """The message, unless it is condemned, malformed, or meant for another group."""
        try:
            message = Message(lane, entry_id, fields, attempts + 1)
            message.check_size()
        except Malformed as error:
            decision = Bury(Reason.MALFORMED, str(error), is_copied=not isinstance(error, Oversized))
            await self._settler.bury(lane, entry_id, attempts, decision)
            self._stats["buried"] += 1
            return None
        if message.addressee is not None and message.addressee != lane.group.encode():
            if not lane.done:
                self._settler.note(lane)
            lane.done.append(entry_id)
            return None
        condemned = None if retried else decide_redelivery(attempts, self._policy)
        if condemned is not None:
            log.warning("%s is a dead letter (%s): %s", message, condemned.reason, condemned.error)
            await self._settler.bury(lane, entry_id, attempts, condemned)
            self._stats["buried"] += 1
            return None
        message.is_suspect = not retried and is_suspect(attempts, self._policy)
        return message

    async def _bury_lost(self, lane: Lane, ids: list[bytes]) -> None:
        """Entries that somebody deleted while they were pending: there is nothing to handle, but it is not silent."""
        for entry_id in ids:
            self._stats["lost_body"] += 1
            log.error(
                "entry %s of %s was deleted by somebody before %s had settled it", entry_id, lane.stream, lane.group
            )
            await self._client.execute_command(
                "XADD", lane.dlq_key, "MAXLEN", "~", self._settings.dlq_length, "*",
                "dlq.reason", Reason.LOST_BODY, "dlq.error", "the entry was deleted before it was settled",
                "dlq.attempts", 0, "dlq.group", lane.group, "dlq.origin", entry_id, "dlq.at_ms", now_ms(),
                "dlq.member", self._member,
            )  # fmt: skip
