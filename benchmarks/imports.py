"""`python -m benchmarks.imports [--write]`: what a program pays for a queue before its first message, beside others.

Each system is imported, and the object that publishes is made, in a new process of an environment of its own
(`benchmarks.peers` makes these). CPU time and memory are those of the whole process, with the start of Python. The
systems take turns, and the least of all rounds counts: other work on the machine can only add.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from benchmarks.peers.catalogue import CATALOGUE, Entry
from benchmarks.peers.environment import Environment, Unavailable
from benchmarks.peers.results import machine
from benchmarks.section import ROOT, Found, Section
from benchmarks.table import table

REDIS: Final = ("redis[hiredis]", "uvloop")
ENTRIES: Final = {each.name: each for each in (*CATALOGUE, Entry("rq", "RQ", "", ("rq", *REDIS)))}
PROGRAMS: Final = {
    "bare": "import redis.asyncio; redis.asyncio.Redis()",
    "rsmq": "from rsmq import Broker; Broker()",
    "arq": "from arq import create_pool; from arq.connections import RedisSettings; RedisSettings()",
    "dramatiq": "from dramatiq.brokers.redis import RedisBroker; RedisBroker()",
    "rq": "from redis import Redis; from rq import Queue; Queue(connection=Redis())",
    "streaq": "from streaq import Worker; Worker()",
    "taskiq": "from taskiq_redis import RedisStreamBroker; RedisStreamBroker('redis://localhost')",
    "faststream": "from faststream.redis import RedisBroker; RedisBroker()",
    "celery": "from celery import Celery; Celery(broker='redis://localhost').amqp.Producer",
}
"""What a module of a program does that publishes. No connection is opened."""
ASK: Final = """
import json, resource
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss]))
"""


def once(environment: Environment, program: str) -> tuple[float, float]:
    """Milliseconds of CPU and MiB of one process."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RSMQ_"))}
    done = subprocess.run(
        [environment.python, "-c", program + ASK], cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    )
    seconds, kib = json.loads(done.stdout.splitlines()[-1])
    return 1000 * seconds, kib / 1024


def measure(rounds: int, names: Sequence[str]) -> Found:
    """The least of each system. One that cannot be installed here is left out."""
    compileall.compile_dir(ROOT / "rsmq", quiet=2)  # as after an installation
    environments, costs = dict[str, Environment](), defaultdict[str, list[tuple[float, float]]](list)
    for name in names:
        environment = Environment(ENTRIES[name])
        try:
            environment.ensure()
            once(environment, PROGRAMS[name])
        except Unavailable as error:
            print(f"{name} is left out: {error}")
            continue
        environments[name] = environment
    for _ in range(rounds):
        for name, environment in environments.items():
            costs[name].append(once(environment, PROGRAMS[name]))
    systems = [
        {"name": ENTRIES[name].title, "version": environments[name].version() if ENTRIES[name].requirements else "",
         "program": PROGRAMS[name], "cpu_ms": min(cpu for cpu, _ in found), "mib": min(mib for _, mib in found)}
        for name, found in costs.items()
    ]  # fmt: skip
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return {"day": now, "rounds": rounds, "load": os.getloadavg()[0], "machine": machine(), "systems": systems}


def text(found: Found) -> str:
    """The section of the page."""
    base = found["systems"][0]
    rows = [
        (f"{each['name']} {each['version']}".strip(), round(each["cpu_ms"]), each["cpu_ms"] / base["cpu_ms"],
         each["mib"]) for each in found["systems"]
    ]  # fmt: skip
    head = ("imported, and the object that publishes made", "CPU, ms", f"times {base['name']}", "memory, MiB")
    about = found["machine"]
    return "\n".join([
        *table(head, rows),
        "",
        f"`python -m benchmarks.imports --write`, {found['day']}: {about['cpu']}, {about['cores']} cores, Python "
        f"{about['python']}; the least of {found['rounds']} rounds, load average {found['load']:.0f} ({SECTION.link}).",
    ])  # fmt: skip


SECTION: Final = Section("imports", text)


def main() -> None:
    """Measure, print, and with `--write` keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", help="names with commas between them; the bare client comes first in any case")
    parser.add_argument("--write", action="store_true", help="keep figures and section")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(PROGRAMS)
    if unknown := set(chosen) - set(PROGRAMS):
        parser.error(f"no such system: {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    found = measure(options.rounds, ["bare", *(name for name in chosen if name != "bare")])
    print(text(found))
    if options.write:
        SECTION.keep(found)


if __name__ == "__main__":
    main()
