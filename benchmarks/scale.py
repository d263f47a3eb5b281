"""`python -m benchmarks.scale`: how costs grow with members, topics, pending and delayed messages, and devices.

Throw-away servers; three sizes each. CPU and counts, not wall-clock time, which is the neighbours'. With
--write into benchmarks/results and docs/benchmarks.md, with a plan for a large deployment
computed from measured costs. Takes minutes.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import anyio
from rich.console import Console
from rich.progress import Progress

from benchmarks.footprint import resident
from benchmarks.groups import groups
from benchmarks.plan import Plan, costs_of
from benchmarks.section import RESULTS, Section
from benchmarks.server import ServerMeter, server
from benchmarks.subscriptions import subscriptions
from benchmarks.table import table
from rsmq import Broker, Settings
from rsmq.model.message import entry_fields
from rsmq.model.packing import pack_fields

PAD: Final = "x" * 150
LOAD: Final = 20_000
"""Messages of a load."""
TAKEN: Final = 10_000
"""Messages that are taken over at each size: the cost of one beside so many that wait."""
IDLE_SECONDS: Final = 3.0
HELD: Final = 500
"""Sessions whose memory in the gateway is traced, which is slow."""

FILL: Final = """
for i = 1, tonumber(ARGV[1]) do
  local n = tonumber(ARGV[2]) + i
  redis.call('XADD', KEYS[1], '*', 'data', ARGV[3], 'id', 'm' .. n, 'key', 'k' .. (n % 1000))
