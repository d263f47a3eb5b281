"""Effects: a handler's transaction commits once for each message, and only for the newest owner."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Annotated, Any

import anyio
import pytest
from fast_depends import Depends
from sqlalchemy import Engine, func, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from tenacity import wait_fixed

from rsmq import Broker, ConfigError, Message, Reject, Retry, RetryPolicy
from rsmq.errors import StaleEpoch
from rsmq.handler.retry import AlreadyHandled
from rsmq.model.clock import now_ms
from rsmq.redis.server_context import ServerContext
from rsmq.sql import Effects, Outbox
from rsmq.sql.effects import Transaction
from rsmq.sql.mark import Mark, marks_of
from rsmq.sql.marks import write_mark
from rsmq.sql.tables import FENCE, HANDLED
from tests.contract.witness import dies, letters_of, settled
from tests.patience import until
from tests.security.test_planted import MARK, leaks
from tests.sql.databases import Postgres

QUICK = RetryPolicy(max_attempts=3, wait=wait_fixed(0.01))
CREATE = text("CREATE TABLE invoice (number int)")
INSERT = text("INSERT INTO invoice VALUES (:number)")


UNSETTLED = "return redis.call('XPENDING', KEYS[1], ARGV[1])[1] + redis.call('ZCARD', KEYS[2])"
"""In one moment: a message moves between the two."""


class Billing:
    """A handler that writes one row for each message, and what became of it."""

    def __init__(self, broker: Broker, engine: AsyncEngine) -> None:
        self.broker, self.engine, self.effects = broker, engine, Effects(async_sessionmaker(engine))
        self.calls: list[tuple[int, int]] = []  # number and attempt
        self.before_end: Callable[[Message, AsyncSession], Awaitable[None]] | None = None

        @broker.handler("orders", group="billing", retry=QUICK, partitions=2)
        async def bill(
            number: int, message: Message, session: Annotated[AsyncSession, Depends(self.effects.session)]
        ) -> None:
            self.calls.append((number, message.attempt))
            await session.execute(INSERT, {"number": number})
            if self.before_end is not None:
                await self.before_end(message, session)

    async def create(self) -> None:
        async with self.engine.begin() as connection:
            await connection.execute(CREATE)

    async def rows(self) -> list[int]:
        async with self.engine.connect() as connection:
            return sorted((await connection.scalars(text("SELECT number FROM invoice"))).all())

    async def marks(self) -> int:
        async with self.engine.connect() as connection:
            return (await connection.scalar(select(func.count()).select_from(HANDLED))) or 0

    async def is_settled(self) -> bool:
        """Whether nothing is pending or waits for a retry, in a group that has read everything."""
        keys, ask = self.broker.keys, self.broker.client.execute_command
        for partition in range(2):
            names = keys.stream("orders", partition), keys.retry("orders", partition, "billing")
            (row,) = await ask("XINFO", "GROUPS", names[0])
            if dict(zip(row[::2], row[1::2], strict=True))[b"lag"]:
                return False
            if await ask("EVAL", UNSETTLED, 2, *names, "billing"):
                return False
        return True


@pytest.fixture
async def billing(engine: AsyncEngine, broker: Broker) -> Billing:
    """On each kind of database."""
    found = Billing(broker, engine)
    await found.create()
    return found


@pytest.fixture
async def pg_billing(pg: AsyncEngine, broker: Broker) -> Billing:
    """On PostgreSQL."""
    found = Billing(broker, pg)
    await found.create()
    return found


async def test_each_message_commits_once_with_its_mark(billing: Billing) -> None:
    """Rows and marks, also for messages whose first attempts fail after they have written."""

    async def fail_first(message: Message, _: AsyncSession) -> None:
        if message.payload % 5 == 0 and message.attempt < 3:
            raise RuntimeError("after the write")

    billing.before_end = fail_first
    async with billing.broker.running():
        await billing.broker.publish_many("orders", range(20), key=lambda number: str(number % 4))
        await until(billing.is_settled, "all are settled")
        assert await billing.rows() == list(range(20))
        assert await billing.marks() == 20
    assert len(billing.calls) == 28


async def test_a_message_whose_settle_was_lost_is_skipped(billing: Billing, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit went through, then the handler's process failed: the next delivery does not call the handler."""
    commit, failures = Transaction.commit, []

    def commit_and_fail(self: Transaction, session: Session) -> None:
        commit(self, session)
        if not failures:
            failures.append(1)
            raise RuntimeError("killed after the commit")

    monkeypatch.setattr(Transaction, "commit", commit_and_fail)
    async with billing.broker.running():
        await billing.broker.publish("orders", 7)
        await until(billing.is_settled, "it is settled")
    assert billing.calls == [(7, 1)]
    assert await billing.rows() == [7]


