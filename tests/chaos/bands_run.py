"""`python -m tests.chaos.bands_run --messages 1000000`: bands are added while workers run; then each message is judged.

Two worker processes handle what this one publishes: first without bands, then in three. Each key has its messages in
one band, numbered. A worker writes down what it has handled, before it is settled, and the verdict goes over all of it:
none is lost, none is handled twice, and those of a key come in their order. With `--resize` the topic is resized twice,
from 4 to 8 and to 24 partitions, with its bands; with `--resize --plain` it has none. With `--kills` a worker that has
handled messages is killed (SIGKILL) and replaced so many times: what it had may be handled again, and still nothing
overtakes. With `--groups` three groups get all: one is read all the time, one is paused until the first resize has
ended, and one has no member until then. With `--cluster` the server is a cluster, and its slots move meanwhile. With
`--sentinel` its master is killed or paused again and again, half of the times while the topic grows, and another one
takes its place: each message waits for a replica, and what none has confirmed may be lost.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import logging
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import redis
from rich.console import Console
from rich.progress import Progress

from rsmq import Broker, BrokerError, Message, Settings
from rsmq.redis.streams import groups_of
from rsmq.testing.server import ThrowawayServer
from tests.cluster.cluster import Cluster
from tests.sentinel.sentinels import Sentinels, replace_master

T = TypeVar("T")
TOPIC: Final = "work"
GROUP: Final = "workers"
PAUSED: Final = "paused"
"""A group that is paused until the first resize has ended."""
ABSENT: Final = "absent"
"""A group that has no member until the first resize has ended."""
BANDS: Final = ("urgent", "normal", "bulk")
KEYS: Final = 300
"""Of each band."""
CHUNK: Final = 1000
SLOW_CHUNK: Final = 100
"""Published at a time while a resize, or a new band, waits."""
MOST_UNREAD: Final = 20_000
"""The publisher waits when more messages than this are not handled: else all are published before workers read."""
RECORD: Final = struct.Struct("<dHI")
"""When it was handled, its key, and its number among the messages of the key."""
UNKNOWN: Final = 0xFF
IN_DOUBT: Final = 0xFE
"""The worker of what was handled shortly before a master was lost, or before there was another one: it may be handled
again, because the server has forgotten that it was settled."""
FORGOTTEN: Final = 2.0
"""Seconds before a loss, and after it, in which that holds."""
REPORT_SECONDS: Final = 30.0
SIZES: Final = (8, 24)
STILL: Final = 240.0
"""Seconds without any change, after which a run ends."""
LAST_SECONDS: Final = 60.0
"""For the questions of a run that has ended early."""
RESIZE_SECONDS: Final = 1800.0
"""Seconds after which a resize has not ended for good."""
LEASE: Final = timedelta(seconds=30)
"""A machine that is busy with something else must not make a worker lose its lease: then messages come again."""

console = Console(highlight=False, soft_wrap=True)


@dataclass(slots=True)
class BandsVerdict:
    """What became of the messages. `again`: handled again after a kill or a failover, which is allowed. `lost_leases`:
    how often a live worker has lost one, which explains messages that came twice. `kills`: workers that were killed
    after they had handled messages. `unconfirmed`: messages that no replica has confirmed, so they may be lost.
    `unread`: how many messages each group had not handled when each resize ended. `ended_early`: why the run has ended
    before all was handled."""

    messages: int
    lost: int = 0
    doubled: int = 0
    reordered: int = 0
    again: int = 0
    unsettled: int = 0
    lost_leases: int = 0
    moved: int = 0
    failovers: int = 0
    unconfirmed: int = 0
    kills: int = 0
    unread: list[dict[str, int]] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    ended_early: str = ""

    @property
    def is_good(self) -> bool:
        """Whether each message was handled once and in order, and is settled."""
        return not (self.lost or self.doubled or self.reordered or self.unsettled or self.ended_early)

    def __str__(self) -> str:
        counts = f"{self.lost} lost, {self.doubled} doubled, {self.reordered} reordered, {self.unsettled} not settled"
        faults = f"{self.kills} kills, {self.again} handled again after one, {self.lost_leases} leases lost"
        waited = ", ".join(f"{number} of {group}" for each in self.unread for group, number in each.items())
        seams = f"; not handled when a resize ended: {waited}" if self.unread else ""
        masters = f", {self.failovers} masters lost, {self.unconfirmed} messages unconfirmed" if self.failovers else ""
        ended = f"; ended early: {self.ended_early}" if self.ended_early else ""
        return f"{self.messages} messages: {counts}; {faults}, {self.moved} slots moved{masters}{seams}{ended}"

    def add(self, other: BandsVerdict) -> None:
        """Add the verdict over another group."""
        for name in ("messages", "lost", "doubled", "reordered", "again"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.examples += other.examples


def judge(
    records: Iterator[tuple[int, int, int]],
    sent: array[int],
    killed: set[int],
    unconfirmed: Collection[tuple[int, int]] = (),
) -> BandsVerdict:
    """The verdict over (worker, key, number) in the order of time. `sent`: how many messages each key had. A worker in
    `killed` may leave messages that are handled again. Those of `unconfirmed`, each a key and a number, may be lost."""
    verdict = BandsVerdict(sum(sent))
    handlers = [bytearray([UNKNOWN]) * count for count in sent]
    newest = array("l", [-1]) * len(sent)
    for worker, key, number in records:
        before = handlers[key][number]
        if before != UNKNOWN and before in killed:
            verdict.again += 1
        elif before != UNKNOWN:
            verdict.doubled += 1
            verdict.examples.append(f"key {key}, message {number}: handled by workers {before} and {worker}")
        elif number < newest[key]:
            verdict.reordered += 1
            verdict.examples.append(f"key {key}: message {number} after {newest[key]}")
        handlers[key][number] = worker
        newest[key] = max(newest[key], number)
    verdict.lost = sum(each.count(UNKNOWN) for each in handlers)
    verdict.lost -= sum(handlers[key][number] == UNKNOWN for key, number in unconfirmed)
    return verdict


def doubt(worker: int, at: float, losses: Collection[tuple[float, float]]) -> int:
    """The worker of a record, or IN_DOUBT. `losses`: when each master was lost, and when there was another one."""
    return IN_DOUBT if any(lost - FORGOTTEN <= at <= ended + FORGOTTEN for lost, ended in losses) else worker


# -- workers ----------------------------------------------------------------------------------------------------------


def settings(url: str) -> Settings:
    """Of all processes."""
    return Settings(url=url, partitions=4, lease_ttl=LEASE, preflight="warn")


def register(broker: Broker, group: str, path: Path) -> None:
    """Let a broker handle the topic for a group, and write down what."""
    file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)

    @broker.handler(TOPIC, group=group, batch=200, linger=timedelta(milliseconds=5), concurrency=4)
    async def handle(payloads: list[str], messages: list[Message]) -> None:
        now = time.monotonic()
        os.write(file, b"".join(RECORD.pack(now, *map(int, each.split())) for each in payloads))


async def work(url: str, path: Path, groups: list[str]) -> None:
    """A worker, until SIGTERM."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(process)d %(name)s %(message)s")
    broker = Broker(settings(url))
    for group in groups:
        register(broker, group, path.with_suffix(f".{group}"))
    async with broker:
        await broker.run()


