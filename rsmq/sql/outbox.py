"""The outbox: messages that are published if, and only if, a transaction of the service's database commits."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar, Unpack, overload

import uuid_utils
from sqlalchemy import Connection, Engine, Executable, func, select
from sqlalchemy.exc import DBAPIError, UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from rsmq.errors import ConfigError
from rsmq.handler.service import OnRow
from rsmq.model.duration import Duration
from rsmq.model.encoding import NO_CODECS, Codec, Encoding
from rsmq.model.layout import checked_band
from rsmq.model.message import LARGEST_PAYLOAD, TEXT, encode_payload, write_headers
from rsmq.model.named_topic import NamedTopic, checked_payload, name_of_topic
from rsmq.model.publish_options import (
    OutboxManyOptions,
    OutboxOptions,
    check_message_id,
    check_replicas,
    check_size,
    due_time,
    refuse_single,
    refuse_unknown,
)
from rsmq.model.settings import Settings
from rsmq.redis.server_context import ServerContext
from rsmq.sql.database import Database, is_autocommit, own_error
from rsmq.sql.deployment import DatabaseClaim
from rsmq.sql.relay import OutboxRelay
from rsmq.sql.row_options import CANCEL, NO_OPTIONS, RowOptions
from rsmq.sql.status import OutboxStatus, read_status
from rsmq.sql.tables import OUTBOX

CHANNEL: Final = "rsmq_outbox"
NOTIFY: Final = func.pg_notify(CHANNEL, "")

T = TypeVar("T")
Steps = list[tuple[Executable, Any]]
"""Statements, each with its parameters, or those of many rows."""
AsyncPlace = AsyncSession | AsyncConnection
SyncPlace = Session | Connection


def nobody_looks(_row: Mapping[str, Any]) -> None:
    """Outside of tests."""


class RelayedOutbox:
    """Rows of messages in a database, which the workers of a broker relay; how they get there is not its business."""

    def __init__(
        self,
        database: Database,
        *,
        poll: timedelta,
        notify: bool,
        wait_replicas: int,
        prefix: str | None = None,
        codecs: Sequence[Codec] = (),
    ) -> None:
        self.database, self._replicas = database, check_replicas(wait_replicas)
        self._poll = poll
        self._has_notify = notify and database.dialect == "postgresql"
        self._payload_limit: int | None = None
        self._prefix = prefix
        self._on_row: OnRow = nobody_looks
        self._encoding = Encoding(codecs) if codecs else NO_CODECS
        self.relay: OutboxRelay | None = None
        """The relay of this process while a worker runs it, or None."""

    @property
    def deployment(self) -> str:
        """The prefix of the workers that relay its rows: as given, that of the broker that includes it, or RSMQ_PREFIX.

        Two deployments can share a database: each relays its own rows.
        """
        if self._prefix is None:
            self._prefix = Settings().prefix
        return self._prefix

    def belong_to(self, prefix: str, encoding: Encoding = NO_CODECS) -> None:
        """A broker with this prefix includes it, and gives it its codecs if it has none. Raises ConfigError if its rows
        belong to another deployment."""
        if self._prefix not in (None, prefix):
            raise ConfigError(
                f"{self!r} belongs to the prefix {self._prefix!r}, and cannot be included in a broker with the prefix "
                f"{prefix!r}: make an outbox for each, and include it before it is used"
            )
        self._prefix = prefix
        self._encoding = self._encoding or encoding

    @contextmanager
    def lent_to(self, prefix: str, on_row: OnRow) -> Iterator[None]:
        """It belongs to another prefix inside the block, for tests. `on_row` is called with each row that is made."""
        before = self._prefix
        self._prefix = prefix
        self._on_row = on_row
        try:
            yield
        finally:
            self._prefix = before
            self._on_row = nobody_looks

    async def rows_left(self) -> int:
        """How many of its rows have yet to be published."""
        return (await self.status()).backlog

    async def remove_rows(self) -> None:
        """Delete all rows of its prefix: a test has ended."""
        mine = OUTBOX.delete().where(OUTBOX.c.deployment == self.deployment)
        await self.database.run(lambda connection: connection.execute(mine))

    def _steps(self, rows: list[dict[str, Any]]) -> Steps:
        """How rows get into the table. On PostgreSQL they announce themselves: a single one in the same statement."""
        if not rows:
            return []
        if not self._has_notify:
            return [(OUTBOX.insert(), rows)]
        if len(rows) == 1:
            return [(OUTBOX.insert().returning(NOTIFY), rows[0])]
        return [(OUTBOX.insert(), rows), (select(NOTIFY), {})]

    def _rows(
        self,
        topic: str | NamedTopic,
        items: Iterable[T],
        key: Callable[[T], str | None] | None,
        options: Mapping[str, Any],
    ) -> list[dict[str, Any]]:
        """Checked messages as rows. `options` are those of `row`, the same for all."""
        refuse_single(items)
        return [
            outbox_row(self, topic, item, **{**options, "key": None if key is None else key(item)}) for item in items
        ]

    def _cancel_row(self, message_id: str, topic: str | NamedTopic, key: str | None) -> dict[str, Any]:
        """The row that cancels a message."""
        check_size(b"", key, None, LARGEST_PAYLOAD)  # raises for a key that is no text
        return {
            "id": uuid.UUID(str(uuid_utils.uuid7())),
            "deployment": self.deployment,
            "aggregatetype": CANCEL + name_of_topic(topic),
            "aggregateid": key,
            "type": TEXT,
            "payload": b"",
            "headers": None,
            "band": None,
            "due_ms": None,
            "options": RowOptions(cancel=check_message_id(message_id)).to_text(),
        }

    # -- in the worker ----------------------------------------------------------------------------------------------

    async def claim(self, context: ServerContext) -> None:
        """Before handlers run: see `DatabaseClaim`."""
        await DatabaseClaim(self.database).begin(context)

    async def serve(self, context: ServerContext) -> None:
        """Relay the rows while this member leads; for the worker."""
        self._payload_limit = int(context.settings.payload_limit)
        self.belong_to(context.keys.prefix)
        channel = CHANNEL if self._has_notify else None
        self.relay = OutboxRelay(self.database, context, self._poll, channel, self._replicas)
        try:
            await self.relay.run()
        finally:
            self.relay = None

    def _figures(self) -> tuple[str, int, int, OutboxStatus | None]:
        """For metrics: the name of the database, the rows that this process has relayed, those that unique names have
        kept out, and what waits if it leads."""
        relay = self.relay
        name = self.database.sync_engine.url.database or ""
        return (name, 0, 0, None) if relay is None else (name, relay.relayed, relay.kept_out, relay.status)

    async def status(self) -> OutboxStatus:
        """How many rows wait, since when, and which the relay cannot publish."""
        return await self.database.run(lambda connection: read_status(connection, self.deployment))

    def __repr__(self) -> str:
        return f"<Outbox {self.database!r}>"


class Outbox(RelayedOutbox):
    """Messages in the tables of a database, which the workers relay to their topics after the commit.

    `broker.include(outbox)` lets the workers of a broker relay it; only one of them does so at a time. `poll` is how
    often that one looks for new rows where the database does not announce them: SQLite, MySQL, and PostgreSQL behind a
    pooler that has no LISTEN. `notify=False` saves the NOTIFY of each transaction on PostgreSQL, which waits for a lock
    at a commit. `wait_replicas`: a row is deleted when so many replicas have its message, too: then a failover that
    loses writes loses none of these, because the next relay publishes them again. `prefix`: of the workers that relay
    its rows, where neither a broker includes it nor RSMQ_PREFIX says so. Several deployments can share a database.
    `codecs` compress and encrypt a row when it is written; without any, those of the broker that includes it do.
    """

    def __init__(
        self,
        engine: Engine | AsyncEngine,
        *,
        poll: timedelta = timedelta(milliseconds=50),
        notify: bool = True,
        wait_replicas: int = 0,
        prefix: str | None = None,
        codecs: Sequence[Codec] = (),
    ) -> None:
        database = Database(engine, "Outbox")
        super().__init__(
            database, poll=poll, notify=notify, wait_replicas=wait_replicas, prefix=prefix, codecs=codecs
        )  # fmt: skip

    @overload
    def publish(
        self, session: AsyncPlace, topic: str | NamedTopic, payload: Any, **options: Unpack[OutboxOptions]
    ) -> Awaitable[str]: ...
    @overload
    def publish(
        self, session: SyncPlace, topic: str | NamedTopic, payload: Any, **options: Unpack[OutboxOptions]
    ) -> str: ...
    def publish(
        self,
        session: AsyncPlace | SyncPlace,
        topic: str | NamedTopic,
        payload: Any = None,  # forgotten together with the session: the error says so
        **options: Unpack[OutboxOptions],
    ) -> Awaitable[str] | str:
        """Publish a message when the transaction of the session commits, and return its id. Await it in an async one.

        `session` is a session or a connection of SQLAlchemy, `topic` a name or a typed topic. The options are those of
        `broker.publish`, and the relay carries them out after the commit. While the topic is full, the row waits. A
        message is not stored if its `message_id` was stored before, or if another message keeps its `unique` name.
        Durations (`delay`, `expires`, `until`) count from the insert by the database's clock, on PostgreSQL from the
        beginning of the transaction. `wait_replicas`: the row is deleted when so many replicas have its message, too.
        Raises TooLarge, NotJson, and ConfigError, also for a session of another database.
        """
        self._check(session)
        refuse_unknown("outbox.publish", options, OutboxOptions.__annotations__)
        row = outbox_row(self, topic, payload, **options)
        done, identity = self._insert(session, [row]), options.get("message_id") or str(row["id"])
        return identity if done is None else returned(done, identity)

    @overload
    def cancel(
        self, session: AsyncPlace, message_id: str, topic: str | NamedTopic, *, key: str | None = None
    ) -> Awaitable[None]: ...
    @overload
    def cancel(
        self, session: SyncPlace, message_id: str, topic: str | NamedTopic, *, key: str | None = None
    ) -> None: ...
    def cancel(
        self, session: AsyncPlace | SyncPlace, message_id: str, topic: str | NamedTopic, *, key: str | None = None
    ) -> Awaitable[None] | None:
        """Cancel a message, of this outbox or of any publisher, when the transaction commits. Await it in an async one.

        It is a row that is relayed behind those before it. If the message still waits in the table, neither is sent.
        Otherwise it is marked as by `broker.cancel`, for all groups, and the answer of a worker that has it is not
        waited for: what runs goes on. `key`: that of the message, if it has one, which makes the search short.
        """
        self._check(session)
        done = self._insert(session, [self._cancel_row(message_id, topic, key)])
        return None if done is None else returned(done, None)

    @overload
    def publish_many(
        self,
        session: AsyncPlace,
        topic: str | NamedTopic,
        items: Iterable[T],
        *,
        key: Callable[[T], str | None] | None = None,
        **options: Unpack[OutboxManyOptions],
    ) -> Awaitable[list[str]]: ...
    @overload
    def publish_many(
        self,
        session: SyncPlace,
        topic: str | NamedTopic,
        items: Iterable[T],
        *,
        key: Callable[[T], str | None] | None = None,
        **options: Unpack[OutboxManyOptions],
    ) -> list[str]: ...
    def publish_many(
        self,
        session: AsyncPlace | SyncPlace,
        topic: str | NamedTopic,
        items: Iterable[T] = (),
        *,
        key: Callable[[T], str | None] | None = None,
        **options: Unpack[OutboxManyOptions],
    ) -> Awaitable[list[str]] | list[str]:
        """`publish` for many payloads, in one statement. `key` gives the key of a payload."""
        self._check(session)
        refuse_unknown("outbox.publish_many", options, OutboxManyOptions.__annotations__)
        rows = self._rows(topic, items, key, options)
        ids = [str(row["id"]) for row in rows]
        done = self._insert(session, rows)
        return ids if done is None else returned(done, ids)

    def _insert(self, session: AsyncPlace | SyncPlace, rows: list[dict[str, Any]]) -> Awaitable[None] | None:
        steps = self._steps(rows)
        if isinstance(session, AsyncSession | AsyncConnection):
            return insert_later(session, steps)
        try:
            for statement, values in steps:
                session.execute(statement, values).close()
        except DBAPIError as error:
            raise own_error(error) from error
        return None

    def _check(self, session: AsyncPlace | SyncPlace) -> None:
        """Raise ConfigError unless the row would belong to a transaction of this database."""
        if not isinstance(session, AsyncPlace | SyncPlace):
            raise ConfigError(
                f"outbox.publish({session!r}, ...) has no session: write `await outbox.publish(session, topic, "
                f"payload)` inside `async with sessions.begin() as session:`"
            )
        found = session.engine if isinstance(session, AsyncConnection | Connection) else bound_to(session)
        engine = found.sync_engine if isinstance(found, AsyncEngine) else found
        own = self.database.sync_engine
        if engine is not own and address_of(engine) != address_of(own):
            raise ConfigError(
                f"outbox.publish: the session belongs to {engine.url!r}, the outbox to {own.url!r}: use one engine for "
                f"both, Outbox(engine) and async_sessionmaker(engine)"
            )
        if is_autocommit(engine):
            raise ConfigError(
                "outbox.publish: the engine is in AUTOCOMMIT, so the message would be sent although the rest fails: "
                "use a session of an engine without isolation_level='AUTOCOMMIT'"
            )


async def insert_later(session: AsyncPlace, steps: Steps) -> None:
    """Run statements in an async session."""
    try:
        for statement, values in steps:
            (await session.execute(statement, values)).close()
    except DBAPIError as error:
        raise own_error(error) from error


async def returned(done: Awaitable[None], value: T) -> T:
    """A value, when something is done."""
    await done
    return value


def outbox_row(
    outbox: RelayedOutbox,
    topic: str | NamedTopic,
    payload: Any,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    delay: Duration | None = None,
    at: datetime | None = None,
    band: str | None = None,
    identity: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A checked message as the row of the table, for code that inserts it in another way. `identity`: its UUID, which
    an encrypted payload is bound to; `more`: see `RowOptions.checked`."""
    data, kind = encode_payload(checked_payload(topic, payload))
    if outbox._payload_limit is None:
        outbox._payload_limit = int(Settings().payload_limit)
    if key is None:  # a unique name lives in one partition
        key = more.get("unique")
    identity = str(uuid_utils.uuid7()) if identity is None else identity
    options = RowOptions.checked(due_time(delay, at), **more) if more else NO_OPTIONS
    stored, enc = outbox._encoding.encode(data, options.message_id or identity, key, kind)
    check_size(stored, key, headers, outbox._payload_limit)
    row: dict[str, Any] = {
        "id": uuid.UUID(identity),
        "deployment": outbox.deployment,
        "aggregatetype": name_of_topic(topic),
        "aggregateid": key,
        "type": kind,
        "payload": stored,
        "headers": write_headers(headers).decode() if headers else None,
        "band": None if band is None else checked_band(band),
        "enc": enc or None,
        "due_ms": due_ms(delay, at),
        "options": options.to_text(),
    }
    outbox._on_row({**row, "payload": data} if enc else row)
    return row


def bound_to(session: AsyncSession | Session) -> Engine:
    """The engine that the session uses for the table."""
    try:
        bind = session.get_bind(clause=OUTBOX.insert())
    except UnboundExecutionError as error:
        raise ConfigError(f"outbox.publish: the session has no engine for the table rsmq_outbox ({error})") from None
    return bind if isinstance(bind, Engine) else bind.engine


def due_ms(delay: Duration | None, at: datetime | None) -> int | None:
    """When a message is to be delivered, as the column has it: see `OUTBOX`. None: at once."""
    due = due_time(delay, at)
    if not due:
        return None
    return -int(due) if due.startswith("+") else int(due)


def address_of(engine: Engine) -> tuple[object, ...]:
    """The identity that two engines of one database share."""
    url = engine.url
    return url.get_backend_name(), url.host, url.port, url.database, dict(url.query).get("host")
