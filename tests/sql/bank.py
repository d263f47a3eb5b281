"""The bank: transfers and receipts under faults, and whether each counted once.

`python -m tests.sql.bank --transfers 100000 [--plain|--batch] [--on sentinel|cluster]` is the long form. Workers are
killed between commit and settle, between publish and delete of the relay, and at random moments; paused for longer than
a lease; their connections to PostgreSQL are cut, and PostgreSQL is killed. With Sentinel and on a cluster masters are
killed, and slots of the cluster move.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from redis.exceptions import RedisError
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from rsmq import Broker, BrokerError, Settings
from rsmq.sql import create_tables
from tests.sql.bank_servers import BankServers, On, bank_servers
from tests.sql.databases import Postgres

ROOT = Path(__file__).parents[2]
ACCOUNTS, BALANCE = 50, 1000
PUBLISHERS = 64
SETTLED = "return redis.call('XPENDING', KEYS[1], ARGV[1])[1] + redis.call('ZCARD', KEYS[2])"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the transfers: all zero and the sum as it was, if each counted once."""

    transfers: int
    missing: int
    doubled: int
    receipts_missing: int
    receipts_doubled: int
    balance_error: int
    kills: int
    failovers: int = 0
    moved: int = 0
    """Slots of a cluster."""

    @property
    def is_good(self) -> bool:
        """Whether each transfer and each receipt counted exactly once."""
        wrong = self.missing, self.doubled, self.receipts_missing, self.receipts_doubled, self.balance_error
        return not any(wrong)


