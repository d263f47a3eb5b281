"""What a server may say instead of doing its work: after each of it a worker that runs goes on by itself, nothing is
lost, and while it lasts the worker neither spins nor fills its log. Promise 2."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import anyio
import pytest
import redis

from rsmq import Broker, BrokerError, PublishUnknown, Settings
from rsmq.testing.server import free_port
from rsmq.worker.eviction_monitor import EvictionMonitor
from tests.contract.witness import Witness, settled
from tests.patience import until
from tests.servers import Server, wait_until

LASTS: Final = 1.5
"""Seconds that a condition lasts."""
MOST_LINES: Final = 10
"""Warnings allowed per second, and so many on top."""
MOST_CPU: Final = 0.5
"""Allowed share of one core, with publisher and handlers."""


@dataclass
class Load:
    """Publishes numbers one after the other and survives all errors of the server."""

    broker: Broker
    confirmed: set[int] = field(default_factory=set)
    refused: int = 0

    async def run(self) -> None:
        """Publish until cancelled."""
        number = 0
        while True:
            number += 1
            with anyio.CancelScope(shield=True):
                try:
                    await self.broker.publish("t", {"n": number}, key=f"k{number % 7}")
                    self.confirmed.add(number)
                except PublishUnknown:
                    pass
                except BrokerError:
                    self.refused += 1
            await anyio.sleep(0.005)


@contextmanager
def out_of_memory(server: Server) -> Iterator[None]:
    """maxmemory with noeviction: OOM."""
    with server.client() as client:
        client.config_set("maxmemory", 1)
        yield
        client.config_set("maxmemory", 0)


@contextmanager
def busy(server: Server) -> Iterator[None]:
    """A script of another client does not end: BUSY."""

    def run() -> None:
        with suppress(redis.ResponseError), redis.Redis.from_url(server.url, socket_timeout=None) as client:
            client.eval("while true do end", 0)

    with server.client() as client:
        client.config_set("busy-reply-threshold", 50)
        thread = threading.Thread(target=run)
        thread.start()
        yield
        client.execute_command("SCRIPT", "KILL")
        thread.join()


@contextmanager
def loading(server: Server) -> Iterator[None]:
    """It restarts and loads its data slowly: LOADING."""
    with server.client() as client:
        for number in range(500):
            client.set(f"ballast{number}", 1)
    server.kill()
    server.start()
    yield


@contextmanager
def read_only(server: Server) -> Iterator[None]:
    """It was made a replica: READONLY."""
    with server.client() as client:
        client.replicaof("127.0.0.1", free_port())
        yield
        client.replicaof("NO", "ONE")


@contextmanager
def replica_alone(server: Server) -> Iterator[None]:
    """It is a replica without a master that serves no stale data: MASTERDOWN."""
    with server.client() as client:
        client.config_set("replica-serve-stale-data", "no")
        client.replicaof("127.0.0.1", 1)
        yield
        client.replicaof("NO", "ONE")


@contextmanager
def too_few_replicas(server: Server) -> Iterator[None]:
    """It requires a replica for writes: NOREPLICAS."""
    with server.client() as client:
        client.config_set("min-replicas-to-write", 1)
        yield
        client.config_set("min-replicas-to-write", 0)


@contextmanager
def disk_error(server: Server) -> Iterator[None]:
    """Its snapshot cannot be written: MISCONF."""
    obstacle = server.directory / "dump.rdb"
    with server.client() as client:
        obstacle.mkdir()
        client.config_set("save", "3600 1")
        client.bgsave()
        wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] != "ok", "the snapshot has failed")
        yield
        client.config_set("save", "")
        obstacle.rmdir()


@contextmanager
def no_rights(server: Server) -> Iterator[None]:
    """Its user may not read, settle and run scripts, because an operator has loaded a wrong ACL: NOPERM."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-eval", "-evalsha", "-xreadgroup", "-xack", "-xadd")
        yield
        client.execute_command("ACL", "SETUSER", "default", "+@all")


def lasting(condition: Callable[[Server], AbstractContextManager[None]], server: Server) -> float:
    """Keep a condition for a while; returns the seconds it took. Runs in a thread."""
    begin = time.monotonic()
    with condition(server):
        time.sleep(max(0.0, LASTS - (time.monotonic() - begin)))  # that it lasts is the thing under test
    return time.monotonic() - begin