@dataclass(frozen=True, slots=True)
class BandWorker:
    """A worker process, and the files that it writes: one for each of its groups."""

    number: int
    groups: tuple[str, ...]
    path: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, number: int, url: str, folder: Path, groups: tuple[str, ...]) -> BandWorker:
        """Start it."""
        path = folder / f"worker-{number}"
        command = [sys.executable, "-m", "tests.chaos.bands_run", "--work-for", url, "--file", str(path)]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen([*command, "--group", *groups], stdout=log, stderr=log)
            return cls(number, groups, path, process)

    def handled(self, group: str) -> int:
        """How many messages of a group."""
        path = self.path.with_suffix(f".{group}")
        return path.stat().st_size // RECORD.size if path.exists() else 0

    @property
    def has_handled(self) -> bool:
        """Whether it has handled any message."""
        return any(map(self.handled, self.groups))

    def records(self, group: str) -> Iterator[tuple[float, int, int, int]]:
        """When, the worker, the key, the number; without a last one that a kill has cut off."""
        path = self.path.with_suffix(f".{group}")
        data = path.read_bytes() if path.exists() else b""
        for at, key, number in RECORD.iter_unpack(data[: len(data) // RECORD.size * RECORD.size]):
            yield at, self.number, key, number


class Stillness:
    """When a run is given up: nothing has changed for minutes, or a resize does not end, though much is handled."""

    def __init__(self, now: float) -> None:
        self._changed_at = now
        self._resizing_since: float | None = None
        self._done: tuple[int, ...] = ()
        self._resizes = 0

    def look(self, now: float, done: tuple[int, ...], resizes: int, *, is_resizing: bool) -> str:
        """Why the run is given up now, or empty. `done`: what has been published, handled and settled so far."""
        if resizes != self._resizes or not is_resizing:
            self._resizing_since = None
        if is_resizing and self._resizing_since is None:
            self._resizing_since = now
        if done != self._done:
            self._changed_at = now
        self._done, self._resizes = done, resizes
        if now - self._changed_at > STILL:
            return f"nothing was handled or settled for {STILL:g} s"
        if self._resizing_since is not None and now - self._resizing_since > RESIZE_SECONDS:
            return f"a resize has not ended in {RESIZE_SECONDS:g} s"
        return ""


# -- the run ----------------------------------------------------------------------------------------------------------


class BandsRun:
    """One run. `folder` gets the files of the workers and their log."""

    def __init__(
        self,
        url: str,
        folder: Path,
        messages: int,
        kills: int,
        seed: int,
        sizes: tuple[int, ...] = (),
        *,
        has_bands: bool = True,
        has_groups: bool = False,
        has_replicas: bool = False,
    ) -> None:
        self._has_replicas = has_replicas
        self._unconfirmed = set[tuple[int, int]]()
        self._has_bands = has_bands
        self._groups = (GROUP, PAUSED, ABSENT) if has_groups else (GROUP,)
        self._unread = list[dict[str, int]]()
        self._sizes = sizes
        self._url, self._folder = url, folder
        self._messages, self._kills = messages, kills
        self._random = random.Random(seed)
        self._broker = Broker(settings(url))
        self._sent = array("l", [0]) * (KEYS * len(BANDS))
        self._workers = list[BandWorker]()
        self._killed = set[int]()
        self.published = 0
        self.moved = 0
        self.losses = list[tuple[float, float]]()
        self.is_resizing = False
        self._ended_resizes = 0
        self._left = 0
        """What the server had unsettled when it was asked last."""

    @property
    def names(self) -> list[str]:
        """Keys of the topic: its hash, its group, its first partitions."""
        keys = self._broker.keys
        return [keys.topic(TOPIC), keys.group(TOPIC, GROUP), *[keys.stream(TOPIC, number) for number in range(4)]]

    @property
    def handled(self) -> int:
        """How many records there are of the group that is read all the time."""
        return self._handled(GROUP)

    @property
    def progress(self) -> str:
        """What else has happened, for a line now and then."""
        faults = f"{len(self._killed)} kills, {self.moved} slots moved, {len(self.losses)} masters lost"
        return f"{self.published} published, {self._ended_resizes} resizes, {faults}, {self._left} not settled"

    def _handled(self, group: str) -> int:
        return sum(each.handled(group) for each in self._workers)

    async def run(self) -> BandsVerdict:
        """Publish all, wait until it is handled, and judge."""
        ended_early = ""
        try:
            async with self._broker:
                ended_early = await self._until_still(asyncio.create_task(self._work()))
        finally:
            for worker in self._workers:
                worker.process.terminate()
            for worker in self._workers:
                worker.process.wait()
        verdict = self._verdict()
        verdict.ended_early = ended_early
        return verdict

    async def _work(self) -> None:
        """Publish all, with the resizes and kills, and wait until it is settled."""
        await self._make_groups()
        self._start((GROUP, PAUSED)[: len(self._groups)])
        self._start((GROUP, PAUSED)[: len(self._groups)])
        await self._publish(self._messages // 6, [1])
        while not self.handled:  # workers take a second to start
            await asyncio.sleep(0.01)
        if self._has_bands:
            await self._ask(lambda: self._broker.topics.set_bands(TOPIC, BANDS))
            while (await self._ask(lambda: self._broker.topics.existing(TOPIC))).layout.waits:
                await self._publish(SLOW_CHUNK, [1])
                await asyncio.sleep(0.01)
        bands, sizes = [0, 1, 2] if self._has_bands else [1], list(self._sizes)
        wanted = self._messages
        while sizes or self.published < wanted:
            begins = wanted * (1 - len(sizes) / (len(self._sizes) + 1))
            self.is_resizing = bool(sizes) and self.published >= begins
            await self._publish(SLOW_CHUNK if self.is_resizing else min(CHUNK, wanted - self.published), bands)
            if self.is_resizing:  # slower: it waits for killed members, and until all of before is handled
                await asyncio.sleep(0.01)
                await self._resize(sizes)
                wanted = max(self._messages, self.published + self._messages // 6)
            if self._is_due():
                await self._replace_one()
        while await self._ask(self._unsettled) and any(each.process.poll() is None for each in self._workers):
            await asyncio.sleep(0.2)

    async def _until_still(self, working: asyncio.Task[None]) -> str:
        """Wait for the run. Returns why it has ended early, or empty."""
        still = Stillness(time.monotonic())
        while not (await asyncio.wait({working}, timeout=1.0))[0]:
            done = self.published, *map(self._handled, self._groups), self._left
            if why := still.look(time.monotonic(), done, self._ended_resizes, is_resizing=self.is_resizing):
                working.cancel()
                await asyncio.wait({working})
                break
        else:
            if (error := working.exception()) is None:
                return ""
            why = f"it has failed ({error!r})"
        try:
            return f"{why}: {await asyncio.wait_for(self._ask(self._describe), LAST_SECONDS)}"
        except TimeoutError:
            return f"{why}: the server does not answer"

    async def _describe(self) -> str:
        """What each partition still has, and who owns it."""
        await self._unsettled()
        topic, keys, found = await self._broker.topics.existing(TOPIC), self._broker.keys, list[str]()
        for number in topic.numbers:
            for row in await groups_of(self._broker.client, keys.stream(TOPIC, number)):
                group = row["name"].decode()
                owner, until = await self._broker.client.execute_command(
                    "HMGET", keys.lease(TOPIC, number, group), "owner", "until_ms"
                )
                if row["pending"] or row["lag"]:
                    ends = f"{owner} until {until}" if owner else "no member"
                    found.append(f"{number} of {group}: {row['pending']} pending, {row['lag']} unread, {ends}")
        waits_for = await self._broker.topics.go_on_with_resize(TOPIC)
        alive = sum(each.process.poll() is None for each in self._workers)
        return "; ".join([*found, f"{alive} workers", *([f"the resize waits for {waits_for}"] if waits_for else [])])

    def _verdict(self) -> BandsVerdict:
        """Over what the workers have written."""
        verdict = BandsVerdict(0)
        for group in self._groups:
            found = heapq.merge(*(each.records(group) for each in self._workers))
            records = ((doubt(worker, at, self.losses), key, number) for at, worker, key, number in found)
            verdict.add(judge(records, self._sent, self._killed | {IN_DOUBT}, self._unconfirmed))
        verdict.failovers, verdict.unconfirmed = len(self.losses), len(self._unconfirmed)
        verdict.unsettled, verdict.unread = self._left, self._unread
        verdict.moved, verdict.kills = self.moved, len(self._killed)
        verdict.lost_leases = (self._folder / "log").read_text(errors="replace").count("lost <Lane")
        return verdict

    async def _make_groups(self) -> None:
        """A member of each group starts and ends: the groups are there before the first message."""
        if len(self._groups) == 1:
            return
        maker = Broker(settings(self._url))
        for group in self._groups:
            register(maker, group, self._folder / f"maker.{group}")
        async with maker:
            async with maker.running():
                pass
            await maker.pause_group(TOPIC, PAUSED)

    async def _resize(self, sizes: list[int]) -> None:
        """Begin or repeat the next resize. When it has ended, the other groups begin to read."""
        if (await self._ask(lambda: self._broker.topics.resize(TOPIC, sizes[0]))).partitions != sizes[0]:
            return
        sizes.pop(0)
        self._ended_resizes += 1
        self._unread.append({group: max(0, self.published - self._handled(group)) for group in self._groups})
        if len(self._groups) > 1 and len(self._unread) == 1:
            await self._ask(lambda: self._broker.resume_group(TOPIC, PAUSED))
            self._start((ABSENT,))

    def _start(self, groups: tuple[str, ...]) -> None:
        self._workers.append(BandWorker.start(len(self._workers), self._url, self._folder, groups))

    async def _publish(self, count: int, bands: list[int]) -> None:
        """So many messages to some of the bands, keys at random."""
        for at in range(0, count, CHUNK):
            band = self._random.choice(bands)
            chunk = list[tuple[int, int]]()
            for _ in range(min(CHUNK, count - at)):
                key = band * KEYS + self._random.randrange(KEYS)
                chunk.append((key, self._sent[key]))
                self._sent[key] += 1
            texts = [f"{key} {number}" for key, number in chunk]
            where = {} if bands == [1] else {"band": BANDS[band]}
            if self._has_replicas:
                several = [
                    self._broker.publish(TOPIC, each, key=each.partition(" ")[0], wait_replicas=1, **where)
                    for each in texts
                ]
                self._note(chunk, await asyncio.gather(*several, return_exceptions=True))
            else:
                await self._broker.publish_many(TOPIC, texts, key=lambda each: each.partition(" ")[0], **where)
            self.published += len(chunk)
            while self.published - self.handled > MOST_UNREAD:
                await asyncio.sleep(0.01)

    def _note(self, chunk: list[tuple[int, int]], replies: list[Any]) -> None:
        """Note what no replica has confirmed."""
        for each, reply in zip(chunk, replies, strict=True):
            if isinstance(reply, BrokerError):
                self._unconfirmed.add(each)
            elif isinstance(reply, BaseException):
                raise reply

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a call, which is repeated while a master is lost."""
        while True:
            try:
                return await call()
            except BrokerError:
                if not self._has_replicas:
                    raise
                await asyncio.sleep(0.05)

    def _is_due(self) -> bool:
        """Whether a worker is to be killed now: spread over the run."""
        return len(self._killed) < self._kills * min(self.published, self._messages) // self._messages

    async def _replace_one(self) -> None:
        """Kill a worker that has handled messages: one that was just started has none."""
        while not (alive := [each for each in self._workers if each.process.poll() is None and each.has_handled]):
            await asyncio.sleep(0.01)
        victim = self._random.choice(alive)
        victim.process.send_signal(signal.SIGKILL)
        victim.process.wait()
        self._killed.add(victim.number)
        self._start(victim.groups)

    async def _unsettled(self) -> int:
        """What the server has for the group."""
        topic, left = await self._broker.topics.existing(TOPIC), 0
        for number in topic.numbers:
            stream = self._broker.keys.stream(TOPIC, number)
            rows = await groups_of(self._broker.client, stream)
            left += sum(row["pending"] + (row["lag"] or 0) for row in rows)
            left += 0 if rows else await self._broker.client.execute_command("XLEN", stream)
        self._left = left
        return left


async def main(
    messages: int,
    kills: int,
    seed: int,
    keep: Path | None = None,
    sizes: tuple[int, ...] = (),
    *,
    has_bands: bool = True,
    has_groups: bool = False,
    on_cluster: bool = False,
    on_sentinel: bool = False,
) -> BandsVerdict:
    """One run on a server, a cluster, or a master with replicas, of its own, with a bar, or a line now and then."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if keep is None else keep
        folder.mkdir(parents=True, exist_ok=True)
        cluster = stack.enter_context(Cluster()) if on_cluster else None
        sentinels = stack.enter_context(Sentinels()) if on_sentinel else None
        server = cluster or sentinels or stack.enter_context(ThrowawayServer())
        what = {"has_bands": has_bands, "has_groups": has_groups, "has_replicas": on_sentinel}
        run = BandsRun(server.url, folder, messages, kills, seed, sizes, **what)
        progress = stack.enter_context(Progress(console=console, transient=True))
        bar = progress.add_task("handled", total=messages)

        async def show() -> None:
            while True:
                progress.update(bar, completed=run.handled)
                if not console.is_terminal:
                    console.print(f"{run.handled} of {messages} handled: {run.progress}")
                await asyncio.sleep(0.5 if console.is_terminal else REPORT_SECONDS)

        tasks = [asyncio.create_task(show())]
        if cluster is not None:
            tasks.append(asyncio.create_task(move_slots(cluster, run, random.Random(seed))))
        if sentinels is not None:
            tasks.append(asyncio.create_task(lose_masters(sentinels, run, random.Random(seed))))
        try:
            return await run.run()
        finally:
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Exception):  # the verdict is not about what was asked for
                    console.print(f"the faults have ended before the run: {ended!r}")


async def move_slots(cluster: Cluster, run: BandsRun, chance: random.Random) -> None:
    """Slots of the topic, and of its partitions, move to other masters, one after the other."""
    while True:
        await asyncio.sleep(chance.uniform(0.2, 1.0))
        try:
            await asyncio.to_thread(cluster.migrate, chance.choice(run.names))
            run.moved += 1
        except (redis.RedisError, AssertionError) as error:  # a node was too busy to answer in time
            console.print(f"a slot has not moved: {error}")


async def lose_masters(sentinels: Sentinels, run: BandsRun, chance: random.Random) -> None:
    """One master after the other is lost, at random moments, or as soon as the topic grows."""
    while True:
        until = time.monotonic() + chance.uniform(2.0, 10.0)
        is_for_resize = chance.random() < 0.5
        while not run.handled or (time.monotonic() < until and not (is_for_resize and run.is_resizing)):
            await asyncio.sleep(0.01)
        await asyncio.sleep(chance.uniform(0, 0.2))
        lost = time.monotonic()
        try:
            await replace_master(sentinels, chance.choice(("kill", "pause")))
        except (redis.RedisError, TimeoutError) as error:
            console.print(f"no other master took its place in time: {error!r}")
        finally:
            run.losses.append((lost, time.monotonic()))
        while not await asyncio.to_thread(sentinels.is_whole):
            await asyncio.sleep(0.05)


def command() -> int:
    """The exit code is 1 if a promise is broken, or if the run has stood still."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.bands_run", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=0, help="workers that are killed and replaced")
    parser.add_argument("--resize", action="store_true", help="resize the topic, with its bands")
    parser.add_argument("--plain", action="store_true", help="with --resize: a topic without bands")
    parser.add_argument("--groups", action="store_true", help="three groups: one is paused first, one has no member")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for the records and the log of the workers")
    parser.add_argument("--work-for", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--group", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--cluster", action="store_true", help="a cluster of six nodes, whose slots move")
    parser.add_argument("--sentinel", action="store_true", help="a master with two replicas, which is lost repeatedly")
    chosen: Any = parser.parse_args()
    if chosen.cluster and chosen.sentinel:
        parser.error("give --cluster or --sentinel")
    if chosen.work_for:
        asyncio.run(work(chosen.work_for, chosen.file, chosen.group))
        return 0
    sizes, has_bands = SIZES if chosen.resize else (), not (chosen.resize and chosen.plain)
    how = {"has_bands": has_bands, "has_groups": chosen.groups}
    how |= {"on_cluster": chosen.cluster, "on_sentinel": chosen.sentinel}
    verdict = asyncio.run(main(chosen.messages, chosen.kills, chosen.seed, chosen.keep, sizes, **how))
    for example in verdict.examples[:10]:
        console.print(f"  {example}")
    console.print(str(verdict))
    return 0 if verdict.is_good else 1


if __name__ == "__main__":
    sys.exit(command())
