"""`rsmq outbox`: what waits in an outbox."""

from __future__ import annotations

from datetime import timedelta

import typer

from rsmq.cli.database import DatabaseUrl, in_database, sql_room
from rsmq.cli.parameters import Json, noun
from rsmq.cli.tables import print_rows
from rsmq.model.words import duration

app = noun("Outboxes of your own databases: status.")


@app.callback()
def outboxes() -> None:
    """Makes `status` a command of its own although it is the only one."""


@app.command(epilog="Example: rsmq outbox status postgresql+psycopg://shop@localhost/shop")
def status(url: DatabaseUrl, as_json: Json = False) -> None:
    """How many rows wait, for how long, and which the relay cannot publish (exit code 1 then)."""
    found = in_database(url, sql_room().read_status)
    age = duration(timedelta(seconds=round(found.age_seconds)))
    rows = [(str(found.backlog), age, str(found.refused), found.error or "")]
    print_rows([found], ("waiting", "oldest", "refused", "why"), rows, "", as_json=as_json)
    if found.refused:
        raise typer.Exit(1)
