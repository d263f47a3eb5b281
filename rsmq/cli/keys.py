"""`rsmq keys`: the keys of encrypted payloads."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated, Any

import typer

from rsmq.cli.connection import CommandConnection, ask
from rsmq.cli.database import in_database, sql_room
from rsmq.cli.output import print_line
from rsmq.cli.parameters import Json, TopicName, Url, noun
from rsmq.cli.tables import print_rows
from rsmq.codecs.keyring import FILE, Keyring
from rsmq.inspector.key_status import KINDS, KeyStatus, KeyUse

VARIABLE = "RSMQ_KEYS"
NOT_LOOKED_AT = (
    "Not looked at: archives, answers to requests (kept for their timeout), inboxes of devices{}. A key that none of "
    "them needs, and no row above, can be deleted."
)

app = noun("Keys of encrypted payloads: which are still needed.")


@app.callback()
def keys() -> None:
    """Makes `status` a command of its own although it is the only one."""


@app.command(epilog="Example: rsmq keys status orders")
def status(
    topic: TopicName,
    outbox: Annotated[
        str | None, typer.Option(metavar="DATABASE_URL", help="Also count the rows of the outbox in this database.")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Which keys the payloads of a topic still need, and where. Reads all of it, and shows no key, only ids."""

    async def read(connection: CommandConnection) -> list[KeyUse]:
        return await KeyStatus(connection.client, connection.keys, await connection.topic(topic)).run()

    found = ask(url, read)
    rows = {} if outbox is None else in_database(outbox, lambda link: sql_room().read_keys(link, topic))
    found += [KeyUse(key) for key in rows if key not in {use.key for use in found}]
    known = known_ids()
    value = [as_object(use, rows, known) for use in found]
    columns = ("key", "here", *(f"#{kind.replace('_', ' ')}" for kind in KINDS), *(("#outbox",) if outbox else ()))
    shown = [
        (
            use.key or "(not encrypted)", "" if not use.key else use.key in known,
            *(getattr(use, kind) for kind in KINDS), *((rows.get(use.key, 0),) if outbox else ()),
        )
        for use in found
    ]  # fmt: skip
    print_rows(value, columns, shown, f"{topic} has no messages", as_json=as_json)
    if not as_json:
        print_line(NOT_LOOKED_AT.format("" if outbox else ", rows of an outbox (--outbox DATABASE_URL)"))


def known_ids() -> tuple[str, ...]:
    """The ids of the keys in the environment of this command."""
    is_set = VARIABLE in os.environ or VARIABLE + FILE in os.environ
    return Keyring.from_env(VARIABLE).ids if is_set else ()


def as_object(use: KeyUse, rows: dict[str, int], known: tuple[str, ...]) -> dict[str, Any]:
    """A key as JSON. `here`: whether RSMQ_KEYS of this command has it."""
    return {**asdict(use), "key": use.key or None, "outbox": rows.get(use.key, 0), "here": use.key in known}
