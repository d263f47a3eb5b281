"""Chaos: your own handlers in several worker processes that are killed, paused and cut off, and then the verdict."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import anyio

from rsmq.broker import Broker
from rsmq.consumer.retention import why_not_trimmed
from rsmq.errors import BrokerError, ConfigError, PublishUnknown
from rsmq.handler import Handler
from rsmq.message import Message, Place
from rsmq.settings import Settings
from rsmq.testing.ending import end
from rsmq.testing.hand import Hand, Job
from rsmq.testing.ledger import Ledger
from rsmq.testing.line import Line
from rsmq.testing.server import ThrowawayServer
from rsmq.testing.verdict import Order, Stored, Story, Verdict, Where, judge

LEASE: Final = timedelta(seconds=2)
"""Short, so that a run does not wait six seconds for each fault."""


class Chaos:
    """Runs `workers` processes that serve `target` (`module:broker`), on a server of its own, behind a line of its own.

    A worker that ends is replaced, as an operator's service manager would. `broker` in here publishes and looks; it
    does not go through the line. Faults are noted: they excuse what is handled again, and nothing else.
    """

    def __init__(
        self, target: str, *, workers: int = 2, patience: timedelta = timedelta(seconds=60), **settings: Any
    ) -> None:
        self._target, self._workers, self._patience = target, workers, patience.total_seconds()
        self._settings = {"lease_ttl": LEASE, "preflight": "warn", "prefix": f"c{uuid.uuid4().hex[:12]}", **settings}
        self.server = ThrowawayServer(tcp=True, durable=True)
        self.line = Line(self.server.port)
        self.hands: list[Hand] = []
        self._confirmed: list[tuple[str, str]] = []
        self._excused: dict[int, str] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self._workers < 1:
            raise ConfigError(f"workers={self._workers} is not possible: use 1 or more")
        async with AsyncExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rsmq-chaos-")))
            self.ledger, self._log = Ledger(directory / "ledger"), directory / "log"
            stack.enter_context(self.server)
            await stack.enter_async_context(self.line)
            far = Settings(url=self.line.url, **self._settings).model_dump(mode="json", exclude_unset=True)
            self._job = Job(self._target, str(self.ledger.path), far)
            self._groups = groups_of(self._job.broker())
            self.broker = Broker(Settings(url=self.server.url, **self._settings))
            await stack.enter_async_context(self.broker)
            stack.callback(self._end_hands)
            for _ in range(self._workers):
                self._hire()
            await self._until(lambda: {hand.pid for hand in self.hands} <= self.ledger.pids("ready"), "workers serve")
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(self._replace_dead)
            stack.callback(tasks.cancel_scope.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool | None:
        return await end(self._stack, kind, error, at)

    # -- publishing -----------------------------------------------------------------------------------------------

    async def publish(
        self, topic: str, payload: Any, *, key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> str:
        """Publish one message; from now on it must be handled or be a dead letter, in every group that has a handler.

        An outage of the server is waited out, and a publish without an answer is done again under the same id.
        """
        message_id = str(uuid.uuid4())
        deadline = time.monotonic() + self._patience
        while True:
            try:
                await self.broker.publish(topic, payload, key=key, headers=headers, message_id=message_id)
            except (PublishUnknown, BrokerError):
                if time.monotonic() > deadline:
                    raise
                await anyio.sleep(0.05)
                continue
            self._confirmed.append((topic, message_id))
            return message_id

    async def handled(self, count: int) -> None:
        """Wait until so many messages have been handled since the beginning, counted over all groups."""
        await self._until(lambda: self.ledger.commits() >= count, f"{count} messages are handled")

    # -- faults ---------------------------------------------------------------------------------------------------

    def kill(self, hand: Hand | None = None) -> Hand:
        """SIGKILL a worker, the busiest one if none is given; another one takes its place."""
        return self._hit(hand, "was killed", Hand.kill)

    def pause(self, hand: Hand | None = None) -> Hand:
        """SIGSTOP a worker, the busiest one if none is given, until `resume`: its sockets stay open."""
        return self._hit(hand, "was paused", Hand.pause)

    def resume(self) -> None:
        """Wake all that are paused."""
        for hand in self.hands:
            if hand.is_paused:
                hand.resume()

    def cut(self) -> None:
        """Cut the line of all workers, until `mend`."""
        self._excuse_all("was cut off")
        self.line.cut()

    def mend(self) -> None:
        """Let everything through again."""
        self.line.mend()

    def reset(self) -> None:
        """Break every connection of every worker."""
        self._excuse_all("had its connections broken")
        self.line.reset()

    def restart_server(self) -> None:
        """SIGKILL the server and start it again, with what it had written."""
        self._excuse_all("lost its server")
        self.server.restart()  # blocks for a moment, in this thread: the server ends with the thread that starts it

    def busiest(self) -> Hand:
        """The worker that has the most in its hands now: the worst one to lose."""
        running = {hand.pid: hand for hand in self.hands if hand.is_running and not hand.is_paused}
        if not running:
            raise ConfigError("no worker runs now: wait with `await chaos.handled(1)`, or resume() one")
        busy = dict.fromkeys(running, 0)
        for event in self.ledger.events():
            if event.pid in busy:
                busy[event.pid] += {"start": 1, "commit": -1}.get(event.what, 0)
        return running[max(busy, key=lambda pid: busy[pid])]

    def _hit(self, hand: Hand | None, why: str, act: Callable[[Hand], None]) -> Hand:
        victim = self.busiest() if hand is None else hand
        self._excused[victim.pid] = why
        act(victim)
        return victim

    def _excuse_all(self, why: str) -> None:
        self._excused.update({hand.pid: why for hand in self.hands})

    # -- the end --------------------------------------------------------------------------------------------------

    async def verdict(self) -> Verdict:
        """End all faults, wait until everything is settled, and judge the run."""
        self.resume()
        self.mend()
        holds = await self._settled()
        story = Story(
            self._groups, await self._stored(), list(self._confirmed), await self._dead(), list(self.ledger.events()),
            dict(self._excused), holds,
        )  # fmt: skip
        return judge(story)

    def log(self, size: int = 6000) -> str:
        """The end of what the workers have printed."""
        return self._log.read_text(errors="replace")[-size:] if self._log.exists() else ""

    async def _settled(self) -> list[str]:
        """Wait until the server keeps nothing for any group; returns what it still keeps after the patience."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                holds = await self._holds()
            except BrokerError as error:  # it has just come back: a connection of the pool was still the old one
                holds = [f"nobody knows: {error}"]
            if not holds or time.monotonic() > deadline:
                return holds
            await anyio.sleep(0.05)

    async def _holds(self) -> list[str]:
        found = []
        for topic, partition in await self._places():
            for hold in await why_not_trimmed(self.broker.client, self.broker.keys, topic, partition):
                found += [f"{topic}.{partition}: {hold}"] if hold.is_holding else []
        return found

    async def _places(self) -> list[tuple[str, int]]:
        topics = [await self.broker.topics.find(name) for name in dict.fromkeys(topic for topic, _ in self._groups)]
        return [(topic.name, number) for topic in topics if topic is not None for number in range(topic.partitions)]

    async def _stored(self) -> list[Stored]:
        """All entries of the topics that have handlers, what handlers published included."""
        found = []
        for topic, partition in await self._places():
            stream = self.broker.keys.stream(topic, partition)
            for entry_id, fields in await self.broker.client.execute_command("XRANGE", stream, "-", "+"):
                message = Message(Place(topic, partition, ""), entry_id, fields)
                found.append(Stored(topic, partition, message.key, message.id))
        return found

    async def _dead(self) -> frozenset[Where]:
        dead = set()
        for name, group in self._groups:
            topic = await self.broker.topics.find(name)
            if topic is not None:
                letters = self.broker.dead_letters.iterate(topic, group)
                dead |= {Where(name, group, letter.message_id) async for letter in letters}
        return frozenset(dead)

    # -- the workers ----------------------------------------------------------------------------------------------

    def _hire(self) -> None:
        self.hands.append(Hand(self._job, self._log))

    async def _replace_dead(self) -> None:
        replaced = set[int]()
        while True:
            for hand in list(self.hands):
                if not hand.is_running and hand.pid not in replaced:
                    replaced.add(hand.pid)
                    self._hire()
            await anyio.sleep(0.02)

    def _end_hands(self) -> None:
        for hand in self.hands:
            hand.kill()

    async def _until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + self._patience
        while not condition():
            if time.monotonic() > deadline or not any(hand.is_running for hand in self.hands):
                raise AssertionError(f"still not: {what}. The workers say:\n{self.log()}")
            await anyio.sleep(0.01)

    def __repr__(self) -> str:
        return f"<Chaos {self._target} {self.hands}>"


def groups_of(broker: Broker) -> dict[tuple[str, str], Order]:
    """What order each (topic, group) of a broker keeps."""
    return {(handler.topic, handler.group): order_of(handler) for handler in broker.handlers}


def order_of(handler: Handler) -> Order:
    """The order of one handler."""
    if handler.ordering == "none":
        return "none"
    return "single" if handler.batch is None else "batch"
