"""Marks and COMMIT: what happens in the database between the handler and its commit is found, by one call of it."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import anyio
import pytest
from fast_depends import Depends
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session
from tenacity import wait_fixed

from rsmq import Broker, Message, RetryPolicy
from rsmq.sql import Effects
from rsmq.sql.effects import Transaction
from rsmq.sql.mark import marks_of
from rsmq.sql.marks import write_marks
from rsmq.sql.tables import FENCE, HANDLED
from tests.contract.witness import add, letters_of, settled
from tests.patience import until
from tests.sql.test_batch_effects import is_waiting
from tests.sql.test_effects import UNSETTLED

INSERT = text("INSERT INTO paid VALUES (:number)")
QUICK = RetryPolicy(max_attempts=2, wait=wait_fixed(0.01))
Meanwhile = Callable[[list[Message], AsyncSession], Awaitable[None]]


class Till:
    """A handler of which each message has a row. `meanwhile` is what happens before its first commit in a partition
    that is known."""

    def __init__(self, broker: Broker, engine: AsyncEngine, is_batch: bool) -> None:
        self.broker, self.engine, self.effects = broker, engine, Effects(async_sessionmaker(engine))
        self.meanwhile: Meanwhile | None = None
        self.attempts = list[int]()

        async def pay(messages: list[Message], session: AsyncSession) -> None:
            self.attempts.append(messages[0].attempt)
            await session.execute(INSERT, [{"number": message.payload} for message in messages])
            meanwhile, self.meanwhile = self.meanwhile, None
            if meanwhile is not None:
                await meanwhile(messages, session)

        async def one(
            number: int, message: Message, session: Annotated[AsyncSession, Depends(self.effects.session)]
        ) -> None:
            await pay([message], session)

        async def many(
            numbers: list[int], messages: list[Message], session: Annotated[AsyncSession, Depends(self.effects.session)]
        ) -> None:
            await pay(messages, session)

        options: Any = {"batch": 10, "linger": "10ms"} if is_batch else {}
        broker.handler("orders", group="till", retry=QUICK, partitions=2, concurrency=1, **options)(
            many if is_batch else one
        )

    async def pay(self, *numbers: int) -> None:
        """Publish, and wait until all are settled."""
        await self.broker.publish_many("orders", numbers, key=str)
        await until(self.is_settled, "all are settled")

    async def is_settled(self) -> bool:
        """Whether each message was read, and none is pending or waits for a retry."""
        keys, ask = self.broker.keys, self.broker.client.execute_command
        for partition in range(2):
            names = keys.stream("orders", partition), keys.retry("orders", partition, "till")
            (row,) = await ask("XINFO", "GROUPS", names[0])
            if dict(zip(row[::2], row[1::2], strict=True))[b"lag"] or await ask("EVAL", UNSETTLED, 2, *names, "till"):
                return False
        return True

    async def ask(self, statement: Any) -> list[Any]:
        """The first column of what a statement returns."""
        async with self.engine.connect() as connection:
            return list((await connection.scalars(statement)).all())

    async def rows(self) -> list[int]:
        """The rows of the handler."""
        return sorted(await self.ask(text("SELECT number FROM paid")))

    async def marks(self) -> int:
        """How many messages are marked."""
        return int((await self.ask(select(func.count()).select_from(HANDLED)))[0])


@pytest.fixture(params=[False, True], ids=["single", "batch"])
async def till(pg: AsyncEngine, broker: Broker, request: pytest.FixtureRequest) -> Till:
    """Both kinds of handlers, with partitions whose first messages have committed."""
    async with pg.begin() as connection:
        await connection.execute(text("CREATE TABLE paid (number int, UNIQUE (number) DEFERRABLE INITIALLY DEFERRED)"))
    return Till(broker, pg, request.param)


FIRST = range(20)
"""Enough numbers for each partition to have one."""


async def test_each_message_has_a_row_and_a_mark(till: Till) -> None:
    """The first ones of an owner, and the later ones."""
    async with till.broker.running():
        await till.pay(*FIRST)
        await till.pay(100, 101, 102)
    assert await till.rows() == [*FIRST, 100, 101, 102]
    assert await till.marks() == 23


async def test_a_mark_that_is_there_rolls_back_the_handler(till: Till) -> None:
    """Another transaction commits for the same message while the handler runs."""

    async def mark(messages: list[Message], _: AsyncSession) -> None:
        async with till.engine.begin() as connection:
            assert await connection.run_sync(write_marks, marks_of(messages[:1])) == {}

    async with till.broker.running():
        await till.pay(*FIRST)
        till.meanwhile = mark
        await till.pay(100)
        await till.pay(101)
    assert await till.rows() == [*FIRST, 101]
    assert set(till.attempts) == {1}, "its connection is usable"


async def test_a_newer_owner_rolls_back_the_handler(till: Till) -> None:
    """It raises the fence after the process has seen it, and commits while the late owner waits for it. That one gives
    the partition up, which is no failed attempt."""
    async with till.engine.connect() as newer, till.engine.connect() as watcher, anyio.create_task_group() as tasks:

        async def commit() -> None:
            await until(lambda: is_waiting(watcher), "the late owner waits")
            await newer.commit()

        async def overtake(messages: list[Message], _: AsyncSession) -> None:
            partition = FENCE.c.partition_number == messages[0].partition
            await newer.execute(FENCE.update().where(partition).values(epoch=messages[0].fence + 1))
            tasks.start_soon(commit)

        async with till.broker.running():
            await till.pay(*FIRST)
            till.meanwhile, till.attempts[:] = overtake, []
            await till.pay(100)
    assert till.attempts == [1, 1]
    assert await till.rows() == [*FIRST, 100]


async def test_another_message_with_a_stream_id_of_a_lost_one_is_handled(till: Till) -> None:
    """By the same call: the mark is taken over."""

    async def take_id(messages: list[Message], _: AsyncSession) -> None:
        async with till.engine.begin() as connection:
            await connection.run_sync(write_marks, [marks_of(messages)[0]._replace(message_id="lost")])

    async with till.broker.running():
        await till.pay(*FIRST)
        till.meanwhile, till.attempts[:] = take_id, []
        await till.pay(100)
        assert till.attempts == [1]
        await till.pay(101, 102, 103, 104)
    assert await till.rows() == [*FIRST, 100, 101, 102, 103, 104]
    assert "lost" not in await till.ask(select(HANDLED.c.message_id))


async def test_fences_that_were_deleted_are_made_again(till: Till) -> None:
    """The mark raises them."""

    async def lose(_: list[Message], session: AsyncSession) -> None:
        async with till.engine.begin() as connection:
            await connection.execute(FENCE.delete())

    async with till.broker.running():
        await till.pay(*FIRST)
        till.meanwhile = lose
        await till.pay(100)
        await till.pay(101)
    assert await till.rows() == [*FIRST, 100, 101]
    assert await till.marks() == 22


async def test_an_error_of_the_commit_itself_is_that_of_the_handler(till: Till) -> None:
    """A constraint that is checked at the end: the mark is rolled back, and its connection stays usable."""

    async def repeat(_: list[Message], session: AsyncSession) -> None:
        await session.execute(INSERT, {"number": 0})

    async with till.broker.running():
        await till.pay(*FIRST)
        till.meanwhile, till.attempts[:] = repeat, []
        await till.pay(100)
        assert till.attempts == [1, 2]
        await till.pay(101)
    assert await till.rows() == [*FIRST, 100, 101]
    assert await till.marks() == 22


@pytest.mark.parametrize("has_committed", [True, False])
async def test_a_commit_without_an_answer_is_handled_again_only_if_it_is_lost(
    till: Till, has_committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark tells."""
    commit, cut = Transaction.commit, list[bool]()

    def lose_answer(transaction: Transaction, session: Session) -> None:
        if cut:
            return commit(transaction, session)
        cut.append(True)
        transaction._may_commit = True
        (commit if has_committed else lambda *_: session.rollback())(transaction, session)
        raise DBAPIError("COMMIT", {}, OSError("cut"), connection_invalidated=True)

    async with till.broker.running():
        await till.pay(*FIRST)
        monkeypatch.setattr(Transaction, "commit", lose_answer)
        till.attempts.clear()
        await till.pay(100)
    assert cut == [True]
    assert till.attempts == ([1] if has_committed else [1, 2])
    assert await till.rows() == [*FIRST, 100]


