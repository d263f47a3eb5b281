"""`python -m tests.chaos.notifications_run --people 100000 --kills 20`: PUSH, then SMS, then AlimTalk, under SIGKILL.

Two worker processes notify people, with all that `docs/notifications.md` names: fallbacks, limits, a breaker, "not
now", quiet hours, tenants, bands. A provider writes down whom it has reached, before the worker can settle. A worker is
killed and replaced so many times. Then each notification is judged: it has reached its person once, by one channel, and
in order, or has become a dead letter. Only what a killed worker had in its hands may be sent again. Which call fails is
drawn from person, channel and attempt, so without kills each channel is known before. `--ledger` writes a line for each
notification: the person, its number, and each channel with the worker that used it.
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
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress
from tenacity import wait_fixed

from rsmq import Breaker, Broker, Hold, Message, QuietHours, Rate, Reject, RetryPolicy, Settings
from rsmq.redis.streams import groups_of
from rsmq.testing.server import ThrowawayServer

CHANNELS: Final = ("push", "sms", "alimtalk")
GROUP: Final = "sender"
BANDS: Final = ("urgent", "normal", "bulk")
ATTEMPTS: Final = (3, 3, 4)
FAILS: Final = (0.3, 0.3, 0.4)
"""The share of calls that fail, of each channel."""
WITHOUT_ADDRESS: Final = 0.05
"""The share of people whom PUSH does not reach at all."""
BUSY_EACH: Final = 2.0
BUSY_FOR: Final = 0.02
"""A provider answers "not now" for so many seconds, in so many."""
EVERY: Final = 10
"""Of so many people one gets three notifications, the others one."""
CHUNK: Final = 1000
RECORD: Final = struct.Struct("<dIBB")
"""When the provider took it, the person, the number of the notification, the channel."""
LEASE: Final = timedelta(seconds=30)
"""A machine that is busy with something else must not make a worker lose its lease: then messages come again."""

console = Console(highlight=False, soft_wrap=True)


def drawn(*what: object) -> float:
    """A number from 0 to 1 that depends on nothing else."""
    return zlib.crc32(repr(what).encode()) / 2**32


def answer(channel: int, person: int, number: int, attempt: int) -> str:
    """What the provider says to a call: `taken`, `failed`, or `unknown` where it knows no address."""
    if channel == 0 and drawn("address", person) < WITHOUT_ADDRESS:
        return "unknown"
    return "failed" if drawn(channel, person, number, attempt) < FAILS[channel] else "taken"


def channel_of(person: int, number: int) -> int | None:
    """The channel that takes a notification if no worker dies. None: it becomes a dead letter."""
    for channel, most in enumerate(ATTEMPTS):
        for attempt in range(1, most + 1):
            said = answer(channel, person, number, attempt)
            if said == "taken":
                return channel
            if said == "unknown":
                break
    return None


def count_for(person: int) -> int:
    """How many notifications a person gets."""
    return 3 if person % EVERY == 0 else 1


# -- the verdict -------------------------------------------------------------------------------------------------------

Taken = tuple[int, int, int, int]
"""The worker, the person, the number of the notification, the channel."""


@dataclass(slots=True)
class NotificationsVerdict:
    """What became of the notifications.

    `again`, `by_two` and `also_dead`: sent again by one channel or by two, or sent and a dead letter, each after a
    kill. These are allowed, as is `elsewhere`: another channel than the drawn one, where a kill has counted as an
    attempt. `doubled`: sent again although no killed worker had it.
    """

    people: int
    notifications: int
    kills: int
    by: Counter[int] = field(default_factory=Counter)
    dead: int = 0
    again: int = 0
    by_two: int = 0
    also_dead: int = 0
    elsewhere: int = 0
    lost: int = 0
    doubled: int = 0
    reordered: int = 0
    unsettled: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether each notification has reached its person once and in order, or what a kill explains."""
        is_as_drawn = self.kills > 0 or not self.elsewhere
        return is_as_drawn and not (self.lost or self.doubled or self.reordered or self.unsettled)

    def __str__(self) -> str:
        by = ", ".join(f"{name} {self.by[number]}" for number, name in enumerate(CHANNELS))
        return (
            f"{self.people} people, {self.notifications} notifications, workers killed {self.kills} times\n"
            f"reached by {by}; dead letters {self.dead}\n"
            f"after a kill: {self.again} again by one channel, {self.by_two} by two channels, {self.also_dead} sent "
            f"and a dead letter, {self.elsewhere} by another channel than drawn\n"
            f"without a kill: {self.doubled} doubled, {self.lost} lost, {self.reordered} out of order, "
            f"{self.unsettled} not settled"
        )


