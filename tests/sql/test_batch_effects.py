"""Effects in batch handlers: one transaction for a batch, and each message commits once all the same."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import anyio
import pytest
from fast_depends import Depends
from sqlalchemy import Engine, func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker
from tenacity import wait_fixed

from rsmq import Broker, Message, Reject, Retry, RetryPolicy
from rsmq.errors import StaleEpoch
from rsmq.handler.retry import AlreadyHandled
from rsmq.sql import Effects
from rsmq.sql.effects import Transaction
from rsmq.sql.mark import Mark, marks_of
from rsmq.sql.marks import handled_of, write_mark, write_marks
from rsmq.sql.tables import HANDLED
from rsmq.testing import Harness
from tests.patience import until
from tests.sql.test_effects import CREATE, INSERT, UNSETTLED

QUICK = RetryPolicy(max_attempts=3, wait=wait_fixed(0.01))
Outcomes = list[BaseException | None] | None


async def succeed(_: list[Message]) -> Outcomes:
    """The outcome of a handler for which all went well."""
    return None


class Bulk:
    """A handler that writes one row for each message of a batch, and which batches it got."""

    def __init__(self, broker: Broker, engine: AsyncEngine) -> None:
        self.broker, self.engine = broker, engine
        self.effects = Effects(async_sessionmaker(engine))
        self.batches: list[list[int]] = []
        self.dead = 0
        self.before_end: Callable[[list[Message]], Awaitable[Outcomes]] = succeed

        @broker.handler("orders", group="bulk", batch=50, linger="200ms", retry=QUICK, partitions=1, concurrency=1)
        async def bulk(
            orders: list[int],
            messages: list[Message],
            session: Annotated[AsyncSession, Depends(self.effects.session)],
        ) -> Outcomes:
            self.batches.append(orders)
            await session.execute(INSERT, [{"number": number} for number in orders])
            return await self.before_end(messages)

    async def handle(self, count: int, key: str | None = None) -> None:
        """Publish so many messages and wait until all of them are settled or dead letters."""
        async with self.engine.begin() as connection:
            await connection.execute(CREATE)
        async with self.broker.running():
            await self.broker.publish_many("orders", range(count), key=None if key is None else lambda _: key)
            await until(self._is_settled, "all are settled")
            self.dead = await self.broker.client.xlen(self.broker.keys.dlq("orders", 0, "bulk"))

    async def _is_settled(self) -> bool:
        keys, ask = self.broker.keys, self.broker.client.execute_command
        names = keys.stream("orders", 0), keys.retry("orders", 0, "bulk")
        (row,) = await ask("XINFO", "GROUPS", names[0])
        return not (
            dict(zip(row[::2], row[1::2], strict=True))[b"lag"] or await ask("EVAL", UNSETTLED, 2, *names, "bulk")
        )

    async def rows(self) -> list[int]:
        """The rows, in the order in which they were written."""
        async with self.engine.connect() as connection:
            return list((await connection.scalars(text("SELECT number FROM invoice"))).all())

    async def marks(self) -> int:
        async with self.engine.connect() as connection:
            return (await connection.scalar(select(func.count()).select_from(HANDLED))) or 0


@pytest.fixture
def bulk(engine: AsyncEngine, broker: Broker) -> Bulk:
    """On each kind of database."""
    return Bulk(broker, engine)


@pytest.fixture
def pg_bulk(pg: AsyncEngine, broker: Broker) -> Bulk:
    """On PostgreSQL."""
    return Bulk(broker, pg)


async def test_a_batch_commits_once_with_a_mark_for_each_message(bulk: Bulk) -> None:
    """One transaction for many messages."""
    await bulk.handle(100)
    assert sorted(await bulk.rows()) == list(range(100))
    assert await bulk.marks() == 100
    assert len(bulk.batches) < 10


async def test_a_batch_that_raises_commits_nothing(bulk: Bulk) -> None:
    """All of it is tried again."""

    async def fail_first(messages: list[Message]) -> Outcomes:
        if messages[0].attempt == 1:
            raise RuntimeError("after the writes")
        return None

    bulk.before_end = fail_first
    await bulk.handle(20)
    assert sorted(await bulk.rows()) == list(range(20))
    assert len(bulk.batches) > 1


async def test_those_that_fail_are_left_out_and_the_others_commit(pg_bulk: Bulk) -> None:
    """The batch with a failure is rolled back, and at once handled without it: no other message fails with it."""
    attempts = list[tuple[int, int]]()

    async def judge(messages: list[Message]) -> Outcomes:
        attempts.extend((message.payload, message.attempt) for message in messages)
        outcomes: list[BaseException | None] = [None] * len(messages)
        for at, message in enumerate(messages):
            if message.payload == 3 and message.attempt < 3:
                outcomes[at] = Retry("not yet")
            if message.payload == 7:
                outcomes[at] = Reject("never")
        return outcomes

    pg_bulk.before_end = judge
    await pg_bulk.handle(20)
    assert sorted(await pg_bulk.rows()) == [number for number in range(20) if number != 7]
    assert await pg_bulk.marks() == 19
    assert pg_bulk.dead == 1
    assert {attempt for number, attempt in attempts if number not in (3, 7)} == {1}


@pytest.mark.parametrize("error", [Retry("not yet"), Reject("never")])
async def test_within_a_key_nothing_overtakes_a_message_that_fails(pg_bulk: Bulk, error: Exception) -> None:
    """Those before it commit at once, those behind it after its last attempt."""

    async def judge(messages: list[Message]) -> Outcomes:
        return [error if message.payload == 5 and message.attempt < 3 else None for message in messages]

    pg_bulk.before_end = judge
    await pg_bulk.handle(12, key="ada")
    expected = [number for number in range(12) if number != 5 or isinstance(error, Retry)]
    assert await pg_bulk.rows() == expected
    assert await pg_bulk.marks() == len(expected)


async def test_what_an_earlier_run_has_committed_is_left_out(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker fails between the commit and the settlement: the next batch has these messages and new ones."""
    commit, failures = Transaction.commit, list[int]()

    def commit_and_fail(self: Transaction, session: Session) -> None:
        commit(self, session)
        if not failures:
            failures.append(len(self.marks))
            raise RuntimeError("killed after the commit")

    monkeypatch.setattr(Transaction, "commit", commit_and_fail)
    await bulk.handle(120)
    assert sorted(await bulk.rows()) == list(range(120))
    assert await bulk.marks() == 120