end
return #redis.call('XREADGROUP', 'GROUP', 'g', 'gone', 'COUNT', ARGV[1], 'STREAMS', KEYS[1], '>')
"""
DELAY: Final = """
for i = 3, #ARGV do redis.call('ZADD', KEYS[1], ARGV[1], ARGV[i]) end
return 'OK'
"""

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Study:
    """One thing that grows. `watched` are the figures whose growth is judged; the others are only shown."""

    name: str
    title: str
    about: str
    sizes: tuple[int, ...]
    measure: Callable[[str, ServerMeter, int], Awaitable[Figures]]
    watched: tuple[str, ...]


@asynccontextmanager
async def running(url: str, register: Callable[[Broker], None], members: int = 1) -> AsyncIterator[list[Broker]]:
    """So many members in this process."""
    async with AsyncExitStack() as stack:
        brokers = []
        for _ in range(members):
            broker = Broker(Settings(url=url, prefix="scale", preflight="warn", stop_grace=timedelta(seconds=5)))
            register(broker)
            brokers.append(await stack.enter_async_context(broker.running()))
        yield brokers


async def idle(meter: ServerMeter, seconds: float = IDLE_SECONDS) -> Figures:
    """CPU of both sides, and commands, a second while nothing is to be done."""
    meter.start()
    calls, cpu, began = meter.calls, time.process_time(), time.perf_counter()
    await anyio.sleep(seconds)
    passed = time.perf_counter() - began
    return {
        "idle_client_percent": 100 * (time.process_time() - cpu) / passed,
        "idle_server_percent": meter.cpu_us / passed / 1e4,
        "idle_commands": (meter.calls - calls) / passed,
    }


async def members(url: str, meter: ServerMeter, size: int) -> Figures:
    """`size` members of each of three groups, four times as many partitions: until all is shared out, idle, busy."""
    partitions, done = 4 * size, [0, 0, 0]

    def register(broker: Broker) -> None:
        for number in range(3):
            count(broker, f"g{number}", number)

    def count(broker: Broker, group: str, number: int) -> None:
        @broker.handler("t", group=group, partitions=partitions)
        async def handle(payload: dict[str, Any]) -> None:
            done[number] += 1

    meter.start(empty=True)
    cpu, began = time.process_time(), time.perf_counter()
    async with running(url, register, size) as brokers:
        with anyio.fail_after(120):
            while not is_shared_out(brokers, partitions):
                await anyio.sleep(0.05)
        figures = {
            "start_seconds": time.perf_counter() - began,
            "start_client_ms": 1000 * (time.process_time() - cpu) / size / 3,
            "start_server_ms": meter.cpu_us / 1000 / size / 3,
            "connections": float(meter.connections),
        }
        figures |= await idle(meter)
        meter.start()
        cpu = time.process_time()
        await brokers[0].publish_many(
            "t", ({"n": n, "pad": PAD} for n in range(LOAD)), key=lambda each: f"k{each['n'] % 5000}"
        )
        with anyio.fail_after(120):
            while min(done) < LOAD:
                await anyio.sleep(0.02)
        handled = 3 * LOAD
        figures |= {"client_us": (time.process_time() - cpu) / handled * 1e6, "server_us": meter.cpu_us / handled}
    return figures


def is_shared_out(brokers: list[Broker], partitions: int) -> bool:
    """Whether every partition of every group has its owner, and no member has more than a fair share."""
    held = [len(c.lanes) for broker in brokers if broker.worker for c in broker.worker.consumers]
    fair = math.ceil(partitions / len(brokers))
    return sum(held) == 3 * partitions and max(held) <= fair


async def topics(url: str, meter: ServerMeter, size: int) -> Figures:
    """One worker with a handler for each of so many topics of one partition; then a message to each."""
    done = [0]

    def register(broker: Broker) -> None:
        for number in range(size):

            @broker.handler(f"t{number}", group="g", partitions=1)
            async def handle(payload: dict[str, Any]) -> None:
                done[0] += 1

    meter.start(empty=True)
    before, cpu, began = resident(), time.process_time(), time.perf_counter()
    async with running(url, register) as (broker,):
        with anyio.fail_after(240):
            while not (broker.worker and sum(len(c.lanes) for c in broker.worker.consumers) == size):
                await anyio.sleep(0.05)
        figures = {
            "start_seconds": time.perf_counter() - began,
            "start_client_ms": 1000 * (time.process_time() - cpu) / size,
            "start_server_ms": meter.cpu_us / 1000 / size,
            "client_kib": (resident() - before) / 1024 / size,
            "server_kib": meter.memory / 1024 / size,
            "connections": float(meter.connections),
        }
        figures |= await idle(meter)
        cpu = time.process_time()
        meter.start()
        async with anyio.create_task_group() as tasks:
            for number in range(size):
                tasks.start_soon(broker.publish, f"t{number}", {"n": number})
        with anyio.fail_after(120):
            while done[0] < size:
                await anyio.sleep(0.01)
        figures |= {"client_us": (time.process_time() - cpu) / size * 1e6, "server_us": meter.cpu_us / size}
    return figures


async def pending(url: str, meter: ServerMeter, size: int) -> Figures:
    """So many messages delivered to a member that is gone; a new one takes over the first ten thousand."""
    meter.start(empty=True)
    async with Broker(Settings(url=url, prefix="scale", preflight="warn")) as broker:
        await broker.topics.ensure("t", 8)
        for partition in range(8):
            stream, share = broker.keys.stream("t", partition), size // 8
            await broker.client.execute_command("XGROUP", "CREATE", stream, "g", "0", "MKSTREAM")
            for at in range(0, share, 2500):
                chunk = min(2500, share - at)
                await broker.client.execute_command("EVAL", FILL, 1, stream, chunk, at, json.dumps({"pad": PAD}))
    figures = {"server_bytes": meter.memory / size}
    done, first, cpu = [0], [0.0], time.process_time()
    finished = anyio.Event()

    def register(broker: Broker) -> None:
        @broker.handler("t", group="g", concurrency=64)
        async def handle(payload: dict[str, Any]) -> None:
            if not done[0]:
                first[0] = time.perf_counter()
            done[0] += 1
            if done[0] >= min(TAKEN, size):
                finished.set()

    meter.start(log=True)
    began = time.perf_counter()
    async with running(url, register):
        with anyio.fail_after(120):
            await finished.wait()
        taken = done[0]
        return figures | {
            "first_seconds": first[0] - began,
            "client_us": (time.process_time() - cpu) / taken * 1e6,
            "server_us": meter.cpu_us / taken,
            "longest_ms": meter.longest_us / 1000,
            "usual_ms": meter.usual_us / 1000,
        }


async def delayed(url: str, meter: ServerMeter, size: int) -> Figures:
    """So many delayed messages become due at once: until all are handled."""
    meter.start(empty=True)
    done, finished = [0], anyio.Event()

    def register(broker: Broker) -> None:
        @broker.handler("t", group="g", partitions=8)
        async def handle(payload: dict[str, Any]) -> None:
            done[0] += 1
            if done[0] >= size:
                finished.set()

    async with Broker(Settings(url=url, prefix="scale", preflight="warn")) as broker:
        await broker.topics.ensure("t", 8)
        for partition in range(8):
            for at in range(0, size // 8, 1000):
                packed = [
                    pack_fields(entry_fields(b'{"pad":"' + PAD.encode() + b'"}', f"{partition}-{n}", f"k{n % 1000}"))
                    for n in range(at, min(at + 1000, size // 8))
                ]
                await broker.client.execute_command(
                    "EVAL", DELAY, 1, broker.keys.delayed("t", partition), 1, "", *packed
                )
    figures = {"server_bytes": meter.memory / size}
    meter.start(log=True)
    cpu, began = time.process_time(), time.perf_counter()
    async with running(url, register):
        with anyio.fail_after(120):
            await finished.wait()
        return figures | {
            "seconds": time.perf_counter() - began,
            "client_us": (time.process_time() - cpu) / size * 1e6,
            "server_us": meter.cpu_us / size,
            "longest_ms": meter.longest_us / 1000,
            "usual_ms": meter.usual_us / 1000,
        }


async def devices(url: str, meter: ServerMeter, size: int) -> Figures:
    """So many devices with three letters each, then a session for each (at most two thousand at once)."""
    meter.start(empty=True)
    async with Broker(Settings(url=url, prefix="scale", preflight="warn")) as broker:
        await broker.send("warm", {"pad": PAD})
        meter.start()
        await broker.send_many((f"device-{n:07d}", {"pad": PAD}) for _ in range(3) for n in range(size))
        figures = {"server_bytes": meter.memory / size, "send_us": meter.cpu_us / size / 3}
        connected = min(size, 2000)
        async with AsyncExitStack() as stack:
            meter.start()
            for n in range(connected):
                await stack.enter_async_context(broker.connect(f"device-{n:07d}"))
            figures |= {"open_us": meter.cpu_us / connected, "session_bytes": meter.memory / connected}
        figures["gateway_bytes"] = await traced(broker, min(connected, HELD))
    return figures


async def traced(broker: Broker, count: int) -> float:
    """Bytes of Python's own memory that each of so many sessions takes in the process that holds it, while it waits for
    letters. Not what the process has in memory: it has room left from what it did before."""
    gc.collect()
    tracemalloc.start()
    try:
        async with AsyncExitStack() as stack:
            before = tracemalloc.get_traced_memory()[0]
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            for n in range(count):
                session = await stack.enter_async_context(broker.connect(f"idle-{n:07d}"))
                tasks.start_soon(anext, aiter(session))
            await anyio.sleep(IDLE_SECONDS)
            gc.collect()
            return (tracemalloc.get_traced_memory()[0] - before) / count
    finally:
        tracemalloc.stop()


TITLES: Final = {
    "start_seconds": "until shared out, s",
    "start_client_ms": "start, client CPU ms each",
    "start_server_ms": "start, server CPU ms each", "connections": "connections",
    "idle_client_percent": "idle client CPU, %",
    "idle_server_percent": "idle server CPU, %", "idle_commands": "idle commands/s",
    "client_us": "client CPU, µs a message",
    "server_us": "server CPU, µs a message", "client_kib": "client, KiB each", "server_kib": "server, KiB each",
    "server_bytes": "server, bytes each", "first_seconds": "first message after, s", "longest_ms": "longest call, ms",
    "usual_ms": "median call of its kind, ms",
    "rest_server_percent": "at rest, % of a server core",
    "change_server_ms": "a join or leave, server CPU ms",
    "change_view_ms": "the same, CPU ms of each member, without the assignment",
    "assign_ms": "assignment of 1,024 partitions, CPU ms of each member",
    "seconds": "until all handled, s", "send_us": "server CPU, µs a letter", "open_us": "server CPU, µs a session",
    "held_bytes": "each gateway process, bytes each", "begin_us": "it begins, CPU µs each",
    "begin_seconds": "it begins, CPU s", "match_us": "a topic name is looked up, gateway CPU µs",
    "look_us": "a topic name is looked up, server CPU µs", "batch_us": "a batch of known names, server CPU µs",
    "subscribe_us": "a client subscribes, server CPU µs",
    "read_us": "it begins, server CPU µs each", "again_us": "a client subscribes again, server CPU µs",
    "again_changes": "changes that 1,000 of them write",
    "session_bytes": "server, bytes a session", "gateway_bytes": "gateway, bytes a session",
}  # fmt: skip

STUDIES: Final = (
    Study(
        "members", "Partitions × members × groups",
        "So many members in each of three groups, over four times as many partitions: the last "
        "column is 64 partitions × "
        "16 members × 3 groups. All members are in one process, so its CPU is that of all of them.",
        (4, 8, 16), members, ("start_client_ms", "start_server_ms", "client_us", "server_us"),
    ),
    Study(
        "groups", "Members of one group",
        "One group of so many members. Their views and subscriptions are real, their heartbeats are played, from one "
        "process.",
        (8, 64, 256, 1000), groups, ("change_server_ms", "change_view_ms", "assign_ms"),
    ),
    Study(
        "topics", "Topics", "One worker with a handler for each of so many topics of one partition each.",
        (10, 100, 1000), topics, ("start_client_ms", "start_server_ms", "client_kib", "client_us", "server_us"),
    ),
    Study(
        "pending", "Pending entries",
        "So many messages were delivered to a member that is gone; a new one takes over, and "
        "its first ten thousand are measured.",
        (10_000, 100_000, 1_000_000), pending, ("server_bytes", "client_us", "server_us", "longest_ms"),
    ),
    Study(
        "delayed", "Delayed messages due at once", "So many become due at the same moment, over eight partitions.",
        (1_000, 10_000, 100_000), delayed, ("server_bytes", "client_us", "server_us", "longest_ms"),
    ),
    Study(
        "devices", "Devices",
        "So many devices with three letters of about 180 bytes each; then sessions, at most 2,000 at once.",
        (1_000, 5_000, 20_000), devices, ("server_bytes", "send_us", "open_us"),
    ),
    Study(
        "subscriptions", "Subscriptions of MQTT clients",
        "So many clients, each of which has subscribed to a topic name of its own. A gateway process begins, and 1,000 "
        "clients subscribe again to what they have. A router looks up names in batches of 500, and one that it knows.",
        (10_000, 100_000, 1_000_000), subscriptions,
        ("server_bytes", "held_bytes", "begin_us", "match_us", "look_us", "batch_us", "again_us", "subscribe_us"),
    ),
)  # fmt: skip

NOISE: Final = 0.2
"""A power below this counts as none."""


def power(sizes: list[int], values: list[float]) -> float:
    """With which power of the size a figure grows, from the first to the last: 0 is constant, 1 is in proportion."""
    return math.log(max(values[-1], 1e-9) / max(values[0], 1e-9)) / math.log(sizes[-1] / sizes[0])


def verdict(study: Study, rows: list[Figures]) -> str:
    """What of one (of a message, a member, a topic) costs more when there are more of them."""
    powers = {name: power(list(study.sizes), [row[name] for row in rows]) for name in study.watched}
    grown = [f"{TITLES[name]} (power {each:.2f})" for name, each in powers.items() if each > NOISE]
    if not grown:
        return "**In proportion:** what one of them costs does not grow with their number."
    return f"**Grows with their number, for each:** {', '.join(grown)}."


async def measure(only: set[str], keep: Callable[[dict[str, list[Figures]]], None]) -> None:
    """All studies, each size on a server of its own. `keep` gets each when it is done."""
    chosen = [study for study in STUDIES if not only or study.name in only]
    found: dict[str, list[Figures]] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=sum(len(study.sizes) for study in chosen))
        for study in chosen:
            for size in study.sizes:
                progress.update(task, description=f"{study.name} {size:,}")
                with server() as url:
                    meter = ServerMeter(url)
                    began = time.perf_counter()
                    figures = await study.measure(url, meter, size)
                    meter.close()
                found.setdefault(study.name, []).append(figures | {"took_seconds": time.perf_counter() - began})
                progress.advance(task)
            keep({study.name: found[study.name]})  # a run that is ended leaves something


def full(report: dict[str, Any]) -> str:
    """All figures."""
    facts, found = report["facts"], report["studies"]
    lines = [
        "# Scale",
        "",
        f"Measured with `python -m benchmarks.scale` on {facts['machine']}, Python {facts['python']}, "
        f"{facts['date']}: CPU time and",
        "counts, one run of each size, so a fifth more or",
        "less means nothing.",
        "",
    ]
    for study in STUDIES:
        rows = found.get(study.name)
        if not rows:
            continue
        names = [name for name in rows[0] if name in TITLES]
        lines += [f"## {study.title}", "", study.about, ""]
        lines += table(
            ("", *(f"{size:,}" for size in study.sizes)),
            [(TITLES[name], *(row[name] for row in rows)) for name in names],
        )
        lines += ["", verdict(study, rows), *WHY.get(study.name, ()), ""]
    if "plan" in report:
        lines += Plan(**report["plan"]).page()
    return "\n".join(lines) + "\n"


def short(report: dict[str, Any]) -> str:
    """The section of the page: what grows in each study, and the plan."""
    facts, found = report["facts"], report["studies"]
    rows = []
    for study in STUDIES:
        if figures := found.get(study.name):
            what = verdict(study, figures).replace("**", "").partition(":")[2].strip().rstrip(".")
            sizes = " – ".join(f"{size:,}" for size in (study.sizes[0], study.sizes[-1]))
            rows.append(f"| {study.title}: {sizes} | {what} |")
    plan = "\n".join(Plan(**report["plan"]).page()) if "plan" in report else ""
    later = "".join(f" {name.capitalize()} on {date}." for name, date in sorted(report.get("later", {}).items()))
    grown = "\n".join(["| from – to | what grows, for each of them |", "|---|---|", *rows])
    return f"""{grown}

