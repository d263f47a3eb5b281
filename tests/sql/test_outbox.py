"""The outbox: what commits is published once, in order; what does not commit is not; bad use says what to write."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import reduce
from itertools import chain
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from sqlalchemy import Engine, create_engine, event, insert, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from rsmq import Broker, ConfigError, Message, Settings
from rsmq.errors import NotJson, PartitionSealed, TooLarge
from rsmq.model.keys import Keys
from rsmq.redis.client.connector import Client
from rsmq.redis.server_context import ServerContext
from rsmq.redis.topics import Topics
from rsmq.sql import Outbox, create_tables
from rsmq.sql.relay import OutboxRelay, Stale
from rsmq.sql.tables import OUTBOX
from tests.patience import until
from tests.servers import Server, wait_until
from tests.sql.databases import Postgres


def recorded(broker: Broker, topic: str = "orders") -> list[Any]:
    """What a handler of the topic gets."""
    seen: list[Any] = []

    @broker.handler(topic, group="billing", ordering="partition", partitions=1)
    async def note(message: Message) -> None:
        seen.append(message.data.decode(errors="replace"))

    return seen


async def test_a_message_is_published_if_and_only_if_its_transaction_commits(
    engine: AsyncEngine, broker: Broker
) -> None:
    """A commit publishes, with key and headers; a rollback, and an error in the block, do not. The rows are deleted."""
    outbox, sessions = Outbox(engine), async_sessionmaker(engine)
    seen: list[Message] = []
    broker.include(outbox)

    @broker.handler("orders", group="billing", partitions=1)
    async def note(message: Message) -> None:
        seen.append(message)

    async with broker.running():
        async with sessions() as session:
            await outbox.publish(session, "orders", {"n": 1})
            await session.rollback()
        with pytest.raises(RuntimeError):
            await publish_and_fail(outbox, sessions)
        async with sessions.begin() as session:
            message_id = await outbox.publish(session, "orders", {"n": 3}, key="ada", headers={"a": "b"})
        async with engine.begin() as connection:
            await outbox.publish(connection, "orders", b"\x00\xff")
        await until(lambda: len(seen) == 2, "both are handled")
        await until(lambda: is_empty(outbox), "the rows are deleted")
    first, second = seen
    assert (first.data, first.id, first.key, first.headers) == (b'{"n":3}', message_id, "ada", {"a": "b"})
    assert (second.data, second.key, second.type) == (b"\x00\xff", None, "application/octet-stream")
    assert uuid.UUID(message_id).version == 7


async def publish_and_fail(outbox: Outbox, sessions: async_sessionmaker[AsyncSession]) -> None:
    """The block ends with an error after the publish."""
    async with sessions.begin() as session:
        await outbox.publish(session, "orders", {"n": 2})
        raise RuntimeError


async def has_backlog(outbox: Outbox, count: int) -> bool:
    """Whether so many rows wait."""
    return (await outbox.status()).backlog == count


async def is_empty(outbox: Outbox) -> bool:
    """Whether nothing waits in the outbox."""
    return await has_backlog(outbox, 0)


async def test_plain_sessions_publish_too(sync_engine: Engine, broker: Broker) -> None:
    """The same with an engine that has no async driver: the worker asks the database in threads."""
    outbox, sessions, seen = Outbox(sync_engine), sessionmaker(sync_engine), recorded(broker)
    broker.include(outbox)
    async with broker.running():
        with sessions() as session:
            outbox.publish(session, "orders", "lost")
            session.rollback()
        with sessions.begin() as session:
            assert isinstance(outbox.publish(session, "orders", "kept", key="ada"), str)
            assert len(outbox.publish_many(session, "orders", ["this", "that"], key=lambda _: "ada")) == 2
            assert outbox.publish_many(session, "orders", []) == []
        await until(lambda: len(seen) == 3, "all are handled")
        await until(lambda: is_empty(outbox), "the row is deleted")
    assert seen == ["kept", "this", "that"]


async def test_messages_come_in_the_order_of_their_commits(engine: AsyncEngine, broker: Broker) -> None:
    """Transactions one after the other, and the messages within each; more of them than one batch."""
    outbox, sessions, seen = Outbox(engine), async_sessionmaker(engine), recorded(broker)
    broker.include(outbox)
    for first in range(0, 300, 100):
        async with sessions.begin() as session:
            for number in range(first, first + 50):
                await outbox.publish(session, "orders", number, key="ada")
            ids = await outbox.publish_many(session, "orders", range(first + 50, first + 100), key=lambda _: "ada")
            assert len(set(ids)) == 50
    async with broker.running():
        await until(lambda: len(seen) == 300, "all are handled")
    assert [int(each) for each in seen] == list(range(300))


async def test_a_transaction_that_began_first_but_locked_later_comes_later(pg: AsyncEngine, broker: Broker) -> None:
    """Order by transaction number would swap these two, although a lock of the key has put them in order."""
    outbox, sessions, seen = Outbox(pg), async_sessionmaker(pg), recorded(broker)
    broker.include(outbox)
    async with pg.begin() as connection:
        await connection.execute(text("CREATE TABLE account (id int primary key, n int)"))
        await connection.execute(text("INSERT INTO account VALUES (1, 0), (2, 0)"))
    async with sessions() as early, sessions() as late:
        await early.execute(text("UPDATE account SET n = n + 1 WHERE id = 2"))  # the lower transaction number
        await late.execute(text("UPDATE account SET n = n + 1 WHERE id = 1"))
        await outbox.publish(late, "orders", "first", key="1")
        waits = asyncio.create_task(early.execute(text("UPDATE account SET n = n + 1 WHERE id = 1")))
        await late.commit()
        await waits
        await outbox.publish(early, "orders", "second", key="1")
        await early.commit()
    async with broker.running():
        await until(lambda: len(seen) == 2, "both are handled")
    assert seen == ["first", "second"]


async def test_row_waits_until_a_replica_has_its_message(
    pg: AsyncEngine, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With `wait_replicas` it is deleted when a replica has confirmed it, and it is published once all the same."""
    with Server(tcp=True) as master, Server("--repl-diskless-sync-delay", "0", tcp=True) as replica:
        with replica.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", master.port)
        with master.client() as client:
            await anyio.to_thread.run_sync(wait_until, lambda: is_replicated(client), "the replica is in sync")
        quick = Settings(url=master.url, prefix=prefix, preflight="warn", command_timeout=timedelta(seconds=1))
        broker, outbox = Broker(quick), Outbox(pg, wait_replicas=1)
        seen = recorded(broker)
        broker.include(outbox)
        async with broker.running():
            replica.pause()
            async with async_sessionmaker(pg).begin() as session:
                await outbox.publish(session, "orders", "x")
            await until(lambda: "only 0 of 1 replicas have confirmed" in caplog.text, "the relay waits")
            assert await has_backlog(outbox, 1)
            replica.resume()
            await until(lambda: is_empty(outbox), "a replica has it")
        assert seen == ["x"]
    with pytest.raises(ConfigError, match="use 0 or more"):
        Outbox(pg, wait_replicas=-1)


