"""The audit: checks that messages in flight are still pending, and that other clients do not delete entries.

Redis sends no notice when a client deletes a consumer with its pending list, or trims entries that no group has seen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio
import anyio.abc

from rsmq.consumer.consumer import Consumer
from rsmq.consumer.waiting.lane import Lane
from rsmq.errors import BrokerError
from rsmq.model.clock import monotonic
from rsmq.model.keys import Keys
from rsmq.model.stream_id import parse_stream_id
from rsmq.model.words import count
from rsmq.redis.client.connector import Client
from rsmq.redis.scripts import COUNT_REMOVED, OK, RESTORE_PENDING, Value
from rsmq.redis.topics import Topics

log = logging.getLogger("rsmq.audit")

CHECK_INTERVAL: Final = 5.0
"""Seconds between two checks of the messages in flight."""
COUNT_INTERVAL: Final = 30.0
"""Seconds between two counts of a partition's entries; the first comes when the partition is taken."""
POLL_INTERVAL: Final = 0.5
"""Seconds before an early check, after a settled message was found not to be pending."""
PAGE: Final = 500
"""Ids in one call."""


@dataclass(slots=True)
class LaneAudit:
    """Findings about one lane. `suspects` were not pending at the last check; `restored` are pending again and still in
    flight.

    `has_too_few`: fewer messages were pending at the last check than wait as ids and are in flight.
    `due` (monotonic): when to count the entries again; `delivered`: the group's last delivered id at the last count.
    """

    suspects: set[bytes] = field(default_factory=set)
    restored: set[bytes] = field(default_factory=set)
    has_too_few: bool = False
    delivered: bytes | None = None
    due: float = 0.0


