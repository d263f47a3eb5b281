"""`python -m tests.chaos.batches_run --batches 10000 --members 100`: SIGKILL of workers and publishers, and a verdict.

Two worker processes handle the members: some fail and are tried again, some are rejected, some add a member. A third
process publishes the batches; when it was killed, the next one resumes. The verdict reads the callback topic: one
callback for each batch, and each says that all its members have ended, with the numbers that the payloads foretell.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from tenacity import wait_fixed

from rsmq import BatchEnded, BatchExists, Broker, Message, Reject, RetryPolicy, Settings
from rsmq.redis.streams import ensure_groups
from rsmq.testing.server import ThrowawayServer

AT_ONCE: Final = 20
"""Batches that are published at the same time."""


def settings(url: str) -> Settings:
    """Of all processes."""
    return Settings(url=url, partitions=4, lease_ttl=timedelta(seconds=2), preflight="warn")


def expected(members: int) -> dict[str, int]:
    """What the callback of a batch says: a tenth is rejected, and each fifth member adds one."""
    failed = len(range(3, members, 10))
    added = len([number for number in range(0, members, 5) if number % 10 != 3])
    total = members + added
    return {"total": total, "done": total - failed, "failed": failed, "cancelled": 0, "expired": 0, "missing": 0}


async def work(url: str) -> None:
    """A worker, until it is killed or SIGTERM."""
    broker, tried = Broker(settings(url)), set[str]()

    @broker.handler("sms", group="sender", retry=RetryPolicy(max_attempts=50, wait=wait_fixed(0.05)), concurrency=16)
    async def send(number: int, message: Message) -> None:
        await asyncio.sleep(random.random() / 200)
        if number % 10 == 3:
            raise Reject("no such number")
        if number % 7 == 2 and message.id not in tried:
            tried.add(message.id)
            raise OSError("once more")
        if number >= 0 and number % 5 == 0:
            assert message.batch is not None
            await message.batch.publish("sms", -1, key=message.key)

    await broker.run()


async def publish(url: str, batches: int, members: int) -> None:
    """Publish all batches, each that was begun by a publisher before it again."""
    broker, limit = Broker(settings(url)), asyncio.Semaphore(AT_ONCE)

    async def one(name: str) -> None:
        async with limit:
            for resume in (False, True):
                status = await broker.find_batch(name) if resume else None
                if status is not None and status.ended is not None:
                    return
                with suppress(BatchExists, BatchEnded):
                    async with broker.batch(name, group="sender", on_complete="reports", resume=resume) as batch:
                        for number in range(members):
                            about = {"key": f"{name}-{number % 50}", "message_id": f"{name}-{number}"}
                            await batch.publish("sms", number, **about)
                    return

    async with broker:
        await asyncio.gather(*[one(f"b{number}") for number in range(batches)])


def start(url: str, *words: object) -> subprocess.Popen[bytes]:
    """A process of this module."""
    command = [sys.executable, "-m", "tests.chaos.batches_run", "--url", url, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def callbacks(broker: Broker) -> list[dict[str, Any]]:
    """The payloads of all callbacks."""
    topic = await broker.topics.ensure("reports")
    found = list[dict[str, Any]]()
    for number in topic.numbers:
        for _, fields in await broker.client.execute_command("XRANGE", broker.keys.stream("reports", number), "-", "+"):
            found.append(json.loads(fields[1]))
    return found


async def stored(broker: Broker) -> int:
    """How many callbacks there are."""
    topic = await broker.topics.ensure("reports")
    return sum([await broker.client.xlen(broker.keys.stream("reports", number)) for number in topic.numbers])


def judge(found: Sequence[dict[str, Any]], batches: int, members: int) -> list[str]:
    """What is wrong."""
    wanted, seen = expected(members), Counter(each["batch"] for each in found)
    wrong = [f"{name}: {seen[name]} callbacks" for name in (f"b{n}" for n in range(batches)) if seen[name] != 1]
    for each in found:
        if {name: each[name] for name in wanted} != wanted or each["state"] != "complete":
            wrong.append(f"{each}, and not {wanted}")
    return wrong


async def run(
    batches: int, members: int, kills: int, seed: int, patience: float = 300.0, pause: float = 0.45
) -> list[str]:
    """Publish, kill, wait for the callbacks, and judge. `pause`: seconds between kills. Returns what is wrong."""
    chance = random.Random(seed)
    server = ThrowawayServer().start()
    processes = dict[str, subprocess.Popen[bytes]]()
    try:
        broker = Broker(settings(server.url))
        async with broker:
            await ensure_groups(broker.client, broker.keys, await broker.topics.ensure("sms"), "sender")
            what: dict[str, tuple[object, ...]] = {
                "worker 1": ("--work",), "worker 2": ("--work",),
                "publisher": ("--publish", "--batches", batches, "--members", members),
            }  # fmt: skip
            processes |= {name: start(server.url, *words) for name, words in what.items()}
            ends = time.monotonic() + patience
            while time.monotonic() < ends:
                await asyncio.sleep(pause * (0.5 + chance.random()))
                if await stored(broker) >= batches and not kills:
                    break
                name = chance.choice(sorted(processes))
                is_over = name == "publisher" and processes[name].poll() == 0
                if kills and not is_over:
                    kills -= 1
                    processes[name].send_signal(signal.SIGKILL)
                    processes[name].wait()
                    processes[name] = start(server.url, *what[name])
            await asyncio.sleep(1)  # for a callback too many
            return judge(await callbacks(broker), batches, members)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
        server.close()


def main() -> None:
    """One of the processes, or the whole run."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--batches", type=int, default=100)
    words.add_argument("--members", type=int, default=100)
    words.add_argument("--kills", type=int, default=20)
    words.add_argument("--pause", type=float, default=0.45, help="seconds between kills")
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--patience", type=float, default=3600)
    words.add_argument("--url", default="")
    words.add_argument("--work", action="store_true")
    words.add_argument("--publish", action="store_true")
    given = words.parse_args()
    if given.work:
        logging.disable(logging.CRITICAL)
        asyncio.run(work(given.url))
    elif given.publish:
        asyncio.run(publish(given.url, given.batches, given.members))
    else:
        begun = time.monotonic()
        wrong = asyncio.run(run(given.batches, given.members, given.kills, given.seed, given.patience, given.pause))
        took = time.monotonic() - begun
        print(f"{given.batches} batches of {given.members}, {given.kills} kills, {took:.0f} s: {len(wrong)} wrong")
        print(*wrong[:20], sep="\n")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
