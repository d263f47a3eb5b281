"""One way to a database, whether the service uses SQLAlchemy's async engines or its plain ones."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
from sqlalchemy import Connection, Engine, create_engine, select
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from rsmq.errors import BrokerUnavailable, ConfigError
from rsmq.sql.error_values import without_values
from rsmq.sql.tables import DATABASE, NEW_COLUMNS, OLD_LAYOUT, metadata, read_url, readable_url

T = TypeVar("T")

INIT = "create the tables with `rsmq sql init URL`, or in a migration from rsmq.sql.metadata"


class Database:
    """An engine. `run` calls a function with a connection, in a transaction that commits when it returns."""

    def __init__(self, engine: Engine | AsyncEngine, user: str) -> None:
        if not isinstance(engine, Engine | AsyncEngine):
            raise ConfigError(f"{user}({engine!r}) is not possible: pass the engine that your sessions are bound to")
        self.engine = engine
        self.sync_engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine

    @classmethod
    def at(cls, url: str, user: str) -> Database:
        """The database of a URL of SQLAlchemy. Raises ConfigError for one that cannot be read or has no driver."""
        with readable_url():
            given = read_url(url)
            is_async = given.get_dialect().is_async
            engine: Engine | AsyncEngine = create_async_engine(given) if is_async else create_engine(given)
        return cls(engine, user)

    async def close(self) -> None:
        """Close its connections."""
        if isinstance(self.engine, AsyncEngine):
            await self.engine.dispose()
        else:
            self.engine.dispose()

    @property
    def is_async(self) -> bool:
        """Whether it has an async driver."""
        return isinstance(self.engine, AsyncEngine)

    @property
    def dialect(self) -> str:
        """`postgresql`, `sqlite`, `mysql` or `mariadb`."""
        return self.sync_engine.dialect.name

    async def run(self, work: Callable[[Connection], T]) -> T:
        """One transaction. Raises ConfigError for a missing table, BrokerUnavailable for a database that is away."""
        return await self._within(self.engine, work)

    async def read(self, work: Callable[[Connection], T]) -> T:
        """One query. The same errors. PostgreSQL needs no transaction for it, which saves two of three round trips."""
        if self.dialect != "postgresql":
            return await self.run(work)
        return await self._within(self.engine.execution_options(isolation_level="AUTOCOMMIT"), work)

    async def _within(self, engine: Engine | AsyncEngine, work: Callable[[Connection], T]) -> T:
        try:
            if isinstance(engine, Engine):
                return await anyio.to_thread.run_sync(within, engine, work)
            if self.dialect != "sqlite":
                return await within_async(engine, work)
            # a query that is cancelled half way leaves its lock on the file until Python collects its cursor
            await anyio.lowlevel.checkpoint_if_cancelled()
            with anyio.CancelScope(shield=True):
                result = await within_async(engine, work)
            return result  # noqa: RET504 - for mypy a cancel scope may swallow an exception
        except DBAPIError as error:
            said = own_error(error)
            if said is error and (error.connection_invalidated or isinstance(error, OperationalError)):
                said = BrokerUnavailable(f"no answer from the database {self!r}: {error.orig}")
            raise said from error
        except OSError as error:
            raise BrokerUnavailable(f"no answer from the database {self!r}: {error}") from error

    async def identity(self) -> str:
        """The id of this database, made at the first call of all."""
        found = await self.run(read_identity)
        if found is None:
            with suppress(IntegrityError):  # another process was first
                await self.run(lambda connection: connection.execute(DATABASE.insert(), {"one": 1, "id": uuid.uuid4()}))
            found = await self.run(read_identity)
        return str(found)

    def __repr__(self) -> str:
        return self.sync_engine.url.render_as_string(hide_password=True)


def within(engine: Engine, work: Callable[[Connection], T]) -> T:
    """One transaction of a plain engine."""
    with engine.begin() as connection:
        return work(connection)


async def within_async(engine: AsyncEngine, work: Callable[[Connection], T]) -> T:
    """One transaction of an async engine."""
    async with engine.begin() as connection:
        return await connection.run_sync(work)


def read_identity(connection: Connection) -> uuid.UUID | None:
    """The id of this database, or None if it has none yet."""
    return connection.scalar(select(DATABASE.c.id))


def is_autocommit(given: Engine | Connection) -> bool:
    """Whether each statement commits by itself, in all connections of an engine or in this one."""
    level = given.get_execution_options().get("isolation_level") or getattr(
        given.dialect, "_on_connect_isolation_level", None
    )
    return str(level).upper() == "AUTOCOMMIT"


def explained(error: DBAPIError) -> Exception:
    """A missing table of rsmq as a ConfigError that says what to do; any other error as it is, without the values that
    the statement was given: payloads are among them, and SQLAlchemy shows them. A handler's statement, too."""
    error.hide_parameters = True
    return missing_table(str(error.orig)) or error


def own_error(error: DBAPIError) -> Exception:
    """`explained` for a statement of rsmq: also without what the driver says of a row."""
    without_values(error)
    return explained(error)


def missing_table(text: str, create: str = INIT) -> ConfigError | None:
    """The error of a driver that says that a table of rsmq is missing, with how to `create` it. None: another one."""
    text = text.lower()
    is_missing = any(part in text for part in ("no such table", "does not exist", "doesn't exist"))
    name = next((name for name in metadata.tables if name in text), None)
    first = text.partition("\n")[0]  # the lines after it may have the statement
    if "column" in text and (missing := next((each for each in NEW_COLUMNS if each in first), None)):
        return ConfigError(OLD_LAYOUT.format(name or "of rsmq", missing))
    return ConfigError(f"the database has no table {name}: {create}") if is_missing and name else None
