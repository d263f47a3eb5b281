"""`python -m benchmarks.everyday [--rounds N] [--only TEXT] [--quick] [--write]`: what a message costs where users are.

Messages of rsmq and of foreign producers, in a plain process, beside a web application and as `rsmq worker` runs it,
over few partitions and many. Each measurement is a process of its own, and the bare redis-py loop is one of them in
each round. With --write into benchmarks/results and docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from secrets import token_hex
from time import process_time
from typing import Any, Final

from rich.progress import Progress

from benchmarks.peers.results import machine
from benchmarks.section import Section
from benchmarks.server import server
from benchmarks.table import table
from rsmq.cli.bench import bare
from rsmq.cli.bench.load import BenchLoad
from rsmq.cli.bench.meter import BY_HAND, OURS, Cost, CpuReading, Meter
from rsmq.cli.bench.run import TRIALS
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Client, Connector
from rsmq.testing.server import remove_prefix
from rsmq.worker.collector import tune_garbage_collector


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. `base` names the one that it is compared with; the goal is of that ratio.

    `side`: whose CPU the ratio is of. What the server pays for writing is measured on keys of its own. `is_long`: over
    many partitions, where what is done once for each of them must not hide the slope.
    """

    name: str
    work: str
    layout: str = "own"
    runs_in: str = "plain"
    partitions: int = 8
    base: str = "bare"
    goal: float | None = None
    side: str = "client"
    is_long: bool = False

    @property
    def data(self) -> tuple[str, int, bool]:
        """Rows where it is equal read the same messages."""
        return self.layout, self.partitions, self.is_long


SINGLE: Final = "single handler, own messages"
LONG: Final = "bare, 200 000 messages"
KEYS: Final = "the keys of a letter by hand, in pipelines of 100"
XADD: Final = "XADD in pipelines of 100"
WITH_KEY: Final = "bare, foreign messages with a key"
FOREIGN: Final = "bare, foreign messages"
ROWS: Final = (
    Row("bare", "bare", base=""),
    Row(WITH_KEY, "bare", "key", base=""),
    Row(FOREIGN, "bare", "data", base=""),
    Row(SINGLE, "single", goal=0.95),
    Row("single handler, foreign messages with a key", "single", "key", base=WITH_KEY, goal=0.95),
    Row("single handler, foreign messages", "single", "data", base=FOREIGN, goal=0.95),
    Row("single handler, in a web application", "single", runs_in="web", goal=0.95),
    Row("single handler, as `rsmq worker`", "single", runs_in="worker", goal=0.85),
    Row("batch handler, own messages", "batch", goal=0.6),
    Row("batch handler, foreign messages with a key", "batch", "key", base=WITH_KEY, goal=0.6),
    Row("batch handler, foreign messages", "batch", "data", base=FOREIGN, goal=0.6),
    Row("batch handler, in a web application", "batch", runs_in="web", goal=0.6),
    Row("bare, 64 that suspend", "bare-suspending", base=""),
    Row("64 handlers that suspend", "suspending", base="bare, 64 that suspend", goal=0.6),
    Row(LONG, "bare", base="", is_long=True),
    Row("single handler, 64 partitions", "single", is_long=True, partitions=64, base=LONG, goal=1.0),
    Row("single handler, 256 partitions", "single", is_long=True, partitions=256, base=LONG, goal=1.0),
    Row(XADD, "pipeline", base="", side="server"),
    Row("`publish_many`", "many", base=XADD, goal=1.3, side="server"),
    Row(KEYS, "keys", base="", side="server"),
    Row("`send`, each to a device of its own", "send", base=KEYS, side="server"),
)
WORK: Final[dict[str, Callable[[BenchLoad, Meter], Awaitable[Cost]]]] = {trial.name: trial.run for trial in TRIALS}


@dataclass(frozen=True, slots=True)
class Taken(Cost):
    """`collector_us`: what Python's garbage collector took of `client_us`. A full collection costs as much as 10 000
    messages, so one more or less of them in a measurement moves its ratio."""

    collector_us: float = 0.0


