"""`rsmq schema`: whether the handlers of this code can decode what waits in the server."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic_core import to_jsonable_python

from rsmq.cli.connection import CommandConnection, ask, asked
from rsmq.cli.load_broker import load_broker
from rsmq.cli.output import print_json, print_line
from rsmq.cli.parameters import Json, Url, noun
from rsmq.cli.tables import print_table
from rsmq.errors import ConfigError
from rsmq.inspector.schema_check import SchemaCheck, SchemaFinding
from rsmq.model.words import count, number

app = noun("Schemas: check before a rollout.")


@app.callback()
def schemas() -> None:
    """Makes `check` a command of its own although it is the only one."""


@app.command(epilog="Example: rsmq schema check app:broker --sample 5000")
def check(
    target: Annotated[str, typer.Argument(metavar="MODULE:BROKER", help="The new code, such as app:broker.")],
    sample: Annotated[int, typer.Option(min=1, help="Most messages of each kind, for each handler.")] = 5000,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Decode unread, pending, waiting, delayed and dead messages with the handlers of this code, before a rollout.

    Changes nothing. Exit 1 if a message cannot be decoded, with the number of each error.
    """
    broker = load_broker(target)
    handlers = broker.handlers
    if not handlers:
        raise ConfigError(f"{target} has no handler: register one with @broker.handler(topic, group=...)")

    async def read(connection: CommandConnection) -> list[SchemaFinding]:
        check = SchemaCheck(connection.client, connection.keys, connection.topics, broker.encoding)
        return await check.run(handlers, sample)

    findings = ask(url, read)
    failed = sum(finding.failed for finding in findings)
    if as_json:
        print_json([{**to_jsonable_python(finding), "failed": finding.failed} for finding in findings])
    else:
        show(findings, asked("none of the topics exists", url))
    if failed:
        raise typer.Exit(1)


def show(findings: list[SchemaFinding], nothing: str) -> None:
    """A table of all, and the errors."""
    rows = [
        (each.topic, each.group, each.kind, number(each.checked), number(each.failed))
        for each in findings
        if each.checked
    ]
    if not findings:
        print_line(nothing)
        return
    print_table(("topic", "group", "messages", "#decoded", "#failed"), rows, "there are no messages to decode")
    for each in findings:
        for error, times in each.errors.most_common():
            print_line(f"{each.topic}/{each.group}, {each.kind}: {count(times, 'message')}: {error}")
        if each.example:
            print_line(f"{each.topic}/{each.group}, {each.kind}: the first is {each.example}")
