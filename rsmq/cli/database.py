"""The service's own database for commands: the extra `sql` is loaded when a command needs it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import anyio
import typer

from rsmq.errors import ConfigError

DatabaseUrl = Annotated[
    str, typer.Argument(envvar="DATABASE_URL", help="URL of SQLAlchemy, such as postgresql+psycopg://user@host/db.")
]


def sql_room() -> Any:
    """The package `rsmq.sql`. Raises ConfigError without its extra."""
    try:
        return import_module("rsmq.sql")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "sqlalchemy":
            raise
        raise ConfigError("this command needs the extra `sql`: pip install 'rsmq[sql]'") from None


def in_database(url: str, work: Callable[[Any], Any]) -> Any:
    """Call a function with a connection, in a transaction."""

    async def run() -> Any:
        database = sql_room().Database.at(url, "rsmq")
        try:
            return await database.run(work)
        finally:
            await database.close()

    return anyio.run(run)