async def test_marks_are_found_at_the_end_too(pg_bulk: Bulk) -> None:
    """As after a failover that has lost the position of the group: they are marked, and do not look redelivered."""
    marked = list[Mark]()

    async def mark_some(messages: list[Message]) -> Outcomes:
        if not marked:
            marked.extend(marks_of([message for message in messages if message.payload in (2, 4)]))
            async with pg_bulk.engine.begin() as connection:
                assert await connection.run_sync(write_marks, marked) == {}
        return None

    pg_bulk.before_end = mark_some
    await pg_bulk.handle(10)
    assert sorted(await pg_bulk.rows()) == [number for number in range(10) if number not in (2, 4)]


async def test_a_zombie_commits_nothing_of_a_batch(pg_bulk: Bulk) -> None:
    """A newer owner has written meanwhile. The partition is given up, which is no failed attempt."""
    fences = list[int]()

    async def raise_fence(messages: list[Message]) -> Outcomes:
        fences.append(messages[0].fence)
        assert {message.attempt for message in messages} == {1}
        if len(fences) == 1:
            assert await pg_bulk.rows() == []
            async with pg_bulk.engine.begin() as connection:
                await connection.run_sync(
                    write_mark, marks_of(messages[:1])[0]._replace(id_ms=1, epoch=messages[0].fence + 1)
                )
        return None

    pg_bulk.before_end = raise_fence
    await pg_bulk.handle(5)
    assert sorted(await pg_bulk.rows()) == [0, 1, 2, 3, 4]
    assert pg_bulk.dead == 0
    assert fences[1] > fences[0] + 1


MARKS = [Mark("rsmq", "billing", "orders", number % 2, 5, number, 0, f"id-{number}", 7) for number in range(6)]


def test_marks_of_a_batch_on_each_database(sync_engine: Engine) -> None:
    """Those that are there are refused, and those of a lane with a newer owner; the others can be written."""
    with sync_engine.begin() as connection:
        assert write_marks(connection, MARKS[:3]) == {}
        assert handled_of(connection, MARKS) == set(MARKS[:3])
        assert handled_of(connection, [MARKS[0]._replace(message_id="another")]) == set()
        refused = write_marks(connection, MARKS[1:])
        assert {mark: type(error) for mark, error in refused.items()} == dict.fromkeys(MARKS[1:3], AlreadyHandled)
        late = [mark._replace(id_ms=6, epoch=6) for mark in MARKS if mark.partition_number]
        refused = write_marks(connection, late)
        assert {mark: type(error) for mark, error in refused.items()} == dict.fromkeys(late, StaleEpoch)


async def test_a_plain_function_gets_a_plain_session(sync_engine: Engine, broker: Broker) -> None:
    """In a thread, on PostgreSQL, SQLite and MariaDB; an outcome for each message."""
    effects = Effects(sessionmaker(sync_engine))
    with sync_engine.begin() as connection:
        connection.execute(CREATE)

    @broker.handler("orders", group="bulk", batch=50, linger="200ms", retry=QUICK, partitions=1, concurrency=1)
    def bulk(orders: list[int], session: Annotated[Session, Depends(effects.session)]) -> list[Any]:
        session.execute(INSERT, [{"number": number} for number in orders])
        return [Reject("never") if number == 3 else None for number in orders]

    async with broker.running():
        await broker.publish_many("orders", range(10))
        names = broker.keys.stream("orders", 0), broker.keys.retry("orders", 0, "bulk")
        await until(lambda: count_rows(sync_engine) == 9, "the others are committed")
        await until(lambda: is_idle(broker, names), "all are settled")
    assert count_rows(sync_engine) == 9


