"""The MQTT gateway beside Mosquitto and amqtt: `python -m benchmarks.gateway [--quick] [--only rsmq] [--work pairs]`.

CPU microseconds a message of the broker's process and of the server behind it, from /proc; wall-clock figures depend on
who else uses the machine. One run after the other, each on a broker of its own. It writes
benchmarks/results/gateway.json and a section of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import redis
from rich.console import Console
from rich.progress import Progress

from benchmarks.gateway_page import SECTION, WORKS, rows
from benchmarks.peers.catalogue import Entry
from benchmarks.peers.environment import Environment, Unavailable
from benchmarks.peers.results import rounded
from benchmarks.section import RESULTS
from benchmarks.server import server
from rsmq.testing.server import free_port

ROOT: Final = Path(__file__).parents[1]
TICKS: Final = os.sysconf("SC_CLK_TCK")
NO_UVLOOP: Final = """import sys

sys.modules["uvloop"] = None  # as if it were not installed
"""
APP: Final = """from rsmq import Broker, Settings
from rsmq.gateway import Gateway, GatewayOptions

gateway = Gateway(Broker(Settings(url={url!r})), listen=["mqtt://127.0.0.1:{port}"],
                  options=GatewayOptions(anonymous=True))
gateway.route("ingest/#", topic="ingest", subscribers=False)
"""
MOSQUITTO: Final = """listener {port} 127.0.0.1
allow_anonymous true
persistence {persistence}
persistence_location {directory}/
max_queued_messages {queue}
"""
AMQTT: Final = """listeners:
  default:
    type: tcp
    bind: 127.0.0.1:{port}
plugins:
  amqtt.plugins.authentication.AnonymousAuthPlugin:
    allow_anonymous: true
"""


def cpu_of(pid: int) -> float:
    """Microseconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS * 1e6


def memory_of(pid: int) -> int:
    """Bytes that a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class System:
    """A broker with what belongs to it. `pids`: its own process, and that of the server behind it."""

    name, goal = "", False

    def __init__(self, stack: ExitStack, *, durable: bool = False) -> None:
        self.port, self.durable = free_port(), durable
        self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._stack = stack
        self._process: subprocess.Popen[bytes] | None = None
        self.pids: list[int] = []
        self.prepare()
        stack.callback(lambda: self.stop(signal.SIGTERM))
        self.start()

    def prepare(self) -> None:
        """Write files, start servers."""

    def command(self) -> list[str]:
        """Of the broker."""
        raise AssertionError

    def start(self) -> None:
        """Start the broker, and wait until it listens."""
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), cwd=self.directory, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)}
            )
        self.pids = [self._process.pid, *self.pids[1:]]
        wait_for_port(self.port)

    def another(self) -> System | None:
        """A second broker with the same sessions, if it can have one."""
        return None

    def stop(self, number: int) -> None:
        """End the broker with a signal, if it could be started."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.send_signal(number)
        self._process.wait()


class Rsmq(System):
    """One gateway on an embedded server with its append-only file, with uvloop, as the extra `mqtt` installs it."""

    name, url, head = "rsmq", "", ""

    def another(self) -> System:
        return type("Second", (type(self),), {"url": self.url})(self._stack)

    def prepare(self) -> None:
        self.url = url = self.url or self._stack.enter_context(server())
        (self.directory / "app.py").write_text(self.head + APP.format(url=url, port=self.port))
        with redis.Redis.from_url(url, protocol=2) as client:
            self.pids = [0, int(client.info("server")["process_id"])]

    def command(self) -> list[str]:
        return [sys.executable, "-m", "rsmq", "gateway", "app:gateway"]


class RsmqAsyncio(Rsmq):
    """The same with the event loop of asyncio."""

    name, head = "rsmq, no uvloop", NO_UVLOOP


class Mosquitto(System):
    """Everything in memory, queues without limit; `durable` with its persistence and its defaults instead."""

    name = "Mosquitto"

    @staticmethod
    def version() -> str:
        """Of the installed one, or nothing."""
        found = shutil.which("mosquitto") or "/usr/sbin/mosquitto"
        if not Path(found).exists():
            return ""
        return subprocess.run([found, "-h"], capture_output=True, text=True, check=False).stdout.split()[2]

    def prepare(self) -> None:
        persistence, queue = ("true", 1000) if self.durable else ("false", 0)
        text = MOSQUITTO.format(port=self.port, persistence=persistence, directory=self.directory, queue=queue)
        (self.directory / "conf").write_text(text + ("user root\n" if os.getuid() == 0 else ""))

    def command(self) -> list[str]:
        found = shutil.which("mosquitto") or "/usr/sbin/mosquitto"
        if not Path(found).exists():
            raise Unavailable("mosquitto is not installed")
        return [found, "-c", str(self.directory / "conf")]


class Amqtt(System):
    """The broker in pure Python."""

    name = "amqtt"
    environment = Environment(Entry("amqtt", "amqtt", "", ("amqtt",)))

    def prepare(self) -> None:
        self.environment.ensure()
        (self.directory / "conf").write_text(AMQTT.format(port=self.port))

    def command(self) -> list[str]:
        return [str(Path(self.environment.python).with_name("amqtt")), "-c", str(self.directory / "conf")]


