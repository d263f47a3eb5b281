"""`python -m benchmarks.limits [--pairs N] [--only TEXT] [--write]`: what limits cost that hold nothing back.

The goal is 98 % of the throughput without them, so 2 % must be seen on a machine that does other things, too. Hence
one worker, whose limit is taken away and comes back every 20 ms: neighbours differ by nothing else. The median of their
ratios, with the interval that it is in with 95 %. With --write into benchmarks/results and docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from math import comb
from secrets import token_hex
from typing import Any, Final

from rich.progress import Progress

from benchmarks.peers.results import machine
from benchmarks.section import Section
from benchmarks.server import server
from benchmarks.table import table
from rsmq.broker import Broker
from rsmq.cli.bench import bare, work
from rsmq.cli.bench.load import BenchLoad
from rsmq.handler.rate_limit import Rate
from rsmq.model.message import Message

GOAL: Final = 98
"""Percent of the throughput without limits."""
SURE: Final = 0.95
"""How sure the interval of a median is."""
SLOT: Final = 0.02
"""Seconds between two switches of the limit."""
LEAST: Final = 200
"""Messages between two switches: those of a worker that starts would say nothing."""
PROVIDERS: Final = ("push", "sms", "alimtalk", "mail")


def provider(message: Message) -> str:
    """The function of a rate by a function: four names, so that none of them reaches its limit."""
    return PROVIDERS[message.partition % 4]


class Counter:
    """Handlers that count their messages."""

    def __init__(self) -> None:
        self.done = 0

    async def nothing(self, payload: dict[str, Any]) -> None:
        """Does nothing else."""
        self.done += 1

    async def work(self, payload: dict[str, Any]) -> None:
        """With about 50 µs of CPU."""
        self.done += 1
        for _ in range(work.WORK):
            sha256(work.BLOCK).digest()

    async def batch(self, payloads: list[dict[str, Any]]) -> None:
        """Many at once."""
        self.done += len(payloads)


@dataclass(frozen=True, slots=True)
class Row:
    """A handler, one of `Counter`, with a limit."""

    name: str
    handler: str
    options: dict[str, Any]


BY_NAME: Final[dict[str, Any]] = {"rate": Rate(work.FREE, by=provider)}
LIMITS: Final = {
    "a rate by key": work.BY_KEY,
    "a rate by a function": BY_NAME,
    "one rate over the group": work.OVER_GROUP,
    "`group_concurrency`": work.AT_ONCE,
}
ROWS: Final = (
    *(Row(f"50 µs of work, {name}", "work", options) for name, options in LIMITS.items()),
    *(Row(f"nothing to do, {name}", "nothing", options) for name, options in LIMITS.items()),
    Row("batches, `group_concurrency`", "batch", work.AT_ONCE),
    Row("nothing to do, no limit at all", "nothing", {}),
)


async def run_group(row: Row, load: BenchLoad, costs: list[tuple[float, float]]) -> None:
    """One new group over the topic; adds its pairs of CPU µs for a message, with the limit and without."""
    counter, broker = Counter(), Broker(work.settings_of(load))
    batch = {"batch": work.BATCH} if row.handler == "batch" else {}
    options = {"group": f"limits-{token_hex(4)}", "concurrency": load.concurrency, **batch, **row.options}
    broker.handler(load.topic, **options)(getattr(counter, row.handler))
    gc.collect()
    async with broker.running():
        assert broker.worker is not None
        queue = broker.worker.consumers[0].queue
        limits = queue.rate_limit, queue.group_limit, queue.message_rate
        last, number = dict[bool, float](), 0
        while True:
            is_limited = number % 2 == 0
            queue.rate_limit, queue.group_limit, queue.message_rate = limits if is_limited else (None, None, None)
            began, done = time.process_time(), counter.done
            while counter.done - done < LEAST and counter.done < load.count:
                await asyncio.sleep(SLOT)
            if counter.done >= load.count:
                return
            last[is_limited] = 1e6 * (time.process_time() - began) / (counter.done - done)
            number += 1
            if number % 2 == 0 and number > 4:  # not the first: what the interpreter specialises
                costs.append((last[True], last[False]))


async def blocks(row: Row, load: BenchLoad, pairs: int) -> list[tuple[float, float]]:
    """Pairs of neighbours of as many groups as it takes."""
    costs = list[tuple[float, float]]()
    while len(costs) < pairs:
        await run_group(row, load, costs)
    return costs[:pairs]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which values the median is with 95 %: by order only, however the noise is distributed."""
    ordered, chance, rank = sorted(values), 0.0, 0
    while (chance := chance + comb(len(ordered), rank) / 2 ** len(ordered)) < (1 - SURE) / 2:
        rank += 1
    return ordered[max(0, rank - 1)], ordered[-max(1, rank)]


