"""The figures of a run: measures them, compares them with their base, and makes tables of them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.pipeline.meter import Meter
from benchmarks.section import Section
from benchmarks.table import table

PARTITIONS: Final = 8
PIPELINE: Final = 100
"""XADDs in a pipeline of the bare client."""
WARM: Final = 2
"""Messages divided by this run before each measurement: the JVM has then compiled most of its code."""
COLUMNS: Final = ("", "messages/s", "per CPU second", "of it in the JVM", "× base", "goal")
PAGE: Final = """# What the pipeline costs

`python -m benchmarks.pipeline` measured these figures and wrote this page on {day}, on {machine}, with
Python {python}, pyspark {pyspark} and redis-py {redis}. It used {messages:,} messages of 176 bytes in
{partitions} partitions. The server ran on the same machine with its append-only file (everysec).

"per CPU second" counts the CPU time of the client: driver, JVM and Python workers, not the server. Before each
measurement the same ran with half of the messages, so most of the JVM is started and compiled. "× base" compares by
CPU:

- reads with `{plain}`
- writes with `{piped}`

{table}

The two bases are the bare libraries in one process. They write no headers, store no offsets, and do not repeat what
fails. A pipeline has {pipeline} XADDs. In `foreachPartition` Spark's tasks send such pipelines, as one would write it
by hand. `archive` and `replay` are the whole commands without the start of Spark. `replay` first counts, then reads the
archive, sorts it and publishes each message once.
"""


@dataclass(frozen=True)
class Figure:
    """One line of the table. `base`: the line it is compared with; `goal` in messages per CPU second."""

    title: str
    rate: float
    per_cpu: float
    jvm_share: float
    base: str = ""
    goal: int = 0


def measure(title: str, act: Callable[[int], object], count: int, base: str = "", goal: int = 0) -> Figure:
    """Run `act` with half of the messages, then measure it with all."""
    act(count // WARM)
    with Meter() as meter:
        start = time.perf_counter()
        act(count)
        passed = time.perf_counter() - start
    return Figure(title, count / passed, count / meter.seconds, meter.jvm_seconds / meter.seconds, base, goal)


def rows(figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    """The table as text."""
    per_cpu = {figure.title: figure.per_cpu for figure in figures}
    return [
        (
            each.title, f"{each.rate:,.0f}", f"{each.per_cpu:,.0f}", f"{each.jvm_share:.0%}" if each.jvm_share else "",
            f"{each.per_cpu / per_cpu[each.base]:.2f}" if each.base else "", verdict(each),
        )
        for each in figures
    ]  # fmt: skip


def verdict(figure: Figure) -> str:
    """The goal, and whether it is met."""
    return f"{figure.goal:,} {'met' if figure.per_cpu >= figure.goal else 'MISSED'}" if figure.goal else ""


def show(figures: Sequence[Figure], count: int) -> None:
    """The table on the terminal."""
    shown = Table(title=f"{count:,} messages of 176 bytes, {PARTITIONS} partitions, AOF everysec, {machine()}")
    for title in COLUMNS:
        shown.add_column(title, justify="right" if title else "left")
    for row in rows(figures):
        shown.add_row(*row)
    Console(width=120).print(shown)


def told(figures: Sequence[Figure], count: int) -> dict[str, Any]:
    """What is kept of a run."""
    conditions: dict[str, Any] = {
        "day": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": machine(),
        "python": platform.python_version(),
        "pyspark": version("pyspark"),
        "redis": version("redis"),
        "messages": count,
        "partitions": PARTITIONS,
        "pipeline": PIPELINE,
    }
    return {"facts": conditions, "figures": [asdict(figure) for figure in figures]}


def full(record: dict[str, Any]) -> str:
    """All figures."""
    figures = [Figure(**each) for each in record["figures"]]
    plain, piped = (next((f.base for f in figures if f.title.startswith(kind) and f.base), "") for kind in ("r", "w"))
    return PAGE.format(**record["facts"], table="\n".join(table(COLUMNS, rows(figures))), plain=plain, piped=piped)


def short(record: dict[str, Any]) -> str:
    """The section of the page: by CPU."""
    facts, figures = record["facts"], [Figure(**each) for each in record["figures"]]
    cells = [(row[0], row[2], row[4], row[5]) for row in rows(figures)]
    return f"""{chr(10).join(table(("", "messages for a second of CPU", "× base", "goal"), cells))}

`python -m benchmarks.pipeline`, {facts["day"]}: {facts["machine"]}, Python {facts["python"]}, pyspark
{facts["pyspark"]}; {facts["messages"]:,} messages of 176 bytes in {facts["partitions"]} partitions ({SECTION.link}).
"""


SECTION: Final = Section("pipeline", short, full)


def machine() -> str:
    """The machine of the measurement."""
    return f"{os.cpu_count()} cores, {platform.machine()}"
