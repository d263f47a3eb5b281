"""`python -m benchmarks.limits [--pairs N] [--only TEXT] [--write]`: what limits cost that hold nothing back.

The goal is 98 % of the throughput without them, so 2 % must be seen on a machine that does other things, too. Hence
many short blocks with and without the limit, in turn, in one process and on one server: the median of the ratios of
neighbours, with the interval that it is in with 95 %. Longer blocks are no steadier, so more of them say more.
With --write into docs/limit-costs.json and docs/limit-costs.md.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from math import comb
from pathlib import Path
from typing import Any, Final

from rich.progress import Progress

from benchmarks.peers.results import machine
from benchmarks.prose import wrapped
from benchmarks.server import server
from benchmarks.table import table
from rsmq.cli.bench import bare, work
from rsmq.cli.bench.load import Load
from rsmq.cli.bench.meter import Meter
from rsmq.cli.bench.work import Count, Kind, consume
from rsmq.handler.rate_limit import Rate
from rsmq.model.message import Message
from rsmq.model.settings import Settings
from rsmq.redis.connector import Connector

DOCS: Final = Path(__file__).parents[1] / "docs"
GOAL: Final = 98
"""Percent of the throughput without limits."""
SURE: Final = 0.95
"""How sure the interval of a median is."""


def provider(message: Message) -> str:
    """The function of a rate by a function."""
    return message.topic


def calling(count: Count) -> Callable[..., Any]:
    """A handler that calls the function itself, so it needs the message, too."""

    async def handle(payload: dict[str, Any], message: Message) -> None:
        if count.is_held:
            await count.hold()
        count.add(1)
        provider(message)

    return handle


def calling_and_working(count: Count) -> Callable[..., Any]:
    """The same with about 50 µs of CPU."""

    async def handle(payload: dict[str, Any], message: Message) -> None:
        if count.is_held:
            await count.hold()
        count.add(1)
        provider(message)
        for _ in range(work.WORK):
            sha256(work.BLOCK).digest()

    return handle


@dataclass(frozen=True, slots=True)
class Row:
    """A handler with limits, and what it is compared with."""

    name: str
    kind: Kind
    options: dict[str, Any]
    base: Kind


BY_NAME: Final[dict[str, Any]] = {"rate": Rate(work.FREE, by=provider)}
HANDLERS: Final = (("nothing to do", work.single, calling), ("50 µs of work", work.working, calling_and_working))
ROWS: Final = (
    *(
        row
        for name, kind, base in HANDLERS
        for row in (
            Row(f"{name}, a rate by key", kind, work.BY_KEY, kind),
            Row(f"{name}, a rate by a function", kind, BY_NAME, base),
            Row(f"{name}, one rate over the group", kind, work.OVER_GROUP, kind),
            Row(f"{name}, `group_concurrency`", kind, work.AT_ONCE, kind),
        )
    ),
    Row("batches, `group_concurrency`", work.batches, work.AT_ONCE, work.batches),
    Row("nothing to do, no limit at all", work.single, {}, work.single),
)


async def block(row: Row, load: Load, *, is_limited: bool) -> float:
    """CPU µs of the client for a message: one run of a new group over the topic, without its start."""
    client = Connector(load.url, Settings(url=load.url)).client()
    gc.collect()
    try:
        options = row.options if is_limited else {}
        return (await consume(load, Meter(client), row.kind if is_limited else row.base, **options)).client_us
    finally:
        await client.aclose()


async def blocks(row: Row, load: Load, pairs: int) -> list[tuple[float, float]]:
    """CPU with the limit and without, of neighbours. Every other pair begins with the limit: what changes slowly, such
    as the machine's other load, weighs for neither."""
    costs = list[tuple[float, float]]()
    for number in range(-1, pairs):
        order = (True, False) if number % 2 else (False, True)
        cost = {is_limited: await block(row, load, is_limited=is_limited) for is_limited in order}
        if number >= 0:  # not the first: imports, and what the interpreter specialises
            costs.append((cost[True], cost[False]))
    return costs


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which values the median is with 95 %: by order only, however the noise is distributed."""
    ordered, chance, rank = sorted(values), 0.0, 0
    while (chance := chance + comb(len(ordered), rank) / 2 ** len(ordered)) < (1 - SURE) / 2:
        rank += 1
    return ordered[max(0, rank - 1)], ordered[-max(1, rank)]


def apart(row: Row, load: Load, pairs: int) -> list[tuple[float, float]]:
    """The blocks of one row, in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.limits", "--one", row.name, "--pairs", str(pairs)]
    ended = subprocess.run([*command, "--load", json.dumps(asdict(load))], stdout=subprocess.PIPE, check=True)
    return [(mine, base) for mine, base in json.loads(ended.stdout.splitlines()[-1])]


def run(rows: Sequence[Row], count: int, pairs: int) -> dict[str, Any]:
    """All rows."""
    found = []
    with server() as url, Progress(transient=True) as progress:
        load, task = Load(url, "limits", count), progress.add_task("filling", total=len(rows))
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
    return wrapped(
        f"""# What limits cost

Generated by `python -m benchmarks.limits --write` from [limit-costs.json](limit-costs.json): not edited by hand.

A rate or `group_concurrency` that holds nothing back should cost nothing: the goal is {GOAL} % of the throughput
without it. Throughput is messages for a second of CPU of the worker's process. Each row compares a handler with the
limit and the same handler without, in {found["pairs"]} pairs of blocks of {found["count"]:,} messages, in one
process and on one server. It shows the median of the ratios of neighbours, and the interval in which that median is
with 95 %. The last row compares a handler with itself: so far off may the others be, too.

The function of a rate is the user's own code, and it needs a message. So a rate by a function is compared with a
handler that takes the message and calls the function itself. The messages have 1000 keys, and 200 bytes each.

{chr(10).join(lines(found))}

{found["date"]}: {box["cpu"]}, {box["cores"]} cores, {box["memory_gib"]} GiB, Python {box["python"]}; load average
{found["load"]:g} at the end.

A rate by key looks at a key for each message, and notes when it starts: a handler that does nothing pays more than 2 %
for it. Where a handler takes the message, and not only its payload, a rate by key or by a
function is asked for each message by itself, which is about 1 µs
([decision 39](decisions/0039-several-rates-of-a-handler.md)).
"""
    )


def main() -> None:
    """Measure, print the table, and with --write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=4_000)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains it")
    parser.add_argument("--write", action="store_true", help="write docs/limit-costs.json and docs/limit-costs.md")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        row = next(row for row in ROWS if row.name == options.one)
        print(json.dumps(asyncio.run(blocks(row, Load(**json.loads(options.load)), options.pairs))))
        return
    rows = [row for row in ROWS if options.only in row.name]
    if not rows:
        parser.error(f"--only {options.only!r}: no row has this in its name")
    found = run(rows, options.count, options.pairs)
    print("\n".join(lines(found)))
    if options.write and not options.only:
        (DOCS / "limit-costs.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        (DOCS / "limit-costs.md").write_text(page(found))


if __name__ == "__main__":
    main()
