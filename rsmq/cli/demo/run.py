"""The course of the demo: start workers, publish, kill a worker, wait until everything is handled, judge."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from rsmq.broker import Broker
from rsmq.cli.demo.flight import Departure
from rsmq.cli.demo.result import AUDITOR, LEDGER_VARIABLE, NOTIFIER, TOPIC, DemoResult, Handled, result_of
from rsmq.cli.demo.screen import DemoScreen
from rsmq.errors import BrokerUnavailable
from rsmq.inspector.inspector import Inspector
from rsmq.inspector.state import GroupState
from rsmq.model.clock import monotonic
from rsmq.model.words import count
from rsmq.testing.ledger import Ledger
from rsmq.testing.verdict import StoredEntry

GROUPS = (AUDITOR, NOTIFIER)
POISON = 5
CHUNK = 500
POLL_SECONDS = 0.2
START_SECONDS, STALL_SECONDS, STOP_SECONDS = 60, 60, 40


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The plan of a run: what the demo publishes, for how many seconds, and whether it kills a worker."""

    departures: list[Departure]
    seconds: float
    is_deadly: bool


@contextmanager
def workers(count: int, directory: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """`rsmq worker --processes count`, stopped gracefully at the end. Its log is `directory/workers.log`."""
    command = [sys.executable, "-m", "rsmq", "worker", "rsmq.cli.demo.service:broker", "--processes", str(count)]
    with (directory / "workers.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, **environment, LEDGER_VARIABLE: str(directory / "ledger")},
        )  # fmt: skip
        try:
            yield
        finally:
            finish(process)


def finish(process: subprocess.Popen[bytes]) -> None:
    """End a process, gracefully if it can."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class DemoRun:
    """Runs one demo. `redraw` is called after each poll of the server and the ledger."""

    def __init__(self, broker: Broker, plan: DemoPlan, directory: Path, redraw: Callable[[DemoScreen], None]) -> None:
        self._broker = broker
        self._plan = plan
        self._redraw = redraw
        self._inspector = Inspector(broker.client, broker.keys, broker.settings)
        self._ledger = Ledger(directory / "ledger", Handled)
        self._stored: list[StoredEntry] = []
        self._malformed: list[str] = []
        self._rejected: list[str] = []
        self._victim = ""
        self._killed_at = 0.0
        self._recovery: float | None = None
        self._is_published = False
        self.screen = DemoScreen(total=len(plan.departures))

    async def run(self) -> DemoResult:
        """Run the demo from start to end."""
        await self._wait_for_workers()
        self.screen.started = monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._publish)
            await self._watch()
        return await self._judge()

    async def _wait_for_workers(self) -> None:
        with anyio.move_on_after(START_SECONDS):
            while not await self._all_owned():
                await anyio.sleep(POLL_SECONDS)
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
            ids = await self._broker.publish_many(TOPIC, chunk, key=lambda departure: departure.aircraft)
            self._stored += [StoredEntry(TOPIC, 0, one.aircraft, ident) for one, ident in zip(chunk, ids, strict=True)]
            if number in poisoned:
                await self._plant(chunk[0])
            self.screen.published += len(chunk)
            await anyio.sleep(max(0.0, started + pause * (number + 1) - monotonic()))
        self._is_published = True

    async def _plant(self, near: Departure) -> None:
        """Publish one message that is not a departure, and one that the notifier rejects."""
        self._malformed.append(await self._publish_one(b'{"number": ', near.aircraft))
        number = -1 - len(self._rejected)
        ghost = {"number": number, "aircraft": f"ghost {-number}", "is_planted": True}
        planted = near.model_copy(update=ghost)
        self._rejected.append(await self._publish_one(planted, planted.aircraft))

    async def _publish_one(self, payload: object, key: str) -> str:
        message_id = await self._broker.publish(TOPIC, payload, key=key)
        self._stored.append(StoredEntry(TOPIC, 0, key, message_id))
        return message_id

    # -- watching -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Wait until everything is handled, or nothing has happened for a minute: then messages are lost."""
        changed_at, before = monotonic(), -1
        while not await self._poll():
            handled = sum(self.screen.handled.values())
            if handled != before:
                changed_at, before = monotonic(), handled
            elif self._is_published and monotonic() - changed_at > STALL_SECONDS:
                self.screen.event("nothing was handled for a minute: giving up")
                return
            await anyio.sleep(POLL_SECONDS / 4 if self._is_recovering else POLL_SECONDS)

    @property
    def _is_recovering(self) -> bool:
        return bool(self._victim) and self._recovery is None

    async def _poll(self) -> bool:
        """Read the server's state and the ledger. True when everything is published, handled and settled."""
        groups = sorted(await self._inspector.groups(TOPIC), key=lambda group: group.name)
        for event in self._ledger.read():
            self.screen.handled[event.group] = self.screen.handled.get(event.group, 0) + 1
            self.screen.channels[event.channel] = self.screen.channels.get(event.channel, 0) + 1
        self.screen.groups = groups
        self._follow_the_kill(groups)
        self._redraw(self.screen)
        is_idle = all(
            not share.unread and not share.pending and not share.waiting_for_retry for g in groups for share in g.shares
        )
        return self._is_published and is_idle and not self._is_recovering

    def _follow_the_kill(self, groups: list[GroupState]) -> None:
        owners = [share.owner for group in groups for share in group.shares]
        if self._plan.is_deadly and not self._victim and self.screen.published > 0.4 * self.screen.total:
            self._victim, _ = Counter(owner for owner in owners if owner).most_common(1)[0]
            had = owners.count(self._victim)
            os.kill(int(self._victim.rsplit("-", 2)[1]), signal.SIGKILL)  # a member id contains its process id
            self._killed_at = monotonic()
            self.screen.event(f"SIGKILL to {self.screen.name(self._victim)}, which owned {count(had, 'partition')}")
        elif self._is_recovering and self._victim not in owners and all(owners):
            self._recovery = monotonic() - self._killed_at
            self.screen.event(f"all its partitions have new owners, {self._recovery:.2f} s after the kill")

    # -- judging --------------------------------------------------------------------------------------------------

    async def _judge(self) -> DemoResult:
        poison = {NOTIFIER: self._malformed + self._rejected, AUDITOR: self._malformed}
        topic = await self._broker.topics.ensure(TOPIC)
        groups = []
        for group in GROUPS:
            dead = [letter.message_id async for letter in self._broker.dead_letters.iterate(topic, group)]
            groups.append(result_of(group, self._stored, self._ledger.events(), poison[group], dead))
        return DemoResult(tuple(groups), bool(self._victim), self._recovery, self.screen.channels)
