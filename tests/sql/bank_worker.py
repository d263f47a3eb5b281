"""A worker of the bank: transfers move money in a database, and their receipts go through the outbox.

`python -m tests.sql.bank_worker REDIS_URL DATABASE_URL DIE [--plain|--batch] [--replicas]`. With the probability DIE it
kills itself between a commit and the settle, and between publish and delete of the relay. If DIE is a directory, one
worker does so once at each of these points. `--plain` works without effects and outbox, `--batch` books many transfers
at once. With `--replicas` the relay waits until a replica has each receipt.
"""

import asyncio
import logging
import os
import random
import signal
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from fast_depends import Depends
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session
from tenacity import wait_random

from rsmq import Broker, Retry, RetryPolicy, Settings
from rsmq.sql import Effects, Outbox
from rsmq.sql.effects import Transaction
from rsmq.sql.relay import OutboxRelay

redis_url, database_url, die, *mode = sys.argv[1:]
broker = Broker(Settings(url=redis_url, preflight="warn", lease_ttl=timedelta(seconds=2)))
engine = create_async_engine(database_url, pool_size=20)
sessions = async_sessionmaker(engine)
effects, outbox = Effects(sessions), Outbox(engine, wait_replicas=int("--replicas" in mode))
BATCH = 50
FAILURES = 0.05
"""The share of batches of which one message fails."""
PATIENT = RetryPolicy(max_attempts=1000, wait=wait_random(0.05, 0.2))
MOVE = text("UPDATE account SET balance = balance + :amount WHERE id = :id")
BOOK = text("INSERT INTO transfer VALUES (:id)")


def failing(count: int) -> list[Any] | None:
    """What a batch handler returns: of some batches the first message fails, and the others are handled again."""
    return [Retry("not yet"), *[None] * (count - 1)] if random.random() < FAILURES else None


def is_time(point: str) -> bool:
    """Whether it is time for the fault of this point."""
    if not Path(die).is_dir():
        return random.random() < float(die)
    try:
        (Path(die) / point).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def perhaps_die(point: str) -> None:
    """SIGKILL, as the kernel would do it."""
    if is_time(point):
        os.kill(os.getpid(), signal.SIGKILL)


async def move(session: AsyncSession, transfer: dict[str, int]) -> None:
    """The work of a transfer: in the order of the account ids, so that two of them cannot wait for each other."""
    steps = sorted([(transfer["source"], -1), (transfer["target"], 1)])
    for account, sign in steps:
        await session.execute(MOVE, {"id": account, "amount": sign * transfer["amount"]})
    await session.execute(BOOK, {"id": transfer["id"]})


async def move_all(session: AsyncSession, transfers: list[dict[str, int]]) -> None:
    """The work of many transfers."""
    changes = Counter[int]()
    for transfer in transfers:
        changes[transfer["source"]] -= transfer["amount"]
        changes[transfer["target"]] += transfer["amount"]
    await session.execute(MOVE, [{"id": account, "amount": changes[account]} for account in sorted(changes)])
    await session.execute(BOOK, [{"id": transfer["id"]} for transfer in transfers])


if "--plain" in mode:

    @broker.handler("transfers", group="bank", retry=PATIENT)
    async def book(transfer: dict[str, int]) -> None:
        async with sessions.begin() as session:
            await move(session, transfer)
        perhaps_die("commit")
        await broker.publish("receipts", transfer["id"])

    @broker.handler("receipts", group="mail", retry=PATIENT)
    async def send(number: int) -> None:
        async with sessions.begin() as session:
            await session.execute(text("INSERT INTO receipt VALUES (:id)"), {"id": number})

else:
    broker.include(outbox)
    if "--batch" in mode:

        @broker.handler("transfers", group="bank", retry=PATIENT, batch=BATCH, linger="20ms")
        async def book_all(
            transfers: list[dict[str, int]], session: Annotated[AsyncSession, Depends(effects.session)]
        ) -> list[Any] | None:
            await move_all(session, transfers)
            await outbox.publish_many(session, "receipts", [transfer["id"] for transfer in transfers])
            return failing(len(transfers))

    else:

        @broker.handler("transfers", group="bank", retry=PATIENT)
        async def book(transfer: dict[str, int], session: Annotated[AsyncSession, Depends(effects.session)]) -> None:
            await move(session, transfer)
            await outbox.publish(session, "receipts", transfer["id"])

    @broker.handler("receipts", group="mail", retry=PATIENT, batch=BATCH)
    async def send(numbers: list[int], session: Annotated[AsyncSession, Depends(effects.session)]) -> list[Any] | None:
        await session.execute(text("INSERT INTO receipt VALUES (:id)"), [{"id": number} for number in numbers])
        if is_time("sleep"):  # longer than the lease: a newer owner takes the messages meanwhile
            await asyncio.sleep(5)
        return failing(len(numbers))

    commit, remove = Transaction.commit, OutboxRelay._remove

    def commit_and_die(self: Transaction, session: Session) -> None:
        commit(self, session)
        perhaps_die("commit")

    async def die_and_remove(self: OutboxRelay, *args: Any) -> None:
        if args[0]:
            perhaps_die("relay")
        await remove(self, *args)

    Transaction.commit = commit_and_die  # type: ignore[method-assign]
    OutboxRelay._remove = die_and_remove  # type: ignore[method-assign]

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    asyncio.run(broker.run())