async def test_a_commit_without_an_answer_is_looked_up(billing: Billing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Committed: the message is settled, without another attempt. Not committed: it is tried again."""
    commit, wanted = Transaction.commit, [True, False]

    def commit_without_answer(self: Transaction, session: Session) -> None:
        if not wanted:
            return commit(self, session)
        (commit if wanted.pop(0) else lambda *_: session.rollback())(self, session)
        raise DBAPIError("COMMIT", {}, OSError("cut"), connection_invalidated=True)

    monkeypatch.setattr(Transaction, "commit", commit_without_answer)
    async with billing.broker.running():
        await billing.broker.publish("orders", 1, key="a")
        await until(billing.is_settled, "it is settled")
        assert billing.calls == [(1, 1)]
        await billing.broker.publish("orders", 2, key="a")
        await until(billing.is_settled, "it is settled")
    assert billing.calls == [(1, 1), (2, 1), (2, 2)]
    assert await billing.rows() == [1, 2]


async def test_a_zombie_cannot_commit(pg_billing: Billing) -> None:
    """A newer owner has written meanwhile: the database refuses the commit, whatever the worker believes. It gives the
    partition up, which is no failed attempt, and its next lease is newer than that owner's."""
    billing, seen = pg_billing, list[Message]()

    async def raise_fence(message: Message, _: AsyncSession) -> None:
        seen.append(message)
        if len(seen) == 1:
            assert await billing.rows() == []
            async with billing.engine.begin() as connection:
                mark = marks_of([message])[0]._replace(id_ms=1, epoch=message.fence + 1)
                await connection.run_sync(write_mark, mark)

    billing.before_end = raise_fence
    async with billing.broker.running():
        await billing.broker.publish("orders", 1)
        await until(billing.is_settled, "it is handled")
    assert await billing.rows() == [1]
    assert [message.attempt for message in seen] == [1, 1]
    async with billing.engine.connect() as connection:
        assert await connection.scalar(select(FENCE.c.epoch)) == seen[1].fence > seen[0].fence + 1


async def test_session_of_a_handler_that_has_returned_is_refused(billing: Billing) -> None:
    """It would begin a transaction that nothing commits."""
    kept = list[AsyncSession]()

    async def keep(_: Message, session: AsyncSession) -> None:
        kept.append(session)

    billing.before_end = keep
    async with billing.broker.running():
        await billing.broker.publish("orders", 1)
        await until(billing.is_settled, "it is settled")
    with pytest.raises(ConfigError, match="the handler has returned"):
        await kept[0].execute(INSERT, {"number": 2})
    with pytest.raises(ConfigError, match="the handler has returned"):
        await Outbox(billing.engine).publish(kept[0], "orders", 3)
    assert await billing.rows() == [1]


async def test_a_refused_handler_that_has_written_nothing_leaves_no_mark(pg_billing: Billing) -> None:
    """The mark is in a transaction, although no statement of the handler has begun one."""
    billing, seen = pg_billing, list[Message]()

    @billing.broker.handler("idle", group="billing", retry=QUICK)
    async def watch(message: Message, session: Annotated[AsyncSession, Depends(billing.effects.session)]) -> None:
        seen.append(message)
        if len(seen) > 1:
            assert await billing.marks() == 1, "only that of the newer owner"
            return
        async with billing.engine.begin() as connection:
            await connection.run_sync(write_mark, marks_of([message])[0]._replace(id_ms=1, epoch=message.fence + 1))

    async with billing.broker.running():
        await billing.broker.publish("idle", 1)
        await until(lambda: len(seen) == 2, "it is handled again")
    assert await billing.marks() == 2


async def test_a_connection_that_breaks_before_the_mark_commits_nothing(pg_billing: Billing) -> None:
    """The next attempt has another connection."""
    billing = pg_billing

    async def cut(message: Message, session: AsyncSession) -> None:
        if message.attempt == 1:
            pid = await session.scalar(text("SELECT pg_backend_pid()"))
            async with billing.engine.begin() as connection:
                await connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})

    billing.before_end = cut
    async with billing.broker.running():
        await billing.broker.publish("orders", 1)
        await until(lambda: billing_has(billing, 1), "it is handled")
        await until(billing.is_settled, "it is settled")
    assert (await billing.rows(), billing.calls) == ([1], [(1, 1), (1, 2)])


