"""Taking over what other members, or our own lost replies, left unsettled: oldest first, before new messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import takewhile
from typing import Any, Final

from rsmq.consumer.reading.cancellations import Cancellations
from rsmq.consumer.running.runner import Runner
from rsmq.consumer.settling.settler import Settler
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.lane import Lane
from rsmq.consumer.waiting.recovery import START
from rsmq.errors import BrokerError, BrokerUnavailable, Malformed
from rsmq.handler.retry import Park, decide_redelivery, is_suspect
from rsmq.model.clock import monotonic, to_ms
from rsmq.model.message import LARGEST_PAYLOAD, Message, refuse_oversized
from rsmq.model.packing import by_name
from rsmq.model.reason import lost_body
from rsmq.model.stream_id import following_id
from rsmq.model.words import count
from rsmq.redis.scripts import (
    ADOPT_PENDING,
    CLAIM_IDS,
    CLAIM_PENDING,
    CLOCK,
    OK,
    STALE_EPOCH,
    UNPARK_MESSAGES,
    Script,
    Value,
)
from rsmq.redis.streams import hash_fields

log = logging.getLogger("rsmq.reclaim")

LISTED: Final = 1000
"""Pending ids in one look for those that are not known here."""
PAGE: Final = 200
"""Pending messages that are claimed with one call."""

ClaimedEntry = tuple[bytes, int, int, list[bytes], int]
"""Id, attempts charged, ms until its retry, fields, and whether the server had it as delivered to this member."""


def next_cursor(reply: list[Any]) -> bytes | None:
    """Where the next page begins; None after the last one."""
    return None if reply[1] == START else bytes(reply[1])


class Reclaimer:
    """Claims pages of pending messages, moves the lane's cursor, and decides what each message needs.

    A claim charges nothing: an attempt is charged when the handler starts. Messages that are in flight here are
    skipped. What a lost reply had delivered to this member has not started here, so it is still a first delivery.
    """

    def __init__(self, context: ConsumerContext, runner: Runner, settler: Settler, page: int = PAGE) -> None:
        self._page = page
        self._client = context.client
        self._settings = context.settings
        self._member = context.member
        self._runner = runner
        self._queue = runner.queue
        self._settler = settler
        self._stats = context.stats
        self._lanes = context.lanes
        self._context = context
        self._largest = 0  # bytes of a body so far
        self._is_sparse = False  # what is pending is not in a row
        self._is_by_key = context.handler.by is not None
        self._has_times = context.handler.when is not None or self._is_by_key
        self._policy, self.cancellations = context.handler.retry, Cancellations(context, runner, settler)

    async def claim_page(self, lane: Lane, reader: str, room: int, *, is_ahead: bool = False) -> None:
        """Take over one page: of everything pending in a leased lane, of our own under shared distribution.

        The recovery is over after the last page. `is_ahead`: of what waits behind its key only the id is kept.
        """
        recovery = lane.recovery
        cursor, number = recovery.cursor, recovery.number
        assert cursor is not None
        if self._has_times and not lane.flows.resting.is_loaded(number):
            await self._load_waits(lane, number)
        if self._is_by_key and not lane.flows.calls.is_loaded(number):
            await self._load_calls(lane, number)
        if lane.epoch:
            if known := lane.flows.known(number):
                cursor, room = await self._skip_known(lane, cursor, known, room)
            cursor = await self._claim(lane, cursor, reader, room, is_ahead=is_ahead)
        else:
            cursor = await self._adopt(lane, cursor, room, source=self._member)
        recovery.advance(cursor, number)
        if recovery.is_over:
            lane.flows.recovered()
            self._queue.recovered(lane)

    async def _load_waits(self, lane: Lane, number: int) -> None:
        """Until when messages wait, as the last owner has noted it."""
        dues, at = dict[bytes, float](), 0
        while True:
            last = at + LISTED - 1
            try:
                flat = await self._client.execute_command("ZRANGE", lane.waits_key, at, last, "WITHSCORES")
            except BrokerUnavailable:
                raise
            except BrokerError as error:
                log.error("%s cannot be read, so the rule is asked for each message anew: %s", lane.waits_key, error)
                break
            dues.update({entry_id: float(due) for entry_id, due in zip(flat[::2], flat[1::2], strict=True)})
            if len(flat) < 2 * LISTED:
                break
            at += LISTED
        self._queue.load_times(lane, number, dues)

    async def _load_calls(self, lane: Lane, number: int) -> None:
        """Which messages of a key have started together, as the last owner has noted it."""
        lane.flows.calls.load(number, dict(await hash_fields(self._client, lane.calls_key)))

    def _attempts_of_call(self, lane: Lane, entry_id: bytes, attempts: int, fields: Sequence[bytes]) -> int:
        """How many attempts count of a message of a handler by key. What was read and has not started is put aside."""
        key = by_name(fields).get(b"key")
        if key is None:
            return attempts
        counted = lane.flows.calls.attempts_of(key, entry_id, attempts)
        if counted is None and attempts:
            lane.flows.put_aside(entry_id)
        return counted or 0

    async def _skip_known(self, lane: Lane, cursor: bytes, known: Collection[bytes], room: int) -> tuple[bytes, int]:
        """Where the first message is that is not known here, and how many follow it. If there is none: behind the last
        one. What is known must not be claimed: a claim settles what was deleted, and so does a call for it that is on
        its way."""
        start, most = cursor, min(self._page, room)
        while True:
            rows = await self._client.execute_command("XPENDING", lane.stream, lane.group, start, "+", LISTED)
            ids = [row[0] for row in rows]
            at = next((at for at, each in enumerate(ids) if each not in known and each not in lane.in_flight), None)
            if at is not None:
                run = takewhile(lambda each: each not in known and each not in lane.in_flight, ids[at : at + most])
                return ids[at], sum(1 for _ in run)
            cursor = following_id(ids[-1]) if ids else cursor
            if len(ids) < LISTED:
                return cursor, 1
            start = cursor

    async def adopt(self, lane: Lane, room: int, *, source: str = "", leases: Mapping[str, int]) -> bool:
        """Shared distribution: claim a page of what was not touched for a lease, or of what a dead member left.

        `leases`: the lease in ms of each member whose lease is longer than this one's. True when it was the last page.
        After a step of the server's clock the search waits for a lease, in which live members touch what they have.
        """
        if not source and monotonic() < lane.recovery.search_at:
            return False
        try:
            if source:
                cursor = await self._adopt(lane, START, room, source=source)
            else:
                cursor = await self._search(lane, room, leases)
                lane.recovery.searched(cursor)
        except BrokerError:
            lane.recovery.restart()  # the claim may have succeeded, of messages that others had started
            raise
        return cursor is None

    def give_up(self, lane: Lane, taken: Collection[bytes], lost: Collection[bytes]) -> None:
        """Shared distribution: other members have `taken` over; the entries of `lost` are deleted."""
        self._settler.report_lost(lane, lost)
        # what is being settled may be pending no more because of that, and may even have come back and gone elsewhere
        gone = lane.undecided().intersection(taken)
        if gone:
            log.warning("%s of %s in flight taken over by other members", count(len(gone), "message"), lane.stream)
            self._queue.cancel(lane, gone)
            self._runner.cancel_lane(lane, "lost", gone)
            lane.forget(gone)

    async def _claim(
        self, lane: Lane, cursor: bytes, reader: str, room: int, *, is_ahead: bool = False
    ) -> bytes | None:
        """Of a leased lane: one page of all that is pending. Returns the next cursor, None after the last page."""
        if is_ahead and self._largest and not self._is_sparse:
            return await self._claim_ids(lane, cursor, reader, room)
        bounds = self._bounds(room, most=LISTED if is_ahead else 0)
        args = (
            self._member, lane.epoch, lane.group, cursor, *bounds, reader, *self._lost_body(lane), self._trims
        )  # fmt: skip
        reply = await self._take(lane, CLAIM_PENDING, args, is_ahead=is_ahead)
        if reply[0] == STALE_EPOCH:
            lane.lease.lose()
            return cursor
        return next_cursor(reply)

    async def _claim_ids(self, lane: Lane, cursor: bytes, reader: str, room: int) -> bytes | None:
        """The same for a large backlog, faster: bodies are read by plain commands, and most of them are not kept.

        As many as a budget has room for if all are as large as the largest so far.
        """
        number, budget = self._bounds(room, most=LISTED)
        number = max(1, min(number, budget // self._largest))
        keys = (lane.stream, lane.lease_key, lane.retry_key, lane.dlq_key)
        args = (self._member, lane.epoch, lane.group, cursor, number, self._trims, reader, *self._lost_body(lane))
        known = lane.in_flight | lane.flows.known(lane.recovery.number)  # as of now
        with lane.recovery.claiming():
            reply = await CLAIM_IDS(self._client, keys, args)
            if reply[0] == STALE_EPOCH:
                lane.lease.lose()
                return cursor
            _, following, lost, trimmed, flat = reply
            self._settler.report_lost(lane, lost)
            self._settler.report_trimmed(lane, trimmed)
            parts = iter(flat)
            rows = [row for row in zip(parts, parts, parts, parts, strict=True) if row[0] not in known]
            with self._client.page_limit.asking():
                bodies = await self._bodies(lane, [row[0] for row in rows])
        entries = [(row[0], row[1], row[2], bodies[row[0]], row[3]) for row in rows if row[0] in bodies]
        await self._enqueue(lane, entries, is_ahead=True)
        for entry_id in [row[0] for row in rows if row[0] not in bodies]:  # deleted meanwhile: a dead letter
            again = (self._member, lane.epoch, lane.group, entry_id, 1, 1, reader, *self._lost_body(lane), self._trims)
            await self._take(lane, CLAIM_PENDING, again, is_ahead=True)
        return None if following == START else bytes(following)

    async def _bodies(self, lane: Lane, ids: Sequence[bytes]) -> dict[bytes, list[bytes]]:
        """The fields of entries, in order; those that are deleted are left out. Nearly always they are in a row."""
        if not ids:
            return {}
        found = dict(await self._client.execute_command("XRANGE", lane.stream, ids[0], ids[-1], "COUNT", len(ids)))
        missing = [entry_id for entry_id in ids if entry_id not in found]
        self._is_sparse = 4 * len(missing) > len(ids)
        replies = await self._client.pipelined([("XRANGE", lane.stream, each, each) for each in missing])
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
            found.update(dict(reply))
        self._note_sizes(found.values())
        return found

    def _note_sizes(self, bodies: Iterable[Sequence[bytes]]) -> None:
        self._largest = max([self._largest, *[64 + sum(map(len, fields)) for fields in bodies]])

    @property
    def _trims(self) -> int:
        """Whether the topic itself removes entries when it is full."""
        return int(self._context.topic.trims)

    async def _adopt(self, lane: Lane, cursor: bytes, room: int, *, source: str) -> bytes | None:
        """Shared distribution: one page of what a member has, this one or a dead one."""
        args = (self._member, lane.group, cursor, *self._bounds(room), source, 0, 0, *self._lost_body(lane))
        return next_cursor(await self._take(lane, ADOPT_PENDING, args))

    async def _search(self, lane: Lane, room: int, leases: Mapping[str, int]) -> bytes | None:
        """Shared distribution: one page of what nobody has touched for a lease."""
        cursor, idle_ms = lane.recovery.idle_cursor, to_ms(self._settings.lease_ttl)
        others = [part for pair in leases.items() for part in pair]
        while True:
            asked, offset = monotonic(), lane.recovery.clock_offset
            expected = 0 if offset is None else round(1000 * (asked + offset))  # the server's time
            args = (self._member, lane.group, cursor, *self._bounds(room), "", idle_ms, expected)
            reply = await self._take(lane, ADOPT_PENDING, (*args, *self._lost_body(lane), *others))
            if reply[0] != CLOCK:
                return next_cursor(reply)
            if not lane.recovery.set_clock(reply[1] / 1000 - asked):
                lane.recovery.rest(max((idle_ms, *leases.values())) / 1000)
                log.info("the server's clock was set: %s is searched for abandoned messages after a lease", lane.stream)
                return cursor

    def _bounds(self, room: int, most: int = 0) -> tuple[int, int]:
        """How many messages a page may have, by default `page`, and how many bytes."""
        part = self._client.page_limit.of
        return min(part(most or self._page), room), part(int(self._settings.prefetch_bytes) // 4)

    def _lost_body(self, lane: Lane) -> tuple[str | int, ...]:
        """How many dead letters are kept, and what is in that of a deleted entry."""
        return (self._settings.dlq_length, *lost_body(lane.group, self._member))

    async def _take(self, lane: Lane, script: Script, args: Sequence[Value], *, is_ahead: bool = False) -> list[Any]:
        """The reply of a script that claims a page. What it has claimed is queued."""
        keys = (lane.stream, lane.lease_key, lane.retry_key, lane.dlq_key)
        # as of now: what is settled before the reply must not start again
        in_flight, far = frozenset(lane.in_flight), lane.flows.known(lane.recovery.number)
        with lane.recovery.claiming():
            with self._client.page_limit.asking():
                reply: list[Any] = await script(self._client, keys, args)
            if reply[0] == OK:
                self._settler.report_lost(lane, reply[2])
        if reply[0] == OK:
            self._settler.report_trimmed(lane, [row[0] for row in reply[3:] if len(row) == 2])
            entries = [row for row in reply[3:] if len(row) > 2 and row[0] not in in_flight and row[0] not in far]
            self._note_sizes(row[3] for row in entries)
            await self._enqueue(lane, entries, is_ahead=is_ahead)
        return reply

    async def unpark(self, lane: Lane, room: int) -> None:
        """Without key order: deliver parked messages that are due, and note when the next one is."""
        limit = min(self._client.page_limit.of(self._page), room)
        keys = (lane.stream, lane.lease_key, lane.retry_key, lane.dlq_key)
        args = (self._member, lane.epoch, lane.group, limit, *self._lost_body(lane))
        lane.recovery.ask_for_retries()
        with lane.recovery.claiming():
            try:
                with self._client.page_limit.asking():
                    reply = await self._settler.ask(UNPARK_MESSAGES, keys, args)
            except BrokerError:
                lane.recovery.retries_unanswered()
                raise
            foreign, due = [row[0] for row in reply[2:] if row[1] < 0], [row for row in reply[2:] if row[1] >= 0]
            for member in foreign:
                log.warning("%s: removed a retry that names no message: %.100r", lane.retry_key, member)
            self._settler.report_lost(lane, [entry_id for entry_id, _, fields, _ in due if not fields])
        if reply[0] == STALE_EPOCH:
            lane.lease.lose()
            return
        lane.recovery.retries_answered()
        if reply[1] >= 0:
            lane.recovery.look_for_retries(reply[1] / 1000)
        while lane.lease.is_held() and any(entry_id in lane.asking for entry_id, *_ in due):
            await asyncio.sleep(0.002)  # it came back before the reply to its parking
        entries = [(entry_id, attempts, 0, fields, is_ours) for entry_id, attempts, fields, is_ours in due if fields]
        await self._enqueue(lane, entries, is_retry=True)

    def look_for_retries(self) -> None:
        """Parked messages may be due earlier than expected: `broker.reschedule` has woken the group."""
        for lane in self._lanes.values():
            if lane.recovery.retry_at < float("inf"):
                lane.recovery.look_for_retries(0)
        self._runner.retries.set()

    async def _enqueue(
        self, lane: Lane, entries: list[ClaimedEntry], *, is_retry: bool = False, is_ahead: bool = False
    ) -> None:
        """Queue claimed entries, in order. What starts without another call must not be cancelled."""
        if lane.followers and not lane.meets([entry_id for entry_id, *_ in entries]):
            return
        unseen = [] if is_retry else [entry_id for entry_id, *_ in entries if lane.recovery.is_unseen(entry_id)]
        marked = await self.cancellations.marked(lane, unseen)
        batch = list[Message]()
        for entry_id, attempts, wait_ms, fields, is_ours in entries:
            if entry_id in lane.in_flight or (is_retry and is_ours and self._has_timer(lane, entry_id, fields)):
                continue
            lane.in_flight.add(entry_id)
            if entry_id in marked:
                self._queue.offer(lane, batch, is_ahead=is_ahead)
                batch = []
                await self.cancellations.settle(lane, marked & {entry_id})
                continue
            is_first = not is_retry and attempts == 1 and bool(is_ours) and lane.recovery.is_unseen(entry_id)
            if is_first:
                lane.recovery.find_unseen(entry_id)
                attempts = 0
            elif self._is_by_key:
                attempts = self._attempts_of_call(lane, entry_id, attempts, fields)
            message = None if is_retry else self._plain(lane, entry_id, attempts, fields)
            if message is None:
                self._queue.offer(lane, batch, is_ahead=is_ahead)
                batch = []
                message = await self._parse(lane, entry_id, attempts, fields, is_retry=is_retry)
            if message is None:
                continue
            message.is_redelivered = not is_first
            self._stats["redelivered"] += 1
            if wait_ms > 0:
                self._queue.offer(lane, batch, is_ahead=is_ahead)
                batch = []
                await self._wait_for_retry(lane, message, wait_ms, is_ahead=is_ahead)
            else:
                batch.append(message)
        self._queue.offer(lane, batch, is_ahead=is_ahead)

    async def _wait_for_retry(self, lane: Lane, message: Message, wait_ms: int, *, is_ahead: bool) -> None:
        """The retry of a claimed message is not due."""
        wait = timedelta(milliseconds=wait_ms)
        if self._queue.blocks_its_key(message):
            parked = self._queue.wait_for_retry(message, lane, is_ahead=is_ahead)
            if parked is not None:
                parked.attempt -= 1  # `resume_later` counts it when it is due
                self._runner.resume_later(parked, lane, wait.total_seconds())
            return
        message.attempt -= 1  # parked under another ordering, it held its key or partition: now it holds up nothing
        if await self._settler.park(message, lane, Park(wait), "", keep_pending=False):
            lane.recovery.look_for_retries(wait.total_seconds())

    def _plain(self, lane: Lane, entry_id: bytes, attempts: int, fields: list[bytes]) -> Message | None:
        """The message of an entry, if nothing has to be asked about it: nearly always."""
        try:
            message = Message(lane, entry_id, fields, attempts + 1)
        except Malformed:
            return None
        if len(message.data) > LARGEST_PAYLOAD or message.addressee is not None:
            return None
        if decide_redelivery(attempts, self._policy) is not None:
            return None
        message.is_suspect = is_suspect(attempts, self._policy)
        return message

    def _has_timer(self, lane: Lane, entry_id: bytes, fields: list[bytes]) -> bool:
        """Whether a parked message that was pending has a timer here, because it blocks its key.

        If not, the auditor has made it pending while it was being parked, and it must be delivered now.
        """
        try:
            return self._queue.blocks_its_key(Message(lane, entry_id, fields))
        except Malformed:
            return False

    async def _parse(
        self, lane: Lane, entry_id: bytes, attempts: int, fields: list[bytes], *, is_retry: bool
    ) -> Message | None:
        """The message, unless it crashed too many workers, is malformed, or is meant for another group."""
        try:
            message = Message(lane, entry_id, fields, attempts + 1)
            refuse_oversized(message)
        except Malformed as error:
            await self._settler.bury_unreadable(lane, entry_id, attempts, error)
            return None
        if message.addressee is not None and message.addressee != lane.group.encode():
            self._settler.add_done(lane, [entry_id])
            return None
        condemned = None if is_retry else decide_redelivery(attempts, self._policy)
        if condemned is not None:
            if await self._runner.is_concluded(message, lane):
                return None
            dead = await self._runner.hand_on(message, lane, condemned, attempts)
            if dead is None:
                return None
            condemned = dead
            log.warning(
                "%s moved to dead letters after %s (%s): %s",
                message, count(attempts, "attempt"), condemned.reason, condemned.error,
            )  # fmt: skip
            await self._runner.bury(message, lane, condemned, attempts)
            return None
        message.is_suspect = not is_retry and is_suspect(attempts, self._policy)
        return message
