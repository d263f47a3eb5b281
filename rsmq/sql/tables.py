"""The tables of rsmq in a service's own database, for Alembic, for `rsmq sql init`, or as SQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    DateTime,
    Dialect,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    Uuid,
    func,
    make_url,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Connection
from sqlalchemy.exc import ArgumentError
from sqlalchemy.schema import CreateTable, DropTable, SetTableComment
from sqlalchemy.sql.ddl import DDLElement

from rsmq.errors import ConfigError

LONGEST_NAME: Final = 128
LONGEST_ID: Final = 256
LONGEST_TOPIC: Final = LONGEST_NAME + 1
"""With the `!` of a row that cancels."""

metadata: Final = MetaData()
"""All tables of rsmq. Alembic: `target_metadata = [Base.metadata, rsmq.sql.metadata]`."""

NUMBER: Final = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts only an INTEGER by itself
# bytes are compared, so that ids which differ in case or in trailing spaces stay different; and indexes stay short
EXACT_NAME: Final = String(LONGEST_NAME).with_variant(
    mysql.VARCHAR(LONGEST_NAME, charset="ascii", collation="ascii_bin"), "mysql", "mariadb"
)
EXACT_TOPIC: Final = String(LONGEST_TOPIC).with_variant(
    mysql.VARCHAR(LONGEST_TOPIC, charset="ascii", collation="ascii_bin"), "mysql", "mariadb"
)
EXACT_ID: Final = String(LONGEST_ID).with_variant(
    mysql.VARCHAR(LONGEST_ID, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb"
)

OUTBOX: Final = Table(
    "rsmq_outbox",
    metadata,
    Column("seq", NUMBER, primary_key=True, autoincrement=True),
    Column("deployment", EXACT_NAME, nullable=False, server_default="rsmq"),
    Column("id", Uuid, nullable=False, unique=True),
    Column("aggregatetype", EXACT_TOPIC, nullable=False),
    Column("aggregateid", Text),
    Column("type", String(255), nullable=False, server_default="application/json"),
    Column("payload", LargeBinary().with_variant(mysql.LONGBLOB, "mysql", "mariadb"), nullable=False),
    Column("headers", Text),
    Column("band", String(32)),
    Column("enc", String(256)),
    Column("due_ms", BigInteger),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.current_timestamp()),
    Column("error", Text),
    Column("options", Text),
    comment="rsmq: messages to publish",
    sqlite_autoincrement=True,
)
"""Messages to publish, oldest first. The names are those of Debezium's outbox event router: `aggregatetype` is the
topic, `aggregateid` the key, `type` the content type. `band`: NULL is `normal`. `enc`: how the payload is compressed
and encrypted, as in the wire format; NULL: not at all. `deployment`: the prefix of the
workers that relay it. `error`: why the relay cannot publish the row, and leaves it. `due_ms`: below 0, a delay, which
counts from `created_at` by the clock of the database; else the moment that the application has named, in ms since 1970,
by the clock of the server. `options`: NULL, or what else is said of the message (JSON): see `RowOptions`. A row with
the topic `!sms` is no message: it cancels one of `sms`."""

HANDLED: Final = Table(
    "rsmq_handled",
    metadata,
    Column("deployment", EXACT_NAME, primary_key=True),
    Column("group_name", EXACT_NAME, primary_key=True),
    Column("topic", EXACT_NAME, primary_key=True),
    Column("partition_number", Integer, primary_key=True, autoincrement=False),
    Column("id_ms", BigInteger, primary_key=True, autoincrement=False),
    Column("id_seq", BigInteger, primary_key=True, autoincrement=False),
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("message_id", EXACT_ID, nullable=False),
    Column("handled_ms", BigInteger, nullable=False),
    comment="rsmq: messages whose effects are committed",
)
"""One row for each message whose transaction has committed: what is in flight, and an hour more. `message_id`: a server
that has lost writes may give the stream id of a lost message to another one."""

FENCE: Final = Table(
    "rsmq_fence",
    metadata,
    Column("deployment", EXACT_NAME, primary_key=True),
    Column("group_name", EXACT_NAME, primary_key=True),
    Column("topic", EXACT_NAME, primary_key=True),
    Column("partition_number", Integer, primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, nullable=False),
    comment="rsmq: the newest owner of each partition",
)
"""The epoch of the newest owner that has written: those of earlier owners are refused."""

DEPLOYMENT: Final = Table(
    "rsmq_deployment",
    metadata,
    Column("deployment", EXACT_NAME, primary_key=True),
    Column("server", String(64), nullable=False),
    Column("renewals", BigInteger, nullable=False),
    comment="rsmq: the server that uses this database under each prefix",
)
"""One row for each prefix. Its workers count `renewals` while they run: see `rsmq.sql.deployment`."""

DATABASE: Final = Table(
    "rsmq_database",
    metadata,
    Column("one", SmallInteger, primary_key=True, autoincrement=False),
    Column("id", Uuid, nullable=False),
    comment="rsmq: the identity of this database, in one row",
)
"""Who relays is agreed under this id: a database may have several addresses, and a server several databases."""


NEW_COLUMNS: Final = ("deployment", "band", "enc", "options")
"""Columns that tables of an older version lack."""
OLD_LAYOUT: Final = (
    "the table {} was made by an older version of rsmq: it has no column {}. Let the workers relay and settle "
    "what waits, stop them, drop the tables rsmq_handled, rsmq_fence and rsmq_outbox, and create them with `rsmq sql "
    "init URL`"
)


def create_tables(connection: Connection) -> list[str]:
    """Create the tables that do not exist yet; returns their names."""
    there = set(connection.dialect.get_table_names(connection))
    for name in (HANDLED.name, FENCE.name, OUTBOX.name):
        columns = connection.dialect.get_columns(connection, name) if name in there else ()
        wanted = set(NEW_COLUMNS) if name == OUTBOX.name else {"deployment"}
        if columns and (missing := sorted(wanted - {each["name"] for each in columns})):
            raise ConfigError(OLD_LAYOUT.format(name, " and ".join(missing)))
    metadata.create_all(connection, checkfirst=True)
    return [name for name in metadata.tables if name not in there]


@contextmanager
def readable_url() -> Iterator[None]:
    """Raise ConfigError for a URL that SQLAlchemy cannot read or has no driver for."""
    try:
        yield
    except (ArgumentError, ImportError, ValueError) as error:
        raise ConfigError(
            f"this database URL cannot be used ({error}): write one as postgresql+psycopg://user@host/db"
        ) from None


def read_url(text: str) -> URL:
    """A URL of SQLAlchemy. One of PostgreSQL without a driver is for psycopg, the one that rsmq has."""
    url = make_url(text)
    is_plain = url.drivername in ("postgresql", "postgres")
    return url.set(drivername="postgresql+psycopg") if is_plain else url


def ddl(url: str) -> str:
    """The CREATE TABLE statements for the database of a URL, as text. Raises ConfigError for another kind of URL."""
    with readable_url():
        dialect = read_url(url).get_dialect()()
    return "\n\n".join(f"{each};" for each in statements(dialect))


def statements(dialect: Dialect) -> list[str]:
    """The statements that create the tables, for migrations: each can be run again."""
    found: list[DDLElement] = []
    for table in metadata.sorted_tables:
        found.append(CreateTable(table, if_not_exists=True))
        if dialect.supports_comments and not dialect.inline_comments:
            found.append(SetTableComment(table))
    return [str(each.compile(dialect=dialect)).strip() for each in found]


def dropping(dialect: Dialect) -> list[str]:
    """The statements that drop the tables."""
    return [str(DropTable(table, if_exists=True).compile(dialect=dialect)).strip() for table in metadata.sorted_tables]
