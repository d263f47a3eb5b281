"""Effects that happen once: a handler's transaction commits once for each message, or not at all."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final

import anyio
import anyio.from_thread
from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from rsmq.errors import BrokerError, ConfigError, StaleEpoch
from rsmq.handler.retry import AlreadyHandled, BatchRolledBack
from rsmq.model.clock import now_ms, to_ms
from rsmq.model.message import Message
from rsmq.redis.leadership import TTL, Leadership
from rsmq.redis.server_context import ServerContext
from rsmq.sql.database import Database, explained
from rsmq.sql.marks import Mark, already, delete_marks, handled_of, lanes, write_mark, write_marks
from rsmq.sql.settled_floor import settled_floor
from rsmq.sql.tables import HANDLED

log = logging.getLogger("rsmq.effects")

KEPT: Final = timedelta(hours=1)
"""For how long a mark is kept after its message is settled: a failover may undo the last settles."""
PRUNE_SECONDS: Final = 60.0
MOST_PARKED: Final = 5000
"""With more messages that wait for a retry, a group's marks are kept until there are fewer."""
RESOLVE_SECONDS: Final = 5.0

Sessions = async_sessionmaker[Any] | sessionmaker[Any]


class Effects:
    """A session as a dependency of a handler: `session: Annotated[AsyncSession, Depends(effects.session)]`.

    Its transaction commits when the handler has returned, together with a mark of the message, before the message is
    settled. If the mark is there already, the handler is skipped, or what it has done is rolled back. The database also
    refuses the commit of a worker whose partition has a newer owner. A plain `sessionmaker` is for plain functions.
    """

    commits: Final = True
    """Not for shared distribution: without a lease there is no fence, and a mark would outlive a reset of the group.
    And what a batch handler returns must be known before the commit."""
    session: Callable[..., Any]
    """The dependency."""

    def __init__(self, sessions: Sessions) -> None:
        if not isinstance(sessions, async_sessionmaker | sessionmaker):
            raise ConfigError(
                f"Effects({sessions!r}) is not possible: pass async_sessionmaker(engine), or sessionmaker"
            )
        bind = sessions.kw.get("bind")
        if not isinstance(bind, Engine | AsyncEngine):
            raise ConfigError("Effects: the sessionmaker has no engine: write Effects(async_sessionmaker(engine))")
        self.database = Database(bind, "Effects")
        if isinstance(sessions, async_sessionmaker):
            guarded = guarded_class(sessions.kw.get("sync_session_class", sessions.class_.sync_session_class))
            self._new_session: Callable[[], Any] = partial(sessions, sync_session_class=guarded)
            self.session = self._async_session
        else:
            self._new_session = partial(guarded_class(sessions.class_), **sessions.kw)
            self.session = self._plain_session

    async def _async_session(self, work: Message | list[Message] = None) -> AsyncIterator[AsyncSession]:  # type: ignore[assignment]
        async with self._new_session() as session:
            with self._guarded(session.sync_session, work) as transaction:
                if transaction.is_redelivered:
                    await session.run_sync(transaction.skip_handled)
                yield session
                refuse_outputs(transaction.messages)
                try:
                    await session.run_sync(transaction.write_and_commit)
                except DBAPIError as error:
                    if not (transaction.is_in_doubt(error) and await self._has_committed(transaction.marks[0])):
                        raise

    def _plain_session(self, work: Message | list[Message] = None) -> Iterator[Session]:  # type: ignore[assignment]
        with self._new_session() as session, self._guarded(session, work) as transaction:
            if transaction.is_redelivered:
                transaction.skip_handled(session)
            yield session
            refuse_outputs(transaction.messages)
            try:
                transaction.write_and_commit(session)
            except DBAPIError as error:
                if not (transaction.is_in_doubt(error) and self._has_committed_plain(transaction.marks[0])):
                    raise

    @contextmanager
    def _guarded(self, session: Session, work: Message | list[Message]) -> Iterator[Transaction]:
        """The transaction of a session. Errors say what to write."""
        transaction = session.info[Transaction] = Transaction(session, work)
        try:
            yield transaction
        except InvalidRequestError as error:
            if "transaction is already begun" not in str(error):
                raise
            raise ConfigError(COMMITS) from error
        except DBAPIError as error:
            said = explained(error)
            if said is error:
                raise
            raise said from error

    async def _has_committed(self, mark: Mark) -> bool:
        """Whether the transaction whose commit had no answer was committed.

        To write the same mark waits for a transaction that is still about to commit. So the answer is final. Of a batch
        one mark says it for all.
        """
        with anyio.move_on_after(RESOLVE_SECONDS):
            while True:
                try:
                    await self.database.run(lambda connection: write_and_roll_back(connection, mark))
                except RolledBack:
                    return False
                except AlreadyHandled:
                    return True
                except Exception as error:
                    log.info("it is unknown yet whether %s was committed: %s", mark, error)
                    await anyio.sleep(0.1)
        return False

    def _has_committed_plain(self, mark: Mark) -> bool:
        return anyio.from_thread.run(self._has_committed, mark)

    # -- in the worker ----------------------------------------------------------------------------------------------

    async def serve(self, context: ServerContext) -> None:
        """Delete old marks, in one worker for all; for the worker."""
        leadership = Leadership(context, f"effects.{await self.database.identity()}")
        next_round = 0.0
        try:
            while True:
                await anyio.sleep(await leadership.bid() or TTL / 3)
                if leadership.epoch and anyio.current_time() >= next_round:
                    next_round = anyio.current_time() + PRUNE_SECONDS
                    await self.prune(context)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(2):
                await leadership.release()

    async def prune(self, context: ServerContext) -> int:
        """Delete the marks of messages that were settled more than an hour ago: these can never come again."""
        before, count = now_ms() - to_ms(KEPT), 0
        for lane in await self.database.run(lanes):
            group, topic, partition = lane
            try:
                floor = await settled_floor(context, topic, partition, group, MOST_PARKED)
            except BrokerError as error:
                log.warning("the marks of %s.%d/%s are kept: %s", topic, partition, group, error)
                continue
            if floor is not None:
                found = floor
                count += await self.database.run(lambda each: delete_marks(each, lane, found, before))  # noqa: B023
        return count

    def __repr__(self) -> str:
        return f"<Effects {self.database!r}>"