def is_replicated(client: Any) -> bool:
    """Whether a replica follows."""
    return bool(client.info("replication").get("slave0", {}).get("state") == "online")


async def test_a_long_transaction_does_not_hold_back_the_others(pg: AsyncEngine, broker: Broker) -> None:
    """A message is published while an older transaction still runs, and that one's message after its commit."""
    outbox, sessions, seen = Outbox(pg), async_sessionmaker(pg), recorded(broker)
    broker.include(outbox)
    async with broker.running(), sessions() as long:
        await outbox.publish(long, "orders", "of the long one")
        async with sessions.begin() as session:
            await outbox.publish(session, "orders", "of the short one")
        await until(lambda: seen == ["of the short one"], "it is handled")
        await long.commit()
        await until(lambda: seen[1:] == ["of the long one"], "it is handled")


async def test_a_commit_wakes_the_relay(postgres: Postgres, broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    """NOTIFY sets the event that the relay waits for, with each driver that can listen."""
    name = postgres.new_database()
    engines: list[Any] = [create_async_engine(postgres.url(driver, name)) for driver in ("asyncpg", "psycopg")]
    engines.append(create_engine(postgres.url("psycopg", name)))
    for engine in engines:
        outbox = Outbox(engine)
        await outbox.database.run(create_tables)
        relay = OutboxRelay(outbox.database, context_of(broker, broker), timedelta(hours=1), "rsmq_outbox")
        listener = relay._listener
        listener.is_wanted = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.run)
            await until(lambda listener=listener: listener.is_listening and listener.news.is_set(), "it listens")
            listener.news.clear()
            await outbox.database.run(lambda connection, outbox=outbox: publish_now(outbox, connection))
            await until(lambda listener=listener: listener.news.is_set(), "it is woken")
            tasks.cancel_scope.cancel()
        await (engine.dispose() if outbox.database.is_async else asyncio.sleep(0))
    engines[-1].dispose()
    assert "Exception" not in caplog.text, "a listener that is stopped leaves no traceback"


