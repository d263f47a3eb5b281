"""Django's connections for the statements of `rsmq.sql`, and an engine of SQLAlchemy for the same database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Final

from django.db import Error, connections
from sqlalchemy import URL, Dialect, Engine, Executable, create_engine
from sqlalchemy.pool import NullPool
from sqlalchemy.sql.compiler import SQLCompiler

from rsmq.errors import ConfigError
from rsmq.sql.database import missing_table

VENDORS: Final = ("postgresql", "sqlite", "mysql")
DRIVERS: Final = {"sqlite3": "pysqlite", "MySQLdb": "mysqldb"}
"""Drivers that SQLAlchemy calls otherwise."""
OWN: Final = ("cursor_factory", "context", "detect_types", "conv")
"""What Django passes to its drivers for its own types."""
MIGRATE: Final = "add 'rsmq.django.database' to INSTALLED_APPS and run `manage.py migrate`"


def driver_of(wrapper: Any) -> str:
    """The driver of a connection of Django, as SQLAlchemy names it."""
    if wrapper.vendor not in VENDORS:
        raise ConfigError(
            f"DATABASES[{wrapper.alias!r}] is {wrapper.vendor}: effects and outbox work with {', '.join(VENDORS)}"
        )
    module = wrapper.Database.__name__.partition(".")[0]
    return f"{wrapper.vendor}+{DRIVERS.get(module, module)}"


@cache
def dialect_named(driver: str) -> Dialect:
    """The dialect of a driver, with the parameters that Django's cursors take."""
    kind: Any = URL.create(driver).get_dialect()
    made: Dialect = kind(paramstyle="pyformat", dbapi=kind.import_dbapi())
    return made


def dialect_of(wrapper: Any) -> Dialect:
    """SQLAlchemy's dialect for a connection of Django."""
    return dialect_named(driver_of(wrapper))


def engine_of(alias: str) -> Engine:
    """An engine for the database of an alias, for the relay and what else a worker does beside its handlers.

    It asks Django for the parameters of each connection, so it follows to the database of a test.
    """
    wrapper = connections[alias]
    given = wrapper.settings_dict

    def connect() -> Any:
        parameters = connections[alias].get_connection_params()
        return engine.dialect.connect(**{name: parameters[name] for name in parameters if name not in OWN})

    url = URL.create(driver_of(wrapper), host=given["HOST"] or None, database=str(given["NAME"]))
    engine = create_engine(url, creator=connect, poolclass=NullPool if wrapper.vendor == "sqlite" else None)
    return engine


class Rows(Sequence[Any]):
    """The result of a statement."""

    def __init__(self, found: list[tuple[Any, ...]], rowcount: int) -> None:
        self._found, self.rowcount = found, rowcount

    def one(self) -> tuple[Any, ...]:
        """The only row."""
        [row] = self._found
        return row

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: Any) -> Any:
        return self._found[index]

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._found)


class DjangoConnection:
    """A connection of Django with what `rsmq.sql` uses of one of SQLAlchemy. It is in Django's own transaction."""

    def __init__(self, alias: str) -> None:
        self._wrapper = connections[alias]
        self.dialect = dialect_of(self._wrapper)

    def execute(self, statement: Executable, values: Any = None) -> Rows:
        """Run a statement, or run it for each of many parameters. Errors are Django's."""
        many = values if isinstance(values, list) else [values or {}]
        made = compiled(statement, self.dialect, tuple(many[0]))
        with self._wrapper.cursor() as cursor:
            if len(many) > 1:
                cursor.executemany(made.string, [bound(made, self.dialect, each) for each in many])
            else:
                cursor.execute(made.string, bound(made, self.dialect, many[0]))
            found = cursor.fetchall() if cursor.description and len(many) == 1 else []
            return Rows([tuple(row) for row in found], cursor.rowcount)

    def scalar(self, statement: Executable, values: Any = None) -> Any:
        """The first value of the first row, or None."""
        found = self.execute(statement, values)
        return found[0][0] if found else None


@lru_cache(maxsize=64)
def compiled(statement: Any, dialect: Dialect, columns: tuple[str, ...]) -> SQLCompiler:
    """A statement as text."""
    names = list(columns) if statement.is_insert else None
    made: SQLCompiler = statement.compile(
        dialect=dialect, column_keys=names, compile_kwargs={"render_postcompile": True}
    )
    return made


def bound(made: SQLCompiler, dialect: Dialect, values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a statement as the driver takes them."""
    found = {**made.params, **values}
    for name in found.keys() & made.binds.keys():
        convert = made.binds[name].type.dialect_impl(dialect).bind_processor(dialect)
        if convert is not None:
            found[name] = convert(found[name])
    return found


def explained(error: Error) -> Exception:
    """A missing table of rsmq as a ConfigError that says what to do; any other error as it is."""
    return missing_table(str(error), MIGRATE) or error
