"""Cancelled messages, as their owner meets them: in what it has read, and among what it has in its hands.

`control/cancel.py` sets the marks, one hash for each partition and group. Each read is followed by one EXISTS for the
marks of its lanes, in the same write. The server executes it after the delivery, so the reader of a message sees a mark
that was set before. Only if there are marks, the ids that were read are compared with them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from rsmq.consumer.reading.moves import Moves
from rsmq.consumer.running.runner import Runner
from rsmq.consumer.settling.settler import Settler
from rsmq.consumer.waiting.context import ConsumerContext
from rsmq.consumer.waiting.lane import Lane
from rsmq.errors import BrokerError, Malformed
from rsmq.model.batch_member import FIELD, BatchMember, batch_mark
from rsmq.model.clock import monotonic
from rsmq.model.message import Message, RawEntry
from rsmq.redis.client.raw_connection import pack
from rsmq.redis.scripts import ANSWER_CANCEL

log = logging.getLogger("rsmq.cancel")

REST: Final = 0.5
"""Seconds between two looks at what is in flight, while marks of messages that are not delivered yet are there."""


NO_MEMBERS: Final[Mapping[bytes, BatchMember]] = {}


class Cancellations:
    """Settles cancelled messages, and answers for those that run."""

    def __init__(self, context: ConsumerContext, runner: Runner, settler: Settler) -> None:
        self._context = context
        self._client = context.client
        self._member = context.member
        self._runner = runner
        self._settler = settler
        self._moves = Moves(context, runner, settler)
        self._next_look = 0.0
        self.wanted = asyncio.Event()
        """A look at what is in flight is due."""

    # -- behind a read --------------------------------------------------------------------------------------------

    def question(self, lanes: Sequence[Lane]) -> bytes:
        """The packed command that follows a read of these lanes."""
        return pack(("EXISTS", *[lane.cancels_key for lane in lanes]))

    async def without_cancelled(self, reply: list[Any], lanes: Sequence[Lane]) -> list[Any]:
        """What was read, without the messages that are cancelled: these are settled. There are marks."""
        if monotonic() >= self._next_look:
            self.wanted.set()
        by_stream = {lane.stream.encode(): lane for lane in lanes if self._context.lanes.get(lane.partition) is lane}
        kept, found = [], list[tuple[Lane, set[bytes]]]()
        for stream, entries in reply:
            lane = by_stream.get(stream)
            ids = [entry_id for entry_id, _ in entries]
            marked = set() if lane is None else await self.marked(lane, ids, members_in(entries))
            if lane is not None and marked:
                found.append((lane, marked))
            kept.append([stream, [entry for entry in entries if entry[0] not in marked]])
        for lane, marked in found:
            lane.in_flight.update(marked)
            await self.settle(lane, marked)
        return [each for each in kept if each[1]]

    async def marked(
        self, lane: Lane, ids: Sequence[bytes], members: Mapping[bytes, BatchMember] = NO_MEMBERS
    ) -> set[bytes]:
        """Those that are to be cancelled. `members`: which of them belong to which batches."""
        return set(await self._marks(lane, ids, members)) if ids else set()

    async def _marks(
        self, lane: Lane, ids: Sequence[bytes], members: Mapping[bytes, BatchMember]
    ) -> dict[bytes, bytes]:
        """The marks of messages, also those of their batches."""
        homes = sorted({member.home for member in members.values() if member.of_group(lane.group)})
        names = (*ids, *(batch_mark(home) for home in homes))
        values = await self._client.execute_command("HMGET", lane.cancels_key, *names)
        found = {entry_id: value for entry_id, value in zip(ids, values, strict=False) if value is not None}
        cancelled = {home for home, value in zip(homes, values[len(ids) :], strict=True) if value is not None}
        for entry_id, member in members.items() if cancelled else ():
            if member.home in cancelled:
                found.setdefault(entry_id, b"asked")
        return found

    async def settle(self, lane: Lane, ids: Collection[bytes]) -> None:
        """Settle messages that have not started and will not."""
        await asyncio.gather(*[self._settler.settle_cancelled(lane, entry_id) for entry_id in ids])
        log.info("%d messages of %s cancelled", len(ids), lane.stream)

    # -- in flight ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look when it is wanted, until cancelled. A failure is repeated with the next look."""
        while True:
            await self.wanted.wait()
            self.wanted.clear()
            try:
                await self.look()
            except BrokerError as error:
                log.debug("cancelled messages wait for the server: %s", error)
                await asyncio.sleep(0.1)
                self.wanted.set()
            await asyncio.sleep(0)

    async def look(self) -> None:
        """Cancel what is in flight and has not started, and answer for what runs."""
        self._next_look = monotonic() + REST
        lanes = [
            lane for lane in self._context.lanes.values()
            if (lane.in_flight or lane.recovery.untimed) and lane.lease.is_held()
        ]  # fmt: skip
        replies = await self._client.pipelined([("EXISTS", lane.cancels_key) for lane in lanes])
        for lane, reply in zip(lanes, replies, strict=True):
            if isinstance(reply, Exception):
                raise reply
            lane.note_cancels(())
            if reply or lane.flows.untimed:
                await self._look_at(lane)
                await self._moves.look_at(lane)

    async def _look_at(self, lane: Lane) -> None:
        ids, known = list(lane.in_flight), lane.outgoing.members
        members = {each: known[each] for each in ids if each in known} if known else NO_MEMBERS
        marks = await self._marks(lane, ids, members) if ids else {}
        if not marks or not lane.lease.is_held():
            return
        gone = self._runner.queue.cancel(lane, marks.keys() & lane.undecided())
        running = (marks.keys() & lane.undecided()) - gone
        lane.note_cancels(running)
        interrupted = {entry_id for entry_id in running if marks[entry_id] == b"interrupt"}
        if interrupted:
            self._runner.cancel_lane(lane, "cancelled", interrupted)
        asked = [entry_id for entry_id in running if marks[entry_id] == b"asked"]
        if asked:
            keys = (lane.lease_key, lane.cancels_key)
            await ANSWER_CANCEL(self._client, keys, [self._member, lane.epoch, *asked])
        self._runner.wake_soon()
        if gone:
            await self.settle(lane, await self._not_concluded(lane, gone))
            self._runner.space.set()

    async def _not_concluded(self, lane: Lane, ids: Collection[bytes]) -> set[bytes]:
        """Without those whose effects an earlier attempt has committed: these are settled as handled."""
        left = set(ids)
        for entry_id in ids if self._runner.commit_check.is_needed else ():
            for _, fields in await self._client.execute_command("XRANGE", lane.stream, entry_id, entry_id):
                with suppress(Malformed):  # no handler has seen it
                    if await self._runner.is_concluded(Message(lane, entry_id, fields), lane):
                        left.discard(entry_id)
        return left

    def __repr__(self) -> str:
        return f"<Cancellations {self._context.name}>"


def members_in(entries: Iterable[RawEntry]) -> Mapping[bytes, BatchMember]:
    """Which of these entries are members of which batches."""
    found = dict[bytes, BatchMember]()
    for entry_id, fields in entries:
        if len(fields) >= 6 and FIELD in fields[::2]:
            member = BatchMember.read(fields[2 * fields[::2].index(FIELD) + 1])
            if member is not None:
                found[entry_id] = member
    return found
