"""`python -m benchmarks.effects [--messages N] [--rounds N] [--only WORD]`: what "once in the database" costs.

Per message the CPU of the worker and of PostgreSQL: a handler with a transaction of its own beside one with `Effects`,
single, and in batches, with ten times as many messages. `python -m benchmarks.outbox` measures the outbox.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Final

from fast_depends import Depends
from rich.progress import Progress
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from benchmarks.server import cpu, server
from benchmarks.table import table
from rsmq import Broker, Settings
from rsmq.sql import Effects, create_tables
from rsmq.worker.collector import tune_garbage_collector
from tests.sql.databases import Postgres, children_of

INSERT: Final = text("INSERT INTO invoice VALUES (:number)")
UPDATE: Final = text("UPDATE account SET balance = balance + 1 WHERE id = :account")
ACCOUNTS: Final = 1000
BATCH: Final = 500
TICKS: Final = os.sysconf("SC_CLK_TCK")
Register = Callable[[Broker, AsyncEngine, Callable[[int], None]], None]


async def write(session: AsyncSession, number: int, statements: int) -> None:
    """The work of a message."""
    await session.execute(INSERT, {"number": number})
    for _ in range(1, statements):
        await session.execute(UPDATE, {"account": number % ACCOUNTS})


def own(broker: Broker, engine: AsyncEngine, done: Callable[[int], None], statements: int = 1) -> None:
    """A transaction for each message."""
    sessions = async_sessionmaker(engine)

    @broker.handler("orders", group="billing", concurrency=8)
    async def bill(number: int) -> None:
        async with sessions.begin() as session:
            await write(session, number, statements)
        done(1)


def effects(broker: Broker, engine: AsyncEngine, done: Callable[[int], None], statements: int = 1) -> None:
    """The same with a mark for each message."""
    once = Effects(async_sessionmaker(engine))

    @broker.handler("orders", group="billing", concurrency=8)
    async def bill(number: int, session: Annotated[AsyncSession, Depends(once.session)]) -> None:
        await write(session, number, statements)
        done(1)


async def write_many(session: AsyncSession, numbers: list[int], statements: int) -> None:
    """The work of a batch, as much for each message. The accounts are in one order, so that batches cannot deadlock."""
    await session.execute(INSERT, [{"number": number} for number in numbers])
    accounts = [{"account": account} for account in sorted(number % ACCOUNTS for number in numbers)]
    for _ in range(1, statements):
        await session.execute(UPDATE, accounts)


def own_batch(broker: Broker, engine: AsyncEngine, done: Callable[[int], None], statements: int = 1) -> None:
    """A transaction for each batch."""
    sessions = async_sessionmaker(engine)

    @broker.handler("orders", group="billing", batch=BATCH, linger="20ms")
    async def bill(numbers: list[int]) -> None:
        async with sessions.begin() as session:
            await write_many(session, numbers, statements)
        done(len(numbers))


def effects_batch(broker: Broker, engine: AsyncEngine, done: Callable[[int], None], statements: int = 1) -> None:
    """The same with a mark for each message."""
    once = Effects(async_sessionmaker(engine))

    @broker.handler("orders", group="billing", batch=BATCH, linger="20ms")
    async def bill(numbers: list[int], session: Annotated[AsyncSession, Depends(once.session)]) -> None:
        await write_many(session, numbers, statements)
        done(len(numbers))


ROWS: Final[dict[str, Register]] = {
    "single handler, one INSERT in its own transaction": own,
    "single handler, one INSERT with Effects": effects,
    "single handler, INSERT and three UPDATEs in its own transaction": partial(own, statements=4),
    "single handler, INSERT and three UPDATEs with Effects": partial(effects, statements=4),
    "batch handler, one INSERT in its own transaction": own_batch,
    "batch handler, one INSERT with Effects": effects_batch,
    "batch handler, INSERT and three UPDATEs in its own transaction": partial(own_batch, statements=4),
    "batch handler, INSERT and three UPDATEs with Effects": partial(effects_batch, statements=4),
}


def database_cpu(postgres: Postgres) -> float:
    """Seconds of CPU of the server and its processes, also of those that have ended."""
    used = 0
    for pid in (postgres.pid, *children_of(postgres.pid)):
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        used += sum(map(int, fields[11:15] if pid == postgres.pid else fields[11:13]))
    return used / TICKS


async def until(done: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    """Wait for a state."""
    while True:
        found = done()
        if found if isinstance(found, bool) else await found:
            return
        await asyncio.sleep(0.005)


async def consume(postgres: Postgres, url: str, register: Register, count: int) -> tuple[float, float]:
    """Microseconds of CPU for each message: of the worker, and of the database."""
    engine, broker = await opened(postgres), Broker(Settings(url=url, prefix=f"b{time.time_ns()}", preflight="warn"))
    seen = [0]

    def done(number: int) -> None:
        seen[0] += number

    register(broker, engine, done)
    async with broker:
        await broker.publish_many("orders", range(count), key=lambda number: str(number % 1000))
    async with broker.running():
        await until(lambda: seen[0] >= count // 10)
        first, start, start_database = seen[0], cpu(), database_cpu(postgres)
        await until(lambda: seen[0] >= count)
        ended, ended_database = cpu(), database_cpu(postgres)
    await engine.dispose()
    return (ended - start) / (count - first) * 1e6, (ended_database - start_database) / (count - first) * 1e6


async def opened(postgres: Postgres) -> AsyncEngine:
    """An engine on an empty database with the tables."""
    engine = create_async_engine(postgres.url("asyncpg", postgres.new_database()), pool_size=20)
    async with engine.begin() as connection:
        await connection.run_sync(create_tables)
        await connection.execute(text("CREATE TABLE invoice (number int)"))
        await connection.execute(text("CREATE TABLE account (id int PRIMARY KEY, balance int)"))
        await connection.execute(text(f"INSERT INTO account SELECT n, 0 FROM generate_series(0, {ACCOUNTS - 1}) n"))
    return engine


def middle(values: list[float]) -> str:
    """The median, and the range."""
    return f"{statistics.median(values):.0f} ({min(values):.0f} … {max(values):.0f})"


def main() -> None:
    """Measure in rounds, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="the beginning of rows, such as `batch` or `single`")
    given = parser.parse_args()
    tune_garbage_collector()
    rows = {name: register for name, register in ROWS.items() if name.startswith(given.only)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    with Postgres() as postgres, server() as url, Progress() as progress:
        bar = progress.add_task("measuring", total=given.rounds * len(found))
        for _ in range(given.rounds):
            for name, register in rows.items():
                count = given.messages * (10 if name.startswith("batch") else 1)
                found[name].append(asyncio.run(consume(postgres, url, register, count)))
                progress.advance(bar)
    lines: list[list[Any]] = []
    for plain, name in zip(list(rows)[::2], list(rows)[1::2], strict=True):
        ratios = [sum(mine) / sum(base) for mine, base in zip(found[name], found[plain], strict=True)]
        for each, ratio in ((plain, "1"), (name, f"{statistics.median(ratios):.2f}")):
            worker, database = zip(*found[each], strict=True)
            lines.append([each, middle(list(worker)), middle(list(database)), ratio])
    print(*table(["", "worker, µs", "database, µs", "both, x its own transaction"], lines), sep="\n")


if __name__ == "__main__":
    main()