class Bank:
    """The servers, the workers and the faults of one run."""

    def __init__(self, postgres: Postgres, servers: BankServers, *, die: float | Path, mode: str, every: float) -> None:
        self._postgres, self._die, self._mode, self._every = postgres, die, mode, every
        self._servers = servers
        self._name = postgres.new_database()
        self._engine: Engine = create_engine(postgres.url("psycopg", self._name), poolclass=NullPool)
        self._url, self._log = servers.url, servers.directory / "workers.log"
        self._workers: list[subprocess.Popen[bytes]] = []
        self._count = 2 if isinstance(die, Path) else 3
        self.kills = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Workers run inside of the block."""
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """SIGKILL to all workers."""
        for worker in self._workers:
            worker.send_signal(signal.SIGCONT)
            worker.kill()
            worker.wait()

    def keep_running(self) -> None:
        """Start those that are dead again."""
        dead = [worker for worker in self._workers if worker.poll() is not None]
        self.kills += len(dead)
        self._workers = [worker for worker in self._workers if worker not in dead]
        while len(self._workers) < self._count:
            url = self._postgres.url("asyncpg", self._name).render_as_string(hide_password=False)
            command = [sys.executable, "-m", "tests.sql.bank_worker", self._url, url, str(self._die)]
            command += [self._mode] if self._mode else []
            command += ["--replicas"] if self._servers.replicas else []
            with self._log.open("ab") as log:
                self._workers.append(subprocess.Popen(command, cwd=ROOT, stderr=log))

    def open(self) -> None:
        """The tables and the accounts."""

        def fill(connection: Connection) -> None:
            create_tables(connection)
            for statement in (
                "CREATE TABLE account (id int primary key, balance bigint)", "CREATE TABLE transfer (id bigint)",
                "CREATE TABLE receipt (id bigint)",
                f"INSERT INTO account SELECT n, {BALANCE} FROM generate_series(0, {ACCOUNTS - 1}) n",
            ):  # fmt: skip
                connection.execute(text(statement))

        with self._engine.begin() as connection:
            fill(connection)

    async def run(self, transfers: int) -> Verdict:
        """Publish the transfers, disturb, wait until all is settled, and count."""
        self.open()
        broker = Broker(Settings(url=self._url, preflight="warn"))
        async with broker:
            publishing = asyncio.create_task(self._publish(broker, transfers))
            next_fault, next_word = time.monotonic() + 2, time.monotonic() + 10
            while not (publishing.done() and await self._is_settled(broker, transfers)):
                self.keep_running()
                if self._every and time.monotonic() > next_fault:
                    next_fault = time.monotonic() + random.uniform(0.5, 1.5) * self._every
                    await self._disturb(broker)
                await asyncio.sleep(0.2)
                if time.monotonic() > next_word:
                    next_word = time.monotonic() + 10
                    self._tell()
            await publishing
        return self._count_all(transfers)

    async def _publish(self, broker: Broker, transfers: int) -> None:
        """All of them; those that are not confirmed once more, under their id."""
        if not self._servers.replicas:
            items = (transfer(number) for number in range(transfers))
            await broker.publish_many("transfers", items, key=lambda each: str(each["source"]))
            return
        numbers = iter(range(transfers))
        await asyncio.gather(*(self._publish_each(broker, numbers) for _ in range(PUBLISHERS)))

    async def _publish_each(self, broker: Broker, numbers: Iterator[int]) -> None:
        for number in numbers:
            item = transfer(number)
            while True:
                try:
                    await broker.publish(
                        "transfers", item, key=str(item["source"]), message_id=str(number),
                        wait_replicas=self._servers.replicas,
                    )  # fmt: skip
                    break
                except BrokerError:
                    await asyncio.sleep(0.1)

    async def _disturb(self, broker: Broker) -> None:
        """One fault of the outside."""
        victim = random.choice(self._workers)
        servers = ["servers", "servers"] if self._servers.replicas else []
        match random.choice(["kill", "pause", "cut", "cut", "database", *servers]):
            case "servers":
                streams = [broker.keys.stream(topic, each) for topic in ("transfers", "receipts") for each in range(8)]
                await asyncio.to_thread(self._servers.fail, streams)
            case "kill":
                victim.kill()
            case "pause":
                victim.send_signal(signal.SIGSTOP)
                await asyncio.sleep(2.5)
                victim.send_signal(signal.SIGCONT)
            case "cut":
                with suppress(DBAPIError), self._engine.begin() as connection:
                    connection.execute(
                        text(
                            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                            "AND pid <> pg_backend_pid()"
                        )
                    )
            case "database":
                self._postgres.kill()
                self._postgres.start()

    def _tell(self) -> None:
        """How far it is, for the long form."""
        with suppress(DBAPIError), self._engine.connect() as connection:
            tables = ("transfer", "receipt", "rsmq_outbox", "rsmq_handled")
            counts = [connection.scalar(text(f"SELECT count(*) FROM {table}")) for table in tables]
            print(dict(zip(tables, counts, strict=True)), f"kills={self.kills}", flush=True)

    async def _is_settled(self, broker: Broker, transfers: int) -> bool:
        if not await self._is_drained(broker):  # asked again below: a receipt may be on its way
            return False
        with suppress(DBAPIError), self._engine.connect() as connection:
            if (connection.scalar(text("SELECT count(*) FROM rsmq_outbox")) or 0) > 0:
                return False
            if (connection.scalar(text("SELECT count(*) FROM receipt")) or 0) < transfers:
                return False
            return await self._is_drained(broker)
        return False

    async def _is_drained(self, broker: Broker) -> bool:
        """Whether both groups have settled everything, so that nothing more can come."""
        ask = broker.client.execute_command
        try:
            for topic, group in (("transfers", "bank"), ("receipts", "mail")):
                for partition in range(8):
                    names = broker.keys.stream(topic, partition), broker.keys.retry(topic, partition, group)
                    rows = await ask("XINFO", "GROUPS", names[0])
                    lag = dict(zip(rows[0][::2], rows[0][1::2], strict=True))[b"lag"] if rows else 1
                    if lag or await ask("EVAL", SETTLED, 2, *names, group):
                        return False
        except (BrokerError, RedisError):
            return False  # a master is missing, or a topic
        return True

    def _count_all(self, transfers: int) -> Verdict:
        with self._engine.connect() as connection:
            found = [
                connection.execute(text(f"SELECT count(DISTINCT id), count(*) FROM {table}")).one()
                for table in ("transfer", "receipt")
            ]
            total = int(connection.scalar(text("SELECT sum(balance) FROM account")) or 0)
            moved = int(connection.scalar(text("SELECT sum(abs(balance - 1000)) FROM account")) or 0)
        assert moved, "no money has moved"
        (booked, rows), (sent, receipts) = found
        numbers = transfers - booked, rows - booked, transfers - sent, receipts - sent
        return Verdict(transfers, *numbers, abs(total - ACCOUNTS * BALANCE), self.kills)


def transfer(number: int) -> dict[str, int]:
    """The same for the same number."""
    generator = random.Random(number)
    source, target = generator.sample(range(ACCOUNTS), 2)
    return {"id": number, "source": source, "target": target, "amount": generator.randint(1, 50)}


async def run_bank(
    transfers: int, *, die: float | Path, mode: str = "", every: float = 0.0, on: On = "server"
) -> Verdict:
    """One run on servers of its own. `every`: seconds between two faults of the outside; 0: there are none."""
    with Postgres() as postgres, bank_servers(on) as servers:
        bank = Bank(postgres, servers, die=die, mode=mode, every=every)
        with bank.running():
            verdict = await bank.run(transfers)
        return replace(verdict, failovers=servers.failovers, moved=servers.moved)


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transfers", type=int, default=100_000)
    parser.add_argument("--die", type=float, default=0.0005)
    parser.add_argument("--every", type=float, default=5.0)
    modes = parser.add_mutually_exclusive_group()
    for mode in ("--plain", "--batch"):
        modes.add_argument(mode, action="store_const", const=mode, default="", dest="mode")
    parser.add_argument("--on", choices=get_args(On), default="server")
    given = parser.parse_args()
    verdict = asyncio.run(run_bank(given.transfers, die=given.die, mode=given.mode, every=given.every, on=given.on))
    print(verdict)
    sys.exit(not verdict.is_good or (given.on != "server" and not verdict.failovers))


if __name__ == "__main__":
    main()
