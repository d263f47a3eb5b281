"""`python -m benchmarks.fairness [--waiting N] [--only TEXT]`: how long others wait for one key that has a backlog.

Each row is measured with and without reading ahead (`RSMQ_READ_AHEAD=0` is first in, first out), in one run, on a
server of its own. Throughput is compared with that of a run without the hot key.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.lending import show_limits
from benchmarks.tenants import show_tenants
from rsmq.broker import Broker
from rsmq.errors import BrokerError
from rsmq.handler.rate_limit import Rate
from rsmq.model.message import Message
from rsmq.model.partition import partition_for
from rsmq.model.settings import Settings
from rsmq.testing import ThrowawayServer

WORK: Final = 0.005
"""Seconds that the handler of a hot message works."""
PARTITIONS: Final = 8
OTHERS: Final = 5000
LONGEST: Final = 20.0
"""Seconds after which a measurement gives up."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    goal: str
    fifo: str
    flows: str

    def __str__(self) -> str:
        return f"| {self.what} | {self.fifo} | {self.flows} | {self.goal} |"


class Scene:
    """A broker with a handler: messages of the key `hot` take `WORK`, others return at once."""

    def __init__(self, server: ThrowawayServer, prefix: str, read_ahead: int, **options: Any) -> None:
        self.broker = Broker(Settings(url=server.url, prefix=prefix, read_ahead=read_ahead, partitions=PARTITIONS))
        self.waits: dict[str, float] = {}
        self.done = self.hot = 0
        options.setdefault("concurrency", 16)
        self.broker.handler("t", group="g", **options)(self.handle)

    async def handle(self, order: dict[str, Any], message: Message) -> None:
        if order["k"].startswith("hot"):
            self.hot += 1
            await asyncio.sleep(WORK)
        else:
            self.done += 1
            self.waits[order["k"]] = time.monotonic() - order["at"]

    async def publish(self, keys: list[str], **options: Any) -> None:
        """A message of each key."""
        now = time.monotonic()
        items = [{"k": key, "at": now} for key in keys]
        for at in range(0, len(items), 5000):
            await self.broker.publish_many("t", items[at : at + 5000], key=lambda item: item["k"], **options)

    @property
    def far(self) -> int:
        """How many wait as ids."""
        consumers = self.broker.worker.consumers if self.broker.worker else ()
        return sum(each.queue.far(each.lanes.values()) for each in consumers)

    async def until(self, is_true: Callable[[], bool], seconds: float = LONGEST) -> bool:
        """Whether it came true in time."""
        end = time.monotonic() + seconds
        while not is_true() and time.monotonic() < end:
            await asyncio.sleep(0.002)
        return is_true()

    async def settles(self, waiting: int) -> None:
        """The worker has read what it reads of a backlog."""
        seen = -1
        while seen != self.far and self.far < waiting - 3000:
            seen = self.far
            await asyncio.sleep(0.5)