def judge(
    records: Iterable[Taken], people: int, killed: Collection[int], dead: Collection[tuple[int, int]]
) -> NotificationsVerdict:
    """The verdict over what providers have taken, in the order of time. `killed`: workers, `dead`: person and number of
    each dead letter."""
    verdict = NotificationsVerdict(people, sum(map(count_for, range(people))), len(killed), dead=len(dead))
    takes = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    newest: dict[tuple[int, int], int] = {}
    for worker, person, number, channel in records:
        of_person = takes[person, number]
        if all(channel != before for _, before in of_person):
            if number < newest.get((channel, person), -1):
                verdict.reordered += 1
                verdict.examples.append(f"person {person}: {number} by {CHANNELS[channel]} after a later one")
            newest[channel, person] = max(number, newest.get((channel, person), -1))
        of_person.append((worker, channel))
    for person in range(people):
        for number in range(count_for(person)):
            _judge_one(verdict, person, number, takes.get((person, number), []), killed, (person, number) in dead)
    return verdict


def _judge_one(
    verdict: NotificationsVerdict,
    person: int,
    number: int,
    takes: list[tuple[int, int]],
    killed: Collection[int],
    is_dead: bool,
) -> None:
    if not takes and not is_dead:
        verdict.lost += 1
        verdict.examples.append(f"person {person}: {number} is lost")
        return
    channels = [channel for _, channel in takes]
    ended = None if is_dead else channels[-1]
    verdict.elsewhere += ended != channel_of(person, number)
    if ended is not None:
        verdict.by[ended] += 1
    if len(takes) + is_dead == 1:
        return
    before = takes if is_dead else takes[:-1]
    if any(worker not in killed for worker, _ in before):
        verdict.doubled += 1
    elif is_dead:
        verdict.also_dead += 1
    elif len(set(channels)) > 1:
        verdict.by_two += 1
    else:
        verdict.again += 1
    ways = ", ".join(f"{CHANNELS[channel]} by worker {worker}" for worker, channel in takes)
    verdict.examples.append(f"person {person}: {number}: {ways}{', dead letter' if is_dead else ''}")


def lines_of(records: Iterable[Taken], dead: Collection[tuple[int, int]]) -> Iterator[str]:
    """The ledger: a line for each notification that was sent or is a dead letter, in the order of people."""
    ways = defaultdict[tuple[int, int], list[str]](list)
    for worker, person, number, channel in records:
        ways[person, number].append(f"{CHANNELS[channel]} by worker {worker}")
    for each in dead:
        ways[each].append("dead letter")
    for (person, number), found in sorted(ways.items()):
        yield f"person {person}, notification {number}: {', '.join(found)}\n"


# -- workers -----------------------------------------------------------------------------------------------------------


def settings(url: str) -> Settings:
    """Of all processes."""
    return Settings(url=url, partitions=4, lease_ttl=LEASE, preflight="warn")


def noon() -> str:
    """A time zone in which it is day."""
    return f"Etc/GMT{datetime.now(UTC).hour - 12:+d}"


