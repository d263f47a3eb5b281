"""Bad use of effects and outbox says what to write: each mistake in each kind of handler."""

from collections.abc import AsyncIterator, Callable
from inspect import isawaitable
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
import pytest
from fast_depends import Depends
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from rsmq import Broker, ConfigError, Message, RetryPolicy
from rsmq.sql import Effects, Outbox, create_tables
from tests.contract.witness import letters_of, settled
from tests.sql.databases import Postgres

ONCE = RetryPolicy(max_attempts=1)
AUTOCOMMIT = {"isolation_level": "AUTOCOMMIT"}
KINDS = ("async", "async-batch", "plain", "plain-batch")
COMMITS = "remove `session.commit()` and `session.begin()` from the handler"
DROPS = "remove `session.rollback()`, `session.close()`"
MISTAKES: dict[str, tuple[Callable[[Any, Message], Any], str]] = {
    "commit": (lambda session, _: session.commit(), COMMITS),
    "commit of its connection": (lambda session, _: commit_connection(session), COMMITS),
    "a transaction in the transaction": (lambda session, _: session.begin(), COMMITS),
    "rollback": (lambda session, _: session.rollback(), DROPS),
    "close": (lambda session, _: session.close(), DROPS),
    "an open savepoint": (lambda session, _: session.begin_nested(), "write `async with session.begin_nested():`"),
    "an output": (
        lambda session, message: (message.publish if is_async(session) else message.publish_sync)("out", 1),
        "its output is lost if the worker dies between the commit and the settlement. Write `await outbox.publish",
    ),
    "a session of another engine": (
        lambda session, _: Outbox(create_async_engine("sqlite+aiosqlite:///x.db")).publish(session, "out", 1),
        "use one engine for both, Outbox(engine) and async_sessionmaker(engine)",
    ),
}


def is_async(session: Any) -> bool:
    """Of an async handler."""
    return isinstance(session, AsyncSession)


def commit_connection(session: Any) -> Any:
    """Past the session."""

    async def commit() -> None:
        await (await session.connection()).commit()

    return commit() if is_async(session) else session.connection().commit()


class Careless:
    """A handler of each kind. It makes the mistake that its message names."""

    def __init__(self, broker: Broker, postgres: Postgres, topic: str) -> None:
        self.name = postgres.new_database()
        self.kept: dict[str, tuple[Message, Any]] = {}
        self.engine = create_async_engine(postgres.url("asyncpg", self.name))
        self.plain_engine = create_engine(postgres.url("psycopg", self.name), poolclass=NullPool)
        effects, plain = Effects(async_sessionmaker(self.engine)), Effects(sessionmaker(self.plain_engine))

        async def work(kind: str, message: Message, session: AsyncSession) -> None:
            await session.execute(text("SELECT 1"))
            done = self._err(kind, message, session)
            if isawaitable(done):
                await done

        def work_plain(kind: str, message: Message, session: Session) -> None:
            session.execute(text("SELECT 1"))
            self._err(kind, message, session)

        @broker.handler(topic, group="async", partitions=1, retry=ONCE)
        async def one(message: Message, session: Annotated[AsyncSession, Depends(effects.session)]) -> None:
            await work("async", message, session)

        @broker.handler(topic, group="async-batch", partitions=1, retry=ONCE, batch=1)
        async def many(messages: list[Message], session: Annotated[AsyncSession, Depends(effects.session)]) -> None:
            await work("async-batch", messages[0], session)

        @broker.handler(topic, group="plain", partitions=1, retry=ONCE)
        def one_plain(message: Message, session: Annotated[Session, Depends(plain.session)]) -> None:
            work_plain("plain", message, session)

        @broker.handler(topic, group="plain-batch", partitions=1, retry=ONCE, batch=1)
        def many_plain(messages: list[Message], session: Annotated[Session, Depends(plain.session)]) -> None:
            work_plain("plain-batch", messages[0], session)

    def _err(self, kind: str, message: Message, session: Any) -> Any:
        self.kept[kind] = message, session
        mistake = MISTAKES.get(message.data.decode())
        return None if mistake is None else mistake[0](session, message)

    async def close(self) -> None:
        """Close its connections."""
        await self.engine.dispose()
        self.plain_engine.dispose()