class CollectorMeter(Meter):
    """Also measures Python's garbage collector."""

    def __init__(self, client: Client, sent: Sequence[str]) -> None:
        super().__init__(client, sent)
        self._began = self._seconds = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _about: dict[str, int]) -> None:
        if phase == "start":
            self._began = process_time()
        else:
            self._seconds += process_time() - self._began

    async def start(self) -> None:
        """Start counting."""
        await super().start()
        self._seconds = 0.0

    async def cost(self, start: CpuReading, end: CpuReading) -> Cost:
        """The cost per message between two marks."""
        seconds, count = self._seconds, max(1, end.done - start.done)
        return Taken(**asdict(await super().cost(start, end)), collector_us=seconds / count * 1e6)


async def measure(row: Row, load: BenchLoad) -> Cost:
    """One measurement, in this process."""
    client = Connector(load.url, Settings(url=load.url)).client()
    if row.side == "server":
        load = replace(load, prefix=f"{load.prefix}-{token_hex(4)}")
    try:
        return await WORK[row.work](load, CollectorMeter(client, OURS if row.base else BY_HAND))
    finally:
        if row.side == "server":
            await remove_prefix(client, load.prefix)
        await client.aclose()


def in_web_application(row: Row, load: BenchLoad) -> Cost:
    """The same inside a FastAPI application that uvicorn serves."""
    import fastapi
    import uvicorn

    found: list[Cost] = []

    @asynccontextmanager
    async def lifespan(_app: fastapi.FastAPI) -> AsyncIterator[None]:
        async def serve() -> None:
            try:
                found.append(await measure(row, load))
            finally:
                running.should_exit = True

        task = asyncio.create_task(serve())
        yield
        await task

    app = fastapi.FastAPI(lifespan=lifespan)
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", loop="asyncio"))
    running.run()
    return found[0]


def measure_here(row: Row, load: BenchLoad) -> Cost:
    """One measurement in this process, which does nothing else."""
    if row.runs_in == "web":
        return in_web_application(row, load)
    if row.runs_in == "worker":
        tune_garbage_collector()
    return asyncio.run(measure(row, load))


def measure_apart(row: Row, load: BenchLoad) -> Taken:
    """One measurement in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.everyday", "--one", row.name, "--load", json.dumps(asdict(load))]
    ended = subprocess.run(words, stdout=subprocess.PIPE, check=True)
    return Taken(**json.loads(ended.stdout.splitlines()[-1]))


def run(rows: Sequence[Row], count: int, rounds: int) -> dict[str, list[Taken]]:
    """All rows in turn, in another order each round."""
    taken: dict[str, list[Taken]] = {row.name: [] for row in rows}
    with server() as url, Progress(transient=True) as progress:
        loads, task = dict[tuple[str, int, bool], BenchLoad](), progress.add_task("filling", total=rounds * len(rows))
        for row in rows:
            if row.data not in loads:
                size, prefix = 2 * count if row.is_long else count, f"{row.layout}{row.partitions}-{row.is_long}"
                loads[row.data] = load = BenchLoad(url, prefix, size, partitions=row.partitions, layout=row.layout)
                asyncio.run(bare.fill(load))
        for number in range(rounds):
            for row in random.Random(number).sample(rows, len(rows)):
                progress.update(task, description=row.name)
                taken[row.name].append(measure_apart(row, loads[row.data]))
                progress.advance(task)
    return taken


def report(taken: dict[str, list[Taken]], count: int) -> dict[str, Any]:
    """The medians: a ratio is of the bare loop of the same round."""
    rows = []
    for row in (row for row in ROWS if row.name in taken):
        costs, figure = taken[row.name], attrgetter(f"{row.side}_us")
        bases = taken.get(row.base, [])
        ratios = [figure(mine) / figure(base) for mine, base in zip(costs, bases, strict=False)]
        rows.append(
            {
                "name": row.name,
                "client_us": round(statistics.median(cost.client_us for cost in costs), 2),
                "collector_us": round(statistics.median(cost.collector_us for cost in costs), 2),
                "ratio": round(statistics.median(ratios), 2) if ratios else None,
                "least": round(min(ratios), 2) if ratios else None,
                "most": round(max(ratios), 2) if ratios else None,
                "goal": row.goal,
                "server_us": round(statistics.median(cost.server_us for cost in costs), 2),
                "commands": round(statistics.median(cost.commands for cost in costs), 4),
            }
        )
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "machine": machine(), "count": count,
        "rounds": len(next(iter(taken.values()))), "load": round(os.getloadavg()[0], 1), "rows": rows,
    }  # fmt: skip


def lines(found: dict[str, Any]) -> list[str]:
    """The table."""
    head = ("", "client CPU µs", "of it collector", "× bare", "least – most", "goal", "server CPU µs", "commands")
    rows = []
    for row in found["rows"]:
        ratio, span = (row["ratio"], f"{row['least']} – {row['most']}") if row["ratio"] else ("", "")
        goal = f"≤ {row['goal']}" if row["goal"] else ""
        collector = row.get("collector_us", "")
        rows.append(
            (row["name"], row["client_us"], collector, ratio, span, goal, row["server_us"], f"{row['commands']:.3f}")
        )
    return table(head, rows)


def page(found: dict[str, Any]) -> str:
    """The page, made from the results and nothing else."""
    box = found["machine"]
    writing = (
        " In the last rows, which write, the ratio is of the server's CPU. The base is redis-py: XADD, or for a letter "
        "SET, ZADD, HSET and two times to live, written without a look at what is there."
        if any(row["name"] == XADD for row in found["rows"])
        else ""
    )
    return f"""# What a message costs where users are