COMMITS: Final = (
    "the session of effects.session commits by itself when the handler has returned, together with the mark of the "
    "message: remove `session.commit()` and `session.begin()` from the handler; for a part that may fail alone write "
    "`async with session.begin_nested():`, and to see generated keys `await session.flush()`"
)

DROPS: Final = (
    "the handler has ended the transaction of effects.session, so what it wrote is rolled back, and the message is not "
    "handled: remove `session.rollback()`, `session.close()`, `session.reset()` and `async with session:` from the "
    "handler; rsmq closes the session; for a part that may fail alone write `async with session.begin_nested():`, and "
    "to undo everything raise an error"
)


def guarded_class(kind: type[Session]) -> type[Session]:
    """A class of sessions that refuse a commit by the handler itself."""
    guarded = type(kind.__name__, (kind,), {})
    event.listen(guarded, "before_commit", lambda session: session.info[Transaction].refuse(session))
    return guarded


class RolledBack(Exception):
    """A mark could be written, and was rolled back."""


class Transaction:
    """The transaction of one message or of a batch. To begin it sends nothing: the session connects at its first
    statement."""

    def __init__(self, session: Session, work: Message | list[Message]) -> None:
        self.is_batch = isinstance(work, list)
        self.messages = messages_of(work)
        self.marks = [Mark.of(message) for message in self.messages]
        self._begun = session.begin()
        self._may_commit = False

    @property
    def is_redelivered(self) -> bool:
        """Whether an earlier run may have committed."""
        return any(message.is_redelivered for message in self.messages)

    def refuse(self, session: Session) -> None:
        """Before a commit: of a savepoint, by the handler, or at the end."""
        if not (self._may_commit or session.in_nested_transaction()):
            raise ConfigError(COMMITS)

    def skip_handled(self, session: Session) -> None:
        """Raise AlreadyHandled if an earlier run has committed, or BatchRolledBack if one has for some of a batch."""
        late = [mark for message, mark in zip(self.messages, self.marks, strict=True) if message.is_redelivered]
        found = handled_of(connection_of(session), late)
        self._raise({mark: already(mark) for mark in found})

    def _raise(self, refused: dict[Mark, Exception]) -> None:
        if refused and self.is_batch:
            raise BatchRolledBack([refused.get(mark) for mark in self.marks])
        for error in refused.values():
            raise error

    def write(self, session: Session) -> None:
        """What the handler has left to write, and the marks. Raises ConfigError if the handler has dropped its work:
        the marks would commit alone."""
        if session.get_transaction() is not self._begun:
            raise ConfigError(DROPS)
        if session.in_nested_transaction():
            raise ConfigError(
                "the handler has returned with an open savepoint: write `async with session.begin_nested():`"
            )
        session.flush()
        if len(self.marks) > 1:
            self._raise(write_marks(connection_of(session), self.marks))
            return
        try:
            write_mark(connection_of(session), self.marks[0])
        except (AlreadyHandled, StaleEpoch) as error:
            self._raise({self.marks[0]: error})

    def write_and_commit(self, session: Session) -> None:
        """All that follows the handler."""
        self.write(session)
        self.commit(session)

    def is_in_doubt(self, error: DBAPIError) -> bool:
        """Whether the error is that of a commit whose answer was lost."""
        return self._may_commit and error.connection_invalidated

    def commit(self, session: Session) -> None:
        """The end of the transaction."""
        self._may_commit = True
        session.commit()


def refuse_outputs(messages: list[Message]) -> None:
    """Raise ConfigError if the handler has published by a message: a mark that is found would skip the output."""
    if any(message.has_outputs for message in messages):
        raise ConfigError(
            "message.publish in a handler with effects.session: its output is lost if the worker dies between the "
            "commit and the settlement. Write `await outbox.publish(session, topic, payload)`, which commits with the "
            "rest, or publish in a handler without effects.session"
        )


def connection_of(session: Session) -> Connection:
    """The connection of the session on which rsmq's tables are."""
    return session.connection(bind_arguments={"clause": HANDLED.insert()})


def messages_of(work: Message | list[Message] | None) -> list[Message]:
    """The messages of a call. Raises ConfigError outside of a handler."""
    messages = work if isinstance(work, list) else [work]
    found = [message for message in messages if isinstance(message, Message)]
    if not found:
        raise ConfigError(
            "effects.session works as a dependency of a handler only: write `session: Annotated[AsyncSession, "
            "Depends(effects.session)]` as its parameter; elsewhere open a session of your own sessionmaker"
        )
    return found


def write_and_roll_back(connection: Connection, mark: Mark) -> None:
    """Raises AlreadyHandled if the mark is there, else RolledBack."""
    write_mark(connection, mark)
    raise RolledBack
