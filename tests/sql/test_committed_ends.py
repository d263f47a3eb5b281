"""A message whose effects are committed is handled, however its attempt or the message itself ends afterwards."""

import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Annotated, Any

import anyio
import pytest
from fast_depends import Depends
from sqlalchemy import Engine, func, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker
from tenacity import wait_fixed

from rsmq import Broker, Cancelled, Malformed, Message, Reject, RetryPolicy, Running, Unknown
from rsmq.errors import HandlerTimeout
from rsmq.model.message import MessageOrigin
from rsmq.model.message_ref import MessageRef
from rsmq.sql import Effects
from rsmq.sql.effects import Transaction
from rsmq.sql.mark import marks_of
from rsmq.sql.marks import write_mark
from rsmq.sql.tables import HANDLED
from tests.contract.witness import ask
from tests.patience import until

CREATE = text("CREATE TABLE invoice (number int)")
INSERT = text("INSERT INTO invoice VALUES (:number)")
SLOW_COMMIT = (
    "CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(2); RETURN NULL; END'",
    "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON invoice DEFERRABLE INITIALLY DEFERRED "
    "FOR EACH ROW EXECUTE FUNCTION late()",
)
"""PostgreSQL waits inside of COMMIT."""
IN_COMMIT = text("SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%COMMIT%' AND wait_event = 'PgSleep'")
ONCE = RetryPolicy(max_attempts=1)


class Till:
    """A group `billing` on one partition, and what became of its messages."""

    def __init__(self, broker: Broker, engine: AsyncEngine) -> None:
        self.broker, self.engine = broker, engine
        self.effects = Effects(async_sessionmaker(engine))
        self.calls = list[int]()
        self.connections = list[Any]()  # of the driver
        self.after: Callable[[], Awaitable[None]] | None = None

    def handle(self, **options: Any) -> None:
        """Register the handler. What `after` does comes behind the commit, before the message is settled."""

        @self.broker.middleware
        async def behind(message: Message, call_next: Any) -> Any:
            result = await call_next(message)
            if self.after is not None:
                await self.after()
            return result

        @self.broker.handler("orders", group="billing", partitions=1, **options)
        async def bill(number: int, session: Annotated[AsyncSession, Depends(self.effects.session)]) -> None:
            self.calls.append(number)
            raw = await (await session.connection()).get_raw_connection()
            self.connections.append(raw.driver_connection)
            await session.execute(INSERT, {"number": number})

    async def create(self, *more: str) -> None:
        """The table of the handler."""
        async with self.engine.begin() as connection:
            for statement in (CREATE, *map(text, more)):
                await connection.execute(statement)

    async def leave_behind(self, number: int, *, starts: int = 1, is_marked: bool = True, **options: Any) -> MessageRef:
        """A message that a dead member has started so often, and committed."""
        stream = self.broker.keys.stream("orders", 0)
        await self.broker.topics.ensure("orders", 1)
        await ask(self.broker, "XGROUP", "CREATE", stream, "billing", "0", "MKSTREAM")
        ref = await self.broker.publish("orders", number, **options)
        ((_, ((entry_id, fields),)),) = await ask(
            self.broker, "XREADGROUP", "GROUP", "billing", "dead", "STREAMS", stream, ">"
        )
        claim = ("XCLAIM", stream, "billing", "dead", 0, entry_id, "RETRYCOUNT", starts, "JUSTID")
        await ask(self.broker, *claim)
        origin = MessageOrigin("orders", 0, "billing", fence=1, deployment=self.broker.keys.prefix)
        (mark,) = marks_of([Message(origin, entry_id, fields)])
        async with self.engine.begin() as connection:
            await connection.execute(INSERT, {"number": number})
            if is_marked:
                await connection.run_sync(write_mark, mark)
        return ref

    async def count(self, statement: Any) -> int:
        """The number that a statement returns."""
        async with self.engine.connect() as connection:
            return int(await connection.scalar(statement) or 0)

    async def rows(self) -> int:
        """How often the handler has committed."""
        return await self.count(text("SELECT count(*) FROM invoice"))

    async def letters(self) -> list[bytes]:
        """The reasons of dead letters."""
        rows = await ask(self.broker, "XRANGE", self.broker.keys.dlq("orders", 0, "billing"), "-", "+")
        return [dict(zip(fields[::2], fields[1::2], strict=True))[b"dlq.reason"] for _, fields in rows]

    async def is_settled(self) -> bool:
        """Whether nothing is unread, pending or waits for a retry."""
        stream, retry = self.broker.keys.stream("orders", 0), self.broker.keys.retry("orders", 0, "billing")
        (row,) = await ask(self.broker, "XINFO", "GROUPS", stream)
        found = dict(zip(row[::2], row[1::2], strict=True))
        return not (found[b"lag"] or found[b"pending"] or await ask(self.broker, "ZCARD", retry))


