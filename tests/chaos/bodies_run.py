"""`python -m tests.chaos.bodies_run --messages 2000 --faults 200`: a store of bodies that is away, and SIGKILL.

Two workers pass large messages on to a second topic, a third process publishes them, and this one sweeps all the time.
Meanwhile the store refuses calls, hangs in the middle of a write, stores or deletes and then fails, or answers with
half of a body or with another one; and a process is killed and replaced. In the end the store works again, and the
verdict is: each message was handled, in the order of its key, again only where a killed worker had it; no dead letter;
no entry names a body that is gone; and when all entries are gone, two sweeps leave nothing in the store.

With `--rotate` all payloads are encrypted, and meanwhile three keys are rotated, each process being killed to give it
the next keyring: a key that some process still needs is kept by what `rsmq keys status` counts, and once a publisher
has a key before the workers. With `--shift 24` the clock of the publisher is a day ahead, and a day behind after each
other start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from tenacity import wait_fixed

from rsmq import Broker, BrokerError, Message, RetryPolicy, Settings
from rsmq.codecs import Encrypt, Keyring, Offload
from rsmq.control import Bodies
from rsmq.inspector.key_status import KeyStatus, KeyUse
from rsmq.model import body as body_module
from rsmq.redis.identity import deployment_id
from rsmq.testing.server import ThrowawayServer
from tests import forks
from tests.chaos.checker import History, Name, check
from tests.chaos.ledger import EventLedger, EventWriter
from tests.compiler import library
from tests.patience import until

TOPICS: Final = ("first", "second")
GROUP: Final = "workers"
KEYS: Final = 5
Process = forks.ForkedProcess | subprocess.Popen[bytes]
MODES: Final = ("refuses", "hangs", "fails after", "half")
LONGEST_HANG: Final = 0.5
FRESH: Final = 1.0
KEYRINGS: Final = ("k1", "k1,k2", "k2,k1", "k2", "k3,k2", "k3")
"""The ids of the keys that all processes have one after another, the first of them to write with. The third key comes
without the step in which it is only read with: then its messages wait."""
EARLY: Final = "k3,k2"
MOST_TURNS: Final = 500
"""In which a rotation goes on when no more faults come. What has not come by then is what the verdict finds wrong."""
NEEDED: Final = ("backlog", "parked", "delayed", "outputs", "dead_letters", "steps")
"""Where a payload needs its key. What is only kept for a replay does not stop the rotation."""
CLOCK: Final = forks.ROOT / "tests" / "producer" / "shifted_clock.c"
KEEP: Final = timedelta(seconds=5)
"""Instead of an hour and of six: a body that is `FRESH` may be named, and one that is older than `KEEP` be swept."""


@dataclass(frozen=True, slots=True)
class BodiesJob:
    """What all processes of a run know. `messages`: of each key, and as many that are delayed and have none. `pause`:
    seconds between two messages of a key. `rotates`: payloads are encrypted. `shift`: hours by which the publisher's
    clock is off."""

    url: str
    prefix: str
    folder: str
    messages: int
    pause: float = 0.0
    rotates: bool = False
    shift: int = 0

    @property
    def ledger(self) -> Path:
        """What was published and handled."""
        return Path(self.folder, "ledger")

    @property
    def switch(self) -> Path:
        """What the store does wrong now; empty: nothing."""
        return Path(self.folder, "switch")

    @property
    def log(self) -> Path:
        """What the processes print."""
        return Path(self.folder, "log")

    @property
    def keyring(self) -> Path:
        """The keys that a process starts with."""
        return Path(self.folder, "keys")

    def give(self, ids: str) -> None:
        """Write a keyring for all that start from now on, whole at any moment."""
        part = self.keyring.with_suffix(".part")
        part.write_text(",".join(f"{each}={b64encode(each.encode() * 16).decode()}" for each in ids.split(",")))
        part.replace(self.keyring)

    @property
    def names(self) -> list[Name]:
        """All messages of the first topic."""
        keyed = [(f"k{key}", n) for n in range(self.messages) for key in range(KEYS)]
        return [*keyed, *((f"late{n}", 0) for n in range(self.messages))]

    def broker(self) -> Broker:
        """With the store that fails."""
        lease = timedelta(seconds=30)  # a killed member is replaced long before that
        settings = Settings(url=self.url, prefix=self.prefix, partitions=2, lease_ttl=lease, preflight="warn")
        codecs = [Encrypt(Keyring.from_file(self.keyring), required=True)] if self.rotates else []
        return Broker(settings, codecs=codecs, offload=Offload(FaultyStore(self), above="1kB"))


class FaultyStore:
    """Bodies in files, and what the switch says."""

    def __init__(self, job: BodiesJob) -> None:
        self._store = Offload(Path(job.folder, "bodies")).store
        self._switch = job.switch
        self._other = b"another body"
        self._random = random.Random(os.getpid())

    def put(self, name: str, data: bytes) -> None:
        self._reach()
        self._store.put(name, data)
        self._answer()

    def get(self, name: str) -> bytes:
        self._reach()
        self.wait()
        data = self._store.get(name)
        if self._mode() == "half":
            return self._random.choice([data[: len(data) // 2], self._other])
        self._other = data
        return data

    def delete(self, name: str) -> None:
        self._reach()
        self._store.delete(name)
        self._answer()

    def list(self, folder: str) -> Iterator[tuple[str, float, int]]:
        self._reach()
        yield from self._store.list(folder)

    def wait(self) -> None:
        """Until it hangs no more."""
        end = time.monotonic() + LONGEST_HANG
        while self._mode() == "hangs" and time.monotonic() < end:
            time.sleep(0.02)

    def _mode(self) -> str:
        return self._switch.read_text()

    def _reach(self) -> None:
        if self._mode() == "refuses":
            raise OSError("the store is away")

    def _answer(self) -> None:
        if self._mode() == "fails after":
            raise OSError("the answer was lost")


def hang_in_writes(store: FaultyStore) -> None:
    """The disk of this process takes long for what was written, so that a kill comes in the middle of a put."""
    sync: Callable[[int], None] = os.fsync

    def slow(file: int) -> None:
        store.wait()
        sync(file)

    os.fsync = slow  # type: ignore[assignment]


def order_of(topic: str, key: str, n: int) -> dict[str, Any]:
    """The payload of a message: two thousand bytes that no other message has."""
    return {"key": key, "n": n, "text": f"{topic} {key} {n} " * (2000 // len(f"{topic} {key} {n} "))}


async def work(job: BodiesJob) -> None:
    """A worker, until SIGTERM."""
    broker, ledger = job.broker(), EventWriter(job.ledger)

    def register(topic: str, then: str) -> None:
        @broker.handler(topic, group=GROUP, retry=RetryPolicy(max_attempts=5, wait=wait_fixed(0.02)))
        async def handle(order: dict[str, Any], message: Message) -> None:
            key, n = f"{topic} {order['key']}", order["n"]
            ledger.note("start", key, n, message.attempt)
            try:
                assert order == order_of(topic, order["key"], n)
                if n % 5 == 2 and message.attempt == 1:
                    raise ValueError("the first attempt fails")
                if then:
                    await message.publish(then, order_of(then, order["key"], n), key=message.key)
            except BaseException:
                ledger.note("fail", key, n, message.attempt)
                raise
            ledger.note("commit", key, n, message.attempt)

    register(TOPICS[0], TOPICS[1])
    register(TOPICS[1], "")
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, broker.stop)
    await broker.run()


async def publish(job: BodiesJob) -> None:
    """Publish what was not confirmed yet, in the order of each key, until all of it is."""
    ledger, ready = EventWriter(job.ledger), EventLedger(job.ledger)
    stored = {(event.key, event.n) for event in ready.read() if event.what == "ok"}
    async with job.broker() as broker:

        async def one(key: str, n: int) -> None:
            about: dict[str, Any] = {"delay": "300ms"} if key.startswith("late") else {"key": key}
            while (f"{TOPICS[0]} {key}", n) not in stored:
                with suppress(BrokerError):
                    await broker.publish(TOPICS[0], order_of(TOPICS[0], key, n), message_id=f"{key}-{n}", **about)
                    ledger.note("ok", f"{TOPICS[0]} {key}", n)
                    return
                await asyncio.sleep(0.05)

        async def all_of(names: list[Name]) -> None:
            for key, n in names:
                await one(key, n)
                await asyncio.sleep(job.pause)

        keys = [f"k{key}" for key in range(KEYS)]
        await asyncio.gather(
            *[all_of([name for name in job.names if name[0] == key]) for key in keys],
            all_of([name for name in job.names if name[0] not in keys]),
        )


def start(job: BodiesJob, role: str, shift: int = 0) -> Process:
    """A process of this module. One whose clock is off by `shift` hours is not forked: a library is loaded first."""
    environment, module = {**os.environ, "PYTHONPATH": str(forks.ROOT)}, "tests.chaos.bodies_run"
    arguments = (role, json.dumps(asdict(job)))
    with job.log.open("ab") as log:
        if not shift:
            return forks.start(module, *arguments, cwd=forks.ROOT, env=environment, stdout=log)
        environment |= {"LD_PRELOAD": str(library(CLOCK)), "SHIFT": str(3600 * shift)}
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(command, cwd=forks.ROOT, env=environment, stdout=log, stderr=log)


class Rotation:
    """Gives all processes one keyring after another."""

    def __init__(self, job: BodiesJob) -> None:
        self._job = job
        self._left = list(KEYRINGS)
        self._old = list[str]()
        self._ids = ""
        self.advance()

    def advance(self) -> None:
        """Write the next keyring. Each process is to be killed, the publisher first."""
        self._ids = self._left.pop(0)
        self._job.give(self._ids)
        self._old = ["work 2", "work", "publish"]

    async def next_role(self, broker: Broker) -> str | None:
        """A process that is to start with the newest keyring; None: all have, or the workers get a key that comes
        without warning when a message has it."""
        is_early = self._ids == EARLY and self._old[-1:] != ["publish"]
        if not self._old or (is_early and not any(use.key == EARLY[:2] for use in await key_uses(broker))):
            return None
        return self._old.pop()

    @property
    def is_over(self) -> bool:
        """Whether all processes have the last one."""
        return not self._left and not self._old

    async def can_advance(self, broker: Broker) -> bool:
        """Whether nothing that is to be handled needs a key that the next keyring has not."""
        if self._old or not self._left:
            return False
        gone = set(self._ids.split(",")) - set(self._left[0].split(","))
        return not any(use.key in gone and any(getattr(use, kind) for kind in NEEDED) for use in await key_uses(broker))


async def key_uses(broker: Broker) -> list[KeyUse]:
    """Which keys the two topics need, and where."""
    topics = [await broker.topics.existing(name) for name in TOPICS]
    return [use for topic in topics for use in await KeyStatus(broker.client, broker.keys, topic).run()]


class BodiesRun:
    """One run: its processes, its faults, its verdict."""

    def __init__(self, job: BodiesJob, seed: int) -> None:
        self._job = job
        self._random = random.Random(seed)
        self._processes: dict[str, Process] = {}
        self._excused: dict[int, str] = {}
        self._rotation = Rotation(job) if job.rotates else None
        self._starts = 0
        self.swept = 0

    async def play(self, faults: int, pause: float) -> list[str]:
        """Publish, break, mend, wait and judge. `pause`: seconds of each fault, on average. Returns what is wrong."""
        self._job.switch.write_text("")
        self._job.ledger.touch()
        try:
            async with self._job.broker() as broker:
                for topic in TOPICS:
                    await broker.topics.ensure(topic)
                self._processes = {role: self._start(role) for role in ("work", "work 2", "publish")}
                ledger = EventLedger(self._job.ledger)
                await until(ledger.commits, "the first message is handled")
                sweeps = asyncio.create_task(self._sweep(broker))
                for turn in range(faults):
                    self._break(turn)
                    await self._rotate(broker)
                    await asyncio.sleep(pause * (0.5 + self._random.random()))
                for _ in range(MOST_TURNS):
                    if self._rotation is None or self._rotation.is_over:
                        break
                    self._job.switch.write_text("")
                    await self._rotate(broker)
                    await asyncio.sleep(pause)
                self._job.switch.write_text("")
                wanted = {(f"{topic} {key}", n) for key, n in self._job.names for topic in TOPICS}
                with suppress(AssertionError):  # the verdict says what is missing
                    await until(lambda: wanted <= ledger.commits() or sweeps.done(), "all is handled", 60 + faults)
                if sweeps.done():
                    sweeps.result()
                sweeps.cancel()
                await self._stop()
                return [*self._judge(wanted), *await self._unused(broker), *await self._left(broker)]
        finally:
            for process in self._processes.values():
                process.kill()
                process.wait()

    def _break(self, turn: int) -> None:
        """The store does something wrong, and in every other turn a process is killed while it does so."""
        if turn % 2 == 0:
            self._job.switch.write_text(MODES[turn // 2 % len(MODES)])
            return
        self._kill(self._random.choice([role for role, each in self._processes.items() if each.poll() is None]))

    def _kill(self, role: str) -> None:
        """Kill a process, and start another one in its place."""
        self._processes[role].kill()
        self._processes[role].wait()
        self._excused[self._processes[role].pid] = "killed"
        self._processes[role] = self._start(role)

    def _start(self, role: str) -> Process:
        """The clock of a publisher is ahead, and behind after each other start."""
        self._starts += 1
        shift = self._job.shift if role == "publish" else 0
        return start(self._job, role, shift if self._starts % 2 else -shift)

    async def _rotate(self, broker: Broker) -> None:
        """Give one process its next keyring, or write one where all have theirs."""
        if self._rotation is None:
            return
        role = await self._rotation.next_role(broker)
        if role is not None:
            self._kill(role)
        elif await self._rotation.can_advance(broker):
            self._rotation.advance()

    async def _unused(self, broker: Broker) -> list[str]:
        """The keys that no message was encrypted with: then nothing was rotated."""
        if self._rotation is None:
            return []
        written = {use.key for use in await key_uses(broker)}
        unused = [f"no message has the key {each}" for each in ("k1", "k2", "k3") if each not in written]
        return unused if self._rotation.is_over else [*unused, "the rotation did not come to its end"]

    async def _sweep(self, broker: Broker) -> None:
        bodies = bodies_of(broker, KEEP)
        while True:
            with suppress(BrokerError):
                self.swept += sum(each.removed for each in await bodies.sweep())
            await asyncio.sleep(0.2)

    async def _stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        await until(lambda: all(each.poll() is not None for each in self._processes.values()), "they end")

    def _judge(self, wanted: set[Name]) -> list[str]:
        history = History(wanted, events=EventLedger(self._job.ledger).read(), excused=self._excused)
        return list(map(str, check(history).faults))

    async def _left(self, broker: Broker) -> list[str]:
        """Dead letters, names without a body, and bodies without a name."""
        wrong, bodies = list[str](), bodies_of(broker, timedelta(0))
        for name in TOPICS:
            topic = await broker.topics.existing(name)
            wrong += [f"a dead letter: {each}" async for each in broker.dead_letters.iterate(topic, GROUP)]
        wrong += [f"no body: {name}" for each in await bodies.status() for name in each.lost]
        for name in TOPICS:
            for number in (await broker.topics.existing(name)).numbers:
                await broker.client.execute_command("XTRIM", broker.keys.stream(name, number), "MAXLEN", 0)
        for _ in range(2):
            await bodies.sweep()
        root = Path(self._job.folder, "bodies", await deployment_id(broker.client, broker.keys))
        left = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
        return [*wrong, *(f"left in the store: {name}" for name in sorted(left - {"clock", "store"}))]


def bodies_of(broker: Broker, keep: timedelta) -> Bodies:
    """A sweep that waits no hour."""
    offload = broker.encoding.bodies
    assert offload is not None
    return Bodies(broker.client, broker.keys, broker.topics, offload, keep=keep, grace=timedelta(0))


def main() -> None:
    """One of the processes, or the whole run."""
    if len(sys.argv) == 3 and sys.argv[1] in ("work", "work 2", "publish"):
        job = BodiesJob(**json.loads(sys.argv[2]))
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
        body_module.FRESH_SECONDS = FRESH  # type: ignore[misc]
        hang_in_writes(FaultyStore(job))
        asyncio.run(publish(job) if sys.argv[1] == "publish" else work(job))
        return
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--messages", type=int, default=200, help="of each of five keys, and as many delayed ones")
    words.add_argument("--faults", type=int, default=40)
    words.add_argument("--pause", type=float, default=0.5, help="seconds of each fault, on average")
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--rotate", action="store_true", help="encrypt, and rotate three keys")
    words.add_argument("--shift", type=int, default=0, help="hours by which the publisher's clock is off")
    words.add_argument("--publish-pause", type=float, default=0.0, help="seconds between two messages of a key")
    given = words.parse_args()
    begun, server = time.monotonic(), ThrowawayServer().start()
    folder = tempfile.mkdtemp(prefix="rsmq-bodies-")
    try:
        about = (given.publish_pause, given.rotate, given.shift)
        run = BodiesRun(BodiesJob(server.url, "rsmq", folder, given.messages, *about), given.seed)
        wrong = asyncio.run(run.play(given.faults, given.pause))
    finally:
        server.close()
    took = time.monotonic() - begun
    count = given.messages * (KEYS + 1)
    print(f"{count} messages twice, {given.faults} faults, {run.swept} swept, {took:.0f} s: {len(wrong)} wrong")
    print(*wrong[:20], f"the ledger and the log are in {folder}", sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
