"""`python -m benchmarks.waiting [--rounds N] [--quick] [--write]`: how long a message waits, and what a start costs.

- Latency at a steady rate beside the bare redis-py loop. Another process publishes; a message counts from the moment
  when it was due, so a publisher or reader that falls behind shows.
- Take-over: from the SIGKILL of a worker until its partitions have another owner, each at a random moment.
- The start: `import rsmq`, and the memory of a worker that waits.

With --write into benchmarks/results and docs/benchmarks.md. Linux only: the clock is compared between processes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any, Final

import redis
import redis.asyncio
from pydantic_core import from_json
from rich.progress import Progress

from benchmarks.footprint import resident
from benchmarks.peers.results import machine
from benchmarks.section import ROOT, Section
from benchmarks.server import server
from benchmarks.table import mib, table
from rsmq import Broker, Settings
from rsmq.model.keys import Keys

RATES: Final = (200, 5_000, 30_000)
TOPIC, GROUP, PARTITIONS = "waiting", "bench", 8
WARM: Final = 0.2
"""This part of the messages comes first and does not count: connections, imports."""
TICK: Final = 0.001
PAD: Final = "x" * 150
SITUATIONS: Final = {"sibling": ("--processes", "2"), "elsewhere": ()}
"""Who is there to take over: a process of the same `rsmq worker`, or another `rsmq worker`, which no parent tells."""


# -- latency ----------------------------------------------------------------------------------------------------------


def publish_steadily(url: str, streams: Sequence[str], rate: int, count: int) -> None:
    """Publish what is due at each tick, in one pipeline. Payloads say when they were due."""
    client = redis.Redis.from_url(url, protocol=2)
    began, sent = time.perf_counter() + 0.2, 0
    while sent < count:
        time.sleep(max(0.0, began + sent / rate - time.perf_counter(), TICK if rate > 1 / TICK else 0.0))
        due, pipe = min(count, int((time.perf_counter() - began) * rate) + 1), client.pipeline(transaction=False)
        for number in range(sent, due):
            payload = json.dumps({"n": number, "due": began + number / rate, "pad": PAD})
            pipe.xadd(streams[number % len(streams)], {"data": payload, "id": f"{number:032d}"})
        pipe.execute()
        sent = due


class Delays:
    """Milliseconds between when each message was due and when its handler ran."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._delays: list[tuple[int, float]] = []
        self.finished = asyncio.Event()

    def note(self, payload: dict[str, Any]) -> None:
        """A handler runs."""
        self._delays.append((payload["n"], time.perf_counter() - payload["due"]))
        if len(self._delays) == self._count:
            self.finished.set()

    def summary(self) -> dict[str, float]:
        """Without those of the warm-up."""
        kept = sorted(delay * 1000 for number, delay in self._delays if number >= WARM * self._count)
        return {"p50": kept[len(kept) // 2], "p99": kept[len(kept) * 99 // 100]}


async def read_bare(url: str, streams: Sequence[str], delays: Delays) -> None:
    """XREADGROUP COUNT 100, decode, call, one XACK for each stream that had some."""
    async with redis.asyncio.from_url(url, protocol=2, socket_timeout=None) as client:
        while not delays.finished.is_set():
            reply: Any = await client.xreadgroup(GROUP, "me", dict.fromkeys(streams, ">"), count=100, block=1000)
            for stream, rows in reply:
                for _, fields in rows:
                    delays.note(from_json(fields[b"data"]))
                await client.xack(stream, GROUP, *[entry_id for entry_id, _ in rows])


async def latency(url: str, side: str, rate: int, count: int) -> dict[str, float]:
    """One measurement: the reader in this process, the publisher in another one."""
    ours = Broker(Settings(url=url, prefix=f"waiting-{token_hex(4)}", partitions=PARTITIONS, preflight="warn"))
    delays, streams = Delays(count), [ours.keys.stream(TOPIC, partition) for partition in range(PARTITIONS)]

    @ours.handler(TOPIC, group=GROUP)
    async def note(payload: dict[str, Any]) -> None:
        delays.note(payload)

    async def published() -> None:
        words = [sys.executable, "-m", "benchmarks.waiting", "--publish", json.dumps([url, streams, rate, count])]
        assert await (await asyncio.create_subprocess_exec(*words)).wait() == 0
        await asyncio.wait_for(delays.finished.wait(), 60)

    gc.collect()
    gc.freeze()  # else a full collection visits what this benchmark has imported, which holds up a hundredth
    async with ours:
        if side == "rsmq":
            await ours.topics.ensure(TOPIC, PARTITIONS)
            async with ours.running():
                await published()
        else:
            for stream in streams:
                await ours.client.execute_command("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")
            reading = asyncio.create_task(read_bare(url, streams, delays))
            await published()
            await reading
        await ours.client.execute_command("FLUSHALL")
    return delays.summary()


# -- take-over --------------------------------------------------------------------------------------------------------


class Owners:
    """Who owns the partitions, asked over one connection."""

    def __init__(self, url: str, prefix: str) -> None:
        self._client, keys = redis.Redis.from_url(url, protocol=2, decode_responses=True), Keys(prefix)
        self._leases = [keys.lease(TOPIC, partition, GROUP) for partition in range(PARTITIONS)]

    def now(self) -> list[str]:
        """The owner of each partition; empty where there is none."""
        pipe = self._client.pipeline(transaction=False)
        for lease in self._leases:
            pipe.hget(lease, "owner")
        return [owner or "" for owner in pipe.execute()]

    def await_two(self) -> list[str]:
        """Wait until two members share the partitions evenly, and have done so for a moment."""
        deadline, since, before = time.monotonic() + 60, time.monotonic(), list[str]()
        while time.monotonic() - since < 1.5:
            assert time.monotonic() < deadline, f"the partitions are not shared by two: {before}"
            found = self.now()
            if found != before or sorted(Counter(found).values()) != [PARTITIONS // 2] * 2:
                since, before = time.monotonic(), found
            time.sleep(0.02)
        return before

    def until_left(self, victim: str) -> float:
        """Seconds until each partition has an owner that is not the victim."""
        began = time.perf_counter()
        while True:
            owners = self.now()
            if victim not in owners and all(owners):
                return time.perf_counter() - began
            assert time.perf_counter() - began < 60, f"nobody takes over: {owners}"


@contextmanager
def worker(url: str, prefix: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """An `rsmq worker` of `waiting_worker`."""
    words = [
        sys.executable,
        "-m",
        "rsmq",
        "worker",
        "benchmarks.waiting_worker:broker",
        "--log-level",
        "error",
        *options,
    ]
    surroundings = os.environ | {"RSMQ_URL": url, "RSMQ_PREFIX": prefix, "RSMQ_PREFLIGHT": "warn"}
    process = subprocess.Popen([*words, *options], env=surroundings, cwd=ROOT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(30)


def take_over(url: str, situation: str) -> tuple[float, float]:
    """Milliseconds from a SIGKILL until the other one has all partitions, and MiB of the killed worker before."""
    prefix = f"waiting-{token_hex(4)}"
    owners = Owners(url, prefix)
    with worker(url, prefix, *SITUATIONS[situation]):
        if situation == "sibling":
            return kill_one(owners)
        with worker(url, prefix):
            return kill_one(owners)


def kill_one(owners: Owners) -> tuple[float, float]:
    """Kill one of two members at a random moment."""
    victim = random.choice(owners.await_two())
    time.sleep(random.random())
    pid = int(victim.split("-")[-2])  # of a member id: host, pid, random
    idle = mib(resident(pid))
    os.kill(pid, signal.SIGKILL)
    return owners.until_left(victim) * 1000, idle


# -- all of it --------------------------------------------------------------------------------------------------------


def import_seconds() -> float:
    """Of `import rsmq` in a new process, without the start of Python."""
    code = "import time; began = time.perf_counter(); import rsmq; print(time.perf_counter() - began)"
    return float(subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE).stdout)


def measure(rounds: int, seconds: float) -> dict[str, Any]:
    """Everything, in turn."""
    waits = {(side, rate): list[dict[str, float]]() for rate in RATES for side in ("bare", "rsmq")}
    kills, idle = {situation: list[float]() for situation in SITUATIONS}, list[float]()
    with server() as url, Progress(transient=True) as progress:
        task = progress.add_task("", total=rounds * (len(waits) + len(kills)))
        for number in range(rounds):
            for side, rate in list(waits)[:: 1 if number % 2 else -1]:
                progress.update(task, description=f"latency at {rate} messages/s: {side}")
                waits[side, rate].append(asyncio.run(latency(url, side, rate, int(rate * seconds))))
                progress.advance(task)
            for situation, found in kills.items():
                progress.update(task, description=f"take-over: {situation}")
                took, size = take_over(url, situation)
                found.append(took)
                idle.append(size)
                progress.advance(task)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "machine": machine(), "rounds": rounds,
        "seconds": seconds, "load": round(os.getloadavg()[0], 1),
        "latency": [
            {"rate": rate} | {
                f"{side}_{what}": round(statistics.median(each[what] for each in waits[side, rate]), 2)
                for side in ("bare", "rsmq") for what in ("p50", "p99")
            }
            for rate in RATES
        ],
        "take_over_ms": {
            situation: [round(figure) for figure in (statistics.median(found), min(found), max(found))]
            for situation, found in kills.items()
        },
        "idle_mib": round(statistics.median(idle), 1),
        "import_s": round(statistics.median(import_seconds() for _ in range(11)), 3),
    }  # fmt: skip


def page(found: dict[str, Any]) -> str:
    """The page, made from the results and nothing else."""
    box = found["machine"]
    waits = table(
        ("messages a second", "bare p50 ms", "rsmq p50 ms", "bare p99 ms", "rsmq p99 ms"),
        [(f"{each['rate']:,}", each["bare_p50"], each["rsmq_p50"], each["bare_p99"], each["rsmq_p99"])
         for each in found["latency"]],
    )  # fmt: skip
    kills = table(
        ("a worker is killed (SIGKILL)", "median ms", "least", "most", "goal"),
        [("its sibling takes over: a process of the same `rsmq worker --processes`", *found["take_over_ms"]["sibling"],
          "≤ 100"),
         ("another `rsmq worker` takes over, as on another host", *found["take_over_ms"]["elsewhere"], "≤ 1,200")],
    )  # fmt: skip
    start = table(
        ("start", "figure", "goal"),
        [("`import rsmq`, seconds", f"{found['import_s']:.3f}", "≤ 0.25"),
         ("a worker that waits, MiB in memory", found["idle_mib"], "≤ 60")],
    )  # fmt: skip
    return f"""# How long a message waits

Generated by `python -m benchmarks.waiting --write` from [waiting.json](waiting.json): not edited by hand.

## Latency

At a steady rate, from when a message was due to be published until its handler runs: what falls behind shows. Another
process publishes messages of 200 bytes by hand to {PARTITIONS} streams, in one pipeline a millisecond at the higher
rates. The bare redis-py loop reads them with XREADGROUP COUNT 100 and one XACK a batch. Medians of {found["rounds"]}
rounds of {found["seconds"]:g} seconds each.

{chr(10).join(waits)}

## Take-over

From the SIGKILL of one of two workers, at a random moment, until each of its {PARTITIONS // 2} partitions has another
owner. {found["rounds"]} kills each.

{chr(10).join(kills)}

## Start

{chr(10).join(start)}

{found["date"]}: {box["cpu"]}, {box["cores"]} cores, {box["memory_gib"]} GiB, Python {box["python"]}; load average
{found["load"]:g} at the end.
"""


def short(found: dict[str, Any]) -> str:
    """The section of the page: latency, take-over, start."""
    box, kills = found["machine"], found["take_over_ms"]
    waits = [
        (f"{each['rate']:,} messages a second: until the handler runs, p50 / p99 ms",
         f"{each['rsmq_p50']} / {each['rsmq_p99']}", f"{each['bare_p50']} / {each['bare_p99']}")
        for each in found["latency"]
    ]  # fmt: skip
    rows = [
        *waits,
        ("a worker is killed: its sibling has taken over, ms", kills["sibling"][0], "–"),
        ("a worker is killed: one on another host has taken over, ms", kills["elsewhere"][0], "–"),
        ("memory of a worker that waits, MiB", found["idle_mib"], "–"),
    ]
    return f"""{chr(10).join(table(("", "rsmq", "bare loop"), rows))}

`python -m benchmarks.waiting --write`, {found["date"]}: {box["cpu"]}, {box["cores"]} cores, Python {box["python"]};
medians of {found["rounds"]} rounds, load average {found["load"]:g} at the end ({SECTION.link}).
"""


SECTION: Final = Section("waiting", short, page)


def main() -> None:
    """Measure, print the page, and write it with --write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one round, and one second at each rate")
    parser.add_argument("--write", action="store_true", help="write figures, report and the section of the page")
    parser.add_argument("--publish", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.publish:
        publish_steadily(*json.loads(options.publish))
        return
    found = measure(1 if options.quick else options.rounds, 1.0 if options.quick else 4.0)
    print(page(found))
    if options.write:
        SECTION.keep(found)


if __name__ == "__main__":
    main()
