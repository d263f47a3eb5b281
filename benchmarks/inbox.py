"""Device inboxes, the published design and a PostgreSQL table: `python -m benchmarks.inbox [--messages N] [--json]`.

`--write` measures only what it costs to store a message, and writes the section of docs/benchmarks.md.

One run on one throw-away server with the append-only file on. What the server does is measured by the server (CPU of
the process, slow log); only rates and the time of catching up are wall-clock. The best of the rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.backlog import Figures, catch_up, many_devices, one_device
from benchmarks.persist import SMALL
from benchmarks.postgres import missing, postgres
from benchmarks.section import Section
from benchmarks.server import ServerMeter, server
from benchmarks.table import figure, table

SIZES: Final = {SMALL: f"{SMALL} B", 1024: "1 KiB", 10_240: "10 KiB"}
SIDES: Final = ("rsmq", "published")
OURS: Final = {
    "send": "send, 256 at once",
    "send_many": "send_many",
    "deliver": "deliver, from a topic",
}
EACH: Final = 10
"""Messages an inbox where there are many inboxes."""


@dataclass(frozen=True)
class Row:
    """One line of the table. `least` and `most` bound what is aimed at, `times` the ratio in our favour."""

    title: str
    rsmq: float
    published: float
    postgres: float | None = None
    is_rate: bool = False
    least: float | None = None
    most: float | None = None
    times: float | None = None

    @property
    def ratio(self) -> float:
        """How many times better than the published design."""
        return self.rsmq / self.published if self.is_rate else self.published / self.rsmq

    @property
    def goal(self) -> str:
        """The aim, in words."""
        for sign, value in (("≥ ", self.least), ("≤ ", self.most)):
            if value is not None:
                return f"{sign}{number(value)}"
        return "" if self.times is None else f"≥ {number(self.times)} ×"

    @property
    def is_met(self) -> bool:
        """Whether it is reached."""
        if self.times is not None:
            return self.ratio >= self.times
        return (self.least is None or self.rsmq >= self.least) and (self.most is None or self.rsmq <= self.most)


def persist(variant: str, url: str, count: int, meter: ServerMeter | None) -> Figures:
    """One measurement of `benchmarks.persist`, in a process of its own."""
    if meter:
        meter.start(empty=True)
    command = [sys.executable, "-m", "benchmarks.persist", variant, url, str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "begin\n":
            raise SystemExit(f"the measurement {variant!r} has failed")
        if meter:
            meter.start()
        process.stdin.write("go\n")
        process.stdin.flush()
        figures: Figures = json.loads(process.stdout.readline() or "{}")
        served = meter.cpu_us if meter else 0.0
    if process.returncode:
        raise SystemExit(f"the measurement {variant!r} has failed")
    return figures | {"server_us": served / count}


def persist_in_tables(count: int) -> Figures:
    """The same on PostgreSQL."""
    with postgres() as instance:
        figures = persist("postgres", instance.socket, count, None)
    return figures | {"server_us": instance.cpu_us / count}


def waited(measure: Callable[..., Coroutine[Any, Any, Figures]], *arguments: str | int) -> Figures:
    """A measurement in this process."""
    return asyncio.run(measure(*arguments))


class Run:
    """All measurements by name, and what they gave: the best of the rounds."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results: dict[str, Figures] = {}

    def steps(self, url: str) -> Iterator[tuple[str, int, Callable[[], Figures]]]:
        """Name, rounds and measurement."""
        options, meter = self.options, ServerMeter(url)
        for variant in ("published", *OURS):
            yield variant, options.rounds, partial(persist, variant, url, options.messages, meter)
        if not missing():
            yield "postgres", options.rounds, partial(persist_in_tables, options.messages)
        if options.write:
            return
        for side in SIDES:
            for size in SIZES:
                rounds = options.rounds if size == SMALL else 1  # the larger ones are written a gigabyte at a time
                yield f"{side} one {size}", rounds, partial(waited, one_device, side, url, options.stored, size)
                inboxes = options.stored // EACH
                yield f"{side} many {size}", 1, partial(waited, many_devices, side, url, inboxes, EACH, size)
            yield f"{side} catch-up", 1, partial(waited, catch_up, side, url, options.devices, options.each, SMALL)

    def all(self) -> None:
        """Measure everything on one server."""
        with server() as url, Progress(transient=True, console=Console(stderr=True)) as progress:
            steps = list(self.steps(url))
            task = progress.add_task("", total=sum(rounds for _, rounds, _ in steps))
            for name, rounds, measure in steps:
                found = []
                for _ in range(rounds):
                    progress.update(task, description=name)
                    found.append(measure())
                    progress.advance(task)
                self.results[name] = {key: best(key, [each[key] for each in found]) for key in found[0]}

    def rows(self) -> Iterator[Row]:
        """The results, side by side."""
        yield from self._persisted()
        one = {side: {size: self.results[f"{side} one {size}"] for size in SIZES} for side in SIDES}
        many = {side: {size: self.results[f"{side} many {size}"] for size in SIZES} for side in SIDES}

        def pair(size: int, key: str) -> tuple[float, float]:
            return one["rsmq"][size][key], one["published"][size][key]

        yield Row("add in batches, server CPU µs a message", *pair(SMALL, "add_us"), most=5)
        yield Row("acknowledge 50 at a time, server CPU µs a message", *pair(SMALL, "ack_us"))
        for size, text in SIZES.items():
            most = 400 if size == SMALL else None
            yield Row(f"bytes a message of {text}, one inbox", *pair(size, "bytes"), most=most)
        for size, text in SIZES.items():
            ours, theirs = (many[side][size]["bytes"] for side in SIDES)
            yield Row(f"bytes a message of {text}, {EACH} an inbox", ours, theirs)
        for size, text in list(SIZES.items())[1:]:
            title = f"longest call of a reconnect, ms ({self.options.stored:,} × {text})"
            yield Row(title, *pair(size, "longest_ms"), times=10)
        mine, other = (self.results[f"{side} catch-up"] for side in SIDES)
        title = f"{self.options.devices:,} devices catch up, {self.options.each:,} messages each"
        yield Row(f"{title}: s", mine["seconds"], other["seconds"])
        yield Row("    server CPU µs a message", mine["server_us"], other["server_us"])
        yield Row("    client CPU µs a message", mine["cpu_us"], other["cpu_us"])

    def _persisted(self) -> Iterator[Row]:
        theirs, tables = self.results["published"], self.results.get("postgres", {})
        for variant, text in OURS.items():
            ours = self.results[variant]
            yield Row(
                f"persisted a second: {text}", ours["rate"], theirs["rate"], tables.get("rate"),
                is_rate=True, least=60_000,
            )  # fmt: skip
            for key, whose in (("server_us", "server"), ("cpu_us", "client")):
                yield Row(f"    {whose} CPU µs a message", ours[key], theirs[key], tables.get(key))