class Sender:
    """The handlers of the page, and the providers that they call. What is taken is appended to `path`."""

    def __init__(self, broker: Broker, path: Path) -> None:
        self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)
        self._quiet = QuietHours("22:00", "08:00", zone=lambda message: message.headers.get("tz"), default="UTC")
        topics = [broker.topic(name, str, bands=BANDS) for name in CHANNELS]
        for channel, topic in enumerate(topics):
            topic.handler(
                name=f"send_{topic.name}",
                group=GROUP,
                fallback=topics[channel + 1] if channel + 1 < len(topics) else None,
                retry=RetryPolicy(max_attempts=ATTEMPTS[channel], wait=wait_fixed(0.02)),
                rate=[Rate(50_000, per="1s", by=lambda message: message.topic), Rate(100, per="1s", by="key")],
                breaker=Breaker(failures=50, hold="100ms", by=lambda message: message.topic),
                when=self._quiet,
                tenant=lambda message: message.headers.get("tenant"),
                reserve={"urgent": 4},
            )(self._handler(channel))

    def _handler(self, channel: int) -> Any:
        async def send(text: str, message: Message) -> None:
            if time.monotonic() % BUSY_EACH < BUSY_FOR:
                raise Hold("20ms")
            person, number = map(int, text.split())
            said = answer(channel, person, number, message.attempt)
            if said == "unknown":
                raise Reject("no address")
            if said == "failed":
                raise ConnectionError("the provider has failed")
            os.write(self._file, RECORD.pack(time.monotonic(), person, number, channel))

        return send


