"""Order, invoice, receipt, while workers are killed at random: each order has one of each. Ends with a verdict.

python examples/shop/run.py
python examples/shop/run.py --orders 5000 --kills 40
python examples/shop/run.py --database postgresql+psycopg://shop@localhost/shop
"""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Final

import anyio
import typer
from sqlalchemy import Table, select

from rsmq import Broker, Settings
from rsmq.inspector import Inspector
from rsmq.sql import create_tables

WORKERS: Final = 2
PATIENCE: Final = 120.0
"""Give up after so many seconds without an invoice or a receipt."""
POLL_SECONDS: Final = 0.1
CUSTOMERS: Final = ("ada", "grace", "linus", "radia")


def main(
    orders: Annotated[int, typer.Option(min=1, max=100_000, help="How many.")] = 1_000,
    kills: Annotated[int, typer.Option(min=0, max=1000, help="How many times a worker is killed.")] = 10,
    database: Annotated[str | None, typer.Option(help="Its URL, with an async driver. Default: a SQLite file.")] = None,
    url: Annotated[str | None, typer.Option(help="The server. Default: RSMQ_URL, else an embedded one.")] = None,
) -> None:
    """Place orders and kill workers; ends with a verdict (exit code 1 if it is bad)."""
    logging.getLogger("rsmq").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(prefix="rsmq-shop-"))
    os.environ["DATABASE_URL"] = database or f"sqlite+aiosqlite:///{folder / 'shop.db'}"
    os.environ["RSMQ_PREFIX"] = f"shop-{secrets.token_hex(4)}"  # here, and in the workers: who relays what is written
    is_good = anyio.run(perform, orders, kills, folder, url)
    if not is_good:
        print(f"A promise was BROKEN: the logs are in {folder}")
        sys.exit(1)
    print("One invoice and one receipt for each order.")
    shutil.rmtree(folder)


async def perform(orders: int, kills: int, folder: Path, url: str | None) -> bool:
    """Run the shop, print what it has, and say whether that is right."""
    import service  # now: it reads DATABASE_URL and RSMQ_PREFIX

    async with service.engine.begin() as connection:
        await connection.run_sync(create_tables)
        await connection.run_sync(service.metadata.drop_all)  # what an earlier run has left
        await connection.run_sync(service.metadata.create_all)
    async with Broker(Settings() if url is None else Settings(url=url)) as broker:
        shop = Shop(service, broker, folder, orders)
        with shop.workers() as workers:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(shop.place_all)
                tasks.start_soon(shop.disturb, workers, kills)
                await shop.wait()
                tasks.cancel_scope.cancel()
        placed, billed = await shop.numbers(service.ORDERS), await shop.numbers(service.INVOICES)
        thanked = await shop.receipts()
        for topic in ("orders", "invoices", "receipts"):
            if await broker.topics.find(topic):  # in a bad run it may never have been made
                await broker.topics.delete(topic)
    await service.engine.dispose()
    print(f"orders      {len(placed)}, workers killed {shop.killed} times")
    return all([judge("invoices", placed, billed), judge("receipts", placed, thanked)])


def judge(what: str, orders: list[int], found: list[int]) -> bool:
    """Print whether each order has one, and return it."""
    counts = Counter(found)
    missing = sum(counts[number] == 0 for number in orders)
    doubled = sum(count > 1 for count in counts.values())
    unknown = len(counts.keys() - set(orders))
    is_good = not (missing or doubled or unknown)
    print(f"{what:<11} {len(found)}: {missing} missing, {doubled} doubled, {unknown} unknown {'✓' if is_good else '✗'}")
    return is_good


class Shop:
    """The course of a run."""

    def __init__(self, service: ModuleType, broker: Broker, folder: Path, orders: int) -> None:
        self._service, self._broker, self._folder, self._orders = service, broker, folder, orders
        self._inspector = Inspector(broker.client, broker.keys, broker.settings)
        self._environment = {**os.environ, "RSMQ_URL": broker.url}
        self._logs: dict[subprocess.Popen[bytes], Path] = {}
        self.killed = 0
        self._has_ended = anyio.Event()

    async def place_all(self) -> None:
        """All orders, one transaction each."""
        for number in range(self._orders):
            await self._service.place(
                {"number": number, "customer": CUSTOMERS[number % len(CUSTOMERS)], "amount": number % 90 + 10}
            )

    async def disturb(self, workers: list[subprocess.Popen[bytes]], kills: int) -> None:
        """Kill a worker that serves, and start it again; `kills` times, evenly over the orders."""
        for kill in range(kills):
            while len(await self.numbers(self._service.INVOICES)) < self._orders * (kill + 0.5) / kills:
                await anyio.sleep(POLL_SECONDS / 5)
            await anyio.sleep(random.uniform(0, POLL_SECONDS))
            while not (serving := [number for number in range(WORKERS) if self._is_serving(workers[number])]):
                await anyio.sleep(POLL_SECONDS / 5)
            victim = random.choice(serving)
            workers[victim].kill()
            workers[victim].wait()
            self.killed += 1
            workers[victim] = self._start(victim)
        self._has_ended.set()

    def _is_serving(self, worker: subprocess.Popen[bytes]) -> bool:
        return " serves " in self._logs[worker].read_text()

    async def wait(self) -> None:
        """Until all is settled and nothing more can come, or until nothing changes any more."""
        changed_at, before = time.monotonic(), (-1, -1)
        while not (self._has_ended.is_set() and await self._is_settled()):
            now = len(await self.numbers(self._service.INVOICES)), len(await self.receipts())
            if now != before:
                changed_at, before = time.monotonic(), now
            elif time.monotonic() > changed_at + PATIENCE:
                return
            await anyio.sleep(POLL_SECONDS)

    async def _is_settled(self) -> bool:
        if (
            len(await self.numbers(self._service.ORDERS)) < self._orders
            or (await self._service.outbox.status()).backlog
        ):
            return False
        groups = await self._inspector.groups()
        waits = (group.unread or group.pending or group.waiting_for_retry for group in groups)
        return len(groups) == 2 and not any(waits)

    async def numbers(self, table: Table) -> list[int]:
        """The order numbers in a table."""
        async with self._service.engine.connect() as connection:
            return list(await connection.scalars(select(table.c.number)))

    async def receipts(self) -> list[int]:
        """The order numbers in the topic of the receipts, which no group reads: it keeps all of them."""
        topic = await self._broker.topics.find("receipts")
        found: list[int] = []
        for partition in () if topic is None else topic.numbers:
            stream = self._broker.keys.stream("receipts", partition)
            for _, fields in await self._broker.client.execute_command("XRANGE", stream, "-", "+"):
                found.append(json.loads(fields[fields.index(b"data") + 1])["number"])
        return found

    @contextmanager
    def workers(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Worker processes, which end with the block."""
        running = [self._start(number) for number in range(WORKERS)]
        try:
            yield running
        finally:
            for worker in running:
                worker.terminate()
            for worker in running:
                worker.wait()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        path = self._folder / f"worker-{number}-{len(self._logs)}.log"
        with path.open("wb") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "rsmq", "worker", "service:broker"], cwd=Path(__file__).parent,
                env=self._environment, stdout=log, stderr=log,
            )  # fmt: skip
        self._logs[worker] = path
        return worker


if __name__ == "__main__":
    typer.run(main)
