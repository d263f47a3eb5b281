"""A scene: a server, a crew, a stream of numbered messages, and at the end the verdict."""

from __future__ import annotations

import json
import os
import random
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import anyio

from rsmq import Broker, BrokerError, PublishUnknown
from rsmq.consumer.retention import why_not_trimmed
from rsmq.dlq import DeadLetters
from rsmq.dlq.letter import DeadLetter
from rsmq.topic import Topic, Topics
from tests.chaos.checker import Name, Story, Verdict, check
from tests.chaos.crew import Crew, Hand
from tests.chaos.leak import leaks
from tests.chaos.ledger import Ledger
from tests.chaos.worker import GROUP, TOPIC, Job

IS_LONG = os.environ.get("CHAOS") == "long"
LOAD = 3 if IS_LONG else 1
FAILING = 0.03
"""The part of all messages whose first attempt fails."""
PATIENCE = 60.0
"""Seconds that a scene may take to settle everything after the last fault: far more than any of them needs."""


def name_of(letter: DeadLetter) -> Name:
    """Which message a dead letter was; what nobody can read is named by its partition and stream id."""
    try:
        data = json.loads(letter.data or b"")
        return str(data["key"]), int(data["n"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return f"entry {letter.partition}/{letter.origin}", 0


class Scene:
    """One run. Everything random comes from the seed; the broker in here only publishes and looks."""

    def __init__(
        self, path: Path, server_url: str, seed: int, *, seconds: float = 0, publish_url: str = "", **job: Any
    ) -> None:
        self.seed, self.seconds = seed, seconds
        self.random = random.Random(seed)
        self.ledger = Ledger(path / f"ledger-{uuid.uuid4().hex[:6]}")
        job.setdefault("url", server_url)
        self.job = Job(prefix=f"c{uuid.uuid4().hex[:12]}", ledger=str(self.ledger.path), **job)
        self.crew = Crew(self.job, self.ledger)
        self.story = Story(is_ordered=self.job.distribution == "hash")
        self.broker = Broker(replace(self.job, url=publish_url or server_url).settings())
        self.recovered = 0.0
        self.lost = 0
        self._forgiven: list[tuple[float, float]] = []
        self.is_watched = True
        self._next: dict[str, int] = {}
        self._stack = AsyncExitStack()
        self._topic: Topic | None = None

    # -- publishing -----------------------------------------------------------------------------------------------

    async def publish(self, key: str, **order: Any) -> Name:
        """One message, the next of its key, and what became of it."""
        n = self._next.get(key, 0)
        self._next[key] = n + 1
        try:
            await self.broker.publish(TOPIC, {"key": key, "n": n, **order}, key=key)
            self.story.stored.add((key, n))
        except PublishUnknown:
            self.story.unknown.add((key, n))
        except BrokerError:
            pass  # refused: it is not stored, and must never be seen
        return key, n

    async def publish_poison(self, key: str, **order: Any) -> Name:
        """A message that must become a dead letter."""
        name = await self.publish(key, **order)
        self.story.poison.add(name)
        return name

    @asynccontextmanager
    async def load(
        self, *, keys: int = 40, burst: int = 20, seconds: float = 0.001, failing: float = FAILING
    ) -> AsyncIterator[None]:
        """Messages without end while the block runs: some 500 a second over `keys` keys."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_publishing, keys, burst * LOAD, seconds, failing)
            yield
            tasks.cancel_scope.cancel()

    async def _keep_publishing(self, keys: int, burst: int, seconds: float, failing: float) -> None:
        while True:
            with anyio.CancelScope(shield=True):  # an interrupted publish would have no outcome
                await self.burst(burst, keys=keys, seconds=seconds, failing=failing)
            await anyio.sleep(0.04)

    async def burst(self, count: int, *, keys: int = 40, seconds: float = 0.001, failing: float = FAILING) -> None:
        """So many messages at once, in order per key."""
        async with anyio.create_task_group() as together:
            for _ in range(count):
                key = f"k{self.random.randrange(keys)}"
                order: dict[str, object] = {"seconds": self.random.random() * 2 * seconds}
                if self.random.random() < failing:
                    order["do"] = "fail once"
                together.start_soon(lambda key=key, order=order: self.publish(key, **order))

    # -- waiting --------------------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
        """Wait for a state; fail with what was waited for."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"after {seconds:g} s still not: {what}\n{self.crew.log()}"
            await anyio.sleep(0.01)

    async def handles(self, count: int) -> None:
        """Wait until so many more messages have been handled, and for the scene's `seconds`: a quiet phase."""
        aim, end = len(self.ledger.commits()) + count, time.monotonic() + self.seconds
        await self.until(lambda: len(self.ledger.commits()) >= aim, f"{count} more messages are handled")
        while time.monotonic() < end:
            await anyio.sleep(0.05)

    async def heals(self, seconds: float = PATIENCE) -> None:
        """The fault is over: wait for the first message that is handled, and note how long it took."""
        since, done = time.monotonic(), len(self.ledger.commits())
        await self.until(lambda: len(self.ledger.commits()) > done, "work goes on", seconds)
        self.recovered = max(self.recovered, time.monotonic() - since)

    async def begins(self, name: Name) -> int:
        """Wait until a message was started; returns by whom."""
        await self.until(
            lambda: any(e.what == "start" and (e.key, e.n) == name for e in self.ledger.events()), f"{name} is started"
        )
        return next(e.pid for e in self.ledger.events() if e.what == "start" and (e.key, e.n) == name)

    def hand_of(self, pid: int) -> Hand:
        """The worker with that process id."""
        return next(hand for hand in self.crew.hands if hand.pid == pid)

    def busiest(self) -> Hand:
        """The worker that has the most in its hands now: the worst one to lose."""
        counts = {hand.pid: 0 for hand in self.crew.living}
        for pid in self.ledger.open_starts().values():
            if pid in counts:
                counts[pid] += 1
        return self.hand_of(max(counts, key=lambda pid: (counts[pid], self.random.random())))

    def starts_of(self, hand: Hand) -> int:
        """How many handlers a worker has started so far."""
        return sum(1 for event in self.ledger.events() if event.pid == hand.pid and event.what == "start")

    def excuse(self, why: str, *hands: Hand) -> None:
        """Note what was done to workers (all of them if none is named): they may cause duplicates."""
        for hand in hands or self.crew.hands:
            self.story.excused[hand.pid] = why

    @staticmethod
    def now() -> float:
        """The ledger's clock."""
        return time.monotonic()

    def forgive(self, since: float, until: float) -> None:
        """Nobody promises anything about what publisher processes were told is stored between these times."""
        self._forgiven.append((since, until))

    def recovery(self, victim: Hand, since: float) -> float:
        """Seconds until another worker had begun with every key that the victim had in use when it was lost."""
        events = self.ledger.events()
        owner = {event.key: event.pid for event in events if event.what == "start" and event.at <= since}
        lost = {key for key, pid in owner.items() if pid == victim.pid}
        first: dict[str, float] = {}
        for event in events:
            if event.what == "start" and event.at > since and event.pid != victim.pid and event.key in lost:
                first.setdefault(event.key, event.at - since)
        self.recovered = max(self.recovered, max(first.values(), default=0.0))
        return self.recovered

    # -- the end --------------------------------------------------------------------------------------------------

    async def until_settled(self, seconds: float = PATIENCE) -> None:
        """Wait until the server keeps nothing for the group any more, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.story.holds = await self._holds()
                if not self.story.holds:
                    return
            except BrokerError as error:  # it has just come back: a connection of the pool was still the old one
                self.story.holds = [f"nobody knows: {error}"]
            if time.monotonic() > deadline:
                return
            await anyio.sleep(0.05)

    async def verdict(self, seconds: float = PATIENCE) -> Verdict:
        """Judge the run, when all of it is settled or `seconds` are over, and everybody has stopped."""
        for publisher in self.crew.publishers:
            if publisher.exit_code is None:
                publisher.terminate()
                await publisher.ended()
        await self.until_settled(seconds)
        self.story.dead = await self._dead()
        if self.is_watched:
            self.story.leaks = await self._leaks()
        self.story.events = list(self.ledger.events())
        self._add_published()
        verdict = check(self.story)
        if verdict.faults:
            print(self.crew.log(20_000))
        return verdict

    def _add_published(self) -> None:
        """What publisher processes have noted: a call that was begun and not confirmed has an unknown outcome.

        So has one that was confirmed while nobody promised anything; those that are gone are counted as `lost`.
        """
        story, names = self.story, defaultdict[str, set[Name]](set)
        for event in story.events:
            if event.what in ("try", "ok", "refused"):
                is_forgiven = event.what == "ok" and any(a <= event.at <= b for a, b in self._forgiven)
                names["forgiven" if is_forgiven else event.what].add((event.key, event.n))
        story.stored |= names["ok"]
        story.unknown |= names["try"] - names["ok"] - names["refused"]
        self.lost = len(names["forgiven"] - self.ledger.commits())

    async def _leaks(self) -> list[str]:
        """Stop everybody and look what they leave. Only who could end in order can be asked to leave nothing."""
        living = [hand for hand in self.crew.living if hand.pid in self.ledger.pids("ready")]
        found = [f"worker {hand.pid} does not stop" for hand in await self.crew.dismiss()]
        found += [f"worker {hand.pid} ended with {hand.exit_code}" for hand in living if hand.exit_code]
        found += [
            f"worker {event.pid} left {event.n} descriptors open"
            for event in self.ledger.events()
            if event.what == "bye" and event.n > 0
        ]
        if len(living) == len(self.crew.hands):  # the killed leave their heartbeat until its TTL
            found += await leaks(self.broker, TOPIC, GROUP)
        return found

    async def _holds(self) -> list[str]:
        """What the server still keeps for the group."""
        topic = await self._found_topic()
        holds = []
        for partition in range(topic.partitions):
            for hold in await why_not_trimmed(self.broker.client, self.broker.keys, TOPIC, partition):
                holds += [f"partition {partition}: {hold}"] if hold.is_holding else []
            delayed = await self.broker.client.execute_command("ZCARD", self.broker.keys.delayed(TOPIC, partition))
            holds += [f"partition {partition}: {delayed} delayed"] if delayed else []
        return holds

    async def _dead(self) -> list[tuple[Name, str]]:
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
        self._stack.enter_context(self.crew)
        await self._stack.enter_async_context(self.broker)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.__aexit__(*error)