SYSTEMS: Final = (Rsmq, RsmqAsyncio, Mosquitto, Amqtt)


def wait_for_port(port: int, seconds: float = 30) -> None:
    """Wait until something listens there."""
    import socket

    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        if time.monotonic() > deadline:
            raise Unavailable("it does not listen")
        time.sleep(0.05)


@contextmanager
def load(work: str, port: int, given: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """The process that makes the load, ready to begin."""
    command = [sys.executable, "-m", "benchmarks.mqtt_load", work, str(port), json.dumps(given)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "begin\n":
                raise Unavailable("its clients do not connect")
            yield process
        finally:
            process.kill()


def go(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Let it work; its results."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    found: dict[str, Any] = json.loads(process.stdout.readline() or "{}")
    return found


def measured(system: System, work: str, given: dict[str, Any], per: int) -> dict[str, Any]:
    """CPU a unit of each process, beside what the load has seen."""
    with load(work, system.port, given) as process:
        before = [cpu_of(pid) for pid in system.pids]
        memory = memory_of(system.pids[0])
        found = go(process)
        found["cpu"] = [(cpu_of(pid) - old) / per for pid, old in zip(system.pids, before, strict=True)]
        found["bytes"] = (memory_of(system.pids[0]) - memory) / per
        found["rate"] = per / found["seconds"] if found.get("seconds") else 0
    return found


def killed(system: System, given: dict[str, Any]) -> dict[str, Any]:
    """The broker is killed when all is acknowledged, and started again."""
    with load("absent", system.port, given) as process:
        system.stop(signal.SIGKILL)
        system.start()
        return go(process)


def resumed(system: System, given: dict[str, Any]) -> dict[str, Any]:
    """Clients come back with a backlog: to a second gateway and to the first in turn, where there are several."""
    other = system.another()
    with load("resume", system.port, given | {"ports": [each.port for each in (other, system) if each]}) as process:
        return go(process)


def run(kind: type[System], work: str, options: argparse.Namespace) -> dict[str, Any]:
    """One work on a broker of its own."""
    n = 10 if options.quick else 1
    many = 200
    slow_kind = 10 if kind is Amqtt else 1
    count = 60_000 // n // slow_kind
    paced, rate = 20_000 // n, 4_000
    with ExitStack() as stack:
        system = kind(stack, durable=work in ("kill", "slow", "resume"))
        match work:
            case "ingest":
                return measured(system, "ingest", {"clients": many, "count": count}, count)
            case "ingest paced":
                return measured(system, "ingest", {"clients": many, "count": paced, "rate": rate}, paced)
            case "pairs":
                return measured(system, "pairs", {"clients": many, "count": count}, count)
            case "pairs paced":
                return measured(system, "pairs", {"clients": many, "count": paced, "rate": rate}, paced)
            case "single":
                return measured(system, "single", {"clients": 40, "count": paced // 10}, paced // 10)
            case "fan brief" | "fan kept":
                times = count // many
                given = {"clients": many, "count": times, "clean": work == "fan brief"}
                return measured(system, "fan", given, times * many)
            case "connect":
                clients = 2_000 // n
                return measured(system, "connects", {"count": clients}, clients)
            case "kill":
                return killed(system, {"count": 5_000})
            case "resume":
                return resumed(system, {"count": 10_000 if issubclass(kind, Rsmq) else 1_000, "times": 40 // n})
            case _:
                return measured(system, "slow", {"clients": many, "seconds": 5 if n == 1 else 2}, 1)


def main() -> None:
    """Measure, keep, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the messages; nothing is kept")
    parser.add_argument("--only", action="append", choices=[each.name for each in SYSTEMS])
    parser.add_argument("--work", action="append", choices=list(WORKS))
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    kinds = [each for each in SYSTEMS if not options.only or each.name in options.only]
    works = options.work or list(WORKS)
    results: dict[str, dict[str, Any]] = {kind.name: {} for kind in kinds}
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(kinds) * len(works))
        for work in works:
            for kind in kinds:
                progress.update(task, description=f"{kind.name}: {work}", advance=1)
                try:
                    found = [run(kind, work, options) for _ in range(options.rounds)]
                    results[kind.name][work] = best(found)
                except Unavailable as error:
                    results[kind.name][work] = {"why": str(error)}
    if not options.quick:
        earlier = SECTION.read()["results"] if (RESULTS / "gateway.json").exists() else {}
        kept = {each.name: earlier.get(each.name, {}) | results.get(each.name, {}) for each in SYSTEMS}
        about = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"), "cores": os.cpu_count(), "load": round(os.getloadavg()[1]),
            "rounds": f"{options.rounds} rounds" if options.rounds > 1 else "one round",
            "mosquitto": Mosquitto.version(),
        }  # fmt: skip
        SECTION.keep({"about": about, "results": rounded(kept)})
    print("\n".join(rows(results)))


def best(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The round with the least CPU: other load on the machine only ever adds."""
    return min(found, key=lambda each: sum(each.get("cpu", [])))


if __name__ == "__main__":
    main()