Generated by `python -m benchmarks.everyday --write` from [everyday.json](everyday.json): not edited by hand.

CPU of one process for a message of 200 bytes that a handler takes and does nothing with, beside the bare redis-py loop
(XREADGROUP COUNT 100, the same JSON parser, one XACK a batch, no recovery, no order). Each measurement is a process of
its own with Python's default garbage collector. A full collection costs as much as 10,000 messages, so one more or less
of them moves a ratio: "of it collector" says what it took. "As `rsmq worker`" has the collector that the command sets.
"Foreign messages" come from a plain XADD: a field `data`, and perhaps `key`, without `id`. "In a web application" is a
FastAPI application under uvicorn whose lifespan runs the worker. Ratios are medians of rounds, each beside the bare
loop of its own round that reads the same messages.{writing}

{chr(10).join(lines(found))}

{found["date"]}: {box["cpu"]}, {box["cores"]} cores, {box["memory_gib"]} GiB, Python {box["python"]};
{found["count"]:,} messages, {found["rounds"]} rounds, load average {found["load"]:g} at the end.
"""


def short(found: dict[str, Any]) -> str:
    """The section of the page: the ratios."""
    box, rows = found["machine"], [row for row in found["rows"] if row["ratio"]]
    figures = table(
        ("", "× bare", "least – most", "client CPU µs", "server CPU µs"),
        [
            (row["name"], row["ratio"], f"{row['least']} – {row['most']}", row["client_us"], row["server_us"])
            for row in rows
        ],
    )
    return f"""{chr(10).join(figures)}

`python -m benchmarks.everyday --write`, {found["date"]}: {box["cpu"]}, {box["cores"]} cores, Python {box["python"]};
{found["rounds"]} rounds of {found["count"]:,} messages, load average {found["load"]:g} at the end ({SECTION.link}).
"""


SECTION: Final = Section("everyday", short, page)


def main() -> None:
    """Measure, print the table, and with --write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of 20 000 messages")
    parser.add_argument("--write", action="store_true", help="write figures, report and the section of the page")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains it, and their bases")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        row = next(row for row in ROWS if row.name == options.one)
        print(json.dumps(asdict(measure_here(row, BenchLoad(**json.loads(options.load))))))
        return
    if options.quick:
        options.count, options.rounds = 20_000, 1
    chosen = [row for row in ROWS if options.only in row.name]
    if not chosen:
        parser.error(f"--only {options.only!r}: no row has this in its name")
    chosen = [row for row in ROWS if row in chosen or row.name in {each.base for each in chosen}]
    found = report(run(chosen, options.count, options.rounds), options.count)
    print("\n".join(lines(found)))
    if options.write and not options.only:
        SECTION.keep(found)


if __name__ == "__main__":
    main()
