"""`rsmq keys`: the keys of encrypted payloads."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any

import typer

from rsmq.cli.connection import CommandConnection, ask
from rsmq.cli.database import in_database, sql_room
from rsmq.cli.output import print_line
from rsmq.cli.parameters import Json, TopicName, Url, noun
from rsmq.cli.tables import print_rows
from rsmq.codecs.keyring import Keyring
from rsmq.codecs.reading import KEYS, has_keys
from rsmq.inspector.key_status import KINDS, KeyStatus, KeyUse, result_keys
from rsmq.inspector.letter_keys import letter_keys, will_keys

NOT_LOOKED_AT = "Not looked at: archives{}. A key that none of them needs, and no row above, can be deleted."

ELSEWHERE = ("letters", "retained", "wills", "results", "outbox")
"""What is counted only where that is asked for."""

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
    devices: Annotated[
        bool,
        typer.Option(
            "--devices",
            help="Also count the letters, retained messages and wills of all devices, of whatever topic: reads every "
            "inbox.",
        ),
    ] = False,
    results: Annotated[
        bool,
        typer.Option(
            "--results",
            help="Also count kept results, answers to requests and results of Django's tasks, of any topic: scans "
            "all keys of the server.",
        ),
    ] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Which keys the payloads of a topic still need, and where. Reads all of it, and shows no key, only ids."""

    async def read(connection: CommandConnection) -> tuple[list[KeyUse], dict[str, Counter[str]]]:
        client, keys = connection.client, connection.keys
        found = await connection.topic(topic)
        wills = await will_keys(client, keys) if devices else Counter[str]()
        uses = await KeyStatus(client, keys, found).run()
        counted = {**await letter_keys(client, keys), "wills": wills} if devices else {}
        if results:
            counted["results"] = await result_keys(client, keys)
        return uses, counted

    # in the order in which payloads move: what is relayed meanwhile is in the topic by then
    rows = None if outbox is None else in_database(outbox, lambda link: sql_room().read_keys(link, topic))
    found, counted = ask(url, read)
    if rows is not None:
        counted["outbox"] = Counter(rows)
    elsewhere = {key for each in counted.values() for key in each}
    found += [KeyUse(key) for key in sorted(elsewhere - {use.key for use in found})]
    known = known_ids()
    value = [as_object(use, counted, known) for use in found]
    columns = ("key", "here", *(f"#{kind.replace('_', ' ')}" for kind in (*KINDS, *counted)))
    shown = [
        (
            use.key or "(not encrypted)", "" if not use.key else use.key in known,
            *(getattr(use, kind) for kind in KINDS), *(each[use.key] for each in counted.values()),
        )
        for use in found
    ]  # fmt: skip
    print_rows(value, columns, shown, f"{topic} has no messages", as_json=as_json)
    if not as_json:
        missed = "" if devices else ", letters, retained messages and wills of devices (--devices)"
        missed += "" if results else ", kept results and answers, which end by time (--results)"
        missed += "" if outbox else ", rows of an outbox (--outbox DATABASE_URL)"
        print_line(NOT_LOOKED_AT.format(missed))


def known_ids() -> tuple[str, ...]:
    """The ids of the keys in the environment of this command."""
    return Keyring.from_env(KEYS).ids if has_keys() else ()


def as_object(use: KeyUse, counted: dict[str, Counter[str]], known: tuple[str, ...]) -> dict[str, Any]:
    """A key as JSON. `here`: whether RSMQ_KEYS of this command has it. What was not counted is 0."""
    elsewhere = {kind: counted[kind][use.key] if kind in counted else 0 for kind in ELSEWHERE}
    return {**asdict(use), "key": use.key or None, **elsewhere, "here": use.key in known}
