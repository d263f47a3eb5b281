"""Reading ahead: what waits behind its key is put aside, only its id is kept, and it is read again when its turn comes.

Pending is pending: such a message has no place of its own on the server, so retention, cancellation, reset and
take-over know it as they know every other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Any, Final

import anyio

from rsmq.consumer.reading.fetchers import Fetchers
from rsmq.consumer.running.runner import Runner
from rsmq.consumer.settling.settler import Settler
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.flows import FEWEST, PAGE, IdPage
from rsmq.consumer.waiting.lane import Lane
from rsmq.errors import BrokerError, GroupMissing
from rsmq.handler.retry import is_suspect
from rsmq.model.message import Message
from rsmq.model.reason import lost_body
from rsmq.redis.scripts import OK, PUT_ASIDE, READ_AGAIN, STALE_EPOCH

log = logging.getLogger("rsmq.fetch")

PAUSE: Final = 0.1
"""Seconds before the next attempt while the server is away, or while a lane may not be read."""


class ReadAhead:
    """Tells the server what has not started, and reads bodies again, for the flows of all lanes.

    The calls of a lane are made one after the other, and numbered: one that comes late does nothing. A message whose
    body is asked for has been put aside before.
    """

    def __init__(self, context: ConsumerContext, runner: Runner, settler: Settler, fetchers: Fetchers) -> None:
        self._client = context.client
        self._settings = context.settings
        self._page_limit = context.client.page_limit
        self._member = context.member
        self._stats = context.stats
        self._context = context
        self._policy = context.handler.retry
        self._lanes = context.lanes
        self._runner = runner
        self._queue = runner.queue
        self._settler = settler
        self._fetchers = fetchers
        self.wanted = asyncio.Event()
        """There is something to put aside, or to read again."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.wanted.wait()
            self.wanted.clear()
            lanes = [lane for lane in self._lanes.values() if lane.flows.is_wanting and lane.lease.is_held()]
            results = await asyncio.gather(*map(self._serve, lanes), return_exceptions=True)
            self._runner.wake_soon()
            for error in results:
                if isinstance(error, BaseException) and not isinstance(error, BrokerError):
                    raise error
            if any(lane.flows.is_wanting for lane in lanes):
                with anyio.move_on_after(PAUSE):
                    await self.wanted.wait()
                self.wanted.set()

    async def _serve(self, lane: Lane) -> None:
        flows = lane.flows
        try:
            while lane.lease.is_held() and not lane.is_quiet:
                while ids := self._queue.due(lane, FEWEST):
                    await self._read_bodies(lane, ids)
                if flows.aside:
                    await self._put_aside(lane)
                may_read = lane.lease.is_held() and not self._fetchers.is_paused and lane.outgoing.has_room
                if may_read and not lane.is_quiet and await self._read_more(lane):
                    self._runner.wake_soon()
                elif not flows.aside:
                    return
        except GroupMissing:  # it is made again from the start: all of it comes again, in order
            lane.lease.lose()
            raise
        except BrokerError as error:
            log.debug("what waits in %s waits for the server: %s", lane.stream, error)
            raise

    async def _read_more(self, lane: Lane) -> bool:
        """Read the next page of what waits as ids. False: there is none now."""
        page = self._queue.page(lane)
        if page is not None:
            await self._read_again(lane, page)
        return page is not None

    async def _read_bodies(self, lane: Lane, ids: Sequence[bytes]) -> None:
        """Of parked messages that are due. They are still pending; `start_message` decides whether they start."""
        filling = lane.flows.filling
        with self._page_limit.asking():
            replies = await self._client.pipelined([("XRANGE", lane.stream, each, each) for each in ids])
        for entry_id, reply in zip(ids, replies, strict=True):
            if isinstance(reply, Exception):
                raise reply
            if filling == lane.flows.filling:  # otherwise all was forgotten meanwhile
                self._queue.fill_body(lane, entry_id, reply[0][1] if reply else None)
        self._runner.wake_soon()

    async def _put_aside(self, lane: Lane) -> None:
        ids = list(islice(lane.flows.aside, PAGE))
        keys = (lane.stream, lane.lease_key, lane.dlq_key)
        about = (self._trims, self._settings.dlq_length, *lost_body(lane.group, self._member))
        filling, number = lane.flows.filling, lane.flows.number()
        reply = await self._settler.ask(PUT_ASIDE, keys, (self._member, lane.epoch, lane.group, number, *about, *ids))
        lane.flows.note_answer(number)
        if reply[0] == STALE_EPOCH:
            lane.lease.lose()
            return
        if reply[0] != OK:  # late: it is told again
            return
        lost, trimmed = reply[1:]
        if filling == lane.flows.filling:  # otherwise all was forgotten meanwhile
            lane.flows.is_aside(ids)
            lane.flows.lose([*lost, *trimmed])
        self._settler.report_lost(lane, lost)
        self._settler.report_trimmed(lane, trimmed)

    async def _read_again(self, lane: Lane, page: IdPage) -> None:
        flows = lane.flows
        asked = [each for ids in page.by_key.values() for each in ids if each not in page.lost]
        pairs = [(each, int(flows.is_first(each))) for each in asked]
        keys = (lane.stream, lane.lease_key, lane.retry_key, lane.dlq_key, lane.cancels_key, lane.cancelled_key)
        budget = self._page_limit.of(int(self._settings.prefetch_bytes) // 4)
        number = flows.number()
        args = (self._member, lane.epoch, lane.group, number, budget)
        about = (self._trims, self._settings.dlq_length, *lost_body(lane.group, self._member))
        with lane.recovery.claiming():
            with self._page_limit.asking():
                reply = await self._settler.ask(
                    READ_AGAIN, keys, (*args, *about, *[part for pair in pairs for part in pair])
                )
            flows.note_answer(number)
            if reply[0] != OK:
                if reply[0] == STALE_EPOCH:
                    lane.lease.lose()
                return
            flows.answered(page)
            await self._fill(lane, page, dict(pairs), {row[0]: row[1:] for row in reply[1:]})

    async def _fill(self, lane: Lane, page: IdPage, firsts: dict[bytes, int], rows: dict[bytes, list[Any]]) -> None:
        if any(row[0] == b"UNDELIVERED" for row in rows.values()):
            log.warning("the server has lost writes: what waits in %s is read again from what it has kept", lane.stream)
            lane.lease.lose()
            return
        late = list[Message]()
        for key, ids in page.by_key.items():
            found = list(takewhile(lambda each: each in rows or each in page.lost, ids))  # up to the budget
            messages = [
                self._message(lane, entry_id, *rows[entry_id], is_first=bool(firsts[entry_id]))
                for entry_id in found if len(rows.get(entry_id, ())) == 2
            ]  # fmt: skip
            if not self._queue.fill(lane, page, key, found, messages):
                late += messages
        self._note(lane, rows)
        if late and lane.lease.is_held():  # the lane was made quiet meanwhile
            await self._settler.hand_back(lane, late)

    def _message(self, lane: Lane, entry_id: bytes, attempts: int, fields: list[bytes], *, is_first: bool) -> Message:
        message = Message(lane, entry_id, fields, 1 if is_first else attempts + 1)
        message.is_redelivered = not is_first
        message.is_suspect = not is_first and is_suspect(attempts, self._policy)
        return message

    def _note(self, lane: Lane, rows: dict[bytes, list[Any]]) -> None:
        words = [(entry_id, row[0]) for entry_id, row in rows.items() if len(row) == 1]
        self._settler.report_lost(lane, [entry_id for entry_id, word in words if word == b"LOST"])
        self._settler.report_trimmed(lane, [entry_id for entry_id, word in words if word == b"TRIMMED"])
        cancelled = [entry_id for entry_id, word in words if word == b"CANCELLED"]
        for entry_id in cancelled:
            self._settler.left_batch(lane, entry_id)
        self._stats["cancelled"] += len(cancelled)

    @property
    def _trims(self) -> int:
        """Whether the topic itself removes entries when it is full."""
        return int(self._context.topic.trims)

    def __repr__(self) -> str:
        return f"<ReadAhead {self._queue!r}>"
