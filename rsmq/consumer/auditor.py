"""The audit: whether the server still knows what we have in hand, and whether others remove what is not theirs.

Redis tells nobody when a client deletes a consumer with its pending list, or trims entries that no group has seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio
import anyio.abc

from rsmq.clock import monotonic
from rsmq.connect import Client
from rsmq.consumer.consumer import Consumer
from rsmq.consumer.lane import Lane
from rsmq.entry import place
from rsmq.errors import BrokerError
from rsmq.keys import Keys
from rsmq.script import COUNT_REMOVED, OK, RESTORE_PENDING, Value
from rsmq.topic import Topics

log = logging.getLogger("rsmq.audit")

EVERY: Final = 5.0
"""Seconds between two looks at what is in hand."""
SELDOM: Final = 30.0
"""Seconds between two counts of a partition's entries; the first is made when it is taken."""
SOON: Final = 0.5
"""Seconds after which one is made early, when a settlement has found something that was not pending."""
PAGE: Final = 500
"""Ids a call."""


@dataclass(slots=True)
class Findings:
    """Of one lane. `suspects` were not pending when last asked; `restored` have been made so and are still in hand.

    `due` (monotonic): when to count its entries again; `delivered`: how far the group was when that was done.
    """

    suspects: set[bytes] = field(default_factory=set)
    restored: set[bytes] = field(default_factory=set)
    delivered: bytes | None = None
    due: float = 0.0


class Auditor:
    """Looks after the partitions that this process owns (shared distribution has no owner who could know).

    What is in hand and not pending is made pending again, so that it outlives us; entries that others have removed are
    counted, and said aloud; what others have read is taken over (the lease was deleted: nobody knew whom to cut off).
    A message counts as not pending when two looks say so: one may meet a settlement on its
    way. Costs a call for 500 messages in hand every 5 s, and one for each partition every 30 s.
    """

    def __init__(self, client: Client, keys: Keys, topics: Topics, consumers: Callable[[], Sequence[Consumer]]) -> None:
        self._client, self._keys, self._topics, self._consumers = client, keys, topics, consumers
        self._findings: dict[Lane, Findings] = {}
        self._surprises = 0

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. An outage is left to others: this is the boundary where errors end."""
        task_status.started()
        due = 0.0
        while True:
            is_surprised = self._is_surprised()
            try:
                if is_surprised or monotonic() >= due:
                    due = monotonic() + (SOON if is_surprised else EVERY)  # a suspicion needs a second look
                    await self.restore()
                await self.count(monotonic())
            except BrokerError as error:
                log.debug("the audit waits: %s", error)
            await anyio.sleep(SOON)

    def _is_surprised(self) -> bool:
        """Whether something that was settled since the last call had not been pending."""
        before, self._surprises = self._surprises, sum(each.stats["not_pending"] for each in self._consumers())
        return self._surprises > before

    def _owned(self) -> list[tuple[Consumer, Lane, Findings]]:
        """Every lane that has an owner: us."""
        owned = [(each, lane) for each in self._consumers() for lane in each.lanes.values() if lane.epoch]
        self._findings = {lane: self._findings.get(lane) or Findings() for _, lane in owned}
        return [(each, lane, self._findings[lane]) for each, lane in owned if lane.lease.is_held()]

    async def restore(self) -> None:
        """Make pending again what is in hand and, for the second time, is found not to be."""
        for consumer, lane, findings in self._owned():
            await self._restore(consumer, lane, findings)

    async def count(self, now: float = float("inf")) -> None:
        """Count what others have removed, where it is due; without a time everywhere."""
        for consumer, lane, findings in self._owned():
            if findings.due <= now:
                findings.due = monotonic() + SELDOM
                await self._count(consumer, lane, findings)

    async def _restore(self, consumer: Consumer, lane: Lane, findings: Findings) -> None:
        self._settle_crossed(consumer, lane, findings)
        restored = await self._ask(lane, findings.suspects & in_hand(lane), restore=True)
        findings.restored |= restored
        findings.suspects = await self._ask(lane, in_hand(lane) - restored, restore=False) & in_hand(lane)
        if restored:
            consumer.stats["restored"] += len(restored)
            log.error(
                "%d messages in hand of %s were not pending any more: somebody has deleted consumer %s of group %s, or "
                "acknowledged them. They are pending again", len(restored), lane.stream, consumer.member, lane.group,
            )  # fmt: skip

    def _settle_crossed(self, consumer: Consumer, lane: Lane, findings: Findings) -> None:
        """What has left our hands since it was restored is settled; the two may have crossed on their way.

        Unless the lane is being given away, or has been and is taken over again: then it may have been handed back.
        """
        if not lane.is_quiet and lane.cursor is None:
            consumer.warden.settle_again(lane, findings.restored - lane.held)
            findings.restored &= lane.held

    async def _ask(self, lane: Lane, ids: Iterable[bytes], *, restore: bool) -> set[bytes]:
        """Those of some ids that the server does not have as pending (any more)."""
        charged = {message.entry_id: message.attempt for message in lane.parked.values()}
        pairs: list[tuple[Value, Value]] = [(each, charged.get(each, 1)) for each in ids]
        found = set[bytes]()
        for at in range(0, len(pairs), PAGE):
            args = [value for pair in pairs[at : at + PAGE] for value in pair]
            member, keys = lane.lease.owner, (lane.stream, lane.lease_key)
            args = [member, lane.epoch, lane.group, int(restore), *args]
            word, *missing = await RESTORE_PENDING(self._client, keys, args)
            if word != OK:
                break  # the lease is not ours: whoever renews it finds out
            found.update(missing)
        return found

    async def _count(self, consumer: Consumer, lane: Lane, findings: Findings) -> None:
        keys = (lane.stream, self._keys.removed(lane.topic, lane.partition))
        is_settled = lane.cursor is None
        args = (lane.group, lane.lease.owner)
        removed, delivered, first, deleted, astray = await COUNT_REMOVED(self._client, keys, args)
        if astray and is_settled and lane.cursor is None and not lane.is_quiet:
            log.warning("%d messages of %s were read by others than its owner: taking them over", astray, lane.stream)
            lane.begin_anew()
        before, findings.delivered = findings.delivered, delivered
        if removed and not await self._is_policy(lane.topic):
            consumer.stats["deleted"] += removed
            is_harmless = before is not None and place(first) <= place(before) and place(deleted) <= place(before)
            (log.warning if is_harmless else log.critical)(
                "%d entries of %s were deleted by somebody else (XTRIM, MAXLEN or XDEL): group %s %s",
                removed, lane.stream, lane.group,
                "had been given all of them" if is_harmless else "will never see what it had not been given of them",
            )  # fmt: skip

    async def _is_policy(self, topic: str) -> bool:
        """Whether the topic itself removes its oldest entries when it is full."""
        found = await self._topics.find(topic)
        return found is None or (found.max_length > 0 and found.on_full == "trim")

    def __repr__(self) -> str:
        return f"<Auditor every {EVERY:g} s>"


def in_hand(lane: Lane) -> set[bytes]:
    """What must be pending: fetched, and not yet on its way to be settled."""
    return lane.held.difference(lane.done)