async def other_partitions(server: ThrowawayServer, prefix: str, read_ahead: int, waiting: int) -> str:
    """The share of the rate of other partitions that is left while a key has a backlog."""
    rates = []
    home = partition_for("hot", PARTITIONS)
    keys = [key for key in (f"k{n}" for n in range(8 * OTHERS // 7 + 800)) if partition_for(key, PARTITIONS) != home]
    for hot in (0, waiting):
        scene = Scene(server, f"{prefix}{hot}", read_ahead)
        async with scene.broker:
            await scene.publish(["hot"] * hot)
        async with scene.broker.running():
            await scene.settles(hot)
            began = time.monotonic()
            await scene.publish(keys[:OTHERS])
            await scene.until(lambda: scene.done >= OTHERS)  # noqa: B023
            rates.append(scene.done / (time.monotonic() - began))
    return f"{100 * rates[1] / rates[0]:.0f} %"


async def same_partition(server: ThrowawayServer, prefix: str, read_ahead: int, waiting: int) -> str:
    """The longest wait of twenty messages of other keys of the partition, published after it has settled."""
    scene = Scene(server, prefix, read_ahead)
    home = partition_for("hot", PARTITIONS)
    keys = [key for key in (f"k{n}" for n in range(400)) if partition_for(key, PARTITIONS) == home][:20]
    async with scene.broker:
        await scene.publish(["hot"] * waiting)
    async with scene.broker.running():
        await scene.settles(waiting)
        await scene.publish(keys)
        is_all = await scene.until(lambda: scene.done == len(keys))
    return f"{max(scene.waits.values()):.2f} s" if is_all else f"> {LONGEST:.0f} s"


async def by_a_name(server: ThrowawayServer, prefix: str, read_ahead: int, waiting: int, keys: int = 500) -> str:
    """One message of a quiet name behind a noisy one whose rate is used up, of so many keys."""
    rate = Rate(500, per="1s", by=lambda message: message.headers["tenant"])
    scene = Scene(server, prefix, read_ahead, rate=rate)
    async with scene.broker:
        await scene.publish([f"hot{n % keys}" for n in range(waiting)], headers={"tenant": "noisy"})
    async with scene.broker.running():
        await scene.settles(waiting)
        await scene.publish(["quiet"], headers={"tenant": "quiet"})
        is_all = await scene.until(lambda: scene.done == 1)
    return f"{scene.waits['quiet']:.2f} s" if is_all else f"> {LONGEST:.0f} s"


async def by_a_name_of_different_keys(server: ThrowawayServer, prefix: str, read_ahead: int, waiting: int) -> str:
    """The same where no two messages have the same key."""
    return await by_a_name(server, prefix, read_ahead, waiting, keys=waiting)


async def take_over(server: ThrowawayServer, prefix: str, read_ahead: int, waiting: int) -> str:
    """From the kill of a worker with a backlog of ids to the first message of its successor, beyond one without."""
    spans = []
    for hot in (1, waiting):
        name = f"{prefix}{hot}"
        scene = Scene(server, name, read_ahead)
        async with scene.broker:
            await scene.publish(["hot"] * hot)
        options = ("-m", "benchmarks.fairness", "--serve", f"{server.url} {name} {read_ahead}")
        child = await asyncio.create_subprocess_exec(sys.executable, *options)
        successor = Scene(server, name, read_ahead)
        async with successor.broker as broker:
            stream, pending, before = broker.keys.stream("t", partition_for("hot", PARTITIONS)), 0, -1
            while pending < min(hot, waiting - 3000) and (pending != before or not pending):
                before, _ = pending, await asyncio.sleep(2)
                with suppress(BrokerError):  # the worker makes the group
                    pending = (await broker.client.execute_command("XPENDING", stream, "g"))[0]
        child.kill()
        await child.wait()
        async with successor.broker.running():
            began = time.monotonic()
            home = partition_for("hot", PARTITIONS)
            keys = [key for key in (f"k{n}" for n in range(400)) if partition_for(key, PARTITIONS) == home]
            await successor.publish(keys[:8])
            await successor.until(lambda: successor.done == 8)  # noqa: B023
            spans.append(time.monotonic() - began)
    return f"{spans[1] - spans[0]:+.2f} s"


def rss() -> float:
    """Memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def memory_while_waiting(scene: Scene, waiting: int) -> str:
    """MB of the member and of the server above their bases, once the member has read all that it reads."""
    async with scene.broker:
        published = await server_memory(scene)
    async with scene.broker.running():
        await asyncio.sleep(0.2)
        base, seen, since = rss(), -1, time.monotonic()
        while scene.far < 0.98 * waiting and time.monotonic() - since < LONGEST:
            if scene.far > seen:
                seen, since = scene.far, time.monotonic()
            await asyncio.sleep(0.5)
        while any(lane.flows.aside for each in scene.broker.worker.consumers for lane in each.lanes.values()):  # type: ignore[union-attr]
            await asyncio.sleep(0.5)
        server = await server_memory(scene) - published
        return f"{rss() - base:.0f} MB, server {server:.0f} MB, with {scene.far:,}"


async def server_memory(scene: Scene) -> float:
    """What the server has in use, in MB."""
    info = await scene.broker.client.execute_command("INFO", "memory")
    used = info["used_memory"] if isinstance(info, dict) else re.search(r"used_memory:(\d+)", decoded(info))[1]  # type: ignore[index]
    return int(used) / 1e6


def decoded(text: str | bytes) -> str:
    """A reply as text."""
    return text if isinstance(text, str) else text.decode()


async def memory(server: ThrowawayServer, prefix: str, read_ahead: int, waiting: int) -> str:
    """MB that a member with so many waiting in eight partitions has above its base."""
    scene = Scene(server, prefix, read_ahead)
    homes: dict[int, str] = {}
    for n in range(200):
        homes.setdefault(partition_for(f"hot{n}", PARTITIONS), f"hot{n}")
    async with scene.broker:
        for _ in range(8 * waiting // 5000 // 8):
            await scene.publish([homes[n % PARTITIONS] for n in range(5000)])
    return await memory_while_waiting(scene, waiting)


class Campaign:
    """The topic `sms`: campaign messages take `seconds` each, or with `spread` up to that share more or less; one-time
    passwords note how long they waited."""

    def __init__(
        self,
        server: ThrowawayServer,
        prefix: str,
        seconds: float,
        *,
        has_bands: bool,
        spread: float = 0.0,
        **options: Any,
    ) -> None:
        self._spread, self._random = spread, random.Random(7)
        self.broker = Broker(Settings(url=server.url, prefix=prefix, partitions=PARTITIONS))
        self.sms = self.broker.topic("sms", dict[str, Any], bands=("urgent", "normal", "bulk") if has_bands else ())
        self.bulk, self.urgent = ("bulk", "urgent") if has_bands else (None, None)
        self.seconds, self.started, self.waits = seconds, 0, list[float]()
        self.sms.handler(group="provider", concurrency=16, **options)(self.send)

    async def send(self, sms: dict[str, Any]) -> None:
        if "at" in sms:
            self.waits.append(time.monotonic() - sms["at"])
            return
        self.started += 1
        await asyncio.sleep(self.seconds * self._random.uniform(1 - self._spread, 1 + self._spread))

    async def fill(self, number: int) -> None:
        for at in range(0, number, 5000):
            items: list[dict[str, Any]] = [{"n": n} for n in range(at, min(number, at + 5000))]
            await self.sms.publish_many(items, key=lambda item: f"u{item['n']}", band=self.bulk)

    async def passwords(self, number: int, seconds: float) -> bool:
        """Publish so many, one every ten milliseconds; whether all were handled in time."""
        for at in range(number):
            await self.sms.publish({"at": time.monotonic()}, key=f"p{at}", band=self.urgent)
            await asyncio.sleep(0.01)
        end = time.monotonic() + seconds
        while len(self.waits) < number and time.monotonic() < end:
            await asyncio.sleep(0.001)
        return len(self.waits) >= number


async def behind_a_campaign(
    server: ThrowawayServer, prefix: str, bands: int, waiting: int, spread: float = 0.5, **options: Any
) -> str:
    """The 99th percentile of one-time passwords behind a campaign, beside that without one. Its handlers take as long
    as the answers of a provider do, half of `WORK` more or less: a slot is free soon."""
    found = []
    for number in (0, waiting):
        scene = Campaign(server, f"{prefix}{number}", WORK, has_bands=bands > 0, spread=spread, **options)
        async with scene.broker:
            await scene.fill(number)
        async with scene.broker.running():
            while scene.started < min(number, 1000):
                await asyncio.sleep(0.01)
            if not await scene.passwords(300, LONGEST):
                return f"> {LONGEST:.0f} s"
        found.append(1000 * sorted(scene.waits)[int(0.99 * len(scene.waits))])
    return f"{found[1]:.1f} ms, {found[1] / found[0]:.1f} × idle"


async def behind_equal_handlers(server: ThrowawayServer, prefix: str, bands: int, waiting: int) -> str:
    """The same where each takes exactly as long: soon all slots begin and end together, and none is free for `WORK`."""
    return await behind_a_campaign(server, prefix, bands, waiting, spread=0)


async def behind_equal_handlers_with_a_slot(server: ThrowawayServer, prefix: str, bands: int, waiting: int) -> str:
    """The same with a slot that only passwords may take."""
    options: dict[str, Any] = {"reserve": {"urgent": 1}} if bands else {}
    return await behind_a_campaign(server, prefix, bands, waiting, spread=0, **options)


async def behind_long_handlers(server: ThrowawayServer, prefix: str, bands: int, waiting: int) -> str:
    """The wait of a one-time password while every other slot runs a handler of a minute."""
    options: dict[str, Any] = {"reserve": {"urgent": 1}} if bands else {}
    scene = Campaign(server, prefix, 60, has_bands=bands > 0, **options)
    async with scene.broker:
        await scene.fill(min(waiting, 5000))
    async with scene.broker.running():
        while scene.started < 16 - len(options):
            await asyncio.sleep(0.01)
        if not await scene.passwords(20, 5):
            return "a whole handler"
        scene.broker.worker.stop(0)  # type: ignore[union-attr]
    return f"{1000 * max(scene.waits):.0f} ms"


async def memory_of_keys(server: ThrowawayServer, prefix: str, read_ahead: int, waiting: int) -> str:
    """The same where all keys differ, and wait for the rate of one name."""
    scene = Scene(server, prefix, read_ahead, rate=Rate(1, per="1h", by=lambda _: "all"))
    async with scene.broker:
        for at in range(0, waiting, 5000):
            await scene.publish([f"hot{n}" for n in range(at, at + 5000)])
    return await memory_while_waiting(scene, waiting)


Measure = Callable[[ThrowawayServer, str, int, int], Awaitable[str]]
ROWS: Final[tuple[tuple[str, str, Measure, int], ...]] = (
    ("rate of 5 000 messages of other partitions, of that without the hot key", "≥ 90 %", other_partitions, 1),
    ("longest wait of 20 other keys of the same partition", "≤ 0.2 s", same_partition, 1),
    ("one message of a quiet name behind a noisy one, whose rate is used up", "≤ 1 s", by_a_name, 1),
    ("the same, of different keys", "≤ 1 s", by_a_name_of_different_keys, 1),
    ("take-over, beyond that of one with nothing waiting", "≤ 1 s", take_over, 1),
    ("memory of a member, eight hot keys", "≤ 60 MB for 800 000", memory, 8),
    ("memory of a member, all keys differ", "≤ 120 MB for 800 000", memory_of_keys, 8),
    ("p99 of a one-time password behind a campaign (bands)", "≤ 2 × idle", behind_a_campaign, 1),
    ("the same, all handlers take exactly as long (bands)", "≤ 2 × idle + a handler", behind_equal_handlers, 1),
    ("the same, with a reserved slot (bands)", "≤ 2 × idle", behind_equal_handlers_with_a_slot, 1),
    ("the same, all slots in handlers of a minute, one reserved (bands)", "at once", behind_long_handlers, 1),
)


async def serve(where: str) -> None:
    """The worker that is killed: its handler of a hot message never ends."""
    url, prefix, read_ahead = where.split()
    broker = Broker(Settings(url=url, prefix=prefix, partitions=PARTITIONS, read_ahead=int(read_ahead)))

    @broker.handler("t", group="g", concurrency=16)
    async def handle(_order: dict[str, Any]) -> None:
        await asyncio.sleep(3600)

    async with broker.running():
        await asyncio.sleep(3600)


async def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description=__doc__)
    parser.add_argument("--waiting", type=int, default=100_000, help="messages of the hot key")
    parser.add_argument("--only", default="", help="rows whose text has this")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    logging.disable(logging.ERROR)
    if chosen.serve:
        await serve(chosen.serve)
        return
    print(f"| with {chosen.waiting:,} waiting | first in, first out | flows | goal |\n|---|--:|--:|--:|")
    for what, goal, measure, factor in ROWS:
        if chosen.only in what:
            results = []
            for read_ahead in (0, 100_000):
                with ThrowawayServer(tcp=True) as server:
                    results.append(await measure(server, "b", read_ahead, factor * chosen.waiting))
            print(Row(what, goal, *results), flush=True)
    await show_limits(chosen.only)
    await show_tenants(chosen.only, chosen.waiting)


if __name__ == "__main__":
    asyncio.run(main())
