"""Savepoints in handlers with effects: they belong to the transaction that commits with the mark."""

from typing import Annotated

from fast_depends import Depends
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from rsmq import Broker, Message
from rsmq.sql import Effects
from tests.contract.witness import settled
from tests.sql.test_effects import CREATE, INSERT, QUICK

FOUND = text("SELECT number FROM invoice")


async def test_savepoint_before_the_first_write_does_not_commit(engine: AsyncEngine, broker: Broker) -> None:
    """What it has written is dropped with an attempt that fails."""
    effects = Effects(async_sessionmaker(engine))
    async with engine.begin() as connection:
        await connection.execute(CREATE)

    @broker.handler("orders", group="billing", retry=QUICK, partitions=1, concurrency=1)
    async def bill(number: int, message: Message, session: Annotated[AsyncSession, Depends(effects.session)]) -> None:
        async with session.begin_nested():
            await session.execute(INSERT, {"number": number})
        if message.attempt == 1:
            raise RuntimeError("after the savepoint")

    async with broker.running():
        await broker.publish("orders", 1)
        await settled(broker, "orders")
    async with engine.connect() as connection:
        assert (await connection.scalars(FOUND)).all() == [1]


async def test_savepoint_of_a_plain_session_does_not_commit(sync_engine: Engine, broker: Broker) -> None:
    """The same in a thread."""
    effects = Effects(sessionmaker(sync_engine))
    with sync_engine.begin() as connection:
        connection.execute(CREATE)

    @broker.handler("orders", group="billing", retry=QUICK, partitions=1, concurrency=1)
    def bill(number: int, message: Message, session: Annotated[Session, Depends(effects.session)]) -> None:
        with session.begin_nested():
            session.execute(INSERT, {"number": number})
        if message.attempt == 1:
            raise RuntimeError("after the savepoint")

    async with broker.running():
        await broker.publish("orders", 1)
        await settled(broker, "orders")
    with sync_engine.connect() as connection:
        assert connection.scalars(FOUND).all() == [1]