async def is_idle(broker: Broker, names: tuple[bytes | str, ...]) -> bool:
    """Whether nothing is pending."""
    return await broker.client.execute_command("EVAL", UNSETTLED, 2, *names, "bulk") == 0


def count_rows(engine: Engine) -> int:
    """The rows of the handler."""
    with engine.connect() as connection:
        return int(connection.scalar(text("SELECT count(*) FROM invoice")) or 0)


async def test_the_test_kit_shows_the_last_outcome_of_each_message(pg_bulk: Bulk, server_url: str, prefix: str) -> None:
    """Not that their batch was rolled back because of another message."""

    async def judge(messages: list[Message]) -> Outcomes:
        return [Reject("never") if message.payload == 3 else None for message in messages]

    pg_bulk.before_end = judge
    async with pg_bulk.engine.begin() as connection:
        await connection.execute(CREATE)
    async with Harness(pg_bulk.broker, url=server_url, prefix=prefix) as harness:
        ids = await pg_bulk.broker.publish_many("orders", range(5))
        await harness.handle()
        found = [(await harness.outcomes("orders", message_id))[0] for message_id in ids]
    assert [(outcome.status, len(outcome.runs)) for outcome in found] == [("done", 1)] * 3 + [("dead", 1), ("done", 1)]


LANE = [Mark("rsmq", "billing", "orders", 0, 5, number, 0, f"id-{number}", 7) for number in range(30)]


async def test_many_marks_of_which_one_is_there_are_all_but_that_written(pg: AsyncEngine) -> None:
    """They are inserted at once, and one by one only if that fails; another message with a stream id takes it over."""
    async with pg.begin() as connection:
        await connection.run_sync(write_marks, [LANE[3], LANE[8]._replace(message_id="lost")])
    async with pg.begin() as connection:
        await connection.execute(CREATE)  # the transaction has begun
        refused = await connection.run_sync(write_marks, LANE)
        assert {mark: type(error) for mark, error in refused.items()} == {LANE[3]: AlreadyHandled}
        assert await connection.run_sync(handled_of, LANE) == set(LANE)
    async with pg.begin() as connection:
        assert await connection.scalar(text("SELECT count(*) FROM invoice")) == 0, "what came before is committed"


async def write_and_roll_back(pg: AsyncEngine, marks: list[Mark], refused: dict[Mark, Exception]) -> None:
    """Write marks in a transaction that has begun, and add those that it must not commit."""
    async with pg.connect() as connection:
        await connection.execute(text("SELECT 1"))
        refused.update(await connection.run_sync(write_marks, marks))
        await connection.rollback()


@pytest.mark.parametrize("ends", ["commit", "rollback"])
async def test_many_marks_wait_for_a_transaction_that_has_one_of_them(pg: AsyncEngine, ends: str) -> None:
    """Such as that of an earlier owner, which is about to commit."""
    found = dict[Mark, Exception]()

    async with pg.connect() as first, pg.connect() as watcher:
        await first.run_sync(write_mark, LANE[5])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write_and_roll_back, pg, LANE, found)
            await until(lambda: is_waiting(watcher), "the batch waits")
            await getattr(first, ends)()
    assert list(found) == ([LANE[5]] if ends == "commit" else [])


@pytest.mark.parametrize("marks", [LANE[2:3], LANE[2:9], LANE[2:]])
@pytest.mark.parametrize("ends", ["commit", "rollback"])
async def test_marks_wait_for_a_newer_owner_that_is_about_to_commit(
    pg: AsyncEngine, marks: list[Mark], ends: str
) -> None:
    """The fence that it has raised is not visible yet: a transaction that did not wait would commit after it."""
    found = dict[Mark, Exception]()

    async with pg.begin() as connection:
        await connection.run_sync(write_mark, LANE[0])
    async with pg.connect() as newer, pg.connect() as watcher:
        await newer.run_sync(write_mark, LANE[1]._replace(epoch=8))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write_and_roll_back, pg, marks, found)
            await until(lambda: is_waiting(watcher), "the late owner waits")
            await getattr(newer, ends)()
    assert {type(error) for error in found.values()} == ({StaleEpoch} if ends == "commit" else set())
    assert set(found) == (set(marks) if ends == "commit" else set())


async def is_waiting(connection: AsyncConnection) -> bool:
    """Whether a transaction of the database waits for another one."""
    waiting = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = :event")
    found = await connection.scalar(waiting, {"event": "transactionid"})
    await connection.rollback()
    return bool(found)


async def test_error_that_a_batch_handler_returns_counts_for_all(bulk: Bulk) -> None:
    """As one that it raises. Before, it was taken for outcomes of a wrong form, and tried again."""

    async def reject(_: list[Message]) -> Any:
        return Reject("no such customers")

    bulk.before_end = reject
    await bulk.handle(3)
    assert (bulk.dead, await bulk.rows()) == (3, [])
    assert sum(map(len, bulk.batches)) == 3
