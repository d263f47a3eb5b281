"""`python -m benchmarks.newer [--count N] [--rounds N]`: would the newer stream commands help? Server CPU per message.

What rsmq does (XACK in batches under a fence, XTRIM MINID behind it) beside XACKDEL ... ACKED, which acknowledges and
deletes at once: where a topic keeps nothing for a replay, and where it does. On Redis 8.2, out of a wheel.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import redis
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.servers import Server

BATCH: Final = 100
PAYLOAD: Final = b"x" * 200
GROUPS: Final = ("a", "b")
FENCE: Final = """
local lease = redis.call('HMGET', KEYS[2], 'owner', 'epoch')
if lease[1] ~= ARGV[1] or lease[2] ~= ARGV[2] then return 'STALE' end
"""
ACK: Final = FENCE + "return redis.call('XACK', KEYS[1], ARGV[3], unpack(ARGV, 4))"
ACK_AND_DELETE: Final = (
    FENCE + "return redis.call('XACKDEL', KEYS[1], ARGV[3], 'ACKED', 'IDS', #ARGV - 3, unpack(ARGV, 4))"
)
KEPT: Final = Path(__file__).parent / "results" / "newer-commands.json"

Way = Callable[[redis.Redis, int], None]


@contextmanager
def cpu_of(client: redis.Redis, into: list[float], count: int) -> Iterator[None]:
    """Adds the microseconds of server CPU that the block has cost per message."""

    def used() -> float:
        cpu = client.info("cpu")
        return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])

    before = used()
    yield
    into.append((used() - before) * 1e6 / count)


def handle(client: redis.Redis, script: Any, group: str, count: int) -> None:
    """Read everything and settle it batch by batch."""
    done = 0
    while done < count:
        ((_, entries),) = client.execute_command("XREADGROUP", "GROUP", group, "m", "COUNT", BATCH, "STREAMS", "s", ">")
        script(keys=["s", "lease"], args=["m", "1", group, *(entry[0] for entry in entries)])
        done += len(entries)


def ack_and_trim(client: redis.Redis, count: int) -> None:
    """As rsmq does: acknowledge; trim behind all groups now and then."""
    script = client.register_script(ACK)
    for group in GROUPS:
        handle(client, script, group, count)
    newest = client.xinfo_stream("s")["last-generated-id"]
    while client.execute_command("XTRIM", "s", "MINID", "~", newest) >= 1000:  # at most 10 000 entries a call
        pass


def ack_and_keep(client: redis.Redis, count: int) -> None:
    """As rsmq does by default: acknowledge, and keep for a replay."""
    script = client.register_script(ACK)
    for group in GROUPS:
        handle(client, script, group, count)


def ack_and_delete(client: redis.Redis, count: int) -> None:
    """The newer command: the last group to acknowledge an entry deletes it. Nothing is left for a replay."""
    script = client.register_script(ACK_AND_DELETE)
    for group in GROUPS:
        handle(client, script, group, count)


WAYS: Final[dict[str, tuple[str, Way]]] = {
    "keep": ("XACK, kept for a replay (rsmq's default)", ack_and_keep),
    "trim": ("XACK, then XTRIM MINID ~ (rsmq with no replay)", ack_and_trim),
    "xackdel": ("XACKDEL … ACKED (no replay possible)", ack_and_delete),
}


def measure(way: Way, count: int) -> tuple[float, int, int]:
    """Server CPU per message, entries left, and bytes that the stream still takes."""
    with Server(kind="redis-8.2", aof=True) as server, server.client() as client:
        for group in GROUPS:
            client.xgroup_create("s", group, "0", mkstream=True)
        client.hset("lease", mapping={"owner": "m", "epoch": "1"})
        for _ in range(count // BATCH):
            pipe = client.pipeline(transaction=False)
            for _ in range(BATCH):
                pipe.execute_command("XADD", "s", "*", "data", PAYLOAD)
            pipe.execute()
        taken: list[float] = []
        with cpu_of(client, taken, count):
            way(client, count)
        return taken[0], int(client.xlen("s")), int(client.memory_usage("s") or 0)


def main() -> None:
    """Measure, print, and write benchmarks/results/newer-commands.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    taken: dict[str, list[tuple[float, int, int]]] = {name: [] for name in WAYS}
    for _ in track(range(options.rounds), transient=True):
        for name, (_, way) in WAYS.items():
            taken[name].append(measure(way, options.count))
    table = Table(title=f"{options.count} messages of {len(PAYLOAD)} bytes, {len(GROUPS)} groups; medians")
    for title in ("", "server CPU µs/message", "min – max", "entries left", "bytes of the stream"):
        table.add_column(title)
    figures = []
    for name, rounds in taken.items():
        cpu = [each[0] for each in rounds]
        figures.append({"way": name, "server_us": round(statistics.median(cpu), 2), "min_us": round(min(cpu), 2),
                        "max_us": round(max(cpu), 2), "left": rounds[0][1], "bytes": rounds[0][2]})  # fmt: skip
        row = figures[-1]
        table.add_row(
            WAYS[name][0],
            f"{row['server_us']}",
            f"{row['min_us']} – {row['max_us']}",
            f"{row['left']}",
            f"{row['bytes']}",
        )
    Console(width=140).print(table)
    KEPT.write_text(json.dumps({"count": options.count, "rounds": options.rounds, "ways": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
