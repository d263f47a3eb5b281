"""The outbox: messages that are published if, and only if, a transaction of the service's database commits."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, overload

import uuid_utils
from sqlalchemy import Connection, Engine, func
from sqlalchemy.exc import DBAPIError, UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import Insert, ReturningInsert

from rsmq.errors import ConfigError, TooLarge
from rsmq.handler.retry import LONGEST_DELAY
from rsmq.model.clock import epoch_ms, now_ms, to_ms
from rsmq.model.keys import check_name
from rsmq.model.message import encode_payload, write_headers
from rsmq.model.settings import Settings
from rsmq.model.words import duration
from rsmq.redis.server_context import ServerContext
from rsmq.sql.database import Database, explained
from rsmq.sql.relay import Relay
from rsmq.sql.status import OutboxStatus, read_status
from rsmq.sql.tables import OUTBOX

CHANNEL: Final = "rsmq_outbox"

AsyncPlace = AsyncSession | AsyncConnection
SyncPlace = Session | Connection


class Outbox:
    """Messages in the tables of a database, which the workers relay to their topics after the commit.

    `broker.include(outbox)` lets the workers of a broker relay it; only one of them does so at a time. `poll` is how
    often that one looks for new rows where the database does not announce them: SQLite, MySQL, and PostgreSQL behind a
    pooler that has no LISTEN. `notify=False` saves the NOTIFY of each transaction on PostgreSQL, which waits for a lock
    at a commit.
    """

    def __init__(
        self, engine: Engine | AsyncEngine, *, poll: timedelta = timedelta(milliseconds=50), notify: bool = True
    ) -> None:
        self.database = Database(engine, "Outbox")
        self._poll, self._has_notify = poll, notify and self.database.dialect == "postgresql"
        self._payload_limit: int | None = None
        self.relay: Relay | None = None
        """The relay of this process while a worker runs it, or None."""

    @overload
    def publish(
        self,
        session: AsyncPlace,
        topic: str,
        payload: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: timedelta | None = None,
        at: datetime | None = None,
    ) -> Awaitable[str]: ...
    @overload
    def publish(
        self,
        session: SyncPlace,
        topic: str,
        payload: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: timedelta | None = None,
        at: datetime | None = None,
    ) -> str: ...
    def publish(
        self,
        session: AsyncPlace | SyncPlace,
        topic: str,
        payload: Any = None,  # forgotten together with the session: the error says so
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: timedelta | None = None,
        at: datetime | None = None,
    ) -> Awaitable[str] | str:
        """Publish a message when the transaction of the session commits, and return its id. Await it in an async one.

        `session` is a session or a connection of SQLAlchemy. Options and errors are those of `broker.publish`; `delay`
        counts from now. Raises ConfigError for a session of another database.
        """
        if not isinstance(session, AsyncPlace | SyncPlace):
            raise ConfigError(
                f"outbox.publish({session!r}, ...) has no session: write `await outbox.publish(session, topic, "
                f"payload)` inside `async with sessions.begin() as session:`"
            )
        row = self.row(topic, payload, key=key, headers=headers, delay=delay, at=at)
        self._check(session)
        if isinstance(session, AsyncSession | AsyncConnection):
            return self._insert(session, row)
        try:
            session.execute(self._statement(), row).close()
        except DBAPIError as error:
            raise explained(error) from error
        return str(row["id"])

    async def _insert(self, session: AsyncPlace, row: dict[str, Any]) -> str:
        try:
            (await session.execute(self._statement(), row)).close()
        except DBAPIError as error:
            raise explained(error) from error
        return str(row["id"])

    def _statement(self) -> Insert | ReturningInsert[Any]:
        """On PostgreSQL the row announces itself in the same statement."""
        return OUTBOX.insert().returning(func.pg_notify(CHANNEL, "")) if self._has_notify else OUTBOX.insert()

    def row(
        self,
        topic: str,
        payload: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: timedelta | None = None,
        at: datetime | None = None,
    ) -> dict[str, Any]:
        """A checked message as the row of the table, for code that inserts it in another way."""
        data, kind = encode_payload(payload)
        if key is not None and type(key) is not str:
            raise ConfigError(f"key={key!r} is not text: pass a str, such as str({key!r})")
        if headers and not all(type(part) is str for pair in headers.items() for part in pair):
            raise ConfigError(f"headers={dict(headers)!r}: names and values must be str")
        size = len(data) + len(key or "") + sum(len(name) + len(value) for name, value in (headers or {}).items())
        if self._payload_limit is None:
            self._payload_limit = int(Settings().payload_limit)
        if size > self._payload_limit:
            raise TooLarge(size, self._payload_limit)
        return {
            "id": uuid.UUID(str(uuid_utils.uuid7())),
            "aggregatetype": check_name("topic", topic),
            "aggregateid": key,
            "type": kind,
            "payload": data,
            "headers": write_headers(headers).decode() if headers else None,
            "due_ms": due_ms(delay, at),
        }

    def _check(self, session: AsyncPlace | SyncPlace) -> None:
        """Raise ConfigError unless the row would belong to a transaction of this database."""
        found = session.engine if isinstance(session, AsyncConnection | Connection) else bound_to(session)
        engine = found.sync_engine if isinstance(found, AsyncEngine) else found
        own = self.database.sync_engine
        if engine is not own and place_of(engine) != place_of(own):
            raise ConfigError(
                f"outbox.publish: the session belongs to {engine.url!r}, the outbox to {own.url!r}: use one engine for "
                f"both, Outbox(engine) and async_sessionmaker(engine)"
            )
        if is_autocommit(engine):
            raise ConfigError(
                "outbox.publish: the engine is in AUTOCOMMIT, so the message would be sent although the rest fails: "
                "use a session of an engine without isolation_level='AUTOCOMMIT'"
            )

    # -- in the worker ----------------------------------------------------------------------------------------------

    async def serve(self, context: ServerContext) -> None:
        """Relay the rows while this member leads; for the worker."""
        self._payload_limit = int(context.settings.payload_limit)
        self.relay = Relay(self.database, context, self._poll, CHANNEL if self._has_notify else None)
        try:
            await self.relay.run()
        finally:
            self.relay = None

    def figures(self) -> tuple[str, int, OutboxStatus | None]:
        """For metrics: the name of the database, the rows that this process has relayed, and what waits if it leads."""
        relay = self.relay
        name = self.database.sync_engine.url.database or ""
        return name, 0 if relay is None else relay.relayed, None if relay is None else relay.status

    async def status(self) -> OutboxStatus:
        """How many rows wait, since when, and which the relay cannot publish."""
        return await self.database.run(read_status)

    def __repr__(self) -> str:
        return f"<Outbox {self.database!r}>"


def bound_to(session: AsyncSession | Session) -> Engine:
    """The engine that the session uses for the table."""
    try:
        bind = session.get_bind(clause=OUTBOX.insert())
    except UnboundExecutionError as error:
        raise ConfigError(f"outbox.publish: the session has no engine for the table rsmq_outbox ({error})") from None
    return bind if isinstance(bind, Engine) else bind.engine


def due_ms(delay: timedelta | None, at: datetime | None) -> int | None:
    """When a message is to be delivered, in ms since 1970; None: at once."""
    if delay is None:
        return None if at is None else max(0, epoch_ms(at))
    if at is not None:
        raise ConfigError("give delay or at, not both")
    if not timedelta(0) <= delay <= LONGEST_DELAY:
        raise ConfigError(f"delay of {duration(delay)} is not possible: use 0 s to {duration(LONGEST_DELAY)}")
    return now_ms() + to_ms(delay)


def place_of(engine: Engine) -> tuple[object, ...]:
    """What two engines of one database have in common."""
    url = engine.url
    return url.get_backend_name(), url.host, url.port, url.database, dict(url.query).get("host")


def is_autocommit(engine: Engine) -> bool:
    """Whether each statement of its connections commits by itself."""
    given = engine.get_execution_options().get("isolation_level") or getattr(
        engine.dialect, "_on_connect_isolation_level", None
    )
    return str(given).upper() == "AUTOCOMMIT"