async def test_ids_with_quotes_are_marked(till: Till) -> None:
    """They are parameters, never part of a statement."""
    ids = ["it's", 'say "hi"', "back\\slash"]
    async with till.broker.running():
        await till.pay(*FIRST)
        for message_id in ids:
            await till.broker.publish("orders", 100 + len(message_id), message_id=message_id)
            await until(till.is_settled, "it is settled")
    assert {*ids} <= {*await till.ask(select(HANDLED.c.message_id))}


async def test_id_with_a_nul_that_another_client_has_written_is_marked(engine: AsyncEngine, broker: Broker) -> None:
    """PostgreSQL stores no NUL. In a batch it would have failed the messages beside it, too."""
    effects = Effects(async_sessionmaker(engine))

    @broker.handler("orders", group="till", retry=QUICK, partitions=1, batch=10)
    async def pay(messages: list[Message], session: Annotated[AsyncSession, Depends(effects.session)]) -> None: ...

    async with broker:
        await broker.publish("orders", 1)
        for message_id in (b"a\0b", b"\0" * 256):
            await add(broker, broker.keys.stream("orders", 0), "data", "2", "id", message_id)
        async with broker.running():
            await settled(broker, "orders")
            assert await letters_of(broker, "orders", "till") == []
    async with engine.connect() as connection:
        assert await connection.scalar(select(func.count()).select_from(HANDLED)) == 3
