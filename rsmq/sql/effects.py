"""Effects that happen once: a handler's transaction commits once for each message, or not at all."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, SessionTransaction, sessionmaker

from rsmq.errors import ConfigError
from rsmq.model.message import Message
from rsmq.sql.database import Database, explained, is_autocommit
from rsmq.sql.handled import HandledMessages, MarkedWork
from rsmq.sql.tables import HANDLED

Sessions = async_sessionmaker[Any] | sessionmaker[Any]


class Effects(HandledMessages):
    """A session as a dependency of a handler: `session: Annotated[AsyncSession, Depends(effects.session)]`.

    Its transaction commits when the handler has returned, together with a mark of the message, before the message is
    settled. If the mark is there already, the handler is skipped, or what it has done is rolled back. The database also
    refuses the commit of a worker whose partition has a newer owner. A plain `sessionmaker` is for plain functions.
    """

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
        if is_autocommit(self.database.sync_engine):
            raise ConfigError(AUTOCOMMIT)
        if self.database.dialect == "sqlite":
            event.listen(self.database.sync_engine, "savepoint", begin_before)
        if isinstance(sessions, async_sessionmaker):
            guarded = guarded_class(sessions.kw.get("sync_session_class", sessions.class_.sync_session_class))
            self._new_session: Callable[[], Any] = partial(sessions, sync_session_class=guarded)
            self.session = self._async_session
        else:
            self._new_session = partial(guarded_class(sessions.class_), **sessions.kw)
            self.session = self._plain_session

    async def _async_session(self, work: Message | list[Message] = None) -> AsyncIterator[AsyncSession]:  # type: ignore[assignment]
        session = self._new_session()
        try:
            with self._guarded(session.sync_session, work) as transaction:
                if transaction.is_redelivered:
                    await session.run_sync(lambda each: transaction.skip_handled(connection_of(each)))
                yield session
                transaction.refuse_outputs(PUBLISH)
                try:
                    await session.run_sync(transaction.write_and_commit)
                except DBAPIError as error:
                    if not (transaction.is_in_doubt(error) and await self._has_committed(transaction.marks[0])):
                        raise
        finally:
            if session.sync_session.in_transaction():
                await session.__aexit__(*sys.exc_info())  # in a task of its own, which a cancellation does not end
            else:
                session.sync_session.close()  # sends nothing

    def _plain_session(self, work: Message | list[Message] = None) -> Iterator[Session]:  # type: ignore[assignment]
        with self._new_session() as session, self._guarded(session, work) as transaction:
            if transaction.is_redelivered:
                transaction.skip_handled(connection_of(session))
            yield session
            transaction.refuse_outputs(PUBLISH)
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
            with self.following(transaction):
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
        finally:
            transaction.is_over = True


PUBLISH: Final = "await outbox.publish(session, topic, payload)"
COMMITS: Final = (
    "the session of effects.session commits by itself when the handler has returned, together with the mark of the "
    "message: remove `session.commit()` and `session.begin()` from the handler; for a part that may fail alone write "
    "`async with session.begin_nested():`, and to see generated keys `await session.flush()`"
)
AUTOCOMMIT: Final = (
    "effects.session is in AUTOCOMMIT, so each statement of the handler would commit although the rest fails: use an "
    "engine and a connection without isolation_level='AUTOCOMMIT'"
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
    event.listen(guarded, "after_transaction_create", refuse_late_use)
    event.listen(guarded, "after_begin", guard)
    return guarded


def guard(session: Session, _transaction: SessionTransaction, connection: Connection) -> None:
    """Refuse the commit of the connection itself, past the session, which does not call it. An event of the engine
    would do the same, but then each statement of the engine costs more. Raises ConfigError if its statements commit by
    themselves."""
    if is_autocommit(connection):
        raise ConfigError(AUTOCOMMIT)
    connection.commit = refuse_commit  # type: ignore[method-assign]


def refuse_commit() -> None:
    """In the place of a commit of the connection."""
    raise ConfigError(COMMITS)


def begin_before(connection: Connection, _name: str) -> None:
    """On SQLite, whose driver begins a transaction at the first write only: to release a savepoint that comes before
    that would commit what is in it, without the mark."""
    if not connection.connection.driver_connection.in_transaction:  # type: ignore[union-attr]
        connection.exec_driver_sql("BEGIN")


def refuse_late_use(session: Session, new: SessionTransaction) -> None:
    """Raise ConfigError for a transaction that begins when the handler has returned: nothing would commit it."""
    own = session.info.get(Transaction)
    if own is not None and own.is_over and new.parent is None:
        new.close()  # so that the next use is refused, too
        raise ConfigError(
            "the handler has returned, and its transaction of effects.session has ended: what a task writes or "
            "publishes by this session now is lost. Await the task in the handler, or open a session of your own"
        )


class Transaction(MarkedWork):
    """The transaction of one message or of a batch. To begin it sends nothing: the session connects at its first
    statement."""

    def __init__(self, session: Session, work: Message | list[Message]) -> None:
        super().__init__(work, "effects.session")
        self._begun = session.begin()
        self._may_commit = False
        self.is_over = False

    def refuse(self, session: Session) -> None:
        """Before a commit: of a savepoint, by the handler, or at the end."""
        if not (self._may_commit or session.in_nested_transaction()):
            raise ConfigError(COMMITS)

    def write(self, session: Session) -> None:
        """What the handler has left to write, and the marks. Raises ConfigError if it has dropped its work: the marks
        would commit alone."""
        if session.get_transaction() is not self._begun:
            raise ConfigError(DROPS)
        if session.in_nested_transaction():
            raise ConfigError(
                "the handler has returned with an open savepoint: write `async with session.begin_nested():`"
            )
        session.flush()
        self.write_marks(connection_of(session))

    def write_and_commit(self, session: Session) -> None:
        """All that follows the handler."""
        self.begin_commit()
        self.write(session)
        self.commit(session)

    def is_in_doubt(self, error: DBAPIError) -> bool:
        """Whether the error is that of a commit whose answer was lost."""
        return self._may_commit and error.connection_invalidated

    def commit(self, session: Session) -> None:
        """The end of the transaction."""
        self._may_commit = True
        session.commit()


INTO_HANDLED: Final = HANDLED.insert()


def connection_of(session: Session) -> Connection:
    """The connection of the session on which rsmq's tables are."""
    return session.connection(bind_arguments={"clause": INTO_HANDLED})