def publish_now(outbox: Outbox, connection: Any) -> None:
    """One message."""
    outbox.publish(connection, "orders", "x")


def context_of(broker: Broker, member: object, client: Any = None) -> ServerContext:
    """What a worker gives to a service."""
    topics = Topics(client, broker.keys, broker.settings)
    return ServerContext(client, broker.keys, broker.settings, topics, f"m{id(member)}")


@pytest.fixture
async def relays(pg: AsyncEngine, client: Client, broker: Broker) -> AsyncIterator[tuple[Outbox, list[OutboxRelay]]]:
    """Three relays of one outbox, as three workers have them."""
    outbox = Outbox(pg, prefix=broker.keys.prefix)
    made = [OutboxRelay(outbox.database, context_of(broker, at, client), timedelta(0), None) for at in range(3)]
    for relay in made:
        relay._name = "db"
    yield outbox, made
    for relay in made:
        await relay._connection.close()


async def published(client: Client, keys: Keys, topic: str = "orders") -> list[bytes]:
    """The payloads of all partitions of a topic."""
    found = []
    for partition in range(8):
        found += await client.execute_command("XRANGE", keys.stream(topic, partition), "-", "+")
    return sorted(fields[1] for _, fields in found)


async def test_a_relay_that_dies_between_publish_and_delete_repeats_nothing(
    relays: tuple[Outbox, list[OutboxRelay]],
    pg: AsyncEngine,
    client: Client,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one skips what is there, publishes the rest, and forgets the ids when their rows are gone."""
    outbox, (first, second, third) = relays
    async with pg.begin() as connection:
        for number in range(50):
            await outbox.publish(connection, "orders", number)

    async def die(*_: object) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(first, "_remove", die)
    with pytest.raises(RuntimeError):
        await first.relay_once(1)
    assert len(await published(client, keys)) == 50
    assert await second.relay_once(2) == 50
    assert (await outbox.status()).backlog == 0
    async with pg.begin() as connection:
        for number in range(50, 150):
            await outbox.publish(connection, "orders", number)
    assert await third.relay_once(3) == 100  # the second one had no time to say that it has deleted the first rows
    async with pg.begin() as connection:
        for number in range(150, 250):
            await outbox.publish(connection, "orders", number)
    assert await third.relay_once(3) == 100
    assert sorted(map(int, await published(client, keys))) == list(range(250))
    remembered = [await client.execute_command("HGET", keys.relayed("orders", each), "rows|db") for each in range(8)]
    assert sum(map(len, remembered)) == 100 * 16, "only the rows of the last batch"


async def test_rows_that_were_relayed_before_a_resize_are_not_relayed_again(
    relays: tuple[Outbox, list[OutboxRelay]],
    pg: AsyncEngine,
    client: Client,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The relay has died before it could delete them. The next one asks the partitions of before, which are sealed."""
    outbox, (first, second, _) = relays
    async with pg.begin() as connection:
        for number in range(50):
            await outbox.publish(connection, "orders", number)

    async def die(*_: object) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(first, "_remove", die)
    with pytest.raises(RuntimeError):
        await first.relay_once(1)
    await Topics(client, keys, Settings()).resize("orders", 16)
    async with pg.begin() as connection:
        for number in range(50, 90):
            await outbox.publish(connection, "orders", number)
    with suppress(PartitionSealed):  # this relay knew the topic
        await second.relay_once(2)
    await second.relay_once(2)
    assert (await outbox.status()).backlog == 0
    streams = [keys.stream("orders", number) for number in range(24)]
    found = [await client.execute_command("XRANGE", stream, "-", "+") for stream in streams]
    values = [[int(fields[1]) for _, fields in entries] for entries in found]
    assert sorted(chain(*values[:8])) == list(range(50))
    assert sorted(chain(*values[8:])) == list(range(50, 90))


async def test_a_relay_that_wakes_up_late_can_publish_nothing(
    relays: tuple[Outbox, list[OutboxRelay]],
    pg: AsyncEngine,
    client: Client,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has read the rows, was paused, and meanwhile another one has relayed and deleted them, and more."""
    outbox, (first, second, _) = relays
    async with pg.begin() as connection:
        await outbox.publish(connection, "orders", "x", key="ada")
    has_read, may_go_on, append = anyio.Event(), anyio.Event(), first._append

    async def paused(*args: Any) -> None:
        has_read.set()
        await may_go_on.wait()
        await append(*args)

    monkeypatch.setattr(first, "_append", paused)

    async def wake_up() -> None:
        with pytest.raises(Stale):
            await first.relay_once(1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wake_up)
        await has_read.wait()
        assert await second.relay_once(2) == 1
        async with pg.begin() as connection:
            await outbox.publish(connection, "orders", "y", key="ada")
        assert await second.relay_once(2) == 1
        may_go_on.set()
    assert await published(client, keys) == [b"x", b"y"]


async def test_relay_asks_the_database_once_before_it_publishes(
    relays: tuple[Outbox, list[OutboxRelay]], pg: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row at rest waits for one round trip to PostgreSQL: its transaction begins after that, to delete it."""
    outbox, (relay, _, _) = relays
    async with pg.begin() as connection:
        await outbox.publish(connection, "orders", "x")
    statements, append = list[str](), relay._append
    event.listen(pg.sync_engine, "checkout", lambda raw, *_: log_queries(raw, statements))

    async def note(*args: Any) -> None:
        await anyio.lowlevel.checkpoint()  # asyncpg's loggers are called a moment later
        statements.append("publish")
        await append(*args)

    monkeypatch.setattr(relay, "_append", note)
    assert await relay.relay_once(1) == 1
    begins = [at for at, each in enumerate(statements) if each.startswith("BEGIN")]
    assert begins
    assert begins[0] > statements.index("publish")


def log_queries(raw: Any, statements: list[str]) -> None:
    """Note what asyncpg sends on a connection, but for prepared statements."""
    raw.driver_connection.add_query_logger(lambda record: statements.append(record.query))


async def test_a_full_topic_waits_and_the_others_go_on(pg: AsyncEngine, broker: Broker) -> None:
    """Its rows stay, and are published when there is room."""
    outbox, sessions, seen = Outbox(pg), async_sessionmaker(pg), recorded(broker, "other")
    broker.include(outbox)
    async with broker.running():
        await broker.topics.ensure("orders", 1)
        await broker.topics.change("orders", max_length=2, on_full="reject")
        await broker.client.execute_command("XGROUP", "CREATE", broker.keys.stream("orders", 0), "g", "0", "MKSTREAM")
        async with sessions.begin() as session:
            for number in range(5):
                await outbox.publish(session, "orders", number)
            await outbox.publish(session, "other", "goes on")
        await until(lambda: seen == ["goes on"], "the other topic is served")
        await until(lambda: has_backlog(outbox, 3), "what has found room is deleted")
        assert await published(broker.client, broker.keys) == [b"0", b"1"]
        await broker.topics.change("orders", max_length=0)
        await until(lambda: is_empty(outbox), "the rest is published")
        assert await published(broker.client, broker.keys) == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_row_that_cannot_be_published_is_marked_and_stops_nothing(pg: AsyncEngine, broker: Broker) -> None:
    """Another program may write rows: a wrong topic name or headers end in the column `error`."""
    outbox, seen = Outbox(pg), recorded(broker)
    broker.include(outbox)
    rows = [{"aggregatetype": "a b"}, {"headers": "no json"}, {"type": "text/plain"}]
    async with pg.begin() as connection:
        for row in rows:
            values = {"id": uuid.uuid4(), "aggregatetype": "orders", "payload": b"x", "type": "text/plain", **row}
            values["deployment"] = broker.keys.prefix
            await connection.execute(insert(OUTBOX), values)
    async with broker.running():
        await until(lambda: seen == ["x"], "the good one is handled")
        await until(lambda: is_empty(outbox), "nothing waits")
    status = await outbox.status()
    assert (status.backlog, status.refused) == (0, 2)
    async with pg.connect() as connection:
        errors = (await connection.scalars(select(OUTBOX.c.error).order_by(OUTBOX.c.seq))).all()
    assert "topic name 'a b' is not allowed" in errors[0]
    assert "the headers are not JSON" in errors[1]


async def test_delayed_messages_wait_beside_their_topic(pg: AsyncEngine, broker: Broker) -> None:
    """`delay` and `at` count from the publish."""
    outbox, sessions, seen = Outbox(pg), async_sessionmaker(pg), recorded(broker)
    broker.include(outbox)
    async with broker.running():
        async with sessions.begin() as session:
            await outbox.publish(session, "orders", "tomorrow", delay=timedelta(days=1))
            await outbox.publish(session, "orders", "soon", delay="50ms")
            await outbox.publish(session, "orders", "past", at=datetime(2020, 1, 1, tzinfo=UTC))
        await until(lambda: sorted(seen) == ["past", "soon"], "what is due is handled")
        assert await broker.client.execute_command("ZCARD", broker.keys.delayed("orders", 0)) == 1


@pytest.mark.parametrize("hours", [2, -2])
async def test_delay_counts_by_the_clock_of_the_database(
    engine: AsyncEngine, broker: Broker, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """The clock of the application may be hours off, or stand still in a test: a delay is a duration."""
    outbox, sessions, seen = Outbox(engine), async_sessionmaker(engine), recorded(broker)
    broker.include(outbox)
    moved = time.time_ns() + hours * 3600 * 10**9
    async with broker.running():
        monkeypatch.setattr("time.time_ns", lambda: moved)
        async with sessions.begin() as session:
            await outbox.publish(session, "orders", "later", delay="1h")
            await outbox.publish(session, "orders", "soon", delay="50ms")
        monkeypatch.undo()
        await until(lambda: seen == ["soon"], "what is due is handled")
        assert await broker.client.execute_command("ZCARD", broker.keys.delayed("orders", 0)) == 1


async def test_bad_use_says_what_to_write(engine: AsyncEngine, tmp_path: Any) -> None:
    """Errors in `publish`, inside the transaction."""
    outbox, sessions = Outbox(engine), async_sessionmaker(engine)
    other = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'other.db'}")
    loose = create_async_engine(engine.url, isolation_level="AUTOCOMMIT")
    async with async_sessionmaker(other)() as session, async_sessionmaker(loose)() as commits:
        with pytest.raises(ConfigError, match="use one engine for both"):
            await outbox.publish(session, "orders", 1)
        with pytest.raises(ConfigError, match="AUTOCOMMIT"):
            await outbox.publish(commits, "orders", 1)
        with pytest.raises(ConfigError, match="no table rsmq_outbox: create the tables with `rsmq sql init"):
            await Outbox(other).publish(session, "orders", 1)
    async with async_sessionmaker()() as session:
        with pytest.raises(ConfigError, match="no engine"):
            await outbox.publish(session, "orders", 1)
    with pytest.raises(ConfigError, match=r"write `await outbox\.publish"):
        await outbox.publish("orders", {"n": 1})  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="pass the engine"):
        Outbox(sessions)  # type: ignore[arg-type]
    async with sessions() as session:
        for wrong, error in (
            ({"topic": "a b"}, ConfigError), ({"payload": float("nan")}, NotJson), ({"key": 7}, ConfigError),
            ({"payload": "x" * 2_000_000}, TooLarge), ({"headers": {"a": 1}}, ConfigError),
            ({"delay": timedelta(-1)}, ConfigError), ({"delay": timedelta(1), "at": datetime.now(UTC)}, ConfigError),
            ({"dely": "1s"}, ConfigError), ({"delay": 5}, ConfigError),
            ({"payload": reduce(lambda inner, _: [inner], range(201), 1)}, NotJson),
        ):  # fmt: skip
            options: dict[str, Any] = {"topic": "orders", "payload": 1, **wrong}
            with pytest.raises(error):
                await outbox.publish(session, **options)
    for each in (other, loose):
        await each.dispose()


async def test_a_missing_table_is_said_by_the_worker_and_waited_for(
    postgres: Postgres, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """The handlers go on, and the relay begins when the tables are there."""
    engine = create_async_engine(postgres.url("asyncpg", postgres.new_database()))
    outbox, seen = Outbox(engine), recorded(broker)
    broker.include(outbox)
    async with broker.running():
        await until(lambda: "no table rsmq_database: create the tables" in caplog.text, "it is said")
        await until(lambda: " waits: the database has no table" in caplog.text, "the relay says so, too")
        assert "Traceback" not in caplog.text, "it is no fault of the program"
        await broker.publish("orders", "handled")
        await until(lambda: seen == ["handled"], "handlers go on")
        await outbox.database.run(create_tables)
        async with async_sessionmaker(engine).begin() as session:
            await outbox.publish(session, "orders", "relayed")
        await until(lambda: seen == ["handled", "relayed"], "the relay has begun")
    await engine.dispose()