async def test_each_end_of_a_handler_gives_its_connection_back(pg_billing: Billing) -> None:
    """After the commit, an error, and a handler that is cancelled."""
    billing, started = pg_billing, anyio.Event()

    async def end(message: Message, session: AsyncSession) -> None:
        if message.attempt == 1:
            raise RuntimeError("after the writes")
        if message.payload == 2:
            started.set()
            await anyio.sleep_forever()

    billing.before_end = end
    async with billing.broker.running():
        await billing.broker.publish("orders", 1)
        await until(billing.is_settled, "it is settled")
        ref = await billing.broker.publish("orders", 2)
        await started.wait()
        assert await billing.broker.cancel(ref, running=True)
        await until(billing.is_settled, "it is settled")
    pool: Any = billing.engine.pool
    assert pool.checkedout() == 0
    assert await billing.rows() == [1]


async def test_a_group_reset_and_a_replay_run_again(pg_billing: Billing) -> None:
    """Both are new runs on purpose: the same messages commit once more."""
    billing = pg_billing

    async def reject(message: Message, _: AsyncSession) -> None:
        if message.payload == 3:
            raise RuntimeError("into the dead letters")

    billing.before_end = reject
    async with billing.broker.running():
        await billing.broker.publish_many("orders", [1, 2, 3])
        await until(billing.is_settled, "all are settled")
        assert await billing.rows() == [1, 2]
        await billing.broker.reset_group("orders", "billing")
        await until(lambda: has_rows(billing, [1, 1, 2, 2]), "they are handled again")
        await until(billing.is_settled, "all are settled")
        billing.before_end = None
        await replay_all(billing.broker)
        await until(lambda: billing_has(billing, 3), "the dead letter is handled")
    assert await billing.marks() >= 5


async def has_rows(billing: Billing, rows: list[int]) -> bool:
    """Whether the table has exactly these rows."""
    return await billing.rows() == rows


async def billing_has(billing: Billing, number: int) -> bool:
    """Whether the table has this row."""
    return number in await billing.rows()


async def replay_all(broker: Broker) -> None:
    """All dead letters of the group."""
    topic = await broker.topics.existing("orders")
    assert await broker.dead_letters.replay(topic, "billing") > 0


