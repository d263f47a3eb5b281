"""A batch beside Celery's chord: `python -m benchmarks.chords --celery PYTHON`, a Python that has celery[redis].

A worker handles members that do nothing; a publisher stores all batches, and the callback of each writes its name. It
prints CPU for each member, of the publisher, the worker and the server, and how many callbacks came. With `--kills` the
worker is killed and started again meanwhile; then it waits for the callbacks for at most `--patience` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import redis

from rsmq import Broker, Message, Settings
from rsmq.testing.server import ThrowawayServer

TASKS: Final = ("benchmarks.peers.systems.celery_chord", "benchmarks.chords")


async def serve(url: str) -> None:
    """The worker of rsmq."""
    broker = Broker(Settings(url=url, preflight="warn", lease_ttl=timedelta(seconds=2)))
    called = redis.Redis.from_url(url)

    @broker.handler("members", group="g", ordering="none", concurrency=16)
    async def member(number: int) -> int:
        return number

    @broker.handler("callbacks", group="g")
    def body(result: dict[str, Any], message: Message) -> None:
        called.rpush("called", f"{result['batch']}|{result['done']}")

    await broker.run()


async def publish(url: str, batches: int, members: int) -> None:
    """The publisher of rsmq."""
    async with Broker(Settings(url=url, preflight="warn")) as broker:
        for number in range(batches):
            async with broker.batch(f"b{number}", group="g", on_complete="callbacks") as batch:
                await asyncio.gather(*[batch.publish("members", n) for n in range(members)])


def start(python: str, module: str, url: str, *words: object) -> subprocess.Popen[bytes]:
    """One of the processes."""
    command = [python, "-m", module, *map(str, words)]
    env = {**os.environ, "CHORD_URL": url}
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ended(process: subprocess.Popen[bytes], how: int = 0) -> float:
    """Wait for its end, or end it. Returns its seconds of CPU."""
    if how:
        process.send_signal(how)
    try:
        _, status, used = os.wait4(process.pid, 0)
    except ChildProcessError:
        raise SystemExit(f"{process.args} has ended by itself: run it by hand to see why") from None
    process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime


def play(python: str, module: str, given: argparse.Namespace) -> str:
    """One system: what it has used, and how many callbacks came."""
    server = ThrowawayServer(tcp=True).start()
    worker = start(python, module, server.url, "work")
    try:
        client, members = redis.Redis.from_url(server.url), given.batches * given.members
        time.sleep(given.warm)
        before, began = server_cpu(client), time.monotonic()
        publisher = start(python, module, server.url, "publish", given.batches, given.members)
        used = 0.0
        for _ in range(given.kills):
            time.sleep(given.pause)
            used += ended(worker, signal.SIGKILL)
            worker = start(python, module, server.url, "work")
        published = ended(publisher)
        while client.llen("called") < given.batches and time.monotonic() - began < given.patience:
            time.sleep(0.1)
        took, on_server = time.monotonic() - began, server_cpu(client) - before
        used += ended(worker, signal.SIGTERM)
        called = Counter(each.decode() for each in client.lrange("called", 0, -1))
        once = sum(1 for count in called.values() if count == 1)
        costs = [f"{seconds / members * 1e6:.0f}" for seconds in (published, used, on_server)]
        return (
            f"{module.rpartition('.')[2]:13} {took:5.1f} s, CPU for each member: publisher {costs[0]} us, worker "
            f"{costs[1]} us, server {costs[2]} us; callbacks: {once} once, {len(called) - once} more often, "
            f"{given.batches - len(called)} never"
        )
    finally:
        worker.kill()
        server.close()


def server_cpu(client: Any) -> float:
    """Seconds of CPU that the server has used."""
    about = client.info("cpu")
    return float(about["used_cpu_user"]) + float(about["used_cpu_sys"])


def main(words: Sequence[str] | None = None) -> None:
    """One of the processes of rsmq, or the comparison."""
    if sys.argv[1:2] == ["work"]:
        asyncio.run(serve(os.environ["CHORD_URL"]))
        return
    if sys.argv[1:2] == ["publish"]:
        asyncio.run(publish(os.environ["CHORD_URL"], *map(int, sys.argv[2:4])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--celery", required=True, help="a Python with celery[redis]")
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--members", type=int, default=100)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--pause", type=float, default=5, help="seconds before each kill")
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--warm", type=float, default=5, help="seconds for the start of a worker")
    given = parser.parse_args(words)
    for module, python in zip(TASKS, (given.celery, sys.executable), strict=True):
        print(play(python, module, given), flush=True)


if __name__ == "__main__":
    main()