class Quiet(logging.Handler):
    """Counts warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name}: {record.getMessage()}")


@pytest.fixture
def log() -> Iterator[Quiet]:
    """The warnings of rsmq."""
    quiet = Quiet()
    logging.getLogger("rsmq").addHandler(quiet)
    yield quiet
    logging.getLogger("rsmq").removeHandler(quiet)


@pytest.fixture
def own() -> Iterator[Server]:
    """A server with an append-only file that loads slowly."""
    with Server("--key-load-delay", "1500", "--loading-process-events-interval-bytes", "1024", aof=True) as server:
        yield server


BOTH_WAYS: Final = (out_of_memory, busy, loading, read_only, replica_alone, too_few_replicas, disk_error)


@pytest.mark.parametrize(
    ("condition", "distribution"), [*itertools.product(BOTH_WAYS, ("hash", "shared")), (no_rights, "hash")]
)
async def test_work_goes_on_after(
    condition: Callable[[Server], AbstractContextManager[None]], distribution: str, own: Server, prefix: str, log: Quiet
) -> None:
    """Work continues after each condition, under load and with a failing handler."""
    settings = Settings(
        url=own.url, prefix=prefix, preflight="warn", unavailable_timeout=timedelta(milliseconds=700),
        lease_ttl=timedelta(seconds=2),
    )  # fmt: skip
    broker, witness, failed = Broker(settings), Witness(), set[int]()

    @broker.handler("t", group="g", distribution=distribution)  # type: ignore[arg-type]
    async def handle(order: dict[str, int]) -> None:
        if order["n"] % 10 == 0 and order["n"] not in failed:
            failed.add(order["n"])
            raise ValueError("the first attempt fails")
        witness.note(order["n"])

    async with broker.running(), anyio.create_task_group() as tasks:
        load = Load(broker)
        tasks.start_soon(load.run)
        await until(lambda: len(witness.seen) > 50, "work goes on before")
        log.lines.clear()
        cpu = time.process_time()
        seconds = await anyio.to_thread.run_sync(lasting, condition, own)
        cpu, lines = time.process_time() - cpu, list(log.lines)
        before = len(load.confirmed)
        await until(lambda: len(load.confirmed) > before + 50, "work goes on after")
        tasks.cancel_scope.cancel()
        await witness.sees(load.confirmed, again=True)
        await settled(broker, "t")
    print(f"{condition.__name__}: {seconds:.1f} s, {len(lines)} lines, {cpu:.2f} s CPU, {load.refused} refused")
    lines = [line for line in lines if "the first attempt fails" not in line]
    assert len(lines) <= MOST_LINES * (seconds + 1), "\n".join(lines)
    assert cpu <= MOST_CPU * (seconds + 1)


async def test_forgotten_scripts_are_loaded_again(own: Server, prefix: str) -> None:
    """SCRIPT FLUSH many times under load has no visible effect."""
    broker, witness = Broker(Settings(url=own.url, prefix=prefix, preflight="warn")), Witness()

    @broker.handler("t", group="g")
    async def handle(order: dict[str, int]) -> None:
        witness.note(order["n"])

    async with broker.running(), anyio.create_task_group() as tasks:
        load = Load(broker)
        tasks.start_soon(load.run)
        for _ in range(20):
            reached = len(witness.seen)
            await broker.client.execute_command("SCRIPT", "FLUSH")
            await until(lambda reached=reached: len(witness.seen) > reached + 5, "work goes on")
        tasks.cancel_scope.cancel()
        await witness.sees(load.confirmed)
        await settled(broker, "t")
    assert load.refused == 0


async def test_evicted_groups_and_streams_are_created_again(own: Server, prefix: str) -> None:
    """The policy is changed under a worker, and the server makes room: groups and streams come back by themselves, and
    what is published afterwards is handled."""
    broker, witness = Broker(Settings(url=own.url, prefix=prefix, preflight="warn")), Witness()

    @broker.handler("t", group="g")
    async def handle(order: dict[str, int]) -> None:
        witness.note(order["n"])

    async with broker.running():
        monitor = EvictionMonitor(broker.client)
        await monitor.check()
        await broker.publish_many("t", [{"n": n} for n in range(50)])
        await witness.sees(range(50))
        with own.client() as client, caplog_of("rsmq.eviction") as lines:
            client.config_set("maxmemory-policy", "allkeys-lru")
            client.config_set("maxmemory", 1)
            await until(lambda: evicted(client) > 20, "more is evicted than the topic has streams")
            await monitor.check()
            client.config_set("maxmemory", 0)
            client.config_set("maxmemory-policy", "noeviction")
        assert "maxmemory-policy has become allkeys-lru" in lines[0]
        assert "has evicted" in lines[1]
        await broker.publish_many("t", [{"n": n} for n in range(50, 100)])
        await witness.sees(range(50, 100), again=True)
        await settled(broker, "t")


def evicted(client: redis.Redis) -> int:
    """Make the server evict keys; returns how many it has evicted so far."""
    with suppress(redis.ResponseError):
        client.set("x", 1)
    return int(client.info("stats")["evicted_keys"])


@contextmanager
def caplog_of(name: str) -> Iterator[list[str]]:
    """What a logger says inside the block."""
    quiet = Quiet()
    logging.getLogger(name).addHandler(quiet)
    yield quiet.lines
    logging.getLogger(name).removeHandler(quiet)
