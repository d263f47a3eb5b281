"""A run of a scenario: worker processes on a server, a stream of numbered messages, and at the end the verdict."""

from __future__ import annotations

import json
import os
import random
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import anyio

from rsmq import Broker, BrokerError, PublishUnknown
from rsmq.dlq import DeadLetters
from rsmq.dlq.dead_letter import DeadLetter
from rsmq.inspector.retention_holds import group_needs
from rsmq.redis.topics import Topic, Topics
from tests.chaos.bank import audit
from tests.chaos.checker import History, Name, Unsound, Verdict, check
from tests.chaos.leak import leaks
from tests.chaos.ledger import EventLedger
from tests.chaos.processes import ChaosProcess, Processes
from tests.chaos.worker import GROUP, TOPIC, Job

IS_LONG = os.environ.get("CHAOS") == "long"
LOAD = 3 if IS_LONG else 1
BANK_LOAD, BANK_PATIENCE = 0.25, 3
"""With the bank each message is a transaction: fewer messages a second, and more time to drain them."""
FAILING = 0.03
"""The part of all messages whose first attempt fails."""
PATIENCE = 60.0
"""Seconds that a run may take to settle everything after the last fault: far more than any run needs."""


def name_of(letter: DeadLetter) -> Name:
    """The name of the message of a dead letter; an unreadable one is named by its partition and stream id."""
    try:
        data = json.loads(letter.data or b"")
        return str(data["key"]), int(data["n"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return f"entry {letter.partition}/{letter.origin}", 0


class ScenarioRun:
    """One run. Everything random comes from the seed; `broker` only publishes and inspects.

    `has_till`: whether its workers can book in a bank. `lost` and `note` are shown in the table of results: how many
    messages the fault has cost, and what else was so.
    """

    has_till: ClassVar[bool] = True

    def __init__(
        self, path: Path, server_url: str, seed: int, *, seconds: float = 0, publish_url: str = "", **job: Any
    ) -> None:
        self.seed, self.seconds = seed, seconds
        self.random = random.Random(seed)
        self.ledger = EventLedger(path / f"ledger-{uuid.uuid4().hex[:6]}")
        job.setdefault("url", server_url)
        self.job = Job(prefix=f"c{uuid.uuid4().hex[:12]}", ledger=str(self.ledger.path), **job)
        self.processes = Processes(self.job, self.ledger)
        self.history = History(is_ordered=self.job.distribution == "hash")
        self.broker = Broker(replace(self.job, url=publish_url or server_url).settings())
        self.recovered = 0.0
        self.lost = 0
        self.note = ""
        self.booked, self.wrong_bookings = 0, list[str]()
        self._forgiven: list[tuple[float, float]] = []
        self.is_watched = True
        self._next: dict[str, int] = {}
        self._bands: Sequence[str] = ()
        self._stack = AsyncExitStack()
        self._topic: Topic | None = None

    def use_bands(self, bands: Sequence[str]) -> None:
        """The topic has these bands now: publish to all of them."""
        self._bands = bands
        self._topic = None

    async def resize(self, factor: int) -> None:
        """Let the topic grow to so many times its partitions, and wait until it has them; the server may be away."""
        wanted = factor * (await self._found_topic()).partitions
        while True:
            with suppress(BrokerError):
                if (await self.broker.topics.resize(TOPIC, wanted)).partitions == wanted:
                    break
            await anyio.sleep(0.02)
        self._topic = None

    # -- publishing -----------------------------------------------------------------------------------------------

    async def publish(self, key: str, **order: Any) -> Name:
        """Publish the next message of a key and record the outcome."""
        band = None
        if self._bands:  # a key has one band, and another name than those that were published before
            band = self._bands[sum(key.encode()) % len(self._bands)]
            key = f"{key}-{band}"
        n = self._next.get(key, 0)
        self._next[key] = n + 1
        try:
            await self.broker.publish(TOPIC, {"key": key, "n": n, **order}, key=key, band=band)
            self.history.stored.add((key, n))
        except PublishUnknown:
            self.history.unknown.add((key, n))
        except BrokerError:
            pass  # refused: it is not stored and must never be handled
        return key, n

    async def publish_poison(self, key: str, **order: Any) -> Name:
        """Publish a message that must become a dead letter."""
        name = await self.publish(key, **order)
        self.history.poison.add(name)
        return name

    @asynccontextmanager
    async def load(
        self, *, keys: int = 40, burst: int = 20, seconds: float = 0.001, failing: float = FAILING
    ) -> AsyncIterator[None]:
        """Publish during the block: about 500 messages a second over `keys` keys."""
        async with anyio.create_task_group() as tasks:
            share = BANK_LOAD if self.job.bank else 1
            tasks.start_soon(self._keep_publishing, keys, max(1, int(burst * LOAD * share)), seconds, failing)
            yield
            tasks.cancel_scope.cancel()

    async def _keep_publishing(self, keys: int, burst: int, seconds: float, failing: float) -> None:
        while True:
            with anyio.CancelScope(shield=True):  # an interrupted publish would have no known outcome
                await self.burst(burst, keys=keys, seconds=seconds, failing=failing)
            await anyio.sleep(0.04)

    async def burst(self, count: int, *, keys: int = 40, seconds: float = 0.001, failing: float = FAILING) -> None:
        """Publish so many messages at once, in order per key."""
        async with anyio.create_task_group() as together:
            for _ in range(count):
                key = f"k{self.random.randrange(keys)}"
                order: dict[str, object] = {"seconds": self.random.random() * 2 * seconds}
                if self.random.random() < failing:
                    order["do"] = "fail once"
                together.start_soon(lambda key=key, order=order: self.publish(key, **order))

    async def backlog(self, count: int, *, seconds: float) -> None:
        """A burst of which much still waits when the fault comes. A third of it in the short form, whose phases have
        no least duration."""
        await self.burst(count if self.seconds else count // 3, seconds=seconds)

    # -- waiting --------------------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
        """Wait for a state; fail with `what` after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"after {seconds:g} s still not: {what}\n{self.processes.log()}"
            await anyio.sleep(0.01)

    async def handles(self, count: int) -> None:
        """A phase without faults: wait for so many more handled messages, and at least the run's `seconds`."""
        aim, end = len(self.ledger.commits()) + count, time.monotonic() + self.seconds
        await self.until(lambda: len(self.ledger.commits()) >= aim, f"{count} more messages are handled")
        while time.monotonic() < end:
            await anyio.sleep(0.05)

    async def recovers(self, seconds: float = PATIENCE) -> None:
        """After a fault, wait until a message is handled, and record how long that took."""
        since, done = time.monotonic(), len(self.ledger.commits())
        await self.until(lambda: len(self.ledger.commits()) > done, "work goes on", seconds)
        self.recovered = max(self.recovered, time.monotonic() - since)

    async def begins(self, name: Name) -> int:
        """Wait until a message was started; returns the process id."""
        await self.until(
            lambda: any(e.what == "start" and (e.key, e.n) == name for e in self.ledger.events()), f"{name} is started"
        )
        return next(e.pid for e in self.ledger.events() if e.what == "start" and (e.key, e.n) == name)

    def worker_of(self, pid: int) -> ChaosProcess:
        """The worker with that process id."""
        return next(worker for worker in self.processes.workers if worker.pid == pid)

    def busiest(self) -> ChaosProcess:
        """The worker that has the most messages in flight: the worst one to lose."""
        counts = {worker.pid: 0 for worker in self.processes.living}
        for pid in self.ledger.open_starts().values():
            if pid in counts:
                counts[pid] += 1
        return self.worker_of(max(counts, key=lambda pid: (counts[pid], self.random.random())))

    def starts_of(self, worker: ChaosProcess) -> int:
        """How many handlers a worker has started so far."""
        return sum(1 for event in self.ledger.events() if event.pid == worker.pid and event.what == "start")

    def excuse(self, why: str, *workers: ChaosProcess) -> None:
        """Record a fault of some workers, or of all if none is given: they may cause duplicates."""
        for worker in workers or self.processes.workers:
            self.history.excused[worker.pid] = why

    @staticmethod
    def now() -> float:
        """The ledger's clock."""
        return time.monotonic()

    def forgive(self, since: float, until: float) -> None:
        """Messages that publisher processes got confirmed between these times may be lost."""
        self._forgiven.append((since, until))

    def recovery(self, victim: int, since: float) -> float:
        """Seconds until other workers had started a message of every key that the lost worker was using."""
        events = self.ledger.events()
        owner = {event.key: event.pid for event in events if event.what == "start" and event.at <= since}
        lost = {key for key, pid in owner.items() if pid == victim}
        first: dict[str, float] = {}
        for event in events:
            if event.what == "start" and event.at > since and event.pid != victim and event.key in lost:
                first.setdefault(event.key, event.at - since)
        self.recovered = max(self.recovered, max(first.values(), default=0.0))
        return self.recovered

    # -- the end --------------------------------------------------------------------------------------------------

    async def until_settled(self, seconds: float = PATIENCE) -> None:
        """Wait until the server holds nothing for the group any more, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.history.holds = await self._holds()
                if not self.history.holds:
                    return
            except BrokerError as error:  # the server has just come back and the pool still had an old connection
                self.history.holds = [f"the server does not answer: {error}"]
            if time.monotonic() > deadline:
                return
            await anyio.sleep(0.05)

    async def verdict(self, seconds: float = PATIENCE) -> Verdict:
        """Wait until everything is settled or `seconds` are over, stop all processes, and judge the run."""
        for publisher in self.processes.publishers:
            if publisher.exit_code is None:
                publisher.terminate()
                await publisher.ended()
        await self.until_settled(seconds * (BANK_PATIENCE if self.job.bank else 1))
        self.history.dead = await self.dead()
        if self.is_watched:
            self.history.leaks = await self._leaks()
        self.history.events = list(self.ledger.events())
        self._add_published()
        verdict = check(self.history)
        if self.job.bank:
            await self.processes.stop_all()
            self.booked, self.wrong_bookings = await audit(self.broker, self.job.bank, self.history)
            if not self.job.is_plain:
                verdict.findings += [Unsound(each) for each in self.wrong_bookings]
        if verdict.faults:
            print(self.processes.log(20_000))
        return verdict

    def _add_published(self) -> None:
        """Add what publisher processes have recorded. A call that was started and not confirmed may be stored or not.

        A call that was confirmed in a time that `forgive` covers may be lost; `lost` counts the missing messages.
        """
        history, names = self.history, defaultdict[str, set[Name]](set)
        for event in history.events:
            if event.what in ("try", "ok", "refused"):
                is_forgiven = event.what == "ok" and any(a <= event.at <= b for a, b in self._forgiven)
                names["forgiven" if is_forgiven else event.what].add((event.key, event.n))
        history.given_up |= dict.fromkeys(names["forgiven"], "the server has forgotten it")
        history.stored |= names["ok"]
        history.unknown |= names["try"] - names["ok"] - names["refused"]
        self.lost = len(names["forgiven"] - self.ledger.commits())

    async def _leaks(self) -> list[str]:
        """Stop all processes and return what they leave. The server is only checked if no worker was killed."""
        living = [worker for worker in self.processes.living if worker.pid in self.ledger.pids("ready")]
        found = [f"worker {worker.pid} does not stop" for worker in await self.processes.stop_all()]
        found += [f"worker {worker.pid} ended with {worker.exit_code}" for worker in living if worker.exit_code]
        found += [
            f"worker {event.pid} left {event.n} descriptors open"
            for event in self.ledger.events()
            if event.what == "bye" and event.n > 0
        ]
        if len(living) == len(self.processes.workers):  # a killed worker leaves its heartbeat until its TTL
            found += await leaks(self.broker, TOPIC, GROUP)
        return found

    async def _holds(self) -> list[str]:
        """What the server still holds for the group."""
        topic = await self._found_topic()
        holds = []
        for partition in topic.numbers:
            for needs in await group_needs(self.broker.client, self.broker.keys, TOPIC, partition):
                holds += [f"partition {partition}: {needs}"] if needs.is_holding else []
            delayed = await self.broker.client.execute_command("ZCARD", self.broker.keys.delayed(TOPIC, partition))
            holds += [f"partition {partition}: {delayed} delayed"] if delayed else []
        return holds

    async def dead(self) -> list[tuple[Name, str]]:
        letters = DeadLetters(self.broker.client, self.broker.keys)
        topic, dead = await self._found_topic(), []
        async for letter in letters.iterate(topic, GROUP):
            dead.append((name_of(letter), letter.reason))
        return dead

    async def _found_topic(self) -> Topic:
        if self._topic is None:
            self._topic = await Topics(self.broker.client, self.broker.keys, self.broker.settings).ensure(TOPIC)
        return self._topic

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self.processes)
        await self._stack.enter_async_context(self.broker)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)