@pytest.fixture
async def careless(broker: Broker, postgres: Postgres) -> AsyncIterator[Careless]:
    """With the tables."""
    found = Careless(broker, postgres, "orders")
    async with found.engine.begin() as connection:
        await connection.run_sync(create_tables)
    yield found
    await found.close()


async def errors_of(broker: Broker, topic: str, kind: str) -> dict[str, str]:
    """The errors of the dead letters of a group, by their messages."""
    return {(each.data or b"").decode(): each.error for each in await letters_of(broker, topic, kind)}


async def test_mistake_in_each_kind_of_handler_says_what_to_write(
    careless: Careless, broker: Broker, postgres: Postgres, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the handler, at its end, without the tables, and when it has returned."""
    monkeypatch.chdir(tmp_path)
    bare = Careless(broker, postgres, "bare")
    async with broker.running():
        for mistake in (*MISTAKES, "none"):
            await broker.publish("orders", mistake)
        await settled(broker, "orders")
        await broker.publish("bare", "none")
        await settled(broker, "bare")
        found = {kind: await errors_of(broker, "orders", kind) for kind in KINDS}
        missing = {kind: (await errors_of(broker, "bare", kind)).get("none", "") for kind in KINDS}
        for kind in KINDS:
            with pytest.raises(ConfigError, match="the handler has returned"):
                await use_late(careless.kept[kind][1])
            with pytest.raises(ConfigError, match="the handler has returned"):
                await publish_late(Outbox(careless.engine), careless.kept[kind][1])
            with pytest.raises(ConfigError, match=r"or use broker\.publish"):
                await publish_output_late(*careless.kept[kind])
    await bare.close()
    for kind in KINDS:
        assert found[kind].keys() == MISTAKES.keys()
        assert {mistake: text for mistake, (_, text) in MISTAKES.items() if text not in found[kind][mistake]} == {}
        assert "no table rsmq_handled: create the tables with `rsmq sql init" in missing[kind]


async def use_late(session: Any) -> None:
    """A statement."""
    done = session.execute(text("SELECT 1"))
    if isawaitable(done):
        await done


async def publish_late(outbox: Outbox, session: Any) -> None:
    """By the outbox."""
    done: Any = outbox.publish(session, "out", 1)
    if isawaitable(done):
        await done


async def publish_output_late(message: Message, session: Any) -> None:
    """With the message."""
    if is_async(session):
        await message.publish("out", 1)
    else:
        await anyio.to_thread.run_sync(message.publish_sync, "out", 1)


async def test_two_effects_in_a_handler_are_refused(broker: Broker) -> None:
    """They would commit one after the other: the mark of the first would skip what the second could not commit."""
    first, second = (Effects(async_sessionmaker(create_async_engine("sqlite+aiosqlite://"))) for _ in range(2))

    async def stock(session: Annotated[AsyncSession, Depends(second.session)]) -> AsyncSession:
        return session

    async def bill(
        order: int,
        session: Annotated[AsyncSession, Depends(first.session)],
        other: Annotated[AsyncSession, Depends(stock)],
    ) -> None: ...

    with pytest.raises(ConfigError, match="commit one after the other: if the second commit fails"):
        broker.handler("orders", group="billing")(bill)


async def test_autocommit_is_refused(pg: AsyncEngine, broker: Broker) -> None:
    """Of the engine, and of the connection that a handler asks for: what it writes would stay when it fails."""
    for engine in (create_async_engine(pg.url, isolation_level="AUTOCOMMIT"), pg.execution_options(**AUTOCOMMIT)):
        with pytest.raises(ConfigError, match="is in AUTOCOMMIT, so each statement of the handler would commit"):
            Effects(async_sessionmaker(engine))
    effects = Effects(async_sessionmaker(pg))

    @broker.handler("orders", group="billing", partitions=1, retry=ONCE)
    async def bill(session: Annotated[AsyncSession, Depends(effects.session)]) -> None:
        await session.connection(execution_options=AUTOCOMMIT)
        await session.execute(text("CREATE TABLE written ()"))
        raise RuntimeError("after the write")

    async with broker.running():
        await broker.publish("orders", 1)
        await settled(broker, "orders")
        [letter] = await letters_of(broker, "orders", "billing")
    assert "is in AUTOCOMMIT" in letter.error
    async with pg.connect() as connection:
        assert await connection.scalar(text("SELECT to_regclass('written')")) is None
