"""`python -m bench [--count N] [--rounds N] [--quick]`: the cost of a message beside the bare redis-py loop.

A throw-away server with the append-only file on; every measurement is a process of its own; medians of the rounds.
Then the same for device inboxes: `bench.inbox`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import uuid

import redis
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import inbox
from bench.server import server

PUBLISH = ("pipeline", "many", "concurrent")
CONSUME = ("bare", "single", "typed", "batch", "bare-suspending", "suspending")
BASE = {"many": "pipeline", "concurrent": "pipeline", "single": "bare", "typed": "bare", "batch": "bare",
        "suspending": "bare-suspending"}  # fmt: skip
MEANING = {
    "pipeline": "publish: redis-py pipeline of 100",
    "many": "publish: publish_many",
    "concurrent": "publish: 64 concurrent publish calls",
    "bare": "consume: bare redis-py loop",
    "single": "consume: async handler, dict payload",
    "typed": "consume: async handler, pydantic model",
    "batch": "consume: batch handler of 500",
    "bare-suspending": "consume: bare loop, handlers suspend, 64 at once",
    "suspending": "consume: handlers suspend, 64 at once",
}


def server_cpu(url: str) -> tuple[float, int]:
    """CPU seconds and commands of the server so far."""
    client = redis.Redis.from_url(url)
    cpu, stats = client.info("cpu"), client.info("stats")
    client.close()
    return cpu["used_cpu_user"] + cpu["used_cpu_sys"], stats["total_commands_processed"]


def measure(module: str, variant: str, url: str, prefix: str, count: int) -> dict[str, float]:
    """One variant in a process of its own."""
    before, commands = server_cpu(url)
    command = [sys.executable, "-m", f"bench.{module}", variant, url, prefix, str(count)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    after, more = server_cpu(url)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result | {"server_us": (after - before) / count * 1e6, "commands": (more - commands) / count}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of 20 000 messages, without the inboxes")
    options = parser.parse_args()
    if options.quick:
        options.count, options.rounds = 20_000, 1
    results: dict[str, list[dict[str, float]]] = {name: [] for name in (*PUBLISH, *CONSUME)}
    with server() as url, Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=options.rounds * len(results))
        for _ in range(options.rounds):
            prefix = f"bench{uuid.uuid4().hex[:8]}"
            for name in PUBLISH:
                progress.update(task, description=MEANING[name])
                own = prefix if name == "many" else f"{prefix}{name}"
                results[name].append(measure("publish", name, url, own, options.count))
                progress.advance(task)
            for name in CONSUME:
                progress.update(task, description=MEANING[name])
                results[name].append(measure("consume", name, url, prefix, options.count))
                progress.advance(task)
    show(results, options.count)
    if not options.quick:
        inbox.main([])


def show(results: dict[str, list[dict[str, float]]], count: int) -> None:
    """Medians, with the range of the CPU figure: a wide one says that the machine was noisy."""
    table = Table(title=f"{count} messages of 200 bytes, 8 partitions, AOF everysec; medians")
    for title in ("", "client CPU µs/message", "min – max", "× base", "server CPU µs", "commands", "messages/s"):
        table.add_column(title, justify="left" if not title else "right")
    for name, rounds in results.items():
        cpu = statistics.median(each["cpu_us"] for each in rounds)
        ratio = ""
        if name in BASE:
            pairs = zip(rounds, results[BASE[name]], strict=True)
            ratio = f"{statistics.median(mine['cpu_us'] / base['cpu_us'] for mine, base in pairs):.2f}"
        low, high = min(each["cpu_us"] for each in rounds), max(each["cpu_us"] for each in rounds)
        table.add_row(
            MEANING[name], f"{cpu:.2f}", f"{low:.1f} – {high:.1f}", ratio,
            f"{statistics.median(each['server_us'] for each in rounds):.1f}",
            f"{statistics.median(each['commands'] for each in rounds):.3f}",
            f"{statistics.median(each['rate'] for each in rounds):,.0f}",
        )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