def apart(row: Row, load: BenchLoad, pairs: int) -> list[tuple[float, float]]:
    """The blocks of one row, in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.limits", "--one", row.name, "--pairs", str(pairs)]
    ended = subprocess.run([*command, "--load", json.dumps(asdict(load))], stdout=subprocess.PIPE, check=True)
    return [(mine, base) for mine, base in json.loads(ended.stdout.splitlines()[-1])]


def run(rows: Sequence[Row], count: int, pairs: int) -> dict[str, Any]:
    """All rows."""
    found = []
    with server() as url, Progress(transient=True) as progress:
        load, task = BenchLoad(url, "limits", count), progress.add_task("filling", total=len(rows))
        asyncio.run(bare.fill(load))
        for row in rows:
            progress.update(task, description=row.name)
            costs = apart(row, load, pairs)
            percent = [100 * base / mine for mine, base in costs]
            found.append(
                {
                    "name": row.name,
                    "with": round(statistics.median(mine for mine, _ in costs), 2),
                    "without": round(statistics.median(base for _, base in costs), 2),
                    "percent": round(statistics.median(percent), 1),
                    "interval": [round(each, 1) for each in interval(percent)],
                }
            )
            progress.advance(task)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "machine": machine(), "count": count,
        "pairs": pairs, "load": round(os.getloadavg()[0], 1), "rows": found,
    }  # fmt: skip


def lines(found: dict[str, Any]) -> list[str]:
    """The table."""
    head = ("", "with, µs", "without, µs", "throughput", "95 % sure")
    return table(
        head,
        [
            (
                row["name"], row["with"], row["without"], f"{row['percent']:.1f} %",
                f"{row['interval'][0]:.1f} – {row['interval'][1]:.1f}",
            )
            for row in found["rows"]
        ],
    )  # fmt: skip


def page(found: dict[str, Any]) -> str:
    """The page, made from the results and nothing else."""
    box = found["machine"]
    return f"""# What limits cost

Generated by `python -m benchmarks.limits --write` from [limits.json](limits.json): not edited by hand.

A rate or `group_concurrency` that holds nothing back should cost nothing: the goal is {GOAL} % of the throughput
without it. Throughput is messages for a second of CPU of the worker's process. Each row compares a handler with the
limit and the same handler without: in one running worker, the limit is taken away and comes back every
{1000 * SLOT:.0f} ms. It shows the median of the ratios of {found["pairs"]} pairs of neighbours, and the interval in
which that median is with 95 %. The last row compares a handler with itself: so far off may the others be, too.

The messages have 1000 keys, and 200 bytes each. All handlers take their payload only. The cost of a rate by a function
has the user's function in it, and the message that is made for it.

{chr(10).join(lines(found))}

{found["date"]}: {box["cpu"]}, {box["cores"]} cores, {box["memory_gib"]} GiB, Python {box["python"]}; load average
{found["load"]:g} at the end.

A rate by key or by a function looks at each message, and notes when it starts: a handler that does nothing pays more
than 2 % for it. Where a handler takes the message, and not only its payload, such a rate is asked for each message by
itself, which is about 1 µs ([decision 39](../../docs/decisions/0039-several-rates-of-a-handler.md)).
"""


def short(found: dict[str, Any]) -> str:
    """The section of the page: the throughput with each limit."""
    box = found["machine"]
    rows = [
        (row["name"], f"{row['percent']:.1f} %", f"{row['interval'][0]:.1f} – {row['interval'][1]:.1f}")
        for row in found["rows"]
    ]
    return f"""{chr(10).join(table(("", "of the throughput without it", "95 % sure"), rows))}

`python -m benchmarks.limits --write`, {found["date"]}: {box["cpu"]}, {box["cores"]} cores, Python {box["python"]};
{found["pairs"]} pairs a row, load average {found["load"]:g} at the end ({SECTION.link}).
"""


SECTION: Final = Section("limits", short, page)


def main() -> None:
    """Measure, print the table, and with --write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200_000, help="messages in the topic")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains it")
    parser.add_argument("--write", action="store_true", help="write figures, report and the section of the page")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        row = next(row for row in ROWS if row.name == options.one)
        print(json.dumps(asyncio.run(blocks(row, BenchLoad(**json.loads(options.load)), options.pairs))))
        return
    rows = [row for row in ROWS if options.only in row.name]
    if not rows:
        parser.error(f"--only {options.only!r}: no row has this in its name")
    found = run(rows, options.count, options.pairs)
    print("\n".join(lines(found)))
    if options.write and not options.only:
        SECTION.keep(found)


if __name__ == "__main__":
    main()
