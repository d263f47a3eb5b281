"""The demo's course of events: publish, watch, kill, wait until everything is handled, judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio

from rsmq.broker import Broker
from rsmq.clock import monotonic
from rsmq.demo.crew import kill_member
from rsmq.demo.flight import Departure
from rsmq.demo.ledger import Reader
from rsmq.demo.screen import Picture
from rsmq.demo.verdict import Verdict, judge
from rsmq.errors import BrokerUnavailable
from rsmq.inspector import GroupState, Inspector

TOPIC, NOTIFIER, AUDITOR = "departures", "notifier", "auditor"
GROUPS = (AUDITOR, NOTIFIER)
POISON = 5
CHUNK = 500
LOOK = 0.2
START_SECONDS, STALL_SECONDS = 60, 60


@dataclass(frozen=True, slots=True)
class Plan:
    """What the demo will do."""

    departures: list[Departure]
    seconds: float
    is_deadly: bool


class Show:
    """Runs one demo. `on_look` is called after each look at the system, to redraw it."""

    def __init__(self, broker: Broker, plan: Plan, directory: Path, on_look: Callable[[Picture], None]) -> None:
        self._broker, self._plan, self._on_look = broker, plan, on_look
        self._inspector = Inspector(broker.client, broker.keys, broker.settings)
        self._reader = Reader(directory)
        self._malformed: list[str] = []
        self._rejected: list[str] = []
        self._victim = ""
        self._killed_at = 0.0
        self._recovery: float | None = None
        self._is_published = False
        self.picture = Picture(total=len(plan.departures))

    async def run(self) -> Verdict:
        """The whole course."""
        await self._wait_for_workers()
        self.picture.started = monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._publish)
            await self._watch()
        return await self._judge()

    async def _wait_for_workers(self) -> None:
        with anyio.move_on_after(START_SECONDS):
            while not await self._all_owned():
                await anyio.sleep(LOOK)
            return
        raise BrokerUnavailable(f"the workers did not start within {START_SECONDS} s: see their log")

    async def _all_owned(self) -> bool:
        groups = await self._inspector.groups(TOPIC)
        return len(groups) == len(GROUPS) and all(share.owner for group in groups for share in group.shares)

    # -- publishing -----------------------------------------------------------------------------------------------

    async def _publish(self) -> None:
        departures, started = self._plan.departures, monotonic()
        pause = self._plan.seconds * CHUNK / max(1, len(departures))
        poisoned = {len(departures) * (2 * n + 1) // (2 * POISON) // CHUNK for n in range(POISON)}
        for number, at in enumerate(range(0, len(departures), CHUNK)):
            chunk = departures[at : at + CHUNK]
            await self._broker.publish_many(TOPIC, chunk, key=lambda departure: departure.aircraft)
            if number in poisoned:
                await self._plant(chunk[0])
            self.picture.published += len(chunk)
            await anyio.sleep(max(0.0, started + pause * (number + 1) - monotonic()))
        self._is_published = True

    async def _plant(self, near: Departure) -> None:
        """One message that is no departure, and one that the notifier refuses."""
        self._malformed.append(await self._broker.publish(TOPIC, b'{"number": ', key=near.aircraft))
        number = -1 - len(self._rejected)
        ghost = {"number": number, "aircraft": f"ghost {-number}", "turn": 0, "is_planted": True}
        planted = near.model_copy(update=ghost)
        self._rejected.append(await self._broker.publish(TOPIC, planted, key=planted.aircraft))

    # -- watching -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Until everything is handled, or nothing has moved for too long: the verdict then says what is missing."""
        moved_at, before = monotonic(), -1
        while not await self._look():
            handled = sum(self.picture.handled.values())
            if handled != before:
                moved_at, before = monotonic(), handled
            elif self._is_published and monotonic() - moved_at > STALL_SECONDS:
                self.picture.event("nothing has moved for a minute: giving up")
                return
            await anyio.sleep(LOOK / 4 if self._is_recovering else LOOK)

    @property
    def _is_recovering(self) -> bool:
        return bool(self._victim) and self._recovery is None

    async def _look(self) -> bool:
        """One look at server and ledgers. True when everything is published, handled and settled."""
        groups = sorted(await self._inspector.groups(TOPIC), key=lambda group: group.name)
        for entry in self._reader.read():
            self.picture.handled[entry.group] = self.picture.handled.get(entry.group, 0) + 1
            self.picture.channels[entry.channel] = self.picture.channels.get(entry.channel, 0) + 1
        self.picture.groups = groups
        self._follow_the_kill(groups)
        self._on_look(self.picture)
        is_idle = all(not share.lag and not share.pending and not share.parked for g in groups for share in g.shares)
        return self._is_published and is_idle and not self._is_recovering

    def _follow_the_kill(self, groups: list[GroupState]) -> None:
        owners = [share.owner for group in groups for share in group.shares]
        if self._plan.is_deadly and not self._victim and self.picture.published > 0.4 * self.picture.total:
            self._victim, _ = Counter(owner for owner in owners if owner).most_common(1)[0]
            had = owners.count(self._victim)
            kill_member(self._victim)
            self._killed_at = monotonic()
            self.picture.event(f"SIGKILL to {self.picture.name(self._victim)}, which owned {had} partitions")
        elif self._is_recovering and self._victim not in owners and all(owners):
            self._recovery = monotonic() - self._killed_at
            self.picture.event(f"all its partitions have new owners, {self._recovery:.2f} s after the kill")

    # -- judging --------------------------------------------------------------------------------------------------

    async def _judge(self) -> Verdict:
        self._reader.read()
        sent = [departure.number for departure in self._plan.departures]
        planted = [-1 - n for n in range(len(self._rejected))]
        expected = {NOTIFIER: sent, AUDITOR: sent + planted}
        poison = {NOTIFIER: self._malformed + self._rejected, AUDITOR: self._malformed}
        topic = await self._broker.topics.ensure(TOPIC)
        groups = []
        for group in GROUPS:
            dead = [letter.message_id async for letter in self._broker.dead_letters.iterate(topic, group)]
            groups.append(judge(group, expected[group], self._reader.entries, poison[group], dead))
        return Verdict(tuple(groups), bool(self._victim), self._recovery, self.picture.channels)