WAYS: Final = {
    "send_many": "`broker.send_many`",
    "send": "`broker.send`, 256 at once",
    "deliver": "from a topic to inboxes, as a handler that feeds devices",
    "published": "the published design: a script for each client, in pipelines",
    "postgres": "two tables of PostgreSQL, 500 messages in a transaction",
}
PUBLISHED: Final = "https://dzone.com/articles/tbmq-redis-persistent-message-storage"
GOAL: Final = 60_000


def section(found: dict[str, Any]) -> str:
    """What the page says of storing a message."""
    facts, results = found["facts"], found["results"]
    rows = [
        (title, each["cpu_us"], each["server_us"], each["cpu_us"] + each["server_us"], allowed(each))
        for name, title in WAYS.items()
        if (each := results.get(name))
    ]
    send = results["send"]
    lines = table(
        ("to store a message", "client CPU, µs", "server CPU, µs", "both", "messages/s that this allows at most"), rows
    )
    side = "server" if send["server_us"] >= send["cpu_us"] else "client"
    reaches = "allows" if allowed(send) >= GOAL else "does not allow"
    text = f"""
The last column is computed: a core for the client and one for the server, both with nothing else to do. For its own
broker, on its own machines, TBMQ names about 30 000 messages/s with PostgreSQL, 40 000 with Redis and a client that
waits for each answer, and 60 000 with one that does not ([its article]({PUBLISHED})): these were not measured here, and
its messages come from MQTT clients.

`send` with 256 at once: {GOAL:,} a second are 16.7 µs of a core. Its CPU {reaches} them: the {side} needs
{figure(max(send["cpu_us"], send["server_us"]))} µs a message. What else stands in the way on two cores: the thread of
the append-only file, and the kernel's work for the socket, which is in both columns, share them. In this run, with
{figure(facts["load"])} processes that wanted the two cores, it was {figure(send["rate"])} a second.

`python -m benchmarks.inbox --write`, {facts["date"]}: {facts["machine"]}, Python {facts["python"]}; {facts["rounds"]}
rounds of {facts["messages"]:,} messages of {SMALL} bytes, each to a device of its own, of which the best counts; AOF
everysec, PostgreSQL with asynchronous commit. All in one run, while other programs used the machine: CPU, no rates
({SECTION.link}).
"""
    return "\n".join(lines) + "\n" + text


def allowed(figures: Figures) -> float:
    """Messages a second with a core for each side."""
    return 1e6 / max(figures["cpu_us"], figures["server_us"])


SECTION: Final = Section("inboxes", section)


def best(key: str, values: Sequence[float]) -> float:
    """The best of the rounds: other load on the machine only ever adds to a figure."""
    return max(values) if key == "rate" else min(values)


def number(value: float | None) -> str:
    """Three digits that say something."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def show(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """The table."""
    title = f"Device inboxes: {options.messages:,} messages of {SMALL} bytes, each to a device of its own; AOF everysec"
    table = Table(title=title)
    for heading in ("", "rsmq", "published", "PostgreSQL*", "× better", "goal", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        mark = "" if not row.goal else "[green]met" if row.is_met else "[red]missed"
        table.add_row(
            row.title, number(row.rsmq), number(row.published), number(row.postgres), f"{row.ratio:.1f}", row.goal, mark
        )
    console = Console(width=140)
    console.print(table)
    if missing():
        console.print(f"* PostgreSQL was left out: {missing()}.")
    else:
        console.print("* two tables, 500 messages in a transaction of two statements; asynchronous commit")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table or JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inbox", description=__doc__)
    parser.add_argument("--messages", type=int, default=50_000, help="persisted point to point, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stored", type=int, default=10_000, help="messages stored to weigh and to read")
    parser.add_argument("--devices", type=int, default=1_000, help="that catch up")
    parser.add_argument("--each", type=int, default=1_000, help="messages that each of them catches up with")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="only what is persisted: write the section of the page")
    options = parser.parse_args(arguments)
    run = Run(options)
    run.all()
    if options.write:
        facts = {
            "date": time.strftime("%Y-%m-%d", time.gmtime()), "python": platform.python_version(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}", "rounds": options.rounds,
            "messages": options.messages, "load": os.getloadavg()[0],
        }  # fmt: skip
        SECTION.keep({"facts": facts, "results": run.results})
        print(section(SECTION.read()))
        return
    rows = list(run.rows())
    if options.json:
        print(json.dumps([asdict(row) | {"ratio": row.ratio, "met": row.is_met} for row in rows], indent=2))
    else:
        show(rows, options)


if __name__ == "__main__":
    main()
