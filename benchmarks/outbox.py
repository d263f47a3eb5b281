"""`python -m benchmarks.outbox [rate|rest|death]`: the relay of an outbox, on PostgreSQL.

- `rate`: rows that one relay with a backlog moves a second, and its CPU for each.
- `rest`: from the commit of a row until it is in its topic, one row after the other. Beside it the bare way, right
  before each: INSERT and NOTIFY, a SELECT, an XADD. What both need, the machine needs.
- `death`: from the SIGKILL to the process that relays until another one has relayed the next row, by the server's
  clock.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine

from benchmarks.server import cpu, server
from rsmq import Broker, Settings
from rsmq.sql import Outbox, create_tables
from rsmq.worker.collector import tune_garbage_collector
from tests.servers import Server
from tests.sql.databases import Postgres
from tests.sql.relays import Relays

DRIVERS: Final = ("asyncpg", "psycopg")
WARM_UP: Final = 10
GOAL_MS: Final = 50


@asynccontextmanager
async def opened(postgres: Postgres, driver: str) -> AsyncIterator[AsyncEngine]:
    """An engine on an empty database with the tables."""
    engine = create_async_engine(postgres.url(driver, postgres.new_database()))
    async with engine.begin() as connection:
        await connection.run_sync(create_tables)
    yield engine
    await engine.dispose()


def relaying(url: str, engine: AsyncEngine) -> tuple[Broker, Outbox]:
    """A broker whose worker relays."""
    broker, outbox = Broker(Settings(url=url, prefix=f"b{time.time_ns()}", preflight="warn")), Outbox(engine)
    broker.include(outbox)

    @broker.handler("unused", group="unused")
    async def unused(number: int) -> None: ...

    return broker, outbox


async def rate(postgres: Postgres, url: str, driver: str, count: int) -> tuple[float, float]:
    """Rows a second with a backlog, and microseconds of CPU of the worker for each."""
    async with opened(postgres, driver) as engine:
        broker, outbox = relaying(url, engine)
        async with async_sessionmaker(engine).begin() as session:
            items = ({"number": number} for number in range(count))
            await outbox.publish_many(session, "invoices", items, key=lambda item: str(item["number"] % 1000))
        async with broker.running():
            while (left := (await outbox.status()).backlog) == count:
                await asyncio.sleep(0.005)
            start, at = cpu(), time.perf_counter()
            while (await outbox.status()).backlog:
                await asyncio.sleep(0.02)
            return left / (time.perf_counter() - at), (cpu() - start) / left * 1e6


async def rest(postgres: Postgres, url: str, driver: str, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each row, by the relay and the bare way."""
    ours, bare = list[float](), list[float]()
    async with opened(postgres, driver) as engine:
        broker, outbox = relaying(url, engine)
        await broker_topic(broker)
        async with broker.running(), bare_way(postgres, engine, url) as go_bare, Redis.from_url(url) as reader:
            stream, sessions = broker.keys.stream("invoices", 0), async_sessionmaker(engine)
            for number in range(WARM_UP + count):
                bare.append(await go_bare())
                arrival = asyncio.create_task(arrived(reader, stream, number))
                await asyncio.sleep(0.03)
                async with sessions.begin() as session:
                    await outbox.publish(session, "invoices", number)
                committed = time.perf_counter()
                ours.append((await arrival - committed) * 1000)
                await asyncio.sleep(0.02)
    return ours[WARM_UP:], bare[WARM_UP:]


async def broker_topic(broker: Broker) -> None:
    """A topic of one partition."""
    async with broker:
        await broker.topics.ensure("invoices", 1)


async def arrived(reader: Any, stream: str, after: int) -> float:
    """When the next entry was there, for a reader that waits for it."""
    last = await reader.xrevrange(stream, count=1)
    await reader.xread({stream: last[0][0] if last else "0"}, block=60_000)
    return time.perf_counter()


@asynccontextmanager
async def bare_way(postgres: Postgres, engine: AsyncEngine, url: str) -> AsyncIterator[Any]:
    """A function that sends one row by hand, and returns the milliseconds from its commit."""
    import asyncpg  # type: ignore[import-untyped]

    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE bare (number int)"))
    socket = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    writer, listener = await asyncpg.connect(socket), await asyncpg.connect(socket)
    news, stream = asyncio.Event(), f"bare{time.time_ns()}"
    await listener.add_listener("bare", lambda *_: news.set())
    async with Redis.from_url(url) as reader, Redis.from_url(url) as sender:

        async def go() -> float:
            arrival = asyncio.create_task(arrived(reader, stream, 0))
            await asyncio.sleep(0.03)
            async with writer.transaction():
                await writer.execute("INSERT INTO bare VALUES (1)")
                await writer.execute("NOTIFY bare")
            committed = time.perf_counter()
            await news.wait()
            news.clear()
            await listener.fetch("SELECT number FROM bare LIMIT 100")
            await sender.xadd(stream, {"data": "1"})
            took = (await arrival - committed) * 1000
            await writer.execute("DELETE FROM bare")
            return took

        yield go
    await writer.close()
    await listener.close()


def death(postgres: Postgres, times: int) -> list[int]:
    """Milliseconds until the next row of a relay that was killed."""
    found = list[int]()
    with Server() as redis, tempfile.TemporaryDirectory() as directory:
        relays = Relays(redis.url, "death", postgres.url("asyncpg", postgres.new_database()), Path(directory) / "log")
        with relays.running():
            for _ in range(times):
                relays.keep_running()
                found.append(relays.replace(rows=100).took_ms)
    return found


def share(values: list[float], part: float) -> float:
    """A percentile."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=("rate", "rest", "death"))
    parser.add_argument("--rows", type=int, default=50_000, help="of the rate, in each round")
    parser.add_argument("--rounds", type=int, default=5, help="of the rate")
    parser.add_argument("--single", type=int, default=500, help="rows at rest")
    parser.add_argument("--deaths", type=int, default=10)
    given = parser.parse_args()
    tune_garbage_collector()
    with Postgres() as postgres, server() as url:
        for driver in DRIVERS if "rate" in given.parts else ():
            rounds = [asyncio.run(rate(postgres, url, driver, given.rows)) for _ in range(given.rounds)]
            rates, used = (sorted(each) for each in zip(*rounds, strict=True))
            print(
                f"{driver}: {statistics.median(rates):.0f} rows/s ({rates[0]:.0f} … {rates[-1]:.0f}), "
                f"{statistics.median(used):.1f} µs of CPU of the worker a row ({used[0]:.1f} … {used[-1]:.1f})",
                flush=True,
            )
        for driver in DRIVERS if "rest" in given.parts else ():
            ours, bare = asyncio.run(rest(postgres, url, driver, given.single))
            for name, times in (("by the relay", ours), ("the bare way", bare)):
                late, longest = sum(each > GOAL_MS for each in times), max(times)
                print(
                    f"{driver}, at rest, {name}: median {share(times, 0.5):.1f} ms, p99 {share(times, 0.99):.1f}, "
                    f"longest {longest:.1f}; {late} of {len(times)} took more than {GOAL_MS} ms", flush=True,
                )  # fmt: skip
        if "death" in given.parts:
            took = death(postgres, given.deaths)
            print(f"a relay that was killed is replaced after {statistics.median(took):.0f} ms, at most {max(took)} ms "
                  f"({len(took)} times)")  # fmt: skip


if __name__ == "__main__":
    main()
