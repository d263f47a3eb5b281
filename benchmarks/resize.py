"""How long a publish waits while its topic is resized: `python -m benchmarks.resize` prints the seconds around it.

This process publishes at a steady rate, a hundred calls each hundredth of a second, with a broker that does not know
the resize; another process resizes the topic from 4 to 8 partitions in the middle, and a worker there handles all.
Each call is timed from the moment at which it was due, so a process that stands still counts, too. Beside it: the
same seconds without a resize. With `--cluster` the topic is on a cluster of six nodes. With `--moves key-by-key`, or
`at-once` (as Valkey 9 can), slots of the topic and of its partitions move to other nodes meanwhile, one after the
other: also printed is how long publishes wait that are due while one moves. A publish to a slot that moves key by key
waits until it has moved, so that depends on how much is in it.

With `--hot 100000` so many messages of one key wait instead, and their handler does not end. Three members serve the
topic while it grows from 2 to 12 partitions. Printed is how long messages of other keys wait that are published then.
With more than `RSMQ_READ_AHEAD` (100 000) the old partition is not read to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any, Final

from rsmq import Broker, Message, Settings
from rsmq.model.keys import Keys
from rsmq.testing.server import ThrowawayServer

TICK: Final = 0.01
SECONDS: Final = 4
"""By default."""
BETWEEN_MOVES: Final = 0.3
"""Seconds."""
MEMBERS: Final = 3
OTHERS: Final = 1000
CHUNK: Final = 1000
AROUND: Final = 0.5
"""Seconds before and after the resize that count as around it."""


def settings(url: str) -> Settings:
    """Of both processes."""
    return Settings(url=url, preflight="warn", partitions=4)


async def work(url: str, ready: Any, go: Any, done: Any, seconds: float) -> None:
    """A worker that resizes when `go` is set, and puts into `done` when it has begun and ended."""
    broker = Broker(settings(url))

    @broker.handler("in", group="g", batch=500)
    async def handle(_: list[Message]) -> None:
        """Nothing: the wait of publishers is measured."""

    async with broker, broker.running():
        ready.set()
        while not await asyncio.to_thread(go.wait, 0.01):
            pass
        begun = time.time()
        await broker.topics.resize("in", 8)
        while (await broker.topics.existing("in")).partitions != 8:
            await asyncio.sleep(0.01)
        done.put((begun, time.time()))
        await asyncio.sleep(seconds)


def other(url: str, ready: Any, go: Any, done: Any, seconds: float) -> None:
    """The other process."""
    asyncio.run(work(url, ready, go, done, seconds))


async def publish(url: str, rate: int, go: Any, seconds: float) -> list[tuple[float, float]]:
    """When each call was due, and how long after that it was stored. The resize begins in the middle."""
    broker, found = Broker(settings(url)), list[tuple[float, float]]()

    async def one(due: float, number: int) -> None:
        await broker.publish("in", number, key=str(number % 1000))
        found.append((due, time.time() - due))

    async with broker, asyncio.TaskGroup() as tasks:
        await broker.publish("in", 0, key="0")
        begun, number = time.time(), 0
        for tick in range(int(seconds / TICK)):
            due = begun + tick * TICK
            await asyncio.sleep(max(0.0, due - time.time()))
            if tick == int(seconds / TICK / 2):
                go.set()
            for _ in range(int(rate * TICK)):
                number += 1
                tasks.create_task(one(due, number))
    return found


@contextmanager
def moving(cluster: Any, how: str) -> Iterator[list[tuple[float, float]]]:
    """Slots move meanwhile: yields when each move has begun and ended."""
    keys, stop, moves = Keys("rsmq"), threading.Event(), list[tuple[float, float]]()
    names = itertools.cycle([keys.topic("in"), *[keys.stream("in", number) for number in range(4)]])

    def move() -> None:
        while not stop.wait(BETWEEN_MOVES):
            begun = time.time()
            (cluster.migrate if how == "key-by-key" else cluster.migrate_at_once)(next(names))
            moves.append((begun, time.time()))

    mover = threading.Thread(target=move)
    if how:
        mover.start()
    try:
        yield moves
    finally:
        stop.set()
        if how:
            mover.join()


async def behind_hot_key(url: str, count: int) -> tuple[float, list[float]]:
    """Seconds until all messages of the hot key are read, and of each message that is published after the resize until
    it is handled."""
    begun, waits, stays = dict[str, float](), list[float](), asyncio.Event()
    brokers = [Broker(Settings(url=url, preflight="warn", partitions=2)) for _ in range(MEMBERS)]

    async def handle(name: str, message: Message) -> None:
        if message.key == "hot":
            await stays.wait()
        elif name in begun:
            waits.append(time.monotonic() - begun[name])

    for each in brokers:
        each.handler("in", group="g", concurrency=16)(handle)
    async with AsyncExitStack() as running:
        for each in brokers:
            await running.enter_async_context(each)
        members = [await running.enter_async_context(each.running()) for each in brokers]
        consumers = [each.worker.consumers[0] for each in members if each.worker is not None]
        began, broker = time.monotonic(), brokers[0]
        for at in range(0, count, CHUNK):
            chunk = range(at, min(count, at + CHUNK))
            await broker.publish_many("in", [str(number) for number in chunk], key=lambda _: "hot")
        wanted = min(count - 1, broker.settings.read_ahead)  # what is beyond that stays unread
        while sum(sum(each.queue.behind_keys(each.lanes.values()).values()) for each in consumers) < wanted:
            await asyncio.sleep(0.05)
        read = time.monotonic() - began
        await broker.topics.resize("in", 12)
        while (await broker.topics.existing("in")).partitions != 12:
            await asyncio.sleep(0.01)
        for number in range(OTHERS):
            begun[str(number)] = time.monotonic()
            await broker.publish("in", str(number), key=f"k{number}")
        while len(waits) < OTHERS:
            await asyncio.sleep(0.01)
        stays.set()
        for each in brokers:
            each.stop()
    return read, waits


def percentiles(waits: list[float]) -> str:
    """In milliseconds."""
    ordered = sorted(waits)
    p50, p99, most = (ordered[min(len(ordered) - 1, int(len(ordered) * part))] for part in (0.5, 0.99, 1.0))
    return f"p50 {p50 * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms, most {most * 1000:.1f} ms ({len(ordered)} calls)"


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resize", description=__doc__)
    parser.add_argument("--rate", type=int, default=10_000, help="messages a second")
    parser.add_argument("--hot", type=int, default=0, help="so many messages of one key wait instead")
    parser.add_argument("--cluster", action="store_true", help="on a cluster of six nodes")
    parser.add_argument("--moves", choices=("key-by-key", "at-once"), default="", help="its slots move meanwhile")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    chosen = parser.parse_args()
    if chosen.moves and not chosen.cluster:
        parser.error("--moves needs --cluster")
    with ExitStack() as stack:
        cluster = None
        if chosen.cluster:
            from tests.cluster.cluster import Cluster

            cluster = stack.enter_context(Cluster())
            url = cluster.url
        else:
            url = stack.enter_context(ThrowawayServer()).url
        if chosen.hot:
            read, waits = asyncio.run(behind_hot_key(url, chosen.hot))
            print(f"{chosen.hot} messages of one key wait, read in {read:.1f} s as far as they may; 2 to 12 partitions")
            print(f"messages of other keys: {percentiles(waits)}")
            return
        spawn = multiprocessing.get_context("spawn")
        ready, go, done = spawn.Event(), spawn.Event(), spawn.Queue()
        process = spawn.Process(target=other, args=(url, ready, go, done, chosen.seconds), daemon=True)
        process.start()
        ready.wait()
        with moving(cluster, chosen.moves) as moves:
            found = asyncio.run(publish(url, chosen.rate, go, chosen.seconds))
        begun, ended = done.get()
        process.join()
    around = [wait for due, wait in found if begun - AROUND < due < ended + AROUND]
    rest = [wait for due, wait in found if not begun - AROUND < due < ended + AROUND]
    print(f"{chosen.rate} messages a second, from 4 to 8 partitions in {(ended - begun) * 1000:.0f} ms")
    print(f"around it: {percentiles(around)}")
    print(f"without:   {percentiles(rest)}")
    if moves:
        during = [wait for due, wait in found if any(first < due < last for first, last in moves)]
        spent = sum(last - first for first, last in moves)
        print(f"{len(moves)} slots moved in {spent * 1000 / len(moves):.0f} ms each; meanwhile: {percentiles(during)}")
        print(f"all:       {percentiles([wait for _, wait in found])}")


if __name__ == "__main__":
    main()