async def test_marks_are_deleted_an_hour_after_the_settle(pg_billing: Billing, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a moved clock: within the hour all stay, after it those below the settled floor go, and only those."""
    billing, broker = pg_billing, pg_billing.broker

    async def fail_last(message: Message, _: AsyncSession) -> None:
        if message.payload == 9:
            raise RuntimeError("waits for its retry")

    billing.before_end = fail_last
    async with broker.running():
        assert broker.worker is not None
        context = ServerContext(broker.client, broker.keys, broker.settings, broker.topics, "m")
        await broker.publish_many("orders", range(9), key=lambda _: "a")
        await until(billing.is_settled, "all are settled")
        assert await billing.effects.prune(context) == 0
        assert await billing.marks() == 9
        monkeypatch.setattr("rsmq.sql.handled.now_ms", lambda: now_ms() + 59 * 60_000)
        assert await billing.effects.prune(context) == 0
        monkeypatch.setattr("rsmq.sql.handled.now_ms", lambda: now_ms() + 61 * 60_000)
        await billing.effects.prune(context)  # or the worker, at the same time
        await until(lambda: has_marks(billing, 0), "they are deleted")


async def test_marks_above_the_settled_floor_stay(pg: AsyncEngine, broker: Broker) -> None:
    """While an earlier message is not settled, the later ones keep their marks, however old they are."""
    billing = Billing(broker, pg)
    await billing.create()

    async def fail_first(message: Message, _: AsyncSession) -> None:
        if message.payload == 0:
            raise RuntimeError("again")

    billing.before_end = fail_first
    slow = RetryPolicy(max_attempts=3, wait=wait_fixed(3600))
    broker.handlers[0] = replace(broker.handlers[0], retry=slow)
    async with broker.running():
        context = ServerContext(broker.client, broker.keys, broker.settings, broker.topics, "m")
        await broker.publish("orders", 0, key="a")
        await until(lambda: billing.calls, "the first one has failed")
        await broker.publish_many("orders", range(1, 6), key=lambda _: "aa")
        await until(lambda: has_marks(billing, 5), "the others are handled")
        hour = timedelta(hours=2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rsmq.sql.handled.now_ms", lambda: now_ms() + int(hour.total_seconds() * 1000))
            is_together = await same_partition(broker)
            await billing.effects.prune(context)  # or the worker, at the same time
            await until(lambda: has_marks(billing, 5 if is_together else 0), "the settled ones are deleted")
        broker.stop(timedelta(0))


async def same_partition(broker: Broker) -> bool:
    """Whether the keys `a` and `aa` share a partition."""
    lengths = [await broker.client.execute_command("XLEN", broker.keys.stream("orders", each)) for each in range(2)]
    return 0 in lengths


async def has_marks(billing: Billing, count: int) -> bool:
    """Whether there are so many marks."""
    return await billing.marks() == count


async def test_another_message_under_the_same_stream_id_is_handled(engine: AsyncEngine) -> None:
    """A server that lost writes gives an id again: only the same message counts as handled."""
    mark = Mark("rsmq", "billing", "orders", 0, 5, 0, 0, "first", 7)
    async with engine.begin() as connection:
        await connection.run_sync(write_mark, mark)
        with pytest.raises(AlreadyHandled):
            await connection.run_sync(write_mark, mark)
        await connection.run_sync(write_mark, mark._replace(message_id="second"))
        with pytest.raises(AlreadyHandled):
            await connection.run_sync(write_mark, mark._replace(message_id="second"))
        await connection.run_sync(write_mark, mark._replace(run=1))
        with pytest.raises(StaleEpoch, match="is rolled back"):
            await connection.run_sync(write_mark, mark._replace(id_ms=6, epoch=6))


async def test_plain_functions_have_plain_sessions(sync_engine: Engine, broker: Broker) -> None:
    """The same for a handler that runs in a thread, on PostgreSQL, SQLite and MariaDB."""
    effects, calls = Effects(sessionmaker(sync_engine)), list[tuple[int, int]]()
    with sync_engine.begin() as connection:
        connection.execute(CREATE)

    @broker.handler("orders", group="billing", retry=QUICK, concurrency=1, partitions=1)
    def bill(number: int, message: Message, session: Annotated[Session, Depends(effects.session)]) -> None:
        calls.append((number, message.attempt))
        session.execute(INSERT, {"number": number})
        if number == 1 and message.attempt == 1:
            raise RuntimeError("after the write")

    commit, failures = Transaction.commit, []

    def commit_and_fail(self: Transaction, session: Session) -> None:
        commit(self, session)
        if not failures:
            failures.append(1)
            raise RuntimeError("killed after the commit")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transaction, "commit", commit_and_fail)
        async with broker.running():
            await broker.publish_many("orders", range(5))
            await until(lambda: count_rows(sync_engine) == 5, "all are handled")
            await until(lambda: is_idle(broker), "all are settled")
    assert sorted(calls) == [(0, 1), (1, 1), (1, 2), (2, 1), (3, 1), (4, 1)]


def count_rows(engine: Engine) -> int:
    """The rows of the handler."""
    with engine.connect() as connection:
        return int(connection.scalar(text("SELECT count(*) FROM invoice")) or 0)


async def is_idle(broker: Broker) -> bool:
    """Whether nothing is pending."""
    names = broker.keys.stream("orders", 0), broker.keys.retry("orders", 0, "billing")
    return await broker.client.execute_command("EVAL", UNSETTLED, 2, *names, "billing") == 0


async def commit(session: AsyncSession) -> None:
    await session.commit()


async def begin(session: AsyncSession) -> None:
    async with session.begin():
        pass


@pytest.mark.parametrize("wrong", [commit, begin])
async def test_a_commit_by_the_handler_says_what_to_write(
    pg_billing: Billing, wrong: Callable[[AsyncSession], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is committed; savepoints work."""

    async def misuse(message: Message, session: AsyncSession) -> None:
        async with session.begin_nested():
            await session.execute(INSERT, {"number": 100})
        if message.payload == 1:
            await wrong(session)

    pg_billing.before_end = misuse
    async with pg_billing.broker.running():
        await pg_billing.broker.publish("orders", 1)
        await pg_billing.broker.publish("orders", 2)
        await until(lambda: has_rows(pg_billing, [2, 100]), "the right one is committed")
        await until(pg_billing.is_settled, "the wrong one is a dead letter")
    assert "remove `session.commit()` and `session.begin()` from the handler" in caplog.text
    assert await pg_billing.rows() == [2, 100]


async def roll_back(session: AsyncSession) -> None:
    await session.rollback()


async def close(session: AsyncSession) -> None:
    await session.close()


async def reset_and_go_on(session: AsyncSession) -> None:
    await session.reset()
    await session.execute(INSERT, {"number": 300})


async def enter(session: AsyncSession) -> None:
    async with session:
        await session.execute(INSERT, {"number": 300})


async def begin_again(session: AsyncSession) -> None:
    await session.rollback()
    await session.begin()


async def test_a_handler_that_drops_its_work_is_not_handled(
    pg_billing: Billing, caplog: pytest.LogCaptureFixture
) -> None:
    """The transaction at the end is not the one that was begun: no mark is written, and the error says why."""
    ways = [roll_back, close, reset_and_go_on, enter, begin_again]

    async def drop(message: Message, session: AsyncSession) -> None:
        if message.payload < len(ways):
            await ways[message.payload](session)

    pg_billing.before_end = drop
    async with pg_billing.broker.running():
        await pg_billing.broker.publish_many("orders", range(len(ways) + 1))
        await until(pg_billing.is_settled, "the wrong ones are dead letters")
    assert await pg_billing.rows() == [len(ways)]
    assert await pg_billing.marks() == 1
    assert "remove `session.rollback()`, `session.close()`" in caplog.text


async def test_bad_use_says_what_to_write(postgres: Postgres, broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    """A missing table, a session outside of a handler, no engine, shared distribution."""
    engine = create_async_engine(postgres.url("asyncpg", postgres.new_database()))
    billing = Billing(broker, engine)
    await billing.create()
    async with broker.running():
        await broker.publish("orders", 1)
        await until(lambda: "no table rsmq_handled: create the tables with `rsmq sql init" in caplog.text, "it is said")
    assert await billing.rows() == []
    await engine.dispose()
    with pytest.raises(ConfigError, match="as a dependency of a handler only"):
        async for _ in billing.effects.session():
            pass
    for wrong, said in ((engine, "pass async_sessionmaker"), (async_sessionmaker(), "has no engine")):
        with pytest.raises(ConfigError, match=said):
            Effects(wrong)  # type: ignore[arg-type]

    async def share(order: int, session: Annotated[AsyncSession, Depends(billing.effects.session)]) -> None: ...

    with pytest.raises(ConfigError, match="an output is lost if the worker dies between the commit"):
        broker.handler("orders", group="output", output="invoices")(share)
    with pytest.raises(ConfigError, match="distribution='shared' has no fence, and a reset of the group would skip"):
        broker.handler("orders", group="shared", distribution="shared")(share)


async def test_output_of_a_handler_with_effects_is_refused(
    pg_billing: Billing, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be lost with the worker that dies between commit and settlement. Nothing is committed or published."""

    async def publish(message: Message, _: AsyncSession) -> None:
        await message.publish("invoices", {"n": 1})

    pg_billing.before_end = publish
    async with pg_billing.broker.running():
        await pg_billing.broker.publish("orders", 1)
        await until(pg_billing.is_settled, "it is a dead letter")
        assert (
            await pg_billing.broker.client.execute_command("EXISTS", pg_billing.broker.keys.stream("invoices", 0)) == 0
        )
    assert await pg_billing.rows() == []
    assert await pg_billing.marks() == 0
    assert "message.publish in a handler with effects.session" in caplog.text


async def test_error_that_a_handler_returns_commits_nothing(engine: AsyncEngine, broker: Broker) -> None:
    """Before, its transaction was committed first: the next attempt was skipped, so `return Retry()` settled the
    message, and what `return Reject()` had written stayed beside its dead letter."""
    effects, attempts = Effects(async_sessionmaker(engine)), list[tuple[int, int]]()

    @broker.handler("orders", group="billing", retry=QUICK, partitions=1)
    async def bill(
        number: int, message: Message, session: Annotated[AsyncSession, Depends(effects.session)]
    ) -> Exception | None:
        attempts.append((number, message.attempt))
        await session.execute(INSERT, {"number": 10 * number + message.attempt})
        if number == 2:
            return Reject("no such customer")
        return Retry("not yet", after="0s") if message.attempt == 1 else None

    async with engine.begin() as connection:
        await connection.execute(CREATE)
    async with broker.running():
        for number in (1, 2):
            await broker.publish("orders", number)
        await settled(broker, "orders")
        (letter,) = await letters_of(broker, "orders", "billing")
    assert sorted(attempts) == [(1, 1), (1, 2), (2, 1)]
    assert (letter.reason, letter.error) == ("rejected", "no such customer")
    async with engine.connect() as connection:
        assert (await connection.scalars(text("SELECT number FROM invoice"))).all() == [12]


async def test_what_a_statement_of_a_handler_was_given_is_in_no_error(
    broker: Broker, engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLAlchemy writes it behind the text of its error: neither the log nor the dead letter has it."""
    caplog.set_level(logging.DEBUG, "rsmq")
    effects = Effects(async_sessionmaker(engine))

    @broker.handler("orders", group="billing", retry=RetryPolicy(max_attempts=1), partitions=1)
    async def bill(owner: str, session: Annotated[AsyncSession, Depends(effects.session)]) -> None:
        await session.execute(text("INSERT INTO invoice VALUES (:owner)"), {"owner": owner})

    async with broker.running():
        await broker.publish("orders", MARK)
        await dies(broker, "orders", "billing", 1)
        (letter,) = await letters_of(broker, "orders", "billing")
    assert "INSERT INTO invoice" in letter.error
    assert "INSERT INTO invoice" in caplog.text
    assert leaks(letter.error, letter.traceback, caplog.text) == []