{largest(found)}

`python -m benchmarks.scale --write`, {facts["date"]}: {facts["machine"]}, Python {facts["python"]}; one run of each
size, so a fifth more or less means nothing ({SECTION.link}).{later}

{plan}
"""


def largest(found: dict[str, list[Figures]]) -> str:
    """What the largest group and the most subscriptions cost, beside what they should."""
    if not {"groups", "subscriptions"} <= found.keys():  # a run of some studies only, before that of the others
        return ""
    group, held = found["groups"][-1], found["subscriptions"][-1]
    rows = [
        ("1,000 members: a join or leave, server CPU ms", group["change_server_ms"], "≤ 20"),
        ("1,000 members: assignment of 1,024 partitions, CPU ms of each member", group["assign_ms"], "≤ 50"),
        ("1,000 members: at rest, % of a server core", group["rest_server_percent"], "≤ 3"),
        ("1,000,000 subscriptions: CPU s until a gateway process has read them", held["begin_seconds"], "≤ 0.2"),
        ("1,000,000 subscriptions: MB in each gateway process", held["held_bytes"], "≤ 20"),
        ("1,000 clients subscribe again to what they have: changes", held["again_changes"], "0"),
    ]
    lines = table(("", "measured", "goal"), rows)
    return (
        "\n".join(lines)
        + """