class Auditor:
    """Audits the partitions that this process owns. Under shared distribution no process knows what is in flight.

    - Messages in flight that are not pending are made pending again, so that they survive this process.
    - Entries that other clients removed are counted and logged.
    - Messages that another consumer has read are taken over. That happens when the lease was deleted: the new owner
      could not cut off the previous reader.

    A message counts as not pending after two checks, because one check may cross a settlement. The cost is one call for
    500 messages in flight every 5 s, and one call for each partition every 30 s.
    """

    def __init__(self, client: Client, keys: Keys, topics: Topics, consumers: Sequence[Consumer]) -> None:
        self._client = client
        self._keys = keys
        self._topics = topics
        self._consumers = consumers
        self._audits: dict[Lane, LaneAudit] = {}
        self._not_pending_count = 0

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Errors end here: other roles report an outage."""
        task_status.started()
        due = 0.0
        while True:
            is_suspicious = self._has_new_not_pending()
            try:
                if is_suspicious or monotonic() >= due:
                    due = monotonic() + (POLL_INTERVAL if is_suspicious else CHECK_INTERVAL)  # needs a second check
                    await self.restore()
                await self.count(monotonic())
            except BrokerError as error:
                log.debug("the audit waits: %s", error)
            await anyio.sleep(POLL_INTERVAL)

    def _has_new_not_pending(self) -> bool:
        """Whether a message settled since the last call had not been pending."""
        before = self._not_pending_count
        self._not_pending_count = sum(each.stats["not_pending"] for each in self._consumers)
        return self._not_pending_count > before

    def _owned(self) -> list[tuple[Consumer, Lane, LaneAudit]]:
        """Every lane that this process owns."""
        owned = [(each, lane) for each in self._consumers for lane in each.lanes.values() if lane.epoch]
        self._audits = {lane: self._audits.get(lane) or LaneAudit() for _, lane in owned}
        return [(each, lane, self._audits[lane]) for each, lane in owned if lane.lease.is_held()]

    async def count(self, now: float = float("inf")) -> None:
        """Count the entries that other clients removed, in the partitions where that is due at `now`."""
        for consumer, lane, audit in self._owned():
            if audit.due <= now:
                audit.due = monotonic() + COUNT_INTERVAL
                await self._count(consumer, lane, audit)

    async def restore(self) -> None:
        """Make messages in flight pending again that two checks in a row found not to be."""
        for consumer, lane, audit in self._owned():
            self._settle_crossed(consumer, lane, audit)
            wanted = audit.suspects & lane.undecided()
            audit.restored |= wanted  # also if the reply gets lost
            restored = await self._not_pending_of(lane, wanted, restore=True)
            audit.restored -= wanted - restored
            missing = await self._not_pending_of(lane, lane.undecided() - restored, restore=False)
            audit.suspects = missing & lane.undecided()
            restored |= await self._restore_far(lane, audit)
            if restored:
                consumer.stats.update(restored=len(restored))
                log.error(
                    "%s in flight of %s no longer pending: consumer %s of group %s was deleted, or "
                    "another client acknowledged it. Pending again now",
                    count(len(restored), "message"), lane.stream, consumer.member, lane.group,
                )  # fmt: skip

    async def _restore_far(self, lane: Lane, audit: LaneAudit) -> set[bytes]:
        """The same for what waits as ids: they are counted, and looked at only when two counts in a row are too low."""
        before = lane.flows.far + len(lane.undecided())
        if not lane.flows.far:
            return set()
        pending, *_ = await self._client.execute_command("XPENDING", lane.stream, lane.group)
        was_short, audit.has_too_few = audit.has_too_few, pending < min(before, lane.flows.far + len(lane.undecided()))
        if not (was_short and audit.has_too_few):
            return set()
        ids = list(lane.flows.far_ids())
        audit.restored.update(ids)  # also if a reply gets lost
        restored = await self._not_pending_of(lane, ids, restore=True)
        audit.restored -= set(ids) - restored
        return restored

    def _settle_crossed(self, consumer: Consumer, lane: Lane, audit: LaneAudit) -> None:
        """Settle again what was restored and is no longer in flight: the restoring may have crossed its settlement.

        Not while the lane is being handed over or taken over: then its messages may have been handed back unsettled.
        """
        if not lane.is_quiet and lane.recovery.is_over:
            known = lane.in_flight.union(lane.flows.far_ids()) if audit.restored else lane.in_flight
            consumer.settler.add_done(lane, audit.restored - known)
            audit.restored &= known

    async def _not_pending_of(self, lane: Lane, ids: Iterable[bytes], *, restore: bool) -> set[bytes]:
        """The ids that are not pending in the server; with `restore`, those made pending again."""
        charged = {message.entry_id: message.attempt for message in lane.flows.parked.values()}
        far = frozenset(lane.flows.far_ids()) if lane.flows.far else frozenset[bytes]()
        pairs: list[tuple[Value, Value]] = [
            (each, int(not lane.flows.is_first(each)) if each in far else charged.get(each, 1)) for each in ids
        ]
        found = set[bytes]()
        for at in range(0, len(pairs), PAGE):
            args = [value for pair in pairs[at : at + PAGE] for value in pair]
            member, keys = lane.lease.owner, (lane.stream, lane.lease_key)
            args = [member, lane.epoch, lane.group, int(restore), *args]
            word, *missing = await RESTORE_PENDING(self._client, keys, args)
            if word != OK:
                break  # the lease was lost: the heartbeat finds out
            found.update(missing)
        return found

    async def _count(self, consumer: Consumer, lane: Lane, audit: LaneAudit) -> None:
        keys = (lane.stream, counts := self._keys.removed(lane.topic, lane.partition))
        is_settled = lane.recovery.is_over
        args = (lane.group, lane.lease.owner)
        removed, delivered, first, deleted, foreign, ever = await COUNT_REMOVED(self._client, keys, args)
        if foreign and is_settled and lane.recovery.is_over and not lane.is_quiet:
            log.warning("%s of %s read by another consumer: taken over", count(foreign, "message"), lane.stream)
            lane.recovery.restart()
        before, audit.delivered = audit.delivered, delivered
        topic = await self._topics.find(lane.topic) if removed else None
        if topic is not None and not topic.trims:  # else it trims itself
            consumer.stats.update(deleted=removed)
            is_harmless = (
                before is not None
                and parse_stream_id(first) <= parse_stream_id(before)
                and parse_stream_id(deleted) <= parse_stream_id(before)
            )
            (log.warning if is_harmless else log.critical)(
                "%s of %s deleted by another client (XTRIM, MAXLEN or XDEL): group %s %s",
                count(removed, "entry", "entries"), lane.stream, lane.group,
                "had already received all of them" if is_harmless else "will never see those that it had not received",
            )  # fmt: skip
        if removed:  # a lost reply must not count as reported
            await self._client.execute_command("HSET", counts, f"seen|{lane.group}", ever)

    def __repr__(self) -> str:
        return f"<Auditor every {CHECK_INTERVAL:g} s>"