@pytest.fixture
async def till(engine: AsyncEngine, broker: Broker) -> Till:
    """On each kind of database."""
    found = Till(broker, engine)
    await found.create()
    return found


@pytest.fixture
async def slow_till(pg: AsyncEngine, broker: Broker) -> Till:
    """PostgreSQL needs two seconds for COMMIT."""
    found = Till(broker, pg)
    await found.create(*SLOW_COMMIT)
    return found


@pytest.mark.parametrize("on_expiry", ["dead", "drop"])
async def test_message_that_expires_after_its_commit_is_handled(till: Till, on_expiry: Any) -> None:
    """Its first owner died between the commit and the settlement."""
    till.handle()
    async with till.broker:
        ref = await till.leave_behind(1, expires=timedelta(seconds=1), on_expiry=on_expiry)
        await until(lambda: is_over(till, ref), "it has expired")
    async with till.broker.running():
        await until(till.is_settled, "it is settled")
        assert (await till.letters(), await till.rows(), till.calls) == ([], 1, [])
        assert till.broker.worker is not None
        assert till.broker.worker.consumers[0].stats["expired"] == 0


async def is_over(till: Till, ref: MessageRef) -> bool:
    """Whether the second has passed, by the server's clock."""
    seconds, _ = await ask(till.broker, "TIME")
    ((entry_id, _),) = await ask(till.broker, "XRANGE", till.broker.keys.stream("orders", 0), "-", "+")
    return int(seconds) * 1000 > int(entry_id.partition(b"-")[0]) + 1000


async def test_message_that_is_cancelled_after_its_commit_is_settled(till: Till) -> None:
    """No caller hears that it was cancelled."""
    till.handle()
    async with till.broker:
        ref = await till.leave_behind(1)
        answers = list[Any]()

        async def cancel() -> None:
            answer = await till.broker.cancel(ref)
            while isinstance(answer, Unknown | Running):  # a worker may need longer than a lease to start
                answer = await till.broker.cancel(ref)
            answers.append(answer)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel)
            cancels = till.broker.keys.cancels("orders", 0, "billing")
            await until(lambda: ask(till.broker, "HLEN", cancels), "it is asked for")
            async with till.broker.running():
                await until(lambda: answers, "there is an answer")
    assert not isinstance(answers[0], Cancelled)
    assert answers[0].groups == {"billing": "settled"}
    assert (await till.rows(), till.calls) == (1, [])


@pytest.mark.parametrize("is_marked", [True, False])
async def test_message_whose_process_died_too_often_is_handled_if_it_has_committed(till: Till, is_marked: bool) -> None:
    """It is a dead letter only if it has not."""
    till.handle(retry=RetryPolicy(max_attempts=3))
    async with till.broker:
        await till.leave_behind(1, starts=4, is_marked=is_marked)
    async with till.broker.running():
        await until(till.is_settled, "it has ended")
        assert (await till.letters(), till.calls) == ([] if is_marked else [b"crashed"], [])


@pytest.mark.parametrize(
    "error", [RuntimeError("late"), Reject("late"), Malformed("late"), HandlerTimeout("bill", 1.0)], ids=repr
)
async def test_attempt_that_fails_after_its_commit_is_handled(till: Till, error: Exception) -> None:
    """In a middleware: there is neither a dead letter nor a retry."""

    async def fail() -> None:
        raise error

    till.after = fail
    till.handle(retry=ONCE)
    async with till.broker.running():
        await till.broker.publish("orders", 1)
        await until(till.is_settled, "it is settled")
        assert (await till.letters(), await till.rows(), till.calls) == ([], 1, [1])


class NoProblems(Exception):
    """An error with a length, such as one that lists problems, is false when it lists none."""

    def __len__(self) -> int:
        return 0


async def test_batch_that_fails_after_its_commit_is_handled_though_its_error_is_false(till: Till) -> None:
    """The truth value of an error does not matter."""

    @till.broker.middleware
    async def behind(messages: list[Message], call_next: Any) -> Any:
        await call_next(messages)
        raise NoProblems

    @till.broker.handler("orders", group="billing", partitions=1, batch=10, retry=ONCE)
    async def bill(numbers: list[int], session: Annotated[AsyncSession, Depends(till.effects.session)]) -> None:
        await session.execute(INSERT, [{"number": number} for number in numbers])

    async with till.broker.running():
        await till.broker.publish("orders", 1)
        await until(till.is_settled, "it is settled")
        assert (await till.letters(), await till.rows()) == ([], 1)