async def work(url: str, path: Path) -> None:
    """A worker, until SIGTERM."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(process)d %(name)s %(message)s")
    broker = Broker(settings(url))
    Sender(broker, path)
    async with broker:
        await broker.run()


@dataclass(frozen=True, slots=True)
class SenderProcess:
    """A worker process, and the file that it writes."""

    number: int
    path: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, number: int, url: str, folder: Path) -> SenderProcess:
        """Start it."""
        path = folder / f"worker-{number}"
        command = [sys.executable, "-m", "tests.chaos.notifications_run", "--work-for", url, "--file", str(path)]
        with (folder / "log").open("ab") as log:
            return cls(number, path, subprocess.Popen(command, stdout=log, stderr=log))

    @property
    def taken(self) -> int:
        """How many records it has."""
        return self.path.stat().st_size // RECORD.size if self.path.exists() else 0

    def records(self) -> Iterator[tuple[float, Taken]]:
        """When, and what; without a last one that a kill has cut off."""
        data = self.path.read_bytes() if self.path.exists() else b""
        for at, *rest in RECORD.iter_unpack(data[: len(data) // RECORD.size * RECORD.size]):
            yield at, (self.number, *rest)  # type: ignore[misc]


# -- the run -----------------------------------------------------------------------------------------------------------


class NotificationsRun:
    """One run. `folder` gets the files of the workers and their log."""

    def __init__(
        self, url: str, folder: Path, people: int, kills: int, *, workers: int, seed: int, ledger: Path | None
    ) -> None:
        self._url, self._folder, self._people, self._ledger = url, folder, people, ledger
        self._kills, self._count = kills, workers
        self._random = random.Random(seed)
        self._broker = Broker(settings(url))
        self._workers = list[SenderProcess]()
        self._killed = set[int]()
        self.notifications = sum(map(count_for, range(people)))

    @property
    def taken(self) -> int:
        """How many records there are."""
        return sum(each.taken for each in self._workers)

    async def run(self) -> NotificationsVerdict:
        """Publish all, kill, wait until all is settled, and judge."""
        for name in CHANNELS:
            self._broker.topic(name, str, bands=BANDS)
        try:
            async with self._broker:
                for _ in range(self._count):
                    self._start()
                publishing = asyncio.create_task(self._publish())
                while not publishing.done() or len(self._killed) < self._kills or await self._unsettled():
                    if len(self._killed) < self._kills and self.taken >= self._next_kill:
                        self._replace_one()
                    if all(each.process.poll() is not None for each in self._workers):
                        break
                    await asyncio.sleep(0.02 if len(self._killed) < self._kills else 0.2)
                await publishing
                left, dead = await self._unsettled(), await self._dead()
        finally:
            for worker in self._workers:
                worker.process.terminate()
            for worker in self._workers:
                worker.process.wait()
        found = [record for _, record in heapq.merge(*(each.records() for each in self._workers))]
        if self._ledger is not None:
            self._ledger.write_text("".join(lines_of(found, dead)))
        verdict = judge(found, self._people, self._killed, dead)
        verdict.unsettled = left
        return verdict

    def _start(self) -> None:
        self._workers.append(SenderProcess.start(len(self._workers), self._url, self._folder))

    @property
    def _next_kill(self) -> float:
        """How many records there are when the next worker is killed: spread over nine tenths of the run."""
        return 0.9 * self.notifications * (len(self._killed) + 0.5) / self._kills

    async def _publish(self) -> None:
        """The first notification of each person, then the second and the third of those who get them."""
        zone = noon()
        for number in range(3):
            for at, band in enumerate(BANDS):
                chosen = [each for each in range(at, self._people, len(BANDS)) if number < count_for(each)]
                for start in range(0, len(chosen), CHUNK):
                    await self._broker.publish_many(
                        CHANNELS[0], [f"{each} {number}" for each in chosen[start : start + CHUNK]], band=band,
                        key=lambda text: text.partition(" ")[0],
                        headers=lambda text: {"tz": zone, "tenant": f"tenant-{int(text.partition(' ')[0]) % 7}"},
                    )  # fmt: skip

    def _replace_one(self) -> None:
        victim = self._random.choice([each for each in self._workers if each.process.poll() is None])
        victim.process.send_signal(signal.SIGKILL)
        victim.process.wait()
        self._killed.add(victim.number)
        self._start()

    async def _unsettled(self) -> int:
        """What the server has for the group: in the order of the channels, so that nothing can slip through."""
        left = 0
        for name in CHANNELS:
            topic = await self._broker.topics.find(name)
            for number in () if topic is None else topic.numbers:
                stream = self._broker.keys.stream(name, number)
                rows = await groups_of(self._broker.client, stream)
                left += sum(row["pending"] + (row["lag"] or 0) for row in rows)
                left += 0 if rows else await self._broker.client.execute_command("XLEN", stream)
        return left

    async def _dead(self) -> set[tuple[int, int]]:
        """Person and number of each dead letter."""
        dead = set[tuple[int, int]]()
        for name in CHANNELS:
            topic = await self._broker.topics.existing(name)
            async for letter in self._broker.dead_letters.iterate(topic, GROUP):
                person, number = map(int, letter.data.split())
                dead.add((person, number))
        return dead


async def main(
    people: int,
    kills: int,
    seed: int = 1,
    workers: int = 2,
    keep: Path | None = None,
    ledger: Path | None = None,
) -> NotificationsVerdict:
    """One run on a server of its own, with a bar."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if keep is None else keep
        folder.mkdir(parents=True, exist_ok=True)
        server = stack.enter_context(ThrowawayServer())
        run = NotificationsRun(server.url, folder, people, kills, workers=workers, seed=seed, ledger=ledger)
        progress = stack.enter_context(Progress(console=console, transient=True))
        bar = progress.add_task("taken", total=run.notifications)

        async def show() -> None:
            while True:
                progress.update(bar, completed=run.taken)
                await asyncio.sleep(0.5)

        showing = asyncio.create_task(show())
        try:
            return await run.run()
        finally:
            showing.cancel()


def command() -> int:
    """The exit code is 1 if a promise is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.notifications_run", description=__doc__)
    parser.add_argument("--people", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20, help="workers that are killed and replaced")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for the records and the log of the workers")
    parser.add_argument("--ledger", type=Path, help="a file for a line of each notification")
    parser.add_argument("--work-for", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    chosen: Any = parser.parse_args()
    if chosen.work_for:
        asyncio.run(work(chosen.work_for, chosen.file))
        return 0
    options = (chosen.seed, chosen.workers, chosen.keep, chosen.ledger)
    verdict = asyncio.run(main(chosen.people, chosen.kills, *options))
    for example in verdict.examples[:20]:
        console.print(f"  {example}")
    console.print(str(verdict))
    return 0 if verdict.is_good else 1


if __name__ == "__main__":
    sys.exit(command())