The goals of subscriptions are a tenth of those for ten million topic names without wildcards. Routers look these up.
Filters with wildcards, shared subscriptions, and names with more than 64 subscribers in a shard are held by every
gateway process. A member at rest sends one write with five commands at each heartbeat: those of 1,000 members are what
is measured there, and each says something that another one would have to ask for."""
    )


SECTION: Final = Section("scale", short, full)


WHY: Final[dict[str, tuple[str, ...]]] = {
    "members": (
        "In groups of up to eight, each member asks for the presence of each other one of its group four times a "
        "second, in one command, and beats for itself: the commands grow with the members, the answers with their "
        "square.",
    ),
    "groups": (
        "Eight members look at all others; the others hear who comes and goes. One announcement to a thousand "
        "connections is most of what a change costs the server.",
    ),
    "topics": (
        "The idle commands are in proportion to the handlers: each has a read that waits, renews its "
        "lease and looks for its group's members; what many of them ask at a time leaves in one write. "
        "Delayed messages are asked for ten times a second, for 32 partitions with one command. A "
        "message costs more than in other studies because each topic gets just one: nothing is shared. "
        "Where the loop of one process is full, spread the handlers over processes, or make them one "
        "topic with a field.",
    ),
    "pending": (
        "The member that is gone has left no lease, only its name: until a lease has passed, it may still "
        "read, so the first message waits. Pages of pending entries are read from a cursor, so what waits "
        "behind costs nothing. A message that may have been started is charged an attempt before it starts, by a "
        "call of its own. The longest call is wall-clock time: on a busy machine it holds the neighbours' turns, so "
        "the median call of its kind stands below it.",
    ),
    "delayed": (
        "They move in pages of 200 a partition, so that no call is long, and pages follow each other without a pause.",
    ),
    "subscriptions": (
        "A router looks up who has subscribed to the names of its messages, in each of the eight shards, and remembers "
        "it until a subscription to a name changes there. Among a million, these places are not in the caches of the "
        "processor. A gateway process holds filters with wildcards, which are "
        "not in this study. A client that subscribes again to what it has writes no change.",
    ),
    "devices": (
        "A session is a hash, and a subscription in the gateway that holds it; letters wait as strings of their own. "
        "The gateway's bytes are those of Python's objects, traced while sessions wait for letters.",
    ),
}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="some of: " + ",".join(study.name for study in STUDIES))
    parser.add_argument("--write", action="store_true", help="write figures, report and the section of the page")
    options = parser.parse_args()
    report: dict[str, Any] = SECTION.read() if (RESULTS / "scale.json").exists() else {"studies": {}}
    facts = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
    }

    if not options.only or "facts" not in report:
        report["facts"], report["later"] = facts, {}

    def keep(studies: dict[str, list[Figures]]) -> None:
        report["studies"] |= studies
        if options.only:
            report.setdefault("later", {}).update(dict.fromkeys(studies, facts["date"]))
        if {"devices", "pending", "subscriptions"} <= report["studies"].keys():
            report["plan"] = costs_of(RESULTS, report["studies"])
        if options.write:
            SECTION.keep(report)

    anyio.run(measure, set(filter(None, options.only.split(","))), keep)
    print(short(report))


if __name__ == "__main__":
    main()