async def test_attempt_that_fails_before_its_commit_is_retried(till: Till) -> None:
    """The question costs no effect."""
    till.handle(retry=RetryPolicy(max_attempts=2, wait=wait_fixed(0.01)))
    async with till.engine.begin() as connection:
        await connection.execute(text("DROP TABLE invoice"))
    async with till.broker.running():
        await till.broker.publish("orders", 1)
        await until(lambda: len(till.calls) == 2, "it is tried again")
        await until(till.is_settled, "it is a dead letter")
        assert await till.letters() == [b"failed"]
    assert await till.count(select(func.count()).select_from(HANDLED)) == 0


async def test_commit_that_takes_longer_than_the_timeout_is_handled(slow_till: Till) -> None:
    """The call is cancelled inside of COMMIT."""
    slow_till.handle(retry=ONCE, timeout=timedelta(seconds=0.5))
    async with slow_till.broker.running():
        await slow_till.broker.publish("orders", 1)
        await until(slow_till.is_settled, "it has ended")
        assert [await slow_till.letters(), await slow_till.rows()] in ([[], 1], [[b"timeout"], 0])


async def test_commit_during_which_the_message_is_cancelled_is_never_called_cancelled(slow_till: Till) -> None:
    """`cancel(running=True)` interrupts the handler while it commits."""
    slow_till.handle()
    async with slow_till.broker.running():
        ref = await slow_till.broker.publish("orders", 1)
        await until(lambda: slow_till.count(IN_COMMIT), "it commits")
        answer = await slow_till.broker.cancel(ref, running=True)
        await until(slow_till.is_settled, "it has ended")
        assert isinstance(answer, Cancelled) == (await slow_till.rows() == 0)


async def test_commit_that_comes_after_its_connection_broke_is_handled(slow_till: Till) -> None:
    """The answer is lost, and the server commits later than anybody waits for the answer."""
    slow_till.handle(retry=ONCE)
    async with slow_till.broker.running():
        await slow_till.broker.publish("orders", 1)
        await until(lambda: slow_till.count(IN_COMMIT), "it commits")
        slow_till.connections[0].terminate()
        await until(slow_till.is_settled, "it has ended")
        assert (await slow_till.letters(), await slow_till.rows()) == ([], 1)


async def test_plain_function_that_outlasts_its_timeout_commits_no_more(sync_engine: Engine, broker: Broker) -> None:
    """Its thread cannot be stopped, and reaches its commit when the message is a dead letter."""
    effects, is_late, kept = Effects(sessionmaker(sync_engine)), threading.Event(), list[Transaction]()
    with sync_engine.begin() as connection:
        connection.execute(CREATE)

    @broker.handler("orders", group="billing", partitions=1, retry=ONCE, timeout=timedelta(seconds=0.3))
    def bill(number: int, session: Annotated[Session, Depends(effects.session)]) -> None:
        kept.append(session.info[Transaction])
        is_late.wait(60)
        session.execute(INSERT, {"number": number})

    async with broker.running():
        await broker.publish("orders", 1)
        dlq = broker.keys.dlq("orders", 0, "billing")
        await until(lambda: ask(broker, "XLEN", dlq), "it is a dead letter")
        is_late.set()
        await until(lambda: kept[0].is_over, "its transaction is over")
    with sync_engine.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(HANDLED)) == 0
        assert connection.scalar(text("SELECT count(*) FROM invoice")) == 0


@pytest.mark.parametrize("is_marked", [True, False])
async def test_what_is_committed_does_not_go_to_the_fallback(till: Till, is_marked: bool) -> None:
    """The mark is looked at first, of a message that killed its workers and of one whose last attempt failed."""
    till.handle(retry=ONCE, fallback="letters")
    async with till.broker:
        await till.leave_behind(1, starts=2, is_marked=is_marked)
    async with till.broker.running():
        await until(till.is_settled, "it is settled")
        assert (await till.letters(), till.calls) == ([], [])
        found = await till.broker.topics.find("letters")
        assert (found is None) is is_marked

        async def fail() -> None:
            raise OSError("after the commit")

        till.after = fail
        await till.broker.publish("orders", 2)
        await until(lambda: 2 in till.calls, "it was handled")
        await until(till.is_settled, "it is settled")
        assert (await till.letters(), await till.rows()) == ([], 2)
        assert (await till.broker.topics.find("letters") is None) is is_marked
