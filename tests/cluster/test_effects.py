"""The pieces that happen once, on a server, with Sentinel and on a cluster: each row, receipt and output once, in each
kind of handler, while slots move and when a master is lost."""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated

import anyio
import pytest
from fast_depends import Depends
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from rsmq import Broker, BrokerError, Settings
from rsmq.sql import Effects, Outbox, create_tables
from tests.cluster.cluster import Cluster
from tests.contract.witness import ask, settled
from tests.patience import until
from tests.sentinel.sentinels import Sentinels
from tests.sql.combinations import COMBINATIONS, PAIRS, Combinations
from tests.sql.databases import Postgres

pytestmark = pytest.mark.usefixtures("no_task_left")


@pytest.fixture(scope="module")
def sentinels() -> Iterator[Sentinels]:
    """A master, two replicas, three sentinels. The last test kills the master."""
    with Sentinels() as running:
        yield running


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL for all."""
    with Postgres() as running:
        yield running


KEYS = [f"k{number}" for number in range(6)]


@pytest.fixture
async def engine(postgres: Postgres) -> AsyncIterator[AsyncEngine]:
    """An empty database with the tables."""
    engine = create_async_engine(postgres.url("asyncpg", postgres.new_database()))
    async with engine.begin() as connection:
        await connection.run_sync(create_tables)
        await connection.execute(text("CREATE TABLE invoice (number int)"))
    yield engine
    await engine.dispose()


def billing(broker: Broker, engine: AsyncEngine, wait_replicas: int = 0) -> Broker:
    """A handler that writes an invoice and publishes a receipt, in one transaction."""
    effects, outbox = Effects(async_sessionmaker(engine)), Outbox(engine, wait_replicas=wait_replicas)
    broker.include(outbox)

    @broker.handler("orders", group="billing", partitions=4)
    async def bill(number: int, session: Annotated[AsyncSession, Depends(effects.session)]) -> None:
        await session.execute(text("INSERT INTO invoice VALUES (:number)"), {"number": number})
        await outbox.publish(session, "receipts", number, key=KEYS[number % len(KEYS)])

    return broker


async def invoices(engine: AsyncEngine) -> list[int]:
    """All of them, sorted."""
    async with engine.connect() as connection:
        return sorted((await connection.scalars(text("SELECT number FROM invoice"))).all())


async def receipts(broker: Broker) -> list[int]:
    """All of them, sorted."""
    topic, found = await broker.topics.find("receipts"), list[int]()
    for partition in () if topic is None else topic.numbers:
        for _, flat in await ask(broker, "XRANGE", broker.keys.stream("receipts", partition), "-", "+"):
            found.append(int(dict(zip(flat[::2], flat[1::2], strict=True))[b"data"]))
    return sorted(found)


@pytest.mark.chaos
@pytest.mark.parametrize("on", ["server", "sentinel", "cluster"])
async def test_each_piece_in_each_kind_of_handler(request: pytest.FixtureRequest, postgres: Postgres, on: str) -> None:
    """Effects with outbox, outputs, fence: with key order, without, shared; single and batch; async and plain. Each two
    of these together, and all of them with `make chaos`."""
    server = request.getfixturevalue({"sentinel": "sentinels"}.get(on, on))
    wanted = COMBINATIONS if os.environ.get("CHAOS") == "long" else PAIRS
    broker = Broker(Settings(url=server.url, prefix=request.getfixturevalue("prefix"), preflight="warn"))
    await Combinations(broker, postgres.url("psycopg", postgres.new_database()), wanted).run()


async def test_each_counts_once_while_slots_move(
    make_broker: Callable[..., Broker], cluster: Cluster, engine: AsyncEngine
) -> None:
    """Partitions and leases go to other nodes, with what is in flight."""
    first, second = (billing(make_broker(), engine) for _ in range(2))
    async with first.running(), second.running():
        for number in range(160):
            await first.publish("orders", number, key=KEYS[number % len(KEYS)])
            if number % 40 == 20:
                stream = first.keys.stream("orders", number // 40)
                await anyio.to_thread.run_sync(cluster.migrate_at_once, stream)
        await settled(first, "orders")
        await until(lambda: has_all(first, 160), "all receipts are relayed")
        assert await invoices(engine) == await receipts(first) == list(range(160))


async def test_each_counts_once_when_a_master_is_lost(prefix: str, sentinels: Sentinels, engine: AsyncEngine) -> None:
    """With Sentinel. What a replica has confirmed is handled, and its receipt is there, because the outbox waits for a
    replica; settlements that were lost with the master are not repeated in the database: their marks are there."""
    broker = billing(Broker(Settings(url=sentinels.url, prefix=prefix, preflight="warn")), engine, wait_replicas=1)
    async with broker.running():
        for number in range(60):
            await publish(broker, number, wait_replicas=2)
        before = await anyio.to_thread.run_sync(sentinels.master_port)
        next(member for member in sentinels.members if member.port == before).kill()
        while await anyio.to_thread.run_sync(sentinels.master_port) in (0, before):
            await anyio.sleep(0.05)
        for number in range(60, 120):
            await publish(broker, number)
        await settled(broker, "orders")
        await until(lambda: has_all(broker, 120), "all receipts are relayed")
        assert await invoices(engine) == await receipts(broker) == list(range(120))


async def publish(broker: Broker, number: int, wait_replicas: int = 0) -> None:
    """Until it is confirmed: the next master may need a moment."""
    with anyio.fail_after(30):
        while True:
            try:
                await broker.publish(
                    "orders", number, key=KEYS[number % len(KEYS)], message_id=str(number), wait_replicas=wait_replicas
                )
                return
            except BrokerError:
                await anyio.sleep(0.05)


async def has_all(broker: Broker, count: int) -> bool:
    """Whether so many receipts are stored."""
    return len(await receipts(broker)) >= count
