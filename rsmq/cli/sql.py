"""`rsmq sql`: the tables of rsmq in a service's own database."""

from __future__ import annotations

from typing import Annotated

import typer

from rsmq.cli.database import DatabaseUrl, in_database, sql_room
from rsmq.cli.output import print_json, print_line
from rsmq.cli.parameters import Json, noun

app = noun("Tables in your own database: create them.")


@app.callback()
def tables() -> None:
    """Makes `init` a command of its own although it is the only one."""


@app.command(epilog="Example: rsmq sql init postgresql+psycopg://shop@localhost/shop")
def init(
    url: DatabaseUrl,
    print_only: Annotated[bool, typer.Option("--print", help="Print the statements and change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Create the tables of `rsmq.sql` that do not exist yet, or print their statements."""
    if print_only:
        statements = sql_room().ddl(url)
        print_json({"statements": statements}) if as_json else print_line(statements)
        return
    created = in_database(url, sql_room().create_tables)
    if as_json:
        print_json({"created": list(created)})
        return
    print_line(f"created {', '.join(created)}" if created else "all tables exist")
